"""Whether an error of the runtime tells of another process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax

from jaxsync.errors import AbsentProcessError, JaxsyncError, PeerLostError

_LATE = "it did not come to a collective in time"
_BROKEN = "its connection broke"
_SILENT = "it stopped answering"
_ABSENT = "it did not come in time"

# What XLA and its CPU collectives say (gloo, 0.10.2 to 0.12), the first that fits: that a peer did not come
# within --xla_cpu_collective_timeout_seconds, or within gloo's own 30 s to its first collective; that its
# connection broke; that it is not heard of. Only the runtime's own words count: with the name of a status
# before them, as each of its errors has.
_STATUS = re.compile("[A-Z]+(_[A-Z]+)*: ")
_SIGNS = (
    (("Gloo", "imed out"), _LATE),
    (("Gloo", "Read timeout"), _LATE),
    (("Gloo",), _BROKEN),
    (("gloo/transport",), _BROKEN),
    (("Connection closed by peer",), _BROKEN),
    (("heartbeat timeout",), _SILENT),
    (("stopped sending heartbeats",), _SILENT),
)
# What the runtime writes before it ends the process.
_SIGNS_OF_AN_ABORT = (
    (("another task died",), _SILENT),
    (("heartbeat timeout",), _SILENT),
    (("stopped sending heartbeats",), _SILENT),
)
# The first line of an exception that Python has printed: the name of its class, with the module's or with
# what such names end on, and its text.
_EXCEPTION = re.compile(
    r"(?:\w+\.)*(?P<name>(?:(?<=\.)\w+|\w+(?:Error|Exception|Exit|Interrupt)))(?:: (?P<text>.*))?$"
)
_OUR_OWN = "Another process is lost: "  # of PeerLostError
# As XLA's errors come to Python: by jaxlib's way to say it that of a bad argument, too.
_RUNTIME_ERRORS = ("JaxRuntimeError", "XlaRuntimeError", "ValueError")

_is_lost = False  # written by whichever thread sees it first; only ever set
_explain: Callable[[], JaxsyncError | None] | None = None  # any thread may write it; each time the like


def has_lost_peer() -> bool:
    """Whether this process has seen that another one is lost: then nobody waits for it at exit."""
    return _is_lost


def explain_losses(explain: Callable[[], JaxsyncError | None]) -> None:
    """From now on `explain` is asked when a process is lost: the error that tells more of it, or None."""
    global _explain
    _explain = explain


def peer_error(error: BaseException) -> JaxsyncError | None:
    """The error to raise from `error`, if the runtime tells by it that a process was lost; else None.

    A PeerLostError; or a DisagreementError, if the other lives and asks something that this one does not.
    Never from what a program raises itself, whatever its text, nor in a process that is alone.

    Threading: any thread; blocks while the others are asked, if they may have something to say.

    >>> peer_error(TimeoutError("broker: heartbeat timeout"))
    """
    global _is_lost
    is_runtime = isinstance(error, jax.errors.JaxRuntimeError) or type(error) is ValueError
    seen = _find_status(str(error)) if is_runtime and jax.distributed.is_initialized() else ""
    if not seen:
        return None
    _is_lost = True
    more = None if _explain is None else _explain()
    return more or PeerLostError(seen=seen)


def sign_of_loss(lines: Sequence[str], *, is_abort: bool = False) -> str:
    """What a process said at its end of another one, as its last lines have it; empty if nothing.

    Only what has ended it counts: the last exception, or what the runtime says when it aborts.

    Args:
        lines: The last lines of its output.
        is_abort: Whether it ended by an abort.

    >>> sign_of_loss(["ERROR: Gloo", "ConnectionError: my database: Connection closed by peer"])
    ''
    >>> sign_of_loss(["Terminating process because [...] another task died; see the logs"], is_abort=True)
    'it stopped answering'
    """
    if is_abort:
        return next(filter(None, (_find(line, _SIGNS_OF_AN_ABORT) for line in reversed(lines))), "")
    found = next(filter(None, map(_EXCEPTION.match, reversed(lines))), None)
    if found is None:
        return ""
    name, text = found["name"], found["text"] or ""
    if name == PeerLostError.__name__:
        return text.removeprefix(_OUR_OWN).strip().removesuffix(".")
    if name == AbsentProcessError.__name__:
        return _ABSENT
    return _find_status(text) if name in _RUNTIME_ERRORS else ""


def is_late(sign: str) -> bool:
    """Whether a sign says that a process was waited for in vain, for as long as one waits.

    >>> is_late("it did not come to a collective in time"), is_late("its connection broke")
    (True, False)
    """
    return sign in (_LATE, _ABSENT)


def _find_status(text: str) -> str:
    return _find(text, _SIGNS) if _STATUS.match(text) else ""


def _find(text: str, signs: tuple[tuple[tuple[str, ...], str], ...]) -> str:
    return next((seen for words, seen in signs if all(word in text for word in words)), "")
