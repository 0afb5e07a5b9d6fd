"""The tables of arms that replayed the same rollouts at several learning rates."""

import string
from collections.abc import Iterable, Sequence

import numpy as np
from reproduce_regimes import Run, collapse_of, row_of

TRIGGERED = "abandoned/negative_responses"
LAST = 3  # evaluations whose mean is the end of a run; one of them has a standard error of 0.015


def tables(runs: Sequence[Run]) -> Iterable[str]:
    """The curve of every run, then the end of every arm with its spread over seeds."""
    yield from [*_curve_table(runs), "", *_end_table(runs), ""]


def _curve_table(runs: Sequence[Run]) -> Iterable[str]:
    places = sorted({point["updates"] for run in runs for point in run["evaluations"]})
    shown, known = " | ".join(map(str, places)), rollouts(runs)
    triggers = f"wrong responses with a trigger, last {_bin(runs)} updates"
    yield f"| arm | η | seed | rollouts | {shown} | {triggers} |"
    yield f"|{'---|' * (5 + len(places))}"
    for run, name in zip(runs, known, strict=True):
        found = {point["updates"]: f"{point['accuracy']:.3f}" for point in run["evaluations"]}
        curve = [found.get(place, "–") for place in places]
        facts = run["arm"], f"{run['rate']:g}", run["seed"], name
        yield row_of(*facts, *curve, f"{100 * _triggered(run):.0f} %")


def rollouts(runs: Sequence[Run]) -> list[str]:
    """A letter for each run: runs of a seed with the same letter trained on the same rollouts.

    These have the same rewards. A run of several stages has its own rollouts, without a letter.
    """
    known: dict[int, list[float]] = {}
    names = []
    for run in runs:
        if run["batch"]["updates_per_stage"] < run["updates"] or not run["bins"]:
            names.append("–")
            continue
        found = known.setdefault(run["seed"], [])
        if (first := run["bins"][0]["reward"]) not in found:
            found.append(first)
        names.append(string.ascii_uppercase[found.index(first)])
    return names


def _bin(runs: Sequence[Run]) -> int:
    return runs[0]["bins"][0]["updates"] if runs[0]["bins"] else 0


def _triggered(run: Run) -> float:
    return run["bins"][-1].get(TRIGGERED, 0.0) if run["bins"] else 0.0


def _end_table(runs: Sequence[Run]) -> Iterable[str]:
    means = f"mean of the last {LAST} evaluations"
    yield f"| arm | η | seeds | start | {means} | by seed | lowest | collapsed | triggers, most |"
    yield f"|{'---|' * 9}"
    for rate, arm in dict.fromkeys((run["rate"], run["arm"]) for run in runs):
        same = [run for run in runs if (run["rate"], run["arm"]) == (rate, arm)]
        ends = [end(run) for run in same]
        start = np.mean([run["evaluations"][0]["accuracy"] for run in same])
        lowest = min(point["accuracy"] for run in same for point in run["evaluations"])
        most = max((point.get(TRIGGERED, 0.0) for run in same for point in run["bins"]), default=0.0)
        yield row_of(
            *(arm, f"{rate:g}", len(same), f"{start:.3f}", f"{np.mean(ends):.3f}"),
            *(", ".join(f"{value:.3f}" for value in ends), f"{lowest:.3f}"),
            *(f"{sum(map(collapsed, same))} of {len(same)}", f"{100 * most:.0f} %"),
        )


def end(run: Run) -> float:
    """The mean of the last evaluations."""
    return float(np.mean([point["accuracy"] for point in run["evaluations"][-LAST:]]))


def collapsed(run: Run) -> bool:
    """Whether the accuracy fell below half of the best before it, and stayed there until the end."""
    at, accuracy = ([point[name] for point in run["evaluations"]] for name in ("updates", "accuracy"))
    return collapse_of(at, accuracy) is not None
