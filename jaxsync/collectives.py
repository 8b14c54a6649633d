"""The collectives of a compiled program, read from its HLO."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxsync.hlo import Instruction, Module, device_groups, group_axes

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: One of `jaxsync.collectives.KINDS`, as HLO writes it: `"all-reduce"`, `"reduce-scatter"`, ...
        num_operands: How many arrays it moves at once.
        num_bytes: Bytes of its results on one device, each time it runs.
        dtypes: The dtypes of its results, as HLO writes them (`f32`, `bf16`).
        axes: The mesh axes it runs over, `()` if each device is alone; None if the groups fit no axes.
        group_size: Devices that take part in one group; None if it does not say.
        in_loop: Whether it is inside a loop, and so runs any number of times a call.
        op_name: Where it comes from, as JAX tells XLA.
    """

    kind: str
    num_operands: int
    num_bytes: int
    dtypes: tuple[str, ...]
    axes: tuple[str, ...] | None
    group_size: int | None
    in_loop: bool
    op_name: str


def read_collectives(module: Module, mesh: Mesh | None) -> tuple[Collective, ...]:
    """The collectives of a module; `mesh` gives names to the groups of devices."""
    looped = module.looped()
    return tuple(
        _collective(instruction, name in looped, mesh)
        for name, body in module.computations.items()
        for instruction in body
        if instruction.opcode.removesuffix("-start") in KINDS
    )


def _collective(instruction: Instruction, in_loop: bool, mesh: Mesh | None) -> Collective:
    kind, line = instruction.opcode.removesuffix("-start"), instruction.line
    arrays = _ARRAY.findall(instruction.type)
    if instruction.opcode != kind and kind != "all-reduce":
        arrays = [pair for pair in arrays if pair != ("u32", "")]  # contexts of the transport
        arrays = arrays[len(arrays) // 2 :]  # the asynchronous forms return (operands, results)
    op_name = re.search(r'op_name="([^"]*)"', line)
    groups = device_groups(line)
    return Collective(
        kind=kind,
        num_operands=len(arrays),
        num_bytes=sum(_num_bytes(dtype, dims) for dtype, dims in arrays),
        dtypes=tuple(dtype for dtype, _ in arrays),
        axes=group_axes(line, mesh),
        group_size=len(groups[0]) if groups else None,
        in_loop=in_loop,
        op_name=op_name[1] if op_name else "",
    )


def _num_bytes(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    size = _ITEM_BITS.get(dtype) or (int(bits[0]) if bits else 8)
    return math.prod(int(dim) for dim in dims.split(",") if dim) * size // 8
