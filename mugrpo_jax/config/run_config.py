"""The config of a run: all sections, what does not go together, and what may change when a run resumes."""

import dataclasses
import hashlib
import json
from typing import Any, Literal

from mugrpo_jax.config.environment import EnvironmentSection
from mugrpo_jax.config.nested_dicts import to_dict
from mugrpo_jax.config.sections import (
    BatchSection,
    CheckpointsSection,
    EvaluationSection,
    LoraSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    ReferenceSection,
    ReplaySection,
    ReportSection,
    SamplingSection,
    TaskSection,
    TrackingSection,
    WarmStartSection,
)
from mugrpo_jax.config.settings import ConfigError, Section, setting
from mugrpo_jax.objectives import ObjectiveConfig

AUTO = "auto"  # the value of a key that the run chooses itself
MOST_CHOSEN_TOKENS = 32_768  # of a micro-batch on one device that is not a GPU
# Keys that are chosen before a run starts for the first time, and then kept. `sampling.slots` is not among
# them: it depends on the memory that is free when the sampler starts.
CHOSEN_AT_START = ("model.scan_layers", "model.remat", "batch.tokens_per_micro_batch")
# Keys without effect on what is trained, so that a run may resume with other values.
WITHOUT_EFFECT = ("report", "tracking", "compile_cache")
# Keys on which nothing depends before the first response; a warm start is kept when they change.
UNTIL_RESPONSES = ("task.reward", "sampling.max_response_tokens")
# Limits on which no stored rollout depends, so that a run may resume with other values too.
CHANGEABLE_LIMITS = {
    "task": ("scorers", "deadline", "scorer_memory_mb", "max_failed", "unsafe_sandbox"),
    "sampling": ("slots", "shrink", "max_prompt_tokens"),
    "environment": ("workers", "deadline"),
    "optimizer": ("max_skipped",),
}


@dataclasses.dataclass(frozen=True)
class RunConfig(Section):
    """Everything that defines a run."""

    seed: int = setting(0, "all random numbers are derived from it", least=0, most=2**63 - 1)
    model: ModelSection = setting(ModelSection(), "the model")
    lora: LoraSection = setting(LoraSection(), "adapters that are trained in place of the model's weights")
    task: TaskSection = setting(TaskSection(), "problems and rewards")
    environment: EnvironmentSection = setting(EnvironmentSection(), "who answers the model after a turn")
    sampling: SamplingSection = setting(SamplingSection(), "how responses are sampled")
    batch: BatchSection = setting(BatchSection(), "batch sizes")
    objective: ObjectiveConfig = setting(ObjectiveConfig(), "the loss and its settings")
    advantage: Literal["std", "mean", "rloo", "batch_std"] = setting(
        "std", "how rewards become advantages; Dr. GRPO (objective.name: dr_grpo) is meant to have mean"
    )
    overlong_buffer: int = setting(
        0,
        "length penalty of DAPO: it grows from 0 to 1 over this many tokens before "
        "sampling.max_response_tokens; 0: no penalty",
        least=0,
    )
    optimizer: OptimizerSection = setting(OptimizerSection(), "AdamW")
    warm_start: WarmStartSection = setting(WarmStartSection(), "supervised training before the first stage")
    evaluation: EvaluationSection = setting(EvaluationSection(), "held-out accuracy")
    checkpoints: CheckpointsSection = setting(CheckpointsSection(), "which checkpoints are kept")
    mesh: MeshSection = setting(MeshSection(), "devices")
    replay: ReplaySection = setting(ReplaySection(), "use the rollouts of another run")
    report: ReportSection = setting(ReportSection(), "the run's report")
    tracking: TrackingSection = setting(TrackingSection(), "TensorBoard and Weights & Biases")
    reference: ReferenceSection = setting(ReferenceSection(), "the reference policy of the KL term")
    proximal_every: int | None = setting(
        4,
        "the proximal policy of decoupled_ppo becomes the current policy after each so many updates, and at "
        "the start of a stage; null: only at the start; 1 needs no second copy of the weights",
        least=1,
    )
    track_drift: bool = setting(
        True, "record parameter drift and gradient cosine; needs two more copies of the weights"
    )
    compile_cache: str | Literal[False] = setting(
        "auto",
        "folder for compiled programs, which later runs load instead of compiling; auto: in the user's cache "
        "folder, unless JAX_COMPILATION_CACHE_DIR names another, and none on several CPU devices; off: none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        batch, response = self.batch, self.sampling.max_response_tokens
        epochs, updates = batch.epochs_per_stage, batch.updates_per_stage
        if updates % epochs:
            raise ConfigError(
                f"batch.epochs_per_stage: {epochs} does not divide batch.updates_per_stage={updates}"
            )
        longest = self.sampling.max_prompt_tokens + response
        tokens = batch.tokens_per_micro_batch
        if isinstance(tokens, int) and tokens < longest:
            raise ConfigError(
                f"batch.tokens_per_micro_batch: {tokens} does not hold one row of "
                f"{longest} tokens (sampling.max_prompt_tokens + sampling.max_response_tokens)"
            )
        most = tokens if isinstance(tokens, int) else max(longest, MOST_CHOSEN_TOKENS)
        if batch.length_multiple > most:
            raise ConfigError(
                f"batch.length_multiple: rows of {batch.length_multiple} tokens are longer than "
                f"batch.tokens_per_micro_batch={most}"
            )
        if batch.equal_groups != "keep" and self.objective.name == "p3o":
            raise ConfigError(
                f"batch.equal_groups: {batch.equal_groups} does not go with p3o, which also pulls "
                "responses without an advantage to the behavior policy; use keep"
            )
        if batch.equal_groups == "skip" and self.objective.arrays & {"reference_logp", "entropy"}:
            raise ConfigError(
                "batch.equal_groups: skip does not go with kl_coef or entropy_coef, which give groups with "
                "equal rewards a gradient too; use keep or drop"
            )
        if (overlong := self.overlong_buffer) > response:
            raise ConfigError(
                f"overlong_buffer: {overlong} is more than sampling.max_response_tokens={response}"
            )
        if self.model.tiny.hidden_size % (2 * self.model.tiny.num_heads):
            raise ConfigError(
                f"model.tiny.num_heads: twice {self.model.tiny.num_heads} must divide "
                f"model.tiny.hidden_size={self.model.tiny.hidden_size}"
            )
        if self.model.tiny.num_heads % self.model.tiny.num_kv_heads:
            raise ConfigError(
                f"model.tiny.num_kv_heads: {self.model.tiny.num_kv_heads} does not divide "
                f"model.tiny.num_heads={self.model.tiny.num_heads}"
            )
        if batch.lag >= batch.stages:
            raise ConfigError(
                f"batch.lag: {batch.lag} is not below batch.stages={batch.stages}, so all stages would use "
                f"the policy of the start; use at most {batch.stages - 1}, or more stages"
            )
        if self.replay.stage >= batch.stages:
            raise ConfigError(
                f"replay.stage: {self.replay.stage} is not one of the {batch.stages} stages (batch.stages), "
                "which are counted from 0"
            )

    @property
    def prompts_per_stage(self) -> int:
        """Number of prompts in one stage; the updates use each prompt `epochs_per_stage` times."""
        return self.batch.prompts_per_update * self.batch.updates_per_stage // self.batch.epochs_per_stage

    @property
    def shards_per_stage(self) -> int:
        """Number of files with the rollouts of one stage."""
        return -(-self.prompts_per_stage // self.sampling.prompts_per_shard)

    @property
    def total_updates(self) -> int:
        """Number of updates in the whole run."""
        return self.batch.updates_per_stage * self.batch.stages

    @property
    def stages(self) -> range:
        """Indices of the stages in this run: all stages, or only the replayed stage."""
        replayed = range(self.replay.stage, self.replay.stage + 1)
        return range(self.batch.stages) if self.replay.run is None else replayed

    @property
    def largest_staleness(self) -> int:
        """S = L·µ + µ − 1, how many updates old rollouts are at most when an update uses them."""
        return (self.batch.lag + 1) * self.batch.updates_per_stage - 1

    def policy_stage(self, stage: int) -> int:
        """Return the stage at whose start the policy was that writes the rollouts of `stage`."""
        return max(stage - self.batch.lag, 0)

    @property
    def training_temperature(self) -> float:
        """The temperature of the policy that is trained."""
        own = self.objective.temperature
        return self.sampling.temperature if own is None else own

    @property
    def abandoned_ratio(self) -> float:
        """The ratio below which metrics and report count a token as abandoned."""
        own = self.report.abandoned_ratio
        return self.objective.settings.get("veto_ratio", 1e-4) if own is None else own

    @property
    def uses_reference(self) -> bool:
        """Whether the loss has a KL term, so that it needs the log-probs of the reference policy."""
        return "reference_logp" in self.objective.arrays

    @property
    def proximal_dtype(self) -> str | None:
        """Dtype of the proximal policy's weights in the training state; None if the state has none."""
        kept = "proximal_logp" in self.objective.arrays and self.proximal_every != 1
        return self.model.compute_dtype if kept else None

    @property
    def own_functions(self) -> list[str]:
        """The functions of the user's own, as `module:function`, on which rollouts and rewards depend."""
        chosen = self.task.reward or str(self.task.options.get("reward"))
        rewards = [chosen] if isinstance(chosen, str) else [part.name for part in chosen]
        return [name for name in (*rewards, self.environment.name or "") if ":" in name]

    def rollout_fingerprint(self) -> str:
        """Return a hash of all settings that, together with the weights, determine the rollouts."""
        fixed = self.fixed_settings()
        names = ("task", "sampling") if self.environment.name is None else ("task", "sampling", "environment")
        sections = {name: fixed[name] for name in names}
        group, dtype = self.batch.responses_per_prompt, self.model.sampling_dtype
        return _digest(sections | {"seed": self.seed, "group": group, "dtype": dtype})

    def rollout_identity(self, stage: int) -> dict[str, Any]:
        """Return what determines a stage's rollouts: settings hash, stage, and version of the policy.

        The version is the stage at whose start the policy was, and the number of its updates.
        """
        version = self.policy_stage(stage)
        return {
            "fingerprint": self.rollout_fingerprint(),
            "stage": stage,
            "policy_stage": version,
            "policy_updates": version * self.batch.updates_per_stage,
        }

    def fingerprint(self) -> str:
        """Return a hash of `fixed_settings`."""
        return _digest(self.fixed_settings())

    def fixed_settings(self) -> dict[str, Any]:
        """Return the config as nested dicts without the keys that may change when a run resumes.

        These are `WITHOUT_EFFECT` and `CHANGEABLE_LIMITS`. If overlong prompts are dropped, the longest
        prompt decides which problems the run has, so `sampling.max_prompt_tokens` is fixed too.
        """
        whole = {name: value for name, value in to_dict(self).items() if name not in WITHOUT_EFFECT}
        for section, names in CHANGEABLE_LIMITS.items():
            for name in names:
                if name != "max_prompt_tokens" or self.sampling.overlong_prompts == "refuse":
                    del whole[section][name]
        return whole


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
