"""Check checkpoints before a run uses them, and move damaged ones away.

With several hosts, each host checks its share of the files, and all hosts come to the same result.
"""

from pathlib import Path

import jax

from mugrpo_jax import distributed
from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import make_folder, move_folder
from mugrpo_jax.runs import progress
from mugrpo_jax.training import checkpoint_folders, damage


def check_whole(checkpoint: Path) -> None:
    """Raise an error that names a damaged file if the checkpoint is damaged."""
    if (problem := _damage(checkpoint)) is not None:
        raise ConfigError(problem)


def move_unusable(folder: Path, back_to: int | None = None) -> None:
    """Move checkpoints out of `folder` until its newest one is not damaged.

    Every damaged checkpoint is named. Nothing is moved if no checkpoint is left, which is an error.
    `back_to` moves away all checkpoints after so many updates too.
    """
    found = [path.name for path in reversed(checkpoint_folders(folder))]
    names = distributed.gather("checkpoints", found)[0]
    if back_to is not None and back_to not in map(int, names):
        kept = ", ".join(str(int(name)) for name in reversed(names)) or "none"
        raise ConfigError(f"--back-to: {folder} has no checkpoint after {back_to} updates; kept: {kept}")
    away = [name for name in names if back_to is not None and int(name) > back_to]
    for name in names[len(away) :]:
        if (problem := _damage(folder / name)) is None:
            break
        progress.say(f"{problem}; the checkpoint before it is used")
        away.append(name)
    if not away:
        return
    if len(away) == len(names):
        raise ConfigError(
            f"{folder}: no checkpoint is left, all are damaged; restore one from a backup, or remove "
            f"{folder} to train again from the beginning"
        )
    with distributed.together("moved"):
        if jax.process_index() == 0:
            for name in away:
                _move_away(folder / name)


def _damage(checkpoint: Path) -> str | None:
    mine = damage(checkpoint, jax.process_index(), jax.process_count())
    return next((problem for problem in distributed.gather("damage", mine) if problem is not None), None)


def _move_away(checkpoint: Path) -> None:
    """Move a checkpoint to the folder `moved_away` of the run, from where it can be deleted by hand."""
    place = checkpoint.parents[1] / "moved_away"
    make_folder(place)
    names = (f"{checkpoint.parent.name}-{checkpoint.name}-{count}" for count in range(10_000))
    target = next(place / name for name in names if not (place / name).exists())
    move_folder(checkpoint, target)
    progress.say(f"{checkpoint}: moved to {target}; delete it if you do not need it")
