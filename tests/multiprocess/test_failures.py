"""A process that is lost: every other one ends soon, with an error that says so or by an abort of JAX."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

# A loop of steps that awaits nothing but the launcher's window, and one that waits for gradients.
STEPS = """
import jax.numpy as jnp, optax

def run(break_down, at=12):
    params = {"w": np.ones((4, 3), np.float32)}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": NUM}))
    step = jaxsync.make_train_step(lambda p, b: jnp.mean((b @ p["w"]) ** 2), optax.sgd(1e-3), plan)
    state = step.init(params)
    for number in range(40):
        if number == at and ME == BAD:
            break_down()
        state, metrics = step(state, np.ones((NUM, 4), np.float32))
    return float(metrics["loss"])
"""
CLIENT = """
def run(break_down, at=5):
    mesh = jaxsync.make_mesh({"data": NUM})
    client = jaxsync.start(mesh)
    client.register_sync_parameters({"w": np.ones(3, np.float32)})
    device = mesh.devices.flat[ME]
    for number in range(40):
        if number == at and ME == BAD:
            break_down()
        client.submit_gradient_sync(device, {"w": jax.device_put(np.ones(3, np.float32), device)})
        client.submit_sync_collective(device).wait()
"""

LOST = "jaxsync.errors.PeerLostError: Another process is lost: "
SHORT = "jaxsync.initialize(collective_timeout_s=3)\n"  # nothing here waits for heartbeats


def breaking(how: str) -> str:
    return f"def break_down():\n    {how}\nrun(break_down)\n"


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise ZeroDivisionError('mine')"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
LEAVE = "sys.exit(3)"


@pytest.mark.parametrize("work", [STEPS, CLIENT], ids=["TrainStep", "SyncClient"])
def test_when_a_process_raises_the_others_get_an_error_and_all_end_with_their_own_code(
    run_job: Callable[..., Any], work: str
) -> None:
    ended = run_job(SHORT + breaking(RAISE), 3, before=work + "BAD = 1\n", limit_s=40)
    assert [process.code for process in ended] == [1, 1, 1], ended
    assert "ZeroDivisionError: mine" in ended[1].err
    for process in (ended[0], ended[2]):
        assert LOST + "its connection broke." in process.err


@pytest.mark.parametrize("work", [STEPS, CLIENT], ids=["TrainStep", "SyncClient"])
def test_when_a_process_is_killed_the_others_get_an_error(run_job: Callable[..., Any], work: str) -> None:
    ended = run_job(SHORT + breaking(KILL), 3, before=work + "BAD = 2\n", limit_s=40)
    assert [process.code for process in ended] == [1, 1, -signal.SIGKILL], ended
    for process in ended[:2]:
        assert LOST + "its connection broke." in process.err


def test_who_reads_an_array_by_a_guarded_function_gets_an_error_of_ours(run_job: Callable[..., Any]) -> None:
    """By itself it would be the runtime's, as below it in the traceback."""
    code = """
    jaxsync.simulate_devices(2)  # with one device a launch waits itself
    jaxsync.initialize(heartbeat_timeout_s=30, collective_timeout_s=2)
    mesh = jaxsync.make_mesh({"data": 4})
    total = jaxsync.guard_dispatch(jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P())))
    fetch = jaxsync.guard_dispatch(jax.device_get)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.make_array_from_callback((4,), rows, lambda index: np.ones(1, np.float32))
    assert fetch({"total": total(x)}) == {"total": 4.0}
    if ME == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    late = total(x)

    def read():
        return fetch(late)

    read()
    """
    ended = run_job(code, 2, limit_s=40)
    assert [process.code for process in ended] == [1, -signal.SIGKILL], ended
    before, _, after = ended[0].err.partition("The above exception was the direct cause")
    assert "Gloo all-reduce failed" in before
    assert LOST in after
    assert ", in read\n" in after  # and so not from total(x)


def test_when_the_coordinator_is_killed_the_others_end_at_once(run_job: Callable[..., Any]) -> None:
    """JAX ends them; whether the error of the collective still gets out is a matter of microseconds."""
    ended = run_job(SHORT + breaking(KILL), 3, before=STEPS + "BAD = 0\n", limit_s=40)
    assert ended[0].code == -signal.SIGKILL
    for process in ended[1:]:
        assert process.code in (-signal.SIGABRT, 1), ended
        assert "another task died" in process.err or LOST in process.err


def test_when_the_coordinator_raises_the_others_end(run_job: Callable[..., Any]) -> None:
    ended = run_job(SHORT + breaking(RAISE), 3, before=STEPS + "BAD = 0\n", limit_s=40)
    assert ended[0].code == 1
    assert "ZeroDivisionError: mine" in ended[0].err
    for process in ended[1:]:
        assert process.code in (-signal.SIGABRT, 1), ended
        assert "another task died" in process.err or LOST in process.err


def test_a_process_that_stands_still_is_given_up_with_the_defaults(run_job: Callable[..., Any]) -> None:
    code = "jaxsync.initialize()\n" + breaking(STOP)
    ended = run_job(code, 3, before=STEPS + "BAD = 1\n", left=(1,), limit_s=45)
    for process in (ended[0], ended[2]):
        assert process.code == -signal.SIGABRT
        assert "stopped sending heartbeats" in process.err


def test_a_process_that_lives_and_does_not_come_to_a_collective_is_given_up(
    run_job: Callable[..., Any],
) -> None:
    """It has left the loop, and waits at its exit until it hears that the others have failed."""
    ended = run_job(SHORT + breaking(LEAVE), 3, before=STEPS + "BAD = 1\n", limit_s=40)
    assert [process.code for process in ended] == [1, 3, 1], ended
    for process in (ended[0], ended[2]):
        assert LOST + "it did not come to a collective in time." in process.err
    assert "process 1 ends without the others: process " in ended[1].err
    assert "ended with PeerLostError" in ended[1].err


def test_nothing_waits_at_exit_for_a_process_that_never_comes_there(run_job: Callable[..., Any]) -> None:
    code = """
    jaxsync.initialize(heartbeat_timeout_s=30, shutdown_timeout_s=1)
    if ME == 1:
        signal.pause()
    """
    ended = run_job(code, 2, left=(1,), limit_s=30)
    assert ended[0].code == 0
    assert "process 0 ends without the others: process 1 has not ended" in ended[0].err


def test_what_a_program_raises_itself_is_no_loss_of_another_process(run_job: Callable[..., Any]) -> None:
    """Whatever its text, and in a job of several as in a process that is alone."""
    code = """
    from jaxsync.host.peers import has_lost_peer

    def fail(error):
        raise error

    def tell():
        for error in (
            TimeoutError("broker: heartbeat timeout"),
            ConnectionError("db.example:5432: Connection closed by peer"),
            ValueError("the transport must not be Gloo"),
        ):
            try:
                jaxsync.guard_dispatch(fail)(error)
            except Exception as raised:
                print(raised is error, has_lost_peer(), flush=True)

    jaxsync.initialize()
    tell()
    """
    for ended in (*run_job(code, 2), *run_job(code, 1)):
        assert (ended.code, ended.out) == (0, "True False\n" * 3), ended


def test_a_mesh_without_devices_of_a_process_is_refused_there_before_anything_starts(
    run_job: Callable[..., Any],
) -> None:
    code = """
    jaxsync.simulate_devices(2)
    jaxsync.initialize()
    params = {"w": np.zeros(3, np.float32)}
    mesh = jaxsync.make_mesh({"data": 2}, devices=jax.devices()[:2])
    plan = jaxsync.make_plan(params, mesh)
    sgd = type("Sgd", (), {"init": lambda _, p: (), "update": lambda _, g, s, p=None: (g, s)})()
    for start in (
        lambda: jaxsync.make_train_step(lambda p, x: (p["w"] * x).sum(), sgd, plan).init(params),
        lambda: jaxsync.start(mesh).close(),
    ):
        try:
            start()
            print("fine")
        except MeshError as error:
            print(str(error).splitlines()[1].strip())
    """
    own, other = run_job(code, 2, before="")
    assert (own.code, own.out.splitlines()[-2:]) == (0, ["fine", "fine"]), own
    assert other.code == 0, other
    assert other.out.splitlines()[-2] == (
        '- process 1 has no device in the mesh; the job has 4: use {"data": jax.device_count()}'
    )
    assert other.out.splitlines()[-1].startswith("- process 1 ")
