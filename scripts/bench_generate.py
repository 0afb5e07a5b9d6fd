#!/usr/bin/env python3
"""Measure the sampler: its rate, its share of the card's limit, and where the rest of the time goes.

Prints one JSON line after each measurement:

    python scripts/bench_generate.py                      # --fixed --tail --gap for both shapes
    python scripts/bench_generate.py --fixed --model smollm2-135m --slots 2048
    python scripts/bench_generate.py --refill             # short responses: how many free slots to wait for
    python scripts/bench_generate.py --ablate             # the parts of a decode step, by differences
    python scripts/bench_generate.py --profile            # which kernels take the time
    python scripts/bench_generate.py --torch              # transformers on torch, same shapes, same card
    python scripts/bench_generate.py --small --fixed --tail --gap --refill --ablate --profile  # a quick test

Weights are random. Each sample has its own length limit and no stop tokens, so its length is fixed. A rate is
generated tokens divided by wall time, from the first prompt to the last response, without compilation.

The limit of a decode step is the time to read weights and filled cache at 4.3 TB/s plus the time for its
FLOPs at 800 TFLOP/s. Both rates were measured on an H200.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import profiling
from shapes import QWEN_1_5B, SMOLLM2_135M

from mugrpo_jax.models import ModelConfig, cache_bytes, cast, create, token_logprobs
from mugrpo_jax.models.model_config import to_hf
from mugrpo_jax.sampling import (
    Request,
    Sampler,
    SamplerPlan,
    draw,
    plan_sampler,
    request_seeds,
    transform_logits,
)
from mugrpo_jax.sampling.programs import abstract_slots, decode, free_rows, sampling_params

BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 800e12


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the requests that are sampled from it."""

    name: str
    config: ModelConfig
    slots: tuple[int, ...]
    prompt: int = 128
    response: int = 512
    tail_samples: int = 16_384
    tail: tuple[int, int] = (32, 1024)
    group: int = 8
    short: tuple[tuple[int, ...], ...] = ()  # slots, prompt; mean, deviation and maximum of lengths
    dtype: Any = jnp.bfloat16


CASES = (
    Case("qwen2.5-1.5b", QWEN_1_5B, slots=(512,)),
    Case(
        "smollm2-135m",
        SMOLLM2_135M,
        slots=(512, 2048),
        short=((2048, 72, 42, 10, 72), (1024, 104, 110, 50, 368)),  # as on word problems and on GSM8K
    ),
)
SMALL = Case(
    "small",
    ModelConfig(
        vocab_size=512,
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
    ),
    slots=(8,),
    prompt=16,
    response=24,
    tail_samples=64,
    tail=(4, 48),
    short=((8, 16, 10, 4, 24),),
    dtype=jnp.float32,
)
PIECES = ("fixed", "tail", "gap", "refill", "ablate", "profile", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for piece in PIECES:
        parser.add_argument(f"--{piece}", action="store_true")
    parser.add_argument("--model", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--slots", type=int, help="default: those of the documentation")
    parser.add_argument("--small", action="store_true", help="a tiny shape in float32")
    parser.add_argument("--torch-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = [piece for piece in PIECES if getattr(arguments, piece)] or ["fixed", "tail", "gap"]
    cases = [SMALL] if arguments.small else [c for c in CASES if arguments.model in (None, c.name)]
    if arguments.slots:
        cases = [dataclasses.replace(case, slots=(arguments.slots,)) for case in cases]
    if arguments.torch_only:
        for case in cases:
            measure_torch(case)
        return
    if "torch" in chosen:
        # First and in a separate process, so that the two frameworks do not share the card's memory.
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--torch-only"], check=True)
        if chosen == ["torch"]:
            return
    say(device=jax.devices()[0].device_kind, jax=jax.__version__)
    for case in cases:
        model = create(case.config, seed=0, dtype=case.dtype)
        for slots in case.slots:
            rate = measure_fixed(case, model, slots) if {"fixed", "tail"} & {*chosen} else 0.0
            if "tail" in chosen:
                measure_tail(case, model, slots, rate)
        if "gap" in chosen:
            measure_gap(case, model)
        if "refill" in chosen:
            measure_refill(case, model)
        if "profile" in chosen:
            profile(case, model, case.slots[0])
        if "ablate" in chosen:
            ablate(case, case.slots[0])


def say(**facts: Any) -> None:
    rounded = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in facts.items()}
    print(json.dumps(rounded), flush=True)


def limit_seconds(config: ModelConfig, rows: float, filled: float, itemsize: int) -> float:
    """The shortest possible time of a decode step with this mean number of busy rows and cache entries."""
    weights = config.num_params - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    cache = cache_bytes(config, 1, 1) // 2 * itemsize * filled * rows
    attention = 4 * filled * config.num_heads * config.head_dim * config.num_layers
    flops = (2 * weights + attention) * rows
    return (weights * itemsize + cache) / BYTES_PER_SECOND + flops / FLOPS_PER_SECOND


def plan_for(case: Case, slots: int, response: int) -> SamplerPlan:
    return plan_sampler(
        case.config,
        max_prompt=case.prompt,
        max_length=case.prompt + response,
        slots=slots,
        dtype=case.dtype,
    )


def requests_for(case: Case, lengths: np.ndarray) -> list[Request]:
    """One group of samples per prompt; each sample has its own length."""
    rng = np.random.default_rng(1)
    return [
        Request(
            prompt=rng.integers(0, case.config.vocab_size, case.prompt),
            seeds=request_seeds(0, index, samples=len(limits)),
            max_tokens=limits.tolist(),
            index=index,
        )
        for index, limits in enumerate(lengths.reshape(-1, case.group))
    ]


def timed_run(case: Case, model: Any, plan: SamplerPlan, lengths: np.ndarray) -> tuple[dict[str, Any], float]:
    """The measured figures of a run, and its rate per occupied slot."""
    requests = requests_for(case, lengths)
    decoder, params = model
    with Sampler(decoder, params, plan) as sampler:
        start = time.perf_counter()
        sampler.warmup()
        compiled = time.perf_counter()
        tokens = sum(len(response.tokens) for response in sampler.run(requests))
        seconds = time.perf_counter() - compiled
    stats, rate = sampler.stats, tokens / seconds
    # A response of length n reads prompt + (n - 1) / 2 cache entries per step on average.
    filled = case.prompt + float((lengths * (lengths - 1) / 2).sum() / lengths.sum())
    itemsize = jnp.dtype(case.dtype).itemsize
    limit = plan.slots / limit_seconds(case.config, plan.slots, filled, itemsize)
    facts = {
        "model": case.name,
        "slots": plan.slots,
        "samples": int(lengths.size),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": rate,
        "occupancy": stats.occupancy,
        "step_ms": 1e3 * seconds / stats.steps,
        "steps": stats.steps,
        "loops": stats.loops,
        # Between two loops the device waits for the host. If a call takes about as long as a loop, the
        # runtime blocks the caller until the loop ends. Otherwise the call time is the cost of a launch.
        "host_ms_per_loop": 1e3 * stats.host_seconds / stats.loops,
        "call_ms_per_loop": 1e3 * stats.call_seconds / stats.loops,
        "loop_ms": 1e3 * seconds / stats.loops,
        "limit_tokens_per_s": limit,
        "share_of_limit": rate / limit,
        "compile_s": compiled - start,
    }
    return facts, rate / (plan.slots * stats.occupancy)


def measure_fixed(case: Case, model: Any, slots: int) -> float:
    """Two rounds of equal lengths; the rate per occupied slot."""
    lengths = np.full(2 * slots, case.response)
    facts, rate = timed_run(case, model, plan_for(case, slots, case.response), lengths)
    say(what="fixed", **facts)
    return rate


def measure_tail(case: Case, model: Any, slots: int, fixed_rate: float) -> None:
    """A stage with a few long responses among many short ones."""
    low, high = case.tail
    rng = np.random.default_rng(0)
    middle = np.log(low) + 0.55 * (np.log(high) - np.log(low))
    lengths = np.clip(np.exp(rng.normal(middle, 0.8, case.tail_samples)), low, high).astype(int)
    facts, rate = timed_run(case, model, plan_for(case, slots, high), lengths)
    say(what="tail", mean_length=float(lengths.mean()), **facts, rate_per_slot_of_fixed=rate / fixed_rate)


@dataclasses.dataclass(frozen=True)
class FixedRefill(SamplerPlan):
    """A plan whose loops end when a fixed share of the slots is free, for any response length."""

    share: int = 32

    def refill_at(self, length: float) -> int:
        """The same share for any length."""
        return max(1, self.slots // self.share)


def measure_refill(case: Case, model: Any) -> None:
    """Stages of short responses: wait for fixed shares of the slots, and for the share of the plan's rule."""
    rng = np.random.default_rng(0)
    for slots, prompt, mean, deviation, longest in case.short:
        lengths = np.clip(rng.normal(mean, deviation, 8 * slots), 4, longest).astype(int)
        short = dataclasses.replace(case, prompt=prompt)
        plan = plan_for(short, slots, longest)
        for share in (32, 16, 8, None):
            chosen = plan if share is None else FixedRefill(**vars(plan), share=share)
            facts, _ = timed_run(short, model, chosen, lengths)
            say(what="refill", share=share or "rule", mean_length=float(lengths.mean()), **facts)


def measure_gap(case: Case, model: Any) -> None:
    """Compare stored log-probs with those of the training forward pass with the same weights."""
    decoder, params = model
    slots = min(64, case.slots[0])
    plan = plan_for(case, slots, case.response)
    lengths = np.full(slots, case.response)
    with Sampler(decoder, params, plan) as sampler:
        responses = list(sampler.run(requests_for(case, lengths)))
    forward = jax.jit(token_logprobs, static_argnames="model")
    weights, gaps = cast(params, case.dtype), []
    for start in range(0, slots, 8):
        part = responses[start : start + 8]
        rows = np.stack([np.concatenate([r.prompt_tokens, r.tokens]) for r in part])
        taught = np.asarray(forward(decoder, weights, rows)[0])[:, case.prompt :]
        gaps.append(np.abs(taught - np.stack([r.logprobs for r in part])))
    gap = np.concatenate(gaps).ravel()
    say(
        what="gap",
        model=case.name,
        dtype=jnp.dtype(case.dtype).name,
        tokens=gap.size,
        mean=float(gap.mean()),
        q999=float(np.quantile(gap, 0.999)),
        max=float(gap.max()),
    )


class Steps:
    """A decode loop over slots in the middle of long responses, to be timed."""

    def __init__(self, case: Case, slots: int, entries: int) -> None:
        prompt = entries // 2
        self.plan = plan_sampler(
            case.config, max_prompt=prompt, max_length=entries, slots=slots, dtype=case.dtype, steps=32
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
    limit = 1e3 * limit_seconds(case.config, slots, filled, jnp.dtype(case.dtype).itemsize)
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


def profile(case: Case, model: Any, slots: int) -> None:
    """Device time by kernel over one short run, after a warm-up."""
    decoder, params = model
    requests = requests_for(case, np.full(slots, min(128, case.response)))
    with Sampler(decoder, params, plan_for(case, slots, case.response)) as sampler:
        list(sampler.run(requests))
        for row in profiling.summary(lambda: list(sampler.run(requests)), most=30):
            say(
                what="profile", model=case.name, slots=slots, **row, ms_a_step=row["ms"] / sampler.stats.steps
            )


def measure_torch(case: Case) -> None:
    """`generate` of transformers: the first number of slots, plain sampling, every row to full length."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        say(what="torch", model=case.name, skipped=str(error))
        return
    hf = to_hf(case.config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = AutoConfig.for_model(hf.pop("model_type"), **hf)
    with torch.device(device):  # draw random weights on the device; the CPU takes minutes for it
        model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, jnp.dtype(case.dtype).name))
    model = model.eval()
    rows = case.slots[0]
    prompts = torch.randint(0, case.config.vocab_size, (rows, case.prompt), device=device)

    def generate(tokens: int) -> float:
        start = time.perf_counter()
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        assert out.cpu().shape == (rows, case.prompt + tokens)
        return time.perf_counter() - start

    with torch.no_grad():
        generate(4)
        seconds = generate(case.response)
    rate = rows * case.response / seconds
    say(what="torch", model=case.name, slots=rows, seconds=seconds, tokens_per_s=rate, device=device)


if __name__ == "__main__":
    main()
