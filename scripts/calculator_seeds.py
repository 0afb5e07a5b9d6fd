"""Train the example `calculator` with three seeds, keep small files of the results, and draw them.

    .venv/bin/python scripts/calculator_seeds.py [--runs runs/calculator-seeds]     # a few minutes per seed

Writes docs/results/calculator: one JSON-lines file per seed, with the records of held-out evaluations and of
the stage, and accuracy.png. With --draw, only the figure is made, from the kept files.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "calculator"
SEEDS = (0, 1, 2)
KEPT = {
    "evaluation": ("kind", "updates", "accuracy", "answered", "malformed", "problems"),
    "stage": ("kind", "updates", "responses", "reward", "answered", "messages", "message_tokens", "finish"),
}
LINES = {"accuracy": "right answers", "answered": "responses that call the calculator"}


def train(runs: Path) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        folder = runs / f"seed-{seed}"
        config = str(ROOT / "configs" / "calculator.yaml")
        command = [sys.executable, "-m", "mugrpo_jax", "train", config, "--out", str(folder), f"seed={seed}"]
        subprocess.run(command, check=True)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = [kept_part(record) for record in records if record["kind"] in KEPT]
        (RESULTS / f"seed-{seed}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))


def kept_part(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in KEPT[record["kind"]] if name in record}


def draw() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for (name, title), color, place in zip(LINES.items(), ("tab:blue", "tab:orange"), axes):
        for seed in SEEDS:
            records = map(json.loads, (RESULTS / f"seed-{seed}.jsonl").read_text().splitlines())
            points = [(r["updates"], r[name]) for r in records if r["kind"] == "evaluation"]
            place.plot(*zip(*points), color=color, alpha=0.5 + 0.25 * (seed == 0), label=f"seed {seed}")
        place.set(title=f"Share of {title}", xlabel="updates", ylim=(0, 1.02))
        place.grid(alpha=0.3)
    figure.savefig(RESULTS / "accuracy.png", dpi=120)


def table() -> None:
    print("| seed | right answers before | after | calls before | after |\n|---|---|---|---|---|")
    for seed in SEEDS:
        lines = map(json.loads, (RESULTS / f"seed-{seed}.jsonl").read_text().splitlines())
        first, *_, last = [record for record in lines if record["kind"] == "evaluation"]
        shares = [f"{record[name]:.3f}" for name in LINES for record in (first, last)]
        print(f"| {seed} | {' | '.join(shares)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "calculator-seeds")
    parser.add_argument("--draw", action="store_true", help="only draw the kept files")
    arguments = parser.parse_args()
    if not arguments.draw:
        train(arguments.runs)
    draw()
    table()


if __name__ == "__main__":
    main()
