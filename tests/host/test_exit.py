"""The interpreter ends, with the right exit code and without a crash, whatever the client was doing."""

from __future__ import annotations

import textwrap

import pytest

START = """
    import gc, sys, threading, time, weakref
    import jax, jax.numpy as jnp, numpy as np, jaxsync
    from jaxsync.errors import ClosedError, JaxsyncError

    jaxsync.simulate_devices(2)
    mesh = jaxsync.make_mesh({"data": 2})
    params = {"w": jnp.zeros(3)}

    def loops():
        return [thread for thread in threading.enumerate() if thread.name == "jaxsync-loop"]

    def open_client(timeout_s=60.0):
        client = jaxsync.SyncClient(mesh, jaxsync.SyncConfig(timeout_s=timeout_s))
        client.register_sync_parameters(params)
        return client

    def submit(client, index):
        gradient = jax.device_put(jnp.full(3, 1.0 + index), jax.devices()[index])
        client.submit_gradient_sync(index, {"w": gradient})

    def half_a_step(client):
        submit(client, 0)
        return client.submit_sync_collective(0)

    def in_thread(fn, daemon):
        entered = threading.Event()

        def run():
            entered.set()
            try:
                fn()
            except JaxsyncError as error:
                if not daemon:
                    print(type(error).__name__, flush=True)

        threading.Thread(target=run, daemon=daemon).start()
        entered.wait()

    @jax.jit
    def psum(x):
        sum_all = jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
        )
        return sum_all(x)[0] + x
"""

# What the main program does last, after START: code, exit code, what it prints.
ENDS = {
    "the client was never used": ("client = jaxsync.SyncClient(mesh)", 0, ""),
    "the client is idle": (
        """
        client = open_client()
        ticket = half_a_step(client)
        submit(client, 1)
        client.submit_sync_collective(1)
        print(ticket.wait()["w"][0])
        """,
        0,
        "1.5",
    ),
    "a step is open": ("client = open_client(); ticket = half_a_step(client)", 0, ""),
    "a program is under way": (
        """
        client = open_client()
        for _ in range(20):
            ticket = half_a_step(client)
            submit(client, 1)
            client.submit_sync_collective(1)
            ticket.wait_until_done()
        half_a_step(client)
        submit(client, 1)
        """,
        0,
        "",
    ),
    "a daemon thread waits": (
        "client = open_client(); ticket = half_a_step(client); in_thread(ticket.wait, daemon=True)",
        0,
        "",
    ),
    "a thread that is no daemon waits": (
        # A thread that is no daemon may go on by itself, so the step has all of its time, and ends with it.
        "client = open_client(2.0); ticket = half_a_step(client); in_thread(ticket.wait, daemon=False)",
        0,
        "SyncTimeoutError",
    ),
    "threads of both kinds wait and a callback is queued": (
        """
        client = open_client(2.0)
        ticket = half_a_step(client)
        in_thread(ticket.wait, daemon=True)
        in_thread(ticket.wait, daemon=False)
        client.defer(lambda: print("called"))
        """,
        0,
        "called\nSyncTimeoutError",
    ),
    "a thread that is no daemon goes on": (
        """
        client = open_client()

        def train():
            threading.main_thread().join()
            for _ in range(30):
                ticket = half_a_step(client)
                submit(client, 1)
                client.submit_sync_collective(1)
                value = ticket.wait()["w"][0]
            print(value)

        in_thread(train, daemon=False)
        """,
        0,
        "1.5",
    ),
    "callbacks are queued": (
        """
        client = open_client()
        guarded, x, seen = jaxsync.guard_dispatch(psum), jnp.arange(2.0), []
        for _ in range(50):
            x = guarded(x * 0.1)
            client.defer(seen.append, x)
        client.defer(lambda: print(len(seen)))
        """,
        0,
        "50",
    ),
    "a callback runs": (
        """
        client = open_client()
        entered = threading.Event()
        client.defer(lambda: (entered.set(), threading.Event().wait(0.5), print("called")))
        entered.wait()
        """,
        0,
        "called",
    ),
    "a callback runs that never ends": (
        """
        client = open_client()
        entered, never = threading.Event(), threading.Event()
        client.defer(lambda: (entered.set(), never.wait()))
        entered.wait()
        """,
        0,
        "",
    ),
    "guarded launches and a train step are not awaited": (
        """
        import optax
        plan = jaxsync.make_plan(params, mesh)
        step = jaxsync.make_train_step(
            lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), optax.sgd(0.1), plan
        )
        state, batch = step.init(params), np.ones((4, 3), np.float32)
        guarded, x = jaxsync.guard_dispatch(psum), jnp.arange(2.0)
        client = open_client()
        for _ in range(200):
            state, _ = step(state, batch)
            x = guarded(x * 0.1)
            client.defer(lambda value: None, x)
        """,
        0,
        "",
    ),
    "the client is broken": (
        """
        client = open_client()
        ticket = half_a_step(client)
        client.abort(ValueError("a device's own"))
        """,
        0,
        "",
    ),
    "the client is closed": (
        "client = open_client(); ticket = half_a_step(client); client.close(); print(len(loops()))",
        0,
        "0",
    ),
    "there are two clients": (
        """
        first, second = open_client(), open_client()
        half_a_step(first)
        ticket = half_a_step(second)
        in_thread(ticket.wait, daemon=True)
        """,
        0,
        "",
    ),
    "the program calls sys.exit": (
        "client = open_client(); ticket = half_a_step(client); sys.exit(3)",
        3,
        "",
    ),
    "the program fails": (
        "client = open_client(); ticket = half_a_step(client); raise RuntimeError('the end')",
        1,
        "",
    ),
    "the program fails inside the context": (
        """
        with open_client() as client:
            in_thread(half_a_step(client).wait, daemon=False)
            raise RuntimeError('the end')
        """,
        1,
        "SyncFailedError",
    ),
}


def program(end: str) -> str:
    return textwrap.dedent(START) + textwrap.dedent(end)


@pytest.mark.parametrize("state", ENDS)
def test_the_interpreter_ends_cleanly_when(state: str, run_python) -> None:
    end, code, printed = ENDS[state]
    done = run_python(program(end), timeout_s=30)
    assert done.returncode == code, done.stderr
    assert done.stdout.strip() == printed
    assert ("the end" in done.stderr) == ("the program fails" in state)
    for crash in ("Fatal", "Abort", "Segmentation", "Exception ignored"):
        assert crash not in done.stderr, done.stderr


def test_it_ends_cleanly_when_a_finalizer_was_made_before_jax_was_imported(run_python) -> None:
    """`weakref.finalize` hooks into the exit once, at its first use, and JAX would go before it."""
    first = "import weakref; weakref.finalize(weakref.WeakSet, int)\n"
    end = """
        client = open_client()
        client.defer(lambda: threading.Event().wait(0.3))
        ticket = half_a_step(client)
        submit(client, 1)
        client.submit_sync_collective(1)
        x = jax.device_put(jnp.arange(4.0), jax.devices()[1])
        client.defer(lambda: print(float((x + 1).sum()), x.devices() == {jax.devices()[1]}))
    """
    done = run_python(first + program(end), timeout_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10.0 True\n", "")


def test_dropping_the_last_reference_ends_the_thread_and_answers_its_tickets(run_python) -> None:
    end = """
        client = open_client()
        sync, deferred = half_a_step(client), client.defer(lambda: 3)
        assert len(loops()) == 1
        del client
        print(len(loops()), deferred.wait())
        try:
            sync.wait()
        except ClosedError as error:
            print(error.pending[0])
    """
    done = run_python(program(end), timeout_s=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0 3\nthe sync of cpu:0\n"


def test_the_collector_may_drop_a_client_on_its_own_loops_thread(run_python) -> None:
    """Even where the thread holds the lock under which messages are taken."""
    end = """
        def orphan():
            client = open_client()
            ticket = half_a_step(client)
            cycle = [client]
            cycle.append(cycle)
            return ticket, client._loop, weakref.ref(client)

        def collect(frame, event, arg):  # in the loop's thread
            if event == "call" and frame.f_code.co_name == "_tick" and client() and loop._lock.locked():
                gc.collect()
                print("collected", client() is None)

        gc.disable()
        client = lambda: None
        threading.setprofile(collect)
        ticket, loop, client = orphan()
        try:
            ticket.wait(10)
        except ClosedError:
            print("closed")
        print(loop.join(5), len(loops()))
    """
    done = run_python(program(end), timeout_s=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "collected True\nclosed\nTrue 0\n"


FAILING = """
    import contextlib

    made = []

    def fail(x):
        raise RuntimeError("SENTINEL of the failing host callback")

    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, y: jnp.tanh(y @ y), x))
    failing = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((3,), jnp.float32), x[0, :3]))

    def failed(index):  # an array that nobody has waited for yet, and whose computation fails
        x = jax.device_put(jnp.full((300, 300), 12345.0), jax.devices()[index])
        for _ in range(100):
            try:
                made.append(failing(slow(x)))
                return made[-1]
            except jax.errors.JaxRuntimeError:  # its input was ready, so the call itself ran it
                continue

    def settle():  # JAX itself crashes at exit while a callback is under way that then fails
        for array in made:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                array.block_until_ready()
"""


def test_a_gradient_whose_computation_failed_is_named_and_the_process_lives(run_python) -> None:
    """Not by its value: to format a failed array ends the process."""
    end = """
        client = open_client()
        client.submit_gradient_sync(0, {"w": failed(0)})
        submit(client, 1)
        for ticket in [client.submit_sync_collective(index) for index in range(2)]:
            try:
                ticket.wait(20)
            except JaxsyncError as error:
                print(type(error).__name__, type(error.__cause__).__name__, error.__cause__.__notes__)
                assert "SENTINEL" in str(error.__cause__) and "12345" not in f"{error} {error!r}"
        for call in (client.describe, client.record, lambda: repr(ticket), client.statistics):
            assert "12345" not in str(call())
        client.close()
        settle()
    """
    done = run_python(program(FAILING) + textwrap.dedent(end), timeout_s=30)
    assert done.returncode == 0, done.stderr
    line = "SyncFailedError JaxRuntimeError [\"gradient ['w'] of cpu:0\"]\n"
    assert done.stdout == 2 * line
    assert "Fatal" not in done.stderr


def test_a_failed_gradient_among_those_that_travel_together_is_named_and_the_process_lives(
    run_python,
) -> None:
    end = """
        params = {"u": jnp.zeros(2), "v": jnp.zeros(3), "w": jnp.zeros(())}
        client = open_client()
        for index, device in enumerate(jax.devices()):
            good = jax.device_put(params, device)
            client.submit_gradient_sync(index, good if index else {**good, "v": failed(0)})
        for ticket in [client.submit_sync_collective(index) for index in range(2)]:
            try:
                ticket.wait(20)
            except JaxsyncError as error:
                print(type(error).__name__, type(error.__cause__).__name__, error.__cause__.__notes__)
        client.close()
        settle()
    """
    done = run_python(program(FAILING) + textwrap.dedent(end), timeout_s=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * "SyncFailedError JaxRuntimeError [\"gradient ['v'] of cpu:0\"]\n"
    assert "Fatal" not in done.stderr


def test_a_callback_whose_array_failed_is_named_and_the_process_lives(run_python) -> None:
    end = """
        client = open_client()
        ticket = client.defer(lambda value: None, failed(0))
        unseen = client.defer(lambda value: None, {"x": failed(1)})
        try:
            ticket.wait(20)
        except JaxsyncError as error:
            print(error)
        try:
            client.close()
        except JaxsyncError as error:
            print(error)
        settle()
    """
    done = run_python(program(FAILING) + textwrap.dedent(end), timeout_s=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<lambda>: JaxRuntimeError") == 2
    assert "12345" not in done.stdout


def test_a_wrong_gradient_whose_computation_failed_is_refused_by_its_shape(run_python) -> None:
    end = """
        client = jaxsync.SyncClient(mesh)
        client.register_sync_parameters({"w": jnp.zeros((2, 2))})
        for call in (
            lambda: client.submit_gradient_sync(0, {"w": failed(0)}),
            lambda: client.submit_gradient_sync(1, {"w": failed(0)}),
            lambda: client.submit_gradient_sync(0, failed(0)),
            lambda: client.register_sync_parameters({"w": failed(0)}, device=0),
        ):
            try:
                call()
            except JaxsyncError as error:
                print(type(error).__name__)
                assert "12345" not in str(error)
        settle()
    """
    done = run_python(program(FAILING) + textwrap.dedent(end), timeout_s=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["SubmissionError"] * 2 + ["UnknownNameError", "SetMismatchError"]
