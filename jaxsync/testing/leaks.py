"""What a block of code with a client leaves behind: threads, tickets, arrays."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from jaxsync.client import SyncClient
from jaxsync.errors import ArgumentError, LeakError
from jaxsync.host.launcher import process_launcher
from jaxsync.report.text import format_function
from jaxsync.testing.blocks import quiet

LEAK_CHECKS = ("threads", "tickets", "arrays")

# For a thread that is about to end: a loop that nobody wants looks four times a second.
_THREAD_S = 1.0
# Workers of pools wait for work until the interpreter ends, and are nobody's fault.
_POOLS = ("ThreadPoolExecutor", "asyncio_")


@quiet
@contextlib.contextmanager
def no_leaks(
    start: Callable[[], SyncClient],
    *,
    checks: Iterable[str] = LEAK_CHECKS,
    kept: Callable[[], Iterable[Any]] = tuple,
    has_failed: Callable[[], bool] = lambda: False,
) -> Iterator[SyncClient]:
    """A block with a client, which is closed at its end, and which may leave nothing behind.

    Looked for are threads that were started in the block and still run (but for workers of pools); steps that
    some device has not synced, whose tickets nobody answers; and arrays that were made in the block and live
    on after the client was closed. A block that raises is not looked at.

    Args:
        start: Makes the client.
        checks: Which of `LEAK_CHECKS` are made.
        kept: Called at the end: trees of arrays that may live on.
        has_failed: Called at the end: whether the block is one not to look at, though it raised nothing.

    Raises:
        LeakError: Names each of them.
        CallbackError, TimeoutError: As `SyncClient.close`.
        ArgumentError: There is no such check.

    Threading: waits for the client, for programs that nobody has awaited, and a second for each thread.

    >>> import jaxsync
    >>> with no_leaks(lambda: jaxsync.start(jaxsync.make_mesh({"data": 4}))) as client:
    ...     client.describe().splitlines()[0]
    'SyncClient over mesh (data=4)'
    """
    chosen = frozenset(checks)
    if unknown := sorted(chosen - set(LEAK_CHECKS)):
        raise ArgumentError(
            function="testing.no_leaks",
            argument="checks",
            got=", ".join(unknown),
            wanted=f"of {', '.join(LEAK_CHECKS)}",
        )
    threads = set(threading.enumerate())
    arrays = {id(x): weakref.ref(x) for x in jax.live_arrays()}
    client = start()
    try:
        yield client
        chosen = frozenset() if has_failed() else chosen
        leaks = {"tickets": _tickets(client) if "tickets" in chosen else []}
    finally:
        client.close()
    if "threads" in chosen:
        leaks["threads"] = _threads(threads)
    if "arrays" in chosen:
        leaks["arrays"] = _arrays(arrays, kept())
    _raise_if_any(leaks, chosen)


def _raise_if_any(leaks: Mapping[str, Sequence[str]], chosen: Collection[str]) -> None:
    kinds = tuple(kind for kind, lines in leaks.items() if lines)
    if kinds:
        raise LeakError(
            leaks=tuple(line for kind in kinds for line in leaks[kind]),
            kinds=kinds,
            others=tuple(kind for kind in LEAK_CHECKS if kind in chosen and kind not in kinds),
        )


def _tickets(client: SyncClient) -> list[str]:
    leaks = []
    for step in client.open_steps():
        synced = ", ".join(map(str, step.tickets)) or "nobody"
        leaks += [f"step {step.number}, in which {synced} has synced: {line}" for line in step.owed_lines()]
        if not step.owed:  # it is on its way: the tickets are answered without anybody's help
            for ticket in step.tickets.values():
                ticket.wait_until_done()
    return leaks


def _threads(before: set[threading.Thread]) -> list[str]:
    new = [thread for thread in threading.enumerate() if thread not in before]
    leaks = []
    for thread in new:
        if thread.name.startswith(_POOLS) or thread is threading.current_thread():
            continue
        thread.join(_THREAD_S)
        if thread.is_alive():
            work = format_function(_work_of(thread), "")
            leaks.append(f"thread {thread.name!r} still runs" + f": {work}" * bool(work))
    return leaks


def _work_of(thread: threading.Thread) -> Any:
    """What a thread runs, as far as it says: only `threading` itself has a name for its target."""
    run = type(thread).run
    return getattr(thread, "_target", None) if run is threading.Thread.run else run


def _arrays(before: Mapping[int, weakref.ref[Any]], kept: Iterable[Any]) -> list[str]:
    process_launcher().drain()  # it holds an output of each program that nobody has awaited
    gc.collect()
    allowed = {id(x) for tree in kept for x in _leaves(tree)}
    leaks = []
    for x in jax.live_arrays():
        known = before.get(id(x))  # an id may be another array's by now
        if id(x) not in allowed and (known is None or known() is not x) and not x.is_deleted():
            places = ", ".join(sorted(map(str, x.devices())))
            leaks.append(f"array {x.dtype}{list(x.shape)} on {places}{_holder(x)}")
    return leaks


def _leaves(tree: Any) -> list[Any]:
    try:
        return jax.tree.leaves(tree)
    except (TypeError, ValueError):  # a dict whose keys have no order is no pytree
        return []


def _holder(array: Any) -> str:
    """Which global holds an array, itself or in a list, tuple or dict."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.split(".")[0] in ("jax", "jaxlib"):
            continue
        for attribute, value in list(vars(module).items()):
            if value is array or _is_inside(array, value):
                return f", held by {name}.{attribute}"
    return ""


def _is_inside(array: Any, value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, list | tuple) and any(x is array or _is_inside_tree(array, x) for x in value)


def _is_inside_tree(array: Any, value: Any) -> bool:
    return isinstance(value, list | tuple | dict) and any(x is array for x in _leaves(value))
