"""Tuning: which plans are tried, how they take turns, and what is kept of the clock."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxsync import SyncConfig, make_mesh, make_plan
from jaxsync.errors import ArgumentError, BatchError, ConfigError, LossError
from jaxsync.workloads.subject import Subject
from jaxsync.workloads.tune import (
    VARIATIONS,
    Bench,
    TuneProgress,
    make_candidates,
    run_rounds,
    tune,
    tune_file,
)
from jaxsync.workloads.verdict import MIN_ROUNDS

pytestmark = pytest.mark.usefixtures("standard_promotion")


def loss_fn(params: Any, batch: Any) -> Any:
    out = sum(jnp.sum(leaf) for leaf in params.values())
    return jnp.mean((batch["x"] * batch["scale"] * out) ** 2)


def make_subject(shapes: dict[str, tuple[int, ...]], **changes: Any) -> Subject:
    subject = Subject(
        loss_fn=loss_fn,
        params={name: np.ones(shape, np.float32) for name, shape in shapes.items()},
        batch={"x": np.ones((16, 2), np.float32), "scale": np.float32(1e-3)},
        tx=optax.adam(1e-3),
        mesh=make_mesh({"data": 8}),
        sync=SyncConfig(),
    )
    return dataclasses.replace(subject, **changes)


FEW = {"a": (3,), "b": (4,), "c": (5, 2)}
MANY = {f"leaf{i:03}": (i + 1,) for i in range(70)}
LARGE = {f"leaf{i}": (25_000,) for i in range(30)}  # 100 kB each: alone by default
MIXED = {**MANY, **LARGE}


def test_the_first_candidate_is_the_config_and_each_other_makes_other_buckets() -> None:
    candidates = make_candidates(make_subject(MIXED))
    assert candidates[0].changes == {}
    assert candidates[0].plan.config == SyncConfig()
    buckets = [candidate.plan.buckets for candidate in candidates]
    assert len(set(buckets)) == len(buckets)
    for candidate in candidates[1:]:
        assert len(candidate.changes) == 1
        assert candidate.plan.config == dataclasses.replace(SyncConfig(), **candidate.changes)


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        ({"a": (3,)}, []),
        # Three small leaves are one bucket whatever the limits, unless nothing is fused.
        (FEW, [{"fuse_max_bytes": 0}]),
        (MANY, [{"fuse_max_bytes": 0}, *({"bucket_max_leaves": n} for n in (8, 16, 64, 128))]),
        (LARGE, [{"fuse_max_bytes": 320_000}]),
    ],
    ids=["one", "few", "many", "large"],
)
def test_a_candidate_that_makes_the_same_buckets_as_another_is_left_out(
    shapes: dict[str, tuple[int, ...]], wanted: list[dict[str, int]]
) -> None:
    assert [candidate.changes for candidate in make_candidates(make_subject(shapes))[1:]] == wanted


def test_a_config_of_the_users_own_is_varied_and_the_default_is_tried_too() -> None:
    own = SyncConfig(fuse_max_bytes=0, bucket_max_leaves=2, reduce="sum", timeout_s=5)
    candidates = make_candidates(make_subject(MANY, sync=own))
    assert candidates[0].plan.config == own
    assert candidates[1].changes == {"fuse_max_bytes": 80_000, "bucket_max_leaves": 32}
    assert {"fuse_max_bytes": 16_000} in [candidate.changes for candidate in candidates]
    for candidate in candidates:
        assert (candidate.plan.config.reduce, candidate.plan.config.timeout_s) == ("sum", 5)


def test_the_default_is_among_the_values_of_each_key() -> None:
    for key, values in VARIATIONS.items():
        assert getattr(SyncConfig(), key) in values
    assert sum(len(values) - 1 for values in VARIATIONS.values()) + 1 <= 15  # what MIN_ROUNDS counts on


def test_each_round_times_every_candidate_once_in_an_order_of_its_own() -> None:
    seen: list[int] = []

    def measure(index: int) -> float:
        seen.append(index)
        return 1.0

    times = run_rounds(4, measure, 12)
    rounds = [tuple(seen[start : start + 4]) for start in range(0, len(seen), 4)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert len(set(rounds)) > 6
    assert times == [[1.0] * 12] * 4
    assert rounds[0] == tuple(seen[:4])


def test_candidates_that_are_clearly_slower_are_timed_no_longer() -> None:
    left_after: list[tuple[int, list[int]]] = []
    times = run_rounds(
        3, [1.0, 3.0, 0.9].__getitem__, 10, lambda number, left: left_after.append((number, list(left)))
    )
    assert [len(each) for each in times] == [10, 5, 10]
    assert left_after == [(n, [0, 1, 2] if n < 5 else [0, 2]) for n in range(1, 11)]


def test_the_rounds_end_when_only_the_first_is_left() -> None:
    assert [len(each) for each in run_rounds(3, [1.0, 3.0, 2.0].__getitem__, 100)] == [5, 5, 5]
    assert [len(each) for each in run_rounds(1, [1.0].__getitem__, 100)] == [1]


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_a_step_is_compiled_once_and_goes_on_with_its_own_state(transform: str, compiles: list[str]) -> None:
    subject = make_subject(FEW, transform=transform)
    candidates = make_candidates(subject)
    bench = Bench(subject, candidates)
    assert bench.compile(0) > 0
    assert bench.compile(1) > 0
    del compiles[:]
    bench.warm_up()
    assert bench.measure(0) > 0
    assert bench.measure(1) > 0
    assert 1 <= bench.steps_per_round <= 50
    assert compiles == []  # the program that was timed is the one that runs
    for state in bench._states.values():
        assert int(state.step) == 3 + bench.steps_per_round


def test_the_users_parameters_and_batch_are_as_they_were() -> None:
    subject = make_subject(FEW)
    tune(subject, num_rounds=MIN_ROUNDS)
    for leaf in subject.params.values():
        np.testing.assert_array_equal(leaf, 1)
    np.testing.assert_array_equal(subject.batch["x"], 1)


def test_steps_that_are_left_out_give_their_memory_back() -> None:
    subject = make_subject(FEW)
    bench = Bench(subject, make_candidates(subject))
    bench.compile(0)
    bench.compile(1)
    bench.keep([0])
    assert (list(bench._steps), list(bench._states)) == ([0], [0])
    assert bench.measure(0) > 0


def test_the_result_has_a_measurement_for_each_candidate() -> None:
    shapes = {f"leaf{i:02}": (2,) for i in range(20)}
    subject, seen = make_subject(shapes, tx=optax.sgd(1e-3)), list[TuneProgress]()
    result = tune(subject, num_rounds=MIN_ROUNDS, on_progress=seen.append)
    candidates = make_candidates(subject)
    assert [each.label for each in result.measurements] == [
        "default",
        "fuse_max_bytes = 0",
        "bucket_max_leaves = 8",
        "bucket_max_leaves = 16",
    ]
    assert [each.sync for each in result.measurements] == [each.plan.config for each in candidates]
    assert [each.num_buckets for each in result.measurements] == [1, 20, 3, 2]
    assert (result.num_devices, result.platform) == (8, "cpu")
    default = result.measurements[0]
    assert (default.ratio.low, default.ratio.median, default.ratio.high) == (1, 1, 1)
    for each in result.measurements:
        assert each.compile_s > 0
        assert each.step_s > 0
        assert 5 <= each.num_rounds <= MIN_ROUNDS
        # So that no time of the report contradicts its ratio, whichever rounds it was timed in.
        assert each.step_s == default.step_s * each.ratio.median
    assert result.spread >= 0
    best = result.measurements[result.best]
    assert best is default or best.ratio.high < 1
    assert [each.doing for each in seen[:2]] == ["compiling default", "compiling fuse_max_bytes = 0"]
    assert seen[4].doing == f"round 1 of {MIN_ROUNDS}, 4 candidates"
    assert [each.done for each in seen] == [*range(4), *range(5, len(seen) + 1)]
    assert {each.total for each in seen} == {4 + MIN_ROUNDS}


def test_a_config_of_the_users_own_is_called_unchanged() -> None:
    result = tune(make_subject({"a": (3,)}, sync=SyncConfig(bucket_max_leaves=5)), num_rounds=MIN_ROUNDS)
    assert [each.label for each in result.measurements] == ["unchanged"]
    assert result.best == 0


def test_weights_aux_and_microbatches_are_those_of_the_step() -> None:
    def full_loss(params: Any, batch: Any) -> Any:
        return (loss_fn(params, batch), jnp.float32(2)), {"mean": jnp.mean(batch["x"])}

    subject = make_subject(FEW, loss_fn=full_loss, has_aux=True, weighted=True, accumulate=2)
    step = subject.make_step(make_plan(subject.params, subject.mesh))
    _, metrics = step(step.init(subject.params), subject.batch)
    assert float(metrics["aux"]["mean"]) == 1
    assert tune(subject, num_rounds=MIN_ROUNDS).measurements[0].step_s > 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"batch": {"x": np.ones((12, 2), np.float32), "scale": np.float32(1)}}, BatchError),
        ({"loss_fn": lambda params, batch: batch["x"]}, LossError),
        ({"loss_fn": "loss"}, ArgumentError),
        ({"tx": 0.1}, ArgumentError),
        ({"accumulate": 0}, ArgumentError),
        ({"accumulate": 3}, BatchError),
    ],
)
def test_what_cannot_be_a_step_is_refused_with_the_error_of_the_step(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        tune(make_subject(FEW, **changes))


def test_too_few_rounds_to_tell_anything_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        tune_file(tmp_path / "no-such.toml", num_rounds=9)
    assert caught.value.source == "--repeats"
    assert caught.value.problems == ("repeats = 9: wanted 10 or more; fewer tell no gain from noise",)


def test_compile_times_are_not_those_of_a_cache_on_disk(run_python: Any, tmp_path: Path) -> None:
    code = """
        import sys, jax, numpy as np, jax.numpy as jnp, jaxsync
        jaxsync.simulate_devices(2)
        from jaxsync.workloads.subject import GradientDescent, Subject
        from jaxsync.workloads.tune import tune
        subject = Subject(
            loss_fn=lambda params, x: jnp.mean((x @ params["w"]) ** 2), params={"w": np.ones(2, np.float32)},
            batch=np.ones((4, 2), np.float32), tx=GradientDescent(), mesh=jaxsync.make_mesh({"data": 2}),
            sync=jaxsync.SyncConfig(),
        )
        tune(subject, num_rounds=10)
        import os
        print(len(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"])))
        jax.jit(lambda x: x + 1)(jnp.ones(3))
        print(len(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"])) > 0)
    """
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = run_python(code, **env)
    assert (done.returncode, done.stdout) == (0, "0\nTrue\n"), done.stderr
