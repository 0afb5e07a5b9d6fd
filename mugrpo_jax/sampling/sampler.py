"""The host's side: a queue of prompts, a fixed number of slots, and device loops with refills between them.

    plan = plan_sampler(config, max_prompt=512, max_length=1536)
    print(plan)
    with Sampler(graphdef, params, plan) as sampler:
        for response in sampler.run(requests):
            ...

Between two device loops the host looks at one small array (which slots became free), starts waiting samples
in them and launches the next loop. Only then does it put finished responses together and hand them out, so
whatever the caller does with them happens while the device decodes.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax.models import Cache
from mugrpo_jax.sampling.plan import SamplerPlan
from mugrpo_jax.sampling.programs import (
    Emitted,
    Rows,
    abstract_slots,
    decode,
    free_rows,
    insert,
    mesh_of,
    params_sharding,
    run_prompts,
    sampling_params,
)
from mugrpo_jax.sampling.requests import Request, Response


@dataclasses.dataclass
class Stats:
    """Counts of a run so far."""

    slots: int
    steps: int = 0
    tokens: int = 0
    responses: int = 0
    loops: int = 0
    prompts: int = 0

    @property
    def occupancy(self) -> float:
        """Share of the slots' decode steps that sampled a token."""
        return self.tokens / max(1, self.steps * self.slots)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """One sample of a request, and the prefilled row it starts from."""

    request: Request
    number: int
    source: int


@dataclasses.dataclass(frozen=True)
class _Started:
    sample: _Sample
    slot: int
    loop: int  # the first device loop that decoded it


class Sampler:
    """Weights and slots on the device, ready to serve requests.

    Args:
      graphdef: the decoder's static definition.
      params: its parameters, of any dtype, stacked as in training; they are copied, not kept.
      plan: from `plan_sampler`.

    Attributes:
      plan: as given.
      stats: counts of the latest run.
    """

    def __init__(self, graphdef: Any, params: Any, plan: SamplerPlan) -> None:
        if plan.mesh is not None and plan.mesh.is_multi_process:
            raise ValueError(
                "sampler: the mesh spans several hosts; give each host a mesh of its own devices"
            )
        self.plan = plan
        self.stats = Stats(plan.slots)
        self._graphdef = graphdef
        weights = sampling_params(params, dtype=plan.dtype, fuse=plan.fuse)
        self._params = jax.device_put(weights, params_sharding(plan, weights)) if plan.mesh else weights
        shapes = abstract_slots(plan)
        self._slots = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
        self._row_shardings = jax.tree.map(lambda x: x.sharding, shapes.rows)

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of weights and cache; their memory is free once no run is under way."""
        self._params = self._slots = None

    def warmup(self, *, top_k: bool = False, top_p: bool = False) -> None:
        """Compile every shape of the plan, by running each program on free slots, which changes nothing."""
        self._clear()
        for bucket in self.plan.prompt_buckets:
            rows = self.plan.prefill_rows(bucket)
            prompts = self._run_prompts(np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32))
            self._insert(prompts, *_entries([], [], self.plan))
        for read in self.plan.read_buckets:
            self._decode(self.plan.refill_at, read=read, top_k=top_k, top_p=top_p)

    def run(self, requests: Sequence[Request]) -> Iterator[Response]:
        """Sample every request; responses come in the order in which they finish.

        All requests are checked before the first one starts.
        """
        if self._params is None:
            raise ValueError("sampler: it is closed")
        for request in requests:
            _check(request, self.plan)
        return self._serve(requests)

    def _serve(self, requests: Sequence[Request]) -> Iterator[Response]:
        self.stats = Stats(self.plan.slots)
        self._clear()
        run = _Run(self, requests)
        finished: list[_Started] = []
        while run.fill():
            run.launch()
            yield from run.collect(finished)
            finished = run.wait()
        yield from run.collect(finished)

    def _clear(self) -> None:
        rows = jax.device_put(free_rows(self.plan.slots), self._row_shardings)
        self._slots = dataclasses.replace(self._slots, rows=rows)

    def _run_prompts(self, tokens: np.ndarray, lengths: np.ndarray) -> Cache:
        with mesh_of(self.plan):
            return run_prompts(self._graphdef, self._params, tokens, lengths)

    def _insert(self, prompts: Cache, source: np.ndarray, target: np.ndarray, rows: Rows) -> None:
        with mesh_of(self.plan):
            self._slots = insert(self._slots, prompts, source, target, rows)

    def _decode(self, refill_at: int, *, read: int, top_k: bool, top_p: bool) -> Emitted:
        with mesh_of(self.plan):
            self._slots, emitted = decode(
                self._graphdef,
                self._params,
                self._slots,
                np.int32(refill_at),
                steps=self.plan.steps,
                read=read,
                top_k=top_k,
                top_p=top_p,
            )
        return emitted


class _Run:
    """One pass over a list of requests: which sample sits in which slot, and what came out of the device."""

    def __init__(self, sampler: Sampler, requests: Sequence[Request]) -> None:
        self.sampler, self.plan, self.stats = sampler, sampler.plan, sampler.stats
        self.top_k = any(request.top_k > 0 for request in requests)
        self.top_p = any(request.top_p < 1 for request in requests)
        self.waiting = _Prompts(requests, self.plan)
        self.prompts: Any = None
        self.ready: collections.deque[_Sample] = collections.deque()
        self.free = list(range(self.plan.slots))
        self.busy: dict[int, _Started] = {}
        self.lengths = np.zeros(self.plan.slots, np.int64)
        self.emitted: dict[int, Emitted] = {}

    def fill(self) -> bool:
        """Start waiting samples in the free slots; whether any slot is busy then."""
        while self.free and (self.ready or self.waiting):
            if not self.ready:
                self.ready.extend(self._prefill())
            count = min(len(self.free), len(self.ready), self.plan.inserts)
            samples = [self.ready.popleft() for _ in range(count)]
            slots, self.free = self.free[:count], self.free[count:]
            self.sampler._insert(self.prompts, *_entries(samples, slots, self.plan))
            for sample, slot in zip(samples, slots):
                self.busy[slot] = _Started(sample, slot, self.stats.loops)
                self.lengths[slot] = len(sample.request.prompt)
        return bool(self.busy)

    def launch(self) -> None:
        """Send the next device loop on its way."""
        longest = int(self.lengths[list(self.busy)].max())
        reach = min(longest + self.plan.steps, self.plan.cache_length)
        emitted = self.sampler._decode(
            self.plan.refill_at if self.ready or self.waiting else self.plan.slots + 1,
            read=next(read for read in self.plan.read_buckets if read >= reach),
            top_k=self.top_k,
            top_p=self.top_p,
        )
        for array in jax.tree.leaves(emitted):
            array.copy_to_host_async()
        self.emitted[self.stats.loops] = emitted

    def wait(self) -> list[_Started]:
        """Wait for the device loop and take the samples it finished out of their slots."""
        emitted = self.emitted[self.stats.loops]
        steps = int(emitted.steps)
        self.stats.loops += 1
        self.stats.steps += steps
        self.lengths += steps
        freed = np.flatnonzero(np.asarray(emitted.left) == 0).tolist()
        finished = [self.busy.pop(slot) for slot in freed if slot in self.busy]
        self.free += [done.slot for done in finished]
        return finished

    def collect(self, finished: list[_Started]) -> Iterator[Response]:
        """Put finished responses together; called while the device works on the next loop."""
        last = self.stats.loops
        if last:
            self.stats.tokens += int((np.asarray(self.emitted[last - 1].tokens) >= 0).sum())
        for done in finished:
            loops = [self.emitted[loop] for loop in range(done.loop, last)]
            tokens = np.concatenate([np.asarray(loop.tokens)[:, done.slot] for loop in loops])
            logprobs = np.concatenate([np.asarray(loop.logprobs)[:, done.slot] for loop in loops])
            self.stats.responses += 1
            yield _response(done.sample, tokens[tokens >= 0], logprobs[tokens >= 0])
        needed = min((started.loop for started in self.busy.values()), default=last)
        self.emitted = {loop: emitted for loop, emitted in self.emitted.items() if loop >= needed}

    def _prefill(self) -> list[_Sample]:
        """Run the next batch of prompts; their samples, ready to be inserted."""
        bucket, requests = self.waiting.take()
        tokens = np.zeros((self.plan.prefill_rows(bucket), bucket), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.prompt)
            tokens[row, : lengths[row]] = request.prompt
        self.prompts = self.sampler._run_prompts(tokens, lengths)
        self.stats.prompts += len(requests)
        return [
            _Sample(request, number, row)
            for row, request in enumerate(requests)
            for number in range(len(request.seeds))
        ]


class _Prompts:
    """Waiting requests by prompt bucket; the oldest decides which bucket is next."""

    def __init__(self, requests: Sequence[Request], plan: SamplerPlan) -> None:
        self.plan = plan
        self.buckets: dict[int, collections.deque[tuple[int, Request]]] = {}
        for place, request in enumerate(requests):
            if len(request.seeds):
                bucket = next(size for size in plan.prompt_buckets if size >= len(request.prompt))
                self.buckets.setdefault(bucket, collections.deque()).append((place, request))

    def __bool__(self) -> bool:
        return bool(self.buckets)

    def take(self) -> tuple[int, list[Request]]:
        """A bucket and as many of its requests as are run together."""
        bucket, queue = min(self.buckets.items(), key=lambda item: item[1][0][0])
        count = min(len(queue), self.plan.prefill_rows(bucket))
        requests = [queue.popleft()[1] for _ in range(count)]
        if not queue:
            del self.buckets[bucket]
        return bucket, requests


def _entries(
    samples: Sequence[_Sample], slots: Sequence[int], plan: SamplerPlan
) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Arguments of `insert`, padded to its fixed width with targets beyond the last slot."""
    source = np.zeros(plan.inserts, np.int32)
    target = np.arange(plan.slots, plan.slots + plan.inserts, dtype=np.int32)
    rows = free_rows(plan.inserts)
    for i, (sample, slot) in enumerate(zip(samples, slots)):
        request, seed = sample.request, int(sample.request.seeds[sample.number])
        source[i], target[i] = sample.source, slot
        rows.lengths[i] = len(request.prompt) - 1
        rows.tokens[i] = request.prompt[-1]
        rows.left[i] = request.limits[sample.number]
        rows.keys[i] = seed >> 32, seed & 0xFFFFFFFF  # `jax.random.key(seed)`, with all 64 bits of the seed
        rows.temperature[i], rows.top_k[i], rows.top_p[i] = request.temperature, request.top_k, request.top_p
        rows.stops[i, : len(request.stop)] = request.stop
    return source, target, rows


def _response(sample: _Sample, tokens: np.ndarray, logprobs: np.ndarray) -> Response:
    request = sample.request
    stopped = int(tokens[-1]) in request.stop
    return Response(
        index=request.index,
        sample=sample.number,
        prompt_tokens=np.asarray(request.prompt),
        tokens=tokens,
        logprobs=logprobs,
        finish_reason="stop" if stopped else "length",
    )


def _check(request: Request, plan: SamplerPlan) -> None:
    prompt, longest = np.asarray(request.prompt), max(request.limits, default=1)
    if len(prompt) > plan.max_prompt:
        raise ValueError(
            f"request {request.index}: prompt of {len(prompt)} tokens exceeds max_prompt={plan.max_prompt}"
        )
    if len(prompt) + longest > plan.max_length:
        raise ValueError(
            f"request {request.index}: prompt of {len(prompt)} + max_tokens of {longest} exceeds "
            f"max_length={plan.max_length}"
        )
    if prompt.min() < 0 or prompt.max() >= plan.config.vocab_size:
        raise ValueError(
            f"request {request.index}: a prompt token lies outside the vocabulary of {plan.config.vocab_size}"
        )
