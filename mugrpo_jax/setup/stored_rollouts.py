"""Find the rollouts in the folder of a run or of an imported stage, and the model that belongs to them."""

from pathlib import Path

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import to_path
from mugrpo_jax.models import ModelConfig, Tokenizer
from mugrpo_jax.models.io.loading import model_shape, model_tokenizer
from mugrpo_jax.rollouts.rollout_folder import read_manifest
from mugrpo_jax.runs.run_folder import read_config, stage_folder
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.trained_model import is_run


def is_stage(path: Path) -> bool:
    """Return whether a path is the folder of a complete stage by itself, as an import writes it."""
    return (path / "manifest.json").exists()


def stage_folders(path: Path, stage: int | None = None) -> dict[int, Path]:
    """Return the folders of the stages of a run, or of one stage, by their numbers; some may not exist yet.

    The folder of an imported stage is its only stage, with number 0. A replay has the stage that it replays.
    """
    if is_stage(path):
        stages, folder = range(1), path
    else:
        config = read_config(path)
        stages, folder = config.stages, path
        if config.replay.run is not None:
            folder = to_path(config.replay.run)
    if stage is not None and stage not in stages:
        raise ConfigError(f"{path}: no stage {stage}; it has {', '.join(map(str, stages))}")
    chosen = stages if stage is None else [stage]
    return {number: folder if is_stage(folder) else stage_folder(folder, number) for number in chosen}


def behavior_names(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the behaviors that wrote a run's responses; () if all have the same.

    A replay has those of the stage that it replays.
    """
    if config.replay.run is None:
        return config.sampling.behavior_names
    folder = stage_folders(to_path(config.replay.run), config.replay.stage)[config.replay.stage]
    names = tuple(sorted(read_manifest(folder / "manifest.json").get("behaviors", {})))
    return names if len(names) > 1 else ()


def shape_of(name: str | Path) -> ModelConfig:
    """Return the shape of the model of a run, or of a model by any name that `load_model` knows."""
    return run_model_shape(read_config(to_path(name))) if is_run(name) else model_shape(name)


def tokenizer_of(name: str | Path) -> Tokenizer:
    """Return the tokenizer of a run, or of a model by any name that `load_model` knows."""
    return run_model_tokenizer(read_config(to_path(name))) if is_run(name) else model_tokenizer(name)


def known_vocabulary(source: Path) -> int | None:
    """Return the vocabulary of a run's model; None for an imported stage, or if the model is not here."""
    try:
        return shape_of(source).vocab_size if is_run(source) else None
    except (ValueError, OSError):
        return None
