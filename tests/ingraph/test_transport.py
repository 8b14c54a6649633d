"""How sums travel: in bfloat16, in two levels, by all-to-all. The same values, or within the stated bound."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import ConfigError
from jaxsync.testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
SHAPES = {"w": (7, 3), "b": (5,), "scalar": (), "large": (150, 200)}
GRADS = {key: RNG.normal(size=(8, *shape)).astype(np.float32) for key, shape in SHAPES.items()}
BOTH = ("host", "device")


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    devices = np.array(jax.devices()).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def plan_of(mesh: Mesh, **config: Any) -> jaxsync.SyncPlan:
    shapes = {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in SHAPES.items()}
    return jaxsync.make_plan(shapes, mesh, config=jaxsync.SyncConfig(**config))


def sync(plan: jaxsync.SyncPlan, grads: Any = None, checked: bool = True) -> tuple[Any, jaxsync.Audit]:
    spec = P(plan.data_axes)
    grads = jax.device_put(GRADS if grads is None else grads, NamedSharding(plan.mesh, spec))
    run = jax.shard_map(
        lambda g: jaxsync.sync_gradients(jax.tree.map(lambda x: x[0], g), plan),
        mesh=plan.mesh,
        in_specs=spec,
        out_specs=P(),
        check_vma=checked,
    )
    return jax.jit(run)(grads), jaxsync.audit(jax.jit(run), grads)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_bfloat16_on_the_wire_is_within_its_bound_and_equal_on_all_devices(
    kind: AxisType, checked: bool
) -> None:
    synced, audit = sync(plan_of(mesh_of(kind, data=8), wire_dtype="bfloat16", reduce="sum"), checked=checked)
    assert_replicas_equal(synced)
    for key, grads in GRADS.items():
        total = grads.astype(np.float64).sum(axis=0)
        bound = 2**-7 * np.abs(grads.astype(np.float64)).sum(axis=0)
        assert synced[key].dtype == np.float32
        assert (np.abs(synced[key] - total) <= 1.001 * bound).all()
    assert np.abs(synced["large"] - GRADS["large"].sum(axis=0)).max() > 0  # it was rounded
    kinds = {c.kind for c in audit.collectives}
    assert kinds == {"all-to-all", "all-gather"}
    num_elements = sum(int(np.prod(shape)) for shape in SHAPES.values())
    for kind_of in kinds:
        moved = sum(c.num_bytes for c in audit.collectives if c.kind == kind_of)
        assert 2 * num_elements <= moved <= 2 * (num_elements + 64)  # with padding


def test_what_is_narrowed_is_added_in_float32() -> None:
    """In bfloat16 1 + 2**-8 is 1: seven such terms would be lost one by one."""
    grads = {key: np.full((8, *shape), 2.0**-8, np.float32) for key, shape in SHAPES.items()}
    for grad in grads.values():
        grad[0] = 1.0
    synced, _ = sync(plan_of(mesh_of(data=8), wire_dtype="bfloat16", reduce="sum"), grads)
    want = np.float32(jnp.bfloat16(1 + 7 * 2.0**-8))
    for value in synced.values():
        np.testing.assert_array_equal(value, np.full(value.shape, want))


def test_infinities_and_nans_survive_the_wire() -> None:
    grads = {key: np.ones((8, *shape), np.float32) for key, shape in SHAPES.items()}
    grads["w"][3, 0, 0], grads["b"][1, 2], grads["large"][0, 1, 1] = np.nan, np.inf, 3e38
    synced, _ = sync(plan_of(mesh_of(data=8), wire_dtype="bfloat16"), grads)
    assert np.isnan(synced["w"]).sum() == 1
    assert np.isnan(synced["w"][0, 0])
    assert np.isposinf(synced["b"]).sum() == 1
    assert np.isfinite(synced["large"]).all()


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)], ids=str)
def test_two_levels_give_the_same_values_and_send_a_share_across_hosts(
    sizes: tuple[int, int], checked: bool
) -> None:
    hosts, devices = sizes
    mesh = mesh_of(host=hosts, device=devices)
    one, flat_audit = sync(plan_of(mesh, axis=BOTH), checked=checked)
    two, audit = sync(plan_of(mesh, axis=BOTH, inner_axis="device"), checked=checked)
    assert_replicas_equal(two)
    for key in GRADS:
        np.testing.assert_allclose(two[key], GRADS[key].astype(np.float64).mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(two[key], one[key], rtol=1e-5, atol=1e-6)
    across = [c for c in audit.collectives if "host" in c.axes]
    assert {c.kind for c in across} == {"all-reduce"}
    flat_bytes = sum(c.num_bytes for c in flat_audit.collectives)
    assert sum(c.num_bytes for c in across) <= flat_bytes / devices + 4 * devices * len(SHAPES)
    inside = [c for c in audit.collectives if c.axes == ("device",)]
    assert sorted({c.kind for c in inside}) == ["all-gather", "reduce-scatter"]
    assert len(across) + len(inside) == len(audit.collectives)


def test_two_levels_narrow_only_what_crosses_hosts() -> None:
    mesh = mesh_of(host=2, device=4)
    plan = plan_of(mesh, axis=BOTH, inner_axis="device", wire_dtype="bfloat16", reduce="sum")
    synced, audit = sync(plan)
    assert_replicas_equal(synced)
    for key, grads in GRADS.items():
        # Two terms are rounded: the sums inside the two hosts.
        inside = np.abs(grads.astype(np.float64).reshape(2, 4, *grads.shape[1:]).sum(axis=1)).sum(axis=0)
        total = grads.astype(np.float64).sum(axis=0)
        assert (np.abs(synced[key] - total) <= 1.01 * 2**-7 * inside + 1e-5).all()
    assert {c.kind for c in audit.collectives if c.axes == ("host",)} == {"all-to-all", "all-gather"}
    assert {c.kind for c in audit.collectives if c.axes == ("device",)} == {"reduce-scatter", "all-gather"}


def loss_fn(params: Any, x: Any) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ params["w"]) @ params["v"]) + params["scalar"] ** 2


PARAMS = {
    "w": RNG.normal(size=(8, 16)).astype(np.float32),
    "v": RNG.normal(size=(16, 1)).astype(np.float32),
    "scalar": np.float32(1),
}
X = RNG.normal(size=(16, 8)).astype(np.float32)
STEPS = {
    "replicated": (P(), False),
    "ZeRO-1": (P(), True),
    "FSDP": ({"w": P("device"), "v": P(("host", "device")), "scalar": P()}, False),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("inner_axis", [None, "device"])
def test_steps_train_the_same_however_sums_travel(name: str, wire_dtype: Any, inner_axis: str | None) -> None:
    specs, divides = STEPS[name]
    config = jaxsync.SyncConfig(axis=BOTH, wire_dtype=wire_dtype, inner_axis=inner_axis)
    plan = jaxsync.make_plan(PARAMS, mesh_of(host=2, device=4), specs, config)
    tx = optax.sgd(0.1, momentum=0.9)
    step = jaxsync.make_train_step(loss_fn, jaxsync.shard_optimizer(tx, plan) if divides else tx, plan)
    state = step.init(PARAMS)
    params, opt_state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        state, metrics = step(state, X)
        loss, grads = jax.value_and_grad(loss_fn)(params, X)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        # The first loss is exact whatever the wire; the later ones have rounded gradients behind them.
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5 if wire_dtype is None else 5e-3)
    tolerance = 1e-6 if wire_dtype is None else 3e-3
    for key, value in state.params.items():
        np.testing.assert_allclose(jax.device_get(value), params[key], atol=tolerance)


def test_an_inner_axis_must_be_one_of_several() -> None:
    for axis in ("data", ("host", "data")):
        with pytest.raises(ConfigError, match="inner_axis = 'device': wanted one of several axes"):
            jaxsync.SyncConfig(axis=axis, inner_axis="device")
    with pytest.raises(ConfigError, match="inner_axis = 'data': wanted one of several axes"):
        jaxsync.SyncConfig(axis="data", inner_axis="data")
    with pytest.raises(ConfigError, match="wire_dtype = 'float16': wanted 'bfloat16'"):
        jaxsync.SyncConfig(wire_dtype="float16")  # type: ignore[arg-type]
