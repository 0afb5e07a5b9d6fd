"""From a stage on disk to update batches: shuffled, complete, in length buckets, at a position one can save.

An update is exactly `prompts_per_update` groups. Inside it, responses are sorted by length and cut into
micro-batches of a few fixed shapes under a token budget; the objective's denominator is that of the whole
update, so the gradient is the one of a single padded batch.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from mugrpo_jax import objectives
from mugrpo_jax.rollouts.records import Group, decode
from mugrpo_jax.rollouts.store import Stage

MicroBatch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes in which micro-batches come: one number of rows for each row length.

    Attributes:
      lengths: row lengths in tokens, ascending; the last holds the longest prompt and response.
      tokens: padded tokens in one micro-batch, at most.
      rows_multiple: rows are a multiple of this (the devices that split the batch).
    """

    lengths: tuple[int, ...]
    tokens: int
    rows_multiple: int = 1

    def rows(self, length: int) -> int:
        """Rows of a micro-batch of this row length."""
        return max(self.tokens // length // self.rows_multiple, 1) * self.rows_multiple

    def fit(self, length: int) -> int:
        """The smallest bucket that holds `length` tokens."""
        return next(bucket for bucket in self.lengths if bucket >= length)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All micro-batch shapes `(rows, length)`, hence all programs that will be compiled."""
        return [(self.rows(length), length) for length in self.lengths]


def plan_buckets(longest: int, tokens: int, rows_multiple: int = 1, *, unit: int = 128) -> Buckets:
    """Buckets of `unit` times 1, 2, 3, 4, 6, 8, 12, 16, ... up to the longest row, so that at most a third
    of a row is padding and the number of programs grows with the logarithm of the length.

    >>> plan_buckets(700, 4096).lengths
    (128, 256, 384, 512, 768)
    """
    lengths: list[int] = []
    step = 1
    while not lengths or lengths[-1] < longest:
        lengths.append(unit * step)
        step = step + 1 if step < 4 else step * 3 // 2 if (step & (step - 1)) == 0 else step * 4 // 3
    return Buckets(tuple(lengths), tokens, rows_multiple)


class Row(NamedTuple):
    """One response with its prompt, as it enters a micro-batch."""

    prompt: np.ndarray
    response: np.ndarray
    behavior_logp: np.ndarray
    advantage: float

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)


@dataclasses.dataclass(frozen=True)
class Update:
    """One optimizer update's data.

    Attributes:
      micro_batches: each a dict of `tokens`, `mask`, `behavior_logp` `[rows, length]` and `advantages`
        `[rows]`; empty rows are all padding.
      denominator: of the whole update, as the objective's aggregation defines it.
      metrics: of the data: mean reward, lengths, share of groups with equal rewards.
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
) -> Update:
    """Arrange some groups as one update."""
    rewards = np.stack([group.rewards for group in groups])
    with jax.default_device(_host_device()):
        advantages = np.asarray(objectives.group_advantages(rewards, kind=advantage)).ravel()
    rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    rows = [Row(p, r.tokens, r.logprobs, a) for (p, r), a in zip(rollouts, advantages)]
    micro_batches = arrange(rows, buckets)
    tokens = sum(len(row.response) for row in rows)
    padded = sum(batch["tokens"].size for batch in micro_batches)
    budget = max_response if aggregation == "constant" else None
    parts = [objectives.denominator(b["mask"], aggregation, max_length=budget) for b in micro_batches]
    return Update(
        micro_batches=micro_batches,
        denominator=float(sum(parts)),
        metrics={
            "reward": float(rewards.mean()),
            "equal_groups": float((rewards.max(1) == rewards.min(1)).mean()),
            "response_tokens": float(tokens),
            "response_length": tokens / len(rows),
            "truncated": float(np.mean([rollout.finish == "length" for _, rollout in rollouts])),
            "padding": 1 - sum(row.length for row in rows) / padded,
        },
    )


@functools.cache
def _host_device() -> Any:
    """Where small sums are done: on an accelerator they would wait behind the updates under way.

    None, the default device, where jax was told to leave the CPU alone.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def arrange(rows: Sequence[Row], buckets: Buckets) -> tuple[MicroBatch, ...]:
    """Rows, longest first, in micro-batches of the buckets' shapes; only the last can have empty rows."""
    rest = sorted(rows, key=lambda row: row.length, reverse=True)
    micro_batches = []
    while rest:
        length = buckets.fit(rest[0].length)
        count = buckets.rows(length)
        micro_batches.append(_micro_batch(rest[:count], count, length))
        rest = rest[count:]
    return tuple(micro_batches)


def _micro_batch(rows: Sequence[Row], count: int, length: int) -> MicroBatch:
    batch = {
        "tokens": np.zeros((count, length), np.int32),
        "mask": np.zeros((count, length), np.float32),
        "behavior_logp": np.zeros((count, length), np.float32),
        "advantages": np.zeros(count, np.float32),
    }
    for i, row in enumerate(rows):
        start, end = len(row.prompt), row.length
        batch["tokens"][i, :start] = row.prompt
        batch["tokens"][i, start:end] = row.response
        batch["mask"][i, start:end] = 1
        batch["behavior_logp"][i, start:end] = row.behavior_logp
        batch["advantages"][i] = row.advantage
    return batch


class UpdateStream:
    """An iterator over a stage's updates whose position is a small dict.

    Groups are shuffled anew in every epoch by `(seed, stage, epoch)`; each epoch gives whole updates only.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        seed: int,
        stage_index: int,
        epochs: int,
        prompts_per_update: int,
        **arrange: Any,
    ) -> None:
        source = grain.sources.ArrayRecordDataSource([str(stage.path(i)) for i in range(stage.shards)])
        per_epoch = len(source) // prompts_per_update
        passes = [
            grain.MapDataset.source(source).shuffle(seed=_shuffle_seed(seed, stage_index, epoch))[
                : per_epoch * prompts_per_update
            ]
            for epoch in range(epochs)
        ]
        self.updates = per_epoch * epochs
        dataset = (
            grain.MapDataset.concatenate(passes)
            .map(decode)
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
        """Where the stream stands, for a checkpoint."""
        return self._iterator.get_state()

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        self._iterator.set_state(dict(position))


def _shuffle_seed(seed: int, stage: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, stage, epoch)).generate_state(1)[0])
