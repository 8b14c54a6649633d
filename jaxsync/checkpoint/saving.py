"""Saving a checkpoint: on a thread of its own, whole or not at all, one after the other."""

from __future__ import annotations

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

from jaxsync.arguments import check_flags
from jaxsync.checkpoint.contents import INFO, PARTS, make_info, stored_arrays
from jaxsync.checkpoint.store import first_line, import_orbax, open_writer, root_of
from jaxsync.errors import ArgumentError, CheckpointWriteError, ForkedProcessError
from jaxsync.fork import check_not_forked
from jaxsync.host.launcher import check_not_deleted
from jaxsync.train_state import TrainState

# Held while a save is started, so that the look at what is there and the start are one; and while `_pending`
# is looked at. Saves of one process therefore start one after the other.
_lock = threading.RLock()
_pending: dict[str, Checkpoint] = {}  # directory -> the last save to it, done or not; under `_lock`


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
            ForkedProcessError: The process was forked while it was being written.
        """
        if not self.is_done:  # the thread of the save is the parent's
            check_not_forked("Checkpoint.wait")
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
        ForkedProcessError: The process was forked from one that had started JAX.
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
    ...     loaded = jaxsync.load_checkpoint(directory, step)
    >>> checkpoint.number, int(loaded.step), loaded.params["w"].tolist()
    (1, 1, [-0.5, 0.5, 1.5])
    """
    check_not_forked("save_checkpoint")
    check_flags("save_checkpoint", wait=wait)
    _check_save_arguments(state, keep)
    ocp = import_orbax("save_checkpoint")
    root = root_of(directory)
    with _lock:
        _wait_for_pending(root)
        _wait_at_exit()
        checkpoint = _start_save(ocp, root, state, keep)
    if wait or checkpoint.is_done:  # done so soon, it may have failed
        checkpoint.wait()
    return checkpoint


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


def settle_pending(root: str) -> None:
    """Before a look at a directory: what was saved is there. An error is left to the next save."""
    with _lock:
        checkpoint = _pending.get(root)
    if checkpoint is not None and not checkpoint.is_done:
        check_not_forked("waiting for a checkpoint")
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
        except ForkedProcessError:
            pass  # the parent's save, for which the parent waits
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
            failure = CheckpointWriteError(directory=root, reason=first_line(error))
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
    manager = open_writer(ocp, root, keep)
    _check_is_newest(root, manager.all_steps(), number)
    trees = {part: getattr(state, part) for part in PARTS}
    arrays = {part: stored for part, tree in trees.items() if (stored := stored_arrays(tree))}
    items = {part: ocp.args.PyTreeSave(stored) for part, stored in arrays.items()}
    items[INFO] = ocp.args.JsonSave(make_info(number, state.packed_params.layout.plan, trees))
    manager.save(number, args=ocp.args.Composite(**items), force=True)
    return manager


def _check_is_newest(root: str, there: Sequence[int], number: int) -> None:
    later = sorted(other for other in there if other >= number)
    if later:
        found = tuple(f"there is {other}" for other in later)
        raise CheckpointWriteError(
            directory=root, reason=f"this one is of step {number}, which is not the newest", found=found
        )
