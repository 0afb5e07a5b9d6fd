"""Describe the rollouts of a run as text: their number, lengths and rewards, and some responses."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mugrpo_jax.config import ConfigError
from mugrpo_jax.models.tokenizer import Tokenizer
from mugrpo_jax.rollouts import Group, Rollout, open_stage, read_groups
from mugrpo_jax.rollouts.conversations import split_turns
from mugrpo_jax.rollouts.records import CURRENT
from mugrpo_jax.runs.progress import reward_parts
from mugrpo_jax.setup.stored_rollouts import stage_folders, tokenizer_of
from mugrpo_jax.setup.trained_model import is_run

_QUANTILES = {
    "shortest": 0.0,
    "5 % have at most": 0.05,
    "median": 0.5,
    "95 % have at most": 0.95,
    "longest": 1.0,
}


def describe_rollouts(
    run: Path,
    *,
    stage: int | None = None,
    show: int = 0,
    rewards: tuple[float, float] | None = None,
    model: str | None = None,
) -> str:
    """Describe the rollouts of the run in folder `run`: one stage, or all stages if `stage` is None.

    The text of `show` responses per stage, evenly spread, is added. If `rewards` is given, only responses
    with a reward in this closed interval are described. `run` may also be the folder of an imported stage;
    then `model` names the model with whose tokenizer the texts are made.
    """
    folders = stage_folders(run, stage)
    if show and model is None and not is_run(run):
        raise ConfigError(f"{run}: an imported stage; name its model with --model, to show texts")
    tokenizer = tokenizer_of(model or run) if show else None
    parts = []
    for number, folder in folders.items():
        if (folder / "manifest.json").exists():
            groups = list(read_groups(open_stage(folder)))
            parts.append(f"stage {number}: {_describe(groups, rewards)}")
            parts += _texts(groups, rewards, show, tokenizer)
        elif stage is not None or folder.exists():
            shards = len(list(folder.glob("shard-*.arrayrecord")))
            parts.append(f"stage {number}: not complete, {shards} shards so far")
    if not parts:
        raise ConfigError(f"{run}: no rollouts yet")
    return "\n".join(parts)


def _chosen(groups: Sequence[Group], rewards: tuple[float, float] | None) -> list[tuple[Group, int, Rollout]]:
    low, high = rewards or (-np.inf, np.inf)
    return [
        (group, sample, rollout)
        for group in groups
        for sample, rollout in enumerate(group.rollouts)
        if low <= rollout.reward <= high
    ]


def _describe(groups: Sequence[Group], rewards: tuple[float, float] | None) -> str:
    found = [rollout for _, _, rollout in _chosen(groups, rewards)]
    responses = sum(len(group.rollouts) for group in groups)
    kept = f"{responses:,} responses to {len(groups):,} prompts"
    if rewards is not None:
        kept += f", {len(found):,} with a reward from {rewards[0]:g} to {rewards[1]:g}"
    if not found:
        return kept
    parts = {name: [rollout.parts[name] for rollout in found] for name in found[0].parts}
    lines = [
        kept,
        f"rewards   {_values([rollout.reward for rollout in found])}",
        *(f"  {name}: {_values(values)}" for name, values in parts.items()),
        f"lengths   {_quantiles([len(rollout.tokens) for rollout in found])} tokens",
        f"prompts   {_quantiles([len(group.prompt) for group in groups])} tokens",
        f"finished  {_counts(map(_finish, found))}",
        f"scored    {_counts(rollout.status for rollout in found)}",
        *_by_behavior(found),
    ]
    return "\n  ".join(lines)


def _by_behavior(found: Sequence[Rollout]) -> list[str]:
    """Return a line for each behavior if another than the current policy wrote some of the responses."""
    names = sorted({rollout.behavior for rollout in found})
    if names == [CURRENT]:
        return []
    return [
        f"by {name}: {len(mine):,} responses, reward {np.mean([r.reward for r in mine]):.3f}, "
        f"lengths {_quantiles([len(r.tokens) for r in mine])}"
        for name in names
        for mine in [[rollout for rollout in found if rollout.behavior == name]]
    ]


def _values(values: Sequence[float]) -> str:
    return f"mean {np.mean(values):.3f}; {_counts(f'{value:g}' for value in values)}"


def _finish(rollout: Rollout) -> str:
    return f"{rollout.finish} without an answer" if rollout.malformed else rollout.finish


def _counts(values: Iterable[str]) -> str:
    counts = Counter(values).most_common()
    shown = ", ".join(f"{value} × {count:,}" for value, count in counts[:6])
    return shown + (f", {len(counts) - 6} others" if len(counts) > 6 else "")


def _quantiles(lengths: Sequence[int]) -> str:
    values = np.quantile(lengths, list(_QUANTILES.values()))
    return ", ".join(f"{name} {value:.0f}" for name, value in zip(_QUANTILES, values))


def _texts(
    groups: Sequence[Group], rewards: tuple[float, float] | None, show: int, tokenizer: Tokenizer | None
) -> list[str]:
    found = _chosen(groups, rewards)
    if tokenizer is None or not found:
        return []
    places = np.unique(np.linspace(0, len(found) - 1, min(show, len(found))).astype(int))
    return [_text(tokenizer, *found[place]) for place in places]


def _text(tokenizer: Tokenizer, group: Group, sample: int, rollout: Rollout) -> str:
    number = group.index * len(group.rollouts) + sample
    title = (
        f"  -- prompt {group.index} (problem {group.problem}), sample {sample}, response {number}: "
        f"reward {rollout.reward:g}{reward_parts(rollout.parts)}, {len(rollout.tokens)} tokens, "
        f"{_finish(rollout)}, {rollout.status}"
    )
    parts = [tokenizer.decode(part.tolist()) for part in split_turns(rollout.tokens, rollout.mask)]
    response = "".join(f"[environment: {part}]" if i % 2 else part for i, part in enumerate(parts))
    said = (tokenizer.decode(group.prompt.tolist()), response)
    return "\n".join([title, *("  " + line for text in said for line in text.split("\n"))])
