"""What processes say of themselves, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Facts = Mapping[str, str]  # what -> its value, both as people read them
ALL_ELSE = "all else"  # stands for whatever a process does not name


def find_differences(said: Mapping[int, Facts]) -> tuple[str, ...]:
    """One line for each fact in which processes differ, in the order of the facts.

    Pure, and the same in every process that is given the same.

    Args:
        said: For each process its facts.

    >>> find_differences({0: {"step": "3"}, 1: {ALL_ELSE: "unknown"}})
    ('step: 3 in process 0; unknown in process 1',)
    >>> find_differences({0: {"jax": "0.10.2"}, 1: {"jax": "0.12.0"}, 2: {"jax": "0.10.2"}})
    ('jax: 0.10.2 in processes 0 and 2; 0.12.0 in process 1',)
    """
    longest = max(said.values(), key=len, default={})
    names = list(dict.fromkeys([*longest, *(name for facts in said.values() for name in facts)]))
    lines = []
    for name in names:
        if name == ALL_ELSE:
            continue
        sides: dict[str, list[int]] = {}
        for process in sorted(said):
            value = said[process].get(name, said[process].get(ALL_ELSE, "none"))
            sides.setdefault(value, []).append(process)
        if len(sides) > 1:
            values = "; ".join(f"{value} in {_name(processes)}" for value, processes in sides.items())
            lines.append(f"{name}: {values}")
    return tuple(lines)


def _name(processes: Sequence[int]) -> str:
    if len(processes) == 1:
        return f"process {processes[0]}"
    first, last = processes[0], processes[-1]
    if len(processes) > 3 and list(processes) == list(range(first, last + 1)):
        return f"processes {first} to {last}"
    return f"processes {', '.join(map(str, processes[:-1]))} and {last}"
