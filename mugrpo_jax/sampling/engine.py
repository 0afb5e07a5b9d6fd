"""Keep the sampler's weights and slots on the device, and call the compiled programs that use them."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.models import Cache, Decoder, cache_entries
from mugrpo_jax.sampling.programs import (
    Emitted,
    Slots,
    decode,
    extend,
    free_rows,
    free_slots,
    insert,
    keep_rows,
    mesh_of,
    no_entries,
    no_messages,
    run_prompts,
)
from mugrpo_jax.sampling.sampler_plan import SamplerPlan
from mugrpo_jax.sampling.sampler_weights import params_sharding, sampling_params


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """The output of one device loop, and three times in seconds.

    The call of the program began at `called` and ended at `returned`. At `arrived`, the host had its copy of
    `emitted.state`; the other arrays in `emitted` may still be on the way to the host.
    """

    emitted: Emitted
    called: float
    returned: float
    arrived: float


class Engine:
    """Keep the weights and slots of a `Sampler`, which has the same arguments, and call its programs.

    One call of the `decode` program is a device loop. It runs in a separate thread, one loop at a time.
    """

    def __init__(
        self, model: Decoder, params: Any, plan: SamplerPlan, programs: CompiledPrograms, *, prepared: bool
    ) -> None:
        self.plan = plan
        self._model = model
        self._programs = programs
        with mesh_of(plan):
            self._params = params
            if not prepared:
                weights = sampling_params(params, **plan.layout)
                self._params = jax.device_put(weights, params_sharding(plan)) if plan.mesh else weights
            self._slots = free_slots(plan)
        self.slots = plan.slots  # how many there are now; `shrink` makes it smaller
        self._row_shardings = jax.tree.map(lambda x: x.sharding, self._slots.rows)
        self._thread = ThreadPoolExecutor(1, "decode")
        self._under_way: Future[LoopResult] | None = None

    def close(self) -> None:
        """Wait for the running device loop, then free the memory of the weights and the KV cache."""
        self.settle()
        self._thread.shutdown()
        self._params = self._slots = None

    def warmup(self, *, top_k: bool, top_p: bool) -> None:
        """Compile all programs of the plan, see `Sampler.warmup`."""
        for bucket in self.plan.prompt_buckets:
            rows = self.plan.prefill_rows(bucket)
            prompts = self.run_prompts(np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32))
            self.insert(prompts, np.zeros((0, 0), np.int32), [])
        if self.plan.turns:
            self.extend([])
        kinds = list(itertools.product({False, top_k}, {False, top_p}))
        for read, (by_k, by_p) in itertools.product(self.plan.read_buckets, kinds):
            self.decode(self.plan.slots, read=read, top_k=by_k, top_p=by_p).result()
        for slots in self.plan.fewer_slots:
            self.shrink(np.full(slots, -1))
            for read, (by_k, by_p) in itertools.product(self.plan.read_buckets, kinds):
                self.decode(slots, read=read, top_k=by_k, top_p=by_p).result()
        self.clear()
        jax.block_until_ready(self._slots)

    def settle(self) -> None:
        """Wait until no device loop is running, because a running loop still changes the slots."""
        if self._under_way is not None:
            wait([self._under_way])  # `SlotScheduler.finish_loop` raises the error of a failed loop
            self._under_way = None

    def clear(self) -> None:
        """Mark all slots as free, so that their samples are discarded; undo `shrink`."""
        self.settle()
        if self._slots is None or self.slots != self.plan.slots:  # None: `shrink` was interrupted
            self._slots = None  # first free the memory of the fewer slots
            with mesh_of(self.plan):
                self._slots = free_slots(self.plan)
            self.slots = self.plan.slots
            return
        rows = jax.device_put(free_rows(self.plan.slots), self._row_shardings)
        self._slots = dataclasses.replace(self._slots, rows=rows)

    def run_prompts(self, tokens: np.ndarray, lengths: np.ndarray) -> Cache:
        """Return the KV cache of right-padded prompts `tokens` `[rows, bucket]` with `lengths` `[rows]`."""
        program = self._program(
            prefill_name(*tokens.shape),
            lambda: run_prompts.lower(
                self._model, self._params, tokens, lengths, eight_bits=self.plan.eight_bit_cache
            ),
        )
        return program(self._params, tokens, lengths)

    def insert(self, prompts: Cache, samples: np.ndarray, slots: Sequence[int]) -> None:
        """Start samples (rows from `slot_scheduler.entries`) in free slots; `prompts` is their KV cache."""
        self.settle()
        # The program has a fixed number of entries, and ignores those that are not replaced here.
        entries = no_entries(self.plan)
        if count := len(slots):
            entries[:count] = samples
            entries[:count, 0] = slots
        shape = len(prompts.lengths), cache_entries.length(prompts.keys[0])
        program = self._program(insert_name(*shape), lambda: insert.lower(self._slots, prompts, entries))
        self._slots = program(self._slots, prompts, entries)

    def extend(self, messages: Sequence[np.ndarray]) -> None:
        """Append messages (entries from `pack_message`) to slots that wait for them."""
        self.settle()
        entries = no_messages(self.plan)
        if messages:
            entries[: len(messages)] = messages
        program = self._program(
            extend_name(), lambda: extend.lower(self._model, self._params, self._slots, entries)
        )
        self._slots = program(self._params, self._slots, entries)

    def shrink(self, kept: np.ndarray) -> None:
        """Continue with fewer slots: slot i becomes what slot `kept[i]` was, or free where `kept[i]` is -1.

        With a mesh, the slots are divided into `plan.parts` parts, and every slot must stay in its part.
        """
        self.settle()
        size = self.slots // self.plan.parts
        rows = np.where(kept < 0, 0, kept % size).astype(np.int32).reshape(self.plan.parts, -1)

        def keep(old: np.ndarray, free: np.ndarray) -> np.ndarray:
            return np.where((kept < 0).reshape(-1, *[1] * (old.ndim - 1)), free, old[kept])

        state = jax.tree.map(keep, jax.device_get(self._slots.rows), free_rows(len(kept)))
        cache, self._slots = [*self._slots.keys, *self._slots.values], None
        program = self._program(keep_name(self.slots, len(kept)), lambda: keep_rows.lower(cache[0], rows))
        for i in range(len(cache)):
            cache[i] = program(cache[i], rows)  # one at a time; its old memory is free before the next
        half = len(cache) // 2
        self._slots = Slots(
            tuple(cache[:half]), tuple(cache[half:]), jax.device_put(state, self._row_shardings)
        )
        self.slots = len(kept)

    def decode(self, refill_at: int, *, read: int, top_k: bool, top_p: bool) -> Future[LoopResult]:
        """Start a device loop in its thread; the arguments are those of `programs.decode`."""
        self.settle()
        limit = np.int32(refill_at)
        # Compile in the caller's thread, where the caller's JAX settings for its thread are in force.
        program = self._program(
            decode_name(self.slots, read, top_k=top_k, top_p=top_p),
            lambda: decode.lower(
                self._model,
                self._params,
                self._slots,
                limit,
                steps=self.plan.steps,
                read=read,
                top_k=top_k,
                top_p=top_p,
                keep=self.plan.turns,
            ),
        )
        calling = threading.Event()
        self._under_way = self._thread.submit(self._loop, program, limit, calling)
        calling.wait()
        return self._under_way

    def _loop(self, program: Any, limit: np.int32, calling: threading.Event) -> LoopResult:
        """Call the decode program and wait for the state of the slots."""
        # This thread holds the GIL until the program is dispatched. So the loop starts before the thread that
        # called `decode` continues with less urgent work.
        calling.set()
        called = time.perf_counter()
        self._slots, emitted = program(self._params, self._slots, limit)
        returned = time.perf_counter()
        for array in (emitted.state, emitted.tokens, emitted.logprobs):
            array.copy_to_host_async()
        emitted = dataclasses.replace(emitted, state=np.asarray(emitted.state))
        return LoopResult(emitted, called, returned, time.perf_counter())

    def _program(self, name: tuple[Any, ...], lower: Callable[[], Any]) -> Any:
        """Return a compiled program, which is faster to call than `jit`; compile it if there is none yet."""

        def compiled() -> Any:
            with mesh_of(self.plan):
                return lower().compile()

        return self._programs.get(name, compiled)


def prefill_name(rows: int, bucket: int) -> tuple[Any, ...]:
    """Return the name of the program that prefills so many prompts of this padded length."""
    return "prefill", rows, bucket


def insert_name(rows: int, bucket: int) -> tuple[Any, ...]:
    """Return the name of the program that copies the KV cache of these prompts into slots."""
    return "insert", rows, bucket


def extend_name() -> tuple[Any, ...]:
    """Return the name of the program that appends messages to slots."""
    return ("extend",)


def keep_name(slots: int, fewer: int) -> tuple[Any, ...]:
    """Return the name of the program that keeps so many of the slots in the keys or values of a layer."""
    return "keep", slots, fewer


def decode_name(slots: int, read: int, *, top_k: bool = False, top_p: bool = False) -> tuple[Any, ...]:
    """Return the name of the decode program with these compile-time constants."""
    return "decode", slots, read, top_k, top_p
