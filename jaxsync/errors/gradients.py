"""Gradients inside a traced function: how they were made, and whether they were reduced."""

from __future__ import annotations

from collections.abc import Sequence

from jaxsync.errors.base import JaxsyncError, error, quote_names
from jaxsync.report.text import format_count


@error
class UnboundAxisError(JaxsyncError, NameError):
    """A collective was asked for where its mesh axis does not exist. `bound`: the axes that do."""

    function: str
    axes: tuple[str, ...]
    bound: tuple[str, ...] = ()

    def what(self) -> str:
        bound = f"; bound: {quote_names(self.bound)}" if self.bound else ""
        return f"{self.function} reduces over {quote_names(self.axes)}, which is not bound here{bound}."

    def fix(self) -> str:
        if self.bound:
            axes, bound = quote_names(self.axes), quote_names(self.bound)
            return (
                f"call the axis {axes} here too, as in jax.pmap(axis_name=...) or in the mesh of "
                f"jax.shard_map; or make the plan for {bound}: the axis of its mesh, and "
                "SyncConfig(axis=...)."
            )
        return (
            "call it inside jax.shard_map over the plan's mesh, or inside jax.pmap(axis_name=...). Under "
            "plain jit on a sharded batch, gradients are global already and need no sync."
        )


@error
class AlreadyReducedError(JaxsyncError, ValueError):
    """Gradients that were summed over the data axis before. `leaves`: their paths."""

    leaves: tuple[str, ...]
    axes: tuple[str, ...]

    def what(self) -> str:
        return (
            f"{format_count(len(self.leaves), 'gradient is', 'gradients are')} already reduced over "
            f"{quote_names(self.axes)}: to reduce again would multiply by the number of devices, silently."
        )

    def places(self) -> Sequence[str]:
        return [f"grads{path}" for path in self.leaves]

    def fix(self) -> str:
        return (
            "under shard_map(check_vma=True), jax.grad with respect to replicated parameters sums the "
            "gradients itself. Differentiate with jaxsync.value_and_grad(loss_fn, plan), which syncs too; "
            "or make the parameters varying before jax.grad: "
            f"jax.lax.pcast(params, {self.axes!r}, to='varying'). Sync once only."
        )


@error
class NotReducedError(JaxsyncError, ValueError):
    """Gradients that still differ from device to device. `leaves`: their paths."""

    function: str
    leaves: tuple[str, ...]
    axes: tuple[str, ...]

    def what(self) -> str:
        return (
            f"{self.function} needs synced gradients; "
            f"{format_count(len(self.leaves), 'gradient still varies', 'gradients still vary')} over "
            f"{quote_names(self.axes)}, so each device would get another norm."
        )

    def places(self) -> Sequence[str]:
        return [f"grads{path}" for path in self.leaves]

    def fix(self) -> str:
        return "sync first: jaxsync.sync_gradients(grads, plan), or put jaxsync.synchronize(plan) before it."


@error
class UncheckedModelError(JaxsyncError, ValueError):
    """A loss that communicates over a model axis where JAX cannot check its gradient."""

    axes: tuple[str, ...]
    primitives: tuple[str, ...]

    def what(self) -> str:
        return (
            f"The loss communicates over {quote_names(self.axes)} ({', '.join(self.primitives)}) without "
            "check_vma: JAX would multiply gradients by the size of that axis."
        )

    def fix(self) -> str:
        return (
            "use jax.shard_map(..., check_vma=True), where gradients across a model axis are right; or "
            "wrap the communication in jax.custom_vjp with the backward rule you mean."
        )


@error
class LossError(JaxsyncError, ValueError):
    """A loss function that returns something else than it should. `function`: its name and its place."""

    got: str
    wanted: str
    function: str = "loss_fn"

    def what(self) -> str:
        return f"{self.function} returned {self.got}; wanted {self.wanted}."

    def fix(self) -> str:
        return (
            "return a real scalar, the mean over this device's rows. weighted=True: (loss, weight); "
            "has_aux=True: (loss, aux), or ((loss, weight), aux) with both."
        )
