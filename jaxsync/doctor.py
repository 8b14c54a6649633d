"""What this machine and its environment are, and what is wrong with them: facts first, then findings.

The devices are counted in a process of its own: an unknown flag in XLA_FLAGS aborts the process that starts
JAX, and a report should outlive it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxsync.devices import THREADS_A_DEVICE
from jaxsync.versions import extra_packages, library_versions

# What jaxsync is made for; a test compares it with pyproject.toml.
OLDEST = {"python": "3.11", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.0"}
_JOB = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_DEVICE_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_START_S = 120.0  # for JAX to start; a TPU or many GPUs may take most of a minute
_CHILD = (
    "import json, jax; devices = jax.devices(); "
    "print(json.dumps([devices[0].platform, devices[0].device_kind, len(devices)]))"
)
_PROJECT_EXTRAS = ("dev", "docs")  # for work on jaxsync itself; to a user they only look as if missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What JAX starts with here.

    Attributes:
        platform: `"cpu"`, `"gpu"`, `"tpu"`; empty if it does not start.
        device_kind: As JAX calls the device.
        num_devices: How many there are.
        error: Why it does not start; empty if it does.
    """

    platform: str = ""
    device_kind: str = ""
    num_devices: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What findings are made from.

    Attributes:
        versions: Of Python, jaxsync and the libraries it needs.
        extras: For each extra that a user may want its packages, each with its version, or None if it is not
            installed.
        backend: What JAX starts with.
        num_cores: Cores this process may use.
        environment: The environment variables that matter, those that are set.
    """

    versions: Mapping[str, str]
    extras: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    backend: Backend
    num_cores: int
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_pool_threads(self) -> int:
        """Threads of the pool on which XLA runs all CPU devices."""
        asked = self.environment.get("PJRT_NPROC", "")
        return int(asked) if asked.isdigit() else self.num_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to know.

    Attributes:
        level: `"wrong"`: jaxsync will not work, or not as it should. `"note"`: it works, and differs.
        what: What there is.
        fix: What to do about it.
    """

    level: Literal["wrong", "note"]
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}. To fix it: {self.fix}."


def gather_facts(environment: Mapping[str, str] | None = None) -> Facts:
    """The facts of this machine. Starts JAX in a child process, and not in this one.

    Threading: blocks until the child has ended, 120 s at most.

    Args:
        environment: By default that of this process.
    """
    environment = os.environ if environment is None else environment
    return Facts(
        versions=library_versions(),
        extras={name: found for name, found in extra_packages().items() if name not in _PROJECT_EXTRAS},
        backend=_start_backend(environment),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environment={
            name: value
            for name, value in sorted(environment.items())
            if name in ("XLA_FLAGS", "PJRT_NPROC") or name.startswith(("JAX_", "JAXSYNC_"))
        },
    )


def _start_backend(environment: Mapping[str, str]) -> Backend:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD],
            capture_output=True,
            text=True,
            timeout=_START_S,
            env=dict(environment),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Backend(error=f"it had not started after {_START_S:g} s")
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if line.strip() and not line.startswith((" ", "*"))
        ]
        return Backend(
            error=next((line for line in reversed(lines) if _tells(line)), f"exit {done.returncode}")
        )
    platform, kind, count = json.loads(done.stdout.splitlines()[-1])
    return Backend(platform=platform, device_kind=kind, num_devices=count)


def _tells(line: str) -> bool:
    return "Error" in line or re.match(r"F\d{4} ", line) is not None  # an exception, or an abort of XLA


def find_problems(facts: Facts) -> tuple[Finding, ...]:
    """What is wrong or worth knowing, the wrong first. Pure.

    >>> backend = Backend(platform="cpu", device_kind="cpu", num_devices=8)
    >>> flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    >>> [finding] = find_problems(Facts(versions={}, backend=backend, num_cores=2, environment=flags))
    >>> finding.what
    '8 CPU devices share a pool of 2 threads, and may starve; 16 are enough'
    """
    checks = (_check_versions, _check_backend, _check_pool, _check_settings, _check_job)
    found = [finding for check in checks for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: finding.level != "wrong"))


def _check_versions(facts: Facts) -> Iterator[Finding]:
    for name, oldest in OLDEST.items():
        version = facts.versions.get(name)
        if version is None:
            continue
        if _numbers(version) < _numbers(oldest):
            fix = "use a newer Python" if name == "python" else f"pip install --upgrade '{name}>={oldest}'"
            what = f"{name} {version} is older than {oldest}, the oldest that jaxsync is tested with"
            yield Finding(level="wrong", what=what, fix=fix)
    jax, jaxlib = facts.versions.get("jax"), facts.versions.get("jaxlib")
    if jax and jaxlib and _numbers(jax) != _numbers(jaxlib):
        fix = f"pip install --upgrade jax=={jax} jaxlib=={jax}"
        yield Finding(level="note", what=f"jax {jax} runs with jaxlib {jaxlib}, of another release", fix=fix)


def _numbers(version: str) -> tuple[int, ...]:
    """`"0.12.0.1rc1"` -> (0, 12, 0, 1); `"not installed"` -> (), older than all."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _check_backend(facts: Facts) -> Iterator[Finding]:
    backend, asked = facts.backend, facts.environment.get("JAX_PLATFORMS", "")
    if backend.error:
        if "XLA_FLAGS" in backend.error:
            fix = "take that flag out of XLA_FLAGS: this jaxlib does not know it, and ends the process"
        elif asked:
            fix = f"unset JAX_PLATFORMS (it is {asked!r}), or install what that platform needs"
        else:
            fix = "see that `python -c 'import jax; print(jax.devices())'` works"
        yield Finding(level="wrong", what=f"JAX does not start: {backend.error}", fix=fix)
        return
    first = asked.split(",")[0].strip()
    if first and {"cuda": "gpu", "rocm": "gpu"}.get(first, first) != backend.platform:
        yield Finding(
            level="wrong",
            what=f"JAX_PLATFORMS asks for {first!r} first, and JAX runs on {backend.platform!r}",
            fix=f"install what {first!r} needs (for NVIDIA jax[cuda13]), or unset JAX_PLATFORMS",
        )


def _check_pool(facts: Facts) -> Iterator[Finding]:
    asked = facts.environment.get("PJRT_NPROC", "")
    if asked and not asked.isdigit():
        what = f"PJRT_NPROC = {asked!r} is no number, and XLA ignores it"
        yield Finding(level="wrong", what=what, fix="unset it; jaxsync.simulate_devices(n) sets it")
    flagged = _DEVICE_FLAG.search(facts.environment.get("XLA_FLAGS", ""))
    counted = facts.environment.get("JAX_NUM_CPU_DEVICES")
    if flagged and counted and flagged[1] != counted:
        what = f"XLA_FLAGS asks for {flagged[1]} CPU devices, and JAX_NUM_CPU_DEVICES = {counted}, which wins"
        yield Finding(level="note", what=what, fix="unset one of them")
    number, backend = facts.backend.num_devices, facts.backend
    wanted = THREADS_A_DEVICE * number
    if backend.platform == "cpu" and number > 1 and facts.num_pool_threads < wanted:
        yield Finding(
            level="wrong",
            what=(
                f"{number} CPU devices share a pool of {facts.num_pool_threads} threads, and may starve; "
                f"{wanted} are enough"
            ),
            fix=(
                f"call jaxsync.simulate_devices({number}) before the first use of JAX, instead of XLA_FLAGS "
                f"or JAX_NUM_CPU_DEVICES; or set PJRT_NPROC={wanted}. A loop that awaits nothing can else "
                "hang, and abort the process"
            ),
        )


# What each setting does when it is on; the runs behind it: `jaxsync train configs/digits.toml`, 8 devices.
_SETTINGS: Mapping[str, tuple[Literal["wrong", "note"], str, str]] = {
    "JAX_DISABLE_JIT": (
        "wrong",
        "steps are not compiled, and run a thousand times slower",
        "unset it; jax.disable_jit() as a context is for single functions",
    ),
    "JAX_DEBUG_NANS": (
        "note",
        "a step that is not finite raises, where jaxsync would skip it on all devices",
        "unset it, unless you look for the first NaN",
    ),
    "JAX_DEBUG_INFS": (
        "note",
        "a step that is not finite raises, where jaxsync would skip it on all devices",
        "unset it, unless you look for the first infinity",
    ),
    "JAX_ENABLE_X64": (
        "note",
        "parameters of 64 bits stay so, and their gradients take twice the bytes on the wire",
        "unset it, or give parameters of 32 bits",
    ),
    "JAX_ENABLE_RECOVERABILITY": (
        "wrong",
        "a process whose peer died may go on for many minutes before it is told, and then with another error",
        "unset it; go on from a checkpoint instead",
    ),
}


def _check_settings(facts: Facts) -> Iterator[Finding]:
    for name, (level, effect, fix) in _SETTINGS.items():
        if _is_on(facts.environment.get(name, "")):
            yield Finding(level=level, what=f"{name} is set: {effect}", fix=fix)
    if facts.environment.get("JAX_CPU_ENABLE_ASYNC_DISPATCH", "1").lower() in ("0", "false", "off", "no"):
        yield Finding(
            level="note",
            what="JAX_CPU_ENABLE_ASYNC_DISPATCH is off: a loop that awaits nothing can hang all the same",
            fix="unset it; jaxsync's steps and jaxsync.guard_dispatch bound what is in flight",
        )
    if facts.environment.get("JAX_TRANSFER_GUARD", "allow").startswith("disallow"):
        yield Finding(
            level="note",
            what="JAX_TRANSFER_GUARD forbids transfers: a step refuses a batch of NumPy arrays",
            fix="unset it, or place batches with jax.device_put",
        )
    if facts.environment.get("JAX_NUMPY_DTYPE_PROMOTION", "standard") != "standard":
        yield Finding(
            level="note",
            what="JAX_NUMPY_DTYPE_PROMOTION is strict: optimizers of optax raise",
            fix="unset it, or run steps inside jax.numpy_dtype_promotion('standard')",
        )


def _is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "on", "yes", "y", "t")


def _check_job(facts: Facts) -> Iterator[Finding]:
    values = {name: facts.environment[name] for name in _JOB if facts.environment.get(name)}
    if not values:
        return
    missing = [name for name in _JOB if name not in values]
    if missing:
        yield Finding(
            level="wrong",
            what=f"of the variables of a job {', '.join(values)} is set, and {', '.join(missing)} not",
            fix="set all three, as `jaxsync launch` does; or none, for a process that is alone",
        )
    address = values.get(_JOB[0])
    if address is not None and not re.fullmatch(r".+:\d{1,5}", address):
        yield Finding(level="wrong", what=f"{_JOB[0]} = {address!r}", fix="set it to host:port of process 0")
    numbers = {name: values[name] for name in _JOB[1:] if name in values}
    for name, value in numbers.items():
        if not value.isdigit():
            yield Finding(level="wrong", what=f"{name} = {value!r}", fix="set it to a number")
    if len(numbers) == 2 and all(value.isdigit() for value in numbers.values()):
        count, number = (int(numbers[name]) for name in _JOB[1:])
        if number >= count:
            what = f"{_JOB[2]} = {number}, and there are {count} processes, the first of which is 0"
            yield Finding(level="wrong", what=what, fix=f"number the processes from 0 to {max(count - 1, 0)}")
    if facts.environment.get("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "gloo") == "none":
        what = "JAX_CPU_COLLECTIVES_IMPLEMENTATION = 'none': processes on CPU cannot reduce"
        yield Finding(level="wrong", what=what, fix="unset it, for gloo")


def format_report(facts: Facts, findings: tuple[Finding, ...]) -> str:
    """Facts and findings as text."""
    backend = facts.backend
    devices = (
        f"{backend.num_devices} {backend.platform} ({backend.device_kind})" if backend.platform else "none"
    )
    rows = [["devices", devices], ["cores", str(facts.num_cores)]]
    if backend.platform == "cpu":
        rows.append(["pool threads", str(facts.num_pool_threads)])
    rows += [[name, version] for name, version in facts.versions.items()]
    rows += [[f"extra {extra}", _extra(extra, packages)] for extra, packages in facts.extras.items()]
    rows += [[name, value] for name, value in facts.environment.items()]
    width = max(len(label) for label, _ in rows)
    table = [f"{label.ljust(width)}  {value}" for label, value in rows]
    lines = [str(finding) for finding in findings] or ["all is well"]
    return "\n".join([*table, "", *lines])


def _extra(extra: str, packages: Mapping[str, str | None]) -> str:
    missing = [name for name, version in packages.items() if version is None]
    if not missing:
        return "installed"
    state = "not installed" if len(missing) == len(packages) else f"without {', '.join(missing)}"
    return f"{state}: pip install 'jaxsync[{extra}]'"
