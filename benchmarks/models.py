"""What is trained in the benchmarks: parameter trees, batches, and losses that are cheap beside the sync."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Shapes = dict[str, tuple[int, ...]]
Values = dict[str, np.ndarray[Any, Any]]

# Which limit of target P2 applies: "small" and "large" are the rows of its table, the others go beyond it.
Group = Literal["small", "large", "beyond"]

# Large enough for the update of a bfloat16 parameter to be told from rounding, small enough to stay finite.
LEARNING_RATE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A list of leaves with a loss.

    Attributes:
        name: As on the command line and in the tables.
        group: Which limit of target P2 it is judged by.
        shapes: Leaf -> shape.
        rows: Global batch; None for one row a device.
        loss: `loss(params, batch)` -> the mean over the rows it is given.
        columns: Features of a row; None for a row that is one number.
    """

    name: str
    group: Group
    shapes: Shapes = field(repr=False)
    rows: int | None
    loss: Callable[[Any, Any], jax.Array] = field(repr=False)
    columns: int | None = None

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def params(self, dtype: str) -> Values:
        """Random values; the biases of an MLP start at zero."""
        rng = np.random.default_rng(0)
        return {name: self._values(rng, shape).astype(dtype) for name, shape in self.shapes.items()}

    def num_rows(self, devices: int) -> int:
        """Rows of the global batch."""
        return devices if self.rows is None else self.rows

    def batch(self, dtype: str, devices: int) -> np.ndarray[Any, Any]:
        rows, rng = self.num_rows(devices), np.random.default_rng(1)
        if self.columns is None:
            return rng.uniform(0.5, 1.5, rows).astype(dtype)
        return rng.normal(size=(rows, self.columns)).astype(dtype)

    def _values(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if self.columns is not None and len(shape) == 1:
            return np.zeros(shape, np.float32)
        scale = 1 / math.sqrt(shape[0]) if self.columns is not None else 1.0
        return rng.standard_normal(shape, np.float32) * np.float32(scale)


def mlp(layers: int, width: int, rows: int, group: Group) -> Model:
    """Tanh layers of a matrix and a bias each: two leaves a layer."""
    shapes: Shapes = {}
    for layer in range(layers):
        shapes |= {f"layer{layer:03d}/w": (width, width), f"layer{layer:03d}/b": (width,)}

    def loss(params: Mapping[str, jax.Array], batch: jax.Array) -> jax.Array:
        x = batch
        for layer in range(layers):
            x = jnp.tanh(x @ params[f"layer{layer:03d}/w"] + params[f"layer{layer:03d}/b"])
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    name = f"L={layers} D={width} B={rows}"
    return Model(name=name, group=group, shapes=shapes, rows=rows, loss=loss, columns=width)


def touched(name: str, shapes: Shapes, group: Group) -> Model:
    """Leaves of which every element is multiplied with a device's one row, and no more.

    The gradient of an element is a sum over rows of something that differs in each row and element. Were it
    the same in all elements of a leaf, a compiler that sees all devices (plain `jit`) could reduce one number
    instead of the leaf. It is a least-squares fit, so that parameters neither grow nor fade away.
    """
    return Model(name=name, group=group, shapes=shapes, rows=None, loss=_touch)


def _touch(params: Mapping[str, jax.Array], batch: jax.Array) -> jax.Array:
    total = jnp.zeros((), jnp.float32)
    for leaf in params.values():
        rows = batch.reshape(-1, *(1 for _ in leaf.shape))
        total += jnp.sum(jnp.square(leaf * rows - 1).astype(jnp.float32)) / 2
    return total / batch.shape[0]


def resnet50_shapes() -> Shapes:
    """The leaves of ResNet-50 (He et al. 2015, table 1) for ImageNet.

    >>> sum(math.prod(shape) for shape in resnet50_shapes().values())
    25557032
    """
    return dict(_resnet50())


def _resnet50() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _conv("stem", 7, 3, 64)
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            if block == 0:
                yield from _conv(f"{name}/projection", 1, channels, 4 * width)
            yield from _conv(f"{name}/reduce", 1, channels, width)
            yield from _conv(f"{name}/conv", 3, width, width)
            yield from _conv(f"{name}/expand", 1, width, 4 * width)
            channels = 4 * width
    yield from _dense("classifier", channels, 1000)


def _conv(name: str, size: int, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A convolution without bias, and its batch norm."""
    yield f"{name}/w", (size, size, inputs, outputs)
    yield f"{name}/scale", (outputs,)
    yield f"{name}/bias", (outputs,)


def _dense(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}/w", (inputs, outputs)
    yield f"{name}/b", (outputs,)


def _layer_norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}/scale", (width,)
    yield f"{name}/bias", (width,)


def bert_base_shapes() -> Shapes:
    """The leaves of BERT-base, uncased, with its pooler (Devlin et al. 2018, section 3).

    >>> sum(math.prod(shape) for shape in bert_base_shapes().values())
    109482240
    """
    return dict(_bert_base())


def _bert_base(width: int = 768, layers: int = 12) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows in (("word", 30522), ("position", 512), ("segment", 2)):
        yield f"embedding/{name}", (rows, width)
    yield from _layer_norm("embedding/norm", width)
    for layer in range(layers):
        name = f"layer{layer:02d}"
        for part in ("query", "key", "value", "output"):
            yield from _dense(f"{name}/{part}", width, width)
        yield from _layer_norm(f"{name}/attention_norm", width)
        yield from _dense(f"{name}/expand", width, 4 * width)
        yield from _dense(f"{name}/contract", 4 * width, width)
        yield from _layer_norm(f"{name}/norm", width)
    yield from _dense("pooler", width, width)


def all_models() -> dict[str, Model]:
    """Name -> model, in the order of the tables."""
    vectors: Shapes = {f"w{index}": (1_000_000,) for index in range(10)}
    models = (
        mlp(50, 32, 64, "small"),
        mlp(150, 16, 64, "small"),
        mlp(20, 256, 256, "large"),
        touched("10 x 1M", vectors, "large"),
        touched("ResNet-50", resnet50_shapes(), "beyond"),
        touched("BERT-base", bert_base_shapes(), "beyond"),
    )
    return {model.name: model for model in models}
