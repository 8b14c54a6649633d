"""The start of a process that is one of several."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxsync.devices import has_backend_started, likely_causes
from jaxsync.errors import ArgumentError, InitializationError
from jaxsync.multiprocess.departure import leave_together
from jaxsync.multiprocess.rollcall import JOB, call_roll, split_address

# With these a process that was killed or stands still ends the others within 30 s: a heartbeat that is
# missed for 10 s was acted on after 11 s, and a collective that waits for a process which lives is given up
# after 20 s.
_HEARTBEAT_S, _COLLECTIVE_S = 10.0, 20.0
_SHUTDOWN_S = 300.0  # as JAX has it: one process may have much to do when the others are done
_XLA_TIMEOUT = "xla_cpu_collective_timeout_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What makes several processes one job; None is left to JAX to find.

    Attributes:
        coordinator_address: Host and port of process 0.
        num_processes: How many there are.
        process_id: Which of them this is.
        local_device_ids: The devices this process may use.
        coordinator_bind_address: Where process 0 listens.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None
    coordinator_bind_address: str | None = None

    @property
    def is_silent(self) -> bool:
        """Whether nothing says that there is a job."""
        return self.coordinator_address is None and self.num_processes is None and self.process_id is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a process waits for others: see `initialize`.

    Raises:
        ArgumentError: One is no number of seconds above 0.
    """

    timeout_s: float
    heartbeat_timeout_s: float
    collective_timeout_s: float
    shutdown_timeout_s: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                wanted = "more than 0 seconds"
                raise ArgumentError(function="initialize", argument=name, got=repr(value), wanted=wanted)


# The job that was asked for, and the one that came of it with what the environment says; both written by
# `initialize` alone, on the thread that sets the process up.
_asked: Job | None = None
_joined: Job | None = None
_patience_s = _COLLECTIVE_S  # likewise


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    timeout_s: float = 60.0,
    heartbeat_timeout_s: float = _HEARTBEAT_S,
    collective_timeout_s: float = _COLLECTIVE_S,
    shutdown_timeout_s: float = _SHUTDOWN_S,
) -> None:
    """Makes this process one of a job of several; or does nothing, if nothing says that there are several.

    Call it once, before the first use of JAX: `jax.devices()` then lists the devices of all processes. One
    script so works alone and under a launcher. A second call with the same arguments, or none, does nothing.

    An argument that is left out is taken from the environment variable `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, `JAX_LOCAL_DEVICE_IDS` or `JAX_COORDINATOR_BIND_ADDRESS`, which
    `jaxsync launch` sets; then from what JAX finds by itself (SLURM, Open MPI, Kubernetes, Cloud TPU). With
    `num_processes=1`, or nothing found at all, the process is alone and nothing is started.

    It differs from `jax.distributed.initialize`, which it calls, in this:

    - A process that is missing is named on every process that came, by an exception, after `timeout_s`.
    - The coordinator listens on its own address alone, and not on every network of the machine.
    - SIGTERM ends the process, as in a process that is alone. JAX's preemption service, which swallows the
      signal, is off unless `JAX_ENABLE_PREEMPTION_SERVICE` is set.
    - A collective on CPU that waits too long raises, rather than wait for ever.
    - At exit a process waits for the others; if it ends by an exception, or another one did, it does not.

    Args:
        coordinator_address: Host and port of process 0, as `"10.0.0.1:1234"`. The port must be free there.
        num_processes: How many processes there are.
        process_id: Which of them this is, from 0.
        local_device_ids: The accelerators this process may use; by default all it can see.
        coordinator_bind_address: Where process 0 listens, if not on `coordinator_address`.
        timeout_s: Seconds to wait for all processes.
        heartbeat_timeout_s: Seconds after which a process that does not answer counts as lost. All others
            are then ended.
        collective_timeout_s: Seconds a collective on CPU waits for a process that does not come; set it
            higher if one may rightly be that late, because it alone writes a checkpoint or compiles. It is
            put into `XLA_FLAGS`, unless `--xla_cpu_collective_timeout_seconds` is there. A process that asks
            whether the others are about to launch the same waits a quarter longer.
        shutdown_timeout_s: Seconds a process waits at its exit for the others.

    Raises:
        InitializationError: JAX has made its devices already; the process was initialized before, with other
            arguments; an argument is missing; or the coordinator cannot listen, or is another job's.
        AbsentProcessError: Not all processes came in time; names those that did not.
        DisagreementError: The processes differ in `num_processes`, or in their versions of jax, jaxlib or
            jaxsync; or two have one `process_id`.
        ArgumentError: An argument cannot be meant.

    >>> import jaxsync
    >>> jaxsync.initialize(num_processes=1)  # alone, like the same script without a launcher
    """
    ids = (local_device_ids,) if isinstance(local_device_ids, int) else local_device_ids
    asked = Job(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=None if ids is None else tuple(ids),
        coordinator_bind_address=coordinator_bind_address,
    )
    limits = Limits(
        timeout_s=timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        collective_timeout_s=collective_timeout_s,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    if not _is_done(asked):
        _initialize(asked, limits)


def _initialize(asked: Job, limits: Limits) -> None:
    global _asked, _joined, _patience_s
    job = fill_in(asked, os.environ)
    _check_job(job)
    if job.num_processes != 1:
        if has_backend_started():
            causes = tuple(likely_causes())
            raise InitializationError(reason="JAX has started its devices already", problems=causes)
        if _join(job, limits):
            bound_collectives(limits.collective_timeout_s)
            _patience_s = limits.collective_timeout_s
        else:
            job = Job(num_processes=1)
    _asked, _joined = asked, job


def check_joined() -> None:
    """Refuses to go on alone where a launcher says that there are several processes.

    Raises:
        InitializationError: `JAX_NUM_PROCESSES` says so, and `initialize` was not called.
    """
    number = os.environ.get("JAX_NUM_PROCESSES", "")
    if number not in ("", "1") and _joined is None and not jax.distributed.is_initialized():
        reason = f"it was not called, and JAX_NUM_PROCESSES says that this is one of {number} processes"
        raise InitializationError(reason=reason, is_launched=JOB in os.environ)


def patience_s() -> float:
    """Seconds to wait for a process of the job that does not come: the timeout of collectives."""
    return _patience_s


def fill_in(job: Job, environment: Mapping[str, str]) -> Job:
    """The job with what the environment says where it says nothing itself, and an address to listen on.

    JAX reads the addresses and the devices itself, not the number of processes and their ids (0.10 to 0.12).

    Raises:
        ArgumentError: A variable that should hold numbers does not.

    >>> job = fill_in(Job(process_id=1), {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:90", "JAX_NUM_PROCESSES": "2"})
    >>> job.num_processes, job.process_id, job.coordinator_bind_address
    (2, 1, '10.0.0.1:90')
    """
    found: dict[str, Any] = {
        "coordinator_address": environment.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _number(environment, "JAX_NUM_PROCESSES"),
        "process_id": _number(environment, "JAX_PROCESS_ID"),
        "local_device_ids": _numbers(environment, "JAX_LOCAL_DEVICE_IDS"),
        "coordinator_bind_address": environment.get("JAX_COORDINATOR_BIND_ADDRESS"),
    }
    filled = dataclasses.replace(
        job, **{name: value for name, value in found.items() if getattr(job, name) is None}
    )
    if filled.coordinator_bind_address is None:
        return dataclasses.replace(filled, coordinator_bind_address=filled.coordinator_address)
    return filled


def bound_collectives(timeout_s: float) -> None:
    """Makes collectives on CPU raise after so many seconds, unless the user's `XLA_FLAGS` say something."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _XLA_TIMEOUT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_XLA_TIMEOUT}={max(1, round(timeout_s))}".strip()


def _number(environment: Mapping[str, str], name: str) -> int | None:
    numbers = _numbers(environment, name)
    return None if numbers is None else numbers[0]


def _numbers(environment: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError(
            function="initialize",
            argument=f"${name}",
            got=repr(text),
            wanted="a number, or several with commas",
        ) from None


def _check_job(job: Job) -> None:
    counts = {"num_processes": (job.num_processes, 1), "process_id": (job.process_id, 0)}
    for argument, (value, least) in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            wanted = f"an int of {least} or more"
            raise ArgumentError(function="initialize", argument=argument, got=repr(value), wanted=wanted)
    if job.process_id is not None and job.num_processes is not None and job.process_id >= job.num_processes:
        wanted = f"less than num_processes = {job.num_processes}"
        raise ArgumentError(
            function="initialize", argument="process_id", got=repr(job.process_id), wanted=wanted
        )
    for argument in ("coordinator_address", "coordinator_bind_address"):
        address = getattr(job, argument)
        if address is not None and split_address(address) is None:
            wanted = "host:port, such as '10.0.0.1:1234'"
            raise ArgumentError(function="initialize", argument=argument, got=repr(address), wanted=wanted)


def _is_done(asked: Job) -> bool:
    """Whether there is nothing left to do."""
    if _asked is None:
        if not jax.distributed.is_initialized():
            return False
        if asked == Job():  # the caller of jax.distributed.initialize has chosen otherwise than we would
            return True
        raise InitializationError(reason="jax.distributed.initialize was called before")
    if asked in (Job(), _asked):
        return True
    problems = [
        f"{field.name} was {getattr(_joined, field.name)!r}, and is now {getattr(asked, field.name)!r}"
        for field in dataclasses.fields(asked)
        if getattr(asked, field.name) not in (None, getattr(_joined, field.name), getattr(_asked, field.name))
    ]
    if not problems:  # it repeats what the environment said
        return True
    raise InitializationError(
        reason="this process was initialized before, with other arguments", problems=tuple(problems)
    )


def _join(job: Job, limits: Limits) -> bool:
    """Makes the process one of the job. Whether there is one."""
    if job.coordinator_address is not None and job.num_processes is not None and job.process_id is not None:
        call_roll(
            job.coordinator_address,
            job.coordinator_bind_address or job.coordinator_address,
            job.num_processes,
            job.process_id,
            timeout_s=limits.timeout_s,
            job=os.environ.get(JOB, ""),
        )
    was_preemptible = jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]  # made at run time
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            job.coordinator_address,
            job.num_processes,
            job.process_id,
            local_device_ids=job.local_device_ids,
            coordinator_bind_address=job.coordinator_bind_address,
            initialization_timeout=max(1, round(limits.timeout_s)),
            heartbeat_timeout_seconds=max(1, round(limits.heartbeat_timeout_s)),
            shutdown_timeout_seconds=max(1, round(limits.shutdown_timeout_s)),
        )
    except ValueError as error:  # what JAX says when it was not told, and finds nothing by itself
        if job.is_silent and "coordinator_address should be defined" in str(error):
            jax.config.update("jax_enable_preemption_service", was_preemptible)
            return False
        raise InitializationError(reason="an argument is missing", problems=(str(error),)) from error
    leave_together(limits.shutdown_timeout_s)
    return True
