"""Ways to sync many small gradients, tried by hand: what docs/performance-notes.md reports of each.

    python benchmarks/experiments.py [--model NAME] [--devices 8] [--dtype f32] [--repeats 31] [--json]

Each experiment is the same step (forward, backward, mean over devices, SGD), written without jaxsync, so that
an idea can be measured before it is built; interleaved call by call with the step without sync and with
`pmean` of the tree. Times to trace and compile are medians of three, with JAX's caches cleared before each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from measure import Spread
from models import LEARNING_RATE, Model, all_models

import jaxsync

AXIS = "data"
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
LEVEL_2: dict[str, bool | str | int] = {"xla_backend_optimization_level": 2}
LEVEL_1: dict[str, bool | str | int] = {"xla_backend_optimization_level": 1}

Arrays = list[jax.Array]


class Packing:
    """Groups of at most `limit` leaves, each flattened into one array."""

    def __init__(self, leaves: Sequence[Any], limit: int, *, by_shape: bool = False) -> None:
        self.shapes = [leaf.shape for leaf in leaves]
        small = [i for i, leaf in enumerate(leaves) if leaf.size <= 20_000]
        pools: dict[Any, list[int]] = {}
        for i in small:
            pools.setdefault(self.shapes[i] if by_shape else None, []).append(i)
        self.groups = [pool[k : k + limit] for pool in pools.values() for k in range(0, len(pool), limit)]
        self.groups += [[i] for i in range(len(leaves)) if i not in set(small)]

    def pack(self, leaves: Sequence[jax.Array]) -> Arrays:
        return [
            leaves[group[0]] if len(group) == 1 else jnp.concatenate([leaves[i].ravel() for i in group])
            for group in self.groups
        ]

    def stack(self, leaves: Sequence[jax.Array]) -> Arrays:
        return [jnp.stack([leaves[i] for i in group]) for group in self.groups]

    def unpack(
        self, arrays: Sequence[jax.Array], *, is_stacked: bool = False, opaque: bool = False
    ) -> Arrays:
        leaves: list[Any] = [None] * len(self.shapes)
        for group, array in zip(self.groups, arrays, strict=True):
            offset = 0
            for place, i in enumerate(group):
                size = 1
                for dim in self.shapes[i]:
                    size *= dim
                if is_stacked:
                    leaves[i] = array[place]
                elif len(group) == 1:
                    leaves[i] = array
                else:
                    # An offset that XLA cannot see might let it use one kernel for all slices of one shape.
                    start = lax.optimization_barrier(jnp.int32(offset)) if opaque else offset
                    piece = (
                        lax.dynamic_slice(array, (start,), (size,))
                        if opaque
                        else lax.slice(array, (offset,), (offset + size,))
                    )
                    leaves[i] = piece.reshape(self.shapes[i])
                offset += size
        return leaves


class Experiments:
    """All forms of one model's step."""

    def __init__(self, model: Model, devices: int, dtype: str) -> None:
        self.mesh = jaxsync.make_mesh({AXIS: devices})
        self.devices = devices
        self.params = {name: jnp.asarray(value) for name, value in model.params(dtype).items()}
        self.batch = jax.device_put(model.batch(dtype, devices), NamedSharding(self.mesh, P(AXIS)))
        self.loss = model.loss
        self.leaves, self.treedef = jax.tree.flatten(self.params)
        self.forms: dict[str, Callable[[], tuple[Any, Any]]] = {}  # name -> (program, first state)
        self._add_all()

    def _add(
        self,
        name: str,
        body: Callable[[Any, Any], Any],
        state: Callable[[], Any] | None = None,
        *,
        donate: bool = True,
        options: Mapping[str, bool | str | int] | None = None,
    ) -> None:
        def make() -> tuple[Any, Any]:
            mapped = jax.shard_map(
                body, mesh=self.mesh, in_specs=(P(), P(AXIS)), out_specs=(P(), P()), check_vma=False
            )
            program = jax.jit(
                mapped,
                donate_argnums=(0,) if donate else (),
                compiler_options=dict(options) if options else None,
            )
            first = jax.device_put((state or (lambda: self.params))(), NamedSharding(self.mesh, P()))
            return program, jax.tree.map(jnp.copy, first)

        self.forms[name] = make

    def _tree_step(
        self, sync: Callable[[Arrays], Sequence[jax.Array]]
    ) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
        def body(params: Any, batch: Any) -> tuple[Any, jax.Array]:
            loss, grads = jax.value_and_grad(self.loss)(params, batch)
            synced = jax.tree.unflatten(self.treedef, sync(jax.tree.leaves(grads)))
            return jax.tree.map(lambda p, g: (p - LEARNING_RATE * g).astype(p.dtype), params, synced), loss

        return body

    def _flat_step(
        self, packing: Packing, sync: Callable[[Arrays], Sequence[jax.Array]]
    ) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
        def body(arrays: Arrays, batch: Any) -> tuple[Any, jax.Array]:
            leaves = packing.unpack(arrays)
            loss, grads = jax.value_and_grad(
                lambda leaves: self.loss(jax.tree.unflatten(self.treedef, leaves), batch)
            )(leaves)
            synced = sync(packing.pack(grads))
            return [
                (p - LEARNING_RATE * g).astype(p.dtype) for p, g in zip(arrays, synced, strict=True)
            ], loss

        return body

    def _add_all(self) -> None:
        mean = self._mean
        self._add("no sync", self._tree_step(lambda grads: grads))
        self._add("one scalar all-reduced", self._scalar_step)
        self._add("pmean of the tree", self._tree_step(lambda grads: lax.pmean(grads, AXIS)))
        for limit in (8, 16, 32, len(self.leaves)):
            packing = Packing(self.leaves, limit)
            self._add(f"concatenate, at most {limit}", self._tree_step(self._split(packing)))
        packing = Packing(self.leaves, 32)
        self._add("concatenate 32, level 2", self._tree_step(self._split(packing)), options=LEVEL_2)
        self._add("concatenate 32, opaque offsets", self._tree_step(self._split(packing, opaque=True)))
        self._add("concatenate 32, barriers", self._tree_step(self._split(packing, barrier=True)))
        stacking = Packing(self.leaves, 32, by_shape=True)
        self._add(
            "stack equal shapes, at most 32",
            self._tree_step(lambda g: stacking.unpack(mean(stacking.stack(g)), is_stacked=True)),
        )
        flat = self._flat_step(packing, mean)
        arrays = lambda: packing.pack(self.leaves)  # noqa: E731
        self._add("flat state", flat, arrays)
        self._add("flat state, level 2", flat, arrays, options=LEVEL_2)
        self._add("flat state, level 1", flat, arrays, options=LEVEL_1)
        self._add("flat state, level 2, no donation", flat, arrays, donate=False, options=LEVEL_2)
        scattered = self._flat_step(packing, self._scatter_gather)
        self._add("flat state, level 2, reduce-scatter + all-gather", scattered, arrays, options=LEVEL_2)
        wide = self._flat_step(packing, lambda a: [x.astype(a[0].dtype) for x in mean(self._widen(a))])
        self._add("flat state, level 2, float32 sum, cast a bucket", wide, arrays, options=LEVEL_2)
        self._add(
            "flat state, level 2, float32 sum, cast a leaf", self._leaf_cast(packing), arrays, options=LEVEL_2
        )

    def _scalar_step(self, params: Any, batch: Any) -> tuple[Any, jax.Array]:
        new, loss = self._tree_step(lambda grads: grads)(params, batch)
        return new, lax.psum(loss, AXIS)

    def _mean(self, arrays: Sequence[jax.Array]) -> Arrays:
        return [x / x.dtype.type(self.devices) for x in lax.psum(list(arrays), AXIS)]

    @staticmethod
    def _widen(arrays: Sequence[jax.Array]) -> Arrays:
        return [x.astype(jnp.float32) for x in arrays]

    def _split(
        self, packing: Packing, *, opaque: bool = False, barrier: bool = False
    ) -> Callable[[Arrays], Arrays]:
        keep = lax.optimization_barrier if barrier else lambda x: x

        def sync(grads: Arrays) -> Arrays:
            leaves: Arrays = keep(packing.unpack(self._mean(keep(packing.pack(grads))), opaque=opaque))
            return leaves

        return sync

    def _scatter_gather(self, arrays: Arrays) -> Arrays:
        synced = []
        for x in arrays:
            flat = jnp.pad(x.ravel(), (0, -x.size % self.devices))
            part = lax.psum_scatter(flat, AXIS, tiled=True) / x.dtype.type(self.devices)
            synced.append(lax.all_gather(part, AXIS, tiled=True)[: x.size].reshape(x.shape))
        return synced

    def _leaf_cast(self, packing: Packing) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
        def body(arrays: Arrays, batch: Any) -> tuple[Any, jax.Array]:
            leaves = packing.unpack(arrays)
            loss, grads = jax.value_and_grad(
                lambda leaves: self.loss(jax.tree.unflatten(self.treedef, leaves), batch)
            )(leaves)
            synced = self._mean(packing.pack(self._widen(grads)))
            return [
                (p - LEARNING_RATE * g).astype(p.dtype) for p, g in zip(arrays, synced, strict=True)
            ], loss

        return body


def measure_model(
    model: Model, devices: int, dtype: str, repeats: int, compiles: int
) -> list[dict[str, Any]]:
    """One row an experiment: run time, compile time, and both as ratios."""
    experiments = Experiments(model, devices, dtype)
    compile_ms: dict[str, list[float]] = {name: [] for name in experiments.forms}
    for _ in range(compiles):
        for name, make in experiments.forms.items():
            program, state = make()
            jax.clear_caches()
            compile_ms[name].append(
                measure.timed(lambda p=program, s=state: p.lower(s, experiments.batch).compile())
            )
    made = {name: list(make()) for name, make in experiments.forms.items()}

    def call(name: str) -> float:
        program, state = made[name]

        def run() -> Any:
            made[name][1], loss = program(state, experiments.batch)
            return jax.block_until_ready((made[name][1], loss))

        return measure.timed(run)

    for name in made:
        call(name)
    times = measure.interleave({name: lambda name=name: call(name) for name in made}, repeats)  # type: ignore[misc]
    floor = Spread.of(times["no sync"]).median
    tree = Spread.of(compile_ms["pmean of the tree"]).median
    return [
        {
            "experiment": name,
            "ms": (spread := Spread.of(times[name])).median,
            "quartiles_ms": [spread.lower, spread.upper],
            "over_no_sync": spread.median / floor,
            "compile_ms": (built := Spread.of(compile_ms[name])).median,
            "compile_over_tree": built.median / tree,
        }
        for name in made
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(all_models()), default="L=50 D=32 B=64")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--dtype", choices=list(DTYPES), default="f32")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--compiles", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    jaxsync.simulate_devices(arguments.devices)
    model = all_models()[arguments.model]
    rows = measure_model(
        model, arguments.devices, DTYPES[arguments.dtype], arguments.repeats, arguments.compiles
    )
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        measure.print_result("experiments", settings, {"rows": rows})
        return 0
    header = ["experiment", "ms (quartiles)", "/ no sync", "compile ms", "/ pmean(tree)"]
    cells = [
        [
            row["experiment"],
            str(Spread(lower=row["quartiles_ms"][0], median=row["ms"], upper=row["quartiles_ms"][1])),
            f"{row['over_no_sync']:.2f}",
            f"{row['compile_ms']:.0f}",
            f"{row['compile_over_tree']:.2f}",
        ]
        for row in rows
    ]
    measure.print_table(header, cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
