"""What a compiled program really communicates, read from its optimised HLO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxsync.audit_warnings import AuditWarning, loop_warnings, missing_warnings, sum_warnings
from jaxsync.collectives import KINDS, Collective, read_collectives
from jaxsync.errors import ArgumentError
from jaxsync.fork import check_not_forked
from jaxsync.hlo import Module, parse_module
from jaxsync.plan import SyncPlan
from jaxsync.report import format_bytes, format_count, format_table
from jaxsync.report.markup import element, fragment, table
from jaxsync.variance import analyse, sharding_axes

__all__ = ["KINDS", "Audit", "AuditWarning", "Collective", "audit", "parse_hlo"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Audit:
    """The collectives of one compiled program, in program order, and what looks wrong with them.

    Attributes:
        collectives: Each of them.
        warnings: See `AuditWarning`. None is no proof: a mean that lacks its division, for one, looks right.
    """

    collectives: tuple[Collective, ...]
    warnings: tuple[AuditWarning, ...] = ()

    def count(self, kind: str) -> int:
        """How many collectives of `kind` the program has, those in loops counted once."""
        if kind not in KINDS:
            wanted = f"one of {', '.join(KINDS)}"
            raise ArgumentError(function="Audit.count", argument="kind", got=repr(kind), wanted=wanted)
        return sum(collective.kind == kind for collective in self.collectives)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind that it has: kind -> number, those in loops counted once."""
        return {kind: number for kind in KINDS if (number := self.count(kind))}

    @property
    def num_bytes(self) -> int:
        """Bytes of all results on one device, those in loops counted once."""
        return sum(collective.num_bytes for collective in self.collectives)

    @property
    def in_loop(self) -> tuple[Collective, ...]:
        """The collectives inside loops."""
        return tuple(collective for collective in self.collectives if collective.in_loop)

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {kind}" for kind, number in self.counts.items()) or "no collectives"
        parts = [counts, format_bytes(self.num_bytes), f"{len(self.in_loop)} in loops"]
        parts.append(format_count(len(self.warnings), "warning"))
        return f"Audit({'; '.join(parts)})"

    def __str__(self) -> str:
        shown = "no collectives"
        if self.collectives:
            shown = format_table(_HEADER, [_cells(collective) for collective in self.collectives])
        return "\n".join([shown, *(f"warning: {warning}" for warning in self.warnings)])

    def _repr_html_(self) -> str:
        rows = [_cells(collective) for collective in self.collectives]
        shown = table(_HEADER, rows) if rows else element("p", "no collectives")
        warned = [element("p", f"warning: {warning}", class_="bad") for warning in self.warnings]
        return fragment(element("p", repr(self)), shown, *warned)


_HEADER = ("kind", "axes", "operands", "dtypes", "bytes", "in loop", "from")


def _cells(collective: Collective) -> list[str]:
    return [
        collective.kind,
        "?" if collective.axes is None else ",".join(collective.axes) or "-",
        str(collective.num_operands),
        ",".join(dict.fromkeys(collective.dtypes)),
        format_bytes(collective.num_bytes),
        "yes" if collective.in_loop else "no",
        collective.op_name,
    ]


def audit(fn: Any, *args: Any, **kwargs: Any) -> Audit:
    """The collectives of `fn` compiled for these arguments, and what looks wrong with them.

    Compiles, and runs nothing. The warnings follow which values may differ from device to device through the
    optimised HLO; without a `NamedSharding` among arguments and results there are only those of loops.

    Args:
        fn: A function made by `jax.jit` or `jax.pmap`, a `TrainStep`, or a plain function, which is jitted.
        *args: Arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: Likewise.

    Raises:
        ArgumentError: `fn` is a `TrainStep`, and its state or its batch is missing.
        ForkedProcessError: The process was forked from one that had started JAX.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jaxsync.make_mesh({"data": 8})
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> report = audit(total, jnp.ones(8))
    >>> report.count("all-reduce"), report.collectives[0].axes, report.num_bytes, report.warnings
    (1, ('data',), 4, ())
    """
    check_not_forked("audit")
    plan = getattr(fn, "plan", None)
    if isinstance(plan, SyncPlan) and len(args) + len(kwargs) < 2:
        wanted = "the arguments of the step too: audit(step, state, batch)"
        raise ArgumentError(function="audit", argument="args", got=f"{len(args)}", wanted=wanted)
    lowerable = fn if hasattr(fn, "lower") else jax.jit(fn)
    lowered = lowerable.lower(*args, **kwargs)
    compiled = lowered.compile()
    mesh, module = _mesh_of(compiled), parse_module(compiled.as_text() or "")
    found = _read_module(module, mesh)
    if mesh is None or mesh.size == 1:
        return found
    inputs = _input_axes(compiled, mesh)
    if inputs is None or len(inputs) != _num_parameters(module):
        return found  # arguments that cannot be told apart
    flow = analyse(module, mesh, [axes for _, axes in inputs])
    more = [
        *sum_warnings(flow, frozenset(plan.data_axes if isinstance(plan, SyncPlan) else ())),
        *missing_warnings(flow, found.collectives, inputs, _output_axes(compiled, mesh)),
    ]
    return replace(found, warnings=found.warnings + tuple(more))


def _mesh_of(compiled: Any) -> Mesh | None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)]
    return max(meshes, key=lambda mesh: mesh.size) if meshes else None


def _input_axes(compiled: Any, mesh: Mesh) -> list[tuple[str, frozenset[str]]] | None:
    """For each parameter of the program its path, and the axes it varies over; None if that is not known."""
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda node: node is None)
    infos = jax.tree_util.tree_leaves_with_path(compiled.args_info)
    if len(shardings) != len(infos):
        return None
    return [
        (jax.tree_util.keystr(path), sharding_axes(sharding, info.shape, mesh))
        for sharding, (path, info) in zip(shardings, infos, strict=True)
        if sharding is not None  # else the program does not use it
    ]


def _output_axes(compiled: Any, mesh: Mesh) -> list[tuple[str, frozenset[str]]]:
    """For each result its path, and the axes it is sharded over; nothing if that is not known."""
    shardings = jax.tree.leaves(compiled.output_shardings)
    infos = jax.tree_util.tree_leaves_with_path(compiled.out_info)
    if len(shardings) != len(infos):
        return []
    return [
        (jax.tree_util.keystr(path), sharding_axes(sharding, info.shape, mesh))
        for sharding, (path, info) in zip(shardings, infos, strict=True)
    ]


def _num_parameters(module: Module) -> int:
    return sum(each.opcode == "parameter" for each in module.computations.get(module.entry, ()))


def parse_hlo(text: str, mesh: Mesh | None = None) -> Audit:
    """The collectives in the text of an HLO module; `mesh` gives names to the groups of devices.

    Of the warnings it has those of loops: the others need the shardings that only the compiled program knows.
    """
    return _read_module(parse_module(text), mesh)


def _read_module(module: Module, mesh: Mesh | None) -> Audit:
    found = read_collectives(module, mesh)
    return Audit(collectives=found, warnings=loop_warnings(found))
