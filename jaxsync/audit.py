"""What a compiled program really communicates, read from its optimised HLO."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from jaxsync.errors import ArgumentError
from jaxsync.report import format_bytes, format_table

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: One of `jaxsync.audit.KINDS`, as HLO writes it: `"all-reduce"`, `"reduce-scatter"`, ...
        num_operands: How many arrays it moves at once.
        num_bytes: Bytes of its results on one device, each time it runs.
        dtypes: The dtypes of its results, as HLO writes them (`f32`, `bf16`).
        axes: The mesh axes it runs over, `()` if each device is alone; None if the groups fit no axes.
        group_size: Devices that take part in one group; None if it does not say.
        in_loop: Whether it is inside a loop, and so runs any number of times a call.
        op_name: Where it comes from, as JAX tells XLA.
    """

    kind: str
    num_operands: int
    num_bytes: int
    dtypes: tuple[str, ...]
    axes: tuple[str, ...] | None
    group_size: int | None
    in_loop: bool
    op_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The collectives of one compiled program, in program order."""

    collectives: tuple[Collective, ...]

    def count(self, kind: str) -> int:
        """How many collectives of `kind` the program has, those in loops counted once."""
        if kind not in KINDS:
            wanted = f"one of {', '.join(KINDS)}"
            raise ArgumentError(function="Audit.count", argument="kind", got=repr(kind), wanted=wanted)
        return sum(collective.kind == kind for collective in self.collectives)

    @property
    def num_bytes(self) -> int:
        """Bytes of all results on one device, those in loops counted once."""
        return sum(collective.num_bytes for collective in self.collectives)

    @property
    def in_loop(self) -> tuple[Collective, ...]:
        """The collectives inside loops."""
        return tuple(collective for collective in self.collectives if collective.in_loop)

    def __str__(self) -> str:
        if not self.collectives:
            return "no collectives"
        header = ["kind", "axes", "operands", "dtypes", "bytes", "in loop", "from"]
        rows = [
            [
                c.kind,
                "?" if c.axes is None else ",".join(c.axes) or "-",
                str(c.num_operands),
                ",".join(dict.fromkeys(c.dtypes)),
                format_bytes(c.num_bytes),
                "yes" if c.in_loop else "no",
                c.op_name,
            ]
            for c in self.collectives
        ]
        return format_table(header, rows)


def audit(fn: Any, *args: Any, **kwargs: Any) -> Audit:
    """The collectives of `fn` compiled for these arguments. Compiles, and runs nothing.

    Args:
        fn: A function made by `jax.jit` or `jax.pmap`, a `TrainStep`, or a plain function, which is jitted.
        *args: Arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: Likewise.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jaxsync.make_mesh({"data": 8})
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> report = audit(total, jnp.ones(8))
    >>> report.count("all-reduce"), report.collectives[0].axes, report.num_bytes
    (1, ('data',), 4)
    """
    lowerable = fn if hasattr(fn, "lower") else jax.jit(fn)
    compiled = lowerable.lower(*args, **kwargs).compile()
    return parse_hlo(compiled.as_text() or "", _mesh_of(compiled))


def _mesh_of(compiled: Any) -> Mesh | None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)]
    return max(meshes, key=lambda mesh: mesh.size) if meshes else None


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^(?:ROOT )?%?[\w.\-]+ = (?P<type>.+?) (?P<kind>" + "|".join(KINDS) + r")(?:-start)?\("
)
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|branch_computations)=(?:\{([^}]*)\}|(%?[\w.\-]+))")
_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4}


def parse_hlo(text: str, mesh: Mesh | None = None) -> Audit:
    """The collectives in the text of an HLO module; `mesh` gives names to the groups of devices."""
    bodies = dict(_computations(text))
    looped = _looped_computations(bodies)
    found = [
        _collective(line, match, name in looped, mesh)
        for name, lines in bodies.items()
        for line in lines
        if (match := _INSTRUCTION.match(line))
    ]
    return Audit(collectives=tuple(found))


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for raw in text.splitlines():
        line = raw.strip()
        if not raw.startswith(" ") and (match := _COMPUTATION.match(line)):
            name, lines = match[1], []
        elif line == "}" and not raw.startswith(" "):
            yield name, lines
        else:
            lines.append(line)


def _looped_computations(bodies: dict[str, list[str]]) -> set[str]:
    calls = {
        name: [(called, " while(" in line) for line in lines for called in _called(line)]
        for name, lines in bodies.items()
    }
    looped: set[str] = set()
    queue = [called for pairs in calls.values() for called, is_loop in pairs if is_loop]
    while queue:
        name = queue.pop()
        if name not in looped:
            looped.add(name)
            queue += [called for called, _ in calls.get(name, [])]
    return looped


def _called(line: str) -> list[str]:
    found = _CALLED.findall(line)
    return [name.strip().lstrip("%") for several, one in found for name in (several or one).split(",")]


def _collective(line: str, match: re.Match[str], in_loop: bool, mesh: Mesh | None) -> Collective:
    arrays = _ARRAY.findall(match["type"])
    if "-start(" in line[: match.end()] and match["kind"] != "all-reduce":
        arrays = [pair for pair in arrays if pair != ("u32", "")]  # contexts of the transport
        arrays = arrays[len(arrays) // 2 :]  # the asynchronous forms return (operands, results)
    op_name = re.search(r'op_name="([^"]*)"', line)
    groups = _groups(line)
    axes = _printed_axes(line, mesh)
    return Collective(
        kind=match["kind"],
        num_operands=len(arrays),
        num_bytes=sum(_num_bytes(dtype, dims) for dtype, dims in arrays),
        dtypes=tuple(dtype for dtype, _ in arrays),
        axes=_axes_of(groups, mesh) if axes is None else axes,
        group_size=len(groups[0]) if groups else None,
        in_loop=in_loop,
        op_name=op_name[1] if op_name else "",
    )


def _num_bytes(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    size = _ITEM_BITS.get(dtype) or (int(bits[0]) if bits else 8)
    return math.prod(int(dim) for dim in dims.split(",") if dim) * size // 8


def _printed_axes(line: str, mesh: Mesh | None) -> tuple[str, ...] | None:
    """Newer XLA prints the groups as `mesh['data'=4,'model'=2] {'data'}`; it makes up names it lacks."""
    match = re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", line)
    axes = tuple(re.findall(r"'([^']+)'", match[1])) if match else None
    is_known = axes is not None and (mesh is None or set(axes) <= set(mesh.axis_names))
    return axes if is_known else None


def _groups(line: str) -> list[list[int]] | None:
    """The groups of devices: `{{0,1},{2,3}}`, or `[2,2]<=[2,2]T(1,0)`: an iota, transposed, reshaped."""
    if match := re.search(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", line):
        return [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        dims = [int(dim) for dim in match[3].split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if match[4]:
            ids = ids.transpose([int(i) for i in match[4].split(",")])
        groups: list[list[int]] = ids.reshape(int(match[1]), int(match[2])).tolist()
        return groups
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        chosen = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", match[2])]
        return _groups_along(np.arange(math.prod(sizes.values())).reshape(list(sizes.values())), chosen)
    return None


def _axes_of(groups: list[list[int]] | None, mesh: Mesh | None) -> tuple[str, ...] | None:
    """The mesh axes along which each group runs. HLO numbers devices by their place in the mesh."""
    if groups is None or mesh is None:
        return None
    wanted = {frozenset(group) for group in groups}
    ids = np.arange(mesh.size).reshape(mesh.devices.shape)
    sized = [axis for axis, size in mesh.shape.items() if size > 1]
    for count in range(len(sized) + 1):
        for axes in itertools.combinations(sized, count):
            dims = [mesh.axis_names.index(axis) for axis in axes]
            if {frozenset(group) for group in _groups_along(ids, dims)} == wanted:
                return axes
    return None


def _groups_along(ids: npt.NDArray[np.int_], dims: list[int]) -> list[list[int]]:
    """The devices of a grid in groups that run along some of its dims."""
    rest = [dim for dim in range(ids.ndim) if dim not in dims]
    size = math.prod(ids.shape[dim] for dim in dims)
    groups: list[list[int]] = ids.transpose(*rest, *dims).reshape(-1, size).tolist()
    return groups
