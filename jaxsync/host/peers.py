"""Whether an error of the runtime tells of another process."""

from __future__ import annotations

from collections.abc import Callable

from jaxsync.errors import JaxsyncError, PeerLostError

_LATE = "it did not come to a collective in time"
_BROKEN = "its connection broke"
_SILENT = "it stopped answering"

# What XLA and its CPU collectives say (gloo, 0.10.2 to 0.12), the first that fits: that a peer did not come
# within --xla_cpu_collective_timeout_seconds, or within gloo's own 30 s to its first collective; that its
# connection broke; that it is not heard of. Other text is somebody else's error.
_SIGNS = (
    (("Gloo", "imed out"), _LATE),
    (("Gloo", "Read timeout"), _LATE),
    (("Gloo",), _BROKEN),
    (("gloo/transport",), _BROKEN),
    (("Connection closed by peer",), _BROKEN),
    (("heartbeat timeout",), _SILENT),
    (("stopped sending heartbeats",), _SILENT),
)
# What stands besides in the output of a process that ended by it.
_OUR_OWN = "Another process is lost: "  # of PeerLostError
_SIGNS_OF_AN_END = (
    (("AbsentProcessError: ",), "it did not come in time"),
    (("another task died",), _SILENT),
)

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
    """The error to raise from `error`, if that tells of a process that was lost; else None.

    A PeerLostError; or a DisagreementError, if the other lives and asks something that this one does not.

    Threading: any thread; blocks while the others are asked, if they may have something to say.

    >>> peer_error(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")).what()
    'Another process is lost: its connection broke.'
    """
    global _is_lost
    seen = _find(str(error), _SIGNS)
    if not seen:
        return None
    _is_lost = True
    more = None if _explain is None else _explain()
    return more or PeerLostError(seen=seen)


def sign_of_loss(line: str) -> str:
    """What a line that a process printed at its end says of another process; empty if nothing.

    >>> sign_of_loss("Terminating process because [...] another task died; see the other task logs")
    'it stopped answering'
    >>> sign_of_loss("[Gloo] Rank 1 is connected to 3 peer ranks.")
    ''
    """
    if line.startswith("[Gloo]"):  # it says that all is well
        return ""
    if _OUR_OWN in line:
        return line.partition(_OUR_OWN)[2].strip().removesuffix(".")
    return _find(line, _SIGNS_OF_AN_END + _SIGNS)


def _find(text: str, signs: tuple[tuple[tuple[str, ...], str], ...]) -> str:
    return next((seen for words, seen in signs if all(word in text for word in words)), "")
