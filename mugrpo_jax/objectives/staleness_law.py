"""The staleness–learning-rate law (arXiv 2607.01083), and how to measure its constants.

A run is stable while

    η  ≪  min{ R_batch / (S · G),  R_crit / (T · G) }

with the learning rate η, the largest lag S of a rollout in updates (µ for a staged run), the number T of
updates, the size G of an update per unit of learning rate, the drift R_batch that a stale batch tolerates
within a stage, and the cumulative drift R_crit at which the run collapses. Only the quotients matter:

    stale    R_batch / G   the largest S · η
    horizon  R_crit / G    the largest T · η, also t_collapse · η

The constants differ between methods. `UNPROTECTED_GRPO` holds the values reported for plain GRPO on
Llama-3.2-1B and 3B. µ-GRPO trains far beyond them (S · η near 1e-3), so measure or fit them for your method.

These are plain functions of numbers and arrays. Only `gradient_cosine` and `vcpo_factor` can be traced.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_number
from mugrpo_jax.objectives.ess import sequence_ess


class StalenessConstants(NamedTuple):
    """The two constants of the law, in units of updates times learning rate."""

    stale: float  # R_batch / G, the largest S · η
    horizon: float  # R_crit / G, the largest T · η


UNPROTECTED_GRPO = StalenessConstants(stale=1.6e-6, horizon=3.2e-5)


def staleness_constants(update_size: float, batch_drift: float, critical_drift: float) -> StalenessConstants:
    """The constants from measured quantities.

    Args:
      update_size: G, see `update_size`.
      batch_drift: R_batch, see `drift_at_level`.
      critical_drift: R_crit, the distance ‖θ_collapse − θ_0‖ of a run that collapsed.

    >>> staleness_constants(update_size=100.0, batch_drift=0.05, critical_drift=2.0)
    StalenessConstants(stale=0.0005, horizon=0.02)
    """
    check_number("update_size", update_size, strict=True)
    return StalenessConstants(batch_drift / update_size, critical_drift / update_size)


def update_size(step_norms: ArrayLike, learning_rate: ArrayLike) -> float:
    """G, the size of an update per unit of learning rate: the median of ‖Δθ‖ / η.

    Args:
      step_norms: `[updates]`, ‖Δθ‖ of each update.
      learning_rate: η, a number or `[updates]`.

    >>> round(update_size([1e-4, 3e-4, 2e-4], 1e-6), 6)
    200.0
    """
    norms = np.asarray(step_norms, np.float64)
    norms, rates = np.broadcast_arrays(norms, np.asarray(learning_rate, np.float64))
    moving = rates > 0  # the first step of a warm-up moves nothing
    if not moving.any():
        raise ValueError(f"learning_rate is {learning_rate}; possible: above 0 for at least one update")
    return float(np.median(norms[moving] / rates[moving]))


def drift_at_level(drift: Sequence[float], signal: Sequence[float], level: float) -> float:
    """R_batch: the drift within a stage at which a warning signal first reaches a level.

    Args:
      drift: `[updates]`, distance of the parameters from the beginning of the stage.
      signal: `[updates]`, for instance the clipped fraction or one minus the effective sample size.
      level: the level of the signal that counts as a problem.

    Returns:
      The drift, interpolated between updates; infinite if the level is never reached.

    >>> drift_at_level([0.0, 1.0, 2.0, 3.0], [0.0, 0.1, 0.3, 0.2], level=0.2)
    1.5
    """
    reached = np.asarray(signal, np.float64) >= level
    if not reached.any():
        return math.inf
    after = int(np.argmax(reached))
    if after == 0:
        return float(drift[0])
    return float(np.interp(level, signal[after - 1 : after + 1], drift[after - 1 : after + 1]))


def largest_learning_rate(lag: float, updates: float, constants: StalenessConstants) -> float:
    """The learning rate at which the law's bound is reached: stay well below it.

    Args:
      lag: S, updates made on a rollout before it is replaced.
      updates: T, updates in the whole run.
      constants: of the method, see `staleness_constants` and `fit_staleness`.

    >>> largest_learning_rate(lag=4, updates=100, constants=UNPROTECTED_GRPO)
    3.2e-07
    """
    check_number("lag", lag, strict=True)
    check_number("updates", updates, strict=True)
    return min(constants.stale / lag, constants.horizon / updates)


def binding_constraint(lag: float, updates: float, constants: StalenessConstants) -> str:
    """Which term of the law limits the learning rate: `stale` (S · η) or `horizon` (T · η).

    >>> binding_constraint(lag=4, updates=100, constants=UNPROTECTED_GRPO)
    'horizon'
    >>> binding_constraint(lag=64, updates=100, constants=UNPROTECTED_GRPO)
    'stale'
    """
    limit = largest_learning_rate(lag, updates, constants)
    return "stale" if constants.stale / lag == limit else "horizon"


def staleness_report(
    lag: float, learning_rate: float, updates: float, constants: StalenessConstants = UNPROTECTED_GRPO
) -> dict[str, float | str]:
    """S·η, T·η, the binding constraint, the largest learning rate and the share of it that a run uses.

    Args:
      lag: S, updates made on a rollout before it is replaced.
      learning_rate: η.
      updates: T, updates in the whole run.
      constants: of the method.

    >>> report = staleness_report(lag=1024, learning_rate=1e-6, updates=4096)
    >>> round(report["lag_times_rate"], 6), report["binding"], round(report["share_of_limit"])
    (0.001024, 'stale', 640)
    """
    check_number("learning_rate", learning_rate)
    limit = largest_learning_rate(lag, updates, constants)
    return {
        "lag_times_rate": lag * learning_rate,
        "updates_times_rate": updates * learning_rate,
        "binding": binding_constraint(lag, updates, constants),
        "largest_learning_rate": limit,
        "share_of_limit": learning_rate / limit,
    }


def gradient_cosine(previous: Any, current: Any) -> jax.Array:
    """The cosine between two consecutive gradients; 0 if one of them vanishes.

    It is near 0 while training is stable. Above about 0.5, expect a collapse.

    Args:
      previous: a gradient, any pytree of arrays.
      current: the next one, of the same structure.

    >>> round(float(gradient_cosine({"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([1.0, 1.0])})), 4)
    0.7071
    """

    def dot(a: Any, b: Any) -> jax.Array:
        products = jax.tree.map(lambda x, y: jnp.sum(jnp.float32(x) * jnp.float32(y)), a, b)
        return jax.tree.reduce(jnp.add, products, jnp.float32(0.0))

    # Divide by one norm after the other: their product can exceed the range of float32.
    norms = jnp.sqrt(dot(previous, previous)), jnp.sqrt(dot(current, current))
    safe = [jnp.where(norm > 0, norm, 1.0) for norm in norms]
    return dot(previous, current) / safe[0] / safe[1]


def vcpo_factor(log_ratio: ArrayLike, mask: ArrayLike) -> jax.Array:
    """VCPO's step-size rule: `η_eff = η · sqrt(min(1, ESS / B))` (arXiv 2602.17616).

    The weights of the effective sample size are those of whole responses. The paper divides by the on-policy
    value of ESS / B; the authors' scripts set that value to 1, as here.

    Args:
      log_ratio: `[B, T]`.
      mask: `[B, T]`, non-zero on response tokens.

    Returns:
      The factor on the learning rate, a scalar in (0, 1].

    >>> log_ratio = jnp.log(jnp.array([[2.0, 2.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    >>> round(float(vcpo_factor(log_ratio, jnp.ones((4, 2)))), 4)  # sqrt(0.644737)
    0.803
    """
    return jnp.sqrt(jnp.minimum(1.0, sequence_ess(log_ratio, mask)))


class FinishedRun(NamedTuple):
    """A run as a row of the table that `fit_staleness` reads."""

    lag: float  # S, or µ for a staged run
    learning_rate: float
    updates: float  # how many it was given
    collapse: float | None = None  # the update at which it collapsed, or None if it did not


class StalenessFit(NamedTuple):
    """The result of `fit_staleness`: constants, their intervals, and how many runs they classify wrongly."""

    constants: StalenessConstants
    stale_interval: tuple[float, float]  # the gap between tolerable and too large S · η
    horizon_interval: tuple[float, float]  # the range of t · η over the runs that ended at the horizon
    misplaced: int  # runs on the wrong side of the threshold on S · η
    misplaced_by_rate: int  # the same for the best threshold on η alone


def fit_staleness(runs: Iterable[FinishedRun], *, spread: float = 2.0) -> StalenessFit:
    """The constants of the law from a grid of finished runs of one method.

    The largest t·η that any run reached is taken as near the horizon. A run that collapsed much earlier (by
    more than the factor `spread`) was too stale. A run that collapsed near it ended at the horizon; like a
    run that survived, it shows that its S·η is tolerable.

    - The stale constant is the threshold on S·η with the fewest runs on the wrong side, placed at the
      geometric mean of the two neighbouring values.
    - The horizon constant is the geometric mean of t·η over the runs that ended there.

    If a threshold on η alone makes fewer errors (`misplaced_by_rate` below `misplaced`), then the age of the
    data may not be the cause of the collapse, and the stale constant means little. S is the setting of the
    run: a run that collapses within its first S updates never saw data that old.

    If the runs bound a constant on one side only, the other end of its interval is 0 or infinite, and the
    constant is the known end.

    Args:
      runs: rows `FinishedRun(lag, learning_rate, updates, collapse)`, or plain tuples of that order.
      spread: the factor by which runs that collapse for the same reason may scatter.

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
    lasted = [(r.updates if r.collapse is None else r.collapse) * r.learning_rate for r in rows]
    reach = max(lasted)
    too_stale = [r.collapse is not None and t * spread < reach for r, t in zip(rows, lasted)]
    samples = [t for r, t, bad in zip(rows, lasted, too_stale) if r.collapse is not None and not bad]

    stale_interval, misplaced = _split([r.lag * r.learning_rate for r in rows], too_stale)
    _, misplaced_by_rate = _split([r.learning_rate for r in rows], too_stale)
    horizon_interval = (min(samples), max(samples)) if samples else (reach, math.inf)
    horizon = float(np.exp(np.mean(np.log(samples)))) if samples else reach
    return StalenessFit(
        StalenessConstants(_middle(*stale_interval), horizon),
        stale_interval,
        horizon_interval,
        misplaced,
        misplaced_by_rate,
    )


def _split(values: list[float], bad: list[bool]) -> tuple[tuple[float, float], int]:
    """The neighbouring values between which a threshold makes the fewest errors, and that number."""
    values = [float(f"{value:.12g}") for value in values]  # products that differ only by rounding are equal
    ends = [0.0, *sorted(set(values)), math.inf]
    errors = {
        (low, high): sum(is_bad == (value < high) for value, is_bad in zip(values, bad))
        for low, high in itertools.pairwise(ends)
    }
    best = min(errors, key=errors.__getitem__)
    return best, errors[best]


def _middle(low: float, high: float) -> float:
    """The geometric mean, or the finite end."""
    if low == 0.0 or math.isinf(high):
        return high if low == 0.0 else low
    return math.sqrt(low * high)
