from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsync import SyncConfig
from jaxsync.errors import ConfigError


def write(path: Path, text: str) -> Path:
    file = path / "job.toml"
    file.write_text(text)
    return file


def test_a_file_sets_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    file = write(tmp_path, '[sync]\naxis = ["data", "replica"]\nreduce = "sum"\n[train]\nsteps = 3\n')
    assert SyncConfig.from_toml(file) == SyncConfig(axis=("data", "replica"), reduce="sum")


def test_a_file_without_a_sync_table_is_the_table(tmp_path: Path) -> None:
    assert SyncConfig.from_toml(write(tmp_path, "timeout_s = 5\n")) == SyncConfig(timeout_s=5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[sync]\naxes = "data"', "unknown key 'axes': the nearest is 'axis'"),
        (
            "[sync]\nbucket_max_leafs = 3",
            "unknown key 'bucket_max_leafs': the nearest is 'bucket_max_leaves'",
        ),
        ('[sync]\nreduce = "avg"', "reduce = 'avg': wanted 'mean' or 'sum'"),
        ("[sync]\nbucket_max_leaves = true", "bucket_max_leaves = True: wanted int"),
        ("[sync]\nbucket_max_leaves = 0", "bucket_max_leaves = 0: wanted 1 or more"),
        ("[sync]\nfuse_max_bytes = -1", "fuse_max_bytes = -1: wanted 0 or more"),
        ("[sync]\nmax_in_flight = 1.5", "max_in_flight = 1.5: wanted int"),
        ("[sync]\ntimeout_s = nan", "timeout_s = nan: wanted more than 0 seconds"),
        ("[sync]\naxis = []", "axis = (): wanted one or more different axis names"),
        ('[sync]\naxis = ["a", "a"]', "axis = ('a', 'a'): wanted one or more different axis names"),
        (
            '[sync]\nreduce_dtype = "int8"',
            "reduce_dtype = 'int8': wanted 'own' or the name of a real float dtype",
        ),
        ("sync = 3", "wanted a table, got 3"),
    ],
)
def test_a_bad_key_is_named_with_its_file_and_the_nearest_key(
    tmp_path: Path, text: str, problem: str
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        SyncConfig.from_toml(file)
    assert caught.value.source == str(file)
    assert problem in caught.value.problems


def test_all_bad_keys_are_named_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, '[sync]\nx = 1\ny = 2\nreduce = "avg"\n')
    with pytest.raises(ConfigError) as caught:
        SyncConfig.from_toml(file)
    assert len(caught.value.problems) == 3


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        SyncConfig.from_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"job\.toml"):
        SyncConfig.from_toml(write(tmp_path, "= 3"))


def test_a_reduce_dtype_may_be_a_dtype() -> None:
    assert (
        SyncConfig(reduce_dtype="half") == SyncConfig(reduce_dtype="f2") == SyncConfig(reduce_dtype="float16")
    )
    assert SyncConfig(reduce_dtype=jnp.bfloat16).reduce_dtype == "bfloat16"  # type: ignore[arg-type]


def test_wrong_values_in_code_are_refused_alike() -> None:
    with pytest.raises(ConfigError, match="axis = 3: wanted str or a list of str"):
        SyncConfig(axis=3)  # type: ignore[arg-type]


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SyncConfig().axis = "x"  # type: ignore[misc]


configs = st.builds(
    SyncConfig,
    axis=st.lists(st.text('abc_\\"\n\té', min_size=1), min_size=1, unique=True).map(tuple) | st.just("data"),
    reduce=st.sampled_from(["mean", "sum"]),
    reduce_dtype=st.sampled_from([None, "own", "float32", "bfloat16", "float64"]),
    fuse_max_bytes=st.integers(0, 1 << 30),
    bucket_max_leaves=st.integers(1, 1000),
    bucket_max_bytes=st.integers(0, 1 << 30),
    timeout_s=st.floats(1e-3, 1e6),
    stall_warning_s=st.floats(1e-3, 1e6),
    max_in_flight=st.none() | st.integers(1, 32),
)


@given(config=configs)
def test_a_config_is_the_same_after_a_way_through_toml(
    tmp_path_factory: pytest.TempPathFactory, config: SyncConfig
) -> None:
    file = tmp_path_factory.mktemp("config") / "c.toml"
    file.write_text(config.to_toml())
    assert SyncConfig.from_toml(file) == config
