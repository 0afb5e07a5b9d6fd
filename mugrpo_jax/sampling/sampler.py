"""The sampler: requests in, responses out, over a fixed number of slots that are refilled when they are free.

    plan = plan_sampler(config, max_prompt=512, max_length=1536)
    print(plan)
    with Sampler(model, params, plan) as sampler:
        for response in sampler.run(requests):
            ...

Between two device loops the host reads one small array (which slots became free), starts waiting samples in
these slots and starts the next loop. Only then does it put the finished responses together and yield them, so
the caller handles them while the device decodes. A separate thread calls the loop, because some runtimes
block the caller until a loop of unknown length has ended.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mugrpo_jax.models import Decoder
from mugrpo_jax.sampling.engine import Engine
from mugrpo_jax.sampling.requests import Request, Response
from mugrpo_jax.sampling.sampler_plan import SamplerPlan
from mugrpo_jax.sampling.slot_scheduler import SamplerStats, SlotScheduler


class Sampler:
    """Weights and slots on the device, ready to serve requests.

    Args:
      model: the decoder.
      params: its parameters, of any dtype, stacked as in training; they are copied, not kept.
      plan: from `plan_sampler`.
      programs: programs that an earlier sampler of the same plan compiled; new ones are added.

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
        self.stats = SamplerStats(plan.slots)
        self._engine: Engine | None = Engine(model, params, plan, {} if programs is None else programs)
        self._left_behind = False  # whether slots may still hold samples of an abandoned run

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release weights and cache."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def warmup(self, *, top_k: bool = False, top_p: bool = False) -> None:
        """Compile every shape of the plan by running each program on free slots, which stay free.

        With `top_k` or `top_p`, the programs that truncate are compiled as well.
        """
        self._open().warmup(top_k=top_k, top_p=top_p)

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Sample every request; responses come in the order in which they finish.

        A sequence is checked as a whole before sampling starts. From an iterator, requests are taken and
        checked shortly before slots become free for them.
        """
        self._open()
        checked: Iterable[Request] = map(functools.partial(_checked, self.plan), requests)
        return self._serve(iter(list(checked) if isinstance(requests, Sequence) else checked))

    def _open(self) -> Engine:
        if self._engine is None:
            raise ValueError("sampler: it is closed")
        return self._engine

    def _serve(self, requests: Iterator[Request]) -> Iterator[Response]:
        engine = self._open()
        self.stats = SamplerStats(self.plan.slots)
        if self._left_behind:
            engine.clear()
        self._left_behind = True
        run = SlotScheduler(engine, self.stats, requests)
        while run.fill():
            run.start_loop()
            yield from run.responses()
            self._open()  # the caller may have closed the sampler meanwhile
            run.finish_loop()
        self._left_behind = False
        yield from run.responses()


def _checked(plan: SamplerPlan, request: Request) -> Request:
    """The request, or an error that says why it does not fit the plan."""
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
