"""The policy of a run: model, tokenizer, devices, and the sizes that follow from the config."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from mugrpo_jax import tasks
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import Decoder, ModelConfig, cast, make_mesh, param_sharding
from mugrpo_jax.models.io.loading import (
    LoadedModel,
    load_model,
    model_shape,
    model_tokenizer,
    tiny_model,
    tiny_shape,
)
from mugrpo_jax.models.sharding import MESH_AXES
from mugrpo_jax.models.tokenizer import CharTokenizer, Tokenizer
from mugrpo_jax.rollouts import Buckets, plan_buckets
from mugrpo_jax.sampling import Sampler, SamplerPlan, plan_sampler
from mugrpo_jax.tasks import Problem
from mugrpo_jax.training import StepOptions


@dataclasses.dataclass(frozen=True)
class Policy:
    """What stays the same while the weights change.

    Attributes:
      model: the decoder.
      tokenizer: text to tokens and back.
      mesh: all devices of the run.
      programs: what its samplers compiled, so that only the first of them compiles.
    """

    config: RunConfig
    model: Decoder
    tokenizer: Tokenizer
    mesh: Mesh
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def prompt_tokens(self, problem: Problem) -> np.ndarray:
        """Tokens of a problem's prompt; one that is too long is refused by its id."""
        tokens = prompt_tokens(self.tokenizer, problem)
        limit = self.config.sampling.max_prompt_tokens
        if len(tokens) > limit:
            raise ConfigError(
                f"problem {problem.id}: its prompt has {len(tokens)} tokens, "
                f"sampling.max_prompt_tokens is {limit}; raise it or filter the data"
            )
        return np.asarray(tokens, np.int32)

    def solution_tokens(self, problem: Problem) -> np.ndarray:
        """Tokens of a problem's worked solution with the end token."""
        if problem.solution is None:
            raise ConfigError(f"problem {problem.id}: no worked solution; a warm start needs one for each")
        tokens = [*self.tokenizer.encode(problem.solution), min(self.tokenizer.eos_ids)]
        limit = self.config.sampling.max_response_tokens
        if len(tokens) > limit:
            raise ConfigError(
                f"problem {problem.id}: its solution has {len(tokens)} tokens, "
                f"sampling.max_response_tokens is {limit}; raise it or filter the data"
            )
        return np.asarray(tokens, np.int32)

    def buckets(self) -> Buckets:
        """Micro-batch shapes of the update step."""
        return update_buckets(self.config, self.mesh)

    def step_options(self) -> StepOptions:
        """How the update step computes the loss."""
        return step_options(self.config)

    @functools.cached_property
    def sampler_plan(self) -> SamplerPlan:
        """Sizes of the sampler on this host's devices, planned once: programs are compiled for them."""
        return sampler_plan(self.config, self.model.config, self.mesh)

    def sampler(self, params: Any) -> Sampler:
        """A sampler with these weights; close it before the updates start."""
        plan = self.sampler_plan
        if plan.mesh is not None:
            params = _copy_on_host(self.model, params, plan.mesh, plan.dtype)
        return Sampler(self.model, params, plan, self.programs)


_cast = jax.jit(cast, static_argnames="dtype")


def _copy_on_host(model: Decoder, params: Any, mesh: Mesh, dtype: Any) -> Any:
    """A whole copy of the weights on this host's devices, split over `tensor` as its `mesh` says.

    They are cast while still spread over all devices of the run, so that few bytes travel, and no device
    ever holds more than its part of the copy.
    """
    weights = _cast(params, dtype=dtype)
    placed = jax.device_put(weights, param_sharding(_on_all_hosts(mesh), model, weights))
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_single_device_arrays(
            leaf.shape, sharding, [shard.data for shard in leaf.addressable_shards]
        ),
        placed,
        param_sharding(mesh, model, weights),
    )


def _sampling_mesh(mesh: Mesh, tensor: int) -> Mesh | None:
    """This host's devices, as copies of the weights × devices that share one; None for a lone device."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if len(local) % tensor:
        raise ConfigError(
            f"mesh.sampling_tensor: {tensor} does not divide the {len(local)} devices of a host"
        )
    if jax.process_count() == 1:
        return None if len(local) == 1 else make_mesh(data=-1, tensor=tensor, devices=local)
    return _rows_of(sorted(local, key=lambda device: device.id), tensor)


def _on_all_hosts(mesh: Mesh) -> Mesh:
    """What `_sampling_mesh` gave each host, as one mesh."""
    if jax.process_count() == 1:
        return mesh
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return _rows_of(devices, mesh.shape["tensor"])


def _rows_of(devices: Sequence[jax.Device], tensor: int) -> Mesh:
    return Mesh(np.asarray(devices).reshape(-1, 1, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


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
    """Sizes of the sampler on this host's devices; `memory` is what is free on each, None asks."""
    sampling = config.sampling
    return plan_sampler(
        model,
        max_prompt=sampling.max_prompt_tokens,
        max_length=sampling.max_prompt_tokens + sampling.max_response_tokens,
        slots=sampling.slots,
        mesh=_sampling_mesh(mesh, config.mesh.sampling_tensor),
        dtype=jnp.dtype(config.model.sampling_dtype),
        memory=memory,
    )


def run_mesh(config: RunConfig) -> Mesh:
    """All devices of the run in the config's shape."""
    return make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)


def prompt_tokens(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Tokens of a problem's prompt: plain text, or messages through the chat template."""
    prompt = problem.prompt
    return tokenizer.encode(prompt, start=True) if isinstance(prompt, str) else tokenizer.chat(prompt)


def policy_shape(config: RunConfig) -> ModelConfig:
    """The shape of the run's model; no weight is read."""
    if config.model.source != "tiny":
        return model_shape(config.model.source)
    return tiny_shape(_tiny_tokenizer(), **_tiny(config))


def policy_tokenizer(config: RunConfig) -> Tokenizer:
    """The run's tokenizer; no weight is read."""
    return _tiny_tokenizer() if config.model.source == "tiny" else model_tokenizer(config.model.source)


def load_policy(config: RunConfig) -> tuple[Policy, Any]:
    """The policy and its initial float32 weights, sharded over the mesh."""
    mesh = run_mesh(config)
    loaded = _load(config, mesh)
    return Policy(config, loaded.model, loaded.tokenizer, mesh), loaded.params


def _load(config: RunConfig, mesh: Mesh) -> LoadedModel:
    if config.model.source != "tiny":
        return load_model(config.model.source, dtype=jnp.float32, mesh=mesh, seed=config.seed)
    return tiny_model(_tiny_tokenizer(), mesh=mesh, seed=config.seed, **_tiny(config))


def _tiny_tokenizer() -> CharTokenizer:
    return CharTokenizer(tasks.ARITHMETIC_ALPHABET)


def _tiny(config: RunConfig) -> dict[str, int]:
    tiny = config.model.tiny
    return dataclasses.asdict(tiny) | {"head_dim": tiny.hidden_size // tiny.num_heads}
