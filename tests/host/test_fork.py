"""A forked child has neither the loop's thread nor a usable JAX: every call says so at once."""

from __future__ import annotations

import textwrap

import pytest

START = """
    import os, signal, sys, threading, warnings

    warnings.filterwarnings("ignore", ".*fork", RuntimeWarning)  # JAX's and Python's own advice not to
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
    import jax, jax.numpy as jnp, numpy as np, jaxsync
    from jaxsync.errors import ForkedProcessError

    jaxsync.simulate_devices(2)
    params = {"w": np.zeros(3, np.float32)}
    gradients = []

    def make_gradients():
        for index, device in enumerate(jax.devices()):
            gradients.append(jax.device_put(np.full(3, 1.0 + index, np.float32), device))

    def step(client):
        for index in range(2):
            client.submit_gradient_sync(index, {"w": gradients[index]})
        tickets = [client.submit_sync_collective(index) for index in range(2)]
        return [float(ticket.wait()["w"][0]) for ticket in tickets]

    def refusals(calls):  # in a forked child: what each call raises, and within 2 s
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
            code = 0
            for name, call in calls.items():
                signal.alarm(2)
                try:
                    call()
                    print(f"{name} returned", flush=True)
                    code = 1
                except ForkedProcessError as error:
                    print(f"{name}: {str(error).splitlines()[0].split(' was called ')[0]}", flush=True)
                except BaseException as error:
                    print(f"{name} raised {error!r}", flush=True)
                    code = 1
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


STARTED = """
    mesh = jaxsync.make_mesh({"data": 2})
    make_gradients()
"""


def program(*parts: str) -> str:
    return "".join(map(textwrap.dedent, (START, *parts)))


def test_every_call_of_a_client_is_refused_and_the_parent_goes_on(run_python) -> None:
    end = """
        client = jaxsync.start(mesh)
        client.register_sync_parameters(params)
        step(client)
        client.submit_gradient_sync(0, {"w": gradients[0]})
        ticket = client.submit_sync_collective(0)
        code = refusals({
            "register_sync_parameters": lambda: client.register_sync_parameters(params),
            "announce": lambda: client.register_sync_parameters(params, device=0),
            "submit_gradient_sync": lambda: client.submit_gradient_sync(1, {"w": gradients[1]}),
            "submit_sync_collective": lambda: client.submit_sync_collective(1),
            "defer": lambda: client.defer(print),
            "abort": lambda: client.abort(ValueError()),
            "describe": client.describe,
            "open_steps": client.open_steps,
            "statistics": client.statistics,
            "record": client.record,
            "close": client.close,
            "with": client.__enter__,
            "ticket.wait": ticket.wait,
            "ticket.wait_until_done": ticket.wait_until_done,
            "await": lambda: ticket.__await__().send(None),
        })
        client.submit_gradient_sync(1, {"w": gradients[1]})
        client.submit_sync_collective(1)
        print(code, float(ticket.wait()["w"][0]), step(client))
        client.close()
    """
    done = run_python(program(STARTED, end), timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    *refused, last = done.stdout.splitlines()
    assert last == "0 1.5 [1.5, 1.5]"
    assert refused == [
        "register_sync_parameters: register_sync_parameters",
        "announce: register_sync_parameters",
        "submit_gradient_sync: submit_gradient_sync",
        "submit_sync_collective: submit_sync_collective",
        "defer: defer",
        "abort: abort",
        "describe: describe",
        "open_steps: open_steps",
        "statistics: statistics",
        "record: record",
        "close: close",
        "with: entering the client",
        "ticket.wait: Ticket.wait",
        "ticket.wait_until_done: Ticket.wait",
        "await: Ticket.wait",
    ]


def test_a_child_that_leaves_the_with_block_is_refused_whatever_was_going_on_at_the_fork(run_python) -> None:
    """Another thread may have been handing over: then the child has its lock, and nobody to release it."""
    end = """
        held, done = threading.Event(), threading.Event()

        def hold(client):
            with client._loop._lock:
                held.set()
                done.wait()

        client = jaxsync.SyncClient(mesh)
        thread = threading.Thread(target=hold, args=(client,))
        thread.start()
        held.wait()
        code = refusals({"leave": lambda: client.__exit__(KeyError, KeyError(), None)})
        done.set()
        thread.join()
        client.close()
        print(code)
    """
    done = run_python(program(STARTED, end), timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "leave: leaving the client\n0\n"


def test_guarded_launches_and_train_steps_are_refused(run_python) -> None:
    end = """
        import optax

        psum = jax.jit(jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
        ))
        guarded, x = jaxsync.guard_dispatch(psum), jnp.arange(2.0)
        train = jaxsync.make_train_step(
            lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), optax.sgd(0.1), jaxsync.make_plan(params, mesh)
        )
        batch = np.ones((4, 3), np.float32)
        state, _ = train(train.init(params), batch)
        guarded(x)
        code = refusals({"guarded": lambda: guarded(x), "train": lambda: train(state, batch)})
        state, metrics = train(state, batch)
        print(code, float(guarded(x)[0]), float(metrics["loss"]))
    """
    done = run_python(program(STARTED, end), timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "guarded: launching a program",
        "train: step",
        "0 1.0 0.0",
    ]


@pytest.mark.parametrize("way", ["os._exit", "sys.exit", "raise"])
def test_a_child_ends_whatever_way_it_takes_and_the_parent_goes_on(run_python, way: str) -> None:
    """Even with the exit hooks that it inherits: it has no loop to close."""
    end = """
        client = jaxsync.start(mesh)
        client.register_sync_parameters(params)
        client.submit_gradient_sync(0, {"w": gradients[0]})
        ticket = client.submit_sync_collective(0)
        client.defer(threading.Event().wait, 0.2)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            del client, ticket
            if way == "os._exit":
                os._exit(1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if way == "sys.exit":
                sys.exit(1)
            raise SystemError
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        client.submit_gradient_sync(1, {"w": gradients[1]})
        client.submit_sync_collective(1)
        print(float(ticket.wait()["w"][0]))
    """
    done = run_python(program(STARTED, f"way = {way!r}", end), timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n1.5\n", "")


def test_a_child_forked_before_jax_started_has_a_client_of_its_own(run_python) -> None:
    end = """
        def whole():
            mesh = jaxsync.make_mesh({"data": 2})
            make_gradients()
            with jaxsync.SyncClient(mesh) as client:
                client.register_sync_parameters(params)
                print(step(client), flush=True)

        child = os.fork()
        if child == 0:
            signal.alarm(30)
            whole()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        whole()
        print(code)
    """
    done = run_python(program(end), timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[1.5, 1.5]\n[1.5, 1.5]\n0\n"


def test_whatever_would_run_jax_is_refused(run_python, tmp_path) -> None:
    end = """
        import optax
        from jaxsync import testing

        def loss_fn(p, batch):
            return jnp.mean((batch @ p["w"]) ** 2)

        plan = jaxsync.make_plan(params, mesh)
        train = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)
        batch = np.ones((4, 3), np.float32)
        state, _ = train(train.init(params), batch)
        host = jax.device_get(state)
        jaxsync.save_checkpoint(directory, state)
        client = jaxsync.start(mesh)
        code = refusals({
            "init": lambda: train.init(params),
            "train": lambda: train(host, batch),
            "lower": lambda: train.lower(state, batch),
            "params": lambda: state.params,
            "opt_state": lambda: state.opt_state,
            "replace": lambda: state.replace(params=params),
            "save": lambda: jaxsync.save_checkpoint(directory, state),
            "load": lambda: jaxsync.load_checkpoint(directory, train),
            "match": lambda: testing.assert_matches_single_device(loss_fn, params, batch, train),
            "replicas": lambda: testing.assert_replicas_equal(state),
            "audit": lambda: jaxsync.audit(train, state, batch),
            "start": lambda: jaxsync.start(mesh),
            "SyncClient": lambda: jaxsync.SyncClient(mesh),
        })
        client.close()
        print(code, jaxsync.list_checkpoints(directory), int(train(state, batch)[0].step))
    """
    done = run_python(program(STARTED, f"directory = {str(tmp_path)!r}\n", end), timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "init: step.init",
        "train: step",
        "lower: step.lower",
        "params: state.params",
        "opt_state: state.opt_state",
        "replace: state.replace",
        "save: save_checkpoint",
        "load: load_checkpoint",
        "match: testing.assert_matches_single_device",
        "replicas: comparing replicas",
        "audit: audit",
        "start: start",
        "SyncClient: SyncClient",
        "0 (1,) 2",
    ]


def test_jax_that_the_parent_started_by_itself_counts_as_well(run_python) -> None:
    end = """
        jnp.zeros(2).block_until_ready()
        mesh = jaxsync.make_mesh({"data": 2})
        print(refusals({
            "SyncClient": lambda: jaxsync.SyncClient(mesh),
            "guarded": lambda: jaxsync.guard_dispatch(jax.jit(jnp.sin))(1.0),
        }))
    """
    done = run_python(program(end), timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["SyncClient: SyncClient", "guarded: launching a program", "0"]


def test_a_child_forked_before_jax_started_may_start_it_by_itself(run_python) -> None:
    end = """
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            x = jnp.arange(2.0)
            print(float(jaxsync.guard_dispatch(jax.jit(jnp.sum))(x)), flush=True)
            print(refusals({"grandchild": lambda: jaxsync.start(jaxsync.make_mesh({"data": 2}))}), flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = run_python(program(end), timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["1.0", "grandchild: start", "0", "0"]
