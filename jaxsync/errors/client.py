"""The host side: a client, the gradients that devices hand over to it, and the steps it completes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxsync.errors.base import JaxsyncError, error
from jaxsync.report.text import format_count
from jaxsync.report.timeline import draw_timeline, make_spans


@error
class ClosedError(JaxsyncError, RuntimeError):
    """A client that is closed. `pending`: what was unanswered when it was closed."""

    function: str
    pending: tuple[str, ...] = ()

    def what(self) -> str:
        return f"{self.function}: the sync client is closed."

    def places(self) -> Sequence[str]:
        return self.pending

    def fix(self) -> str:
        return "make a new client: jaxsync.start(mesh, config), or `with jaxsync.SyncClient(mesh, config)`."


@error
class StartConflictError(JaxsyncError, RuntimeError):
    """A second start with another mesh or config. `differences`: one line each."""

    differences: tuple[str, ...]

    def what(self) -> str:
        return "jaxsync.start was called before, and that client is still open, with other settings."

    def places(self) -> Sequence[str]:
        return self.differences

    def fix(self) -> str:
        return "close the first client before another start; or start with the same mesh and config."


@error
class NotRegisteredError(JaxsyncError, RuntimeError):
    """A sync before any parameters were registered."""

    function: str

    def what(self) -> str:
        return f"{self.function} was called before any parameters were registered."

    def fix(self) -> str:
        return "call client.register_sync_parameters(params) first."


@error
class UnknownNameError(JaxsyncError, LookupError):
    """A device, leaf or step that does not exist."""

    kind: str
    names: tuple[str, ...]
    known: tuple[str, ...]

    def what(self) -> str:
        return f"There is no such {self.kind}: {', '.join(self.names)}."

    def places(self) -> Sequence[str]:
        return [f"there is {name}" for name in self.known]

    def fix(self) -> str:
        return (
            "name a device of the client's mesh (itself or its index), and leaves of the registered tree by "
            "their path, as jax.tree_util.keystr writes it."
        )


@error
class DuplicateError(JaxsyncError, ValueError):
    """The same registration or gradient twice. Only the caller is told; the first one counts.

    `leaves`: the gradients that came twice; or, of an announcement, those that came before it.
    """

    function: str
    device: str
    step: int
    leaves: tuple[str, ...] = ()

    def what(self) -> str:
        if self._is_announcement and self.leaves:
            return (
                f"{self.function}: {self.device} had handed over gradients of step {self.step}; its "
                "announcement comes before the first of them."
            )
        return f"{self.function}: {self.device} did that before in step {self.step}."

    def places(self) -> Sequence[str]:
        return [f"grads{path}" for path in self.leaves]

    @property
    def _is_announcement(self) -> bool:
        return self.function == "register_sync_parameters"

    def fix(self) -> str:
        if self._is_announcement:
            return (
                "announce once a step, before the first gradient of the device; its next step begins after "
                "client.submit_sync_collective(device)."
            )
        return (
            "hand over each gradient once a step: add up several backward passes before, and end a step "
            "with client.submit_sync_collective(device)."
        )


@error
class SubmissionError(JaxsyncError, ValueError):
    """A gradient of another shape, dtype or device than registered. `problems`: one line a leaf."""

    device: str
    problems: tuple[str, ...]

    def what(self) -> str:
        return f"Gradients of {self.device} cannot be synced."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "hand over concrete arrays that live on that device alone, with the shape of its shard and the "
            "registered dtype: jax.device_put(grad, device)."
        )


@error
class TracedSubmissionError(JaxsyncError, TypeError):
    """A host call inside a traced function, where it would run once and never again."""

    function: str

    def what(self) -> str:
        return f"{self.function} was called with traced values, inside jit, grad, shard_map or pmap."

    def fix(self) -> str:
        return (
            "inside a traced function use jaxsync.sync_gradients(grads, plan); call the client with the "
            "arrays the function returned."
        )


@error
class StepOverlapError(JaxsyncError, RuntimeError):
    """A device that is two steps ahead of another."""

    device: str
    step: int

    def what(self) -> str:
        return f"{self.device} would start step {self.step + 2} while step {self.step} is incomplete."

    def fix(self) -> str:
        return "wait for the ticket of a step before the next but one: ticket.wait()."


@error
class SetMismatchError(JaxsyncError, ValueError):
    """Devices that announce different leaves, shapes or dtypes. Nothing was launched."""

    step: int
    problems: tuple[str, ...]

    def what(self) -> str:
        return f"Step {self.step}: the devices do not announce the same leaves, so nothing was reduced."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "announce the same tree on every device; a leaf that one device does not use gets a gradient of "
            "zeros there."
        )


@error
class MissingGradientError(JaxsyncError, ValueError):
    """A sync without a gradient that was announced."""

    step: int
    device: str
    leaves: tuple[str, ...]

    def what(self) -> str:
        number = format_count(len(self.leaves), "gradient", "gradients")
        return f"Step {self.step}: {self.device} synced without {number}."

    def places(self) -> Sequence[str]:
        return [f"grads{path}" for path in self.leaves]

    def fix(self) -> str:
        return (
            "hand over every announced leaf before client.submit_sync_collective(device); or take unused "
            "ones for zero with SyncConfig(unused='zero')."
        )


@error
class SyncTimeoutError(JaxsyncError, TimeoutError):
    """A sync that was not completed in time.

    `owed`: who owes what; `events`: the last that happened; `record`: all that are kept, as JSON.
    """

    step: int
    timeout_s: float
    owed: tuple[str, ...]
    events: str = ""
    record: str = ""

    def what(self) -> str:
        return f"Step {self.step} was not complete after {self.timeout_s:g} s."

    def places(self) -> Sequence[str]:
        return self.owed or (
            "every device of this process has synced: a launched program did not finish; if it runs over "
            "several processes, another one may not have come to it",
        )

    def fix(self) -> str:
        text = (
            "see that every device reaches client.submit_sync_collective in every step; if one is only slow, "
            "raise SyncConfig(timeout_s=...)."
            if self.owed
            else "see that every process makes the same calls, with the same leaves, in the same order. With "
            "SyncConfig(timeout_s=...) above the collective_timeout_s of jaxsync.initialize, the processes "
            "can find out first in what they do not agree."
        )
        return f"{text}\nThe last events:\n{self.events}" if self.events else text

    def picture(self) -> str:
        return draw_timeline(make_spans(json.loads(self.record))) if self.record else ""


@error
class TicketTimeoutError(JaxsyncError, TimeoutError):
    """A wait that ended before the answer came. The ticket is still good."""

    what_for: str
    timeout_s: float

    def what(self) -> str:
        return f"No answer to {self.what_for} within {self.timeout_s:g} s; the ticket is still pending."

    def fix(self) -> str:
        return "wait again, or longer; client.describe() says who and what is missing."


@error
class SyncFailedError(JaxsyncError, RuntimeError):
    """A device or a launch broke; `__cause__` is the exception it broke with."""

    step: int
    devices: tuple[str, ...]
    reason: str

    def what(self) -> str:
        return f"Step {self.step} failed for all devices: {self.reason}."

    def places(self) -> Sequence[str]:
        return [f"it came from {device}" for device in self.devices]

    def fix(self) -> str:
        return "mend what the attached cause says, close the client, and start a new one."


@error
class CallbackError(JaxsyncError, RuntimeError):
    """A deferred callback raised; `__cause__` is what it raised."""

    callbacks: tuple[str, ...]

    def what(self) -> str:
        return f"{format_count(len(self.callbacks), 'deferred callback', 'deferred callbacks')} raised."

    def places(self) -> Sequence[str]:
        return self.callbacks

    def fix(self) -> str:
        return "mend the callback; its exception is attached as the cause."


@error
class WrongThreadError(JaxsyncError, RuntimeError):
    """A wait on the thread that would have to answer."""

    function: str

    def what(self) -> str:
        return f"{self.function} on the loop's own thread, inside a callback, would never end."

    def fix(self) -> str:
        return (
            "let the callback only store or print, and do the rest on the thread that waits for its ticket."
        )


@error
class ForkedProcessError(JaxsyncError, RuntimeError):
    """A call in a forked child, which has neither the loop's thread nor a usable JAX."""

    function: str

    def what(self) -> str:
        return f"{self.function} was called in a forked child of the process that started JAX."

    def fix(self) -> str:
        return "start children with multiprocessing.get_context('spawn'), and make the client there."
