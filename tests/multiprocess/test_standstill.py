"""Who is said to have stood still: of what is known of a run, and of runs of real processes."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any

import pytest

from jaxsync.cli import main
from jaxsync.host.peers import sign_of_loss
from jaxsync.host.recorder import Event
from jaxsync.multiprocess.ending import Ending, Stop
from jaxsync.multiprocess.launch import LaunchConfig, launch
from jaxsync.multiprocess.postmortem import Run, format_run, runs_as_json
from jaxsync.multiprocess.standstill import find_standstills, format_standstills

pytestmark = pytest.mark.timeout(120)

LOST = ("jaxsync.errors.PeerLostError: Another process is lost: it did not come to a collective in time.",)
TOLD = (signal.SIGINT,)


def ended(process: int, num_programs: int = 0, finished: int = 0, **facts: Any) -> Ending:
    """A process that was ended by the launcher, and had launched so many programs with all others by then."""
    at_s = facts.pop("last_s", 2.4)
    event = Event(at_s=at_s, kind="program", step=num_programs, together=num_programs, finished=finished)
    facts = {"code": -2, "at_s": 12.0, "told": TOLD, "events": (event,), **facts}
    return Ending(process=process, pid=1000 + process, **facts)


def victim(process: int, num_programs: int, finished: int = 42, **facts: Any) -> Ending:
    facts = {"code": 1, "at_s": 9.0, "told": (), "last_lines": LOST, **facts}
    return ended(process, num_programs, finished, **facts)


def said(*endings: Ending) -> str:
    first = next((ending for ending in endings if not ending.told), None)
    return format_standstills(find_standstills(endings, first))


def test_a_process_that_a_signal_stopped_is_named_with_the_signal() -> None:
    stop = Stop(by=signal.SIGSTOP, at_s=2.5)
    others = victim(0, 43), victim(1, 43)
    wanted = "process 2 stood still, stopped by SIGSTOP 2.50 s after the start"
    assert said(*others, ended(2, 42, stop=stop)) == f"{wanted}, when it had launched 42 programs"
    assert said(*others, ended(2, events=(), stop=stop)) == wanted
    # Whatever the first says, and if none has failed: the launcher was stopped by who waited too long.
    assert said(victim(0, 43, last_lines=()), ended(2, events=(), stop=stop)) == wanted
    assert said(ended(0, 43), ended(2, events=(), stop=stop)) == wanted


def test_the_one_that_has_not_launched_what_the_first_waited_for_is_named() -> None:
    assert said(victim(1, 43), ended(0, 44), ended(2, 42)) == (
        "process 2 stood still, having launched 42 programs that all launch, where the others had 43 to 44; "
        "the last it recorded was 2.40 s after the start and it still ran when process 1 gave it up"
    )
    left = ended(2, 1, code=0, told=(), at_s=3.0)
    first = victim(1, 3, 1)
    assert format_standstills(find_standstills([left, first], first)) == (
        "process 2 stood still, having launched 1 program that all launch, where the others had 3; the last "
        "it recorded was 2.40 s after the start and it ended by exit code 0 3.00 s after the start"
    )


def test_programs_of_its_own_neither_hide_who_stood_still_nor_accuse_who_waits_for_each() -> None:
    """Process 0 awaits each program, process 1 runs ahead; process 2 launches what nobody waits for."""
    own = tuple(
        Event(at_s=20.0 + n, kind="program", step=1980 + n, together=21, finished=21) for n in range(8)
    )
    endings = victim(1, 29, 21), ended(0, 22, 21), ended(2, events=own)
    assert said(*endings).startswith("process 2 stood still, having launched 21 programs that all launch,")


BROKEN = ("jaxsync.errors.PeerLostError: Another process is lost: its connection broke.",)


@pytest.mark.parametrize(
    "endings",
    [
        (victim(0, 43, last_lines=("ValueError: mine",)), ended(2, 42)),
        (victim(0, 43, last_lines=BROKEN), ended(2, 42)),
        (victim(0, 43), ended(2, 43)),
        (victim(0, 50), ended(1, 43), ended(2, 50)),
        (victim(0, 43), ended(1, 42), ended(2, 42)),
        (victim(0, 50), ended(1, 41), ended(2, 50)),
        (victim(0, 42), ended(2, 43)),
        (victim(0, 43), ended(2, events=())),
        (victim(0, 1, 0), ended(2, events=())),
        (victim(0, 0, 0), ended(2, 0, 0)),
        (ended(0, 43), ended(2, 42)),
    ],
    ids=[
        "the_first_failed_of_its_own",
        "the_first_did_not_wait_long",
        "as_many_programs",
        "one_awaits_each_program_and_all_have_launched_it",
        "two_are_behind_and_one_may_wait_for_the_other",
        "one_that_is_behind_what_is_over",
        "the_first_itself_came_to_fewest",
        "it_recorded_nothing",
        "it_recorded_nothing_from_the_first_on",
        "nothing_recorded",
        "stopped_by_a_person",
    ],
)
def test_nobody_is_named_if_it_cannot_be_told(endings: tuple[Ending, ...]) -> None:
    assert said(*endings) == ""


LATE = "it did not come to a collective in time"
GLOO = "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        (LOST[0], LATE),
        (f"ValueError: {GLOO}unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation", LATE),
        (f"jax.errors.JaxRuntimeError: {GLOO}buffer.cc:72] Read timeout [127.0.0.1]:44982", LATE),
        (
            "jaxlib._jax.XlaRuntimeError: UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: "
            "GetKeyValue() timed out with key: cpu:gloo/0,1/1 and duration: 30s",
            LATE,
        ),
        (
            f"jax.errors.JaxRuntimeError: {GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:62651",
            "its connection broke",
        ),
        ("jaxsync.errors.AbsentProcessError: 1 of 3 processes did not come", "it did not come in time"),
        ("[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3", ""),
        ("ZeroDivisionError: mine", ""),
        ("ConnectionError: db.example:5432: Connection closed by peer", ""),
        ("TimeoutError: broker: heartbeat timeout", ""),
        ("ValueError: the transport must not be Gloo", ""),
        ("INFO transport chosen by config: Gloo", ""),
    ],
)
def test_what_the_last_exception_says_of_another_process(line: str, seen: str) -> None:
    assert sign_of_loss([line]) == seen
    assert sign_of_loss([line, "To fix it: find the process whose log ends first."]) == seen
    assert sign_of_loss([line, "Traceback (most recent call last):", "ValueError: my own bug"]) == ""


def test_what_the_runtime_says_counts_of_a_process_that_it_ended_alone() -> None:
    lines = ["The following tasks are unhealthy (stopped sending heartbeats):", "/job:jax_worker/task:2"]
    assert sign_of_loss(lines, is_abort=True) == "it stopped answering"
    assert sign_of_loss([*lines, "ValueError: my own bug"]) == ""


def make_run(*endings: Ending, stopped_by: int | None = None) -> Run:
    return Run(restart=0, endings=endings, took_s=12.0, stopped_by=stopped_by)


def test_the_report_begins_and_ends_with_who_stood_still_and_shows_its_output_and_events_first() -> None:
    many = [ended(process, 43) for process in range(3, 20)]
    still = ended(2, 42, last_lines=("reading shard 7",))
    run = make_run(victim(1, 43), *many, still)
    text = format_run(run)
    first, verdict = text.splitlines()[:2]
    assert first.startswith("process 1 (pid 1001) ended first, by exit code 1, 9.00 s after the start")
    assert verdict.startswith("process 1 had waited for another one: process 2 stood still, having launched")
    assert text.endswith(f"\n\n{verdict}")
    assert "The last output of process 2:\n  reading shard 7\n" in text
    shown = re.findall(r"The last (output|events) of process (\d+)", text)
    assert shown[:4] == [("output", "1"), ("output", "2"), ("events", "1"), ("events", "2")]
    found = runs_as_json([run])["runs"][0]
    assert found["stood_still"] == [2]


def test_a_loss_is_explained_if_nobody_is_known_to_have_stood_still() -> None:
    lost = "process 1 had lost another one (it did not come to a collective in time): "
    text = format_run(make_run(victim(1, 0, 0), ended(0)))
    assert text.splitlines()[1] == f"{lost}which is not known here, but its last output may tell."
    left = ended(2, code=0, told=(), at_s=8.0)
    text = format_run(make_run(left, victim(1, 0, 0), ended(0)))
    assert text.splitlines()[1] == f"{lost}process 2 had ended by exit code 0."


def test_a_process_that_is_stopped_is_told_of_in_a_run_that_is_ended_by_hand() -> None:
    stop = Stop(by=signal.SIGTSTP, at_s=2.5)
    run = make_run(ended(0, 43), ended(1, stop=stop), stopped_by=signal.SIGINT)
    assert format_run(run).splitlines()[:2] == [
        "the run was ended by SIGINT after 12.00 s; exit code 130.",
        "Meanwhile process 1 stood still, stopped by SIGTSTP 2.50 s after the start.",
    ]
    process = runs_as_json([run])["runs"][0]["processes"][1]
    assert process["stopped_by"] == "SIGTSTP"


# Process 1 stops itself; process 0 waits until the system says so, and may let it go on.
STOPPED = """
import os, signal, sys
me, pipe = int(os.environ["JAX_PROCESS_ID"]), sys.argv[1]
if me == 1:
    with open(pipe, "w") as file:
        file.write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    while True: signal.pause()
pid = int(open(pipe).read())
def state():
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
while state() != "T": pass
if sys.argv[2:]:
    os.kill(pid, signal.SIGCONT)
    while state() == "T": pass
sys.exit(3)
"""


@pytest.mark.parametrize("goes_on", [False, True], ids=["to_the_end", "and_goes_on"])
def test_the_launcher_sees_who_is_stopped_and_who_goes_on(goes_on: bool, tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "pid")
    args = [str(tmp_path / "pid"), *["on"] * goes_on]
    command = (sys.executable, "-I", "-S", "-c", STOPPED, *args)
    config = LaunchConfig(command=command, num_processes=2, grace_s=1.0)
    [run] = launch(config, lambda *_: None, lambda *_: None)
    failed, other = run.endings
    assert (failed.process, failed.code, failed.stop) == (0, 3, None)
    if goes_on:
        assert (other.stop, other.cause) == (None, "SIGINT")
    else:
        assert other.stop is not None
        assert other.stop.by == signal.SIGSTOP
        assert 0 < other.stop.at_s <= failed.at_s
        assert other.cause == "SIGKILL"  # it takes nothing else


TRAINING = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np, jaxsync

class Sgd:  # optax takes longer to import than this takes to train
    def init(self, params):
        return ()

    def update(self, grads, state, params=None):
        return jax.tree.map(lambda x: -1e-3 * x, grads), state

jaxsync.initialize(heartbeat_timeout_s=3, collective_timeout_s=3)
params = {"w": np.ones((4, 3), np.float32)}
plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 3}))
step = jaxsync.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), Sgd(), plan)
state = step.init(params)
for number in range(40):
    if number == 20 and jax.process_index() == 1:
        exec(sys.argv[1])
    state, metrics = step(state, np.ones((3, 4), np.float32))
    float(metrics["loss"])
"""


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            r"stopped by SIGSTOP \d+\.\d\d s after the start, when it had launched (\d+) programs\.",
        ),
        (
            "own = jaxsync.guard_dispatch(jax.jit(lambda x: x + 1))\nwhile True: own(1.0)",
            r"having launched (\d+) programs that all launch, where the others had [0-9 to]+; the last "
            r"it recorded was \d+\.\d\d s after the start and it still ran when process \d gave it up\.",
        ),
    ],
    ids=["stopped", "in_programs_of_its_own"],
)
def test_the_report_of_a_training_names_who_stood_still(
    how: str, wanted: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", TRAINING, how]
    assert main(["launch", "-n", "3", "--grace-s", "2", "--", *command]) != 0
    report = capfd.readouterr().err.partition("jaxsync launch: ")[2].splitlines()
    assert re.fullmatch(
        rf"process [02] had waited for another one: process 1 stood still, {wanted}", report[1]
    ), report
    assert report[-1] == report[1]
    assert "The last output of process 1:" in report
