"""The tables of arms that replayed the same rollouts at several learning rates."""

import string
from collections.abc import Iterable, Sequence

import numpy as np
from reproduce_regimes import Run, collapse_of, row_of

TRIGGERED = "abandoned/negative_responses"
LAST = 3  # evaluations whose mean is the end of a run; one of them has a standard error of 0.015


def tables(runs: Sequence[Run]) -> Iterable[str]:
    """The curve of every run, the end of every arm with its spread over seeds, then what explains them."""
    yield from [*_curve_table(runs), "", *_end_table(runs), ""]
    for explain in (_summary_table, _earlier_end_table, _collapse_table, _stage_table):
        if lines := list(explain(runs)):
            yield from [*lines, ""]


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
    yield from ["", *standard_errors(runs)]


def standard_errors(runs: Sequence[Run]) -> Iterable[str]:
    """The span of the standard errors; runs that have lost the task do not count, unless all have."""
    points = [point for run in runs for point in run["evaluations"]]
    above = [point for point in points if point["accuracy"] > 0.05]
    if errors := [point["standard_error"] for point in above or points]:
        which = " with an accuracy above 0.05" if above else ""
        yield f"Standard error of an evaluation{which}: {min(errors):.3f} to {max(errors):.3f}."


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


def _summary_table(runs: Sequence[Run]) -> Iterable[str]:
    """The ends once more, over the learning rates: mean, lowest and highest seed, how many collapsed.

    Where an arm lacks seeds that others have, the number of its seeds is added.
    """
    rates = sorted({run["rate"] for run in runs})
    if len(rates) == 1:
        return
    seeds = len({run["seed"] for run in runs})
    yield f"| arm | {' | '.join(f'η = {rate:g}' for rate in rates)} |"
    yield f"|{'---|' * (1 + len(rates))}"
    for arm in dict.fromkeys(run["arm"] for run in runs):
        cells = []
        for rate in rates:
            same = [run for run in runs if (run["rate"], run["arm"]) == (rate, arm)]
            ends, gone = [end(run) for run in same], sum(map(collapsed, same))
            spread = f" ({min(ends):.3f}–{max(ends):.3f})" if len(ends) > 1 else ""
            lost = f", {gone} of {len(same)} collapsed" if gone else ""
            few = f", only {len(same)} seed{'s' * (len(same) > 1)}" if len(same) < seeds else ""
            cells.append(f"{np.mean(ends):.3f}{spread}{few}{lost}" if same else "–")
        yield row_of(arm, *cells)


def end(run: Run) -> float:
    """The mean of the last evaluations."""
    return float(np.mean([point["accuracy"] for point in run["evaluations"][-LAST:]]))


def collapsed(run: Run) -> bool:
    """Whether the accuracy fell below half of the best before it, and stayed there until the end."""
    at, accuracy = ([point[name] for point in run["evaluations"]] for name in ("updates", "accuracy"))
    return collapse_of(at, accuracy) is not None


def _earlier_end_table(runs: Sequence[Run]) -> Iterable[str]:
    """How many seeds of each arm would have collapsed, if the runs had ended earlier."""
    ends = sorted({point["updates"] for run in runs for point in run["evaluations"]})[-4:]
    rows = []
    for rate, arm in dict.fromkeys((run["rate"], run["arm"]) for run in runs):
        same = [run for run in runs if (run["rate"], run["arm"]) == (rate, arm)]
        same = [run for run in same if run["updates"] >= ends[-1]]
        gone = [[collapsed(_until(run, end)) for run in same] for end in ends]
        if any(map(any, gone)):
            shown = [_seeds_of(same, which) for which in gone]
            rows.append(row_of(arm, f"{rate:g}", *shown))
    if rows:
        yield f"| arm | η | collapsed, if the run ended after {' | '.join(map(str, ends))} |"
        yield f"|{'---|' * (2 + len(ends))}"
        yield from rows


def _until(run: Run, end: int) -> Run:
    return run | {"evaluations": [point for point in run["evaluations"] if point["updates"] <= end]}


def _seeds_of(runs: Sequence[Run], which: Sequence[bool]) -> str:
    count, seeds = f"{sum(which)} of {len(runs)}", [str(run["seed"]) for run, yes in zip(runs, which) if yes]
    return f"{count} (seed {', '.join(seeds)})" if 0 < len(seeds) < len(runs) else count


def _collapse_table(runs: Sequence[Run]) -> Iterable[str]:
    """What happens in the runs that collapse: each line is a mean over some updates."""
    rows = []
    for run in filter(collapsed, runs):
        seen = {point["updates"]: point for point in run["evaluations"]}
        for line in run["bins"]:
            point = seen.get(line["updates"], {})
            shares = (
                *(line.get(f"abandoned/{sign}_responses") for sign in ("negative", "positive")),
                line.get("behind_abandoned/negative_pull"),
                *(point.get("truncated"), point.get("malformed")),
            )
            ratios = [line.get(f"ratio/{place}_abandoned_tokens") for place in ("before", "behind")]
            if None not in shares[:3]:
                rows.append(
                    row_of(
                        *(run["arm"], f"{run['rate']:g}", run["seed"], line["updates"]),
                        *("–" if share is None else f"{100 * share:.0f} %" for share in shares),
                        *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                        f"{line['entropy/tokens']:.3f}" if "entropy/tokens" in line else "–",
                    )
                )
    if rows:
        abandoned = "with an abandoned token: wrong responses | right responses"
        around = "mean ratio in wrong responses before the trigger | behind it"
        pull = "share of Σ\\|ρA\\| behind triggers"
        cut = "unfinished | malformed"
        yield f"| arm | η | seed | updates | {abandoned} | {pull} | {cut} | {around} | entropy |"
        yield f"|{'---|' * 12}"
        yield from rows


def _stage_table(runs: Sequence[Run]) -> Iterable[str]:
    """The accuracy of the policy that sampled each stage, by all responses, and the drift in the stage."""
    rows = []
    for run in runs:
        batch, ends = run["batch"], {line["updates"] for line in run["bins"]}
        stage = batch["updates_per_stage"]
        for start in range(0, run["updates"], stage):
            inside = [line for line in run["bins"] if start < line["updates"] <= start + stage]
            if start + stage in ends and start in ends | {0} and "drift" in inside[-1]:
                responses = stage * batch["prompts_per_update"] * batch["responses_per_prompt"]
                facts = run["arm"], f"{run['rate']:g}", run["seed"], start // stage + 1, f"{responses:,}"
                reward = np.mean([line["reward"] for line in inside])
                rows.append(row_of(*facts, f"{reward:.3f}", f"{inside[-1]['drift']:.3f}"))
    if rows:
        yield "| arm | η | seed | stage | responses | their mean reward | drift at the end |"
        yield f"|{'---|' * 7}"
        yield from rows
