"""What the processes of one plan agree on, each thing once."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxsync.errors import MeshError
from jaxsync.mesh import format_mesh
from jaxsync.multiprocess.agreement import (
    agree,
    digest_of,
    go_on,
    mesh_processes,
    plan_digest,
    plan_facts,
)
from jaxsync.multiprocess.differences import ALL_ELSE, Facts
from jaxsync.multiprocess.runtime import patience_s
from jaxsync.multiprocess.values import broadcast, host_value, restore, value_digest
from jaxsync.plan import SyncPlan


def agree_on_values(subject: str, tree: Any, shardings: Sequence[Any]) -> None:
    """Returns when all processes of these shardings bring the same values for `tree`; at once if alone.

    Arrays that are on the mesh of several processes already are not compared.

    Raises:
        DisagreementError: In every process: which leaves differ.
        AbsentProcessError: Names the processes that did not come.
    """
    devices = {device for sharding in shardings for device in sharding.device_set}
    processes = sorted({device.process_index for device in devices})
    if len(processes) < 2:
        return
    facts = _value_facts(
        (jax.tree_util.keystr(path), _bits(x))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if not isinstance(x, jax.Array) or x.is_fully_addressable
    )
    agree(subject, digest_of(sorted(facts.items())), lambda: facts, processes, patience_s())


def _bits(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _value_facts(values: Iterable[tuple[str, Any]]) -> Facts:
    return {f"value of {path}": f"bits {value_digest(value)}" for path, value in values}


class Consent:
    """The agreement of all processes on what one of them is about to do with a plan.

    Args:
        plan: The plan.
        mesh: Its mesh.
        options: What else must be the same in every process.

    Raises:
        MeshError: This process owns no device of the mesh: it could only wait, or fail amid the others.
    """

    def __init__(self, plan: SyncPlan, mesh: Mesh, options: Facts) -> None:
        self._plan = plan
        self._mesh = mesh
        self._options = dict(options)
        self._processes = mesh_processes(mesh)
        self._given: set[Hashable] = set()
        self.is_needed = len(self._processes) > 1
        if (me := jax.process_index()) not in self._processes:
            axis = json.dumps(mesh.axis_names[0])
            hint = f"the job has {jax.device_count()}: use {{{axis}: jax.device_count()}}"
            problem = f"process {me} has no device in the mesh; {hint}"
            raise MeshError(mesh=format_mesh(mesh), problems=(problem,))

    def ask(self, subject: str, facts: Callable[[], Facts], key: Hashable = None) -> None:
        """Returns when all processes have asked the same with the same plan, options and facts.

        Asks nobody if the mesh is this process's own, or if `key` is not None and was asked with before.

        Raises:
            DisagreementError: In every process: in what they differ.
            AbsentProcessError: Names the processes that did not ask.
            PeerLostError: The coordinator is gone.
            InitializationError: `jaxsync.initialize` was not called.
        """
        if not self.is_needed or (key is not None and key in self._given):
            return
        more = {**self._options, **facts()}
        agree(
            subject,
            digest_of([plan_digest(self._plan, self._mesh), more]),
            lambda: {**plan_facts(self._plan, self._mesh), **more},
            self._processes,
            patience_s(),
        )
        if key is not None:
            self._given.add(key)
        call = f"none, but a program launched after the agreement on {subject}"
        self.go_on(f"what follows {subject}", lambda: {"call": call, ALL_ELSE: "not asked about"})

    def go_on(self, subject: str, facts: Callable[[], Facts]) -> None:
        """Notes what this process does without asking, as nothing has changed: for each launch like that.

        If others ask meanwhile, since something has changed there, this process waits for them in vain. Then
        all get a DisagreementError, made of what is noted here; without it, one that only says what the
        others asked.

        Threading: any thread; does not block.

        Args:
            subject: As `ask` would have it.
            facts: Likewise; held until the next call. It must hold no array.
        """
        if self.is_needed:
            go_on(
                subject,
                lambda: {**plan_facts(self._plan, self._mesh), **self._options, **facts()},
                self._processes,
            )

    def share(self, leaves: Sequence[Any], *, is_broadcast: bool) -> list[Any]:
        """Parameter leaves with equal values in every process: those of the first process, or else their own.

        Args:
            leaves: In plan order.
            is_broadcast: Whether the first process's values count; if not, all must have the same.

        Raises:
            DisagreementError: They have not; names the leaves.
            AbsentProcessError, PeerLostError, InitializationError: As for `ask`.
        """
        if not self.is_needed:
            return list(leaves)
        values = [host_value(x, leaf) for x, leaf in zip(leaves, self._plan.leaves, strict=True)]
        if is_broadcast:
            self.ask("the parameters", dict)
            sent = broadcast(values, self._mesh)
        else:
            paths = [leaf.path for leaf in self._plan.leaves]
            self.ask("the values of the parameters", lambda: _value_facts(zip(paths, values, strict=True)))
            sent = values
        return [restore(value, x) for x, value in zip(leaves, sent, strict=True)]
