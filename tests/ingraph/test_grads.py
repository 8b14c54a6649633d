"""value_and_grad and sync_gradients beyond the table: definitions, weights, states, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import (
    AlreadyReducedError,
    LossError,
    MeshError,
    TreeMismatchError,
    UnboundAxisError,
    UncheckedModelError,
)

WAYS = ["checked", "unchecked", "pmap"]
W = {"w": jnp.float32(2)}


def run(way: str, fn: Callable[..., Any], plan: jaxsync.SyncPlan, params: Any, rows: Any) -> Any:
    """`fn(params, rows of this device)` on every device; the first device's result."""
    axis = plan.data_axes[0]
    if way == "pmap":
        n = plan.num_replicas
        stacked = rows.reshape(n, len(rows) // n, *rows.shape[1:])
        out = jax.pmap(fn, axis_name=axis, in_axes=(None, 0), devices=list(plan.mesh.devices.flat))(
            params, stacked
        )
        return jax.tree.map(lambda x: x[0], out)
    mapped = jax.shard_map(
        fn, mesh=plan.mesh, in_specs=(P(), P(axis)), out_specs=P(), check_vma=way == "checked"
    )
    return jax.jit(mapped)(params, rows)


def plan_of(params: Any, n: int = 4, **config: Any) -> jaxsync.SyncPlan:
    return jaxsync.make_plan(params, jaxsync.make_mesh({"data": n}), config=jaxsync.SyncConfig(**config))


def mean_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(params["w"] * x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("reduce", "loss", "grad"), [("mean", 7.0, 3.5), ("sum", 28.0, 14.0)])
def test_loss_and_gradient_are_those_of_the_whole_batch(way, reduce, loss, grad) -> None:
    plan = plan_of(W, reduce=reduce)
    got = run(way, jaxsync.value_and_grad(mean_loss, plan), plan, W, jnp.arange(8.0))
    assert (float(got[0]), float(got[1]["w"])) == (loss, grad)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("collective", [jax.lax.psum, jax.lax.pmean])
def test_a_loss_reduced_by_the_user_gives_its_own_gradient(way, collective) -> None:
    """The gradient is that of the mean over devices of what loss_fn returns, whatever it did inside."""
    plan = plan_of(W)
    loss_fn = lambda params, x: collective(jnp.sum(params["w"] * x), "data")  # noqa: E731
    loss, grads = run(way, jaxsync.value_and_grad(loss_fn, plan), plan, W, jnp.arange(4.0))
    truth = 6.0 if collective is jax.lax.psum else 1.5
    assert (float(loss), float(grads["w"])) == (2 * truth, truth)


@pytest.mark.parametrize("collective", [jax.lax.psum, jax.lax.pmean])
def test_a_loss_reduced_by_the_user_is_not_added_up_again(collective) -> None:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return collective(jnp.sum(params["w"] * x), "data")

    plan = plan_of(W, reduce="sum")
    with pytest.raises(LossError) as caught:
        run("checked", jaxsync.value_and_grad(loss_fn, plan), plan, W, jnp.arange(4.0))
    assert caught.value.got == "a loss that is equal along data: it was reduced there already"
    assert re.fullmatch(r"loss_fn \(test_grads\.py:\d+\)", caught.value.function)


@pytest.mark.parametrize("way", WAYS)
def test_communication_inside_the_loss_is_differentiated(way) -> None:
    """Each device's loss depends on all devices' rows, as with batch statistics."""
    x = np.arange(8.0, dtype=np.float32)

    def loss_fn(params: Any, rows: jax.Array) -> jax.Array:
        y = params["w"] * rows
        return jnp.mean((y - jax.lax.pmean(y.mean(), "data")) ** 2)

    plan = plan_of(W)
    loss, grads = run(way, jaxsync.value_and_grad(loss_fn, plan), plan, W, jnp.asarray(x))
    assert float(loss) == pytest.approx(4 * x.var(), rel=1e-6)
    assert float(grads["w"]) == pytest.approx(4 * x.var(), rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("reduce", "total"), [("mean", 16 / 7), ("sum", 16.0)])
def test_weights_count_rows_and_not_devices(way, reduce, total) -> None:
    rows = jnp.array([1.0, 1, 2, 2, 3, 3, 4, jnp.nan])  # the last is padding

    def loss_fn(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        real = ~jnp.isnan(x)
        count = real.sum().astype(jnp.float32)
        return (params["w"] * jnp.where(real, x, 0.0)).sum() / count, count

    plan = plan_of(W, reduce=reduce)
    loss, grads = run(way, jaxsync.value_and_grad(loss_fn, plan, weighted=True), plan, W, rows)
    assert float(grads["w"]) == pytest.approx(total, rel=1e-6)
    assert float(loss) == pytest.approx(2 * total, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_device_of_weight_zero_adds_nothing_even_if_it_holds_nan(way) -> None:
    def loss_fn(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = (x >= 0).sum()  # an int is a weight too
        return (params["w"] * jnp.where(x >= 0, x, 0.0)).sum() / count.astype(jnp.float32), count

    plan = plan_of(W)
    step = jaxsync.value_and_grad(loss_fn, plan, weighted=True)
    loss, grads = run(way, step, plan, W, jnp.array([1.0, 2, 3, -1, -1, -1, -1, -1]))
    assert (float(loss), float(grads["w"])) == (4.0, 2.0)
    loss, grads = run(way, step, plan, W, -jnp.ones(8))
    assert (float(loss), float(grads["w"])) == (0.0, 0.0)


@pytest.mark.parametrize("weighted", [False, True])
def test_aux_comes_back_as_each_devices_own(weighted: bool) -> None:
    plan = plan_of(W)

    def loss_fn(params: Any, x: jax.Array) -> Any:
        loss = mean_loss(params, x)
        return ((loss, 1.0) if weighted else loss), {"rows": x}

    step = jaxsync.value_and_grad(loss_fn, plan, has_aux=True, weighted=weighted)
    mapped = jax.shard_map(
        lambda p, x: step(p, x)[0][1], mesh=plan.mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    np.testing.assert_array_equal(mapped(W, jnp.arange(8.0))["rows"], np.arange(8.0))


def test_the_loss_rides_with_the_gradients() -> None:
    plan = plan_of(W)
    step = jaxsync.value_and_grad(mean_loss, plan)
    mapped = jax.shard_map(step, mesh=plan.mesh, in_specs=(P(), P("data")), out_specs=P())
    audit = jaxsync.audit(mapped, W, jnp.arange(8.0))
    assert [c.kind for c in audit.collectives] == ["all-reduce"]
    assert audit.collectives[0].num_operands == 2


MIXED = {
    "bool": jnp.array([True]),
    "empty": jnp.zeros((0, 3)),
    "int": jnp.array([3, 4]),
    "key": jax.random.key(0),
    "none": None,
    "raw": jax.random.PRNGKey(0),
    "w": jnp.float32(2),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_float_passes_through_untouched(way) -> None:
    plan = plan_of(MIXED)
    grads = run(
        way, lambda tree, x: jaxsync.sync_gradients({**tree, "w": x[0]}, plan), plan, MIXED, jnp.arange(4.0)
    )
    assert float(grads["w"]) == 1.5
    assert grads["none"] is None
    for name in ("bool", "empty", "int", "raw"):
        np.testing.assert_array_equal(grads[name], MIXED[name])
    np.testing.assert_array_equal(jax.random.key_data(grads["key"]), jax.random.key_data(MIXED["key"]))


def test_gradients_of_what_is_no_float_are_float0() -> None:
    plan = plan_of(MIXED)
    seen: dict[str, Any] = {}

    def step(params: Any, x: jax.Array) -> jax.Array:
        _, grads = jaxsync.value_and_grad(mean_loss, plan)(params, x)
        seen.update(grads)
        return grads["w"]

    assert float(run("checked", step, plan, MIXED, jnp.arange(4.0))) == 1.5
    assert {name for name in seen if getattr(seen[name], "dtype", None) == jax.dtypes.float0} == {
        "bool",
        "int",
        "key",
        "raw",
    }
    assert seen["empty"].shape == (0, 3)


def test_a_tree_of_another_form_is_matched_by_path() -> None:
    plan = plan_of({"int": jnp.int32(1), "w": jnp.float32(2)})
    fn = lambda tree, x: jaxsync.sync_gradients({"int": None, "w": x[0]}, plan)  # noqa: E731
    assert float(run("checked", fn, plan, W, jnp.arange(4.0))["w"]) == 1.5


@pytest.mark.parametrize(
    ("grads", "problem"),
    [
        (lambda x: {}, "grads['w'] is missing"),
        (lambda x: {"w": x[0], "v": x}, "grads['v'] is not in the plan"),
        (lambda x: {"w": x}, "grads['w'] has shape (1,); wanted ()"),
        (lambda x: {"w": x[0].astype(jnp.int8)}, "grads['w'] has dtype int8; wanted float32"),
        (lambda x: {"w": 1.0}, "grads['w'] is a float, no array"),
    ],
)
def test_gradients_that_do_not_fit_are_named(grads, problem: str) -> None:
    plan = plan_of(W)
    with pytest.raises(TreeMismatchError) as caught:
        run("checked", lambda p, x: jaxsync.sync_gradients(grads(x), plan), plan, W, jnp.arange(4.0))
    assert caught.value.problems == (problem,)


def test_gradients_summed_by_autodiff_are_refused_by_name() -> None:
    plan = plan_of({"b": jnp.float32(0), "w": jnp.float32(2)})

    def step(params: Any, x: jax.Array) -> Any:
        return jaxsync.sync_gradients(jax.grad(lambda p: (p["w"] * x + p["b"]).sum())(params), plan)

    with pytest.raises(AlreadyReducedError) as caught:
        run("checked", step, plan, {"b": jnp.float32(0), "w": jnp.float32(2)}, jnp.arange(8.0))
    assert caught.value.leaves == ("['b']", "['w']")
    assert caught.value.axes == ("data",)


def test_only_the_axis_that_was_reduced_is_named() -> None:
    mesh = jaxsync.make_mesh({"replica": 2, "data": 4})
    config = jaxsync.SyncConfig(axis=("replica", "data"))
    plan = jaxsync.make_plan(W, mesh, config=config)

    def step(x: jax.Array) -> Any:
        return jaxsync.sync_gradients({"w": jax.lax.psum(x[0], "data")}, plan)

    with pytest.raises(AlreadyReducedError) as caught:
        jax.shard_map(step, mesh=mesh, in_specs=P(("replica", "data")), out_specs=P())(jnp.arange(8.0))
    assert caught.value.axes == ("data",)


def test_a_second_sync_is_refused() -> None:
    plan = plan_of(W)

    def twice(params: Any, x: jax.Array) -> Any:
        return jaxsync.sync_gradients(jaxsync.sync_gradients({"w": x[0]}, plan), plan)

    with pytest.raises(AlreadyReducedError):
        run("checked", twice, plan, W, jnp.arange(4.0))


def test_the_remedies_the_refusal_names_work() -> None:
    plan = plan_of(W)

    def step(params: Any, x: jax.Array) -> Any:
        local = jax.lax.pcast(params, ("data",), to="varying")
        return jaxsync.sync_gradients(jax.grad(lambda p: mean_loss(p, x))(local), plan)

    assert float(run("checked", step, plan, W, jnp.arange(8.0))["w"]) == 3.5


def test_unreduced_gradients_are_reduced() -> None:
    plan = plan_of({"b": jnp.float32(0), "w": jnp.float32(2)})

    def step(params: Any, x: jax.Array) -> Any:
        reduced = jax.lax.pcast(params["w"], "data", to="reduced")
        grad = jax.grad(lambda w: (w * x).sum())(reduced)
        assert "data" in jax.typeof(grad).manual_axis_type.unreduced
        return jaxsync.sync_gradients({"w": grad, "b": x[0]}, plan)

    got = run("checked", step, plan, {"b": jnp.float32(0), "w": jnp.float32(2)}, jnp.arange(4.0))
    assert (float(got["w"]), float(got["b"])) == (1.5, 1.5)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sync_gradients", lambda plan: jax.jit(lambda g: jaxsync.sync_gradients(g, plan))(W)),
        ("value_and_grad", lambda plan: jaxsync.value_and_grad(mean_loss, plan)(W, jnp.ones(2))),
    ],
)
def test_outside_a_mesh_the_missing_axis_is_named(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(UnboundAxisError) as caught:
        call(plan_of(W))
    assert caught.value.function == name
    assert caught.value.axes == ("data",)


def test_a_mesh_of_another_size_is_refused() -> None:
    plan, other = plan_of(W), plan_of(W, n=8)
    with pytest.raises(
        MeshError, match="axis 'data' has size 8 where sync_gradients is called, 4 in the plan"
    ):
        run("checked", lambda p, x: jaxsync.sync_gradients({"w": x[0]}, plan), other, W, jnp.arange(8.0))


@pytest.mark.parametrize(
    ("returned", "flags", "got"),
    [
        (lambda x: x, {}, "float32[2]"),
        (lambda x: (x.sum(), 1.0), {}, "a tuple of 2"),
        (lambda x: x.sum(), {"weighted": True}, "float32[]"),
        (lambda x: (x.sum(), 1.0, 2.0), {"has_aux": True}, "a tuple of 3"),
        (lambda x: x.sum().astype(jnp.int32), {}, "int32[]"),
        (lambda x: x.sum().astype(jnp.complex64), {}, "complex64[]"),
        (lambda x: None, {}, "a NoneType"),
        (lambda x: (x.sum(), "much"), {"weighted": True}, "a str"),
        (lambda x: (x.sum(), x.sum().astype(jnp.complex64)), {"weighted": True}, "complex64[]"),
    ],
)
def test_a_loss_that_is_no_loss_is_described(returned, flags, got: str) -> None:
    plan = plan_of(W)
    step = jaxsync.value_and_grad(lambda params, x: returned(params["w"] * x), plan, **flags)
    with pytest.raises(LossError) as caught:
        run("checked", step, plan, W, jnp.arange(8.0))
    assert caught.value.got == got


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("reduce_dtype", [None, "own", "float16"])
def test_float16_means_do_not_overflow_by_the_number_of_devices(reduce, reduce_dtype) -> None:
    tree = {"w": jnp.float16(0)}
    plan = plan_of(tree, reduce=reduce, reduce_dtype=reduce_dtype)
    value = 30000.0 if reduce == "mean" else 15000.0
    rows = jnp.full(4, value, jnp.float16)
    got = run("checked", lambda p, x: jaxsync.sync_gradients({"w": x[0]}, plan), plan, tree, rows)["w"]
    assert float(got) == (30000.0 if reduce == "mean" else 60000.0)
    assert got.dtype == jnp.float16


def test_float16_on_the_wire_is_right_for_weights_too() -> None:
    tree = {"w": jnp.float16(1)}
    plan = plan_of(tree, reduce_dtype="own")
    step = jaxsync.value_and_grad(
        lambda p, x: ((p["w"] * x[0]).astype(jnp.float32), 2.0), plan, weighted=True
    )
    _, grads = run("checked", step, plan, tree, jnp.array([1.0, 2, 3, 6], jnp.float16))
    assert float(grads["w"]) == 3.0


MODEL = {"w1": jnp.full((3, 4), 0.5), "w2": jnp.full((4, 2), 0.25), "b": jnp.ones(2)}
MODEL_SPECS = {"w1": P(None, "model"), "w2": P("model", None), "b": P()}


def two_layers(params: Any, x: jax.Array, total: Callable[[jax.Array], jax.Array]) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"])
    return jnp.mean((total(hidden @ params["w2"]) + params["b"]) ** 2)


def sharded_grads(check_vma: bool) -> Any:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    plan = jaxsync.make_plan(MODEL, mesh, MODEL_SPECS)
    total = lambda y: jax.lax.psum(y, "model")  # noqa: E731
    step = jaxsync.value_and_grad(lambda p, x: two_layers(p, x, total), plan)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(MODEL_SPECS, P("data")),
        out_specs=(P(), MODEL_SPECS),
        check_vma=check_vma,
    )
    x = jnp.arange(24.0).reshape(8, 3) / 10
    return mapped(MODEL, x), jax.value_and_grad(lambda p: two_layers(p, x, lambda y: y))(MODEL)


def test_model_parallel_gradients_equal_the_single_device_ones() -> None:
    (loss, grads), (true_loss, true_grads) = sharded_grads(check_vma=True)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-6)
    for name in MODEL:
        np.testing.assert_allclose(grads[name], true_grads[name], rtol=1e-5)


def test_untyped_communication_over_a_model_axis_is_refused() -> None:
    with pytest.raises(UncheckedModelError) as caught:
        sharded_grads(check_vma=False)
    assert caught.value.axes == ("model",)
    assert caught.value.primitives == ("psum",)


def test_untyped_communication_with_a_rule_of_its_own_is_let_through() -> None:
    @jax.custom_vjp
    def total(y: jax.Array) -> jax.Array:
        return jax.lax.psum(y, "model")

    total.defvjp(lambda y: (total(y), None), lambda _, g: (g,))
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    plan = jaxsync.make_plan(
        {k: MODEL[k] for k in ("w1", "w2")}, mesh, {"w1": P(None, "model"), "w2": P("model")}
    )
    loss_fn = lambda p, x: two_layers({**p, "b": MODEL["b"]}, x, total)  # noqa: E731
    mapped = jax.shard_map(
        jaxsync.value_and_grad(loss_fn, plan),
        mesh=mesh,
        in_specs=(plan.specs, P("data")),
        out_specs=(P(), plan.specs),
        check_vma=False,
    )
    x = jnp.arange(24.0).reshape(8, 3) / 10
    _, grads = mapped({k: MODEL[k] for k in ("w1", "w2")}, x)
    truth = jax.grad(lambda p: two_layers(p, x, lambda y: y))(MODEL)
    for name in grads:
        np.testing.assert_allclose(grads[name], truth[name], rtol=1e-5)


def test_a_forward_rule_does_not_hide_untyped_communication() -> None:
    @jax.custom_jvp
    def total(y: jax.Array) -> jax.Array:
        return jax.lax.psum(y, "model")

    total.defjvp(lambda primals, tangents: (total(*primals), jax.lax.psum(tangents[0], "model")))
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    plan = jaxsync.make_plan({"w": jnp.ones(2)}, mesh, P("model"))
    mapped = jax.shard_map(
        jaxsync.value_and_grad(lambda p, x: total((p["w"] * x.mean()).sum()), plan),
        mesh=mesh,
        in_specs=(plan.specs, P("data")),
        out_specs=(P(), plan.specs),
        check_vma=False,
    )
    with pytest.raises(UncheckedModelError):
        mapped({"w": jnp.ones(2)}, jnp.arange(4.0))


def test_two_data_axes_are_one_reduction() -> None:
    mesh = jaxsync.make_mesh({"replica": 2, "data": 4})
    plan = jaxsync.make_plan(W, mesh, config=jaxsync.SyncConfig(axis=("replica", "data")))
    step = jaxsync.value_and_grad(mean_loss, plan)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(("replica", "data"))), out_specs=P())
    loss, grads = mapped(W, jnp.arange(16.0))
    assert (float(loss), float(grads["w"])) == (15.0, 7.5)
    [collective] = jaxsync.audit(mapped, W, jnp.arange(16.0)).collectives
    assert collective.axes == ("replica", "data")
    assert collective.group_size == 8


def test_a_data_axis_alone_is_reduced_when_another_axis_repeats_the_rows() -> None:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    plan = jaxsync.make_plan(W, mesh, config=jaxsync.SyncConfig(reduce="sum"))
    step = jaxsync.value_and_grad(lambda p, x: (p["w"] * x).sum(), plan)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert float(mapped(W, jnp.arange(4.0))[1]["w"]) == 6.0


def test_axes_that_are_not_manual_stay_sharded_and_move_nothing() -> None:
    """shard_map over the data axis alone: the model axis is the compiler's."""
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    specs = {"b": P("model"), "v": P("model"), "w": P()}
    tree = {"b": jnp.ones(6), "v": jnp.ones(4), "w": jnp.ones(3)}
    plan = jaxsync.make_plan(tree, mesh, specs)
    mapped = jax.jit(
        jax.shard_map(
            lambda g: jaxsync.sync_gradients(jax.tree.map(lambda x: x[0], g), plan),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            axis_names={"data"},
        )
    )
    stacked = {
        name: jax.device_put(
            jnp.arange(4.0)[:, None] * tree[name], jax.sharding.NamedSharding(mesh, P("data", *specs[name]))
        )
        for name in tree
    }
    got = mapped(stacked)
    for name in tree:
        np.testing.assert_array_equal(got[name], 1.5 * np.ones(tree[name].shape))
    assert {c.kind for c in jaxsync.audit(mapped, stacked).collectives} == {"all-reduce"}
