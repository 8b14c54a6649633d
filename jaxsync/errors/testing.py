"""What the assertions, fixtures and marks of `jaxsync.testing` found."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxsync.errors.base import JaxsyncError, error
from jaxsync.report.text import format_count


@error
class GradientMismatchError(JaxsyncError, AssertionError):
    """Gradients that are not what one device computes. `leaves`: path and finding of each."""

    leaves: tuple[tuple[str, str], ...]
    num_compared: int

    def what(self) -> str:
        verb = "differs" if len(self.leaves) == 1 else "differ"
        number = f"{len(self.leaves)} of {format_count(self.num_compared, 'value', 'values')}"
        return f"{number} {verb} from what one device computes."

    def places(self) -> Sequence[str]:
        return [f"{path}: {finding}" for path, finding in self.leaves]

    def fix(self) -> str:
        return (
            "reduce every gradient once, over the axes that carry the batch and no other: "
            "jaxsync.value_and_grad(loss_fn, plan) does. A ratio that is a number of devices comes most "
            "often from jax.grad with respect to replicated parameters under jax.shard_map: it sums over the "
            "devices itself, and pmean of that sum changes nothing. There make the parameters varying before "
            "jax.grad: jax.lax.pcast(params, axis, to='varying'). See that loss_fn, on one "
            "device, is the loss of the whole batch; if all is right but the rounding, pass rtol=."
        )


@error
class ReplicasDifferError(JaxsyncError, AssertionError):
    """Devices that should hold the same values, and do not. `leaves`: path and the two devices."""

    leaves: tuple[tuple[str, str, str], ...]

    def what(self) -> str:
        return f"The replicas of {format_count(len(self.leaves), 'array', 'arrays')} hold different values."

    def places(self) -> Sequence[str]:
        return [f"tree{path}: {first} and {second} differ" for path, first, second in self.leaves]

    def fix(self) -> str:
        return (
            "reduce what devices add to, before it is returned with a replicated spec; keep check_vma=True, "
            "which refuses most of these; start every device from the same values, and decide (skip, clip, "
            "stop) by numbers that were reduced."
        )


@error
class CollectiveCountError(JaxsyncError, AssertionError):
    """A program with other collectives than expected. `problems`: one line a kind; `table`: all it has."""

    problems: tuple[str, ...]
    table: str

    def what(self) -> str:
        return "The compiled program does not have the collectives it should have."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "reduce once a step, outside loops, by bucket (jaxsync.sync_gradients); or, if the program is "
            f"right, name every kind with its number.\nIts collectives:\n{self.table}"
        )


@error
class RecompiledError(JaxsyncError, AssertionError):
    """Programs that were compiled where none should be. `functions`: the name of each, in order."""

    functions: tuple[str, ...]

    def what(self) -> str:
        number = format_count(len(self.functions), "program was", "programs were")
        return f"{number} compiled inside no_recompile()."

    def places(self) -> Sequence[str]:
        counts = {name: self.functions.count(name) for name in self.functions}
        return [name if count == 1 else f"{name}, {count} times" for name, count in counts.items()]

    def fix(self) -> str:
        return (
            "call everything once before the block (operations outside jit compile too), and keep shapes, "
            "dtypes, weak types and shardings as they were; make functions and meshes once, not in the loop. "
            "jax.config.update('jax_explain_cache_misses', True) tells what was new."
        )


@error
class LeakError(JaxsyncError, AssertionError):
    """What a test left behind. `leaks`: one line each.

    `kinds`: the checks that found something; `others`: those that found nothing.
    """

    leaks: tuple[str, ...]
    kinds: tuple[str, ...] = ("tickets", "threads", "arrays")
    others: tuple[str, ...] = ()

    def what(self) -> str:
        return f"The test left {format_count(len(self.leaks), 'thing', 'things')} behind."

    def places(self) -> Sequence[str]:
        return self.leaks

    def fix(self) -> str:
        advice = {
            "tickets": "let every device sync and wait for its ticket",
            "threads": "join each thread",
            "arrays": "keep no array in a global",
        }
        checks = "that check" if len(self.kinds) == 1 else "these checks"
        return (
            f"{'; '.join(text for kind, text in advice.items() if kind in self.kinds)}. If it rightly stays, "
            f"leave {checks} out, in pyproject.toml: jaxsync_leak_checks = {json.dumps(self.others)}."
        )


@error
class MeshMarkError(JaxsyncError, AssertionError):
    """A mesh mark that asks for more devices than there are."""

    mesh: str
    asked: int
    found: int
    platform: str

    def what(self) -> str:
        found = f"JAX has {self.found} ({self.platform})"
        return f"The mark mesh({self.mesh}) needs {self.asked} devices; {found}."

    def fix(self) -> str:
        return (
            f"run pytest --jaxsync-devices={self.asked}, or set jaxsync_devices = "
            f'"{self.asked}" in pytest\'s configuration.'
        )


@error
class TooFewDevicesError(JaxsyncError, AssertionError):
    """A test on too few devices to show anything. `allow`: what lets it pass where that is meant."""

    subject: str
    found: int
    wanted: int
    allow: str

    def what(self) -> str:
        why = ", and one device shows nothing: no reduction can be wrong there" if self.found == 1 else ""
        found = format_count(self.found, "device", "devices")
        return f"{self.subject} is on {found}; wanted {self.wanted} or more{why}."

    def fix(self) -> str:
        devices = max(self.wanted, 8)
        return (
            f'run pytest --jaxsync-devices={devices}, or set jaxsync_devices = "{devices}" in pytest\'s '
            f"configuration, and use all devices; or, if so few are meant, {self.allow}."
        )


@error
class FaultMissedError(JaxsyncError, AssertionError):
    """Injected faults that never struck, so that nothing was tested. `faults`: one line each."""

    faults: tuple[str, ...]

    def what(self) -> str:
        return f"{format_count(len(self.faults), 'injected fault', 'injected faults')} never struck."

    def places(self) -> Sequence[str]:
        return self.faults

    def fix(self) -> str:
        return (
            "use the client that inject_faults gives in place of the other, and count steps from 0 at the "
            "beginning of the block, for each device."
        )
