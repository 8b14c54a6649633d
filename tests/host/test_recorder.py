"""Recorder on its own: a bounded ring that anybody may read while others write; and its file, which outlives
the process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxsync.host.recorder import Event, EventFile, Recorder, read_event_file, read_events

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.timeout(60)


def test_events_are_kept_in_order_with_their_facts() -> None:
    recorder = Recorder()
    recorder.record("launch", step=3, what="bucket 0", num_bytes=24, took_s=0.001)
    recorder.record("answer", step=3, device=1)
    first, second = recorder.events()
    assert first == Event(at_s=first.at_s, kind="launch", step=3, what="bucket 0", num_bytes=24, took_s=0.001)
    assert second == Event(at_s=second.at_s, kind="answer", step=3, device=1)
    assert 0 <= first.at_s <= second.at_s


def test_the_oldest_events_are_dropped() -> None:
    recorder = Recorder(size=3)
    for step in range(5):
        recorder.record("finish", step=step)
    assert [event.step for event in recorder.events()] == [2, 3, 4]


def test_a_thousand_events_are_kept() -> None:
    recorder = Recorder()
    for step in range(1500):
        recorder.record("finish", step=step)
    assert [event.step for event in recorder.events()] == list(range(500, 1500))


def test_json_leaves_out_what_an_event_does_not_have_and_keeps_zeros() -> None:
    recorder = Recorder()
    recorder.record("answer", step=0, device=0)
    recorder.record("callback", what='a "name"', took_s=0.0)
    first, second = json.loads(recorder.to_json())
    assert first.pop("at_s") >= 0
    assert first == {"kind": "answer", "step": 0, "device": 0}
    assert second.pop("at_s") >= 0
    assert second == {"kind": "callback", "what": 'a "name"', "took_s": 0.0}


def test_an_empty_recorder_has_a_table_and_a_list() -> None:
    recorder = Recorder()
    assert recorder.events() == ()
    assert json.loads(recorder.to_json()) == []
    assert recorder.format().split() == ["at", "event", "step", "device", "what", "bytes", "took", *DASHES]


DASHES = ["--", "-----", "----", "------", "----", "-----", "----"]


def test_the_table_shows_the_last_events_with_units() -> None:
    recorder = Recorder()
    for step in range(30):
        recorder.record("finish", step=step)
    recorder.record("launch", step=30, device=2, what="bucket 1", num_bytes=2048, took_s=0.0015)
    lines = recorder.format(last=3).splitlines()
    assert len(lines) == 2 + 3
    assert lines[2].split()[2:] == ["finish", "28"]
    assert lines[4].split()[2:] == ["launch", "30", "2", "bucket", "1", "2.0", "KiB", "1.5", "ms"]


def test_long_texts_are_cut_in_the_table_and_whole_in_the_list() -> None:
    recorder = Recorder()
    text = "x" * 200
    recorder.record("stall", what=text)
    assert "x" * 57 + "..." in recorder.format()
    assert "x" * 58 not in recorder.format()
    assert json.loads(recorder.to_json())[0]["what"] == text


def test_it_can_be_read_while_others_write() -> None:
    recorder = Recorder(size=50)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def write(device: int) -> None:
        for step in range(2000):
            recorder.record("submit", step=step, device=device)

    try:
        with ThreadPoolExecutor(4) as pool:
            writing = [pool.submit(write, device) for device in range(4)]
            while not all(future.done() for future in writing):
                assert len(recorder.events()) <= 50
                json.loads(recorder.to_json())
                recorder.format()
            for future in writing:
                future.result()
    finally:
        sys.setswitchinterval(interval)
    for device in range(4):  # each thread's own events are in order
        steps = [event.step for event in recorder.events() if event.device == device]
        assert steps == sorted(steps)


def test_an_event_file_keeps_the_last_events_in_a_bounded_space(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events")
    size = (tmp_path / "events").stat().st_size
    for step in range(600):
        file.append(Event(at_s=float(step), kind="program", step=step, took_s=0.0))
    found = read_event_file(tmp_path / "events")
    assert [event.step for event in found] == list(range(344, 600))  # 256 of them
    assert found[0] == Event(at_s=344.0, kind="program", step=344, took_s=0.0)
    assert (tmp_path / "events").stat().st_size == size == 256 * 256


def test_an_event_file_is_text_with_an_event_a_line(tmp_path: Path) -> None:
    EventFile(tmp_path / "events").append(Event(at_s=1.5, kind="answer", device=0))
    first, *others = (tmp_path / "events").read_text().splitlines()
    assert json.loads(first) == {"at_s": 1.5, "kind": "answer", "device": 0}
    assert {line.strip() for line in others} == {""}


@pytest.mark.parametrize("text", ["x" * 1000, 'a "quote" ' * 50, "\u00e9\U0001f600" * 100, "\x00" * 300])
def test_a_long_text_is_cut_so_that_its_line_is_whole(text: str, tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events")
    file.append(
        Event(at_s=1.0, kind="stall", step=10**9, device=7, what=text, num_bytes=10**12, took_s=1 / 3)
    )
    [event] = read_event_file(tmp_path / "events")
    assert (event.kind, event.step, event.device, event.num_bytes) == ("stall", 10**9, 7, 10**12)
    assert text.startswith(event.what)


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events"
    EventFile(path).append(Event(at_s=1.0, kind="good"))
    half = [
        '{"at_s": 2.0, "ki',
        "7",
        '{"what": "no time"}',
        '{"at_s": 0.5, "kind": "first", "from_later": 1}',
    ]
    path.write_bytes("\n".join([*half, path.read_text()]).encode() + b"\xff\xfe")
    assert [event.kind for event in read_event_file(path)] == ["first", "good"]


def test_the_events_of_one_process_are_gathered_over_its_own_processes(tmp_path: Path) -> None:
    for name, at_s in (("events-1-500", 12.0), ("events-1-501", 11.0), ("events-11-502", 13.0)):
        EventFile(tmp_path / name).append(Event(at_s=at_s, kind=name))
    found = read_events(tmp_path, 1, start_s=10.0)
    assert [(event.at_s, event.kind) for event in found] == [(1.0, "events-1-501"), (2.0, "events-1-500")]
    assert read_events(tmp_path / "nowhere", 1) == ()


def test_threads_write_to_one_file(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events")

    def write(device: int) -> None:
        for step in range(64):
            file.append(Event(at_s=float(step), kind="submit", step=step, device=device))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found = {(event.device, event.step) for event in read_event_file(tmp_path / "events")}
    assert found == {(device, step) for device in range(4) for step in range(64)}


LAUNCHES = """
    import os
    import jax, jax.numpy as jnp
    import jaxsync
    from jaxsync.host.recorder import note

    step = jaxsync.guard_dispatch(jax.jit(lambda x: x + 1))
    x = jnp.zeros(())
    for _ in range(12):
        x = step(x)
    pid = os.fork()
    if pid == 0:
        note("child")
        os._exit(0)
    os.waitpid(pid, 0)
    print(os.getpid(), pid)
    os.abort()
"""


def test_launches_are_recorded_where_the_environment_says_and_a_fork_has_its_own(
    run_python: RunPython, tmp_path: Path
) -> None:
    code = "import warnings; warnings.simplefilter('ignore')\n" + textwrap.dedent(
        LAUNCHES
    )  # JAX warns of forks
    done = run_python(code, JAXSYNC_RUN_DIR=str(tmp_path / "made"), JAX_PROCESS_ID="3")
    assert done.returncode == -signal.SIGABRT, done.stderr
    parent, child = done.stdout.split()
    events = read_event_file(tmp_path / "made" / f"events-3-{parent}")
    assert [event.step for event in events if event.kind == "program"] == list(range(1, 13))
    waits = [event.what for event in events if event.kind == "await"]
    assert waits == ["the oldest of 8 in flight"] * 4
    assert [event.kind for event in read_event_file(tmp_path / "made" / f"events-3-{child}")] == ["child"]


def test_a_directory_that_cannot_be_written_is_told_once_and_harms_nobody(
    run_python: RunPython, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code = """
        import warnings
        from jaxsync.host.recorder import Recorder, note

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorder = Recorder()
            recorder.record("launch")
            note("program")
        [warning] = caught
        print(warning.message)
        assert len(recorder.events()) == 1
    """
    done = run_python(code, JAXSYNC_RUN_DIR=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"no events are written to JAXSYNC_RUN_DIR={tmp_path / 'file'}: [Errno 17]")


def test_without_a_directory_nothing_is_written(run_python: RunPython, tmp_path: Path) -> None:
    code = """
        import os, sys
        os.chdir(sys.argv[1])
        from jaxsync.host.recorder import note
        note("program", step=1)
    """
    assert run_python(code, str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []
