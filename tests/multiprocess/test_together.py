"""The count of the programs that all processes launch, in a process that is all there is."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxsync
from jaxsync.host.together import Together


class Caller:
    """Somebody who launches programs."""


def launch(together: Together, caller: object | None, *outputs: jax.Array) -> dict[str, int]:
    """What is known while it is launched; `outputs` are of it."""
    together.begin(caller)
    meanwhile = together.counts()
    together.end(caller, outputs)
    return meanwhile


def test_what_a_caller_launches_is_unknown_once_and_then_taken_for_what_it_was() -> None:
    together, step, fetch = Together(), Caller(), Caller()
    done = jax.block_until_ready(jnp.ones(3))
    assert together.counts() == {}
    assert launch(together, step, done) == {}
    assert launch(together, step, done) == {"together": 2, "finished": 1}
    assert launch(together, fetch) == {}  # it has no arrays: a program of this process, or none
    assert launch(together, fetch) == {"together": 2, "finished": 2}
    assert launch(together, None, done) == {}
    assert together.counts() == {"together": 3, "finished": 3}


def test_a_caller_that_is_mistaken_for_what_it_was_is_counted_by_its_outputs() -> None:
    together, caller = Together(), Caller()
    launch(together, caller, jax.block_until_ready(jnp.ones(3)))
    assert launch(together, caller)["together"] == 2
    assert together.counts()["together"] == 1
    together.begin(caller)
    together.cancel()
    assert together.counts()["together"] == 1


def test_a_call_that_failed_counts_for_nothing() -> None:
    together, caller = Together(), Caller()
    launch(together, caller, jax.block_until_ready(jnp.ones(3)))
    together.begin(caller)
    assert together.counts()["together"] == 2
    together.cancel()
    assert together.counts() == {"together": 1, "finished": 1}


def test_only_programs_up_to_the_first_that_runs_are_over() -> None:
    together, caller = Together(), Caller()
    done, donated = jax.block_until_ready(jnp.ones(3)), jnp.ones(3)
    donated.delete()
    launch(together, caller, done)
    launch(together, caller, donated)
    assert together.counts() == {"together": 2, "finished": 1}
    launch(together, caller, done)
    assert together.counts() == {"together": 3, "finished": 3}


def test_what_runs_is_not_over_and_nor_is_what_was_launched_after_it() -> None:
    together, caller, gate = Together(), Caller(), threading.Event()
    done = jax.block_until_ready(jnp.ones(3))

    def hold(x: np.ndarray) -> np.ndarray:
        gate.wait(60)
        return x

    mesh = jaxsync.make_mesh({"data": 2})  # on one device the call would last until the program is over
    program = jax.shard_map(
        lambda x: jax.pure_callback(hold, x, x), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    running = jax.jit(program)(jnp.ones(4))
    launch(together, caller, done)
    launch(together, caller, running)
    launch(together, caller, done)
    assert together.counts() == {"together": 3, "finished": 1}
    gate.set()
    jax.block_until_ready(running)
    assert together.counts() == {"together": 3, "finished": 3}
