"""Batches as a step wants them: from anywhere to the devices of its mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsync.placement import check_batch, put
from jaxsync.step.options import StepOptions


class BatchPlacer:
    """Places batches on a mesh, their rows divided over the data axes.

    Args:
        options: Those of the step.
        mesh: The devices of its plan.
        is_shared: Whether several processes have devices of the mesh.
    """

    def __init__(self, options: StepOptions, mesh: Mesh, *, is_shared: bool) -> None:
        self._num_replicas = options.plan.num_replicas
        self._divisor = options.plan.num_replicas * options.accumulate
        self._is_pmap = options.transform == "pmap"
        self._is_shared = is_shared
        self._shardings = {
            ndim: NamedSharding(mesh, spec)
            for ndim, spec in ((0, PartitionSpec()), (1, options.plan.batch_spec))
        }

    def place(self, batch: Any) -> Any:
        """The batch on the mesh, which costs little if it is there already; shapes stay shapes.

        Raises:
            BatchError: It cannot be divided, or its leaves differ in their rows.
        """
        leaves, treedef = jax.tree.flatten(batch)
        if self._is_pmap:
            check_batch(batch, self._divisor)
            leaves = [self._stack(x) for x in leaves]
        shardings = [self._shardings[min(np.ndim(x), 1)] for x in leaves]
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            leaves = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for x, sharding in zip(leaves, shardings, strict=True)
            ]
        elif not all(map(_is_placed, leaves, shardings)):
            check_batch(batch, self._divisor)
            # Copied, since JAX may go on reading a NumPy array after the call: a loader that refills its
            # buffer would train this step on the next step's rows. `put` copies the rows of one of several
            # processes itself.
            own = [np.array(x) if isinstance(x, np.ndarray) and not self._is_shared else x for x in leaves]
            leaves = put(own, shardings)
        return jax.tree.unflatten(treedef, leaves)

    def _stack(self, x: Any) -> Any:
        """The rows of each device along a leading dim, as `pmap` wants them."""
        n, shape = self._num_replicas, np.shape(x)
        return x.reshape(n, shape[0] // n, *shape[1:]) if shape else np.broadcast_to(x, (n,))


def _is_placed(x: Any, sharding: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and x.sharding == sharding
