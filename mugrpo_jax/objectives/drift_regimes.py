"""The staleness law in two regimes: how far updates carry the weights, and the learning rate that follows.

An update moves the weights by η·G. Gradients have a common signal with the share c of their power and
independent noise with the share 1 − c (`signal_share`). Then the drift after S updates is

    d(S)  =  η · G · √( S·(1 − c) + S²·c )

    noise       S·c ≪ 1    d = η · G · √S    the law limits η·√S
    ballistic   S·c ≫ 1    d = η · G · S     the law limits η·S, the form of the paper (arXiv 2607.01083)

The noise is overtaken by the signal after `updates_until_signal(c)` = (1 − c)/c updates. The square root is
the number of *parallel* updates with the same drift, `effective_updates`. The law for all regimes is
therefore

    η  ≪  min{ R_batch / (G · effective_updates(S)),  R_crit / (G · effective_updates(T)) }

**Momentum.** G is measured on the steps of the optimizer, c on the gradients. Adam's steps are exponential
averages of gradients. The average keeps the signal and leaves the share q = (1 − β₁)/(1 + β₁) of the noise's
power, so the share of signal in a step is s = c / (c + q·(1 − c)), larger than c. Two steps j updates apart
share noise with the correlation β₁^j. So S steps with noise only give a drift of G·√(S/q), which is 4.4·G·√S
for β₁ = 0.9. The two effects cancel in S·c: the crossover stays at (1 − c)/c updates. In the first stage of a
run Adam's average starts empty, and its bias correction makes the first steps longer (`first_stage`).

Adam also divides every coordinate by its own scale. The cosine of raw gradients does not know this, so it can
differ from the share that the drift shows; `fit_drift` reads the share from a measured drift instead.

All functions use NumPy and cannot be traced by JAX.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_number
from mugrpo_jax.objectives.momentum_walk import gradient_share, step_share, walk_power
from mugrpo_jax.objectives.step_signal import drift_exponent, updates_until_signal

# The drift grows locally as S^p: p = 0.6 at a quarter of the crossover, p = 0.9 at four times the crossover.
_NOISE, _BALLISTIC = 0.25, 4.0


def effective_updates(
    updates: ArrayLike, signal: float, momentum: float = 0.0, *, first_stage: bool = False
) -> np.ndarray:
    """Return how many parallel updates would give the same drift: the drift divided by η·G.

    Args:
      updates: S, a number or an array.
      signal: c, the share of signal in the power of a gradient, see `signal_share`; below 0 it counts as 0.
      momentum: β₁ of Adam.
      first_stage: count from the first update of a run, where Adam's average starts empty.

    >>> [float(effective_updates(16, share)) for share in (0.0, 1.0)]
    [4.0, 16.0]
    >>> round(float(effective_updates(4, 0.5)), 4)  # √(4 · 0.5 + 16 · 0.5)
    3.1623
    """
    count = np.asarray(updates, np.float64)
    if not (count >= 0).all():
        raise ValueError(f"updates is {updates}; possible: numbers not below 0")
    share = step_share(_share(signal), momentum)
    noise = walk_power(count, momentum, first_stage=first_stage)
    return np.sqrt((1 - share) * noise + share * count**2)


def drift(
    updates: ArrayLike,
    learning_rate: float,
    update_size: float,
    signal: float,
    momentum: float = 0.0,
    *,
    first_stage: bool = False,
) -> np.ndarray:
    """Return the predicted distance of the weights from those before these updates.

    Args:
      learning_rate: η.
      update_size: G, the size of one update per unit of learning rate, see `update_size`.

    The other arguments are those of `effective_updates`.

    >>> [float(drift(100, 1e-3, 20.0, signal)) for signal in (0.0, 1.0)]
    [0.2, 2.0]
    """
    moved = effective_updates(updates, signal, momentum, first_stage=first_stage)
    return learning_rate * update_size * moved


def regime(lag: float, signal: float) -> str:
    """Return what carries the drift of `lag` updates: `noise`, `ballistic` (signal), or `between`.

    It is `noise` up to a quarter of the crossover (1 − c)/c, where the drift grows as the power 0.6 of the
    updates or slower, and `ballistic` from four times the crossover, where the power is 0.9 or more. A share
    of signal below 0, a chance result of `signal_share`, counts as 0.

    >>> [regime(lag, 0.01) for lag in (16, 128, 1024)]
    ['noise', 'between', 'ballistic']
    """
    check_number("lag", lag)
    turn = updates_until_signal(_share(signal))
    if lag <= _NOISE * turn:
        return "noise"
    return "ballistic" if lag >= _BALLISTIC * turn else "between"


class DriftFit(NamedTuple):
    """The result of `fit_drift`."""

    update_size: float  # G, the size of one update per unit of learning rate
    signal: float  # c, the share of signal in the power of a gradient that explains the drift
    exponent: float  # see `drift_exponent`; compare it with that of a random walk with the same momentum
    error: float  # root mean square of the relative error of the fitted drift


def fit_drift(
    drift: Sequence[float],
    learning_rate: float,
    *,
    updates: Sequence[float] | None = None,
    momentum: float = 0.0,
    first_stage: bool = False,
) -> DriftFit:
    """Find the update size and the share of signal that explain a measured drift best.

    The square of the drift is a sum of a noise part and a signal part. The fit finds their two factors by
    least squares of the relative error; both are at least 0. A drift that grows more slowly than a random
    walk gives the signal 0.

    Args:
      drift: `[points]`, the distance from the weights at the start of the stage.
      updates: `[points]`, the updates since the start of the stage; 1, 2, 3, … if left out.

    The other arguments are those of `drift`. At least two points must be finite and above 0.

    >>> fit = fit_drift(drift([1, 4, 16, 64], 1e-3, 20.0, signal=0.02), 1e-3, updates=[1, 4, 16, 64])
    >>> round(fit.update_size, 6), round(fit.signal, 6), round(fit.exponent, 2)
    (20.0, 0.02, 0.55)
    """
    check_number("learning_rate", learning_rate, strict=True)
    moved = np.asarray(drift, np.float64)
    count = np.arange(1.0, len(moved) + 1) if updates is None else np.asarray(updates, np.float64)
    known = np.isfinite(moved) & (moved > 0)
    moved, count = moved[known], count[known]
    if len(set(count.tolist())) < 2:
        raise ValueError(f"drift has {len(moved)} usable points; possible: two or more, at different updates")
    noise = walk_power(count, momentum, first_stage=first_stage)
    parts = np.stack([noise, count**2], axis=1) / moved[:, None] ** 2
    powers = _least_squares_above_zero(parts)
    share = powers[1] / powers.sum()
    whole = np.full(round(count.max()), np.nan)
    whole[np.round(count).astype(int) - 1] = moved
    error = float(np.sqrt(np.mean((np.sqrt(parts @ powers) - 1) ** 2)))
    size = math.sqrt(powers.sum()) / learning_rate
    return DriftFit(size, gradient_share(float(share), momentum), drift_exponent(whole.tolist()), error)


def updates_until_drift(
    distance: float,
    learning_rate: float,
    update_size: float,
    signal: float,
    momentum: float = 0.0,
    *,
    first_stage: bool = False,
    most: int = 65536,
) -> float:
    """Return after how many updates the drift reaches `distance`; infinite if it takes more than `most`.

    The other arguments are those of `drift`.

    >>> [updates_until_drift(0.2, 1e-3, 20.0, signal) for signal in (0.0, 1.0)]
    [100, 10]
    """
    check_number("distance", distance)
    moved = drift(
        np.arange(1, most + 1), learning_rate, update_size, signal, momentum, first_stage=first_stage
    )
    reached = np.flatnonzero(moved >= distance * (1 - 1e-12))
    return int(reached[0]) + 1 if len(reached) else math.inf


class Advice(NamedTuple):
    """The result of `advise_learning_rate`. A limit is infinite if its drift is."""

    learning_rate: float  # the upper bound on η; a stable run needs a rate well below it
    binding: str  # the bound that is the lower one: `stage`, `run`, or `none` if both are infinite
    regime: str  # of a stage, see `regime`
    stage_limit: float  # R_batch / (G · effective_updates(S))
    run_limit: float  # R_crit / (G · effective_updates(T))


def advise_learning_rate(
    lag: float,
    updates: float,
    signal: float,
    update_size: float,
    batch_drift: float,
    critical_drift: float = math.inf,
    momentum: float = 0.0,
) -> Advice:
    """Return the largest learning rate for data of this age, the bound that sets it, and the regime.

    Args:
      lag: S, the largest age of a rollout in updates: (L + 1)·µ − 1 for stages of µ updates and a lag of L
        stages. If it is 0, the data is always fresh and there is no limit of a stage.
      updates: T, the updates of the whole run.
      signal: c, see `signal_share` or `fit_drift`.
      update_size: G, see `update_size` or `fit_drift`.
      batch_drift: R_batch, the drift that a stage tolerates, see `drift_at_level`; infinite if not known.
      critical_drift: R_crit, the drift since the start at which runs collapse; infinite if not known.
      momentum: β₁ of Adam, if `signal` is the share in a gradient and `update_size` that of a step.

    >>> advice = advise_learning_rate(
    ...     lag=100, updates=400, signal=0.0, update_size=20.0, batch_drift=0.4, critical_drift=2.0
    ... )
    >>> round(advice.learning_rate, 6), advice.binding, advice.regime
    (0.002, 'stage', 'noise')
    """
    check_number("lag", lag)
    for name, value in (("updates", updates), ("update_size", update_size)):
        check_number(name, value, strict=True)
    in_stage = update_size * float(effective_updates(lag, signal, momentum))
    stage = batch_drift / in_stage if lag > 0 else math.inf
    run = critical_drift / (
        update_size * float(effective_updates(updates, signal, momentum, first_stage=True))
    )
    limit = min(stage, run)
    binding = "none" if math.isinf(limit) else "stage" if stage <= run else "run"
    return Advice(limit, binding, regime(lag, signal), stage, run)


def _least_squares_above_zero(parts: np.ndarray) -> np.ndarray:
    """Return the two factors >= 0 with which the columns of `parts` add up to 1 as nearly as possible."""
    found = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)[0]
    if (found >= 0).all():
        return found
    left = int(found.argmax())
    alone = np.zeros(2)
    alone[left] = parts[:, left].sum() / (parts[:, left] ** 2).sum()
    return alone


def _share(signal: float) -> float:
    """Return the share of signal; one below 0, a chance result of `signal_share`, counts as 0."""
    check_number("signal", signal, low=-1.0)
    if signal > 1 + 1e-6:  # a mean of cosines in float32 may be a little above 1
        raise ValueError(f"signal is {signal}; possible: a share between 0 and 1")
    return min(max(signal, 0.0), 1.0)
