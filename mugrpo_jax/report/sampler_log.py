"""What samplers of their own (`mugrpo sample`) did for a run, and how long each side waited."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mugrpo_jax.files import read_json_lines
from mugrpo_jax.runs.time_left import duration


def sampling_seconds(stage: dict[str, Any]) -> dict[str, float]:
    """Return times and counts of the sampling of a stage, by the run itself or by samplers of their own."""
    seconds = stage["seconds"]
    return seconds | {name.removeprefix("sampler/"): value for name, value in seconds.items()}


def sampler_facts(
    folder: Path, seconds: float, waited: float, stages: Sequence[Mapping[str, Any]], shards: int
) -> str:
    """Return a text about what the samplers of a run did and what they waited for; empty without them.

    Args:
      seconds: running time of the trainer.
      waited: how much of it the trainer waited for samplers.
      stages: the records of the stages whose rollouts the trainer has.
      shards: number of shards in a stage.
    """
    logs = [
        list(read_json_lines(path, skip_damaged=True))
        for path in sorted((folder / "samplers").glob("*.jsonl"))
    ]
    done = [record for log in logs for _, record in log if isinstance(record, dict)]
    try:
        spent = sum(record["seconds"]["generate"] for record in done)
        tokens = sum(record["response_tokens"] for record in done)
        written = {(record["stage"], shard) for record in done for shard in record["shards"]}
        waits = {
            name: sum(r["seconds"].get(f"wait/{name}", 0.0) for r in done) for name in ("policy", "samplers")
        }
    except (KeyError, TypeError):
        return ""
    if not done:
        return ""
    used = sum(stage["response_tokens"] for stage in stages)
    missing = {(stage["stage"], shard) for stage in stages for shard in range(shards)} - written
    apart = seconds - waited + spent
    return (
        f"{len(logs)} with a log: {len(written):,} shards, {_rate(tokens, spent)} while sampling "
        f"({duration(spent)}); waited {duration(waits['policy'])} for policies and "
        f"{duration(waits['samplers'])} for other samplers. The run: {_rate(used, seconds)} in "
        f"{duration(seconds)}, in which the trainer waited {duration(waited)}; "
    ) + (
        f"{len(missing):,} shards are in no log, because a sampler was killed or the run sampled itself, so "
        "the time without overlap is not known"
        if missing
        else f"without overlap, one sampler and the trainer one after the other, {_rate(tokens, apart)} in "
        f"{duration(apart)}"
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
