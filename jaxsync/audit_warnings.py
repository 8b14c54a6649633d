"""What looks wrong with the collectives of a compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxsync.collectives import Collective
from jaxsync.report import format_bytes
from jaxsync.variance import Flow, Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditWarning:
    """Something that looks wrong.

    Attributes:
        kind: `"loop"`: a collective in a loop. `"double"`: a sum of values that were summed over the same
            axes before. `"equal"`: a sum of values that are equal on all devices. `"missing"`: rows sharded
            over an axis, and results that are to be equal along it but may differ.
        axes: The mesh axes in question; None if they are not known.
        what: What there is, in a sentence.
        fix: What may mend it.
    """

    kind: Literal["loop", "double", "equal", "missing"]
    axes: tuple[str, ...] | None
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. To fix it: {self.fix}."


def loop_warnings(collectives: Sequence[Collective]) -> tuple[AuditWarning, ...]:
    """One for each collective in a loop."""
    return tuple(
        AuditWarning(
            kind="loop",
            axes=each.axes,
            what=(
                f"{each.kind}{_over(each.axes)} of {format_bytes(each.num_bytes)} is inside a loop, and runs "
                f"each time around{_from(each.op_name)}"
            ),
            fix=(
                "add up inside the loop and reduce once after it: make_train_step(accumulate=...), or "
                "parameters that are varying inside the loop (jax.lax.pcast)"
            ),
        )
        for each in collectives
        if each.in_loop
    )


def sum_warnings(flow: Flow, synced: frozenset[str] = frozenset()) -> list[AuditWarning]:
    """One for each reduction that adds up values which are equal on the devices it runs over.

    Args:
        flow: What is known of the values.
        synced: Axes over which a plan reduces. Where gradients of others differ, one that is equal on all
            devices is of a leaf that no row has a part in, such as one with a penalty alone: no mistake.
    """
    operands = (value for reduction in flow.reductions for value in reduction.operands)
    carried = any(value.is_given and synced & value.varies for value in operands)
    found = [warning for each in flow.reductions if (warning := _sum_warning(each)) is not None]
    expected = [each for each in found if each.kind == "equal" and synced.issuperset(each.axes or ())]
    if carried:
        return [warning for warning in found if warning not in expected]
    return [replace(warning, fix=_USE_ROWS) if warning in expected else warning for warning in found]


_USE_ROWS = "see that loss_fn uses the rows of its batch: nothing that is synced here depends on them"


def _sum_warning(reduction: Reduction) -> AuditWarning | None:
    # A constant is equal everywhere as well; to sum it is how devices or rows are counted.
    equal = [(v, reduction.axes - v.varies) for v in reduction.operands if v.is_given]
    wrong = [(value, axes) for value, axes in equal if axes]
    if not wrong:
        return None
    axes = tuple(sorted(frozenset().union(*(axes for _, axes in wrong))))
    is_double = all(axes <= value.summed for value, axes in wrong)
    kind, over = reduction.instruction.opcode.removesuffix("-start"), tuple(sorted(reduction.axes))
    names, total = ", ".join(axes), len(reduction.operands)
    state = f"was summed over {names} before" if is_double else f"is equal along {names}"
    some = "" if total == 1 else f" ({len(wrong)} of its {total} operands)"
    return AuditWarning(
        kind="double" if is_double else "equal",
        axes=axes,
        what=(
            f"{kind}{_over(over)} adds up what {state}{some}: a sum is multiplied by the number of devices, "
            f"{'a mean is still the sum' if is_double else 'a mean changes nothing'}"
            f"{_from(_op_name(reduction.instruction.line))}"
        ),
        fix=(
            "reduce once, over the axes that carry the batch: jaxsync.value_and_grad(loss_fn, plan). Under "
            "shard_map(check_vma=True) jax.grad has summed the gradients of replicated parameters already"
        ),
    )


# What passes parts around may make values equal in ways that are not followed, such as a ring of permutes.
_PASSED = ("all-to-all", "ragged-all-to-all", "collective-permute")


def missing_warnings(
    flow: Flow,
    collectives: Sequence[Collective],
    inputs: Sequence[tuple[str, frozenset[str]]],
    outputs: Sequence[tuple[str, frozenset[str]]],
) -> list[AuditWarning]:
    """One for each axis that arguments are sharded over, and along which replicated results may differ.

    Args:
        flow: What is known of the values.
        collectives: Those of the program.
        inputs: For each argument its path, and the axes it is sharded over.
        outputs: For each result its path, and the axes it is sharded over.
    """
    if len(outputs) != len(flow.results) or any(each.axes is None for each in collectives):
        return []
    covered = {axis for each in collectives for axis in each.axes or ()}
    passed = {axis for each in collectives if each.kind in _PASSED for axis in each.axes or ()}
    unequal: dict[str, list[str]] = {}
    for (path, axes), value in zip(outputs, flow.results, strict=True):
        for axis in value.varies - axes - passed:
            unequal.setdefault(axis, []).append(path)
    found = []
    for axis, results in sorted(unequal.items()):
        names = [path for path, axes in inputs if axis in axes]
        if names:
            found.append(_missing_warning(axis, names, results if axis in covered else ()))
    return found


def _missing_warning(axis: str, names: Sequence[str], results: Sequence[str]) -> AuditWarning:
    what = (
        f"no collective runs over {axis!r}, over which arguments are sharded ({_shown(names)}); a result "
        "that is to be equal on all devices depends on them, and so is another one on each"
    )
    if results:  # others are reduced
        what = (
            f"no collective over {axis!r} lies between arguments that are sharded over it ({_shown(names)}) "
            f"and results that are to be equal along it ({_shown(results)}): they differ by device"
        )
    fix = "sync the gradients before they are used: jaxsync.value_and_grad(loss_fn, plan)"
    return AuditWarning(kind="missing", axes=(axis,), what=what, fix=fix)


def _shown(paths: Sequence[str]) -> str:
    named = [path or "the only one" for path in paths[:3]]
    return ", ".join(named) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _over(axes: tuple[str, ...] | None) -> str:
    return f" over {', '.join(axes)}" if axes else ""


def _op_name(line: str) -> str:
    return line.partition('op_name="')[2].partition('"')[0]


def _from(op_name: str) -> str:
    return f" ({op_name})" if op_name else ""
