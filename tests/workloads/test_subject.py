"""Subject: what `jaxsync tune` measures, from a job or from a function of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jaxsync import SyncConfig, make_plan
from jaxsync.errors import ConfigError
from jaxsync.reference import importing_from
from jaxsync.workloads.subject import GradientDescent, Subject, load_subject

pytestmark = pytest.mark.usefixtures("standard_promotion")

CONFIGS = Path(__file__).parents[2] / "configs"

# One module for each kind of function, so that no test finds another's in sys.modules.
MODULE = """
import jax.numpy as jnp, numpy as np, optax

def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)

def made():
    return loss_fn, {"w": np.ones(3, np.float32)}, np.ones((8, 3), np.float32)

def make():
    return made()

def make_with_optimizer():
    return [*made(), optax.adam(0.1)]

def make_two():
    return made()[:2]

def make_dict():
    return {"loss_fn": loss_fn}

def make_sized(width, depth, *, bias=True):
    return made()

def make_optional(width=3, *args, **kwargs):
    return made()

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tune_own_model.py").write_text(MODULE)
    (tmp_path / "tune_broken_model.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def write(folder: Path, reference: str = "tune_own_model:make", more: str = "") -> Path:
    file = folder / "tune.toml"
    file.write_text(f'{more}\n[tune]\nmodule = "{reference}"\n[mesh]\ndata = 4\n')
    return file


def load(file: Path, *overrides: str) -> Subject:
    sys.modules.pop("tune_own_model", None)  # that of another test, in another folder
    with importing_from(file.parent):
        return load_subject(file, overrides)


def problem_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, *overrides)
    [problem] = caught.value.problems
    return problem


def test_a_job_gives_its_loss_parameters_batch_and_optimizer() -> None:
    subject = load_subject(
        CONFIGS / "digits.toml",
        ["train.accumulate=2", "train.transform=pmap", "sync.fuse_max_bytes=0", "model.hidden=[]"],
    )
    assert (subject.accumulate, subject.transform, subject.mesh.shape) == (2, "pmap", {"data": 8})
    assert subject.sync == SyncConfig(fuse_max_bytes=0)
    assert jax.tree.map(np.shape, subject.params) == [{"kernel": (64, 10), "bias": (10,)}]
    assert jax.tree.map(np.shape, subject.batch) == {"image": (64, 64), "label": (64,)}
    # Its first step is the first of the training.
    step = subject.make_step(make_plan(subject.params, subject.mesh, config=subject.sync))
    _, metrics = step(step.init(subject.params), subject.batch)
    np.testing.assert_allclose(metrics["loss"], subject.loss_fn(subject.params, subject.batch), rtol=1e-5)


def test_a_function_of_the_users_own_gives_the_same(folder: Path) -> None:
    subject = load(write(folder), "sync.axis=data", "tune.accumulate=2")
    assert (subject.accumulate, subject.transform, subject.mesh.shape) == (2, "shard_map", {"data": 4})
    assert (subject.has_aux, subject.weighted) == (False, False)
    assert isinstance(subject.tx, GradientDescent)
    step = subject.make_step(make_plan(subject.params, subject.mesh))
    state, metrics = step(step.init(subject.params), subject.batch)
    assert float(metrics["loss"]) == 9
    np.testing.assert_allclose(state.params["w"], 1 - 1e-3 * 6, rtol=1e-6)


def test_a_function_may_give_an_optimizer_and_have_optional_arguments(folder: Path) -> None:
    assert isinstance(
        load(write(folder, "tune_own_model:make_with_optimizer")).tx, optax.GradientTransformation
    )
    assert isinstance(load(write(folder, "tune_own_model:make_optional")).tx, GradientDescent)


def test_modules_are_importable_for_as_long_as_it_takes(folder: Path) -> None:
    before = list(sys.path)
    with importing_from(folder, "here"):
        assert sys.path == [str(folder), str(Path("here").absolute()), *before]
    assert sys.path == before


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("tune_own_model", 'wanted "package.module:function"'),
        ("tune_own_model:", 'wanted "package.module:function"'),
        ("a/path.py:make", "wanted \"package.module:function\"; leave out .py: 'a.path:make'"),
        (
            "no_such_model:make",
            "there is no module 'no_such_model' beside the TOML file, in the current folder, or where Python "
            "looks (PYTHONPATH)",
        ),
        (
            "elsewhere.model:make",
            "there is no module 'elsewhere.model' beside the TOML file, in the current folder, or where "
            "Python looks (PYTHONPATH)",
        ),
        ("tune_own_model:NUMBER", "'NUMBER' is of type int; wanted a function"),
        (
            "tune_own_model:make_sized",
            "'make_sized' needs 'width', 'depth'; wanted a function of no arguments",
        ),
        (
            "tune_own_model:make_two",
            "it returned 2 values; wanted (loss_fn, params, batch) or (loss_fn, params, batch, optimizer)",
        ),
        (
            "tune_own_model:make_dict",
            "it returned a dict; wanted (loss_fn, params, batch) or (loss_fn, params, batch, optimizer)",
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_named_with_the_reason(
    folder: Path, reference: str, problem: str
) -> None:
    assert problem_of(write(folder, reference)) == f"tune.module = {reference!r}: {problem}"


def test_a_name_that_the_module_does_not_have_gets_the_nearest(folder: Path) -> None:
    reference = "tune_own_model:mak"
    file = folder / "tune_own_model.py"
    wanted = f"tune.module = {reference!r}: {file} has no 'mak': the nearest is 'make'"
    assert problem_of(write(folder, reference)) == wanted


def test_an_import_that_fails_inside_the_users_module_keeps_its_own_error(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there") as caught:
        load(write(folder, "tune_broken_model:make"))
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("tune.modul=x", "unknown key 'tune.modul': the nearest is 'tune.module'"),
        ("accumulate=2", "unknown key 'accumulate': the nearest is 'tune.accumulate'"),
        ("tune.accumulate=two", "tune.accumulate = 'two': wanted int"),
        ("sync.reduce=avg", "sync.reduce = 'avg': wanted 'mean' or 'sum'"),
        ("mesh.data=four", "mesh.data = 'four': wanted int"),
        ("devices=-1", "devices = -1: wanted 0 (the devices JAX has) or more"),
        ("workload=digits", "workload = 'digits' and a [tune] table: give one of the two"),
    ],
)
def test_a_mistake_in_the_file_is_named_by_its_dotted_key(folder: Path, override: str, problem: str) -> None:
    assert problem_of(write(folder), override) == problem


def test_a_file_that_says_nothing_of_a_model_is_told_what_it_can_say(tmp_path: Path) -> None:
    file = tmp_path / "sync.toml"
    file.write_text('[sync]\naxis = "data"\n')
    assert problem_of(file) == (
        "there is neither a `workload`, as for `jaxsync train`, nor a [tune] table with module = "
        '"package.module:function", which returns (loss_fn, params, batch)'
    )
