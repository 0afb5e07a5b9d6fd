"""Where the time of a decode step goes, by differences; `bench_generate.py --ablate` calls this."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from generate_cases import Case, limit_seconds, say

from mugrpo_jax.models import create
from mugrpo_jax.sampling import draw, plan_sampler, transform_logits
from mugrpo_jax.sampling.programs import abstract_slots, decode, free_rows
from mugrpo_jax.sampling.sampler_weights import sampling_params


class Steps:
    """A decode loop over slots in the middle of long responses, to be timed."""

    def __init__(self, case: Case, slots: int, entries: int) -> None:
        prompt = entries // 2
        self.plan = plan_sampler(
            case.config, max_prompt=prompt, max_length=entries, slots=slots, steps=32, **case.dtypes
        )
        self.model, params = create(case.config, seed=0, dtype=case.dtype)
        self.params = sampling_params(params, **self.plan.layout)
        shapes = abstract_slots(self.plan)
        noise = jax.random.normal(jax.random.key(0), shapes.keys[0].shape, case.dtype)
        self.slots = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        copies = tuple(noise.copy() for _ in shapes.keys), tuple(noise.copy() for _ in shapes.values)
        self.slots = dataclasses.replace(self.slots, keys=copies[0], values=copies[1])

    def ms(
        self,
        filled: int,
        *,
        left: int = 1 << 20,
        whole: bool = True,
        top_k: bool = False,
        top_p: bool = False,
    ) -> float:
        """Milliseconds per step with `filled` cache entries per slot, the median of seven loops after one.

        A whole loop has 32 steps. A loop that must refill at once has 4. A loop without anything to sample
        has none; it measures the launch.
        """
        count = self.plan.slots
        times = []
        for _ in range(8):
            rows = free_rows(count)
            rows.lengths[:], rows.left[:], rows.keys[:, 1] = filled, left, np.arange(count)
            self.slots = jax.block_until_ready(dataclasses.replace(self.slots, rows=jax.device_put(rows)))
            start = time.perf_counter()
            self.slots, emitted = decode(
                self.model,
                self.params,
                self.slots,
                np.int32(count + 1 if whole else 0),
                steps=self.plan.steps,
                read=self.plan.read_buckets[-1],
                top_k=top_k,
                top_p=top_p,
                keep=self.plan.turns,
            )
            steps = int(emitted.state[-1])
            times.append(1e3 * (time.perf_counter() - start) / max(1, steps))
        return float(np.median(times[1:]))


def calls_ms(program: Any, *inputs: Any, calls: int = 20) -> float:
    """Milliseconds per call of a jitted program, launched back to back."""
    jax.block_until_ready(program(*inputs))
    start = time.perf_counter()
    jax.block_until_ready([program(*inputs) for _ in range(calls)][-1])
    return 1e3 * (time.perf_counter() - start) / calls


def ablate(case: Case, slots: int) -> None:
    """Where the time of a step goes: some parts alone, and the step without a part."""
    filled = case.prompt + case.response // 2
    part = functools.partial(say, what="ablate", model=case.name, slots=slots)
    steps = Steps(case, slots, case.prompt + case.response)
    full = steps.ms(filled)
    limit = 1e3 * limit_seconds(case, slots, filled)
    part(part="whole step", ms=full, limit_ms=limit, share_of_limit=limit / full)
    part(part="reading the filled cache", ms=full - steps.ms(1))
    part(part="loops of 4 steps instead of 32, more a step", ms=steps.ms(filled, whole=False) - full)
    part(part="a loop of no step", ms=steps.ms(filled, left=0))
    part(part="a loop of one step", ms=steps.ms(filled, left=1))
    part(part="top-p, more a step", ms=steps.ms(filled, top_p=True) - full)
    part(part="top-k, more a step", ms=steps.ms(filled, top_k=True) - full)
    del steps
    short = min(128, case.prompt + case.response // 4)
    part(part="all that depends on the cache", ms=full - Steps(case, slots, short).ms(1))
    entries = case.prompt + case.response
    few_words = dataclasses.replace(case.config, vocab_size=128)
    one_layer = dataclasses.replace(case.config, num_layers=1)
    for name, config in (("head and draw", few_words), ("all layers but one", one_layer)):
        less = dataclasses.replace(case, config=config)
        part(part=name, ms=full - Steps(less, slots, entries).ms(filled))
    key = jax.random.key(1)
    hidden = jax.random.normal(key, (slots, case.config.hidden_size), case.dtype)
    head = jax.random.normal(key, (case.config.vocab_size, case.config.hidden_size), case.dtype)
    project = jax.jit(lambda h, w: jnp.einsum("bd,vd->bv", h, w, preferred_element_type=jnp.float32))
    part(part="head alone", ms=calls_ms(project, hidden, head))
    z = project(hidden, head)
    keys = jax.random.split(key, slots)
    temperature, greedy = jnp.ones(slots), jnp.zeros(slots, bool)
    sample = jax.jit(lambda keys, z, t, greedy: draw(keys, transform_logits(z, t), greedy))
    part(part="draw alone", ms=calls_ms(sample, keys, z, temperature, greedy))
