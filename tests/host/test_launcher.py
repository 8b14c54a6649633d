"""The window, its witnesses, and loops that await nothing."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import DeletedArrayError, DispatchError
from jaxsync.host.launcher import Launcher, find_witness, process_launcher, resolve_window


def collective(donate: bool = False):
    mesh = jaxsync.make_mesh({"data": 8})
    return jax.jit(
        jax.shard_map(
            lambda x: x + jax.lax.pmean(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data")
        ),
        donate_argnums=(0,) if donate else (),
    )


def test_a_guarded_function_returns_what_the_function_returns() -> None:
    fn = collective()
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(jaxsync.guard_dispatch(fn)(x), fn(x))


def test_no_more_than_the_window_is_in_flight() -> None:
    launcher, program = Launcher(), collective()
    x = jnp.arange(8.0)
    seen = []
    for _ in range(20):
        launcher.launch(lambda: program(x), 3, lambda out: (out,))
        seen.append(launcher.num_in_flight)
    assert seen == [1, 2] + [3] * 18
    launcher.drain()
    assert launcher.num_in_flight == 0


def test_without_a_window_nothing_is_kept() -> None:
    launcher = Launcher()
    launcher.launch(lambda: jnp.ones(3), None, lambda out: (out,))
    assert launcher.num_in_flight == 0


def test_a_program_without_a_sure_witness_is_awaited_before_the_next() -> None:
    launcher = Launcher()
    outputs = [jnp.ones(2), jnp.ones(3)]
    for _ in range(3):
        launcher.launch(lambda: outputs, 8, tuple)
        assert launcher.num_in_flight == 1


@pytest.mark.parametrize("all_donated", [True, False])
def test_donated_witnesses_are_waited_for_through_later_programs(all_donated: bool) -> None:
    launcher, program = Launcher(), collective(donate=True)
    x = program(jnp.arange(8.0))
    for _ in range(50):
        x = launcher.launch(lambda x=x: program(x), 4, lambda out: (out,))
        assert launcher.num_in_flight <= 4
    if all_donated:
        program(x)
    launcher.drain()
    assert launcher.num_in_flight == 0


def test_the_witness_is_the_smallest_output_that_no_input_looks_like() -> None:
    params, batch = jnp.ones(5), jnp.ones(4)
    loss, grads = jnp.ones(()), jnp.ones(7)
    assert find_witness({"p": params, "l": loss, "g": grads}, (params, batch)) == (loss,)
    same = find_witness([params, batch], (params, batch))
    assert [id(x) for x in same] == [id(params), id(batch)]
    assert find_witness([None, "x", 3.0], (params,)) == ()


def test_a_forwarded_input_is_never_the_only_witness() -> None:
    """JAX hands an output that is an input back at once, ready, whatever the program still does."""
    fn = jax.jit(lambda counter, x: (counter, x * 2))
    counter, x = jnp.zeros(()), jnp.ones(8)
    witness = find_witness(fn(counter, x), (counter, x))
    assert {array.shape for array in witness} == {(), (8,)}


def test_inside_a_trace_it_is_the_function_itself() -> None:
    guarded = jaxsync.guard_dispatch(collective())
    process_launcher().drain()
    outer = jax.jit(lambda x: guarded(x) * 2)
    np.testing.assert_array_equal(outer(jnp.arange(8.0)), 2 * collective()(jnp.arange(8.0)))
    assert process_launcher().num_in_flight == 0


def test_a_guarded_function_inside_another_does_not_lock_itself_out() -> None:
    inner = jaxsync.guard_dispatch(collective())
    outer = jaxsync.guard_dispatch(jax.jit(lambda x: inner(x) * 2))
    np.testing.assert_array_equal(outer(jnp.arange(8.0)), 2 * collective()(jnp.arange(8.0)))


def test_an_exception_leaves_the_launcher_usable() -> None:
    def fail(x: jax.Array) -> jax.Array:
        raise KeyError("x")

    with pytest.raises(KeyError):
        jaxsync.guard_dispatch(fail)(jnp.ones(2))
    np.testing.assert_array_equal(jaxsync.guard_dispatch(jax.jit(lambda x: x + 1))(jnp.ones(2)), [2, 2])


def test_an_argument_that_was_donated_is_named() -> None:
    guarded = jaxsync.guard_dispatch(collective(donate=True))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(jaxsync.make_mesh({"data": 8}), P("data")))
    guarded(x)
    with pytest.raises(DeletedArrayError) as caught:
        guarded(x)
    assert caught.value.leaves == ("args[0]",)


def test_it_keeps_name_doc_and_lowering() -> None:
    @jax.jit
    def named(x: jax.Array) -> jax.Array:
        """Its doc."""
        return x

    guarded = jaxsync.guard_dispatch(named)
    assert (guarded.__name__, guarded.__doc__) == ("named", "Its doc.")
    assert "func.func public @main" in guarded.lower(jnp.ones(2)).as_text()
    with pytest.raises(AttributeError):
        guarded.no_such_attribute  # noqa: B018


def test_a_method_can_be_guarded() -> None:
    class Model:
        scale = 3.0

        @jaxsync.guard_dispatch
        def apply(self, x: jax.Array) -> jax.Array:
            return x * self.scale

    np.testing.assert_array_equal(Model().apply(jnp.ones(2)), [3, 3])


def test_results_without_arrays_are_passed_on() -> None:
    assert jaxsync.guard_dispatch(lambda: "done")() == "done"


@pytest.mark.parametrize("value", [0, -1, 33, 1.5, True, "8"])
def test_a_window_that_cannot_work_on_cpu_is_refused(value: object) -> None:
    with pytest.raises(DispatchError) as caught:
        jaxsync.guard_dispatch(lambda x: x, value)(jnp.ones(1))  # type: ignore[arg-type]
    assert caught.value.asked == repr(value)


def test_the_default_window_depends_on_the_platform() -> None:
    assert [resolve_window(None, platform) for platform in ("cpu", "gpu", "tpu")] == [8, None, None]
    assert resolve_window(100, "gpu") == 100


def test_many_threads_share_one_window_and_lose_nothing() -> None:
    guarded = jaxsync.guard_dispatch(collective())
    results: dict[int, float] = {}

    def work(seed: int) -> None:
        x = jnp.full(8, float(seed))
        for _ in range(50):
            x = guarded(x) / 9  # each call multiplies by 9: x + the mean over devices of 8 * x / 8
        results[seed] = float(x[0])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert set(results) == {1, 2, 3, 4}
    for seed, value in results.items():
        assert value == pytest.approx(seed * (2 / 9) ** 50, rel=1e-3)


LOOP = """
    import sys
    import jax, jax.numpy as jnp, numpy as np, optax
    import jaxsync
    from jax.sharding import PartitionSpec as P

    n, kind, pool, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    if pool == "enlarged":
        jaxsync.simulate_devices(n)
    else:
        jax.config.update("jax_num_cpu_devices", n)
    mesh = jaxsync.make_mesh({"data": n})
    if kind == "TrainStep":
        params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
        plan = jaxsync.make_plan(params, mesh)
        loss_fn = lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)
        step = jaxsync.make_train_step(loss_fn, optax.sgd(1e-3), plan)
        state, batch = step.init(params), np.ones((2 * n, 8), np.float32)
        for _ in range(steps):
            state, metrics = step(state, batch)
        print(int(state.step), bool(metrics["finite"]))
    else:
        keep = lambda x: (x + jax.lax.pmean(x.sum(), "data")) / 3
        fn = jax.shard_map(keep, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        guarded = jaxsync.guard_dispatch(jax.jit(fn, donate_argnums=(0,) if kind == "donating" else ()))
        x = jnp.ones(2 * n)
        for _ in range(steps):
            x = guarded(x)
        print(steps, float(x[0]) == 1.0)
"""


@pytest.mark.parametrize("pool", ["enlarged", "default"])
@pytest.mark.parametrize("kind", ["TrainStep", "guarded", "donating"])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_loop_of_20000_calls_that_awaits_nothing_ends_well(
    run_python, n: int, kind: str, pool: str
) -> None:
    done = run_python(LOOP, str(n), kind, pool, "20000", timeout_s=280)
    assert (done.returncode, done.stdout, done.stderr) == (0, "20000 True\n", "")
