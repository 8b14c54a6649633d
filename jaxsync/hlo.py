"""The text of an HLO module as computations of instructions, and the groups of devices in it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"(to_apply|calls|body|condition|true_computation|false_computation|branch_computations)"
    r"=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Its name, which is its own in its computation.
        opcode: What it does, such as `"all-reduce"`.
        type: The type of its result, as HLO writes it.
        operands: The names of the instructions it uses; for `parameter` and `constant` their text.
        called: The computations it calls: (as what, name), such as `("body", "region_0.2")`.
        line: All of it.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    called: tuple[tuple[str, str], ...]
    line: str

    def calls(self, role: str) -> tuple[str, ...]:
        """The computations it calls as `role`, in order."""
        return tuple(name for called_as, name in self.called if called_as == role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module.

    Attributes:
        computations: Name -> instructions, in program order.
        roots: Name -> the name of the instruction whose value the computation returns.
        entry: The name of the computation that the program is; empty if the text has none.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    roots: Mapping[str, str]
    entry: str

    def looped(self) -> set[str]:
        """The computations that run inside a loop."""
        queue = [
            name
            for body in self.computations.values()
            for instruction in body
            if instruction.opcode == "while"
            for _, name in instruction.called
        ]
        found: set[str] = set()
        while queue:
            name = queue.pop()
            if name not in found:
                found.add(name)
                body = self.computations.get(name, ())
                queue += [called for instruction in body for _, called in instruction.called]
        return found


def parse_module(text: str) -> Module:
    r"""The module in a text such as `compiled.as_text()`.

    >>> module = parse_module("ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}")
    >>> module.entry, module.computations["main"][0].opcode, module.roots
    ('main', 'parameter', {'main': 'p'})
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    roots: dict[str, str] = {}
    name, entry, body = "", "", list[Instruction]()
    for raw in text.splitlines():
        line = raw.strip()
        is_top = not raw.startswith(" ")
        if is_top and (match := _COMPUTATION.match(line)):
            name, body = match[2], []
            entry = name if match[1] else entry
        elif is_top and line == "}":
            computations[name] = tuple(body)
        elif match := _INSTRUCTION.match(line):
            body.append(_parse_instruction(line, match))
            if match[1]:
                roots[name] = match[2]
    return Module(computations=computations, roots=roots, entry=entry)


def _parse_instruction(line: str, match: re.Match[str]) -> Instruction:
    end = _closing(line, match.end() - 1)
    called = [
        (role, name.strip().lstrip("%"))
        for role, several, one in _CALLED.findall(line, end)
        for name in (several or one).split(",")
    ]
    return Instruction(
        name=match[2],
        opcode=match[4],
        type=match[3],
        operands=_operands(line[match.end() : end]),
        called=tuple(called),
        line=line,
    )


def _closing(line: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(line)):
        depth += (line[place] == "(") - (line[place] == ")")
        if not depth:
            return place
    return len(line)


def _operands(text: str) -> tuple[str, ...]:
    """`%a, f32[2]{0} %b` -> names. Commas also stand in types, so a name is what ends a part."""
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+)", text))
    parts = [part.strip() for part in text.split(",")]
    names = [match[1] for part in parts if (match := _NAME.search(part))]
    return tuple(names) if names else tuple(part for part in parts if part)


def printed_axes(line: str, mesh: Mesh | None) -> tuple[str, ...] | None:
    """Newer XLA prints the groups as `mesh['data'=4,'model'=2] {'data'}`; it makes up names it lacks."""
    match = re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", line)
    axes = tuple(re.findall(r"'([^']+)'", match[1])) if match else None
    is_known = axes is not None and (mesh is None or set(axes) <= set(mesh.axis_names))
    return axes if is_known else None


def device_groups(line: str) -> list[list[int]] | None:
    """The groups of devices: `{{0,1},{2,3}}`, or `[2,2]<=[2,2]T(1,0)`: an iota, transposed, reshaped."""
    if match := re.search(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", line):
        return [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        dims = [int(dim) for dim in match[3].split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if match[4]:
            ids = ids.transpose([int(i) for i in match[4].split(",")])
        groups: list[list[int]] = ids.reshape(int(match[1]), int(match[2])).tolist()
        return groups
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        chosen = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", match[2])]
        return _groups_along(np.arange(math.prod(sizes.values())).reshape(list(sizes.values())), chosen)
    return None


def group_axes(line: str, mesh: Mesh | None) -> tuple[str, ...] | None:
    """The mesh axes along which each group of a collective runs; None if they fit no axes.

    HLO numbers devices by their place in the mesh.
    """
    printed = printed_axes(line, mesh)
    groups = device_groups(line)
    if printed is not None or groups is None or mesh is None:
        return printed
    wanted = {frozenset(group) for group in groups}
    ids = np.arange(mesh.size).reshape(mesh.devices.shape)
    sized = [axis for axis, size in mesh.shape.items() if size > 1]
    for count in range(len(sized) + 1):
        for axes in itertools.combinations(sized, count):
            dims = [mesh.axis_names.index(axis) for axis in axes]
            if {frozenset(group) for group in _groups_along(ids, dims)} == wanted:
                return axes
    return None


def _groups_along(ids: npt.NDArray[np.int_], dims: list[int]) -> list[list[int]]:
    """The devices of a grid in groups that run along some of its dims."""
    rest = [dim for dim in range(ids.ndim) if dim not in dims]
    size = math.prod(ids.shape[dim] for dim in dims)
    groups: list[list[int]] = ids.transpose(*rest, *dims).reshape(-1, size).tolist()
    return groups
