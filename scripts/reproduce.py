#!/usr/bin/env python3
"""The paper's comparison on one GPU: stale data with and without relaxed clipping and veto, and fresh data.

    python scripts/reproduce.py run --runs runs/reproduce --seconds 560   # again until it says "all done"
    python scripts/reproduce.py collect --runs runs/reproduce             # small files into docs/results/
    python scripts/reproduce.py draw                                      # table and figures from them

Every arm starts from the same warm-started SmolLM2-135M, sees the same prompts in the same order and takes
the same number of updates. `run` goes through the arms until its time is over, stops the one under way with
SIGTERM, and continues it next time. `draw` needs no GPU.
"""

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "experiments" / "smollm2_word_problems.yaml"
RESULTS = ROOT / "docs" / "results"

RELAXED = ["objective.name=mu_grpo"]
ARMS = {
    "grpo-mu4": ["objective.name=grpo", "mu=4"],
    "mu_grpo": RELAXED,
    "grpo-mu1024": ["objective.name=grpo"],
    "relaxed-no-veto": [*RELAXED, "objective.knobs={veto: none}"],
    "mu_grpo-trigger": [*RELAXED, "objective.knobs={veto: trigger}"],
    "mu_grpo-suffix_non_trigger": [*RELAXED, "objective.knobs={veto: suffix_non_trigger}"],
    "mu_grpo-sequence": [*RELAXED, "objective.knobs={veto: sequence}"],
    "m2po": ["objective.name=m2po"],
    "p3o": ["objective.name=p3o"],
}
MARGIN = 25.0  # seconds a run may need to save and leave
BIN = 32  # updates averaged into one line of the collected files
KEPT = (
    *("reward", "response_length", "clipped/tokens", "vetoed/tokens", "triggered/negative_responses"),
    *("ratio/negative_tokens", "ratio/positive_tokens", "ess/tokens", "gap/tokens", "drift"),
    *("gradient_cosine", "gradient_norm", "update_norm", "padding", "equal_groups"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="train the arms, as far as the time goes")
    run.set_defaults(command=run_arms)
    run.add_argument("--model", default="smollm2-135m", help="before the warm start")
    run.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    run.add_argument("--seeds", nargs="+", type=int, default=[0])
    run.add_argument("--updates", type=int, default=4096, help="of each arm")
    run.add_argument("--mu", type=int, default=1024, help="updates per stage of the stale arms")
    run.add_argument("--seconds", type=float, default=1e9, help="stop and save after this long")
    run.add_argument("overrides", nargs="*", help="config keys, such as optimizer.learning_rate=3e-6")
    collect = commands.add_parser("collect", help="summarise runs into small files")
    collect.set_defaults(command=collect_runs)
    collect.add_argument("--out", type=Path, default=RESULTS)
    for command in (run, collect):
        command.add_argument("--runs", type=Path, required=True, help="folder of all runs")
    draw = commands.add_parser("draw", help="print the table and draw the figures")
    draw.set_defaults(command=draw_results)
    draw.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.command(arguments)


# -- run


def run_arms(arguments: argparse.Namespace) -> None:
    """Warm start, then arm after arm; what is finished is not done again."""
    deadline = time.monotonic() + arguments.seconds - MARGIN
    runs: Path = arguments.runs
    warm = runs / "warm-start"
    start = runs / "warm-start-model"
    if not start.exists():
        say(what="warm start")
        call(
            ["sft", CONFIG, "--out", warm, f"model.source={arguments.model}", *arguments.overrides], deadline
        )
        call(["export", warm, start, "--dtype", "float32"], deadline)
        say(what="warm start", accuracy=last(warm, "evaluation")["accuracy"])
    for seed in arguments.seeds:
        for arm in arguments.arms:
            folder = runs / f"{arm}-seed{seed}"
            if (folder / "done").exists():
                continue
            mu = 4 if "mu=4" in ARMS[arm] else arguments.mu
            command = [
                *("train", CONFIG, "--out", folder, f"seed={seed}", f"model.source={start}"),
                *(f"batch.updates_per_stage={mu}", f"batch.stages={arguments.updates // mu}"),
                *(override for override in ARMS[arm] if override != "mu=4"),
                *(["sampling.slots=256"] if mu == 4 else []),
                *arguments.overrides,
                "warm_start.updates=0",
            ]
            if not call(command, deadline):
                say(what="stopped", run=folder.name, updates=last(folder, "update").get("updates", 0))
                return
            (folder / "done").touch()
            say(what="done", run=folder.name, **summary(folder))
    say(what="all done")


def call(command: list[Any], deadline: float) -> bool:
    """Run `mugrpo`; True if it finished, False if it was stopped at the deadline and saved its state."""
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    process = subprocess.Popen([sys.executable, "-m", "mugrpo_jax.cli", *map(str, command)], cwd=ROOT)
    try:
        status = process.wait(left)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait()
        return False
    if status:
        sys.exit(f"{' '.join(map(str, command))}: ended with status {status}")
    return True


# -- collect


def records(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        yield json.loads(line)


def last(folder: Path, kind: str) -> dict[str, Any]:
    return ([{}] + [record for record in records(folder) if record["kind"] == kind])[-1]


def summary(folder: Path) -> dict[str, Any]:
    """What a run cost and where it got: seconds by part, tokens, accuracy at the end and at best."""
    seconds: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    accuracy = []
    for record in records(folder):
        kind, spent = record["kind"], record["seconds"]
        if kind == "stage":
            for part in ("sample", "score_wait", "switch"):
                seconds[part] += spent.get(part, 0.0)
            tokens["generated"] += record["response_tokens"]
        elif kind == "update":
            seconds["update"] += spent["update"]
            tokens["trained"] += int(record["response_tokens"])
        elif kind == "evaluation":
            accuracy.append(record["accuracy"])
    parts = {name: round(value, 1) for name, value in seconds.items()}
    return {
        "seconds": parts | {"training": round(sum(seconds.values()), 1)},
        "tokens": dict(tokens),
        "first_accuracy": accuracy[0] if accuracy else None,
        "last_accuracy": accuracy[-1] if accuracy else None,
        "best_accuracy": max(accuracy, default=None),
        "updates": last(folder, "update").get("updates", 0),
    }


def collect_runs(arguments: argparse.Namespace) -> None:
    """One small JSON-lines file a run: its cost, its evaluations, and its updates in bins."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    for folder in sorted(arguments.runs.glob("*-seed*")):
        if not (folder / "metrics.jsonl").exists():
            continue
        path = arguments.out / f"{folder.name}.jsonl"
        lines = [{"kind": "run", "run": folder.name, **facts(folder), **summary(folder)}, *binned(folder)]
        path.write_text("".join(json.dumps(rounded(line)) + "\n" for line in lines))
        say(wrote=os.path.relpath(path), lines=len(lines))


def facts(folder: Path) -> dict[str, Any]:
    """What was run, and on what."""
    import yaml

    config = yaml.safe_load((folder / "config.yaml").read_text())
    environment = folder / "environment.json"
    return {
        "objective": config["objective"],
        "batch": config["batch"],
        "optimizer": config["optimizer"],
        "task": config["task"],
        "seed": config["seed"],
        "environment": json.loads(environment.read_text()) if environment.exists() else None,
    }


def binned(folder: Path) -> Iterator[dict[str, Any]]:
    """Evaluations as they are, updates averaged over bins; `clock` is training time without evaluations."""
    clock, pending = 0.0, []
    for record in records(folder):
        kind, spent = record["kind"], record["seconds"]
        if kind == "stage":
            clock += spent["generate"]
        elif kind == "update":
            clock += spent["update"]
            pending.append(record)
            if record["updates"] % BIN == 0:
                means = {name: np.mean([r[name] for r in pending]) for name in KEPT if name in record}
                yield {"kind": "updates", "updates": record["updates"], "clock": clock, **means}
                pending = []
        elif kind == "evaluation":
            keep = {name: record[name] for name in ("updates", "accuracy", "standard_error")}
            yield {"kind": "evaluation", "clock": clock, **keep}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, (float, np.floating)) else value


# -- draw


def draw_results(arguments: argparse.Namespace) -> None:
    """The table, as Markdown, and two figures beside the files."""
    runs = [load(path) for path in sorted(arguments.results.glob("*.jsonl"))]
    if not runs:
        sys.exit(f"{arguments.results}: no results; run and collect first")
    order = {arm: i for i, arm in enumerate(ARMS)}
    runs.sort(key=lambda run: (order.get(arm_of(run), len(order)), run["seed"]))
    print_table(runs)
    draw_accuracy(runs, arguments.results / "accuracy.png")
    draw_staleness(runs, arguments.results / "staleness.png")


def load(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    parts = {"evaluations": "evaluation", "bins": "updates"}
    return lines[0] | {name: [line for line in lines if line["kind"] == kind] for name, kind in parts.items()}


def arm_of(run: dict[str, Any]) -> str:
    return run["run"].rsplit("-seed", 1)[0]


def print_table(runs: list[dict[str, Any]]) -> None:
    print("| run | updates | accuracy: start → end (best) | generate | update | switch | in all |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        spent = run["seconds"]
        generate = spent.get("sample", 0) + spent.get("score_wait", 0)
        accuracy = f"{run['first_accuracy']:.3f} → {run['last_accuracy']:.3f} ({run['best_accuracy']:.3f})"
        parts = (generate, spent["update"], spent.get("switch", 0), spent["training"])
        times = " | ".join(f"{part:.0f} s" for part in parts)
        print(f"| {run['run']} | {run['updates']} | {accuracy} | {times} |")


def styles(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each run with its line: a colour an arm, a dash pattern a seed."""
    arms = list(dict.fromkeys(map(arm_of, runs)))
    for run in runs:
        yield (
            run,
            {
                "color": f"C{arms.index(arm_of(run))}",
                "linestyle": ("-", "--", ":", "-.")[run["seed"] % 4],
                "label": run["run"].replace("-seed", ", seed "),
            },
        )


def draw_accuracy(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for run, style in styles(runs):
        points = run["evaluations"]
        accuracy = [point["accuracy"] for point in points]
        axes[0].plot([point["updates"] for point in points], accuracy, **style)
        axes[1].plot([point["clock"] / 60 for point in points], accuracy, **style)
    axes[0].set(xlabel="updates", ylabel="held-out accuracy")
    axes[1].set(xlabel="minutes of training, evaluations left out")
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def draw_staleness(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    shown = {
        "clipped/tokens": "clipped tokens",
        "vetoed/tokens": "vetoed tokens",
        "ratio/negative_tokens": "E[ρ | A < 0]",
        "ess/tokens": "effective sample size",
        "drift": "‖θ − θ of the stage's start‖",
        "gradient_cosine": "cosine of consecutive gradients",
    }
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharex=True, layout="constrained")
    for axis, (name, title) in zip(axes.flat, shown.items()):
        for run, style in styles(runs):
            points = [point for point in run["bins"] if name in point]
            axis.plot([p["updates"] for p in points], [p[name] for p in points], linewidth=1, **style)
        axis.set_title(title, fontsize=9)
    axes[0, 0].legend(fontsize=6)
    for axis in axes[1]:
        axis.set_xlabel("updates")
    figure.savefig(path, dpi=120)


def say(**record: Any) -> None:
    print(json.dumps(rounded(record)), flush=True)


if __name__ == "__main__":
    main()
