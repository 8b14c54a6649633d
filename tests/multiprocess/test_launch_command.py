"""`jaxsync launch` as a process: what it prints where, and how it ends when it is told to, or killed."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxsync.cli import main
from jaxsync.cli.launch import make_prefixes, make_sink
from jaxsync.multiprocess.outlet import Outlet

pytestmark = pytest.mark.timeout(120)

PYTHON = [sys.executable, "-I", "-S", "-c"]
WAIT = "import signal\nwhile True: signal.pause()"
STUBBORN = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"


@pytest.fixture
def launched() -> Iterator[Any]:
    """Starts `jaxsync launch` with these arguments; what is left of it is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "jaxsync", "launch", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def first_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().strip() for _ in range(count))


def test_output_is_prefixed_and_nothing_is_added_to_a_run_that_goes_well(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'caf\xe9\n'); sys.stderr.write('oh')"
    assert main(["launch", "-n", "2", "--", *PYTHON, code]) == 0
    out, err = capfdbinary.readouterr()
    assert sorted(out.splitlines()) == [b"[0] caf\xe9", b"[1] caf\xe9"]
    assert sorted(err.splitlines()) == [b"[0] oh", b"[1] oh"]


def test_the_report_names_the_first_that_failed_and_how_the_others_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    end = "print('out of memory', flush=True); os.abort()"
    code = f"import os\nif os.environ['JAX_PROCESS_ID'] == '1': {end}\n{WAIT}"
    assert main(["launch", "-n", "2", "--grace-s", "1", "--", *PYTHON, code]) == 134
    out, err = capfd.readouterr()
    assert out == "[1] out of memory\n"
    report = re.sub(r"\d+\.\d\d s", "T s", err[err.index("jaxsync launch") :])
    report = re.sub(r"pid \d+", "pid P", report)
    assert report == (
        "jaxsync launch: process 1 (pid P) ended first, by SIGABRT, T s after the start; exit code 134.\n"
        "\n"
        "process  ended by      at  the launcher had sent\n"
        "-------  --------  ------  ---------------------\n"
        "      1  SIGABRT   T s  nothing\n"
        "      0  SIGINT    T s  SIGINT\n"
        "\n"
        "The launcher told process 0 to end, since process 1 had failed: what it says of SIGINT "
        "(KeyboardInterrupt) is no failure.\n"
        "\n"
        "The last output of process 1:\n"
        "  out of memory\n"
    )


def test_a_restart_is_announced(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; sys.exit(os.environ['JAXSYNC_RESTART'] == '0')"
    assert main(["launch", "-n", "1", "--max-restarts", "2", "--", *PYTHON, code]) == 0
    err = capfd.readouterr().err
    assert err.splitlines()[0].startswith("jaxsync launch: process 0 (pid ")
    assert err.endswith("\njaxsync launch: restart 1 of at most 2\n")


def test_json_is_one_object_on_stdout_and_all_output_is_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; print('hello'); sys.exit(3 * (os.environ['JAXSYNC_RESTART'] == '0'))"
    assert main(["launch", "-n", "1", "--max-restarts", "1", "--json", "--", *PYTHON, code]) == 0
    out, err = capfd.readouterr()
    assert err == "[0] hello\njaxsync launch: restart 1 of at most 1\n[0] hello\n"
    assert out.count("\n") == 1
    report = json.loads(out)
    assert (report["exit_code"], report["num_restarts"]) == (0, 1)
    failed, good = report["runs"]
    assert (failed["restart"], failed["exit_code"], failed["first_failure"]) == (0, 3, 0)
    assert (good["restart"], good["exit_code"], good["first_failure"], good["stopped_by"]) == (
        1,
        0,
        None,
        None,
    )
    [process] = failed["processes"]
    assert (process["process"], process["exit_code"], process["signal"]) == (0, 3, None)
    assert (process["told"], process["last_lines"], process["events"]) == ([], ["hello"], [])


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["-n", "2", "--"], "command = (): wanted a program and its arguments"),
        (["-n", "0", "--", "true"], "num_processes = 0: wanted 1 or more"),
        (["-n", "1", "--port", "99999", "--", "true"], "port = 99999: wanted 1 to 65535"),
        (["-n", "1", "--run-dir", __file__, "--", "true"], f"{__file__}/restart-0: Not a directory"),
        (["-n", "1", "--", "no-such-program"], "no-such-program: No such file or directory"),
    ],
)
def test_what_cannot_run_gives_one_message_and_exit_code_2(
    args: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert text in err
    assert err.count("To fix it: ") == 1
    assert "SyncConfig" not in err


def test_the_programs_own_options_are_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print(sys.argv[1:])"
    assert main(["launch", "-n", "1", "--", *PYTHON, code, "-n", "4", "--json", "--", "x"]) == 0
    assert capfd.readouterr().out == "[0] ['-n', '4', '--json', '--', 'x']\n"


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"FORCE_COLOR": "1"}, b"\x1b[35m[1]\x1b[0m hi\n"),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, b"[1] hi\n"),
        ({}, b"[1] hi\n"),
    ],
    ids=["terminal", "no_color", "file"],
)
def test_prefixes_are_coloured_on_a_terminal_alone(
    environment: dict[str, str], wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert make_prefixes(io.StringIO(), 2)[1] + b"hi\n" == wanted


def test_without_rich_prefixes_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert make_prefixes(io.StringIO(), 2) == [b"[0] ", b"[1] "]


def test_lines_go_where_they_should_each_with_its_prefix(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        outlets = [Outlet(file.fileno()) for file in (out, err)]
        sink = make_sink(outlets, [[b"0 ", b"1 "], [b"0! ", b"1! "]])
        sink(1, True, [b"a", b"b"])
        sink(0, False, [b"c"])
        assert [outlet.close(timeout_s=30) for outlet in outlets] == [True, True]
    assert (tmp_path / "out").read_bytes() == b"0 c\n"
    assert (tmp_path / "err").read_bytes() == b"1! a\n1! b\n"


@pytest.mark.parametrize(
    ("number", "exit_code", "options", "limit_s"),
    [(signal.SIGINT, 130, [], 7), (signal.SIGTERM, 143, ["--grace-s", "1"], 5)],
    ids=["ctrl_c", "sigterm"],
)
def test_told_to_end_it_ends_all_within_the_grace_time(
    launched: Any, number: int, exit_code: int, options: list[str], limit_s: float
) -> None:
    # Process 1 ends as it is told to, process 0 ignores all that can be ignored.
    code = f"import os\nif os.environ['JAX_PROCESS_ID'] == '0': exec({STUBBORN!r})\n"
    code += f"print('ready', flush=True)\n{WAIT}"
    process = launched("-n", "2", "--max-restarts", "3", *options, "--", *PYTHON, code)
    assert first_lines(process, 2) == ["[0] ready", "[1] ready"]
    process.send_signal(number)
    _, err = process.communicate(timeout=limit_s)  # more than the grace time, for the launcher itself to end
    assert process.returncode == exit_code
    name = signal.Signals(number).name
    assert f"jaxsync launch: the run was ended by {name} after " in err
    assert re.search(r" 0  SIGKILL +\d\.\d\d s  SIGINT, SIGTERM, SIGKILL\n", err)
    assert re.search(r" 1  SIGINT +\d\.\d\d s  SIGINT\n", err)


def test_told_twice_it_does_not_wait(launched: Any) -> None:
    code = "import os, signal\nfor n in (2, 15): signal.signal(n, lambda n, _: os.write(1, b'%d\\n' % n))\n"
    code += "print('ready', flush=True)\nwhile True: signal.pause()"
    process = launched("-n", "1", "--grace-s", "1000", "--", *PYTHON, code)
    assert first_lines(process, 1) == ["[0] ready"]
    process.send_signal(signal.SIGINT)
    assert first_lines(process, 1) == ["[0] 2"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_no_process_outlives_a_launcher_that_is_killed(launched: Any, tmp_path: Path) -> None:
    # Each process and the child of each holds the FIFO open for as long as it lives.
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    child = f"import sys\n{STUBBORN}print('ready', flush=True)\nwhile True: signal.pause()"
    code = (
        f"import subprocess, sys\n{STUBBORN}"
        f"file = open({str(tmp_path / 'alive')!r}, 'w')\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], pass_fds=[file.fileno()])\n"
        "while True: signal.pause()"
    )
    process = launched("-n", "2", "--", *PYTHON, code)
    assert first_lines(process, 2) == ["[0] ready", "[1] ready"]
    process.kill()
    os.set_blocking(reader, True)
    with open(reader, "rb") as file:
        assert file.read() == b""  # hangs for ever if any of the four lives


def test_a_reader_that_goes_away_ends_the_run_quietly(launched: Any) -> None:
    code = "while True: print('x' * 1000, flush=True)"
    process = launched("-n", "2", "--", *PYTHON, code)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 128 + signal.SIGPIPE
    err = process.stderr.read()
    assert "jaxsync launch: the run was ended by SIGPIPE after " in err
    assert "Exception ignored" not in err


FLOOD = """
import os, signal
me, fifo = os.environ["JAX_PROCESS_ID"], os.environ["FIFO"]
if me == "0":
    os.set_blocking(1, False)
    try:
        while True: os.write(1, b"x" * 63 + b"\\n")
    except BlockingIOError:  # the launcher may only have been slow: once it does not read, this is for good
        os.set_blocking(1, True)
    signal.signal(signal.SIGALRM, lambda *_: open(fifo, "w").close())
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    while True: os.write(1, b"x" * 63 + b"\\n")
"""


@pytest.fixture
def flood(launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a launcher whose output nobody reads, and returns it when a process has printed for long."""
    os.mkfifo(tmp_path / "printed")
    monkeypatch.setenv("FIFO", str(tmp_path / "printed"))

    def start(rest: str = WAIT) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] = launched("-n", "2", "--grace-s", "1", "--", *PYTHON, FLOOD + rest)
        (tmp_path / "printed").read_text()
        return process

    return start


def test_a_signal_is_heard_while_nobody_reads_the_output(flood: Any) -> None:
    process = flood()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143  # of the output nothing was read
    err = process.stderr.read()
    assert "jaxsync launch: the run was ended by SIGTERM after " in err
    assert "Exception ignored" not in err


def test_a_failure_is_seen_while_nobody_reads_the_output_and_is_told(flood: Any) -> None:
    rest = "open(fifo + '.2').read()\nos.write(1, b'why\\n')\nos._exit(7)"
    os.mkfifo(os.environ["FIFO"] + ".2")
    process = flood(rest)
    open(os.environ["FIFO"] + ".2", "w").close()
    for line in process.stderr:  # up to the report: all have ended, and still nobody has read stdout
        if line.startswith("jaxsync launch: process 1 "):
            assert "ended first, by exit code 7" in line
            break
    assert process.poll() is None  # it waits for who reads
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "[1] why\n" in out
    assert len(out) > 1 << 18
    assert set(out.splitlines()[:-1]) == {"[0] " + "x" * 63, "[1] why"}  # the last one was cut by a signal


def test_a_slow_reader_gets_every_line(launched: Any) -> None:
    code = "for number in range(200_000): print(number)"
    process = launched("-n", "1", "--", *PYTHON, code)
    assert process.stdout.readline() == "[0] 0\n"
    out = process.stdout.read()
    assert process.wait(timeout=60) == 0
    assert out.splitlines() == [f"[0] {number}" for number in range(1, 200_000)]
