"""TrainStep: forward, backward, sync and optimizer update as one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsync.errors import ArgumentError, DataShardedError, LossError, MeshError, TreeMismatchError
from jaxsync.host.launcher import (
    check_not_aliased,
    check_not_deleted,
    process_launcher,
    resolve_window,
)
from jaxsync.ingraph.axes import declared_synced
from jaxsync.ingraph.elementwise import choose_layout, state_specs
from jaxsync.ingraph.gather import gather_params
from jaxsync.ingraph.grads import Synced, is_finite, sync_local
from jaxsync.ingraph.local import Local, LossFn, accumulate, local_gradients
from jaxsync.ingraph.match import match_tree
from jaxsync.ingraph.packed import Layout, Packed
from jaxsync.ingraph.sharded import ShardedOptimizer
from jaxsync.ingraph.shards import Shard, is_shard
from jaxsync.mesh import format_mesh
from jaxsync.multiprocess.agreement import digest_of, mesh_processes
from jaxsync.multiprocess.consent import Consent, agree_on_values
from jaxsync.multiprocess.values import value_digest
from jaxsync.placement import (
    abstract_params,
    batch_spec,
    check_batch,
    check_replicas_equal,
    concrete_mesh,
    place_leaves,
    put,
)
from jaxsync.plan import SyncPlan
from jaxsync.train_state import TrainState, strong_copy

# LLVM's level 3, which XLA asks for by default, takes up to three times as long to compile the many small
# kernels of a step as level 2, for code that was not measurably faster (docs/design/0009).
_CPU_OPTIONS: dict[str, bool | str | int] = {"xla_backend_optimization_level": 2}


class Optimizer(Protocol):
    """The optax protocol."""

    def init(self, params: Any, /) -> Any:
        """The optimizer's state for these parameters."""

    def update(self, updates: Any, state: Any, params: Any = None, /) -> tuple[Any, Any]:
        """Gradients -> updates to add to the parameters, and the next state."""


class TrainStep:
    """One training step over a mesh. Made by `make_train_step`, whose docstring is its contract."""

    def __init__(
        self,
        loss_fn: LossFn,
        tx: Optimizer,
        plan: SyncPlan,
        *,
        accumulate: int,
        donate: bool,
        transform: str,
        has_aux: bool,
        weighted: bool,
        skip_nonfinite: bool,
    ) -> None:
        self.plan = plan
        self._mesh = concrete_mesh(plan)
        self._loss_fn = loss_fn
        self._sharded = tx if isinstance(tx, ShardedOptimizer) else None
        self._tx: Optimizer = tx.inner if isinstance(tx, ShardedOptimizer) else tx
        self._accumulate = accumulate
        self._donate = donate
        self._has_aux = has_aux
        self._weighted = weighted
        self._skip_nonfinite = skip_nonfinite
        self._is_pmap = transform == "pmap"
        self._shardings = {
            ndim: NamedSharding(self._mesh, spec)
            for ndim, spec in ((0, PartitionSpec()), (1, plan.batch_spec))
        }
        # With several processes: calls so far, and the batch of the last.
        self._num_calls = 0
        self._last_kinds: tuple[Any, ...] | None = None
        # Of the optimizer's states: that of `init`, and those that its updates have returned.
        self._opt_structures: list[Any] = []
        self._consent = Consent(
            plan,
            self._mesh,
            {
                "make_train_step": f"accumulate={accumulate}, donate={donate}, has_aux={has_aux}, "
                f"weighted={weighted}, skip_nonfinite={skip_nonfinite}, sharded={self._sharded is not None}"
            },
        )
        self._window = resolve_window(plan.config.max_in_flight, self._mesh.devices.flat[0].platform)
        self._compiled = self._make_pmap() if self._is_pmap else self._make_jit()

    def init(self, params: Any, *, broadcast: bool = True) -> TrainState:
        """The first state: `params` and `tx.init(params)` on the mesh, in buffers of their own.

        The caller's arrays are copied, so that donating the state never deletes them; and a tree that
        holds one array twice becomes one that holds two.

        Args:
            params: The tree of the plan. In each of several processes the whole tree, with global shapes.
            broadcast: With several processes: whether all start from the values of the first one. If not,
                they must have equal values.

        Raises:
            TreeMismatchError: `params` is not the tree of the plan.
            ReplicaMismatchError: An array claims to be replicated, and its replicas differ.
            DisagreementError: Processes differ in the plan, the step, versions, or in values.
            AbsentProcessError: Processes did not come in time.
        """
        leaves, _ = match_tree(params, self.plan, "params")
        check_replicas_equal(params)
        leaves = self._consent.share(leaves, is_broadcast=broadcast)
        placed = jax.tree.unflatten(self.plan.treedef, place_leaves(leaves, self.plan))
        make = jax.jit(self._make_state, out_shardings=self._state_shardings(placed))
        state: TrainState = make(placed)
        if not self._opt_structures:
            self._opt_structures.append(jax.tree.structure(state.packed_opt_state))
        # Until the copies are made JAX reads the caller's NumPy arrays, which may change once this returns.
        jax.block_until_ready(state)
        return state

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """The next state, and metrics: see `make_train_step`.

        Inside another trace (with `transform="shard_map"`) it is part of that program: `lax.scan` over steps.
        """
        if not isinstance(state, TrainState):
            got = f"a {type(state).__name__}"
            raise ArgumentError(function="TrainStep", argument="state", got=got, wanted="what step.init made")
        rows = jax.tree.leaves(batch)
        if any(isinstance(x, jax.core.Tracer) for x in (state.step, *rows)):
            # Part of another program, such as a scan over steps.
            inner = self._compiled if self._is_pmap else self._step
            return inner(state, batch)
        if isinstance(state.step, np.ndarray | np.generic):  # a state from the host
            shardings = jax.tree.leaves(self._state_shardings(state.params))
            agree_on_values("the state", state, shardings)
            state = jax.tree.unflatten(jax.tree.structure(state), put(jax.tree.leaves(state), shardings))
        held = jax.tree.leaves(state)
        check_not_deleted([*held, *rows], {"state": state, "batch": batch})
        if self._donate:
            check_not_aliased("state", state, held, rows)
        kinds = self._kinds_if_new(rows) if self._consent.is_needed else None
        if kinds is not None:
            self._agree_on_batch(state, rows, kinds)
        batch = self._place_batch(batch)
        if kinds is not None:
            self._agree_on_program(state, batch, kinds)
        return process_launcher().launch(
            lambda: self._run(state, batch), self._window, lambda outputs: (outputs[1]["loss"],)
        )

    def _kinds_if_new(self, rows: Sequence[Any]) -> tuple[Any, ...] | None:
        """The shapes and dtypes of a batch, if they are not those of the last call; counts the calls."""
        kinds = tuple((np.shape(x), str(getattr(x, "dtype", type(x).__name__))) for x in rows)
        self._num_calls += 1
        last, self._last_kinds = self._last_kinds, kinds
        return None if kinds == last else kinds

    def _agree_on_batch(self, state: TrainState, rows: Sequence[Any], kinds: tuple[Any, ...]) -> None:
        """Asks the other processes whether they have such a batch and state.

        Each time when the shapes are not those of the call before: else a process that comes to its last,
        smaller batch a step early would pair it with another one of the others.
        """

        def facts() -> dict[str, str]:
            held = {
                f"state{jax.tree_util.keystr(path)}": f"{x.dtype}{list(x.shape)}"
                for path, x in jax.tree_util.tree_leaves_with_path(state)
            }
            values = [value_digest(np.asarray(x)) for x in rows if not isinstance(x, jax.Array)]
            return {
                "call": f"number {self._num_calls}",
                "batch": ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds),
                "values of the batch's host arrays": digest_of(values)[:16],
                **held,
            }

        self._consent.ask("the training step", facts)

    def _agree_on_program(self, state: TrainState, batch: Any, kinds: Hashable) -> None:
        """Asks whether loss and optimizer are the same: another learning rate would part the replicas."""

        def facts() -> dict[str, str]:
            text = self._compiled.lower(state, batch).as_text()
            return {"loss function and optimizer, as compiled": digest_of(text)[:16]}

        self._consent.ask("the program of the training step", facts, key=("program", kinds))

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        try:
            result: tuple[TrainState, dict[str, Any]] = self._compiled(state, batch)
        except ValueError:
            if not isinstance(jnp.zeros(()), jax.core.Tracer):
                raise
            # Called with concrete arguments while another program is traced. JAX refuses compiler options
            # there, and has no public way to ask beforehand that costs as little.
            return self._step(state, batch)
        return result

    def lower(self, state: TrainState, batch: Any) -> Any:
        """The lowered program for these arguments, as `jax.jit(...).lower` gives it.

        Arrays, or `ShapeDtypeStruct`s: `step.lower(step.abstract_state(), ...)` needs no memory.
        """
        return self._compiled.lower(state, self._place_batch(batch))

    def abstract_state(self) -> TrainState:
        """What `init` returns, with a `ShapeDtypeStruct` that has a sharding in place of each array.

        >>> import jax, jax.numpy as jnp, optax, jaxsync
        >>> plan = jaxsync.make_plan({"w": jnp.zeros((8, 3))}, jaxsync.make_mesh({"data": 8}))
        >>> loss_fn = lambda params, batch: jnp.mean(batch @ params["w"])
        >>> step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)
        >>> batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)
        >>> compiled = step.lower(step.abstract_state(), batch).compile()
        >>> compiled.memory_analysis().argument_size_in_bytes  # of a device: 24 floats, 2 rows, a step number
        164
        """
        params = self._abstract_params()
        state: TrainState = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(self._make_state, params),
            self._state_shardings(params),
        )
        return state

    def _abstract_params(self) -> Any:
        params = abstract_params(self.plan)
        if self._is_pmap:  # whose traces know no mesh
            return params
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec)),
            params,
            self.plan.specs,
        )

    @functools.cached_property
    def _layout(self) -> Layout:
        """How parameters are kept: fused, if the optimizer gives the same numbers for that."""
        if self._sharded is not None:
            return self._sharded.layout
        return choose_layout(self._tx, self.plan)

    def _trained(self, packed: Packed) -> Any:
        """What the optimizer sees: the packed parameters if any are fused, else the tree.

        With None for what is not trained, which optimizers take for absent.
        """
        if self._sharded is not None:
            return self._sharded.view(packed)
        trained = packed.without_rest()
        return trained if self._layout.is_fused else trained.tree()

    def _make_state(self, params: Any) -> TrainState:
        # A copy is an operation of the program, so its result is a buffer of its own.
        packed = self._layout.pack(jax.tree.map(strong_copy, params))
        own = packed if self._sharded is None else self._sharded.cut(packed)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            packed_params=packed,
            packed_opt_state=jax.tree.map(strong_copy, self._tx.init(self._trained(own))),
        )

    def _state_shardings(self, params: Any) -> TrainState:
        """The state with a sharding in place of each array."""
        shapes: TrainState = jax.eval_shape(self._make_state, params)
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

    def _make_jit(self) -> Any:
        is_cpu = self._mesh.devices.flat[0].platform == "cpu"
        return jax.jit(
            self._step,
            donate_argnums=(0,) if self._donate else (),
            compiler_options=_CPU_OPTIONS if is_cpu else None,
        )

    def _make_pmap(self) -> Any:
        return jax.pmap(
            self._device_step,
            axis_name=self.plan.data_axes[0],
            in_axes=(None, 0),
            out_axes=(None, None),
            devices=list(self._mesh.devices.flat),
            donate_argnums=(0,) if self._donate else (),
        )

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Local gradients and their sync on each device's shard; the update on global arrays.

        The update is outside `shard_map` so that an optimizer which looks at whole leaves (norms, factored
        moments) is right for sharded ones too.
        """
        check_batch(batch, self.plan.num_replicas * self._accumulate)
        specs = self._layout.specs
        batch_specs = jax.tree.map(lambda x: batch_spec(x, self.plan), batch)
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

    def _own_params(self, state: TrainState) -> Packed:
        """The parameters, if they are packed as this step packs; another model's must not do."""
        if state.packed_params.layout != self._layout:
            match_tree(state.params, self.plan, "state.params")  # says which leaf differs, if one does
            problem = "state.params is not kept as this step keeps it: start from step.init(state.params)"
            raise TreeMismatchError(problems=(problem,))
        if not self._knows(state.packed_opt_state):
            problem = "state.opt_state is that of another optimizer: start from step.init(state.params)"
            raise TreeMismatchError(problems=(problem,))
        return state.packed_params

    def _knows(self, opt_state: Any) -> bool:
        """Whether it has the structure of the optimizer's first state, or of one that its update returned."""
        if not self._opt_structures:
            made = jax.eval_shape(self._make_state, self._abstract_params())
            self._opt_structures.append(jax.tree.structure(made.packed_opt_state))
        return jax.tree.structure(opt_state) in self._opt_structures

    def _sync(self, packed: Packed, batch: Any) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
        """On one device: its rows -> synced gradients, packed like the parameters, and metrics."""
        microbatches = self._split_batch(batch)
        params = gather_params(packed.tree(), self.plan)

        def local_fn(microbatch: Any) -> tuple[Local, Any]:
            return local_gradients(
                self._loss_fn,
                self.plan,
                params,
                (microbatch,),
                has_aux=self._has_aux,
                weighted=self._weighted,
            )

        local, aux = accumulate(local_fn, microbatches, self._accumulate)
        _check_aux(aux)
        cuts = () if self._sharded is None else tuple(cut for cut in self._sharded.cuts if cut is not None)
        synced = sync_local(local, self.plan, jax.tree.leaves(aux), cuts)
        _check_loss_is_whole(synced)
        metrics = {"loss": synced.loss, "finite": is_finite(synced, self.plan)}
        if self._has_aux:
            metrics["aux"] = jax.tree.unflatten(jax.tree.structure(aux), synced.means)
        return synced.packed(self._layout), metrics

    def _split_batch(self, batch: Any) -> Any:
        k = self._accumulate
        return jax.tree.map(
            lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]) if x.ndim else jnp.broadcast_to(x, (k,)),
            batch,
        )

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
        with jax.numpy_dtype_promotion("standard"):  # a float32 update of a bfloat16 parameter is fine
            arrays = [
                (array + update).astype(array.dtype)
                for array, update in zip(old.arrays, jax.tree.leaves(updates), strict=True)
            ]
        new = old.with_arrays(arrays)
        if self._skip_nonfinite:
            # A select, not a branch: no collective may stand under a flag, and this one is the same on
            # every device in any case.
            new, opt_state = jax.tree.map(
                lambda new, old: jnp.where(metrics["finite"], _sharded_like(new, old), old),
                (new, opt_state),
                (old, state.packed_opt_state),
            )
        if self._sharded is not None:
            new = self._sharded.gather(new)
        if not self._knows(opt_state):
            self._opt_structures.append(jax.tree.structure(opt_state))
        return TrainState(step=state.step + 1, packed_params=new, packed_opt_state=opt_state), metrics

    def _place_batch(self, batch: Any) -> Any:
        leaves, treedef = jax.tree.flatten(batch)
        if self._is_pmap:
            check_batch(batch, self.plan.num_replicas * self._accumulate)
            leaves = [self._stack(x) for x in leaves]
        shardings = [self._shardings[min(np.ndim(x), 1)] for x in leaves]
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            leaves = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for x, sharding in zip(leaves, shardings, strict=True)
            ]
        elif not all(map(_is_placed, leaves, shardings)):
            check_batch(batch, self.plan.num_replicas * self._accumulate)
            # Copied, since JAX may go on reading a NumPy array after the call: a loader that refills its
            # buffer would train this step on the next step's rows.
            is_shared = self._consent.is_needed  # then `put` copies this process's rows
            own = [np.array(x) if isinstance(x, np.ndarray) and not is_shared else x for x in leaves]
            leaves = put(own, shardings)
        return jax.tree.unflatten(treedef, leaves)

    def _stack(self, x: Any) -> Any:
        """The rows of each device along a leading dim, as `pmap` wants them."""
        n, shape = self.plan.num_replicas, np.shape(x)
        return x.reshape(n, shape[0] // n, *shape[1:]) if shape else np.broadcast_to(x, (n,))


def _own_spec(x: Any) -> Any:
    return Shard(array=x.cut.spec, cut=x.cut) if is_shard(x) else x


def _is_placed(x: Any, sharding: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and x.sharding == sharding


def _check_updates(updates: Any, trainable: Any) -> None:
    wanted, found = (
        {jax.tree_util.keystr(path): np.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (trainable, updates)
    )
    problems = [
        f"updates{path} has shape {found.get(path, 'none')}; wanted {shape}"
        for path, shape in wanted.items()
        if found.get(path) != shape
    ]
    problems += [f"updates{path} is not in the plan" for path in found if path not in wanted]
    if problems:
        raise TreeMismatchError(problems=tuple(problems))


def _sharded_like(new: Any, old: Any) -> Any:
    """`new` with the sharding of `old`, which matters on Explicit meshes alone: there it is in the type."""
    wanted = jax.typeof(old).sharding
    if wanted.mesh.are_all_axes_auto or wanted.mesh.empty or jax.typeof(new).sharding == wanted:
        return new
    return jax.sharding.reshard(new, wanted)


def _check_aux(aux: Any) -> None:
    wrong = [
        f"aux{jax.tree_util.keystr(path)}, a {x.dtype} array"
        for path, x in jax.tree_util.tree_leaves_with_path(aux)
        if not jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if wrong:
        wanted = "real float aux, of which the mean over devices is returned"
        raise LossError(got=", ".join(wrong[:8]), wanted=wanted)


def _check_loss_is_whole(synced: Synced) -> None:
    axes = sorted(jax.typeof(synced.loss).manual_axis_type.varying)
    if axes:
        raise LossError(
            got=f"a loss that differs along {axes}",
            wanted="one that all model shards agree on: sum or average it over these axes with jax.lax.psum",
        )


def make_train_step(
    loss_fn: LossFn,
    tx: Optimizer,
    plan: SyncPlan,
    *,
    accumulate: int = 1,
    donate: bool = True,
    transform: Literal["shard_map", "pmap"] = "shard_map",
    has_aux: bool = False,
    weighted: bool = False,
    skip_nonfinite: bool = True,
) -> TrainStep:
    """A compiled data-parallel training step: `state, metrics = step(state, batch)`.

    Start with `state = step.init(params)`. A batch is a pytree of host or device arrays with the global
    batch as leading dim, divided over the data axes in order; a scalar leaf goes to every device. An
    un-awaited loop of calls neither hangs nor aborts: see `guard_dispatch`.

    With several processes every one makes the same step, state and calls. A batch of host arrays is the whole
    batch in every process, of which each uploads only the rows of its own devices. A process that has only
    its own rows makes global arrays of them: `jax.make_array_from_process_local_data(sharding, rows)`, with
    `sharding = NamedSharding(mesh, plan.batch_spec)`. Before the first call, and for each new shape of batch,
    the processes compare what they are about to launch.

    Args:
        loss_fn: `loss_fn(params, batch)` -> the mean loss over the rows it is given, a real scalar; with
            `weighted` and `has_aux` as for `value_and_grad`.
        tx: An optimizer of the optax protocol. It sees synced gradients as global arrays, so any optax
            chain is right; `synchronize` in it is refused, since that would sync twice.
        plan: From `make_plan`.
        accumulate: Microbatches a device goes through, one after the other, before the one reduction.
        donate: Whether the memory of the old state is reused for the new one. The old state is then deleted.
        transform: `"shard_map"`, or `"pmap"` for a mesh of one axis.
        has_aux: Whether `loss_fn` returns aux: a tree of real float arrays, whose mean over devices and
            microbatches (weighted like the loss) is in the metrics.
        weighted: Whether `loss_fn` returns a weight.
        skip_nonfinite: Whether a step whose loss or gradients are not finite leaves parameters and optimizer
            state as they were, on every device alike.

    Returns:
        A `TrainStep`. Its metrics are `loss` (scalar, reduced as the gradients are), `finite` (bool scalar)
        and, with `has_aux`, `aux`.

    Collectives: those of `value_and_grad`, whatever `accumulate` is; and, if leaves are sharded over model
    axes, one all-reduce of one element for `finite`, and what `tx` needs.

    Raises:
        ArgumentError: An argument is of another kind, or has a value that cannot be meant.
        DataShardedError: `transform="pmap"`, and a parameter is sharded over a data axis.
        MeshError: The mesh has no devices; or `transform="pmap"` and it has more than one axis.
        DispatchError: The config's `max_in_flight` cannot work.
        BatchError: When called: the batch cannot be divided, or its leaves differ in their rows.
        TreeMismatchError: When called: the state or the optimizer's update is not the tree of the plan.
        DeletedArrayError: When called: an argument was donated to an earlier call.
        AliasedArrayError: When called with `donate`: the state holds one array twice.
        DisagreementError: When called: processes would launch different programs; on every one of them.
        AbsentProcessError: When called: processes did not come in time.
        PeerLostError: When called: another process broke a collective of this or an earlier step.
        LossError: When called: `loss_fn` returns something else.

    >>> import jax, jax.numpy as jnp, optax, jaxsync
    >>> params = {"w": jnp.zeros(3)}
    >>> plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)
    >>> state, metrics = step(step.init(params), {"x": jnp.ones((16, 3)), "y": jnp.ones(16)})
    >>> float(metrics["loss"]), float(state.params["w"][0])
    (1.0, 0.20000000298023224)
    """
    is_count = isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate >= 1
    checks = [
        ("loss_fn", loss_fn, callable(loss_fn), "a function"),
        ("tx", tx, hasattr(tx, "init") and hasattr(tx, "update"), "an optimizer with init and update"),
        ("plan", plan, isinstance(plan, SyncPlan), "a SyncPlan"),
        ("accumulate", accumulate, is_count, "an int of 1 or more"),
        ("transform", transform, transform in ("shard_map", "pmap"), "'shard_map' or 'pmap'"),
    ]
    for argument, value, is_right, wanted in checks:
        if not is_right:
            got = repr(value) if isinstance(value, int | str) else f"a {type(value).__name__}"
            raise ArgumentError(function="make_train_step", argument=argument, got=got, wanted=wanted)
    if transform == "pmap" and len(plan.mesh.axis_names) != 1:
        problem = "transform='pmap' has one axis: use transform='shard_map'"
        raise MeshError(mesh=format_mesh(plan.mesh), problems=(problem,))
    if transform == "pmap" and isinstance(plan.mesh, Mesh) and len(mesh_processes(plan.mesh)) > 1:
        problem = "transform='pmap' is for the devices of one process: use transform='shard_map'"
        raise MeshError(mesh=format_mesh(plan.mesh), problems=(problem,))
    over_data = tuple((leaf.path, str(leaf.spec)) for leaf in plan.leaves if leaf.scatter_dims)
    if transform == "pmap" and over_data:
        raise DataShardedError(function="transform='pmap'", leaves=over_data, axes=plan.data_axes)
    if transform == "pmap" and isinstance(tx, ShardedOptimizer):
        wanted = "'shard_map', for a sharded optimizer: pmap holds all state whole on every device"
        raise ArgumentError(function="make_train_step", argument="transform", got="'pmap'", wanted=wanted)
    if isinstance(tx, ShardedOptimizer) and tx.plan != plan:
        wanted = "an optimizer that was sharded for this plan"
        raise ArgumentError(
            function="make_train_step", argument="tx", got="one of another plan", wanted=wanted
        )
    return TrainStep(
        loss_fn,
        tx,
        plan,
        accumulate=accumulate,
        donate=donate,
        transform=transform,
        has_aux=has_aux,
        weighted=weighted,
        skip_nonfinite=skip_nonfinite,
    )
