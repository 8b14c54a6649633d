"""The one place that launches programs with collectives.

On CPU, XLA runs every device's share of a program on one thread pool, and a collective parks a thread until
its peers come. A loop that launches programs without awaiting one fills the pool with the early devices of
many programs; the late ones never run, and XLA aborts the process. Two threads that launch at once can do
the same with two programs. So: one lock, and a bounded number of programs in flight. Measured with jax
0.10.2 on 2 cores: more than 32 un-awaited launches abort, a window of up to 16 costs nothing. jax 0.12
takes no harm from 2,000 launches; the window stays while 0.10 is supported.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np

from jaxsync.errors import AliasedArrayError, DeletedArrayError, DispatchError
from jaxsync.fork import check_not_forked
from jaxsync.host.peers import peer_error
from jaxsync.host.recorder import Noted, is_noting, note
from jaxsync.host.together import Together

P = ParamSpec("P")
R = TypeVar("R")

# Outputs of one program that are ready when it has finished. One array is enough if the program surely made
# it; several mean that no single one is sure. None: there was no program.
Witness = tuple[jax.Array, ...]

CPU_WINDOW = 8
CPU_LIMIT = 32


class Launcher:
    """Launches programs one at a time and bounds how many are un-awaited.

    Threading: any thread may launch; launches are serialised, and a launch that finds the window full
    blocks until the oldest program has finished. A launch from inside another launch of the same thread
    (a guarded function called while another one is traced) runs as part of it.
    """

    def __init__(self) -> None:
        # Held while a program is handed to XLA: the order in which devices see programs must be one order.
        self._lock = threading.Lock()
        self._owner: int | None = None  # written by the thread that holds the lock; read by any
        self._in_flight: deque[Witness] = deque()  # oldest first; guarded by the lock
        self._num_launched = 0  # guarded by the lock
        self._together = Together()  # guarded by the lock; empty unless events are noted

    @property
    def num_in_flight(self) -> int:
        """How many launched programs have not been awaited. For reports: it may be old when read."""
        return len(self._in_flight)

    def launch(
        self,
        fn: Callable[[], R],
        window: int | None,
        witness: Callable[[R], Witness],
        *,
        caller: object | None = None,
    ) -> R:
        """Calls `fn` with at most `window - 1` programs in flight.

        Args:
            fn: Launches one program and returns its outputs.
            window: How many programs may be un-awaited, this one included; None bounds nothing.
            witness: Outputs of `fn` -> what tells when its program has finished.
            caller: Who launches programs on always the same devices; for the recorded events.

        Raises:
            ForkedProcessError: The process was forked from one that had started JAX.
            PeerLostError: Another process broke a collective of this program or of an earlier one.
            DisagreementError: Likewise, since it asks something that this one does not.
            Exception: What `fn` raises; or what an earlier program failed with, before `fn` is called.
        """
        check_not_forked("launching a program")
        me = threading.get_ident()
        if self._owner == me:
            return fn()
        with self._lock:
            try:
                self._owner = me
                if window is not None:
                    self._make_room(window)
                self._num_launched += 1
                noted = self._note_launch(caller)  # before it: it may be the last of the process
                result = fn()
                arrays = witness(result) if window is not None or noted is not None else ()
                if arrays and isinstance(arrays[0], jax.core.Tracer):  # part of another program
                    arrays = ()
                if arrays and window is not None:
                    self._in_flight.append(arrays)
                self._note_launched(noted, caller, arrays)
                return result
            except Exception as error:
                if (lost := peer_error(error)) is not None:
                    raise lost from error
                self._together.cancel()
                raise
            finally:
                self._owner = None

    def drain(self) -> None:
        """Waits until every launched program has finished.

        Raises:
            ForkedProcessError: The process was forked from one that had started JAX.
            PeerLostError: Another process broke a collective.
            DisagreementError: Likewise, since it asks something that this one does not.
            Exception: What a program failed with.
        """
        check_not_forked("launching a program")
        with self._lock:
            try:
                while self._in_flight:
                    self._await_oldest()
            except Exception as error:
                if (lost := peer_error(error)) is not None:
                    raise lost from error
                raise

    def _note_launch(self, caller: object | None) -> Noted | None:
        if not is_noting():
            return None
        self._together.begin(caller)
        return self._note("program", step=self._num_launched)

    def _note_launched(self, noted: Noted | None, caller: object | None, arrays: Witness) -> None:
        """Tells more of a launch that is noted, now that its outputs say where it runs."""
        if noted is not None and jax.process_count() > 1:
            self._together.end(caller, arrays)
            self._note("program", instead_of=noted, step=self._num_launched)

    def _note(self, kind: str, *, instead_of: Noted | None = None, **facts: Any) -> Noted | None:
        """Notes an event, with what this process has launched together with all others, if anything."""
        if not is_noting():
            return None
        return note(kind, instead_of=instead_of, **facts, **self._together.counts())

    def _make_room(self, window: int) -> None:
        # A program without a sure witness holds all its outputs, so it is not kept waiting in line.
        if self._in_flight and len(self._in_flight[-1]) > 1:
            window = 1
        while len(self._in_flight) >= window:
            self._await_oldest()

    def _await_oldest(self) -> None:
        self._note("await", what=f"the oldest of {len(self._in_flight)} in flight")
        if not _await(self._in_flight.popleft()):
            # Its buffers were donated to a later program, whose end tells of its own: wait for those.
            while self._in_flight:
                _await(self._in_flight.popleft())


def _await(witness: Witness) -> bool:
    """Whether any array of it could be waited for; False if all buffers were donated meanwhile."""
    num_awaited = sum(_await_array(array) for array in witness)  # each of them: any() would stop at one
    return num_awaited > 0


def _await_array(array: jax.Array) -> bool:
    if array.is_deleted():
        return False
    try:
        array.block_until_ready()
    except RuntimeError:
        if array.is_deleted():  # another thread donated it between the two calls
            return False
        raise
    return True


_LAUNCHER = Launcher()  # one a process: the thread pool it protects is one a process


def process_launcher() -> Launcher:
    """The launcher of this process."""
    return _LAUNCHER


def resolve_window(max_in_flight: int | None, platform: str) -> int | None:
    """The window that holds on `platform`: the one asked for, else 8 on CPU and none on accelerators.

    Raises:
        DispatchError: It is no int of 1 or more, or so large that it would abort on CPU.
    """
    limit = CPU_LIMIT if platform == "cpu" else None
    if max_in_flight is None:
        return CPU_WINDOW if platform == "cpu" else None
    is_int = isinstance(max_in_flight, int) and not isinstance(max_in_flight, bool)
    if not is_int or max_in_flight < 1 or (limit is not None and max_in_flight > limit):
        raise DispatchError(asked=repr(max_in_flight), limit=CPU_LIMIT)
    return max_in_flight


class GuardedFunction(Generic[P, R]):
    """A function whose launches go through the process's launcher. Made by `guard_dispatch`.

    Attributes of the wrapped function (`lower`, `trace`, ...) are its own.
    """

    def __init__(self, fn: Callable[P, R], max_in_flight: int | None) -> None:
        resolve_window(max_in_flight, platform="any")
        functools.update_wrapper(self, fn)
        self._max_in_flight = max_in_flight

    @functools.cached_property
    def _window(self) -> int | None:
        # At the first call and not before: to ask for the platform starts the backend, and a decorator
        # runs at import.
        return resolve_window(self._max_in_flight, jax.default_backend())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The wrapped call, through the launcher."""
        fn: Callable[P, R] = self.__wrapped__  # set by update_wrapper

        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return fn(*args, **kwargs)  # part of another program
        check_not_deleted(leaves, {"args": args, "kwargs": kwargs})

        def witness(outputs: R) -> Witness:
            return find_witness(outputs, (args, kwargs))

        return _LAUNCHER.launch(lambda: fn(*args, **kwargs), self._window, witness, caller=self)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds like a function, so that a method can be guarded."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # not set yet: a copy or an unpickled object
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


def guard_dispatch(fn: Callable[P, R], max_in_flight: int | None = None) -> GuardedFunction[P, R]:
    """`fn`, safe to call in a loop that awaits nothing.

    Args:
        fn: A function made by `jax.jit` or `jax.pmap`, or any function that launches one such program.
        max_in_flight: How many programs may be un-awaited, over all guarded functions and `TrainStep`s of
            the process: by default 8 on CPU (at most 32), and no bound on accelerators.

    Returns:
        A callable with the same arguments and results. Inside another trace it is `fn` itself.

    Threading: any thread may call it; calls are serialised. It blocks while the window is full.

    Raises:
        DispatchError: `max_in_flight` cannot work on this platform.
        DeletedArrayError: When called: an argument was donated before.
        ForkedProcessError: When called: in a process that was forked from one that had started JAX.

    >>> import jax, jax.numpy as jnp
    >>> step = guard_dispatch(jax.jit(lambda x: x + 1))
    >>> x = jnp.zeros(())
    >>> for _ in range(100):
    ...     x = step(x)
    >>> float(x)
    100.0
    """
    return GuardedFunction(fn, max_in_flight)


def find_witness(outputs: Any, inputs: Any) -> Witness:
    """The smallest output that the program surely made; all of them if none is sure.

    An input that a jitted function returns as it is comes back at once, in a new array with the old buffer,
    and tells nothing; so an output that looks like an input is not sure. The smallest is the cheapest to
    keep and the least likely to be donated.
    """
    made = [x for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array)]
    if not made or isinstance(made[0], jax.core.Tracer):
        return ()
    given = {(x.shape, x.dtype) for x in jax.tree.leaves(inputs) if isinstance(x, jax.Array | np.ndarray)}
    sure = [x for x in made if (x.shape, x.dtype) not in given]
    return (min(sure, key=lambda array: array.size),) if sure else tuple(made)


def check_not_deleted(leaves: Sequence[Any], trees: Mapping[str, Any]) -> None:
    """Refuses arguments whose buffers are gone.

    JAX 0.10 finds out device by device, while other devices already run their share; on CPU the process
    then often ends with a segmentation fault.

    Args:
        leaves: All leaves of `trees`, which the caller has at hand: this runs before every launch.
        trees: What each argument is called -> the argument.

    Raises:
        DeletedArrayError: Names each of them.
    """
    if not _has_deleted(leaves):
        return
    found = [
        f"{name}{jax.tree_util.keystr(path)}"
        for name, tree in trees.items()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(x, jax.Array) and x.is_deleted()
    ]
    raise DeletedArrayError(leaves=tuple(found))


def _has_deleted(leaves: Sequence[Any]) -> bool:
    try:  # isinstance(x, jax.Array) takes longer than the question itself
        return any([x.is_deleted() for x in leaves])  # noqa: C419  # and a generator than a list
    except AttributeError:
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


def check_not_aliased(name: str, donated: Any, leaves: Sequence[Any], other_leaves: Sequence[Any]) -> None:
    """Refuses a tree, about to be donated, one array of which is passed twice: the end of the process, too.

    Args:
        name: What the donated argument is called.
        donated: The donated argument.
        leaves: Its leaves, which the caller has at hand.
        other_leaves: The leaves of the other arguments.

    Raises:
        AliasedArrayError: Names each pair of places.
    """
    ids = set(map(id, leaves))
    if len(ids) == len(leaves) and ids.isdisjoint(map(id, other_leaves)):
        return
    first = {id(x): "another argument" for x in other_leaves}
    pairs = []
    for path, x in jax.tree_util.tree_leaves_with_path(donated):
        place = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(x, jax.Array) and first.setdefault(id(x), place) != place:
            pairs.append((place, first[id(x)]))
    if pairs:
        raise AliasedArrayError(leaves=tuple(pairs))
