#!/usr/bin/env python3
"""Compare whole updates from a stage on disk with the bare forward and backward pass.

Prints one JSON line per measurement:

    python scripts/bench_run.py                           # SmolLM2-135M shape, three kinds of lengths
    python scripts/bench_run.py --lengths chains          # one of them: short, chains or long-tailed
    python scripts/bench_run.py --share-prompts           # also with each prompt computed once for its group
    python scripts/bench_run.py --profile                 # also the kernel times, of both
    python scripts/bench_run.py --sweep                   # every setting that `auto` chooses between
    python scripts/bench_run.py --small-updates --sweep   # updates of only 64 short responses
    python scripts/bench_run.py --small                   # a tiny shape, to check that the script runs

`bare` is the forward and backward pass of `bench_update.py`: full rows as long as the mean prompt with its
response, all in memory, no optimizer. `whole` is what a run does: Grain reads a stage of ragged responses
from disk and forms updates of 256 (or 64) responses in length buckets; the update computes the objective with
its diagnostics, float32 accumulation, AdamW and the drift metrics. Both rates count real tokens: each
response with its prompt, without padding.
`bare` computes logits for all tokens, `whole` only for response tokens, which the loss needs.
`parts` times the same updates in memory: as a run dispatches them, one at a time (the host waits for each),
their forward and backward passes alone, and the optimizer alone.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_update
import jax
import numpy as np
import profiling

from mugrpo_jax import models, objectives, training
from mugrpo_jax.config import OptimizerSection
from mugrpo_jax.loop.pending_metrics import PendingMetrics
from mugrpo_jax.rollouts import Group, Rollout, RolloutFolder, Update, UpdateStream, plan_buckets

GROUP = 8
WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and responses. The log of a response's length has a normal distribution, cut off."""

    prompt: int
    shortest: int
    median: int
    longest: int
    spread: float  # standard deviation of the log

    def draw(self, rng: np.random.Generator, number: int) -> np.ndarray:
        """So many lengths of responses."""
        lengths = np.exp(rng.normal(np.log(self.median), self.spread, number))
        return np.clip(lengths, self.shortest, self.longest).astype(int)

    def mean_row(self) -> int:
        """The mean number of tokens of a prompt with its response, a multiple of 8."""
        mean = self.prompt + self.draw(np.random.default_rng(0), 100_000).mean()
        return 8 * round(mean / 8)


LENGTHS = {
    "short": Lengths(64, 16, 42, 96, 0.25),  # word problems
    "chains": Lengths(112, 256, 304, 416, 0.06),  # chains of 24 sums
    "long-tailed": Lengths(128, 32, 180, 1024, 0.8),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model as in `bench_update`, and a stage of ragged responses to optimise it on."""

    bare: bench_update.Case
    dtype: str
    lengths: Lengths
    micro_tokens: int
    unit: int
    updates: int
    fit_rows: bool = True  # `Buckets.fit_rows`
    prompts: int = 32  # of an update

    def bare_rows(self) -> bench_update.Case:
        """The bare pass with rows of the mean length, and as many tokens at a time."""
        length = self.lengths.mean_row()
        micro_rows = max(1, self.micro_tokens // length)
        return dataclasses.replace(self.bare, length=length, micro_rows=micro_rows, rows=2 * micro_rows)


SMALL = Case(bench_update.SMALL_CASE, "float32", Lengths(8, 4, 20, 56, 0.8), 2048, 16, 4)


def small_updates(updates: int) -> Case:
    """Updates as in configs/experiments/smollm2_word_problems.yaml: 64 responses in one micro-batch."""
    lengths = dataclasses.replace(LENGTHS["short"], prompt=72, longest=72)
    case = dataclasses.replace(smollm2("short", updates), lengths=lengths, prompts=8)
    return dataclasses.replace(case, micro_tokens=3584, unit=224)


def smollm2(name: str, updates: int) -> Case:
    bare = dataclasses.replace(bench_update.CASES[1], remat="dots", scan=True)
    return Case(bare, "bfloat16", LENGTHS[name], 32_768, 128, updates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a tiny shape in float32")
    parser.add_argument("--share-prompts", action="store_true", help="measure batch.share_prompts as well")
    parser.add_argument("--profile", action="store_true", help="also print which kernels take the time")
    parser.add_argument("--sweep", action="store_true", help="measure several settings of the update")
    parser.add_argument("--small-updates", action="store_true", help="8 × 8 short responses, shared prompts")
    parser.add_argument("--updates", type=int, default=50, help="updates to time for each kind of lengths")
    parser.add_argument("--lengths", choices=LENGTHS, nargs="+", default=list(LENGTHS))
    arguments = parser.parse_args()
    if arguments.small and arguments.small_updates:
        parser.error("--small and --small-updates: choose one")
    cases = (
        {"small": SMALL}
        if arguments.small
        else {name: smollm2(name, arguments.updates) for name in arguments.lengths}
    )
    if arguments.small_updates:
        cases = {"word problems": small_updates(arguments.updates)}
    say(device=jax.devices()[0].device_kind, jax=jax.__version__)
    shares = (True,) if arguments.small_updates else (False, True) if arguments.share_prompts else (False,)
    for name, case in cases.items():
        bare = bench_update.measure(
            case.bare_rows(), case.dtype, repeats=5, peak=990e12, profile=arguments.profile
        )
        with tempfile.TemporaryDirectory() as folder:
            stage = make_stage(case, Path(folder))
            for variant in sweep(case) if arguments.sweep else [case]:
                for share in shares:
                    whole = measure_whole(variant, stage, share, profile=arguments.profile)
                    about = {"lengths": name, "share_prompts": share, **settings(variant)}
                    say(what="share", **about, whole_of_bare=round(whole / bare, 4))


def sweep(case: Case) -> list[Case]:
    """The case with other settings of remat, layers and micro-batches; its own come first."""

    def other(remat: str, scan: bool, **changes: Any) -> Case:
        return dataclasses.replace(
            case, bare=dataclasses.replace(case.bare, remat=remat, scan=scan), **changes
        )

    tokens = case.micro_tokens
    if case.prompts < 32:  # small updates fill one micro-batch
        return [case, other("none", True), other("none", False)]
    return [
        case,
        *(dataclasses.replace(case, micro_tokens=count) for count in (tokens // 2, 2 * tokens)),
        dataclasses.replace(case, fit_rows=False),
        other("full", True),
        other("none", True),
        other("none", False),
    ]


def settings(case: Case) -> dict[str, Any]:
    layers = "scan" if case.bare.scan else "unroll"
    rows = "fitted" if case.fit_rows else "usual"
    return {"remat": case.bare.remat, "layers": layers, "rows": rows, "micro_tokens": case.micro_tokens}


def make_stage(case: Case, folder: Path) -> RolloutFolder:
    """Random responses, written in the format of a run."""
    rng = np.random.default_rng(0)
    prompts = case.prompts * (case.updates + WARM_UP)
    stage = RolloutFolder(folder, {"made": "at random"}, prompts, 64)
    vocabulary = case.bare.model.vocab_size

    def rollout() -> Rollout:
        length = int(case.lengths.draw(rng, 1)[0])
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        logp = np.full(length, -np.log(vocabulary), np.float32)
        return Rollout(tokens, logp, float(rng.integers(2)), "stop")

    for shard in range(stage.shards):
        stage.write_shard(
            shard,
            [
                Group(
                    index,
                    str(index),
                    rng.integers(0, vocabulary, case.lengths.prompt).astype(np.int32),
                    tuple(rollout() for _ in range(GROUP)),
                )
                for index in stage.shard_prompts(shard)
            ],
        )
    stage.commit()
    return stage


def stream(case: Case, stage: RolloutFolder, share: bool) -> UpdateStream:
    longest = case.lengths.prompt + case.lengths.longest
    return UpdateStream(
        stage,
        seed=0,
        stage_index=0,
        epochs=1,
        prompts_per_update=case.prompts,
        buckets=plan_buckets(
            longest,
            case.micro_tokens,
            unit=case.unit,
            share=share,
            fit_rows=case.fit_rows,
            most_rows=case.prompts * GROUP,
        ),
        advantage="std",
        aggregation="token_mean",
        max_response=case.lengths.longest,
    )


def make_step(case: Case, share: bool) -> tuple[training.UpdateStep, training.TrainState]:
    """The update step of a run and its first state."""
    mesh = models.make_mesh(devices=jax.devices()[:1])
    model, params = models.create(case.bare.model, mesh=mesh)
    optimizer = training.make_optimizer(OptimizerSection(), case.updates, model)
    options = training.StepOptions(
        compute_dtype=case.dtype, remat=case.bare.remat, scan=case.bare.scan, share_prompts=share
    )
    state = training.make_state(params, optimizer, mesh, model, track_drift=True)
    return training.UpdateStep(model, objectives.mu_grpo, optimizer, mesh, options, state=state), state


def measure_whole(case: Case, stage: RolloutFolder, share: bool, *, profile: bool = False) -> float:
    """Tokens per second of whole updates from disk; prints the parts."""
    step, state = make_step(case, share)
    kept = list(stream(case, stage, share))
    tokens = sum(real_tokens(case, update) for update in kept[WARM_UP:])
    padding = float(np.mean([update.metrics["padding"] for update in kept]))
    started = time.perf_counter()
    for update in kept:  # compile every shape
        state, metrics = step(state, update)
    jax.block_until_ready(state.params)
    compiled = time.perf_counter() - started

    updates = stream(case, stage, share)
    recorded: list[dict[str, float]] = []
    pending = PendingMetrics(lambda about, metrics, seconds: recorded.append(metrics))
    for number, update in enumerate(updates):
        if number == WARM_UP:
            jax.block_until_ready(state.params)
            started = time.perf_counter()
        state, metrics = step(state, update)
        pending.add(None, metrics)
    pending.flush()
    jax.block_until_ready(state.params)
    whole = time.perf_counter() - started

    say(
        what="whole",
        share_prompts=share,
        updates=case.updates,
        tokens=tokens,
        padding=round(padding, 4),
        shapes=sorted(
            {
                (batch["tokens"].size, *batch["mask"].shape)
                for update in kept
                for batch in update.micro_batches
            }
        ),
        first_pass_s=round(compiled, 1),
        seconds=round(whole, 3),
        tokens_per_second=round(tokens / whole),
    )
    state = measure_parts(step, state, kept[WARM_UP:], tokens)
    if profile:
        few = kept[WARM_UP : WARM_UP + 2]

        def run() -> None:
            jax.block_until_ready([step.gradient(state, update)[0] for update in few])

        for row in profiling.summary(run):
            say(what="kernels of two updates", **row)
    return tokens / whole


def measure_parts(
    step: training.UpdateStep, state: training.TrainState, updates: list[Update], tokens: int
) -> training.TrainState:
    """Print the seconds of the updates in memory and of their parts; return the new state."""
    seconds = {}
    started = time.perf_counter()
    for update in updates:
        state, _ = step(state, update)
    jax.block_until_ready(state.params)
    seconds["updates"] = time.perf_counter() - started

    started = time.perf_counter()
    for update in updates:
        state, _ = step(state, update)
        jax.block_until_ready(state.params)
    seconds["one_at_a_time"] = time.perf_counter() - started

    started = time.perf_counter()
    for update in updates:
        gradient, _ = step.gradient(state, update)
    jax.block_until_ready(gradient)
    seconds["passes"] = time.perf_counter() - started

    started = time.perf_counter()
    for _ in updates:
        state = step.apply(state, gradient)[0]
    jax.block_until_ready(state.params)
    seconds["optimizer"] = time.perf_counter() - started
    rounded = {f"{name}_s": round(value, 3) for name, value in seconds.items()}
    say(what="parts", **rounded, tokens_per_second_of_passes=round(tokens / seconds["passes"]))
    return state


def real_tokens(case: Case, update: Update) -> int:
    return sum(
        int(batch["mask"].sum()) + case.lengths.prompt * int(batch["mask"].any(1).sum())
        for batch in update.micro_batches
    )


def say(**record: Any) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
