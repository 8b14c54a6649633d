"""TrainState: parameters and optimizer state, kept as the step wants them and shown as the user made them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import GetAttrKey

from jaxsync.errors import TreeMismatchError
from jaxsync.fork import check_not_forked
from jaxsync.host.launcher import check_not_deleted, process_launcher, resolve_window
from jaxsync.ingraph.packed import Packed, is_packed, split, unpack_all
from jaxsync.ingraph.sharded import cut_like, gather_all
from jaxsync.ingraph.shards import Shard, holds_array, is_shard
from jaxsync.mismatch import tree_problems
from jaxsync.multiprocess.consent import agree_on_values
from jaxsync.placement import check_replicas_equal, put
from jaxsync.plan import SyncPlan


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """What a step needs and returns: a plain pytree, in which small leaves are kept together in flat arrays.

    Attributes:
        step: int32 scalar, how many batches were seen.
        packed_params: The parameters as the step keeps them.
        packed_opt_state: The optimizer's state, with what is shaped like the parameters packed like them.
    """

    step: jax.Array
    packed_params: Packed
    packed_opt_state: Any

    @property
    def params(self) -> Any:
        """The parameters, placed on the plan's mesh.

        Leaves that are kept together are taken out anew at each look: keep the result, rather than look
        twice.

        Raises:
            DeletedArrayError: The state was donated to a step.
            ForkedProcessError: The process was forked from one that had started JAX.
        """
        return _show("state.params", self.packed_params)

    @property
    def opt_state(self) -> Any:
        """The optimizer's state, in the structure of `tx.init(params)` and sharded as the parameters are.

        With `shard_optimizer` each array is gathered from its parts, and then sharded over the data axes
        along the first dim that divides.

        Raises:
            DeletedArrayError: The state was donated to a step.
            ForkedProcessError: The process was forked from one that had started JAX.
        """
        return _show("state.opt_state", self.packed_opt_state)

    def replace(self, *, params: Any = None, opt_state: Any = None) -> TrainState:
        """The same state with other parameters or another optimizer state, copied to where the old ones are.

        Raises:
            TreeMismatchError: A new tree has another structure, or a leaf another shape or dtype.
            ReplicaMismatchError: A new array claims to be replicated, and its replicas differ.
            DeletedArrayError: The state was donated to a step.
            ForkedProcessError: The process was forked from one that had started JAX.
            DisagreementError: Several processes bring other values.
            AbsentProcessError: Not all of several processes came.
        """
        check_not_forked("state.replace")
        old = {"params": self.packed_params, "opt_state": self.packed_opt_state}
        check_not_deleted(jax.tree.leaves(old), {"state": self})
        new = {
            name: old[name] if tree is None else _repack(f"state.{name}", old[name], tree)
            for name, tree in (("params", params), ("opt_state", opt_state))
        }
        return TrainState(step=self.step, packed_params=new["params"], packed_opt_state=new["opt_state"])

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """For JAX. Paths are those of the user's trees."""
        names = (GetAttrKey("step"), GetAttrKey("params"), GetAttrKey("opt_state"))
        return tuple(zip(names, self.tree_flatten()[0], strict=True)), None

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """For JAX."""
        return (self.step, self.packed_params, self.packed_opt_state), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> TrainState:
        """For JAX."""
        step, params, opt_state = children
        return cls(step=step, packed_params=params, packed_opt_state=opt_state)


def strong_copy(x: Any) -> jax.Array:
    """A copy of its own inside a program, without the weak type, which would compile the second step anew."""
    return jnp.copy(lax.convert_element_type(x, x.dtype) if jnp.issubdtype(x.dtype, jnp.number) else x)


def _is_kept(x: Any) -> bool:
    """Whether it is kept in another form than it is shown in."""
    return is_packed(x) or is_shard(x)


def _show(name: str, tree: Any) -> Any:
    check_not_forked(name)
    arrays = jax.tree.leaves(tree)
    # A state on the host is shown on the host.
    if any(isinstance(x, np.ndarray | np.generic) for x in arrays):
        return jax.device_get(unpack_all(gather_all(jax.tree.map(_place_parts, tree, is_leaf=is_shard))))
    if not all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in arrays):
        return unpack_all(gather_all(tree))
    if any(is_shard(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)):
        check_not_deleted(arrays, {name: tree})
        shardings = tuple(x.sharding for x in arrays)
        return process_launcher().launch(
            lambda: _gatherer(jax.tree.structure(tree), shardings)(tree),
            resolve_window(None, next(iter(arrays[0].devices())).platform),
            lambda shown: tuple(jax.tree.leaves(shown)),
        )
    return _show_fused(name, tree)


def _place_parts(x: Any) -> Any:
    if not is_shard(x) or not holds_array(x):
        return x
    sharding = NamedSharding(x.cut.plan.mesh, x.cut.spec)
    return Shard(array=jax.device_put(x.array, sharding), cut=x.cut)


def _show_fused(name: str, tree: Any) -> Any:
    fused: list[tuple[Any, tuple[tuple[int, ...], ...]]] = []

    def note(array: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        if len(shapes) > 1:
            fused.append((array, tuple(shapes)))
        return [array] * len(shapes)

    noted = unpack_all(tree, note)
    if not fused:
        return noted
    arrays = [array for array, _ in fused]
    check_not_deleted(arrays, {name: tree})
    # Only what is kept together goes through a program; all else is shown as it is, without a copy.
    program = _splitter(tuple(shapes for _, shapes in fused), tuple(array.sharding for array in arrays))
    parts = iter(program(arrays))
    return unpack_all(tree, lambda array, shapes: next(parts) if len(shapes) > 1 else [array])


@functools.lru_cache(maxsize=64)
def _gatherer(structure: Any, shardings: tuple[Sharding, ...]) -> Callable[[Any], Any]:
    """A program that makes whole arrays of those that are cut, sharded as their shapes allow."""
    tree = jax.tree.unflatten(structure, shardings)

    def place(x: Any) -> Any:
        if is_packed(x):
            slots = zip(x.layout.slots, x.arrays, strict=True)
            specs = {i: _shown_spec(x.layout.plan, i, is_shard(array)) for slot, array in slots for i in slot}
            mesh = x.layout.plan.mesh
            leaves = [
                None if i in x.layout.rest else NamedSharding(mesh, specs[i])
                for i in range(len(x.layout.plan.leaves))
            ]
            return jax.tree.unflatten(x.layout.plan.treedef, leaves)
        if is_shard(x) and not holds_array(x):
            return x.array
        if is_shard(x):
            return NamedSharding(x.cut.plan.mesh, _shown_spec(x.cut.plan, x.cut.slot[0], True))
        return x

    return jax.jit(
        lambda tree: unpack_all(gather_all(tree)),
        out_shardings=jax.tree.map(place, tree, is_leaf=_is_kept),
    )


def _shown_spec(plan: SyncPlan, index: int, is_cut: bool) -> PartitionSpec:
    """The leaf's own spec; if it is kept in parts, with the data axes along the first dim that divides."""
    leaf = plan.leaves[index]
    entries = [*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec))]
    for dim, (size, entry) in enumerate(zip(leaf.shape, entries, strict=True)):
        if is_cut and entry is None and size and size % plan.num_replicas == 0:
            entries[dim] = plan.data_axes
            return PartitionSpec(*entries)
    return leaf.spec


@functools.lru_cache(maxsize=64)
def _splitter(
    shapes: tuple[tuple[tuple[int, ...], ...], ...], shardings: tuple[Sharding, ...]
) -> Callable[[Sequence[jax.Array]], list[list[jax.Array]]]:
    """A program that takes leaves of these shapes out of each of several arrays."""
    places = [
        [_as_scalar(sharding) if shape == () else sharding for shape in own]
        for own, sharding in zip(shapes, shardings, strict=True)
    ]
    return jax.jit(
        lambda arrays: [split(array, own) for array, own in zip(arrays, shapes, strict=True)],
        out_shardings=places,
    )


def _as_scalar(sharding: Sharding) -> Sharding:
    """The sharding for an array without dims: on Explicit meshes a spec names each dim, if only as None."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _repack(name: str, old: Any, new: Any) -> Any:
    outer: Any = jax.tree.structure(old, is_leaf=_is_kept)
    wanted = jax.tree.leaves(old, is_leaf=_is_kept)

    def pack(pieces: Sequence[Any]) -> Any:
        return jax.tree.unflatten(
            outer, [_keep_like(was, piece) for was, piece in zip(wanted, pieces, strict=True)]
        )

    _check_same_leaves(name, old, new)
    check_replicas_equal(new, name)
    agree_on_values(name, new, [x.sharding for x in jax.tree.leaves(old)])
    program = jax.jit(pack, out_shardings=jax.tree.map(lambda x: x.sharding, old))
    pieces = [_bring_to(was, piece) for was, piece in zip(wanted, outer.flatten_up_to(new), strict=True)]
    result = program(pieces)
    jax.block_until_ready(result)  # until then JAX may read the caller's NumPy arrays
    return result


def _bring_to(was: Any, piece: Any) -> Any:
    """`piece` on the mesh of `was`, from wherever it is, as its spec says."""
    if is_packed(was):
        plan = was.layout.plan
        leaves = plan.treedef.flatten_up_to(piece)
        own = [NamedSharding(plan.mesh, leaf.spec) for leaf in plan.leaves]
        placed = [None if x is None else put([x], [s])[0] for x, s in zip(leaves, own, strict=True)]
        return jax.tree.unflatten(plan.treedef, placed)
    if is_shard(was):
        plan = was.cut.plan
        sharding = NamedSharding(plan.mesh, plan.leaves[was.cut.slot[0]].spec)
        return jax.tree.map(lambda x: put([x], [sharding])[0], piece)
    return put([piece], [was.sharding])[0]


def _keep_like(was: Any, piece: Any) -> Any:
    if is_packed(was):
        packed = was.layout.pack(jax.tree.map(strong_copy, piece))
        return packed.with_arrays(
            [cut_like(old, array) for old, array in zip(was.arrays, packed.arrays, strict=True)]
        )
    return cut_like(was, jax.tree.map(strong_copy, piece))


def _check_same_leaves(name: str, old: Any, new: Any) -> None:
    wanted = jax.eval_shape(lambda tree: unpack_all(gather_all(tree)), old)
    if problems := tree_problems(name, new, wanted, owner="the state"):
        raise TreeMismatchError(problems=tuple(problems))
