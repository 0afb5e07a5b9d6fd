"""The policy of a run: model, tokenizer, devices, and the sizes that follow from the config."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import tasks
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import ModelConfig, make_mesh
from mugrpo_jax.models.loading import (
    LoadedModel,
    load_model,
    model_shape,
    model_tokenizer,
    tiny_model,
    tiny_shape,
)
from mugrpo_jax.models.tokenizer import CharTokenizer, Tokenizer
from mugrpo_jax.rollouts import Buckets, plan_buckets
from mugrpo_jax.sampling import Sampler, SamplerPlan, plan_sampler
from mugrpo_jax.tasks import Problem
from mugrpo_jax.training import StepOptions


@dataclasses.dataclass(frozen=True)
class Policy:
    """What stays the same while the weights change.

    Attributes:
      model: shape of the decoder.
      graphdef: its static definition.
      tokenizer: text to tokens and back.
      mesh: all devices of the run.
      programs: what its samplers compiled, so that only the first of them compiles.
    """

    config: RunConfig
    model: ModelConfig
    graphdef: Any
    tokenizer: Tokenizer
    mesh: Mesh
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def prompt_tokens(self, problem: Problem) -> np.ndarray:
        """Tokens of a problem's prompt; one that is too long is refused by its id."""
        prompt = problem.prompt
        tokens = (
            self.tokenizer.encode(prompt, start=True)
            if isinstance(prompt, str)
            else self.tokenizer.chat(prompt)
        )
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
        return sampler_plan(self.config, self.model, self.mesh)

    def sampler(self, params: Any) -> Sampler:
        """A sampler with these weights; close it before the updates start."""
        if jax.process_count() > 1:
            whole = NamedSharding(self.mesh, P())
            gathered = jax.jit(lambda tree: tree, out_shardings=whole)(params)
            params = jax.tree.map(lambda leaf: leaf.addressable_data(0), gathered)
        return Sampler(self.graphdef, params, self.sampler_plan, self.programs)


def step_options(config: RunConfig) -> StepOptions:
    """How the update step computes the loss."""
    return StepOptions(
        compute_dtype=config.model.compute_dtype,
        temperature=config.sampling.temperature,
        remat=config.model.remat,
        scan=config.model.scan_layers,
        attention=config.model.attention,
    )


def update_buckets(config: RunConfig, mesh: Mesh) -> Buckets:
    """Micro-batch shapes of the update step."""
    sampling, batch = config.sampling, config.batch
    return plan_buckets(
        sampling.max_prompt_tokens + sampling.max_response_tokens,
        batch.tokens_per_micro_batch,
        mesh.shape["data"] * mesh.shape["fsdp"],
        unit=batch.length_multiple,
    )


def sampler_plan(
    config: RunConfig, model: ModelConfig, mesh: Mesh, *, memory: int | None = None
) -> SamplerPlan:
    """Sizes of the sampler on this host's devices; `memory` is what is free on each, None asks."""
    sampling = config.sampling
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return plan_sampler(
        model,
        max_prompt=sampling.max_prompt_tokens,
        max_length=sampling.max_prompt_tokens + sampling.max_response_tokens,
        slots=sampling.slots,
        mesh=None if len(local) == 1 else make_mesh(data=len(local), devices=local),
        dtype=jnp.dtype(config.model.sampling_dtype),
        memory=memory,
    )


def run_mesh(config: RunConfig) -> Mesh:
    """All devices of the run in the config's shape."""
    return make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)


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
    return Policy(config, loaded.config, loaded.graphdef, loaded.tokenizer, mesh), loaded.params


def _load(config: RunConfig, mesh: Mesh) -> LoadedModel:
    if config.model.source != "tiny":
        return load_model(config.model.source, dtype=jnp.float32, mesh=mesh, seed=config.seed)
    return tiny_model(_tiny_tokenizer(), mesh=mesh, seed=config.seed, **_tiny(config))


def _tiny_tokenizer() -> CharTokenizer:
    return CharTokenizer(tasks.ARITHMETIC_ALPHABET)


def _tiny(config: RunConfig) -> dict[str, int]:
    tiny = config.model.tiny
    return dataclasses.asdict(tiny) | {"head_dim": tiny.hidden_size // tiny.num_heads}
