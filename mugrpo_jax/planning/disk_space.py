"""Compare what the files of a run need with the free space of its disk."""

import contextlib
import os
import shutil
from pathlib import Path

from mugrpo_jax.files import is_remote, nearest_existing
from mugrpo_jax.planning.units import human

_COUNTED = ("rollouts", "reference", "checkpoints")  # the large files, those of `RunPlan.disk_bytes`


def little_disk(folder: Path, needed: float, *, continues: bool = False) -> str:
    """Return a line of text if the disk of a run's folder has less free space than the run may still need.

    If the run continues, what it has written need not be written again.
    """
    if is_remote(folder):
        return ""
    free = shutil.disk_usage(nearest_existing(folder)).free
    if needed - (_written(folder) if continues else 0) <= free:
        return ""
    return (
        f"disk        {folder}: the run needs up to {human(needed)}, and {human(free)} are free; if the disk "
        "is full the run stops, and the same command continues it. Remedies: another --out, fewer or shorter "
        "responses, a smaller checkpoints.keep_last"
    )


def _written(folder: Path) -> int:
    """Return the bytes of a run's large files. Another process may rename or delete some meanwhile."""
    total = 0
    for part in _COUNTED:
        for place, _, names in os.walk(folder / part):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(place, name)).st_size
    return total
