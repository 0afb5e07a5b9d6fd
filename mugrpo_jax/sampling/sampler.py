"""The host's side: a queue of prompts, a fixed number of slots, and device loops with refills between them.

    plan = plan_sampler(config, max_prompt=512, max_length=1536)
    print(plan)
    with Sampler(graphdef, params, plan) as sampler:
        for response in sampler.run(requests):
            ...

Between two device loops the host looks at one small array (which slots became free), starts waiting samples
in them and launches the next loop. Only then does it put finished responses together and hand them out, so
whatever the caller does with them happens while the device decodes. A thread of its own calls the loop,
because a runtime may keep the caller until a loop of unknown length has ended.
"""

import collections
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import jax
import numpy as np

from mugrpo_jax.models import Cache
from mugrpo_jax.sampling.plan import SamplerPlan
from mugrpo_jax.sampling.programs import (
    Emitted,
    Rows,
    decode,
    free_rows,
    free_slots,
    insert,
    mesh_of,
    pack_entries,
    params_sharding,
    run_prompts,
    sampling_params,
)
from mugrpo_jax.sampling.requests import MAX_STOPS, Request, Response


@dataclasses.dataclass
class Stats:
    """Counts of a run so far.

    `host_seconds` is the time between a loop's result and the call of the next loop, when the device waits
    for the host; `call_seconds` is the time inside those calls, as long as the loops where the runtime keeps
    the caller.
    """

    slots: int
    steps: int = 0
    tokens: int = 0
    responses: int = 0
    loops: int = 0
    prompts: int = 0
    host_seconds: float = 0.0
    call_seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of the slots' decode steps that sampled a token."""
        return self.tokens / max(1, self.steps * self.slots)


_Sample = tuple[Request, int]  # and its number in the request


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What a device loop emitted, its `state` already on the host, and when that was."""

    emitted: Emitted
    called: float
    returned: float
    arrived: float


class Sampler:
    """Weights and slots on the device, ready to serve requests.

    Args:
      graphdef: the decoder's static definition.
      params: its parameters, of any dtype, stacked as in training; they are copied, not kept.
      plan: from `plan_sampler`.
      programs: what an earlier sampler of the same plan compiled; new programs are added to it.

    Attributes:
      plan: as given.
      stats: counts of the latest run.
    """

    def __init__(
        self, graphdef: Any, params: Any, plan: SamplerPlan, programs: dict[Any, Any] | None = None
    ) -> None:
        if plan.mesh is not None and plan.mesh.is_multi_process:
            raise ValueError(
                "sampler: the mesh spans several hosts; give each host a mesh of its own devices"
            )
        self.plan = plan
        self.stats = Stats(plan.slots)
        self._graphdef = graphdef
        self._programs = {} if programs is None else programs
        with mesh_of(plan):
            weights = sampling_params(params, dtype=plan.dtype, fuse=plan.fuse)
            self._params = jax.device_put(weights, params_sharding(plan, weights)) if plan.mesh else weights
            self._slots = free_slots(plan)
        self._row_shardings = jax.tree.map(lambda x: x.sharding, self._slots.rows)
        self._thread = ThreadPoolExecutor(1, "decode")
        self._under_way: Future[_Loop] | None = None
        self._left_behind = False  # whether slots may still hold samples of a run that was given up

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of weights and cache; their memory is free once no run is under way."""
        self._settle()
        self._thread.shutdown()
        self._params = self._slots = None

    def warmup(self, *, top_k: bool = False, top_p: bool = False) -> None:
        """Compile every shape of the plan, by running each program on free slots, which changes nothing.

        With `top_k` or `top_p` also the programs for runs that truncate so, beside those that do not.
        """
        for bucket in self.plan.prompt_buckets:
            rows = self.plan.prefill_rows(bucket)
            prompts = self._run_prompts(np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32))
            self._insert(prompts, np.zeros((0, 0), np.int32), [])
        kinds = itertools.product({False, top_k}, {False, top_p})
        for read, (by_k, by_p) in itertools.product(self.plan.read_buckets, kinds):
            self._decode(self.plan.refill_at, read=read, top_k=by_k, top_p=by_p).result()

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Sample every request; responses come in the order in which they finish.

        A sequence is checked as a whole before anything starts. Of an iterator, requests are taken, and
        checked, when slots can be expected for them.
        """
        if self._params is None:
            raise ValueError("sampler: it is closed")
        checked: Iterable[Request] = map(functools.partial(_checked, self.plan), requests)
        return self._serve(iter(list(checked) if isinstance(requests, Sequence) else checked))

    def _serve(self, requests: Iterator[Request]) -> Iterator[Response]:
        self.stats = Stats(self.plan.slots)
        self._settle()
        if self._left_behind:
            rows = jax.device_put(free_rows(self.plan.slots), self._row_shardings)
            self._slots = dataclasses.replace(self._slots, rows=rows)
        self._left_behind = True
        run = _Run(self, requests)
        while run.fill():
            run.launch()
            yield from run.collect()
            run.wait()
        self._left_behind = False
        yield from run.collect()

    def _settle(self) -> None:
        """Wait for a loop that is still under way, as after a run that was given up: it holds the slots."""
        if self._under_way is not None:
            wait([self._under_way])  # whether it failed is told to the run that launched it
            self._under_way = None

    def _program(self, name: tuple[Any, ...], lower: Callable[[], Any]) -> Any:
        """A program compiled once and then called directly, which spares looking at its static arguments."""
        if name not in self._programs:
            with mesh_of(self.plan):
                self._programs[name] = lower().compile()
        return self._programs[name]

    def _run_prompts(self, tokens: np.ndarray, lengths: np.ndarray) -> Cache:
        program = self._program(
            ("run_prompts", tokens.shape),
            lambda: run_prompts.lower(self._graphdef, self._params, tokens, lengths),
        )
        return program(self._params, tokens, lengths)

    def _insert(self, prompts: Cache, samples: np.ndarray, slots: Sequence[int]) -> None:
        """Start samples, rows of what `_entries` returns, in free slots."""
        self._settle()
        # Padded to the program's width with slots beyond the last.
        width, count = self.plan.inserts, len(slots)
        entries = _free_entries(width)
        entries[:, 0] = np.arange(self.plan.slots, self.plan.slots + width)
        if count:
            entries[:count] = samples
            entries[:count, 0] = slots
        program = self._program(
            ("insert", prompts.keys[0].shape), lambda: insert.lower(self._slots, prompts, entries)
        )
        self._slots = program(self._slots, prompts, entries)

    def _decode(self, refill_at: int, *, read: int, top_k: bool, top_p: bool) -> Future[_Loop]:
        self._settle()
        limit = np.int32(refill_at)
        # Compiled here: settings that the caller made for its own thread count.
        program = self._program(
            ("decode", read, top_k, top_p),
            lambda: decode.lower(
                self._graphdef,
                self._params,
                self._slots,
                limit,
                steps=self.plan.steps,
                read=read,
                top_k=top_k,
                top_p=top_p,
            ),
        )
        calling = threading.Event()
        self._under_way = self._thread.submit(self._loop, program, limit, calling)
        calling.wait()
        return self._under_way

    def _loop(self, program: Any, limit: np.int32, calling: threading.Event) -> _Loop:
        """One device loop, in the thread of the loops."""
        # From here on the interpreter is ours until the call lets go of it: the launch comes first, and the
        # caller's thread goes on with what can wait.
        calling.set()
        called = time.perf_counter()
        self._slots, emitted = program(self._params, self._slots, limit)
        returned = time.perf_counter()
        for array in (emitted.state, emitted.tokens, emitted.logprobs):
            array.copy_to_host_async()
        emitted = dataclasses.replace(emitted, state=np.asarray(emitted.state))
        return _Loop(emitted, called, returned, time.perf_counter())


class _Run:
    """One pass over some requests: which sample sits in which slot, and what came out of the device."""

    def __init__(self, sampler: Sampler, requests: Iterator[Request]) -> None:
        self.sampler, self.plan, self.stats = sampler, sampler.plan, sampler.stats
        self.top_k = self.top_p = False  # whether any request so far truncates
        self.waiting = _Prompts(requests, self.plan)
        self.prompts: Any = None
        self.ready: list[_Sample] = []  # of these prompts, and what `insert` takes of them
        self.entries = np.zeros((0, 0), np.int32)
        self.free = list(range(self.plan.slots))
        self.busy: dict[int, _Sample] = {}
        self.starts = np.zeros(self.plan.slots, np.int64)  # the step that first sampled what is in a slot
        self.lengths = np.zeros(self.plan.slots, np.int64)  # of busy slots, counting the token to be sampled
        self.finished: list[tuple[int, _Sample, int]] = []  # slot, sample and its first step
        self.history = _History(self.plan)
        self.latest: _Loop | None = None

    def fill(self) -> bool:
        """Start waiting samples in the free slots; whether any slot is busy then."""
        while self.free and (self.ready or self.waiting):
            if not self.ready:
                self._prefill()
            count = min(len(self.free), len(self.ready), self.plan.inserts)
            samples, self.ready = self.ready[:count], self.ready[count:]
            entries, self.entries = self.entries[:count], self.entries[count:]
            slots, self.free = self.free[:count], self.free[count:]
            self.sampler._insert(self.prompts, entries, slots)
            self.busy.update(zip(slots, samples))
            self.starts[slots] = self.stats.steps
            self.lengths[slots] = [len(request.prompt) for request, _ in samples]
        return bool(self.busy)

    def launch(self) -> None:
        """Send the next device loop on its way."""
        reach = min(int(self.lengths.max()) + self.plan.steps, self.plan.cache_length)
        self.loop = self.sampler._decode(
            self.plan.refill_at if self.ready or self.waiting else self.plan.slots + 1,
            read=next(read for read in self.plan.read_buckets if read >= reach),
            top_k=self.top_k,
            top_p=self.top_p,
        )

    def wait(self) -> None:
        """Wait for the device loop and take the samples it finished out of their slots."""
        loop, before = self.loop.result(), self.latest
        *_, steps = left = loop.emitted.state
        self.latest = loop
        self.stats.loops += 1
        self.stats.steps += int(steps)
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
        self.free += [slot for slot, _, _ in self.finished]

    def collect(self) -> Iterator[Response]:
        """Put finished responses together; called while the device works on the next loop."""
        if self.latest is not None:
            self.stats.tokens += self.history.add(self.latest.emitted)
        for slot, sample, start in self.finished:
            self.stats.responses += 1
            yield _response(sample, *self.history.since(start, slot))

    def _prefill(self) -> None:
        """Run the next batch of prompts and make their samples ready to be inserted."""
        bucket, requests = self.waiting.take()
        tokens = np.zeros((self.plan.prefill_rows(bucket), bucket), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.prompt)
            tokens[row, : lengths[row]] = request.prompt
        self.prompts = self.sampler._run_prompts(tokens, lengths)
        self.stats.prompts += len(requests)
        self.top_k |= any(request.top_k > 0 for request in requests)
        self.top_p |= any(request.top_p < 1 for request in requests)
        self.ready = [(request, number) for request in requests for number in range(len(request.seeds))]
        self.entries = _entries(requests)


class _History:
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


class _Prompts:
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


def _entries(requests: Sequence[Request]) -> np.ndarray:
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


def _free_entries(count: int) -> np.ndarray:
    return pack_entries(np.zeros(count, np.int32), np.zeros(count, np.int32), free_rows(count))


def _response(sample: _Sample, tokens: np.ndarray, logprobs: np.ndarray) -> Response:
    request, number = sample
    stopped = int(tokens[-1]) in request.stop
    return Response(
        index=request.index,
        sample=number,
        prompt_tokens=np.asarray(request.prompt),
        tokens=tokens,
        logprobs=logprobs,
        finish_reason="stop" if stopped else "length",
    )


def _checked(plan: SamplerPlan, request: Request) -> Request:
    """The request, or why the plan has no room for it."""
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
    return request
