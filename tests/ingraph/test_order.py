"""Where order matters to a sum of floats, and where it does not: bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxsync

RNG = np.random.default_rng(0)
# Of magnitudes that make every order of summation another float.
GRADS = {
    f"w{i:02}": (RNG.normal(size=(8, 37)) * 10.0 ** RNG.integers(-6, 6, size=(8, 37))).astype(np.float32)
    for i in range(40)
}
PERMUTED = (3, 1, 7, 0, 2, 6, 5, 4)


def in_mesh_order(grads: Any) -> Any:
    """The sum as float32 additions, from the first place in the mesh to the last."""
    total = {name: rows[0].copy() for name, rows in grads.items()}
    for place in range(1, 8):
        total = {name: total[name] + grads[name][place] for name in grads}
    return total


def synced(grads: Any = GRADS, order: Any = range(8), window: int | None = None, **config: Any) -> Any:
    mesh = Mesh(np.array(jax.devices())[list(order)], ("data",))
    plan = jaxsync.make_plan(
        {name: rows[0] for name, rows in grads.items()},
        mesh,
        config=jaxsync.SyncConfig(reduce="sum", **config),
    )

    def own(rows: Any) -> Any:
        return jaxsync.sync_gradients({name: x[0] for name, x in rows.items()}, plan)

    step = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P("data"), out_specs=P()))
    launch = jaxsync.guard_dispatch(step, max_in_flight=window)
    results = [launch(grads) for _ in range(1 if window is None else 12)]
    return jax.device_get(results[-1])


def check_equal_bits(got: Any, want: Any) -> None:
    for name in want:
        np.testing.assert_array_equal(got[name].view(np.uint32), want[name].view(np.uint32))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"fuse_max_bytes": 0},
        {"bucket_max_leaves": 3},
        {"bucket_max_leaves": 40},
        {"bucket_max_bytes": 400},
    ],
    ids=str,
)
def test_buckets_do_not_change_a_bit(config: dict[str, int]) -> None:
    check_equal_bits(synced(**config), in_mesh_order(GRADS))


@pytest.mark.parametrize("window", [1, 2, 16])
def test_the_launch_window_does_not_change_a_bit(window: int) -> None:
    check_equal_bits(synced(window=window), in_mesh_order(GRADS))


@pytest.mark.parametrize("order", [range(7, -1, -1), PERMUTED], ids=["reversed", "permuted"])
def test_which_device_stands_where_in_the_mesh_does_not_change_a_bit(order: Any) -> None:
    check_equal_bits(synced(order=order), in_mesh_order(GRADS))


def test_which_rows_stand_where_in_the_mesh_does_change_bits() -> None:
    permuted = {name: rows[list(PERMUTED)] for name, rows in GRADS.items()}
    got, want = synced(permuted), in_mesh_order(GRADS)
    check_equal_bits(got, in_mesh_order(permuted))
    assert sum(int((got[name] != want[name]).sum()) for name in want) > 100
