"""Evaluate the staleness–learning-rate law (arXiv 2607.01083), and measure or fit its constants.

The law says that a run is stable if

    η  ≪  min{ R_batch / (S · G),  R_crit / (T · G) }

η is the learning rate. S is the largest age of a rollout in updates (µ for a run with stages), T the number
of updates. G is the size of an update per unit of learning rate. R_batch is the largest drift within a stage
at which training is still stable, R_crit the drift since the start at which a run collapses. The code uses
two constants:

    stale    R_batch / G   the largest stable S · η
    horizon  R_crit / G    the largest stable T · η; a run collapses at update horizon / η

The constants differ between methods. `UNPROTECTED_GRPO` has the values reported for GRPO on Llama-3.2-1B
and 3B. µ-GRPO is stable far above these values (S · η near 1e-3), so measure or fit the constants for your
method. Only `gradient_cosine` and `vcpo_factor` can be traced by JAX.
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
    """The two constants of the law. Both are a number of updates multiplied by a learning rate."""

    stale: float  # R_batch / G, the largest S · η
    horizon: float  # R_crit / G, the largest T · η


UNPROTECTED_GRPO = StalenessConstants(stale=1.6e-6, horizon=3.2e-5)


def staleness_constants(update_size: float, batch_drift: float, critical_drift: float) -> StalenessConstants:
    """Compute the constants of the law from measured quantities.

    Args:
      update_size: G, see `update_size`.
      batch_drift: R_batch, see `drift_at_level`.
      critical_drift: R_crit, the distance ‖θ_collapse − θ_0‖ between the parameters at the collapse of a run
        and the initial parameters.

    >>> staleness_constants(update_size=100.0, batch_drift=0.05, critical_drift=2.0)
    StalenessConstants(stale=0.0005, horizon=0.02)
    """
    check_number("update_size", update_size, strict=True)
    return StalenessConstants(batch_drift / update_size, critical_drift / update_size)


def update_size(step_norms: ArrayLike, learning_rate: ArrayLike) -> float:
    """Return G, the size of an update per unit of learning rate: the median of ‖Δθ‖ / η over the updates.

    Args:
      step_norms: `[updates]`, the norm ‖Δθ‖ of the change of the parameters in each update.
      learning_rate: η, one number or `[updates]`.

    >>> round(update_size([1e-4, 3e-4, 2e-4], 1e-6), 6)
    200.0
    """
    norms = np.asarray(step_norms, np.float64)
    norms, rates = np.broadcast_arrays(norms, np.asarray(learning_rate, np.float64))
    moving = rates > 0  # in a warm-up, the learning rate of the first update is 0
    if not moving.any():
        raise ValueError(f"learning_rate is {learning_rate}; possible: above 0 for at least one update")
    return float(np.median(norms[moving] / rates[moving]))


def drift_at_level(drift: Sequence[float], signal: Sequence[float], level: float) -> float:
    """Return R_batch, measured as the drift within a stage at which a warning signal first reaches a level.

    Args:
      drift: `[updates]`, the distance of the parameters from those at the start of the stage.
      signal: `[updates]`, for example the share of clipped tokens, or 1 minus the effective sample size.
      level: the value of the signal at which training is no longer stable.

    Returns:
      The drift, interpolated between updates; infinite if the signal never reaches the level.

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
    """Return the upper bound on the learning rate. A stable run needs a rate well below this bound.

    Args:
      lag: S, the largest age of a rollout in updates.
      updates: T, the number of updates in the whole run.
      constants: the constants of the method, from `staleness_constants` or `fit_staleness`.

    >>> largest_learning_rate(lag=4, updates=100, constants=UNPROTECTED_GRPO)
    3.2e-07
    """
    check_number("lag", lag, strict=True)
    check_number("updates", updates, strict=True)
    return min(constants.stale / lag, constants.horizon / updates)


def binding_constraint(lag: float, updates: float, constants: StalenessConstants) -> str:
    """Return which constant limits the learning rate: `stale` (through S · η) or `horizon` (through T · η).

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
    """Compare a run with the law. The arguments are η and those of `largest_learning_rate`.

    In the returned dict, `lag_times_rate` is S·η, `updates_times_rate` is T·η, `binding` is the result of
    `binding_constraint`, and `share_of_limit` is η divided by `largest_learning_rate`.

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
    """Return the cosine between the gradients of two consecutive updates; 0 if a gradient is 0.

    The cosine is near 0 while training is stable. Above about 0.5, expect a collapse. `previous` and
    `current` are the two gradients, pytrees with the same structure.

    >>> round(float(gradient_cosine({"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([1.0, 1.0])})), 4)
    0.7071
    """

    def dot(a: Any, b: Any) -> jax.Array:
        products = jax.tree.map(lambda x, y: jnp.sum(jnp.float32(x) * jnp.float32(y)), a, b)
        return jax.tree.reduce(jnp.add, products, jnp.float32(0.0))

    # Divide by one norm after the other, because their product can exceed the range of float32.
    norms = jnp.sqrt(dot(previous, previous)), jnp.sqrt(dot(current, current))
    safe = [jnp.where(norm > 0, norm, 1.0) for norm in norms]
    return dot(previous, current) / safe[0] / safe[1]


def vcpo_factor(log_ratio: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Return the factor of VCPO's learning rate `η_eff = η · sqrt(min(1, ESS / B))` (arXiv 2602.17616).

    ESS / B is `sequence_ess`, which has the same arguments. The paper also divides ESS / B by its on-policy
    value. The authors' scripts set that value to 1, as this function does. The factor is a scalar in (0, 1].

    >>> log_ratio = jnp.log(jnp.array([[2.0, 2.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    >>> round(float(vcpo_factor(log_ratio, jnp.ones((4, 2)))), 4)  # sqrt(0.644737)
    0.803
    """
    return jnp.sqrt(jnp.minimum(1.0, sequence_ess(log_ratio, mask)))


class FinishedRun(NamedTuple):
    """The settings and the outcome of one run, an input of `fit_staleness`."""

    lag: float  # S, which is µ for a run with stages
    learning_rate: float
    updates: float  # the number of updates that was planned
    collapse: float | None = None  # the update at which the run collapsed; None if it did not collapse


class StalenessFit(NamedTuple):
    """The result of `fit_staleness`: two constants, their intervals, and how many runs contradict the fit."""

    constants: StalenessConstants
    stale_interval: tuple[float, float]  # S · η is tolerable at the lower end and too large at the upper end
    horizon_interval: tuple[float, float]  # smallest and largest t · η of the runs that ended at the horizon
    misplaced: int  # number of runs that the threshold on S · η classifies wrongly
    misplaced_by_rate: int  # the same number for the best threshold on η alone


def fit_staleness(runs: Iterable[FinishedRun], *, spread: float = 2.0) -> StalenessFit:
    """Fit the constants of the law to finished runs of one method with different S and η.

    t is the number of updates that a run took until it collapsed or finished. The horizon is near the largest
    t·η of all runs. A run was too stale if it collapsed and its t·η is smaller than the largest by more than
    the factor `spread`. All other collapsed runs ended at the horizon. A run that was not too stale shows
    that its S·η is tolerable.

    - The stale constant is the threshold on S·η that classifies the fewest runs wrongly. It is the geometric
      mean of the two neighbouring values of S·η.
    - The horizon constant is the geometric mean of t·η over the runs that ended at the horizon.

    If a threshold on η alone classifies fewer runs wrongly (`misplaced_by_rate` below `misplaced`), old data
    may not be the cause of the collapse, and the stale constant has little meaning. S is a setting: a run
    that collapses in its first S updates never used data of age S. If the runs give only one end of an
    interval, the other end is 0 or infinite, and the constant is the known end.

    Args:
      runs: `FinishedRun`s, or plain tuples (lag, learning_rate, updates, collapse).
      spread: runs that collapse for the same reason may differ in t·η by up to this factor.

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
    """Return the neighbouring values between which a threshold makes the fewest errors, and these errors."""
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
