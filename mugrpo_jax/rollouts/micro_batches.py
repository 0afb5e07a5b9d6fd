"""From a stage on disk to update batches: shuffled, complete, in length buckets, at a position one can save.

An update is exactly `prompts_per_update` groups. Inside it, responses are sorted by length and cut into
micro-batches of a few fixed shapes under a token budget, packed without padding; the objective's denominator
is that of the whole update, so the gradient is the one of a single padded batch.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from mugrpo_jax import objectives
from mugrpo_jax.models import plan_packing
from mugrpo_jax.rollouts.records import Group, decode
from mugrpo_jax.rollouts.store import Stage

MicroBatch = dict[str, np.ndarray]


class Shape(NamedTuple):
    """Sizes of a micro-batch, over all devices: `tokens` packed ones, and room to spread them out to rows."""

    rows: int
    length: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes in which micro-batches come.

    Rows are packed without their padding, so what a micro-batch costs is its `tokens`; its rows and their
    length matter to attention alone. There is room for rows that are half as long as their length, and twice
    as many where they share prompts.

    Attributes:
      lengths: row lengths in tokens, ascending; the last holds the longest prompt and response.
      tokens: tokens in one micro-batch, at most.
      groups: devices that split the batch; each packs its own rows.
      share: rows with the same prompt stand together, and all but its last token are packed once.
    """

    lengths: tuple[int, ...]
    tokens: int
    groups: int = 1
    share: bool = False

    def fit(self, length: int) -> int:
        """The smallest bucket that holds `length` tokens."""
        return next(bucket for bucket in self.lengths if bucket >= length)

    def rows(self, length: int) -> int:
        """Rows of this length that fill a micro-batch."""
        return self.groups * max(self.tokens // self.groups // length, 1)

    def sizes(self, length: int) -> tuple[Shape, ...]:
        """Shapes with this row length, largest first: whole, half and quarter, if a device can hold a row."""
        share = max(self.tokens // self.groups, length)
        shares = [share // part for part in (1, 2, 4) if share // part >= length]
        room = 4 if self.share else 2
        return tuple(
            Shape(self.groups * (room * tokens // length), length, self.groups * tokens) for tokens in shares
        )

    @property
    def shapes(self) -> list[Shape]:
        """All micro-batch shapes, hence all programs that can be compiled."""
        return [shape for length in self.lengths for shape in self.sizes(length)]


def plan_buckets(
    longest: int, tokens: int, groups: int = 1, *, unit: int = 64, share: bool = False
) -> Buckets:
    """Row lengths of `unit` times 1, 2, 4, ... up to the longest row: few programs for any length.

    >>> plan_buckets(700, 4096).lengths
    (64, 128, 256, 512, 704)
    """
    last = -(-longest // unit) * unit
    lengths = [unit]
    while lengths[-1] < last:
        lengths.append(min(2 * lengths[-1], last))
    return Buckets(tuple(lengths), tokens, groups, share)


# Groups whose responses all got the same reward have advantages of exactly 0. They are computed like all
# others; or left out of the passes, which costs their share of diagnostics and (but for P3O, whose pull to
# the behavior knows no advantage) no gradient; or left out of the denominator too.
EQUAL_GROUPS = ("keep", "skip", "drop")


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
      micro_batches: each a dict of `mask`, `behavior_logp` `[rows, length]`, `advantages` `[rows]`, and the
        packed `tokens [P, N]` with their `packed_from`, `padded_from` (see `models.Packing`); empty rows are
        all padding.
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
    overlong_buffer: int = 0,
    equal_groups: str = "keep",
) -> Update:
    """Arrange some groups as one update.

    Args:
      groups: all responses of each.
      buckets: the shapes of micro-batches.
      advantage: how rewards become advantages, one of `objectives.ADVANTAGE_KINDS`.
      aggregation: of the objective; it decides the denominator.
      max_response: the generation budget in tokens.
      overlong_buffer: tokens before the budget over which DAPO's penalty grows; 0: no penalty.
      equal_groups: what happens to groups without signal, one of `EQUAL_GROUPS`.
    """
    if equal_groups not in EQUAL_GROUPS:
        raise ValueError(f"equal_groups is {equal_groups!r}; possible: {', '.join(EQUAL_GROUPS)}")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.stack([group.rewards for group in groups])
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    with jax.default_device(_host_device()):
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
        "padding": 1 - sum(_packed_tokens(batch) for batch in micro_batches) / padded,
    }
    return Update(
        micro_batches=micro_batches,
        denominator=_denominator(counted, aggregation, max_response),
        metrics=metrics | ({"overlong_penalty": float((shaped - rewards).mean())} if overlong_buffer else {}),
    )


def shaped_rewards(groups: Sequence[Group], max_response: int, overlong_buffer: int) -> np.ndarray:
    """`[prompts, G]`: what advantages are made of, the task's rewards and DAPO's penalty if there is one."""
    rewards = np.stack([group.rewards for group in groups])
    if not overlong_buffer:
        return rewards
    lengths = np.array([[len(rollout.tokens) for rollout in group.rollouts] for group in groups])
    penalty = objectives.overlong_penalty(lengths, max_length=max_response, buffer=overlong_buffer)
    return rewards + np.asarray(penalty)


def _choose_rows(
    rows: Sequence[Sequence[Row]], equal: np.ndarray, equal_groups: str
) -> tuple[list[Row], list[Row]]:
    """Rows to compute, and rows that the denominator counts."""
    everything = [row for group in rows for row in group]
    if equal_groups == "keep":
        return everything, everything
    telling = [row for group, silent in zip(rows, equal) if not silent for row in group]
    # An update takes place even if no group has anything to say: AdamW moves on.
    taken = telling or [min(everything, key=lambda row: row.length)]
    return taken, taken if equal_groups == "drop" else everything


def _denominator(rows: Sequence[Row], aggregation: str, max_response: int) -> float:
    lengths = np.array([len(row.response) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    budget = max_response if aggregation == "constant" else None
    return float(objectives.denominator(mask, aggregation, max_length=budget))


@functools.cache
def _host_device() -> Any:
    """Where small sums are done: on an accelerator they would wait behind the updates under way.

    None, the default device, where jax was told to leave the CPU alone.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def abstract_micro_batch(shape: Shape, groups: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A micro-batch's arrays without their contents, to compile for."""
    rows, packed = (shape.rows, shape.length), (groups, shape.tokens // groups)
    sizes = {
        "mask": (rows, np.float32),
        "behavior_logp": (rows, np.float32),
        "advantages": (rows[:1], np.float32),
        "tokens": (packed, np.int32),
        "packed_from": (packed, np.int32),
        "padded_from": (rows, np.int32),
    }
    return {name: jax.ShapeDtypeStruct(*size) for name, size in sizes.items()}


def _packed_tokens(batch: MicroBatch) -> int:
    return int((batch["packed_from"] < batch["padded_from"].size // len(batch["packed_from"])).sum())


def arrange(rows: Sequence[Row], buckets: Buckets) -> tuple[MicroBatch, ...]:
    """Rows, longest first, packed into micro-batches of the buckets' shapes."""
    rest = _by_prompt(rows) if buckets.share else sorted(rows, key=lambda row: row.length, reverse=True)
    micro_batches = []
    while rest:
        longest = max(row.length for row in rest)
        tokens = sum(row.length - _common(row, before, buckets) for before, row in zip([None, *rest], rest))
        shape = _choose(buckets.sizes(buckets.fit(longest)), tokens, len(rest))
        taken, rest = _fill(rest, shape, buckets)
        micro_batches.append(_micro_batch(taken, shape, buckets))
    return tuple(micro_batches)


def _by_prompt(rows: Sequence[Row]) -> list[Row]:
    """Rows with the same prompt side by side, the prompt with the longest row first."""
    together: dict[int, list[Row]] = {}
    for row in rows:
        together.setdefault(id(row.prompt), []).append(row)
    groups = sorted(together.values(), key=lambda group: max(row.length for row in group), reverse=True)
    return [row for group in groups for row in group]


def _common(row: Row, before: Row | None, buckets: Buckets) -> int:
    """Tokens that `row` need not bring along where it stands behind `before`."""
    # The prompt's last token comes along: what follows it is predicted from there.
    return len(row.prompt) - 1 if buckets.share and before and before.prompt is row.prompt else 0


def _choose(sizes: Sequence[Shape], tokens: int, rows: int) -> Shape:
    """The smallest shape that holds everything and is nearly full with it, or the largest it fills."""
    whole = [shape for shape in sizes if shape.tokens >= tokens and shape.rows >= rows]
    if whole and tokens > 0.8 * whole[-1].tokens:
        return whole[-1]
    return next((shape for shape in sizes if shape.tokens <= tokens), sizes[-1])


def _fill(rest: Sequence[Row], shape: Shape, buckets: Buckets) -> tuple[list[list[Row]], list[Row]]:
    """Rows for each group, taken in order as long as the next one has room somewhere; and those left over."""
    groups = buckets.groups
    taken: list[list[Row]] = [[] for _ in range(groups)]
    filled = [0] * groups
    for number, row in enumerate(rest):
        cost = [row.length - _common(row, members[-1] if members else None, buckets) for members in taken]
        open_groups = [
            g
            for g in range(groups)
            if len(taken[g]) < shape.rows // groups and filled[g] + cost[g] <= shape.tokens // groups
        ]
        if not open_groups:
            return taken, list(rest[number:])
        best = min(open_groups, key=lambda g: (cost[g], filled[g]))
        taken[best].append(row)
        filled[best] += cost[best]
    return taken, []


def _micro_batch(groups: Sequence[Sequence[Row]], shape: Shape, buckets: Buckets) -> MicroBatch:
    rows, length = shape.rows, shape.length
    per_group, share = rows // len(groups), shape.tokens // len(groups)
    padded = np.zeros((rows, length), np.int32)
    batch = {
        "mask": np.zeros((rows, length), np.float32),
        "behavior_logp": np.zeros((rows, length), np.float32),
        "advantages": np.zeros(rows, np.float32),
    }
    lengths, shared = [0] * rows, [0] * rows
    for g, members in enumerate(groups):
        for i, (before, row) in enumerate(zip([None, *members], members), start=g * per_group):
            start, end = len(row.prompt), row.length
            padded[i, :start], padded[i, start:end] = row.prompt, row.response
            lengths[i], shared[i] = end, _common(row, before, buckets)
            batch["mask"][i, start:end] = 1
            batch["behavior_logp"][i, start:end] = row.behavior_logp
            batch["advantages"][i] = row.advantage
    packing = plan_packing(
        lengths,
        (rows, length),
        tokens=share,
        groups=len(groups),
        shared=shared if buckets.share else None,
    )
    places = np.pad(padded.reshape(len(groups), -1), ((0, 0), (0, 1)))  # a zero where nothing stands
    tokens = np.take_along_axis(places, np.asarray(packing.packed_from), axis=1)
    return batch | {"tokens": tokens} | packing._asdict()


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
        # Not Grain's own shuffle: in a stage of a few prompts it takes a millisecond for each.
        order = np.concatenate(
            [
                np.random.default_rng((seed, stage_index, epoch)).permutation(len(source))[
                    : per_epoch * prompts_per_update
                ]
                for epoch in range(epochs)
            ]
        )
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
        """Where the stream stands, for a checkpoint."""
        return self._iterator.get_state()

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        self._iterator.set_state(dict(position))
