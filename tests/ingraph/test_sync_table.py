"""One table: every way of tracing x devices x reduction x dtype x placement, against NumPy in 64 bits.

The truth is the sum (or mean) over devices of the very values the devices hold, in float64 or complex128;
what is allowed is the rounding of the dtypes the sync says it uses, and nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync

# devices -> (data, model)
MESHES = {1: (1, 1), 2: (2, 1), 8: (4, 2)}
SPECS = {"b": P("model"), "big": P(None, "model"), "scalar": P(), "w": P("model", None)}
SHAPES = {"b": (6,), "big": (90, 300), "scalar": (), "w": (4, 3)}
EPS = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "complex64": 2**-23, "float64": 2**-53}
WIRE = {"float16": "float32", "bfloat16": "float32"}


def local_grads(dtype: str, replicas: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.normal(size=(replicas, *shape)) * 10
        if dtype.startswith("complex"):
            values = values + 1j * rng.normal(size=values.shape)
        return values.astype(jnp.dtype(dtype))

    return {name: draw(shape) for name, shape in SHAPES.items()}


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def check_within_rounding(got: Any, per_device: np.ndarray, reduce: str, dtype: str) -> None:
    replicas = len(per_device)
    truth = wide(per_device).sum(0) / (replicas if reduce == "mean" else 1)
    magnitude = np.abs(wide(per_device)).sum(0) / (replicas if reduce == "mean" else 1)
    allowed = EPS[dtype] * np.abs(truth) + 2 * replicas * EPS[WIRE.get(dtype, dtype)] * magnitude
    assert got.dtype == jnp.dtype(dtype)
    assert np.all(np.abs(wide(got) - truth) <= allowed)


def run_shard_map(grads: dict[str, np.ndarray], plan: jaxsync.SyncPlan, check_vma: bool):
    in_specs = {leaf.path[2:-2]: P("data", *leaf.spec) for leaf in plan.leaves}

    def sync(stacked: Any) -> Any:
        return jaxsync.sync_gradients(jax.tree.map(lambda x: x[0], stacked), plan)

    mapped = jax.jit(
        jax.shard_map(sync, mesh=plan.mesh, in_specs=(in_specs,), out_specs=plan.specs, check_vma=check_vma)
    )
    return mapped(grads), jaxsync.audit(mapped, grads)


def run_pmap(grads: dict[str, np.ndarray], plan: jaxsync.SyncPlan, columns: int):
    """pmap has one axis, so each column of the mesh is a pmap of its own over the data axis."""
    sync = partial(jaxsync.sync_gradients, plan=plan)
    results, audits = [], []
    for column in range(columns):
        shard = {name: _column(grads[name], plan.specs[name], column, columns) for name in grads}
        devices = list(plan.mesh.devices.reshape(plan.num_replicas, -1)[:, column])
        mapped = jax.pmap(sync, axis_name="data", devices=devices)
        out = mapped(shard)
        for replica in range(plan.num_replicas):  # bit-equal on every device
            for name in out:
                np.testing.assert_array_equal(np.asarray(out[name][replica]), np.asarray(out[name][0]))
        results.append({name: np.asarray(out[name][0]) for name in out})
        audits.append(jaxsync.audit(mapped, shard))
    whole = {name: _join([r[name] for r in results], plan.specs[name]) for name in grads}
    return whole, audits[0]


def _column(stacked: np.ndarray, spec: P, column: int, columns: int) -> np.ndarray:
    if "model" not in tuple(spec):
        return stacked
    return np.split(stacked, columns, axis=tuple(spec).index("model") + 1)[column]


def _join(parts: list[np.ndarray], spec: P) -> np.ndarray:
    return np.concatenate(parts, axis=tuple(spec).index("model")) if "model" in tuple(spec) else parts[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "float64"])
@pytest.mark.parametrize("placement", ["replicated", "model-sharded"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("way", ["checked", "unchecked", "pmap"])
def test_synced_gradients_are_the_truth_within_rounding_in_the_planned_number_of_all_reduces(
    way: str, devices: int, reduce: str, placement: str, dtype: str
) -> None:
    is_sharded = placement == "model-sharded"
    data, model = MESHES[devices] if is_sharded else (devices, 1)
    with jax.enable_x64(dtype == "float64"):
        mesh = jaxsync.make_mesh({"data": data, "model": model} if is_sharded else {"data": data})
        grads = local_grads(dtype, data)
        shapes = {name: jax.ShapeDtypeStruct(SHAPES[name], dtype) for name in grads}
        specs = SPECS if is_sharded else P()
        plan = jaxsync.make_plan(shapes, mesh, specs, jaxsync.SyncConfig(reduce=reduce))
        if way == "pmap":
            synced, audit = run_pmap(grads, plan, model)
        else:
            synced, audit = run_shard_map(grads, plan, check_vma=way == "checked")
        for name in grads:
            check_within_rounding(synced[name], grads[name], reduce, dtype)
    assert audit.count("all-reduce") == plan.num_all_reduces == 1
    assert len(audit.collectives) == 1
    assert audit.in_loop == ()
    assert audit.collectives[0].num_operands == len(plan.buckets)
