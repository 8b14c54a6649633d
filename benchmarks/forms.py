"""One training step in each of the forms that are compared: the same loss, the same donated SGD update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import LEARNING_RATE, Model, Shapes, Values

import jaxsync

FLOOR = "no sync"
TREE = "shard_map, pmean(tree)"
PEERS = ("pmap, pmean per leaf", "jit, sharded batch", "shard_map, autodiff's psum", TREE)
OURS = "jaxsync"
OWN_STEP = "jaxsync in an own shard_map"
ZERO, FSDP = "jaxsync, ZeRO-1", "jaxsync, FSDP"
SHARDED = (ZERO, FSDP)  # the same step as OURS, with less on each device
NAMES = (FLOOR, *PEERS, OURS, OWN_STEP, *SHARDED)

AXIS = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to write the step.

    Attributes:
        name: One of `NAMES`.
        step: `step(state, batch)` -> the next state and something of the loss; it donates the state, and has
            `lower` as `jax.jit` gives it.
        start: Parameters on the host -> the first state.
        batch: The batch, placed where the step wants it.
        params: State -> its tree of parameters.
        is_stacked: Whether parameters have a leading dim of devices.
    """

    name: str
    step: Any
    start: Callable[[Values], Any]
    batch: Any = field(repr=False)
    params: Callable[[Any], Any] = lambda state: state
    is_stacked: bool = False

    def held(self, param: jax.Array) -> list[tuple[Any, np.ndarray[Any, Any]]]:
        """What devices have of a parameter, in float32, each with its place in the whole.

        Every part of one that is sharded; else the copies of the first device and of the last.
        """
        shards = param.addressable_shards
        if self.is_stacked or param.is_fully_replicated:
            shards = [shards[0], shards[-1]]
        values = [np.asarray(shard.data).astype(np.float32) for shard in shards]
        if self.is_stacked:
            return [(..., value[0]) for value in values]
        return [(shard.index, value) for shard, value in zip(shards, values, strict=True)]


def make_form(name: str, model: Model, mesh: Mesh, dtype: str) -> Form:
    """The form `name`, newly made, so that nothing of it is traced yet."""
    batch = model.batch(dtype, mesh.size)
    if name == "pmap, pmean per leaf":
        return _pmap(model, mesh, batch)
    rows, everywhere = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
    if name in (OURS, *SHARDED):
        return _train_step(name, model, mesh, batch)
    if name == "jit, sharded batch":
        step = jax.jit(
            lambda params, batch: _sgd(params, *jax.value_and_grad(model.loss)(params, batch)),
            donate_argnums=0,
            out_shardings=everywhere,
        )
    else:
        step = jax.jit(
            jax.shard_map(
                _body(name, model, mesh, dtype),
                mesh=mesh,
                in_specs=(P(), P(AXIS)),
                out_specs=P(),
                check_vma=name == "shard_map, autodiff's psum",
            ),
            donate_argnums=0,
        )
    return Form(
        name=name,
        step=step,
        start=lambda params: jax.device_put(params, everywhere),
        batch=jax.device_put(batch, rows),
    )


def _sgd(params: Any, loss: jax.Array, grads: Any) -> tuple[Any, jax.Array]:
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), loss


def _body(name: str, model: Model, mesh: Mesh, dtype: str) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """What one device does under `shard_map`."""
    plan = jaxsync.make_plan(abstract_params(model, dtype), mesh)

    def body(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        match name:
            case "shard_map, autodiff's psum":
                loss, grads = lax.pmean(loss, AXIS), jax.tree.map(lambda g: g / mesh.size, grads)
            case "shard_map, pmean(tree)":
                loss, grads = lax.pmean((loss, grads), AXIS)
            case "jaxsync in an own shard_map":
                loss, grads = lax.pmean(loss, AXIS), jaxsync.sync_gradients(grads, plan)
            case _:
                pass  # the floor: each device goes on with what it has
        return _sgd(params, loss, grads)

    return body


def abstract_params(model: Model, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The model's parameters without their values."""
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in model.shapes.items()}


def _pmap(model: Model, mesh: Mesh, batch: np.ndarray[Any, Any]) -> Form:
    num_devices, stacked = mesh.size, NamedSharding(mesh, P(AXIS))

    def body(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        return _sgd(params, lax.pmean(loss, AXIS), jax.tree.map(lambda g: lax.pmean(g, AXIS), grads))

    def start(params: Values) -> Any:
        copies = {name: np.broadcast_to(value, (num_devices, *value.shape)) for name, value in params.items()}
        return jax.device_put(copies, stacked)

    rows = batch.reshape(num_devices, -1, *batch.shape[1:])
    step = jax.pmap(body, axis_name=AXIS, donate_argnums=0, devices=list(mesh.devices.flat))
    placed = jax.device_put(rows, stacked)
    return Form(name=PEERS[0], step=step, start=start, batch=placed, is_stacked=True)


def _train_step(name: str, model: Model, mesh: Mesh, batch: np.ndarray[Any, Any]) -> Form:
    specs = data_specs(model.shapes, mesh.size) if name == FSDP else None
    plan = jaxsync.make_plan(abstract_params(model, str(batch.dtype)), mesh, specs)
    tx = optax.sgd(LEARNING_RATE)
    step = jaxsync.make_train_step(
        model.loss, jaxsync.shard_optimizer(tx, plan) if name == ZERO else tx, plan
    )
    placed = jax.device_put(batch, NamedSharding(mesh, plan.batch_spec))
    return Form(name=name, step=step, start=step.init, batch=placed, params=lambda state: state.params)


def data_specs(shapes: Shapes, devices: int) -> dict[str, P]:
    """Each leaf over the data axis along its first dim that divides; one that has none stays replicated.

    >>> specs = data_specs({"word": (30522, 768), "norm": (768,), "segment": (3,)}, 8)
    >>> specs == {"word": P(None, "data"), "norm": P("data"), "segment": P()}
    True
    """
    return {name: _data_spec(shape, devices) for name, shape in shapes.items()}


def _data_spec(shape: tuple[int, ...], devices: int) -> P:
    dim = next((dim for dim, size in enumerate(shape) if size % devices == 0), None)
    return P() if dim is None else P(*[None] * dim, AXIS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One step on a single device: of all rows, or of the first device's rows for the floor."""

    old: Values = field(repr=False)
    new: Values = field(repr=False)
    dtype: str

    def error(self, name: str, value: np.ndarray[Any, Any], where: Any = ...) -> float:
        """How far a new parameter, or its part at `where`, is off in units of what rounding allows.

        More than 1 is wrong. Allowed are a few units in the last place of the largest parameter, and a share
        of the largest update for the rounding inside of the gradients, which are summed in another order. An
        update that was multiplied with the number of devices, or not divided by it, is off by a whole update
        and more.
        """
        old, new = (np.asarray(tree[name]).astype(np.float32) for tree in (self.old, self.new))
        last_place = float(jax.numpy.finfo(self.dtype).eps) * float(np.max(np.abs(old)))
        share = 0.15 if self.dtype == "bfloat16" else 1e-3
        allowed = 4 * last_place + share * float(np.max(np.abs(new - old))) + 1e-30
        return float(np.max(np.abs(value - new[where]))) / allowed

    def check_sensitive(self) -> None:
        """Refuses a model whose updates drown in what rounding allows: the comparison would show nothing."""
        if max(self.error(name, np.asarray(x).astype(np.float32)) for name, x in self.old.items()) < 2:
            raise AssertionError("no update is large enough to be told from rounding")


def make_reference(params: Values, batch: np.ndarray[Any, Any], model: Model) -> Reference:
    """What a single device computes from `batch`."""
    step = jax.jit(lambda params, batch: _sgd(params, *jax.value_and_grad(model.loss)(params, batch)))
    new, _ = step(params, batch)
    new = {name: np.asarray(x) for name, x in new.items()}
    return Reference(old=params, new=new, dtype=str(batch.dtype))


def largest_error(form: Form, state: Any, reference: Reference, *, is_synced: bool) -> float:
    """The largest error over all parameters, on the first device and, if synced, on others: see `held`."""
    params = form.params(state)  # looked at once: a `TrainState` takes them out anew each time
    errors = [
        reference.error(name, value, where)
        for name in reference.old
        for where, value in form.held(params[name])[: None if is_synced else 1]
    ]
    return max(errors)


def is_donated(state: Any) -> bool:
    """Whether a step has taken over the buffers of `state`."""
    return all(x.is_deleted() for x in jax.tree.leaves(state))
