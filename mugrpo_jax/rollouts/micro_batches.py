"""Split the rows of an update into micro-batches with a few fixed shapes, and pack the rows without padding.

Rows are sorted by length and split into micro-batches with a limited number of tokens. Every loss is divided
by the denominator of the whole update, so the gradients of the micro-batches add up to that of the update.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mugrpo_jax.models import plan_packing

MicroBatch = dict[str, np.ndarray]

_ROOM = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)  # possible values of `Buckets.room`, up to the usual one
_TRIED = 16  # updates of a stage that `Buckets.fitted` packs to see how many rows they need


class Shape(NamedTuple):
    """The size of a micro-batch: `tokens` packed tokens, which attention pads to `rows` × `length`."""

    rows: int
    length: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The possible shapes of micro-batches.

    Rows are packed without padding, so the cost of a micro-batch depends on its number of tokens. Only the
    cost of attention depends on the padded rows (on TPUs without `share`, only on their length). A shape has
    2 · tokens / length rows, because a row is filled by half on average, and twice as many rows if rows share
    prompts, but never more than an update has. Rows that stay empty cost memory and time, so `fitted` chooses
    the number of rows for a stage.

    Attributes:
      lengths: row lengths in tokens, ascending. The last length fits the longest prompt with its response.
      tokens: maximum number of tokens in one micro-batch.
      parts: number of parts into which devices split a micro-batch; each part is packed by itself.
      share: if True, adjacent rows with the same prompt store the prompt once (the last token once per row).
      fit_rows: if True, each stage calls `fitted`. Then the shapes are not known before the responses.
      room: rows × length / tokens for each of the lengths; None for the values above.
      most_rows: number of rows in an update; None if it is not known.
    """

    lengths: tuple[int, ...]
    tokens: int
    parts: int = 1
    share: bool = False
    fit_rows: bool = False
    room: tuple[float, ...] | None = None
    most_rows: int | None = None

    def fit(self, length: int) -> int:
        """Return the smallest row length that holds `length` tokens."""
        if length > self.lengths[-1]:
            raise ValueError(
                f"a prompt with its response has {length} tokens, a row at most {self.lengths[-1]}; raise "
                "sampling.max_prompt_tokens or sampling.max_response_tokens"
            )
        return next(bucket for bucket in self.lengths if bucket >= length)

    def rows(self, length: int) -> int:
        """Return how many rows with this number of tokens fit in a micro-batch."""
        return self.parts * max(self.tokens // self.parts // length, 1)

    def sizes(self, length: int) -> tuple[Shape, ...]:
        """Return the shapes of this row length with all, 1/2 and 1/4 of the tokens, if a full row fits.

        >>> Buckets((64,), 1024).sizes(64)[0], Buckets((64,), 1024, most_rows=20).sizes(64)[0]
        (Shape(rows=32, length=64, tokens=1024), Shape(rows=20, length=64, tokens=1024))
        """
        share = max(self.tokens // self.parts, length)
        shares = [share // part for part in (1, 2, 4) if share // part >= length]
        room = self.room[self.lengths.index(length)] if self.room else self._usual_room
        most = self.most_rows or sys.maxsize
        return tuple(
            Shape(self.parts * min(int(room * tokens / length), most), length, self.parts * tokens)
            for tokens in shares
        )

    @property
    def _usual_room(self) -> int:
        return 4 if self.share else 2

    def fitted(self, prompts: np.ndarray, responses: np.ndarray, prompts_per_update: int) -> "Buckets":
        """Return the buckets with only as many rows as the micro-batches of a stage use.

        Some updates are packed with the usual numbers of rows, to see how many rows they use. There are a few
        possible numbers of rows, so that most stages of a run have the same shapes. There are never more rows
        than without this, so that a plan made before the responses is an upper bound.

        Args:
          prompts: `[G]`, the lengths of the prompts.
          responses: `[G, R]`, the lengths of their responses.
          prompts_per_update: how many of the G groups are in one update.

        >>> buckets = Buckets((32, 64), 1024, fit_rows=True)
        >>> buckets.fitted(np.array([10]), np.full((1, 20), 45), prompts_per_update=1).room  # 18 rows of 64
        (2.0, 1.25)
        """
        usual = dataclasses.replace(self, room=None)
        used = dict.fromkeys(self.lengths, 0.0)
        starts = np.arange(0, max(1, len(prompts) - prompts_per_update + 1), prompts_per_update)
        for start in starts[:: -(-len(starts) // _TRIED)]:
            chosen = slice(start, start + prompts_per_update)
            for taken, shape in _plan(_outlines(prompts[chosen], responses[chosen]), usual):
                rows = self.parts * max(map(len, taken))
                used[shape.length] = max(used[shape.length], rows * shape.length / shape.tokens)
        most = float(self._usual_room)
        room = tuple(
            next((size for size in _ROOM if 0 < part <= size < most), most) for part in used.values()
        )
        return dataclasses.replace(self, room=room)

    @property
    def shapes(self) -> list[Shape]:
        """All micro-batch shapes; each of them is compiled once."""
        return [shape for length in self.lengths for shape in self.sizes(length)]


def plan_buckets(
    longest: int,
    tokens: int,
    parts: int = 1,
    *,
    unit: int = 64,
    share: bool = False,
    fit_rows: bool = False,
    most_rows: int | None = None,
) -> Buckets:
    """Return buckets with row lengths of `unit` × 1, 2, 4, ... up to the longest row.

    >>> plan_buckets(700, 4096).lengths
    (64, 128, 256, 512, 704)
    """
    last = -(-longest // unit) * unit
    lengths = [unit]
    while lengths[-1] < last:
        lengths.append(min(2 * lengths[-1], last))
    return Buckets(tuple(lengths), tokens, parts, share, fit_rows, most_rows=most_rows)


class Row(NamedTuple):
    """One response with its prompt, as it enters a micro-batch.

    `origin` is the index of the group in its stage, and the number of the response in the group. `behavior`
    is the number of the behavior that wrote the response; None if all responses of the stage have the same.
    `wrote` is True on the tokens that the model wrote; None if it wrote the whole response. Only these tokens
    are in the mask of the micro-batch, so that nothing else enters the loss and the diagnostics.
    """

    prompt: np.ndarray
    response: np.ndarray
    behavior_logp: np.ndarray
    advantage: float
    origin: tuple[int, int] = (0, 0)
    reference_logp: np.ndarray | None = None
    behavior: int | None = None
    wrote: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Number of tokens in prompt and response together."""
        return len(self.prompt) + len(self.response)

    @property
    def written(self) -> int:
        """Number of response tokens that the model wrote."""
        return len(self.response) if self.wrote is None else int(self.wrote.sum())


def _outlines(prompts: np.ndarray, responses: np.ndarray) -> list[Row]:
    """Return rows with the lengths of these prompts `[G]` and responses `[G, R]`, without their tokens."""
    none = np.zeros(0, np.float32)
    rows = []
    for prompt, lengths in zip(prompts.tolist(), responses.tolist()):
        shared = np.broadcast_to(np.int32(0), prompt)
        rows += [Row(shared, np.broadcast_to(np.int32(0), length), none, 0.0) for length in lengths]
    return rows


def abstract_micro_batch(
    shape: Shape, parts: int, *, reference: bool = False, behaviors: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the arrays in a micro-batch, to compile the update without data.

    `reference=True` adds the log-probs of the reference policy, `behaviors=True` the behavior of each row.
    """
    rows, packed = (shape.rows, shape.length), (parts, shape.tokens // parts)
    sizes = {
        "mask": (rows, np.float32),
        "behavior_logp": (rows, np.float32),
        "advantages": (rows[:1], np.float32),
        "tokens": (packed, np.int32),
        "packed_from": (packed, np.int32),
        "padded_from": (rows, np.int32),
    } | ({"reference_logp": (rows, np.float32)} if reference else {})
    sizes |= {"behavior": (rows[:1], np.int32)} if behaviors else {}
    return {name: jax.ShapeDtypeStruct(*size) for name, size in sizes.items()}


ReadRows = Callable[[Sequence[Row]], Sequence[Row]]


def arrange(
    rows: Sequence[Row],
    buckets: Buckets,
    *,
    read: ReadRows | None = None,
    parts: Collection[int] | None = None,
) -> tuple[MicroBatch, ...]:
    """Pack rows, longest first, into micro-batches with the shapes of `buckets`.

    If `read` is given, the tokens and log-probs of `rows` are not known yet, only their lengths. `read` then
    returns the complete rows of those parts of the micro-batches that `parts` names (None: all parts), which
    are the parts for the devices of this host. In the other parts, tokens and log-probs stay 0.
    """
    planned = _plan(rows, buckets)
    if read is not None:
        wanted = range(buckets.parts) if parts is None else sorted(parts)
        members = [taken[part] for taken, _ in planned for part in wanted]
        complete = iter(read([row for part in members for row in part]))
        for part in members:
            part[:] = [next(complete) for _ in part]
    return tuple(_micro_batch(taken, shape, buckets) for taken, shape in planned)


def _plan(rows: Sequence[Row], buckets: Buckets) -> list[tuple[list[list[Row]], Shape]]:
    """Return the rows of each part of each micro-batch, and the shape of each micro-batch."""
    rest = _by_prompt(rows) if buckets.share else sorted(rows, key=lambda row: row.length, reverse=True)
    planned = []
    while rest:
        longest = max(row.length for row in rest)
        tokens = sum(row.length - _common(row, before, buckets) for before, row in zip([None, *rest], rest))
        shape = _choose(buckets.sizes(buckets.fit(longest)), tokens, len(rest))
        taken, rest = _fill(rest, shape, buckets)
        planned.append((taken, shape))
    return planned


def _by_prompt(rows: Sequence[Row]) -> list[Row]:
    """Sort rows so that rows with the same prompt are adjacent; the prompt with the longest row is first."""
    together: dict[int, list[Row]] = {}
    for row in rows:
        together.setdefault(id(row.prompt), []).append(row)
    groups = sorted(together.values(), key=lambda group: max(row.length for row in group), reverse=True)
    return [row for group in groups for row in group]


def _common(row: Row, before: Row | None, buckets: Buckets) -> int:
    """Return how many prompt tokens of `row` are not packed because the row before has the same prompt."""
    # The last token of the prompt is packed again: the first token of the response is predicted from it.
    return len(row.prompt) - 1 if buckets.share and before and before.prompt is row.prompt else 0


def _choose(sizes: Sequence[Shape], tokens: int, rows: int) -> Shape:
    """Return the smallest shape that holds everything if over 80 % is used, else the largest full shape."""
    whole = [shape for shape in sizes if shape.tokens >= tokens and shape.rows >= rows]
    if whole and tokens > 0.8 * whole[-1].tokens:
        return whole[-1]
    return next((shape for shape in sizes if shape.tokens <= tokens), sizes[-1])


def _fill(rest: Sequence[Row], shape: Shape, buckets: Buckets) -> tuple[list[list[Row]], list[Row]]:
    """Distribute rows to devices, up to the first row that fits nowhere; return them and the rows left."""
    parts = buckets.parts
    taken: list[list[Row]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for number, row in enumerate(rest):
        cost = [row.length - _common(row, members[-1] if members else None, buckets) for members in taken]
        open_parts = [
            part
            for part in range(parts)
            if len(taken[part]) < shape.rows // parts and filled[part] + cost[part] <= shape.tokens // parts
        ]
        if not open_parts:
            return taken, list(rest[number:])
        best = min(open_parts, key=lambda part: (cost[part], filled[part]))
        taken[best].append(row)
        filled[best] += cost[best]
    return taken, []


def _micro_batch(parts: Sequence[Sequence[Row]], shape: Shape, buckets: Buckets) -> MicroBatch:
    rows, length = shape.rows, shape.length
    per_part, share = rows // len(parts), shape.tokens // len(parts)
    padded = np.zeros((rows, length), np.int32)
    batch = {
        "mask": np.zeros((rows, length), np.float32),
        "behavior_logp": np.zeros((rows, length), np.float32),
        "advantages": np.zeros(rows, np.float32),
    }
    if any(row.reference_logp is not None for members in parts for row in members):
        batch["reference_logp"] = np.zeros((rows, length), np.float32)
    if any(row.behavior is not None for members in parts for row in members):
        batch["behavior"] = np.zeros(rows, np.int32)
    lengths, shared = [0] * rows, [0] * rows
    for part, members in enumerate(parts):
        for i, (before, row) in enumerate(zip([None, *members], members), start=part * per_part):
            start, end = len(row.prompt), row.length
            padded[i, :start], padded[i, start:end] = row.prompt, row.response
            lengths[i], shared[i] = end, _common(row, before, buckets)
            batch["mask"][i, start:end] = 1 if row.wrote is None else row.wrote
            batch["behavior_logp"][i, start:end] = row.behavior_logp
            batch["advantages"][i] = row.advantage
            if row.reference_logp is not None:
                batch["reference_logp"][i, start:end] = row.reference_logp
            if row.behavior is not None:
                batch["behavior"][i] = row.behavior
    packing = plan_packing(
        lengths, (rows, length), tokens=share, parts=len(parts), shared=shared if buckets.share else None
    )
    places = np.pad(padded.reshape(len(parts), -1), ((0, 0), (0, 1)))  # a zero for empty places
    tokens = np.take_along_axis(places, np.asarray(packing.packed_from), axis=1)
    return batch | {"tokens": tokens} | packing._asdict()


def packed_tokens(batch: MicroBatch) -> int:
    """Return the number of tokens in a micro-batch, without padding."""
    return int((batch["packed_from"] < batch["padded_from"].size // len(batch["packed_from"])).sum())
