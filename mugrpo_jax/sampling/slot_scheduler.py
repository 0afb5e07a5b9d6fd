"""Assign samples to free slots, and collect the sampled tokens into responses. This runs on the host."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mugrpo_jax.sampling.engine import Engine, LoopResult
from mugrpo_jax.sampling.programs import Rows, pack_entries
from mugrpo_jax.sampling.prompt_queue import PromptQueue
from mugrpo_jax.sampling.recent_tokens import RecentTokens
from mugrpo_jax.sampling.requests import MAX_STOPS, Request, Response
from mugrpo_jax.sampling.turns import Dialogue, OpenTurns, Turns, message_entries


@dataclasses.dataclass
class SamplerStats:
    """Counts (decode steps, tokens, responses, device loops, prefilled prompts) and times of a run so far.

    `slot_steps` adds up, over all decode steps, the number of slots at that time.
    `host_seconds` is the time between a loop's result and the call of the next loop, when the device waits.
    `call_seconds` is the time spent in these calls; some JAX backends return only when the loop has ended.
    """

    steps: int = 0
    slot_steps: int = 0
    tokens: int = 0
    responses: int = 0
    loops: int = 0
    prompts: int = 0
    host_seconds: float = 0.0
    call_seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of the slots that sampled a token, over all decode steps and the slots of each."""
        return self.tokens / max(1, self.slot_steps)


_Sample = tuple[Request, int]  # a request, and the position of a sample in `request.seeds`


class SlotScheduler:
    """Run some requests: assign their samples to free slots and collect the responses.

    Call `fill`, `start_loop`, `responses` and `finish_loop` in this order until `fill` returns False.
    `dialogue` asks the environment after a turn of the model; None: every response has one turn.
    """

    def __init__(
        self,
        engine: Engine,
        stats: SamplerStats,
        requests: Iterator[Request],
        dialogue: Dialogue | None = None,
    ) -> None:
        self.engine, self.plan, self.stats = engine, engine.plan, stats
        self.top_k = self.top_p = False  # whether any request so far uses top-k, top-p
        self.waiting = PromptQueue(requests, self.plan)
        self.prompts: Any = None
        self.ready: list[_Sample] = []  # prefilled samples that wait for a slot
        self.entries = np.zeros((0, 0), np.int32)  # one row for `Engine.insert` per sample in `ready`
        self.free = list(range(self.plan.slots))
        self.busy: dict[int, _Sample] = {}
        self.starts = np.zeros(self.plan.slots, np.int64)  # the step at which each slot's sample began
        self.lengths = np.zeros(self.plan.slots, np.int64)  # cache entries of busy slots after the next step
        self.finished: list[tuple[int, _Sample, int]] = []  # slot, sample and its first step
        self.recent = RecentTokens(self.plan)
        self.latest: LoopResult | None = None
        self.collected: LoopResult | None = None  # the loop whose tokens were added to `recent`
        self.turns = None if dialogue is None else OpenTurns(dialogue)
        self.ended: list[Response] = []  # responses that were not yielded yet

    def fill(self) -> bool:
        """Start waiting samples in the free slots; return whether any slot is busy now.

        If no samples wait and few slots are busy, continue with fewer slots.
        """
        while not self._fill() and self.turns is not None and self.turns.asked:
            self._go_on(self.turns, patient=True)
        for slots in self.plan.fewer_slots:
            if slots < self.engine.slots and self.busy and not (self.ready or self.waiting):
                self._shrink(slots)
        return bool(self.busy)

    def _shrink(self, slots: int) -> None:
        """Continue with this many slots, if the samples of each part of the slots fit in a part of these."""
        old, new = self.engine.slots // self.plan.parts, slots // self.plan.parts
        parts = [
            [slot for slot in sorted(self.busy) if slot // old == part] for part in range(self.plan.parts)
        ]
        if max(map(len, parts)) > new:
            return
        self._collect()  # with the old numbers of the slots
        kept = np.array([slot for part in parts for slot in [*part, *[-1] * (new - len(part))]])
        self.engine.shrink(kept)
        self.recent.keep(kept)
        self.starts, self.lengths = self.starts[kept], np.where(kept < 0, 0, self.lengths[kept])
        self.busy = {i: self.busy[slot] for i, slot in enumerate(kept.tolist()) if slot >= 0}
        self.free = np.flatnonzero(kept < 0).tolist()

    def _fill(self) -> bool:
        if self.turns is not None:
            self._go_on(self.turns, patient=False)
        while self.free and (self.ready or self.waiting):
            if not self.ready:
                self._prefill()
            count = min(len(self.free), len(self.ready), self.plan.inserts)
            samples, self.ready = self.ready[:count], self.ready[count:]
            entries, self.entries = self.entries[:count], self.entries[count:]
            slots, self.free = self.free[:count], self.free[count:]
            self.engine.insert(self.prompts, entries, slots)
            self.busy.update(zip(slots, samples))
            self.starts[slots] = self.stats.steps
            self.lengths[slots] = [len(request.prompt) for request, _ in samples]
        return bool(self.busy)

    def _go_on(self, open_turns: OpenTurns, *, patient: bool) -> None:
        """Start the next turn in each slot whose environment has replied, or free the slot if it ends."""
        messages: dict[int, Turns] = {}
        for slot, found in open_turns.replies(patient=patient):
            if isinstance(found, Turns):
                messages[slot] = found
            else:
                self.ended.append(found)
                self.free.append(slot)
        for entries in message_entries(self.plan, messages):
            self.engine.extend(entries)
        for slot, turns in messages.items():
            self.busy[slot] = turns.request, turns.number
            self.starts[slot] = self.stats.steps
            self.lengths[slot] = len(turns.request.prompt) + sum(map(len, turns.tokens))

    def start_loop(self) -> None:
        """Start the next device loop and return without waiting for its end."""
        asked = 0 if self.turns is None else len(self.turns.asked)
        waiting = asked or self.ready or self.waiting
        pause = asked + self.plan.refill_at(self._mean_length()) if waiting else self._free_to_shrink()
        reach = min(int(self.lengths.max()) + self.plan.steps, self.plan.cache_length)
        self.loop = self.engine.decode(
            pause,
            read=next(read for read in self.plan.read_buckets if read >= reach),
            top_k=self.top_k,
            top_p=self.top_p,
        )

    def _free_to_shrink(self) -> int:
        """Return how many slots must be free so that a loop ends, because fewer slots are then enough."""
        fewer = [slots for slots in self.plan.fewer_slots if slots < self.engine.slots]
        # With several parts this count is not enough: one part can have too many busy slots for its smaller
        # size while the others have few. Then loops run to their end, and `_shrink` looks at every part.
        return self.engine.slots - fewer[0] if fewer and self.plan.parts == 1 else self.plan.slots + 1

    def finish_loop(self) -> None:
        """Wait for the device loop and free the slots of the samples that it finished."""
        loop, before = self.loop.result(), self.latest
        *_, steps = left = loop.emitted.state
        self.latest = loop
        self.stats.loops += 1
        self.stats.steps += int(steps)
        self.stats.slot_steps += int(steps) * (len(left) - 1)
        self.stats.call_seconds += loop.returned - loop.called
        self.stats.host_seconds += loop.called - before.arrived if before else 0.0
        freed = np.flatnonzero(left[:-1] == 0)
        self.lengths += steps
        self.lengths[freed] = 0
        self.finished = [
            (slot, self.busy.pop(slot), start)
            for slot, start in zip(freed.tolist(), self.starts[freed].tolist())
            if slot in self.busy
        ]
        if self.turns is None:
            self.free += [slot for slot, _, _ in self.finished]
        else:
            self._end_turns(self.turns)

    def _end_turns(self, open_turns: OpenTurns) -> None:
        """Ask the environment about the turns that the last loop ended.

        The device waits for this. But the slots of environments that reply at once sample in the next loop.
        """
        assert self.latest is not None
        self.stats.tokens += self.recent.add(self.latest.emitted)
        for slot in list(self.busy) if open_turns.by_text else ():
            start = int(self.starts[slot])
            if open_turns.ends(self.recent.since(start, slot)[0]) is not None:
                # The device samples on in this slot, until the next turn or sample starts there.
                self.finished.append((slot, self.busy.pop(slot), start))
                self.lengths[slot] = 0
        for slot, sample, start in self.finished:
            response = open_turns.end_turn(slot, *sample, *self.recent.since(start, slot))
            if response is not None:
                self.ended.append(response)
                self.free.append(slot)

    def responses(self) -> Iterator[Response]:
        """Yield the responses that the last loop finished. Call it while the device runs the next loop."""
        if self.turns is None:
            self._collect()
        ended, self.ended = self.ended, []
        self.stats.responses += len(ended)
        yield from ended

    def _collect(self) -> None:
        """Add the tokens of the last loop to the responses; do nothing if this was done already."""
        if self.latest is None or self.latest is self.collected:
            return
        self.collected = self.latest
        self.stats.tokens += self.recent.add(self.latest.emitted)
        self.ended += [
            _response(sample, *self.recent.since(start, slot)) for slot, sample, start in self.finished
        ]

    def _mean_length(self) -> float:
        """Estimate the mean response length. Tokens of unfinished responses make it too high at first."""
        return self.stats.tokens / self.stats.responses if self.stats.responses else self.plan.max_length

    def _prefill(self) -> None:
        """Prefill the next batch of prompts and put their samples into `ready`."""
        bucket, requests = self.waiting.take()
        tokens = np.zeros((self.plan.prefill_rows(bucket), bucket), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.prompt)
            tokens[row, : lengths[row]] = request.prompt
        self.prompts = self.engine.run_prompts(tokens, lengths)
        self.stats.prompts += len(requests)
        self.top_k |= any(request.top_k > 0 for request in requests)
        self.top_p |= any(request.top_p < 1 for request in requests)
        self.ready = [(request, number) for request in requests for number in range(len(request.seeds))]
        self.entries = entries(requests)


def entries(requests: Sequence[Request]) -> np.ndarray:
    """Return one row for `Engine.insert` per sample of the requests. Column 0, the slot, is not set yet."""
    counts = [len(request.seeds) for request in requests]
    seeds = np.concatenate([np.asarray(request.seeds, np.uint64) for request in requests])

    def each(values: Sequence[Any], dtype: Any) -> np.ndarray:
        return np.repeat(np.array(values, dtype), counts, axis=0)

    rows = Rows(
        lengths=each([len(request.prompt) - 1 for request in requests], np.int32),
        tokens=each([request.prompt[-1] for request in requests], np.int32),
        left=np.concatenate([request.limits for request in requests]).astype(np.int32),
        keys=seeds.astype(">u8").view(">u4").astype(np.uint32).reshape(-1, 2),  # as in `jax.random.key(seed)`
        temperature=each([request.temperature for request in requests], np.float32),
        top_k=each([request.top_k for request in requests], np.int32),
        top_p=each([request.top_p for request in requests], np.float32),
        stops=each(
            [(*request.stop, *[-1] * (MAX_STOPS - len(request.stop))) for request in requests], np.int32
        ),
    )
    return pack_entries(np.zeros(len(seeds), np.int32), each(range(len(requests)), np.int32), rows)


def _response(sample: _Sample, tokens: np.ndarray, logprobs: np.ndarray) -> Response:
    request, number = sample
    stopped = int(tokens[-1]) in request.stop
    return Response(
        index=request.index,
        sample=number if request.numbers is None else request.numbers[number],
        prompt_tokens=np.asarray(request.prompt),
        tokens=tokens,
        logprobs=logprobs,
        finish_reason="stop" if stopped else "length",
    )
