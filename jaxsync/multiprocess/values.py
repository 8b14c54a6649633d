"""One process's values for all: parameters that start alike, whatever each process made them of."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsync.host.launcher import process_launcher
from jaxsync.params import Leaf

_CHUNK = 4 << 20  # 32-bit words a program sends: few programs for a large model, little memory beside it
_AXIS = "process"


def host_value(x: Any, leaf: Leaf) -> Any:
    """The value of a parameter as NumPy, in the dtype of its leaf; of a key its data.

    What this process cannot see whole (an array that several processes share) or has no bits stays as it is.
    """
    if leaf.kind == "float0" or (isinstance(x, jax.Array) and not is_whole(x)):
        return x
    if leaf.kind == "key":
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x).astype(jnp.dtype(leaf.dtype), copy=False)


def restore(value: Any, like: Any) -> Any:
    """A value that `host_value` made, as what it was made of: keys again, where it was one."""
    is_key = isinstance(like, jax.Array) and jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    if not is_key or not isinstance(value, np.ndarray):
        return value
    return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))


def is_whole(x: jax.Array) -> bool:
    """Whether this process can see all of an array."""
    return bool(x.is_fully_addressable or x.is_fully_replicated)


def value_digest(value: Any) -> str:
    """What stands for a value: equal for equal bits."""
    if not isinstance(value, np.ndarray):
        return "shared already"
    return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).hexdigest()[:16]


def broadcast(values: Sequence[Any], mesh: Mesh) -> list[Any]:
    """The first process's values on every process of a mesh, bit for bit.

    Every process calls it with arrays of the same shapes and dtypes. What is not NumPy stays as it is.

    Collectives: one all-reduce for each 16 MiB, between one device of each process.

    Args:
        values: The arrays of this process.
        mesh: Whose processes take part.
    """
    arrays = [np.ascontiguousarray(value) for value in values if isinstance(value, np.ndarray)]
    sizes = [array.nbytes for array in arrays]
    words = np.zeros(-(-sum(sizes) // 4), np.uint32)
    into = words.view(np.uint8)
    for array, start in zip(arrays, _starts(sizes), strict=True):
        into[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    sent = np.concatenate([_send(chunk, mesh) for chunk in _chunks(words)]).view(np.uint8) if sizes else into
    received = iter(
        sent[start : start + size].view(array.dtype).reshape(array.shape)
        for array, size, start in zip(arrays, sizes, _starts(sizes), strict=True)
    )
    return [next(received) if isinstance(value, np.ndarray) else value for value in values]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _chunks(words: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [words[start : start + _CHUNK] for start in range(0, len(words), _CHUNK)]


def _send(words: np.ndarray[Any, Any], mesh: Mesh) -> np.ndarray[Any, Any]:
    """The first process's words. Words, since a sum of floats with zeros would lose the sign of zero."""
    leaders = _leaders(mesh)
    own = next(device for device in leaders.devices.flat if device.process_index == jax.process_index())
    is_source = own == leaders.devices.flat[0]
    piece = jax.device_put((words if is_source else np.zeros_like(words))[None], own)
    whole = jax.make_array_from_single_device_arrays(
        (leaders.size, len(words)), NamedSharding(leaders, PartitionSpec(_AXIS)), [piece]
    )
    program = _sum(leaders)
    result = process_launcher().launch(lambda: program(whole), 1, lambda out: (out,), caller=program)
    return np.asarray(result.addressable_data(0))


def _leaders(mesh: Mesh) -> Mesh:
    """One device of each process, as a mesh."""
    first: dict[int, jax.Device] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[process] for process in sorted(first)]), (_AXIS,))


@functools.lru_cache(maxsize=8)
def _sum(leaders: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(
        jax.shard_map(
            lambda words: jax.lax.psum(words[0], _AXIS),
            mesh=leaders,
            in_specs=PartitionSpec(_AXIS),
            out_specs=PartitionSpec(),
        )
    )
