"""The rule that says which candidate is best, on made-up times."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsync.workloads.verdict import (
    ERROR_RATE,
    MIN_GAIN,
    MIN_ROUNDS,
    compare,
    find_best,
    is_slower,
    median_interval,
    share_error_rate,
    spread,
)

values = st.lists(st.floats(0.001, 1000), min_size=1, max_size=40)


def noisy(factor: float, seed: int, num_rounds: int = 20, spread: float = 0.05) -> list[float]:
    rng = random.Random(seed)
    return [factor * math.exp(rng.gauss(0, spread)) for _ in range(num_rounds)]


# Tables of the sign test's bounds, such as Conover, Practical Nonparametric Statistics, table A3 halves.
@pytest.mark.parametrize(
    ("count", "error_rate", "rank"),
    [(5, 0.05, 0), (6, 0.05, 1), (8, 0.05, 1), (9, 0.05, 2), (12, 0.05, 3), (20, 0.05, 6), (20, 0.01, 4)],
)
def test_the_bounds_of_a_median_are_those_of_the_sign_test(count: int, error_rate: float, rank: int) -> None:
    found = median_interval([float(i) for i in range(1, count + 1)], error_rate)
    wanted = (float(rank), float(count + 1 - rank)) if rank else (-math.inf, math.inf)
    assert (found.low, found.high) == wanted
    assert found.median == (count + 1) / 2


@given(values, st.floats(0.001, 0.5))
def test_the_median_is_between_its_bounds_and_no_order_matters(values: list[float], rate: float) -> None:
    found = median_interval(values, rate)
    assert found.low <= found.median <= found.high
    assert found == median_interval(values[::-1], rate)
    assert found.median == np.median(values)


@given(values, st.floats(0.001, 0.4))
def test_a_smaller_error_rate_gives_a_wider_interval(values: list[float], rate: float) -> None:
    wide, narrow = median_interval(values, rate / 2), median_interval(values, rate)
    assert wide.low <= narrow.low
    assert wide.high >= narrow.high


def test_an_interval_misses_the_true_median_as_seldom_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [median_interval(rng.lognormal(0, 0.3, 20).tolist(), ERROR_RATE) for _ in range(4000)]
    missed = sum(not each.low <= 1 <= each.high for each in found)
    assert missed / 4000 <= ERROR_RATE


def test_times_are_compared_within_a_round_so_that_a_slow_spell_of_the_machine_is_nobodys() -> None:
    spell = [1.0] * 5 + [7.0] * 10 + [1.0] * 5
    ours = [0.9 * slow for slow in spell]
    found = compare(ours, spell, ERROR_RATE)
    np.testing.assert_allclose([found.low, found.median, found.high], 0.9, rtol=1e-12)
    assert find_best([spell, ours]) == 1


def test_a_candidate_that_is_faster_in_every_round_by_enough_is_the_best() -> None:
    default = noisy(1.0, seed=0)
    assert find_best([default, noisy(0.8, seed=1), noisy(0.7, seed=2), noisy(1.3, seed=3)]) == 2


def test_a_gain_within_the_noise_is_none() -> None:
    assert find_best([noisy(1.0, seed=0, spread=0.3), noisy(0.97, seed=1, spread=0.3)]) == 0


def test_a_sure_gain_that_is_too_small_to_matter_is_none() -> None:
    default = noisy(1.0, seed=0)
    assert find_best([default, [(1 - MIN_GAIN / 2) * t for t in default]]) == 0
    assert find_best([default, [(1 - 2 * MIN_GAIN) * t for t in default]]) == 1


def test_the_spread_is_that_of_the_middle_half_and_has_no_unit() -> None:
    times = noisy(0.003, seed=4)
    low, median, high = np.quantile(times, [0.25, 0.5, 0.75])
    np.testing.assert_allclose(spread(times), (high - low) / median, rtol=1e-12)
    np.testing.assert_allclose(spread([1000 * t for t in times]), spread(times), rtol=1e-12)
    assert spread([1.0] * 19 + [50.0]) == 0  # one slow round is no noise


def test_a_single_fast_round_does_not_win() -> None:
    assert find_best([[1.0] * 20, [0.01] + [1.0] * 19]) == 0


def test_of_fifteen_equal_candidates_the_default_is_best_as_often_as_it_should_be() -> None:
    wrong = sum(find_best([noisy(1.0, seed=100 * run + i) for i in range(16)]) != 0 for run in range(200))
    assert wrong / 200 <= ERROR_RATE


def test_a_candidate_that_was_left_out_does_not_win() -> None:
    assert find_best([[1.0] * 20, [1.2] * 5]) == 0
    assert find_best([[1.0] * 20, [0.1] * 5]) == 0  # five rounds are too few to be sure


def test_the_default_alone_is_the_best() -> None:
    assert find_best([[1.0]]) == 0


@pytest.mark.parametrize(
    ("ratios", "wanted"),
    [
        ([1.5] * 4, False),  # too few rounds
        ([1.5] * 5, True),
        ([1.001] * 5, True),
        ([1.5, 1.5, 0.99, 1.5, 1.5], False),
        ([1.5, 1.5, 0.99, 1.5, 1.5, 1.5, 1.5], False),
        ([1.5, 1.5, 0.99, 1.5, 1.5, 1.5, 1.5, 1.5], True),  # one of eight
        ([0.9] * 20, False),
    ],
)
def test_a_candidate_is_left_out_once_it_is_clearly_slower(ratios: list[float], wanted: bool) -> None:
    assert is_slower(ratios, [1.0] * 20) is wanted


def test_the_fewest_rounds_are_just_enough_for_the_most_candidates() -> None:
    winner, default = [0.5] * 20, [1.0] * 20

    def best_of_16(num_rounds: int) -> int:
        return find_best([default[:num_rounds]] * 15 + [winner[:num_rounds]])

    assert (best_of_16(MIN_ROUNDS), best_of_16(MIN_ROUNDS - 1)) == (15, 0)
    assert share_error_rate(0) == ERROR_RATE
