"""What processes compare before they launch together, and what each of them is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.multiprocess.agreement import plan_digest, plan_facts
from jaxsync.multiprocess.differences import ALL_ELSE, find_differences

pytestmark = pytest.mark.timeout(120)


def test_processes_that_say_the_same_do_not_differ() -> None:
    assert find_differences({}) == ()
    assert find_differences({3: {"a": "1"}}) == ()
    assert find_differences({0: {"a": "1", "b": "2"}, 1: {"b": "2", "a": "1"}}) == ()


def test_each_side_of_a_difference_is_named_with_its_processes() -> None:
    said = {process: {"same": "x", "jax": "0.10" if process in (1, 6) else "0.12"} for process in range(8)}
    assert find_differences(said) == (
        "jax: 0.12 in processes 0, 2, 3, 4, 5 and 7; 0.10 in processes 1 and 6",
    )
    assert find_differences({k: {"a": "1"} if k else {} for k in range(6)}) == (
        "a: none in process 0; 1 in processes 1 to 5",
    )


def test_what_a_process_leaves_open_is_no_difference_unless_there_is_no_other() -> None:
    said = {0: {"call": "none", ALL_ELSE: "not asked about"}, 1: {"call": "a step", "leaf": "announced"}}
    assert find_differences(said) == ("call: none in process 0; a step in process 1",)
    same = {process: {**facts, "call": "a step"} for process, facts in said.items()}
    assert find_differences(same) == ("leaf: not asked about in process 0; announced in process 1",)


def test_of_different_calls_only_what_is_known_of_all_is_compared() -> None:
    said = {
        0: {"call": "number 29", "jax": "0.10", "batch": "float32[12]"},
        1: {"call": "state.params", "batch": "float32[6]", "value": "1"},
    }
    assert find_differences(said) == (
        "call: number 29 in process 0; state.params in process 1",
        "batch: float32[12] in process 0; float32[6] in process 1",
    )
    assert find_differences({k: {**facts, "call": "init"} for k, facts in said.items()})[1:] == (
        "batch: float32[12] in process 0; float32[6] in process 1",
        "value: none in process 0; 1 in process 1",
    )


def test_differences_come_in_the_order_of_the_facts_of_whoever_says_most() -> None:
    more = {"leaf 0": "a", "leaf 1": "b", "leaf 2": "c", "end": "same"}
    fewer = {"leaf 0": "b", "end": "same"}
    assert [line.split(":")[0] for line in find_differences({0: fewer, 1: more})] == [
        "leaf 0",
        "leaf 1",
        "leaf 2",
    ]


def plan_of(config: jaxsync.SyncConfig | None = None, **leaves: Any) -> jaxsync.SyncPlan:
    return jaxsync.make_plan(leaves, jaxsync.make_mesh({"data": 2}), {"w": P("data")}, config)


def test_a_plan_is_told_by_leaf_axis_device_config_and_version() -> None:
    plan = plan_of(w=np.zeros((4, 2), np.float32))
    facts = plan_facts(plan, plan.mesh)
    assert facts["leaf 0"] == f"['w'] float32[4, 2] {P('data')}"
    assert facts["mesh"] == "data=2"
    assert facts["device 1 of the mesh"] == "1 of process 0"
    assert facts["config.reduce"] == "'mean'"
    assert facts["jax"] == jax.__version__
    # Each only says how long this process waits, or how far it runs ahead.
    assert not {"config.timeout_s", "config.stall_warning_s", "config.max_in_flight"} & set(facts)


def test_a_digest_is_equal_only_for_equal_facts() -> None:
    w = np.zeros((4, 2), np.float32)
    others = jaxsync.make_mesh({"data": 2}, devices=jax.devices()[2:4])
    plans = [
        plan_of(w=w),
        plan_of(w=w.astype(np.float16)),
        plan_of(w=np.zeros((4, 3), np.float32)),
        plan_of(jaxsync.SyncConfig(reduce="sum"), w=w),
        jaxsync.make_plan({"w": w}, jaxsync.make_mesh({"data": 2}), {"w": P()}),
        jaxsync.make_plan({"w": w}, others, {"w": P("data")}),
    ]
    assert len({plan_digest(plan, plan.mesh) for plan in plans}) == len(plans)
    assert plan_digest(plans[0], plans[0].mesh) == plan_digest(plan_of(w=w), plans[0].mesh)


JOB = """
import jax.numpy as jnp, optax
from jaxsync import versions

jaxsync.initialize(collective_timeout_s=PATIENCE_S)
W, B = np.zeros((2, 3), np.float32), np.zeros(3, np.float32)

def loss_fn(params, batch):
    return jnp.mean((batch @ params[0] + params[1]) ** 2)

def make_step(params=(W, B), config=None, reverse=False, tx=optax.sgd(0.1), loss_fn=loss_fn, **options):
    devices = jax.devices()[::-1] if reverse else jax.devices()
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": NUM}, devices=devices), config=config)
    return jaxsync.make_train_step(loss_fn, tx, plan, **options), params

def start(*args, **options):
    step, params = make_step(*args, **options)
    return step.init(params)

def tell(name, do):
    try:
        do()
    except JaxsyncError as error:
        print(name, "|", type(error).__name__, "|", "|".join(str(error).splitlines()[:3]), flush=True)
    else:
        print(name, "| fine", flush=True)

odd = ME == NUM - 1  # the one that is unlike the others
"""


def test_every_process_is_told_in_what_they_differ(run_job: Callable[..., Any]) -> None:
    """And can go on: nothing was launched."""
    code = """
    tell("order", lambda: start((B, W) if odd else (W, B)))
    tell("shape", lambda: start((W, np.zeros(4, np.float32)) if odd else (W, B)))
    tell("more", lambda: start((W, B, B) if odd else (W, B)))
    tell("config", lambda: start(config=jaxsync.SyncConfig(reduce="sum" if odd else "mean")))
    tell("patience", lambda: start(config=jaxsync.SyncConfig(timeout_s=5.0 if odd else 9.0)))
    tell("devices", lambda: start(reverse=odd))
    tell("options", lambda: start(accumulate=2 if odd else 1))
    step, params = make_step()
    state = step.init(params)
    tell("batch", lambda: step(state, np.ones((4 if odd else 6, 2), np.float32)))

    def launch(**options):
        step, params = make_step(**options)
        step(step.init(params), np.ones((4, 2), np.float32))

    tell("rows", lambda: step(state, np.full((8, 2), float(ME), np.float32)))

    def loop(sizes):
        step, params = make_step()
        state = step.init(params)
        for size in sizes:
            state, metrics = step(state, np.ones((size, 2), np.float32))
        jax.block_until_ready(state)

    tell("in turn", lambda: loop([4, 2, 4, 2] if odd else [2, 4, 2, 4]))
    tell("replaced", lambda: step.init(params).replace(params=(W + ME, B)))
    def from_host():
        host = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), step.init(params))
        own = jax.tree.map(lambda x: x + x.dtype.type(ME), host)
        step(own, np.ones((8, 2), np.float32))

    tell("from the host", from_host)
    tell("optimizer", lambda: launch(tx=optax.sgd(0.2 if odd else 0.1)))
    tell("loss", lambda: launch(loss_fn=(lambda p, x: 2 * loss_fn(p, x)) if odd else loss_fn))
    client = jaxsync.SyncClient(jaxsync.make_mesh({"data": NUM}))
    tell("client", lambda: client.register_sync_parameters({"a" if odd else "b": B}))
    tell("call", lambda: client.register_sync_parameters({"a": B}) if odd else start())
    was, versions.__version__ = versions.__version__, "odd" if odd else "even"
    tell("version", start)
    versions.__version__ = was
    tell("end", lambda: step(state, np.ones((4, 2), np.float32)))
    client.close()
    """
    ended = run_job(code, 2, before="PATIENCE_S = 20\n" + JOB)
    assert [process.code for process in ended] == [0, 0], ended
    found, also = (dict(line.split(" | ", 1) for line in process.out.splitlines()) for process in ended)
    # Those who call different things are told so, each by what it called itself.
    calls = found.pop("call"), also.pop("call")
    assert found == also
    for subject, text in zip(("the parameters", "the registered parameters"), calls, strict=True):
        first = "call: the parameters in process 0; the registered parameters in process 1"
        assert f"The processes do not agree on {subject}, so nothing was launched.|  - {first}" in text

    def differ(subject: str, first: str) -> str:
        what = f"The processes do not agree on {subject}, so nothing was launched."
        return f"DisagreementError | {what}|  - {first}"

    parameters = "the parameters"
    one, other = "in process 0; {} in process 1", str(P())
    assert found["order"].startswith(
        differ(parameters, f"leaf 0: [0] float32[2, 3] {other} " + one.format(f"[0] float32[3] {other}"))
    )
    assert found["shape"].startswith(
        differ(parameters, f"leaf 1: [1] float32[3] {other} " + one.format(f"[1] float32[4] {other}"))
    )
    assert found["more"].startswith(differ(parameters, "number of leaves: 2 " + one.format("3")))
    assert found["config"].startswith(differ(parameters, "config.reduce: 'mean' " + one.format("'sum'")))
    assert found["patience"] == "fine"
    assert "device 0 of the mesh: 0 of process 0 in process 0; " in found["devices"]
    assert "accumulate=1, " in found["options"]
    assert "accumulate=2, " in found["options"]
    assert found["batch"].startswith(
        differ("the training step", "batch: float32[6, 2] " + one.format("float32[4, 2]"))
    )
    assert found["rows"].startswith(differ("the training step", "values of the batch's host arrays: "))
    assert found["in turn"].startswith(
        differ("the training step", "batch: float32[2, 2] " + one.format("float32[4, 2]"))
    )
    assert found["replaced"].startswith(differ("state.params", "value of [0]: bits "))
    assert found["from the host"].startswith(differ("the state", "value of "))
    for name in ("optimizer", "loss"):
        program = "loss function and optimizer, as compiled: "
        assert found[name].startswith(differ("the program of the training step", program))
    assert found["client"].startswith(
        differ(
            "the registered parameters",
            f"leaf 0: ['b'] float32[3] {other} " + one.format(f"['a'] float32[3] {other}"),
        )
    )
    assert found["version"].startswith(differ(parameters, "jaxsync: even " + one.format("odd")))
    assert found["end"] == "fine"


def test_a_last_batch_that_comes_a_step_early_is_not_paired_with_another(run_job: Callable[..., Any]) -> None:
    """Both shapes are known to both. One of them has launched a step by then that the other never will."""
    code = """
    step, params = make_step()
    state = step.init(params)
    for size in [4, 2, 4, 4, 2, 4] if odd else [4, 2, 4, 2, 4, 4]:
        state, metrics = step(state, np.ones((size, 2), np.float32))
    """
    ended = run_job(code, 2, before="PATIENCE_S = 5\n" + JOB)
    for process in ended:
        assert process.code != 0
        assert "jaxsync.errors.DisagreementError: The processes do not agree on " in process.err, ended
        assert "in process 0; " in process.err


def test_a_process_that_does_not_come_is_named_and_one_that_comes_late_is_told(
    run_job: Callable[..., Any],
) -> None:
    code = """
    step, params = make_step()
    state = step.init(params)
    if odd:  # leaves the others alone until they have given up
        threading.Event().wait(4)
    tell("step", lambda: step(state, np.ones((NUM, 2), np.float32)))
    """
    ended = run_job(code, 3, before="PATIENCE_S = 2\nimport threading\n" + JOB)
    assert [process.code for process in ended] == [0, 0, 0], ended
    for process in ended[:2]:
        assert process.out.startswith(
            "step | AbsentProcessError | 1 of 3 processes did not come to the agreement on the training step "
            "within 2.5 s.|  - process 2 is missing"
        )
    assert "Some of 3 processes did not come" in ended[2].out


CONSENT = """
from jaxsync.multiprocess.consent import Consent
from jaxsync.multiprocess.coordination import connect
from jaxsync.multiprocess.values import broadcast

mesh = jaxsync.make_mesh({"data": NUM})
consent = Consent(jaxsync.make_plan([W], mesh), mesh, {})

def leaves(*names):
    return lambda: {f"leaf {name}": "announced" for name in names}

def sum_up():  # a program of all processes, which asks nobody
    broadcast([W], mesh)

consent.ask("the parameters", dict)
sum_up()
"""


def test_who_waits_for_processes_that_ask_something_is_told_so_and_they_are_told_why(
    run_job: Callable[..., Any],
) -> None:
    """Also if they have given up by then, and if nothing is known of what it does without asking."""
    code = """
    def ask():
        consent.ask("the leaves of step 3", leaves("b", "c"))

    def go_on():
        consent.go_on("the leaves of step 3", leaves("a", "b"))
        sum_up()

    tell("known", ask if odd else go_on)
    consent.ask("the parameters", dict)
    if odd:
        tell("gone", ask)
    assert connect().meet("has given up", (0, 1), 30)
    if not odd:
        tell("gone", sum_up)
    """
    ended = run_job(code, 2, before="PATIENCE_S = 2\n" + JOB + CONSENT)
    assert [process.code for process in ended] == [0, 0], ended
    waiting, asking = (dict(line.split(" | ", 1) for line in process.out.splitlines()) for process in ended)
    assert waiting["known"] == asking["known"]
    assert waiting["known"] == (
        "DisagreementError | The processes do not agree on the leaves of step 3: some launched a program to "
        "which others never came.|  - leaf a: announced in process 0; none in process 1|"
        "  - leaf c: none in process 0; announced in process 1"
    )
    assert waiting["gone"].startswith(
        "DisagreementError | The processes do not agree on what follows the parameters: some launched a "
        "program to which others never came.|  - call: none, but a program launched after the agreement on "
        "the parameters in process 0; the leaves of step 3 in process 1|To fix it: "
    )
    assert asking["gone"].startswith(
        "AbsentProcessError | 1 of 2 processes did not come to the agreement on the leaves of step 3 within "
        "2.5 s.|  - process 0 is missing|"
    )


def test_a_process_that_is_lost_is_not_taken_for_one_that_differs(run_job: Callable[..., Any]) -> None:
    code = """
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    tell("lost", (lambda: consent.ask("the leaves of step 3", leaves("a"))) if ME else sum_up)
    """
    ended = run_job(code, 3, before="PATIENCE_S = 2\n" + JOB + CONSENT)
    assert ended[0].out.startswith("lost | PeerLostError | Another process is lost: ")
    assert "did not come to the agreement on the leaves of step 3" in ended[1].out
    assert "process 2 is missing" in ended[1].out.replace("|", "")


def test_a_set_of_leaves_that_one_process_alone_has_changed_is_refused_on_all(
    run_job: Callable[..., Any],
) -> None:
    code = """
    mesh = jaxsync.make_mesh({"data": NUM})
    client = jaxsync.start(mesh)
    client.register_sync_parameters({"w": W, "b": B})

    def sync(tree):
        client.register_sync_parameters(tree, device=ME)
        client.submit_gradient_sync(ME, jax.device_put(tree, mesh.devices.flat[ME]))
        return client.submit_sync_collective(ME).wait()

    for _ in range(2):
        sync({"w": W, "b": B})
    tell("changed", lambda: sync({"b": B} if odd else {"w": W, "b": B}))
    """
    ended = run_job(code, 2, before="PATIENCE_S = 2\n" + JOB)
    for process in ended:
        assert process.out.startswith("changed | DisagreementError | The processes do not agree on "), ended
        assert "|  - leaf ['w']: announced in process 0; none in process 1" in process.out


def test_a_batch_of_another_shape_in_one_process_alone_is_refused_on_all(run_job: Callable[..., Any]) -> None:
    code = """
    step, params = make_step()
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, np.ones((NUM, 2), np.float32))
    rows = 2 * NUM if odd else NUM

    def go_on(state):
        for _ in range(20):  # more than may be in flight: jaxsync itself waits for the first
            state, _ = step(state, np.ones((rows, 2), np.float32))

    tell("changed", lambda: go_on(state))
    """
    ended = run_job(code, 2, before="PATIENCE_S = 2\n" + JOB)
    for process in ended:
        assert process.out.startswith("changed | DisagreementError | "), ended
        assert "|  - batch: float32[2, 2] in process 0; float32[4, 2] in process 1" in process.out
