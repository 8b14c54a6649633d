"""Checkpoints: a TrainState on disk, as the user's trees, so that it loads on other devices and shardings.

A directory holds a checkpoint a step, named by its number. What is being written has another name until it is
whole, so a directory that is called by a number is a good checkpoint, whenever the process was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsync.errors import (
    ArgumentError,
    CheckpointMismatchError,
    CheckpointReadError,
    CheckpointWriteError,
)
from jaxsync.extras import import_extra
from jaxsync.host.launcher import check_not_deleted
from jaxsync.mesh import axis_sizes
from jaxsync.placement import abstract_params, put
from jaxsync.plan import SyncPlan
from jaxsync.step import TrainStep
from jaxsync.train_state import TrainState

_FORMAT = 1  # of what is in a checkpoint; a reader refuses what it does not know
_PARTS = ("params", "opt_state")
_INFO = "jaxsync"  # the item beside the parts

# Held while a save is started, so that the look at what is there and the start are one; and while `_pending`
# is looked at. Saves of one process therefore start one after the other.
_lock = threading.RLock()
_pending: dict[str, Checkpoint] = {}  # directory -> the last save to it, done or not; under `_lock`


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says of itself. Read without reading an array.

    Attributes:
        number: The step its state had reached.
        fingerprint: That of the plan it was saved with.
        mesh: Axis -> size of the mesh it was saved on.
        jaxsync_version: What wrote it.
        jax_version: What it was written with.
        leaves: Path, dtype and shape of each leaf, in tree order: parameters, then the optimizer's state.
    """

    number: int
    fingerprint: str
    mesh: dict[str, int]
    jaxsync_version: str
    jax_version: str
    leaves: tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint that is being written, or is there. Returned by `save_checkpoint`.

    Attributes:
        directory: The directory of all checkpoints.
        number: The step of the state that was saved.
    """

    directory: str
    number: int
    _finished: Future[None] = field(default_factory=Future, repr=False)  # set by the thread of the save
    _is_told: bool = field(default=False, repr=False)  # whether `wait` has answered to anybody

    @property
    def path(self) -> str:
        """Where it is, once it is whole."""
        return os.path.join(self.directory, str(self.number))

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._finished.done()

    def wait(self) -> None:
        """Returns when the checkpoint is whole, and older ones that are too many are gone.

        Threading: any thread, any number of times; blocks. A Ctrl-C ends the wait, not the save.

        Raises:
            CheckpointWriteError: It could not be written.
        """
        wait_for_futures([self._finished])
        self._is_told = True
        self._finished.result()


def save_checkpoint(
    directory: str | os.PathLike[str], state: TrainState, *, keep: int | None = 3, wait: bool = True
) -> Checkpoint:
    """Writes `state` to `directory/N`, where N is `state.step`.

    What is written are the user's trees, `state.params` and `state.opt_state`, bit for bit: it depends
    neither on buckets nor on devices, mesh or sharding. Until it is whole it has another name, so a save that
    is killed leaves the checkpoints before it as they are; the next save clears away what it left.

    With `wait=False` the call returns once the values are on the host: the state may be donated to the next
    step at once. Call `wait()` of the result to know that it is on disk; the next save to the same directory
    waits for it, and raises its error if nobody has asked for it; so does the end of the process, which
    prints the error. A crash between loses that save, and no earlier one.

    Of several processes that train together, all call this, for the same states and a directory that they
    share: each writes what its devices hold, and the checkpoint is whole when all have.

    Threading: any thread; saves start one after the other, and wait for the step that makes `state`. Two
    jobs must not save to one directory.

    Args:
        directory: Made if it is not there. Each run wants its own.
        state: From `step.init` or a step, not donated yet.
        keep: How many of the newest checkpoints stay, this one included; None keeps all.
        wait: Whether to return when the checkpoint is whole.

    Raises:
        ArgumentError: An argument is of another kind; or `state` is traced.
        MissingExtraError: Orbax is not installed.
        DeletedArrayError: The state was donated to a step.
        CheckpointWriteError: It cannot be written; or the directory has a checkpoint of this step or a later
            one, which would be the one to go on from.

    >>> import tempfile
    >>> import jax.numpy as jnp, optax, jaxsync
    >>> params = {"w": jnp.arange(3.0)}
    >>> plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    >>> step = jaxsync.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(0.5), plan)
    >>> state, _ = step(step.init(params), jnp.ones((8, 3)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpoint = save_checkpoint(directory, state)
    ...     loaded = load_checkpoint(directory, step)
    >>> checkpoint.number, int(loaded.step), loaded.params["w"].tolist()
    (1, 1, [-0.5, 0.5, 1.5])
    """
    _check_save_arguments(state, keep)
    ocp = _import_orbax("save_checkpoint")
    root = _root(directory)
    with _lock:
        _wait_for_pending(root)
        _wait_at_exit()
        checkpoint = _start_save(ocp, root, state, keep)
    if wait or checkpoint.is_done:  # done so soon, it may have failed
        checkpoint.wait()
    return checkpoint


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
        MissingExtraError: Orbax is not installed.
        CheckpointReadError: There is no such checkpoint, or it cannot be read.
        CheckpointMismatchError: Its leaves are not those of the step. Told before any array is read.

    >>> load_checkpoint("no/such/directory", step=None)
    Traceback (most recent call last):
    ...
    jaxsync.errors.ArgumentError: load_checkpoint got step = a NoneType; wanted a TrainStep.
    To fix it: see help(jaxsync.load_checkpoint) for what each argument is, and their order.
    """
    if not isinstance(step, TrainStep):
        got = f"a {type(step).__name__}"
        raise ArgumentError(function="load_checkpoint", argument="step", got=got, wanted="a TrainStep")
    ocp = _import_orbax("load_checkpoint")
    root = _root(directory)
    manager, number = _open(ocp, root, number)
    with contextlib.closing(manager):
        info = _read_info(ocp, manager, root, number)
        state = step.init(_zeros(step.plan))
        _check_leaves(info, state, root, step.plan)
        # One part after the other, so that no more than one is there twice.
        for part in _PARTS:
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
    ocp, root = _import_orbax("list_checkpoints"), _root(directory)
    _settle_pending(root)
    if not _path(root).is_dir():
        return ()
    with contextlib.closing(_reader(ocp, root)) as manager:
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
    ocp, root = _import_orbax("inspect_checkpoint"), _root(directory)
    manager, number = _open(ocp, root, number)
    with contextlib.closing(manager):
        return _read_info(ocp, manager, root, number)


def _import_orbax(function: str) -> Any:
    return import_extra(
        "orbax.checkpoint", package="orbax-checkpoint", feature=f"jaxsync.{function}", extra="checkpoint"
    )


def _root(directory: str | os.PathLike[str]) -> str:
    text = os.fspath(directory)
    return text if "://" in text else os.path.abspath(text)


def _path(root: str) -> Any:
    # As Orbax has it, which knows buckets of object stores too.
    return import_extra(
        "etils.epath", package="orbax-checkpoint", feature="A checkpoint", extra="checkpoint"
    ).Path(root)


def _check_save_arguments(state: Any, keep: Any) -> None:
    is_count = keep is None or (isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1)
    is_state = isinstance(state, TrainState)
    is_traced = is_state and any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state))
    got = "traced values" if is_traced else f"a {type(state).__name__}"
    checks = [
        ("state", got, is_state and not is_traced, "the TrainState that a step returned"),
        ("keep", repr(keep), is_count, "an int of 1 or more, or None"),
    ]
    for argument, shown, is_right, wanted in checks:
        if not is_right:
            raise ArgumentError(function="save_checkpoint", argument=argument, got=shown, wanted=wanted)
    check_not_deleted(jax.tree.leaves(state), {"state": state})


def _wait_for_pending(root: str) -> None:
    with _lock:
        checkpoint = _pending.get(root)  # and it stays there: a Ctrl-C may end the wait
    if checkpoint is not None and not checkpoint._is_told:
        checkpoint.wait()


def _settle_pending(root: str) -> None:
    """Before a look at a directory: what was saved is there. An error is left to the next save."""
    with _lock:
        checkpoint = _pending.get(root)
    if checkpoint is not None:
        wait_for_futures([checkpoint._finished])


def _wait_at_exit() -> None:
    """At the end of the process waits for the saves that are under way.

    `atexit` is too late: Python has closed its executors then, without which Orbax loses the save and hangs.
    What closes them hooks in here too, before us, and is called after us.
    """
    global _waits_at_exit
    if not _waits_at_exit:
        threading._register_atexit(_finish_all)  # type: ignore[attr-defined]  # no public way to be as early
        _waits_at_exit = True


_waits_at_exit = False  # under `_lock`


def _finish_all() -> None:
    for root in list(_pending):
        try:
            _wait_for_pending(root)
        except CheckpointWriteError as error:
            traceback.print_exception(error, file=sys.stderr)


def _start_save(ocp: Any, root: str, state: TrainState, keep: int | None) -> Checkpoint:
    """Returns once the values are on the host. A Ctrl-C is raised then, and not before.

    All of Orbax is on a thread of its own, since signals are raised in the main one: Orbax, interrupted amid
    a save, leaves threads that write to a directory which is gone, or waits for ever.
    """
    checkpoint = Checkpoint(directory=root, number=int(state.step))
    copied = threading.Event()

    def work() -> None:
        try:
            manager = _begin_save(ocp, checkpoint, state, keep)
            copied.set()
            manager.wait_until_finished()
            manager.close()
            checkpoint._finished.set_result(None)
        except CheckpointWriteError as error:
            checkpoint._finished.set_exception(error)
        except BaseException as error:
            failure = CheckpointWriteError(directory=root, reason=_first_line(error))
            failure.__cause__ = error
            checkpoint._finished.set_exception(failure)
        finally:
            copied.set()

    thread = threading.Thread(target=work, name="jaxsync-save")
    _pending[root] = checkpoint  # before it starts, so that a save which runs is known
    try:
        thread.start()
        copied.wait()
    except BaseException:
        if thread.ident is None:  # nobody would ever finish it
            del _pending[root]
        else:
            copied.wait()
        raise
    return checkpoint


def _begin_save(ocp: Any, checkpoint: Checkpoint, state: TrainState, keep: int | None) -> Any:
    root, number = checkpoint.directory, checkpoint.number
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        create=False,
        multiprocessing_options=_together(ocp, root),
    )
    manager = ocp.CheckpointManager(root, options=options)
    _check_is_newest(root, manager.all_steps(), number)
    trees = {part: getattr(state, part) for part in _PARTS}
    arrays = {part: stored for part, tree in trees.items() if (stored := _stored(tree))}
    items = {part: ocp.args.PyTreeSave(stored) for part, stored in arrays.items()}
    items[_INFO] = ocp.args.JsonSave(_make_info(number, state.packed_params.layout.plan, trees))
    manager.save(number, args=ocp.args.Composite(**items), force=True)
    return manager


def _together(ocp: Any, root: str) -> Any:
    """Makes the directory, and how the processes of a job wait for each other while they save.

    With processes named, Orbax waits at the coordinator. Else it launches a collective to wait by, from the
    thread of the save, which may meet the collectives of a step in another order on another process, and
    which does not wait for a slow disk.
    """
    if jax.process_index() == 0:
        _path(root).mkdir(parents=True, exist_ok=True)
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    # A name is used once; the processes count their saves alike, since all of them make each save.
    name = f"jaxsync-save-{next(_save_numbers)}"
    processes = set(range(jax.process_count()))
    ocp.multihost.sync_global_processes(f"{name}-directory", processes=processes)
    return ocp.options.MultiprocessingOptions(active_processes=processes, barrier_sync_key_prefix=name)


_save_numbers = itertools.count()


def _check_is_newest(root: str, there: Sequence[int], number: int) -> None:
    later = sorted(other for other in there if other >= number)
    if later:
        found = tuple(f"there is {other}" for other in later)
        raise CheckpointWriteError(
            directory=root, reason=f"this one is of step {number}, which is not the newest", found=found
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _stored(tree: Any) -> dict[str, Any]:
    """The arrays to write, by their place in tree order. Orbax has no arrays without elements."""
    return {str(i): x for i, x in enumerate(jax.tree.leaves(tree)) if x.size}


def _leaf_table(part: str, tree: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (part + jax.tree_util.keystr(path), str(x.dtype), tuple(x.shape))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _make_info(number: int, plan: SyncPlan, trees: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "number": number,
        "fingerprint": plan.fingerprint,
        "mesh": axis_sizes(plan.mesh),
        "jaxsync_version": _version(),
        "jax_version": jax.__version__,
        "leaves": [leaf for part, tree in trees.items() for leaf in _leaf_table(part, tree)],
    }


def _version() -> str:
    import jaxsync  # the package imports this module

    return jaxsync.__version__


def _reader(ocp: Any, root: str) -> Any:
    # Not `read_only`, which writes two warnings to stderr each time; nothing is written without a save.
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=_alone(ocp))
    return ocp.CheckpointManager(root, options=options)


def _alone(ocp: Any) -> Any:
    """How a process reads: it waits for no other, each reads what its own devices hold."""
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})


def _open(ocp: Any, root: str, number: int | None) -> tuple[Any, int]:
    """A reader of the directory, and the number of the checkpoint that was asked for."""
    there = list_checkpoints(root)
    if number is None and there:
        number = there[-1]
    if number is None or number not in there:
        what = "no checkpoint" if number is None else f"no checkpoint {number}"
        reason = f"there is {what} in it" if _path(root).is_dir() else "there is no such directory"
        raise CheckpointReadError(directory=root, reason=reason, found=_contents(root))
    return _reader(ocp, root), number


def _contents(root: str) -> tuple[str, ...]:
    path = _path(root)
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return tuple(
        f"there is {name}" + (", a save that was not finished" if ".orbax-checkpoint-tmp" in name else "")
        for name in names
    )


def _read_info(ocp: Any, manager: Any, root: str, number: int) -> CheckpointInfo:
    try:
        args = ocp.args.Composite(**{_INFO: ocp.args.JsonRestore()})
        facts = dict(manager.restore(number, args=args)[_INFO])
        if (found := facts.pop("format")) != _FORMAT:
            raise ValueError(f"its format is {found}, and this version of jaxsync reads {_FORMAT}")
        leaves = tuple((path, dtype, tuple(shape)) for path, dtype, shape in facts.pop("leaves"))
        return CheckpointInfo(leaves=leaves, **facts)
    except Exception as error:
        raise _read_error(root, number, error) from error


def _read_error(root: str, number: int, error: Exception) -> CheckpointReadError:
    reason = f"{number} cannot be read: {_first_line(error)}"
    return CheckpointReadError(directory=root, reason=reason, found=_contents(root))


def _zeros(plan: SyncPlan) -> Any:
    """Parameters to be replaced. On the host one element stands for all of an array."""

    def zeros(x: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.zeros(x.shape, x.dtype)
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)

    return jax.tree.map(zeros, abstract_params(plan))


def _check_leaves(info: CheckpointInfo, state: TrainState, root: str, plan: SyncPlan) -> None:
    wanted = {
        path: (dtype, shape)
        for part in _PARTS
        for path, dtype, shape in _leaf_table(part, getattr(state, part))
    }
    found = {path: (dtype, shape) for path, dtype, shape in info.leaves}
    problems = [f"{path} is not in the checkpoint" for path in wanted if path not in found]
    problems += [f"{path} is in the checkpoint only" for path in found if path not in wanted]
    problems += [
        f"{path} is {_format(leaf)}; the checkpoint has {_format(found[path])}"
        for path, leaf in wanted.items()
        if found.get(path, leaf) != leaf
    ]
    if problems:
        raise CheckpointMismatchError(
            path=os.path.join(root, str(info.number)),
            saved_with=info.fingerprint,
            loaded_with=plan.fingerprint,
            problems=tuple(problems),
        )


def _format(leaf: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = leaf
    return f"{dtype}{list(shape)}"


def _read_part(ocp: Any, manager: Any, root: str, info: CheckpointInfo, part: str, target: Any) -> Any:
    """The arrays of one part, in the structure and with the shardings of `target`."""
    # A dict may have been saved in another order, so leaves are found by their paths.
    places = {path: str(i) for i, path in enumerate(_paths(info, part))}
    leaves, treedef = jax.tree.flatten(target)
    names = [places[path] for path, _, _ in _leaf_table(part, target)]
    wanted = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in zip(names, leaves, strict=True)
        if x.size
    }
    found = _read_arrays(ocp, manager, root, info.number, part, wanted) if wanted else {}
    return jax.tree.unflatten(treedef, [found.get(name, x) for name, x in zip(names, leaves, strict=True)])


def _paths(info: CheckpointInfo, part: str) -> list[str]:
    # Neither name begins with the other, and a path goes on with a bracket or a dot, if it does.
    return [path for path, _, _ in info.leaves if path.startswith(part)]


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
