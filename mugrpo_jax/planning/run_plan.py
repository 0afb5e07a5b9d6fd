"""The sizes of a run and their description in text."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from mugrpo_jax.config import AUTO, RunConfig
from mugrpo_jax.models import Decoder, ModelConfig
from mugrpo_jax.planning.run_memory import Memory
from mugrpo_jax.planning.units import count, human, human_share
from mugrpo_jax.rollouts import Buckets
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.setup.auto_settings import Choice
from mugrpo_jax.setup.lora import trainable_model
from mugrpo_jax.setup.sizes import update_statistics

_BYTES_PER_SHARD = 132 * 1024  # of an empty ArrayRecord file, with the summary beside it
_BYTES_PER_GROUP = 512  # what a record has beside tokens
_BYTES_PER_RESPONSE = 64  # reward and the like
_BYTES_PER_ROLLOUT_TOKEN = 8  # a token id and its log-prob
_BYTES_PER_REFERENCE = 4  # the log-prob of the reference policy, only with a KL term
APART = "apart: "  # before the names of programs on devices that only sample


@dataclasses.dataclass(frozen=True)
class SamplingDevices:
    """The devices that only sample (`mesh.sampling_devices`).

    Attributes:
      sampler: sizes of the sampler on them; its mesh is never None.
      loaded: bytes on one device of the weights that the trainer published, from which the sampler makes its
        own copy.
    """

    sampler: SamplerPlan
    loaded: int

    @property
    def devices(self) -> list[Any]:
        """Return the devices."""
        assert self.sampler.mesh is not None
        return list(self.sampler.mesh.devices.flat)

    def __str__(self) -> str:
        devices, plan = self.devices, self.sampler
        whole = self.loaded + plan.weight_bytes + plan.cache_bytes + plan.work_bytes
        return (
            f"{len(devices)} × {devices[0].device_kind} only sample, {plan.slots} slots × "
            f"{plan.cache_length} cache entries; per device {human(whole)} with the published weights"
        )


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The sizes of a run, see `plan_run`. `print(plan)` shows the sizes.

    Attributes:
      buckets: micro-batch shapes; one program is compiled for each shape.
      sampler: sizes of the sampler; None if the run needs no sampler or if no sampler fits. If there are
        devices that only sample, this one samples only for evaluations.
      memory: bytes on each device.
      checkpoint_bytes: size of one checkpoint on disk.
      choices: the settings that the config left to us.
      problem: one line that says why the run does not fit on these devices; None if no reason is known.
      behaviors: sizes of the samplers of other models that write responses, by their sources. They run one
        after the other, so that the largest counts.
      apart: the devices that only sample, if there are any.
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
    apart: SamplingDevices | None = None

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
        if self.config.replay.run is not None:
            return 0
        sampling = self.config.sampling
        files, per_token = self.config.shards_per_stage, _BYTES_PER_ROLLOUT_TOKEN
        if self.config.uses_reference:
            files, per_token = 2 * files, per_token + _BYTES_PER_REFERENCE
        group = _BYTES_PER_GROUP + 4 * sampling.max_prompt_tokens
        response = _BYTES_PER_RESPONSE + per_token * sampling.max_response_tokens
        return self.stages * (
            files * _BYTES_PER_SHARD
            + self.config.prompts_per_stage * group
            + self.responses_per_stage * response
        )

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
            "sampler": self._sampler(),
            "apart": "" if self.apart is None else str(self.apart),
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
        per_stage = count(self.config.batch.updates_per_stage, "update")
        return (
            f"{count(self.stages, 'stage')} × {per_stage} = {count(self.updates, 'update')}, "
            f"objective {self.config.objective.name}{self._lag()}"
        )

    def _lag(self) -> str:
        lag, oldest = self.config.batch.lag, self.config.largest_staleness
        if not lag or self.config.replay.run is not None:
            return ""
        return (
            f"; lag of {count(lag, 'stage')}: rollouts are at most {count(oldest, 'update')} old, and "
            f"{lag + 1} stages are generated before the first update"
        )

    def _update(self) -> str:
        batch = self.config.batch
        pooled = self.most_micro_batches > 1 and update_statistics(self.config) is not None
        forward = "; one more forward pass for the statistics of the objective" if pooled else ""
        left_out = "" if batch.equal_groups == "keep" else "; groups with equal rewards are left out"
        return (
            f"{batch.prompts_per_update} prompts × {batch.responses_per_prompt} responses "
            f"= {count(self.rows_per_update, 'response')} in at most "
            f"{count(self.most_micro_batches, 'micro-batch', 'micro-batches')}{left_out}{forward}"
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
        return f"{count(warm.updates, 'update')} on {warm.rows_per_update} worked solutions each"

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

    def _sampler(self) -> str:
        if self.sampler is None:
            return ""
        hosts = len({device.process_index for device in self.mesh.devices.flat})
        each = f"; each of {hosts} hosts has such a sampler" if hosts > 1 else ""
        return f"{str(self.sampler).removeprefix('sampler: ')}{each}"

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

    @property
    def disk_bytes(self) -> float:
        """The most bytes that the run's files can have at once: rollouts and checkpoints."""
        return self.rollout_bytes + self.checkpoints_kept * self.checkpoint_bytes

    def _disk(self) -> str:
        return (
            f"rollouts at most {human(self.rollout_bytes)}; at most "
            f"{count(self.checkpoints_kept, 'checkpoint')} of {human(self.checkpoint_bytes)}"
        )

    def _memory(self) -> str:
        m = self.memory
        drift = f" + drift {human(m.drift)}" if m.drift else ""
        frozen = f" + frozen policies {human(m.frozen)}" if m.frozen else ""
        free = "" if m.device is None else f"; a device has {human(m.device)}"
        base = f" + frozen weights {human(m.base)}" if m.base else ""
        base_sampling = f" + frozen weights {human(m.base_sampling)}" if m.base_sampling else ""
        sampling = f"generating{base_sampling} + sampler {human(m.sampler)} = {human(m.generating)}; "
        return (
            f"per device: weights {human(m.weights)} + optimizer {human(m.optimizer)}{drift}{frozen}; "
            f"{'' if self.sampler is None else sampling}updating{base} + gradients {human(m.gradients)} + "
            f"compute copies {human(m.compute)} = {human(m.updating)} + activations{free}"
        )
