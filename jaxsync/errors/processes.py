"""Several processes as one job: how they start, meet, agree, and lose one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxsync.errors.base import JaxsyncError, error


@error
class InitializationError(JaxsyncError, RuntimeError):
    """`jaxsync.initialize` was called too late, twice, or with arguments that do not make a job; or not.

    `is_launched`: it was not, under `jaxsync launch`.
    """

    reason: str
    problems: tuple[str, ...] = ()
    is_launched: bool = False

    def what(self) -> str:
        return f"jaxsync.initialize: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        if self.is_launched:
            return (
                "add jaxsync.initialize() at the top of the script, before anything makes an array or lists "
                "devices; jaxsync launch has set the rest."
            )
        return (
            "call jaxsync.initialize once, before anything makes an array or lists devices: with one "
            "coordinator_address (a free port on the machine of process 0) and num_processes for all, and a "
            "process_id of its own for each; or with none of them, under a launcher that sets them."
        )


@error
class AbsentProcessError(JaxsyncError, TimeoutError):
    """A process that did not come in time. `missing`: the processes; `waited_for`: where they should be."""

    waited_for: str
    missing: tuple[int, ...]
    num_processes: int
    timeout_s: float

    def what(self) -> str:
        number = str(len(self.missing)) if self.missing else "Some"  # who came late sees all of them
        return (
            f"{number} of {self.num_processes} processes did not come to {self.waited_for} within "
            f"{self.timeout_s:g} s."
        )

    def places(self) -> Sequence[str]:
        return [f"process {process} is missing" for process in self.missing]

    def fix(self) -> str:
        is_start = self.waited_for.startswith("jaxsync.initialize")
        timeout = "timeout_s" if is_start else "collective_timeout_s"
        return (
            "see in their logs whether they were started, ended early or take another way through the "
            "program: all processes must run the same calls in the same order. If they are only slow, raise "
            f"the timeout: jaxsync.initialize({timeout}=...)."
        )


@error
class PeerLostError(JaxsyncError, ConnectionError):
    """A process that died or stopped while others needed it; `__cause__` is what was seen of it."""

    seen: str
    processes: tuple[str, ...] = ()

    def what(self) -> str:
        return f"Another process is lost: {self.seen}."

    def places(self) -> Sequence[str]:
        return self.processes

    def fix(self) -> str:
        return (
            "find the process whose log ends first, and start all processes anew, from the last checkpoint. "
            "If one was only slow, raise the timeouts: jaxsync.initialize(collective_timeout_s=...)."
        )


@error
class DisagreementError(JaxsyncError, ValueError):
    """Processes that do not run the same job. `differences`: one line each. Nothing was launched.

    But if it `is_late`: then some have launched what the others did not, and that came to nothing.
    """

    subject: str
    differences: tuple[str, ...]
    is_late: bool = False

    def what(self) -> str:
        late, early = ": some launched a program to which others never came", ", so nothing was launched"
        return f"The processes do not agree on {self.subject}{late if self.is_late else early}."

    def places(self) -> Sequence[str]:
        return self.differences

    def fix(self) -> str:
        return (
            "run the same program, with the same versions, configuration and order of devices, in every "
            "process. A batch of host arrays is the whole batch, the same in all of them; for a process that "
            "has only its own rows: jax.make_array_from_process_local_data(sharding, rows)."
        )


@error
class ForeignDeviceError(JaxsyncError, ValueError):
    """A device that another process owns. `device`, `owner` and the caller's own process."""

    function: str
    device: str
    owner: int
    process: int

    def what(self) -> str:
        owner = f"belongs to process {self.owner}, and this is process {self.process}"
        return f"{self.function}: {self.device} {owner}."

    def fix(self) -> str:
        return (
            "let each process act for its own devices only: those of mesh.devices.flat whose process_index "
            "is jax.process_index()."
        )


@error
class LaunchError(JaxsyncError, OSError):
    """Processes that cannot be started. Those that were started before have been ended.

    `kind` says whether the command is at fault, the run directory, or options, of which `problems` has a line
    for each.
    """

    command: tuple[str, ...] = ()
    process: int = 0
    reason: str = ""
    kind: Literal["command", "run_dir", "options"] = "command"
    run_dir: str = ""
    problems: tuple[str, ...] = ()

    def what(self) -> str:
        if self.kind == "run_dir":
            return f"No process was started: nothing can be recorded in {self.run_dir}: {self.reason}."
        if self.kind == "options":
            return "No process was started: options that cannot be meant."
        return f"Process {self.process} could not be started: {self.command[0]}: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        if self.kind == "run_dir":
            return "give --run-dir a directory that can be made and written to; or leave it out."
        if self.kind == "options":
            return (
                "correct what is listed above; `jaxsync launch --help` says what each option is: "
                "`jaxsync launch -n 4 -- python train.py`."
            )
        return (
            "give the program and its arguments after `--`, as a shell would find them from here: "
            "`jaxsync launch -n 4 -- python train.py`."
        )
