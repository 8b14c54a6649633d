"""A job in several processes: how they join, what each simulates, and what they must agree on."""

from __future__ import annotations

import os

import jax

from jaxsync.devices import has_backend_started
from jaxsync.errors import ConfigError
from jaxsync.multiprocess.agreement import agree
from jaxsync.multiprocess.coordination import connect
from jaxsync.multiprocess.launch import RESTART
from jaxsync.multiprocess.runtime import initialize


def join_processes() -> int:
    """Makes this process one of those that train together, if there are several: how many there are.

    Raises:
        InitializationError: The environment announces several, and JAX has made its devices already.
        AbsentProcessError: Not all came in time.
        DisagreementError: They are not the same versions.
    """
    # In a notebook, where JAX has started and nobody speaks of several processes, there is nothing to join.
    if "JAX_NUM_PROCESSES" in os.environ or not has_backend_started():
        initialize()
    coordination = connect()
    return 1 if coordination is None else coordination.num_processes


def is_restart() -> bool:
    """Whether `jaxsync launch` has started this process again after a failure."""
    return os.environ.get(RESTART, "0") != "0"


def devices_here(devices: int, num_processes: int) -> int:
    """How many of a job's simulated devices are this process's.

    Args:
        devices: Of the job, in all processes together.
        num_processes: Among how many they are divided.

    Raises:
        ConfigError: They cannot be divided evenly.

    >>> devices_here(8, 4)
    2
    """
    if devices % num_processes:
        problem = f"devices = {devices}: wanted a multiple of {num_processes}, the number of processes"
        raise ConfigError(source="the job", problems=(problem,))
    return devices // num_processes


def check_shared_job(mesh_size: int, transform: str) -> None:
    """Refuses what several processes cannot train.

    Raises:
        ConfigError: The mesh leaves devices out, and so perhaps a whole process; or `transform = "pmap"`.
    """
    problems = []
    if mesh_size != jax.device_count():
        wanted = f"all {jax.device_count()}, of {jax.process_count()} processes"
        problems.append(f"mesh has {mesh_size} devices: wanted {wanted}")
    if transform == "pmap":
        problems.append("train.transform = 'pmap': wanted 'shard_map', with several processes")
    if problems:
        raise ConfigError(source="the job", problems=tuple(problems))


def agree_on_start(start: int | None, directory: str, timeout_s: float) -> None:
    """Returns when all processes go on from the same checkpoint; each has looked for itself.

    Raises:
        DisagreementError: They see other checkpoints: the directory is not one that they share.
        AbsentProcessError: Not all came in time.
    """
    if jax.process_count() > 1:
        agree(
            "the checkpoint to go on from",
            str(start),
            lambda: {f"newest checkpoint in {directory!r}": "none" if start is None else str(start)},
            range(jax.process_count()),
            timeout_s,
        )
