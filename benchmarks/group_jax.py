"""One of several processes that train together in JAX: what `multiprocess.py` runs and times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import group
import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models import LEARNING_RATE, Model, mlp

import jaxsync

AXES = ("host", "device")
FLOOR, TREE, JIT, OURS = "no sync", "jax, pmean(tree)", "jax, jit", "jaxsync"
WIRE, LEVELS, BOTH = "jaxsync, bfloat16 wire", "jaxsync, two levels", "jaxsync, two levels, bfloat16 wire"
CONFIGS: dict[str, dict[str, Any]] = {
    OURS: {},
    WIRE: {"wire_dtype": "bfloat16"},
    LEVELS: {"inner_axis": "device"},
    BOTH: {"inner_axis": "device", "wire_dtype": "bfloat16"},
}

Run = Callable[[], Any]


def make_run(name: str, model: Model, mesh: Mesh) -> tuple[Run, Callable[[], Any]]:
    """A call of the form `name`, awaited, and its parameters."""
    params, rows = model.params("float32"), model.batch("float32", mesh.size)
    if name in CONFIGS:
        return _train_step(model, mesh, params, rows, CONFIGS[name])
    everywhere, divided = jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P(AXES))
    batch, state = _place(rows, divided), jax.tree.map(lambda x: _place(x, everywhere), params)
    held = [state]

    def run() -> None:
        held[0] = jax.block_until_ready(step(held[0], batch))

    step = _step(name, model, mesh)
    return run, lambda: held[0]


def _place(x: Any, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _step(name: str, model: Model, mesh: Mesh) -> Callable[[Any, Any], Any]:
    def sgd(params: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)

    if name == JIT:
        return jax.jit(lambda p, x: sgd(p, jax.grad(model.loss)(p, x)), donate_argnums=0)

    def body(params: Any, batch: Any) -> Any:
        grads = jax.grad(model.loss)(params, batch)
        return sgd(params, lax.pmean(grads, AXES) if name == TREE else grads)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def _train_step(
    model: Model, mesh: Mesh, params: Any, rows: Any, options: dict[str, Any]
) -> tuple[Run, Callable[[], Any]]:
    plan = jaxsync.make_plan(params, mesh, config=jaxsync.SyncConfig(axis=AXES, **options))
    step = jaxsync.make_train_step(model.loss, optax.sgd(LEARNING_RATE), plan)
    batch = _place(rows, jax.NamedSharding(mesh, plan.batch_spec))
    held = [step.init(params)]

    def run() -> None:
        held[0], _ = jax.block_until_ready(step(held[0], batch))

    return run, lambda: held[0].params


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("--address", "--bind"):
        parser.add_argument(name)
    for name in ("--processes", "--process", "--devices", "--layers", "--width", "--rows"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    jaxsync.simulate_devices(arguments.devices)
    jaxsync.initialize(
        arguments.address,
        arguments.processes,
        arguments.process,
        coordinator_bind_address=arguments.bind,
        collective_timeout_s=240,
    )
    devices = np.array(jax.devices()).reshape(arguments.processes, arguments.devices)
    mesh = Mesh(devices, AXES)
    model = mlp(arguments.layers, arguments.width, arguments.rows, "beyond")
    runs: dict[str, tuple[Run, Callable[[], Any]]] = {}

    def make(form: str, steps: int) -> dict[str, Any]:
        """Makes a form, and tells the sums of some parameters after some steps."""
        runs[form] = make_run(form, model, mesh)
        for _ in range(steps):
            runs[form][0]()
        params = runs[form][1]()
        first = {key: np.asarray(x.addressable_shards[0].data) for key, x in params.items()}
        return {"sums": {key: float(x.astype(np.float64).sum()) for key, x in first.items()}}

    def run(form: str, calls: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        for _ in range(calls):
            runs[form][0]()
        return {"ms": (time.perf_counter() - start_s) * 1e3 / calls}

    group.serve({"make": make, "run": run})


if __name__ == "__main__":
    main()
