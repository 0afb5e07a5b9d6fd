#!/usr/bin/env python3
"""Measure memory and time of LoRA against full tuning on one card, beside what the plan says.

Prints one JSON line per measurement. Each runs in its own process, because a process cannot reset its peak:

    python scripts/bench_lora.py                          # Qwen2.5-1.5B: full tuning and LoRA
    python scripts/bench_lora.py --model Qwen/Qwen2.5-Math-7B --only lora-bfloat16 lora-int8 --card-gb 24
    python scripts/bench_lora.py --small                  # a tiny shape, to check that the script runs

The weights are random. The order is that of a run: the sampler opens (with LoRA, it merges the weights),
generates and closes; then come updates. `sampling_peak_gb` is the peak until the sampler closes, `peak_gb`
that of everything. `planned_gb` has the plan's figures. `--card-gb` limits a larger card to the memory of a
smaller one.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

SMALL = [
    "sampling.max_prompt_tokens=16",
    "sampling.max_response_tokens=16",
    "batch.length_multiple=32",
]
KINDS = {
    "full": ["lora.rank=0"],
    "lora-bfloat16": ["lora.rank=16", "lora.base_dtype=bfloat16"],
    "lora-int8": ["lora.rank=16", "lora.base_dtype=int8"],
}
USABLE = 0.96  # of a card's memory, as the plan assumes


def main() -> int:
    """Measure every kind in a process of its own; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B", help="a known shape")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--card-gb", type=float, help="use only so much of the card's memory")
    parser.add_argument("--micro-batch", type=int, default=4096, help="tokens in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches in an update")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--plan", action="store_true", help="also compile the plan for this card (minutes)")
    parser.add_argument("--small", action="store_true", help="a tiny shape")
    parser.add_argument("--here", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        measure(arguments.here, arguments)
        return 0
    environment = dict(os.environ)
    if arguments.card_gb:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        total = float(subprocess.check_output(query, text=True).split()[0]) * 2**20
        share = USABLE * arguments.card_gb * 1e9 / total
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.4f}"
    codes = [
        subprocess.run([sys.executable, *sys.argv, "--here", kind], env=environment).returncode
        for kind in arguments.only
    ]
    return 1 if any(codes) else 0


def measure(kind: str, arguments: argparse.Namespace) -> None:
    """Open a sampler, generate, close it, take two updates, and print what that took."""
    import jax

    from mugrpo_jax import models, training
    from mugrpo_jax.setup.run_setup import RunSetup

    config, shape = settings(kind, arguments)
    mesh = models.make_mesh(devices=jax.devices()[:1])
    record: dict[str, Any] = {"kind": kind, "model": arguments.model, "device": jax.devices()[0].device_kind}
    record["planned_gb"] = planned(config, shape, mesh, arguments)
    base, params = weights(config, shape, mesh)
    setup = RunSetup(config, models.Decoder(shape), models.CharTokenizer("ab"), mesh, base=base)
    optimizer = training.make_optimizer(config.optimizer, 1, setup.trainable)
    state = training.make_state(params, optimizer, mesh, setup.trainable, track_drift=config.track_drift)
    del params
    try:
        record |= sample(setup, state)
        record |= updates(setup, state, optimizer, arguments)
    except Exception as error:  # out of memory is a result
        record["error"] = str(error).splitlines()[0][:300]
    print(json.dumps(record | {"peak_gb": peak()}), flush=True)


def settings(kind: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the config and the shape of the model."""
    from mugrpo_jax import config as configs
    from mugrpo_jax.models.io.known_shapes import KNOWN_SHAPES

    keys = ["model.scan_layers=true", "sampling.max_prompt_tokens=512", "sampling.max_response_tokens=1536"]
    keys += [f"batch.tokens_per_micro_batch={arguments.micro_batch}", f"sampling.slots={arguments.slots}"]
    keys += [f"model.remat={arguments.remat}", f"model.source={arguments.model}", *KINDS[kind]]
    shape = KNOWN_SHAPES[arguments.model]
    if arguments.small:
        keys += [*SMALL, "model.compute_dtype=float32", "model.sampling_dtype=float32"]
        shape = dataclasses.replace(
            shape, vocab_size=512, hidden_size=64, num_layers=2, head_dim=16, num_heads=4, num_kv_heads=2
        )
        shape = dataclasses.replace(shape, intermediate_size=128)
    return configs.load(None, keys), shape


def planned(config: Any, shape: Any, mesh: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the plan's bytes without compiling, and with `--plan` the peaks of the compiled programs."""
    from mugrpo_jax.planning import plan_run
    from mugrpo_jax.planning.chips import Topology, chip_of
    from mugrpo_jax.planning.program_list import programs_of
    from mugrpo_jax.planning.programs import compile_program

    run = plan_run(config, shape, mesh)
    found = {"state": run.memory.state, "frozen": run.memory.base, "generating": run.memory.generating}
    found["updating_without_activations"] = run.memory.updating
    if arguments.plan:
        device = mesh.devices.flat[0]
        topology = Topology("here", chip_of(device), [device])
        for program in programs_of(run):
            if program.kind in ("update", "optimizer", "decode", "prefill", "cast"):
                found[program.name] = compile_program(program, topology).peak
    return {name: round(size / 1e9, 2) for name, size in found.items()}


def weights(config: Any, shape: Any, mesh: Any) -> tuple[Any, Any]:
    """Return the frozen weights (None for full tuning) and the weights to train, drawn one by one."""
    import jax
    import jax.numpy as jnp

    from mugrpo_jax import models
    from mugrpo_jax.models.frozen_weights import quantised
    from mugrpo_jax.setup.lora import BaseWeights, loaded_dtype, trainable_model

    decoder = models.Decoder(shape)
    dtype = loaded_dtype(config) if config.lora.rank else jnp.float32
    declared = decoder.weights()
    shardings = models.param_sharding(mesh, decoder, models.abstract_params(decoder))

    def draw(weight: Any, sharding: Any) -> Any:
        make = jax.jit(
            lambda key: weight.mean + weight.std * jax.random.normal(key, weight.shape, dtype),
            out_shardings=sharding,
        )
        return jax.block_until_ready(make(jax.random.key(0)).astype(dtype))

    params = jax.tree.map(draw, declared, shardings)
    if not config.lora.rank:
        return None, params
    if config.lora.base_dtype == "int8":
        quantised(params)
    model = trainable_model(config, decoder)
    assert isinstance(model, models.LoraDecoder)
    return BaseWeights(model, params, mesh), models.random_params(model, mesh=mesh)


def sample(setup: Any, state: Any) -> dict[str, Any]:
    """Fill every slot once."""
    import numpy as np

    from mugrpo_jax.sampling import SamplingSettings, make_request

    longest = setup.config.sampling.max_response_tokens
    requests = [
        make_request(
            np.ones(setup.config.sampling.max_prompt_tokens, np.int32),
            SamplingSettings(samples=1, max_tokens=longest),
            index,
            stop=(),
        )
        for index in range(setup.config.sampling.slots)
    ]
    started = time.perf_counter()
    with setup.sampler(state.params) as sampler:
        opened = time.perf_counter()
        sampler.warmup()
        ready = time.perf_counter()
        tokens = sum(len(response.tokens) for response in sampler.run(requests))
        ended = time.perf_counter()
    return {
        "open_sampler_s": round(opened - started, 2),
        "generated_tokens_per_s": round(tokens / (ended - ready)),
        "sampling_peak_gb": peak(),
    }


def updates(setup: Any, state: Any, optimizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Take two updates and time the second."""
    import jax
    import numpy as np

    from mugrpo_jax import training
    from mugrpo_jax.rollouts import Update

    config, rng = setup.config, np.random.default_rng(0)
    length = config.sampling.max_prompt_tokens + config.sampling.max_response_tokens
    shape = (max(config.batch.tokens_per_micro_batch // length, 1), length)
    micro = {
        "tokens": rng.integers(0, 512, shape).astype(np.int32),
        "mask": np.ones(shape, np.float32),
        "behavior_logp": np.full(shape, -6.0, np.float32),
        "advantages": rng.choice([-1.0, 1.0], shape[0]).astype(np.float32),
    }
    update = Update((micro,) * arguments.micro_batches, float(np.prod(shape)) * arguments.micro_batches, {})
    step = training.UpdateStep(
        setup.trainable,
        config.objective.build(),
        optimizer,
        setup.mesh,
        setup.step_options(),
        state=state,
    )
    started = time.perf_counter()
    frozen = jax.block_until_ready(setup.frozen())
    back = time.perf_counter() - started
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        state, metrics = step(state, update, frozen)
        jax.block_until_ready((state, metrics))
        seconds = time.perf_counter() - started
    tokens = np.prod(shape) * arguments.micro_batches
    return {"base_back_s": round(back, 2), "update_tokens_per_s": round(float(tokens / seconds))}


def peak() -> float | None:
    """Return the largest number of gigabytes in use on the device so far; None on a CPU."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    return round(stats["peak_bytes_in_use"] / 1e9, 2) if "peak_bytes_in_use" in stats else None


if __name__ == "__main__":
    sys.exit(main())
