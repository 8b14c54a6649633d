"""What workloads share: the order of rows, the loss, optional packages."""

from __future__ import annotations

import itertools
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsync.errors import MissingExtraError
from jaxsync.extras import import_extra
from jaxsync.workloads.workload import mean_cross_entropy, shuffled_rows


def test_an_epoch_has_each_row_at_most_once_and_drops_its_remainder() -> None:
    batches = list(itertools.islice(shuffled_rows(10, 4, seed=0), 2))
    rows = np.concatenate(batches)
    assert [len(batch) for batch in batches] == [4, 4]
    assert len(set(rows.tolist())) == 8
    assert set(rows.tolist()) <= set(range(10))


def test_epochs_differ_and_a_seed_repeats_them() -> None:
    def first_two_epochs(seed: int) -> list[list[int]]:
        return [batch.tolist() for batch in itertools.islice(shuffled_rows(8, 8, seed), 2)]

    first, second = first_two_epochs(3)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert first_two_epochs(3) == [first, second]
    assert first_two_epochs(4) != [first, second]


def test_the_cross_entropy_is_that_of_numpy_in_float64() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(3, 5, 7)), rng.integers(7, size=(3, 5))
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    wanted = -np.mean(np.take_along_axis(log_p, labels[..., None], axis=-1))
    got = mean_cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(labels, jnp.int32))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_package_that_is_not_there_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(MissingExtraError) as caught:
        import_extra("optax", package="optax", feature="Training")
    assert str(caught.value) == (
        "Training needs the package 'optax', which is not installed.\nTo fix it: pip install 'jaxsync[train]'"
    )
