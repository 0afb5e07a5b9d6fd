"""Read the rollouts of a stage from disk, and convert the rollouts to the data of updates.

Each update uses exactly `prompts_per_update` groups. The order of the groups is shuffled in every epoch.
Every host arranges every update from the index of the stage, but reads only the rows of its own devices.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from mugrpo_jax import objectives
from mugrpo_jax.rollouts.micro_batches import (
    Buckets,
    MicroBatch,
    ReadRows,
    Row,
    abstract_micro_batch,
    arrange,
    packed_tokens,
)
from mugrpo_jax.rollouts.records import Group
from mugrpo_jax.rollouts.reference_folder import ReferenceFolder
from mugrpo_jax.rollouts.rollout_folder import RolloutFolder, read_index
from mugrpo_jax.rollouts.row_reader import RowReader
from mugrpo_jax.rollouts.stage_index import StageIndex

# What to do with equal groups. All responses of an equal group got the same reward, so its advantages are 0.
#   keep  Compute equal groups like all other groups.
#   skip  Leave equal groups out of the forward and backward passes, so also out of the diagnostics. The
#         gradient stays the same (except with P3O, whose KL term does not depend on advantages).
#   drop  Leave equal groups out of the passes and also out of the denominator.
EQUAL_GROUPS = ("keep", "skip", "drop")


@dataclasses.dataclass(frozen=True)
class Update:
    """The data of one optimizer update.

    Attributes:
      micro_batches: one dict per micro-batch. `mask` (1 on tokens that the model wrote), `behavior_logp` and,
        if it is known, `reference_logp` are padded arrays `[rows, length]`, `advantages` is `[rows]`, and
        `tokens` is packed. `models.Packing` describes the packed shape and the index arrays `packed_from` and
        `padded_from`. Unused rows have mask 0.
      denominator: the number by which the sum over all tokens of the update is divided.
      metrics: mean reward, response lengths, share of equal groups and so on.
    """

    micro_batches: tuple[MicroBatch, ...]
    denominator: float
    metrics: Mapping[str, float]


def abstract_update(buckets: Buckets, *, reference: bool, behaviors: bool = False) -> Update:
    """Return an update with one abstract micro-batch, the smallest, to trace the loss without data."""
    batch: Any = abstract_micro_batch(
        buckets.sizes(buckets.lengths[0])[-1], buckets.parts, reference=reference, behaviors=behaviors
    )
    return Update((batch,), 1.0, {})


def make_update(
    groups: Sequence[Group],
    buckets: Buckets,
    *,
    advantage: str,
    aggregation: str,
    max_response: int,
    max_length: int | None = None,
    overlong_buffer: int = 0,
    equal_groups: str = "keep",
    read: ReadRows | None = None,
    parts: Collection[int] | None = None,
    reference: bool = False,
    behaviors: bool = False,
) -> Update:
    """Compute the advantages of all responses in `groups`, and pack the responses into one update.

    Args:
      buckets: the possible shapes of micro-batches.
      advantage: how to compute advantages from rewards, one of `objectives.ADVANTAGE_KINDS`.
      aggregation: the objective's aggregation, one of `objectives.AGGREGATIONS`, to compute the denominator.
      max_response: the maximum number of tokens in a response.
      max_length: L_max of the aggregation `constant`; None: `max_response`.
      overlong_buffer: DAPO's length penalty grows over the last `overlong_buffer` tokens; 0 means no penalty.
      equal_groups: what to do with groups whose rewards are all equal, one of `EQUAL_GROUPS`.
      read: reads the rows of the chosen `parts`, if `groups` are outlines without tokens; see `arrange`.
      reference: the micro-batches get an array for the log-probs of the reference policy, which `read` reads.
      behaviors: the micro-batches get an array for the behavior of each row, which `read` reads.
    """
    if equal_groups not in EQUAL_GROUPS:
        raise ValueError(f"equal_groups is {equal_groups!r}; possible: {', '.join(EQUAL_GROUPS)}")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.stack([group.rewards for group in groups])
    lengths = np.array([rollout.written for rollout in rollouts])
    shaped = shaped_rewards(groups, max_response, overlong_buffer)
    advantages = np.asarray(objectives.group_advantages(shaped, kind=advantage))
    equal = shaped.max(1) == shaped.min(1)
    rows = [
        [
            Row(
                group.prompt,
                r.tokens,
                r.logprobs,
                a,
                (group.index, i),
                r.logprobs if reference else None,
                0 if behaviors else None,
                r.mask,
            )
            for i, (r, a) in enumerate(zip(group.rollouts, values))
        ]
        for group, values in zip(groups, advantages)
    ]
    taken, counted = _choose_rows(rows, equal, equal_groups)
    micro_batches = arrange(taken, buckets, read=read, parts=parts)
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
        denominator=_denominator(counted, aggregation, max_length or max_response),
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
    """Return the rows to pack into micro-batches, and the rows from which to compute the denominator."""
    everything = [row for group in rows for row in group]
    if equal_groups == "keep":
        return everything, everything
    unequal = [row for group, same in zip(rows, equal) if not same for row in group]
    # If all groups are equal, keep one row, so that the optimizer still applies momentum and weight decay.
    taken = unequal or [min(everything, key=lambda row: row.length)]
    return taken, taken if equal_groups == "drop" else everything


def _denominator(rows: Sequence[Row], aggregation: str, max_length: int) -> float:
    lengths = np.array([row.written for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    budget = max_length if aggregation == "constant" else None
    return float(objectives.denominator(mask, aggregation, max_length=budget))


class UpdateStream:
    """A resumable iterator over the updates of a stage. `arrange` are other arguments of `make_update`.

    `parts` are the parts of each micro-batch for which this host reads rows (None: all), see `local_parts`.
    `reference` has the log-probs of the reference policy; None if the loss does not need them. `behaviors`
    are the names of the behaviors whose diagnostics are wanted; () if all responses have the same.
    Each epoch shuffles the groups. If the last groups of an epoch do not fill an update, they are left out.
    """

    def __init__(
        self,
        stage: RolloutFolder,
        *,
        seed: int,
        stage_index: int,
        epochs: int,
        prompts_per_update: int,
        buckets: Buckets,
        reference: ReferenceFolder | None = None,
        behaviors: Sequence[str] = (),
        **arrange: Any,
    ) -> None:
        index = read_index(stage)
        reader = RowReader(stage, index.lengths.shape[1], reference, behaviors)
        if buckets.fit_rows:
            buckets = _fitted(buckets, index, prompts_per_update, arrange.get("equal_groups", "keep"))
        arrange |= {"buckets": buckets, "reference": reference is not None, "behaviors": bool(behaviors)}
        per_epoch = stage.prompts // prompts_per_update
        # Grain's own shuffle takes a millisecond per prompt in stages with few prompts.
        rngs = [np.random.default_rng((seed, stage_index, epoch)) for epoch in range(epochs)]
        used = per_epoch * prompts_per_update
        order = np.concatenate([rng.permutation(stage.prompts)[:used] for rng in rngs])
        self.updates = per_epoch * epochs
        dataset = (
            grain.MapDataset.source(order.tolist())
            .map(index.outline)
            .batch(prompts_per_update, drop_remainder=True, batch_fn=list)
            .map(lambda groups: make_update(groups, read=reader, **arrange))
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
        """Resume the stream at a position that `position` returned."""
        self._iterator.set_state(dict(position))


def _fitted(buckets: Buckets, index: StageIndex, prompts_per_update: int, equal_groups: str) -> Buckets:
    """Fit the rows to the groups that updates compute: without `keep`, those with different rewards."""
    taken = np.full(len(index.prompts), True)
    if equal_groups != "keep":
        taken = index.rewards.max(1) > index.rewards.min(1)
    groups = max(1, round(prompts_per_update * taken.mean()))
    return buckets.fitted(index.prompts[taken], index.lengths[taken], groups)
