"""Print the progress of a run: progress bars with a few numbers, and lines of text between them."""

import sys
from collections.abc import Mapping
from typing import Any

import jax
from tqdm import tqdm

from mugrpo_jax.tasks.scoring import FAILURES


def show_sampling(bar: Any, *, tokens: int, occupancy: float, rewards: float, scored: int) -> None:
    """Advance a progress bar by one response; every 64 responses, also update the numbers behind the bar.

    `tokens`, `rewards` (a sum) and `scored` (responses with a reward) are totals so far; `occupancy` is the
    share of the slots' decode steps that sampled a token.
    """
    bar.update()
    if bar.n % 64 == 0:
        rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
        reward = f"{rewards / scored:.3f}" if scored else "–"
        numbers = {"tok/s": f"{rate:,.0f}", "slots": f"{occupancy:.0%}", "reward": reward}
        bar.set_postfix(numbers, refresh=False)


def headline(record: dict[str, Any]) -> dict[str, str]:
    """Return the metrics of an update that the progress bar shows, formatted, by short name."""
    shares = {"clip": "clipped/tokens", "veto": "vetoed/tokens"}  # if the objective clips, vetoes
    # The difference to the behavior policy; only at the first update of a stage is it the sampler's error.
    chosen = {"reward": "reward", **shares, "ess": "ess/tokens", "|log ratio|": "gap/tokens"}
    return {name: f"{record[metric]:.3f}" for name, metric in chosen.items() if metric in record}


def reward_parts(parts: Mapping[str, float]) -> str:
    """Return a text about each of several rewards, to print behind their weighted sum.

    >>> reward_parts({"math": 0.5, "mine:short": 1.0}), reward_parts({})
    (' (math 0.5, mine:short 1)', '')
    """
    return f" ({', '.join(f'{name} {value:.3g}' for name, value in parts.items())})" if parts else ""


def say_unscored(what: str, status: Mapping[str, int], examples: Mapping[str, str]) -> None:
    """Print how many responses have each status except `ok`, with one example text per status."""

    def counts(failed: bool) -> str:
        return ", ".join(
            f"{name} × {count}{f' ({examples[name]})' if name in examples else ''}"
            for name, count in status.items()
            if name != "ok" and count and (name in FAILURES) == failed
        )

    if total := sum(count for name, count in status.items() if name in FAILURES):
        answers = "1 answer" if total == 1 else f"{total} answers"
        say(f"{what}: {answers} could not be scored; a failed reward counts as 0: {counts(True)}")
    if wrong := counts(False):
        say(f"{what}: why answers are wrong: {wrong}")


def say_equal_groups(what: str, equal: int, groups: int, reward: float) -> None:
    """Print a line if the rewards are equal in most groups, because such groups have no gradient.

    `reward` is the mean reward of all responses.
    """
    if 2 * equal > groups:
        kind = "harder problems" if reward > 0.5 else "easier problems, a warm start"
        say(
            f"{what}: in {equal:,} of {groups:,} groups all responses have the same reward (mean of all: "
            f"{reward:.3f}), and these groups teach nothing; use {kind}, a finer reward, or more "
            "batch.responses_per_prompt"
        )


def bar(total: int, title: str, unit: str, initial: int = 0, *, quiet: bool = False) -> Any:
    """Return a progress bar that only process 0 shows, and nobody if `quiet`.

    In a log file, where every redrawn bar stays, it is drawn every 10 seconds.
    """
    quiet |= jax.process_index() > 0
    seconds = 0.5 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=title, unit=unit, initial=initial, disable=quiet, mininterval=seconds)


def say(text: str) -> None:
    """Print a line without breaking the progress bars; only process 0 prints."""
    if jax.process_index() == 0:
        tqdm.write(text)
