"""A character model of Python's own help texts: a small decoder-only transformer."""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsync.errors import ConfigError
from jaxsync.workloads.workload import Batch, Params, mean_cross_entropy, normal, shuffled_rows

_VAL_SHARE = 10  # one tenth of the text is held out
_EVAL_WINDOWS = 32  # at once: bounds the memory of an evaluation, whatever the text's length
_NORM_EPSILON = 1e-6  # keeps the norm of a row of zeros finite


@dataclass(frozen=True, slots=True, kw_only=True)
class CharlmModel:
    """The `[model]` table of the charlm job.

    Attributes:
        context: Characters the model sees at once, and predicts in one row of a batch.
        width: Of the residual stream; a multiple of `num_heads`.
        num_heads: Attention heads of a block.
        num_blocks: Transformer blocks.
    """

    context: int = 64
    width: int = 64
    num_heads: int = 4
    num_blocks: int = 2

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {getattr(self, name)}: wanted 1 or more"
            for name in ("context", "width", "num_heads", "num_blocks")
            if getattr(self, name) < 1
        ]
        if not problems and self.width % self.num_heads:
            problems.append(f"width = {self.width}: wanted a multiple of num_heads = {self.num_heads}")
        if problems:
            raise ConfigError(source="CharlmModel(...)", problems=tuple(problems))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Charlm:
    """The charlm workload: see `Workload`. A batch has `text` [rows, context + 1], indices into `alphabet`.

    The text is that of this interpreter's `pydoc_data.topics`, in alphabetical order of the topics; the
    last tenth is held out. Some topics repeat passages of others, so held-out text is not all unseen.

    Attributes:
        model: The sizes.
        alphabet: The characters of the text, sorted.
        train: The text to train on.
        val: The text held out.
    """

    model: CharlmModel
    alphabet: str
    train: npt.NDArray[np.int32]
    val: npt.NDArray[np.int32]

    @classmethod
    def load(cls, model: CharlmModel) -> Charlm:
        """The text of this interpreter, cut into training and held-out text.

        Raises:
            ConfigError: The context is longer than the held-out text.
        """
        topics = pydoc_data.topics.topics
        text = "".join(topics[name] for name in sorted(topics))
        alphabet = "".join(sorted(set(text)))
        index = {char: i for i, char in enumerate(alphabet)}
        codes = np.array([index[char] for char in text], np.int32)
        cut = len(codes) - len(codes) // _VAL_SHARE
        if model.context >= len(codes) - cut:
            problem = f"model.context = {model.context}: the held-out text has {len(codes) - cut} characters"
            raise ConfigError(source="the charlm job", problems=(problem,))
        return cls(model=model, alphabet=alphabet, train=codes[:cut], val=codes[cut:])

    @property
    def num_rows(self) -> int:
        """Windows of one epoch: the training text cut into pieces of `context` characters, less one."""
        # One less, so that every random offset of an epoch leaves as many windows.
        return (len(self.train) - 1) // self.model.context - 1

    def init_params(self, seed: int) -> Params:
        """New parameters. The embedding is the output layer too (Press and Wolf 2017, arXiv:1608.05859)."""
        width, num_blocks = self.model.width, self.model.num_blocks
        rng = np.random.default_rng(seed)
        return {
            "token": normal(rng, (len(self.alphabet), width), width**-0.5),
            "place": normal(rng, (self.model.context, width), width**-0.5),
            "blocks": [_init_block(rng, width, num_blocks) for _ in range(num_blocks)],
            "norm": np.ones(width, np.float32),
        }

    def loss_fn(self, params: Params, batch: Any) -> jax.Array:
        """The mean cross-entropy of the next character, in nats."""
        text = batch["text"]
        return mean_cross_entropy(self.logits(params, text[:, :-1]), text[:, 1:])

    def logits(self, params: Params, text: Any) -> jax.Array:
        """For each character of `text` [rows, length <= context], the logits of the one that follows."""
        x = jnp.asarray(params["token"])[text] + params["place"][: text.shape[1]]
        for block in params["blocks"]:
            x = x + _attention(block, _rms_norm(x, block["attention_norm"]), self.model.num_heads)
            hidden = jax.nn.gelu(_rms_norm(x, block["mlp_norm"]) @ block["mlp_in"])
            x = x + hidden @ block["mlp_out"]
        return jnp.dot(_rms_norm(x, params["norm"]), params["token"].T)

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Windows that do not overlap within an epoch, shuffled; an incomplete last batch is dropped.

        The windows of each epoch begin at another offset, so that the cuts move.
        """
        context, rng = self.model.context, np.random.default_rng(seed)
        offset = 0
        for number, rows in enumerate(shuffled_rows(self.num_rows, batch_size, seed)):
            if number % (self.num_rows // batch_size) == 0:
                offset = int(rng.integers(context))
            starts = offset + rows * context
            yield {"text": self.train[starts[:, None] + np.arange(context + 1)]}

    def evaluate(self, params: Params) -> dict[str, float]:
        """`val_bits_per_char`, and `unigram_bits_per_char`: the entropy of the held-out characters.

        The entropy is what no model without context can beat, not even one that knows the held-out
        frequencies. The held-out text is cut into windows that do not overlap; what fills none is left out.
        """
        context = self.model.context
        starts = np.arange(0, len(self.val) - context, context)
        windows = self.val[starts[:, None] + np.arange(context + 1)]

        def mean_loss(params: Params, windows: jax.Array) -> jax.Array:
            row_losses = jax.lax.map(
                lambda text: self.loss_fn(params, {"text": text[None]}), windows, batch_size=_EVAL_WINDOWS
            )
            return jnp.mean(row_losses)

        nats = float(jax.jit(mean_loss)(params, windows))
        return {"val_bits_per_char": nats / math.log(2), "unigram_bits_per_char": entropy_bits(self.val)}


def entropy_bits(codes: npt.NDArray[np.int32]) -> float:
    """The entropy of the empirical distribution of `codes`, in bits a code.

    >>> entropy_bits(np.array([0, 1, 2, 3, 0, 1, 2, 3], np.int32))
    2.0
    """
    counts = np.bincount(codes)
    shares = counts[counts > 0] / len(codes)
    return float(-np.sum(shares * np.log2(shares)))


def _init_block(rng: np.random.Generator, width: int, num_blocks: int) -> Params:
    scale, wide_scale = width**-0.5, (4 * width) ** -0.5
    # What is added to the residual stream shrinks with the number of additions, so that the stream does not
    # grow with depth (Radford et al. 2019, GPT-2, section 2.3).
    shrink = (2 * num_blocks) ** -0.5
    return {
        "attention_norm": np.ones(width, np.float32),
        "qkv": normal(rng, (width, 3 * width), scale),
        "attention_out": normal(rng, (width, width), scale * shrink),
        "mlp_norm": np.ones(width, np.float32),
        "mlp_in": normal(rng, (width, 4 * width), scale),
        "mlp_out": normal(rng, (4 * width, width), wide_scale * shrink),
    }


def _attention(block: Params, x: jax.Array, num_heads: int) -> jax.Array:
    rows, length, width = x.shape
    qkv = (x @ block["qkv"]).reshape(rows, length, 3, num_heads, width // num_heads)
    heads = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return jnp.dot(heads.reshape(rows, length, width), block["attention_out"])


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return jnp.multiply(x * jax.lax.rsqrt(mean_square + _NORM_EPSILON), scale)
