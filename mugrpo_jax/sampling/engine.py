"""What the sampler has on the device: weights, slots, and the compiled programs that work on them."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from mugrpo_jax.models import Cache, Decoder
from mugrpo_jax.sampling.programs import (
    Emitted,
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
from mugrpo_jax.sampling.sampler_plan import SamplerPlan


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """The output of one device loop, with `emitted.state` already on the host, and its times.

    Attributes:
      emitted: tokens, log-probs and the state of the slots.
      called, returned: when the call of the program began and ended.
      arrived: when the state was on the host.
    """

    emitted: Emitted
    called: float
    returned: float
    arrived: float


class Engine:
    """Weights and slots of a sampler.

    Args:
      model: the decoder.
      params: its parameters, of any dtype, stacked as in training; they are copied, not kept.
      plan: from `plan_sampler`.
      programs: programs compiled earlier for the same plan; new ones are added.
    """

    def __init__(self, model: Decoder, params: Any, plan: SamplerPlan, programs: dict[Any, Any]) -> None:
        self.plan = plan
        self._model = model
        self._programs = programs
        with mesh_of(plan):
            weights = sampling_params(params, dtype=plan.dtype, fuse=plan.fuse)
            self._params = jax.device_put(weights, params_sharding(plan)) if plan.mesh else weights
            self._slots = free_slots(plan)
        self._row_shardings = jax.tree.map(lambda x: x.sharding, self._slots.rows)
        self._thread = ThreadPoolExecutor(1, "decode")
        self._under_way: Future[LoopResult] | None = None

    def close(self) -> None:
        """Wait for the loop that is running, then release weights and cache."""
        self.settle()
        self._thread.shutdown()
        self._params = self._slots = None

    def warmup(self, *, top_k: bool, top_p: bool) -> None:
        """Compile every shape of the plan by running each program on free slots, which stay free."""
        for bucket in self.plan.prompt_buckets:
            rows = self.plan.prefill_rows(bucket)
            prompts = self.run_prompts(np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32))
            self.insert(prompts, np.zeros((0, 0), np.int32), [])
        kinds = itertools.product({False, top_k}, {False, top_p})
        for read, (by_k, by_p) in itertools.product(self.plan.read_buckets, kinds):
            self.decode(self.plan.slots, read=read, top_k=by_k, top_p=by_p).result()
        jax.block_until_ready(self._slots)

    def settle(self) -> None:
        """Wait for a loop that is still running, for example after an abandoned run: it owns the slots."""
        if self._under_way is not None:
            wait([self._under_way])  # an error in it is raised in the run that started it
            self._under_way = None

    def clear(self) -> None:
        """Free all slots."""
        self.settle()
        rows = jax.device_put(free_rows(self.plan.slots), self._row_shardings)
        self._slots = dataclasses.replace(self._slots, rows=rows)

    def run_prompts(self, tokens: np.ndarray, lengths: np.ndarray) -> Cache:
        """The cache entries of padded prompts `[rows, bucket]`."""
        program = self._program(
            ("run_prompts", tokens.shape),
            lambda: run_prompts.lower(self._model, self._params, tokens, lengths),
        )
        return program(self._params, tokens, lengths)

    def insert(self, prompts: Cache, samples: np.ndarray, slots: Sequence[int]) -> None:
        """Start samples in free slots; `samples` are rows of `scheduler.entries`."""
        self.settle()
        # Pad to the program's width with slot numbers beyond the last, which the program drops.
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

    def decode(self, refill_at: int, *, read: int, top_k: bool, top_p: bool) -> Future[LoopResult]:
        """Start a device loop."""
        self.settle()
        limit = np.int32(refill_at)
        # Compile in the caller's thread, where the caller's JAX settings for its thread are in force.
        program = self._program(
            ("decode", read, top_k, top_p),
            lambda: decode.lower(
                self._model,
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

    def _loop(self, program: Any, limit: np.int32, calling: threading.Event) -> LoopResult:
        """One device loop, in the thread of the loops."""
        # This thread holds the GIL until dispatch releases it, so the loop starts before the caller's thread
        # continues with less urgent work.
        calling.set()
        called = time.perf_counter()
        self._slots, emitted = program(self._params, self._slots, limit)
        returned = time.perf_counter()
        for array in (emitted.state, emitted.tokens, emitted.logprobs):
            array.copy_to_host_async()
        emitted = dataclasses.replace(emitted, state=np.asarray(emitted.state))
        return LoopResult(emitted, called, returned, time.perf_counter())

    def _program(self, name: tuple[Any, ...], lower: Callable[[], Any]) -> Any:
        """A program that is compiled once and then called directly, without `jit` checking its arguments."""
        if name not in self._programs:
            with mesh_of(self.plan):
                self._programs[name] = lower().compile()
        return self._programs[name]


def _free_entries(count: int) -> np.ndarray:
    return pack_entries(np.zeros(count, np.int32), np.zeros(count, np.int32), free_rows(count))
