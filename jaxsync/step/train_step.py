"""A training step: what users hold and call, and how it is made."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxsync.arguments import check_flags
from jaxsync.errors import ArgumentError
from jaxsync.fork import check_not_forked
from jaxsync.host.launcher import (
    check_not_aliased,
    check_not_deleted,
    process_launcher,
    resolve_window,
)
from jaxsync.ingraph.local import LossFn
from jaxsync.ingraph.match import match_tree
from jaxsync.multiprocess.consent import agree_on_values
from jaxsync.placement import check_replicas_equal, concrete_mesh, place_leaves, put
from jaxsync.plan import SyncPlan
from jaxsync.step.agreement import StepAgreement
from jaxsync.step.batches import BatchPlacer
from jaxsync.step.options import Optimizer, StepOptions, check_options
from jaxsync.step.program import StepProgram
from jaxsync.train_state import TrainState


class TrainStep:
    """One training step over a mesh. Made by `make_train_step`, whose docstring is its contract."""

    def __init__(self, options: StepOptions) -> None:
        self._options = options
        mesh = concrete_mesh(options.plan)
        self._program = StepProgram(options, mesh)
        self._agreement = StepAgreement(options, mesh)
        # What each call looks at, a look away.
        self._is_shared = self._agreement.is_needed
        self._is_pmap = options.transform == "pmap"
        self._donate = options.donate
        self._place = BatchPlacer(options, mesh, is_shared=self._is_shared).place
        self._window = resolve_window(options.plan.config.max_in_flight, mesh.devices.flat[0].platform)
        self._compiled = self._program.pmapped() if self._is_pmap else self._program.jitted()

    @property
    def plan(self) -> SyncPlan:
        """The plan it was made with."""
        return self._options.plan

    @property
    def tx(self) -> Optimizer:
        """The optimizer, as it was passed: with `shard_optimizer`, what that returned."""
        return self._options.tx

    @property
    def accumulate(self) -> int:
        """How many microbatches a device goes through before the reduction."""
        return self._options.accumulate

    def replace(
        self,
        *,
        tx: Optimizer | None = None,
        accumulate: int | None = None,
        donate: bool | None = None,
        skip_nonfinite: bool | None = None,
    ) -> TrainStep:
        """The same step with another optimizer or other options. This one stays as it is.

        Loss, plan and transform are the same. A state of this step fits the new one if the new optimizer's
        state has the structure of the old one's, as with another learning rate; else start with
        `new.init(state.params)`. The new step compiles when it is called first.

        Args:
            tx: As for `make_train_step`; for a sharded state `shard_optimizer(tx, step.plan)`.
            accumulate: Likewise.
            donate: Likewise.
            skip_nonfinite: Likewise.

        Raises:
            ArgumentError: As for `make_train_step`.

        >>> import jax.numpy as jnp, optax, jaxsync
        >>> params = {"w": jnp.zeros(3)}
        >>> plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
        >>> step = jaxsync.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(0.5), plan)
        >>> state, _ = step(step.init(params), jnp.ones((8, 3)))
        >>> slower = step.replace(tx=optax.sgd(0.25))
        >>> state, _ = slower(state, jnp.ones((8, 3)))
        >>> state.params["w"].tolist()
        [-0.75, -0.75, -0.75]
        """
        given = {"tx": tx, "accumulate": accumulate, "donate": donate, "skip_nonfinite": skip_nonfinite}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        options = dataclasses.replace(self._options, **changes)
        check_options(options, "TrainStep.replace")
        return TrainStep(options)

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
            ForkedProcessError: The process was forked from one that had started JAX.
            ArgumentError: `broadcast` is no bool.
            DisagreementError: Processes differ in the plan, the step, versions, or in values.
            AbsentProcessError: Processes did not come in time.
        """
        check_not_forked("step.init")
        check_flags("TrainStep.init", broadcast=broadcast)
        plan = self.plan
        leaves, _ = match_tree(params, plan, "params")
        check_replicas_equal(params)
        leaves = self._agreement.share(leaves, is_broadcast=broadcast)
        placed = jax.tree.unflatten(plan.treedef, place_leaves(leaves, plan))
        make = jax.jit(self._program.make_state, out_shardings=self._program.state_shardings(placed))
        state: TrainState = make(placed)
        self._program.note_first(state)
        # Until the copies are made JAX reads the caller's NumPy arrays, which may change once this returns.
        jax.block_until_ready(state)
        return state

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """The next state, and metrics: see `make_train_step`.

        Inside another trace (with `transform="shard_map"`) it is part of that program: `lax.scan` over steps.

        Args:
            state: What `init`, or the call before, returned. With `donate` it is deleted.
            batch: A pytree of host or device arrays with the global batch as leading dim, a multiple of
                `plan.num_replicas * accumulate`; a scalar leaf goes to every device.

        Returns:
            The next state, and metrics: `loss` (scalar, reduced as the gradients are), `finite` (bool
            scalar), and with `has_aux` `aux`.

        Raises:
            ArgumentError: `state` is something else.
            JaxsyncError: What `make_train_step` names as raised when called.
        """
        check_not_forked("step")
        if not isinstance(state, TrainState):
            raise self._no_state(state)
        rows = jax.tree.leaves(batch)
        if any(isinstance(x, jax.core.Tracer) for x in (state.step, *rows)):
            # Part of another program, such as a scan over steps.
            inner = self._compiled if self._is_pmap else self._program.step
            return inner(state, batch)
        if isinstance(state.step, np.ndarray | np.generic):
            state = self._from_host(state)
        held = jax.tree.leaves(state)
        check_not_deleted([*held, *rows], {"state": state, "batch": batch})
        if self._donate:
            check_not_aliased("state", state, held, rows)
        kinds = self._agreement.kinds_if_new(rows) if self._is_shared else None
        if kinds is not None:
            self._agreement.on_batch(state, rows, kinds)
        batch = self._place(batch)
        if kinds is not None:
            self._agreement.on_program(lambda: self._compiled.lower(state, batch), kinds)
        return process_launcher().launch(
            lambda: self._run(state, batch), self._window, lambda outputs: (outputs[1]["loss"],), caller=self
        )

    def _no_state(self, state: Any) -> ArgumentError:
        is_pair = isinstance(state, tuple) and any(isinstance(part, TrainState) for part in state)
        unpacked = "the first of the two that a step returns: state, metrics = step(state, batch)"
        is_params = jax.tree.structure(state) == self.plan.treedef
        return ArgumentError(
            function="TrainStep",
            argument="state",
            got=f"a {type(state).__name__}",
            wanted=unpacked if is_pair else "what step.init made",
            before="state = step.init(params)" if is_params else "",
        )

    def _from_host(self, state: TrainState) -> TrainState:
        """The state on the mesh, of one that was taken to the host, such as one that was unpickled."""
        shardings = jax.tree.leaves(self._program.state_shardings(state.params))
        agree_on_values("the state", state, shardings)
        placed: TrainState = jax.tree.unflatten(
            jax.tree.structure(state), put(jax.tree.leaves(state), shardings)
        )
        return placed

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        try:
            result: tuple[TrainState, dict[str, Any]] = self._compiled(state, batch)
        except ValueError:
            if not isinstance(jnp.zeros(()), jax.core.Tracer):
                raise
            # Called with concrete arguments while another program is traced. JAX refuses compiler options
            # there, and has no public way to ask beforehand that costs as little.
            return self._program.step(state, batch)
        return result

    def lower(self, state: TrainState, batch: Any) -> Any:
        """The lowered program for these arguments, as `jax.jit(...).lower` gives it.

        Arrays, or `ShapeDtypeStruct`s: `step.lower(step.abstract_state(), ...)` needs no memory.

        Raises:
            BatchError: The batch cannot be divided, or its leaves differ in their rows.
            ForkedProcessError: The process was forked from one that had started JAX.
        """
        check_not_forked("step.lower")  # arrays are placed
        return self._compiled.lower(state, self._place(batch))

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
        return self._program.abstract_state()


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
        ForkedProcessError: When called: the process was forked from one that had started JAX.

    >>> import jax, jax.numpy as jnp, optax, jaxsync
    >>> params = {"w": jnp.zeros(3)}
    >>> plan = jaxsync.make_plan(params, jaxsync.make_mesh({"data": 8}))
    >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> step = jaxsync.make_train_step(loss_fn, optax.sgd(0.1), plan)
    >>> state, metrics = step(step.init(params), {"x": jnp.ones((16, 3)), "y": jnp.ones(16)})
    >>> float(metrics["loss"]), float(state.params["w"][0])
    (1.0, 0.20000000298023224)
    """
    options = StepOptions(
        loss_fn=loss_fn,
        tx=tx,
        plan=plan,
        accumulate=accumulate,
        donate=donate,
        transform=transform,
        has_aux=has_aux,
        weighted=weighted,
        skip_nonfinite=skip_nonfinite,
    )
    check_options(options, "make_train_step")
    return TrainStep(options)
