"""The sections of a config. The default and the meaning of every key are here and in `run_config`."""

import dataclasses
import typing
from typing import Any, Literal

from mugrpo_jax.config.behaviors import Behavior, BehaviorSection, behaviors_of, check_behaviors
from mugrpo_jax.config.settings import ConfigError, Section, required, setting


@dataclasses.dataclass(frozen=True)
class TinyModelSection(Section):
    """Shape of the built-in small model, which is trained from scratch."""

    hidden_size: int = setting(128, "model width", least=1)
    num_layers: int = setting(4, "number of layers", least=1)
    num_heads: int = setting(4, "attention heads", least=1)
    num_kv_heads: int = setting(4, "key-value heads", least=1)
    intermediate_size: int = setting(384, "MLP width", least=1)


@dataclasses.dataclass(frozen=True)
class ModelSection(Section):
    """Which model is trained, and how its forward and backward passes are computed."""

    source: str = setting("tiny", "`tiny`, a Hugging Face folder, a .gguf file, a Hub name, or smollm2-135m")
    tiny: TinyModelSection = setting(TinyModelSection(), "shape when `source` is `tiny`")
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "bfloat16", "dtype of the forward and backward pass; the optimizer keeps the weights in float32"
    )
    sampling_dtype: Literal["float32", "bfloat16", "int8", "fp8"] = setting(
        "bfloat16",
        "dtype of weights and key-value cache while sampling; `int8`, `fp8`: 8 bits for the matrices of the "
        "layers, with a scale for every column, and bfloat16 for the rest; see also sampling.cache_dtype",
    )
    remat: Literal["auto", "none", "dots", "full"] = setting(
        "auto",
        "what the backward pass recomputes to save memory; `dots`: all except matrix products; `auto`: as "
        "little as the memory allows, but on GPUs a scan over the layers has at least `dots`",
    )
    scan_layers: Literal["auto", True, False] = setting(
        "auto",
        "scan over the layers; false unrolls them, which is faster for small models on GPUs but compiles "
        "longer; `auto` unrolls them there in a run of an hour or more, if the memory allows it",
    )
    attention: Literal["auto", "xla", "cudnn", "splash"] = setting(
        "auto", "implementation of attention; `auto` chooses one for the device"
    )


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclasses.dataclass(frozen=True)
class LoraSection(Section):
    """LoRA: train two thin matrices beside each of the model's matrices, which stay as they are."""

    rank: int = setting(0, "rank of the adapters; 0: no LoRA, all weights are trained", least=0)
    alpha: float = setting(32.0, "the product of the adapters is multiplied by alpha / rank", above=0)
    targets: tuple[Target, ...] = setting(
        typing.get_args(Target), "matrices with adapters, named as in PEFT; by default all of them"
    )
    base_dtype: Literal["float32", "bfloat16", "int8"] = setting(
        "bfloat16", "dtype of the frozen weights in memory; `int8`: 8 bits, with a scale for every column"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ConfigError("targets: the list is empty; name a matrix, or turn LoRA off with rank 0")
        if twice := [name for name in self.targets if self.targets.count(name) > 1]:
            raise ConfigError(f"targets: {twice[0]} is listed twice; list each matrix once")


@dataclasses.dataclass(frozen=True)
class WeightedReward(Section):
    """One of several rewards. The reward of a response is the sum of weight × reward over all of them."""

    name: str = required("a built-in reward, or your own module:function")
    weight: float = required("factor of this reward in the sum; 0 only logs it, below 0 is a penalty")


@dataclasses.dataclass(frozen=True)
class TaskSection(Section):
    """Where the problems come from and how responses are scored."""

    name: str = setting(
        "arithmetic",
        "a generator (arithmetic, word_problems, countdown, chains, multiplication, programs, tool_sums, "
        "reasoning_gym), a preset, or a source",
    )
    options: dict[str, Any] = setting({}, "options of the task")
    reward: str | tuple[WeightedReward, ...] | None = setting(
        None,
        "math, exact, code, or your own module:function; null: the task's reward; or a list of "
        "{name, weight}: the weighted sum of several, of which the first says whether a response is right",
    )
    scorers: int | None = setting(
        None,
        "number of scoring processes; 0 scores in the main process, without a deadline; null: 0 for the fast "
        "built-in rewards, one per usable processor for all others; several rewards have so many each",
        least=0,
        most=4096,
    )
    deadline: float = setting(
        5.0, "seconds to score one response; a slower one scores 0 and is counted", above=0, most=86_400
    )
    scorer_memory_mb: int = setting(
        2048, "megabytes of address space of one scoring process; only Linux enforces it", least=64
    )
    max_failed: float = setting(
        0.9,
        "largest share of responses whose reward may fail; if more fail, the run stops and says the most "
        "frequent reason; 1 turns this off",
        least=0,
        most=1,
    )

    unsafe_sandbox: bool = setting(
        False,
        "run the programs of code rewards without isolation where none is possible: they can then read and "
        "write your files and use the network",
    )

    @property
    def several_rewards(self) -> bool:
        """Whether the reward is a list, so that each reward in it is stored and logged by itself."""
        return isinstance(self.reward, tuple)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reward, tuple):
            return
        if not self.reward:
            raise ConfigError("reward: the list is empty; name a reward, or leave the key out")
        names = [part.name for part in self.reward]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"reward: {twice[0]} is listed twice; list each reward once")
        if not any(part.weight for part in self.reward):
            raise ConfigError("reward: all weights are 0; at least one must not be")


@dataclasses.dataclass(frozen=True)
class SamplingSection(Section):
    """How responses are sampled for training; there is no top-k or top-p truncation."""

    temperature: float = setting(
        1.0, "divides the logits while sampling, and in training unless objective.temperature is set", above=0
    )
    max_prompt_tokens: int = setting(1536, "longest prompt; see `overlong_prompts`", least=1)
    overlong_prompts: Literal["refuse", "drop"] = setting(
        "refuse",
        "problems whose prompt is longer than `max_prompt_tokens`: `refuse` stops before the run starts and "
        "names the first; `drop` leaves them out",
    )
    max_response_tokens: int = setting(
        2560, "longest response; a response that reaches it has the finish reason `length`", least=1
    )
    slots: int | Literal["auto"] = setting(
        "auto",
        "sequences decoded at once; `auto`: as many as fit, but not more than a stage or an evaluation has "
        "responses",
        least=1,
    )
    shrink: bool | Literal["auto"] = setting(
        "auto",
        "continue with fewer slots when few responses of a stage are left. Then a step takes less time, but "
        "other shapes change log-probs in their last bits, so that a run killed while sampling may resume "
        "with other responses. `auto`: not on a CPU, and only where the longest responses take long. With an "
        "environment, the slots are always kept",
    )
    cache_dtype: Literal["auto", "int8"] = setting(
        "auto",
        "dtype of the key-value cache; `auto`: as model.sampling_dtype says; `int8`: 8 bits, with a scale "
        "for every token and head, in half the memory of bfloat16",
    )
    prompts_per_shard: int = setting(64, "prompts per rollout file; complete files survive a kill", least=1)
    behaviors: tuple[BehaviorSection, ...] | None = setting(
        None,
        "who writes the responses: a list of {source, share, temperature}. source: `current`, the checkpoint "
        "RUN@UPDATES of a run, or another model with the same tokenizer, named as in model.source; share of "
        "the responses to each prompt; temperature: null or left out is sampling.temperature. null: the "
        "current policy writes all",
    )

    @property
    def all_behaviors(self) -> tuple[Behavior, ...]:
        """The policies that write responses, with their names; at least one."""
        return behaviors_of(self.behaviors, self.temperature)

    @property
    def behavior_names(self) -> tuple[str, ...]:
        """The names of the behaviors, each once, in order; () if all responses have the same."""
        names = tuple(sorted({behavior.name for behavior in self.all_behaviors}))
        return names if len(names) > 1 else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_behaviors(self.behaviors)


@dataclasses.dataclass(frozen=True)
class BatchSection(Section):
    """The four batch sizes, how often a stage uses its data, and the shape of micro-batches."""

    prompts_per_update: int = setting(64, "prompts in one optimizer update", least=1)
    responses_per_prompt: int = setting(
        8, "responses per prompt, compared with each other to get advantages", least=2
    )
    updates_per_stage: int = setting(1024, "µ: optimizer updates per stage", least=1)
    stages: int = setting(4, "generations in the run", least=1)
    lag: int = setting(
        0,
        "L: a stage trains on rollouts of the policy from L stages earlier; the first L + 1 stages use the "
        "policy of the start; the oldest rollouts are L·µ + µ − 1 updates old; 0: the policy of the stage",
        least=0,
    )
    epochs_per_stage: int = setting(1, "passes over a stage's data, µ updates in total", least=1)
    tokens_per_micro_batch: int | Literal["auto"] = setting(
        "auto",
        "most tokens in one forward and backward pass, over all devices; `auto`: so many that the tokens "
        "which an update has on average fill the fewest micro-batches that fit into memory",
        least=1,
    )
    length_multiple: int = setting(128, "row lengths are multiples of this; 128 suits accelerators", least=1)
    share_prompts: bool = setting(False, "compute each prompt once per micro-batch, not once per response")
    statistics: Literal["update", "micro_batch"] = setting(
        "update",
        "where P3O, M2PO and BAPO take their batch statistics from: `update` gives the same gradient for any "
        "split into micro-batches and costs one more forward pass; `micro_batch` costs nothing",
    )
    equal_groups: Literal["keep", "skip", "drop"] = setting(
        "keep",
        "prompts whose responses all have the same reward, and so no gradient: `keep` computes them anyway; "
        "`skip` does not (they are then missing in diagnostics and in objectives that use the whole batch); "
        "`drop` also takes them out of the denominator (as DAPO, but without sampling others instead)",
    )


@dataclasses.dataclass(frozen=True)
class OptimizerSection(Section):
    """The AdamW optimizer."""

    learning_rate: float = setting(1e-6, "peak learning rate", least=0)
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant", "learning rate after the warm-up; `cosine` and `linear` fall to 0"
    )
    warmup_updates: int = setting(0, "updates in which the learning rate rises linearly from 0", least=0)
    beta1: float = setting(0.9, "decay of the first moment", least=0, below=1)
    beta2: float = setting(0.999, "decay of the second moment", least=0, below=1)
    eps: float = setting(1e-8, "added to the square root of the second moment", above=0)
    weight_decay: float = setting(0.01, "decoupled weight decay, not applied to norms and biases", least=0)
    grad_clip: float = setting(1.0, "largest global norm of the gradient; 0 turns clipping off", least=0)
    max_skipped: int = setting(20, "updates skipped for non-finite gradients before the run fails", least=0)


@dataclasses.dataclass(frozen=True)
class WarmStartSection(Section):
    """Supervised training on worked solutions before the first stage."""

    updates: int = setting(0, "optimizer updates; 0: no warm start", least=0)
    rows_per_update: int = setting(128, "solutions in one update", least=1)
    problems: int | None = setting(None, "number of training problems to use; null: all", least=1)
    learning_rate: float = setting(1e-3, "peak learning rate; it falls to 0 as a cosine", least=0)


@dataclasses.dataclass(frozen=True)
class EvaluationSection(Section):
    """Accuracy on held-out problems: before the first stage, between stages and after the last one."""

    problems: int = setting(256, "held-out problems; 0 turns evaluation off", least=0)
    every: int | None = setting(
        None, "updates between evaluations, also inside a stage; null: one after each stage", least=1
    )
    samples: int = setting(1, "responses per problem", least=1)
    temperature: float = setting(1.0, "sampling temperature; 0 is greedy", least=0)
    top_p: float = setting(1.0, "nucleus sampling; 1 keeps all tokens", above=0, most=1)


@dataclasses.dataclass(frozen=True)
class CheckpointsSection(Section):
    """When checkpoints are saved and which are kept."""

    every: int = setting(64, "updates between checkpoints; the end of the run is saved too", least=1)
    keep_last: int = setting(2, "number of newest checkpoints to keep", least=1)
    keep_best: int = setting(1, "number of checkpoints with the best held-out accuracy to keep", least=0)
    keep_stage_starts: bool = setting(False, "keep the checkpoint before every stage, for `mugrpo replay`")


@dataclasses.dataclass(frozen=True)
class MeshSection(Section):
    """Number of devices along each mesh axis; -1 takes all remaining devices."""

    data: int = setting(1, "copies of the model")
    fsdp: int = setting(-1, "devices that shard the parameters of one copy and split its batch")
    tensor: int = setting(1, "devices that split attention heads, MLP and vocabulary")
    sampling_tensor: int = setting(
        1, "devices of a host that split the weights while sampling; each host samples its own share", least=1
    )
    sampling_devices: int = setting(
        0,
        "devices that only sample while the others train, by the rule of batch.lag; only on one host; 0: all "
        "devices sample, then all of them train",
        least=0,
    )


@dataclasses.dataclass(frozen=True)
class ReplaySection(Section):
    """A stage of another run, whose stored rollouts are optimised again."""

    run: str | None = setting(None, "folder of the run with the rollouts; null: generate them")
    stage: int = setting(0, "which stage of that run, from 0", least=0)


@dataclasses.dataclass(frozen=True)
class ReportSection(Section):
    """The report `report.html`, which a run writes to its folder, and the metrics that it draws."""

    samples: int = setting(8, "responses per stage shown token by token, 64 stages at most; 0: none", least=0)
    abandoned_ratio: float | None = setting(
        None,
        "tokens with a ratio below this count as abandoned; null: `veto_ratio` of the objective, else 1e-4",
        above=0,
    )


@dataclasses.dataclass(frozen=True)
class TrackingSection(Section):
    """Where to send metrics in addition to `metrics.jsonl` in the run's folder."""

    tensorboard: bool = setting(False, "write event files to `tensorboard` in the run's folder")
    wandb: str | None = setting(None, "name of a Weights & Biases project; null: none")


@dataclasses.dataclass(frozen=True)
class ReferenceSection(Section):
    """The reference policy of the KL term, used only if the knob `kl_coef` of the objective is above 0."""

    source: str = setting(
        "start",
        "`start`: the policy before the first stage, after the warm start; or another model with the same "
        "vocabulary, named as in `model.source`",
    )
    keep_in_memory: bool = setting(
        False, "keep the weights on the devices between stages; false loads them again in each stage"
    )
