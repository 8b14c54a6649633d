"""A step as traced code: local gradients, their sync, the optimizer's update, and the state they work on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsync.errors import LossError, TreeMismatchError
from jaxsync.ingraph.axes import declared_synced
from jaxsync.ingraph.elementwise import choose_layout, state_specs
from jaxsync.ingraph.gather import gather_params
from jaxsync.ingraph.grads import Synced, is_finite, sync_local
from jaxsync.ingraph.local import Local, accumulate, local_gradients, name_loss
from jaxsync.ingraph.match import match_tree
from jaxsync.ingraph.packed import Layout, Packed
from jaxsync.ingraph.sharded import ShardedOptimizer
from jaxsync.ingraph.shards import Shard, is_shard
from jaxsync.mismatch import tree_problems
from jaxsync.placement import abstract_params, batch_spec, check_batch
from jaxsync.step.options import Optimizer, StepOptions
from jaxsync.train_state import TrainState, strong_copy

# LLVM's level 3, which XLA asks for by default, takes up to three times as long to compile the many small
# kernels of a step as level 2, for code that was not measurably faster (docs/design/0009).
_CPU_OPTIONS: dict[str, bool | str | int] = {"xla_backend_optimization_level": 2}


class StepProgram:
    """What a step computes, as functions to be traced. Places nothing and launches nothing.

    Args:
        options: What the step is made of.
        mesh: The devices of its plan.
    """

    def __init__(self, options: StepOptions, mesh: Mesh) -> None:
        tx = options.tx
        self._options = options
        self._plan = options.plan
        self._mesh = mesh
        self._sharded = tx if isinstance(tx, ShardedOptimizer) else None
        self._tx: Optimizer = tx.inner if isinstance(tx, ShardedOptimizer) else tx
        # Of the optimizer's states: that of `init`, and those that its updates have returned.
        self._opt_structures: list[Any] = []

    def jitted(self) -> Any:
        """`step`, as a program of the whole mesh."""
        is_cpu = self._mesh.devices.flat[0].platform == "cpu"
        return jax.jit(
            self.step,
            donate_argnums=(0,) if self._options.donate else (),
            compiler_options=_CPU_OPTIONS if is_cpu else None,
        )

    def pmapped(self) -> Any:
        """The step as `pmap` makes it: all but the batch whole on every device."""
        return jax.pmap(
            self._device_step,
            axis_name=self._plan.data_axes[0],
            in_axes=(None, 0),
            out_axes=(None, None),
            devices=list(self._mesh.devices.flat),
            donate_argnums=(0,) if self._options.donate else (),
        )

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Local gradients and their sync on each device's shard; the update on global arrays.

        The update is outside `shard_map` so that an optimizer which looks at whole leaves (norms, factored
        moments) is right for sharded ones too.
        """
        check_batch(batch, self._plan.num_replicas * self._options.accumulate)
        specs = self._layout.specs
        batch_specs = jax.tree.map(lambda x: batch_spec(x, self._plan), batch)
        grad_specs = specs.arrays if self._sharded is None else self._sharded.specs
        synced = jax.shard_map(
            self._sync,
            mesh=self._mesh,
            in_specs=(specs, batch_specs),
            out_specs=(grad_specs, PartitionSpec()),
        )(self._own_params(state), batch)
        return self._update(state, *synced)

    def _device_step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        return self._update(state, *self._sync(self._own_params(state), batch))

    def make_state(self, params: Any) -> TrainState:
        """The first state, of parameters that are on the mesh."""
        # A copy is an operation of the program, so its result is a buffer of its own.
        packed = self._layout.pack(jax.tree.map(strong_copy, params))
        own = packed if self._sharded is None else self._sharded.cut(packed)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            packed_params=packed,
            packed_opt_state=jax.tree.map(strong_copy, self._tx.init(self._trained(own))),
        )

    def state_shardings(self, params: Any) -> TrainState:
        """The state with a sharding in place of each array."""
        shapes: TrainState = jax.eval_shape(self.make_state, params)
        if self._sharded is not None:
            opt_specs = self._sharded.state_specs(shapes.packed_opt_state)
        else:
            trained = self._trained(shapes.packed_params)
            opt_specs = state_specs(shapes.packed_opt_state, trained, self._layout.specs.arrays)
            # Of an optimizer in the chain that is sharded.
            opt_specs = jax.tree.map(_own_spec, opt_specs, is_leaf=is_shard)
        specs = (PartitionSpec(), self._layout.specs, opt_specs)
        return TrainState.tree_unflatten(
            None, jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)
        )

    def abstract_state(self) -> TrainState:
        """The state with a `ShapeDtypeStruct` that has a sharding in place of each array."""
        params = self._abstract_params()
        state: TrainState = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(self.make_state, params),
            self.state_shardings(params),
        )
        return state

    def note_first(self, state: TrainState) -> None:
        """Keeps the structure of the optimizer's first state, by which states of others are told apart."""
        if not self._opt_structures:
            self._opt_structures.append(jax.tree.structure(state.packed_opt_state))

    def _abstract_params(self) -> Any:
        params = abstract_params(self._plan)
        if self._options.transform == "pmap":  # whose traces know no mesh
            return params
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec)),
            params,
            self._plan.specs,
        )

    @functools.cached_property
    def _layout(self) -> Layout:
        """How parameters are kept: fused, if the optimizer gives the same numbers for that."""
        if self._sharded is not None:
            return self._sharded.layout
        return choose_layout(self._tx, self._plan)

    def _trained(self, packed: Packed) -> Any:
        """What the optimizer sees: the packed parameters if any are fused, else the tree.

        With None for what is not trained, which optimizers take for absent.
        """
        if self._sharded is not None:
            return self._sharded.view(packed)
        trained = packed.without_rest()
        return trained if self._layout.is_fused else trained.tree()

    def _own_params(self, state: TrainState) -> Packed:
        """The parameters, if they are packed as this step packs; another model's must not do."""
        if state.packed_params.layout != self._layout:
            match_tree(state.params, self._plan, "state.params")  # says which leaf differs, if one does
            problem = "state.params is not kept as this step keeps it: start from step.init(state.params)"
            raise TreeMismatchError(problems=(problem,))
        if not self._knows(state.packed_opt_state):
            problem = "state.opt_state is that of another optimizer: start from step.init(state.params)"
            raise TreeMismatchError(problems=(problem,))
        return state.packed_params

    def _knows(self, opt_state: Any) -> bool:
        """Whether it has the structure of the optimizer's first state, or of one that its update returned."""
        if not self._opt_structures:
            self.note_first(jax.eval_shape(self.make_state, self._abstract_params()))
        return jax.tree.structure(opt_state) in self._opt_structures

    def _sync(self, packed: Packed, batch: Any) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
        """On one device: its rows -> synced gradients, packed like the parameters, and metrics."""
        options, plan = self._options, self._plan
        microbatches = _split(batch, options.accumulate)
        params = gather_params(packed.tree(), plan)

        def local_fn(microbatch: Any) -> tuple[Local, Any]:
            return local_gradients(
                options.loss_fn,
                plan,
                params,
                (microbatch,),
                has_aux=options.has_aux,
                weighted=options.weighted,
            )

        local, aux = accumulate(local_fn, microbatches, options.accumulate)
        _check_aux(aux, name_loss(options.loss_fn))
        cuts = () if self._sharded is None else tuple(cut for cut in self._sharded.cuts if cut is not None)
        synced = sync_local(local, plan, jax.tree.leaves(aux), cuts)
        _check_loss_is_whole(synced, name_loss(options.loss_fn))
        metrics = {"loss": synced.loss, "finite": is_finite(synced, plan)}
        if options.has_aux:
            metrics["aux"] = jax.tree.unflatten(jax.tree.structure(aux), synced.means)
        return synced.packed(self._layout), metrics

    def _update(
        self, state: TrainState, grads: Sequence[jax.Array], metrics: dict[str, Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        old, opt_state = state.packed_params, state.packed_opt_state
        if self._sharded is not None:
            old = self._sharded.cut(old)
        trained = self._trained(old)
        with declared_synced():
            updates, opt_state = self._tx.update(self._trained(old.with_arrays(grads)), opt_state, trained)
        _check_updates(updates, trained)
        new = old.with_arrays(_add(old.arrays, jax.tree.leaves(updates)))
        if self._options.skip_nonfinite:
            kept = (old, state.packed_opt_state)
            new, opt_state = _select(metrics["finite"], (new, opt_state), kept)
        if self._sharded is not None:
            new = self._sharded.gather(new)
        if not self._knows(opt_state):
            self._opt_structures.append(jax.tree.structure(opt_state))
        return TrainState(step=state.step + 1, packed_params=new, packed_opt_state=opt_state), metrics


def _own_spec(x: Any) -> Any:
    return Shard(array=x.cut.spec, cut=x.cut) if is_shard(x) else x


def _split(batch: Any, k: int) -> Any:
    """The rows of one device as microbatches, along a leading dim."""
    return jax.tree.map(
        lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]) if x.ndim else jnp.broadcast_to(x, (k,)),
        batch,
    )


def _add(arrays: Sequence[jax.Array], updates: Sequence[Any]) -> list[jax.Array]:
    with jax.numpy_dtype_promotion("standard"):  # a float32 update of a bfloat16 parameter is fine
        return [(array + update).astype(array.dtype) for array, update in zip(arrays, updates, strict=True)]


def _select(is_new: jax.Array, new: Any, old: Any) -> Any:
    # Not a branch: no collective may stand under a flag, and this one is the same on every device anyway.
    return jax.tree.map(lambda new, old: jnp.where(is_new, _sharded_like(new, old), old), new, old)


def _sharded_like(new: Any, old: Any) -> Any:
    """`new` with the sharding of `old`, which matters on Explicit meshes alone: there it is in the type."""
    wanted = jax.typeof(old).sharding
    if wanted.mesh.are_all_axes_auto or wanted.mesh.empty or jax.typeof(new).sharding == wanted:
        return new
    return jax.sharding.reshard(new, wanted)


def _check_updates(updates: Any, trained: Any) -> None:
    if problems := tree_problems("updates", updates, trained, owner="the plan", any_dtype=True):
        raise TreeMismatchError(problems=tuple(problems))


def _check_aux(aux: Any, function: str) -> None:
    wrong = [
        f"aux{jax.tree_util.keystr(path)}, a {x.dtype} array"
        for path, x in jax.tree_util.tree_leaves_with_path(aux)
        if not jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if wrong:
        wanted = "real float aux, of which the mean over devices is returned"
        raise LossError(function=function, got=", ".join(wrong[:8]), wanted=wanted)


def _check_loss_is_whole(synced: Synced, function: str) -> None:
    axes = sorted(jax.typeof(synced.loss).manual_axis_type.varying)
    if axes:
        raise LossError(
            function=function,
            got=f"a loss that differs along {axes}",
            wanted="one that all model shards agree on: sum or average it over these axes with jax.lax.psum",
        )
