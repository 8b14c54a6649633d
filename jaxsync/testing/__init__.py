"""What users assert about their own training code, on simulated devices: see `docs/how-to/ci.md`.

Every assertion that fails raises an `AssertionError` of `jaxsync.errors`, which says what, where, and what to
do. Not imported by `import jaxsync`.
"""

from jaxsync.testing.faults import Delay, Drop, Duplicate, FaultyClient, Raise, inject_faults
from jaxsync.testing.gradients import assert_matches_single_device
from jaxsync.testing.leaks import LEAK_CHECKS, no_leaks
from jaxsync.testing.programs import (
    assert_collectives,
    assert_replicas_equal,
    count_collectives,
    no_recompile,
)

__all__ = [
    "LEAK_CHECKS",
    "Delay",
    "Drop",
    "Duplicate",
    "FaultyClient",
    "Raise",
    "assert_collectives",
    "assert_matches_single_device",
    "assert_replicas_equal",
    "count_collectives",
    "inject_faults",
    "no_leaks",
    "no_recompile",
]
