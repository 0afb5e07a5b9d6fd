"""Sizes and options that follow from the config: of the update step and of the sampler."""

import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax.config import RunConfig
from mugrpo_jax.models import ModelConfig
from mugrpo_jax.rollouts import Buckets, plan_buckets
from mugrpo_jax.sampling import SamplerPlan, SamplingSettings, plan_sampler
from mugrpo_jax.setup.devices import sampling_mesh
from mugrpo_jax.training import StepOptions


def step_options(config: RunConfig) -> StepOptions:
    """How the update step computes the loss."""
    return StepOptions(
        compute_dtype=config.model.compute_dtype,
        temperature=config.sampling.temperature,
        remat=config.model.remat,
        scan=config.model.scan_layers,
        attention=config.model.attention,
        share_prompts=config.batch.share_prompts,
    )


def update_buckets(config: RunConfig, mesh: Mesh) -> Buckets:
    """Micro-batch shapes of the update step."""
    sampling, batch = config.sampling, config.batch
    return plan_buckets(
        sampling.max_prompt_tokens + sampling.max_response_tokens,
        batch.tokens_per_micro_batch,
        mesh.shape["data"] * mesh.shape["fsdp"],
        unit=batch.length_multiple,
        share=batch.share_prompts,
    )


def sampler_plan(
    config: RunConfig, model: ModelConfig, mesh: Mesh, *, memory: int | None = None
) -> SamplerPlan:
    """Sizes of the sampler on this host's devices; `memory`: free bytes on each; None asks the device."""
    sampling = config.sampling
    return plan_sampler(
        model,
        max_prompt=sampling.max_prompt_tokens,
        max_length=sampling.max_prompt_tokens + sampling.max_response_tokens,
        slots=sampling.slots,
        mesh=sampling_mesh(mesh, config.mesh.sampling_tensor),
        dtype=jnp.dtype(config.model.sampling_dtype),
        memory=memory,
    )


def rollout_settings(config: RunConfig) -> SamplingSettings:
    """How the rollouts of a stage are sampled."""
    return SamplingSettings(
        samples=config.batch.responses_per_prompt,
        max_tokens=config.sampling.max_response_tokens,
        temperature=config.sampling.temperature,
        seed=config.seed,
        dtype=config.model.sampling_dtype,
    )


def evaluation_settings(config: RunConfig) -> SamplingSettings:
    """How responses to held-out problems are sampled during a run."""
    return SamplingSettings(
        samples=config.evaluation.samples,
        max_tokens=config.sampling.max_response_tokens,
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        seed=config.seed,
        dtype=config.model.sampling_dtype,
    )
