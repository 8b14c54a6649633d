"""Workload: what a training job needs to know of a model and its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Params = Any
Batch = dict[str, npt.NDArray[Any]]


class Workload(Protocol):
    """A model with its data. Holds the data on the host; the parameters are passed in and out."""

    @property
    def num_rows(self) -> int:
        """Rows of the training set: the largest batch there can be."""

    def init_params(self, seed: int) -> Params:
        """New parameters on the host, the same for the same seed."""

    def loss_fn(self, params: Params, batch: Any) -> jax.Array:
        """The mean loss over the rows of `batch`; traceable, and it communicates with nobody.

        The mean over equal shards of a batch is the mean over the batch.
        """

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Batches of `batch_size` rows on the host, without end, the same for the same seed.

        Rows are shuffled anew every epoch; those that fill no batch at the end of an epoch are dropped.
        """

    def evaluate(self, params: Params) -> dict[str, float]:
        """Metrics on held-out data, computed on one device. `params` are host or one-device arrays."""


def shuffled_rows(num_rows: int, batch_size: int, seed: int) -> Iterator[npt.NDArray[np.intp]]:
    """Indices of the rows of each batch, without end: each epoch in a new order, its remainder dropped.

    Args:
        num_rows: Rows of the data set, at least `batch_size`.
        batch_size: Rows of a batch.
        seed: Of the order.

    >>> batches = shuffled_rows(5, 2, seed=0)
    >>> epoch = [next(batches), next(batches)]
    >>> len(set(np.concatenate(epoch).tolist()))
    4
    """
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(num_rows)
        for start in range(0, num_rows - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> npt.NDArray[np.float32]:
    """Normal values of mean 0 and standard deviation `scale`, in float32 on the host.

    On the host because `jax.random` would compile a program for each shape, which takes longer than a short
    training; and an interrupt between such programs can crash the process while it exits (jax 0.10.2).
    """
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels of -log softmax(logits)[label], in nats.

    Args:
        logits: [..., classes].
        labels: [...], ints.

    >>> round(float(mean_cross_entropy(jnp.zeros((3, 2)), jnp.zeros(3, jnp.int32))), 4)
    0.6931
    """
    log_p = jax.nn.log_softmax(logits)
    return jnp.negative(jnp.take_along_axis(log_p, labels[..., None], axis=-1).mean())
