"""JobConfig: one file, every mistake named by its dotted key."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxsync import SyncConfig
from jaxsync.errors import ConfigError
from jaxsync.workloads.charlm import CharlmModel
from jaxsync.workloads.digits import DigitsModel
from jaxsync.workloads.job import JobConfig, TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"

TEXT = """
workload = "digits"
devices = 8
[mesh]
data = 4
model = 2
[sync]
reduce = "sum"
[train]
steps = 5
batch_size = 64
learning_rate = 1e-3
[model]
hidden = [32]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(TEXT)
    return path


def problems_of(file: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_toml(file, overrides)
    return caught.value.problems


def test_each_table_becomes_its_dataclass(file: Path) -> None:
    assert JobConfig.from_toml(file) == JobConfig(
        workload="digits",
        devices=8,
        mesh={"data": 4, "model": 2},
        sync=SyncConfig(reduce="sum"),
        train=TrainConfig(steps=5, batch_size=64, learning_rate=1e-3),
        model=DigitsModel(hidden=(32,)),
    )


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("digits", DigitsModel()),
        ("charlm", CharlmModel(context=64, width=64, num_heads=4, num_blocks=2)),
    ],
)
def test_the_configs_that_come_with_the_library_train_on_eight_devices(
    name: str, model: DigitsModel | CharlmModel
) -> None:
    job = JobConfig.from_toml(CONFIGS / f"{name}.toml")
    assert (job.workload, job.devices, job.mesh, job.sync) == (name, 8, {"data": 8}, SyncConfig())
    assert job.model == model


def test_an_override_replaces_one_value_and_leaves_the_others(file: Path) -> None:
    plain = JobConfig.from_toml(file)
    changed = JobConfig.from_toml(file, ["train.steps=9", "model.hidden=[8, 8]", "sync.reduce=mean"])
    assert changed == dataclasses.replace(
        plain,
        train=dataclasses.replace(plain.train, steps=9),
        model=DigitsModel(hidden=(8, 8)),
        sync=SyncConfig(reduce="mean"),
    )


@pytest.mark.parametrize("text", ['sync.reduce="mean"', "sync.reduce=mean", " sync.reduce = mean "])
def test_a_string_needs_no_quotes_in_an_override(file: Path, text: str) -> None:
    assert JobConfig.from_toml(file, [text]).sync.reduce == "mean"


def test_the_last_override_of_a_key_counts(file: Path) -> None:
    assert JobConfig.from_toml(file, ["train.steps=1", "train.steps=2"]).train.steps == 2


def test_an_override_can_replace_a_whole_table_and_make_one(file: Path) -> None:
    assert JobConfig.from_toml(file, ["mesh={data = 2}"]).mesh == {"data": 2}
    file.write_text(TEXT.replace('[sync]\nreduce = "sum"', ""))
    assert JobConfig.from_toml(file, ["sync.timeout_s=5"]).sync == SyncConfig(timeout_s=5)


def test_all_unknown_keys_are_named_with_the_nearest_of_the_whole_file(file: Path) -> None:
    assert problems_of(
        file, "train.batchsize=3", "batch_size=7", "sync.reduse=sum", "modle.x=3", "model.widht=1"
    ) == (
        "unknown key 'sync.reduse': the nearest is 'sync.reduce'",
        "unknown key 'train.batchsize': the nearest is 'train.batch_size'",
        "unknown key 'model.widht': the nearest is 'model.hidden'",
        "unknown key 'batch_size': the nearest is 'train.batch_size'",
        "unknown key 'modle': the nearest is 'model'",
    )


def test_an_error_names_the_file_and_the_overrides(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_toml(file, ["train.stesp=3"])
    assert str(caught.value) == (
        f"Not a valid configuration: {file} with train.stesp=3.\n"
        "  - unknown key 'train.stesp': the nearest is 'train.steps'\n"
        "To fix it: correct what is listed above. `jaxsync.SyncConfig` documents the keys of the sync table; "
        "configs/digits.toml in the repository of jaxsync shows all keys of a job."
    )


def test_wrong_values_in_all_tables_are_named_at_once(file: Path) -> None:
    assert problems_of(
        file, "mesh.data=x", "sync.reduce=avg", "train.steps=1.5", "train.warmup=2", "model.hidden=[0]"
    ) == (
        "mesh.data = 'x': wanted int",
        "sync.reduce = 'avg': wanted 'mean' or 'sum'",
        "train.steps = 1.5: wanted int",
        "model.hidden = [0]: wanted sizes of 1 or more",
    )


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("workload=mnist", "workload = 'mnist': wanted 'digits' or 'charlm'"),
        ("devices=-1", "devices = -1: wanted 0 (the devices JAX has) or more"),
        ("mesh={}", "sync.axis names 'data', which the mesh does not have: its axes are []"),
        ("mesh={batch=8}", "sync.axis names 'data', which the mesh does not have: its axes are ['batch']"),
        ("mesh.data=0", "mesh = {'data': 0, 'model': 2}: wanted one or more axes, each of size 1 or more"),
        ("mesh.data=8", "mesh = {'data': 8, 'model': 2}: needs 16 devices, and devices = 8"),
        ("sync.axis=[]", "sync.axis = (): wanted one or more different axis names"),
        ("train.steps=0", "train.steps = 0: wanted 1 or more"),
        ("train.learning_rate=nan", "train.learning_rate = nan: wanted more than 0"),
        ("train.weight_decay=-1", "train.weight_decay = -1: wanted 0 or more"),
        ("train.warmup=1.5", "train.warmup = 1.5: wanted a share of the steps, from 0 to 1"),
        ("train.seed=-1", "train.seed = -1: wanted 0 or more"),
        ("train.transform=vmap", "train.transform = 'vmap': wanted 'shard_map' or 'pmap'"),
        ("train=3", "train = 3: wanted a table"),
        ("model.split_seed=-1", "model.split_seed = -1: wanted 0 or more"),
        (
            "train.batch_size=60",
            "train.batch_size = 60: wanted a multiple of 8 (4 devices x 2 microbatches), such as 64",
        ),
        (
            "train.batch_size=3",
            "train.batch_size = 3: wanted a multiple of 8 (4 devices x 2 microbatches), such as 8",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(file: Path, override: str, problem: str) -> None:
    assert problem in problems_of(file, "train.accumulate=2", override)


def test_a_key_that_must_be_given_is_missed(file: Path) -> None:
    file.write_text(TEXT.replace("batch_size = 64\n", ""))
    assert problems_of(file) == ("train.batch_size is missing",)
    file.write_text(TEXT.replace('workload = "digits"\n', ""))
    assert problems_of(file) == ("workload is missing",)


def test_the_keys_of_another_workloads_model_are_unknown(file: Path) -> None:
    assert problems_of(file, "workload=charlm") == (
        "unknown key 'model.hidden': the nearest is 'model.width'",
    )


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("steps", "'steps': wanted key=value, such as train.steps=10"),
        ("=3", "'=3': wanted key=value, such as train.steps=10"),
        ("train.=3", "'train.=3': wanted key=value, such as train.steps=10"),
        ("devices.x=3", "'devices.x=3': devices is a value, not a table"),
    ],
)
def test_an_override_that_is_none_is_refused(file: Path, override: str, problem: str) -> None:
    assert problems_of(file, override) == (problem,)


def test_an_override_sets_one_key_only(file: Path) -> None:
    assert problems_of(file, "workload=digits\ndevices=1") == (
        "workload = 'digits\\ndevices=1': wanted 'digits' or 'charlm'",
    )
    assert problems_of(file, "train.steps=3\nseed=1") == ("train.steps = '3\\nseed=1': wanted int",)


def test_a_model_of_another_workload_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        JobConfig(
            workload="charlm",
            mesh={"data": 8},
            train=TrainConfig(steps=1, batch_size=8, learning_rate=1e-3),
            model=DigitsModel(),
        )
    assert caught.value.problems == ("model is a DigitsModel: workload 'charlm' has another",)


def test_a_width_must_divide_among_the_heads() -> None:
    with pytest.raises(ConfigError) as caught:
        CharlmModel(width=10, num_heads=4)
    assert caught.value.problems == ("width = 10: wanted a multiple of num_heads = 4",)
    with pytest.raises(ConfigError) as caught:
        CharlmModel(context=0, num_blocks=0)
    assert caught.value.problems == ("context = 0: wanted 1 or more", "num_blocks = 0: wanted 1 or more")
