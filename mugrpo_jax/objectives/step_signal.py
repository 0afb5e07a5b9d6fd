"""Separate signal and noise in the updates of a run, from numbers that the run records anyway.

The model: the gradients of consecutive updates are `g_k = s + n_k`. The signal s is common to them. The noise
n_k comes from the responses that update k happened to draw, and is independent between updates. A model has
many parameters, so s and the noise vectors are nearly orthogonal, and

    E[cos(g_k, g_{k+1})]  ≈  ‖s‖² / (‖s‖² + E‖n‖²)

The mean cosine is therefore the share of signal in the power of a gradient (`signal_share`). After k updates
the signal has added up to k‖s‖ and the noise to √k·‖n‖, so the signal is the larger part of the drift after
about (1 − c) / c updates (`updates_until_signal`). The growth of the drift shows the same from the other side
(`drift_exponent`): 0.5 is a random walk, 1 a straight line.

Three limits. The noise is independent only if consecutive updates share no responses, as in a stage with one
epoch. The cosine compares neighbours: a signal that turns within a stage adds up to less than (1 − c) / c
says, and the exponent of the drift shows this. The cosine is measured on the gradient before Adam. Adam's
momentum correlates the steps themselves, so compare an exponent with that of a random walk with the same
momentum (`random_walk_drift`).

All functions take plain sequences and use NumPy. Values that are not finite are ignored.
"""

import math
from collections.abc import Sequence

import numpy as np

from mugrpo_jax.objectives._checks import check_number


def smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """Return the mean of each value and up to `window − 1` values before it, without the ones not finite.

    The result has the length of `values`. It is NaN where the window has no finite value.

    >>> smoothed([4.0, 0.0, 2.0, float("nan"), 6.0], window=2).tolist()
    [4.0, 2.0, 1.0, 2.0, 6.0]
    """
    check_number("window", window, low=1)
    array = np.asarray(values, np.float64)
    known = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    last = np.arange(1, len(array) + 1)
    first = np.maximum(last - window, 0)
    number = counts[last] - counts[first]
    return np.where(number > 0, (sums[last] - sums[first]) / np.maximum(number, 1), np.nan)


def signal_share(cosines: Sequence[float]) -> tuple[float, float]:
    """Estimate the share of signal in the power of a gradient, ‖s‖² / (‖s‖² + E‖n‖²), and its standard error.

    The estimate is the mean cosine of consecutive gradients. It is not cut off at 0, so that it stays
    unbiased: an estimate within two standard errors of 0, also a negative one, means that no signal could be
    measured. Neighbouring cosines have one gradient in common, and the standard error counts their
    covariance. It is infinite for one cosine. Without a cosine the estimate is NaN.

    Args:
      cosines: `[updates]`, the cosine between the gradients of each update and the update before it.

    >>> share, error = signal_share([0.1, 0.3, 0.2, 0.2])
    >>> round(share, 3), round(error, 3)
    (0.2, 0.041)
    """
    array = np.asarray(cosines, np.float64)
    array = array[np.isfinite(array)]
    count = len(array)
    if count < 2:
        return (float(array[0]) if count else math.nan), math.inf
    centred = array - array.mean()
    variance = (centred**2).sum() / (count - 1)
    neighbours = (centred[1:] * centred[:-1]).sum() / (count - 1)
    # A negative covariance of few values is chance more often than not, so it does not lower the error.
    return float(array.mean()), math.sqrt((variance + 2 * max(neighbours, 0.0)) / count)


def updates_until_signal(share: float) -> float:
    """Return after how many updates the signal is half of the power of the drift, (1 − c) / c.

    Args:
      share: c, see `signal_share`. The result is infinite if it is 0 or negative.

    >>> round(updates_until_signal(0.02)), updates_until_signal(-0.001)
    (49, inf)
    """
    return (1.0 - share) / share if share > 0 else (math.nan if math.isnan(share) else math.inf)


def drift_exponent(drift: Sequence[float]) -> float:
    """Return the slope of log drift over log updates within a stage: 0.5 is a random walk, 1 a straight line.

    Every factor in the number of updates has the same weight in the fit, not every update; otherwise the many
    late updates would decide alone. A learning-rate warm-up raises the exponent, and so does momentum: see
    `random_walk_drift`.

    Args:
      drift: `[updates]`, the distance of the parameters from those at the start of the stage, after its 1st,
        2nd, ... update. Values that are 0 or not finite are ignored.

    Returns:
      The slope; NaN with fewer than three values to fit it to.

    >>> round(drift_exponent([1.0, 2**0.5, 3**0.5, 2.0]), 6), round(drift_exponent([0.2, 0.4, 0.6]), 6)
    (0.5, 1.0)
    """
    array = np.asarray(drift, np.float64)
    places = np.flatnonzero(np.isfinite(array) & (array > 0))
    if len(places) < 3:
        return math.nan
    updates = places + 1.0
    x, y, weights = np.log(updates), np.log(array[places]), 1 / updates
    x = x - np.average(x, weights=weights)
    return float((weights * x * y).sum() / (weights * x**2).sum())


def random_walk_drift(updates: int, momentum: float) -> np.ndarray:
    """Return the drift of a random walk with momentum after 1, 2, ... `updates` updates, up to a factor.

    Its steps are exponential averages of independent noise (`momentum` is Adam's β₁), so two steps that are j
    updates apart have the correlation β₁^j. For updates ≪ 1 / (1 − β₁) such a walk looks straight.

    >>> [round(drift_exponent(random_walk_drift(64, momentum)), 3) for momentum in (0.0, 0.9)]
    [0.5, 0.865]
    """
    check_number("momentum", momentum)
    apart = np.arange(updates)
    # Var of the sum of k steps: Σ_{i,j ≤ k} β^|i − j|; each new step adds 1 + 2 (β + β² + … + β^{k−1}).
    added = 2 * np.cumsum(momentum ** apart.astype(np.float64)) - 1
    return np.sqrt(np.cumsum(added))
