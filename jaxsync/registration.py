"""Which parameters a client syncs: one tree at a time, and another only while no step is open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxsync.errors import NotRegisteredError
from jaxsync.host.explain import Explainer
from jaxsync.host.loop import Loop
from jaxsync.host.state import Setup
from jaxsync.multiprocess.consent import Consent
from jaxsync.plan import SyncPlan
from jaxsync.submission import Intake


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What is made of a plan when it is registered. Replaced as a whole, so that its parts fit each other.

    Attributes:
        plan: The plan.
        setup: What the state machine knows of it. A message that was made with another one is refused.
        intake: Looks at what devices hand over.
        explainer: Gives names to numbers.
        consent: Asks the other processes.
        is_wide: Whether it is reduced in 64 bits.
    """

    plan: SyncPlan
    setup: Setup
    intake: Intake
    explainer: Explainer
    consent: Consent
    is_wide: bool


class Registration:
    """The parameters of one client.

    Args:
        empty: A plan of no parameters, for the time before any are registered.
        mesh: Its mesh.
        devices: Those of this process.

    Threading: any thread may read `now`, which is one assignment. Its parts fit each other; whether they fit
    the state of the loop, the loop says when it takes a message.
    """

    def __init__(self, empty: SyncPlan, mesh: Mesh, devices: Sequence[jax.Device]) -> None:
        self._mesh = mesh
        self._devices = tuple(devices)
        self._adopting = threading.Lock()  # one at a time changes `now` and the setup of the loop
        self._empty = self._make(empty, Consent(empty, mesh, {}))
        self.now = self._empty  # written under the locks of the registration and of the loop

    def current(self, function: str) -> Registered:
        """What is registered.

        Raises:
            NotRegisteredError: Nothing is.
        """
        now = self.now
        if now is self._empty:
            raise NotRegisteredError(function=function)
        return now

    def adopt(self, plan: SyncPlan, loop: Loop) -> bool:
        """Registers a plan. Whether that could be: not while a step is open, nor when the loop is broken.

        Raises:
            JaxsyncError: As for `Consent.ask`.
        """
        with self._adopting:
            return self._adopt(plan, loop)

    def adopt_first(self, make: Callable[[], SyncPlan], loop: Loop) -> bool:
        """As `adopt`, unless something is registered: of devices that come at once, one registers.

        Raises:
            JaxsyncError: As for `adopt`.
            Exception: What `make` raises.
        """
        with self._adopting:
            return self._is_in_place(loop) or self._adopt(make(), loop)

    def _adopt(self, plan: SyncPlan, loop: Loop) -> bool:
        consent = Consent(plan, self._mesh, {})
        consent.ask("the registered parameters", lambda: {"next step": str(loop.state.first)})
        is_same = self.now.plan == plan and self.now.plan.treedef == plan.treedef  # by more than their paths
        if is_same and self._is_in_place(loop):
            return True
        registered = self._make(plan, consent)

        def commit() -> None:
            self.now = registered

        return loop.reset(registered.setup, commit)

    def _is_in_place(self, loop: Loop) -> bool:
        """Whether something is registered, here and in the loop: an interrupt may have struck between."""
        return self.now is not self._empty and self.now.setup is loop.state.setup

    def _make(self, plan: SyncPlan, consent: Consent) -> Registered:
        setup = Setup(
            num_devices=len(self._devices),
            buckets=tuple(sum(1 << leaf for leaf in bucket.leaves) for bucket in plan.buckets),
            is_strict=plan.config.unused == "error",
            timeout_s=plan.config.timeout_s,
            stall_s=plan.config.stall_warning_s,
        )
        explainer = Explainer(
            devices=tuple(str(device) for device in self._devices),
            paths=tuple(leaf.path for leaf in plan.leaves),
            timeout_s=plan.config.timeout_s,
        )
        return Registered(
            plan=plan,
            setup=setup,
            intake=Intake(plan, self._devices),
            explainer=explainer,
            consent=consent,
            is_wide=any(bucket.dtype in ("float64", "complex128") for bucket in plan.buckets),
        )
