"""The tables about time: milliseconds per update, and when stale runs reach the accuracy of fresh data."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from reproduce_rates import LAST
from reproduce_regimes import Run, row_of

FRESH = "grpo-mu4"  # the arm that all others are compared with
LOWER = (0.01, 0.02, 0.03)  # below the level at which times are compared


def time_table(runs: Sequence[Run]) -> Iterable[str]:
    """Time per update, with its share of generation and switching, relative to fresh data.

    The parts do not include compiling. The quickest stage is measured by the clock, which includes compiling;
    a run that is long enough has a stage in which nothing is compiled.
    """
    whole_stages = [run for run in runs if run["updates"] % run["batch"]["updates_per_stage"] == 0]
    alone = [run for run in whole_stages if _timed(run)]
    fresh = [run for run in alone if run["arm"] == FRESH]
    if not fresh or len(alone) < 2:
        return
    parts, speed = "generate | update | switch | total per update", f"speed, `{FRESH}` = 1"
    by_clock = "quickest stage by the clock"
    yield f"| arm | seed | η | µ | updates | {parts} | {speed} | {by_clock} | {speed} |"
    yield f"|{'---|' * 12}"
    for run in alone:
        compared = next((other for other in fresh if other["seed"] == run["seed"]), fresh[0])
        spent, other = _milliseconds(run), _milliseconds(compared)
        several = run["updates"] > run["batch"]["updates_per_stage"]  # else compiling is in it
        own = quickest(run)
        shown = [f"{part:.1f} ms" for part in spent] or ["–"] * 4
        times = f"{other[-1] / spent[-1]:.2f}×" if spent and other else "–"
        best = [f"{own:.1f} ms", f"{quickest(compared) / own:.2f}×"] if several else ["–", "–"]
        facts = f"{run['optimizer']['learning_rate']:g}", run["batch"]["updates_per_stage"], run["updates"]
        yield row_of(run["arm"], run["seed"], *facts, *shown, times, *best)


def _timed(run: Run) -> bool:
    """Whether the times of a run are valid: it had the GPU to itself, and it generated its own rollouts."""
    spent = run["seconds"]
    generated = "sample" in spent or "update" not in spent  # old files have no parts
    return bool(run["alone"] and run["updates"] and generated)


def equal_accuracy_table(runs: Sequence[Run]) -> Iterable[str]:
    """When fresh data and a stale run of the same seed first reach the accuracy that both reach.

    Compiling is not counted: it takes less if an earlier run left the same programs in the cache. A pair
    has no lines if this accuracy is not above that of both starts.
    """
    timed = [run for run in runs if _timed(run) and _milliseconds(run) and len(_smoothed(run)) > 1]
    fresh = {_setting(run): run for run in timed if run["arm"] == FRESH}
    stale = [run for run in timed if run["arm"] != FRESH and _setting(run) in fresh]
    pairs = [(fresh[_setting(run)], run) for run in stale]
    pairs = [pair for pair in pairs if _level(*pair) > _start(*pair)]
    if not pairs:
        return
    speed = f"speed, `{FRESH}` = 1"
    about = f"arm | prompts per update | µ | η | seed | time per update | {speed}"
    lower = f"at levels lower by up to {LOWER[-1]:.2f}"
    yield f"| {about} | level | reached after | {speed} | {lower} | compiling, not counted |"
    yield f"|{'---|' * 12}"
    for pair in pairs:
        yield from _reached_by(*pair)


def _setting(run: Run) -> tuple[Any, ...]:
    batch = run["batch"]
    return run["seed"], run["rate"], batch["prompts_per_update"], batch.get("responses_per_prompt")


def _reached_by(fresh: Run, stale: Run) -> Iterable[str]:
    """The lines of the two runs: when each reaches the highest level that both reach, rounded down.

    A speed depends on the level. So the smallest and the largest at some lower levels are shown too, if both
    runs begin below these.
    """
    pair = fresh, stale
    level = _level(*pair)
    begin = max(_smoothed(run)[0][0] for run in pair)
    lower = [level - less for less in LOWER if level - less > begin]
    times, updates = ([_until(run, level, of) for run in pair] for of in (_without_compiling, _updates))
    others = [[_until(run, other, _without_compiling) for run in pair] for other in lower]
    for i, run in enumerate(pair):
        sizes = run["batch"]["prompts_per_update"], run["batch"]["updates_per_stage"]
        per_update = [_milliseconds(either)[-1] for either in (fresh, run)]
        speeds = [other[0] / other[i] for other in others] if run is stale else []
        yield row_of(
            *(run["arm"], *sizes, f"{run['rate']:g}", run["seed"]),
            *(f"{per_update[1]:.1f} ms", f"{per_update[0] / per_update[1]:.2f}×"),
            *(f"{level:.2f}", f"{times[i]:.0f} s ({updates[i]:.0f} updates)", f"{times[0] / times[i]:.2f}×"),
            f"{min(speeds):.2f}× to {max(speeds):.2f}×" if speeds else "–",
            f"{run['seconds'].get('compile', 0):.0f} s",
        )


def _level(*pair: Run) -> float:
    return math.floor(100 * min(max(accuracy for accuracy, _ in _smoothed(run)) for run in pair)) / 100


def _start(*pair: Run) -> float:
    return max(run["evaluations"][0]["accuracy"] for run in pair)


def _until(run: Run, level: float, amount: Callable[[Run, dict[str, Any]], float]) -> float:
    """Time or updates until the mean accuracy reaches a level, on a straight line between evaluations."""
    accuracy, points = zip(*_smoothed(run), strict=True)
    amounts = [amount(run, point) for point in points]
    end = next(i for i, value in enumerate(accuracy) if value >= level)
    begin = max(end - 1, 0)  # a run whose first mean is above the level reaches it there
    return float(np.interp(level, accuracy[begin : end + 1], amounts[begin : end + 1]))


def _updates(run: Run, point: dict[str, Any]) -> float:
    return float(point["updates"])


def _without_compiling(run: Run, point: dict[str, Any]) -> float:
    """Seconds until an evaluation; for old files all compiling of the run counts as before it."""
    return float(point["clock"] - point.get("compiled", run["seconds"].get("compile", 0.0)))


def _smoothed(run: Run) -> list[tuple[float, dict[str, Any]]]:
    """The mean accuracy of each evaluation and those before it, with the evaluation."""
    points = run["evaluations"]
    ends = range(LAST, len(points) + 1)
    return [
        (float(np.mean([p["accuracy"] for p in points[end - LAST : end]])), points[end - 1]) for end in ends
    ]


def _milliseconds(run: Run) -> tuple[float, ...]:
    """Milliseconds per update: generation with scoring, the update itself, switching, and their sum.

    Empty if the file does not have the parts.
    """
    spent = {name: 1e3 * seconds / run["updates"] for name, seconds in run["seconds"].items()}
    if "update" not in spent:
        return ()
    parts = spent.get("sample", 0) + spent.get("score_wait", 0), spent["update"], spent.get("switch", 0)
    return *parts, sum(parts)


def quickest(run: Run) -> float:
    """Milliseconds per update in the quickest stage, or in the quickest line of the file if longer."""
    clock = {0: 0.0} | {point["updates"]: point["clock"] for point in run["bins"]}
    line = min(point for point in clock if point)
    stage = max(run["batch"]["updates_per_stage"], line)
    ends = [end for end in clock if end and end % stage == 0]
    return min(1e3 * (clock[end] - clock[end - stage]) / stage for end in ends)
