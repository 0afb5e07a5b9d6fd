"""Move an old run out of the way, if the user asked for it with `--overwrite`."""

from collections.abc import Mapping
from pathlib import Path

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import absolute, is_remote, move_folder, to_path
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.run_data import changed_data
from mugrpo_jax.runs.run_folder import differences
from mugrpo_jax.runs.run_lock import RunLock
from mugrpo_jax.runs.sampler_claims import refuse_samplers


def reason_to_move(folder: Path, config: RunConfig, sources: Mapping[str, str]) -> str | None:
    """Return why the run in the folder cannot continue with this config and these data; None if it can.

    A run that can continue is never moved, so that a job that is started again with `--overwrite` goes on.
    """
    changed = [f"{name} has changed" for name in changed_data(folder, sources)]
    return "; ".join([*differences(folder, config), *changed]) or None


def set_aside(folder: Path, config: RunConfig, sources: Mapping[str, str]) -> None:
    """Move a run that cannot continue with this config to a folder beside it; nothing is deleted."""
    reason = reason_to_move(folder, config, sources)
    if reason is None:
        return
    if config.replay.run is not None and absolute(to_path(config.replay.run)) == absolute(folder):
        raise ConfigError(f"--overwrite: {folder} holds the rollouts to replay; use another --out")
    linked = not is_remote(folder) and folder.is_symlink()
    place = absolute(folder) if linked else folder  # a link stays, and the folder that it points to is moved
    target = place_beside(place)
    with RunLock(folder):  # nobody else trains there
        refuse_samplers(folder, "stop it first")
        move_folder(place, target)
        if linked:
            place.mkdir()
    (target / "lock.json").unlink(missing_ok=True)  # ours, which moved with the folder
    progress.say(f"{folder}: the run that was here is now in {target}, because of --overwrite: {reason}")


def place_beside(folder: Path) -> Path:
    """Return the first of `FOLDER.old-1`, `FOLDER.old-2`, … that does not exist."""
    names = (folder.with_name(f"{folder.name}.old-{count}") for count in range(1, 10_000))
    return next(path for path in names if not path.exists())
