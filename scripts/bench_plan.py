"""Compare the planner's predictions with the device: peak memory, update time, decode step.

    python scripts/bench_plan.py                       # every case, each in its own process
    python scripts/bench_plan.py --case update-smollm2-135m
    python scripts/bench_plan.py --small               # tiny shapes, to check that the script runs

Prints one JSON line per case: `predicted` from the programs compiled for this device, `measured` from running
them with random weights, and `ratio` = measured / predicted. The peak is the allocator's `peak_bytes_in_use`
over the process; a CPU has none. Times are predicted with `planning.Assumptions` if the peaks of the
chip are known.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from mugrpo_jax import config as configs
from mugrpo_jax import models, objectives, training
from mugrpo_jax.models import ModelConfig
from mugrpo_jax.planning import Assumptions, Topology
from mugrpo_jax.planning.call_time import call_time
from mugrpo_jax.planning.chips import chip_of
from mugrpo_jax.planning.programs import (
    CompiledProgram,
    UpdatePrograms,
    compile_program,
    sampler_programs,
)
from mugrpo_jax.rollouts import Update
from mugrpo_jax.rollouts.micro_batches import Row, arrange
from mugrpo_jax.sampling import Request, Sampler, plan_sampler
from mugrpo_jax.setup.initial_model import run_model_shape
from mugrpo_jax.setup.sizes import step_options, update_buckets


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its settings. It is sampled from if it has slots, and updated otherwise.

    Attributes:
      source: a known shape, or `tiny`.
      prompt: tokens of every prompt.
      response: tokens of every response.
      tokens: tokens of a micro-batch; an update has two of them.
      slots: sequences decoded at once.
      remat: what the update recomputes.
      scan: whether layers are scanned.
    """

    source: str
    prompt: int
    response: int
    tokens: int = 0
    slots: int = 0
    remat: str = "dots"
    scan: bool = True


SMOLLM2, QWEN = "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-1.5B"
CASES = {
    "update-smollm2-135m": Case(SMOLLM2, 128, 512, tokens=40_960),
    "update-smollm2-135m-unrolled": Case(SMOLLM2, 128, 512, tokens=40_960, remat="none", scan=False),
    "update-qwen2.5-1.5b": Case(QWEN, 128, 896, tokens=16_384),
    "update-qwen2.5-1.5b-full": Case(QWEN, 128, 896, tokens=16_384, remat="full"),
    "decode-smollm2-135m": Case(SMOLLM2, 128, 512, slots=512),
    "decode-qwen2.5-1.5b": Case(QWEN, 128, 512, slots=512),
}
SMALL = {
    "update-tiny": Case("tiny", 16, 16, tokens=256),
    "decode-tiny": Case("tiny", 16, 16, slots=8),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=[*CASES, *SMALL], help="one case, in this process")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    arguments = parser.parse_args()
    if arguments.case:
        run(arguments.case, (CASES | SMALL)[arguments.case])
        return
    for name in SMALL if arguments.small else CASES:  # one process each: the peak is per process
        done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, text=True)
        error = {"case": name, "error": done.stderr.strip().splitlines()[-1:]}
        print(done.stdout.strip() if done.returncode == 0 else json.dumps(error), flush=True)


def run(name: str, case: Case) -> None:
    """Predict, measure, print."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:  # the measurement reuses the compiled programs
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        device = jax.devices()[0]
        topology = Topology("this device", chip_of(device), [device])
        part = decode if case.slots else update
        predicted, measured = part(case, topology)
    measured["peak"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    ratio = {key: measured[key] / predicted[key] for key in predicted if predicted[key] and measured.get(key)}
    record = {
        "case": name,
        "device": device.device_kind,
        "jax": jax.__version__,
        **{key: value for key, value in dataclasses.asdict(case).items() if value or key == "scan"},
        "predicted": predicted,
        "measured": measured,
        "ratio": {key: round(value, 3) for key, value in ratio.items()},
        "case_s": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(record), flush=True)


def update(case: Case, topology: Topology) -> tuple[dict[str, Any], dict[str, Any]]:
    """One whole update: two micro-batches and the optimizer step, with float32 master weights and moments."""
    overrides = [
        f"model.source={case.source}",
        f"model.remat={case.remat}",
        f"model.scan_layers={case.scan}",
        f"sampling.max_prompt_tokens={case.prompt}",
        f"sampling.max_response_tokens={case.response}",
        f"batch.tokens_per_micro_batch={case.tokens}",
        "track_drift=false",
    ]
    config = configs.load(None, overrides)
    model = run_model_shape(config)
    mesh = models.make_mesh(devices=topology.devices)
    programs = UpdatePrograms(config, model, mesh)
    compiled = [compile_program(program, topology) for program in programs.programs()]
    gradient, apply = (_seconds(program, topology) for program in compiled)
    both = None if gradient is None or apply is None else 2 * gradient.overlapped + apply.overlapped
    predicted = {"peak": max(program.peak for program in compiled), "update": both}

    decoder, params = models.create(model, mesh=mesh)
    optimizer = training.make_optimizer(config.optimizer, 1, decoder)
    state = training.make_state(params, optimizer, mesh, decoder, track_drift=False)
    step = training.UpdateStep(
        decoder, config.objective.build(), optimizer, mesh, step_options(config), state=state
    )
    batch = _update(case, config, model, mesh)
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - begun)
    return predicted, {"update": float(np.median(times[1:])), "first_update": times[0]}


def _update(case: Case, config: configs.RunConfig, model: ModelConfig, mesh: Any) -> Update:
    """Rows of full length, so that no position of a micro-batch is padding."""
    rng = np.random.default_rng(0)
    rows = [
        Row(
            prompt=rng.integers(0, model.vocab_size, case.prompt, dtype=np.int32),
            response=rng.integers(0, model.vocab_size, case.response, dtype=np.int32),
            behavior_logp=np.full(case.response, -np.log(model.vocab_size), np.float32),
            advantage=float(sign),
        )
        for sign in rng.choice([-1.0, 1.0], 2 * (case.tokens // (case.prompt + case.response)))
    ]
    micro_batches = arrange(rows, update_buckets(config, mesh))
    total = sum(objectives.denominator(b["mask"], "token_mean") for b in micro_batches)
    return Update(micro_batches, float(total), {})


def decode(case: Case, topology: Topology) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill every slot once and decode to the end."""
    model = run_model_shape(configs.load(None, [f"model.source={case.source}"]))
    config = configs.load(None)
    plan = plan_sampler(
        model, max_prompt=case.prompt, max_length=case.prompt + case.response, slots=case.slots
    )
    placed = dataclasses.replace(plan, mesh=models.make_mesh(devices=topology.devices))
    weights = jax.tree.leaves(models.abstract(model, dtype=plan.dtype)[1])
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in weights)  # the caller's own copy
    lowered = list(sampler_programs(placed, config, held))[:2]
    prefill, step = (compile_program(program, topology) for program in lowered)
    time_of_step = _seconds(step, topology)
    predicted: dict[str, Any] = {"peak": max(prefill.peak, step.peak), "step": None}
    if time_of_step is not None:
        empty = 1 - (case.prompt + case.response / 2) / plan.cache_length
        assert topology.chip.bandwidth is not None
        unread = empty * plan.cache_bytes / (topology.chip.bandwidth * Assumptions().memory)
        predicted["step"] = max(time_of_step.added - unread, time_of_step.compute)

    decoder, params = models.create(model, dtype=plan.dtype)
    rng = np.random.default_rng(0)
    requests = [
        Request(rng.integers(0, model.vocab_size, case.prompt, dtype=np.int32), [i], case.response, index=i)
        for i in range(case.slots)
    ]
    with Sampler(decoder, params, plan) as sampler:
        del params
        sampler.warmup()
        begun = time.perf_counter()
        tokens = sum(len(response.tokens) for response in sampler.run(requests))
        elapsed = time.perf_counter() - begun
        return predicted, {"step": elapsed / sampler.stats.steps, "tokens_per_second": tokens / elapsed}


def _seconds(program: CompiledProgram, topology: Topology) -> Any:
    return None if program.cost is None else call_time(program.cost, topology.chip, Assumptions())


if __name__ == "__main__":
    main()
