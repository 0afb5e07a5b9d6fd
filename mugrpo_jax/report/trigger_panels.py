"""The figures about triggers: tokens whose ratio fell so low that the policy has abandoned them.

They are drawn for every objective, also without a veto. `report.abandoned_ratio` says how low. The glossary
of the documentation explains the words.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from mugrpo_jax.report.against_staleness import for_all
from mugrpo_jax.report.panel_data import Panel
from mugrpo_jax.report.run_history import History


def ratio_text(ratios: Iterable[float]) -> str:
    """Return ratios as text.

    >>> ratio_text([0.0001, 0.01])
    '1e-4 or 1e-2'
    """
    return " or ".join(np.format_float_scientific(ratio, trim="-", exp_digits=1) for ratio in ratios)


def low_ratio(runs: Sequence[History]) -> str:
    """Return `ρ < 1e-4`, with the ratios below which the updates of these runs called a token abandoned."""
    ratios = sorted(set[float]().union(*(run.abandoned_ratios for run in runs)))
    return f"ρ < {ratio_text(ratios)}"


def abandoned(runs: Sequence[History]) -> Panel:
    """Panel: share of responses with a trigger, by the sign of the advantage, against staleness."""
    note = (
        "Share of the responses with A < 0 (or A > 0) that have an abandoned token: its ratio ρ fell below "
        "this. Updates push down wrong responses; if right ones lose tokens too, the policy loses what it "
        "needs."
    )
    metrics = {"wrong, A < 0": "abandoned/negative_responses", "right, A > 0": "abandoned/positive_responses"}
    title = f"Responses with a token of {low_ratio(runs)}"
    return for_all(runs, title, "share of responses", metrics, low=0, note=note)


def triggered(runs: Sequence[History]) -> Panel:
    """Panel: share of the wrong responses with a trigger, against staleness."""
    note = "Share of the responses with A < 0 that have an abandoned token: its ratio ρ fell below this."
    metrics = {"wrong, A < 0": "abandoned/negative_responses"}
    title = f"Wrong responses with a token of {low_ratio(runs)}"
    return for_all(runs, title, "share of responses", metrics, low=0, note=note)


def pull_behind_trigger(runs: Sequence[History]) -> Panel:
    """Panel: the share of the pull on wrong responses that lies behind their first trigger."""
    note = (
        "Share of Σ|ρA| over the tokens with A < 0. π would never reach the tokens behind a trigger, "
        "so this part of an unclipped gradient teaches nothing. The veto removes it."
    )
    metrics = {"share": "behind_abandoned/negative_pull"}
    return for_all(runs, "Pull behind the first trigger", "share of Σ|ρA|", metrics, low=0, note=note)


def mean_ratio_negative(runs: Sequence[History]) -> Panel:
    """Panel: the mean ratio ρ of tokens with A < 0: all, and before and behind the first trigger."""
    metrics = {
        "all": "ratio/negative_tokens",
        "before a trigger": "ratio/before_abandoned_tokens",
        "behind it": "ratio/behind_abandoned_tokens",
    }
    note = (
        "Before and behind the first trigger of a response; responses without a trigger are only in “all”. "
        "Below 1 behind a trigger: the suffix is pushed down. Near 1 says little: over tokens that were "
        "drawn from the behavior policy the mean is 1 for every policy."
    )
    return for_all(runs, "E[ρ | A < 0]", "mean ρ", metrics, levels=(("", 1.0),), note=note)
