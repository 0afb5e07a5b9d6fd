"""Fit the constants of the staleness law to finished runs, and count the runs that contradict it."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from mugrpo_jax.objectives._checks import check_number
from mugrpo_jax.objectives.drift_regimes import effective_updates
from mugrpo_jax.objectives.staleness_law import StalenessConstants


class FinishedRun(NamedTuple):
    """The settings and the outcome of one run, an input of `fit_staleness`."""

    lag: float  # S, the largest age of a rollout in updates
    learning_rate: float
    updates: float  # the number of updates that was planned
    collapse: float | None = None  # the update at which the run collapsed; None if it did not collapse


class WrongSide(NamedTuple):
    """How many runs lie on the wrong side of the best limit on each quantity; the lowest orders best."""

    lag_times_rate: int  # S · η, the law of the paper
    root_lag_times_rate: int  # √S · η, the law if noise dominates the updates
    rate: int  # η alone: the age of the data does not matter
    stage_drift: int  # η · effective_updates(S) with the signal that the fit was given


class StalenessFit(NamedTuple):
    """The result of `fit_staleness`: two constants, their intervals, and how many runs contradict the fit."""

    constants: StalenessConstants
    stale_interval: tuple[float, float]  # S · η is tolerable at the lower end and too large at the upper end
    horizon_interval: tuple[float, float]  # smallest and largest t · η of the runs that ended at the horizon
    too_stale: int  # number of runs that collapsed long before the horizon
    at_horizon: int  # number of runs that collapsed at the horizon
    runs_on_the_wrong_side: WrongSide


def fit_staleness(
    runs: Iterable[FinishedRun], *, spread: float = 2.0, signal: float = 1.0, momentum: float = 0.0
) -> StalenessFit:
    """Fit the constants of the law to finished runs of one method with different S and η.

    t is the number of updates that a run took until it collapsed or finished. The horizon is near the largest
    t·η of all runs. A run was too stale if it collapsed and its t·η is smaller than the largest by more than
    the factor `spread`. All other collapsed runs ended at the horizon. A run that was not too stale shows
    that its S·η is tolerable.

    - The stale constant is the threshold on S·η that classifies the fewest runs wrongly. It is the geometric
      mean of the two neighbouring values of S·η.
    - The horizon constant is the geometric mean of t·η over the runs that ended at the horizon.

    With a `signal` below 1, `effective_updates` takes the place of S and t everywhere; with 0 that is √S and
    √t. Runs that look too stale by t·η can then turn out to have ended at the horizon.

    `runs_on_the_wrong_side` compares S·η with other quantities. If η alone has fewer runs on the wrong side,
    old data may not be the cause of the collapse, and the stale constant has little meaning. S is a setting:
    a run that collapses in its first S updates never used data of age S. If the runs give only one end of an
    interval, the other end is 0 or infinite, and the constant is the known end.

    Args:
      runs: `FinishedRun`s, or plain tuples (lag, learning_rate, updates, collapse).
      spread: runs that collapse for the same reason may differ in t·η by up to this factor.
      signal: c, the share of signal in a gradient, see `signal_share` and `fit_drift`; 1 is the law of the
        paper.
      momentum: β₁ of Adam, which matters if `signal` is below 1.

    >>> runs = [(4, 1e-7, 100, None), (4, 1e-6, 100, 32), (16, 1e-6, 100, 32), (64, 1e-6, 100, 5)]
    >>> fit = fit_staleness(runs)
    >>> [float(f"{constant:.3g}") for constant in fit.constants]
    [3.2e-05, 3.2e-05]
    >>> [float(f"{end:.3g}") for end in fit.stale_interval]
    [1.6e-05, 6.4e-05]
    """
    rows = [FinishedRun(*run) for run in runs]
    if not rows:
        raise ValueError("runs is empty; possible: at least one finished run")
    check_number("spread", spread, low=1.0)
    for place, run in enumerate(rows):
        _check_run(f"runs[{place}]", run)
    ends = np.array([r.updates if r.collapse is None else r.collapse for r in rows], np.float64)
    rates = np.array([r.learning_rate for r in rows])
    lasted = (effective_updates(ends, signal, momentum, first_stage=True) * rates).tolist()
    reach = max(lasted)
    too_stale = [r.collapse is not None and t * spread < reach for r, t in zip(rows, lasted)]
    samples = [t for r, t, bad in zip(rows, lasted, too_stale) if r.collapse is not None and not bad]

    def split(length: Callable[[float], float]) -> tuple[tuple[float, float], int]:
        return best_split([length(r.lag) * r.learning_rate for r in rows], too_stale)

    stale_interval, by_drift = split(lambda lag: float(effective_updates(lag, signal, momentum)))
    horizon = float(np.exp(np.mean(np.log(samples)))) if samples else reach
    return StalenessFit(
        StalenessConstants(_middle(*stale_interval), horizon),
        stale_interval,
        horizon_interval=(min(samples), max(samples)) if samples else (reach, math.inf),
        too_stale=sum(too_stale),
        at_horizon=len(samples),
        runs_on_the_wrong_side=WrongSide(
            split(float)[1], split(math.sqrt)[1], split(lambda lag: 1.0)[1], by_drift
        ),
    )


def _check_run(name: str, run: FinishedRun) -> None:
    check_number(f"{name}.lag", run.lag)
    check_number(f"{name}.learning_rate", run.learning_rate, strict=True)
    check_number(f"{name}.updates", run.updates, strict=True)
    if run.collapse is not None and not 0 < run.collapse <= run.updates:
        raise ValueError(f"{name}.collapse is {run.collapse}; possible: 1 to {run.updates}, or None")


def best_split(values: list[float], bad: list[bool]) -> tuple[tuple[float, float], int]:
    """Return the best interval for a limit on `values`, and the number of runs on the wrong side of it.

    Below the limit no run should be bad, above it every run should be.

    >>> best_split([1.0, 2.0, 4.0], [False, False, True])
    ((2.0, 4.0), 0)
    """
    values = [float(f"{value:.12g}") for value in values]  # products that differ only by rounding are equal
    ends = [0.0, *sorted(set(values)), math.inf]
    errors = {
        (low, high): sum(is_bad == (value < high) for value, is_bad in zip(values, bad))
        for low, high in itertools.pairwise(ends)
    }
    best = min(errors, key=errors.__getitem__)
    return best, errors[best]


def _middle(low: float, high: float) -> float:
    """Return the geometric mean of both ends; if `low` is 0 or `high` is infinite, return the other end."""
    if low == 0.0 or math.isinf(high):
        return high if low == 0.0 else low
    return math.sqrt(low * high)
