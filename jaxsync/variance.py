"""Over which mesh axes each value of a compiled program may vary: a walk along its HLO.

A parameter varies over the axes it is sharded over; an all-reduce or all-gather takes its axes away; all
else varies over what its operands vary over. So a value is known to be equal over an axis, or may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxsync.hlo import Instruction, Module, group_axes
from jaxsync.params import spec_axes

# What each device computes for itself, or is given from outside.
_OWN = frozenset({"partition-id", "replica-id", "rng", "infeed", "recv", "recv-done", "outfeed"})
_SAME = frozenset({"copy", "optimization-barrier", "domain"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What is known of one array.

    Attributes:
        varies: The axes over which it may differ.
        summed: The axes over which a part of what it was computed from was summed.
        is_given: Whether it depends on a parameter of the program, and is no constant.
    """

    varies: frozenset[str]
    summed: frozenset[str] = frozenset()
    is_given: bool = False


Tree: TypeAlias = "Value | tuple[Tree, ...]"
_CONSTANT = Value(varies=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A collective that adds: its instruction, its axes, and what is known of each operand."""

    instruction: Instruction
    axes: frozenset[str]
    operands: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What is known of a program: its reductions in the order they are met, and its results."""

    reductions: tuple[Reduction, ...]
    results: tuple[Value, ...]


def analyse(module: Module, mesh: Mesh, parameters: Sequence[frozenset[str]]) -> Flow:
    """What is known of the values of a module.

    Args:
        module: The module.
        mesh: The mesh its devices are numbered by.
        parameters: For each parameter of the program the axes it varies over.
    """
    walk = _Walk(module, mesh)
    given: tuple[Tree, ...] = tuple(Value(varies=axes, is_given=True) for axes in parameters)
    results = walk.run(module.entry, given)
    return Flow(reductions=tuple(walk.reductions.values()), results=tuple(_leaves(results)))


def sharding_axes(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> frozenset[str]:
    """The mesh axes along which an array of this sharding and global shape holds different parts.

    All of them, if its devices are not those of the mesh.

    >>> import jaxsync
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jaxsync.make_mesh({"data": 4, "model": 2})
    >>> sorted(sharding_axes(NamedSharding(mesh, PartitionSpec(None, "model")), (3, 2), mesh))
    ['model']
    """
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return frozenset(axis for axis in spec_axes(sharding.spec) if mesh.shape[axis] > 1)
    parts = {device: str(index) for device, index in sharding.devices_indices_map(tuple(shape)).items()}
    if not set(mesh.devices.flat) <= set(parts):
        return frozenset(mesh.axis_names)
    held = np.vectorize(parts.__getitem__, otypes=[object])(mesh.devices)
    return frozenset(
        axis for dim, axis in enumerate(mesh.axis_names) if (held != np.take(held, [0], axis=dim)).any()
    )


class _Walk:
    def __init__(self, module: Module, mesh: Mesh) -> None:
        self._module, self._mesh = module, mesh
        self._all = frozenset(mesh.axis_names)
        self._known: dict[tuple[str, tuple[Tree, ...]], Tree] = {}  # a computation may be called often
        self.reductions: dict[tuple[str, str], Reduction] = {}

    def run(self, name: str, arguments: tuple[Tree, ...]) -> Tree:
        """What a computation returns for these arguments."""
        if (name, arguments) not in self._known:
            values: dict[str, Tree] = {}
            for instruction in self._module.computations.get(name, ()):
                operands = tuple(values.get(operand, _CONSTANT) for operand in instruction.operands)
                values[instruction.name] = self._value(name, instruction, operands, arguments)
            root = self._module.roots.get(name, "")
            self._known[name, arguments] = values.get(root, self._unknown(arguments))
        return self._known[name, arguments]

    def _value(
        self, name: str, instruction: Instruction, operands: tuple[Tree, ...], arguments: tuple[Tree, ...]
    ) -> Tree:
        opcode = instruction.opcode
        if opcode.endswith("-done") or opcode in _SAME:
            return operands[0] if operands else self._unknown(())
        match opcode.removesuffix("-start"):
            case "parameter":
                number = int(instruction.operands[0])
                return arguments[number] if number < len(arguments) else self._unknown(arguments)
            case "tuple":
                return operands
            case "get-tuple-element":
                return _part(operands[0], instruction)
            case "fusion" | "call" | "async":
                return self.run(
                    (instruction.calls("calls") or instruction.calls("to_apply") or ("",))[0], operands
                )
            case "while":
                return self._loop(instruction, operands[0])
            case "conditional":
                return self._branches(instruction, operands)
            case "all-reduce" | "reduce-scatter" | "all-gather" | "collective-broadcast":
                return self._collective(name, instruction, operands)
            case "all-to-all" | "ragged-all-to-all" | "collective-permute":
                return self._spread(operands, self._axes(instruction) or self._all)
        if opcode in _OWN or (opcode == "custom-call" and "callback" in instruction.line):
            return self._unknown(operands)
        return _merge(operands)

    def _axes(self, instruction: Instruction) -> frozenset[str] | None:
        axes = group_axes(instruction.line, self._mesh)
        return None if axes is None else frozenset(axes)

    def _unknown(self, operands: Sequence[Tree]) -> Value:
        return self._spread(operands, self._all)

    def _spread(self, operands: Sequence[Tree], axes: frozenset[str]) -> Value:
        value = _merge(operands)
        return Value(varies=value.varies | axes, summed=value.summed, is_given=value.is_given)

    def _collective(self, name: str, instruction: Instruction, operands: tuple[Tree, ...]) -> Tree:
        axes = self._axes(instruction)
        if axes is None:
            return self._unknown(operands)
        kind = instruction.opcode.removesuffix("-start")
        is_sum = kind in ("all-reduce", "reduce-scatter") and self._adds(instruction)
        if is_sum:
            self._note(name, instruction, axes, [_merge([operand]) for operand in operands])
        parts = [_reduced(_merge([part]), axes, is_sum, kind == "reduce-scatter") for part in operands]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _adds(self, instruction: Instruction) -> bool:
        [name] = instruction.calls("to_apply") or ("",)
        root = self._module.roots.get(name)
        body = self._module.computations.get(name, ())
        return any(each.name == root and each.opcode == "add" for each in body)

    def _note(
        self, name: str, instruction: Instruction, axes: frozenset[str], operands: Sequence[Value]
    ) -> None:
        # A loop's body is walked until nothing changes: what counts is all that an operand may be.
        key = name, instruction.name
        if (before := self.reductions.get(key)) is not None:
            operands = [_merge(pair) for pair in zip(before.operands, operands, strict=True)]
        self.reductions[key] = Reduction(instruction=instruction, axes=axes, operands=tuple(operands))

    def _loop(self, instruction: Instruction, state: Tree) -> Tree:
        [body], [condition] = instruction.calls("body"), instruction.calls("condition")
        while True:
            goes_on = _merge([self.run(condition, (state,))])
            after = _join(state, self.run(body, (state,)))
            if goes_on.varies:  # devices that leave at different times hold different values
                after = _join(after, Value(varies=goes_on.varies), spread=True)
            if after == state:
                return state
            state = after

    def _branches(self, instruction: Instruction, operands: tuple[Tree, ...]) -> Tree:
        names = [name for role, name in instruction.called if role.endswith(("computation", "computations"))]
        chosen = _merge([operands[0]])
        results = [self.run(name, (operand,)) for name, operand in zip(names, operands[1:], strict=False)]
        if not results:
            return self._unknown(operands)
        joined = results[0]
        for result in results[1:]:
            joined = _join(joined, result)
        return _join(joined, Value(varies=chosen.varies), spread=True)


def _reduced(value: Value, axes: frozenset[str], is_sum: bool, is_scattered: bool) -> Value:
    return Value(
        varies=value.varies | axes if is_scattered else value.varies - axes,
        summed=value.summed | axes if is_sum else value.summed,
        is_given=value.is_given,
    )


def _part(value: Tree, instruction: Instruction) -> Tree:
    if isinstance(value, Value):
        return value
    _, _, rest = instruction.line.partition(", index=")
    digits = rest.split(",")[0].split(" ")[0]
    index = int(digits) if digits.isdigit() else len(value)
    return value[index] if index < len(value) else _merge(value)


def _leaves(value: Tree) -> list[Value]:
    return [value] if isinstance(value, Value) else [leaf for part in value for leaf in _leaves(part)]


def _merge(values: Sequence[Tree]) -> Value:
    """One value for what is computed from all of them."""
    leaves = [leaf for value in values for leaf in _leaves(value)]
    return Value(
        varies=frozenset().union(*(leaf.varies for leaf in leaves)),
        summed=frozenset().union(*(leaf.summed for leaf in leaves)),
        is_given=any(leaf.is_given for leaf in leaves),
    )


def _join(first: Tree, second: Tree, *, spread: bool = False) -> Tree:
    """What is either; with `spread`, each part of the first joined with the second."""
    if isinstance(first, tuple) and spread:
        return tuple(_join(part, second, spread=True) for part in first)
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(_join(one, other) for one, other in zip(first, second, strict=True))
    return _merge([first, second])
