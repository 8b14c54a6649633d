"""Reading checkpoints: which there are, what they say of themselves, and their arrays to where they go."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsync.checkpoint.contents import (
    INFO,
    PARTS,
    CheckpointInfo,
    leaf_differences,
    leaf_table,
    parse_info,
    stored_places,
)
from jaxsync.checkpoint.saving import settle_pending
from jaxsync.checkpoint.store import (
    entries_of,
    first_line,
    import_orbax,
    open_reader,
    path_of,
    root_of,
)
from jaxsync.errors import ArgumentError, CheckpointMismatchError, CheckpointReadError
from jaxsync.fork import check_not_forked
from jaxsync.placement import abstract_params, put
from jaxsync.plan import SyncPlan
from jaxsync.step import TrainStep
from jaxsync.train_state import TrainState


def load_checkpoint(
    directory: str | os.PathLike[str], step: TrainStep, *, number: int | None = None
) -> TrainState:
    """The state in a checkpoint, placed as `step` wants it.

    The step may be for other devices, another mesh, sharding, config or buckets than the one that was saved;
    parameters and optimizer state are the same bit for bit. Each array is read to where it is needed: a
    device reads the parts of sharded arrays that it holds. Of several processes, all call this.

    Args:
        directory: As for `save_checkpoint`.
        step: Whose parameters and optimizer are of the same trees, shapes and dtypes.
        number: Which checkpoint; by default the newest that is whole. A save of this process that is under
            way is waited for.

    Raises:
        ArgumentError: `step` is something else.
        ForkedProcessError: The process was forked from one that had started JAX.
        MissingExtraError: Orbax is not installed.
        CheckpointReadError: There is no such checkpoint, or it cannot be read.
        CheckpointMismatchError: Its leaves are not those of the step. Told before any array is read.

    >>> load_checkpoint("no/such/directory", step=None)
    Traceback (most recent call last):
    ...
    jaxsync.errors.ArgumentError: load_checkpoint got step = a NoneType; wanted a TrainStep.
    To fix it: see help(jaxsync.load_checkpoint) for what each argument is, and their order.
    """
    check_not_forked("load_checkpoint")
    if not isinstance(step, TrainStep):
        got = f"a {type(step).__name__}"
        raise ArgumentError(function="load_checkpoint", argument="step", got=got, wanted="a TrainStep")
    ocp = import_orbax("load_checkpoint")
    root = root_of(directory)
    manager, number = _open(ocp, root, number)
    with contextlib.closing(manager):
        info = _read_info(ocp, manager, root, number)
        state = step.init(_zeros(step.plan))
        _check_leaves(info, state, root, step.plan)
        # One part after the other, so that no more than one is there twice.
        for part in PARTS:
            state = state.replace(**{part: _read_part(ocp, manager, root, info, part, getattr(state, part))})
    [count] = put([np.asarray(number, state.step.dtype)], [state.step.sharding])
    return dataclasses.replace(state, step=count)


def list_checkpoints(directory: str | os.PathLike[str]) -> tuple[int, ...]:
    """The numbers of the checkpoints that are whole, oldest first; empty if the directory is not there.

    Like all that reads, it waits for a save of this process to that directory.

    Raises:
        MissingExtraError: Orbax is not installed.

    >>> list_checkpoints("no/such/directory")
    ()
    """
    ocp, root = import_orbax("list_checkpoints"), root_of(directory)
    settle_pending(root)
    if not path_of(root).is_dir():
        return ()
    with contextlib.closing(open_reader(ocp, root)) as manager:
        return tuple(sorted(manager.all_steps()))


def inspect_checkpoint(directory: str | os.PathLike[str], number: int | None = None) -> CheckpointInfo:
    """What a checkpoint says of itself: its plan's fingerprint, its mesh, its leaves.

    Args:
        directory: As for `save_checkpoint`.
        number: Which checkpoint; by default the newest that is whole.

    Raises:
        MissingExtraError: Orbax is not installed.
        CheckpointReadError: There is no such checkpoint, or it cannot be read.

    >>> inspect_checkpoint("no/such/directory")
    Traceback (most recent call last):
    ...
    jaxsync.errors.CheckpointReadError: No checkpoint could be loaded from ...
    """
    ocp, root = import_orbax("inspect_checkpoint"), root_of(directory)
    manager, number = _open(ocp, root, number)
    with contextlib.closing(manager):
        return _read_info(ocp, manager, root, number)


def _open(ocp: Any, root: str, number: int | None) -> tuple[Any, int]:
    """A reader of the directory, and the number of the checkpoint that was asked for."""
    there = list_checkpoints(root)
    if number is None and there:
        number = there[-1]
    if number is None or number not in there:
        what = "no checkpoint" if number is None else f"no checkpoint {number}"
        reason = f"there is {what} in it" if path_of(root).is_dir() else "there is no such directory"
        raise CheckpointReadError(directory=root, reason=reason, found=entries_of(root))
    return open_reader(ocp, root), number


def _read_info(ocp: Any, manager: Any, root: str, number: int) -> CheckpointInfo:
    try:
        args = ocp.args.Composite(**{INFO: ocp.args.JsonRestore()})
        return parse_info(manager.restore(number, args=args)[INFO])
    except Exception as error:
        raise _read_error(root, number, error) from error


def _read_error(root: str, number: int, error: Exception) -> CheckpointReadError:
    reason = f"{number} cannot be read: {first_line(error)}"
    return CheckpointReadError(directory=root, reason=reason, found=entries_of(root))


def _zeros(plan: SyncPlan) -> Any:
    """Parameters to be replaced. On the host one element stands for all of an array."""

    def zeros(x: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.zeros(x.shape, x.dtype)
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)

    return jax.tree.map(zeros, abstract_params(plan))


def _check_leaves(info: CheckpointInfo, state: TrainState, root: str, plan: SyncPlan) -> None:
    if problems := leaf_differences(info, {part: getattr(state, part) for part in PARTS}):
        raise CheckpointMismatchError(
            path=os.path.join(root, str(info.number)),
            saved_with=info.fingerprint,
            loaded_with=plan.fingerprint,
            problems=tuple(problems),
        )


def _read_part(ocp: Any, manager: Any, root: str, info: CheckpointInfo, part: str, target: Any) -> Any:
    """The arrays of one part, in the structure and with the shardings of `target`."""
    # A dict may have been saved in another order, so leaves are found by their paths.
    places = stored_places(info, part)
    leaves, treedef = jax.tree.flatten(target)
    names = [places[path] for path, _, _ in leaf_table(part, target)]
    wanted = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in zip(names, leaves, strict=True)
        if x.size
    }
    found = _read_arrays(ocp, manager, root, info.number, part, wanted) if wanted else {}
    return jax.tree.unflatten(treedef, [found.get(name, x) for name, x in zip(names, leaves, strict=True)])


def _read_arrays(
    ocp: Any, manager: Any, root: str, number: int, part: str, wanted: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.Composite(**{part: ocp.args.PyTreeRestore(wanted, restore_args=restore_args)})
    try:
        found: dict[str, jax.Array] = manager.restore(number, args=args)[part]
        jax.block_until_ready(found)
    except Exception as error:
        raise _read_error(root, number, error) from error
    return found
