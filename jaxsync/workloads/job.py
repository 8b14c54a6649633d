"""JobConfig: a whole training job as one TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxsync.config import SyncConfig, from_table, load_toml
from jaxsync.errors import ConfigError
from jaxsync.workloads.charlm import CharlmModel
from jaxsync.workloads.digits import DigitsModel

T = TypeVar("T")

ModelConfig = DigitsModel | CharlmModel
MODELS: Mapping[str, type[ModelConfig]] = {"digits": DigitsModel, "charlm": CharlmModel}
_WANTED_SET = "wanted key=value, such as train.steps=10"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The `[train]` table: AdamW with a linear warmup and a cosine decay to 0.

    Attributes:
        steps: How many batches to train on.
        batch_size: Rows of a batch, over all devices and microbatches.
        learning_rate: The largest, at the end of the warmup.
        weight_decay: Of AdamW, on every leaf.
        warmup: Share of the steps in which the learning rate rises, from 0 to 1.
        accumulate: Microbatches a device goes through before the one sync.
        seed: Of the first parameters and the order of the rows.
        transform: What the step is made with.
        report_every: Steps from one look at the loss to the next. A look waits for the devices.
        checkpoint_dir: Where checkpoints are written, one directory a run; empty writes none.
        checkpoint_every: Steps from one checkpoint to the next; the last step makes one too. The newest
            three stay.
        run_dir: Where the run's figures are written for `jaxsync report`, one directory a run; empty writes
            none.
    """

    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.0
    warmup: float = 0.1
    accumulate: int = 1
    seed: int = 0
    transform: Literal["shard_map", "pmap"] = "shard_map"
    report_every: int = 20
    checkpoint_dir: str = ""
    checkpoint_every: int = 100
    run_dir: str = ""

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {getattr(self, name)}: wanted 1 or more"
            for name in ("steps", "batch_size", "accumulate", "report_every", "checkpoint_every")
            if getattr(self, name) < 1
        ]
        if not 0 < self.learning_rate < math.inf:  # also refuses nan
            problems.append(f"learning_rate = {self.learning_rate}: wanted more than 0")
        if not 0 <= self.weight_decay < math.inf:
            problems.append(f"weight_decay = {self.weight_decay}: wanted 0 or more")
        if not 0 <= self.warmup <= 1:
            problems.append(f"warmup = {self.warmup}: wanted a share of the steps, from 0 to 1")
        if self.seed < 0:
            problems.append(f"seed = {self.seed}: wanted 0 or more")
        if problems:
            raise ConfigError(source="TrainConfig(...)", problems=tuple(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What to train, on which devices, and how: one TOML file.

    Attributes:
        workload: `"digits"` or `"charlm"`.
        devices: CPU devices to simulate; 0 uses the devices JAX has.
        mesh: Mesh axis -> size, slowest axis first. The rows of a batch are divided over `sync.axis`.
        sync: The `[sync]` table.
        train: The `[train]` table.
        model: The `[model]` table; its keys depend on the workload.

    Raises:
        ConfigError: The parts do not fit together: names every key at fault.

    >>> job = JobConfig(
    ...     workload="digits",
    ...     mesh={"data": 8},
    ...     train=TrainConfig(steps=10, batch_size=64, learning_rate=1e-3),
    ...     model=DigitsModel(),
    ... )
    >>> job.num_replicas
    8
    """

    workload: Literal["digits", "charlm"]
    devices: int = 8
    mesh: dict[str, int]
    sync: SyncConfig = field(default_factory=SyncConfig)
    train: TrainConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        if problems := tuple(_problems(self)):
            raise ConfigError(source="JobConfig(...)", problems=problems)

    @property
    def num_replicas(self) -> int:
        """Into how many parts a batch is divided: the product of the data axes."""
        return math.prod(self.mesh[axis] for axis in self.sync.axes)

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
        """The job in a TOML file.

        Args:
            path: The file: `workload` and `devices`, and the tables mesh, sync, train and model.
            overrides: Each `key=value` with a dotted key, such as `train.steps=10`, replaces a value of the
                file. The value is TOML; what is no TOML is taken for a string.

        Raises:
            ConfigError: The file cannot be read, a key is unknown or has a wrong value, or the parts do not
                fit together; names the file, each dotted key and the nearest key that exists.
        """
        return _from_tables(*load_tables(path, overrides))


def load_tables(path: str | Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """The tables of a TOML file with the overrides in place, and what messages call them.

    Args:
        path: The file.
        overrides: As for `JobConfig.from_toml`.

    Raises:
        ConfigError: The file cannot be read, or an override is no `key=value`.
    """
    tables = load_toml(path)
    for override in overrides:
        _set(tables, override)
    return tables, f"{path} with {', '.join(overrides)}" if overrides else str(path)


def _problems(job: JobConfig) -> Iterator[str]:
    if job.devices < 0:
        yield f"devices = {job.devices}: wanted 0 (the devices JAX has) or more"
    if type(job.model) is not MODELS[job.workload]:
        yield f"model is a {type(job.model).__name__}: workload {job.workload!r} has another"
    sizes_fit = bool(job.mesh) and min(job.mesh.values()) >= 1
    if not sizes_fit:
        yield f"mesh = {job.mesh}: wanted one or more axes, each of size 1 or more"
    asked = math.prod(job.mesh.values())
    if sizes_fit and job.devices and asked > job.devices:
        yield f"mesh = {job.mesh}: needs {asked} devices, and devices = {job.devices}"
    missing = [axis for axis in job.sync.axes if axis not in job.mesh]
    for axis in missing:
        yield f"sync.axis names {axis!r}, which the mesh does not have: its axes are {list(job.mesh)}"
    if sizes_fit and not missing:
        yield from _batch_problems(job)


def _batch_problems(job: JobConfig) -> Iterator[str]:
    rows, accumulate = job.train.batch_size, job.train.accumulate
    divisor = job.num_replicas * accumulate
    if rows % divisor:
        parts = f"{job.num_replicas} devices x {accumulate} microbatches"
        nearest = max(1, round(rows / divisor)) * divisor
        yield f"train.batch_size = {rows}: wanted a multiple of {divisor} ({parts}), such as {nearest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """The file as it stands, before each table becomes its dataclass."""

    workload: Literal["digits", "charlm"]
    devices: int = 8
    mesh: dict[str, int]
    sync: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)


def _set(tables: dict[str, Any], override: str) -> None:
    """Replaces one value in `tables`."""
    key, equals, text = (part.strip() for part in override.partition("="))
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(source="--set", problems=(f"{override!r}: {_WANTED_SET}",))
    table = tables
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(source="--set", problems=(f"{override!r}: {name} is a value, not a table",))
    table[names[-1]] = _parse_value(text)


def _parse_value(text: str) -> Any:
    # As a whole document, which could hold a second key after a line break: only `value` itself counts.
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _from_tables(tables: Mapping[str, Any], source: str) -> JobConfig:
    check_keys(tables, _Tables, _part_classes(tables.get("workload")), source)
    parts = from_table(_Tables, tables, source=source)
    problems = mesh_problems(parts.mesh)
    sync = read_part(SyncConfig, "sync", parts.sync, problems)
    train = read_part(TrainConfig, "train", parts.train, problems)
    model = read_part(MODELS[parts.workload], "model", parts.model, problems)
    if sync is None or train is None or model is None or problems:
        raise ConfigError(source=source, problems=tuple(problems))
    try:
        return JobConfig(
            workload=parts.workload,
            devices=parts.devices,
            mesh=parts.mesh,
            sync=sync,
            train=train,
            model=model,
        )
    except ConfigError as error:
        raise ConfigError(source=source, problems=error.problems) from None


def mesh_problems(mesh: Mapping[str, Any]) -> list[str]:
    """One line for each size of a `[mesh]` table that is no int.

    >>> mesh_problems({"data": 8, "model": "two"})
    ["mesh.model = 'two': wanted int"]
    """
    return [
        f"mesh.{axis} = {size!r}: wanted int"
        for axis, size in mesh.items()
        if isinstance(size, bool) or not isinstance(size, int)
    ]


def read_part(cls: type[T], name: str, table: Mapping[str, Any], problems: list[str]) -> T | None:
    """The dataclass from its table; or None, with its problems added under their dotted keys."""
    try:
        return from_table(cls, table, source=name)
    except ConfigError as error:
        problems += [f"{name}.{problem}" for problem in error.problems]
        return None


def check_keys(
    tables: Mapping[str, Any], whole: type[Any], parts: Sequence[tuple[str, type[Any]]], source: str
) -> None:
    """Refuses unknown keys of a whole file, so that a key in the wrong table finds its own.

    Args:
        tables: The file.
        whole: The dataclass of its top level.
        parts: Name and dataclass of each table; a name may be there twice.
        source: What the message calls the file.

    Raises:
        ConfigError: Names each unknown key and the nearest one that exists.
    """
    known = [f.name for f in dataclasses.fields(whole)]
    known += [f"{table}.{f.name}" for table, cls in parts for f in dataclasses.fields(cls)]
    problems = tuple(
        f"unknown key {key!r}: the nearest is {difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]!r}"
        for key in _used_keys(tables, {table for table, _ in parts})
        if key not in known
    )
    if problems:
        raise ConfigError(source=source, problems=problems)


def _part_classes(workload: Any) -> list[tuple[str, type[Any]]]:
    is_known = isinstance(workload, str) and workload in MODELS
    models = [MODELS[workload]] if is_known else list(MODELS.values())
    return [("sync", SyncConfig), ("train", TrainConfig), *(("model", model) for model in models)]


def _used_keys(tables: Mapping[str, Any], parts: Set[str]) -> Iterator[str]:
    for name, value in tables.items():
        if name in parts and isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name
