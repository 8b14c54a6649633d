"""How a tree differs from the one that is wanted, leaf by leaf and in words: the lines of an error."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsync.params import canonical_dtype


def leaf_problems(
    value: Any, shape: tuple[int, ...], dtype: str | None, *, is_converted: bool = False
) -> list[str]:
    """What is wrong with `value` in place of an array of this shape and dtype: nothing, if it fits.

    Args:
        value: Anything; also an array that was deleted, or a `ShapeDtypeStruct`.
        shape: What is wanted.
        dtype: The name of what is wanted; None if any will do.
        is_converted: Whether `value` is going to be converted as JAX does it: without x64, NumPy's 64 bits
            count as 32.

    >>> import numpy as np
    >>> leaf_problems(np.zeros(3), (2,), "float32")
    ['has shape (3,); wanted (2,)', 'has dtype float64; wanted float32']
    >>> leaf_problems(np.zeros(2), (2,), "float32", is_converted=True), leaf_problems("text", (2,), None)
    ([], ['is a str, no array'])
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return [f"is a {type(value).__name__}, no array"]
    problems = []
    if tuple(value.shape) != shape:
        problems.append(f"has shape {tuple(value.shape)}; wanted {shape}")
    found = canonical_dtype(value) if is_converted else str(value.dtype)
    if dtype is not None and found != dtype:
        problems.append(f"has dtype {value.dtype}; wanted {dtype}")
    return problems


def path_problems(
    found: Collection[str], wanted: Collection[str], *, owner: str, optional: Collection[str] = ()
) -> dict[str, str]:
    """Path -> what is wrong with it: those that are missing, then those that should not be there.

    Args:
        found: The paths that there are.
        wanted: Those that must be there.
        owner: What has the wanted leaves: the plan, the state.
        optional: Those that may be there.

    >>> path_problems(["['v']"], ["['w']"], owner="the plan")
    {"['w']": 'is missing', "['v']": 'is not in the plan'}
    """
    there, known = set(found), {*wanted, *optional}
    missing = {path: "is missing" for path in wanted if path not in there}
    return missing | {path: f"is not in {owner}" for path in found if path not in known}


def tree_problems(name: str, found: Any, wanted: Any, *, owner: str, any_dtype: bool = False) -> list[str]:
    """What is wrong with a tree in place of another one, a line a leaf: nothing, if it fits.

    Args:
        name: What the tree is called.
        found: The tree. It is going to be converted as JAX does it: a Python number may stand for a scalar.
        wanted: A tree of arrays, or of `ShapeDtypeStruct`s.
        owner: What has the wanted leaves.
        any_dtype: Whether leaves may be of other dtypes.

    >>> import numpy as np
    >>> wanted = {"w": np.zeros(3, np.float32), "b": np.float32(0)}
    >>> tree_problems("params", {"w": np.ones(2), "b": 1.0}, wanted, owner="the state")
    ["params['w'] has shape (2,); wanted (3,)"]
    """
    there, leaves = (
        {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (found, wanted)
    )
    wrong = path_problems(there, leaves, owner=owner)
    problems = [f"{name}{path} {problem}" for path, problem in wrong.items()]
    return problems + [
        f"{name}{path} {problem}"
        for path, x in leaves.items()
        if path in there
        for problem in leaf_problems(
            _form(there[path]), tuple(x.shape), None if any_dtype else str(x.dtype), is_converted=True
        )
    ]


def _form(x: Any) -> Any:
    is_number = isinstance(x, bool | int | float | complex)
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) if is_number else x
