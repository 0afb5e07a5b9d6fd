"""Compute the stacked bars of a report: for each stage, how responses ended and how time was spent."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mugrpo_jax.report.panel_data import MOST_BARS, Bars, bin_size, time_unit
from mugrpo_jax.report.run_history import PHASES, History
from mugrpo_jax.tasks.scoring import FAILURES


def finish_reasons(runs: Sequence[History]) -> Bars:
    """Bars: for each stage, the shares of responses that ended, were cut off, or could not be scored.

    Where malformed responses were counted, they are a part of their own: they ended without an answer.
    """

    def shares(run: History, stages: Sequence[int]) -> dict[str, float]:
        records = [record for record in run.generations if record["stage"] in stages]
        total = sum(record.get("responses", 0) for record in records)
        if not total:
            return {}
        cut = sum(record.get("truncated", 0.0) * record["responses"] for record in records) / total
        failed = sum(record.get("status", {}).get(name, 0) for record in records for name in FAILURES) / total
        turns = sum(record.get("finish", {}).get("turns", 0) for record in records) / total
        if all("malformed" in record for record in records):
            bad = sum(record["malformed"] * record["responses"] for record in records) / total
            ended = {"ended with an answer": 1 - cut - turns - bad, "ended without an answer": bad}
        else:
            ended = {"ended by itself": 1 - cut - turns}
        return {**ended, "cut at the limit": cut, "turns used up": turns, "not scored": failed}

    bars = _bars(runs, shares, "Finish reasons", "share of responses", note="", stages=_generated)
    if "not scored" not in bars.parts:
        return bars
    note = "Responses that could not be scored (timeout, crash, error) are added on top of the other parts."
    return dataclasses.replace(bars, note=note)


def time_spent(runs: Sequence[History]) -> Bars:
    """Bars: for each stage, the time spent in each phase, such as generation, updates or compiling."""

    def seconds(run: History, stages: Sequence[int]) -> dict[str, float]:
        return {phase: sum(run.phases[stage].get(phase, 0.0) for stage in stages) for phase in PHASES}

    note = (
        "Scoring: time that generation waited for scores. Waiting: time that updates waited for samplers of "
        "their own. Compiling: programs for sampling, updates and evaluations. "
        "Switching: everything between the phases, such as building the sampler, checkpoints "
        "and this report."
    )
    bars = _bars(runs, seconds, "Time", "seconds", note=note, stages=lambda run: list(run.phases))
    unit, factor = time_unit(max((float(sum(stack)) for stack in zip(*bars.parts.values())), default=0.0))
    parts = {name: values / factor for name, values in bars.parts.items()}
    return dataclasses.replace(bars, y=unit, parts=parts)


def _generated(run: History) -> list[int]:
    return [record["stage"] for record in run.generations]


def _bars(
    runs: Sequence[History],
    parts: Callable[[History, Sequence[int]], dict[str, float]],
    title: str,
    y: str,
    *,
    note: str,
    stages: Callable[[History], Sequence[int]],
) -> Bars:
    groups, found = [], []
    for i, run in enumerate(runs):
        for some in _bar_stages(stages(run), max(MOST_BARS // len(runs), 1)):
            if values := parts(run, some):
                first, last = some[0], some[-1]
                label = "start" if last < 0 else f"{first}" if first == last else f"{first}–{last}"
                groups.append((i, label))
                found.append(values)
    names = list(dict.fromkeys(name for values in found for name in values))
    heights = {name: np.array([values.get(name, 0.0) for values in found]) for name in names}
    return Bars(title, y, tuple(groups), {k: v for k, v in heights.items() if v.any()}, note=note)


def _bar_stages(stages: Sequence[int], most: int) -> list[list[int]]:
    """Divide stages into at most `most` bars. Stage -1, the time before stage 0, has an additional bar."""
    before, numbered = [s for s in stages if s < 0], [s for s in stages if s >= 0]
    size = bin_size(len(numbered), most)
    parts = [numbered[start : start + size] for start in range(0, len(numbered), size)]
    return [before, *parts] if before else parts
