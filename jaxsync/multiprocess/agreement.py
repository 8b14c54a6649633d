"""What processes must agree on before they launch a program together."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import jax
from jax.sharding import Mesh

from jaxsync.errors import AbsentProcessError, DisagreementError, InitializationError, JaxsyncError
from jaxsync.host.peers import explain_losses
from jaxsync.multiprocess.coordination import Coordination, connect
from jaxsync.multiprocess.differences import Facts, find_differences
from jaxsync.multiprocess.rollcall import versions
from jaxsync.plan import SyncPlan

# What may differ: each only says how long this process waits, or how far it runs ahead.
_LOCAL_CONFIG = ("timeout_s", "stall_warning_s", "max_in_flight")

# A process that asks waits longer than a collective of those who do not, by this share: so they find out
# first that it does not come, and can still tell it why.
_LEEWAY = 0.25

_UNASKED = "unasked"  # the digest of who answers without having asked: it equals that of nobody who has

_lock = threading.Lock()  # protects _rounds, and keeps the rounds of one process in one order
_rounds: dict[tuple[int, ...], int] = {}  # processes -> how often they have met
_standing: dict[tuple[int, ...], Statement] = {}  # what this process would answer; any thread writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a process says in a round.

    Attributes:
        subject: What it is about, for people.
        digest: Stands for the facts.
        facts: What must be equal.
    """

    subject: str
    digest: str
    facts: Callable[[], Facts]


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
    said = Statement(subject=subject, digest=digest_of([subject, digest]), facts=facts)
    explain_losses(functools.partial(find_disagreement, timeout_s * _LEEWAY))
    with _lock:
        _take_round(coordination, group, said, timeout_s * (1 + _LEEWAY))


def go_on(subject: str, facts: Callable[[], Facts], processes: Sequence[int]) -> None:
    """Notes what this process goes on with and asks nobody about, since it has changed nothing.

    It is what those are told who have changed something, and so ask, and do not come to where this process
    waits for them.

    Threading: any thread; does not block.

    Args:
        subject: What they would ask about.
        facts: What this process would say; held until the next call.
        processes: As for `agree`.
    """
    # Without the lock, which a thread that waits for the others holds for long: one operation on a dict.
    _standing[tuple(sorted(processes))] = Statement(subject=subject, digest=_UNASKED, facts=facts)


def find_disagreement(patience_s: float) -> DisagreementError | None:
    """The error for a process that lost others because they ask something and it does not; None if not so.

    They are answered, and get the error too. If one neither asks nor answers, that one is lost indeed.

    Threading: blocks for the time in which the others are answered; any thread.

    Args:
        patience_s: How long to wait for those who wait like this process and have yet to find out.
    """
    coordination = connect()
    if coordination is None:
        return None
    if not _lock.acquire(blocking=False):  # another thread of this process asks: it will be told
        return None
    try:
        for group, number in list(_rounds.items()):
            said = _standing.get(group)
            if said is not None and coordination.list(f"{_directory(group)}/{number + 1}/digest"):
                _take_round(coordination, group, said, patience_s)
    except DisagreementError as error:
        return error
    except (JaxsyncError, RuntimeError):  # whatever keeps them from being asked: the loss is the error
        return None
    finally:
        _lock.release()
    return None


def _take_round(
    coordination: Coordination, group: tuple[int, ...], said: Statement, timeout_s: float
) -> None:
    number = _rounds[group] = _rounds.get(group, 0) + 1
    Meeting(coordination, f"{_directory(group)}/{number}", said, group, timeout_s).hold()
    if coordination.process == group[0] and number > 1:
        coordination.delete(f"{_directory(group)}/{number - 1}")  # all have met since, and so have read it


def _directory(group: tuple[int, ...]) -> str:
    return f"agree/{digest_of(group)[:16]}"


class Meeting:
    """One round of an agreement.

    Args:
        coordination: Where they meet.
        place: A directory of its own.
        said: What this process says.
        group: The processes.
        timeout_s: How long to wait for them.
    """

    def __init__(
        self,
        coordination: Coordination,
        place: str,
        said: Statement,
        group: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._coordination = coordination
        self._place = place
        self._said = said
        self._group = group
        self._timeout_s = timeout_s

    def hold(self) -> None:
        """Returns when all have come and said the same.

        Raises:
            DisagreementError: In what they differ; also of processes that came too late for each other.
            AbsentProcessError: Names the processes that did not come.
        """
        is_met, digests = self._exchange("digest", self._said.digest)
        if is_met and len(set(digests.values())) == 1:
            return
        # Left in any case: who comes too late, because it waits for this process elsewhere, finds them there.
        words = json.dumps({"call": self._said.subject, **self._said.facts()})
        is_met, found = self._exchange("facts", words, is_waiting=is_met)
        if len(digests) == len(self._group):
            facts = {process: json.loads(text) for process, text in found.items()}
            if differences := find_differences(facts):  # else only in what the facts leave out
                is_late = _UNASKED in digests.values()
                raise DisagreementError(subject=self._said.subject, differences=differences, is_late=is_late)
        if not is_met:
            raise self._absent(digests)

    def _exchange(self, about: str, word: str, *, is_waiting: bool = True) -> tuple[bool, Mapping[int, str]]:
        """Whether all have met, if this process waits for them; and the word of each that has left one."""
        place = f"{self._place}/{about}"
        self._coordination.put(f"{place}/{self._coordination.process}", word)
        is_met = is_waiting and self._coordination.meet(place, self._group, self._timeout_s)
        return is_met, {int(process): text for process, text in self._coordination.list(place).items()}

    def _absent(self, heard: Mapping[int, str]) -> AbsentProcessError:
        return AbsentProcessError(
            waited_for=f"the agreement on {self._said.subject}",
            missing=tuple(process for process in self._group if process not in heard),
            num_processes=len(self._group),
            timeout_s=self._timeout_s,
        )


def digest_of(value: object) -> str:
    """What stands for a value of JSON in every process, whatever its hash seed."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _is_x64() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # made at run time
