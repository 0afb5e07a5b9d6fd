"""Compute the sizes and options of the update step and of the sampler from the config."""

from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax.config import AUTO, RunConfig, value_of
from mugrpo_jax.models import ModelConfig
from mugrpo_jax.objectives import Statistics
from mugrpo_jax.rollouts import Buckets, plan_buckets
from mugrpo_jax.sampling import SamplerPlan, SamplingSettings, plan_sampler
from mugrpo_jax.sampling.sampler_plan import sampler_dtypes
from mugrpo_jax.setup.devices import local_device, sampling_mesh
from mugrpo_jax.training import StepOptions


def step_options(config: RunConfig) -> StepOptions:
    """Return the options with which the update step computes the loss."""
    arrays = config.objective.arrays
    proximal: Literal["policy", "state"] = "policy" if config.proximal_dtype is None else "state"
    return StepOptions(
        compute_dtype=config.model.compute_dtype,
        temperature=config.training_temperature,
        remat=_chosen(config, "model.remat"),
        scan=_chosen(config, "model.scan_layers"),
        attention=config.model.attention,
        share_prompts=config.batch.share_prompts,
        entropy="gradient" if "entropy" in arrays else "value",
        proximal=proximal if "proximal_logp" in arrays else "none",
        abandoned_ratio=config.abandoned_ratio,
    )


def _chosen(config: RunConfig, key: str) -> Any:
    value = value_of(config, key)
    if value == AUTO:
        raise ValueError(f"{key}: nothing was chosen yet; call `choose_settings` first")
    return value


def update_statistics(config: RunConfig) -> Statistics | None:
    """Return the statistics that the objective takes from the whole update; None if it takes none."""
    return config.objective.statistics() if config.batch.statistics == "update" else None


def update_buckets(config: RunConfig, mesh: Mesh) -> Buckets:
    """Return the possible shapes of micro-batches in the update step."""
    sampling, batch = config.sampling, config.batch
    return plan_buckets(
        sampling.max_prompt_tokens + sampling.max_response_tokens,
        _chosen(config, "batch.tokens_per_micro_batch"),
        mesh.shape["data"] * mesh.shape["fsdp"],
        unit=batch.length_multiple,
        share=batch.share_prompts,
        # On other platforms, the updates are compiled while the responses are sampled.
        fit_rows=local_device(mesh).platform == "gpu",
        most_rows=batch.prompts_per_update * batch.responses_per_prompt,
    )


def sampler_plan(
    config: RunConfig, model: ModelConfig, mesh: Mesh, *, slots: int | None = None, **options: Any
) -> SamplerPlan:
    """Plan this host's sampler; `slots` None takes those of the config, `options` are of `plan_sampler`."""
    sampling = config.sampling
    return plan_sampler(
        model,
        max_prompt=sampling.max_prompt_tokens,
        max_length=sampling.max_prompt_tokens + sampling.max_response_tokens,
        slots=slots or (sampling.slots if isinstance(sampling.slots, int) else None),
        shrink=sampling.shrink if isinstance(sampling.shrink, bool) else None,
        samples=_most_samples(config, mesh),
        mesh=sampling_mesh(mesh, config.mesh.sampling_tensor),
        turns=config.environment.name is not None,
        cache_dtype=None if sampling.cache_dtype == "auto" else jnp.dtype(sampling.cache_dtype),
        **sampler_dtypes(config.model.sampling_dtype),
        **options,
    )


def _most_samples(config: RunConfig, mesh: Mesh) -> int:
    """Return how many responses a host samples in a stage or an evaluation, whichever is more."""
    hosts = len({device.process_index for device in mesh.devices.flat})
    prompts = 0 if config.replay.run is not None else config.prompts_per_stage
    stage = prompts * config.batch.responses_per_prompt
    evaluation = config.evaluation.problems * config.evaluation.samples
    return max(-(-stage // hosts), -(-evaluation // hosts), 1)


def rollout_settings(config: RunConfig) -> SamplingSettings:
    """Return the settings for sampling the rollouts of a stage."""
    return SamplingSettings(
        samples=config.batch.responses_per_prompt,
        max_tokens=config.sampling.max_response_tokens,
        temperature=config.sampling.temperature,
        seed=config.seed,
        dtype=config.model.sampling_dtype,
    )


def evaluation_settings(config: RunConfig) -> SamplingSettings:
    """Return the settings for sampling responses to held-out problems during a run."""
    return SamplingSettings(
        samples=config.evaluation.samples,
        max_tokens=config.sampling.max_response_tokens,
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        seed=config.seed,
        dtype=config.model.sampling_dtype,
    )
