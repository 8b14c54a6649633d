"""An optimizer whose state, and whose work, is divided over the devices of the data axes (ZeRO, stage 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsync.errors import ArgumentError, MeshError, NotElementwiseError
from jaxsync.ingraph.elementwise import choose_layout, find_differences, state_specs, trained_shapes
from jaxsync.ingraph.packed import Layout, Packed
from jaxsync.ingraph.shards import Cut, Shard, all_gather, holds_array, is_shard, own_part
from jaxsync.mesh import format_mesh
from jaxsync.plan import SyncPlan


class ShardedOptimizer:
    """An optimizer on parts of arrays. Made by `shard_optimizer`, whose docstring is its contract.

    Attributes:
        plan: The plan.
        inner: The optimizer that it runs on parts.
        layout: Which leaves are one array.
        cuts: How each array of the layout is cut; None for one that stays whole.
    """

    def __init__(self, inner: Any, plan: SyncPlan) -> None:
        self.plan = plan
        self.inner = inner
        self.layout = choose_layout(inner, plan)
        self.cuts = _make_cuts(self.layout)
        self._check_elementwise()

    def init(self, params: Any) -> Any:
        """The optimizer's state for global parameters, each part on its device."""
        specs = self.state_specs(jax.eval_shape(self._make_state, params))
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
            return jax.tree.map(self._constrain, self._make_state(params), specs)
        if not isinstance(self.plan.mesh, Mesh):
            problem = "it is an AbstractMesh: there are no devices to run on"
            raise MeshError(mesh=format_mesh(self.plan.mesh), problems=(problem,))
        own = jax.tree.map(lambda spec: NamedSharding(self.plan.mesh, spec), (self.plan.specs, specs))
        placed = jax.device_put(params, own[0])
        return jax.jit(self._make_state, out_shardings=own[1])(placed)

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        # The state often does not depend on the parameters, and would be put anywhere.
        sharding = NamedSharding(self.plan.mesh, spec)
        is_auto = self.plan.mesh.are_all_axes_auto
        constrained: jax.Array = (
            lax.with_sharding_constraint(x, sharding) if is_auto else jax.sharding.reshard(x, sharding)
        )
        return constrained

    def _make_state(self, params: Any) -> Any:
        return self.inner.init(self.view(self.cut(self.layout.pack(params))))

    def state_specs(self, state: Any) -> Any:
        """How the leaves of a state of the inner optimizer are sharded."""
        parts = Packed(layout=self.layout, arrays=self.shapes, rest=(None,) * len(self.layout.rest))
        return state_specs(state, self.view(parts), self.specs)

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays of parts."""
        leaves = self.plan.leaves
        whole = [
            leaves[slot[0]].shape if len(slot) == 1 else (sum(math.prod(leaves[i].shape) for i in slot),)
            for slot in self.layout.slots
        ]
        return tuple(
            jax.ShapeDtypeStruct(shape if cut is None else cut.shape, leaves[slot[0]].dtype)
            for slot, shape, cut in zip(self.layout.slots, whole, self.cuts, strict=True)
        )

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Synced gradients as global arrays -> updates and the next state, as every optax optimizer."""
        parts, own = (
            None if tree is None else self.view(self.cut(self.layout.pack(tree)))
            for tree in (updates, params)
        )
        found, state = self.inner.update(parts, state, own)
        packed = self.layout.pack(updates).with_arrays(jax.tree.leaves(found))
        return self.gather(packed).tree(), state

    def view(self, packed: Packed) -> Any:
        """What the inner optimizer sees: `Shard`s, in a packed tree if leaves are fused, else in the tree."""
        shards = [
            array if cut is None else Shard(array=array, cut=cut)
            for array, cut in zip(packed.arrays, self.cuts, strict=True)
        ]
        seen = packed.without_rest().with_arrays(shards)
        return seen if self.layout.is_fused else seen.tree()

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """How the arrays of parts are sharded."""
        whole = self.layout.specs.arrays
        return tuple(own if cut is None else cut.spec for own, cut in zip(whole, self.cuts, strict=True))

    def cut(self, packed: Packed) -> Packed:
        """Whole arrays -> parts. Moves nothing between devices."""
        run = jax.shard_map(
            self.own_parts,
            mesh=self.plan.mesh,
            in_specs=(self.layout.specs.arrays,),
            out_specs=self.specs,
            check_vma=False,
        )
        return packed.with_arrays(run(packed.arrays))

    def own_parts(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The same inside `shard_map`."""
        return tuple(
            array if cut is None else own_part(array, cut)
            for array, cut in zip(arrays, self.cuts, strict=True)
        )

    def gather(self, packed: Packed) -> Packed:
        """Parts -> whole arrays.

        Collectives: one all-gather for each bucket that is cut.
        """
        run = jax.shard_map(
            self._gather_local,
            mesh=self.plan.mesh,
            in_specs=(self.specs,),
            out_specs=self.layout.specs.arrays,
            check_vma=False,  # by its type, what all_gather returns may differ from device to device
        )
        return packed.with_arrays(run(packed.arrays))

    def _gather_local(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        whole = list(arrays)
        for group in self._groups():
            cuts = [cut for k in group if (cut := self.cuts[k]) is not None]
            for k, array in zip(group, all_gather([arrays[k] for k in group], cuts), strict=True):
                whole[k] = array
        return tuple(whole)

    def _groups(self) -> list[list[int]]:
        """The arrays that are cut, by bucket."""
        bucket_of = {i: number for number, bucket in enumerate(self.plan.buckets) for i in bucket.leaves}
        groups: dict[int, list[int]] = {}
        for k, cut in enumerate(self.cuts):
            if cut is not None:
                groups.setdefault(bucket_of[cut.slot[0]], []).append(k)
        return list(groups.values())

    def _check_elementwise(self) -> None:
        leaves = self.plan.leaves
        seen = self.view(Packed(layout=self.layout, arrays=self.shapes, rest=(None,) * len(self.layout.rest)))
        tree = trained_shapes(self.plan)
        jax.eval_shape(lambda p: self.inner.update(p, self.inner.init(p), p), tree)  # errors of its own
        try:
            found = find_differences(self.inner, self.plan, tree, seen, self.layout.slots, is_padded=True)
        except Exception as error:  # whatever it makes of parts
            reason = f"cannot be traced on parts of arrays: {error}"
            raise NotElementwiseError(problems=(("updates", "", reason),)) from error
        if found:
            places = [
                (
                    difference.place,
                    "" if difference.leaf is None else leaves[difference.leaf].path,
                    difference.reason,
                )
                for difference in found
            ]
            raise NotElementwiseError(problems=tuple(places))


def _make_cuts(layout: Layout) -> tuple[Cut | None, ...]:
    plan = layout.plan
    large = {
        i for bucket in plan.buckets if bucket.num_bytes >= plan.config.shard_min_bytes for i in bucket.leaves
    }
    return tuple(
        Cut(plan=plan, slot=slot)
        if slot[0] in large and not set(plan.leaves[slot[0]].spec_axes) & set(plan.data_axes)
        else None
        for slot in layout.slots
    )


def gather_all(tree: Any) -> Any:
    """`tree` with whole arrays in place of every `Shard` in it.

    Collectives: one all-gather each.
    """

    def show(x: Any) -> Any:
        if not is_shard(x):
            return x
        return _whole(x) if holds_array(x) else x.array

    return jax.tree.map(show, tree, is_leaf=is_shard)


def _whole(shard: Shard) -> jax.Array:
    cut = shard.cut
    whole: jax.Array = jax.shard_map(
        lambda part: all_gather([part], [cut])[0],
        mesh=cut.plan.mesh,
        in_specs=cut.spec,
        out_specs=cut.plan.leaves[cut.slot[0]].spec,
        check_vma=False,
    )(shard.array)
    return whole


def cut_like(old: Any, array: Any) -> Any:
    """A whole array cut as `old` is, if `old` is a `Shard`; else the array."""
    if not is_shard(old):
        return array
    cut = old.cut
    if not holds_array(old):
        return Shard(array=array, cut=cut)
    part = jax.shard_map(
        lambda whole: own_part(whole, cut),
        mesh=cut.plan.mesh,
        in_specs=cut.plan.leaves[cut.slot[0]].spec,
        out_specs=cut.spec,
        check_vma=False,
    )(array)
    return Shard(array=part, cut=cut)


def shard_optimizer(tx: Any, plan: SyncPlan) -> ShardedOptimizer:
    """`tx` with its state, and its work, divided over the devices of the data axes (ZeRO, stage 1).

    In a `TrainStep` gradients are reduce-scattered by bucket, each device updates its part of the parameters,
    and the new parameters are all-gathered; each device then holds 1/N of the optimizer's state. As an
    optimizer of its own it takes and gives global arrays under `jit`.

    Every array is cut, whatever its shape: it is padded to a multiple of the number of devices. Buckets below
    `SyncConfig.shard_min_bytes` stay whole.

    Args:
        tx: An optimizer of the optax protocol whose update is elementwise, as its trace shows: each element
            depends on the same element of gradient, parameter and state alone, on scalars, and on sums over
            whole trees that zeros do not change (a global norm).
        plan: From `make_plan`.

    Returns:
        An optimizer of the optax protocol, for `make_train_step` with the same plan.

    Raises:
        NotElementwiseError: `tx` is not elementwise (adafactor, lamb, shampoo).
        ArgumentError: An argument is something else.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    section 5.1.

    >>> import jax.numpy as jnp, optax, jaxsync
    >>> params = {"w": jnp.zeros((5, 3))}
    >>> plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    >>> state = jaxsync.shard_optimizer(optax.sgd(1e-3, momentum=0.9), plan).init(params)
    >>> [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state)]
    [(2, 1)]
    """
    for argument, value, good, wanted in (
        ("tx", tx, hasattr(tx, "init") and hasattr(tx, "update"), "an optimizer with init and update"),
        ("plan", plan, isinstance(plan, SyncPlan), "a SyncPlan"),
    ):
        if not good or isinstance(value, ShardedOptimizer):
            got = f"a {type(value).__name__}"
            raise ArgumentError(function="shard_optimizer", argument=argument, got=got, wanted=wanted)
    return ShardedOptimizer(tx, plan)
