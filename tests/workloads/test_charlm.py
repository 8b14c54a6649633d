"""The charlm workload: its text, its windows, its model, its metric."""

from __future__ import annotations

import itertools
import math
import pydoc_data.topics

import jax
import numpy as np
import pytest

from jaxsync.errors import ConfigError
from jaxsync.workloads.charlm import Charlm, CharlmModel, entropy_bits

TINY = CharlmModel(context=16, width=16, num_heads=2, num_blocks=1)


def test_the_text_is_that_of_the_topics_and_a_tenth_is_held_out() -> None:
    charlm = Charlm.load(TINY)
    topics = pydoc_data.topics.topics
    text = "".join(charlm.alphabet[code] for code in np.concatenate([charlm.train, charlm.val]))
    assert text == "".join(topics[name] for name in sorted(topics))
    assert len(charlm.val) == len(text) // 10


def test_an_epoch_reads_windows_of_the_training_text_that_do_not_overlap() -> None:
    charlm = Charlm.load(TINY)
    # Numbers in place of characters, so that each window tells where it begins.
    places = Charlm(
        model=TINY, alphabet=charlm.alphabet, train=np.arange(1000, dtype=np.int32), val=charlm.val
    )
    assert places.num_rows == 61
    batches = places.batches(batch_size=20, seed=0)
    offsets = set()
    for _ in range(4):
        windows = np.concatenate([batch["text"] for batch in itertools.islice(batches, 3)])
        starts = windows[:, 0]
        np.testing.assert_array_equal(windows, starts[:, None] + np.arange(17))
        assert len(set(starts.tolist())) == 60
        assert len(set((starts % 16).tolist())) == 1
        offsets.add(int(starts[0] % 16))
    assert len(offsets) > 1


def test_batches_are_the_same_for_a_seed() -> None:
    charlm = Charlm.load(TINY)
    first, again = (list(itertools.islice(charlm.batches(8, seed=2), 3)) for _ in range(2))
    np.testing.assert_array_equal([b["text"] for b in first], [b["text"] for b in again])


def test_a_prediction_depends_on_all_earlier_characters_and_on_no_later_one() -> None:
    charlm = Charlm.load(TINY)
    params = charlm.init_params(seed=0)
    text = next(charlm.batches(1, seed=0))["text"][:, :16]
    changed = text.copy()
    changed[:, 9] = (changed[:, 9] + 1) % len(charlm.alphabet)
    logits = jax.jit(charlm.logits)
    before, after = logits(params, text)[0], logits(params, changed)[0]
    is_same = (before == after).all(axis=-1).tolist()
    assert is_same == [True] * 9 + [False] * 7
    np.testing.assert_allclose(logits(params, text[:, :4])[0], before[:4], rtol=1e-5, atol=1e-6)


def test_new_parameters_predict_about_as_well_as_a_uniform_guess() -> None:
    charlm = Charlm.load(TINY)
    loss = charlm.loss_fn(charlm.init_params(seed=0), next(charlm.batches(64, seed=0)))
    assert abs(float(loss) - math.log(len(charlm.alphabet))) < 1


def test_the_metric_is_the_mean_loss_over_the_held_out_windows_in_bits() -> None:
    charlm = Charlm.load(TINY)
    params = charlm.init_params(seed=0)
    num_windows = (len(charlm.val) - 1) // 16
    windows = np.stack([charlm.val[16 * i : 16 * i + 17] for i in range(num_windows)])
    metrics = charlm.evaluate(params)
    wanted = float(charlm.loss_fn(params, {"text": windows})) / math.log(2)
    np.testing.assert_allclose(metrics["val_bits_per_char"], wanted, rtol=1e-5)
    assert metrics["unigram_bits_per_char"] == entropy_bits(charlm.val)


def test_the_entropy_is_that_of_the_frequencies() -> None:
    assert entropy_bits(np.array([5, 5, 5, 5], np.int32)) == 0
    assert entropy_bits(np.array([0, 0, 1, 7], np.int32)) == 1.5


def test_a_context_longer_than_the_held_out_text_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Charlm.load(CharlmModel(context=10**6))
    num_chars = len(Charlm.load(TINY).val)
    assert caught.value.problems == (
        f"model.context = 1000000: the held-out text has {num_chars} characters",
    )
