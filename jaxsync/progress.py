"""What a client is in the middle of: its open steps, for programs and for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxsync.exchange import Exchange
from jaxsync.host.explain import owed_lines
from jaxsync.host.state import State, Step, owed
from jaxsync.host.ticket import Ticket
from jaxsync.registration import Registered, Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStep:
    """A step that some device has begun and that is not complete. Made by `SyncClient.open_steps`.

    Attributes:
        number: Counted from 0.
        tickets: The ticket of each device that has synced: also of one whose caller was interrupted before it
            had the ticket. It is answered when the step is complete.
        owed: For each device that has not synced, the paths of the leaves it has not handed over. The step
            waits for these devices; if there is none, for programs on their way.
        num_buckets: Buckets of the plan.
        num_launched: Those whose reduction was asked for, as every device had handed over their leaves.
        num_finished: Those that have their result.
        waited_s: Seconds that count towards `timeout_s`; 0 before a device has synced.

    >>> import jax.numpy as jnp, jaxsync
    >>> with jaxsync.SyncClient(jaxsync.make_mesh({"data": 2})) as client:
    ...     _ = client.register_sync_parameters({"b": jnp.zeros(2), "w": jnp.zeros(3)})
    ...     first, second = client.mesh.devices.flat
    ...     client.submit_gradient_sync(second, "['w']", jax.device_put(jnp.ones(3), second))
    ...     [step] = client.open_steps()
    >>> (step.number, step.owed[second], step.owed[first], step.num_launched)
    (0, ("['b']",), ("['b']", "['w']"), 0)
    """

    number: int
    tickets: Mapping[jax.Device, Ticket[Any]]
    owed: Mapping[jax.Device, tuple[str, ...]]
    num_buckets: int
    num_launched: int
    num_finished: int
    waited_s: float

    def __str__(self) -> str:
        counts = f"{self.num_launched} are launched and {self.num_finished} finished"
        lines = [f"step {self.number}: of {self.num_buckets} buckets {counts}", *self.owed_lines()]
        return "\n  ".join(lines)

    def owed_lines(self) -> tuple[str, ...]:
        """What devices have not done: one line for those that owe the same."""
        return owed_lines(list(map(str, self.owed)), list(self.owed.values()))


def look(exchange: Exchange, registration: Registration) -> tuple[State, tuple[OpenStep, ...]]:
    """The state of a client, and its open steps, oldest first.

    Threading: waits for nobody.
    """
    while True:
        state, registered = exchange.loop.state, registration.now
        # Else something was registered between the two looks, and leaves would get the names of others.
        if not state.steps or state.setup is registered.setup:
            steps = tuple(_open_step(exchange, state, registered, current) for current in state.steps)
            return state, steps


def _open_step(exchange: Exchange, state: State, registered: Registered, current: Step) -> OpenStep:
    devices = exchange.devices
    late, leaves = owed(state, current)
    promised = {
        device: exchange.promised.get(-1 if number is None else number)
        for device, number in zip(devices, current.tickets, strict=True)
    }
    return OpenStep(
        number=current.number,
        tickets={device: one.ticket for device, one in promised.items() if one is not None},
        owed={
            devices[device]: registered.explainer.names(mask)
            for device, mask in zip(late, leaves, strict=True)
        },
        num_buckets=len(state.setup.buckets),
        num_launched=current.num_launched,
        num_finished=current.num_finished,
        waited_s=0.0 if current.since_s is None else state.now_s - current.since_s,
    )
