"""Failures and refusals of the state machine as errors that name devices and leaf paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxsync.errors import (
    ClosedError,
    DuplicateError,
    JaxsyncError,
    MissingGradientError,
    SetMismatchError,
    StepOverlapError,
    SubmissionError,
    SyncFailedError,
    SyncTimeoutError,
    UnknownNameError,
)
from jaxsync.host.messages import Failure, Refuse, Warn, bits

_MAX_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Explainer:
    """Gives names to numbers.

    Attributes:
        devices: The name of each device.
        paths: The path of each leaf.
        timeout_s: The limit that a timeout was over.
    """

    devices: tuple[str, ...]
    paths: tuple[str, ...]
    timeout_s: float

    def names(self, mask: int) -> tuple[str, ...]:
        """The paths of the leaves in a mask."""
        return tuple(self.paths[index] for index in bits(mask))

    def refusal(self, refuse: Refuse, function: str, device: int, step: int) -> JaxsyncError:
        """What the sender of a refused message is told."""
        name = self.devices[device] if 0 <= device < len(self.devices) else f"device {device}"
        leaves = self.names(refuse.leaves)
        match refuse.reason:
            case "failed" if refuse.failure is not None:
                return self.failure(refuse.failure, function)
            case "registered" | "submitted":
                return DuplicateError(function=function, device=name, step=step, leaves=leaves)
            case "ahead":
                return StepOverlapError(device=name, step=step)
            case "unannounced":
                problems = tuple(f"grads{path} was not announced for step {step}" for path in leaves)
                return SubmissionError(device=name, problems=problems)
            case _:
                return UnknownNameError(kind=refuse.reason, names=(name,), known=self.devices)

    def failure(
        self, failure: Failure, function: str, *, events: str = "", record: str = "", reason: str = ""
    ) -> JaxsyncError:
        """What everybody who waits, or comes later, is told."""
        devices = tuple(self.devices[device] for device in failure.devices)
        match failure.kind:
            case "closed":
                return ClosedError(function=function, pending=self.owed(failure.devices, failure.leaves))
            case "mismatch":
                return SetMismatchError(step=failure.step, problems=self._differences(failure))
            case "missing":
                leaves = self.names(failure.leaves[0])
                return MissingGradientError(step=failure.step, device=devices[0], leaves=leaves)
            case "timeout" | "stuck":
                owed = self.owed(failure.devices, failure.leaves)
                return SyncTimeoutError(
                    step=failure.step, timeout_s=self.timeout_s, owed=owed, events=events, record=record
                )
            case "crash":
                return SyncFailedError(step=failure.step, devices=devices, reason=reason or "an exception")

    def warning(self, warn: Warn, waited_s: float) -> str:
        """The line that reports a stall."""
        owed = self.owed(warn.devices, warn.leaves) or ("a launched program has not finished",)
        return f"step {warn.step} has waited for {waited_s:g} s: " + "; ".join(owed)

    def owed(self, devices: tuple[int, ...], leaves: tuple[int, ...]) -> tuple[str, ...]:
        """What devices have not done: one line for those that owe the same."""
        return owed_lines([self.devices[device] for device in devices], [self.names(mask) for mask in leaves])

    def _differences(self, failure: Failure) -> tuple[str, ...]:
        first, second = failure.leaves
        one, other = (self.devices[device] for device in failure.devices)
        only_first, only_second = first & ~second, second & ~first
        lines = []
        if only_first:
            lines.append(f"{one} announces {_join(self.names(only_first))}, which {other} does not")
        if only_second:
            lines.append(f"{other} announces {_join(self.names(only_second))}, which {one} does not")
        return tuple(lines)


def owed_lines(devices: Sequence[str], paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What devices have not done: one line for those that owe the same.

    Args:
        devices: The names of devices that have not synced.
        paths: For each, the leaves that it has not handed over.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for device, own in zip(devices, paths, strict=True):
        groups.setdefault(own, []).append(device)
    return tuple(
        f"{_join(names)} {'has' if len(names) == 1 else 'have'} not synced"
        + (f", nor handed over the gradients of {_join(own)}" if own else "")
        for own, names in groups.items()
    )


def _join(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
