"""The digits workload: its split, its model, its metric."""

from __future__ import annotations

import itertools

import numpy as np

from jaxsync.workloads.digits import Digits, DigitsModel


def test_every_image_is_either_in_the_training_or_in_the_test_set() -> None:
    digits = Digits.load(DigitsModel())
    images = np.concatenate([digits.train["image"], digits.test["image"]])
    assert (digits.num_rows, len(digits.test["label"])) == (1437, 360)
    assert images.shape == (1797, 64)
    assert images.dtype == np.float32
    assert (float(images.min()), float(images.max())) == (0, 1)
    assert set(digits.train["label"].tolist()) == set(range(10))
    # The set has no image twice, so as many different images as rows means that none is in both.
    assert len(np.unique(images, axis=0)) == 1797


def test_a_split_seed_gives_the_same_split_and_another_one_another() -> None:
    first, again, other = (Digits.load(DigitsModel(split_seed=seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.test["image"], again.test["image"])
    assert not np.array_equal(first.test["image"], other.test["image"])


def test_the_loss_is_that_of_numpy_in_float64() -> None:
    digits = Digits.load(DigitsModel(hidden=(16, 8)))
    params, batch = digits.init_params(seed=1), next(digits.batches(32, seed=0))
    x = batch["image"].astype(np.float64)
    for index, layer in enumerate(params):
        x = (np.maximum(x, 0) if index else x) @ np.asarray(layer["kernel"], np.float64) + layer["bias"]
    log_p = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    wanted = -log_p[np.arange(32), batch["label"]].mean()
    np.testing.assert_allclose(digits.loss_fn(params, batch), wanted, rtol=1e-6)


def test_the_accuracy_is_the_share_of_test_images_told_right() -> None:
    digits = Digits.load(DigitsModel(hidden=()))
    # A model that always says 3.
    params = [{"kernel": np.zeros((64, 10), np.float32), "bias": np.eye(10, dtype=np.float32)[3]}]
    assert digits.evaluate(params) == {"test_accuracy": np.mean(digits.test["label"] == 3)}


def test_batches_come_from_the_training_set_and_are_the_same_for_a_seed() -> None:
    digits = Digits.load(DigitsModel())
    known = {image.tobytes() for image in digits.train["image"]}
    first, again = (list(itertools.islice(digits.batches(64, seed=5), 3)) for _ in range(2))
    for batch, same in zip(first, again, strict=True):
        assert (batch["image"].shape, batch["label"].shape) == ((64, 64), (64,))
        assert {image.tobytes() for image in batch["image"]} <= known
        np.testing.assert_array_equal(batch["image"], same["image"])
