"""Measuring a few plans for one training step, and finding the best."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding

from jaxsync.config import SyncConfig
from jaxsync.errors import ConfigError
from jaxsync.placement import batch_spec, check_batch
from jaxsync.plan import SyncPlan, make_plan
from jaxsync.reference import importing_from
from jaxsync.step import TrainStep
from jaxsync.workloads.subject import Subject, load_subject
from jaxsync.workloads.verdict import (
    MIN_ROUNDS,
    Interval,
    compare,
    find_best,
    is_slower,
    share_error_rate,
    spread,
)

# What is tried for each key, the others as they are. Each value is 4 times the one before, or 2 for leaves:
# closer ones differ by less than can be measured.
VARIATIONS = {
    "fuse_max_bytes": (0, 16_000, 80_000, 320_000, 1_280_000),
    "bucket_max_leaves": (8, 16, 32, 64, 128),
    "bucket_max_bytes": (1 << 18, 1 << 20, 1 << 22, 1 << 24),
}
DEFAULT_ROUNDS = 20
_ROUND_S = 0.1  # of one candidate; long enough for a median of several steps where steps are short
_MAX_STEPS = 50  # of one candidate in one round
_WARM_UP_STEPS = 3  # the first run of a program touches its memory for the first time


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan to measure.

    Attributes:
        changes: The keys of the config that differ from the one to start from.
        plan: The plan.
    """

    changes: dict[str, int]
    plan: SyncPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What came out for one candidate.

    Attributes:
        label: `"default"`, `"unchanged"` (what the file has, if that is not the default), or the changes.
        changes: The keys of the config that differ from the one to start from.
        sync: The config.
        num_buckets: Buckets of its plan.
        compile_s: Seconds to trace and compile the step.
        step_s: Seconds a step: the ratio times those of the first candidate, which has the median of all its
            rounds. No median of its own: other rounds, or other halves of them, are other times of the
            machine, and might contradict the ratio.
        num_rounds: Rounds it was timed in; fewer than those of the result if it was clearly slower.
        ratio: The time of a step divided by that of the first candidate, over all rounds it was timed in.
    """

    label: str
    changes: dict[str, int]
    sync: SyncConfig
    num_buckets: int
    compile_s: float
    step_s: float
    num_rounds: int
    ratio: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What came out of all.

    Attributes:
        measurements: One for each candidate; the config to start from is the first.
        best: The index of the best; 0 unless another is faster beyond doubt.
        steps_per_round: Steps of one candidate in one round.
        spread: How much the rounds of the first candidate differ among themselves; see `verdict.spread`.
        num_devices: Devices of the mesh.
        platform: Theirs.
    """

    measurements: tuple[Measurement, ...]
    best: int
    steps_per_round: int
    spread: float
    num_devices: int
    platform: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneProgress:
    """How far the measurement is.

    Attributes:
        done: Candidates compiled and rounds timed.
        total: How many there are of both.
        doing: What goes on now.
    """

    done: int
    total: int
    doing: str


OnProgress = Callable[[TuneProgress], None]


def make_candidates(subject: Subject) -> tuple[Candidate, ...]:
    """The plan of the config to start from, and those of its variations that make other buckets.

    One key varies at a time. If the config is not the default, the default is there as well.

    Raises:
        ConfigError: The reduce dtype cannot be used.
        MeshError: The mesh lacks a data axis of the config.
        RegistrationError: A leaf of the parameters is no array.
        DataShardedError: A parameter is sharded over a data axis.
    """
    found: list[Candidate] = []
    for changes in _make_variations(subject.sync):
        config = dataclasses.replace(subject.sync, **changes)  # type: ignore[arg-type]  # keys of ints only
        plan = make_plan(subject.params, subject.mesh, config=config)
        if all(plan.buckets != other.plan.buckets for other in found):
            found.append(Candidate(changes=changes, plan=plan))
    return tuple(found)


def _make_variations(config: SyncConfig) -> Iterator[dict[str, int]]:
    yield {}
    yield {key: value for key, value in _defaults().items() if value != getattr(config, key)}
    for key, values in VARIATIONS.items():
        yield from ({key: value} for value in values if value != getattr(config, key))


def _defaults() -> dict[str, int]:
    default = SyncConfig()
    return {key: getattr(default, key) for key in VARIATIONS}


def tune_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    num_rounds: int = DEFAULT_ROUNDS,
    on_progress: OnProgress = lambda progress: None,
) -> TuneResult:
    """`tune` for the subject in a TOML file. Modules are looked for beside it first, then in this folder.

    Args:
        path: As for `load_subject`, whose errors come through like those of `tune`.
        overrides: As for `JobConfig.from_toml`.
        num_rounds: As for `tune`.
        on_progress: As for `tune`.

    Raises:
        ConfigError: `num_rounds` is too small, or the file is not valid.
    """
    check_num_rounds(num_rounds)
    with importing_from(Path(path).parent, Path.cwd()):
        return tune(load_subject(path, overrides), num_rounds=num_rounds, on_progress=on_progress)


def check_num_rounds(num_rounds: int) -> None:
    """Refuses so few rounds that nothing could win.

    Raises:
        ConfigError: Fewer than `MIN_ROUNDS`.
    """
    if num_rounds < MIN_ROUNDS:
        problem = f"repeats = {num_rounds}: wanted {MIN_ROUNDS} or more; fewer tell no gain from noise"
        raise ConfigError(source="--repeats", problems=(problem,))


def tune(
    subject: Subject,
    *,
    num_rounds: int = DEFAULT_ROUNDS,
    on_progress: OnProgress = lambda progress: None,
) -> TuneResult:
    """Compiles the candidates, times them in turn, and finds the best.

    Each candidate has a state of its own in memory, since a step may keep it in the form of its buckets,
    until it is found to be clearly slower.

    Threading: runs on the calling thread and blocks until all is done.

    Args:
        subject: What to measure.
        num_rounds: How often each candidate is timed.
        on_progress: Called before each candidate is compiled and after each round.

    Raises:
        BatchError: The batch cannot be divided over the devices.
        LossError: `loss_fn` returns something else than it should.
        TreeMismatchError: The optimizer's update is not the tree of the parameters.
    """
    candidates = make_candidates(subject)
    labels = [_label(candidate.changes, subject.sync) for candidate in candidates]
    total = len(candidates) + num_rounds

    def on_round(number: int, left: Sequence[int]) -> None:
        bench.keep(left)
        doing = f"round {number} of {num_rounds}, {len(left)} candidates"
        on_progress(TuneProgress(done=len(candidates) + number, total=total, doing=doing))

    with _no_compilation_cache():
        bench = Bench(subject, candidates)
        compile_s = []
        for index, label in enumerate(labels):
            on_progress(TuneProgress(done=index, total=total, doing=f"compiling {label}"))
            compile_s.append(bench.compile(index))
        bench.warm_up()
        times = run_rounds(len(candidates), bench.measure, num_rounds, on_round)
    return TuneResult(
        measurements=_measurements(candidates, labels, compile_s, times),
        best=find_best(times),
        steps_per_round=bench.steps_per_round,
        spread=spread(times[0]),
        num_devices=subject.mesh.size,
        platform=subject.mesh.devices.flat[0].platform,
    )


def _label(changes: dict[str, int], config: SyncConfig) -> str:
    if changes:
        return ", ".join(f"{key} = {value}" for key, value in changes.items())
    is_default = all(getattr(config, key) == value for key, value in _defaults().items())
    return "default" if is_default else "unchanged"


def _ratios(times: Sequence[Sequence[float]]) -> list[Interval]:
    error_rate = share_error_rate(len(times) - 1)
    itself = Interval(low=1.0, median=1.0, high=1.0)
    return [itself, *(compare(own, times[0], error_rate) for own in times[1:])]


def _measurements(
    candidates: Sequence[Candidate],
    labels: Sequence[str],
    compile_s: Sequence[float],
    times: Sequence[Sequence[float]],
) -> tuple[Measurement, ...]:
    first_s = statistics.median(times[0])
    return tuple(
        Measurement(
            label=label,
            changes=candidate.changes,
            sync=candidate.plan.config,
            num_buckets=len(candidate.plan.buckets),
            compile_s=to_compile_s,
            step_s=first_s * ratio.median,
            num_rounds=len(own),
            ratio=ratio,
        )
        for candidate, label, to_compile_s, own, ratio in zip(
            candidates, labels, compile_s, times, _ratios(times), strict=True
        )
    )


def run_rounds(
    num_candidates: int,
    measure: Callable[[int], float],
    num_rounds: int,
    on_round: Callable[[int, Sequence[int]], None] = lambda number, left: None,
) -> list[list[float]]:
    """Times of each candidate, one a round; those that are clearly slower than the first are left out.

    The order within a round is drawn anew each time, so that nobody always runs after the same other. The
    rounds end early when only the first is left.

    Args:
        num_candidates: One or more.
        measure: The index of a candidate -> seconds.
        num_rounds: How many rounds.
        on_round: Called after each round with its number, from 1, and the candidates that are left.

    >>> [len(times) for times in run_rounds(3, [1.0, 0.9, 1.2].__getitem__, 10)]
    [10, 10, 5]
    """
    times: list[list[float]] = [[] for _ in range(num_candidates)]
    left, order = list(range(num_candidates)), random.Random(0)
    for number in range(1, num_rounds + 1):
        for index in order.sample(left, len(left)):
            times[index].append(measure(index))
        left = [0, *(index for index in left[1:] if not is_slower(times[index], times[0]))]
        on_round(number, left)
        if len(left) == 1:
            break
    return times


class Bench:
    """Steps with different plans, each with a state of its own that it goes on with.

    Args:
        subject: What they have in common.
        candidates: Their plans.
    """

    def __init__(self, subject: Subject, candidates: Sequence[Candidate]) -> None:
        self.steps_per_round = 1
        plan = candidates[0].plan
        first = subject.make_step(plan)
        check_batch(subject.batch, plan.num_replicas * subject.accumulate)
        self._subject = subject
        self._plans = [candidate.plan for candidate in candidates]
        self._steps: dict[int, TrainStep] = {}
        self._states: dict[int, Any] = {}
        self._batch = subject.batch
        if subject.transform == "shard_map":  # pmap wants its rows stacked, which is free on the host only
            self._batch = jax.tree.map(
                lambda x: jax.device_put(x, NamedSharding(subject.mesh, batch_spec(x, plan))), subject.batch
            )
        # What the loss calls is traced once and kept by JAX: let the first candidate not pay for all.
        first.lower(first.init(subject.params), self._batch)

    def compile(self, index: int) -> float:
        """Seconds to trace and compile one step."""
        self._steps[index] = step = self._subject.make_step(self._plans[index])
        self._states[index] = state = step.init(self._subject.params)
        start_s = time.perf_counter()
        # The step itself finds this program again, as it is called with the same shapes and shardings.
        step.lower(state, self._batch).compile()
        return time.perf_counter() - start_s

    def warm_up(self) -> None:
        """Runs each step a few times, and chooses how many make a round."""
        fastest_s = min(min(self._run(index, _WARM_UP_STEPS)) for index in self._steps)
        self.steps_per_round = max(1, min(_MAX_STEPS, round(_ROUND_S / fastest_s)))

    def measure(self, index: int) -> float:
        """The median seconds of one round of awaited steps."""
        return statistics.median(self._run(index, self.steps_per_round))

    def keep(self, left: Sequence[int]) -> None:
        """Gives the memory of all other steps back."""
        for index in self._steps.keys() - set(left):
            del self._steps[index], self._states[index]

    def _run(self, index: int, num_steps: int) -> list[float]:
        step, state, times = self._steps[index], self._states[index], []
        for _ in range(num_steps):
            start_s = time.perf_counter()
            state, metrics = step(state, self._batch)
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - start_s)
        self._states[index] = state
        return times


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Compile times are those of compiling, not of reading what an earlier run has left on disk."""
    was_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]  # made at run time
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once, and remembers
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()
