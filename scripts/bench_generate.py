#!/usr/bin/env python3
"""Measure the sampler: its rate, its share of the card's limit, and where the rest of the time goes.

Prints one JSON line after each measurement:

    python scripts/bench_generate.py                      # --fixed --tail --gap for both shapes
    python scripts/bench_generate.py --fixed --model smollm2-135m --slots 2048
    python scripts/bench_generate.py --fixed --gap --matrices none int8   # matrices of the layers in 8 bits
    python scripts/bench_generate.py --fixed --gap --cache none int8      # the KV cache in 8 bits
    python scripts/bench_generate.py --refill             # short responses: how many free slots to wait for
    python scripts/bench_generate.py --ablate             # the parts of a decode step, by differences
    python scripts/bench_generate.py --profile            # which kernels take the time
    python scripts/bench_generate.py --torch              # transformers on torch, same shapes, same card
    python scripts/bench_generate.py --small --fixed --tail --gap --refill --ablate --profile  # a quick test

Weights are random. Each sample has its own length limit and no stop tokens, so its length is fixed. A rate is
generated tokens divided by wall time, from the first prompt to the last response, without compilation.

`gap` compares the stored log-probs with those of the training pass, whose weights are never in 8 bits. So
with `--matrices int8` and `--cache int8` it includes what the rounding changes.

The limit of a decode step is the time to read weights and filled cache at 4.3 TB/s plus the time for its
FLOPs at 800 TFLOP/s. Both rates were measured on an H200.
"""

import argparse
import dataclasses
import itertools
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import profiling
from decode_parts import ablate
from generate_cases import CASES, SMALL, Case, limit_seconds, plan_for, requests_for, say
from torch_generate import measure_torch

from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.models import cast, create, token_logprobs
from mugrpo_jax.models.eight_bits import EIGHT_BITS
from mugrpo_jax.sampling import Sampler, SamplerPlan
from mugrpo_jax.sampling.engine import decode_name

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
    parser.add_argument(
        "--matrices",
        nargs="+",
        choices=["none", *EIGHT_BITS],
        default=["none"],
        help="dtypes of the layers' matrices, one after the other; none: that of the other weights",
    )
    parser.add_argument(
        "--cache",
        nargs="+",
        choices=["none", "int8"],
        default=["none"],
        help="dtypes of the KV cache, one after the other; none: that of the weights",
    )
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
        for kinds in itertools.product(arguments.matrices, arguments.cache):
            matrices, cache = (None if kind == "none" else kind for kind in kinds)
            measure(dataclasses.replace(case, matrices=matrices, cache=cache), model, chosen)


def measure(case: Case, model: Any, chosen: list[str]) -> None:
    """Measure what was chosen with one model."""
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


def timed_run(case: Case, model: Any, plan: SamplerPlan, lengths: np.ndarray) -> tuple[dict[str, Any], float]:
    """The measured figures of a run, and its rate per occupied slot."""
    requests = requests_for(case, lengths)
    decoder, params = model
    before, programs = bytes_in_use(), CompiledPrograms()
    with Sampler(decoder, params, plan, programs) as sampler:
        start = time.perf_counter()
        sampler.warmup()
        compiled = time.perf_counter()
        used = bytes_in_use() - before
        tokens = sum(len(response.tokens) for response in sampler.run(requests))
        seconds = time.perf_counter() - compiled
    stats, rate = sampler.stats, tokens / seconds
    # A response of length n reads prompt + (n - 1) / 2 cache entries per step on average.
    filled = case.prompt + float((lengths * (lengths - 1) / 2).sum() / lengths.sum())
    limit = plan.slots / limit_seconds(case, plan.slots, filled)
    loop: Any = programs.get(decode_name(plan.slots, plan.read_buckets[-1]), _not_compiled)
    facts = {
        "model": case.name,
        "matrices": case.label,
        "cache": case.cache_label,
        "weights_gb": plan.weight_bytes / 1e9,
        "cache_gb": plan.cache_bytes / 1e9,
        "sampler_gb": used / 1e9,  # weights and cache, measured; 0 where the device does not say
        "decode_temporaries_gb": loop.memory_analysis().temp_size_in_bytes / 1e9,
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
    return facts, rate / (stats.occupancy * stats.slot_steps / stats.steps)


def _not_compiled() -> Any:
    raise RuntimeError("the warm-up should have compiled this program")


def bytes_in_use() -> int:
    """Bytes on the device, or 0 if it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


def measure_fixed(case: Case, model: Any, slots: int) -> float:
    """Two rounds of equal lengths; the rate per occupied slot."""
    lengths = np.full(2 * slots, case.response)
    facts, rate = timed_run(case, model, plan_for(case, slots, case.response), lengths)
    say(what="fixed", **facts)
    return rate


def measure_tail(case: Case, model: Any, slots: int, fixed_rate: float) -> None:
    """A stage with a few long responses among many short ones, without and with fewer slots at its end."""
    low, high = case.tail
    rng = np.random.default_rng(0)
    middle = np.log(low) + 0.55 * (np.log(high) - np.log(low))
    lengths = np.clip(np.exp(rng.normal(middle, 0.8, case.tail_samples)), low, high).astype(int)
    for shrink in (False, True):
        facts, rate = timed_run(case, model, plan_for(case, slots, high, shrink=shrink), lengths)
        share = {"rate_per_slot_of_fixed": rate / fixed_rate}
        say(what="tail", shrink=shrink, mean_length=float(lengths.mean()), **facts, **share)


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
        matrices=case.label,
        cache=case.cache_label,
        tokens=gap.size,
        mean=float(gap.mean()),
        q999=float(np.quantile(gap, 0.999)),
        max=float(gap.max()),
    )


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


if __name__ == "__main__":
    main()
