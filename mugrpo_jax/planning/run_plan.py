"""Compute the sizes and the memory of a run from its config. No arrays are allocated."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax import models, training
from mugrpo_jax.config import AUTO, RunConfig
from mugrpo_jax.models import Decoder, ModelConfig, check_mesh
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.rollouts import Buckets
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.sampling.sampler_plan import free_memory, sampler_dtypes
from mugrpo_jax.setup.auto_settings import Choice, choose_settings
from mugrpo_jax.setup.behavior_policy import behavior_shape, check_behaviors, other_sources
from mugrpo_jax.setup.devices import local_device, run_mesh
from mugrpo_jax.setup.initial_model import run_model_shape
from mugrpo_jax.setup.lora import abstract_run_base, trainable_model
from mugrpo_jax.setup.reference_policy import check_reference, reference_shape
from mugrpo_jax.setup.sizes import sampler_plan, update_buckets, update_statistics

_BYTES_PER_ROLLOUT_TOKEN = 8  # a token id and its log-prob
_BYTES_PER_REFERENCE = 4  # the log-prob of the reference policy, only with a KL term


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes in use on one device, without the activations of updates, which only the compiler knows.

    Attributes:
      weights: float32 weights that are trained; with LoRA only the adapters.
      base: frozen weights of a LoRA run during updates.
      base_sampling: frozen weights during generation; 0 on one device, where they are in host memory then.
      optimizer: both moments of AdamW.
      drift: weights at the start of the stage and the last gradient; 0 if `track_drift` is False.
      frozen: weights of the proximal policy, and of the reference policy if they stay in memory.
      gradients: float32 gradient, summed over micro-batches.
      compute: weights and the gradient of one micro-batch, both in the compute dtype.
      sampler: weights, KV cache and temporary arrays of the sampler, which are freed before updates start.
      device: free memory of a device; None if unknown.
    """

    weights: int
    base: int
    base_sampling: int
    optimizer: int
    drift: int
    frozen: int
    gradients: int
    compute: int
    sampler: int
    device: int | None

    @property
    def state(self) -> int:
        """Return the bytes in use during the whole run, without the frozen weights of LoRA."""
        return self.weights + self.optimizer + self.drift + self.frozen

    @property
    def generating(self) -> int:
        """Return the bytes in use during generation."""
        return self.state + self.base_sampling + self.sampler

    @property
    def updating(self) -> int:
        """Return the bytes in use during updates, without activations."""
        return self.state + self.base + self.gradients + self.compute


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The sizes of a run, computed from its config. `print(plan)` shows the sizes.

    Attributes:
      buckets: micro-batch shapes; one program is compiled for each shape.
      sampler: sizes of the sampler; None if the run needs no sampler or if no sampler fits.
      memory: bytes on each device.
      checkpoint_bytes: size of one checkpoint on disk.
      choices: the settings that the config left to us.
      problem: one line that says why the run does not fit on these devices; None if no reason is known.
      behaviors: sizes of the samplers of other models that write responses, by their sources. They run one
        after the other, so that the largest counts.
    """

    config: RunConfig
    model: ModelConfig
    mesh: Mesh
    buckets: Buckets
    sampler: SamplerPlan | None
    memory: Memory
    checkpoint_bytes: int
    problem: str | None = None
    choices: tuple[Choice, ...] = ()
    behaviors: Mapping[str, SamplerPlan] = dataclasses.field(default_factory=dict)

    @property
    def stages(self) -> int:
        """Return the number of stages in this run."""
        return len(self.config.stages)

    @property
    def updates(self) -> int:
        """Return the number of optimizer updates in this run."""
        return self.stages * self.config.batch.updates_per_stage

    @property
    def rows_per_update(self) -> int:
        """Return the number of responses in one update."""
        return self.config.batch.prompts_per_update * self.config.batch.responses_per_prompt

    @property
    def responses_per_stage(self) -> int:
        """Return the number of responses generated in one stage; 0 if the run replays a stage."""
        replayed = self.config.replay.run is not None
        return 0 if replayed else self.config.prompts_per_stage * self.config.batch.responses_per_prompt

    @property
    def responses_trained_per_stage(self) -> int:
        """Return the number of responses in all updates of a stage; a response counts once per pass."""
        return self.rows_per_update * self.config.batch.updates_per_stage

    @property
    def most_micro_batches(self) -> int:
        """Return the number of micro-batches in an update if all responses have the maximum length."""
        return -(-self.rows_per_update // self.buckets.rows(self.buckets.lengths[-1]))

    @property
    def rollout_bytes(self) -> int:
        """Return an upper bound of the bytes of all rollouts on disk."""
        tokens = self.stages * self.responses_per_stage * self.config.sampling.max_response_tokens
        per_token = _BYTES_PER_ROLLOUT_TOKEN + (_BYTES_PER_REFERENCE if self.config.uses_reference else 0)
        return tokens * per_token

    @property
    def checkpoints_kept(self) -> int:
        """Return the largest number of checkpoints that are on disk at the same time."""
        keep = self.config.checkpoints
        return keep.keep_last + keep.keep_best + keep.keep_stage_starts * self.stages

    def __str__(self) -> str:
        return f"{self.verdict}\n{self.details()}"

    def details(self) -> str:
        """Return the lines about sizes, memory and disk."""
        lines = {
            "model": self._model(),
            "lora": self._lora(),
            "devices": self._devices(),
            "run": self._run(),
            "update": self._update(),
            "stage": self._work(1),
            "in all": self._work(self.stages),
            "warm start": self._warm_start(),
            "evaluation": self._evaluation(),
            "programs": self._programs(),
            "sampler": str(self.sampler or "none").removeprefix("sampler: "),
            "behaviors": self._behaviors(),
            "memory": self._memory(),
            "copies": self._copies(),
            "disk": self._disk(),
            "chosen": "\n            ".join(map(str, self._chosen())),
        }
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items() if text)

    @property
    def verdict(self) -> str:
        """Return one line that says whether the run fits, as far as that is known without compiling it."""
        if self.problem is not None:
            return f"DOES NOT FIT: {self.problem}"
        needed, device = max(self.memory.generating, self.memory.updating), self.memory.device
        of = human(needed) if device is None else human_share(needed, device)
        return (
            f"FITS without activations: {of} on each device; `mugrpo plan` with --topology also knows "
            "activations and hours"
        )

    def _model(self) -> str:
        m = self.model
        return (
            f"{self.config.model.source}: {m.num_params:,} parameters, {m.num_layers} layers of width "
            f"{m.hidden_size}, vocabulary {m.vocab_size:,}; passes in {self.config.model.compute_dtype}, "
            f"sampling in {self.config.model.sampling_dtype}"
        )

    def _lora(self) -> str:
        lora = self.config.lora
        if not lora.rank:
            return ""
        table = jax.tree.leaves(trainable_model(self.config, Decoder(self.model)).weights())
        trained = sum(math.prod(weight.shape) for weight in table)
        return (
            f"rank {lora.rank}, alpha {lora.alpha:g}, beside {', '.join(lora.targets)}: {trained:,} "
            f"parameters are trained, {trained / self.model.num_params:.2%}; all others are frozen, "
            f"in {lora.base_dtype}"
        )

    def _devices(self) -> str:
        axes = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        return f"{self.mesh.size} × {self.mesh.devices.flat[0].device_kind} ({axes})"

    def _run(self) -> str:
        per_stage = _count(self.config.batch.updates_per_stage, "update")
        return (
            f"{_count(self.stages, 'stage')} × {per_stage} = {_count(self.updates, 'update')}, "
            f"objective {self.config.objective.name}{self._lag()}"
        )

    def _lag(self) -> str:
        lag, oldest = self.config.batch.lag, self.config.largest_staleness
        if not lag or self.config.replay.run is not None:
            return ""
        return (
            f"; lag of {_count(lag, 'stage')}: rollouts are at most {_count(oldest, 'update')} old, and "
            f"{lag + 1} stages are generated before the first update"
        )

    def _update(self) -> str:
        batch = self.config.batch
        pooled = self.most_micro_batches > 1 and update_statistics(self.config) is not None
        forward = "; one more forward pass for the statistics of the objective" if pooled else ""
        left_out = "" if batch.equal_groups == "keep" else "; groups with equal rewards are left out"
        return (
            f"{batch.prompts_per_update} prompts × {batch.responses_per_prompt} responses "
            f"= {_count(self.rows_per_update, 'response')} in at most "
            f"{_count(self.most_micro_batches, 'micro-batch', 'micro-batches')}{left_out}{forward}"
        )

    def _work(self, stages: int) -> str:
        longest, batch = self.config.sampling.max_response_tokens, self.config.batch
        made, read = stages * self.responses_per_stage, stages * self.responses_trained_per_stage
        source = f"replays stage {self.config.replay.stage} of {self.config.replay.run};"
        if self.config.replay.run is None:
            prompts = stages * self.config.prompts_per_stage
            source = (
                f"generates {made:,} responses to {prompts:,} prompts, at most {made * longest:,} tokens;"
            )
        passes = "" if batch.epochs_per_stage == 1 else f" ({batch.epochs_per_stage} passes)"
        return f"{source} trains on {read:,} responses{passes}, at most {read * longest:,} tokens"

    def _warm_start(self) -> str:
        warm = self.config.warm_start
        if not warm.updates or self.config.replay.run is not None:  # a replay starts from a checkpoint
            return ""
        return f"{_count(warm.updates, 'update')} on {warm.rows_per_update} worked solutions each"

    def _evaluation(self) -> str:
        evaluation = self.config.evaluation
        if not evaluation.problems:
            return ""
        responses = evaluation.problems * evaluation.samples
        inside = 0 if evaluation.every is None else (self.updates - 1) // evaluation.every
        times = 2 + (self.stages - 1 if evaluation.every is None else inside)
        return (
            f"{times} times {responses:,} responses to {evaluation.problems} held-out problems "
            "(fewer if the task has fewer)"
        )

    def _programs(self) -> str:
        lengths = ", ".join(map(str, self.buckets.lengths))
        sizes = ", ".join(f"{shape.tokens:,}" for shape in self.buckets.sizes(self.buckets.lengths[0]))
        return f"micro-batches of {sizes} tokens, in rows of up to {lengths}; compiled as they come"

    def _chosen(self) -> list[Choice]:
        """Return what was chosen, with the slots, which are chosen again when the sampler starts."""
        slots = []
        if self.sampler is not None and self.config.sampling.slots == AUTO:
            free = human(self.sampler.memory) if self.sampler.memory else "an unknown amount of memory"
            slots = [
                Choice("sampling.slots", self.sampler.slots, f"as many as are useful and fit into {free}")
            ]
        return [*self.choices, *slots]

    def _behaviors(self) -> str:
        if self.config.sampling.behaviors is None or not self.responses_per_stage:
            return ""
        listed = self.config.sampling.all_behaviors
        shares = ", ".join(f"{b.share:g} by {b.name} at temperature {b.temperature:g}" for b in listed)
        others = [
            f"{source}: {plan.config.num_params:,} parameters, {plan.slots} slots"
            for source, plan in self.behaviors.items()
        ]
        return "; ".join([shares, *others]) + ("; one model after the other" if others else "")

    def _copies(self) -> str:
        """Say what every device holds whole although the run has several devices."""
        shape, tensor = self.mesh.shape, self.config.mesh.sampling_tensor
        whole = []
        if self.mesh.size > 1 and shape["fsdp"] * shape["tensor"] == 1:
            whole.append("the training state (mesh.fsdp and mesh.tensor are 1)")
        if self.mesh.size > 1 and self.sampler is not None and tensor == 1:
            size, dtype = human(self.sampler.weight_bytes), self.config.model.sampling_dtype
            whole.append(f"while sampling, all weights in {dtype}, {size} (mesh.sampling_tensor is 1)")
        return f"every device holds whole: {'; '.join(whole)}" if whole else ""

    def _disk(self) -> str:
        return (
            f"rollouts at most {human(self.rollout_bytes)}; at most "
            f"{_count(self.checkpoints_kept, 'checkpoint')} of {human(self.checkpoint_bytes)}"
        )

    def _memory(self) -> str:
        m = self.memory
        drift = f" + drift {human(m.drift)}" if m.drift else ""
        frozen = f" + frozen policies {human(m.frozen)}" if m.frozen else ""
        free = "" if m.device is None else f"; a device has {human(m.device)}"
        base = f" + frozen weights {human(m.base)}" if m.base else ""
        base_sampling = f" + frozen weights {human(m.base_sampling)}" if m.base_sampling else ""
        return (
            f"per device: weights {human(m.weights)} + optimizer {human(m.optimizer)}{drift}{frozen}; "
            f"generating{base_sampling} + sampler {human(m.sampler)} = {human(m.generating)}; updating{base} "
            f"+ gradients {human(m.gradients)} + compute copies {human(m.compute)} = {human(m.updating)} "
            f"+ activations{free}"
        )


def plan_run(
    config: RunConfig,
    model: ModelConfig | None = None,
    mesh: Mesh | None = None,
    *,
    device_memory: int | None = None,
) -> RunPlan:
    """Compute the plan of a run. No arrays are allocated and no weights are loaded.

    Args:
      model: shape of the model; if None, the shape of the model that the config names.
      mesh: all devices of the run; if None, this machine's devices in the config's mesh shape.
      device_memory: free bytes on each device; if None, the free memory that the device reports.
    """
    model = run_model_shape(config) if model is None else model
    mesh = run_mesh(config) if mesh is None else mesh
    check_mesh(model, mesh)
    check_reference(config, mesh)
    config, choices = choose_settings(config, model, mesh, memory=device_memory)
    check_behaviors(config, mesh)
    state = abstract_state(config, model, mesh)
    weights, optimizer = bytes_on_device(state.params), bytes_on_device(state.opt_state)
    drift = bytes_on_device((state.anchor, state.previous))
    frozen = bytes_on_device((state.proximal, kept_reference(config, mesh)))
    base = bytes_on_device(abstract_run_base(config, Decoder(model), mesh))
    base_sampling = 0 if mesh.size == 1 else base
    device = free_memory(local_device(mesh)) if device_memory is None else device_memory
    kept = weights + optimizer + drift + frozen + base_sampling
    sampler, problem = _sampler(config, model, mesh, kept, device)
    behaviors: dict[str, SamplerPlan] = {}
    for source in other_sources(config) if problem is None else ():
        other, loaded = _behavior(config, source, mesh)
        plan, problem = _sampler(config, other, mesh, kept + loaded, device)
        if plan is None:
            problem = f"the behavior {source}: {problem}"
            break
        behaviors[source] = plan
    memory = Memory(
        weights=weights,
        base=base,
        base_sampling=base_sampling,
        optimizer=optimizer,
        drift=drift,
        frozen=frozen,
        gradients=weights,
        compute=2 * weights * jnp.dtype(config.model.compute_dtype).itemsize // 4,
        sampler=max(map(_sampler_bytes, (sampler, *behaviors.values()))),
        device=device,
    )
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    if problem is None and device is not None and memory.updating > device:
        problem = (
            f"an update takes {human(memory.updating)} on each device without activations, and "
            f"{human(device)} are free; {_smaller(config)}"
        )
    buckets = update_buckets(config, mesh)
    return RunPlan(config, model, mesh, buckets, sampler, memory, whole, problem, choices, behaviors)


def _behavior(config: RunConfig, source: str, mesh: Mesh) -> tuple[ModelConfig, int]:
    """Return the shape of another model that writes responses, and the bytes of its loaded weights."""
    shape = behavior_shape(source)
    model, params = models.abstract(shape, dtype=sampler_dtypes(config.model.sampling_dtype)["dtype"])
    return shape, bytes_on_device(placed(params, models.param_sharding(mesh, model, params)))


def _sampler_bytes(plan: SamplerPlan | None) -> int:
    return 0 if plan is None else plan.weight_bytes + plan.cache_bytes + plan.work_bytes


def _sampler(
    config: RunConfig, model: ModelConfig, mesh: Mesh, kept: int, device: int | None
) -> tuple[SamplerPlan | None, str | None]:
    """Plan a sampler that fits beside a training state of `kept` bytes, or return why no sampler fits."""
    if config.replay.run is not None and not config.evaluation.problems:
        return None, None
    if device is not None and device <= kept:
        return None, (
            f"the training state takes {human(kept)} on each device, and {human(device)} are "
            f"free; {_smaller(config)}"
        )
    left = None if device is None else device - kept
    try:
        return sampler_plan(config, model, mesh, memory=left), None
    except ValueError as error:
        if "does not fit" not in str(error):
            raise
        return None, str(error)


def _smaller(config: RunConfig) -> str:
    """Return what makes the training state smaller."""
    other = "lora.base_dtype=int8" if config.lora.rank else "track_drift=false or LoRA (lora.rank=16)"
    return f"more devices along mesh.fsdp, or {other}, would help"


def abstract_state(config: RunConfig, shape: ModelConfig, mesh: Mesh) -> training.TrainState:
    """Return the training state as abstract arrays with shardings."""
    model = trainable_model(config, Decoder(shape))
    optimizer = training.make_optimizer(config.optimizer, config.total_updates, model)
    return training.abstract_state(
        optimizer, mesh, model, track_drift=config.track_drift, proximal=config.proximal_dtype
    )


def abstract_reference(config: RunConfig, mesh: Mesh) -> tuple[models.Model, Any]:
    """Return the reference policy's model, and its weights as abstract arrays with shardings.

    The start of a LoRA run shares the frozen weights, so that only its adapters are weights of its own.
    """
    dtype, decoder = jnp.dtype(config.model.compute_dtype), Decoder(reference_shape(config))
    model = trainable_model(config, decoder) if config.reference.source == "start" else decoder
    params = models.abstract_params(model, dtype=dtype)
    return model, placed(params, models.param_sharding(mesh, model, params))


def kept_reference(config: RunConfig, mesh: Mesh) -> Any:
    """Return the abstract weights of the reference policy if they stay on the devices, else None."""
    shared = config.lora.rank > 0 and config.reference.source == "start"
    kept = config.uses_reference and config.reference.keep_in_memory and not shared
    return abstract_reference(config, mesh)[1] if kept else None


def bytes_on_device(tree: Any) -> int:
    """Return the bytes that a tree of abstract arrays takes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def human(number: float | None) -> str:
    """Write a number of bytes as text, with units in powers of 1000.

    >>> human(3_200_000), human(141e9)
    ('3.2 MB', '141 GB')
    """
    number = number or 0
    unit = next(u for u in (1e12, 1e9, 1e6, 1e3, 1) if number >= u or u == 1)
    name = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB", 1: "B"}[unit]
    return f"{number / unit:.3g} {name}"


def human_share(used: float, whole: float) -> str:
    """Write how many bytes of a whole are in use. The unit is written once if both have the same.

    >>> human_share(13.1e9, 16e9), human_share(24e6, 16e9)
    ('13.1 of 16 GB', '24 MB of 16 GB')
    """
    number, unit = human(used).split()
    return (
        f"{number} of {human(whole)}"
        if human(whole).endswith(f" {unit}")
        else f"{human(used)} of {human(whole)}"
    )
