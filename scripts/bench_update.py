#!/usr/bin/env python3
"""Time the forward and backward pass of whole models, and of transformers on torch if it is installed.

Prints one JSON line per measurement:

    python scripts/bench_update.py                        # both shapes of the documentation, best settings
    python scripts/bench_update.py --sweep                # every remat, scan and micro-batch setting
    python scripts/bench_update.py --losses               # cost of entropy and proximal policy
    python scripts/bench_update.py --check                # cuDNN attention against XLA, at odd lengths
    python scripts/bench_update.py --statistics           # the cost of statistics of the whole update
    python scripts/bench_update.py --torch                # transformers on torch, same shapes
    python scripts/bench_update.py --small                # a tiny shape, to check that the script runs

MFU = 6 · parameters · tokens / time / peak, with the H200's dense bfloat16 peak of 990 TFLOP/s by default.
The pass is that of the trainer: bfloat16 weights cast once from float32 masters, log-probs in chunks, the
µ-GRPO objective, float32 gradients accumulated over micro-batches. It does not include the optimizer step.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import profiling
from shapes import QWEN_1_5B, SMOLLM2_135M

from mugrpo_jax import models, objectives, training
from mugrpo_jax.config import OptimizerSection
from mugrpo_jax.models import ModelConfig
from mugrpo_jax.models.model_config import to_hf
from mugrpo_jax.rollouts import Update

SMALL = dataclasses.replace(
    SMOLLM2_135M, vocab_size=512, hidden_size=144, num_layers=2, intermediate_size=128
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch, and the settings that were fastest in a measurement."""

    name: str
    model: ModelConfig
    rows: int
    length: int
    micro_rows: int
    remat: str
    scan: bool
    entropy: Literal["none", "value", "gradient"] = "none"
    proximal: Literal["none", "state", "policy"] = "none"

    @property
    def objective(self) -> objectives.ObjectiveConfig:
        """The objective that needs what the case measures."""
        knobs = {"entropy_coef": 0.01} if self.entropy == "gradient" else {}
        return objectives.ObjectiveConfig("mu_grpo" if self.proximal == "none" else "decoupled_ppo", knobs)


CASES = (
    Case("qwen2.5-1.5b", QWEN_1_5B, 64, 1024, 32, "none", False),
    Case("smollm2-135m", SMOLLM2_135M, 256, 640, 128, "none", False),
)
SMALL_CASE = Case("small", SMALL, 8, 64, 4, "dots", True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="one case by name")
    parser.add_argument("--sweep", action="store_true", help="try the settings one by one")
    parser.add_argument("--losses", action="store_true", help="measure what entropy and proximal policy cost")
    parser.add_argument("--check", action="store_true", help="cuDNN against XLA attention")
    parser.add_argument("--statistics", action="store_true", help="objectives with statistics, both ways")
    parser.add_argument("--torch", action="store_true", help="time transformers on torch")
    parser.add_argument("--profile", action="store_true", help="also print which kernels take the time")
    parser.add_argument("--small", action="store_true", help="a tiny shape in float32")
    parser.add_argument("--peak", type=float, default=990e12, help="peak FLOP/s for MFU")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    cases = [SMALL_CASE] if arguments.small else [c for c in CASES if arguments.only in (None, c.name)]
    dtype = "float32" if arguments.small else "bfloat16"
    say(device=jax.devices()[0].device_kind, jax=jax.__version__)
    if arguments.check:
        check_attention(dtype)
    for case in cases:
        for variant in sweep(case) if arguments.sweep else losses(case) if arguments.losses else [case]:
            try:
                measure(variant, dtype, arguments.repeats, arguments.peak, profile=arguments.profile)
            except Exception as error:  # in a sweep, out of memory is a result
                say(case=variant.name, **settings(variant), error=str(error).splitlines()[0][:200])
        if arguments.statistics:
            measure_statistics(case, dtype, arguments.repeats, arguments.peak)
        if arguments.torch:
            measure_torch(case, arguments.repeats, arguments.peak)


def sweep(case: Case) -> list[Case]:
    """The case with every useful combination of settings."""
    rows = [case.rows // part for part in (4, 2)]
    return [
        dataclasses.replace(case, micro_rows=count, remat=remat, scan=scan)
        for (remat, scan), count in itertools.product(
            [("full", True), ("dots", True), ("none", True), ("none", False)], rows
        )
    ]


def losses(case: Case) -> list[Case]:
    """The case without entropy, with the entropy as a metric, as a bonus, and with a proximal policy."""
    entropies: tuple[Literal["none", "value", "gradient"], ...] = ("none", "value", "gradient")
    variants = [dataclasses.replace(case, entropy=entropy) for entropy in entropies]
    return [*variants, dataclasses.replace(case, proximal="state")]


def settings(case: Case) -> dict[str, Any]:
    layers = "scan" if case.scan else "unroll"
    more = {"entropy": case.entropy, "proximal": case.proximal}
    return {"micro_rows": case.micro_rows, "remat": case.remat, "layers": layers, **more}


def measure_statistics(case: Case, dtype: str, repeats: int, peak: float) -> None:
    """Time objectives with batch statistics of each micro-batch, and with those of the whole update."""
    for name in objectives.STATISTICS:
        config = objectives.ObjectiveConfig(name)
        apart, pooled = (
            measure(case, dtype, repeats, peak, config=config, pooled=pooled) for pooled in (False, True)
        )
        say(case=case.name, objective=name, update_takes_times_micro_batch=round(apart / pooled, 3))


def measure(
    case: Case,
    dtype: str,
    repeats: int,
    peak: float,
    *,
    profile: bool = False,
    config: objectives.ObjectiveConfig | None = None,
    pooled: bool = False,
) -> float:
    """Time the gradient of one update; returns tokens per second. `pooled`: statistics of the update."""
    model, params = models.create(case.model)
    optimizer = training.make_optimizer(OptimizerSection(), 1, model)
    options = training.StepOptions(
        compute_dtype=dtype,
        remat=case.remat,
        scan=case.scan,
        entropy=case.entropy,
        proximal=case.proximal,
    )
    mesh = models.make_mesh(devices=jax.devices()[:1])
    state = training.abstract_state(optimizer, mesh, model, track_drift=False)
    config = config or case.objective
    statistics = config.statistics() if pooled else None
    step = training.UpdateStep(
        model, config.build(), optimizer, mesh, options, state=state, statistics=statistics
    )
    micro = [batch(case, i) for i in range(case.rows // case.micro_rows)]
    update = Update(tuple(micro), float(sum(b["mask"].sum() for b in micro)), {})

    @dataclasses.dataclass
    class Holder:
        params: Any
        proximal: Any

    holder: Any = Holder(params, models.cast(params, jnp.dtype(dtype)) if case.proximal == "state" else None)

    def run() -> None:
        jax.block_until_ready(step.gradient(holder, update)[0])  # it reads only these two fields

    started = time.perf_counter()
    run()
    compile_s = time.perf_counter() - started
    seconds = median_seconds(run, repeats)
    more = {"compile_s": round(compile_s, 1), "peak_gb": peak_memory(), "objective": config.name}
    if config.statistics() is not None:
        more["statistics"] = "update" if pooled else "micro_batch"
    report(case, "mugrpo_jax", seconds, peak, **settings(case), **more)
    if profile:
        for row in profiling.summary(run):
            say(case=case.name, **row)
    return case.rows * case.length / seconds


def batch(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Random full rows: every token is a response token, so that every token costs work."""
    rng = np.random.default_rng(seed)
    shape = (case.micro_rows, case.length)
    return {
        "tokens": rng.integers(0, case.model.vocab_size, shape).astype(np.int32),
        "mask": np.ones(shape, np.float32),
        "behavior_logp": np.full(shape, -np.log(case.model.vocab_size), np.float32),
        "advantages": rng.choice([-1.0, 1.0], case.micro_rows).astype(np.float32),
    }


def check_attention(dtype: str) -> None:
    """Compare cuDNN with XLA, forward and gradient, at odd lengths."""
    backend: Any = "xla" if jax.default_backend() == "cpu" else "cudnn"
    for length, heads, kv_heads, width in ((77, 9, 3, 64), (333, 12, 2, 128), (1000, 12, 2, 128)):
        keys = jax.random.split(jax.random.key(length), 4)
        q, k, v, weight = (
            jax.random.normal(key, (4, length, count, width), jnp.dtype(dtype))
            for key, count in zip(keys, (heads, kv_heads, kv_heads, heads))
        )

        def value(q: jax.Array, k: jax.Array, v: jax.Array, *, backend: Any, weight: jax.Array) -> jax.Array:
            out = models.attention(q, k, v, backend=backend)
            return (out.astype(jnp.float32) * weight).sum()

        def outputs(backend: Any, *arrays: jax.Array, weight: jax.Array = weight) -> Any:
            gradient = jax.grad(functools.partial(value, backend=backend, weight=weight), argnums=(0, 1, 2))
            return models.attention(*arrays, backend=backend), *gradient(*arrays)

        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        exact = jax.jit(functools.partial(outputs, "xla"))(*wide)
        names = ("forward", "dq", "dk", "dv")
        for kind in dict.fromkeys((backend, "xla")):
            found = jax.jit(functools.partial(outputs, kind))(q, k, v)
            errors = {n: relative(a, b) for n, a, b in zip(names, found, exact)}
            say(check="attention", backend=kind, length=length, heads=heads, relative_error_to_float32=errors)


def relative(found: jax.Array, exact: jax.Array) -> float:
    difference = jnp.linalg.norm((found.astype(jnp.float32) - exact).ravel())
    return round(float(difference / jnp.linalg.norm(exact.ravel())), 6)


def measure_torch(case: Case, repeats: int, peak: float) -> None:
    """The same shape with transformers on torch: bfloat16, SDPA attention, its own loss over full logits.

    Each kernel that torch has for SDPA is measured, with the larger micro-batch that fits of the two tried.
    """
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        say(case=case.name, framework="transformers on torch", error=f"not installed ({error})")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hf = to_hf(case.model)
    config = AutoConfig.for_model(hf.pop("model_type"), **hf)
    with torch.device(device):  # draw random weights on the device; the CPU takes minutes for it
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    kernels = (
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        if device == "cuda"
        else [SDPBackend.MATH]
    )
    for kernel, micro_rows in itertools.product(kernels, (case.rows // 16, case.rows // 32)):
        about = {"kernel": kernel.name.lower(), "micro_rows": max(micro_rows, 1), "device": device}
        tokens = torch.randint(0, case.model.vocab_size, (about["micro_rows"], case.length), device=device)

        def run(tokens: Any = tokens, kernel: Any = kernel) -> None:
            model.zero_grad(set_to_none=True)
            with sdpa_kernel(kernel):  # fails where torch has no such kernel for the shape
                for _ in range(case.rows // len(tokens)):
                    model(input_ids=tokens, labels=tokens).loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()

        try:
            run()
        except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
            say(case=case.name, framework="transformers on torch", **about, error=str(error)[:200])
            torch.cuda.empty_cache()
            continue
        report(case, "transformers on torch", median_seconds(run, repeats), peak, **about)


def median_seconds(run: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def report(case: Case, framework: str, seconds: float, peak: float, **more: Any) -> None:
    tokens = case.rows * case.length
    say(
        case=case.name,
        framework=framework,
        tokens=tokens,
        seconds=round(seconds, 4),
        tokens_per_second=round(tokens / seconds),
        mfu=round(6 * case.model.num_params * tokens / seconds / peak, 4),
        **more,
    )


def peak_memory() -> float | None:
    stats = jax.devices()[0].memory_stats() or {}
    return round(stats["peak_bytes_in_use"] / 1e9, 2) if "peak_bytes_in_use" in stats else None


def say(**record: Any) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
