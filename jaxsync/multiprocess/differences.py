"""What processes say of themselves, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Facts = Mapping[str, str]  # what -> its value, both as people read them
CALL = "call"  # what a process is about to do; those who do different things differ in all else, too
ALL_ELSE = "all else"  # stands for whatever a process does not name


def find_differences(said: Mapping[int, Facts]) -> tuple[str, ...]:
    """One line for each fact in which processes differ, in the order of the facts.

    What a process was not asked about is no difference; nor, between processes that call different things,
    what some of them do not name. But if there is nothing else: so that who differs is never told nothing.

    Pure, and the same in every process that is given the same.

    Args:
        said: For each process its facts.

    >>> find_differences({0: {"step": "3"}, 1: {ALL_ELSE: "unknown"}})
    ('step: 3 in process 0; unknown in process 1',)
    >>> find_differences({0: {CALL: "init", "jax": "0.10.2"}, 1: {CALL: "save", "path": "a"}})
    ('call: init in process 0; save in process 1',)
    >>> find_differences({0: {"jax": "0.10.2"}, 1: {"jax": "0.12.0"}, 2: {"jax": "0.10.2"}})
    ('jax: 0.10.2 in processes 0 and 2; 0.12.0 in process 1',)
    """
    longest = max(said.values(), key=len, default={})
    names = list(dict.fromkeys([*longest, *(name for facts in said.values() for name in facts)]))
    lines = {name: line for name in names if name != ALL_ELSE and (line := _difference(name, said))}
    is_open = CALL in lines or any(ALL_ELSE in facts for facts in said.values())
    known = [line for name, line in lines.items() if all(name in facts for facts in said.values())]
    return tuple(known if is_open and known else lines.values())


def _difference(name: str, said: Mapping[int, Facts]) -> str:
    """Who says what; empty if all say the same."""
    sides: dict[str, list[int]] = {}
    for process in sorted(said):
        value = said[process].get(name, said[process].get(ALL_ELSE, "none"))
        sides.setdefault(value, []).append(process)
    if len(sides) < 2:
        return ""
    return f"{name}: " + "; ".join(
        f"{value} in {name_processes(processes)}" for value, processes in sides.items()
    )


def name_processes(processes: Sequence[int]) -> str:
    """Such as `process 3`, `processes 1 and 6` or `processes 0 to 7`.

    Args:
        processes: In order.

    >>> name_processes([3]), name_processes([1, 6])
    ('process 3', 'processes 1 and 6')
    """
    if len(processes) == 1:
        return f"process {processes[0]}"
    first, last = processes[0], processes[-1]
    if len(processes) > 3 and list(processes) == list(range(first, last + 1)):
        return f"processes {first} to {last}"
    return f"processes {', '.join(map(str, processes[:-1]))} and {last}"
