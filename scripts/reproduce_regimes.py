"""Which regime of the staleness law is each run in, and how well is its drift predicted?

A file of `reproduce_collect` that lacks a column has "–" in its row.
"""

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mugrpo_jax import objectives
from mugrpo_jax.report import staleness_position as law

Run = dict[str, Any]
BIN = 32  # updates that `reproduce_collect` averages into one line of a run
FEWEST = 4  # points of a stage's drift that a fit needs
MOMENTUM = 0.9  # of grids that were collected without it


class Measured(NamedTuple):
    """What a collected run says about its drift; NaN or empty where the file does not have it."""

    name: str
    seed: int
    lag: int  # S + 1: µ, or (L + 1)·µ with `batch.lag` = L
    learning_rate: float
    momentum: float
    update_size: float  # G, the median of ‖Δθ‖ / η
    cosines: tuple[float, ...]
    stages: tuple[tuple[np.ndarray, np.ndarray, bool], ...]  # updates, drift, whether it is the run's first
    stage_updates: int  # µ

    def fits(self, share: float = 1.0) -> list[objectives.DriftFit]:
        """A fit for every stage, to the first `share` of it."""
        found = []
        for updates, drift, first in self.stages:
            early = updates <= share * self.stage_updates
            if early.sum() >= (FEWEST if share == 1 else 2):
                given = {"updates": updates[early].tolist(), "momentum": self.momentum, "first_stage": first}
                found.append(objectives.fit_drift(drift[early].tolist(), self.learning_rate, **given))
        return found

    def ratio(self, size: float, signal: float) -> float:
        """Predicted drift divided by the measured one at the end of a stage, the median over stages."""
        return float(np.median([self._ratio(stage, size, signal) for stage in self.stages]))

    def early_ratio(self) -> float:
        """The same, for a prediction from a fit to the first quarter of each stage."""
        fits = self.fits(0.25)
        if not fits or len(fits) != len(self.stages):
            return math.nan
        pairs = zip(self.stages, fits)
        return float(np.median([self._ratio(stage, f.update_size, f.signal) for stage, f in pairs]))

    def _ratio(self, stage: tuple[np.ndarray, np.ndarray, bool], size: float, signal: float) -> float:
        updates, drift, first = stage
        given = self.learning_rate, size, signal, self.momentum
        return float(objectives.drift(updates[-1], *given, first_stage=first)) / drift[-1]


def measured_run(run: Run) -> Measured:
    """From the lines of a run of the comparison: means over `BIN` updates, at the middle of the bin."""
    lag, optimizer = run["batch"]["updates_per_stage"], run["optimizer"]
    points = [(line["updates"], line["drift"]) for line in run["bins"] if "drift" in line]
    stages = []
    for start in range(0, run["updates"] - lag + 1, lag):
        inside = [(at - start, drift) for at, drift in points if start < at <= start + lag]
        if lag % BIN == 0 and len(inside) >= FEWEST:
            at, drift = np.array(inside, np.float64).T
            stages.append((at - (BIN - 1) / 2, drift, start == 0))
    norms = [line["update_norm"] for line in run["bins"] if "update_norm" in line]
    rate = optimizer["learning_rate"]
    return Measured(
        run["arm"],
        run["seed"],
        lag,
        rate,
        optimizer["beta1"],
        objectives.update_size(np.array(norms), rate) if norms else math.nan,
        tuple(line["gradient_cosine"] for line in run["bins"] if "gradient_cosine" in line),
        tuple(stages),
        lag,
    )


def measured_row(row: Run) -> Measured:
    """From a line of the grid: its `curve`, or the distances at its evaluations if it has none."""
    curve = row.get("curve")
    if curve is None:
        seen = row["evaluations"]
        cosines, points = (), _from_evaluations(seen["updates"], seen["way"], row["mu"])
    else:
        cosines = tuple(value for value in curve["gradient_cosine"] if value is not None)
        points = list(zip(curve["updates"], curve["age"], curve["drift"]))
    stages = []
    for start in dict.fromkeys(at - age for at, age, _ in points):
        inside = [(age, drift) for at, age, drift in points if at - age == start and drift]
        if len(inside) >= FEWEST:
            age, drift = np.array(inside, np.float64).T
            stages.append((age, drift, start == 0))
    momentum = row.get("momentum", MOMENTUM)
    size = row["update_size"] or math.nan
    settings = row["objective"], row["seed"], row["mu"], row["learning_rate"]
    stage_updates = int(row.get("stage_updates") or row["mu"])
    return Measured(*settings, momentum, size, cosines, tuple(stages), stage_updates)


def _from_evaluations(updates: Sequence[int], way: Sequence[float], lag: int) -> list[tuple[int, int, float]]:
    """Updates, age and drift. `way` is a sum over stages; the way at the start of the stage is taken off."""
    reached = dict(zip(updates, way))
    starts = {at: (at - 1) // lag * lag for at in updates if at}
    return [
        (at, at - start, reached[at] - reached[start]) for at, start in starts.items() if start in reached
    ]


# -- the regime of each run


def lag_name(lags: Iterable[tuple[int, int]]) -> str:
    """How tables call `lag` (in files `mu`): µ, or S + 1 if it differs from µ in a run, by `batch.lag`."""
    return "S + 1" if any(lag != stage for lag, stage in lags) else "µ"


def regime_table(runs: Iterable[Measured]) -> Iterable[str]:
    """Signal and noise by the cosine and by the drift, and three predictions of the drift."""
    by_drift = "drift exponent | random walk | signal by drift | regime by it"
    predicted = "predicted / measured drift: noise alone | with the cosine | from the first quarter"
    runs = list(runs)
    lag = lag_name((run.lag, run.stage_updates) for run in runs)
    yield f"| run | seed | {lag} | η | G | cosine | regime by it | {by_drift} | {predicted} |"
    yield f"|{'---|' * 14}"
    columns = []
    for run in runs:
        columns.append(_regime_cells(run))
        yield row_of(run.name, run.seed, run.lag, f"{run.learning_rate:g}", *columns[-1])
    yield ""
    yield from _regime_summary(columns)


def _regime_summary(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """The table in a few lines: how many runs are in each regime, and how far predictions are off."""
    for name, column in (("cosine", 2), ("drift", 6)):
        found = collections.Counter(row[column] for row in rows if row[column] != "–")
        counts = ", ".join(f"{regime} {count}" for regime, count in found.most_common())
        yield f"Runs by the {name}: {counts or 'not recorded'}."
    for name, column in (("noise alone", 7), ("the cosine", 8), ("the first quarter", 9)):
        ratios = sorted(float(row[column]) for row in rows if row[column] != "–")
        if ratios:
            span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {np.median(ratios):.2f}"
            yield f"Predicted / measured drift from {name}: {span}."


def _regime_cells(run: Measured) -> list[str]:
    share, error = objectives.signal_share(run.cosines)
    cosine = [_number(share, ".4f"), "–"]
    if math.isfinite(share):
        cosine = [f"{share:.4f} ± {error:.4f}", objectives.regime(run.lag, share)]
    fits = run.fits()
    if not fits:
        return [_number(run.update_size, ".0f"), *cosine, *["–"] * 7]
    exponent, signal = (float(np.median([getattr(f, name) for f in fits])) for name in ("exponent", "signal"))
    walks = [
        _exponent(at, objectives.effective_updates(at, 0.0, run.momentum, first_stage=first))
        for at, _, first in run.stages
    ]
    by_cosine = run.ratio(run.update_size, max(share, 0.0)) if math.isfinite(share) else math.nan
    return [
        _number(run.update_size, ".0f"),
        *cosine,
        f"{exponent:.2f}",
        f"{np.median(walks):.2f}",
        f"{signal:.1e}" if signal > 1e-9 else "0",
        objectives.regime(run.lag, signal),
        _number(run.ratio(run.update_size, 0.0), ".2f"),
        _number(by_cosine, ".2f"),
        _number(run.early_ratio(), ".2f"),
    ]


def _exponent(updates: np.ndarray, drift: np.ndarray) -> float:
    whole = np.full(round(updates[-1]), np.nan)
    whole[np.round(updates).astype(int) - 1] = drift
    return objectives.drift_exponent(whole.tolist())


def collapse_of(updates: Sequence[int], accuracy: Sequence[float], level: float = 0.5) -> int | None:
    """`accuracy_collapse` of accuracies that were rounded: what is at the limit is not below it."""
    return law.accuracy_collapse(updates, accuracy, level * (1 - 1e-4))


def row_of(*cells: Any) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "–"
