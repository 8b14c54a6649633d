"""What is said of a run, from what happened: pure functions."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from jaxsync.host.recorder import Event
from jaxsync.multiprocess.ending import Ending, signal_name
from jaxsync.multiprocess.postmortem import Run, format_run, runs_as_json, should_restart


def ended(process: int, code: int = 0, at_s: float = 1.0, **facts: Any) -> Ending:
    return Ending(process=process, pid=1000 + process, code=code, at_s=at_s, **facts)


def make_run(*endings: Ending, restart: int = 0, stopped_by: int | None = None) -> Run:
    return Run(restart=restart, endings=endings, took_s=9.0, stopped_by=stopped_by)


TOLD = (signal.SIGINT,)


@pytest.mark.parametrize(
    ("run", "first", "exit_code"),
    [
        (make_run(ended(0), ended(1)), None, 0),
        (make_run(ended(1), ended(0, 3)), 0, 3),
        (make_run(ended(2, -9), ended(0, 3)), 2, 137),
        (make_run(ended(0, -6), ended(1, -2, told=TOLD)), 0, 134),
        (make_run(ended(0, -2, told=TOLD), ended(1, 1, told=TOLD), stopped_by=2), None, 130),
        (make_run(ended(0, told=TOLD), stopped_by=15), None, 143),
        (make_run(ended(1, 7), ended(0, -2, told=TOLD), stopped_by=2), 1, 7),
        (make_run(ended(0, -2)), 0, 130),
    ],
    ids=[
        "all_well",
        "last_fails",
        "first_of_two",
        "others_were_ended",
        "ctrl_c",
        "sigterm_and_graceful",
        "failed_before_ctrl_c",
        "killed_by_another",
    ],
)
def test_the_exit_code_is_that_of_the_first_that_failed_of_its_own(
    run: Run, first: int | None, exit_code: int
) -> None:
    assert (run.first_failure and run.first_failure.process) == first
    assert run.exit_code == exit_code


@pytest.mark.parametrize(
    ("run", "max_restarts", "wanted"),
    [
        (make_run(ended(0, 1)), 0, False),
        (make_run(ended(0, 1)), 1, True),
        (make_run(ended(0, 1), restart=1), 1, False),
        (make_run(ended(0, -9), restart=1), 2, True),
        (make_run(ended(0)), 5, False),
        (make_run(ended(0, 1), stopped_by=2), 5, False),
        (make_run(ended(0, 2)), 5, False),
    ],
    ids=["none", "one", "used_up", "another", "well", "stopped", "usage"],
)
def test_only_a_failure_of_its_own_is_followed_by_a_restart(
    run: Run, max_restarts: int, wanted: bool
) -> None:
    assert should_restart(run, max_restarts) is wanted


def test_the_report_has_the_first_failure_the_endings_its_output_and_the_last_events_of_all() -> None:
    events = tuple(Event(at_s=float(n), kind="program", step=n) for n in range(10))
    run = make_run(
        ended(2, -9, 3.0, last_lines=("step 8", "step 9"), events=events),
        ended(0, 1, 3.5, events=events[:1]),
        ended(1, -15, 4.0, told=(2, 15)),
    )
    assert format_run(run) == (
        "process 2 (pid 1002) ended first, by SIGKILL, 3.00 s after the start; exit code 137.\n"
        "\n"
        "process  ended by         at  the launcher had sent\n"
        "-------  -----------  ------  ---------------------\n"
        "      2  SIGKILL      3.00 s  nothing\n"
        "      0  exit code 1  3.50 s  nothing\n"
        "      1  SIGTERM      4.00 s  SIGINT, SIGTERM\n"
        "\n"
        "The launcher told process 1 to end, since process 2 had failed: what it says of SIGINT "
        "(KeyboardInterrupt) is no failure.\n"
        "\n"
        "The last output of process 2:\n"
        "  step 8\n"
        "  step 9\n"
        "\n"
        "The last events of process 2, since the start:\n"
        "       at  event    step  device  what  bytes  took\n"
        "  -------  -------  ----  ------  ----  -----  ----\n"
        "  5.000 s  program     5\n"
        "  6.000 s  program     6\n"
        "  7.000 s  program     7\n"
        "  8.000 s  program     8\n"
        "  9.000 s  program     9\n"
        "\n"
        "The last events of process 0, since the start:\n"
        "       at  event    step  device  what  bytes  took\n"
        "  -------  -------  ----  ------  ----  -----  ----\n"
        "  0.000 s  program     0"
    )


def test_a_run_that_was_stopped_has_no_first_failure() -> None:
    text = format_run(make_run(ended(0, -2, told=TOLD), stopped_by=signal.SIGINT))
    assert text.startswith("the run was ended by SIGINT after 9.00 s; exit code 130.\n\nprocess  ended by")
    assert "last output" not in text


def test_no_output_is_said_to_be_none() -> None:
    assert format_run(make_run(ended(0, 1))).endswith("The last output of process 0:\n  none")


def test_the_events_of_many_processes_are_counted_beyond_eight() -> None:
    event = (Event(at_s=1.0, kind="program"),)
    text = format_run(make_run(*(ended(n, 1, events=event) for n in range(20))))
    assert text.count("The last events of process") == 8
    assert text.endswith("And those of 12 processes more: --json has them.")


def test_json_has_every_run_and_every_process() -> None:
    event = Event(at_s=0.5, kind="launch", step=0)
    failed = make_run(ended(1, -9, 1.23456, last_lines=("a",), events=(event,)), ended(0, -2, told=(2,)))
    report = runs_as_json([failed, make_run(ended(0), restart=1)])
    assert json.loads(json.dumps(report)) == {
        "exit_code": 0,
        "num_restarts": 1,
        "runs": [
            {
                "restart": 0,
                "exit_code": 137,
                "first_failure": 1,
                "stood_still": [],
                "stopped_by": None,
                "took_s": 9.0,
                "processes": [
                    {
                        "process": 1,
                        "pid": 1001,
                        "exit_code": 137,
                        "signal": "SIGKILL",
                        "at_s": 1.235,
                        "told": [],
                        "stopped_by": None,
                        "last_lines": ["a"],
                        "events": [{"at_s": 0.5, "kind": "launch", "step": 0}],
                    },
                    {
                        "process": 0,
                        "pid": 1000,
                        "exit_code": 130,
                        "signal": "SIGINT",
                        "at_s": 1.0,
                        "told": ["SIGINT"],
                        "stopped_by": None,
                        "last_lines": [],
                        "events": [],
                    },
                ],
            },
            {
                "restart": 1,
                "exit_code": 0,
                "first_failure": None,
                "stood_still": [],
                "stopped_by": None,
                "took_s": 9.0,
                "processes": [
                    {
                        "process": 0,
                        "pid": 1000,
                        "exit_code": 0,
                        "signal": None,
                        "at_s": 1.0,
                        "told": [],
                        "stopped_by": None,
                        "last_lines": [],
                        "events": [],
                    }
                ],
            },
        ],
    }


def test_signals_without_a_name_have_a_number() -> None:
    assert (signal_name(signal.SIGTERM), signal_name(signal.SIGRTMIN + 1)) == (
        "SIGTERM",
        f"signal {signal.SIGRTMIN + 1}",
    )
