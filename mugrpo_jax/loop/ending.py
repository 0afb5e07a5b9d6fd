"""Say what came out of a run that has finished, and what to do next."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mugrpo_jax.config import RunConfig
from mugrpo_jax.files import absolute, to_path
from mugrpo_jax.runs.journal import read_journal
from mugrpo_jax.runs.start_times import recorded_start
from mugrpo_jax.runs.time_left import duration
from mugrpo_jax.setup.stored_rollouts import is_stage


def ending(config: RunConfig, folder: Path) -> str:
    """Return lines of text about a finished run: its start, accuracy, the report, the next command."""
    records = list(read_journal(folder / "metrics.jsonl"))
    updates = sum(record["kind"] == "update" for record in records)
    spent = sum(record.get("seconds", {}).get("elapsed", 0.0) for record in records)
    stages = "1 stage" if len(config.stages) == 1 else f"{len(config.stages)} stages"
    lines = {
        "finished": f"{folder}: {stages}, {updates:,} updates, in {duration(spent)}",
        "start": recorded_start(records),
        "accuracy": _change(
            [
                f"{record['accuracy']:.3f} ± {record['standard_error']:.3f}"
                for record in records
                if record["kind"] == "evaluation"
            ],
            "on held-out problems",
        ),
        "reward": _change(
            [f"{record['reward']:.3f}" for record in records if record["kind"] == "stage"],
            "mean of the first and the last stage",
        ),
        "skipped": _skipped(records),
        "report": str(folder / "report.html") if (folder / "report.html").exists() else "",
        "best": _better(config, folder, records),
        "next": _next(config, folder),
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items() if text)


def _change(values: list[str], what: str) -> str:
    return f"{values[0]} before, {values[-1]} after ({what})" if len(values) > 1 else ""


def _skipped(records: Sequence[Mapping[str, Any]]) -> str:
    counts = [record["skipped"] for record in records if record["kind"] == "update" and "skipped" in record]
    if not counts or counts[-1] == 0:
        return ""
    return f"{counts[-1]:,.0f} of the updates changed nothing, because their gradient was not finite"


def _better(config: RunConfig, folder: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """Return text about a kept checkpoint that had a higher accuracy than the last; "" if there is none."""
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    kept = [
        record for record in evaluations if (folder / "checkpoints" / f"{record['updates']:06d}").is_dir()
    ]
    best = max(kept, key=lambda record: (record["accuracy"], record["updates"]), default=None)
    if best is None or best["accuracy"] <= evaluations[-1]["accuracy"]:
        return ""
    updates = "1 update" if best["updates"] == 1 else f"{best['updates']:,} updates"
    after = f"after {updates}, accuracy {best['accuracy']:.3f}"
    return f"{after}: {_export(config, folder)} --step {best['updates']}"


def _next(config: RunConfig, folder: Path) -> str:
    run = shlex.quote(str(folder))
    if config.replay.run is not None and not is_stage(to_path(config.replay.run)):
        return f"mugrpo report {shlex.quote(config.replay.run)} {run} -o comparison.html"
    return _export(config, folder)


def _export(config: RunConfig, folder: Path) -> str:
    target = f"models/{folder.name}"
    if absolute(to_path(target)) == absolute(to_path(config.model.source)):
        target += "-trained"
    return f"mugrpo export {shlex.quote(str(folder))} {shlex.quote(target)}"
