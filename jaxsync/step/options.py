"""What a step is made of: the arguments of `make_train_step`, and whether they go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import Mesh

from jaxsync.arguments import check_flags
from jaxsync.errors import ArgumentError, DataShardedError, MeshError
from jaxsync.ingraph.local import LossFn
from jaxsync.ingraph.sharded import ShardedOptimizer
from jaxsync.mesh import format_mesh
from jaxsync.multiprocess.agreement import mesh_processes
from jaxsync.plan import SyncPlan


class Optimizer(Protocol):
    """The optax protocol."""

    def init(self, params: Any, /) -> Any:
        """The optimizer's state for these parameters."""

    def update(self, updates: Any, state: Any, params: Any = None, /) -> tuple[Any, Any]:
        """Gradients -> updates to add to the parameters, and the next state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The arguments of `make_train_step`, whose docstring says what each is."""

    loss_fn: LossFn
    tx: Optimizer
    plan: SyncPlan
    accumulate: int
    donate: bool
    transform: str
    has_aux: bool
    weighted: bool
    skip_nonfinite: bool


def check_options(options: StepOptions, function: str) -> None:
    """Refuses options of which no step can be made.

    Args:
        options: What was passed.
        function: To what, for the error.

    Raises:
        ArgumentError: An option is of another kind, has a value that cannot be meant, or does not go with
            another one.
        DataShardedError: `transform="pmap"`, and a parameter is sharded over a data axis.
        MeshError: `transform="pmap"`, and the mesh has more than one axis, or devices of several processes.
    """
    k, tx, plan, transform = options.accumulate, options.tx, options.plan, options.transform
    is_count = isinstance(k, int) and not isinstance(k, bool) and k >= 1
    checks = [
        ("loss_fn", options.loss_fn, callable(options.loss_fn), "a function"),
        ("tx", tx, hasattr(tx, "init") and hasattr(tx, "update"), "an optimizer with init and update"),
        ("plan", plan, isinstance(plan, SyncPlan), "a SyncPlan"),
        ("accumulate", k, is_count, "an int of 1 or more"),
        ("transform", transform, transform in ("shard_map", "pmap"), "'shard_map' or 'pmap'"),
    ]
    for argument, value, is_right, wanted in checks:
        if not is_right:
            got = repr(value) if isinstance(value, int | str) else f"a {type(value).__name__}"
            raise ArgumentError(function=function, argument=argument, got=got, wanted=wanted)
    flags = {name: getattr(options, name) for name in ("donate", "has_aux", "weighted", "skip_nonfinite")}
    check_flags(function, **flags)
    if transform == "pmap":
        _check_pmap(options, function)
    if isinstance(tx, ShardedOptimizer) and tx.plan != plan:
        wanted = "an optimizer that was sharded for this plan"
        raise ArgumentError(function=function, argument="tx", got="one of another plan", wanted=wanted)


def _check_pmap(options: StepOptions, function: str) -> None:
    plan = options.plan
    if len(plan.mesh.axis_names) != 1:
        problem = "transform='pmap' has one axis: use transform='shard_map'"
        raise MeshError(mesh=format_mesh(plan.mesh), problems=(problem,))
    if isinstance(plan.mesh, Mesh) and len(mesh_processes(plan.mesh)) > 1:
        problem = "transform='pmap' is for the devices of one process: use transform='shard_map'"
        raise MeshError(mesh=format_mesh(plan.mesh), problems=(problem,))
    over_data = tuple((leaf.path, str(leaf.spec)) for leaf in plan.leaves if leaf.scatter_dims)
    if over_data:
        raise DataShardedError(function="transform='pmap'", leaves=over_data, axes=plan.data_axes)
    if isinstance(options.tx, ShardedOptimizer):
        wanted = "'shard_map', for a sharded optimizer: pmap holds all state whole on every device"
        raise ArgumentError(function=function, argument="transform", got="'pmap'", wanted=wanted)
