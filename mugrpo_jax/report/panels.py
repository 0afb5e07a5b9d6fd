"""Compute the data of every figure in a report. Each function takes runs and returns one figure's data."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mugrpo_jax.report import staleness_position as law
from mugrpo_jax.report.against_staleness import drawable, for_all
from mugrpo_jax.report.behavior_panels import (
    behavior_abandoned,
    behavior_entropy,
    behavior_kl,
    behavior_log_ratio,
    behavior_ratio,
    behavior_reward,
    behavior_sample_size,
)
from mugrpo_jax.report.objective_panels import adapted, clipped, vetoed
from mugrpo_jax.report.panel_data import (
    ACCURACY,
    MOST_STAGES,
    Bars,
    Line,
    Panel,
    over_stages,
    reduce,
    run_bins,
    time_unit,
)
from mugrpo_jax.report.reward_panels import rewards
from mugrpo_jax.report.run_history import History
from mugrpo_jax.report.sampler_log import sampling_seconds
from mugrpo_jax.report.stacked_bars import finish_reasons, time_spent
from mugrpo_jax.report.step_signal_panels import drift, gradient_cosine
from mugrpo_jax.report.trigger_panels import abandoned, mean_ratio_negative, pull_behind_trigger
from mugrpo_jax.report.update_panels import (
    entropy,
    equal_groups,
    gradient_norm,
    kl,
    largest_bin,
    loss,
    response_length,
)

# -- learning


def learning(runs: Sequence[History]) -> Panel:
    """Panel: held-out accuracy and training reward against updates; vertical lines show starts of stages."""
    return _learning(runs, "updates")


def learning_by_time(runs: Sequence[History]) -> Panel:
    """Panel: held-out accuracy and training reward against wall-clock time."""
    return _learning(runs, "seconds")


def _learning(runs: Sequence[History], over: str) -> Panel:
    unit, factor = ("updates", 1.0) if over == "updates" else time_unit(max(run.seconds for run in runs))
    lines: list[Line] = []
    marks: list[tuple[str, float, int | None]] = []
    for i, run in enumerate(runs):
        place = run.values("updates" if over == "updates" else "seconds/clock") / factor
        x, y, low, high = over_stages(run, place, run.values("reward"))
        if len(runs) == 1 or not run.evaluations:  # with several runs, only accuracies can be compared
            lines.append(Line(i, "training reward", x, y, low, high, style="dashed"))
        if run.evaluations:
            lines.append(_accuracy(i, run, over, factor))
        if len(run.stage_slices) <= MOST_STAGES:
            starts = [(stage, float(place[part][0])) for stage, part in run.stage_slices.items()]
            alone = len(runs) == 1
            marks += [(f"stage {s}" if alone else "", x, None if alone else i) for s, x in starts[1:]]
    return Panel(
        title="Learning" if over == "updates" else "Learning over wall-clock",
        x=unit,
        y=", ".join(sorted({"reward" if line.name != ACCURACY else "accuracy" for line in lines})),
        lines=tuple(lines),
        marks=tuple(marks),
        note=_learning_note(runs, over),
    )


def _accuracy(i: int, run: History, over: str, factor: float) -> Line:
    place = [r["updates"] if over == "updates" else r["seconds"]["clock"] for r in run.evaluations]
    accuracy = np.array([record["accuracy"] for record in run.evaluations])
    error = np.array([record["standard_error"] for record in run.evaluations])
    x = np.array(place, np.float64) / factor
    return Line(i, ACCURACY, x, accuracy, accuracy - error, accuracy + error)


def _learning_note(runs: Sequence[History], over: str) -> str:
    size = largest_bin(runs)
    reward = "The training reward is measured on stored rollouts; it changes when new ones are generated."
    if size > 1:
        reward += f" Each reward is the mean of {size} updates; the band is their range."
    time = "Pauses between a stop and the restart do not count." if over == "seconds" else ""
    accuracy = "Accuracy on held-out problems ± one standard error. Dotted lines: a new stage starts."
    return " ".join(filter(None, (accuracy, reward, time)))


# -- against staleness


def effective_sample_size(runs: Sequence[History]) -> Panel:
    """Panel: effective sample size divided by the number of tokens or responses, against staleness."""
    metrics = {"tokens": "ess/tokens", "responses": "sequence_ess/responses"}
    note = "Responses: values of each micro-batch, averaged over the update."
    return for_all(runs, "Effective sample size", "ESS / n", metrics, low=0, high=1.05, note=note)


def ratios_positive(runs: Sequence[History]) -> Panel:
    """Panel: quantiles of the importance ratio of tokens with positive advantage, against staleness."""
    return _ratio_quantiles(runs, "positive", ">")


def ratios_negative(runs: Sequence[History]) -> Panel:
    """Panel: quantiles of the importance ratio of tokens with negative advantage, against staleness."""
    return _ratio_quantiles(runs, "negative", "<")


def _ratio_quantiles(runs: Sequence[History], sign: str, relation: str) -> Panel:
    quantiles = {"median": "p50", "95 %": "p95", "5 %": "p05"}
    metrics = {name: f"ratio_{key}/{sign}_tokens" for name, key in quantiles.items()}
    note = "Quantiles of each micro-batch, averaged over the update."
    title = f"Ratio ρ where A {relation} 0"
    return for_all(runs, title, "ρ", metrics, log="y", levels=(("", 1.0),), note=note)


def log_ratio(runs: Sequence[History]) -> Panel:
    """Panel: |log-ratio| of the tokens against staleness: how far the policy is from the one that sampled."""
    metrics = {"mean": "gap/tokens", "largest": "gap_max"}
    return for_all(runs, "Distance from the rollouts", "|log π − log b|", metrics, log="y")


def gap(runs: Sequence[History]) -> Panel:
    """Panel: the sampler–trainer gap of each stage, |log-ratio| before the first update of the stage."""
    lines = []
    for i, run in enumerate(runs):
        first = run.values("staleness") == 0
        for name, metric in {"mean": "gap/tokens", "largest": "gap_max"}.items():
            y = drawable(run.values(metric)[first], "y")
            if np.isfinite(y).any():
                lines.append(Line(i, name, run.values("stage")[first], y, style="points"))
    note = (
        "The upper point of a stage is its token with the largest gap, the lower one the mean of all tokens. "
        "Before the first update of a stage, sampler and trainer have the same weights (with a lag, only in "
        "stage 0, so only this stage is shown). What differs is their arithmetic: about 1e-6 in float32, "
        "about 1e-2 in bfloat16. With 8-bit sampling, the rounding "
        "of the sampler's weights is in here too. So is the distance to another model or temperature that "
        "wrote responses."
    )
    return Panel("Sampler–trainer gap", "stage", "|log π − log b|", tuple(lines), log="y", note=note)


# -- responses


def broken_responses(runs: Sequence[History]) -> Panel:
    """Panel: shares of malformed and of unfinished responses in the held-out evaluations, against updates."""
    lines = []
    for i, run in enumerate(runs):
        x = np.array([record["updates"] for record in run.evaluations], float)
        for name, key, style in (("malformed", "malformed", "solid"), ("unfinished", "truncated", "dashed")):
            y = np.array([record.get(key, np.nan) for record in run.evaluations], float)
            if np.isfinite(y).any():
                lines.append(Line(i, name, x, y, style=style))
    note = (
        "Held-out problems. Malformed: the response ended, but has no answer that the reward can read. "
        "Unfinished: it was cut off at the length limit. Both rise when the text itself breaks."
    )
    title = "Malformed or unfinished responses"
    return Panel(title, "updates", "share of responses", tuple(lines), low=0, note=note)


# -- time


def throughput(runs: Sequence[History]) -> Panel:
    """Panel: response tokens per second in generation and in updates, against updates."""
    lines = []
    for i, run in enumerate(runs):
        updates = run.values("tokens") / np.maximum(run.values("seconds/update"), 1e-9)
        x, y, *_ = reduce(run.values("updates"), updates, run_bins(run))
        lines.append(Line(i, "update", x, y))
        made = [record for record in run.generations if sampling_seconds(record).get("generate")]
        rates = [
            record.get("response_tokens", np.nan) / sampling_seconds(record)["generate"] for record in made
        ]
        place = [record["updates"] for record in made]
        lines.append(Line(i, "generation", np.array(place, float), np.array(rates, float), style="points"))
    note = "The times include scoring and compilation."
    return Panel("Throughput", "updates", "response tokens / s", tuple(lines), log="y", note=note)


def slot_occupancy(runs: Sequence[History]) -> Panel:
    """Panel: the share of the sampler's slots that were busy, against stages."""
    lines = [
        Line(
            i,
            "slots busy",
            np.array([record["stage"] for record in run.generations], float),
            np.array(
                [sampling_seconds(record).get("occupancy", np.nan) for record in run.generations], float
            ),
            style="points",
        )
        for i, run in enumerate(runs)
    ]
    return Panel("Slot occupancy", "stage", "share of slots", tuple(lines), low=0, high=1.05)


# -- the staleness law


def staleness_law(runs: Sequence[History]) -> Panel:
    """Panel: η × effective updates of a stage and of the run, with their limits (η: learning rate)."""
    positions = [law.position(run) for run in runs]
    places = {i: _effective(p) for i, p in enumerate(positions) if p.learning_rate > 0 and p.updates}
    lines = [Line(i, "run", np.array([x]), np.array([y]), style="points") for i, (x, y) in places.items()]
    marks: list[tuple[str, float, int | None]] = []
    levels: list[tuple[str, float]] = []
    note = "Effective updates: S if all updates are parallel, √S if they are noise, by the measured drift."
    limits = []
    if law.shows_reported(positions):
        marks.append(("paper", law.REPORTED.stale, None))
        levels.append(("paper", law.REPORTED.horizon))
        limits.append("those that the paper reports for GRPO without protection")
    fitted = law.fit(runs)
    alone = positions[0].advised if len(runs) == 1 else None
    if fitted is not None:
        marks.append(("fitted", fitted.constants.stale, None))
        levels.append(("fitted", fitted.constants.horizon))
        limits.append("those fitted to these runs")
    elif alone is not None and np.isfinite(alone.learning_rate):
        in_stage, in_run = (moved / positions[0].learning_rate for moved in _effective(positions[0]))
        if np.isfinite(alone.stage_limit):
            marks.append(("measured", in_stage * alone.stage_limit, None))
        if np.isfinite(alone.run_limit):
            levels.append(("measured", in_run * alone.run_limit))
        limits.append("those measured in this run")
    if limits:
        note += f" Dotted lines are limits: {', and '.join(limits)}."
    axes = "Staleness law", "η · effective updates of a stage", "η · effective updates of the run"
    return Panel(*axes, tuple(lines), tuple(marks), tuple(levels), log="xy", note=note)


def _effective(place: law.Position) -> tuple[float, float]:
    lag = max(place.lag, 1)  # the axis is logarithmic, and the lag of an on-policy run is 0
    return place.effective(lag, first_stage=False), place.effective(place.updates, first_stage=True)


SECTIONS: Mapping[str, tuple[Callable[[Sequence[History]], Panel | Bars], ...]] = {
    "Learning": (learning, learning_by_time, rewards),
    "Updates": (loss, entropy, kl, equal_groups, gradient_norm),
    "Staleness": (
        clipped,
        vetoed,
        adapted,
        abandoned,
        pull_behind_trigger,
        mean_ratio_negative,
        effective_sample_size,
        ratios_positive,
        ratios_negative,
        log_ratio,
        gap,
        drift,
        gradient_cosine,
    ),
    "By behavior": (
        behavior_reward,
        behavior_ratio,
        behavior_sample_size,
        behavior_kl,
        behavior_log_ratio,
        behavior_abandoned,
        behavior_entropy,
    ),
    "Responses": (response_length, finish_reasons, broken_responses),
    "Time": (time_spent, throughput, slot_occupancy),
    "Staleness law": (staleness_law,),
}
