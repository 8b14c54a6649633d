"""How a command ends early: on Ctrl-C, also where Python drops it, and when nobody reads its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxsync.cli.endings import interruptible
from jaxsync.run_log import RunHeader, RunLog

LOSES_THE_INTERRUPT = """
import signal, sys, threading, weakref

class Thing:
    pass

def interrupt(reference):  # called by Python itself, which drops what it raises
    signal.raise_signal(signal.SIGINT)
    for _ in range(1000):
        pass

def make():
    thing = Thing()
    reference = weakref.ref(thing, interrupt)
    del thing
    print("went on")
    threading.Event().wait(100)
    print("ran to its end")
"""


def test_an_interrupt_that_python_drops_ends_the_command_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "losing.py").write_text(LOSES_THE_INTERRUPT)
    # The handler is set here because a process started in the background inherits one that ignores it.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from jaxsync.cli import main; sys.exit(main(['audit', 'losing:make']))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    dropped, _, rest = done.stderr.partition("went on\n")
    assert "Exception ignored in" in dropped
    assert "KeyboardInterrupt" in dropped
    assert rest == "jaxsync: interrupted\n"


def test_an_interrupt_is_not_raised_again_while_it_is_handled() -> None:
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGALRM)  # what the timer sends
            try:
                raise ValueError
            except ValueError:
                signal.raise_signal(signal.SIGALRM)
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt), interruptible():
        work()
    assert cleaned == [True]


def test_an_interrupt_is_raised_again_until_it_is_handled() -> None:
    count = 0
    with interruptible():
        for number in (signal.SIGINT, signal.SIGALRM, signal.SIGALRM):
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                count += 1
    assert count == 3


def test_afterwards_the_handlers_are_what_they_were_and_no_timer_runs() -> None:
    numbers = (signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_handler_of_somebody_elses_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_has_gone_ends_a_command_without_a_traceback(tmp_path: Path, unbuffered: str) -> None:
    header = RunHeader(workload="digits", num_devices=8, platform="cpu", bytes_per_step=24)
    RunLog.open(tmp_path / "run", header).close({})
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxsync", "report", str(tmp_path / "run")],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            timeout=90,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
