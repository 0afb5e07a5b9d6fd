"""The parts of a run that stay fixed during training: model, tokenizer, mesh, and derived sizes."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.config import RunConfig
from mugrpo_jax.models import Decoder, LoraDecoder, ModelConfig, Tokenizer, check_mesh, random_params
from mugrpo_jax.rollouts import Buckets
from mugrpo_jax.sampling import Sampler, SamplerPlan
from mugrpo_jax.setup import problem_tokens
from mugrpo_jax.setup.auto_settings import choose_settings
from mugrpo_jax.setup.behavior_policy import check_same_weights, load_behavior, other_sources
from mugrpo_jax.setup.devices import copy_on_host, run_mesh
from mugrpo_jax.setup.initial_model import initial_model, run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.lora import BaseWeights, load_base, trainable_model
from mugrpo_jax.setup.run_environment import turn_ends
from mugrpo_jax.setup.sampler_record import recorded_sampler_plan
from mugrpo_jax.setup.sizes import sampler_plan, step_options, update_buckets
from mugrpo_jax.tasks import Problem
from mugrpo_jax.training import StepOptions


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """The parts of a run that stay fixed while the weights change.

    `mesh` has all devices of the run. `programs` has the compiled programs of all samplers and of the update
    step, so that only the first sampler compiles. `sampler_file` records the planned slots; None plans them
    anew at every start. A sampler calls `on_tokens` whenever it has sampled new tokens. `base` are the
    frozen weights of a LoRA run; without them, all weights that `sampler` gets are complete.
    `behavior_plans` and `behavior_programs` are the sizes and the compiled programs of the samplers of other
    models, by their sources.
    """

    config: RunConfig
    model: Decoder
    tokenizer: Tokenizer
    mesh: Mesh
    programs: CompiledPrograms = dataclasses.field(default_factory=CompiledPrograms)
    behavior_plans: dict[str, SamplerPlan] = dataclasses.field(default_factory=dict)
    behavior_programs: dict[str, CompiledPrograms] = dataclasses.field(default_factory=dict)
    sampler_file: Path | None = None
    on_tokens: Callable[[], None] | None = None
    base: BaseWeights | None = None

    @property
    def trainable(self) -> Decoder | LoraDecoder:
        """The model whose weights the updates change: `model`, or with LoRA its adapters."""
        return self.model if self.base is None else self.base.model

    def frozen(self) -> Any:
        """Return the frozen weights of a LoRA run on the devices; None without LoRA."""
        return None if self.base is None else self.base.on_devices()

    def prompt_tokens(self, problem: Problem) -> np.ndarray:
        """Return the tokens of a problem's prompt; raise an error if the prompt is too long."""
        return problem_tokens.prompt_tokens(self.config, self.tokenizer, problem)

    @functools.cached_property
    def stop_ids(self) -> list[int]:
        """The tokens that end a turn of the model, and without an environment its response."""
        return turn_ends(self.config.environment, self.tokenizer)

    def solution_tokens(self, problem: Problem) -> problem_tokens.Solution:
        """Return the tokens of a worked solution and the end token; raise an error if it is too long."""
        return problem_tokens.solution_tokens(self.config, self.tokenizer, problem)

    def buckets(self) -> Buckets:
        """Return the possible shapes of micro-batches in the update step."""
        return update_buckets(self.config, self.mesh)

    def step_options(self) -> StepOptions:
        """Return the options with which the update step computes the loss."""
        return step_options(self.config)

    @functools.cached_property
    def sampler_plan(self) -> SamplerPlan:
        """The sampler's sizes on this host; computed once, because programs are compiled for these sizes."""
        if self.sampler_file is None:
            return sampler_plan(self.config, self.model.config, self.mesh)
        return recorded_sampler_plan(self.config, self.model.config, self.mesh, self.sampler_file)

    def sampler(self, params: Any) -> Sampler:
        """Return a sampler with these trained weights; the caller must close it before the updates start."""
        if self.base is not None:
            self.base.leave_devices()  # first, because the plan of the sampler measures the free memory
        plan = self.sampler_plan
        if plan.mesh is not None:
            frozen = {} if self.base is None else {"base": self.base.on_devices()}
            weights = copy_on_host(self.trainable, params | frozen, plan, self.mesh)
        elif self.base is not None:
            weights = self.base.merged_on_device(params, plan)
        else:
            return Sampler(self.model, params, plan, self.programs, on_tokens=self.on_tokens)
        return Sampler(self.model, weights, plan, self.programs, prepared=True, on_tokens=self.on_tokens)

    def behavior_sampler(self, source: str) -> Sampler:
        """Load another model that writes responses; return a sampler, which the caller must close."""
        if self.base is not None:
            self.base.leave_devices()
        loaded = load_behavior(self.config, source, self.mesh)
        if self.sampler_file is not None:
            file = self.sampler_file.with_name(f"weights-{other_sources(self.config).index(source)}.json")
            check_same_weights(self.config, source, loaded.params, file)
        if source not in self.behavior_plans:  # after loading, so that the weights are not counted as free
            self.behavior_plans[source] = self._behavior_plan(source, loaded.config)
        plan = self.behavior_plans[source]
        programs = self.behavior_programs.setdefault(source, CompiledPrograms())
        if plan.mesh is None:
            return Sampler(loaded.model, loaded.params, plan, programs)
        weights = copy_on_host(loaded.model, loaded.params, plan, self.mesh)
        return Sampler(loaded.model, weights, plan, programs, prepared=True)

    def _behavior_plan(self, source: str, shape: ModelConfig) -> SamplerPlan:
        if self.sampler_file is None:
            return sampler_plan(self.config, shape, self.mesh)
        number = other_sources(self.config).index(source)
        file = self.sampler_file.with_name(f"sampler-{number}.json")
        return recorded_sampler_plan(self.config, shape, self.mesh, file)


def load_run_model(config: RunConfig) -> tuple[RunSetup, Any]:
    """Return the setup of a run, and the initial float32 weights to train, sharded over the mesh."""
    mesh = run_mesh(config)
    shape = run_model_shape(config)
    config, _ = choose_settings(config, shape, mesh)
    trainable = trainable_model(config, Decoder(shape))
    if not isinstance(trainable, LoraDecoder):
        loaded = initial_model(config, mesh)
        return RunSetup(config, loaded.model, loaded.tokenizer, mesh), loaded.params
    loaded = load_base(config, mesh)
    base = BaseWeights(trainable, loaded.params, mesh)
    params = random_params(trainable, seed=config.seed, mesh=mesh)
    return RunSetup(config, loaded.model, loaded.tokenizer, mesh, base=base), params


def load_sampling_setup(config: RunConfig, mesh: Mesh) -> RunSetup:
    """Return the setup of a sampler of its own on a mesh. It gets the weights from its trainer.

    Only with LoRA weights are loaded here: the frozen ones.
    """
    shape = run_model_shape(config)
    config, _ = choose_settings(config, shape, mesh)
    model = Decoder(shape)
    check_mesh(shape, mesh)
    trainable = trainable_model(config, model)
    if not isinstance(trainable, LoraDecoder):
        return RunSetup(config, model, run_model_tokenizer(config), mesh)
    loaded = load_base(config, mesh)
    base = BaseWeights(trainable, loaded.params, mesh)
    return RunSetup(config, loaded.model, loaded.tokenizer, mesh, base=base)
