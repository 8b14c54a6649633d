"""The end of a process that is one of several.

At exit JAX lets a process wait for all others, and ends them all by an abort when one does not come. That is
minutes when one of them has raised, and its exit code is lost. So the processes tell each other first how
they end: if all do so well, JAX does as it always does; else nobody waits.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Mapping

from jaxsync.errors import JaxsyncError
from jaxsync.host.peers import has_lost_peer
from jaxsync.multiprocess.coordination import Coordination, connect, let_go

logger = logging.getLogger("jaxsync")

_WELL = "well"
# The coordinator lives in process 0, and when it goes, JAX aborts the others. When all fail at once, as on a
# disagreement or when a third is lost, each has so long to report its error and end with its own code.
_GRACE_S = 2.0
_LOOK_S = 0.02  # between two looks at what the others have said: a fraction of what a start costs


def leave_together(timeout_s: float) -> None:
    """Makes this process wait at its exit for the others, as long as nobody has failed.

    Args:
        timeout_s: For how long.
    """
    # Registered after JAX's own handler, and so called before it.
    atexit.register(_leave, timeout_s)


def _leave(timeout_s: float) -> None:
    coordination = connect()
    if coordination is None:  # jax.distributed.shutdown was called
        return
    end = _own_end()
    try:
        coordination.put(f"exit/{coordination.process}", end)
        if end == _WELL:
            ends = _hear_ends(coordination, timeout_s)
            if set(ends.values()) == {_WELL} and len(ends) == coordination.num_processes:
                return
            _report(ends, coordination)
        elif coordination.process == 0:
            threading.Event().wait(_GRACE_S)
    except JaxsyncError as error:
        logger.warning("%s", error)
    except KeyboardInterrupt:
        pass  # whoever does not want to wait; what Python would print of it hides the error that matters
    let_go()


def _report(ends: Mapping[int, str], coordination: Coordination) -> None:
    others = [f"process {process} ended {end}" for process, end in ends.items() if end != _WELL]
    silent = set(range(coordination.num_processes)) - set(ends)
    others += [f"process {process} has not ended" for process in sorted(silent)]
    logger.warning("process %d ends without the others: %s", coordination.process, "; ".join(others))


def _own_end() -> str:
    """How this process ends: well, or by what."""
    # What the interpreter has reported and is about to exit with (last_exc from Python 3.12 on).
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        return f"with {type(error).__name__}"
    return "after it lost another process" if has_lost_peer() else _WELL


def _hear_ends(coordination: Coordination, timeout_s: float) -> Mapping[int, str]:
    """How the processes have ended, once all have, or one has not ended well; or what is known in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        ends = {int(process): end for process, end in coordination.list("exit").items()}
        is_over = len(ends) == coordination.num_processes or set(ends.values()) != {_WELL}
        if is_over or time.monotonic() >= deadline:
            return ends
        threading.Event().wait(_LOOK_S)  # the service has no wait for "all, or any that failed"
