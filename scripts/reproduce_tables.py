"""Make the Markdown tables of the reproduction from the files that `reproduce_collect` wrote."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import reproduce_held_out as held_out
import reproduce_rates as rates
import reproduce_regimes as regimes
import reproduce_settings as settings
import reproduce_stages as stages
from reproduce_regimes import Run, row_of
from reproduce_times import FRESH, equal_accuracy_table, time_table

from mugrpo_jax import objectives
from mugrpo_jax.report import staleness_position as law


def read(
    results: Path, arms: Sequence[str], level: float, fresh: Path | None = None
) -> tuple[list[Run], list[Run]]:
    """The runs of the comparison, and the finished runs of the grid.

    Runs with fresh data that are not there are taken from the folder `fresh`. If the folder `results` has
    only folders of runs in it, each is one of `settings.SETTINGS`.
    """
    runs = [_load(path) for path in results.glob("*-seed*.jsonl")]
    if runs and fresh is not None:
        others = list(fresh.glob(f"{FRESH}-*seed*.jsonl"))
        if not others:
            raise SystemExit(f"{fresh}: no run of {FRESH} in it; --fresh needs a folder that has one")
        here = {run["path"].name for run in runs}
        runs += [_load(path) for path in others if path.name not in here]
    grid = results / "law.jsonl"
    if not runs and not grid.exists():
        found = [_load(path) for path in results.glob("*/*-seed*.jsonl")]
        return settings.sort(found, arms), []
    return (
        sorted(runs, key=lambda run: (run["rate"] or 0, arms.index(run["arm"]), run["seed"])),
        _load_law(grid, level) if grid.exists() else [],
    )


def _load(path: Path) -> Run:
    """Read a run. Its `rate` is None unless its name has one, as the runs of several learning rates do."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    parts = {"evaluations": "evaluation", "bins": "updates"}
    found = {name: [line for line in lines if line["kind"] == kind] for name, kind in parts.items()}
    arm, _, rate = lines[0]["run"].rsplit("-seed", 1)[0].partition("-lr")
    return lines[0] | {"arm": arm, "rate": float(rate) if rate else None, "path": path} | found


def tables(runs: Sequence[Run], grid: Sequence[Run], level: float) -> Iterator[str]:
    """The lines that `draw` prints."""
    if settings.are(runs):
        yield from settings.tables(runs)
    elif runs and all(run["rate"] for run in runs):
        yield from rates.tables(runs)
        for compare in (time_table, equal_accuracy_table):
            if lines := list(compare(runs)):
                yield from [*lines, ""]
        yield from [*regimes.regime_table(map(regimes.measured_run, runs)), ""]
    elif runs:
        for compare in (_comparison_table, _distance_table, _worst_table, time_table):
            if lines := list(compare(runs)):
                yield from [*lines, ""]
        yield from [*rates.standard_errors(runs), ""]
        yield from [*regimes.regime_table(map(regimes.measured_run, runs)), ""]
    if stages.are(grid):
        yield from [*stages.table(grid), "", *stages.generations(grid), "", *_law_table(grid), ""]
        yield from [*held_out.advice_check_table(grid), ""]
    elif grid:
        yield from [*_law_table(grid), "", *_law_constants(grid, level), ""]
        yield from [*regimes.regime_table(map(regimes.measured_row, grid)), ""]
        for table in (
            held_out.border_table,
            held_out.pairs_table,
            held_out.order_table,
            held_out.exponents,
            held_out.held_out_table,
            held_out.time_table,
            held_out.advice_table,
            held_out.advice_check_table,
        ):
            yield from [*table(grid), ""]
        yield from held_out.unseen_table([*runs, *_elsewhere(runs)], grid)


def _elsewhere(runs: Sequence[Run]) -> list[Run]:
    """Runs of the same task in folders inside the folder of these runs."""
    tasks = [(run["task"]["name"], run["task"]["options"]) for run in runs]
    folders = {run["path"].parent for run in runs}
    found = [_load(path) for folder in folders for path in sorted(folder.glob("*/*-seed*.jsonl"))]
    return [run for run in found if (run["task"]["name"], run["task"]["options"]) in tasks]


# -- the comparison


def _comparison_table(runs: Sequence[Run]) -> Iterable[str]:
    """Accuracy of all runs, and times of the runs that had the GPU to themselves."""
    yield "| arm | seed | updates | start | end | best | generate | update | switch | compile | in all |"
    yield f"|{'---|' * 11}"
    for run in runs:
        accuracy = [_number(run[f"{when}_accuracy"], ".3f") for when in ("first", "last", "best")]
        spent = run["seconds"]
        parts = (
            spent.get("sample", 0) + spent.get("score_wait", 0),
            *(spent.get(name, 0) for name in ("update", "switch", "compile", "training")),
        )
        times = [f"{part:.0f} s" if run["alone"] and "update" in spent else "–" for part in parts]
        done = f"{run['updates']}{'' if run['finished'] else ' so far'}"
        yield row_of(run["arm"], run["seed"], done, *accuracy, *times)
    for arm in dict.fromkeys(run["arm"] for run in runs):
        same = [run for run in runs if run["arm"] == arm and run["finished"]]
        if len(same) > 1:
            ends = [np.mean([run[f"{when}_accuracy"] for run in same]) for when in ("first", "last", "best")]
            shown = [f"{end:.3f}" for end in ends]
            yield row_of(arm, f"mean of {len(same)}", same[0]["updates"], *shown, *["–"] * 5)


def _distance_table(runs: Sequence[Run]) -> Iterable[str]:
    """Mean distance of each run to fresh data with the same seed; less noisy than the end alone."""
    if not any(less_fresh(run, runs) for run in runs):
        return
    means = "mean of all evaluations but the first | of the last five"
    yield f"| arm | seed | distance to `{FRESH}`: {means} | ahead |"
    yield f"|{'---|' * 5}"
    of_arm: dict[str, list[Sequence[float]]] = {}
    for run in runs:
        if apart := [point["accuracy"] for point in less_fresh(run, runs) if point["updates"]]:
            of_arm.setdefault(run["arm"], []).append(apart)
            newest = f"{np.mean(apart[-5:]):+.4f}" if len(apart) > 5 else "–"
            ahead = f"{sum(distance > 0 for distance in apart)} of {len(apart)}"
            yield row_of(run["arm"], run["seed"], f"{np.mean(apart):+.4f}", newest, ahead)
    for arm, seeds in of_arm.items():
        if len(seeds) > 1:
            newest = _over_seeds([a[-5:] for a in seeds]) if min(map(len, seeds)) > 5 else "–"
            yield row_of(arm, f"mean of {len(seeds)}", _over_seeds(seeds), newest, "–")


def less_fresh(run: Run, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Evaluations of a run minus those of fresh data with the same seed, where both exist."""
    fresh = [other for other in runs if (other["arm"], other["seed"]) == (FRESH, run["seed"])]
    there = {point["updates"]: point["accuracy"] for other in fresh for point in other["evaluations"]}
    return [
        point | {"accuracy": point["accuracy"] - there[point["updates"]]}
        for point in run["evaluations"]
        if run["arm"] != FRESH and point["updates"] in there
    ]


def _over_seeds(distances: Iterable[Sequence[float]]) -> str:
    means = [np.mean(apart) for apart in distances]
    return f"{np.mean(means):+.4f} ± {np.std(means, ddof=1) / math.sqrt(len(means)):.4f}"


def _worst_table(runs: Sequence[Run]) -> Iterable[str]:
    """The worst point of each run; a run that recovers does not show it at its end."""
    shares = "most wrong responses with a trigger | up to | mean ESS"
    yield f"| arm | seed | lowest accuracy | after | {shares} |"
    yield f"|{'---|' * 7}"
    for run in runs:
        low = min(run["evaluations"][1:] or run["evaluations"], key=lambda point: point["accuracy"])
        name = "abandoned/negative_responses"
        most = max(run["bins"], key=lambda point: point.get(name, 0.0))
        accuracy, share = f"{low['accuracy']:.3f}", f"{100 * most.get(name, 0.0):.1f} %"
        sizes = [point["ess/tokens"] for point in run["bins"] if "ess/tokens" in point]
        ess = f"{np.mean(sizes):.3f}" if sizes else "–"
        yield row_of(run["arm"], run["seed"], accuracy, low["updates"], share, most["updates"], ess)


# -- the law


def _load_law(path: Path, level: float) -> list[Run]:
    """Finished runs of the grid; collapses are found here, from the evaluations."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        seen = row["evaluations"]
        collapse = regimes.collapse_of(seen["updates"], seen["accuracy"], level)
        if collapse != row["collapse"]:  # the level differs from that of the file
            way = None if collapse is None else float(np.interp(collapse, seen["updates"], seen["way"]))
            row |= {"collapse": collapse, "critical_drift": way}
    return [row for row in rows if row["finished"]]


def _law_table(rows: Sequence[Run]) -> Iterable[str]:
    accuracy_and_after = (
        "start | end | best | mean | collapse at | t·η | G | R_batch | R_crit | largest cosine"
    )
    several = len({row["seed"] for row in rows}) > 1
    yield f"| objective | {held_out.lag_of(rows)} | η | {'seed | ' * several}S·η | {accuracy_and_after} |"
    yield f"|{'---|' * (14 + several)}"
    for row in rows:
        collapse, rate = row["collapse"], row["learning_rate"]
        accuracy = [_number(row[f"accuracy_{when}"], ".3f") for when in ("start", "end", "best")]
        mean = _number(np.mean(row["evaluations"]["accuracy"][1:]), ".3f")
        gone = None if collapse is None else collapse * rate
        yield row_of(
            *(row["objective"], row["mu"], f"{rate:g}", *[row["seed"]] * several),
            *(f"{row['lag_times_rate']:.1e}", *accuracy, mean),
            *(
                "–" if collapse is None else collapse,
                _number(gone, ".1e"),
                _number(row["update_size"], ".0f"),
            ),
            *(_number(row[name], ".3g") for name in ("batch_drift", "critical_drift")),
            _number(row["cosine"], ".2f"),
        )


def _law_constants(rows: Sequence[Run], level: float) -> Iterable[str]:
    yield f"Collapsed: held-out accuracy ended below {level:g} times the best before it."
    for name, fit in fits(rows).items():
        same = [row for row in rows if row["objective"] == name]
        yield f"{name}, the law of the paper: {_constants(fit, 'S·η', 'T·η')}"
        walk = held_out.walk_of(same)
        noisy = objectives.fit_staleness(_finished(same), signal=walk.signal, momentum=walk.momentum)
        form = _constants(noisy, "η·effective updates of a stage", "of the run")
        yield f"{name}, with the signal of its drift, {walk.signal:.1g}: {form}"
    reported = law.REPORTED
    limits = f"S·η up to {reported.stale:.2g}, T·η up to {reported.horizon:.2g}"
    yield f"The paper, for GRPO without protection: {limits}."


def _constants(fit: objectives.StalenessFit, stage: str, run: str) -> str:
    return (
        f"{stage} up to {fit.constants.stale:.2g} ({_between(fit.stale_interval)}), {run} up to "
        f"{fit.constants.horizon:.2g} ({_between(fit.horizon_interval)}); {fit.too_stale} runs were too "
        f"stale, {fit.at_horizon} collapsed at the horizon."
    )


def fits(rows: Sequence[Run]) -> dict[str, objectives.StalenessFit]:
    """The constants of each objective whose runs differ in µ or η, in the form of the paper."""
    found = {}
    for name in dict.fromkeys(row["objective"] for row in rows):
        same = [row for row in rows if row["objective"] == name]
        if len({(row["mu"], row["learning_rate"]) for row in same}) > 1:
            found[name] = objectives.fit_staleness(_finished(same))
    return found


def _finished(rows: Sequence[Run]) -> list[objectives.FinishedRun]:
    names = "mu", "learning_rate", "updates", "collapse"
    return [objectives.FinishedRun(*(row[name] for name in names)) for row in rows]


def _between(interval: tuple[float, float]) -> str:
    low, high = interval
    if math.isinf(high):
        return f"not reached at {low:.2g}"
    if low == high:
        return "no range"
    return f"below {high:.2g}" if low == 0 else f"between {low:.2g} and {high:.2g}"


# -- cells


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:{form}}"
