"""Evaluate the staleness–learning-rate law (arXiv 2607.01083), and measure its constants.

The law says that a run is stable if

    η  ≪  min{ R_batch / (S · G),  R_crit / (T · G) }

This form holds if all updates point in the same direction. If noise dominates them, √S and √T take the place
of S and T. `mugrpo_jax.objectives.drift_regimes` has the form for both cases; pass the measured `signal` to
use it.

η is the learning rate. S is the largest age of a rollout in updates, T the number of updates. The last update
of a stage of µ updates uses rollouts that are µ − 1 updates old; with a lag of L stages, (L + 1)·µ − 1. G is
the size of an update per unit of learning rate. R_batch is the largest drift within a stage at which training
is still stable, R_crit the drift since the start at which a run collapses. The code uses two constants:

    stale    R_batch / G   the largest stable S · η  (or √S · η)
    horizon  R_crit / G    the largest stable T · η  (or √T · η)

The constants differ between methods. `UNPROTECTED_GRPO` has the values that the paper reports for GRPO on
Llama-3.2-1B and 3B. They say nothing about other methods: µ-GRPO is stable far above them (S · η near 1e-3).
Measure the constants for your method, or fit them (`fit_staleness`). Only `gradient_cosine` and `vcpo_factor`
can be traced by JAX.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_number
from mugrpo_jax.objectives.drift_regimes import effective_updates
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

    Updates with a learning rate of 0 or a norm that is not finite are ignored.

    Args:
      step_norms: `[updates]`, the norm ‖Δθ‖ of the change of the parameters in each update.
      learning_rate: η, one number or `[updates]`.

    >>> round(update_size([1e-4, 3e-4, 2e-4], 1e-6), 6)
    200.0
    """
    norms = np.asarray(step_norms, np.float64)
    norms, rates = np.broadcast_arrays(norms, np.asarray(learning_rate, np.float64))
    moving = (rates > 0) & np.isfinite(norms)  # in a warm-up, the learning rate of the first update is 0
    if not moving.any():
        raise ValueError("no update has a learning rate above 0 and a finite norm; possible: at least one")
    return float(np.median(norms[moving] / rates[moving]))


def drift_at_level(drift: Sequence[float], signal: Sequence[float], level: float) -> float:
    """Return R_batch, measured as the drift within a stage at which a warning signal first reaches a level.

    Args:
      drift: `[updates]`, the distance of the parameters from those at the start of the stage.
      signal: `[updates]`, for example the share of clipped tokens, or 1 minus the effective sample size.
      level: the value of the signal at which training is no longer stable.

    Returns:
      The drift, interpolated between updates; infinite if the signal never reaches the level. Updates with a
      value that is not finite are left out.

    >>> drift_at_level([0.0, 1.0, 2.0, 3.0], [0.0, 0.1, 0.3, 0.2], level=0.2)
    1.5
    """
    both = np.array([drift, signal], np.float64)
    moved, warning = both[:, np.isfinite(both).all(axis=0)]
    reached = warning >= level
    if not reached.any():
        return math.inf
    after = int(np.argmax(reached))
    if after == 0:
        return float(moved[0])
    return float(np.interp(level, warning[after - 1 : after + 1], moved[after - 1 : after + 1]))


def largest_learning_rate(
    lag: float,
    updates: float,
    constants: StalenessConstants,
    signal: float = 1.0,
    momentum: float = 0.0,
) -> float:
    """Return the upper bound on the learning rate. A stable run needs a rate well below this bound.

    Args:
      lag: S, the largest age of a rollout in updates; 0 if the data is always fresh.
      updates: T, the number of updates in the whole run.
      constants: the constants of the method, from `staleness_constants` or `fit_staleness`.
      signal: c, the share of signal in a gradient, see `signal_share`. 1 is the law of the paper, 0 its form
        for pure noise.
      momentum: β₁ of Adam, which matters if `signal` is below 1.

    >>> largest_learning_rate(lag=4, updates=100, constants=UNPROTECTED_GRPO)
    3.2e-07
    >>> noise = largest_learning_rate(lag=64, updates=100, constants=UNPROTECTED_GRPO, signal=0.0)
    >>> round(noise, 9)  # 1.6e-6 / √64
    2e-07
    """
    return min(_limits(lag, updates, constants, signal, momentum))


def binding_constraint(
    lag: float,
    updates: float,
    constants: StalenessConstants,
    signal: float = 1.0,
    momentum: float = 0.0,
) -> str:
    """Return which constant limits the learning rate: `stale` (through S · η) or `horizon` (through T · η).

    The arguments are those of `largest_learning_rate`.

    >>> binding_constraint(lag=4, updates=100, constants=UNPROTECTED_GRPO)
    'horizon'
    >>> binding_constraint(lag=64, updates=100, constants=UNPROTECTED_GRPO)
    'stale'
    """
    stale, horizon = _limits(lag, updates, constants, signal, momentum)
    return "stale" if stale <= horizon else "horizon"


def _limits(
    lag: float, updates: float, constants: StalenessConstants, signal: float, momentum: float
) -> tuple[float, float]:
    check_number("lag", lag)
    check_number("updates", updates, strict=True)
    in_stage = float(effective_updates(lag, signal, momentum))
    in_run = float(effective_updates(updates, signal, momentum, first_stage=True))
    return constants.stale / in_stage if lag > 0 else math.inf, constants.horizon / in_run


def staleness_report(
    lag: float, learning_rate: float, updates: float, constants: StalenessConstants = UNPROTECTED_GRPO
) -> dict[str, float | str]:
    """Compare a run with the law in the form of the paper.

    The arguments are η and those of `largest_learning_rate`. The default constants are those of the paper,
    for GRPO without protection.

    In the returned dict, `lag_times_rate` is S·η, and `updates_times_rate` is T·η. `binding` is the result of
    `binding_constraint`, `largest_learning_rate` that of the function of this name, and `share_of_limit` is η
    divided by it.

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

    The cosine is near 0 while training is stable. The paper reports values above 0.5 before a
    collapse. `previous` and `current` are the two gradients, pytrees with the same structure.

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
