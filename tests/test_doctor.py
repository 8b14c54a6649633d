"""What is wrong with a machine, as a table. `tests/cli/test_report.py` looks at this one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from jaxsync.doctor import OLDEST, Backend, Facts, Finding, find_problems, format_report

GOOD = {"python": "3.11.4", "jaxsync": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6"}
ONE_CPU = Backend(platform="cpu", device_kind="cpu", num_devices=1)
EIGHT_CPUS = Backend(platform="cpu", device_kind="cpu", num_devices=8)
GPU = Backend(platform="gpu", device_kind="NVIDIA H200", num_devices=8)
JOB = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9000", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def problems(
    backend: Backend = ONE_CPU, versions: dict[str, str] | None = None, **environment: str
) -> list[tuple[str, str]]:
    facts = Facts(versions=GOOD | (versions or {}), backend=backend, num_cores=2, environment=environment)
    return [(finding.level, finding.what) for finding in find_problems(facts)]


@pytest.mark.parametrize(
    ("facts", "environment"),
    [
        ({}, {}),
        ({"backend": GPU}, {}),
        ({"backend": GPU}, {"JAX_PLATFORMS": "cuda,cpu"}),
        (
            {"backend": EIGHT_CPUS},
            {"PJRT_NPROC": "16", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        ),
        ({"versions": {"python": "3.13.1", "jax": "0.12.0.1", "jaxlib": "0.12.0.1"}}, {}),
        ({}, JOB),
        ({}, {"JAX_ENABLE_X64": "0", "JAX_DISABLE_JIT": "False", "JAX_TRANSFER_GUARD": "allow"}),
    ],
)
def test_all_is_well(facts, environment) -> None:
    assert problems(**facts, **environment) == []


@pytest.mark.parametrize(
    ("facts", "environment", "level", "what"),
    [
        ({"versions": {"python": "3.10.9"}}, {}, "wrong", "python 3.10.9 is older than 3.11"),
        ({"versions": {"jax": "0.9.5", "jaxlib": "0.9.5"}}, {}, "wrong", "jax 0.9.5 is older than 0.10.2"),
        ({"versions": {"numpy": "1.26.4"}}, {}, "wrong", "numpy 1.26.4 is older than 2.0"),
        ({"versions": {"numpy": "not installed"}}, {}, "wrong", "numpy not installed is older than 2.0"),
        (
            {"versions": {"jaxlib": "0.11.0"}},
            {},
            "note",
            "jax 0.10.2 runs with jaxlib 0.11.0, of another release",
        ),
        ({"backend": EIGHT_CPUS}, {}, "wrong", "8 CPU devices share a pool of 2 threads, and may starve"),
        ({"backend": EIGHT_CPUS}, {"PJRT_NPROC": "15"}, "wrong", "8 CPU devices share a pool of 15 threads"),
        ({}, {"PJRT_NPROC": "many"}, "wrong", "PJRT_NPROC = 'many' is no number"),
        (
            {},
            {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=4 --b", "JAX_NUM_CPU_DEVICES": "1"},
            "note",
            "XLA_FLAGS asks for 4 CPU devices, and JAX_NUM_CPU_DEVICES = 1, which wins",
        ),
        (
            {},
            {"JAX_PLATFORMS": "cuda,cpu"},
            "wrong",
            "JAX_PLATFORMS asks for 'cuda' first, and JAX runs on 'cpu'",
        ),
        ({}, {"JAX_DISABLE_JIT": "1"}, "wrong", "JAX_DISABLE_JIT is set: steps are not compiled"),
        ({}, {"JAX_DEBUG_NANS": "true"}, "note", "JAX_DEBUG_NANS is set: a step that is not finite raises"),
        ({}, {"JAX_DEBUG_INFS": "True"}, "note", "JAX_DEBUG_INFS is set: a step that is not finite raises"),
        ({}, {"JAX_ENABLE_X64": "1"}, "note", "JAX_ENABLE_X64 is set: parameters of 64 bits stay so"),
        (
            {},
            {"JAX_ENABLE_RECOVERABILITY": "1"},
            "wrong",
            "JAX_ENABLE_RECOVERABILITY is set: a process whose",
        ),
        ({}, {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"}, "note", "JAX_CPU_ENABLE_ASYNC_DISPATCH is off"),
        ({}, {"JAX_TRANSFER_GUARD": "disallow_explicit"}, "note", "JAX_TRANSFER_GUARD forbids transfers"),
        ({}, {"JAX_NUMPY_DTYPE_PROMOTION": "strict"}, "note", "JAX_NUMPY_DTYPE_PROMOTION is strict"),
        (
            {},
            {"JAX_PROCESS_ID": "0"},
            "wrong",
            "of the variables of a job JAX_PROCESS_ID is set, and JAX_COORD",
        ),
        ({}, JOB | {"JAX_PROCESS_ID": "2"}, "wrong", "JAX_PROCESS_ID = 2, and there are 2 processes"),
        ({}, JOB | {"JAX_NUM_PROCESSES": "two"}, "wrong", "JAX_NUM_PROCESSES = 'two'"),
        ({}, JOB | {"JAX_COORDINATOR_ADDRESS": "host"}, "wrong", "JAX_COORDINATOR_ADDRESS = 'host'"),
        (
            {},
            JOB | {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "none"},
            "wrong",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION = 'none': processes on CPU cannot reduce",
        ),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(facts, environment, level: str, what: str) -> None:
    found = problems(**facts, **environment)
    # An old jax brings an old jaxlib with it.
    assert [one[0] for one in found] == [level] * (
        2 if "jaxlib" in facts.get("versions", {}) and level == "wrong" else 1
    )
    assert found[0][1].startswith(what)


def test_what_is_wrong_comes_before_notes() -> None:
    found = problems(backend=EIGHT_CPUS, JAX_ENABLE_X64="1", JAX_DISABLE_JIT="1")
    assert [level for level, _ in found] == ["wrong", "wrong", "note"]


@pytest.mark.parametrize(
    ("error", "environment", "fix"),
    [
        ("F1 Unknown flag in XLA_FLAGS: --xla_bogus=1", {}, "take that flag out of XLA_FLAGS"),
        ("RuntimeError: no tpu", {"JAX_PLATFORMS": "tpu"}, "unset JAX_PLATFORMS (it is 'tpu')"),
        ("exit -11", {}, "see that `python -c"),
    ],
)
def test_a_backend_that_does_not_start_has_its_reason_and_a_fix(error, environment, fix) -> None:
    facts = Facts(versions=GOOD, backend=Backend(error=error), num_cores=2, environment=environment)
    [finding] = find_problems(facts)
    assert (finding.level, finding.what) == ("wrong", f"JAX does not start: {error}")
    assert finding.fix.startswith(fix)


def test_the_oldest_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = dict(requirement.split(">=") for requirement in project["dependencies"])
    assert {"python": project["requires-python"].removeprefix(">="), **wanted} == OLDEST


def test_the_report_has_each_fact_and_each_finding() -> None:
    extras = {"train": {"optax": "0.2.8", "rich": None}, "a": {"flax": "1"}, "b": {"orbax": None}}
    facts = Facts(
        versions=GOOD, extras=extras, backend=EIGHT_CPUS, num_cores=2, environment={"PJRT_NPROC": "16"}
    )
    text = format_report(facts, ())
    lines = [line.split(maxsplit=1) for line in text.splitlines()[:-2]]
    assert [*lines[:2], lines[2][1]] == [["devices", "8 cpu (cpu)"], ["cores", "2"], "threads  16"]
    assert (
        "extra train   without rich: pip install 'jaxsync[train]'\nextra a       installed\n"
        "extra b       not installed: pip install 'jaxsync[b]'\nPJRT_NPROC    16\n" in text
    )
    assert text.endswith("\n\nall is well")
    finding = Finding(level="note", what="it rains", fix="take an umbrella")
    assert format_report(facts, (finding,)).endswith("\n\nnote: it rains. To fix it: take an umbrella.")
