"""Statistics of an evaluation: pass@k, avg@k, majority, and the mean over problems with its uncertainty."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CORRECT = 1.0  # a reward this high counts as solved in pass@k and in a majority vote


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is correct: `1 − C(n−c, k) / C(n, k)`.

    n samples were drawn and c of them are correct. The estimate is unbiased (arXiv 2107.03374).

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 0, 2), pass_at_k(4, 3, 2)
    (0.5, 0.0, 1.0)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}; possible: 0 <= c <= n and 1 <= k <= n")
    misses, draws = math.comb(n - c, k), math.comb(n, k)
    return (draws - misses) / draws


def average_at_k(values: Sequence[float]) -> float:
    """Return the mean reward of the k samples of one problem."""
    if not values:
        raise ValueError("values is empty; possible: one reward or more")
    return math.fsum(values) / len(values)


def majority(answers: Sequence[str | None], values: Sequence[float]) -> float:
    """Return 1.0 if the most frequent answer is correct; in a tie, the correct share of the tied answers.

    `values` are the rewards. Samples whose answer is None do not vote; without any vote the result is 0.

    >>> majority(["7", "8", "7", None], [1.0, 0.0, 1.0, 0.0]), majority(["7", "8"], [1.0, 0.0])
    (1.0, 0.5)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    verdict = {answer: value >= CORRECT for answer, value in zip(answers, values, strict=True)}
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(verdict[answer] for answer in winners) / len(winners)


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, its standard error, and its confidence interval (`low`, `high`)."""

    mean: float
    low: float
    high: float
    standard_error: float


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Return the standard error of the mean of one value per problem; 0 for a single problem."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def estimate_mean(
    values: Sequence[float] | np.ndarray, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Return the mean over problems with a confidence interval; `values` has one per problem.

    If every problem is either solved or not (all values are 0 or 1), or if all problems have the same share,
    the interval is Wilson's: it has a width even at 0 and at 1. Otherwise it is a bootstrap interval.
    Problems are resampled, not samples, because the samples of one problem are not independent.

    >>> estimate_mean([1.0] * 16).low
    0.806...
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values has shape {values.shape}; possible: one number per problem, at least one")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; possible: between 0 and 1")
    mean, error = float(values.mean()), standard_error(values)
    equal_shares = values.min() == values.max() and 0 <= mean <= 1
    if equal_shares or np.isin(values, (0.0, 1.0)).all():
        return Estimate(mean, *wilson(mean, len(values), confidence), error)
    rng = np.random.default_rng(seed)
    means = np.array([values[rng.integers(len(values), size=len(values))].mean() for _ in range(resamples)])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(mean, float(low), float(high), error)


def wilson(share: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval (low, high) of a share among `count` problems.

    >>> low, high = wilson(0.0, 16)
    >>> low, round(high, 3)
    (0.0, 0.194)
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    # The formulas give exactly 0 and 1 at the ends, but for rounding.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def estimate_average(benchmarks: Sequence[Sequence[float]], *, confidence: float = 0.95) -> Estimate:
    """Return the mean of the benchmarks' means, with an interval; every benchmark has the same weight.

    The distances from each mean to its limits are independent, so their squares add (the method MOVER).
    """
    if not benchmarks:
        raise ValueError("benchmarks is empty; possible: one list of values or more")
    parts = [estimate_mean(values, confidence=confidence) for values in benchmarks]
    count, mean = len(parts), float(np.mean([part.mean for part in parts]))
    return Estimate(
        mean,
        mean - math.hypot(*(part.mean - part.low for part in parts)) / count,
        mean + math.hypot(*(part.high - part.mean for part in parts)) / count,
        math.hypot(*(part.standard_error for part in parts)) / count,
    )
