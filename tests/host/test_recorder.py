"""Recorder on its own: a bounded ring that anybody may read while others write."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxsync.host.recorder import Event, Recorder

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
