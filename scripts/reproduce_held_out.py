"""Limits of the staleness law that are fitted to some runs and checked on runs that were not fitted."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from reproduce_regimes import Run, collapse_of, lag_name, measured_row, row_of

from mugrpo_jax import objectives


class Walk(NamedTuple):
    """How the drift of runs grows: the share of signal and the momentum, and G to make it a distance."""

    signal: float
    momentum: float
    update_size: float

    def of_stage(self, row: Run) -> float:
        """The predicted drift of a stage."""
        return self._drift(row, row["mu"], first_stage=False)

    def of_run(self, row: Run, updates: float | None = None) -> float:
        """The predicted drift since the start, after `updates` or after all updates of the run."""
        return self._drift(row, row["updates"] if updates is None else updates, first_stage=True)

    def _drift(self, row: Run, updates: float, *, first_stage: bool) -> float:
        given = row["learning_rate"], self.update_size, self.signal, self.momentum
        return float(objectives.drift(updates, *given, first_stage=first_stage))


def walk_of(rows: Sequence[Run]) -> Walk:
    """The median over runs of G and of the signal that explains the drift (0 if no run has a curve)."""
    found = [measured_row(row) for row in rows]
    signals = [fit.signal for run in found for fit in run.fits()]
    sizes = [run.update_size for run in found if math.isfinite(run.update_size)]
    return Walk(float(np.median(signals)) if signals else 0.0, found[0].momentum, float(np.median(sizes)))


RULES: dict[str, Callable[[Walk, Run], float]] = {
    "S·η": lambda walk, row: row["mu"] * row["learning_rate"],
    "√S·η": lambda walk, row: math.sqrt(row["mu"]) * row["learning_rate"],
    "η alone": lambda walk, row: row["learning_rate"],
    "predicted drift of a stage": Walk.of_stage,
    "predicted drift since the start": Walk.of_run,
}


def border_table(rows: Sequence[Run]) -> Iterable[str]:
    """How many runs collapsed, by the age of their data and their learning rate."""
    rates = sorted({row["learning_rate"] for row in rows})
    yield f"| objective | {lag_of(rows)} | " + " | ".join(f"η = {rate:g}" for rate in rates) + " |"
    yield f"|{'---|' * (2 + len(rates))}"
    for name, same in _by_objective(rows).items():
        for mu in sorted({row["mu"] for row in same}):
            found: dict[float, list[bool]] = {rate: [] for rate in rates}
            for row in same:
                if row["mu"] == mu:
                    found[row["learning_rate"]].append(row["collapse"] is not None)
            yield row_of(name, mu, *(f"{sum(bad)} of {len(bad)}" if bad else "–" for bad in found.values()))


def pairs_table(rows: Sequence[Run]) -> Iterable[str]:
    """Collapses with and without the veto, of runs with the same age of the data, learning rate and seed."""
    with_veto, without = (
        {(row["learning_rate"], row["mu"], row["seed"]): row["collapse"] is not None for row in found}
        for found in (_by_objective(rows).get(name, []) for name in ("mu_grpo", "relaxed-no-veto"))
    )
    both = sorted(with_veto.keys() & without.keys())
    if both:
        yield f"| η | {lag_of(rows)} | pairs | collapsed: mu_grpo | relaxed-no-veto |"
        yield "|---|---|---|---|---|"
    for (rate, lag), same in itertools.groupby(both, key=lambda pair: pair[:2]):
        pairs = list(same)
        gone = (sum(found[pair] for pair in pairs) for found in (with_veto, without))
        yield row_of(f"{rate:g}", lag, len(pairs), *gone)


def order_table(rows: Sequence[Run]) -> Iterable[str]:
    """Which quantity tells runs that collapse from the others, if its limit may be chosen afterwards?"""
    yield (
        "| objective | runs | collapsed | on the wrong side of the best limit on: " + " | ".join(RULES) + " |"
    )
    yield f"|{'---|' * (3 + len(RULES))}"
    for name, same in _by_objective(rows).items():
        walk, bad = walk_of(same), [row["collapse"] is not None for row in same]
        wrong = [objectives.best_split([rule(walk, row) for row in same], bad)[1] for rule in RULES.values()]
        yield row_of(name, len(same), sum(bad), *wrong)


def exponents(rows: Sequence[Run]) -> Iterable[str]:
    """With which exponents p does the best limit on S^p·η have the fewest runs on the wrong side?"""
    for name, same in _by_objective(rows).items():
        bad = [row["collapse"] is not None for row in same]
        if all(bad) or not any(bad) or len({row["mu"] for row in same}) < 2:
            continue
        wrong = {
            p: objectives.best_split([row["mu"] ** p * row["learning_rate"] for row in same], bad)[1]
            for p in np.arange(0, 151) / 100
        }
        best = [p for p, errors in wrong.items() if errors == min(wrong.values())]
        yield (
            f"{name}: the best limit on S^p·η has {min(wrong.values())} of {len(same)} runs on the wrong "
            f"side, with p from {best[0]:g} to {best[-1]:g}."
        )


def lag_of(rows: Iterable[Run]) -> str:
    """How tables of this grid call `mu`."""
    return lag_name((row["mu"], row.get("stage_updates") or row["mu"]) for row in rows)


def held_out_table(rows: Sequence[Run]) -> Iterable[str]:
    """Fit every limit to all µ but one, and predict which runs with the left-out µ collapse."""
    yield "| objective | limit on | left-out runs predicted right | wrong | the wrong ones |"
    yield f"|{'---|' * 5}"
    for name, same in _by_objective(rows).items():
        if len({row["mu"] for row in same}) < 2:
            yield row_of(name, "–", "–", "–", f"only {lag_of(rows)} = {same[0]['mu']}: none can be left out")
            continue
        for rule, value in RULES.items():
            right, wrong = 0, []
            for others, left in _leave_one_lag_out(same):
                walk = walk_of(others)
                limit = _limit(walk, others, value)
                for row in left if limit else ():
                    if (value(walk, row) >= limit) == (row["collapse"] is not None):
                        right += 1
                    else:
                        wrong.append(f"{lag_of(rows)} = {row['mu']}, η = {row['learning_rate']:g}")
            yield row_of(name, rule, right, len(wrong), "; ".join(wrong) or "–")
        yield row_of(name, *_most_frequent(same), "–")


def other_grid_table(rows: Sequence[Run], fitted: Sequence[Run]) -> Iterable[str]:
    """Fit every limit to the runs of one grid, and predict which runs of another grid collapse."""
    yield "| objective | limit on | fitted limit | runs predicted right | wrong |"
    yield f"|{'---|' * 5}"
    groups = _by_objective(fitted)
    for name, same in _by_objective(rows).items():
        others = groups.get(name, [])
        if len({row["collapse"] is None for row in others}) < 2:
            continue  # all collapsed or none did, so there is no limit
        walk = walk_of(others)
        for rule, value in RULES.items():
            limit = _limit(walk, others, value)
            wrong = sum((value(walk, row) >= limit) != (row["collapse"] is not None) for row in same)
            yield row_of(name, rule, f"{limit:.2g}", len(same) - wrong, wrong)
        told, *counts = _most_frequent(same)
        yield row_of(name, told, "–", *counts)


def _most_frequent(rows: Sequence[Run]) -> tuple[str, int, int]:
    """The rule that gives all runs the more frequent end; how many it predicts right, and wrong."""
    fell = sum(row["collapse"] is not None for row in rows)
    rest = len(rows) - fell
    return ("none: all collapse", fell, rest) if fell > rest else ("none: all hold", rest, fell)


def time_table(rows: Sequence[Run]) -> Iterable[str]:
    """When do the left-out runs collapse? By T·η, as in the paper, and by the drift that was measured."""
    predicted = "predicted, T·η | predicted, drift since the start"
    yield f"| objective | {lag_of(rows)} | η | collapsed at | {predicted} |"
    yield f"|{'---|' * 6}"
    near = []
    for name, same in _by_objective(rows).items():
        if len({row["mu"] for row in same}) < 2:
            continue
        for others, left in _leave_one_lag_out(same):
            walk = walk_of(others)
            forms = walk._replace(signal=1.0), walk
            for row in (row for row in left if row["collapse"] is not None):
                told = [_update_of_collapse(form, others, row) for form in forms]
                near.append([0.5 <= at / row["collapse"] <= 2 for at in told])
                shown = [f"{at:.0f}" if math.isfinite(at) else "never" for at in told]
                yield row_of(name, row["mu"], f"{row['learning_rate']:g}", row["collapse"], *shown)
    if near:
        by_product, by_drift = map(sum, zip(*near))
        yield ""
        yield f"Right up to a factor of two, of {len(near)}: {by_product} by T·η, {by_drift} by the drift."


def unseen_table(runs: Sequence[Run], rows: Sequence[Run]) -> Iterable[str]:
    """Runs outside the grid, with another µ, η or length: does the limit of the grid hold for them?"""
    arms = {"grpo-mu4": "grpo", "grpo-stale": "grpo", "mu_grpo": "mu_grpo"}
    groups = _by_objective(rows)
    known = [run for run in runs if arms.get(run["arm"]) in groups]
    if not known:
        return
    told = "predicted by T·η | predicted by the drift | seen"
    yield f"| run | seed | µ | η | updates | predicted drift since the start | tolerated | {told} |"
    yield f"|{'---|' * 10}"
    right = np.zeros(2, int)
    for run in known:
        same = groups[arms[run["arm"]]]
        mu, rate = run["batch"]["updates_per_stage"], run["optimizer"]["learning_rate"]
        walk = walk_of(same)
        straight, noisy = ((form, tolerated(form, same)) for form in (walk._replace(signal=1.0), walk))
        row = {"learning_rate": rate, "updates": run["updates"]}
        at, accuracy = ([line[name] for line in run["evaluations"]] for name in ("updates", "accuracy"))
        fell = collapse_of(at, accuracy) is not None
        bad = [*(form.of_run(row) >= limit for form, limit in (straight, noisy)), fell]
        right += [told == fell for told in bad[:2]]
        cells = mu, f"{rate:g}", run["updates"], f"{walk.of_run(row):.2f}", f"{noisy[1]:.2f}"
        yield row_of(run["arm"], run["seed"], *cells, *("collapses" if it else "holds" for it in bad))
    yield ""
    yield f"Predicted right of {len(known)} runs: {right[0]} by T·η, {right[1]} by the drift."


def advice_table(rows: Sequence[Run]) -> Iterable[str]:
    """The largest learning rate for runs of several lengths, by T·η and by the drift as it was measured."""
    lengths = (512, 1024, 4096)
    heads = [f"{form}, {updates} updates" for form in ("η by T·η", "η by the drift") for updates in lengths]
    yield f"| objective | tolerated drift | {' | '.join(heads)} |"
    yield f"|{'---|' * (2 + len(heads))}"
    for name, same in _by_objective(rows).items():
        if all(row["collapse"] is None for row in same):
            continue
        walk, limits = walk_of(same), []
        for form in (walk._replace(signal=1.0), walk):
            given = form.signal, form.update_size, math.inf, tolerated(form, same), form.momentum
            limits += [objectives.advise_learning_rate(n, n, *given).run_limit for n in lengths]
        yield row_of(name, f"{tolerated(walk, same):.2f}", *(f"{limit:.1e}" for limit in limits))


def advice_check_table(rows: Sequence[Run]) -> Iterable[str]:
    """Was a lower rate safe? That which a report says to try after a collapse, and two simpler ones.

    Each run that collapsed is compared with all runs of the same µ at the rate in question or a lower one.
    A cell adds up how many of these collapsed, of how many.
    """
    rates: dict[str, Callable[[Run], float]] = {
        "half of the report's limit": lambda row: _advised(row) / 2,
        "half of its own η": lambda row: row["learning_rate"] / 2,
        "a quarter of it": lambda row: row["learning_rate"] / 4,
    }
    yield f"| objective | runs that collapsed | collapsed at {' | '.join(rates)} |"
    yield f"|{'---|' * (2 + len(rates))}"
    for name, same in _by_objective(rows).items():
        fell = [row for row in same if row["collapse"] is not None and row["critical_drift"]]
        counts = []
        for rate in rates.values():
            lower = [
                other["collapse"] is not None
                for row in fell
                for other in same
                if other["mu"] == row["mu"] and other["learning_rate"] <= rate(row) * (1 + 1e-9)
            ]
            counts.append(f"{sum(lower)} of {len(lower)}")
        if fell:
            yield row_of(name, len(fell), *counts)


def _advised(row: Run) -> float:
    """The limit on the learning rate that `mugrpo report` names for a run that collapsed."""
    run = measured_row(row)
    fits = run.fits()
    size = float(np.median([fit.update_size for fit in fits])) if fits else run.update_size
    signal = float(np.median([fit.signal for fit in fits])) if fits else 0.0
    known = row["batch_drift"] or math.inf, row["critical_drift"], run.momentum
    advised = objectives.advise_learning_rate(max(row["mu"] - 1, 1), row["updates"], signal, size, *known)
    return min(advised.learning_rate, row["learning_rate"])


def tolerated(walk: Walk, rows: Sequence[Run]) -> float:
    """The drift since the start that runs tolerate: that at collapses, but not below that of the others."""
    bad = [row["collapse"] is not None for row in rows]
    (low, high), _ = objectives.best_split([walk.of_run(row) for row in rows], bad)
    at_collapse = [walk.of_run(row, row["collapse"]) for row in rows if row["collapse"] is not None]
    return float(np.clip(np.median(at_collapse), low, high)) if at_collapse else math.inf


def _update_of_collapse(walk: Walk, others: Sequence[Run], row: Run) -> float:
    given = row["learning_rate"], walk.update_size, walk.signal, walk.momentum
    limit = tolerated(walk, others)
    return float(objectives.updates_until_drift(limit, *given, first_stage=True, most=row["updates"]))


def _limit(walk: Walk, rows: Sequence[Run], value: Callable[[Walk, Run], float]) -> float:
    """The best limit; 0 if all of these runs collapsed or none did, because then there is nothing to fit."""
    bad = [row["collapse"] is not None for row in rows]
    if all(bad) or not any(bad):
        return 0.0
    (low, high), _ = objectives.best_split([value(walk, row) for row in rows], bad)
    return high if low == 0 else low * 1.001 if math.isinf(high) else math.sqrt(low * high)


def _leave_one_lag_out(rows: Sequence[Run]) -> Iterable[tuple[list[Run], list[Run]]]:
    for lag in sorted({row["mu"] for row in rows}):
        yield [row for row in rows if row["mu"] != lag], [row for row in rows if row["mu"] == lag]


def _by_objective(rows: Sequence[Run]) -> dict[str, list[Run]]:
    names = dict.fromkeys(row["objective"] for row in rows)
    return {name: [row for row in rows if row["objective"] == name] for name in names}
