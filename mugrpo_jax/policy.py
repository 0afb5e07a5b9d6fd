"""The policy of a run: model, tokenizer, devices, and the sizes that follow from the config."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import tasks
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import ModelConfig, make_mesh
from mugrpo_jax.models.loading import LoadedModel, load_model, tiny_model
from mugrpo_jax.models.tokenizer import CharTokenizer, Tokenizer
from mugrpo_jax.rollouts import Buckets, plan_buckets
from mugrpo_jax.sampling import Sampler, SamplerPlan, plan_sampler
from mugrpo_jax.tasks import Problem


@dataclasses.dataclass(frozen=True)
class Policy:
    """What stays the same while the weights change.

    Attributes:
      model: shape of the decoder.
      graphdef: its static definition.
      tokenizer: text to tokens and back.
      mesh: all devices of the run.
    """

    config: RunConfig
    model: ModelConfig
    graphdef: Any
    tokenizer: Tokenizer
    mesh: Mesh

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
        sampling, batch = self.config.sampling, self.config.batch
        return plan_buckets(
            sampling.max_prompt_tokens + sampling.max_response_tokens,
            batch.tokens_per_micro_batch,
            self.mesh.shape["data"] * self.mesh.shape["fsdp"],
            unit=batch.length_multiple,
        )

    def sampler_plan(self) -> SamplerPlan:
        """Sizes of the sampler on this host's devices."""
        sampling = self.config.sampling
        local = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        return plan_sampler(
            self.model,
            max_prompt=sampling.max_prompt_tokens,
            max_length=sampling.max_prompt_tokens + sampling.max_response_tokens,
            slots=sampling.slots,
            mesh=None if len(local) == 1 else make_mesh(data=len(local), devices=local),
            dtype=jnp.dtype(self.config.model.sampling_dtype),
        )

    def sampler(self, params: Any) -> Sampler:
        """A sampler with these weights; close it before the updates start."""
        if jax.process_count() > 1:
            whole = NamedSharding(self.mesh, P())
            gathered = jax.jit(lambda tree: tree, out_shardings=whole)(params)
            params = jax.tree.map(lambda leaf: leaf.addressable_data(0), gathered)
        return Sampler(self.graphdef, params, self.sampler_plan())


def load_policy(config: RunConfig) -> tuple[Policy, Any]:
    """The policy and its initial float32 weights, sharded over the mesh."""
    mesh = make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    loaded = _load(config, mesh)
    return Policy(config, loaded.config, loaded.graphdef, loaded.tokenizer, mesh), loaded.params


def _load(config: RunConfig, mesh: Mesh) -> LoadedModel:
    if config.model.source != "tiny":
        return load_model(config.model.source, dtype=jnp.float32, mesh=mesh, seed=config.seed)
    tiny = config.model.tiny
    return tiny_model(
        CharTokenizer(tasks.ARITHMETIC_ALPHABET),
        mesh=mesh,
        seed=config.seed,
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=tiny.hidden_size // tiny.num_heads,
        intermediate_size=tiny.intermediate_size,
    )
