"""The config of a run: frozen dataclasses, read from YAML files and overrides such as `batch.stages=2`.

The default and the meaning of every key are here and nowhere else. An unknown key raises an error that names
the nearest known key.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from mugrpo_jax import shipped_configs
from mugrpo_jax.files import to_path
from mugrpo_jax.objectives import ObjectiveConfig

LARGEST_INTEGER, LARGEST_FLOAT = 2**31 - 1, 3.4e38  # of the int32 and float32 numbers on the devices
_LIMITS = (
    ("least", operator.lt, "at least"),
    ("most", operator.gt, "at most"),
    ("above", operator.le, "above"),
    ("below", operator.ge, "below"),
)
_MOST_VALUES = 10_000  # in a free-form key such as task.options; YAML aliases can make billions


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field with a default, a meaning for the docs, and the limits of its values.

    `least` and `most` are allowed values themselves; `above` and `below` are not.
    """
    metadata = {"meaning": meaning, "least": least, "most": most, "above": above, "below": below}
    if isinstance(default, (dict, list)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(meaning: str) -> Any:
    """Return a dataclass field without a default; an entry of a list in a config must have it."""
    return dataclasses.field(metadata={"meaning": meaning})


class ConfigError(ValueError):
    """An error that the user can fix; its message names the key, file or argument and the remedy."""


class Section:
    """Base class of config sections; `__post_init__` checks the limits of all numbers."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                _check_limits(field.name, value, field.metadata)


def _check_limits(name: str, value: float, limits: Mapping[str, Any]) -> None:
    if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
        raise ConfigError(f"{name}: must be a finite number, got {value}")
    if isinstance(value, int) and limits.get("most") is None:
        limits = {**limits, "most": LARGEST_INTEGER}
    for key, wrong, what in _LIMITS:
        limit = limits.get(key)
        if limit is not None and wrong(value, limit):
            raise ConfigError(f"{name}: must be {what} {limit}, got {value}")


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
    sampling_dtype: Literal["float32", "bfloat16"] = setting(
        "bfloat16", "dtype of weights and key-value cache while sampling"
    )
    remat: Literal["none", "dots", "full"] = setting(
        "dots", "what the backward pass recomputes to save memory; `dots`: all except matrix products"
    )
    scan_layers: bool = setting(True, "scan over the layers; false unrolls them, faster for small models")
    attention: Literal["auto", "xla", "cudnn", "splash"] = setting(
        "auto", "implementation of attention; `auto` chooses one for the device"
    )


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
        "a generator (arithmetic, word_problems, countdown, chains, multiplication), a preset, or a source",
    )
    options: dict[str, Any] = setting({}, "options of the task")
    reward: str | tuple[WeightedReward, ...] | None = setting(
        None,
        "math, exact, or your own module:function; null: the task's reward; or a list of {name, weight}: "
        "the weighted sum of several, of which the first says whether a response is right",
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

    temperature: float = setting(1.0, "divides the logits, in sampling and in training")
    max_prompt_tokens: int = setting(1536, "longest prompt; see `overlong_prompts`", least=1)
    overlong_prompts: Literal["refuse", "drop"] = setting(
        "refuse",
        "problems whose prompt is longer than `max_prompt_tokens`: `refuse` stops before the run starts and "
        "names the first; `drop` leaves them out",
    )
    max_response_tokens: int = setting(
        2560, "longest response; a response that reaches it has the finish reason `length`", least=1
    )
    slots: int | None = setting(None, "sequences decoded at once; null: as many as fit", least=1)
    prompts_per_shard: int = setting(64, "prompts per rollout file; complete files survive a kill", least=1)


@dataclasses.dataclass(frozen=True)
class BatchSection(Section):
    """The four batch sizes, how often a stage uses its data, and the shape of micro-batches."""

    prompts_per_update: int = setting(64, "prompts in one optimizer update", least=1)
    responses_per_prompt: int = setting(
        8, "responses per prompt, compared with each other to get advantages", least=2
    )
    updates_per_stage: int = setting(1024, "µ: optimizer updates per stage", least=1)
    stages: int = setting(4, "generations in the run", least=1)
    epochs_per_stage: int = setting(1, "passes over a stage's data, µ updates in total", least=1)
    tokens_per_micro_batch: int = setting(
        32768, "most tokens in one forward and backward pass, over all devices", least=1
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

    every: int = setting(64, "updates between checkpoints; each stage also ends with one", least=1)
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


@dataclasses.dataclass(frozen=True)
class ReplaySection(Section):
    """A stage of another run, whose stored rollouts are optimised again."""

    run: str | None = setting(None, "folder of the run with the rollouts; null: generate them")
    stage: int = setting(0, "which stage of that run, from 0", least=0)


@dataclasses.dataclass(frozen=True)
class ReportSection(Section):
    """The report `report.html`, which a run writes to its folder."""

    samples: int = setting(8, "responses per stage shown token by token, 64 stages at most; 0: none", least=0)


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


# Keys without effect on the results, so that a run may resume with other values.
WITHOUT_EFFECT = ("report", "tracking", "compile_cache")
# Keys on which nothing depends before the first response; a warm start is kept when they change.
UNTIL_RESPONSES = ("task.reward", "sampling.max_response_tokens")
# Limits on which no stored rollout depends, so that a run may resume with other values too.
CHANGEABLE_LIMITS = {
    "task": ("scorers", "deadline", "scorer_memory_mb", "max_failed"),
    "sampling": ("slots", "max_prompt_tokens"),
    "optimizer": ("max_skipped",),
}


@dataclasses.dataclass(frozen=True)
class RunConfig(Section):
    """Everything that defines a run."""

    seed: int = setting(0, "all random numbers are derived from it", least=0, most=2**63 - 1)
    model: ModelSection = setting(ModelSection(), "the model")
    task: TaskSection = setting(TaskSection(), "problems and rewards")
    sampling: SamplingSection = setting(SamplingSection(), "how responses are sampled")
    batch: BatchSection = setting(BatchSection(), "batch sizes")
    objective: ObjectiveConfig = setting(ObjectiveConfig(), "the loss and its settings")
    advantage: Literal["std", "mean", "rloo", "batch_std"] = setting("std", "how rewards become advantages")
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
    compile_cache: str = setting(
        "auto",
        "folder for compiled programs, which later runs load instead of compiling; auto: in the user's cache "
        "folder, unless JAX_COMPILATION_CACHE_DIR names another; off: none",
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
        if batch.tokens_per_micro_batch < longest:
            raise ConfigError(
                f"batch.tokens_per_micro_batch: {batch.tokens_per_micro_batch} does not hold one row of "
                f"{longest} tokens (sampling.max_prompt_tokens + max_response_tokens)"
            )
        if batch.length_multiple > batch.tokens_per_micro_batch:
            raise ConfigError(
                f"batch.length_multiple: rows of {batch.length_multiple} tokens are longer than "
                f"batch.tokens_per_micro_batch={batch.tokens_per_micro_batch}"
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
        if self.sampling.temperature <= 0:
            raise ConfigError(
                f"sampling.temperature: must be positive for training, got {self.sampling.temperature}"
            )
        if self.model.tiny.hidden_size % (2 * self.model.tiny.num_heads):
            raise ConfigError(
                f"model.tiny.num_heads: twice {self.model.tiny.num_heads} must divide "
                f"model.tiny.hidden_size={self.model.tiny.hidden_size}"
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
    def total_updates(self) -> int:
        """Number of updates in the whole run."""
        return self.batch.updates_per_stage * self.batch.stages

    @property
    def stages(self) -> range:
        """Indices of the stages in this run: all stages, or only the replayed stage."""
        replayed = range(self.replay.stage, self.replay.stage + 1)
        return range(self.batch.stages) if self.replay.run is None else replayed

    @property
    def uses_reference(self) -> bool:
        """Whether the loss has a KL term, so that it needs the log-probs of the reference policy."""
        return "reference_logp" in self.objective.arrays

    @property
    def proximal_dtype(self) -> str | None:
        """Dtype of the proximal policy's weights in the training state; None if the state has none."""
        kept = "proximal_logp" in self.objective.arrays and self.proximal_every != 1
        return self.model.compute_dtype if kept else None

    def rollout_fingerprint(self) -> str:
        """Return a hash of all settings that, together with the weights, determine the rollouts."""
        fixed = self.fixed_settings()
        sections = {name: fixed[name] for name in ("task", "sampling")}
        group, dtype = self.batch.responses_per_prompt, self.model.sampling_dtype
        return _digest(sections | {"seed": self.seed, "group": group, "dtype": dtype})

    def rollout_identity(self, stage: int) -> dict[str, Any]:
        """Return what determines a stage's rollouts: settings hash, stage, and updates of the policy."""
        updates = stage * self.batch.updates_per_stage
        return {"fingerprint": self.rollout_fingerprint(), "stage": stage, "policy_updates": updates}

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


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config and apply overrides such as `batch.stages=2`.

    `path` is a YAML file, or the name of a shipped config such as `quickstart`; None: all defaults.
    """
    raw = {} if path is None else _read(path)
    for override in overrides:
        _override(raw, override)
    return build(RunConfig, raw, "defaults" if path is None else str(path))


def _read(path: str | Path) -> dict[str, Any]:
    content = _file(path).read_bytes()
    try:
        loaded = yaml.safe_load(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as a date with month 13
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a config: nested too deeply") from None
    if loaded is None or loaded == {}:
        raise ConfigError(
            f"{path}: no keys in this file; set at least model.source and task.name. `mugrpo config` lists "
            "all keys, `mugrpo init FILE` writes a starting config"
        )
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, got {type(loaded).__name__}")
    return loaded


def _file(path: str | Path) -> Path:
    """Return the file at `path`, or the shipped config with this name; a file comes first."""
    file = to_path(path)
    if file.exists() and not file.is_dir():
        return file
    if str(path) in (shipped := shipped_configs.files()):
        return shipped[str(path)]
    name = re.sub(r"^configs/|\.ya?ml$", "", str(path))
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if name != str(path):
        raise ConfigError(f"{path}: no such config file; {hint}`mugrpo init FILE` writes a starting config")
    raise ConfigError(f"{path}: no such config file; {hint}configs known by name: {', '.join(shipped)}")


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a copy of a config with overrides such as `batch.stages=2`."""
    raw = to_dict(config)
    for override in overrides:
        _override(raw, override)
    return build(RunConfig, raw, "overrides")


def build(cls: type, raw: Mapping[str, Any], source: str, prefix: str = "") -> Any:
    """Build a config dataclass from nested dicts; errors begin with `source`, and keys with `prefix`."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in raw.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"{source}: unknown key {prefix}{name}; {hint}")
        values[name] = _convert(hints[name], value, source, prefix + name)
    for name, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING and name not in values:
            raise ConfigError(f"{source}: {prefix}{name} is missing")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {prefix}{error}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {prefix.rstrip('.') or 'config'}: {error}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to nested dicts, as in a YAML file."""
    out = {}
    for field in dataclasses.fields(config):
        out[field.name] = _to_plain(getattr(config, field.name))
    return out


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of the keys in which two nested dicts differ, with both values as text."""
    out = []
    for name in sorted(set(a) | set(b)):
        left, right = a.get(name), b.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            out += differing_keys(left, right, f"{prefix}{name}.")
        elif left != right:
            out.append(f"{prefix}{name} ({left!r} there, {right!r} here)")
    return out


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _override(raw: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r}: expected key=value, such as batch.stages=2")
    *parents, last = name.split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    try:
        raw[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"override {override[:80]!r}: {text[:60]!r} is not valid YAML") from None


def _convert(hint: Any, value: Any, source: str, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, Mapping):
            keys = ", ".join(field.name for field in dataclasses.fields(hint))
            raise ConfigError(f"{source}: {name} is a section with keys, got {value!r}; its keys: {keys}")
        return build(typing.cast(type, hint), value, source, name + ".")
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{source}: {name} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        plain, *lists = (arg for arg in args if arg is not type(None))
        if lists and isinstance(value, Mapping):
            raise ConfigError(f"{source}: {name} must be text or a list, got keys and values")
        return _convert(lists[0] if isinstance(value, list) and lists else plain, value, source, name)
    if origin is tuple:
        return tuple(_convert(args[0], item, source, f"{name}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{source}: {name} must be keys and values, got {value!r}")
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{source}: {name}: the key {key!r} must be text")
        _check_plain(value, source, name, iter(range(_MOST_VALUES)))
        return dict(value)
    if hint is float:
        value = _number(value)
    kinds = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    if hint in kinds and (type(value) is not hint):
        raise ConfigError(f"{source}: {name} must be {kinds[hint]}, got {value!r}")
    if value == "":
        raise ConfigError(f"{source}: {name} must not be empty; leave the key out for its default")
    return value


def _check_plain(value: Any, source: str, name: str, left: Iterator[int], depth: int = 8) -> None:
    """Raise an error unless a value is text, a finite number, true, false, null, or lists and keys of such.

    YAML has more types, such as dates, which cannot be stored with the run. Each value takes one of `left`.
    """
    if next(left, None) is None:
        raise ConfigError(f"{source}: {name}: more than {_MOST_VALUES} values")
    if isinstance(value, (Mapping, list)) and depth:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            _check_plain(item, source, f"{name}.{key}", left, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source}: {name}: must be a finite number, got {value}")
    elif not isinstance(value, (str, int, float, bool, type(None))):
        kind = "nested too deeply" if isinstance(value, (Mapping, list)) else f"a {type(value).__name__}"
        raise ConfigError(f"{source}: {name} is {kind}; put text into quotation marks")


def _number(value: Any) -> Any:
    """Convert to float what YAML 1.1 reads as text (`1e-6`) or as an integer (`1`)."""
    if isinstance(value, str) or type(value) is int:
        try:
            return float(value)
        except (ValueError, OverflowError):
            return value
    return value
