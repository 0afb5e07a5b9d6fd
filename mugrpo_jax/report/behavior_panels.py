"""The figures and the table about each of several policies that wrote the responses of a run.

A metric of one behavior is in the journal under the name of the metric, `@` and the name of the behavior.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from mugrpo_jax.report.against_staleness import drawable
from mugrpo_jax.report.panel_data import STYLES, Line, Panel, over_stages
from mugrpo_jax.report.run_history import History
from mugrpo_jax.report.trigger_panels import low_ratio


def behaviors(run: History) -> list[str]:
    """Return the names of the behaviors whose metrics a run recorded; none if all responses have the same."""
    last = run.updates[-1] if run.updates else {}
    return sorted(key.partition("@")[2] for key in last if key.startswith("tokens@"))


def behavior_reward(runs: Sequence[History]) -> Panel:
    """Panel: the mean reward of the responses of each behavior in each stage, against updates."""
    lines = []
    for i, run in enumerate(runs):
        x = np.array([record["updates"] for record in run.generations], float)
        for name in behaviors(run):
            y = np.array([record.get(f"reward@{name}", np.nan) for record in run.generations], float)
            lines.append(Line(i, name, x, y, style="points"))
    note = "Mean over the responses of a behavior in a stage, at the update before which they were sampled."
    return Panel("Reward", "updates", "reward", tuple(lines), note=note, wanted=_any(runs))


def behavior_ratio(runs: Sequence[History]) -> Panel:
    """Panel: the mean ratio of the tokens of each behavior, against updates."""
    note = (
        "Mean of π / b over the tokens of a behavior b. Its expectation is 1 if b can write all that π can."
    )
    return _over_updates(runs, "Mean ratio ρ", "ρ", "ratio/tokens", log="y", note=note)


def behavior_sample_size(runs: Sequence[History]) -> Panel:
    """Panel: the effective sample size of the tokens of each behavior, against updates."""
    return _over_updates(runs, "Effective sample size", "ESS / n", "ess/tokens")


def behavior_kl(runs: Sequence[History]) -> Panel:
    """Panel: KL of the policy from each behavior, against updates."""
    return _over_updates(runs, "KL divergence", "nats per token", "k3/tokens", note="KL(b ‖ π), k3.")


def behavior_log_ratio(runs: Sequence[History]) -> Panel:
    """Panel: the distance of the policy from each behavior on its tokens, against updates."""
    return _over_updates(runs, "Distance from the behavior", "|log π − log b|", "gap/tokens", log="y")


def behavior_abandoned(runs: Sequence[History]) -> Panel:
    """Panel: the share of the responses of each behavior with A < 0 that have an abandoned token."""
    title = f"Responses with a token of {low_ratio(runs)}"
    return _over_updates(runs, title, "share where A < 0", "abandoned/negative_responses")


def behavior_entropy(runs: Sequence[History]) -> Panel:
    """Panel: the mean entropy of the policy on the tokens of each behavior, against updates."""
    return _over_updates(runs, "Policy entropy", "nats per token", "entropy/tokens")


def behavior_table(runs: Sequence[History], called: Sequence[str]) -> list[list[str]]:
    """Return a table of every metric by behavior: means over the updates of the last stage."""
    names = sorted({name for run in runs for name in behaviors(run)})
    rows = [["run", "metric", *names]]
    for run, title in zip(runs, called):
        last = run.by_stage()[-1] if behaviors(run) else []
        metrics = dict.fromkeys(key.partition("@")[0] for key in (last[-1] if last else ()) if "@" in key)
        for metric in metrics:
            found = [[record.get(f"{metric}@{name}") for record in last] for name in names]
            means = [
                np.mean([value for value in values if value is not None] or [np.nan]) for values in found
            ]
            rows.append([title, metric, *(f"{mean:.4g}" for mean in means)])
    return rows


def _any(runs: Sequence[History]) -> bool:
    return any(behaviors(run) for run in runs)


def _over_updates(
    runs: Sequence[History], title: str, y: str, metric: str, *, log: str = "", note: str = ""
) -> Panel:
    lines = []
    for i, run in enumerate(runs):
        for name, style in zip(behaviors(run), itertools.cycle((*STYLES, "dashdot"))):
            values = drawable(run.values(f"{metric}@{name}"), log)
            lines.append(Line(i, name, *over_stages(run, run.values("updates"), values), style=style))
    low = None if log else 0.0
    return Panel(title, "updates", y, tuple(lines), low=low, log=log, note=note, wanted=_any(runs))
