"""Checkpoints: the same bits on other devices and shardings, and a good one whatever is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.errors import (
    ArgumentError,
    CheckpointMismatchError,
    CheckpointReadError,
    CheckpointWriteError,
    DeletedArrayError,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {
    "w": np.arange(32, dtype=np.float32).reshape(4, 8),
    "b": np.ones(8, np.float32),
    "low": np.full((3,), 1.5, jnp.bfloat16),
    "n": np.int32(4),
}
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def loss_fn(params: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"]) ** 2) + jnp.sum(params["low"]).astype(jnp.float32) ** 2


def make_step(
    mesh: dict[str, int] | None = None,
    specs: Any = None,
    params: Any = PARAMS,
    tx: Any = None,
    loss: Any = loss_fn,
    config: Any = None,
    **options: Any,
) -> jaxsync.TrainStep:
    plan = jaxsync.make_plan(params, jaxsync.make_mesh(mesh or {"data": 8}), specs, config)
    return jaxsync.make_train_step(loss, tx or optax.adam(1e-2), plan, **options)


def trained(step: jaxsync.TrainStep, num_steps: int = 3, params: Any = PARAMS) -> jaxsync.TrainState:
    state = step.init(params)
    for _ in range(num_steps):
        state, _ = step(state, X)
    return state


def bits(state: jaxsync.TrainState) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every leaf to its last bit, by its path in the user's trees."""

    def raw(x: Any) -> bytes:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    tree = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    return {
        jax.tree_util.keystr(path): (str(x.dtype), x.shape, raw(x))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_a_loaded_state_is_the_saved_one_and_trains_on_alike(tmp_path: Path) -> None:
    step = make_step(donate=False)
    state = trained(step)
    checkpoint = jaxsync.save_checkpoint(tmp_path, state)
    assert (checkpoint.number, checkpoint.path, checkpoint.is_done) == (3, str(tmp_path / "3"), True)
    loaded = jaxsync.load_checkpoint(tmp_path, make_step())
    assert bits(loaded) == bits(state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    fresh = step.init(PARAMS)
    assert [x.sharding for x in jax.tree.leaves(loaded)] == [x.sharding for x in jax.tree.leaves(fresh)]
    assert bits(step(loaded, X)[0]) == bits(step(state, X)[0])


def test_it_goes_from_8_to_4_to_1_to_8_devices_with_the_same_bits(tmp_path: Path) -> None:
    state = trained(make_step())
    wanted = bits(state)
    jaxsync.save_checkpoint(tmp_path / "0", state)
    for number, size in enumerate((4, 1, 8)):
        loaded = jaxsync.load_checkpoint(tmp_path / str(number), make_step({"data": size}))
        assert bits(loaded) == wanted
        assert len(loaded.params["w"].sharding.device_set) == size
        jaxsync.save_checkpoint(tmp_path / str(number + 1), loaded)


SHARDED = {"w": P(None, "model"), "b": P("model"), "low": P(), "n": P()}


def test_it_goes_between_replicated_and_sharded_with_the_same_bits(tmp_path: Path) -> None:
    replicated = make_step()
    sharded = make_step({"data": 2, "model": 4}, SHARDED, loss=model_loss)
    state = trained(replicated)
    jaxsync.save_checkpoint(tmp_path / "a", state)
    there = jaxsync.load_checkpoint(tmp_path / "a", sharded)
    assert bits(there) == bits(state)
    assert there.params["w"].sharding.spec == P(None, "model")
    assert there.opt_state[0].mu["w"].sharding.spec == P(None, "model")
    assert {shard.data.shape for shard in there.params["w"].addressable_shards} == {(4, 2)}
    there, _ = sharded(there, X)
    jaxsync.save_checkpoint(tmp_path / "b", there)
    back = jaxsync.load_checkpoint(tmp_path / "b", replicated)
    assert bits(back) == bits(there)
    assert back.params["w"].sharding.spec == P()


def model_loss(params: Any, x: Any) -> jax.Array:
    return jax.lax.pmean(loss_fn(params, x), "model")


def test_buckets_and_the_way_leaves_are_kept_may_differ(tmp_path: Path) -> None:
    state = trained(make_step())
    jaxsync.save_checkpoint(tmp_path, state)
    # Clipping by the norm of each leaf forbids to keep leaves together, and has no state of its own.
    alone = optax.chain(optax.clip_by_block_rms(1e9), optax.adam(1e-2))
    chained = make_step(tx=optax.chain(optax.identity(), optax.adam(1e-2)))
    jaxsync.save_checkpoint(tmp_path / "chained", trained(chained))
    loaded = jaxsync.load_checkpoint(tmp_path / "chained", make_step(tx=alone))
    assert bits(loaded) == bits(trained(chained))
    small = make_step(config=jaxsync.SyncConfig(bucket_max_leaves=1))
    assert bits(jaxsync.load_checkpoint(tmp_path, small)) == bits(state)


def test_a_pmap_step_goes_on_from_a_checkpoint_of_a_shard_map_step(tmp_path: Path) -> None:
    state = trained(make_step())
    jaxsync.save_checkpoint(tmp_path / "a", state)
    pmapped = make_step(transform="pmap")
    loaded = jaxsync.load_checkpoint(tmp_path / "a", pmapped)
    assert bits(loaded) == bits(state)
    loaded, _ = pmapped(loaded, X)
    jaxsync.save_checkpoint(tmp_path / "b", loaded)
    assert bits(jaxsync.load_checkpoint(tmp_path / "b", make_step())) == bits(loaded)


def test_every_kind_of_leaf_comes_back_with_its_bits(tmp_path: Path) -> None:
    floats = np.array([-0.0, 0.0, np.inf, np.nan, 1e-45], np.float32)
    floats = np.append(floats, np.array([0x7FC00123, 0xFFC00001], np.uint32).view(np.float32))
    params = {
        "floats": floats,
        "minus_zeros": np.full((5,), -0.0, np.float32),
        "scalar": np.float32(-0.0),
        "half": floats.astype(np.float16),
        "brain": floats.astype(jnp.bfloat16),
        "eighth": np.ones(3, jnp.float8_e4m3fn),
        "complex": np.array([1 - 2j, complex(-0.0, np.inf)], np.complex64),
        "int8": np.array([-128, 127], np.int8),
        "uint32": np.array(2**32 - 1, np.uint32),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3), np.float32),
        "none": None,
        "list": [np.ones(2, np.float32), (np.zeros((), np.int32),), {}, ()],
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(5, impl="rbg"), 3),
        "raw_key": jax.random.PRNGKey(7),
        "odd /.name\n": np.ones(1, np.float32),
        7: {"é": np.ones(1, np.float32)} if False else np.full(1, 7, np.float32),
    }
    params = {str(name): value for name, value in params.items()}

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.sum(params["floats"]) * jnp.mean(x)

    step = make_step(params=params, tx=optax.sgd(0.1), loss=loss)
    state = step.init(params)
    jaxsync.save_checkpoint(tmp_path, state)
    loaded = jaxsync.load_checkpoint(tmp_path, step)
    assert bits(loaded) == bits(state)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    four = make_step({"data": 4}, params=params, tx=optax.sgd(0.1), loss=loss)
    assert bits(jaxsync.load_checkpoint(tmp_path, four)) == bits(state)


def test_it_says_what_it_was_saved_with(tmp_path: Path) -> None:
    step = make_step({"data": 4, "model": 2})
    jaxsync.save_checkpoint(tmp_path, trained(step))
    info = jaxsync.inspect_checkpoint(tmp_path)
    assert (info.number, info.fingerprint, info.mesh) == (3, step.plan.fingerprint, {"data": 4, "model": 2})
    assert (info.jaxsync_version, info.jax_version) == (jaxsync.__version__, jax.__version__)
    assert info.leaves[:4] == (
        ("params['b']", "float32", (8,)),
        ("params['low']", "bfloat16", (3,)),
        ("params['n']", "int32", ()),
        ("params['w']", "float32", (4, 8)),
    )
    assert ("opt_state[0].mu['w']", "float32", (4, 8)) in info.leaves


def test_a_mismatch_names_every_leaf_and_both_plans(tmp_path: Path) -> None:
    step = make_step()
    jaxsync.save_checkpoint(tmp_path, step.init(PARAMS))
    other = {**PARAMS, "w": np.zeros((4, 9), np.float32), "n": np.uint32(4), "new": np.ones(2, np.float32)}
    del other["low"]
    new = make_step(params=other, tx=optax.sgd(1e-2, momentum=0.9))
    with pytest.raises(CheckpointMismatchError) as caught:
        jaxsync.load_checkpoint(tmp_path, new)
    assert caught.value.problems == (
        "params['new'] is not in the checkpoint",
        "opt_state[0].trace['b'] is not in the checkpoint",
        "opt_state[0].trace['new'] is not in the checkpoint",
        "opt_state[0].trace['w'] is not in the checkpoint",
        "params['low'] is in the checkpoint only",
        "opt_state[0].count is in the checkpoint only",
        *(
            f"opt_state[0].{m}['{name}'] is in the checkpoint only"
            for m in ("mu", "nu")
            for name in ("b", "low", "w")
        ),
        "params['n'] is uint32[]; the checkpoint has int32[]",
        "params['w'] is float32[4, 9]; the checkpoint has float32[4, 8]",
    )
    assert caught.value.path == str(tmp_path / "0")
    assert (caught.value.saved_with, caught.value.loaded_with) == (
        step.plan.fingerprint,
        new.plan.fingerprint,
    )


def test_a_mismatch_is_told_before_an_array_is_read(tmp_path: Path) -> None:
    jaxsync.save_checkpoint(tmp_path, make_step().init(PARAMS))
    for part in ("params", "opt_state"):
        shutil.rmtree(tmp_path / "0" / part)
    with pytest.raises(CheckpointMismatchError):
        jaxsync.load_checkpoint(tmp_path, make_step(tx=optax.sgd(1e-2)))


def test_the_newest_stay_and_the_number_chooses(tmp_path: Path) -> None:
    step = make_step(donate=False)
    state, states = step.init(PARAMS), {}
    for number in range(5):
        states[number] = state
        jaxsync.save_checkpoint(tmp_path, state, keep=2 if number else None)
        state, _ = step(state, X)
    assert jaxsync.list_checkpoints(tmp_path) == (3, 4)
    assert bits(jaxsync.load_checkpoint(tmp_path, step)) == bits(states[4])
    assert bits(jaxsync.load_checkpoint(tmp_path, step, number=3)) == bits(states[3])
    jaxsync.save_checkpoint(tmp_path, state, keep=None)
    assert jaxsync.list_checkpoints(tmp_path) == (3, 4, 5)


def test_a_save_that_is_not_the_newest_is_refused(tmp_path: Path) -> None:
    step = make_step(donate=False)
    first = step.init(PARAMS)
    second, _ = step(first, X)
    jaxsync.save_checkpoint(tmp_path, second)
    for state in (first, second):
        with pytest.raises(CheckpointWriteError) as caught:
            jaxsync.save_checkpoint(tmp_path, state)
        assert caught.value.reason == f"this one is of step {int(state.step)}, which is not the newest"
        assert caught.value.found == ("there is 1",)
    assert bits(jaxsync.load_checkpoint(tmp_path, step)) == bits(second)


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    step = make_step()
    with pytest.raises(CheckpointReadError) as caught:
        jaxsync.load_checkpoint(tmp_path / "none", step)
    assert (caught.value.reason, caught.value.found) == ("there is no such directory", ())
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointReadError) as caught:
        jaxsync.load_checkpoint(tmp_path, step)
    assert caught.value.reason == "there is no checkpoint in it"
    assert caught.value.found == (
        "there is 7.orbax-checkpoint-tmp, a save that was not finished",
        "there is notes.txt",
    )
    jaxsync.save_checkpoint(tmp_path, step.init(PARAMS))
    with pytest.raises(CheckpointReadError) as caught:
        jaxsync.load_checkpoint(tmp_path, step, number=5)
    assert caught.value.reason == "there is no checkpoint 5 in it"
    assert caught.value.found == ("there is 0", "there is notes.txt")


@pytest.mark.parametrize("part", ["jaxsync", "params", "opt_state"])
def test_a_damaged_checkpoint_is_an_error_and_the_one_before_loads(part: str, tmp_path: Path) -> None:
    step = make_step(donate=False)
    first = step.init(PARAMS)
    jaxsync.save_checkpoint(tmp_path, first)
    jaxsync.save_checkpoint(tmp_path, step(first, X)[0])
    for file in (tmp_path / "1" / part).rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(CheckpointReadError) as caught:
        jaxsync.load_checkpoint(tmp_path, step)
    assert caught.value.reason.startswith("1 cannot be read: ")
    assert caught.value.__cause__ is not None
    assert bits(jaxsync.load_checkpoint(tmp_path, step, number=0)) == bits(first)


BIG = {"w": np.zeros((1024, 2048), np.float32), "b": np.zeros(64, np.float32)}


def big_loss(params: Any, x: Any) -> jax.Array:
    return (jnp.sum(params["w"]) + jnp.sum(params["b"])) * jnp.mean(x) ** 0


@pytest.mark.parametrize("specs", [None, {"w": P("model"), "b": P()}], ids=["replicated", "sharded"])
def test_the_state_may_be_donated_while_it_is_written(specs: Any, tmp_path: Path) -> None:
    def loss(params: Any, x: Any) -> jax.Array:
        return jax.lax.psum(big_loss(params, x), "model") if specs else big_loss(params, x)

    step = make_step({"data": 4, "model": 2}, specs, params=BIG, tx=optax.sgd(1.0), loss=loss)
    state, _ = step(step.init(BIG), X)
    wanted = bits(state)
    saved = jaxsync.save_checkpoint(tmp_path, state, wait=False)
    for _ in range(10):
        state, _ = step(state, X)  # donates what is being written
    saved.wait()
    assert saved.is_done
    loaded = jaxsync.load_checkpoint(tmp_path, step)
    assert bits(loaded) == wanted
    assert bits(loaded) != bits(state)


def test_saves_without_waiting_come_one_after_the_other(tmp_path: Path) -> None:
    step = make_step()
    state, saves = step.init(PARAMS), []
    for _ in range(4):
        saves.append(jaxsync.save_checkpoint(tmp_path, state, wait=False))
        state, _ = step(state, X)
    assert all(save.is_done for save in saves[:-1])
    waiting = [threading.Thread(target=saves[-1].wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert jaxsync.list_checkpoints(tmp_path) == (1, 2, 3)


def test_a_load_waits_for_the_save_that_is_under_way(tmp_path: Path) -> None:
    step = make_step(donate=False)
    state = trained(step)
    jaxsync.save_checkpoint(tmp_path, state, wait=False)
    assert bits(jaxsync.load_checkpoint(tmp_path, step)) == bits(state)


def test_arguments_of_another_kind_are_refused(tmp_path: Path) -> None:
    step = make_step()
    state = step.init(PARAMS)
    for arguments, text in [
        ({"state": PARAMS}, "state = a dict; wanted the TrainState that a step returned"),
        ({"state": state, "keep": 0}, "keep = 0; wanted an int of 1 or more, or None"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            jaxsync.save_checkpoint(tmp_path, **arguments)
    with pytest.raises(ArgumentError, match="state = traced values"):
        jax.jit(lambda state: jaxsync.save_checkpoint(tmp_path, state))(state)
    step(state, X)
    with pytest.raises(DeletedArrayError):
        jaxsync.save_checkpoint(tmp_path, state)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointWriteError) as caught:
        jaxsync.save_checkpoint(file, make_step().init(PARAMS))
    assert caught.value.__cause__ is not None
    assert jaxsync.list_checkpoints(file) == ()


PROGRAM = """
    import os, signal, sys, threading
    import numpy as np
    import jaxsync
    jaxsync.simulate_devices(2)
    import jax, jax.numpy as jnp, optax

    directory = sys.argv[1]
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.integers(1000, size=(512, 512)).astype(np.float32) for i in range(8)}
    plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 2}))
    loss_fn = lambda p, x: sum(jnp.sum(w) for w in p.values()) * jnp.mean(x)
    step = jaxsync.make_train_step(loss_fn, optax.sgd(1.0), plan)
    x = np.ones((2, 1), np.float32)

    def next_state(state):
        return step(state, x)[0]

    state = next_state(step.init(params))
"""


@pytest.fixture
def run(run_python: Any, tmp_path: Path) -> Any:
    return lambda code: run_python(textwrap.dedent(PROGRAM) + textwrap.dedent(code), str(tmp_path))


def test_the_end_of_the_process_waits_for_a_save(run: Any, tmp_path: Path) -> None:
    done = run("jaxsync.save_checkpoint(directory, state, wait=False); sys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "")
    assert jaxsync.list_checkpoints(tmp_path) == (1,)


# A limit on the size of files stands for a full disk: the same errors, from the same calls.
FULL = """
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    jaxsync.save_checkpoint(directory, state)
    state = next_state(state)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize(
    "save",
    [
        "jaxsync.save_checkpoint(directory, state)",
        "jaxsync.save_checkpoint(directory, state, wait=False).wait()",
        "jaxsync.save_checkpoint(directory, state, wait=False); jaxsync.save_checkpoint(directory, state)",
    ],
    ids=["wait", "handle", "next_save"],
)
def test_a_full_disk_is_an_error_and_the_last_checkpoint_stays(save: str, run: Any, tmp_path: Path) -> None:
    check = f"""
    from jaxsync.errors import CheckpointWriteError
    try:
        {save}
    except CheckpointWriteError as error:
        assert error.__cause__ is not None
        print(error.reason)
    print(jaxsync.list_checkpoints(directory), int(jaxsync.load_checkpoint(directory, step).step))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    jaxsync.save_checkpoint(directory, state)
    print(sorted(os.listdir(directory)))
    """
    done = run(textwrap.dedent(FULL) + textwrap.dedent(check))
    assert done.returncode == 0, done.stderr
    reason, after, mended = done.stdout.splitlines()
    assert "File too large" in reason
    assert after == "(1,) 1"
    assert mended == "['1', '2']"


def test_an_error_that_nobody_asked_for_is_printed_at_the_end(run: Any) -> None:
    done = run(textwrap.dedent(FULL) + "jaxsync.save_checkpoint(directory, state, wait=False)")
    assert "CheckpointWriteError: No checkpoint could be saved in" in done.stderr


def test_an_interrupt_amid_a_save_loses_no_checkpoint_and_spoils_no_later_save(run: Any) -> None:
    done = run(
        """
        def interrupt(*_):
            raise KeyboardInterrupt

        import gc
        import orbax.checkpoint  # an interrupted import would be another matter
        gc.disable()  # Python prints, and drops, what is raised in the callback that JAX has there
        signal.signal(signal.SIGALRM, interrupt)
        num_interrupts = 0
        for i in range(12):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003 * i + 0.001)
                jaxsync.save_checkpoint(directory, state, wait=i % 2 == 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                num_interrupts += 1
            numbers = jaxsync.list_checkpoints(directory)
            if numbers:
                assert int(jaxsync.load_checkpoint(directory, step).step) == numbers[-1]
            state = next_state(state)
        jaxsync.save_checkpoint(directory, state)
        assert num_interrupts > 3
        assert jaxsync.list_checkpoints(directory)[-1] == 13
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


LOOP = """
    print("saved", flush=True) if jaxsync.save_checkpoint(directory, state, keep=2) else None
    while True:
        state = next_state(state)
        print("saving", flush=True)
        jaxsync.save_checkpoint(directory, state, keep=2, wait=WAIT)
"""


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_a_save_that_is_killed_leaves_a_good_checkpoint(wait: bool, tmp_path: Path) -> None:
    """Killed at many points of a save: by the number of files that it has made."""
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(LOOP).replace("WAIT", str(wait))
    unfinished = 0
    for number_of_files in (0, 1, 3, 6, 12):
        last, was_unfinished = _kill_while_saving(code, tmp_path, number_of_files)
        unfinished += was_unfinished
        numbers = jaxsync.list_checkpoints(tmp_path)
        assert last in numbers or numbers[-1] > last
        for number in numbers:
            _check_whole(tmp_path, number)
        shutil.rmtree(tmp_path)
    assert unfinished


def _kill_while_saving(code: str, directory: Path, number_of_files: int) -> tuple[int, bool]:
    """Kills the loop in a later save: the last number known to be good, and whether a save was cut short."""
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            for _ in range(3):
                child.stdout.readline()
            last = max(int(name) for name in os.listdir(directory) if name.isdigit())
            while child.poll() is None:
                files = [file for tmp in directory.glob("*-tmp*") for file in tmp.rglob("*")]
                if len(files) >= number_of_files:
                    break
        finally:
            child.send_signal(signal.SIGKILL)
    return last, bool(list(directory.glob("*-tmp*")))


def _check_whole(directory: Path, number: int) -> None:
    """Each step of the loop takes 1 from every element."""
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.integers(1000, size=(512, 512)).astype(np.float32) for i in range(8)}
    step = make_step(params=params, tx=optax.sgd(1.0))
    loaded = jaxsync.load_checkpoint(directory, step, number=number)
    assert int(loaded.step) == number
    for name, value in params.items():
        np.testing.assert_array_equal(loaded.params[name], value - number)


def test_a_run_goes_on_saving_where_another_was_killed(run: Any, tmp_path: Path) -> None:
    killed = run(
        """
        jaxsync.save_checkpoint(directory, state)
        state = next_state(state)
        jaxsync.save_checkpoint(directory, state, wait=False)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert killed.returncode == -signal.SIGKILL
    done = run(
        """
        state = jaxsync.load_checkpoint(directory, step)
        print(int(state.step))
        if int(state.step) == 1:
            state = next_state(state)
            jaxsync.save_checkpoint(directory, state)
        print(sorted(os.listdir(directory)))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() in (["1", "['1', '2']"], ["2", "['1', '2']"])


def test_without_orbax_the_import_works_and_a_save_says_what_to_install(run_python: Any) -> None:
    done = run_python(
        """
        import sys
        sys.modules["orbax"] = None
        import jaxsync
        try:
            jaxsync.list_checkpoints(".")
        except ImportError as error:
            print(error)
        """
    )
    assert done.stdout == (
        "jaxsync.list_checkpoints needs the package 'orbax-checkpoint', which is not installed.\n"
        "To fix it: pip install 'jaxsync[checkpoint]'\n"
    )


def test_importing_jaxsync_does_not_import_orbax(run_python: Any) -> None:
    done = run_python("import sys, jaxsync; print('orbax' in sys.modules)")
    assert done.stdout == "False\n", done.stderr
