"""Faults to inject into a `SyncClient`, so that users can test what their own code makes of each error."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxsync.client import SyncClient
from jaxsync.errors import FaultMissedError, JaxsyncError, UnknownNameError
from jaxsync.host.ticket import Ticket, raising
from jaxsync.submission import Device, with_paths
from jaxsync.testing.blocks import quiet

Call = Literal["register", "submit", "sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _At:
    """Where a fault strikes.

    Attributes:
        device: The index of the device in the mesh.
        step: The device's step, counted from 0 at the beginning of the block.
        call: Its `register_sync_parameters(device=...)`, `submit_gradient_sync` or `submit_sync_collective`.
    """

    device: int
    step: int
    call: Call = "submit"

    def __str__(self) -> str:
        return f"{type(self).__name__} of {self.call} by device {self.device} in step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(_At):
    """The calls are lost: each returns, and the client never hears of it.

    A lost `submit` is a `MissingGradientError` for all, or a `SetMismatchError` if the device has not even
    announced its leaves. A lost `sync` is a `SyncTimeoutError`, for the lost ticket too. A lost `register` is
    a `SetMismatchError` if the other devices announced a part of the tree.

    Attributes:
        leaf: With `call="submit"`: the path of the one leaf whose gradient is lost; None loses all.

    >>> str(Drop(device=1, step=0, call="sync"))
    'Drop of sync by device 1 in step 0'
    """

    leaf: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(_At):
    """The call, and all that the device calls after it, is held until `FaultyClient.release`.

    Meanwhile a `ticket.wait(timeout)` is a `TicketTimeoutError`, and after the client's `timeout_s` the step
    is a `SyncTimeoutError` for all.

    >>> str(Delay(device=1, step=0))
    'Delay of submit by device 1 in step 0'
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate(_At):
    """The first such call is made twice. A second `register` or `submit` is a `DuplicateError` to the caller.

    >>> str(Duplicate(device=1, step=0))
    'Duplicate of submit by device 1 in step 0'
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise(_At):
    """The first such call raises, as if the device's own work had.

    The caller should tell the others with `client.abort(error, device)`, or leave the `with` block of the
    client: they then get a `SyncFailedError` with this cause, and else a `SyncTimeoutError`.

    Attributes:
        error: What is raised.

    >>> str(Raise(device=1, step=0, error=OSError("no more memory")))
    'Raise of submit by device 1 in step 0'
    """

    error: BaseException


Fault = Drop | Delay | Duplicate | Raise


class FaultyClient:
    """A `SyncClient` whose devices' calls suffer faults. Made by `inject_faults`; all else is the client's.

    Threading: as the client's.
    """

    def __init__(self, client: SyncClient, faults: tuple[Fault, ...]) -> None:
        self._client = client
        self._faults = faults
        self._devices = [_Device() for _ in range(client.mesh.size)]
        self._struck: set[int] = set()  # indices of faults; written under the lock
        # Held while a call is handed on, so that a call and those that release lets go keep their order.
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register_sync_parameters(
        self, params: Any, specs: Any = None, *, device: Device | None = None, **options: Any
    ) -> Any:
        """As `SyncClient.register_sync_parameters`; without `device` no fault strikes it."""
        if device is None:
            return self._client.register_sync_parameters(params, specs, **options)

        def call() -> Any:
            return self._client.register_sync_parameters(params, specs, device=device, **options)

        with self._lock:
            return self._strike("register", self._index(device), call, params)

    def submit_gradient_sync(self, device: Device, name_or_tree: Any, grad: Any = None) -> None:
        """As `SyncClient.submit_gradient_sync`."""
        with self._lock:
            index = self._index(device)
            lost = {fault.leaf: i for i, fault in self._here("submit", index) if _loses_leaf(fault)}

            def call() -> None:
                if lost:
                    self._submit_others(device, lost, name_or_tree, grad)
                else:
                    self._client.submit_gradient_sync(device, name_or_tree, grad)

            self._strike("submit", index, call, None)

    def submit_sync_collective(self, device: Device) -> Ticket[Any]:
        """As `SyncClient.submit_sync_collective`."""
        with self._lock:
            index = self._index(device)
            late = _LateTicket(f"the sync of {self._client.mesh.devices.flat[index]}", self._client)

            def call() -> Ticket[Any]:
                return late.follow(lambda: self._client.submit_sync_collective(device))

            ticket: Ticket[Any] = self._strike("sync", index, call, late)
            self._devices[index].step += 1
            return ticket

    def release(self) -> None:
        """Hands over all that is held, in order; later calls of these devices go through.

        Raises:
            JaxsyncError: What the first call that failed would have raised to its caller.
        """
        errors = []
        with self._lock:
            for device in self._devices:
                device.is_held = False
                while device.held:
                    try:
                        device.held.popleft()()
                    except JaxsyncError as error:
                        errors.append(error)
        if errors:
            raise errors[0]

    def missed(self) -> tuple[Fault, ...]:
        """The faults that have not struck."""
        return tuple(fault for i, fault in enumerate(self._faults) if i not in self._struck)

    def _strike(self, call: Call, index: int, hand_on: Callable[[], Any], instead: Any) -> Any:
        """Makes a call as the faults will have it. `instead` is what a call returns that is not made."""
        device = self._devices[index]
        found = {type(fault): (i, fault) for i, fault in self._here(call, index) if not _loses_leaf(fault)}
        self._struck.update(i for i, _ in found.values())
        if Raise in found:
            raise found[Raise][1].error
        if Drop in found:
            return instead
        times = 2 if Duplicate in found else 1
        device.is_held = device.is_held or Delay in found
        if device.is_held:
            device.held.extend([hand_on] * times)
            return instead
        return [hand_on() for _ in range(times)][-1]

    def _here(self, call: Call, index: int) -> list[tuple[int, Any]]:
        """The faults, with their indices, that strike a call now. All but a `Drop` strike once."""
        step = self._devices[index].step
        return [
            (i, fault)
            for i, fault in enumerate(self._faults)
            if (fault.device, fault.step, fault.call) == (index, step, call)
            and (isinstance(fault, Drop) or i not in self._struck)
        ]

    def _submit_others(self, device: Device, lost: dict[str, int], name_or_tree: Any, grad: Any) -> None:
        prefix, tree = (name_or_tree, grad) if isinstance(name_or_tree, str) else ("", name_or_tree)
        for path, value in with_paths(tree, prefix):
            if path in lost:
                self._struck.add(lost[path])
            else:
                self._client.submit_gradient_sync(device, path, value)

    def _index(self, device: Device) -> int:
        devices = list(self._client.mesh.devices.flat)
        if isinstance(device, int) and 0 <= device < len(devices):
            return device
        if device in devices:
            return devices.index(device)
        raise UnknownNameError(kind="device", names=(str(device),), known=tuple(map(str, devices)))


@dataclass(slots=True, kw_only=True)
class _Device:
    """Where a device is: under the lock of its `FaultyClient`, as all that changes."""

    step: int = 0
    is_held: bool = False
    held: deque[Callable[[], Any]] = field(default_factory=deque)


def _loses_leaf(fault: Fault) -> bool:
    return isinstance(fault, Drop) and fault.leaf is not None


class _LateTicket(Ticket[Any]):
    """The ticket of a sync that the client has not been told of (yet)."""

    def __init__(self, what: str, client: SyncClient) -> None:
        super().__init__(what, poke=self._look, is_loop_thread=lambda: False)
        self._client = client
        self._real: Ticket[Any] | None = None  # written once, by the thread that tells the client
        self._asked: Ticket[Any] | None = None  # of the last look; two at once ask twice, and harm nobody
        self._looking = threading.Lock()  # two threads may wait, and one of them answers

    def follow(self, sync: Callable[[], Ticket[Any]]) -> Ticket[Any]:
        """Syncs at last. What that raises, waiters get too."""
        try:
            self._real = sync()
        except JaxsyncError as error:
            self._fail(error)
            raise
        return self._real

    def done(self) -> bool:
        """Whether the answer is there, good or bad."""
        self._look()
        return super().done()

    def __await__(self) -> Generator[Any, None, Any]:
        """The answer, without blocking the event loop."""
        return asyncio.to_thread(self.wait).__await__()

    def _look(self) -> None:
        if self._real is not None:
            if self._real.done():
                with self._looking:
                    self.answer(self._real.wait)
            return
        if self._asked is not None and not self._asked.done():  # else a long wait would fill its line
            return
        try:
            self._asked = self._client.defer(_nothing)  # what the client is broken by, this raises
        except JaxsyncError as error:
            self._fail(error)

    def _fail(self, error: JaxsyncError) -> None:
        cause = error.__cause__

        def make_error() -> JaxsyncError:
            again = copy.copy(error)
            again.__cause__ = cause
            return again

        with self._looking:
            self.answer(raising(make_error))


def _nothing() -> None:
    """A callback that only asks whether the client works."""


@quiet
@contextlib.contextmanager
def inject_faults(client: SyncClient, *faults: Fault) -> Iterator[FaultyClient]:
    """A client in whose place the code under test suffers faults: lost, late, doubled and failing calls.

    The client itself is not changed. What is held at the end of the block is handed over.

    Args:
        client: The client.
        *faults: `Drop`, `Delay`, `Duplicate` and `Raise`: each says which device, step and call it strikes.

    Raises:
        FaultMissedError: At the end of a block that raised nothing: a fault never struck.

    Threading: the calls of all devices are serialised.

    >>> import jax, jax.numpy as jnp, jaxsync
    >>> client = jaxsync.SyncClient(jaxsync.make_mesh({"data": 2}))
    >>> _ = client.register_sync_parameters({"w": jnp.zeros(2)})
    >>> with inject_faults(client, Duplicate(device=1, step=0)) as faulty:
    ...     grad = jax.device_put(jnp.ones(2), client.mesh.devices.flat[1])
    ...     try:
    ...         faulty.submit_gradient_sync(1, {"w": grad})
    ...     except jaxsync.errors.DuplicateError as error:
    ...         error.leaves
    ("['w']",)
    >>> client.close()
    """
    faulty = FaultyClient(client, faults)
    try:
        yield faulty
    finally:
        with contextlib.suppress(JaxsyncError):
            faulty.release()
    if missed := faulty.missed():
        raise FaultMissedError(faults=tuple(map(str, missed)))
