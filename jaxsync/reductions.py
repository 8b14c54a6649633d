"""Gradients of single devices on their way: held until all are there, launched as programs, taken out."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxsync.buckets import Bucket
from jaxsync.crossing import assemble, is_ready, sync_program, take_out
from jaxsync.host.launcher import process_launcher, resolve_window
from jaxsync.host.messages import Launch, bits
from jaxsync.host.peers import peer_error
from jaxsync.host.recorder import Recorder
from jaxsync.registration import Registered, Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A launched program: its buckets, its leaves by plan index, and the reduced array of each."""

    step: int
    buckets: tuple[int, ...]
    leaves: tuple[int, ...]
    outputs: list[jax.Array]
    launched_s: float


class Reductions:
    """The gradients that a client holds, the programs that reduce them, and their results.

    Launches are of an open step, and while one is open nothing else can be registered: so what is registered
    now is what they are made for.

    Args:
        registration: Of the client.
        devices: Those of this process.
        recorder: Told of launches and their ends.
        announced: The leaves that this process's devices take part with in an open step.

    Threading: all but `keep` runs on the loop's thread. Callers' threads add gradients, each before the
    message that tells of them, and never change what is there; every such change is one operation on a dict.
    """

    def __init__(
        self,
        registration: Registration,
        devices: Sequence[jax.Device],
        recorder: Recorder,
        announced: Callable[[int], int],
    ) -> None:
        self.num_submitted = 0  # gradients; written under the lock of the loop, as `keep` is called
        self.num_launched = 0  # buckets; loop thread only, as are the next two
        self.num_bytes = 0  # of the launched, on one device
        self.paused_s = 0.0  # spent launching, so compiling, too
        self._registration = registration
        self._devices = tuple(devices)
        self._recorder = recorder
        self._announced = announced
        config = registration.now.plan.config
        self._window = resolve_window(config.max_in_flight, self._devices[0].platform)
        # (step, device) -> leaf -> gradient. Callers' threads add, the loop's thread takes.
        self._gradients: dict[tuple[int, int], dict[int, jax.Array]] = {}
        # step -> device -> leaf -> its block. Loop thread only, as is all that follows.
        self._results: dict[int, list[dict[int, jax.Array]]] = {}
        self._waiting: deque[Launch] = deque()
        self._running: deque[Running] = deque()
        self._last_launched = -1  # step
        # The leaves that all processes took part with in the step before, and in whose terms; None if they
        # must say so first.
        self._agreed: tuple[Registered | None, int | None] = (None, None)

    def keep(self, step: int, device: int, gradients: Mapping[int, jax.Array]) -> None:
        """Holds gradients until their bucket is launched.

        Threading: callers' threads, one at a time.
        """
        self._gradients.setdefault((step, device), {}).update(gradients)
        self.num_submitted += len(gradients)

    def add(self, launch: Launch) -> None:
        """Puts a launch in line."""
        self._waiting.append(launch)

    def is_busy(self) -> bool:
        """Whether a launch waits, or a program runs."""
        return bool(self._running or self._waiting)

    def blocks(self, step: int, device: int) -> dict[int, jax.Array]:
        """The reduced gradients of a complete step on one device, by leaf."""
        results = self._results.get(step)
        return {} if results is None else results[device]

    def forget(self, step: int, registered: Registered) -> None:
        """Lets go of a complete step.

        Args:
            step: Its number.
            registered: What it was made for; something else may be registered by now.
        """
        for device in range(len(self._devices)):
            self._gradients.pop((step, device), None)
        self._results.pop(step, None)
        if step > self._last_launched:  # nobody here took part: is the next one the others' next, too?
            self._agreed = (registered, None)

    def forget_all(self) -> None:
        """Lets go of everything."""
        self._gradients.clear()
        self._results.clear()
        self.give_up()

    def give_up(self) -> None:
        """Launches no more, and waits for no program."""
        self._waiting.clear()
        self._running.clear()

    def advance(self, finish: Callable[[int], None]) -> bool:
        """Takes one program further, a finished one first: its end is seen to while others run.

        Args:
            finish: Told the step of each bucket that has its result.

        Returns:
            Whether anything could be done.
        """
        if self._running and is_ready(self._running[0].outputs[0]):
            self._finish(self._running.popleft(), finish)
        elif launches := self._launchable():
            for _ in launches:
                self._waiting.popleft()
            self._launch(launches)
        else:
            return False
        return True

    def _is_launchable(self, launch: Launch) -> bool:
        """Whether all inputs are ready: on CPU a program launched on others can end the process."""
        leaves = bits(launch.leaves)
        for device in range(len(self._devices)):
            held = self._gradients.get((launch.step, device), {})
            if not all([is_ready(held[leaf]) for leaf in leaves if leaf in held]):  # noqa: C419
                return False
        return True

    def _launchable(self) -> list[Launch]:
        """The launches to make now, as one program: the oldest; or all of its step, if they are all there.

        One program takes less time than one for each bucket. Only these two, since every set of buckets is a
        program to compile.
        """
        if not self._waiting:
            return []
        now = self._registration.now
        if now.consent.is_needed:
            return self._shared_step(now)
        first = self._waiting[0]
        whole = [launch for launch in self._waiting if launch.step == first.step]
        if len(whole) == len(now.plan.buckets) and all(map(self._is_launchable, whole)):
            return whole
        return [first] if self._is_launchable(first) else []

    def _shared_step(self, now: Registered) -> list[Launch]:
        """All launches of the oldest step, if they are all there.

        As one program always, whatever was ready first here: every process must launch the same programs.
        """
        step = self._waiting[0].step
        found = [launch for launch in self._waiting if launch.step == step]
        announced = self._announced(step)
        num_wanted = sum(bool(bucket & announced) for bucket in now.setup.buckets)
        return found if len(found) == num_wanted and all(map(self._is_launchable, found)) else []

    def _agree_on_leaves(self, now: Registered, step: int, leaves: int) -> None:
        """Asks the other processes, if this set of leaves is not that of the step before; else notes it."""
        registered, agreed = self._agreed
        if registered is not now:
            agreed = now.setup.all_leaves  # as all have registered
        if now.consent.is_needed:
            explainer = now.explainer  # `facts` is held for as long as nothing else is said
            say = now.consent.go_on if leaves == agreed else now.consent.ask

            def facts() -> dict[str, str]:
                announced = {f"leaf {name}": "announced" for name in explainer.names(leaves)}
                return {"step": str(step), **announced}

            say(f"the leaves of step {step}", facts)
        self._agreed, self._last_launched = (now, leaves), step

    def _launch(self, launches: Sequence[Launch]) -> None:
        now = self._registration.now
        step, buckets = launches[0].step, tuple(launch.bucket for launch in launches)
        leaves = [bits(launch.leaves) for launch in launches]
        start_s = time.monotonic()
        self._agree_on_leaves(
            now, step, sum(launch.leaves for launch in launches)
        )  # disjoint, as buckets are
        with _number_types(now):
            program = sync_program(now.plan, buckets, leaves)
            arrays = assemble(now.plan, self._take_gradients(step, leaves))
            outputs = process_launcher().launch(
                lambda: program(arrays), self._window, lambda out: (out[0],), caller=self
            )
        now_s = time.monotonic()
        self.paused_s += now_s - start_s
        every = tuple(itertools.chain.from_iterable(leaves))
        running = Running(step=step, buckets=buckets, leaves=every, outputs=outputs, launched_s=now_s)
        self._running.append(running)
        for number, own in zip(buckets, leaves, strict=True):
            self._record_launch(step, number, self._num_bytes(now.plan.buckets[number], own), now_s - start_s)

    def _num_bytes(self, bucket: Bucket, leaves: Sequence[int]) -> int:
        """The bytes of the announced leaves of a bucket."""
        entries = self._registration.now.plan.leaves
        num_elements = sum(math.prod(entries[leaf].local_shape) for leaf in leaves)
        return bucket.num_bytes * num_elements // bucket.num_elements

    def _record_launch(self, step: int, number: int, num_bytes: int, took_s: float) -> None:
        self.num_launched += 1
        self.num_bytes += num_bytes
        self._recorder.record(
            "launch", step=step, what=f"bucket {number}", num_bytes=num_bytes, took_s=took_s
        )

    def _take_gradients(self, step: int, buckets: Sequence[Sequence[int]]) -> list[list[list[jax.Array]]]:
        """For each device, for each bucket, the gradients of its leaves, which are kept no longer."""
        return [
            [[self._take_gradient(step, device, leaf) for leaf in leaves] for leaves in buckets]
            for device in range(len(self._devices))
        ]

    def _take_gradient(self, step: int, device: int, leaf: int) -> jax.Array:
        gradient = self._gradients.get((step, device), {}).pop(leaf, None)
        if gradient is None:  # unused="zero"
            entry = self._registration.now.plan.leaves[leaf]
            zeros = np.zeros(entry.local_shape, entry.dtype)
            gradient = jax.device_put(zeros, self._devices[device])
        self._check_input(gradient, leaf, device)
        return gradient

    def _check_input(self, gradient: jax.Array, leaf: int, device: int) -> None:
        try:
            gradient.block_until_ready()  # it is ready: this raises what its computation failed with
        except Exception as error:
            explainer = self._registration.now.explainer
            error.add_note(f"gradient {explainer.paths[leaf]} of {explainer.devices[device]}")
            raise

    def _finish(self, done: Running, finish: Callable[[int], None]) -> None:
        try:
            jax.block_until_ready(done.outputs)
        except Exception as error:
            if (lost := peer_error(error)) is not None:
                raise lost from error
            raise
        results = self._results.setdefault(done.step, [{} for _ in self._devices])
        for result, blocks in zip(results, take_out(done.outputs), strict=True):
            result.update(zip(done.leaves, blocks, strict=True))
        took_s = time.monotonic() - done.launched_s
        for bucket in done.buckets:
            self._recorder.record("finish", step=done.step, what=f"bucket {bucket}", took_s=took_s)
            finish(done.step)


def _number_types(now: Registered) -> contextlib.AbstractContextManager[object]:
    """Lets this thread compute in 64 bits if the plan does: x64 may be the caller's setting alone."""
    return jax.enable_x64(True) if now.is_wide else contextlib.nullcontext()
