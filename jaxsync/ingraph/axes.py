"""What JAX's types say about a value over a mesh axis, and what follows.

Inside `shard_map(check_vma=True)` every value carries the axes it varies over. Under `pmap`, `vmap` and
`check_vma=False` none does: there a value's state is unknown, and it is taken for local, as pmap always did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any

import jax
from jax import lax

from jaxsync.errors import (
    AlreadyReducedError,
    MeshError,
    NotReducedError,
    UnboundAxisError,
    UncheckedModelError,
)
from jaxsync.mesh import axis_sizes, format_mesh
from jaxsync.params import Leaf
from jaxsync.plan import SyncPlan


class AxisState(Enum):
    """What is known of a value over one axis."""

    VARYING = "varying"  # each device holds its own
    UNREDUCED = "unreduced"  # each device holds a term of a sum
    INVARYING = "invarying"  # every device holds the same: it was reduced, or never differed
    UNKNOWN = "unknown"  # no types here


def axis_state(x: Any, axis: str, typed: Collection[str]) -> AxisState:
    """The state of `x` over `axis`, from its type alone; `typed` is what `typed_axes` found."""
    state = jax.typeof(x).manual_axis_type
    if axis in state.varying:
        return AxisState.VARYING
    if axis in state.unreduced:
        return AxisState.UNREDUCED
    return AxisState.INVARYING if axis in typed else AxisState.UNKNOWN


def typed_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes over which values carry their state here (`check_vma=True`).

    Ask once a trace, not once a leaf: each question traces an operation.
    """
    return tuple(axis for axis in axes if is_bound(axis) and _varies_over_itself(axis))


def _varies_over_itself(axis: str) -> bool:
    # The index along an axis varies over it by definition, if anything here has types. Dead code once asked.
    return axis in jax.typeof(lax.axis_index(axis)).manual_axis_type.varying


def is_bound(axis: str) -> bool:
    """Whether a collective over `axis` can be traced here."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def bound_axes() -> tuple[str, ...]:
    """The axes that `shard_map` or `pmap` has bound here; those of `vmap` JAX does not tell."""
    return tuple(map(str, jax.sharding.get_abstract_mesh().manual_axes))


def check_axes_bound(plan: SyncPlan, function: str) -> None:
    """Refuses to reduce where the plan's data axes are missing or have another size.

    Raises:
        UnboundAxisError: A data axis is not bound here.
        MeshError: A data axis has another size than in the plan.
    """
    unbound = [axis for axis in plan.data_axes if not is_bound(axis)]
    if unbound:
        raise UnboundAxisError(function=function, axes=tuple(unbound), bound=bound_axes())
    sizes = axis_sizes(plan.mesh)
    problems = [
        f"axis {axis!r} has size {lax.axis_size(axis)} where {function} is called, {sizes[axis]} in the plan"
        for axis in plan.data_axes
        if lax.axis_size(axis) != sizes[axis]
    ]
    if problems:
        raise MeshError(mesh=format_mesh(plan.mesh), problems=tuple(problems))


_is_synced_here: ContextVar[bool] = ContextVar("_is_synced_here", default=False)


@contextlib.contextmanager
def declared_synced() -> Iterator[None]:
    """While an optimizer is traced: its gradients are synced, also where types do not say so (`pmap`)."""
    token = _is_synced_here.set(True)
    try:
        yield
    finally:
        _is_synced_here.reset(token)


def check_not_declared_synced(plan: SyncPlan) -> None:
    """Refuses to sync where gradients are declared synced.

    Raises:
        AlreadyReducedError: Names every synced leaf.
    """
    if _is_synced_here.get():
        paths = tuple(leaf.path for leaf in plan.leaves if leaf.is_synced)
        raise AlreadyReducedError(leaves=paths, axes=plan.data_axes)


def check_not_reduced(leaves: Sequence[Leaf], values: Sequence[Any]) -> None:
    """Refuses gradients that are the same on every device by their type.

    Raises:
        AlreadyReducedError: Names every such leaf.
    """
    found = list(_with_state(leaves, values, (AxisState.INVARYING,)))
    if found:
        raise AlreadyReducedError(leaves=_paths(found), axes=_axes(found))


def check_reduced(leaves: Sequence[Leaf], values: Sequence[Any], function: str) -> None:
    """Refuses gradients that differ from device to device by their type.

    Raises:
        NotReducedError: Names every such leaf.
    """
    found = list(_with_state(leaves, values, (AxisState.VARYING, AxisState.UNREDUCED)))
    if found:
        raise NotReducedError(function=function, leaves=_paths(found), axes=_axes(found))


def _with_state(
    leaves: Sequence[Leaf], values: Sequence[Any], states: tuple[AxisState, ...]
) -> Iterator[tuple[str, str]]:
    typed = typed_axes(tuple({axis: None for leaf in leaves for axis in leaf.reduce_axes}))
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.is_synced:
            for axis in leaf.reduce_axes:
                if axis_state(value, axis, typed) in states:
                    yield leaf.path, axis


def _paths(found: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for path, _ in found))


def _axes(found: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for _, axis in found))


def make_varying(values: Sequence[Any], axes: Sequence[str]) -> list[Any]:
    """`values` typed as each device's own over `axes`, so that their gradients stay local.

    Values that vary already, or whose type says reduced or unreduced, are returned as they are; so is
    everything where there are no types.
    """
    typed = typed_axes(axes)
    return [_make_one_varying(value, typed) for value in values]


def _make_one_varying(x: Any, typed: Sequence[str]) -> Any:
    state = jax.typeof(x).manual_axis_type
    known = state.varying | state.unreduced | state.reduced
    missing = tuple(axis for axis in typed if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def check_typed_communication(fn: Callable[..., Any], arg: Any, plan: SyncPlan) -> None:
    """Refuses a loss that communicates over a model axis where values carry no types.

    Untyped, JAX transposes a sum over an axis into a sum over it, so that the gradient of a loss which all
    of M model shards hold comes out M times too large. Communication inside `jax.custom_vjp` has a rule of
    the user's own and is let through.

    Raises:
        UncheckedModelError: Names the axes and the primitives.
    """
    others = [axis for axis in plan.mesh.axis_names if axis not in plan.data_axes]
    bound = [axis for axis in others if axis_sizes(plan.mesh)[axis] > 1 and is_bound(axis)]
    untyped = [axis for axis in bound if axis not in typed_axes(bound)]
    if not untyped:
        return
    found = sorted(set(_communication(jax.make_jaxpr(fn)(arg).jaxpr, untyped)))
    if found:
        raise UncheckedModelError(axes=tuple(untyped), primitives=tuple(found))


def _communication(jaxpr: Any, axes: Sequence[str]) -> Iterator[str]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith("custom_vjp") or name == "axis_index":
            continue
        used = equation.params.get("axes", equation.params.get("axis_name", ()))
        if set(used if isinstance(used, tuple) else (used,)) & set(axes):
            yield name
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _communication(inner, axes)
