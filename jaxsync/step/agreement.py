"""What the processes of a mesh compare before they launch a step, so that all launch the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxsync.ingraph.sharded import ShardedOptimizer
from jaxsync.multiprocess.agreement import digest_of
from jaxsync.multiprocess.consent import Consent
from jaxsync.multiprocess.differences import ALL_ELSE
from jaxsync.multiprocess.values import value_digest
from jaxsync.step.options import StepOptions
from jaxsync.train_state import TrainState

Kinds = tuple[Any, ...]


class StepAgreement:
    """The agreement of all processes on the calls of one step. Asks nobody if the mesh is this process's own.

    Attributes:
        is_needed: Whether several processes have devices of the mesh.
    """

    def __init__(self, options: StepOptions, mesh: Mesh) -> None:
        is_sharded = isinstance(options.tx, ShardedOptimizer)
        own = (
            f"accumulate={options.accumulate}, donate={options.donate}, has_aux={options.has_aux}, "
            f"weighted={options.weighted}, skip_nonfinite={options.skip_nonfinite}, sharded={is_sharded}"
        )
        self._consent = Consent(options.plan, mesh, {"make_train_step": own})
        self.is_needed = self._consent.is_needed
        self._num_calls = 0
        self._last_kinds: Kinds | None = None  # of the batch of the last call

    def share(self, leaves: Sequence[Any], *, is_broadcast: bool) -> list[Any]:
        """Parameter leaves with equal values in every process: see `Consent.share`."""
        return self._consent.share(leaves, is_broadcast=is_broadcast)

    def kinds_if_new(self, rows: Sequence[Any]) -> Kinds | None:
        """The shapes and dtypes of a batch, if they are not those of the last call; else notes the call."""
        kinds = tuple((np.shape(x), str(getattr(x, "dtype", type(x).__name__))) for x in rows)
        self._num_calls += 1
        last, self._last_kinds = self._last_kinds, kinds
        if kinds != last:
            return kinds
        call = f"number {self._num_calls}"
        self._consent.go_on(
            "the training step",
            lambda: {"call": call, "batch": _format(kinds), ALL_ELSE: "not asked about"},
        )
        return None

    def on_batch(self, state: TrainState, rows: Sequence[Any], kinds: Kinds) -> None:
        """Asks the other processes whether they have such a batch and state.

        Each time when the shapes are not those of the call before: else a process that comes to its last,
        smaller batch a step early would pair it with another one of the others.
        """

        def facts() -> dict[str, str]:
            held = {
                f"state{jax.tree_util.keystr(path)}": f"{x.dtype}{list(x.shape)}"
                for path, x in jax.tree_util.tree_leaves_with_path(state)
            }
            values = [value_digest(np.asarray(x)) for x in rows if not isinstance(x, jax.Array)]
            return {
                "call": f"number {self._num_calls}",
                "batch": _format(kinds),
                "values of the batch's host arrays": digest_of(values)[:16],
                **held,
            }

        self._consent.ask("the training step", facts)

    def on_program(self, lower: Callable[[], Any], kinds: Kinds) -> None:
        """Asks whether loss and optimizer are the same: another learning rate would part the replicas.

        Args:
            lower: Gives the lowered program; called the first time that `kinds` are asked about.
            kinds: Those of the batch.
        """

        def facts() -> dict[str, str]:
            return {"loss function and optimizer, as compiled": digest_of(lower().as_text())[:16]}

        self._consent.ask("the program of the training step", facts, key=("program", kinds))


def _format(kinds: Kinds) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
