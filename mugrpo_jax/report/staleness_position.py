"""Measure where runs stand on the staleness law (`objectives.staleness_law`, `objectives.drift_regimes`).

The law limits the drift over S updates, the largest age of rollouts, and over all T updates. η is the
learning rate.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from mugrpo_jax import objectives
from mugrpo_jax.report.objective_panels import KEEP_GRADIENT
from mugrpo_jax.report.run_history import History
from mugrpo_jax.report.step_signal_panels import cosines

REPORTED = objectives.UNPROTECTED_GRPO
# R_batch is the drift at which the ESS of a stage falls by this share, or this share of tokens is clipped and
# so has no gradient.
ESS_LOSS, CLIPPED = 0.5, 0.2
# A run has collapsed if its reward or accuracy falls below this share of the best value and stays there.
COLLAPSED = 0.5
_WINDOW = 8  # number of updates over which noisy metrics are averaged
# A shorter stage cannot tell signal from noise, because momentum makes all steps look parallel at first.
SHORTEST_STAGE = 32


@dataclasses.dataclass(frozen=True)
class Position:
    """The quantities of the staleness law, measured in one run; NaN if the run did not record the metrics.

    Attributes:
      per_stage: µ, the number of updates per stage.
      lag: S, how many updates old rollouts are at most when an update uses them: L·µ + µ − 1.
      updates: T, the number of updates done so far.
      learning_rate: η.
      update_size: G, the median of ‖Δθ‖ / η, where Δθ is the change of the weights in one update.
      batch_drift: R_batch, the smallest drift at which a stage reached `ESS_LOSS` or `CLIPPED`, or inf. NaN
        with `batch.lag`: the drift is measured from the start of the stage, the rollouts are older.
      largest_drift: the largest drift in any stage.
      collapse: the update at which reward or held-out accuracy collapsed, or None.
      critical_drift: R_crit, the drift from the first weights at the collapse; NaN without a collapse.
      cosine: largest mean over `_WINDOW` cosines of consecutive gradients, which is high before a collapse.
      signal: mean cosine of consecutive gradients, the share of signal in a gradient; see `signal_share`.
      signal_error: standard error of `signal`.
      growth: how the drift grows within a stage, the median over stages; None if no stage has
        `SHORTEST_STAGE` updates.
      walk_exponent: the exponent of the drift of a random walk with the same momentum and stages.
      momentum: β₁ of Adam.
    """

    per_stage: int
    lag: int
    updates: int
    learning_rate: float
    update_size: float
    batch_drift: float
    largest_drift: float
    collapse: int | None
    critical_drift: float
    cosine: float
    signal: float
    signal_error: float
    growth: objectives.DriftFit | None
    walk_exponent: float
    momentum: float

    @property
    def lag_times_rate(self) -> float:
        """Return S·η, the largest age of rollouts times the learning rate."""
        return self.lag * self.learning_rate

    @property
    def updates_times_rate(self) -> float:
        """Return T·η, the updates done so far times the learning rate."""
        return self.updates * self.learning_rate

    @property
    def share(self) -> float:
        """Return the share of signal in a gradient: that which explains the drift, otherwise the cosine.

        The drift goes first, because it is measured on the steps of the optimizer and over a whole stage.
        """
        return self.cosine_share if self.growth is None else self.growth.signal

    @property
    def cosine_share(self) -> float:
        """Return the share of signal by the cosine; 0 if it is within two standard errors of 0."""
        return 0.0 if self.signal <= 2 * self.signal_error else self.signal

    @property
    def regime(self) -> str:
        """Return the regime of the drift over S updates, see `objectives.regime`; empty if not measured."""
        return self.regime_at(self.share) if math.isfinite(self.share) else ""

    def regime_at(self, share: float) -> str:
        """Return the regime for a share of signal. With S = 0, on-policy, there is only the one update."""
        return objectives.regime(max(self.lag, 1), share)

    @functools.cached_property
    def advised(self) -> objectives.Advice | None:
        """Return the advised learning rate for this µ; None if the run did not record what it needs."""
        size = self.update_size if self.growth is None else self.growth.update_size
        known = math.isfinite(size) and size > 0 and math.isfinite(self.share) and self.updates
        drifts = self.batch_drift, self.critical_drift
        if not known or all(map(math.isnan, drifts)):
            return None
        stage, run = (math.inf if math.isnan(drift) else drift for drift in drifts)
        return objectives.advise_learning_rate(
            max(self.lag, 1), self.updates, self.share, size, stage, run, self.momentum
        )

    def effective(self, updates: int, *, first_stage: bool) -> float:
        """Return η × `effective_updates` of this run, the quantity that the law limits."""
        share = self.share if math.isfinite(self.share) else 1.0
        moved = objectives.effective_updates(updates, share, self.momentum, first_stage=first_stage)
        return self.learning_rate * float(moved)


def position(run: History) -> Position:
    """Measure the quantities of the staleness law in a run."""
    rate = run.config.optimizer.learning_rate
    norms = run.values("update_norm")
    norms = norms[np.isfinite(norms)]
    drift = run.values("drift")
    fallen = _collapse(run)
    known = cosines(run)
    signal, error = objectives.signal_share(known.tolist())
    growth, walk = _growth(run, drift)
    return Position(
        per_stage=run.config.batch.updates_per_stage,
        lag=run.config.largest_staleness,
        updates=run.done,
        learning_rate=rate,
        update_size=objectives.update_size(norms, rate) if len(norms) and rate > 0 else math.nan,
        batch_drift=_batch_drift(run),
        largest_drift=float(np.nanmax(drift)) if np.isfinite(drift).any() else math.nan,
        collapse=fallen,
        critical_drift=math.nan if fallen is None else critical_drift(run, fallen),
        cosine=_largest_cosine(known),
        signal=signal,
        signal_error=error,
        growth=growth,
        walk_exponent=walk,
        momentum=run.config.optimizer.beta1,
    )


def shows_reported(positions: Sequence[Position]) -> bool:
    """Return whether to compare runs with `REPORTED`: only if one collapsed.

    The reported limits are for one method and two models. A healthy run can be thousands of times beyond
    them, which would look like an alarm and is none.
    """
    return any(place.collapse is not None for place in positions)


def _growth(run: History, drift: np.ndarray) -> tuple[objectives.DriftFit | None, float]:
    """Return the median over stages of how the drift grows, and the exponent of a random walk."""
    rate, momentum = run.config.optimizer.learning_rate, run.config.optimizer.beta1
    found, walks = [], []
    for stage, part in run.stage_slices.items():
        moved = drift[part]
        if rate <= 0 or np.count_nonzero(moved > 0) < SHORTEST_STAGE:
            continue
        first = stage == run.config.stages.start
        found.append(objectives.fit_drift(moved.tolist(), rate, momentum=momentum, first_stage=first))
        walk = objectives.effective_updates(np.arange(1, len(moved) + 1), 0.0, momentum, first_stage=first)
        walks.append(objectives.drift_exponent(walk.tolist()))
    if not found:
        return None, math.nan
    return objectives.DriftFit(*np.median(found, axis=0).tolist()), float(np.median(walks))


def _batch_drift(run: History) -> float:
    """Return the smallest drift at which a stage reached `ESS_LOSS` or `CLIPPED`, infinity if none did.

    Means over `_WINDOW` updates are compared, because a single update can have a low ESS by chance.
    """
    drift, ess, clipped = (run.values(name) for name in ("drift", "ess/tokens", "clipped/tokens"))
    if run.config.batch.lag or not np.isfinite(drift).any():
        return math.nan
    if run.config.objective.name in KEEP_GRADIENT:
        clipped = np.full_like(clipped, math.nan)
    found = [math.inf]
    for part in run.stage_slices.values():
        for signal, level in ((1 - ess[part], ESS_LOSS), (clipped[part], CLIPPED)):
            known = np.isfinite(signal) & np.isfinite(drift[part])
            window = min(_WINDOW, max(int(known.sum()) // 4, 1))  # short stages have no time to be noisy
            moved, seen = (objectives.smoothed(x[known].tolist(), window) for x in (drift[part], signal))
            found.append(objectives.drift_at_level(moved.tolist(), seen.tolist(), level))
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

    A reward that was never above 0, such as a penalty, has no half to fall below.

    >>> collapse(np.concatenate([np.full(50, 0.8), np.full(50, 0.1)]))
    54
    >>> collapse(np.concatenate([np.full(50, -0.5), np.full(50, -2.0)]))
    """
    window = max(len(reward) // 50, 8)
    if len(reward) < 2 * window:
        return None
    smooth = np.convolve(np.nan_to_num(reward), np.full(window, 1 / window), "valid")
    if smooth.max() <= 0:
        return None
    last = int(np.flatnonzero(smooth >= COLLAPSED * smooth.max())[-1])
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
    >>> accuracy_collapse([0, 100, 200], [-0.4, -0.5, -0.9])
    >>> accuracy_collapse([0, 100], [0.5, math.nan])
    """
    known = np.isfinite(np.asarray(accuracy, np.float64))
    values, updates = np.asarray(accuracy, np.float64)[known], np.asarray(updates)[known].tolist()
    best = np.maximum.accumulate(values)
    floor = np.where(best > 0, level * best, -np.inf)
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
    rows = (objectives.FinishedRun(max(p.lag, 1), p.learning_rate, p.updates, p.collapse) for p in places)
    shares = [p.share for p in places if math.isfinite(p.share)]
    signal = float(np.median(shares)) if shares else 1.0
    return objectives.fit_staleness(rows, signal=signal, momentum=places[0].momentum)
