"""A training step: its optimizer, the state and batch it is given, and how often it is launched."""

from __future__ import annotations

from collections.abc import Sequence

from jaxsync.errors.base import JaxsyncError, error
from jaxsync.report.text import format_count


@error
class NotElementwiseError(JaxsyncError, ValueError):
    """An optimizer that looks at several elements at once. `problems`: place, leaf path, operation."""

    problems: tuple[tuple[str, str, str], ...]

    def what(self) -> str:
        return "shard_optimizer cannot divide this optimizer: its results are not elementwise."

    def places(self) -> Sequence[str]:
        return [
            f"{place} of params{path}: {reason}" if path else f"{place}: {reason}"
            for place, path, reason in self.problems
        ]

    def fix(self) -> str:
        return (
            "use an elementwise optimizer (sgd, momentum, adam, adamw, lion, rmsprop, also with schedules, "
            "masks, inject_hyperparams and clipping by the global norm); or give this one to make_train_step "
            "as it is, with its state on every device."
        )


@error
class DeletedArrayError(JaxsyncError, RuntimeError):
    """An array whose buffer was donated to an earlier call. `leaves`: where it was passed."""

    leaves: tuple[str, ...]

    def what(self) -> str:
        arguments = format_count(len(self.leaves), "argument is an array", "arguments are arrays")
        return f"{arguments} deleted before."

    def places(self) -> Sequence[str]:
        return self.leaves

    def fix(self) -> str:
        return (
            "a function that donates an argument reuses its memory: go on with what it returned, copy what "
            "must stay, or do not donate (make_train_step(..., donate=False))."
        )


@error
class AliasedArrayError(JaxsyncError, ValueError):
    """One array at two places of a donated tree. `leaves`: each pair of places."""

    leaves: tuple[tuple[str, str], ...]

    def what(self) -> str:
        return "A donated state holds the same array more than once; its memory can be reused only once."

    def places(self) -> Sequence[str]:
        return [f"{first} is also {second}" for first, second in self.leaves]

    def fix(self) -> str:
        return "make the state with step.init(params), which copies; or copy one of each pair: jnp.copy(x)."


@error
class BatchError(JaxsyncError, ValueError):
    """A batch that cannot be divided. `leaves`: path, shape, reason."""

    leaves: tuple[tuple[str, str, str], ...]
    divisor: int

    def what(self) -> str:
        return f"The batch cannot be divided into {self.divisor} equal parts (devices x accumulate)."

    def places(self) -> Sequence[str]:
        return [f"batch{path} {shape}: {reason}" for path, shape, reason in self.leaves]

    def fix(self) -> str:
        return (
            f"give every batch leaf the same number of rows, a multiple of {self.divisor}; to keep all "
            "rows, pad the last batch and give the padding weight 0 with weighted=True."
        )


@error
class DispatchError(JaxsyncError, ValueError):
    """A dispatch window that cannot work."""

    asked: str
    limit: int

    def what(self) -> str:
        return f"max_in_flight={self.asked} is not between 1 and {self.limit} (on CPU)."

    def fix(self) -> str:
        return (
            f"leave it out (8 on CPU, no window on accelerators): more than {self.limit} un-awaited "
            "programs with collectives abort the process on CPU."
        )
