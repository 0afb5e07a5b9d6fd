"""Compare runs with the staleness law (see `objectives.staleness_law`), and give advice.

The law limits S·η and T·η, where S is the updates per stage, T the updates done and η the learning rate.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mugrpo_jax import objectives
from mugrpo_jax.report.objective_panels import KEEP_GRADIENT
from mugrpo_jax.report.run_history import History

REPORTED = objectives.UNPROTECTED_GRPO
# R_batch is the drift at which the ESS of a stage falls by this share, or this share of tokens is clipped and
# so has no gradient.
ESS_LOSS, CLIPPED = 0.5, 0.2
# A run has collapsed if its reward or accuracy falls below this share of the best value and stays there.
COLLAPSED = 0.5
_WINDOW = 8  # number of updates over which cosines are averaged, because a single cosine is noisy


@dataclasses.dataclass(frozen=True)
class Position:
    """The quantities of the staleness law, measured in one run; NaN if the run did not record the metrics.

    Attributes:
      lag: S, the number of updates per stage.
      updates: T, the number of updates done so far.
      learning_rate: η.
      update_size: G, the median of ‖Δθ‖ / η, where Δθ is the change of the weights in one update.
      batch_drift: R_batch, the smallest drift at which a stage reached `ESS_LOSS` or `CLIPPED`, or inf.
      largest_drift: the largest drift in any stage.
      collapse: the update at which reward or held-out accuracy collapsed, or None.
      critical_drift: R_crit, the drift from the first weights at the collapse; NaN without a collapse.
      cosine: largest mean over `_WINDOW` cosines of consecutive gradients, which is high before a collapse.
    """

    lag: int
    updates: int
    learning_rate: float
    update_size: float
    batch_drift: float
    largest_drift: float
    collapse: int | None
    critical_drift: float
    cosine: float

    @property
    def lag_times_rate(self) -> float:
        """Return S·η, the updates per stage times the learning rate."""
        return self.lag * self.learning_rate

    @property
    def updates_times_rate(self) -> float:
        """Return T·η, the updates done so far times the learning rate."""
        return self.updates * self.learning_rate

    @property
    def stale_limit(self) -> float:
        """Return R_batch / G, the limit on S·η measured in this run (G is `update_size`)."""
        return self.batch_drift / self.update_size if self.update_size else math.nan


def position(run: History) -> Position:
    """Measure the quantities of the staleness law in a run."""
    rate = run.config.optimizer.learning_rate
    norms = run.values("update_norm")
    norms = norms[np.isfinite(norms)]
    drift = run.values("drift")
    fallen = _collapse(run)
    return Position(
        lag=run.config.batch.updates_per_stage,
        updates=run.done,
        learning_rate=rate,
        update_size=objectives.update_size(norms, rate) if len(norms) and rate > 0 else math.nan,
        batch_drift=_batch_drift(run),
        largest_drift=float(np.nanmax(drift)) if np.isfinite(drift).any() else math.nan,
        collapse=fallen,
        critical_drift=math.nan if fallen is None else critical_drift(run, fallen),
        cosine=_largest_cosine(run.values("gradient_cosine")),
    )


def _batch_drift(run: History) -> float:
    """Return the smallest drift at which a stage reached `ESS_LOSS` or `CLIPPED`, infinity if none did."""
    drift, ess, clipped = (run.values(name) for name in ("drift", "ess/tokens", "clipped/tokens"))
    if not np.isfinite(drift).any():
        return math.nan
    if run.config.objective.name in KEEP_GRADIENT:
        clipped = np.full_like(clipped, math.nan)
    found = [math.inf]
    for part in run.stage_slices.values():
        for signal, level in ((1 - ess[part], ESS_LOSS), (clipped[part], CLIPPED)):
            known = np.isfinite(signal) & np.isfinite(drift[part])
            found.append(objectives.drift_at_level(drift[part][known], signal[known], level))
    return min(found)


def _collapse(run: History) -> int | None:
    """Return the update of the first collapse of the training reward or the held-out accuracy, or None."""
    accuracy = accuracy_collapse(
        [record["updates"] for record in run.evaluations], [record["accuracy"] for record in run.evaluations]
    )
    found = collapse(run.values("reward")), accuracy
    return min((update for update in found if update is not None), default=None)


def collapse(reward: np.ndarray) -> int | None:
    """Return the update at which the mean reward fell below half of its best value and stayed there, or None.

    >>> collapse(np.concatenate([np.full(50, 0.8), np.full(50, 0.1)]))
    54
    """
    window = max(len(reward) // 50, 8)
    if len(reward) < 2 * window:
        return None
    smooth = np.convolve(np.nan_to_num(reward), np.full(window, 1 / window), "valid")
    best = int(smooth.argmax())
    up = np.flatnonzero(smooth >= COLLAPSED * smooth[best])
    last = int(up[-1])
    return None if last == len(smooth) - 1 else last + window


def accuracy_collapse(
    updates: Sequence[int], accuracy: Sequence[float], level: float = COLLAPSED
) -> int | None:
    """Return the update at which the accuracy fell below `level` × the best so far and stayed there, or None.

    The update is interpolated between evaluations. Only evaluations show a collapse within a stage, because
    the training reward is measured on rollouts that were sampled before the stage's updates.

    >>> accuracy_collapse([0, 100, 200, 300], [0.4, 0.5, 0.1, 0.0])
    162
    >>> accuracy_collapse([0, 100, 200, 300], [0.4, 0.1, 0.3, 0.5])
    """
    values = np.asarray(accuracy, np.float64)
    floor = level * np.maximum.accumulate(values)
    up = np.flatnonzero(values >= floor)
    if not len(up) or up[-1] == len(values) - 1:
        return None
    last = int(up[-1])
    share = (values[last] - floor[last]) / (values[last] - values[last + 1])
    return round(updates[last] + share * (updates[last + 1] - updates[last]))


def critical_drift(run: History, update: int) -> float:
    """Return R_crit, the sum of the drifts of all stages up to `update`, at which the run collapsed.

    The sum is the distance ‖θ − θ_0‖ between the weights after `update` and the first weights if `update` is
    in the first stage. In a later stage, the sum is an upper bound of the distance.
    """
    drift, done = run.values("drift"), np.array([record["updates"] for record in run.updates])
    stages = (np.flatnonzero(done[part] <= update) + part.start for part in run.stage_slices.values())
    return float(sum(drift[places[-1]] for places in stages if len(places)))


def _largest_cosine(cosine: np.ndarray) -> float:
    cosine = cosine[np.isfinite(cosine)]
    if len(cosine) < _WINDOW:
        return math.nan
    return float(np.convolve(cosine, np.full(_WINDOW, 1 / _WINDOW), "valid").max())


def fit(runs: Sequence[History]) -> objectives.StalenessFit | None:
    """Fit the law's limits to runs with one objective but different S or η; return None for other runs."""
    places = [position(run) for run in runs]
    methods = {run.config.objective for run in runs}
    if len(methods) > 1 or len({(p.lag, p.learning_rate) for p in places}) < 2:
        return None
    if not all(p.updates and p.learning_rate for p in places):
        return None
    rows = (objectives.FinishedRun(p.lag, p.learning_rate, p.updates, p.collapse) for p in places)
    return objectives.fit_staleness(rows)


def advice(run: History, fitted: objectives.StalenessFit | None = None) -> list[str]:
    """Return sentences that compare a run with the staleness law."""
    place = position(run)
    if not place.learning_rate or not place.updates:
        return ["The law does not apply: no update was made yet, or the learning rate is 0."]
    said = [_reported(place), _measured(place)]
    if fitted is not None:
        said.append(_fitted(place, run.config.total_updates, fitted.constants))
        if fitted.misplaced_by_rate < fitted.misplaced:
            said.append(
                f"But {fitted.misplaced} of the runs lie on the wrong side of that S·η, and "
                f"{fitted.misplaced_by_rate} on the wrong side of the best limit on η alone: staleness may "
                "not be what limits them."
            )
    if place.collapse is not None:
        said.append(
            "Its reward or held-out accuracy fell below half of its best for good at update "
            f"{place.collapse}."
        )
    return list(filter(None, said))


def _reported(place: Position) -> str:
    reported = objectives.staleness_report(place.lag, place.learning_rate, place.updates)
    times = float(reported["share_of_limit"])
    return (
        f"S·η = {place.lag_times_rate:.2g} and T·η = {place.updates_times_rate:.2g}: "
        f"{f'{times:,.0f}' if times > 10 else f'{times:.2g}'} times the limit reported for unprotected GRPO "
        f"({_side(reported['binding'])})."
    )


def _measured(place: Position) -> str:
    level = f"an ESS below {1 - ESS_LOSS:g} or {CLIPPED:.0%} clipped tokens"
    if math.isinf(place.batch_drift):
        return f"No stage reached {level}, up to a drift of {place.largest_drift:.3g}."
    if math.isnan(place.stale_limit):
        return ""
    limit = place.stale_limit / place.lag
    found = f"A stage reached {level} at a drift of {place.batch_drift:.3g}"
    if place.learning_rate <= limit:
        return f"{found}, S·η = {place.stale_limit:.2g}. η = {place.learning_rate:.2g} stays below it."
    stage = max(int(place.lag * limit / place.learning_rate), 1)
    return (
        f"{found}, S·η = {place.stale_limit:.2g}. At this staleness a learning rate below {limit:.2g} would "
        f"avoid it (now {place.learning_rate:.2g}), or stages of {stage} updates (now {place.lag})."
    )


def _fitted(place: Position, updates: int, constants: objectives.StalenessConstants) -> str:
    limit = objectives.largest_learning_rate(place.lag, updates, constants)
    side = objectives.binding_constraint(place.lag, updates, constants)
    return (
        f"Fitted to these runs: S·η up to {constants.stale:.2g}, T·η up to {constants.horizon:.2g}; "
        f"for this run a learning rate below {limit:.2g} ({_side(side)})."
    )


def _side(binding: float | str) -> str:
    product = "S·η, the staleness" if binding == "stale" else "T·η, the length of the run"
    return f"the tighter limit is on {product}"
