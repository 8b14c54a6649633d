"""The start of a job: who is missed, what is refused, and what a process alone sees of it."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

import jaxsync
from jaxsync.errors import ArgumentError, InitializationError
from jaxsync.multiprocess.rollcall import call_roll, judge, parse_report, split_address, versions
from jaxsync.multiprocess.runtime import Job, fill_in

pytestmark = pytest.mark.timeout(120)


def test_nobody_is_judged_before_all_have_come_or_the_time_is_over() -> None:
    same = {"jax": "1"}
    assert judge({0: same}, (), 3, is_over=False) is None
    assert judge({0: same, 1: {"jax": "2"}}, (), 3, is_over=False) is None  # the third shall hear of it
    assert judge({0: same, 1: same, 2: same}, (), 3, is_over=False) == {"missing": []}
    assert judge({0: same, 2: same}, (), 4, is_over=True) == {"missing": [1, 3]}
    assert judge({0: same, 1: {"jax": "2"}}, (), 2, is_over=False) == {
        "differences": ["jax: 1 in process 0; 2 in process 1"]
    }
    assert judge({0: same, 1: same}, (1,), 3, is_over=False) == {
        "differences": ["process_id: 1 in two processes"]
    }


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:9", ("::1", 9)),
        ("host.example:65535", ("host.example", 65535)),
        ("host", None),
        (":80", None),
        ("host:0", None),
        ("host:65536", None),
        ("host:http", None),
        (5, None),
    ],
)
def test_an_address_is_a_host_and_a_port(address: Any, found: object) -> None:
    assert split_address(address) == found


def test_arguments_come_before_the_environment() -> None:
    environment = {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:80",
        "JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:80",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
        "JAX_LOCAL_DEVICE_IDS": "0,2",
    }
    assert fill_in(Job(), environment) == Job(
        coordinator_address="10.0.0.1:80",
        num_processes=4,
        process_id=3,
        local_device_ids=(0, 2),
        coordinator_bind_address="0.0.0.0:80",
    )
    own = Job(coordinator_address="127.0.0.1:9", process_id=0, coordinator_bind_address="127.0.0.1:9")
    assert fill_in(own, environment).coordinator_address == "127.0.0.1:9"
    assert fill_in(own, environment).process_id == 0
    # JAX would listen on every network of the machine.
    assert fill_in(Job(coordinator_address="127.0.0.1:9"), {}).coordinator_bind_address == "127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"coordinator_address": "host"}, "initialize got coordinator_address = 'host'"),
        ({"num_processes": 0}, "initialize got num_processes = 0"),
        ({"num_processes": True}, "initialize got num_processes = True"),
        ({"num_processes": 2, "process_id": 2}, "initialize got process_id = 2; wanted less than"),
        ({"process_id": -1}, "initialize got process_id = -1"),
        ({"coordinator_bind_address": "[::]"}, "initialize got coordinator_bind_address"),
        ({"timeout_s": 0}, "initialize got timeout_s = 0"),
        ({"heartbeat_timeout_s": float("nan")}, "initialize got heartbeat_timeout_s = nan"),
        ({"collective_timeout_s": True}, "initialize got collective_timeout_s = True"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        jaxsync.initialize(**arguments)
    assert str(caught.value).startswith(problem)


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ArgumentError, match=r"\$JAX_NUM_PROCESSES = 'two'"):
        jaxsync.initialize()


def test_it_is_refused_once_jax_has_devices() -> None:
    with pytest.raises(InitializationError, match="JAX has started its devices already"):
        jaxsync.initialize("127.0.0.1:9", 2, 0)


def test_a_process_that_nothing_is_said_to_is_alone_and_unchanged(run_python: Callable[..., Any]) -> None:
    code = """
    import os
    import jax, jaxsync
    was = jax.config.jax_enable_preemption_service
    jaxsync.initialize()
    jaxsync.initialize()
    print(len(jax.devices()), jax.process_count(), os.environ.get("XLA_FLAGS"))
    print(jax.config.jax_enable_preemption_service == was)
    jaxsync.initialize()
    try:
        jaxsync.initialize("127.0.0.1:1234", 2, 0)
    except jaxsync.errors.InitializationError as error:
        print(str(error).splitlines()[1])
    """
    done = run_python(code, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1 1 ",
        "True",
        "  - coordinator_address was None, and is now '127.0.0.1:1234'",
    ]


def test_half_of_the_arguments_is_an_error(run_python: Callable[..., Any]) -> None:
    code = """
    import jaxsync
    try:
        jaxsync.initialize(num_processes=2)
    except jaxsync.errors.InitializationError as error:
        print(error)
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "jaxsync.initialize: an argument is missing.\n  - coordinator_address should be defined"
    )


def test_a_port_that_is_taken_is_named(run_python: Callable[..., Any]) -> None:
    code = """
    import sys
    import jaxsync
    try:
        jaxsync.initialize(sys.argv[1], 2, 0)
    except jaxsync.errors.InitializationError as error:
        print(str(error).splitlines()[1])
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_python(code, address)
    assert done.stdout.startswith(f"  - {address}: Address already in use"), done.stderr


def test_all_are_told_who_is_missing(run_job: Callable[..., Any]) -> None:
    """Also who came late: by then nobody is there any more."""
    code = """
    if ME == 2:
        sys.exit()
    try:
        jaxsync.initialize(timeout_s=4)
    except AbsentProcessError as error:
        print(str(error).splitlines()[1], isinstance(error, TimeoutError))
    """
    ended = run_job(code, 3)
    assert [(process.code, process.out) for process in ended] == [
        (0, "  - process 2 is missing True\n"),
        (0, "  - process 2 is missing True\n"),
        (0, ""),
    ], ended


@pytest.mark.parametrize(
    ("odd", "difference"),
    [
        ("versions.__version__ = 'odd'", "jaxsync: even in processes 0 and 2; odd in process 1"),
        ("arguments = {'num_processes': 4}", "num_processes: 3 in processes 0 and 2; 4 in process 1"),
        ("arguments = {'process_id': 2}", "process_id: 2 in two processes"),
    ],
    ids=["another version", "another number", "the same id"],
)
def test_all_are_told_in_what_they_differ(run_job: Callable[..., Any], odd: str, difference: str) -> None:
    code = f"""
    from jaxsync import versions
    arguments = {{}}
    versions.__version__ = "even"
    if ME == 1:
        {odd}
    try:
        jaxsync.initialize(timeout_s=20, **arguments)
    except DisagreementError as error:
        print(str(error).splitlines()[1])
    """
    ended = run_job(code, 3)
    assert [(process.code, process.out) for process in ended] == [(0, f"  - {difference}\n")] * 3, ended


def test_a_job_listens_on_loopback_alone_and_its_calls_can_be_repeated(run_job: Callable[..., Any]) -> None:
    code = """
    import socket, threading
    jaxsync.initialize()
    jaxsync.initialize()
    jaxsync.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], NUM, ME)
    try:
        jaxsync.initialize(num_processes=5)
    except InitializationError as error:
        print(str(error).splitlines()[1])
    print(len(jax.devices()), jax.process_index(), os.environ["XLA_FLAGS"])
    if ME == 0:
        port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
        lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
        hosts = {host for address, state in ((line[1], line[3]) for line in lines)
                 for host, _, own in [address.partition(":")] if state == "0A" and own == f"{port:04X}"}
        print(hosts)
    else:
        threading.Event().wait(1)  # the other one waits at its exit
    """
    ended = run_job(code, 2, XLA_FLAGS="--xla_cpu_collective_timeout_seconds=7")
    assert [process.code for process in ended] == [0, 0], ended
    first = ["  - num_processes was 2, and is now 5", "2 0 --xla_cpu_collective_timeout_seconds=7"]
    *told, hosts = ended[0].out.splitlines()
    assert told == first
    # 127.0.0.1 and nothing else, as Linux writes it among its own and among IPv6 addresses.
    assert hosts in ("{'0100007F'}", "{'0000000000000000FFFF00000100007F'}")
    assert ended[1].out.splitlines()[1] == "2 1 --xla_cpu_collective_timeout_seconds=7"
    assert "without the others" not in ended[0].err


def test_sigterm_ends_a_process_of_a_job(run_job: Callable[..., Any]) -> None:
    code = """
    jaxsync.initialize(heartbeat_timeout_s=2)
    jax.devices()
    if ME == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    """
    ended = run_job(code, 2)
    assert ended[1].code == -signal.SIGTERM
    assert ended[0].code == -signal.SIGABRT  # JAX ends it, when the heartbeats of the other stay away


def report(process: Any, num_processes: str = "2", job: str = "ours") -> bytes:
    facts = {"num_processes": num_processes, **versions()}
    return json.dumps({"kind": "jaxsync roll call", "process": process, "facts": facts, "job": job}).encode()


STRAY = {
    "infinity": report(float("inf")),
    "nan": report(float("nan")),
    "nested": b"[" * 4000,
    "beyond": report(99),
    "negative": report(-1),
    "zero": report(0),
    "fraction": report(1.0),
    "bool": report(True),
    "count": report(1, num_processes="many"),
    "list": b"[1]",
    "http": b"GET / HTTP/1.1",
    "no facts": b'{"kind": "jaxsync roll call", "process": 1, "facts": {}}',
}


@pytest.mark.parametrize("line", STRAY.values(), ids=STRAY)
def test_what_is_no_report_is_none(line: bytes) -> None:
    assert parse_report(line) is None


def test_a_process_that_counts_otherwise_is_no_stranger() -> None:
    found = parse_report(report(3, num_processes="4"))
    assert found == (3, {"num_processes": "4", **versions()}, "ours")


def test_strangers_and_other_jobs_are_sent_away_and_the_roll_waits_for_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ended: list[BaseException | None] = []

    def be_first() -> None:
        try:
            call_roll(address, address, 2, 0, timeout_s=60, job="ours")
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    first = threading.Thread(target=be_first)
    first.start()
    with pytest.raises(InitializationError) as caught:  # it waits until there is a process 0
        call_roll(address, address, 2, 1, timeout_s=60, job="theirs")
    assert caught.value.reason == f"process 0 of another job listens at {address}"
    for line in STRAY.values():
        with socket.create_connection(split_address(address), timeout=30) as stray:
            stray.sendall(line + b"\n")
            stray.shutdown(socket.SHUT_WR)
            assert stray.recv(100) == b""
    assert not ended
    call_roll(address, address, 2, 1, timeout_s=60, job="ours")
    first.join(timeout=30)
    assert ended == [None]
