"""Checkpoints on disk: those that cannot be read, written, or used for this step."""

from __future__ import annotations

from collections.abc import Sequence

from jaxsync.errors.base import JaxsyncError, error
from jaxsync.report.text import format_count


@error
class CheckpointReadError(JaxsyncError, OSError):
    """A checkpoint that is not there, or cannot be read. `found`: what is in the directory."""

    directory: str
    reason: str
    found: tuple[str, ...] = ()

    def what(self) -> str:
        return f"No checkpoint could be loaded from {self.directory}: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.found

    def fix(self) -> str:
        return (
            "give the directory that save_checkpoint wrote to, and a number that "
            "jaxsync.list_checkpoints(directory) has; if one cannot be read, load the one before it."
        )


@error
class CheckpointWriteError(JaxsyncError, OSError):
    """A checkpoint that cannot be written. `found`: what is in the way."""

    directory: str
    reason: str
    found: tuple[str, ...] = ()

    def what(self) -> str:
        return f"No checkpoint could be saved in {self.directory}: {self.reason}."

    def places(self) -> Sequence[str]:
        return self.found

    def fix(self) -> str:
        return (
            "give each run a directory of its own that can be written to and has room; to go back to an "
            "earlier step, go on in a new directory. The checkpoints that were there are as they were."
        )


@error
class CheckpointMismatchError(JaxsyncError, ValueError):
    """A checkpoint whose leaves are not those of the step. `problems`: one line a leaf."""

    path: str
    saved_with: str
    loaded_with: str
    problems: tuple[str, ...]

    def what(self) -> str:
        number = format_count(len(self.problems), "leaf does", "leaves do")
        return (
            f"{number} not fit: the checkpoint {self.path} (plan {self.saved_with[:16]}) is of another model "
            f"or optimizer than the step (plan {self.loaded_with[:16]})."
        )

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        return (
            "load it with a step whose parameters and optimizer have these leaves; only devices, mesh, "
            "specs and config may differ from those it was saved with."
        )
