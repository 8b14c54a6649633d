"""The devices a process has, and the mesh it makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxsync.errors.base import JaxsyncError, error
from jaxsync.report.text import format_count


@error
class BackendStartedError(JaxsyncError, RuntimeError):
    """Simulated devices were asked for after JAX had made its devices, or others were asked for before."""

    asked: int
    found: str
    causes: tuple[str, ...] = ()
    by_launcher: bool = False

    def what(self) -> str:
        return f"Cannot simulate {self.asked} CPU devices: {self.found}."

    def places(self) -> Sequence[str]:
        return self.causes

    def fix(self) -> str:
        if self.by_launcher:
            return (
                f"launch with --devices-per-process {self.asked}; or without it, and the script's own "
                "jaxsync.simulate_devices decides."
            )
        return (
            "call jaxsync.simulate_devices(n) once, before anything makes an array or lists devices, and "
            "restart the process (in Jupyter: the kernel). JAX_DEBUG_LOG_MODULES=jax._src.xla_bridge shows "
            "when the backend starts."
        )


@error
class DeviceCountError(JaxsyncError, RuntimeError):
    """Fewer devices than the mesh needs.

    `problem`: why JAX has none, if it cannot start; `simulated`: how many `simulate_devices` has made.
    """

    asked: int
    found: int
    platform: str
    problem: str = ""
    causes: tuple[str, ...] = ()
    simulated: int = 0

    def what(self) -> str:
        found = f"JAX has {self.found} ({self.platform})"
        if self.problem:
            found = f"JAX cannot start: {self.problem}"
        elif self.simulated:
            found += f", since jaxsync.simulate_devices({self.simulated}) was called"
        return f"The mesh needs {format_count(self.asked, 'device', 'devices')}; {found}."

    def places(self) -> Sequence[str]:
        return self.causes

    def fix(self) -> str:
        if self.problem:
            return (
                "choose a platform that is there, before the first use of JAX; an accelerator needs JAX's "
                "plugin for it. For simulated devices: JAX_PLATFORMS=cpu, and "
                f"jaxsync.simulate_devices({self.asked})."
            )
        if self.simulated:
            return (
                "make a smaller mesh; or restart the process (in Jupyter: the kernel), and simulate as many "
                f"as the largest mesh needs: jaxsync.simulate_devices({self.asked})."
            )
        return (
            f"make a smaller mesh, or simulate the devices: jaxsync.simulate_devices({self.asked}) "
            "before the first use of JAX."
        )


@error
class MeshError(JaxsyncError, ValueError):
    """An axis that the mesh does not have, or has in another size. `problems`: one line an axis.

    `axes` and `missing`: what the mesh has, and what the config names of it in vain, if that is all.
    """

    mesh: str
    problems: tuple[str, ...]
    axes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def what(self) -> str:
        return f"The mesh ({self.mesh}) does not fit."

    def places(self) -> Sequence[str]:
        return self.problems

    def fix(self) -> str:
        if self.axes and self.missing:
            first, *others = (json.dumps(axis) for axis in self.axes)
            choice = f" (or whichever of {', '.join([first, *others])} carries the batch)" if others else ""
            wanted = ", ".join(map(json.dumps, self.missing))
            rename = (
                f"call the axis of the mesh {wanted}" if not others else f"give the mesh an axis {wanted}"
            )
            return f"make_plan(..., config=SyncConfig(axis={first})){choice}, or {rename}."
        return (
            "give the mesh named axes of one or more devices, make the plan for the mesh it runs on, and "
            "name the axes that carry the batch in SyncConfig(axis=...)."
        )
