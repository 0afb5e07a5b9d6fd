"""Find out what a run has done so far, because its settings may change while nothing depends on them."""

from pathlib import Path

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError
from mugrpo_jax.runs.journal import read_journal


def has_work(folder: Path) -> bool:
    """Return whether the folder of a run has anything that a new start would have to do again.

    Records, rollouts, a warm start and updates are work. The checkpoint of a run before its first update is
    not, because it is a copy of the initial weights. (After a warm start it is more than that.)
    """
    if any(True for _ in read_journal(folder / "metrics.jsonl")) or _has_rollouts(folder):
        return True
    saved = {path.name for name in ("checkpoints", "warm_start") for path in (folder / name).glob("*")}
    return bool({name for name in saved if name.isdigit()} - _copies(folder))


def has_responses(folder: Path) -> bool:
    """Return whether responses were sampled and scored, for an evaluation or a stage."""
    records = read_journal(folder / "metrics.jsonl")
    return any(record["kind"] != "warm_start" for record in records) or _has_rollouts(folder)


def _has_rollouts(folder: Path) -> bool:
    return any(True for _ in (folder / "rollouts").glob("*/*.arrayrecord"))


def _copies(folder: Path) -> set[str]:
    """Return the names of checkpoints that only copy what the run started from."""
    try:
        config = configs.load(folder / "config.yaml")
    except ConfigError:
        return set()
    if config.warm_start.updates and config.replay.run is None:
        return set()
    return {f"{config.stages.start * config.batch.updates_per_stage:06d}"}
