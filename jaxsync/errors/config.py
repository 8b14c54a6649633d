"""What a job is asked to be: its configuration, the arguments of a call, the extras it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxsync.errors.base import JaxsyncError, error


@error
class ConfigError(JaxsyncError, ValueError):
    """A configuration that cannot be meant. `problems` has one line for each key at fault.

    `kind` says whether values are at fault, or the file that cannot be read, or its TOML; `folder` is where a
    relative path started.
    """

    source: str
    problems: tuple[str, ...]
    kind: Literal["values", "file", "toml"] = "values"
    folder: str = ""

    def what(self) -> str:
        return f"Not a valid configuration: {self.source}."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        if self.kind == "file":
            where = f"; {self.source} was looked for in the current folder, {self.folder}" * bool(self.folder)
            return f"give the path of a TOML file that is there and can be read{where}."
        if self.kind == "toml":
            return "correct the file at that place: it has to be TOML in UTF-8."
        return (
            "correct what is listed above. `jaxsync.SyncConfig` documents the keys of the sync table; "
            "configs/digits.toml in the repository of jaxsync shows all keys of a job."
        )


@error
class ArgumentError(JaxsyncError, TypeError, ValueError):
    """An argument that is of another kind than it should be, or has a value that cannot be meant.

    `before`: the call that makes the argument of what was passed, if one does.
    """

    function: str
    argument: str
    got: str
    wanted: str
    before: str = ""

    def what(self) -> str:
        return f"{self.function} got {self.argument} = {self.got}; wanted {self.wanted}."

    def fix(self) -> str:
        # The class of a callable says how it is made; what it takes is said where it is called.
        name = f"{self.function}.__call__" if self.function == "TrainStep" else self.function
        text = f"see help(jaxsync.{name}) for what each argument is, and their order."
        return f"first {self.before}; {text}" if self.before else text


@error
class MissingExtraError(JaxsyncError, ImportError):
    """An optional dependency is not installed."""

    feature: str
    package: str
    extra: str

    def what(self) -> str:
        return f"{self.feature} needs the package {self.package!r}, which is not installed."

    def fix(self) -> str:
        return f"pip install 'jaxsync[{self.extra}]'"
