"""Sample responses to requests in a fixed number of slots; a slot whose response has ended gets a new sample.

    plan = plan_sampler(config, max_prompt=512, max_length=1536)
    print(plan)
    with Sampler(model, params, plan) as sampler:
        for response in sampler.run(requests):
            ...

A device loop is one call of a compiled program that decodes several tokens in every slot. After a loop, the
host reads which slots became free, starts waiting samples in these slots and starts the next loop. Only then
does the host yield the finished responses, so that the caller handles them while the device decodes. The loop
is called in a separate thread, because some JAX backends block the calling thread until the loop has ended.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.models import Decoder
from mugrpo_jax.sampling.engine import Engine
from mugrpo_jax.sampling.requests import Request, Response
from mugrpo_jax.sampling.sampler_plan import SamplerPlan
from mugrpo_jax.sampling.slot_scheduler import SamplerStats, SlotScheduler
from mugrpo_jax.sampling.turns import Dialogue


class Sampler:
    """Sample responses to requests with the weights of a model. `stats` has the counts of the latest run.

    Args:
      model: the decoder.
      params: parameters of the model as in training, of any dtype. The sampler makes its own copy of them.
      plan: from `plan_sampler`.
      programs: the compiled programs; those that are missing are added. Samplers with the same plan can
        share them.
      prepared: whether `params` already come from `sampling_params`, with the shardings of the plan. The
        sampler then uses them without a copy.
      on_tokens: called whenever a device loop has ended, so that new tokens are sampled.
    """

    def __init__(
        self,
        model: Decoder,
        params: Any,
        plan: SamplerPlan,
        programs: CompiledPrograms | None = None,
        *,
        prepared: bool = False,
        on_tokens: Callable[[], None] | None = None,
    ) -> None:
        if plan.mesh is not None and plan.mesh.is_multi_process:
            raise ValueError(
                "sampler: the mesh spans several hosts; give each host a mesh of its own devices"
            )
        self.plan, self._on_tokens = plan, on_tokens
        self.stats = SamplerStats()
        programs = CompiledPrograms() if programs is None else programs
        self._engine: Engine | None = Engine(model, params, plan, programs, prepared=prepared)
        self._left_behind = False  # whether slots may still hold samples of a run that was not finished

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of the weights and the KV cache."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def warmup(self, *, top_k: bool = False, top_p: bool = False) -> None:
        """Compile all programs of the plan by calling each one while all slots are free.

        `top_k` and `top_p` say whether to compile also the programs for requests with top-k and top-p.
        """
        self._open().warmup(top_k=top_k, top_p=top_p)

    def run(self, requests: Iterable[Request], dialogue: Dialogue | None = None) -> Iterator[Response]:
        """Sample all requests and yield the responses in the order in which they finish.

        If `requests` is a sequence, all requests are checked before sampling starts. If it is an iterator,
        each request is read and checked shortly before its samples start. With a `dialogue`, an
        environment answers each turn of the model; the plan must have been made with `turns=True`.
        """
        self._open()
        if dialogue is not None and not self.plan.turns:
            raise ValueError("sampler: the plan is for responses of one turn; plan it with turns=True")
        checked: Iterable[Request] = map(functools.partial(_checked, self.plan), requests)
        return self._serve(iter(list(checked) if isinstance(requests, Sequence) else checked), dialogue)

    def _open(self) -> Engine:
        if self._engine is None:
            raise ValueError("sampler: it is closed")
        return self._engine

    def _serve(self, requests: Iterator[Request], dialogue: Dialogue | None) -> Iterator[Response]:
        engine = self._open()
        self.stats = SamplerStats()
        if self._left_behind or engine.slots != self.plan.slots:
            engine.clear()
        self._left_behind = True
        run = SlotScheduler(engine, self.stats, requests, dialogue)
        while run.fill():
            run.start_loop()
            yield from run.responses()
            self._open()  # the caller may have closed the sampler meanwhile
            run.finish_loop()
            if self._on_tokens is not None:
                self._on_tokens()
        # After a turn that ended by its text, the device may still sample in the slot.
        self._left_behind = dialogue is not None and dialogue.turn_end is not None
        yield from run.responses()


def _checked(plan: SamplerPlan, request: Request) -> Request:
    """Return the request, or raise an error that says why it does not fit the plan."""
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
