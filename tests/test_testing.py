"""The testing kit: every assertion passes what is right, and says by how much the rest is wrong."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync import testing
from jaxsync.errors import (
    ArgumentError,
    ClosedError,
    CollectiveCountError,
    DeletedArrayError,
    DuplicateError,
    FaultMissedError,
    GradientMismatchError,
    LeakError,
    MissingGradientError,
    RecompiledError,
    ReplicasDifferError,
    SetMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    TicketTimeoutError,
    TooFewDevicesError,
)
from jaxsync.testing.comparison import describe_difference

W = {"w": np.float32(1)}
ROWS = np.arange(8, dtype=np.float32)
FOUR = "the number of devices (data=4)"
CPU = [str(device) for device in jax.devices()]


def summed(params: Any, x: Any) -> jax.Array:
    return (params["w"] * x).sum()


def averaged(params: Any, x: Any) -> jax.Array:
    return (params["w"] * x).mean()


def mapped(fn: Any, *, mesh: Mesh | None = None, rows: Any = "data", **kwargs: Any) -> Any:
    """`fn(params, its rows)` on each of 4 devices, as users write it."""
    mesh = jaxsync.make_mesh({"data": 4}) if mesh is None else mesh
    specs = {"in_specs": (P(), P(rows)), "out_specs": P(), **kwargs}
    return jax.jit(jax.shard_map(fn, mesh=mesh, **specs))


def fail(_: Any = None) -> None:
    raise OSError("first")


def findings(*args: Any, **kwargs: Any) -> dict[str, str]:
    """What the factor check says of each leaf."""
    with pytest.raises(GradientMismatchError) as caught:
        testing.assert_matches_single_device(*args, **kwargs)
    return dict(caught.value.leaves)


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"weighted": True}, {"has_aux": True}],
    ids=lambda x: "-".join(x) or "plain",
)
def test_a_train_step_passes_in_all_its_forms(
    transform: Any, options: dict[str, Any], standard_promotion
) -> None:
    params = {"w": np.array([1.0, -2.0], np.float32), "key": jax.random.key(0), "n": np.int32(3), "no": None}
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)

    def loss_fn(params: Any, x: jax.Array) -> Any:
        loss = jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
        extra = {"weighted": jnp.float32(len(x)), "has_aux": jnp.max(x)}
        return (loss, *[extra[name] for name in extra if name in options]) if extra.keys() & options else loss

    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    step = jaxsync.make_train_step(loss_fn, optax.adam(1e-3), plan, transform=transform, **options)
    testing.assert_matches_single_device(loss_fn, params, x, step)


@pytest.mark.parametrize("is_optimizer_sharded", [False, True])
def test_a_step_with_sharded_parameters_or_a_sharded_optimizer_passes(is_optimizer_sharded: bool) -> None:
    params = {"w": np.ones((8, 3), np.float32), "b": np.ones(3, np.float32)}
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    loss_fn = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)  # noqa: E731
    specs = P() if is_optimizer_sharded else {"w": P("data"), "b": P()}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}), specs)
    tx = jaxsync.shard_optimizer(optax.sgd(0.1), plan) if is_optimizer_sharded else optax.sgd(0.1)
    testing.assert_matches_single_device(loss_fn, params, x, jaxsync.make_train_step(loss_fn, tx, plan))


def test_a_train_step_of_another_loss_is_told_by_its_ratio() -> None:
    """8 rows of which the last is masked out: the mean over 8 rows is 7/8 of the mean over real ones."""
    plan = jaxsync.make_plan(W, jaxsync.make_mesh({"data": 8}))
    step = jaxsync.make_train_step(averaged, optax.sgd(0.1), plan)
    truth = lambda params, x: (params["w"] * x).sum() / 7  # noqa: E731
    alike = (
        "ratio 0.875, in all elements alike: another weight, such as of rows that are masked out, or of "
        "microbatches"
    )
    assert findings(truth, W, ROWS, step) == {"loss": alike, "grads['w']": alike}


@pytest.mark.parametrize(("loss_fn", "reduce"), [(summed, lax.psum), (averaged, lax.pmean)])
def test_a_second_sum_of_gradients_is_found(loss_fn: Any, reduce: Any) -> None:
    """Under check_vma autodiff has summed already: 112 for 28, 28 for 7."""
    step = mapped(lambda params, x: reduce(jax.grad(loss_fn)(params, x), "data"))
    assert findings(loss_fn, W, ROWS, step) == {
        "grads['w']": f"ratio 4 = {FOUR}: reduced twice, or a sum where the mean is meant"
    }


def test_the_right_gradients_pass_with_and_without_a_loss() -> None:
    plan = jaxsync.make_plan(W, jaxsync.make_mesh({"data": 4}))
    pair = mapped(jaxsync.value_and_grad(averaged, plan))
    testing.assert_matches_single_device(averaged, W, ROWS, pair)
    testing.assert_matches_single_device(averaged, W, ROWS, lambda params, x: pair(params, x)[1])


def test_the_mean_where_the_sum_is_meant_is_found_in_loss_and_gradients() -> None:
    plan = jaxsync.make_plan(W, jaxsync.make_mesh({"data": 4}))
    quarter = f"ratio 0.25 = 1 / {FOUR}: averaged twice, or the mean where a sum is meant"
    step = mapped(jaxsync.value_and_grad(summed, plan))
    assert findings(summed, W, ROWS, step) == {"loss": quarter, "grads['w']": quarter}


def test_gradients_that_each_device_has_of_its_own_are_found() -> None:
    """The gradient of `psum(loss)` under pmap: [0, 4, 8, 12] where 6 is right."""

    def device_step(params: Any, x: jax.Array) -> Any:
        return jax.grad(lambda params: lax.psum(params["w"] * x, "data"))(params)

    pmapped = jax.pmap(device_step, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:4])
    assert findings(summed, W, np.arange(4, dtype=np.float32), pmapped) == {
        "grads['w']": "each device has its own, not reduced: ratios 0, 0.6667, 1.333, 2"
    }


def test_equal_gradients_with_a_leading_dim_of_devices_pass() -> None:
    plan = jaxsync.make_plan(W, jaxsync.make_mesh({"data": 4}))
    fn = jaxsync.value_and_grad(averaged, plan)
    pmapped = jax.pmap(fn, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:4])
    step = lambda params, x: pmapped(params, x.reshape(4, -1))  # noqa: E731
    testing.assert_matches_single_device(averaged, W, ROWS, step)


def test_a_sum_over_an_axis_that_carries_no_batch_is_found_by_its_name() -> None:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    step = mapped(
        lambda params, x: lax.psum(jax.grad(summed)(params, x), ("data", "model")), mesh=mesh, check_vma=False
    )
    twice = "the number of devices along 'model' (model=2): reduced twice, or a sum where the mean is meant"
    assert findings(summed, W, ROWS, step) == {"grads['w']": f"ratio 2 = {twice}"}


def test_a_sum_over_all_axes_after_one_over_all_is_the_number_of_all_devices() -> None:
    mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    step = mapped(
        lambda params, x: lax.psum(jax.grad(summed)(params, x), ("data", "model")),
        mesh=mesh,
        rows=("data", "model"),
    )
    eight = "the number of devices (data=4, model=2): reduced twice, or a sum where the mean is meant"
    assert findings(summed, W, ROWS, step) == {"grads['w']": f"ratio 8 = {eight}"}


def test_clipping_by_the_norm_of_a_device_is_found() -> None:
    """A norm of one device's shard of w: other replicas of b, another factor for each half of w."""
    mesh = jaxsync.make_mesh({"data": 2, "model": 2})
    params = {"w": np.arange(4, dtype=np.float32), "b": np.float32(1)}
    plan = jaxsync.make_plan(params, mesh, {"w": P("model"), "b": P()})
    loss = lambda params, x: (params["w"] ** 2).sum() * x.mean() + params["b"] * x.mean()  # noqa: E731
    wrong, right = optax.clip_by_global_norm(1.0), jaxsync.clip_by_global_norm(1.0, plan)

    def step(tx: Any) -> Any:
        def device_step(params: Any, x: jax.Array) -> Any:
            grads = lax.pmean(jax.grad(loss)(params, x), "data")
            return tx.update(grads, tx.init(params))[0]

        specs = {"w": P("model"), "b": P()}
        return mapped(device_step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check_vma=False)

    then = lambda grads: wrong.update(grads, wrong.init(grads))[0]  # noqa: E731
    testing.assert_matches_single_device(loss, params, ROWS, step(right), then=then)
    found = findings(loss, params, ROWS, step(wrong), then=then)
    assert found["grads['b']"] == (
        f"{CPU[0]} and {CPU[1]} hold different values: not reduced, or not on all devices"
    )
    assert found["grads['w']"] == "3 of 4 elements differ, ratios from 1.037 to 3.376"


def test_five_microbatches_reduced_inside_the_loop_are_found_twice() -> None:
    params, rows = {"w": np.zeros(3, np.float32)}, np.arange(120, dtype=np.float32).reshape(40, 3)
    loss = lambda params, x: (x @ params["w"]).mean()  # noqa: E731

    def device_step(params: Any, x: jax.Array) -> Any:
        def body(total: Any, x: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, lax.pmean(jax.grad(loss)(params, x), "data")), None

        total, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, params), x.reshape(5, 2, 3))
        return jax.tree.map(lambda g: g / 5, total)

    step = mapped(device_step)
    assert findings(loss, params, rows, step) == {
        "grads['w']": f"ratio 4 = {FOUR}: reduced twice, or a sum where the mean is meant"
    }
    with pytest.raises(CollectiveCountError) as caught:
        testing.assert_collectives(step, (params, rows), all_reduce=1)
    assert caught.value.problems == (
        "all_reduce: has 2; wanted 1",
        "2 in a loop: allow that with in_loop=True",
    )
    testing.assert_collectives(step, (params, rows), all_reduce=2, in_loop=True)


def test_the_whole_text_names_eight_leaves_and_a_count() -> None:
    params = [np.float32(1) for _ in range(10)]
    loss = lambda params, x: sum(params) * x.sum()  # noqa: E731
    with pytest.raises(AssertionError) as caught:
        testing.assert_matches_single_device(loss, params, ROWS, mapped(jax.grad(loss), check_vma=False))
    lines = str(caught.value).splitlines()
    assert lines[0] == "10 of 10 values differ from what one device computes."
    assert (
        lines[1]
        == f"  - grads[0]: {CPU[0]} and {CPU[1]} hold different values: not reduced, or not on all devices"
    )
    assert lines[9] == "  - and 2 more"
    assert lines[10].startswith("To fix it: reduce every gradient once, over the axes that carry the batch")


def test_leaves_that_are_missing_or_of_another_shape_are_named() -> None:
    params = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    loss = lambda params, x: ((params["a"] + params["b"]) * x.sum()).sum()  # noqa: E731
    step = lambda params, x: {"a": np.full((3, 4), 28.0, np.float32)}  # noqa: E731
    assert findings(loss, params, ROWS, step) == {
        "grads['a']": "has shape (3, 4); wanted (2,)",
        "grads['b']": "is missing from what step returned",
    }


@pytest.mark.parametrize(
    ("params", "grads"),
    [
        ((1.0, 2.0), lambda g: g),
        ((1.0, 2.0), lambda g: (0.0, g)),
        ([1.0], lambda g: (0.0, g)),
        (1.0, lambda g: (0.0, g)),
    ],
)
def test_a_loss_before_the_gradients_is_told_from_a_tree_of_two(params: Any, grads: Any) -> None:
    params = jax.tree.map(np.float32, params)
    loss = lambda params, x: sum(jax.tree.leaves(params)) * x.sum()  # noqa: E731
    right = jax.tree.map(lambda _: np.float32(28), params)
    step = lambda params, x: grads(right)  # noqa: E731
    if grads(right) is right:
        testing.assert_matches_single_device(loss, params, ROWS, step)
    else:
        assert findings(loss, params, ROWS, step) == {"loss": "ratio 0: nothing of it arrives"}


def test_a_train_step_on_one_device_shows_nothing_unless_that_is_meant() -> None:
    plan = jaxsync.make_plan(W, jaxsync.make_mesh({"data": 1}))
    step = jaxsync.make_train_step(averaged, optax.sgd(0.1), plan)
    with pytest.raises(TooFewDevicesError) as caught:
        testing.assert_matches_single_device(averaged, W, ROWS, step)
    assert (caught.value.subject, caught.value.found, caught.value.wanted) == ("the mesh of the step", 1, 2)
    assert caught.value.allow == "pass min_devices=1"
    testing.assert_matches_single_device(averaged, W, ROWS, step, min_devices=1)


def test_a_function_that_never_reduces_does_not_pass_on_one_device() -> None:
    step = mapped(jax.value_and_grad(averaged), mesh=jaxsync.make_mesh({"data": 1}), check_vma=False)
    with pytest.raises(TooFewDevicesError, match="what step returned is on 1 device; wanted 2 or more"):
        testing.assert_matches_single_device(averaged, W, ROWS, step)
    testing.assert_matches_single_device(averaged, W, ROWS, step, min_devices=1)
    wrong = lambda params, x: jax.tree.map(lambda g: 3 * g, step(params, x)[1])  # noqa: E731
    assert findings(averaged, W, ROWS, wrong)["grads['w']"].startswith("ratio 3, in all elements alike")


def test_more_devices_can_be_demanded() -> None:
    pair = mapped(jaxsync.value_and_grad(averaged, jaxsync.make_plan(W, jaxsync.make_mesh({"data": 4}))))
    testing.assert_matches_single_device(averaged, W, ROWS, pair, min_devices=4)
    with pytest.raises(TooFewDevicesError, match="is on 4 devices; wanted 8 or more\\.\n"):
        testing.assert_matches_single_device(averaged, W, ROWS, pair, min_devices=8)


def test_a_block_can_decorate_a_function_which_can_be_called_again() -> None:
    double = jax.jit(lambda x: 2 * x)
    calls = [jax.device_put(ROWS), jax.device_put(ROWS), jax.device_put(ROWS[:5])]
    double(calls[0])
    call = testing.no_recompile()(double)
    np.testing.assert_array_equal(call(calls[0]), call(calls[1]))
    with pytest.raises(RecompiledError):
        call(calls[2])


def test_a_step_that_is_no_function_is_refused() -> None:
    with pytest.raises(ArgumentError, match="wanted a TrainStep, or a function"):
        testing.assert_matches_single_device(summed, W, ROWS, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("got", "want", "text"),
    [
        ([1.0, 2.00001], [1.0, 2.0], None),
        ([2.0, 1e-6], [2.0, 0.0], None),
        ([16.0, 32.0], [1.0, 2.0], f"ratio 16 = the square of {FOUR}: reduced three times"),
        ([-1.0, -2.0], [1.0, 2.0], "ratio -1: the sign is turned"),
        ([0.0, 0.0], [1.0, 2.0], "ratio 0: nothing of it arrives"),
        ([1.0, 2.0], [0.0, 0.0], "not zero, where one device computes zero"),
        ([np.nan, 2.0], [1.0, 2.0], "1 of 2 elements are NaN or infinite; on one device none"),
        ([np.nan, 2.0], [np.nan, 2.0], None),
        ([np.inf, 4.0], [np.nan, 1.0], f"ratio 4 = {FOUR}: reduced twice, or a sum where the mean is meant"),
        ([1.0, 0.0, 4.0], [1.0, 0.0, 2.0], "1 of 3 elements differ, ratios from 1 to 2"),
        ([4j, 8.0], [1j, 2.0], f"ratio 4 = {FOUR}: reduced twice, or a sum where the mean is meant"),
        ([1j, 8.0], [1j, 2.0], "1 of 2 elements differ"),
        ([], [], None),
    ],
)
def test_each_kind_of_difference_has_its_words(got: list[Any], want: list[Any], text: str | None) -> None:
    kind = np.complex128 if any(isinstance(x, complex) for x in got) else np.float64
    found = describe_difference(
        np.array(got, kind), np.array(want, kind), rtol=1e-4, atol=1e-7, axes={"data": 4}
    )
    assert found == text


def test_gradients_that_the_step_would_skip_are_compared_too(standard_promotion) -> None:
    params = {"bad": np.ones(1, np.float32), "w": np.float32(1)}

    def loss_fn(params: Any, x: Any) -> jax.Array:
        return averaged(params, x) + jnp.sqrt(params["bad"] - 1).sum()  # which has an infinite gradient

    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 4}))
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)
    assert not bool(step(step.init(params), ROWS)[1]["finite"])
    testing.assert_matches_single_device(loss_fn, params, ROWS, step)
    doubled = findings(lambda params, x: loss_fn(params, 2 * x), params, ROWS, step)
    assert doubled.keys() == {"loss", "grads['w']"}
    assert doubled["grads['w']"].startswith("ratio 0.5")


def test_a_step_that_sends_bfloat16_passes_and_a_factor_in_it_is_seen() -> None:
    """The gradients of devices cancel: numbers near 100, rounded by up to 0.25, have a mean near 0."""
    rng = np.random.default_rng(0)
    x = np.repeat([100.0, -100.0], 8)[:, None] + rng.normal(size=(16, 4))
    params = {"w": np.ones(4, np.float32), "v": np.ones(4, np.float32)}
    loss = lambda params, x: ((x @ params["w"]) + 3 * params["v"].sum()).mean()  # noqa: E731
    plan = jaxsync.make_plan(
        params, jaxsync.make_mesh({"data": 8}), config=jaxsync.SyncConfig(wire_dtype="bfloat16")
    )
    step = jaxsync.make_train_step(loss, optax.sgd(0.1), plan)
    testing.assert_matches_single_device(loss, params, x.astype(np.float32), step)
    half = lambda params, x: ((x @ params["w"]) + 1.5 * params["v"].sum()).mean()  # noqa: E731
    found = findings(half, params, x.astype(np.float32), step)
    assert found["grads['v']"].startswith("ratio 2, in all elements alike")


def low_loss(params: Any, x: jax.Array) -> jax.Array:
    """A bfloat16 model with a float32 loss, and a bias that its softmax does not depend on."""
    logits = jnp.tanh(x @ params["w"]) * params["g"] + params["shift"]
    return -jax.nn.log_softmax(logits)[:, 0].mean().astype(jnp.float32)


def test_a_model_in_bfloat16_passes_and_a_wrong_leaf_of_it_does_not() -> None:
    rng = np.random.default_rng(1)
    shapes = {"w": (8, 5), "g": (5,), "shift": ()}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(32, 8)), jnp.bfloat16)
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    loss, right = mapped(jaxsync.value_and_grad(low_loss, plan), mesh=plan.mesh)(params, x)
    testing.assert_matches_single_device(low_loss, params, x, lambda params, x: (loss, right))
    for leaf, factor in (("w", 8), ("g", 0)):
        wrong = {**right, leaf: right[leaf] * factor}
        assert list(findings(low_loss, params, x, lambda params, x, wrong=wrong: wrong)) == [
            f"grads['{leaf}']"
        ]


@pytest.mark.parametrize("factor", [8, 0, 1])
def test_a_factor_is_seen_in_a_leaf_whose_gradients_are_far_smaller_than_others(factor: int) -> None:
    params = {"w": jnp.ones(4, jnp.bfloat16), "v": jnp.zeros(4, jnp.bfloat16)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        w, v = params["w"].astype(jnp.float32), params["v"].astype(jnp.float32)
        return (x @ w).mean() ** 2 + 1e-3 * v.sum()

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)(params, x)
        return {**grads, "v": grads["v"] * factor}

    x = jnp.ones((16, 4))
    if factor == 1:
        testing.assert_matches_single_device(loss, params, x, step, min_devices=1)
    else:
        assert findings(loss, params, x, step)["grads['v']"].startswith(f"ratio {factor}")


def test_float32_parameters_of_a_model_that_computes_in_bfloat16_pass() -> None:
    params = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)}
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        out = jnp.tanh(x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16))
        return (out**2).mean().astype(jnp.float32)

    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    testing.assert_matches_single_device(loss, params, x, jaxsync.make_train_step(loss, optax.sgd(0.1), plan))


def test_parameters_and_batches_that_were_donated_are_named() -> None:
    gone = jnp.ones(2)
    gone.delete()
    for params, x, name in (({"w": gone}, ROWS, "params['w']"), (W, gone, "batch")):
        with pytest.raises(DeletedArrayError) as caught:
            testing.assert_matches_single_device(summed, params, x, mapped(jax.grad(summed)))
        assert caught.value.leaves == (name,)


def test_collectives_are_counted_by_kind() -> None:
    step = mapped(lambda params, x: lax.psum(lax.all_gather(x, "data", tiled=True), "data"), check_vma=False)
    assert testing.count_collectives(step, W, ROWS) == {"all_reduce": 1, "all_gather": 1}
    testing.assert_collectives(step, (W, ROWS), all_reduce=1, all_gather=1)
    with pytest.raises(AssertionError) as caught:
        testing.assert_collectives(step, (W, ROWS), all_reduce=2)
    text = str(caught.value)
    assert "  - all_reduce: has 1; wanted 2\n  - all_gather: has 1; wanted 0\n" in text
    table = text.split("Its collectives:\n")[1].splitlines()
    assert sorted(line.split()[:2] for line in table[2:4]) == [["all-gather", "data"], ["all-reduce", "data"]]


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a kind = all_sum; wanted one of all_reduce, reduce_scatter"):
        testing.assert_collectives(lambda x: x, (ROWS,), all_sum=1)


def test_replicas_that_differ_are_named() -> None:
    mesh = jaxsync.make_mesh({"data": 4})
    pieces = [jax.device_put(np.float32(5 if i else 1), device) for i, device in enumerate(mesh.devices.flat)]
    w = jax.make_array_from_single_device_arrays((), NamedSharding(mesh, P()), pieces)
    testing.assert_replicas_equal({"b": jax.device_put(ROWS, NamedSharding(mesh, P())), "name": "no array"})
    with pytest.raises(AssertionError, match=rf"  - tree\['w'\]: {CPU[0]} and {CPU[1]} differ") as caught:
        testing.assert_replicas_equal({"w": w})
    assert isinstance(caught.value, ReplicasDifferError)


def test_what_compiles_in_a_block_is_named() -> None:
    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    short, long = jax.device_put(ROWS), jax.device_put(np.ones(9, np.float32))
    double(short)
    with testing.no_recompile():
        double(short)
    with pytest.raises(RecompiledError) as caught, testing.no_recompile():
        double(long)
    assert caught.value.functions == ("jit(double)",)
    with pytest.raises(OSError, match="first"), testing.no_recompile():
        fail(jax.jit(lambda x: x + 3)(short))


def test_a_train_step_compiles_once() -> None:
    plan = jaxsync.make_plan(W, jaxsync.make_mesh({"data": 8}))
    step = jaxsync.make_train_step(averaged, optax.sgd(0.1), plan)
    state, _ = step(step.init(W), ROWS)
    with testing.no_recompile():
        for _ in range(3):
            state, _ = step(state, ROWS)


PARAMS = {"w": np.zeros(2, np.float32), "b": np.zeros((), np.float32)}


@pytest.fixture
def client() -> Any:
    made = start()
    yield made
    made.close()


@pytest.fixture
def hasty() -> Any:
    """A client that is quick to give up: for steps that are never complete."""
    made = start(jaxsync.SyncConfig(timeout_s=0.3, stall_warning_s=0.2))
    yield made
    made.close()


def start(config: Any = None) -> Any:
    client = jaxsync.SyncClient(jaxsync.make_mesh({"data": 2}), config)
    client.register_sync_parameters(PARAMS)
    return client


def grads(client: Any, device: int) -> Any:
    return jax.device_put(
        jax.tree.map(lambda x: x + np.float32(device), PARAMS), client.mesh.devices.flat[device]
    )


def sync(client: Any) -> list[Any]:
    """One step, from one thread: the tickets of both devices."""
    for device in (0, 1):
        client.submit_gradient_sync(device, grads(client, device))
    return [client.submit_sync_collective(device) for device in (0, 1)]


def sync_one(client: Any, device: int) -> Any:
    client.submit_gradient_sync(device, grads(client, device))
    return client.submit_sync_collective(device)


def test_a_client_without_faults_is_as_the_client(client) -> None:
    with testing.inject_faults(client) as faulty:
        for _ in range(2):
            results = [ticket.wait(60) for ticket in sync(faulty)]
        assert [float(tree["b"]) for tree in results] == [0.5, 0.5]
        assert faulty.statistics()["steps"] == 2
        assert faulty.plan is client.plan


@pytest.mark.parametrize(("leaf", "missing"), [(None, ("['b']", "['w']")), ("['w']", ("['w']",))])
def test_a_lost_gradient_is_missing_for_all(client, leaf: str | None, missing: tuple[str, ...]) -> None:
    with testing.inject_faults(client, testing.Drop(device=1, step=1, leaf=leaf)) as faulty:
        [ticket.wait(60) for ticket in sync(faulty)]
        for device in (0, 1):
            faulty.register_sync_parameters(PARAMS, device=device)
        for ticket in sync(faulty):
            with pytest.raises(MissingGradientError) as caught:
                ticket.wait(60)
            assert (caught.value.device, caught.value.leaves) == (CPU[1], missing)


def test_a_lost_leaf_that_is_handed_over_by_its_path_is_missing(client) -> None:
    with testing.inject_faults(client, testing.Drop(device=1, step=0, leaf="['b']")) as faulty:
        faulty.submit_gradient_sync(0, grads(client, 0))
        for name in ("w", "b"):
            faulty.submit_gradient_sync(1, f"['{name}']", grads(client, 1)[name])
        tickets = [faulty.submit_sync_collective(device) for device in client.mesh.devices.flat]
        with pytest.raises(MissingGradientError, match=r"grads\['b'\]"):
            tickets[0].wait(60)


def test_a_lost_sync_is_a_timeout_for_all_the_lost_device_included(hasty) -> None:
    with testing.inject_faults(hasty, testing.Drop(device=1, step=0, call="sync")) as faulty:
        for ticket in sync(faulty):
            with pytest.raises(SyncTimeoutError, match=f"{CPU[1]} has not synced"):
                ticket.wait(60)


def test_the_ticket_of_a_lost_sync_can_be_awaited(hasty) -> None:
    async def wait(ticket: Any) -> None:
        with pytest.raises(SyncTimeoutError):
            await ticket

    with testing.inject_faults(hasty, testing.Drop(device=1, step=0, call="sync")) as faulty:
        asyncio.run(wait(sync(faulty)[1]))


def test_a_lost_announcement_is_a_mismatch(client) -> None:
    with testing.inject_faults(client, testing.Drop(device=1, step=0, call="register")) as faulty:
        for device in (0, 1):
            part = {"w": PARAMS["w"]}
            assert faulty.register_sync_parameters(part, device=device) is part
        faulty.submit_gradient_sync(0, {"w": grads(client, 0)["w"]})
        with pytest.raises(SetMismatchError):
            faulty.submit_gradient_sync(1, {"w": grads(client, 1)["w"]})


def test_what_is_delayed_waits_for_its_release() -> None:
    client = start()
    with testing.inject_faults(client, testing.Delay(device=1, step=0)) as faulty:
        tickets = sync(faulty)
        with pytest.raises(TicketTimeoutError):
            tickets[1].wait(0.01)
        assert not tickets[0].done()
        assert f"{CPU[1]} has not synced, nor handed over the gradients of ['b'], ['w']" in client.describe()
        faulty.release()
        assert [float(ticket.wait(60)["b"]) for ticket in tickets] == [0.5, 0.5]
        assert [float(ticket.wait(60)["b"]) for ticket in sync(faulty)] == [0.5, 0.5]
    client.close()


def test_a_long_wait_for_a_held_sync_asks_the_client_once_at_a_time() -> None:
    client, gate, entered = start(), threading.Event(), threading.Event()
    client.defer(lambda: (entered.set(), gate.wait(60)))
    entered.wait(60)
    with testing.inject_faults(client, testing.Delay(device=1, step=0)) as faulty:
        held = sync(faulty)[1]
        for _ in range(20):
            assert not held.done()
        assert "\n2 callbacks wait\n" in client.describe()
        gate.set()
    held.wait(60)
    client.close()


def test_what_is_never_released_is_a_timeout_and_then_no_work_for_the_client(hasty) -> None:
    with testing.inject_faults(hasty, testing.Delay(device=1, step=0, call="sync")) as faulty:
        for ticket in sync(faulty):
            with pytest.raises(SyncTimeoutError):
                ticket.wait(60)
        with pytest.raises(SyncTimeoutError):
            faulty.release()


def test_what_is_held_at_the_end_of_the_block_is_handed_over() -> None:
    client = start()
    with testing.inject_faults(client, testing.Delay(device=0, step=0)) as faulty:
        tickets = sync(faulty)
    assert [float(ticket.wait(60)["b"]) for ticket in tickets] == [0.5, 0.5]
    client.close()


def test_a_closed_client_answers_the_ticket_of_a_held_sync() -> None:
    client = start()
    with testing.inject_faults(client, testing.Delay(device=0, step=0)) as faulty:
        tickets = sync(faulty)
        client.close()
        for ticket in tickets:
            with pytest.raises(ClosedError):
                ticket.wait(60)


@pytest.mark.parametrize("call", ["submit", "register"])
def test_a_doubled_call_is_refused_to_its_caller_alone(client, call: Any) -> None:
    with testing.inject_faults(client, testing.Duplicate(device=1, step=0, call=call)) as faulty:
        faulty.register_sync_parameters(PARAMS, device=0)
        if call == "register":
            with pytest.raises(DuplicateError):
                faulty.register_sync_parameters(PARAMS, device=1)
        faulty.submit_gradient_sync(0, grads(client, 0))
        if call == "submit":
            with pytest.raises(DuplicateError):
                faulty.submit_gradient_sync(1, grads(client, 1))
        else:
            faulty.submit_gradient_sync(1, grads(client, 1))
        tickets = [faulty.submit_sync_collective(device) for device in (0, 1)]
        assert [float(ticket.wait(60)["b"]) for ticket in tickets] == [0.5, 0.5]


@pytest.mark.parametrize("call", ["register", "submit", "sync"])
def test_a_device_that_raises_reaches_the_others_through_abort(client, call: Any) -> None:
    fault = testing.Raise(device=1, step=1, call=call, error=MemoryError("device 1"))
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work(faulty: Any, device: int) -> None:
        try:
            for _ in range(2):
                faulty.register_sync_parameters(PARAMS, device=device)
                faulty.submit_gradient_sync(device, grads(client, device))
                faulty.submit_sync_collective(device).wait(60)
        except MemoryError as error:
            faulty.abort(error, device)
            answers.put(error)
        except SyncFailedError as error:
            answers.put(error)

    with testing.inject_faults(client, fault) as faulty:
        threads = [threading.Thread(target=work, args=(faulty, device)) for device in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = {type(error): error for error in (answers.get_nowait(), answers.get_nowait())}
    assert found[MemoryError] is fault.error
    assert found[SyncFailedError].__cause__ is fault.error
    assert found[SyncFailedError].devices == (CPU[1],)


def test_a_fault_that_never_struck_is_told_and_does_not_hide_an_error(client) -> None:
    never = testing.Drop(device=1, step=5, call="sync")
    told = pytest.raises(FaultMissedError, match="  - Drop of sync by device 1 in step 5")
    with told, testing.inject_faults(client, never) as faulty:
        [ticket.wait(60) for ticket in sync(faulty)]
    with pytest.raises(OSError, match="first"), testing.inject_faults(client, never):
        fail()


def test_a_block_that_leaves_nothing_passes() -> None:
    with testing.no_leaks(start) as client:
        thread = threading.Thread(target=lambda: [ticket.wait(60) for ticket in sync(client)])
        thread.start()
        thread.join()
        sync(client)  # nobody waits, but nobody would have to wait for ever
        client.defer(lambda x: None, jnp.ones(2))
    assert client.is_closed


def test_a_step_that_nobody_completes_is_a_leak() -> None:
    with pytest.raises(LeakError) as caught, testing.no_leaks(start) as client:
        sync_one(client, 0)
    assert caught.value.leaks == (
        f"step 0, in which {CPU[0]} has synced: {CPU[1]} has not synced, nor handed over the gradients of "
        "['b'], ['w']",
    )


def test_a_thread_that_still_runs_is_a_leak() -> None:
    ends = threading.Event()

    def work() -> None:
        ends.wait()

    class Worker(threading.Thread):
        def run(self) -> None:
            ends.wait()

    threads = [
        threading.Thread(target=work, name="device-1", daemon=True),
        Worker(name="device-2", daemon=True),
    ]
    with pytest.raises(LeakError) as caught, testing.no_leaks(start):
        [thread.start() for thread in threads]
    ends.set()
    for thread in threads:
        thread.join()
    lines = [fn.__code__.co_firstlineno for fn in (work, Worker.run)]
    assert caught.value.leaks == (
        f"thread 'device-1' still runs: work (test_testing.py:{lines[0]})",
        f"thread 'device-2' still runs: run (test_testing.py:{lines[1]})",
    )
    assert (caught.value.kinds, caught.value.others) == (("threads",), ("tickets", "arrays"))


HISTORY: list[Any] = []


def test_an_array_that_lives_on_is_a_leak_and_its_holder_is_named() -> None:
    with pytest.raises(LeakError) as caught, testing.no_leaks(start) as client:
        HISTORY.append({"loss": sync(client)[0].wait(60)["w"]})
    assert caught.value.leaks == (f"array float32[2] on {CPU[0]}, held by {__name__}.HISTORY",)
    assert (caught.value.kinds, caught.value.others) == (("arrays",), ("threads", "tickets"))
    kept = lambda: HISTORY  # noqa: E731
    with testing.no_leaks(start, kept=kept):
        HISTORY.append(jnp.ones(3))
    with testing.no_leaks(start, checks=("threads", "tickets")):
        HISTORY.append(jnp.ones(3))
    with pytest.raises(OSError, match="first"), testing.no_leaks(start):
        fail(HISTORY.append(jnp.ones(3)))
    HISTORY.clear()


def test_a_check_that_does_not_exist_is_refused() -> None:
    refused = pytest.raises(ArgumentError, match="checks = files; wanted of threads, tickets, arrays")
    with refused, testing.no_leaks(start, checks=["files"]):
        fail()


def test_importing_jaxsync_does_not_import_the_kit() -> None:
    code = "import sys, jaxsync; sys.exit(bool({'jaxsync.testing', 'pytest'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
