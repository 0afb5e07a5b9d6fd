"""Summarise the folders of runs into small files that can be kept and drawn on another machine."""

import collections
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

BIN = 32  # updates averaged into one line of the collected files
POINTS = 256  # of the drift of a run of the grid
KEPT = (
    *("reward", "response_length", "clipped/tokens", "vetoed/tokens", "abandoned/negative_responses"),
    *("ratio/negative_tokens", "ratio/positive_tokens", "ess/tokens", "gap/tokens", "drift"),
    *("gradient_cosine", "gradient_norm", "update_norm", "padding", "equal_groups", "entropy/tokens"),
    *("abandoned/positive_responses", "behind_abandoned/negative_pull"),
    *("ratio/before_abandoned_tokens", "ratio/behind_abandoned_tokens"),
    *("within_0.001/tokens", "within_0.01/tokens", "within_0.05/tokens"),
)
FACTS = (
    "seed",
    "model",
    "task",
    "sampling",
    "batch",
    "objective",
    "advantage",
    "overlong_buffer",
    "optimizer",
    "lora",
)


def collect(runs: Path, out: Path) -> None:
    """Write one JSON-lines file per arm and seed, and `law.jsonl` for the grid."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in _folders(runs):
        about = {"kind": "run", "run": folder.name, **_facts(folder), **summary(folder)}
        _write(out / f"{folder.name}.jsonl", [about, *_binned(folder)])
    grid = [_law(folder) for folder in _folders(runs / "law") if last(folder, "update")]
    if grid:
        _write(out / "law.jsonl", sorted(grid, key=lambda r: (r["objective"], r["mu"], r["learning_rate"])))


def say(**record: Any) -> None:
    """One JSON line on the terminal."""
    print(json.dumps(_plain(record), ensure_ascii=False), flush=True)


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """The journal of a run, without an unfinished last line."""
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def last(folder: Path, kind: str | None = None) -> dict[str, Any]:
    """The newest record, or the newest of a kind; empty if there is none."""
    return ([{}] + [record for record in records(folder) if kind in (None, record["kind"])])[-1]


def summary(folder: Path) -> dict[str, Any]:
    """The cost and result of a run: seconds by part, tokens, accuracy at the end and at best.

    Compiling is a separate part; `training` is the sum of all parts.
    """
    seconds: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    accuracy, updates = [], 0
    for record in records(folder):
        kind, spent = record["kind"], record["seconds"]
        if kind in ("stage", "update"):
            work = "sample" if kind == "stage" else "update"
            compiled = spent.get("compile", 0.0)
            seconds["compile"] += compiled
            seconds[work] += spent.get(work, 0.0) - compiled
        if kind == "stage":
            for part in ("score_wait", "switch"):
                seconds[part] += spent.get(part, 0.0)
            tokens["generated"] += record["response_tokens"]
        elif kind == "update":
            tokens["trained"] += int(record["tokens"])
            updates = record["updates"]
        elif kind == "evaluation":
            accuracy.append(record["accuracy"])
    parts = {name: round(value, 1) for name, value in seconds.items()}
    return {
        "alone": not any((folder / mark).exists() for mark in ("shared_gpu", "resumed")),
        "finished": finished(folder),
        "seconds": parts | {"training": round(sum(seconds.values()), 1)},
        "tokens": dict(tokens),
        "first_accuracy": accuracy[0] if accuracy else None,
        "last_accuracy": accuracy[-1] if accuracy else None,
        "best_accuracy": max(accuracy, default=None),
        "updates": updates,
    }


def finished(folder: Path) -> bool:
    """Whether the run has taken its last update and, if it evaluates, has evaluated after it."""
    config = folder / "config.yaml"
    if not config.exists():
        return False
    batch = yaml.safe_load(config.read_text())["batch"]
    planned = batch["updates_per_stage"] * batch["stages"]
    ends = [found["updates"] for kind in ("update", "evaluation") if (found := last(folder, kind))]
    return bool(ends) and min(ends) == planned


def _folders(runs: Path) -> list[Path]:
    return [path.parent for path in sorted(runs.glob("*-seed*/metrics.jsonl"))]


def _facts(folder: Path) -> dict[str, Any]:
    """The config of a run, and its environment if its file is there."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    named = {name: config[name] for name in FACTS if name in config}
    if ratio := config.get("report", {}).get("abandoned_ratio"):
        named["abandoned_ratio"] = ratio
    # Keep only the names: the paths of this machine are private.
    for part in (named["model"], *(named.get("sampling", {}).get("behaviors") or ())):
        part["source"] = Path(part["source"]).name
    options = named["task"]["options"]
    if "folder" in options:
        options["folder"] = Path(options["folder"]).name
    environment = folder / "environment.json"
    return named | {"environment": json.loads(environment.read_text()) if environment.exists() else None}


def _binned(folder: Path) -> Iterator[dict[str, Any]]:
    """Evaluations unchanged, updates averaged over bins.

    `clock` is training time without evaluations, and `compiled` the part of it that was compiling.
    """
    clock, compiled, pending = 0.0, 0.0, []
    for record in records(folder):
        kind, spent = record["kind"], record["seconds"]
        if kind in ("stage", "update"):
            compiled += spent.get("compile", 0.0)
        if kind == "stage":
            clock += spent["generate"]
        elif kind == "update":
            clock += spent["update"]
            pending.append(record)
            if record["updates"] % BIN == 0:
                means = {name: _mean(pending, name) for name in KEPT if name in record}
                means = {name: mean for name, mean in means.items() if mean is not None}
                yield {"kind": "updates", "updates": record["updates"], "clock": clock, **means}
                pending = []
        elif kind == "evaluation":
            keep = ("updates", "accuracy", "standard_error", "truncated", "malformed")
            found = {name: record[name] for name in keep if name in record}
            yield {"kind": "evaluation", "clock": clock, "compiled": compiled, **found}


def _mean(records: list[dict[str, Any]], name: str) -> float | None:
    """The mean over updates. `a/b` is a mean over `b`, so each update is weighted by its number of `b`."""
    weights = [record.get(name.partition("/")[2], 1.0) for record in records]
    return float(np.average([r[name] for r in records], weights=weights)) if any(weights) else None


def _law(folder: Path) -> dict[str, Any]:
    """A run of the grid with the quantities of the law; null if an event never happened."""
    from mugrpo_jax.report import read_run
    from mugrpo_jax.report import staleness_position as law

    run = read_run(folder)
    place = law.position(run)
    updates, accuracy, errors = (
        [record[name] for record in run.evaluations] for name in ("updates", "accuracy", "standard_error")
    )
    collapse = law.accuracy_collapse(updates, accuracy)
    way = [law.critical_drift(run, update) for update in updates]
    return {
        "run": folder.name,
        "finished": finished(folder),
        "objective": _name(run.config.objective),
        "mu": place.lag + 1,  # (L + 1)·µ with `batch.lag`; else µ
        "learning_rate": place.learning_rate,
        "seed": run.config.seed,
        "lag_times_rate": (place.lag + 1) * place.learning_rate,
        "updates": place.updates,
        "accuracy_start": accuracy[0] if accuracy else None,
        "accuracy_end": accuracy[-1] if accuracy else None,
        "accuracy_best": max(accuracy, default=None),
        "collapsed": collapse is not None,
        "collapse": collapse,
        "update_size": place.update_size,
        "batch_drift": place.batch_drift,
        "largest_drift": place.largest_drift,
        "critical_drift": None if collapse is None else law.critical_drift(run, collapse),
        "cosine": place.cosine,
        "momentum": place.momentum,
        "stage_updates": run.config.batch.updates_per_stage,
        "generations": [
            {name: record.get(name) for name in ("reward", "equal_groups")} for record in run.generations
        ],
        "curve": _curve(list(run.updates), run.config.batch.updates_per_stage),
        "evaluations": {"updates": updates, "accuracy": accuracy, "standard_error": errors, "way": way},
        "environment": run.environment,
    }


def _name(objective: Any) -> str:
    """The objective's name; µ-GRPO without the veto has the name of its arm."""
    return "relaxed-no-veto" if objective.knobs.get("veto") == "none" else str(objective.name)


def _curve(updates: list[dict[str, Any]], mu: int) -> dict[str, list[Any]]:
    """At most `POINTS` points: the drift there, and the mean step and cosine of the updates up to there.

    `age` is the number of updates since the stage began.
    """
    apart = -(-len(updates) // POINTS)
    parts = [updates[end - apart : end] for end in range(apart, len(updates) + 1, apart)]
    return {
        "updates": [part[-1]["updates"] for part in parts],
        "age": [(part[-1]["updates"] - 1) % mu + 1 for part in parts],
        "drift": [part[-1].get("drift") for part in parts],
        **{name: [_known_mean(part, name) for part in parts] for name in ("update_norm", "gradient_cosine")},
    }


def _known_mean(records: list[dict[str, Any]], name: str) -> float | None:
    known = [record[name] for record in records if record.get(name) is not None]
    return float(np.mean(known)) if known else None


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    text = (json.dumps(_plain(line), ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    path.write_text("".join(text))
    say(wrote=os.path.relpath(path), lines=len(lines))


def _plain(value: Any) -> Any:
    """Round every number to five digits; NaN and infinity become null, because JSON does not have them."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
