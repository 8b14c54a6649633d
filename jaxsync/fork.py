"""Whether this process was forked from one that had started JAX: there XLA has no threads, and JAX hangs."""

from __future__ import annotations

from jaxsync.errors import ForkedProcessError

_is_orphan = False  # written in a child alone, inside its `fork`, before it has a second thread


def note_fork(*, had_jax: bool) -> None:
    """For the hook of the fork, in the child: whether JAX had started its devices before."""
    global _is_orphan
    _is_orphan = _is_orphan or had_jax


def check_not_forked(function: str) -> None:
    """Refuses to run JAX where it would wait for ever. Costs a look at a variable.

    Args:
        function: What was called, for the error.

    Raises:
        ForkedProcessError: This process was forked after JAX had started.

    >>> check_not_forked("step.init")
    """
    if _is_orphan:
        raise ForkedProcessError(function=function)
