"""Putting trees on a mesh, and refusing what claims to be there and is not."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxsync.errors import BatchError, MeshError, ReplicaMismatchError
from jaxsync.fork import check_not_forked
from jaxsync.mesh import format_mesh
from jaxsync.multiprocess.runtime import check_joined
from jaxsync.params import Leaf
from jaxsync.plan import SyncPlan

_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")  # all that JAX has a name for


def concrete_mesh(plan: SyncPlan) -> Mesh:
    """The plan's mesh, which must have devices.

    Raises:
        MeshError: It is an `AbstractMesh`.
        InitializationError: This is one of several processes, and does not know of the others.
    """
    if not isinstance(plan.mesh, Mesh):
        problem = "it is an AbstractMesh: there are no devices to run on"
        raise MeshError(mesh=format_mesh(plan.mesh), problems=(problem,))
    check_joined()
    return plan.mesh


def local_devices(mesh: Mesh) -> list[jax.Device]:
    """The devices of a mesh that this process owns, in mesh order.

    Raises:
        MeshError: It owns none.
    """
    me = jax.process_index()
    found = [device for device in mesh.devices.flat if device.process_index == me]
    if not found:
        problem = f"process {me} owns none of its devices"
        raise MeshError(mesh=format_mesh(mesh), problems=(problem,))
    return found


def abstract_params(plan: SyncPlan) -> Any:
    """The plan's tree, with a `ShapeDtypeStruct` in place of each array."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape, _dtype(leaf)) for leaf in plan.leaves]
    return jax.tree.unflatten(plan.treedef, leaves)


def _dtype(leaf: Leaf) -> Any:
    if leaf.kind != "key":
        return jnp.dtype(leaf.dtype)
    keys = (jax.eval_shape(functools.partial(jax.random.key, impl=impl), 0) for impl in _KEY_IMPLS)
    return next(key.dtype for key in keys if str(key.dtype) == leaf.dtype)


def check_replicas_equal(tree: Any, name: str = "params") -> None:
    """Refuses arrays whose replicas hold different bits (NaNs of equal bits are equal).

    Reads every addressable shard of every array that has replicas; arrays that live once cost nothing.

    Args:
        tree: The arrays.
        name: What the tree is called.

    Raises:
        ReplicaMismatchError: Names each such leaf and two devices that differ.
        ForkedProcessError: The process was forked from one that had started JAX.
    """
    check_not_forked("comparing replicas")
    found = [
        (jax.tree_util.keystr(path), *devices)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if (devices := _differing_devices(leaf))
    ]
    if found:
        raise ReplicaMismatchError(leaves=tuple(found), tree=name)


def _differing_devices(leaf: Any) -> tuple[str, str] | None:
    if (
        not isinstance(leaf, jax.Array)
        or isinstance(leaf, jax.core.Tracer)
        or len(leaf.sharding.device_set) == 1
    ):
        return None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    first: dict[str, tuple[jax.Device, bytes]] = {}
    for shard in leaf.addressable_shards:
        bits = np.asarray(shard.data).tobytes()
        device, expected = first.setdefault(str(shard.index), (shard.device, bits))
        if bits != expected:
            return str(device), str(shard.device)
    return None


def place_leaves(leaves: Sequence[Any], plan: SyncPlan, *, copy: bool = False) -> list[Any]:
    """Parameter leaves, in plan order, on the plan's mesh as their specs say.

    Args:
        leaves: The leaves.
        plan: The plan.
        copy: Whether the result has buffers of its own; else it may share those of `leaves`.
    """
    mesh = concrete_mesh(plan)
    shardings = [NamedSharding(mesh, leaf.spec) for leaf in plan.leaves]
    # Copied by hand: device_put(..., may_alias=False) still shares the buffer of a device that has one, and
    # the memory of a NumPy array (0.10.2).
    own = [x.copy() if isinstance(x, jax.Array) else np.array(x) for x in leaves] if copy else list(leaves)
    return put(own, shardings)


def put(arrays: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Arrays as `jax.device_put` places them; of one that several processes share, each places its own part.

    JAX itself would first compare such an array between all processes, with a collective each time.

    Args:
        arrays: Host or device arrays; each the whole array, the same in every process.
        shardings: One for each.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        return list(jax.device_put(list(arrays), list(shardings)))
    return [_put_part(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)]


def _put_part(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:  # on the mesh of several processes already
        placed: jax.Array = x if x.sharding == sharding else jax.device_put(x, sharding)
        return placed
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put_part(jax.random.key_data(x), sharding)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return keys
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    # A copy, since JAX may share the memory of an array that it is given, and the caller may write there.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def check_batch(batch: Any, divisor: int) -> None:
    """Refuses a batch that does not divide into `divisor` equal parts. Scalars go to every device.

    Raises:
        BatchError: Names each leaf without rows, with a number of rows that is no multiple, or with another
            number than most: it would be broadcast against the others, silently.
    """
    rows = {
        jax.tree_util.keystr(path): np.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if np.ndim(leaf)
    }
    counts = Counter(shape[0] for shape in rows.values())
    usual = counts.most_common(1)[0][0] if counts else 0
    bad = []
    for path, shape in rows.items():
        if shape[0] == 0 or shape[0] % divisor:
            count = f"{shape[0]} rows are no multiple of {divisor}" if shape[0] else "it has no rows"
            bad.append((path, str(shape), count))
        elif shape[0] != usual:
            bad.append((path, str(shape), f"{shape[0]} rows, where other leaves have {usual}"))
    if bad:
        raise BatchError(leaves=tuple(bad), divisor=divisor)


def batch_spec(leaf: Any, plan: SyncPlan) -> PartitionSpec:
    """How one batch leaf is divided: by its leading dim over the data axes; a scalar not at all."""
    return plan.batch_spec if np.ndim(leaf) else PartitionSpec()
