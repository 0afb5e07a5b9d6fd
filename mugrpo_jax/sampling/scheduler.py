"""The host's books: which requests wait, and what the slots sampled lately."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mugrpo_jax.sampling.plan import SamplerPlan
from mugrpo_jax.sampling.programs import Emitted, Rows, pack_entries
from mugrpo_jax.sampling.requests import MAX_STOPS, Request


class History:
    """What the slots sampled lately, one row a slot and one column a step, for responses to be cut out of."""

    def __init__(self, plan: SamplerPlan) -> None:
        self.kept = plan.max_length + plan.steps  # no response that is still wanted began earlier
        self.tokens = np.empty((plan.slots, 2 * self.kept), np.int32)
        self.logprobs = np.empty((plan.slots, 2 * self.kept), np.float32)
        self.first = 0  # the step in column 0
        self.filled = 0
        self.ends: list[int] = []  # the column after each slot's last token

    def add(self, emitted: Emitted) -> int:
        """Append a loop; how many tokens it sampled."""
        steps = int(emitted.state[-1])
        if self.filled + steps > self.tokens.shape[1]:
            drop = self.filled - self.kept
            for array in (self.tokens, self.logprobs):
                array[:, : self.kept] = array[:, drop : self.filled]
            self.first, self.filled = self.first + drop, self.kept
        new = slice(self.filled, self.filled + steps)
        self.tokens[:, new] = np.asarray(emitted.tokens)[:steps].T
        self.logprobs[:, new] = np.asarray(emitted.logprobs)[:steps].T
        # A slot samples from the start of a loop until its response ends, and is free from there on.
        sampled = (self.tokens[:, new] >= 0).sum(1)
        self.ends = (self.filled + sampled).tolist()
        self.filled += steps
        return int(sampled.sum())

    def since(self, step: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs of the response that began with a step and ended in the latest loop."""
        columns = slice(step - self.first, self.ends[slot])
        return self.tokens[slot, columns].copy(), self.logprobs[slot, columns].copy()


class Prompts:
    """Waiting requests by prompt bucket; the oldest decides which bucket is next.

    Requests are read as they are needed. What is run together depends on their order alone, never on how
    soon they come.
    """

    def __init__(self, requests: Iterator[Request], plan: SamplerPlan) -> None:
        self.plan = plan
        self.buckets: dict[int, collections.deque[tuple[int, Request]]] = {}
        self.count = 0
        self._requests = enumerate(request for request in requests if len(request.seeds))

    def __bool__(self) -> bool:
        return self.count > 0 or self._read()

    def take(self) -> tuple[int, list[Request]]:
        """A bucket and as many of its requests as are run together."""
        bucket, queue = min(self.buckets.items(), key=lambda item: item[1][0][0])
        rows = self.plan.prefill_rows(bucket)
        while len(queue) < rows and self.count < self.plan.slots and self._read():
            pass
        requests = [queue.popleft()[1] for _ in range(min(len(queue), rows))]
        self.count -= len(requests)
        if not queue:
            del self.buckets[bucket]
        return bucket, requests

    def _read(self) -> bool:
        """Put one more request into its bucket; False when there is none."""
        for place, request in self._requests:
            bucket = next(size for size in self.plan.prompt_buckets if size >= len(request.prompt))
            self.buckets.setdefault(bucket, collections.deque()).append((place, request))
            self.count += 1
            return True
        return False


def entries(requests: Sequence[Request]) -> np.ndarray:
    """The samples of requests as `insert` takes them, without their slots."""
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
