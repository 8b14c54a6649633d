"""What is in a checkpoint: the arrays of the user's trees, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxsync.mesh import axis_sizes
from jaxsync.plan import SyncPlan
from jaxsync.versions import __version__

PARTS = ("params", "opt_state")
INFO = "jaxsync"  # the item beside the parts
_FORMAT = 1  # of what is in a checkpoint; a reader refuses what it does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says of itself. Read without reading an array.

    Attributes:
        number: The step its state had reached.
        fingerprint: That of the plan it was saved with.
        mesh: Axis -> size of the mesh it was saved on.
        jaxsync_version: What wrote it.
        jax_version: What it was written with.
        leaves: Path, dtype and shape of each leaf, in tree order: parameters, then the optimizer's state.
    """

    number: int
    fingerprint: str
    mesh: dict[str, int]
    jaxsync_version: str
    jax_version: str
    leaves: tuple[tuple[str, str, tuple[int, ...]], ...]


def stored_arrays(tree: Any) -> dict[str, Any]:
    """The arrays to write, by their place in tree order. Orbax has no arrays without elements."""
    return {str(i): x for i, x in enumerate(jax.tree.leaves(tree)) if x.size}


def leaf_table(part: str, tree: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """Path, dtype and shape of each leaf of a part, in tree order."""
    return [
        (part + jax.tree_util.keystr(path), str(x.dtype), tuple(x.shape))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def make_info(number: int, plan: SyncPlan, trees: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of these parts says of itself, as JSON has it."""
    return {
        "format": _FORMAT,
        "number": number,
        "fingerprint": plan.fingerprint,
        "mesh": axis_sizes(plan.mesh),
        "jaxsync_version": __version__,
        "jax_version": jax.__version__,
        "leaves": [leaf for part, tree in trees.items() for leaf in leaf_table(part, tree)],
    }


def parse_info(written: Mapping[str, Any]) -> CheckpointInfo:
    """What `make_info` made, read back.

    Raises:
        ValueError: It is of a format that this version does not know.
        KeyError, TypeError: It is not whole.
    """
    facts = dict(written)
    if (found := facts.pop("format")) != _FORMAT:
        raise ValueError(f"its format is {found}, and this version of jaxsync reads {_FORMAT}")
    leaves = tuple((path, dtype, tuple(shape)) for path, dtype, shape in facts.pop("leaves"))
    return CheckpointInfo(leaves=leaves, **facts)


def leaf_differences(info: CheckpointInfo, trees: Mapping[str, Any]) -> list[str]:
    """One line for each leaf in which a checkpoint is not like these parts."""
    wanted = {path: (dtype, shape) for part in PARTS for path, dtype, shape in leaf_table(part, trees[part])}
    found = {path: (dtype, shape) for path, dtype, shape in info.leaves}
    lines = [f"{path} is not in the checkpoint" for path in wanted if path not in found]
    lines += [f"{path} is in the checkpoint only" for path in found if path not in wanted]
    lines += [
        f"{path} is {_format(leaf)}; the checkpoint has {_format(found[path])}"
        for path, leaf in wanted.items()
        if found.get(path, leaf) != leaf
    ]
    return lines


def _format(leaf: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = leaf
    return f"{dtype}{list(shape)}"


def stored_places(info: CheckpointInfo, part: str) -> dict[str, str]:
    """Path -> the name that an array of this part is stored under."""
    # Neither part's name begins with the other's, and a path goes on with a bracket or a dot, if it does.
    paths = [path for path, _, _ in info.leaves if path.startswith(part)]
    return {path: str(i) for i, path in enumerate(paths)}
