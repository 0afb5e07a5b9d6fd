"""The folder of a run: config, environment, journal, and the paths of the rollouts."""

import json
from pathlib import Path

import jax
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import PATIENCE_S, make_folder, wait_for, write_atomically
from mugrpo_jax.runs.environment import environment
from mugrpo_jax.runs.journal import Journal


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
        if path.exists():
            check_config(self.folder, self.config)
        else:
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


def check_config(folder: Path, config: RunConfig) -> None:
    """Raise an error with the differing keys if a run in the folder was started with another config."""
    path = folder / "config.yaml"
    if not path.exists():
        return
    mesh = {"mesh": None}
    there, here = (run.fixed_settings() | mesh for run in (configs.load(path), config))
    if differing := configs.differing_keys(there, here):
        raise ConfigError(
            f"{path}: this run was started with another config: {'; '.join(differing)}; "
            "use another --out, or the config it was started with"
        )


def stage_folder(run: Path, stage: int) -> Path:
    """Return the folder with the rollouts of a stage."""
    return run / "rollouts" / f"stage-{stage:03d}"


def reference_folder(run: Path, stage: int) -> Path:
    """Return the folder with the reference policy's log-probs for the rollouts of a stage."""
    return run / "reference" / f"stage-{stage:03d}"


def read_config(folder: Path) -> RunConfig:
    """Return the config with which a run was started."""
    path = folder / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{folder}: not the folder of a run (it has no config.yaml)")
    return configs.load(path)
