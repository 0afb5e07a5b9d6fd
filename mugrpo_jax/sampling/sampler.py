"""The host's side: a queue of prompts, a fixed number of slots, and device loops with refills between them.

    plan = plan_sampler(config, max_prompt=512, max_length=1536)
    print(plan)
    with Sampler(model, params, plan) as sampler:
        for response in sampler.run(requests):
            ...

Between two device loops the host looks at one small array (which slots became free), starts waiting samples
in them and launches the next loop. Only then does it put finished responses together and hand them out, so
whatever the caller does with them happens while the device decodes. A thread of its own calls the loop,
because a runtime may keep the caller until a loop of unknown length has ended.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mugrpo_jax.models import Decoder
from mugrpo_jax.sampling.engine import Device, Loop
from mugrpo_jax.sampling.plan import SamplerPlan
from mugrpo_jax.sampling.requests import Request, Response
from mugrpo_jax.sampling.scheduler import History, Prompts, entries


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


class Sampler:
    """Weights and slots on the device, ready to serve requests.

    Args:
      model: the decoder.
      params: its parameters, of any dtype, stacked as in training; they are copied, not kept.
      plan: from `plan_sampler`.
      programs: what an earlier sampler of the same plan compiled; new programs are added to it.

    Attributes:
      plan: as given.
      stats: counts of the latest run.
    """

    def __init__(
        self, model: Decoder, params: Any, plan: SamplerPlan, programs: dict[Any, Any] | None = None
    ) -> None:
        if plan.mesh is not None and plan.mesh.is_multi_process:
            raise ValueError(
                "sampler: the mesh spans several hosts; give each host a mesh of its own devices"
            )
        self.plan = plan
        self.stats = Stats(plan.slots)
        self._device: Device | None = Device(model, params, plan, {} if programs is None else programs)
        self._left_behind = False  # whether slots may still hold samples of a run that was given up

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of weights and cache; their memory is free once no run is under way."""
        if self._device is not None:
            self._device.close()
            self._device = None

    def warmup(self, *, top_k: bool = False, top_p: bool = False) -> None:
        """Compile every shape of the plan, by running each program on free slots, which changes nothing.

        With `top_k` or `top_p` also the programs for runs that truncate so, beside those that do not.
        """
        self._open().warmup(top_k=top_k, top_p=top_p)

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Sample every request; responses come in the order in which they finish.

        A sequence is checked as a whole before anything starts. Of an iterator, requests are taken, and
        checked, when slots can be expected for them.
        """
        self._open()
        checked: Iterable[Request] = map(functools.partial(_checked, self.plan), requests)
        return self._serve(iter(list(checked) if isinstance(requests, Sequence) else checked))

    def _open(self) -> Device:
        if self._device is None:
            raise ValueError("sampler: it is closed")
        return self._device

    def _serve(self, requests: Iterator[Request]) -> Iterator[Response]:
        device = self._open()
        self.stats = Stats(self.plan.slots)
        if self._left_behind:
            device.clear()
        self._left_behind = True
        run = _Run(device, self.stats, requests)
        while run.fill():
            run.launch()
            yield from run.collect()
            self._open()  # the caller may have closed it in between
            run.wait()
        self._left_behind = False
        yield from run.collect()


class _Run:
    """One pass over some requests: which sample sits in which slot, and what came out of the device."""

    def __init__(self, device: Device, stats: Stats, requests: Iterator[Request]) -> None:
        self.device, self.plan, self.stats = device, device.plan, stats
        self.top_k = self.top_p = False  # whether any request so far truncates
        self.waiting = Prompts(requests, self.plan)
        self.prompts: Any = None
        self.ready: list[_Sample] = []  # of these prompts, and what `insert` takes of them
        self.entries = np.zeros((0, 0), np.int32)
        self.free = list(range(self.plan.slots))
        self.busy: dict[int, _Sample] = {}
        self.starts = np.zeros(self.plan.slots, np.int64)  # the step that first sampled what is in a slot
        self.lengths = np.zeros(self.plan.slots, np.int64)  # of busy slots, counting the token to be sampled
        self.finished: list[tuple[int, _Sample, int]] = []  # slot, sample and its first step
        self.history = History(self.plan)
        self.latest: Loop | None = None

    def fill(self) -> bool:
        """Start waiting samples in the free slots; whether any slot is busy then."""
        while self.free and (self.ready or self.waiting):
            if not self.ready:
                self._prefill()
            count = min(len(self.free), len(self.ready), self.plan.inserts)
            samples, self.ready = self.ready[:count], self.ready[count:]
            entries, self.entries = self.entries[:count], self.entries[count:]
            slots, self.free = self.free[:count], self.free[count:]
            self.device.insert(self.prompts, entries, slots)
            self.busy.update(zip(slots, samples))
            self.starts[slots] = self.stats.steps
            self.lengths[slots] = [len(request.prompt) for request, _ in samples]
        return bool(self.busy)

    def launch(self) -> None:
        """Send the next device loop on its way."""
        reach = min(int(self.lengths.max()) + self.plan.steps, self.plan.cache_length)
        self.loop = self.device.decode(
            self.plan.refill_at(self._mean_length()) if self.ready or self.waiting else self.plan.slots + 1,
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

    def _mean_length(self) -> float:
        """Of the responses so far; what has been sampled of others counts, so it begins too long."""
        return self.stats.tokens / self.stats.responses if self.stats.responses else self.plan.max_length

    def _prefill(self) -> None:
        """Run the next batch of prompts and make their samples ready to be inserted."""
        bucket, requests = self.waiting.take()
        tokens = np.zeros((self.plan.prefill_rows(bucket), bucket), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.prompt)
            tokens[row, : lengths[row]] = request.prompt
        self.prompts = self.device.run_prompts(tokens, lengths)
        self.stats.prompts += len(requests)
        self.top_k |= any(request.top_k > 0 for request in requests)
        self.top_p |= any(request.top_p < 1 for request in requests)
        self.ready = [(request, number) for request in requests for number in range(len(request.seeds))]
        self.entries = entries(requests)


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
