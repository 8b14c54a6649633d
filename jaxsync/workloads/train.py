"""Running a job: plan, compile, loop, and what came out of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from jaxsync.audit import Audit, audit
from jaxsync.checkpoint import inspect_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from jaxsync.devices import simulate_devices
from jaxsync.errors import ConfigError
from jaxsync.extras import import_extra
from jaxsync.host.launcher import guard_dispatch
from jaxsync.ingraph.grads import value_and_grad
from jaxsync.mesh import make_mesh
from jaxsync.placement import batch_spec, concrete_mesh, place_leaves, put
from jaxsync.plan import SyncPlan, make_plan
from jaxsync.run_log import RunHeader, RunLog, check_no_run
from jaxsync.step import Optimizer, TrainStep, make_train_step
from jaxsync.train_state import TrainState
from jaxsync.versions import library_versions
from jaxsync.workloads.charlm import Charlm, CharlmModel
from jaxsync.workloads.digits import Digits, DigitsModel
from jaxsync.workloads.job import JobConfig, ModelConfig, TrainConfig
from jaxsync.workloads.processes import (
    agree_on_start,
    check_shared_job,
    devices_here,
    is_restart,
    join_processes,
)
from jaxsync.workloads.workload import Batch, Params, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done.
        loss: The mean training loss of the last of them.
        num_skipped: Steps of this run so far that changed nothing because the loss or a gradient was not
            finite.
        steps_per_s: Since the first step was ready; None while there is no second.
    """

    step: int
    loss: float
    num_skipped: int
    steps_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What came out of a run.

    Attributes:
        workload: Its name.
        metrics: What the workload measured on held-out data, by name; of several processes, the first alone
            measures.
        final_loss: The mean training loss of the last batch; nan if a restart had no step left to do.
        steps: Steps done, skipped ones and those before a checkpoint included.
        num_skipped: Steps of this run that changed nothing because the loss or a gradient was not finite.
        steps_per_s: Without the first step, and so without compiling; None if there was only one.
        collectives_per_step: Collective instructions of the compiled step that run once a step.
        collectives_in_loop: Those inside loops of the compiled step, which run any number of times.
        bytes_synced_per_step: Bytes each device hands to the collectives of one sync, as the plan has it.
        gradient_error: See `gradient_error`.
        num_devices: Devices of the mesh.
    """

    workload: str
    metrics: dict[str, float]
    final_loss: float
    steps: int
    num_skipped: int
    steps_per_s: float | None
    collectives_per_step: int
    collectives_in_loop: int
    bytes_synced_per_step: int
    gradient_error: float
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedJob:
    """A job that nothing stands in the way of: what `run_job` needs. Made by `prepare_job`."""

    config: JobConfig
    workload: Workload
    plan: SyncPlan
    step: TrainStep
    resume: int | None


def prepare_job(config: JobConfig, *, resume: bool = False) -> PreparedJob:
    """Data, plan and step of a job. Simulates the job's devices; compiles and trains nothing.

    Under `jaxsync launch`, or what else `jaxsync.initialize` knows, the process joins the others, and the
    job's devices are those of all processes together. Every process must make the same calls.

    Args:
        config: The job.
        resume: Whether to go on from the newest checkpoint in `train.checkpoint_dir`. With the same config
            and devices the losses are then those of a run that was never interrupted, bit for bit. A process
            that `jaxsync launch` has started again goes on from there in any case, if there is one.

    Raises:
        MissingExtraError: optax, or what the data needs, is not installed.
        BackendStartedError: JAX has made other devices than the job simulates.
        DeviceCountError: There are fewer devices than the mesh needs.
        ConfigError: The data set does not fit the job; or the checkpoints do not: there are some without
            `resume`, or none are asked for with it, or the newest is of the last step. Or several processes
            cannot train it.
        CheckpointReadError: `resume`, and there is no checkpoint.
        RunWriteError: There is a run in `train.run_dir`, and not `resume`.
        MeshError: `transform = "pmap"` and the mesh has more than one axis.
        DispatchError: `sync.max_in_flight` cannot work.
        InitializationError: The process cannot join the others.
        AbsentProcessError: Not all processes came in time.
        DisagreementError: The processes see other checkpoints, or are of other versions.
    """
    train = config.train
    tx = make_optimizer(train)
    num_processes = join_processes()
    if config.devices:
        simulate_devices(devices_here(config.devices, num_processes))
    start = find_start(train, resume=resume)  # and no earlier: Orbax asks JAX which process this is
    if train.run_dir and start is None and not is_restart():
        check_no_run(train.run_dir)
    mesh = make_mesh(config.mesh)
    if num_processes > 1:
        check_shared_job(mesh.size, train.transform)
        agree_on_start(start, train.checkpoint_dir, config.sync.timeout_s)
    workload = load_workload(config.model)
    if train.batch_size > workload.num_rows:
        problem = f"train.batch_size = {train.batch_size}: the data set has {workload.num_rows} rows"
        raise ConfigError(source=f"the {config.workload} job", problems=(problem,))
    plan = make_plan(workload.init_params(train.seed), mesh, config=config.sync)
    step = make_train_step(workload.loss_fn, tx, plan, accumulate=train.accumulate, transform=train.transform)
    return PreparedJob(config=config, workload=workload, plan=plan, step=step, resume=start)


def find_start(config: TrainConfig, *, resume: bool) -> int | None:
    """The number of the checkpoint to go on from; None to start anew.

    Raises:
        MissingExtraError: Checkpoints are asked for, and Orbax is not installed.
        ConfigError: As for `prepare_job`.
        CheckpointReadError: As for `prepare_job`.
    """
    if not config.checkpoint_dir:
        if resume:
            problem = "--resume needs --checkpoints DIR (train.checkpoint_dir), the run to go on with"
            raise ConfigError(source="the job", problems=(problem,))
        return None
    feature = "jaxsync train with checkpoints (--checkpoints, train.checkpoint_dir)"
    import_extra("orbax.checkpoint", package="orbax-checkpoint", feature=feature, extra="checkpoint")
    there = list_checkpoints(config.checkpoint_dir)
    if is_restart():  # nobody is there to be told; a run that ended after its last step is just evaluated
        return there[-1] if there else None
    if resume and not there:
        inspect_checkpoint(config.checkpoint_dir)  # says what is in the directory instead
    if there and not resume:
        problem = (
            f"has checkpoints up to step {there[-1]}; go on from there (--resume), or give another directory"
        )
        raise _checkpoint_dir_error(config.checkpoint_dir, problem)
    if there and there[-1] >= config.steps:
        problem = (
            f"its newest checkpoint is of step {there[-1]}, and train.steps = {config.steps}: nothing is left"
        )
        raise _checkpoint_dir_error(config.checkpoint_dir, problem)
    return there[-1] if there else None


def _checkpoint_dir_error(directory: str, problem: str) -> ConfigError:
    return ConfigError(source="the job", problems=(f"train.checkpoint_dir = {directory!r}: {problem}",))


def load_workload(model: ModelConfig) -> Workload:
    """The workload of a `[model]` table, with its data."""
    match model:
        case DigitsModel():
            return Digits.load(model)
        case CharlmModel():
            return Charlm.load(model)


def make_optimizer(config: TrainConfig) -> Optimizer:
    """AdamW with a linear warmup and a cosine decay to 0 (Loshchilov and Hutter 2019, arXiv:1711.05101).

    Raises:
        MissingExtraError: optax is not installed.
    """
    optax = import_extra("optax", package="optax", feature="jaxsync train")
    warmup = min(round(config.warmup * config.steps), config.steps - 1)
    decay = optax.cosine_decay_schedule(config.learning_rate, config.steps - warmup)
    if warmup:
        # Not from 0: the first step would change nothing.
        rise = optax.linear_schedule(config.learning_rate / (warmup + 1), config.learning_rate, warmup)
        decay = optax.join_schedules([rise, decay], [warmup])
    tx: Optimizer = optax.adamw(decay, weight_decay=config.weight_decay)
    return tx


def run_job(job: PreparedJob, on_progress: Callable[[Progress], None] = lambda progress: None) -> TrainResult:
    """Trains, evaluates, and checks one synced gradient against a single device's.

    Threading: runs on the calling thread and blocks until all is done.

    Args:
        job: From `prepare_job`.
        on_progress: Called after the first step, every `report_every` steps and after the last one.

    Raises:
        CheckpointReadError: The checkpoint to go on from cannot be read.
        CheckpointMismatchError: It is of another model or optimizer.
        CheckpointWriteError: A checkpoint cannot be written.
        RunWriteError: The run's figures cannot be written.
        RunReadError: Those of the run to go on with are damaged.
    """
    workload, train = job.workload, job.config.train
    state = _first_state(job)
    sample = next(workload.batches(train.batch_size, train.seed))
    report = audit(job.step, state, sample)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_open_log(job, report)) if _writes_log(train) else None
        state, last = _train(job, state, on_progress if log is None else _logged(log, on_progress))
        result = _result(job, state, last, sample, report)
        if log is not None:
            log.close(dataclasses.asdict(result))
    return result


def _writes_log(config: TrainConfig) -> bool:
    return bool(config.run_dir) and jax.process_index() == 0


def _open_log(job: PreparedJob, report: Audit) -> RunLog:
    mesh = concrete_mesh(job.plan)
    header = RunHeader(
        workload=job.config.workload,
        num_devices=mesh.size,
        platform=mesh.devices.flat[0].platform,
        bytes_per_step=job.plan.num_bytes,
        plan=job.plan,
        config=dataclasses.asdict(job.config),
        versions=library_versions(),
        audit=report.counts,
    )
    resume = job.resume is not None or is_restart()
    return RunLog.open(job.config.train.run_dir, header, resume=resume)


def _logged(log: RunLog, on_progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """`on_progress`, which also writes to the log."""
    num_skipped = 0

    def write(progress: Progress) -> None:
        nonlocal num_skipped
        is_finite, num_skipped = progress.num_skipped == num_skipped, progress.num_skipped
        log.step(progress.step, loss=progress.loss, steps_per_s=progress.steps_per_s, finite=is_finite)
        on_progress(progress)

    return write


def _result(job: PreparedJob, state: TrainState, last: Progress, sample: Batch, report: Audit) -> TrainResult:
    workload, plan = job.workload, job.plan
    params = jax.device_get(state.params)
    return TrainResult(
        workload=job.config.workload,
        metrics=workload.evaluate(params) if jax.process_index() == 0 else {},
        final_loss=last.loss,
        steps=last.step,
        num_skipped=last.num_skipped,
        steps_per_s=last.steps_per_s,
        collectives_per_step=len(report.collectives) - len(report.in_loop),
        collectives_in_loop=len(report.in_loop),
        bytes_synced_per_step=plan.num_bytes,
        gradient_error=gradient_error(workload, plan, params, sample),
        num_devices=concrete_mesh(plan).size,
    )


def _first_state(job: PreparedJob) -> TrainState:
    train = job.config.train
    if job.resume is None:
        return job.step.init(job.workload.init_params(train.seed))
    return load_checkpoint(train.checkpoint_dir, job.step, number=job.resume)


def _train(
    job: PreparedJob, state: TrainState, on_progress: Callable[[Progress], None]
) -> tuple[TrainState, Progress]:
    """All steps. Only those that are looked at are awaited; the step itself bounds how many are in flight."""
    config = job.config.train
    start = job.resume or 0
    # Batch n is that of step n, whether or not the steps before it were in this run.
    batches = itertools.islice(job.workload.batches(config.batch_size, config.seed), start, None)
    flags: list[jax.Array] = []  # of the steps since the last look
    num_skipped, ready_s = 0, 0.0
    progress = Progress(step=start, loss=math.nan, num_skipped=0, steps_per_s=None)
    for number in range(start + 1, config.steps + 1):
        state, metrics = job.step(state, next(batches))
        flags.append(metrics["finite"])
        _save_if_due(config, state, number)
        if number not in (start + 1, config.steps) and number % config.report_every:
            continue
        jax.block_until_ready((state, metrics))
        now_s = time.perf_counter()
        ready_s = ready_s or now_s  # the first step compiles, so time starts when it is ready
        num_skipped += sum(not flag for flag in jax.device_get(flags))
        flags.clear()
        progress = Progress(
            step=number,
            loss=float(metrics["loss"]) / _num_summed(job.plan),
            num_skipped=num_skipped,
            steps_per_s=(number - start - 1) / (now_s - ready_s) if number > start + 1 else None,
        )
        on_progress(progress)
    return state, progress


def _save_if_due(config: TrainConfig, state: TrainState, number: int) -> None:
    """Starts a checkpoint; the next one waits for it. Only the last is awaited."""
    is_last = number == config.steps
    if config.checkpoint_dir and (is_last or number % config.checkpoint_every == 0):
        save_checkpoint(config.checkpoint_dir, state, wait=is_last)


def gradient_error(workload: Workload, plan: SyncPlan, params: Params, batch: Batch) -> float:
    """How far one synced gradient is from that of the same batch on a single device.

    The largest difference of any element, divided by the norm of the whole single-device gradient (both
    compared in float64). The synced gradient is that of `jaxsync.value_and_grad` inside `jax.shard_map`.

    Args:
        workload: Gives the loss.
        plan: The plan under test.
        params: Host arrays.
        batch: Host arrays; rows a multiple of `plan.num_replicas`.
    """
    loss_and_grad = value_and_grad(workload.loss_fn, plan)
    sharded = jax.shard_map(
        lambda params, batch: loss_and_grad(params, batch)[1],
        mesh=concrete_mesh(plan),
        in_specs=(plan.specs, plan.batch_spec),
        out_specs=plan.specs,
    )
    synced = guard_dispatch(jax.jit(sharded), plan.config.max_in_flight)(*_place(params, batch, plan))
    _, single = jax.jit(jax.value_and_grad(workload.loss_fn))(params, batch)
    wanted = _flat(single) * _num_summed(plan)
    difference, norm = np.max(np.abs(_flat(synced) - wanted)), np.linalg.norm(wanted)
    return float(difference / norm if norm else difference)


def _place(params: Params, batch: Batch, plan: SyncPlan) -> tuple[Params, Batch]:
    """Both on the mesh: a function that several processes call takes no host arrays of different rows."""
    leaves, treedef = jax.tree.flatten(params)
    shardings = [NamedSharding(concrete_mesh(plan), batch_spec(rows, plan)) for rows in batch.values()]
    placed = dict(zip(batch, put(list(batch.values()), shardings), strict=True))
    return jax.tree.unflatten(treedef, place_leaves(leaves, plan)), placed


def _num_summed(plan: SyncPlan) -> int:
    """By what a synced loss or gradient is larger than the mean over devices."""
    return plan.num_replicas if plan.config.reduce == "sum" else 1


def _flat(tree: Any) -> npt.NDArray[np.float64]:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
