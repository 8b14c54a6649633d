"""Explainer on its own: numbers in, errors with names out."""

from __future__ import annotations

import pytest

from jaxsync import errors
from jaxsync.host.explain import Explainer
from jaxsync.host.messages import Failure, Refuse, Warn

EXPLAINER = Explainer(devices=("cpu:0", "cpu:1", "cpu:2"), paths=("['a']", "['b']", "['c']"), timeout_s=60.0)
A, B, C = 0b001, 0b010, 0b100


def facts(error: errors.JaxsyncError) -> tuple[type, dict[str, object]]:
    return type(error), vars(error)


@pytest.mark.parametrize(
    ("mask", "names"), [(0, ()), (A, ("['a']",)), (A | C, ("['a']", "['c']")), (B, ("['b']",))]
)
def test_a_mask_is_the_paths_of_its_leaves(mask: int, names: tuple[str, ...]) -> None:
    assert EXPLAINER.names(mask) == names


REFUSALS = [
    (
        Refuse(reason="registered"),
        errors.DuplicateError,
        {"function": "call", "device": "cpu:1", "step": 4, "leaves": ()},
    ),
    (
        Refuse(reason="submitted", leaves=A | B),
        errors.DuplicateError,
        {"function": "call", "device": "cpu:1", "step": 4, "leaves": ("['a']", "['b']")},
    ),
    (Refuse(reason="ahead"), errors.StepOverlapError, {"device": "cpu:1", "step": 4}),
    (
        Refuse(reason="unannounced", leaves=C),
        errors.SubmissionError,
        {"device": "cpu:1", "problems": ("grads['c'] was not announced for step 4",)},
    ),
    (
        Refuse(reason="device"),
        errors.UnknownNameError,
        {"kind": "device", "names": ("cpu:1",), "known": EXPLAINER.devices},
    ),
    (
        Refuse(reason="failed", failure=Failure(kind="missing", step=7, devices=(2,), leaves=(A,))),
        errors.MissingGradientError,
        {"step": 7, "device": "cpu:2", "leaves": ("['a']",)},
    ),
]


@pytest.mark.parametrize(("refuse", "kind", "expected"), REFUSALS, ids=[r.reason for r, _, _ in REFUSALS])
def test_a_refusal_names_device_step_and_leaves(refuse: Refuse, kind: type, expected: object) -> None:
    assert facts(EXPLAINER.refusal(refuse, "call", 1, 4)) == (kind, expected)


@pytest.mark.parametrize("device", [-1, 3])
def test_a_device_without_a_name_is_a_number(device: int) -> None:
    error = EXPLAINER.refusal(Refuse(reason="device"), "call", device, 0)
    assert isinstance(error, errors.UnknownNameError)
    assert error.names == (f"device {device}",)


OWED = (
    "cpu:0, cpu:2 have not synced, nor handed over the gradients of ['a'], ['b']",
    "cpu:1 has not synced",
)
PENDING = {"devices": (0, 1, 2), "leaves": (A | B, 0, A | B)}
FAILURES = [
    (Failure(kind="closed", step=4, **PENDING), errors.ClosedError, {"function": "call", "pending": OWED}),
    (
        Failure(kind="timeout", step=4, **PENDING),
        errors.SyncTimeoutError,
        {"step": 4, "timeout_s": 60.0, "owed": OWED, "events": "a table", "record": "[]"},
    ),
    (
        Failure(kind="stuck", step=4),
        errors.SyncTimeoutError,
        {"step": 4, "timeout_s": 60.0, "owed": (), "events": "a table", "record": "[]"},
    ),
    (
        Failure(kind="missing", step=4, devices=(1,), leaves=(A | C,)),
        errors.MissingGradientError,
        {"step": 4, "device": "cpu:1", "leaves": ("['a']", "['c']")},
    ),
    (
        Failure(kind="mismatch", step=4, devices=(0, 2), leaves=(A | B, B | C)),
        errors.SetMismatchError,
        {
            "step": 4,
            "problems": (
                "cpu:0 announces ['a'], which cpu:2 does not",
                "cpu:2 announces ['c'], which cpu:0 does not",
            ),
        },
    ),
    (
        Failure(kind="mismatch", step=4, devices=(0, 1), leaves=(0, B)),
        errors.SetMismatchError,
        {"step": 4, "problems": ("cpu:1 announces ['b'], which cpu:0 does not",)},
    ),
    (
        Failure(kind="crash", step=4, devices=(1,), cause=3),
        errors.SyncFailedError,
        {"step": 4, "devices": ("cpu:1",), "reason": "OSError was raised"},
    ),
]


@pytest.mark.parametrize(("failure", "kind", "expected"), FAILURES, ids=[f.kind for f, _, _ in FAILURES])
def test_a_failure_names_step_devices_and_leaves(failure: Failure, kind: type, expected: object) -> None:
    error = EXPLAINER.failure(failure, "call", events="a table", record="[]", reason="OSError was raised")
    assert facts(error) == (kind, expected)


def test_a_crash_without_a_known_cause_says_so() -> None:
    error = EXPLAINER.failure(Failure(kind="crash", step=0), "call")
    assert isinstance(error, errors.SyncFailedError)
    assert error.reason == "an exception"


def test_a_warning_says_how_long_and_for_whom() -> None:
    warn = Warn(step=4, **PENDING)
    assert EXPLAINER.warning(warn, 10.0) == f"step 4 has waited for 10 s: {OWED[0]}; {OWED[1]}"
    program = Warn(step=4, devices=(), leaves=())
    assert EXPLAINER.warning(program, 10.0) == (
        "step 4 has waited for 10 s: a launched program has not finished"
    )


def test_eight_names_are_shown_and_the_rest_counted() -> None:
    explainer = Explainer(
        devices=tuple(f"cpu:{i}" for i in range(12)), paths=tuple(f"[{i}]" for i in range(9)), timeout_s=1.0
    )
    [line] = explainer.owed(tuple(range(12)), (0b111111111,) * 12)
    assert line == (
        "cpu:0, cpu:1, cpu:2, cpu:3, cpu:4, cpu:5, cpu:6, cpu:7 and 4 more have not synced, "
        "nor handed over the gradients of [0], [1], [2], [3], [4], [5], [6], [7] and 1 more"
    )
