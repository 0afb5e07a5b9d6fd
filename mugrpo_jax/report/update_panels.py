"""The figures over all updates of a run: loss, entropy, KL, equal groups, lengths and the gradient's norm.

Their values are measured on the rollouts of a stage, so a line is interrupted where a new stage starts.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from mugrpo_jax.report.against_staleness import drawable
from mugrpo_jax.report.panel_data import MOST_POINTS, STYLES, Line, Panel, bin_size, over_stages
from mugrpo_jax.report.run_history import History


def loss(runs: Sequence[History]) -> Panel:
    """Panel: the loss of each update, against updates."""
    note = (
        "The loss is no measure of progress: it is near 0 before the first update of a stage, and its "
        "size depends on the objective. Look for jumps and for values that are not finite."
    )
    return over_updates(runs, "Loss", "loss", {"loss": "loss"}, note=note)


def response_length(runs: Sequence[History]) -> Panel:
    """Panel: the mean response length in each update, against updates."""
    return over_updates(runs, "Response length", "tokens", {"mean": "response_length"}, low=0)


def entropy(runs: Sequence[History]) -> Panel:
    """Panel: mean entropy of the policy per response token, against updates."""
    note = "Near 0, the policy always gives the same response and explores no more."
    return over_updates(
        runs, "Policy entropy", "nats per token", {"entropy": "entropy/tokens"}, log="y", note=note
    )


def kl(runs: Sequence[History]) -> Panel:
    """Panel: KL of the policy from the policy that sampled and, with a KL term, from the reference."""
    metrics = {"from the policy that sampled": "k3/tokens", "from the reference": "reference_kl/tokens"}
    note = (
        "Estimated on the tokens of the rollouts (k3). The KL from the policy that sampled grows within a "
        "stage, from 0, and starts again with new rollouts."
    )
    return over_updates(runs, "KL divergence", "nats per token", metrics, low=0, note=note)


def equal_groups(runs: Sequence[History]) -> Panel:
    """Panel: the share of groups whose responses all got the same reward, against updates."""
    note = (
        "All responses of such a group are right, or all are wrong: their advantages are 0 and they teach "
        "nothing. A high share means that the problems are too easy or too hard for the policy."
    )
    metrics = {"equal groups": "equal_groups"}
    return over_updates(
        runs, "Groups with equal rewards", "share of groups", metrics, low=0, high=1.05, note=note
    )


def gradient_norm(runs: Sequence[History]) -> Panel:
    """Panel: the norm of the gradient before gradient clipping, against updates."""
    return over_updates(runs, "Gradient norm", "‖g‖", {"norm": "gradient_norm"}, log="y")


def over_updates(
    runs: Sequence[History],
    title: str,
    y: str,
    metrics: Mapping[str, str],
    *,
    log: str = "",
    low: float | None = None,
    high: float | None = None,
    note: str = "",
) -> Panel:
    """Draw metrics of every run against updates; a metric that a run did not record has no line."""
    lines = []
    for i, run in enumerate(runs):
        for (name, metric), style in zip(metrics.items(), STYLES):
            values = drawable(run.values(metric), log)
            if np.isfinite(values).any():
                lines.append(Line(i, name, *over_stages(run, run.values("updates"), values), style=style))
    size = largest_bin(runs)
    bins = f"Each point is the mean of {size} updates; the band is their range." if size > 1 else ""
    said = " ".join(filter(None, (note, bins)))
    return Panel(title, "updates", y, tuple(lines), low=low, high=high, log=log, note=said)


def largest_bin(runs: Sequence[History]) -> int:
    """Return the largest number of updates that one point shows."""
    return max(bin_size(len(run.updates), MOST_POINTS) for run in runs)
