"""The words for leaves that are not what was wanted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsync.mismatch import leaf_problems, path_problems, tree_problems


@pytest.mark.parametrize(
    ("value", "problems"),
    [
        (np.zeros((2, 3), np.float32), []),
        (jax.ShapeDtypeStruct((2, 3), jnp.float32), []),
        (np.zeros((3, 2), np.float32), ["has shape (3, 2); wanted (2, 3)"]),
        (jnp.zeros((2, 3), jnp.bfloat16), ["has dtype bfloat16; wanted float32"]),
        (np.zeros((2, 3), np.float64), ["has dtype float64; wanted float32"]),
        (np.int8(1), ["has shape (); wanted (2, 3)", "has dtype int8; wanted float32"]),
        (1.5, ["is a float, no array"]),
        (None, ["is a NoneType, no array"]),
    ],
)
def test_a_leaf_that_does_not_fit_is_described_in_all_respects(value: Any, problems: list[str]) -> None:
    assert leaf_problems(value, (2, 3), "float32") == problems


def test_64_bits_fit_where_jax_converts_them() -> None:
    assert leaf_problems(np.zeros(2), (2,), "float32", is_converted=True) == []
    assert leaf_problems(np.zeros(2, np.int64), (2,), "float32", is_converted=True) == [
        "has dtype int64; wanted float32"
    ]


def test_any_dtype_will_do_if_none_is_wanted() -> None:
    assert leaf_problems(np.zeros(2, np.int8), (2,), None) == []
    assert leaf_problems(np.zeros(3, np.int8), (2,), None) == ["has shape (3,); wanted (2,)"]


def test_keys_are_told_apart_by_their_dtype() -> None:
    key = jax.random.key(0)
    assert leaf_problems(key, (), "key<fry>", is_converted=True) == []
    assert leaf_problems(key, (), "uint32") == ["has dtype key<fry>; wanted uint32"]


def test_what_was_deleted_is_described_all_the_same() -> None:
    x = jnp.zeros(3)
    x.delete()
    assert leaf_problems(x, (2,), "float32") == ["has shape (3,); wanted (2,)"]


def test_missing_paths_come_first_each_side_in_its_order() -> None:
    found = path_problems(["c", "x", "y"], ["b", "a", "c"], owner="the state", optional=["y", "z"])
    assert list(found.items()) == [("b", "is missing"), ("a", "is missing"), ("x", "is not in the state")]
    assert path_problems({"a": 1}, {"a": 2}, owner="the plan") == {}


def test_a_tree_is_compared_leaf_by_leaf_missing_ones_first() -> None:
    wanted = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.int32), "c": jnp.zeros(()), "d": None}
    found = {"a": np.zeros((1, 2), np.int8), "b": "text", "x": np.zeros(2), "d": None}
    assert tree_problems("state", found, wanted, owner="the plan") == [
        "state['c'] is missing",
        "state['x'] is not in the plan",
        "state['a'] has shape (1, 2); wanted (2,)",
        "state['a'] has dtype int8; wanted float32",
        "state['b'] is a str, no array",
    ]
    assert tree_problems("state", wanted, wanted, owner="the plan") == []


@pytest.mark.parametrize(("x", "dtype"), [(True, "bool"), (1, "int32"), (0.5, "float32"), (1j, "complex64")])
def test_a_number_fits_a_scalar_of_the_dtype_that_jax_gives_it(x: Any, dtype: str) -> None:
    assert tree_problems("x", x, jax.ShapeDtypeStruct((), dtype), owner="the state") == []
    other = jax.ShapeDtypeStruct((), "int8")
    assert tree_problems("x", x, other, owner="the state") == [f"x has dtype {dtype}; wanted int8"]
    assert tree_problems("x", x, other, owner="the state", any_dtype=True) == []
