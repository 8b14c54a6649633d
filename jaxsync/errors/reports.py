"""The files of a run, and what is reported from them or from an audit."""

from __future__ import annotations

from collections.abc import Sequence

from jaxsync.errors.base import JaxsyncError, error


@error
class RunReadError(JaxsyncError, OSError):
    """The files of a run that are not there, or are damaged. `found`: what is in the directory."""

    directory: str
    reason: str
    found: tuple[str, ...] = ()

    def what(self) -> str:
        return f"No run could be read from {self.directory}: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.found

    def fix(self) -> str:
        return (
            "give the directory of a run: what `jaxsync train CONFIG --run-dir DIR` or "
            "jaxsync.run_log.RunLog wrote to. A line of steps.jsonl that is damaged can be deleted; run.json "
            "cannot be mended."
        )


@error
class RunWriteError(JaxsyncError, OSError):
    """The files of a run that cannot be written."""

    directory: str
    reason: str

    def what(self) -> str:
        return f"The run cannot be written to {self.directory}: {self.reason}."

    def fix(self) -> str:
        return (
            "give each run a directory of its own that can be written to and has room (--run-dir DIR). To go "
            "on with the run that is there: `jaxsync train` with its --checkpoints DIR and --resume, or in a "
            "program of your own RunLog.open(directory, header, resume=True)."
        )


@error
class ReportWriteError(JaxsyncError, OSError):
    """A page or trace that cannot be written."""

    file: str
    reason: str

    def what(self) -> str:
        return f"The report cannot be written to {self.file}: {self.reason}."

    def fix(self) -> str:
        return "name a file in a folder that exists and can be written to."


@error
class SubjectError(JaxsyncError, ValueError):
    """A function of the user's own that cannot be audited."""

    reference: str
    problem: str

    def what(self) -> str:
        return f"{self.reference!r} cannot be audited: {self.problem}."

    def fix(self) -> str:
        return (
            "name a function as package.module:function. It takes no arguments and returns (fn, *args): a "
            "step and the arguments to compile it for. Its module is looked for in the current folder, and "
            "where Python looks (PYTHONPATH)."
        )
