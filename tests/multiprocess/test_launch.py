"""launch with small programs: what each process is told, what is read of it, and how all end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxsync.errors import LaunchError
from jaxsync.multiprocess.group import Sink
from jaxsync.multiprocess.launch import LaunchConfig, launch, make_environments
from jaxsync.multiprocess.postmortem import Run

pytestmark = pytest.mark.timeout(60)

# What a program uses to stand still until it is ended; there is no clock in it.
PREAMBLE = "import os, signal, sys\nME = int(os.environ['JAX_PROCESS_ID'])\n"
FOREVER = "while True: signal.pause()"


class Output:
    """A sink that keeps all lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, bool, bytes]] = []

    def __call__(self, process: int, is_error: bool, lines: Sequence[bytes]) -> None:
        self.lines += [(process, is_error, line) for line in lines]

    def of(self, process: int, is_error: bool = False) -> list[bytes]:
        return [line for who, error, line in self.lines if (who, error) == (process, is_error)]


def run(code: str, sink: Sink, num_processes: int = 2, **options: Any) -> tuple[Run, ...]:
    command = (sys.executable, "-I", "-S", "-c", PREAMBLE + textwrap.dedent(code))
    config = LaunchConfig(command=command, num_processes=num_processes, **options)
    ended: list[tuple[Run, bool]] = []
    runs = launch(config, sink, lambda run, is_restarted: ended.append((run, is_restarted)))
    assert ended == [(run, run is not runs[-1]) for run in runs]
    return runs


def fifo_reader(path: Path) -> Callable[[], bytes]:
    """Makes a FIFO; the result reads what was written to it, and returns when the last writer has ended."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # before there is a writer

    def read_to_end() -> bytes:
        os.set_blocking(reader, True)
        with open(reader, "rb") as file:
            return file.read()

    return read_to_end


def test_each_process_learns_which_of_how_many_it_is_and_where_the_coordinator_is() -> None:
    output = Output()
    code = """
        import json
        print(json.dumps({name: os.environ.get(name) for name in sys.argv[1:] or os.environ}))
    """
    [run_] = run(code, output, num_processes=3, devices_per_process=40)
    assert (run_.exit_code, run_.first_failure, run_.restart) == (0, None, 0)
    found = [json.loads(output.of(process)[0]) for process in range(3)]
    assert [facts["JAX_PROCESS_ID"] for facts in found] == ["0", "1", "2"]
    assert {facts["JAX_NUM_PROCESSES"] for facts in found} == {"3"}
    [address] = {facts["JAX_COORDINATOR_ADDRESS"] for facts in found}
    host, _, port = address.partition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536
    assert {facts["JAX_COORDINATOR_BIND_ADDRESS"] for facts in found} == {address}
    assert {facts["JAXSYNC_RESTART"] for facts in found} == {"0"}
    assert {(facts["JAX_NUM_CPU_DEVICES"], facts["PJRT_NPROC"]) for facts in found} == {("40", "80")}
    assert not os.path.exists(found[0]["JAXSYNC_RUN_DIR"])  # it was ours, and is gone


def test_each_start_is_a_job_of_its_own() -> None:
    output = Output()
    runs = run("print(os.environ['JAXSYNC_JOB'], flush=True); sys.exit(3)", output, max_restarts=1)
    assert len(runs) == 2
    jobs = [job for process in range(2) for job in output.of(process)]
    assert len(set(jobs)) == 2  # one a run, and not one a process
    assert all(len(job) == 16 for job in jobs)


def test_a_run_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = LaunchConfig(command=("true",), num_processes=1, run_dir=str(tmp_path / "file"))
    with pytest.raises(LaunchError) as caught:
        launch(config, Output(), lambda run, is_restarted: None)
    assert caught.value.run_dir == str(tmp_path / "file" / "restart-0")
    assert caught.value.reason == "Not a directory"


def test_without_a_number_of_devices_the_program_chooses() -> None:
    config = LaunchConfig(command=("x",), num_processes=1)
    outer = {"JAXSYNC_DEVICES_PER_PROCESS": "4"}  # of a launcher that has started this one
    [environment] = make_environments(outer, config, port=1, restart=0, run_dir="/r", job="j")
    names = {"JAX_NUM_CPU_DEVICES", "PJRT_NPROC", "JAX_PLATFORMS", "JAXSYNC_DEVICES_PER_PROCESS"}
    assert not names & set(environment)


def test_what_the_user_has_set_stays() -> None:
    base = {"JAX_PLATFORMS": "cuda", "PJRT_NPROC": "64", "PYTHONUNBUFFERED": "", "HOME": "/h"}
    config = LaunchConfig(command=("x",), num_processes=1, devices_per_process=2)
    [environment] = make_environments(base, config, port=1, restart=0, run_dir="/r", job="j")
    assert {name: environment[name] for name in base} == base


def test_lines_come_whole_as_bytes_and_the_last_one_without_its_end() -> None:
    output = Output()
    code = r"""
        out = sys.stdout.buffer
        out.write(b"\xff\xfe caf\xc3\xa9\n\n")
        out.write(b"a" * 200_000 + b"\n")
        sys.stderr.write("no end")
    """
    run(code, output)
    for process in range(2):
        assert output.of(process) == [b"\xff\xfe caf\xc3\xa9", b"", b"a" * 200_000]
        assert output.of(process, is_error=True) == [b"no end"]


def test_a_line_beyond_a_mebibyte_comes_in_pieces() -> None:
    output = Output()
    run("sys.stdout.write('x' * (5 << 19))", output, num_processes=1)
    assert [len(line) for line in output.of(0)] == [1 << 20, 1 << 20, 1 << 19]


def test_lines_are_read_while_the_process_goes_on() -> None:
    # Process 1 ends only when what process 0 printed has been seen here.
    pids: dict[int, int] = {}

    def sink(process: int, is_error: bool, lines: Sequence[bytes]) -> None:
        pids[process] = int(lines[0])
        if len(pids) == 2:
            os.kill(pids[1], signal.SIGUSR1)
            os.kill(pids[0], signal.SIGUSR1)

    code = f"""
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
        print(os.getpid(), flush=True)
        {FOREVER}
    """
    [run_] = run(code, sink)
    assert run_.exit_code == 0


@pytest.mark.parametrize(
    ("end", "cause", "exit_code"),
    [
        ("sys.exit(7)", "exit code 7", 7),
        ("raise RuntimeError('why')", "exit code 1", 1),
        ("os.abort()", "SIGABRT", 134),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", 137),
    ],
    ids=["exit", "raise", "abort", "kill"],
)
def test_the_first_that_fails_gives_the_exit_code_and_the_others_are_ended(
    end: str, cause: str, exit_code: int
) -> None:
    code = f"""
        print("I am", ME, flush=True)
        if ME == 1:
            {end}
        {FOREVER}
    """
    [run_] = run(code, Output(), num_processes=3, grace_s=1.0)
    first = run_.first_failure
    assert first is not None
    assert (first.process, first.cause, first.told) == (1, cause, ())
    assert first.last_lines[0] == "I am 1"
    assert run_.exit_code == exit_code
    others = {ending.process: ending for ending in run_.endings[1:]}
    assert set(others) == {0, 2}
    for other in others.values():
        assert (other.cause, other.told) == ("SIGINT", (signal.SIGINT,))
        assert other.at_s > first.at_s


def test_one_that_will_not_end_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    code = f"""
        fifo = {str(tmp_path / "ready")!r}
        if ME == 1:
            open(fifo).read()  # process 0 is ready
            sys.exit(3)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.write(1, b"%d\\n" % number))
        open(fifo, "w").close()
        {FOREVER}
    """
    output = Output()
    [run_] = run(code, output, grace_s=2.0)
    stubborn = run_.endings[-1]
    assert (stubborn.process, stubborn.cause) == (0, "SIGKILL")
    assert stubborn.told == (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    assert output.of(0) == [b"2", b"15"]
    assert run_.exit_code == 3


def test_a_peer_that_fails_too_has_time_to_say_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    code = f"""
        fifo = {str(tmp_path / "alive")!r}
        if ME == 1:
            held = open(fifo, "w")
            os._exit(4)
        open(fifo).read()  # process 1 has ended
        print("my own reason", flush=True)
        sys.exit(5)
    """
    output = Output()
    [run_] = run(code, output, grace_s=30.0)
    found = sorted((ending.process, ending.code, ending.told) for ending in run_.endings)
    assert found == [(0, 5, ()), (1, 4, ())]
    assert output.of(0) == [b"my own reason"]


@pytest.mark.parametrize("end", ["sys.exit(1)", "sys.exit(0)"], ids=["failed", "well"])
def test_what_a_process_started_ends_with_the_run(end: str, tmp_path: Path) -> None:
    read_to_end = fifo_reader(tmp_path / "alive")
    grandchild = (
        "import signal, sys; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
        "file = open(sys.argv[1], 'w'); file.write('here'); file.flush(); "
        "print('ready', flush=True); signal.pause()"
    )
    code = f"""
        import subprocess
        child = subprocess.Popen(
            [sys.executable, "-c", {grandchild!r}, {str(tmp_path / "alive")!r}], stdout=subprocess.PIPE
        )
        child.stdout.readline()
        {end}
    """
    run(code, Output(), num_processes=1, grace_s=1.0)
    assert read_to_end() == b"here"  # hangs for ever if the grandchild lives


def test_a_restart_starts_all_anew_until_it_goes_well() -> None:
    output = Output()
    code = f"""
        restart = int(os.environ["JAXSYNC_RESTART"])
        print(restart, os.environ["JAX_COORDINATOR_ADDRESS"], os.environ["JAXSYNC_RUN_DIR"], flush=True)
        if restart == 2:
            sys.exit(0)
        if ME == restart:
            sys.exit(10 + restart)
        {FOREVER}
    """
    runs = run(code, output, max_restarts=5, grace_s=1.0)
    assert [(run.restart, run.exit_code) for run in runs] == [(0, 10), (1, 11), (2, 0)]
    lines = [line.split() for line in output.of(0)]
    assert [line[0] for line in lines] == [b"0", b"1", b"2"]
    assert len({line[1] for line in lines}) == 3  # a new port each time
    assert len({line[2] for line in lines}) == 3


def test_restarts_are_counted() -> None:
    runs = run("sys.exit(9)", Output(), num_processes=1, max_restarts=2)
    assert [(run.restart, run.exit_code) for run in runs] == [(0, 9), (1, 9), (2, 9)]


def test_the_port_can_be_given() -> None:
    output = Output()
    run("print(os.environ['JAX_COORDINATOR_ADDRESS'])", output, port=23456)
    assert output.of(0) == output.of(1) == [b"127.0.0.1:23456"]


def test_a_reader_that_has_gone_ends_the_run() -> None:
    def sink(process: int, is_error: bool, lines: Sequence[bytes]) -> None:
        raise BrokenPipeError

    [run_] = run(f"print('x', flush=True)\n{FOREVER}", sink, max_restarts=3)
    assert (run_.exit_code, run_.stopped_by) == (128 + signal.SIGPIPE, signal.SIGPIPE)


def test_a_command_that_is_not_there_is_named() -> None:
    config = LaunchConfig(command=("no-such-program", "-v"), num_processes=2)
    with pytest.raises(LaunchError) as caught:
        launch(config, Output(), lambda run, is_restarted: None)
    assert caught.value.command == ("no-such-program", "-v")
    assert (caught.value.process, caught.value.reason) == (0, "No such file or directory")


def test_the_handlers_of_before_are_back_afterwards() -> None:
    numbers = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    run("pass", Output())
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_processes": 0}, "num_processes = 0: wanted 1 or more"),
        ({"command": ()}, "command = (): wanted a program and its arguments"),
        ({"devices_per_process": 0}, "devices_per_process = 0: wanted 1 or more"),
        ({"max_restarts": -1}, "max_restarts = -1: wanted 0 or more"),
        ({"grace_s": 0.0}, "grace_s = 0.0: wanted more than 0"),
        ({"grace_s": float("nan")}, "grace_s = nan: wanted more than 0"),
        ({"port": 70000}, "port = 70000: wanted 1 to 65535"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(LaunchError) as caught:
        LaunchConfig(**{"command": ("x",), "num_processes": 1, **options})
    assert caught.value.problems == (problem,)


EVENTS = """
import os, signal, sys, threading
from jaxsync.host.recorder import Recorder, note

me = int(os.environ["JAX_PROCESS_ID"])
recorder = Recorder()
recorder.record("launch", step=me, what="bucket 0", num_bytes=24)
note("program", step=41)
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
os.abort()
"""


def test_events_outlive_sigkill_and_abort(tmp_path: Path) -> None:
    old = tmp_path / "restart-0" / "events-0-1"
    old.parent.mkdir()
    old.write_text('{"at_s": 1.0, "kind": "old"}\n')
    config = LaunchConfig(
        command=(sys.executable, "-c", EVENTS), num_processes=2, run_dir=str(tmp_path), grace_s=20.0
    )
    [run_] = launch(config, Output(), lambda run, is_restarted: None)
    endings = sorted(run_.endings, key=lambda ending: ending.process)
    assert [ending.cause for ending in endings] == ["SIGABRT", "SIGKILL"]
    for ending in endings:
        first, second = ending.events
        assert (first.kind, first.step, first.what, first.num_bytes) == (
            "launch",
            ending.process,
            "bucket 0",
            24,
        )
        assert (second.kind, second.step) == ("program", 41)
        assert 0 < first.at_s <= second.at_s <= ending.at_s
    assert len(list(tmp_path.glob("restart-0/events-*"))) == 2  # kept, and the old one is not


def test_the_guardian_forgets_groups_that_have_ended_and_kills_the_others() -> None:
    from jaxsync.multiprocess import guardian

    sleepers = [
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], process_group=0)
        for _ in range(2)
    ]
    kept, lost = sleepers
    text = f"+{kept.pid}\n+{lost.pid}\n-{kept.pid}\n"
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", guardian.__file__], input=text.encode(), check=True, timeout=30
        )
        assert lost.wait(timeout=30) == -signal.SIGKILL
        assert kept.poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
