"""Compare what the files of a run need with the free space of its disk."""

import shutil
from pathlib import Path

from mugrpo_jax.files import is_remote
from mugrpo_jax.planning.units import human


def little_disk(folder: Path, needed: float) -> str:
    """Return a line of text if the disk of a run's folder has less free space than the run may still need.

    What the run has written already counts as done.
    """
    if is_remote(folder):
        return ""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    more = needed - sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if more <= free:
        return ""
    return (
        f"disk        {folder}: the run needs up to {human(more)}, and {human(free)} are free; if the disk "
        "is full the run stops, and the same command continues it. Remedies: another --out, fewer or shorter "
        "responses, a smaller checkpoints.keep_last"
    )
