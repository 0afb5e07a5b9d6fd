"""Replay a stage that was imported from files: fit the sizes of a config to it, and check that they fit.

An imported stage has no run. The replay starts from the weights of `model.source`.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax.config import AUTO, ConfigError, RunConfig
from mugrpo_jax.files import to_path
from mugrpo_jax.rollouts import RolloutFolder, open_stage
from mugrpo_jax.rollouts.rollout_folder import StageIndex, read_index
from mugrpo_jax.setup.initial_model import run_model_shape


def fitting_sizes(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Return the config keys that depend on the size of the stage, with values that use the whole stage.

    Limits of the config that are large enough stay as they are.
    """
    stage = open_stage(folder)
    index = read_index(stage)
    sampling, batch = config.sampling, config.batch
    prompt = max(sampling.max_prompt_tokens, int(index.prompts.max()))
    response = max(sampling.max_response_tokens, int(index.lengths.max()))
    per_update = min(batch.prompts_per_update, stage.prompts)
    micro_batch = batch.tokens_per_micro_batch
    return {
        "batch.responses_per_prompt": index.lengths.shape[1],
        "batch.prompts_per_update": per_update,
        "batch.updates_per_stage": stage.prompts // per_update * batch.epochs_per_stage,
        "batch.stages": 1,
        "batch.lag": 0,
        "batch.tokens_per_micro_batch": AUTO if micro_batch == AUTO else max(micro_batch, prompt + response),
        "sampling.max_prompt_tokens": prompt,
        "sampling.max_response_tokens": response,
        "warm_start.updates": 0,
    }


def imported_rollouts(config: RunConfig) -> RolloutFolder:
    """Return the imported stage that `config.replay` names; raise an error if the config does not fit it."""
    assert config.replay.run is not None
    folder = to_path(config.replay.run)
    stage = open_stage(folder, share=(jax.process_index(), jax.process_count()))
    index, manifest = read_index(stage), stage.manifest() or {}
    per_epoch = stage.prompts // config.batch.prompts_per_update
    possible = per_epoch * config.batch.epochs_per_stage
    vocabulary = run_model_shape(config).vocab_size
    limits = (
        ("batch.responses_per_prompt", config.batch.responses_per_prompt, {index.lengths.shape[1]}),
        ("batch.updates_per_stage", config.batch.updates_per_stage, range(1, possible + 1)),
        ("replay.stage", config.replay.stage, {0}),
        ("warm_start.updates", config.warm_start.updates, {0}),
    )
    for key, value, allowed in limits:
        if value not in allowed:
            raise ConfigError(f"{key}: {value} does not fit {folder}; possible: {_text(allowed)}")
    check_lengths(config, stage, index)
    if manifest["largest_token"] >= vocabulary:
        raise ConfigError(
            f"model.source: {config.model.source} has {vocabulary} tokens, {folder} has the token "
            f"{manifest['largest_token']}; name the model with whose tokenizer the rollouts were made"
        )
    return stage


def check_lengths(config: RunConfig, stage: RolloutFolder, index: StageIndex) -> None:
    """Raise an error if a prompt or a response of a stored stage is longer than the config's limits."""
    lengths = (
        ("sampling.max_prompt_tokens", config.sampling.max_prompt_tokens, index.prompts.max()),
        ("sampling.max_response_tokens", config.sampling.max_response_tokens, index.lengths.max()),
    )
    for key, limit, longest in lengths:
        if longest > limit:
            raise ConfigError(f"{key}: {limit} is too small for {stage.folder}; possible: {longest} or more")


def _text(allowed: Collection[int]) -> str:
    return f"{min(allowed)} to {max(allowed)}" if len(allowed) > 1 else str(next(iter(allowed), "none"))
