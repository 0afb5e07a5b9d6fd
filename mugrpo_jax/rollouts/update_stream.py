"""Read the rollouts of a stage from disk and turn them into updates, with a resumable iterator.

An update is exactly `prompts_per_update` groups, in an order that is shuffled in every epoch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from mugrpo_jax import objectives
from mugrpo_jax.rollouts.micro_batches import Buckets, MicroBatch, Row, arrange, packed_tokens
from mugrpo_jax.rollouts.records import Group, decode
from mugrpo_jax.rollouts.rollout_folder import RolloutFolder

# What happens to groups whose responses all got the same reward, so that their advantages are exactly 0:
#   keep  they are computed like all others;
#   skip  they are left out of the passes: the gradient is the same (except for P3O, whose pull to the
#         behavior policy does not depend on advantages), but diagnostics do not count them;
#   drop  they are left out of the denominator too.
EQUAL_GROUPS = ("keep", "skip", "drop")


@dataclasses.dataclass(frozen=True)
class Update:
    """The data of one optimizer update.

    Attributes:
      micro_batches: each a dict of `mask`, `behavior_logp` `[rows, length]`, `advantages` `[rows]`, and the
        packed `tokens [P, N]` with their `packed_from`, `padded_from` (see `models.Packing`); empty rows are
        all padding.
      denominator: the denominator of the whole update, which the aggregation of the objective defines.
      metrics: mean reward, response lengths, share of equal groups and so on.
    """

    micro_batches: tuple[MicroBatch, ...]
    denominator: float
    metrics: Mapping[str, float]


def make_update(
    groups: Sequence[Group],
    buckets: Buckets,
    *,
    advantage: str,
    aggregation: str,
    max_response: int,
    overlong_buffer: int = 0,
    equal_groups: str = "keep",
) -> Update:
    """Compute the advantages of some groups and pack the groups into one update.

    Args:
      buckets: the possible shapes of micro-batches.
      advantage: how rewards become advantages, one of `objectives.ADVANTAGE_KINDS`.
      aggregation: of the objective; it decides the denominator.
      max_response: the generation budget in tokens.
      overlong_buffer: tokens before the budget over which DAPO's penalty grows; 0: no penalty.
      equal_groups: what happens to groups with equal rewards, one of `EQUAL_GROUPS`.
    """
    if equal_groups not in EQUAL_GROUPS:
        raise ValueError(f"equal_groups is {equal_groups!r}; possible: {', '.join(EQUAL_GROUPS)}")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.stack([group.rewards for group in groups])
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    shaped = shaped_rewards(groups, max_response, overlong_buffer)
    advantages = np.asarray(objectives.group_advantages(shaped, kind=advantage))
    equal = shaped.max(1) == shaped.min(1)
    rows = [
        [Row(group.prompt, r.tokens, r.logprobs, a) for r, a in zip(group.rollouts, values)]
        for group, values in zip(groups, advantages)
    ]
    taken, counted = _choose_rows(rows, equal, equal_groups)
    micro_batches = arrange(taken, buckets)
    padded = sum(batch["tokens"].size for batch in micro_batches)
    metrics = {
        "reward": float(rewards.mean()),
        "equal_groups": float(equal.mean()),
        "response_tokens": float(lengths.sum()),
        "response_length": float(lengths.mean()),
        "truncated": float(np.mean([rollout.finish == "length" for rollout in rollouts])),
        "padding": 1 - sum(packed_tokens(batch) for batch in micro_batches) / padded,
    }
    return Update(
        micro_batches=micro_batches,
        denominator=_denominator(counted, aggregation, max_response),
        metrics=metrics | ({"overlong_penalty": float((shaped - rewards).mean())} if overlong_buffer else {}),
    )


def shaped_rewards(groups: Sequence[Group], max_response: int, overlong_buffer: int) -> np.ndarray:
    """Return rewards `[prompts, responses]`, plus DAPO's length penalty if `overlong_buffer` is not 0."""
    rewards = np.stack([group.rewards for group in groups])
    if not overlong_buffer:
        return rewards
    lengths = np.array([[len(rollout.tokens) for rollout in group.rollouts] for group in groups])
    penalty = objectives.overlong_penalty(lengths, max_length=max_response, buffer=overlong_buffer)
    return rewards + np.asarray(penalty)


def _choose_rows(
    rows: Sequence[Sequence[Row]], equal: np.ndarray, equal_groups: str
) -> tuple[list[Row], list[Row]]:
    """Return the rows to compute, and the rows that the denominator includes."""
    everything = [row for group in rows for row in group]
    if equal_groups == "keep":
        return everything, everything
    unequal = [row for group, same in zip(rows, equal) if not same for row in group]
    # Keep one row so that the update still runs; Adam's moments and weight decay advance.
    taken = unequal or [min(everything, key=lambda row: row.length)]
    return taken, taken if equal_groups == "drop" else everything


def _denominator(rows: Sequence[Row], aggregation: str, max_response: int) -> float:
    lengths = np.array([len(row.response) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    budget = max_response if aggregation == "constant" else None
    return float(objectives.denominator(mask, aggregation, max_length=budget))


class UpdateStream:
    """An iterator over the updates of a stage, which can be resumed from a saved position.

    Each epoch has another order of the groups. Groups that do not fill an update are left out in this epoch.
    """

    def __init__(
        self,
        stage: RolloutFolder,
        *,
        seed: int,
        stage_index: int,
        epochs: int,
        prompts_per_update: int,
        **arrange: Any,
    ) -> None:
        source = grain.sources.ArrayRecordDataSource([str(stage.path(i)) for i in range(stage.shards)])
        per_epoch = len(source) // prompts_per_update
        # Grain's own shuffle takes a millisecond per prompt in stages with few prompts.
        rngs = [np.random.default_rng((seed, stage_index, epoch)) for epoch in range(epochs)]
        used = per_epoch * prompts_per_update
        order = np.concatenate([rng.permutation(len(source))[:used] for rng in rngs])
        self.updates = per_epoch * epochs
        dataset = (
            grain.MapDataset.source(order.tolist())
            .map(lambda index: decode(source[index]))
            .batch(prompts_per_update, drop_remainder=True, batch_fn=list)
            .map(lambda groups: make_update(groups, **arrange))
        )
        self._iterator = iter(
            dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
        )

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        return next(self._iterator)

    def position(self) -> dict[str, Any]:
        """Return the position of the stream, to store it in a checkpoint."""
        return self._iterator.get_state()

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue from a position that `position` returned."""
        self._iterator.set_state(dict(position))
