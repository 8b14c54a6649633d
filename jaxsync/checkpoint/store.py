"""Orbax, and the directory of checkpoints as it keeps it."""

from __future__ import annotations

import itertools
import os
from typing import Any

import jax

from jaxsync.extras import import_extra


def import_orbax(function: str) -> Any:
    """Orbax, which `function` of jaxsync needs.

    Raises:
        MissingExtraError: It is not installed.
    """
    return import_extra(
        "orbax.checkpoint", package="orbax-checkpoint", feature=f"jaxsync.{function}", extra="checkpoint"
    )


def root_of(directory: str | os.PathLike[str]) -> str:
    """The one name of a directory, wherever this process goes on to."""
    text = os.fspath(directory)
    return text if "://" in text else os.path.abspath(text)


def path_of(root: str) -> Any:
    """The directory, to look into. As Orbax has it, which knows buckets of object stores too."""
    return import_extra(
        "etils.epath", package="orbax-checkpoint", feature="A checkpoint", extra="checkpoint"
    ).Path(root)


def entries_of(root: str) -> tuple[str, ...]:
    """What is in the directory, a line each, for an error."""
    path = path_of(root)
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return tuple(
        f"there is {name}" + (", a save that was not finished" if ".orbax-checkpoint-tmp" in name else "")
        for name in names
    )


def first_line(error: BaseException) -> str:
    """An error of another library, told in a line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def open_writer(ocp: Any, root: str, keep: int | None) -> Any:
    """A manager that saves. Makes the directory, and clears away what killed saves have left there."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        create=False,
        multiprocessing_options=_together(ocp, root),
    )
    return ocp.CheckpointManager(root, options=options)


def open_reader(ocp: Any, root: str) -> Any:
    """A manager that reads."""
    # Not `read_only`, which writes two warnings to stderr each time; nothing is written without a save.
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=_alone(ocp))
    return ocp.CheckpointManager(root, options=options)


def _together(ocp: Any, root: str) -> Any:
    """Makes the directory, and how the processes of a job wait for each other while they save.

    With processes named, Orbax waits at the coordinator. Else it launches a collective to wait by, from the
    thread of the save, which may meet the collectives of a step in another order on another process, and
    which does not wait for a slow disk.
    """
    if jax.process_index() == 0:
        path_of(root).mkdir(parents=True, exist_ok=True)
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    # A name is used once; the processes count their saves alike, since all of them make each save.
    name = f"jaxsync-save-{next(_save_numbers)}"
    processes = set(range(jax.process_count()))
    ocp.multihost.sync_global_processes(f"{name}-directory", processes=processes)
    return ocp.options.MultiprocessingOptions(active_processes=processes, barrier_sync_key_prefix=name)


_save_numbers = itertools.count()


def _alone(ocp: Any) -> Any:
    """How a process reads: it waits for no other, each reads what its own devices hold."""
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
