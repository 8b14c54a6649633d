"""Simulated CPU devices, and a runtime thread pool that cannot starve them."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import jax

from jaxsync.errors import ArgumentError, BackendStartedError, DeviceCountError
from jaxsync.fork import note_fork

# XLA's CPU runtime runs every device's share of a program on one pool. A collective parks one thread a
# device until all have come, so a pool of fewer threads than devices in flight waits for itself. Twice the
# devices was measured to be enough, with the launcher's window on top. Read once, when the backend starts.
_POOL_SIZE = "PJRT_NPROC"
THREADS_A_DEVICE = 2

# In the environment of a process that `jaxsync launch --devices-per-process` has started: that number.
DEVICES_PER_PROCESS = "JAXSYNC_DEVICES_PER_PROCESS"

_simulated: int | None = None  # written by simulate_devices alone, on the thread that sets the process up


def simulate_devices(n: int) -> None:
    """Gives this process `n` CPU devices, whatever it has.

    Call it once, before the first use of JAX. It starts no backend itself. Calling it again with the same
    `n` does nothing, so a notebook cell can be re-run.

    Args:
        n: How many devices, 1 or more.

    Raises:
        BackendStartedError: JAX has made its devices already, and not these; or another `n` was asked for
            before, by this function or by `jaxsync launch --devices-per-process`. The process never
            continues with fewer devices than asked.
        ArgumentError: `n` is no positive int.

    >>> import jaxsync, jax
    >>> jaxsync.simulate_devices(8)
    >>> len(jax.devices())
    8
    """
    global _simulated
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        wanted = "a number of devices, 1 or more"
        raise ArgumentError(function="simulate_devices", argument="n", got=repr(n), wanted=wanted)
    if _simulated == n:
        return
    if _simulated is not None:
        raise BackendStartedError(asked=n, found=f"simulate_devices({_simulated}) was called before")
    launched = os.environ.get(DEVICES_PER_PROCESS, "")
    if launched not in ("", str(n)):
        found = f"jaxsync launch --devices-per-process has given this process {launched}"
        raise BackendStartedError(asked=n, found=found, by_launcher=True)
    if has_backend_started():
        _check_started_backend(n)
    else:
        os.environ[_POOL_SIZE] = str(max(THREADS_A_DEVICE * n, _num_pool_threads()))
        if not jax.config.jax_platforms:  # type: ignore[attr-defined]  # made at run time
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n)
    _simulated = n


def num_simulated() -> int:
    """How many devices `simulate_devices` has given this process; 0 if it was not called."""
    return _simulated or 0


def _num_pool_threads() -> int:
    value = os.environ.get(_POOL_SIZE, "")
    return int(value) if value.isdigit() else os.cpu_count() or 1


def has_backend_started() -> bool:
    """Whether JAX has made its devices. Starts nothing."""
    # JAX has no public question for this, but refuses to change this setting once the backend is up.
    count = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # made at run time
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    # Asked in the child: there no other thread can start JAX while the question changes its setting. And at
    # the fork, since a child that was forked before JAX started may start one of its own.
    os.register_at_fork(after_in_child=lambda: note_fork(had_jax=has_backend_started()))


def all_devices(asked: int) -> list[jax.Device]:
    """The devices of JAX, however many: `asked` is what they are for. Starts the backend.

    Raises:
        DeviceCountError: JAX cannot start, and has none.

    >>> len(all_devices(2))
    8
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX (0.10 to 0.12) has an assertion without a text for JAX_PLATFORMS=cuda without the plugin.
        raise DeviceCountError(
            asked=asked,
            found=0,
            platform="no platform",
            problem=str(error).rstrip(".") or "a platform that is asked for is not there",
            causes=platform_causes(),
        ) from error


def platform_causes() -> tuple[str, ...]:
    """Which setting chose a platform other than the CPU: a line, if one did."""
    chosen = jax.config.jax_platforms  # type: ignore[attr-defined]  # made at run time
    if not chosen or chosen == "cpu":
        return ()
    name = "JAX_PLATFORMS" if os.environ.get("JAX_PLATFORMS") == chosen else "jax.config.jax_platforms"
    return (f"{name} is {chosen!r}: unset it, or make it 'cpu'",)


def _check_started_backend(n: int) -> None:
    devices = jax.local_devices()
    platform, count = devices[0].platform, len(devices)
    if platform == "cpu" and count == n and _num_pool_threads() >= THREADS_A_DEVICE * n:
        return
    found = f"JAX has already started with {count} {platform} device{'s' * (count != 1)}"
    if platform == "cpu" and count == n:
        found += f" on a pool of {_num_pool_threads()} threads, which can starve"
    raise BackendStartedError(asked=n, found=found, causes=tuple(likely_causes()))


def likely_causes() -> list[str]:
    """What may have made JAX start its devices: one line each."""
    holders = [
        f"module {name!r} holds the array {attribute!r}, made when it was imported or run"
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.split(".")[0] not in ("jax", "jaxlib")
        for attribute, value in list(vars(module).items())
        if isinstance(value, jax.Array)
    ]
    return holders or ["something has listed the devices (jax.devices()) or run a JAX operation"]
