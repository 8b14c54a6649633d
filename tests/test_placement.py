from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import ReplicaMismatchError
from jaxsync.placement import check_replicas_equal


def from_pieces(
    pieces: list[np.ndarray], spec: P, mesh: jax.sharding.Mesh, shape: tuple[int, ...]
) -> jax.Array:
    arrays = [jax.device_put(piece, device) for piece, device in zip(pieces, mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), arrays)


def test_equal_replicas_pass_whatever_they_hold() -> None:
    mesh = jaxsync.make_mesh({"data": 2, "model": 2})
    tree = {
        "nan": jax.device_put(jnp.array([jnp.nan, -0.0]), NamedSharding(mesh, P())),
        "key": jax.device_put(jax.random.key(0), NamedSharding(mesh, P())),
        "split": jax.device_put(jnp.arange(4), NamedSharding(mesh, P("model"))),
        "host": np.ones(3),
        "single": jnp.ones(2),
    }
    check_replicas_equal(tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_one_differing_element_is_found_and_its_devices_named(dtype: str) -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    pieces = [np.zeros(1000, jnp.dtype(dtype)) for _ in range(4)]
    pieces[2][999] = 1
    with pytest.raises(ReplicaMismatchError) as caught:
        check_replicas_equal({"a": {"w": from_pieces(pieces, P(), mesh, (1000,))}})
    devices = mesh.devices
    assert caught.value.leaves == (("['a']['w']", str(devices[0]), str(devices[2])),)


def test_shards_are_compared_with_their_own_replicas_only() -> None:
    mesh = jaxsync.make_mesh({"data": 2, "model": 2})
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    check_replicas_equal(from_pieces([zero, one, zero, one], P("model"), mesh, (2,)))
    with pytest.raises(ReplicaMismatchError):
        check_replicas_equal(from_pieces([zero, one, one, one], P("model"), mesh, (2,)))


def test_a_replica_that_drifted_in_a_compiled_program_is_found() -> None:
    """out_specs=P() without check_vma is a promise that nobody checks."""
    mesh = jaxsync.make_mesh({"data": 4})
    drift = jax.shard_map(
        lambda: jnp.where(jax.lax.axis_index("data") == 0, 1.0, 5.0),
        mesh=mesh,
        in_specs=(),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ReplicaMismatchError):
        check_replicas_equal({"w": jax.jit(drift)()})
