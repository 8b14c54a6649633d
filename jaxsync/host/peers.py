"""Whether an error of the runtime tells of another process."""

from __future__ import annotations

from jaxsync.errors import PeerLostError

# What XLA's CPU collectives say (gloo, 0.10.2 to 0.12): that a peer's connection broke, or that it did not
# come within --xla_cpu_collective_timeout_seconds. Other text is somebody else's error.
_SIGNS = (
    "Gloo",
    "gloo/transport",
    "Connection closed by peer",
    "heartbeat timeout",
    "stopped sending heartbeats",
)

_is_lost = False  # written by whichever thread sees it first; only ever set


def has_lost_peer() -> bool:
    """Whether this process has seen that another one is lost: then nobody waits for it at exit."""
    return _is_lost


def peer_error(error: BaseException) -> PeerLostError | None:
    """The error to raise from `error`, if that tells of a process that was lost; else None.

    >>> peer_error(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")).what()
    'Another process is lost: its connection broke.'
    """
    global _is_lost
    text = str(error)
    if not any(sign in text for sign in _SIGNS):
        return None
    _is_lost = True
    seen = "it did not come to a collective in time" if "Timed out" in text else "its connection broke"
    return PeerLostError(seen=seen)
