"""How gradients of single devices become arrays of the whole mesh, and their sums arrays of single devices.

Each array that crosses costs tens of microseconds in Python, whatever its size, so leaves of a bucket are
made one array on their own device first, and cross as that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxsync.ingraph import reduce
from jaxsync.placement import concrete_mesh, local_devices
from jaxsync.plan import SyncPlan

Shape = tuple[int, ...]


def is_ready(array: jax.Array) -> bool:
    """Whether its computation is done, well or badly. Does not wait."""
    # is_ready of a deleted array ends the process with a segmentation fault (0.10.2). It counts as ready:
    # whoever takes it says what happened, with its name.
    return array.is_deleted() or bool(array.is_ready())  # type: ignore[attr-defined]  # missing in the stubs


def assemble(plan: SyncPlan, gradients: Sequence[Sequence[Sequence[jax.Array]]]) -> list[jax.Array]:
    """For each bucket the gradients of some of its leaves on all devices, as the blocks of one array.

    Args:
        plan: The plan.
        gradients: For each device of this process, for each bucket, one array a leaf, on that device. They
            are ready: on CPU, a program with collectives that is launched on others can end the process.

    Returns:
        Arrays that are ready. That of a single leaf holds the given arrays without a copy.
    """
    mesh = concrete_mesh(plan)
    pieces = [_pack_on(device, own) for device, own in zip(local_devices(mesh), gradients, strict=True)]
    jax.block_until_ready(pieces)
    return [_assemble_one(plan, mesh, own) for own in zip(*pieces, strict=True)]


def _assemble_one(plan: SyncPlan, mesh: Mesh, pieces: Sequence[jax.Array]) -> jax.Array:
    shape = pieces[0].shape
    stacked = (shape[0] * mesh.size, *shape[1:]) if shape else ()
    sharding = NamedSharding(mesh, _block_spec(plan, shape))
    return jax.make_array_from_single_device_arrays(stacked, sharding, pieces)


def _pack_on(device: jax.Device, buckets: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """One array a bucket, on this device."""
    # JAX compiles anew for weak types, and runs where it likes what is not committed to a device.
    fused = [
        [_strengthen(x, device) if x.weak_type else x for x in leaves]
        for leaves in buckets
        if len(leaves) > 1
    ]
    if not fused:
        return [leaves[0] for leaves in buckets]
    with jax.default_device(device):
        packed = iter(_pack(fused))
    return [leaves[0] if len(leaves) == 1 else next(packed) for leaves in buckets]


def _strengthen(x: jax.Array, device: jax.Device) -> jax.Array:
    return jax.make_array_from_single_device_arrays(x.shape, SingleDeviceSharding(device), [x])


@jax.jit
def _pack(buckets: list[list[jax.Array]]) -> list[jax.Array]:
    return [jnp.concatenate([leaf.ravel() for leaf in leaves]) for leaves in buckets]


def take_out(arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """For each device of this process its block of every array, without a copy.

    Threading: no other thread may look into the arrays meanwhile: JAX splits one into its blocks at the first
    look, and a second thread sees part of them (0.10.2).
    """
    # All devices at once: each call of addressable_data lists all blocks of an array to take one.
    blocks = [[shard.data for shard in array.addressable_shards] for array in arrays]
    return [list(own) for own in zip(*blocks, strict=True)]


def sync_program(
    plan: SyncPlan, buckets: Sequence[int], leaves: Sequence[Sequence[int]]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The compiled sync of some leaves of some buckets: what `assemble` returns -> one array a leaf.

    The same for all buckets of equal plans that hold leaves of the same shapes.

    Collectives: one all-reduce for each dtype and set of axes among the buckets.
    """
    manifest, start = [], 0
    for bucket, own in zip(buckets, leaves, strict=True):
        cargo = reduce.Cargo(
            bucket=replace(plan.buckets[bucket], leaves=()),
            leaves=tuple(range(start, start + len(own))),
            shapes=tuple(plan.leaves[leaf].local_shape for leaf in own),
        )
        manifest.append(cargo)
        start += len(own)
    return _program(plan, tuple(manifest))


@functools.lru_cache(maxsize=1024)
def _program(
    plan: SyncPlan, manifest: tuple[reduce.Cargo, ...]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    shapes = [shape for cargo in manifest for shape in cargo.shapes]
    given = [
        cargo.shapes[0] if len(cargo.shapes) == 1 else (sum(map(math.prod, cargo.shapes)),)
        for cargo in manifest
    ]
    whole = [
        reduce.Cargo(bucket=cargo.bucket, leaves=(index,), shapes=(shape,))
        for index, (cargo, shape) in enumerate(zip(manifest, given, strict=True))
    ]
    divisor = plan.num_replicas if plan.config.reduce == "mean" else 1

    def sync(arrays: list[jax.Array]) -> list[jax.Array]:
        packed = reduce.scale_before(plan, whole, reduce.pack(whole, arrays))
        summed = reduce.all_reduce(plan, whole, packed)
        finished = reduce.finish(plan, whole, summed, divisor)
        return reduce.unpack(manifest, finished, [()] * len(manifest), [arrays[0]] * len(shapes))

    # Without check_vma: what goes in and out are each device's own blocks, whatever the types would say.
    mapped = jax.shard_map(
        sync,
        mesh=concrete_mesh(plan),
        in_specs=([_block_spec(plan, shape) for shape in given],),
        out_specs=[_block_spec(plan, shape) for shape in shapes],
        check_vma=False,
    )
    compiled: Callable[[list[jax.Array]], list[jax.Array]] = jax.jit(mapped)
    return compiled


def _block_spec(plan: SyncPlan, shape: Shape) -> PartitionSpec:
    """The sharding of an array whose blocks are all devices' own values of a shape, along the first dim.

    A scalar has no dim: its array says that it is replicated, and its replicas differ. Nothing but the
    program and the ticket ever sees it.
    """
    return PartitionSpec(plan.mesh.axis_names) if shape else PartitionSpec()
