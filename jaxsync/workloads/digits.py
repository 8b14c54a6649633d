"""Handwritten digits: a multilayer perceptron on the 1,797 images that scikit-learn ships."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsync.errors import ConfigError
from jaxsync.extras import import_extra
from jaxsync.workloads.workload import Batch, Params, mean_cross_entropy, normal, shuffled_rows

_NUM_PIXELS = 64
_NUM_CLASSES = 10
_MAX_PIXEL = 16.0
_NUM_TEST_ROWS = 360  # a fifth, as is usual for this data set


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsModel:
    """The `[model]` table of the digits job.

    Attributes:
        hidden: Units of each hidden layer.
        split_seed: Which images are held out for the test.
    """

    hidden: tuple[int, ...] = (256, 128)
    split_seed: int = 0

    def __post_init__(self) -> None:
        problems: list[str] = []
        if min(self.hidden, default=1) < 1:
            problems.append(f"hidden = {list(self.hidden)}: wanted sizes of 1 or more")
        if self.split_seed < 0:
            problems.append(f"split_seed = {self.split_seed}: wanted 0 or more")
        if problems:
            raise ConfigError(source="DigitsModel(...)", problems=tuple(problems))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Digits:
    """The digits workload: see `Workload`. A batch has `image` [rows, 64] in 0..1 and `label` [rows].

    Attributes:
        model: The sizes.
        train: The rows to train on.
        test: The rows held out.
    """

    model: DigitsModel
    train: Batch
    test: Batch

    @classmethod
    def load(cls, model: DigitsModel) -> Digits:
        """The data set, split the same way for the same `split_seed`.

        Raises:
            MissingExtraError: scikit-learn is not installed.
        """
        datasets = import_extra("sklearn.datasets", package="scikit-learn", feature="The digits workload")
        pixels, labels = datasets.load_digits(return_X_y=True)
        rows = {"image": (pixels / _MAX_PIXEL).astype(np.float32), "label": labels.astype(np.int32)}
        order = np.random.default_rng(model.split_seed).permutation(len(labels))
        held_out, kept = order[:_NUM_TEST_ROWS], order[_NUM_TEST_ROWS:]
        return cls(model=model, train=_take(rows, kept), test=_take(rows, held_out))

    @property
    def num_rows(self) -> int:
        """Images of the training set."""
        return len(self.train["label"])

    def init_params(self, seed: int) -> Params:
        """New layers, normal with variance 2 / inputs (He et al. 2015, arXiv:1502.01852, section 2.2)."""
        sizes = [_NUM_PIXELS, *self.model.hidden, _NUM_CLASSES]
        rng = np.random.default_rng(seed)
        return [
            {
                "kernel": normal(rng, (num_in, num_out), (2 / num_in) ** 0.5),
                "bias": np.zeros(num_out, np.float32),
            }
            for num_in, num_out in itertools.pairwise(sizes)
        ]

    def loss_fn(self, params: Params, batch: Any) -> jax.Array:
        """The mean cross-entropy, in nats."""
        return mean_cross_entropy(_logits(params, batch["image"]), batch["label"])

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Shuffled batches without end; an epoch's incomplete last batch is dropped."""
        for rows in shuffled_rows(self.num_rows, batch_size, seed):
            yield _take(self.train, rows)

    def evaluate(self, params: Params) -> dict[str, float]:
        """`test_accuracy`: the share of held-out images told right."""
        logits = np.asarray(jax.jit(_logits)(params, self.test["image"]))
        return {"test_accuracy": float(np.mean(np.argmax(logits, axis=-1) == self.test["label"]))}


def _take(rows: Batch, index: npt.NDArray[np.intp]) -> Batch:
    return {name: values[index] for name, values in rows.items()}


def _logits(params: Params, image: jax.Array) -> jax.Array:
    x = image
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(_dense(layer, x))
    return _dense(last, x)


def _dense(layer: Params, x: jax.Array) -> jax.Array:
    return jnp.add(jnp.dot(x, layer["kernel"]), layer["bias"])
