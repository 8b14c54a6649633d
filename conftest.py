"""Eight simulated devices for the whole test process, and the few fixtures that several tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxsync

pytest_plugins = ["pytester"]

jaxsync.simulate_devices(8)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Too few devices is a failure, never a skip."""
    assert len(jax.devices()) == 8
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For steps with optimizers of optax, which is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python() -> RunPython:
    """Runs code in a fresh interpreter with a hard limit; for what starts or may end a process."""

    def run(code: str, *args: str, timeout_s: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *args],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **env},
            check=False,
        )

    return run


Visit = Callable[..., "dict[str, Any]"]


@pytest.fixture(scope="session")
def visit() -> Visit:
    """Opens a page in headless Chromium: what `scripts/browse.py` says of it. Nothing is on the console."""

    def open_page(page: Path, *options: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, Path(__file__).parent / "scripts" / "browse.py", str(page), *options],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if "cannot open shared object file" in done.stderr:
            pytest.skip(f"Chromium lacks a library of this system: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        visited: dict[str, Any] = json.loads(done.stdout)
        assert visited["console"] == []
        return visited

    return open_page


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """One entry for each program XLA compiles while the test runs."""
    found: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)
