"""The folder of a run: config, environment, journal, and the paths of the rollouts."""

import json
import os
from collections.abc import Collection
from pathlib import Path

import jax
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import (
    PATIENCE_S,
    is_remote,
    make_folder,
    move_folder,
    nearest_existing,
    remove_folder,
    wait_for,
    write_atomically,
)
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.environment import environment
from mugrpo_jax.runs.journal import Journal
from mugrpo_jax.runs.work_done import has_responses, has_work


class RunFolder:
    """Creates or opens a run's folder; raises an error with the differing keys if its config differs."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        try:
            make_folder(folder)
            self._write_or_check_config()
            if jax.process_index() == 0:
                write_atomically(folder / "environment.json", json.dumps(environment(), indent=1))
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error.strerror or error})") from None
        self.journal = Journal(folder / "metrics.jsonl")

    def _write_or_check_config(self) -> None:
        path = self.folder / "config.yaml"
        if jax.process_index() > 0:
            _wait_for_text(path)
        check_config(self.folder, self.config)
        if jax.process_index() > 0 or (path.exists() and has_responses(self.folder)):
            return
        if path.exists() and not has_work(self.folder) and _differing(path, self.config):
            _move_leftovers(self.folder)
        write_atomically(path, yaml.safe_dump(configs.to_dict(self.config), sort_keys=False))

    def stage_folder(self, stage: int) -> Path:
        """Return the folder with the rollouts of a stage."""
        return stage_folder(self.folder, stage)


def _wait_for_text(path: Path) -> None:
    """Wait for the file that process 0 has just written: a network file system may show it late or empty."""

    def read() -> None:
        if not path.read_bytes():
            raise ValueError("empty")

    try:
        wait_for(read, path, PATIENCE_S)
    except (OSError, ValueError):
        raise ConfigError(
            f"{path}: not seen here after {PATIENCE_S:g} s; --out must be on storage that all hosts share"
        ) from None


def keep_choices(folder: Path, config: RunConfig) -> RunConfig:
    """Give each key that the config leaves to us the value that was chosen when the run first started.

    A config that cannot continue the run in the folder is returned as it is.
    """
    path = folder / "config.yaml"
    if not path.exists() or not has_work(folder) or differences(folder, config):
        return config
    stored = configs.load(path)
    values = {key: configs.value_of(stored, key) for key in _left_to_us(config)}
    return configs.changed(config, [f"{key}={str(value).lower()}" for key, value in values.items()])


def _left_to_us(config: RunConfig) -> list[str]:
    return [key for key in configs.CHOSEN_AT_START if configs.value_of(config, key) == configs.AUTO]


def check_place(folder: Path) -> None:
    """Raise an error if it is clear beforehand that the folder of a run cannot be written."""
    if is_remote(folder):
        return
    try:
        there = nearest_existing(folder)
    except PermissionError as error:
        raise ConfigError(f"{folder}: cannot be written (no permission for {error.filename})") from None
    if not there.is_dir():
        raise ConfigError(f"{folder}: cannot be written ({there} is a file)")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: cannot be written (no permission for {there})")


def check_config(folder: Path, config: RunConfig) -> None:
    """Raise an error with the differing keys if the run in the folder depends on another config."""
    if differing := differences(folder, config):
        names = [text.split(" ")[0] for text in differing]
        more = ""
        if names == ["batch.stages"] and config.batch.stages > read_config(folder).batch.stages:
            more = "; to train longer, export its model and start a new run from it"
        elif _of_updates(names) and config.replay.run is None and has_responses(folder):
            more = (
                f"; its rollouts do not depend on {'this' if len(names) == 1 else 'these'}: "
                f"`mugrpo replay {folder}` trains a stage again with other values, in another --out"
            )
        raise ConfigError(
            f"{folder / 'config.yaml'}: this run was started with another config: {'; '.join(differing)}; "
            "use another --out or the config it was started with, or move the run aside with --overwrite"
            f"{more}"
        )


def _of_updates(names: Collection[str]) -> bool:
    """Return whether a replay may change all these keys: no rollout of a stage depends on them."""
    return all(name.startswith(("optimizer.", "objective.", "advantage")) for name in names)


def check_same_config(folder: Path, config: RunConfig) -> None:
    """Raise an error with the differing keys if a sampler's config is not that of its run."""
    if differing := _differing(folder / "config.yaml", config):
        raise ConfigError(
            f"{folder / 'config.yaml'}: the rollouts of this run depend on {'; '.join(differing)}; leave "
            "these overrides out"
        )


class SameRun:
    """Notices that the folder of a run, for which a sampler works, was deleted or has another run now."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder, self._config, self._text = folder, config, b""

    def check(self) -> None:
        """Raise an error if it is another run. The config is parsed only if its file has changed."""
        path = self._folder / "config.yaml"
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise ConfigError(f"{self._folder}: the folder of the run is gone; nothing is written") from None
        if text == self._text:
            return
        if differing := _differing(path, self._config):
            raise ConfigError(
                f"{self._folder}: another run was started here ({'; '.join(differing)}); start the sampler "
                "again"
            )
        self._text = text


def differences(folder: Path, config: RunConfig) -> list[str]:
    """Return the keys in which the config of the run in the folder differs, if anything depends on them.

    While a run has done no work, nothing depends on its config. Before its first response, nothing depends on
    the keys `UNTIL_RESPONSES`.
    """
    path = folder / "config.yaml"
    if not path.exists() or not has_work(folder):
        return []
    return _differing(path, config, () if has_responses(folder) else configs.UNTIL_RESPONSES)


def _differing(path: Path, config: RunConfig, free: Collection[str] = ()) -> list[str]:
    """Return the keys in which the config at `path` differs, except those in `free` or left to us."""
    free = {*free, *_left_to_us(config)}
    stored = configs.load(path)
    there, here = (run.fixed_settings() | {"mesh": None} for run in (stored, config))
    fixed = _by_name(configs.differing_keys(there, here))
    # A setting that is fixed in only one of the two is None in the other; its value may be the same in both.
    values = _by_name(configs.differing_keys(configs.to_dict(stored), configs.to_dict(config)))
    named = {name: values.get(name, text) for name, text in fixed.items() if name not in free}
    return [text for name, text in named.items() if name in values or "None" not in text]


def _by_name(differing: list[str]) -> dict[str, str]:
    """Return {key: text} for the texts of `differing_keys`."""
    return {text.split(" ")[0]: text for text in differing}


def _move_leftovers(folder: Path) -> None:
    """Make room for a new start in the folder of a run that did no work."""
    for path in (folder / "sampler.json", *folder.glob("sampler-*.json")):
        path.unlink(missing_ok=True)
    if (folder / "policies").exists():  # of the last run; samplers must not take them for this one's
        remove_folder(folder / "policies")
    if not (folder / "checkpoints").exists():
        return
    make_folder(folder / "moved_away")
    names = (folder / "moved_away" / f"initial-checkpoint-{count}" for count in range(10_000))
    target = next(path for path in names if not path.exists())
    move_folder(folder / "checkpoints", target)
    progress.say(f"{folder}: its run did no work and starts anew; {target} can be deleted")


def stage_folder(run: Path, stage: int) -> Path:
    """Return the folder with the rollouts of a stage."""
    return run / "rollouts" / f"stage-{stage:03d}"


def is_sampled(run: Path, config: RunConfig) -> bool:
    """Return whether the rollouts of all stages are complete."""
    return all((stage_folder(run, stage) / "manifest.json").exists() for stage in config.stages)


def reference_folder(run: Path, stage: int) -> Path:
    """Return the folder with the reference policy's log-probs for the rollouts of a stage."""
    return run / "reference" / f"stage-{stage:03d}"


def read_config(folder: Path) -> RunConfig:
    """Return the config with which a run was started."""
    path = folder / "config.yaml"
    if not path.exists():
        inside = [] if is_remote(folder) else sorted(folder.glob("*/config.yaml"))
        named = f"; runs in it: {', '.join(place.parent.name for place in inside[:8])}" if inside else ""
        raise ConfigError(f"{folder}: not the folder of a run (it has no config.yaml){named}")
    return configs.load(path)
