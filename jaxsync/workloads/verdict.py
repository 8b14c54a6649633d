"""Which candidate is faster than the default: a rule on times that were taken in turn, without a clock.

In each round every candidate is timed once, so what slows the machine down for a while slows all of them.
What counts is the ratio to the default within a round, and the median of these ratios over the rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The chance, all candidates together, that one which is no faster is called the best.
ERROR_RATE = 0.05
# Candidates that lose with this error rate are timed no longer. It is large because to drop one that is as
# good as the default costs nothing; 5 rounds are the fewest that reach it, if all five are lost.
_DROP_ERROR_RATE = 0.1
# The bounds alone hold: a plan that was compiled twice and timed against itself (12 times, digits and charlm
# on 2 busy cores) came out as much as 9 % faster in the median, and never with an upper bound below 1.02. A
# gain of less than this, though sure, is not worth a setting.
MIN_GAIN = 0.02
# The rounds of one plan (digits, 8 devices, 2 cores that a load of 2 shared) differed by 0.08 to 0.19.
MAX_SPREAD = 0.25
# With fewer rounds not even a candidate that wins each of them could win among 15, the most there are.
MIN_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median, and where the true one lies.

    Attributes:
        low: The lower bound, -inf if there are too few values to give one.
        median: The median of the values.
        high: The upper bound, inf if there are too few values.
    """

    low: float
    median: float
    high: float


def median_interval(values: Sequence[float], error_rate: float) -> Interval:
    """The median of values and an interval that misses the median of their source at most at `error_rate`.

    The sign test turned round: both bounds are values of the sample, whatever the distribution is (David
    and Nagaraja 2003, Order Statistics, section 7.1).

    Args:
        values: One or more, independent of each other.
        error_rate: Between 0 and 1, both sides together.

    >>> median_interval([0.95, 0.97, 0.96, 1.2, 0.94, 0.93], error_rate=0.05)
    Interval(low=0.93, median=0.955, high=1.2)
    >>> median_interval([0.95, 0.97], error_rate=0.05)
    Interval(low=-inf, median=0.96, high=inf)
    """
    ordered, rank = sorted(values), _rank(len(values), error_rate)
    return Interval(
        low=ordered[rank - 1] if rank else -math.inf,
        median=statistics.median(ordered),
        high=ordered[-rank] if rank else math.inf,
    )


def _rank(count: int, error_rate: float) -> int:
    """Which value, counted from either end, is the bound; 0 if there are too few values."""
    tail, rank = 0.0, 0
    for outside in range((count + 1) // 2):
        tail += math.comb(count, outside) / 2**count
        if 2 * tail > error_rate:
            break
        rank = outside + 1
    return rank


def compare(times: Sequence[float], default: Sequence[float], error_rate: float) -> Interval:
    """The ratio of a candidate's times to the default's, paired by round.

    Args:
        times: Seconds, one a round; may end before those of the default.
        default: Seconds of the default in the same rounds.
        error_rate: As for `median_interval`.

    >>> compare([2.0, 4.0, 3.0], [4.0, 8.0, 6.0, 7.0], error_rate=0.5).median
    0.5
    """
    ratios = [ours / theirs for ours, theirs in zip(times, default, strict=False)]
    return median_interval(ratios, error_rate)


def spread(times: Sequence[float]) -> float:
    """How much a candidate differs from itself: the middle half of its rounds, as a share of their median.

    Args:
        times: Seconds, one a round; one or more.

    >>> spread([1.0, 1.0, 2.0, 3.0, 9.0]), spread([1.0])
    (1.0, 0.0)
    """
    if len(times) == 1:
        return 0.0
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / median


def is_slower(times: Sequence[float], default: Sequence[float]) -> bool:
    """Whether a candidate is clearly slower than the default, so that more rounds would be lost on it.

    >>> is_slower([1.1] * 4, [1.0] * 4), is_slower([1.1] * 5, [1.0] * 5)
    (False, True)
    """
    return compare(times, default, _DROP_ERROR_RATE).low > 1


def find_best(times: Sequence[Sequence[float]]) -> int:
    """The index of the best candidate: 0, the default, unless another is faster beyond doubt.

    A candidate wins if it takes `MIN_GAIN` less time than the default even at the upper bound of its ratio.
    The bounds are those of `ERROR_RATE` divided by the number of candidates (Bonferroni), as more of them
    have more chances. Of several that win, it is the one with the smallest median ratio.

    Args:
        times: For each candidate its seconds, one a round; those of the default first.

    >>> noise = [0.99, 1.01, 1.0, 1.02, 0.98] * 4
    >>> find_best([noise, [0.9 * t for t in noise], [0.8 * t for t in noise]])
    2
    >>> find_best([noise, [0.99 * t for t in noise]])  # surely faster, but not by enough
    0
    """
    default, *others = times
    ratios = [compare(other, default, share_error_rate(len(others))) for other in others]
    winners = [(ratio.median, index) for index, ratio in enumerate(ratios, 1) if ratio.high <= 1 - MIN_GAIN]
    return min(winners)[1] if winners else 0


def share_error_rate(num_others: int) -> float:
    """The error rate of each comparison, of which there are `num_others`.

    >>> share_error_rate(10)
    0.005
    """
    return ERROR_RATE / max(num_others, 1)
