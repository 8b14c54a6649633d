"""What the audit says of steps that are wrong in a known way, and that it says nothing of right ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.audit import AuditWarning, parse_hlo

X = jnp.arange(8.0)
W = jnp.float32(1)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jaxsync.make_mesh({"data": 4, "model": 2})


def mapped(mesh, fn, out=None, rows="data", check_vma=False):
    specs, out = (P(), P(rows)), P() if out is None else out
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma))


def grad(w, x):
    return jax.grad(lambda w: (w * x).sum())(w)


def kinds(audit: jaxsync.Audit) -> list[tuple[str, tuple[str, ...] | None]]:
    return [(warning.kind, warning.axes) for warning in audit.warnings]


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean])
def test_a_gradient_that_autodiff_has_summed_is_not_summed_again(mesh, reduce) -> None:
    step = mapped(mesh, lambda w, x: reduce(grad(w, x), "data"), check_vma=True)
    audit = jaxsync.audit(step, W, X)
    assert audit.count("all-reduce") == 2
    assert kinds(audit) == [("double", ("data",))]
    assert "adds up what was summed over data before: a sum is multiplied" in str(audit)


def scaled(x):
    return 0.5 * lax.psum(x, "data").reshape(1, 2).astype(jnp.float32)


@pytest.mark.parametrize(
    ("fn", "axes"),
    [
        (lambda w, x: lax.psum(scaled(x), "data"), ("data",)),
        (lambda w, x: lax.psum(jnp.tanh(lax.pmean(w * x, "data")), "data"), ("data",)),
        (lambda w, x: lax.psum(lax.psum_scatter(jnp.tile(x, 4), "data", tiled=True), "data"), None),
        (lambda w, x: lax.psum(scaled(x), ("data", "model")), ("data", "model")),
        (
            lambda w, x: lax.psum(lax.all_gather(lax.psum_scatter(jnp.tile(x, 2), "data"), "data"), "data"),
            ("data",),
        ),
    ],
    ids=[
        "scaled",
        "through a function",
        "scattered is summed once",
        "and over more",
        "scattered and gathered",
    ],
)
def test_a_second_sum_is_seen_through_what_lies_between(mesh, fn, axes) -> None:
    found = kinds(jaxsync.audit(mapped(mesh, fn), W, X))
    if axes is None:  # the shards of a sum differ
        assert found == []
    else:
        assert [kind for kind, _ in found] == (["equal"] if "model" in axes else ["double"])
        assert found[0][1] == axes


def test_a_sum_over_an_axis_that_carries_no_rows_is_told(mesh) -> None:
    audit = jaxsync.audit(mapped(mesh, lambda w, x: lax.psum(grad(w, x), ("data", "model"))), W, X)
    assert kinds(audit) == [("equal", ("model",))]
    assert "over data, model adds up what is equal along model: " in audit.warnings[0].what


def test_only_the_operands_that_are_at_fault_are_counted(mesh) -> None:
    def fn(w, x):
        total = lax.psum(x.sum(), "data")
        return lax.psum((total, (w * x).sum(), x.max()), "data")

    [warning] = jaxsync.audit(mapped(mesh, fn), W, X).warnings
    assert warning.kind == "double"
    assert "1 of its 3 operands" in warning.what


def test_what_one_device_computes_for_itself_is_summed_silently(mesh) -> None:
    fn = lambda w, x: lax.psum(w * lax.axis_index("model").astype(w.dtype), "model")  # noqa: E731
    assert jaxsync.audit(mapped(mesh, fn), W, X).warnings == ()


def test_counting_devices_is_no_fault(mesh) -> None:
    fn = lambda w, x: lax.psum(x, "data") / lax.psum(jnp.ones(()), "data")  # noqa: E731
    assert jaxsync.audit(mapped(mesh, fn), W, X).warnings == ()


def test_the_largest_of_equal_values_is_no_fault(mesh) -> None:
    fn = lambda w, x: lax.pmax(lax.psum(x, "data"), "data")  # noqa: E731
    audit = jaxsync.audit(mapped(mesh, fn), W, X)
    assert audit.warnings == ()


@pytest.mark.parametrize("is_wrong", [True, False])
def test_microbatches_reduced_in_a_scan_are_told(mesh, is_wrong: bool) -> None:
    def fn(w, x):
        def body(total, row):
            part = grad(w, row)
            return total + (lax.psum(part, "data") if is_wrong else part), None

        total, _ = lax.scan(body, jnp.zeros(()), x)
        return total if is_wrong else lax.psum(total, "data")

    audit = jaxsync.audit(mapped(mesh, fn), W, X)
    assert kinds(audit) == ([("loop", ("data",))] if is_wrong else [])


def test_a_double_sum_across_the_rounds_of_a_loop_is_told(mesh) -> None:
    def fn(w, x):
        return lax.fori_loop(0, 3, lambda _, total: lax.psum(total, "data") / 4, lax.psum(x, "data"))

    assert kinds(jaxsync.audit(mapped(mesh, fn), W, X)) == [("loop", ("data",)), ("double", ("data",))]


def test_a_loop_whose_length_differs_by_device_makes_its_values_differ(mesh) -> None:
    def fn(w, x):
        last = x.sum().astype(jnp.int32)
        return lax.psum(lax.fori_loop(0, last, lambda _, value: value * 2, w), "data")

    assert jaxsync.audit(mapped(mesh, fn), W, X).warnings == ()


@pytest.mark.parametrize("is_own", [True, False])
def test_a_branch_makes_values_differ_if_devices_take_different_ones(mesh, is_own: bool) -> None:
    def fn(w, x):
        where = x.sum() if is_own else w
        value = lax.cond(where > 3, lambda w: w * 2 + jnp.sin(w), lambda w: w - 1, w)
        return lax.psum(value, "data")

    found = kinds(jaxsync.audit(mapped(mesh, fn), W, X))
    assert found == ([] if is_own else [("equal", ("data",))])


def test_a_step_without_a_reduction_is_told(mesh) -> None:
    audit = jaxsync.audit(mapped(mesh, lambda w, x: w - 0.1 * grad(w, x)), W, X)
    assert kinds(audit) == [("missing", ("data",))]
    assert str(audit) == (
        "no collectives\n"
        "warning: no collective runs over 'data', over which arguments are sharded ([0][1]); a result that "
        "is to be equal on all devices depends on them, and so is another one on each. To fix it: sync the "
        "gradients before they are used: jaxsync.value_and_grad(loss_fn, plan)."
    )


def test_a_leaf_that_is_not_reduced_is_told_though_others_are(mesh) -> None:
    def fn(w, x):
        grads = jax.grad(lambda w: (w["w"] * x + w["v"] * x**2).sum())(w)
        return {"w": lax.pmean(grads["w"], "data"), "v": grads["v"]}

    [warning] = jaxsync.audit(mapped(mesh, fn), {"w": W, "v": W}, X).warnings
    assert (warning.kind, warning.axes) == ("missing", ("data",))
    assert warning.what == (
        "no collective over 'data' lies between arguments that are sharded over it ([0][1]) and results that "
        "are to be equal along it (['v']): they differ by device"
    )


def test_a_sum_made_of_permutes_is_not_taken_for_a_missing_one(mesh) -> None:
    def fn(w, x):
        total, part = w * x, w * x
        for _ in range(3):
            part = lax.ppermute(part, "data", [(i, (i + 1) % 4) for i in range(4)])
            total = total + part
        return total, lax.pmean(x, "data")

    assert jaxsync.audit(mapped(mesh, fn), W, X).warnings == ()


def test_results_that_are_sharded_like_their_rows_need_no_collective(mesh) -> None:
    step = mapped(mesh, lambda w, x: (w * x, w + 1), out=(P("data"), P()))
    assert jaxsync.audit(step, W, X).warnings == ()


def test_pmap_is_read_too() -> None:
    def fn(w, x):
        return lax.psum(lax.psum(w * x, "i") / 8, "i")

    step = jax.pmap(fn, axis_name="i", in_axes=(None, 0))
    assert kinds(jaxsync.audit(step, W, X)) == [("double", ("i",))]


def test_an_argument_that_is_not_used_and_a_constant_confuse_nothing(mesh) -> None:
    table = jnp.asarray(np.random.default_rng(0).normal(size=4096).astype(np.float32))

    def fn(unused, w, x):
        del unused
        return lax.psum((lax.psum(w * x, "data") * table[:2]).sum(), "data")

    specs = (P("data"), P(), P("data"))
    step = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    assert kinds(jaxsync.audit(step, X, W, X)) == [("double", ("data",))]


MODELS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "pmap": {"transform": "pmap"},
    "sharded parameters": {"specs": {"w": P("data"), "b": P()}},
    "sharded optimizer": {"is_sharded": True},
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_train_step_has_no_warning(model: str) -> None:
    options = dict(MODELS[model])
    specs, is_sharded = options.pop("specs", None), options.pop("is_sharded", False)
    params = {"w": jnp.ones((8, 2)), "b": jnp.zeros(2)}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}), specs)
    tx = optax.chain(jaxsync.clip_by_global_norm(1.0, plan), optax.adam(1e-2))
    tx = jaxsync.shard_optimizer(optax.adam(1e-2), plan) if is_sharded else tx

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    step = jaxsync.make_train_step(loss_fn, tx, plan, **options)
    audit = jaxsync.audit(step, step.init(params), np.ones((32, 8), np.float32))
    assert audit.collectives
    assert audit.warnings == ()


@pytest.mark.parametrize("uses_rows", [True, False])
def test_a_leaf_with_a_penalty_alone_is_no_fault_of_a_step_unless_no_leaf_sees_the_batch(
    mesh, uses_rows
) -> None:
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2 if uses_rows else params["w"] ** 2) + jnp.sum(
            params["big"]
        )

    params = {"w": jnp.ones((4, 4)), "big": jnp.ones((256, 256))}  # in buckets of their own
    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), jaxsync.make_plan(params, mesh))
    audit = jaxsync.audit(step, step.init(params), np.ones((16, 4), np.float32))
    assert kinds(audit) == ([] if uses_rows else [("equal", ("data",))])
    assert uses_rows or audit.warnings[0].fix.startswith("see that loss_fn uses the rows of its batch")


def test_a_model_parallel_train_step_has_no_warning(mesh) -> None:
    params = {"w": jnp.ones((8, 2)), "b": jnp.zeros(2)}
    plan = jaxsync.make_plan(params, mesh, {"w": P("model"), "b": P()})

    def loss_fn(params, batch):
        part = lax.axis_index("model") * 4
        rows = lax.dynamic_slice_in_dim(batch, part, 4, axis=1)
        return jnp.mean((lax.psum(rows @ params["w"], "model") + params["b"]) ** 2)

    step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)
    audit = jaxsync.audit(step, step.init(params), np.ones((32, 8), np.float32))
    assert {c.axes for c in audit.collectives} >= {("data",), ("model",)}
    assert audit.warnings == ()


def test_plain_jit_on_a_sharded_batch_has_no_warning(mesh) -> None:
    rows = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, P("data")))
    weights = jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(mesh, P(None, "model")))
    step = jax.jit(lambda w, x: w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w))
    audit = jaxsync.audit(step, weights, rows)
    assert audit.count("all-reduce") >= 1
    assert audit.warnings == ()


def test_a_text_without_its_program_has_the_warnings_of_loops(mesh) -> None:
    fn = lambda w, x: lax.fori_loop(0, 9, lambda _, total: lax.psum(total, "data") / 5, x)  # noqa: E731
    text = mapped(mesh, fn).lower(W, X).compile().as_text()
    assert kinds(parse_hlo(text, mesh)) == [("loop", ("data",))]


def test_a_warning_says_what_there_is_and_what_to_do() -> None:
    warning = AuditWarning(kind="loop", axes=None, what="all-reduce is inside a loop", fix="move it")
    assert str(warning) == "all-reduce is inside a loop. To fix it: move it."


def test_the_short_and_the_html_form_have_the_counts(mesh) -> None:
    audit = jaxsync.audit(mapped(mesh, lambda w, x: w - 0.1 * grad(w, x)), W, X)
    assert repr(audit) == "Audit(no collectives; 0 B; 0 in loops; 1 warning)"
    total = jaxsync.audit(mapped(mesh, lambda w, x: lax.psum(x, "data")), W, X)
    assert repr(total) == "Audit(1 all-reduce; 8 B; 0 in loops; 0 warnings)"
    assert total.counts == {"all-reduce": 1}
    assert "&#x27;data&#x27;" in audit._repr_html_()
    assert "<td>all-reduce</td>" in total._repr_html_()
