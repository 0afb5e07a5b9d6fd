"""The tables of arms that replayed the same rollouts at several learning rates."""

from collections.abc import Iterable, Sequence

import numpy as np
from reproduce_regimes import Run, row_of

TRIGGERED = "abandoned/negative_responses"
LAST = 3  # evaluations whose mean is the end of a run; one of them has a standard error of 0.015
COLLAPSED = 0.5  # a run that ends below this share of its start


def tables(runs: Sequence[Run]) -> Iterable[str]:
    """The curve of every run, then the end of every arm with its spread over seeds."""
    yield from [*_curve_table(runs), "", *_end_table(runs), ""]


def _curve_table(runs: Sequence[Run]) -> Iterable[str]:
    places = sorted({point["updates"] for run in runs for point in run["evaluations"]})
    shown = " | ".join(map(str, places))
    yield f"| arm | η | seed | {shown} | wrong responses with a trigger, last {_bin(runs)} updates |"
    yield f"|{'---|' * (4 + len(places))}"
    for run in runs:
        found = {point["updates"]: f"{point['accuracy']:.3f}" for point in run["evaluations"]}
        curve = [found.get(place, "–") for place in places]
        yield row_of(run["arm"], f"{run['rate']:g}", run["seed"], *curve, f"{100 * _triggered(run):.0f} %")


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
        most = max(point.get(TRIGGERED, 0.0) for run in same for point in run["bins"])
        yield row_of(
            *(arm, f"{rate:g}", len(same), f"{start:.3f}", f"{np.mean(ends):.3f}"),
            *(", ".join(f"{value:.3f}" for value in ends), f"{lowest:.3f}"),
            *(f"{sum(map(collapsed, same))} of {len(same)}", f"{100 * most:.0f} %"),
        )


def end(run: Run) -> float:
    """The mean of the last evaluations."""
    return float(np.mean([point["accuracy"] for point in run["evaluations"][-LAST:]]))


def collapsed(run: Run) -> bool:
    """Whether the last evaluation is below half of the first."""
    points = run["evaluations"]
    return points[-1]["accuracy"] < COLLAPSED * points[0]["accuracy"]
