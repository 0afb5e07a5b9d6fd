"""The figures that depend on the objective of a run: what it clips, what it vetoes and what it adapts.

Every run is drawn with the bounds of its own objective. An objective without a quantity has no line for it.
"""

from collections.abc import Mapping, Sequence

from mugrpo_jax.report.against_staleness import against_staleness
from mugrpo_jax.report.panel_data import Panel
from mugrpo_jax.report.run_history import History
from mugrpo_jax.report.trigger_panels import ratio_text

_PPO = "tokens whose ratio is outside {bounds} on the side where the update goes; they have no gradient"
CLIPPED: Mapping[str, str] = {
    "mu_grpo": _PPO,
    "grpo": _PPO,
    "dr_grpo": _PPO,
    "dapo": _PPO,
    "gspo": "tokens of responses whose ratio s is outside {bounds}; they have no gradient",
    "gmpo": "tokens whose ratio is bounded by {bounds} before the mean; they have no gradient",
    "cispo": "tokens whose weight is bounded by {bounds}; they keep a gradient",
    "gppo": "tokens whose ratio is outside {bounds}; they keep a bounded gradient",
    "m2po": "harmful tokens beyond the bound c of the update; they have no gradient",
    "bapo": "tokens whose ratio is outside the bounds of the update; they have no gradient",
    "p3o": "tokens whose ratio is above the cap e; they keep a gradient",
    "pnpo": "tokens whose prefix weight is outside {bounds}; they have no gradient",
    "ctpo": "tokens whose prefix ratio is outside its bounds; they have no gradient",
    "decoupled_ppo": "tokens whose ratio to the proximal policy is outside {bounds}; they have no gradient",
    "dppo": "tokens whose probability moved too far; they have no gradient",
}
"""What `clipped/tokens` counts, for each objective that clips; `{bounds}` is filled in from the config."""

KEEP_GRADIENT = ("cispo", "gppo", "p3o")
"""Objectives whose clipped tokens keep a gradient."""

ADAPTED: Mapping[str, Mapping[str, str]] = {
    "p3o": {"cap e": "cap/tokens"},
    "m2po": {"lower bound e^−c": "clip_low_max"},
    "bapo": {"lower bound": "clip_low/tokens", "upper bound": "clip_high/tokens"},
    "topr": {"mean weight of a response": "response_weight/tokens"},
    "vespo": {"mean weight of a response": "response_weight/tokens"},
    "decoupled_ppo": {"mean weight π_prox / b": "behavior_weight/tokens"},
    "dppo": {"mean divergence": "divergence/tokens"},
    "minpro": {"mean log of the prefix factor": "prefix_log_ratio/tokens"},
}
"""The quantities that an objective computes from the data, as {name of the line: metric}."""


def clipped(runs: Sequence[History]) -> Panel:
    """Panel: the share of tokens beyond the bounds of the run's own objective, against staleness."""
    shares = {"all tokens": "clipped/tokens", "A > 0": "clipped/positive_tokens"}
    shares["A < 0"] = "clipped/negative_tokens"
    metrics = [shares if run.config.objective.name in CLIPPED else {} for run in runs]
    found = dict.fromkeys(_clipped_note(run) for run, drawn in zip(runs, metrics) if drawn)
    return _panel(runs, "Clipped tokens", "share of tokens", metrics, low=0, note=" ".join(found))


def _clipped_note(run: History) -> str:
    objective = run.config.objective
    low, high = (objective.settings.get(name) for name in ("clip_low", "clip_high"))
    bounds = "" if low is None or high is None else f"[{low:.4g}, {high:.4g}]"
    return f"{objective.name}: {CLIPPED[objective.name].format(bounds=bounds)}."


def vetoed(runs: Sequence[History]) -> Panel:
    """Panel: shares of vetoed tokens and of responses (advantage < 0) with a trigger, against staleness."""
    shares = {"vetoed tokens": "vetoed/tokens", "triggered responses": "triggered/negative_responses"}
    ratios = {run.config.objective.settings["veto_ratio"] for run in runs if run.has_veto}
    below = ratio_text(sorted(ratios))
    note = (
        f"Triggered: the share of responses with A < 0 in which the ratio of a token fell below τ = {below}."
    )
    return _panel(runs, "Vetoed", "share", [shares if run.has_veto else {} for run in runs], low=0, note=note)


def adapted(runs: Sequence[History]) -> Panel:
    """Panel: what the objective computes from the data, such as P3O's cap, against staleness."""
    metrics = [ADAPTED.get(run.config.objective.name, {}) for run in runs]
    return _panel(runs, "Adapted by the objective", "value", metrics)


def _panel(
    runs: Sequence[History],
    title: str,
    y: str,
    metrics: Sequence[Mapping[str, str]],
    *,
    low: float | None = None,
    note: str = "",
) -> Panel:
    return against_staleness(runs, title, y, metrics, low=low, note=note, wanted=any(metrics))
