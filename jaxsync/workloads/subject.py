"""Subject: the training step that `jaxsync tune` measures, from a job or from the user's own function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxsync.config import SyncConfig, from_table
from jaxsync.devices import simulate_devices
from jaxsync.errors import ConfigError, SubjectError
from jaxsync.mesh import make_mesh
from jaxsync.placement import concrete_mesh
from jaxsync.plan import SyncPlan
from jaxsync.reference import find_function
from jaxsync.step import Optimizer, TrainStep, make_train_step
from jaxsync.workloads.job import JobConfig, check_keys, load_tables, mesh_problems, read_part
from jaxsync.workloads.train import make_optimizer, prepare_job
from jaxsync.workloads.workload import Params

_LEARNING_RATE = 1e-3  # of the optimizer for a function that returns none; any value takes the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """The `[tune]` table: a step of the user's own.

    Attributes:
        module: `"package.module:function"`. The function takes no arguments and returns `(loss_fn, params,
            batch)` or `(loss_fn, params, batch, optimizer)`, as `make_train_step` and `TrainStep` want
            them; without an optimizer it is plain gradient descent. The module is looked for beside the
            TOML file, in the current folder, and where Python looks. What it raises comes through as it is.
        accumulate: As for `make_train_step`, like all that follow.
        transform: `"shard_map"` or `"pmap"`.
        has_aux: Whether `loss_fn` returns aux.
        weighted: Whether `loss_fn` returns a weight.
    """

    module: str
    accumulate: int = 1
    transform: Literal["shard_map", "pmap"] = "shard_map"
    has_aux: bool = False
    weighted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """All of a training step but its plan.

    Attributes:
        loss_fn: As for `make_train_step`.
        params: The parameters.
        batch: One global batch; every step gets this one.
        tx: The optimizer.
        mesh: The mesh.
        sync: The config to start from.
        accumulate: As for `make_train_step`, like all that follow.
        transform: `"shard_map"` or `"pmap"`.
        has_aux: Whether `loss_fn` returns aux.
        weighted: Whether `loss_fn` returns a weight.
    """

    loss_fn: Callable[..., Any]
    params: Params
    batch: Any
    tx: Optimizer
    mesh: Mesh
    sync: SyncConfig
    accumulate: int = 1
    transform: Literal["shard_map", "pmap"] = "shard_map"
    has_aux: bool = False
    weighted: bool = False

    def make_step(self, plan: SyncPlan) -> TrainStep:
        """A new step with this plan; nothing is compiled.

        Raises:
            ArgumentError: `loss_fn` or `tx` is something else.
            MeshError: `transform = "pmap"` and the mesh has more than one axis.
            DispatchError: `sync.max_in_flight` cannot work.
        """
        return make_train_step(
            self.loss_fn,
            self.tx,
            plan,
            accumulate=self.accumulate,
            transform=self.transform,
            has_aux=self.has_aux,
            weighted=self.weighted,
        )


class GradientDescent:
    """The optimizer of a function that returns none: parameters minus a thousandth of their gradients.

    >>> GradientDescent().update({"w": 2.0}, ())
    ({'w': -0.002}, ())
    """

    def init(self, params: Any, /) -> Any:
        """No state."""
        return ()

    def update(self, updates: Any, state: Any, params: Any = None, /) -> tuple[Any, Any]:
        """The gradients times minus the learning rate."""
        return jax.tree.map(lambda grad: -_LEARNING_RATE * grad, updates), state


def load_subject(path: str | Path, overrides: Sequence[str] = ()) -> Subject:
    """The subject in a TOML file. Simulates the file's devices; compiles nothing itself.

    Args:
        path: A job, as for `jaxsync train`; or `devices` (default 0: those JAX has) and the tables mesh,
            sync and tune (see `TuneConfig`).
        overrides: As for `JobConfig.from_toml`.

    Raises:
        ConfigError: The file cannot be read, does not fit together, or names a function that does not exist
            or returns something else.
        MissingExtraError: What a job needs is not installed.
        BackendStartedError: JAX has made other devices than the file simulates.
        DeviceCountError: There are fewer devices than the mesh needs.
    """
    tables, source = load_tables(path, overrides)
    if "tune" in tables:
        return _read_own(tables, source)
    if "workload" not in tables:
        problem = (
            'there is neither a `workload`, as for `jaxsync train`, nor a [tune] table with module = "'
            'package.module:function", which returns (loss_fn, params, batch)'
        )
        raise ConfigError(source=source, problems=(problem,))
    return _read_job(JobConfig.from_toml(path, overrides))


def _read_job(config: JobConfig) -> Subject:
    job = prepare_job(config)
    train = config.train
    return Subject(
        loss_fn=job.workload.loss_fn,
        params=job.workload.init_params(train.seed),
        batch=next(job.workload.batches(train.batch_size, train.seed)),
        tx=make_optimizer(train),
        mesh=concrete_mesh(job.plan),
        sync=config.sync,
        accumulate=train.accumulate,
        transform=train.transform,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """A file with a `[tune]` table as it stands."""

    devices: int = 0
    mesh: dict[str, int]
    sync: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, Any]


def _read_own(tables: Mapping[str, Any], source: str) -> Subject:
    if "workload" in tables:
        problem = f"workload = {tables['workload']!r} and a [tune] table: give one of the two"
        raise ConfigError(source=source, problems=(problem,))
    check_keys(tables, _Tables, [("sync", SyncConfig), ("tune", TuneConfig)], source)
    parts = from_table(_Tables, tables, source=source)
    problems = mesh_problems(parts.mesh)
    if parts.devices < 0:
        problems.append(f"devices = {parts.devices}: wanted 0 (the devices JAX has) or more")
    sync = read_part(SyncConfig, "sync", parts.sync, problems)
    tune = read_part(TuneConfig, "tune", parts.tune, problems)
    if sync is None or tune is None or problems:
        raise ConfigError(source=source, problems=tuple(problems))
    if parts.devices:
        simulate_devices(parts.devices)  # before the import: the module may make arrays
    mesh = make_mesh(parts.mesh)
    loss_fn, params, batch, tx = _call(tune.module, source)
    options = {f.name: getattr(tune, f.name) for f in dataclasses.fields(tune) if f.name != "module"}
    return Subject(loss_fn=loss_fn, params=params, batch=batch, tx=tx, mesh=mesh, sync=sync, **options)


def _call(reference: str, source: str) -> tuple[Any, Any, Any, Any]:
    """What the user's function returns, with an optimizer in any case."""
    try:
        function = find_function(reference)
    except SubjectError as error:
        is_missing = isinstance(error.__cause__, ModuleNotFoundError)
        where = " beside the TOML file, in the current folder, or where Python looks (PYTHONPATH)"
        raise _refuse(reference, error.problem + (where if is_missing else ""), source) from error
    made = function()
    if isinstance(made, tuple | list) and len(made) == 3:
        return made[0], made[1], made[2], GradientDescent()
    if isinstance(made, tuple | list) and len(made) == 4:
        return made[0], made[1], made[2], made[3]
    got = f"{len(made)} values" if isinstance(made, tuple | list) else f"a {type(made).__name__}"
    wanted = "(loss_fn, params, batch) or (loss_fn, params, batch, optimizer)"
    raise _refuse(reference, f"it returned {got}; wanted {wanted}", source)


def _refuse(reference: str, problem: str, source: str) -> ConfigError:
    return ConfigError(source=source, problems=(f"tune.module = {reference!r}: {problem}",))
