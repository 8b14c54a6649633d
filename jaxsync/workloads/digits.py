"""Handwritten digits: a multilayer perceptron on the 1,797 images that scikit-learn ships."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsync.errors import ConfigError
from jaxsync.workloads.workload import Batch, Params, import_extra, shuffled_rows

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
        problems = (
            [f"hidden = {list(self.hidden)}: wanted units of 1 or more"]
            if min(self.hidden, default=1) < 1
            else []
        )
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
        rows = {
            "image": (pixels / _MAX_PIXEL).astype(np.float32),
            "label": labels.astype(np.int32),
        }
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
        keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
        return {
            f"layer_{index}": {
                "kernel": jax.random.normal(key, (num_in, num_out)) * (2 / num_in) ** 0.5,
                "bias": jnp.zeros(num_out),
            }
            for index, (key, num_in, num_out) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=True))
        }

    def loss_fn(self, params: Params, batch: Batch) -> jax.Array:
        """The mean cross-entropy, in nats."""
        log_p = jax.nn.log_softmax(_logits(params, batch["image"]))
        return -jnp.take_along_axis(log_p, batch["label"][:, None], axis=-1).mean()

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Shuffled batches without end; an epoch's incomplete last batch is dropped."""
        for rows in shuffled_rows(self.num_rows, batch_size, seed):
            yield _take(self.train, rows)

    def evaluate(self, params: Params) -> dict[str, float]:
        """`test_accuracy`: the share of held-out images told right."""
        logits = jax.jit(_logits)(params, self.test["image"])
        return {"test_accuracy": float(np.mean(np.argmax(logits, axis=-1) == self.test["label"]))}


def _take(rows: Batch, index: npt.NDArray[np.intp]) -> Batch:
    return {name: values[index] for name, values in rows.items()}


def _logits(params: Params, image: jax.Array) -> jax.Array:
    x = image
    *hidden, last = params.values()
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]
