"""What processes must agree on before they launch a program together."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import jax
from jax.sharding import Mesh

from jaxsync.errors import AbsentProcessError, DisagreementError, InitializationError
from jaxsync.multiprocess.coordination import Coordination, connect
from jaxsync.multiprocess.differences import Facts, find_differences
from jaxsync.multiprocess.rollcall import versions
from jaxsync.plan import SyncPlan

# What may differ: each only says how long this process waits, or how far it runs ahead.
_LOCAL_CONFIG = ("timeout_s", "stall_warning_s", "max_in_flight")

_lock = threading.Lock()  # protects _rounds, and keeps the rounds of one process in one order
_rounds: dict[tuple[int, ...], int] = {}  # processes -> how often they have met


def mesh_processes(mesh: Mesh) -> tuple[int, ...]:
    """The processes that own devices of a mesh, in order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def plan_facts(plan: SyncPlan, mesh: Mesh) -> dict[str, str]:
    """What of a plan must be the same in every process, as people read it.

    The leaves in order, with path, shape, dtype and spec; the axes and devices of the mesh, each device with
    the process that owns it; the config, but for timeouts and the dispatch window; versions.
    """
    config = {name: value for name, value in asdict(plan.config).items() if name not in _LOCAL_CONFIG}
    devices = [f"{device.id} of process {device.process_index}" for device in mesh.devices.flat]
    return {
        **versions(),
        "jax_enable_x64": str(_is_x64()),
        **{f"config.{name}": repr(value) for name, value in config.items()},
        "mesh": ", ".join(f"{name}={size}" for name, size in mesh.shape.items()),
        **{f"device {index} of the mesh": device for index, device in enumerate(devices)},
        "number of leaves": str(len(plan.leaves)),
        **{
            f"leaf {index}": f"{leaf.path} {leaf.dtype}{list(leaf.shape)} {leaf.spec}"
            for index, leaf in enumerate(plan.leaves)
        },
        "buckets": digest_of([bucket.leaves for bucket in plan.buckets])[:16],
    }


def plan_digest(plan: SyncPlan, mesh: Mesh) -> str:
    """What stands for `plan_facts`: equal digests mean equal facts, and it costs less to make."""
    devices = [(device.id, device.process_index) for device in mesh.devices.flat]
    return digest_of([plan.fingerprint, devices, versions(), _is_x64()])


def agree(
    subject: str, digest: str, facts: Callable[[], Facts], processes: Sequence[int], timeout_s: float
) -> None:
    """Returns when all `processes` have called this for the same subject, with equal facts.

    Every process must make the same calls in the same order. Costs two messages to the coordinator and a
    meeting, whatever the size of the facts; these travel only when the digests differ.

    Threading: blocks; one call at a time.

    Args:
        subject: What the facts are about, for people.
        digest: Stands for the facts: equal digests must mean equal facts.
        facts: What must be equal.
        processes: Who must agree; this process is among them.
        timeout_s: How long to wait for them.

    Raises:
        DisagreementError: In every one of these processes: in what they differ, and who is on which side.
        AbsentProcessError: Names the processes that did not come.
        PeerLostError: The coordinator is gone.
        InitializationError: The process was not initialized, or JAX has hidden its coordination service.
    """
    coordination = connect()
    if coordination is None:
        raise InitializationError(reason="the mesh has devices of other processes, but this one is alone")
    group = tuple(sorted(processes))
    with _lock:
        number = _rounds[group] = _rounds.get(group, 0) + 1
        directory = f"agree/{digest_of(group)[:16]}"
        meeting = Meeting(coordination, f"{directory}/{number}", subject, group, timeout_s)
        if len(set(meeting.exchange("digest", digest_of([subject, digest])).values())) > 1:
            own = json.dumps({"call": subject, **facts()})
            said = {process: json.loads(text) for process, text in meeting.exchange("facts", own).items()}
            if differences := find_differences(said):  # else only in what the facts leave out
                raise DisagreementError(subject=subject, differences=differences)
        if coordination.process == group[0] and number > 1:
            coordination.delete(f"{directory}/{number - 1}")  # all have met since, and so have read it


class Meeting:
    """One round of an agreement."""

    def __init__(
        self, coordination: Coordination, place: str, subject: str, group: Sequence[int], timeout_s: float
    ) -> None:
        self._coordination = coordination
        self._place = place
        self._subject = subject
        self._group = group
        self._timeout_s = timeout_s

    def exchange(self, about: str, word: str) -> Mapping[int, str]:
        """The word of each process.

        Raises:
            AbsentProcessError: Names the processes that did not come.
        """
        place = f"{self._place}/{about}"
        self._coordination.put(f"{place}/{self._coordination.process}", word)
        is_met = self._coordination.meet(place, self._group, self._timeout_s)
        heard = {int(process): text for process, text in self._coordination.list(place).items()}
        if is_met:
            return heard
        raise AbsentProcessError(
            waited_for=f"the agreement on {self._subject}",
            missing=tuple(process for process in self._group if process not in heard),
            num_processes=len(self._group),
            timeout_s=self._timeout_s,
        )


def digest_of(value: object) -> str:
    """What stands for a value of JSON in every process, whatever its hash seed."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _is_x64() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # made at run time
