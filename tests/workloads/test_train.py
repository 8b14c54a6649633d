"""Whole jobs: what they reach, and what they report of the sync."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxsync
from jaxsync.errors import (
    BackendStartedError,
    CheckpointReadError,
    ConfigError,
    DeviceCountError,
    DispatchError,
    MeshError,
    RunWriteError,
)
from jaxsync.run_log import read_run
from jaxsync.workloads.charlm import CharlmModel
from jaxsync.workloads.digits import Digits, DigitsModel
from jaxsync.workloads.job import JobConfig, TrainConfig
from jaxsync.workloads.train import Progress, gradient_error, make_optimizer, prepare_job, run_job

pytestmark = pytest.mark.usefixtures("standard_promotion")

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = JobConfig(
    workload="digits",
    mesh={"data": 8},
    train=TrainConfig(steps=3, batch_size=32, learning_rate=1e-2),
    model=DigitsModel(hidden=(16,)),
)


def with_train(job: JobConfig, **changes: Any) -> JobConfig:
    return dataclasses.replace(job, train=dataclasses.replace(job.train, **changes))


def test_the_digits_job_reaches_97_percent_and_syncs_exactly() -> None:
    result = run_job(prepare_job(JobConfig.from_toml(CONFIGS / "digits.toml")))
    assert result.metrics["test_accuracy"] >= 0.97
    assert result.gradient_error <= 1e-6
    assert result.final_loss < 0.1
    assert (result.steps, result.num_skipped, result.num_devices) == (400, 0, 8)
    assert (result.collectives_per_step, result.collectives_in_loop) == (1, 0)
    num_params = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    assert result.bytes_synced_per_step == 4 * num_params
    assert result.steps_per_s is not None
    assert result.steps_per_s > 0


def test_a_small_charlm_learns() -> None:
    job = JobConfig(
        workload="charlm",
        mesh={"data": 8},
        train=TrainConfig(steps=40, batch_size=32, learning_rate=1e-2, report_every=1),
        model=CharlmModel(context=16, width=16, num_heads=2, num_blocks=1),
    )
    losses: list[float] = []
    result = run_job(prepare_job(job), lambda progress: losses.append(progress.loss))
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    assert result.final_loss == losses[-1]
    assert result.metrics["val_bits_per_char"] < losses[0] / math.log(2) - 1
    assert set(result.metrics) == {"val_bits_per_char", "unigram_bits_per_char"}
    assert result.gradient_error <= 1e-6
    assert result.collectives_per_step == 1


def test_training_on_eight_devices_gives_the_losses_of_one() -> None:
    def losses(mesh: dict[str, int]) -> list[float]:
        job = with_train(dataclasses.replace(SMALL, mesh=mesh), steps=5, report_every=1)
        found: list[float] = []
        run_job(prepare_job(job), lambda progress: found.append(progress.loss))
        return found

    np.testing.assert_allclose(losses({"data": 8}), losses({"data": 1}), rtol=1e-5)


@pytest.mark.parametrize(
    "job",
    [
        with_train(SMALL, transform="pmap"),
        with_train(SMALL, accumulate=2),
        dataclasses.replace(SMALL, sync=jaxsync.SyncConfig(reduce="sum")),
        dataclasses.replace(SMALL, mesh={"data": 4, "model": 2}),
        dataclasses.replace(
            SMALL, mesh={"data": 2, "replica": 4}, sync=jaxsync.SyncConfig(axis=("data", "replica"))
        ),
    ],
    ids=["pmap", "accumulate", "sum", "model_axis", "two_data_axes"],
)
def test_other_ways_to_sync_train_alike(job: JobConfig) -> None:
    # Adam does not feel the scale of the gradients, so a sum trains like a mean; the loss is always a mean.
    plain, other = run_job(prepare_job(SMALL)), run_job(prepare_job(job))
    np.testing.assert_allclose(other.final_loss, plain.final_loss, rtol=1e-4)
    assert other.gradient_error <= 1e-6
    assert (other.collectives_per_step, other.collectives_in_loop) == (1, 0)


def test_a_coarse_sync_shows_in_the_gradient_error() -> None:
    job = dataclasses.replace(SMALL, sync=jaxsync.SyncConfig(reduce_dtype="bfloat16"))
    assert 1e-5 < run_job(prepare_job(job)).gradient_error < 1e-2


def test_the_gradient_error_is_relative_to_the_norm_of_the_gradient() -> None:
    digits = Digits.load(DigitsModel(hidden=()))
    params, batch = digits.init_params(seed=0), next(digits.batches(16, seed=0))
    mesh = jaxsync.make_mesh({"data": 8})
    plan = jaxsync.make_plan(params, mesh, config=jaxsync.SyncConfig(reduce_dtype="bfloat16"))
    sync = jaxsync.value_and_grad(digits.loss_fn, plan)
    sharded = jax.shard_map(
        lambda batch: sync(params, batch)[1], mesh=mesh, in_specs=plan.batch_spec, out_specs=plan.specs
    )
    synced, single = jax.jit(sharded)(batch), jax.grad(digits.loss_fn)(params, batch)
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(synced), jax.tree.leaves(single), strict=True)
    ]
    norm = math.sqrt(sum(np.sum(b**2) for _, b in pairs))
    wanted = max(np.abs(a - b).max() for a, b in pairs) / norm
    np.testing.assert_allclose(gradient_error(digits, plan, params, batch), wanted, rtol=1e-3)


def test_steps_that_are_not_finite_are_counted_and_change_nothing() -> None:
    result = run_job(prepare_job(with_train(SMALL, steps=6, learning_rate=1e38, warmup=0)))
    assert result.num_skipped == 5  # the first is finite still, and its update is what overflows
    assert not math.isfinite(result.final_loss)


def test_progress_comes_after_the_first_step_every_few_and_after_the_last() -> None:
    seen: list[Progress] = []
    run_job(prepare_job(with_train(SMALL, steps=8, report_every=3)), seen.append)
    assert [progress.step for progress in seen] == [1, 3, 6, 8]
    assert [progress.steps_per_s is None for progress in seen] == [True, False, False, False]
    assert all(math.isfinite(progress.loss) and progress.num_skipped == 0 for progress in seen)


def test_one_step_has_no_speed() -> None:
    result = run_job(prepare_job(with_train(SMALL, steps=1)))
    assert (result.steps, result.steps_per_s) == (1, None)


@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_the_learning_rate_rises_to_its_height_and_falls(steps: int, warmup: float) -> None:
    config = TrainConfig(steps=steps, batch_size=8, learning_rate=0.5, warmup=warmup)
    tx: Any = make_optimizer(config)
    params = {"w": np.zeros((), np.float32)}
    state, rates = tx.init(params), []
    for _ in range(steps):
        # With equal gradients, Adam's step is the learning rate.
        updates, state = tx.update({"w": np.ones((), np.float32)}, state, params)
        rates.append(-float(updates["w"]))
    num_rising = min(round(warmup * steps), steps - 1)
    rise = [0.5 * (1 + i * num_rising / (num_rising or 1)) / (num_rising + 1) for i in range(num_rising)]
    num_falling = steps - num_rising
    fall = [0.25 * (1 + math.cos(math.pi * i / num_falling)) for i in range(num_falling)]
    np.testing.assert_allclose(rates, rise + fall, rtol=1e-4)


def test_weight_decay_reaches_the_optimizer() -> None:
    config = TrainConfig(steps=1, batch_size=8, learning_rate=0.5, weight_decay=0.1)
    tx: Any = make_optimizer(config)
    params = {"w": np.full((), 2, np.float32)}
    updates, _ = tx.update({"w": np.zeros((), np.float32)}, tx.init(params), params)
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], 2 * (1 - 0.5 * 0.1), rtol=1e-6)


def test_a_batch_larger_than_the_data_set_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_job(with_train(SMALL, batch_size=1440))
    assert caught.value.problems == ("train.batch_size = 1440: the data set has 1437 rows",)
    assert caught.value.source == "the digits job"


@pytest.mark.parametrize(
    ("job", "error"),
    [
        (dataclasses.replace(SMALL, devices=0, mesh={"data": 16}), DeviceCountError),
        (dataclasses.replace(SMALL, devices=4, mesh={"data": 4}), BackendStartedError),
        (with_train(dataclasses.replace(SMALL, mesh={"data": 4, "m": 2}), transform="pmap"), MeshError),
        (dataclasses.replace(SMALL, sync=jaxsync.SyncConfig(max_in_flight=100)), DispatchError),
    ],
    ids=["too_few_devices", "other_devices", "pmap_of_two_axes", "window"],
)
def test_what_cannot_run_is_refused_before_anything_is_compiled(
    job: JobConfig, error: type[Exception]
) -> None:
    with pytest.raises(error):
        prepare_job(job)


class Interrupted(Exception):
    """Ends a run at a step, as Ctrl-C would."""


def losses_of(job: JobConfig, *, resume: bool = False, until: int | None = None) -> dict[int, float]:
    found: dict[int, float] = {}

    def note(progress: Progress) -> None:
        found[progress.step] = progress.loss
        if progress.step == until:
            raise Interrupted

    prepared = prepare_job(job, resume=resume)
    if until is None:
        run_job(prepared, note)
    else:
        with pytest.raises(Interrupted):
            run_job(prepared, note)
    return found


CHARLM = JobConfig(
    workload="charlm",
    mesh={"data": 8},
    train=TrainConfig(steps=3, batch_size=16, learning_rate=1e-2),
    model=CharlmModel(context=16, width=16, num_heads=2, num_blocks=1),
)


@pytest.mark.parametrize(
    "job",
    [SMALL, with_train(SMALL, transform="pmap"), with_train(SMALL, accumulate=2), CHARLM],
    ids=["digits", "pmap", "accumulate", "charlm"],
)
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(job: JobConfig, tmp_path: Path) -> None:
    steps = {"steps": 12, "report_every": 1, "checkpoint_every": 4}
    wanted = losses_of(with_train(job, **steps))
    job = with_train(job, **steps, checkpoint_dir=str(tmp_path))
    assert losses_of(job, until=6) == {step: wanted[step] for step in range(1, 7)}
    assert losses_of(job, resume=True, until=11) == {step: wanted[step] for step in range(5, 12)}
    assert losses_of(job, resume=True) == {step: wanted[step] for step in range(9, 13)}
    assert jaxsync.list_checkpoints(tmp_path) == (4, 8, 12)


def test_a_run_goes_on_with_other_devices(tmp_path: Path) -> None:
    job = with_train(SMALL, steps=8, report_every=1, checkpoint_every=4)
    wanted = losses_of(job)
    job = with_train(job, checkpoint_dir=str(tmp_path))
    losses_of(job, until=5)
    found = losses_of(dataclasses.replace(job, mesh={"data": 2}), resume=True)
    np.testing.assert_allclose(list(found.values()), [wanted[step] for step in range(5, 9)], rtol=1e-5)


def test_a_resumed_run_reports_all_steps_and_its_own_speed(tmp_path: Path) -> None:
    job = with_train(SMALL, steps=6, report_every=2, checkpoint_every=3, checkpoint_dir=str(tmp_path))
    losses_of(job, until=4)
    seen: list[Progress] = []
    result = run_job(prepare_job(job, resume=True), seen.append)
    assert [progress.step for progress in seen] == [4, 6]
    assert [progress.steps_per_s is None for progress in seen] == [True, False]
    assert result.steps == 6


def test_a_run_that_is_started_again_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_train(SMALL, steps=8, report_every=1, checkpoint_every=4, checkpoint_dir=str(tmp_path))
    wanted = losses_of(with_train(job, checkpoint_dir=""))
    monkeypatch.setenv("JAXSYNC_RESTART", "1")
    assert losses_of(job, until=5) == {step: wanted[step] for step in range(1, 6)}  # nothing is there yet
    monkeypatch.setenv("JAXSYNC_RESTART", "2")
    assert losses_of(job) == {step: wanted[step] for step in range(5, 9)}


def test_a_run_that_is_started_again_after_its_last_step_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_train(SMALL, checkpoint_dir=str(tmp_path))
    wanted = run_job(prepare_job(job))
    monkeypatch.setenv("JAXSYNC_RESTART", "1")
    found = run_job(prepare_job(job))
    assert math.isnan(found.final_loss)
    assert (found.metrics, found.gradient_error) == (wanted.metrics, wanted.gradient_error)
    assert (found.steps, found.steps_per_s) == (3, None)


def test_checkpoints_that_do_not_fit_the_run_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_job(SMALL, resume=True)
    assert caught.value.problems == (
        "--resume needs --checkpoints DIR (train.checkpoint_dir), the run to go on with",
    )
    job = with_train(SMALL, checkpoint_dir=str(tmp_path))
    with pytest.raises(CheckpointReadError, match="there is no checkpoint in it"):
        prepare_job(job, resume=True)
    run_job(prepare_job(job))
    with pytest.raises(ConfigError) as caught:
        prepare_job(job)
    assert caught.value.problems == (
        f"train.checkpoint_dir = {str(tmp_path)!r}: has checkpoints up to step 3; go on from there "
        "(--resume), or give another directory",
    )
    with pytest.raises(ConfigError) as caught:
        prepare_job(job, resume=True)
    assert caught.value.problems == (
        f"train.checkpoint_dir = {str(tmp_path)!r}: its newest checkpoint is of step 3, and train.steps = 3: "
        "nothing is left",
    )


def test_a_run_writes_what_its_report_shows_and_goes_on_with_it_when_resumed(tmp_path: Path) -> None:
    job = with_train(
        SMALL,
        steps=8,
        report_every=1,
        checkpoint_every=4,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        run_dir=str(tmp_path / "run"),
    )
    found = losses_of(job, until=5)
    view = read_run(tmp_path / "run")
    assert {record.step: record.loss for record in view.steps} == found
    assert view.summary is None  # it was interrupted
    prepared = prepare_job(job, resume=True)
    result = run_job(prepared)
    view = read_run(tmp_path / "run")
    assert [record.step for record in view.steps] == list(range(1, 9))
    assert view.steps[-1].loss == result.final_loss
    assert all(record.finite for record in view.steps)
    assert view.summary is not None
    assert view.summary["final_loss"] == result.final_loss
    assert view.audit == {"all-reduce": 1}
    assert view.bytes_per_step == prepared.plan.num_bytes
    with pytest.raises(RunWriteError, match="there is a run in it"):
        prepare_job(with_train(SMALL, run_dir=str(tmp_path / "run")))


def test_a_restart_goes_on_with_the_run_that_the_first_start_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_train(SMALL, steps=2, report_every=1, run_dir=str(tmp_path))
    run_job(prepare_job(job))
    monkeypatch.setenv("JAXSYNC_RESTART", "1")  # before any checkpoint: from the first step
    run_job(prepare_job(job))
    assert [record.step for record in read_run(tmp_path).steps] == [1, 2]
