"""What is taken from single devices, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsync
from jaxsync.errors import RegistrationError, SubmissionError, UnknownNameError
from jaxsync.submission import Intake, shapes, with_paths

PARAMS = {
    "w": np.zeros((2, 3), np.float32),
    "sub": {"b": np.zeros(3, np.float32), "n": np.zeros(2, np.int32)},
}


@pytest.fixture
def intake() -> Intake:
    mesh = jaxsync.make_mesh({"data": 2})
    return Intake(jaxsync.make_plan(PARAMS, mesh), list(mesh.devices.flat))


def on(device: int, tree: Any = PARAMS) -> Any:
    return jax.device_put(tree, jax.devices()[device])


def test_a_whole_tree_is_taken_as_it_is_but_for_what_is_not_synced(intake) -> None:
    tree = on(1)
    found = intake.gradients(1, tree, None)
    assert list(found) == [0, 2]
    assert found[0] is tree["sub"]["b"]
    assert found[2] is tree["w"]


@pytest.mark.parametrize(
    ("name_or_tree", "grad", "leaves"),
    [
        ("['w']", lambda: on(0)["w"], [2]),
        ("['sub']", lambda: on(0)["sub"], [0]),
        ({"sub": {"b": np.ones(3, np.float32)}}, lambda: None, [0]),
        ("['sub']['n']", lambda: on(0)["sub"]["n"], []),
    ],
    ids=["leaf", "subtree", "part", "not synced"],
)
def test_a_part_of_the_tree_is_found_by_its_paths(intake, name_or_tree, grad, leaves) -> None:
    assert list(intake.gradients(0, name_or_tree, grad())) == leaves


def test_numpy_arrays_are_copied_to_the_device(intake) -> None:
    tree = {"w": np.ones((2, 3), np.float32), "sub": {"b": np.ones(3, np.float32), "n": None}}
    found = intake.gradients(1, tree, None)
    tree["w"][:] = 7
    assert all(value.devices() == {jax.devices()[1]} for value in found.values())
    np.testing.assert_array_equal(found[2], np.ones((2, 3)))


def deleted() -> Any:
    tree = on(1)
    tree["w"].delete()
    return tree


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (lambda: on(0), "grads['w'] lives on TFRT_CPU_0, not on TFRT_CPU_1"),
        (deleted, "grads['w'] was deleted or donated"),
        (lambda: on(1, {**PARAMS, "w": np.zeros((3, 2), np.float32)}), "has shape (3, 2); wanted (2, 3)"),
        (lambda: on(1, {**PARAMS, "w": jnp.zeros((2, 3), jnp.bfloat16)}), "dtype bfloat16; wanted float32"),
        (lambda: {**PARAMS, "w": 1.0}, "grads['w'] is a float, no array"),
        (dict, "grads holds no gradient"),
    ],
    ids=["elsewhere", "deleted", "shape", "dtype", "no array", "empty"],
)
def test_what_does_not_fit_is_named(intake, tree, problem: str) -> None:
    problem = problem.replace("TFRT_CPU_0", str(jax.devices()[0])).replace(
        "TFRT_CPU_1", str(jax.devices()[1])
    )
    with pytest.raises(SubmissionError, match=re.escape(problem)):
        intake.gradients(1, tree(), None)


@pytest.mark.parametrize(
    ("name", "grad"), [("['x']", np.zeros(3)), ("['x']", {}), ("['w']", {"y": np.zeros(3)})]
)
def test_an_unknown_path_is_named(intake, name: str, grad: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"no such leaf: \['(x|w)'\]"):
        intake.gradients(0, name, grad)


def test_an_announcement_is_a_mask_and_what_is_wrong_with_it(intake) -> None:
    assert intake.announced(PARAMS) == (0b101, [])
    mask, problems = intake.announced({"w": np.zeros(2, np.float32), "v": np.zeros(2)})
    assert mask == 0b100
    assert problems == ["['v'] is not registered", "['w'] has shape (2,); wanted (2, 3)"]


def test_shapes_hold_no_array_and_name_what_is_none() -> None:
    assert shapes({"w": np.zeros(2, np.float32)}) == {"w": jax.ShapeDtypeStruct((2,), np.float32)}
    with pytest.raises(RegistrationError, match=re.escape("['w']")):
        shapes({"w": "text"})


def test_paths_are_written_as_jax_does() -> None:
    assert with_paths({"a": [1, 2]}, "['x']") == [("['x']['a'][0]", 1), ("['x']['a'][1]", 2)]


def test_a_path_of_what_is_not_synced_takes_nothing(intake) -> None:
    assert intake.gradients(0, "['sub']['n']", on(0)["sub"]["n"]) == {}
    assert intake.gradients(0, "['sub']['n']", on(1)["sub"]["n"]) == {}
