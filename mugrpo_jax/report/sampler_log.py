"""What samplers of their own (`mugrpo sample`) did for a run, and how long each side waited."""

from pathlib import Path
from typing import Any

from mugrpo_jax.files import read_json_lines
from mugrpo_jax.runs.time_left import duration


def sampling_seconds(stage: dict[str, Any]) -> dict[str, float]:
    """Return times and counts of the sampling of a stage, by the run itself or by samplers of their own."""
    seconds = stage["seconds"]
    return seconds | {name.removeprefix("sampler/"): value for name, value in seconds.items()}


def sampler_facts(folder: Path, seconds: float, waited: float) -> str:
    """Return a text about what the samplers of a run did and what they waited for; empty without them.

    Args:
      seconds: running time of the trainer.
      waited: how much of it the trainer waited for samplers.
    """
    logs = [
        list(read_json_lines(path, skip_damaged=True))
        for path in sorted((folder / "samplers").glob("*.jsonl"))
    ]
    done = [record for log in logs for _, record in log if isinstance(record, dict)]
    try:
        spent = sum(record["seconds"]["generate"] for record in done)
        tokens = sum(record["response_tokens"] for record in done)
        shards = sum(len(record["shards"]) for record in done)
        waits = {
            name: sum(r["seconds"].get(f"wait/{name}", 0.0) for r in done) for name in ("policy", "samplers")
        }
    except (KeyError, TypeError):
        return ""
    if not done:
        return ""
    apart = seconds - waited + spent
    rates = [f"{tokens / max(time, 1e-9):,.0f}" for time in (spent, seconds, apart)]
    return (
        f"{len(logs)} started, {shards:,} shards, {rates[0]} tokens/s while sampling "
        f"({duration(spent)}); waited {duration(waits['policy'])} for policies and "
        f"{duration(waits['samplers'])} for other samplers. The run: {rates[1]} tokens/s in "
        f"{duration(seconds)}, in which the trainer waited {duration(waited)}; without overlap, one sampler "
        f"and the trainer one after the other, {rates[2]} tokens/s in {duration(apart)}"
    )
