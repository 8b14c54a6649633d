"""SyncClient: gradients that single devices hand over, synced by one loop on the host."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxsync.arguments import check_flags
from jaxsync.callbacks import check_in_reach, do_nothing
from jaxsync.calls import Calls
from jaxsync.config import SyncConfig
from jaxsync.errors import (
    ArgumentError,
    CallbackError,
    ClosedError,
    DataShardedError,
    StartConflictError,
    TracedSubmissionError,
    WrongThreadError,
)
from jaxsync.exchange import Exchange
from jaxsync.fork import check_not_forked
from jaxsync.host.loop import Loop
from jaxsync.host.recorder import Recorder
from jaxsync.host.ticket import Ticket
from jaxsync.mesh import format_mesh
from jaxsync.placement import check_replicas_equal, concrete_mesh, place_leaves
from jaxsync.plan import SyncPlan, make_plan
from jaxsync.progress import OpenStep, look
from jaxsync.registration import Registration
from jaxsync.submission import Device, Senders

_CLOSE_S = 5.0
_EXIT_S = 4.0  # for a thread that nobody wants any more: its own grace of 2 s, and a callback that runs


class SyncClient:
    """The host side of sync: registration, gradients handed over by device, deferred callbacks, shutdown.

    For work that is not one compiled step: one thread for each device, or one thread that goes through
    them. (A compiled step needs `make_train_step`; `defer` is useful beside it.) A context manager.

    The mesh may span several processes. Each makes a client and acts for its own devices alone. A step is
    launched when all devices of this process have handed over, and waits for those of the others. All must
    register the same, at the same step, and take part with the same leaves.

    In each step a device announces leaves (`register_sync_parameters(..., device=...)`; a device that does
    not, and submits, takes part with all), hands over gradients and ends with `submit_sync_collective`. A
    bucket is reduced as soon as every device has handed over its leaves. What comes out is bit for bit what
    `sync_gradients` computes.

    When something fails, it fails for all: every waiter, and every later call, gets an error that names the
    step, the devices and the leaves, with the first cause attached. Close the client and start anew.

    Threading: every method may be called from any thread, and blocks for microseconds at most, but for
    `close` and for `defer` when 1,000 callbacks wait. A device's own calls must be in order: by one thread,
    or by several that agree. Callbacks run on the loop's thread, one after the other in the order of `defer`,
    and hold up syncs while they run.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> mesh = jaxsync.make_mesh({"data": 4})
    >>> with SyncClient(mesh) as client:
    ...     _ = client.register_sync_parameters({"w": jnp.zeros(2)})
    ...     for i, device in enumerate(mesh.devices.flat):
    ...         client.submit_gradient_sync(device, {"w": jax.device_put(jnp.full(2, 1.0 * i), device)})
    ...     tickets = [client.submit_sync_collective(device) for device in mesh.devices.flat]
    ...     tickets[0].wait()
    {'w': Array([1.5, 1.5], dtype=float32)}
    """

    def __init__(self, mesh: Mesh, config: SyncConfig | None = None) -> None:
        check_not_forked("SyncClient")
        self.config = SyncConfig() if config is None else config
        self.mesh = mesh
        empty = make_plan({}, mesh, config=self.config)
        self._senders = Senders(concrete_mesh(empty))
        self._registration = Registration(empty, mesh, self._senders.devices)
        self._recorder = Recorder()
        # Does not know the client, or it would never go.
        self._exchange = Exchange(self._registration, self._senders.devices, self._recorder)
        self._loop = self._exchange.loop
        self._calls = Calls(self._exchange, self._registration, self._senders)
        # Runs when the last reference goes, and at exit.
        self._finalizer = finalizer = weakref.finalize(self, _shut_down, self._loop, os.getpid())
        _open.add(self)
        self._loop.start(lambda: finalizer.alive)

    @property
    def plan(self) -> SyncPlan:
        """The plan of the registered parameters.

        Raises:
            NotRegisteredError: Nothing has been registered.
        """
        return self._registration.current("client.plan").plan

    def register_sync_parameters(
        self, params: Any, specs: Any = None, *, device: Device | None = None, broadcast: bool = True
    ) -> Any:
        """Registers the parameters; or announces the leaves of one device's coming step.

        Args:
            params: Without `device`: the tree of parameters, arrays with global shapes. With `device`: the
                tree, or a part of it with the same paths: all devices must announce the same. If nothing is
                registered yet, the first announcement registers.
            specs: As for `make_plan`; without `device` only.
            device: A device of the mesh, or its index.
            broadcast: With several processes and without `device`: whether the values of the first process
                count for all. If not, they must have equal values.

        Returns:
            Without `device`: the parameters as arrays on the mesh, in buffers of their own. With `device`:
            `params`.

        Raises:
            ArgumentError: `broadcast` is no bool.
            RegistrationError, SpecError, MeshError: As for `make_plan`.
            DataShardedError: A parameter is sharded over a data axis.
            ReplicaMismatchError: An array claims to be replicated, and its replicas differ.
            DuplicateError: That device has announced, or begun to submit, before in this step.
            UnknownNameError: There is no such device.
            SetMismatchError: Devices announce different leaves, shapes or dtypes: fails all.
            ForeignDeviceError: Another process owns the device.
            DisagreementError: Processes register something else: on every one of them.
            AbsentProcessError: Processes did not come to register in time.
            JaxsyncError: What the client is broken by.
        """
        self._check("register_sync_parameters", params)
        check_flags("SyncClient.register_sync_parameters", broadcast=broadcast)
        if device is not None:
            self._calls.announce(self._senders.index(device, "register_sync_parameters"), params)
            return params
        check_replicas_equal(params)
        plan = make_plan(params, self.mesh, specs, self.config)
        over_data = tuple((leaf.path, str(leaf.spec)) for leaf in plan.leaves if leaf.scatter_dims)
        if over_data:  # each device hands over and gets back whole leaves
            raise DataShardedError(function="SyncClient", leaves=over_data, axes=plan.data_axes)
        registered = self._calls.register(plan)
        leaves = registered.consent.share(jax.tree.leaves(params), is_broadcast=broadcast)
        return jax.tree.unflatten(plan.treedef, place_leaves(leaves, plan, copy=True))

    def submit_gradient_sync(self, device: Device, name_or_tree: Any, grad: Any = None) -> None:
        """Hands over gradients of one device. Returns at once.

        Args:
            device: A device of the mesh, or its index.
            name_or_tree: A tree of gradients, all or part of the registered one; or the path of a leaf or
                subtree (as `jax.tree_util.keystr` writes it), of which `grad` is the gradient.
            grad: The array or subtree for a path.

        Raises:
            SubmissionError: A gradient has another shape or dtype than the device's shard, lives elsewhere,
                is deleted, or was not announced.
            TracedSubmissionError: Called inside a traced function.
            DuplicateError: A gradient was handed over before in this step.
            StepOverlapError: The device is two steps ahead of another.
            UnknownNameError: There is no such device or leaf.
            ForeignDeviceError: Another process owns the device.
            NotRegisteredError: Nothing has been registered.
            JaxsyncError: What the client is broken by.
        """
        self._check("submit_gradient_sync", (name_or_tree, grad))
        index = self._senders.index(device, "submit_gradient_sync")
        self._calls.submit(index, name_or_tree, grad)

    def submit_sync_collective(self, device: Device) -> Ticket[Any]:
        """Says that this device has handed over all gradients of its step.

        Args:
            device: A device of the mesh, or its index.

        Returns:
            A ticket for the synced gradients of that device: the registered tree of arrays on that device,
            with None for leaves that were not announced.

        Raises:
            UnknownNameError: There is no such device.
            ForeignDeviceError: Another process owns the device.
            StepOverlapError: The device is two steps ahead of another.
            NotRegisteredError: Nothing has been registered.
            JaxsyncError: What the client is broken by.
        """
        self._check("submit_sync_collective")
        index = self._senders.index(device, "submit_sync_collective")
        return self._calls.sync(index)

    def defer(
        self, callback: Callable[..., Any], *arrays: Any, on: Literal["all", "first"] = "all"
    ) -> Ticket[Any]:
        """Runs `callback(*host_values)` on the loop's thread once the arrays are ready.

        Args:
            callback: Gets NumPy values; what it returns answers the ticket.
            *arrays: Arrays, or trees of them.
            on: With several processes: whether the callback runs in `"all"` that call this, or in the
                `"first"` of the mesh alone. In the others the ticket is answered with None.

        Returns:
            A ticket; nobody needs to wait for it. If the callback raises, the ticket does, or else `close`.

        Raises:
            ArgumentError: `on` is something else; or an array is sharded over several processes.
            TracedSubmissionError: Called inside a traced function.
            JaxsyncError: What the client is broken by.
        """
        self._check("defer", arrays)
        if on not in ("all", "first"):
            wanted = "'all' or 'first'"
            raise ArgumentError(function="SyncClient.defer", argument="on", got=repr(on), wanted=wanted)
        if on == "first" and not self._senders.is_first:
            callback, arrays = do_nothing, ()
        check_in_reach(arrays)
        callbacks = self._exchange.callbacks
        while callbacks.is_full() and not self._loop.is_loop_thread():
            callbacks.wait_for_first()
            self._check("defer")
        return self._calls.defer(callback, arrays)

    def abort(self, error: BaseException, device: Device | None = None) -> None:
        """Fails the step for all: every waiter, and every later call, gets `error` as the cause.

        For a thread that cannot go on. The first cause wins.

        Threading: also from a signal's handler.

        Args:
            error: What happened.
            device: The device it happened on.

        Raises:
            ArgumentError: `error` is no exception.
            UnknownNameError: There is no such device.
            ForeignDeviceError: Another process owns the device.
            ClosedError: The client was closed.
        """
        self._check("abort")
        if not isinstance(error, BaseException):
            wanted, got = "an exception, made and not only its class", type(error).__name__
            raise ArgumentError(function="SyncClient.abort", argument="error", got=got, wanted=wanted)
        devices = () if device is None else (self._senders.index(device, "abort"),)
        self._exchange.fail(error, devices)
        self._loop.poke()

    def describe(self) -> str:
        """What the client is doing, for people: the mesh, the open steps, who owes what, the last events.

        Threading: waits for nobody.
        """
        check_not_forked("describe")
        state, steps = look(self._exchange, self._registration)
        lines = [f"SyncClient over mesh ({format_mesh(self.mesh)})", f"next step {state.first}"]
        if state.failure is not None:
            lines.append(f"broken: {state.failure.kind} in step {state.failure.step}")
        lines += [*map(str, steps), f"{len(state.deferred)} callbacks wait", self._recorder.format()]
        return "\n".join(lines)

    def open_steps(self) -> tuple[OpenStep, ...]:
        """The steps that are not complete, oldest first: who has synced, who owes what, how far it is.

        Empty when nobody has begun one, when all are complete, and after a failure or `close`.

        Threading: waits for nobody.

        >>> import jax.numpy as jnp, jaxsync
        >>> with jaxsync.SyncClient(jaxsync.make_mesh({"data": 2})) as client:
        ...     _ = client.register_sync_parameters({"w": jnp.zeros(2)})
        ...     client.submit_gradient_sync(0, {"w": jnp.ones(2)})
        ...     _ = client.submit_sync_collective(0)
        ...     for step in client.open_steps():
        ...         print(step)
        step 0: of 1 buckets 0 are launched and 0 finished
          cpu:1 has not synced, nor handed over the gradients of ['w']
        """
        check_not_forked("open_steps")
        return look(self._exchange, self._registration)[1]

    def statistics(self) -> Mapping[str, int]:
        """Counts since the start: submissions, launched buckets, bytes (on one device), steps, callbacks.

        Threading: waits for nobody.
        """
        check_not_forked("statistics")
        return self._exchange.counts()

    def record(self) -> str:
        """The last 1,000 events as a JSON list.

        Threading: waits for nobody.
        """
        check_not_forked("record")
        return self._recorder.to_json()

    def close(self, timeout: float = _CLOSE_S) -> None:
        """Ends the client. Closing again does nothing.

        Runs the callbacks whose arrays become ready in time, answers what is still pending with
        `ClosedError`, stops the loop and joins its thread.

        Threading: any thread but the loop's, and a signal's handler. If the signal struck in the middle of
        another call of its thread, the client ends after the handler has, and this is a `TimeoutError`.

        Args:
            timeout: Seconds for all of it.

        Raises:
            CallbackError: Deferred callbacks had raised, and nobody had seen it. Raised once.
            TimeoutError: The thread had not ended in time; it ends as soon as its callback does.
            WrongThreadError: Called on the loop's thread.
        """
        check_not_forked("close")
        if self._loop.is_loop_thread():
            raise WrongThreadError(function="close")
        deadline = time.monotonic() + timeout
        if self._loop.is_alive:
            self._exchange.callbacks.wait_for_last(timeout)
        self._loop.close()
        if not self._loop.join(max(0.1, deadline - time.monotonic())):
            what = "a callback still runs, or a call that a signal's handler has interrupted"
            raise TimeoutError(f"close: the loop did not end within {timeout:g} s: {what}")
        self._finalizer.detach()
        if unseen := self._exchange.callbacks.take_unseen():
            names = tuple(f"{name}: {type(error).__name__}" for name, error in unseen)
            raise CallbackError(callbacks=names) from unseen[0][1]

    def __enter__(self) -> SyncClient:
        self._check("entering the client")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        check_not_forked("leaving the client")
        self._exchange.fail(error)
        try:
            self.close()
        except (CallbackError, TimeoutError) as also:  # the first cause is what the caller must see
            error.add_note(str(also))

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._loop.state.is_closed

    def _check(self, function: str, values: Any = None) -> None:
        check_not_forked(function)
        state = self._loop.state
        if state.is_closed:
            raise ClosedError(function=function)
        # A list, since a generator takes twice as long, and this runs for every gradient.
        if values is not None and any([isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values)]):  # noqa: C419
            raise TracedSubmissionError(function=function)


def _shut_down(loop: Loop, pid: int) -> None:
    if os.getpid() == pid and not loop.is_loop_thread():
        loop.poke()
        loop.join(_EXIT_S)


_open: weakref.WeakSet[SyncClient] = weakref.WeakSet()  # for _shut_down_all


@atexit.register  # after JAX was imported, so that it runs before JAX takes its runtime down
def _shut_down_all() -> None:
    # Not left to weakref.finalize: its hook has the place of the first finalizer of the whole process, which
    # may have been made before JAX was imported, and then runs too late.
    for client in list(_open):
        client._finalizer()


_start_lock = threading.Lock()  # protects _started
_started: weakref.ref[SyncClient] | None = None


def start(mesh: Mesh, config: SyncConfig | None = None) -> SyncClient:
    """The client of this process: a new one, or the one that is open with the same mesh and config.

    So a notebook cell can be run again. The process holds no reference: when the last one of yours goes, the
    client closes.

    Threading: any thread; concurrent starts return one client.

    Raises:
        StartConflictError: One is open with another mesh or config.
        ForkedProcessError: The process was forked from one that had started JAX.

    >>> import jaxsync
    >>> client = start(jaxsync.make_mesh({"data": 2}))
    >>> start(jaxsync.make_mesh({"data": 2})) is client
    True
    >>> client.close()
    """
    global _started
    check_not_forked("start")
    config = SyncConfig() if config is None else config
    with _start_lock:
        current = None if _started is None else _started()
        if current is None or current.is_closed:
            current = SyncClient(mesh, config)
            _started = weakref.ref(current)
            return current
    differences = []
    if current.mesh != mesh:
        differences.append(f"mesh: open with ({format_mesh(current.mesh)}), asked for ({format_mesh(mesh)})")
    if current.config != config:
        differences.append(f"config: open with {current.config}, asked for {config}")
    if differences:
        raise StartConflictError(differences=tuple(differences))
    return current
