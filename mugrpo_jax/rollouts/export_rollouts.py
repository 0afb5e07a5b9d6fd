"""Write the rollouts of a stage to a file in the open format."""

from pathlib import Path

from mugrpo_jax.rollouts.open_format import COLUMNS, stage_facts, to_row
from mugrpo_jax.rollouts.rollout_folder import RolloutFolder, read_groups
from mugrpo_jax.rollouts.table_files import write_rows


def export_rollouts(stage: RolloutFolder, path: Path, *, vocab_size: int | None = None) -> int:
    """Write the responses of a complete stage to a `.jsonl` or `.parquet` file; return their number.

    `vocab_size` is that of the model that wrote them, so that an import can check the tokens; None: unknown.
    """
    facts = stage_facts(stage.identity, stage.prompts_per_shard, vocab_size)
    rows = (to_row(group, i, facts) for group in read_groups(stage) for i in range(len(group.rollouts)))
    return write_rows(path, rows, columns=COLUMNS)
