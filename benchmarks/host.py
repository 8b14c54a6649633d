"""The host path: what it costs to hand gradients over by device instead of calling one compiled program.

    python benchmarks/host.py [--repeats 21] [--json]

Prints, from one interleaved run:

- the step of 8 threads that hand over 100 gradients of 1,000 floats each, leaf by leaf and as one tree,
  beside the bucketed compiled program on global arrays that are ready (the floor) and `pmean` of the tree on
  them (the peer), as ratios to the floor;
- submissions and syncs a second through the state machine and the loop, without a launch.
"""

from __future__ import annotations

import argparse
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import measure
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from measure import Spread, Verdict

import jaxsync
from jaxsync.host.loop import Loop
from jaxsync.host.messages import Effect, Fail, Finish, Forget, Launch, Message, Submit, Sync
from jaxsync.host.state import Setup

DEVICES, LEAVES, SIZE = 8, 100, 1000
FLOOR = "bucketed program, ready global arrays"
HOST_PATHS = ("8 threads, one tree each", "8 threads, leaf by leaf")
P5_LIMIT = 1.5
WARM_UP = 3  # rounds, of which the first compile


class Instant:
    """A handler whose launches are finished at once."""

    def __init__(self) -> None:
        self.post: Callable[[Message], Any] = lambda message: None
        self.done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Launch):
            self.post(Finish(step=effect.step))
        elif isinstance(effect, Forget):
            self.done.put(effect.step or 0)

    def poll(self) -> bool:
        return False

    def paused_s(self) -> float:
        return 0.0

    def crash(self, error: BaseException, effect: Effect | None = None) -> Message:
        return Fail(cause=0)


def message_rates(steps: int) -> tuple[float, float]:
    """Submissions a second (100 leaves a step), and syncs a second (1 leaf a step), from one thread."""
    return _rate(steps, LEAVES)[0], _rate(steps * 10, 1)[1]


def _rate(steps: int, leaves: int) -> tuple[float, float]:
    handler = Instant()
    setup = Setup(num_devices=DEVICES, buckets=((1 << leaves) - 1,), is_strict=True, timeout_s=60, stall_s=10)
    loop = Loop(handler, setup, "benchmark")
    handler.post = loop.post
    loop.start()
    start_s = time.perf_counter()
    for step in range(steps):
        if step >= 2:  # a device may lead by one step
            handler.done.get()
        for leaf in range(leaves):
            for device in range(DEVICES):
                loop.post(Submit(device=device, leaves=1 << leaf))
        for device in range(DEVICES):
            loop.post(Sync(device=device, ticket=step * DEVICES + device))
    for _ in range(min(steps, 2)):
        handler.done.get()
    took_s = time.perf_counter() - start_s
    loop.close()
    loop.join(5)
    return steps * leaves * DEVICES / took_s, steps * DEVICES / took_s


class Team:
    """Eight threads that do one thing each when told, and are waited for."""

    def __init__(self, work: Callable[[int], Any]) -> None:
        self._work = work
        self._start, self._end = threading.Barrier(DEVICES + 1), threading.Barrier(DEVICES + 1)
        for index in range(DEVICES):
            threading.Thread(target=self._run, args=(index,), daemon=True).start()

    def _run(self, index: int) -> None:
        while True:
            self._start.wait()
            self._work(index)
            self._end.wait()

    def __call__(self) -> None:
        self._start.wait()
        self._end.wait()


def host_path(repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each form, interleaved."""
    mesh = jaxsync.make_mesh({"data": DEVICES})
    devices = list(mesh.devices.flat)
    names = [f"w{i}" for i in range(LEAVES)]
    local = [
        {name: jax.device_put(np.full(SIZE, d, np.float32), device) for name in names}
        for d, device in enumerate(devices)
    ]
    jax.block_until_ready(local)
    client = jaxsync.SyncClient(mesh)
    client.register_sync_parameters({name: np.zeros(SIZE, np.float32) for name in names})
    paths = [f"['{name}']" for name in names]

    def leaf_by_leaf(d: int) -> None:
        for path, name in zip(paths, names, strict=True):
            client.submit_gradient_sync(d, path, local[d][name])
        jax.block_until_ready(client.submit_sync_collective(d).wait())

    def as_tree(d: int) -> None:
        client.submit_gradient_sync(d, local[d])
        jax.block_until_ready(client.submit_sync_collective(d).wait())

    rows = NamedSharding(mesh, P("data"))
    stacked = {name: jax.device_put(np.ones((DEVICES, SIZE), np.float32), rows) for name in names}

    def mapped(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        body = jax.shard_map(
            lambda g: fn(jax.tree.map(lambda x: x[0], g)), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        return jax.jit(body)

    bucketed = mapped(lambda g: jaxsync.sync_gradients(g, client.plan))
    per_leaf = mapped(lambda g: jax.lax.pmean(g, "data"))
    forms: dict[str, Callable[[], Any]] = {
        FLOOR: lambda: jax.block_until_ready(bucketed(stacked)),
        "pmean of the tree, ready global arrays": lambda: jax.block_until_ready(per_leaf(stacked)),
        HOST_PATHS[0]: Team(as_tree),
        HOST_PATHS[1]: Team(leaf_by_leaf),
    }
    runs = {name: functools.partial(measure.timed, run) for name, run in forms.items()}
    times = measure.interleave(runs, repeats + WARM_UP)
    client.close()
    return {name: values[WARM_UP:] for name, values in times.items()}


def figures(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Each form's milliseconds, and their ratio to the floor's."""
    spreads = {name: Spread.of(values) for name, values in times.items()}
    floor_ms = spreads[FLOOR].median
    return {
        name: {
            "ms": spread.median,
            "quartiles_ms": [spread.lower, spread.upper],
            "ratio": spread.median / floor_ms,
        }
        for name, spread in spreads.items()
    }


def verdicts(found: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """P5, for each way to hand gradients over."""
    target = "P5 host path / bucketed program"
    return [
        Verdict(target=target, row=name, value=found[name]["ratio"], limit=P5_LIMIT) for name in HOST_PATHS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    jaxsync.simulate_devices(DEVICES)
    submissions, syncs = message_rates(100)
    found = figures(host_path(arguments.repeats))
    judged = verdicts(found)
    if arguments.json:
        rates = {"submissions_per_s": submissions, "syncs_per_s": syncs}
        targets = [verdict.as_dict() for verdict in judged]
        settings = {"repeats": arguments.repeats}
        measure.print_result("host", settings, {"forms": found, **rates, "targets": targets})
        return
    rows = []
    for name, values in found.items():
        lower, upper = values["quartiles_ms"]
        rows.append(
            [name, str(Spread(lower=lower, median=values["ms"], upper=upper)), f"{values['ratio']:.2f}"]
        )
    measure.print_table(["form", "ms (quartiles)", "ratio"], rows)
    print(
        f"{submissions:,.0f} submissions/s and {syncs:,.0f} syncs/s through the state machine and the loop\n"
    )
    measure.print_verdicts(judged)


if __name__ == "__main__":
    main()
