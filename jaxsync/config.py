"""SyncConfig: one frozen dataclass, one TOML table."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax.numpy as jnp

from jaxsync.errors import ConfigError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How gradients are synced. Every field has a default that is right on its own.

    Attributes:
        axis: The mesh axis, or axes, that carry the batch. Gradients are reduced over these.
        reduce: `"mean"` divides the sum by the number of devices (or the total weight); `"sum"` does not.
        reduce_dtype: The dtype gradients are summed in; they come back in their own. By default real
            floats of less than 32 bits are summed in float32 and all others in their own dtype. A dtype
            name applies to every real float leaf; `"own"` sums each leaf in its own dtype. What travels as
            float16 is scaled by 1/devices before the sum, so that the number of devices alone does not make a
            mean overflow; microbatches and weights can.
        fuse_max_bytes: A leaf of more bytes (in its reduce dtype, per device) travels alone: to flatten it
            would cost more than it saves.
        bucket_max_leaves: At most so many leaves are fused into one bucket; more cost compile time. Between
            CPU processes eight times as many, since each collective costs more there.
        bucket_max_bytes: At most so many bytes are fused into one bucket.
        shard_min_bytes: `shard_optimizer` keeps the state of a smaller bucket whole on every device.
        reshard_after_forward: For parameters that are sharded over a data axis. False: each is gathered once
            a step, and its gradient reduce-scattered after the last microbatch. True: for each microbatch it
            is gathered where it is used, dropped after the forward pass, gathered again for the backward
            pass, and its gradient reduce-scattered there: least memory, more bytes. On CPU XLA keeps what it
            should drop.
        wire_dtype: `"bfloat16"` halves the bytes of float32 gradients on the way: each device's gradient is
            rounded once where it leaves, summed in float32, and the sum rounded once, so that an element is
            off by at most 2**-7 times the sum of the devices' absolute values. The loss travels as it is.
        inner_axis: One of several data axes, the one inside a host, such as `"device"` of
            `("host", "device")`. Gradients are then reduce-scattered over it, summed over the others, and
            gathered over it again: a host sends each array once, not once a device.
        timeout_s: Seconds after which an incomplete host-side sync fails.
        stall_warning_s: Seconds after which a host-side sync that is still incomplete is reported.
        unused: What a sync does with a leaf that a device announced and did not hand over: `"error"` names
            it and fails the step for all, `"zero"` takes its gradient for zero.
        max_in_flight: How many launched programs may be un-awaited: default 8 on CPU, where more than 32
            abort the process, and no limit on accelerators.

    >>> SyncConfig(axis=("data", "replica"), reduce="sum").axes
    ('data', 'replica')
    """

    axis: str | tuple[str, ...] = "data"
    reduce: Literal["mean", "sum"] = "mean"
    reduce_dtype: str | None = None
    fuse_max_bytes: int = 80_000
    bucket_max_leaves: int = 32
    bucket_max_bytes: int = 1 << 20
    shard_min_bytes: int = 0
    reshard_after_forward: bool = False
    wire_dtype: Literal["bfloat16"] | None = None
    inner_axis: str | None = None
    timeout_s: float = 60.0
    stall_warning_s: float = 10.0
    unused: Literal["error", "zero"] = "error"
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.axis, list):  # as TOML has it
            object.__setattr__(self, "axis", tuple(self.axis))
        if self.reduce_dtype not in (None, "own"):  # one name for each dtype: "half" is "float16"
            object.__setattr__(self, "reduce_dtype", _dtype_name(self.reduce_dtype))
        if problems := list(_problems(self)):
            raise ConfigError(source="SyncConfig(...)", problems=tuple(problems))

    @property
    def axes(self) -> tuple[str, ...]:
        """The data axes, always as a tuple."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @classmethod
    def from_toml(cls, path: str | Path) -> SyncConfig:
        """The `[sync]` table of a TOML file, or the whole file if it has no such table.

        Raises:
            ConfigError: The file cannot be read, or a key is unknown or has a wrong value; names the
                file, the key and the nearest key that exists.
        """
        table = load_toml(path)
        return from_table(cls, table.get("sync", table), source=str(path))

    def to_toml(self) -> str:
        """The `[sync]` table that `from_toml` reads back as an equal config."""
        lines = [f"{field.name} = {_toml(value)}" for field, value in _set_fields(self)]
        return "\n".join(["[sync]", *lines, ""])


def load_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: The file is missing, unreadable or no TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            source=str(path),
            problems=(f"cannot be read: {reason}",),
            kind="file" if isinstance(error, OSError) else "toml",
            folder="" if Path(path).is_absolute() else str(Path.cwd()),
        ) from error


def from_table(cls: type[T], table: Mapping[str, Any], *, source: str) -> T:
    """An instance of the dataclass `cls` from one TOML table.

    Raises:
        ConfigError: `table` is no table, a key is unknown, or a value has another type than its field.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(source=source, problems=(f"wanted a table, got {table!r}",))
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    problems = [_unknown(key, names) for key in table if key not in names]
    problems += [
        f"{key} = {value!r}: wanted {_hint_text(hints[key])}"
        for key, value in table.items()
        if key in hints and not _fits(value, hints[key])
    ]
    problems += [
        f"{field.name} is missing"
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in table
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if problems:
        raise ConfigError(source=source, problems=tuple(problems))
    try:
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in table.items()})
    except ConfigError as error:
        raise ConfigError(source=source, problems=error.problems) from None


def _unknown(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return f"unknown key {key!r}: the nearest is {near[0]!r}"


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, typing.get_args(hint)[0]) for v in value)
    if origin is dict or hint is dict:
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _hint_text(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in typing.get_args(hint))
    options = [option for option in typing.get_args(hint) if option is not types.NoneType]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_hint_text(option) for option in options)
    if typing.get_origin(hint) is tuple:
        return f"a list of {_hint_text(options[0])}"
    is_table = hint is dict or typing.get_origin(hint) is dict
    return "a table" if is_table else str(getattr(hint, "__name__", hint))


def _dtype_name(dtype: Any) -> str:
    try:
        return str(jnp.dtype(dtype))
    except TypeError:
        return str(dtype)


def is_real_float(dtype_name: str) -> bool:
    """Whether `dtype_name` names a real floating dtype that JAX knows."""
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype_name), jnp.floating))
    except TypeError:
        return False


def _problems(config: SyncConfig) -> typing.Iterator[str]:
    hints = typing.get_type_hints(SyncConfig)
    wrong = [f for f in dataclasses.fields(config) if not _fits(getattr(config, f.name), hints[f.name])]
    for field in wrong:
        yield f"{field.name} = {getattr(config, field.name)!r}: wanted {_hint_text(hints[field.name])}"
    if wrong:
        return
    if not config.axes or len(set(config.axes)) != len(config.axes):
        yield f"axis = {config.axis!r}: wanted one or more different axis names"
    if config.inner_axis is not None and (config.inner_axis not in config.axes or len(config.axes) < 2):
        yield f"inner_axis = {config.inner_axis!r}: wanted one of several axes in axis = {config.axis!r}"
    if config.reduce_dtype not in (None, "own") and not is_real_float(str(config.reduce_dtype)):
        yield f"reduce_dtype = {config.reduce_dtype!r}: wanted 'own' or the name of a real float dtype"
    for name in ("fuse_max_bytes", "bucket_max_bytes"):
        if getattr(config, name) < 0:
            yield f"{name} = {getattr(config, name)}: wanted 0 or more"
    for name in ("bucket_max_leaves", "max_in_flight"):
        value = getattr(config, name)
        if value is not None and value < 1:
            yield f"{name} = {value}: wanted 1 or more"
    for name in ("timeout_s", "stall_warning_s"):
        if not getattr(config, name) > 0:  # also refuses nan
            yield f"{name} = {getattr(config, name)}: wanted more than 0 seconds"


def _set_fields(config: SyncConfig) -> typing.Iterator[tuple[dataclasses.Field[Any], Any]]:
    for field in dataclasses.fields(config):
        if (value := getattr(config, field.name)) is not None:  # TOML has no null: absent means default
            yield field, value


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value)  # what JSON escapes, TOML reads
    return repr(float(value) if isinstance(value, float) else value)
