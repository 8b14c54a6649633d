"""What a job does in several processes, as far as one process can tell; tests/multiprocess has the rest."""

from __future__ import annotations

import pytest

from jaxsync.errors import ConfigError
from jaxsync.workloads.processes import (
    check_shared_job,
    devices_here,
    is_restart,
    join_processes,
)


def test_a_process_that_nobody_speaks_to_is_alone() -> None:
    assert join_processes() == 1


def test_devices_are_divided_evenly_or_not_at_all() -> None:
    assert [devices_here(8, n) for n in (1, 2, 8)] == [8, 4, 1]
    with pytest.raises(ConfigError) as caught:
        devices_here(8, 3)
    assert caught.value.problems == ("devices = 8: wanted a multiple of 3, the number of processes",)


def test_a_mesh_that_leaves_devices_out_and_pmap_are_refused() -> None:
    check_shared_job(8, "shard_map")
    with pytest.raises(ConfigError) as caught:
        check_shared_job(4, "pmap")
    assert caught.value.problems == (
        "mesh has 4 devices: wanted all 8, of 1 processes",
        "train.transform = 'pmap': wanted 'shard_map', with several processes",
    )


@pytest.mark.parametrize(("value", "wanted"), [(None, False), ("0", False), ("1", True), ("12", True)])
def test_a_restart_is_told_by_the_environment(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXSYNC_RESTART", raising=False)
    if value is not None:
        monkeypatch.setenv("JAXSYNC_RESTART", value)
    assert is_restart() is wanted
