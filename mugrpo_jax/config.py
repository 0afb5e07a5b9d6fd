"""The configuration of a run: frozen dataclasses, YAML files, dotted overrides.

Every key has one default and one meaning, both here. Unknown keys are refused with the nearest known name.
"""

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from mugrpo_jax.objectives import ObjectiveConfig


def key(default: Any, meaning: str, *, least: float | None = None) -> Any:
    """A config field with its default, its meaning and the least value it may have."""
    metadata = {"meaning": meaning, "least": least}
    if isinstance(default, (dict, list)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class ConfigError(ValueError):
    """A configuration that cannot be run, with the key and what to do."""


class Section:
    """Part of a config: its numbers are checked when it is built."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # each section is one
            least, value = field.metadata.get("least"), getattr(self, field.name)
            if least is not None and value is not None and value < least:
                raise ConfigError(f"{field.name}: must be at least {least}, got {value}")


@dataclasses.dataclass(frozen=True)
class TinyModel(Section):
    """Shape of the embedded model, trained from scratch."""

    hidden_size: int = key(128, "model width", least=1)
    num_layers: int = key(4, "number of layers", least=1)
    num_heads: int = key(4, "attention heads", least=1)
    num_kv_heads: int = key(4, "key-value heads", least=1)
    intermediate_size: int = key(384, "MLP width", least=1)


@dataclasses.dataclass(frozen=True)
class Model(Section):
    """Which policy is trained and how it is computed."""

    source: str = key("tiny", "`tiny`, a Hugging Face folder, a .gguf file, a Hub name, or smollm2-135m")
    tiny: TinyModel = key(TinyModel(), "shape when `source` is `tiny`")
    compute_dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16", "dtype of the forward and backward pass; masters are float32"
    )
    sampling_dtype: Literal["float32", "bfloat16"] = key("bfloat16", "dtype of weights and cache in sampling")
    remat: Literal["none", "dots", "full"] = key("dots", "what is recomputed in the backward pass")
    scan_layers: bool = key(
        True, "scan over layers (small programs) or unroll them (faster for small models)"
    )
    attention: Literal["auto", "xla", "cudnn", "splash"] = key("auto", "attention back end")


@dataclasses.dataclass(frozen=True)
class TaskConfig(Section):
    """Where prompts come from and how answers are scored."""

    name: str = key("arithmetic", "a generator (arithmetic, word_problems, countdown), a preset, or a source")
    options: dict[str, Any] = key({}, "options of that task, by name")
    reward: str | None = key(
        None, "reward function: math, exact, or your own module:function; None: the task's"
    )
    scorers: int | None = key(
        None,
        "scoring processes; 0 scores in this process, without a deadline; None: 0 for the cheap built-in "
        "rewards and one a core for others",
        least=0,
    )
    deadline: float = key(5.0, "seconds after which scoring one answer is given up and counted", least=0)


@dataclasses.dataclass(frozen=True)
class Sampling(Section):
    """How rollouts are drawn. Raw by default: temperature 1, no truncation."""

    temperature: float = key(1.0, "divides the logits; training applies the same")
    max_prompt_tokens: int = key(1536, "longest prompt; a longer one is refused with its index", least=1)
    max_response_tokens: int = key(2560, "longest response; what is cut there finishes by `length`", least=1)
    slots: int | None = key(None, "sequences decoded at once; None plans them from device memory", least=1)
    prompts_per_shard: int = key(
        64, "prompts in one file of rollouts, the unit that survives a kill", least=1
    )


@dataclasses.dataclass(frozen=True)
class Batch(Section):
    """The four batch sizes, and how often a stage's data is used."""

    prompts_per_update: int = key(64, "prompts in one optimizer update", least=1)
    responses_per_prompt: int = key(
        8, "responses sampled for each prompt, the group of the advantage", least=2
    )
    updates_per_stage: int = key(1024, "µ: updates between two generations", least=1)
    stages: int = key(4, "generations in the run", least=1)
    epochs_per_stage: int = key(1, "passes over a stage's data; µ updates in all", least=1)
    tokens_per_micro_batch: int = key(32768, "tokens in one forward-backward pass, over all devices", least=1)
    length_multiple: int = key(128, "row lengths are multiples of this; 128 suits accelerators", least=1)
    share_prompts: bool = key(False, "compute a prompt once for all its responses in a micro-batch")
    equal_groups: Literal["keep", "skip", "drop"] = key(
        "keep",
        "groups whose rewards are all equal have no gradient: `skip` does not compute them (diagnostics, and "
        "objectives that look at the whole batch, then miss them), `drop` takes them out of the denominator "
        "too (as DAPO, without its resampling)",
    )


@dataclasses.dataclass(frozen=True)
class Optimizer(Section):
    """AdamW."""

    learning_rate: float = key(1e-6, "peak learning rate", least=0)
    schedule: Literal["constant", "cosine", "linear"] = key("constant", "shape after warm-up")
    warmup_updates: int = key(0, "updates of linear warm-up", least=0)
    beta1: float = key(0.9, "decay of the first moment", least=0)
    beta2: float = key(0.999, "decay of the second moment", least=0)
    eps: float = key(1e-8, "added to the root of the second moment", least=0)
    weight_decay: float = key(0.01, "decoupled decay of matrices (norms and biases are exempt)", least=0)
    grad_clip: float = key(1.0, "largest global gradient norm; 0 turns clipping off", least=0)
    max_skipped: int = key(20, "non-finite updates, which are skipped, after which the run stops", least=0)


@dataclasses.dataclass(frozen=True)
class WarmStart(Section):
    """Supervised training on worked solutions before the first stage."""

    updates: int = key(0, "updates; 0 skips the warm start", least=0)
    rows_per_update: int = key(128, "solutions in one update", least=1)
    problems: int | None = key(
        None, "how many training problems to take the solutions from; None: all", least=1
    )
    learning_rate: float = key(1e-3, "peak learning rate, cosine to zero", least=0)


@dataclasses.dataclass(frozen=True)
class Evaluation(Section):
    """Held-out accuracy: before the first stage, after the last, and between."""

    problems: int = key(256, "held-out problems; 0 turns evaluation off", least=0)
    every: int | None = key(
        None, "updates between evaluations, inside stages too; None: one after each stage", least=1
    )
    samples: int = key(1, "responses per problem", least=1)
    temperature: float = key(1.0, "sampling temperature; 0 is greedy", least=0)
    top_p: float = key(1.0, "nucleus truncation")


@dataclasses.dataclass(frozen=True)
class Checkpoints(Section):
    """What is kept on disk."""

    every: int = key(
        64, "updates between checkpoints inside a stage; each stage ends with one anyway", least=1
    )
    keep_last: int = key(2, "newest checkpoints kept", least=1)
    keep_best: int = key(1, "checkpoints kept by held-out accuracy", least=0)
    keep_stage_starts: bool = key(
        False, "keep the checkpoint before every stage too, so that any stage can be replayed"
    )


@dataclasses.dataclass(frozen=True)
class MeshShape(Section):
    """Devices along each axis; -1 takes what is left."""

    data: int = key(1, "copies of the model")
    fsdp: int = key(-1, "devices that share one copy's parameters and split the batch")
    tensor: int = key(1, "devices that split heads, MLP and vocabulary")
    sampling_tensor: int = key(
        1, "devices of one host that split the weights in sampling; each host samples on its own", least=1
    )


@dataclasses.dataclass(frozen=True)
class Replay(Section):
    """A stage of another run, optimised again instead of generating."""

    run: str | None = key(None, "folder of the run whose rollouts are used; None: this run generates its own")
    stage: int = key(0, "which of its stages", least=0)


@dataclasses.dataclass(frozen=True)
class Report(Section):
    """The page that a run writes about itself, `report.html` in its folder."""

    samples: int = key(
        8, "responses of a stage (of 64 stages at most) shown token by token; 0: none", least=0
    )


@dataclasses.dataclass(frozen=True)
class Tracking(Section):
    """Where metrics go beside `metrics.jsonl` in the run's folder."""

    tensorboard: bool = key(False, "event files for TensorBoard, in `tensorboard` in the run's folder")
    wandb: str | None = key(None, "name of a Weights & Biases project")


# Sections that only look on: a run may continue with other values, its result is the same.
ONLOOKERS = ("report", "tracking")


@dataclasses.dataclass(frozen=True)
class RunConfig(Section):
    """Everything that defines a run."""

    seed: int = key(0, "every random choice derives from it", least=0)
    model: Model = key(Model(), "the policy")
    task: TaskConfig = key(TaskConfig(), "prompts and rewards")
    sampling: Sampling = key(Sampling(), "rollouts")
    batch: Batch = key(Batch(), "batch sizes")
    objective: ObjectiveConfig = key(ObjectiveConfig(), "the loss and its knobs")
    advantage: Literal["std", "mean", "rloo", "batch_std"] = key("std", "how rewards become advantages")
    overlong_buffer: int = key(
        0,
        "tokens before sampling.max_response_tokens over which a penalty grows from 0 to 1 (DAPO); 0: none",
        least=0,
    )
    optimizer: Optimizer = key(Optimizer(), "AdamW")
    warm_start: WarmStart = key(WarmStart(), "supervised start")
    evaluation: Evaluation = key(Evaluation(), "held-out accuracy")
    checkpoints: Checkpoints = key(Checkpoints(), "what is kept")
    mesh: MeshShape = key(MeshShape(), "devices")
    replay: Replay = key(Replay(), "optimise rollouts of another run")
    report: Report = key(Report(), "the run's own page")
    tracking: Tracking = key(Tracking(), "metrics elsewhere")
    track_drift: bool = key(
        True, "record parameter drift and gradient cosine (two more copies of the weights)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        batch = self.batch
        if batch.updates_per_stage % batch.epochs_per_stage:
            raise ConfigError(
                f"batch.epochs_per_stage: {batch.epochs_per_stage} does not divide "
                f"batch.updates_per_stage={batch.updates_per_stage}"
            )
        longest = self.sampling.max_prompt_tokens + self.sampling.max_response_tokens
        if batch.tokens_per_micro_batch < longest:
            raise ConfigError(
                f"batch.tokens_per_micro_batch: {batch.tokens_per_micro_batch} does not hold one row of "
                f"{longest} tokens (sampling.max_prompt_tokens + max_response_tokens)"
            )
        if batch.equal_groups != "keep" and self.objective.name == "p3o":
            raise ConfigError(
                f"batch.equal_groups: {batch.equal_groups} does not go with p3o, whose pull to the behavior "
                "policy counts for responses without an advantage too; take keep"
            )
        if self.overlong_buffer > self.sampling.max_response_tokens:
            raise ConfigError(
                f"overlong_buffer: {self.overlong_buffer} is more than "
                f"sampling.max_response_tokens={self.sampling.max_response_tokens}"
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
        """Prompts generated in one stage: its updates read each of them `epochs_per_stage` times."""
        return self.batch.prompts_per_update * self.batch.updates_per_stage // self.batch.epochs_per_stage

    @property
    def total_updates(self) -> int:
        """Updates in the whole run."""
        return self.batch.updates_per_stage * self.batch.stages

    @property
    def stages(self) -> range:
        """The stages this run goes through: all of them, or the one it replays."""
        replayed = range(self.replay.stage, self.replay.stage + 1)
        return range(self.batch.stages) if self.replay.run is None else replayed

    def rollout_fingerprint(self) -> str:
        """Twelve hex digits that name what decides a rollout, given the policy's weights."""
        group = self.batch.responses_per_prompt
        parts = {
            "seed": self.seed,
            "task": to_dict(self.task),
            "group": group,
            "sampling": to_dict(self.sampling),
        }
        return _digest(parts | {"dtype": self.model.sampling_dtype})

    def rollout_identity(self, stage: int) -> dict[str, Any]:
        """What makes the rollouts of a stage these and no others."""
        updates = stage * self.batch.updates_per_stage
        return {"fingerprint": self.rollout_fingerprint(), "stage": stage, "policy_updates": updates}

    def fingerprint(self) -> str:
        """Twelve hex digits that name this configuration, whoever looks on."""
        return _digest({name: value for name, value in to_dict(self).items() if name not in ONLOOKERS})


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file (None: all defaults) and apply overrides such as `batch.stages=2`."""
    raw: dict[str, Any] = {}
    source = "defaults" if path is None else str(path)
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such config file") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path}: expected keys and values at the top, got {type(loaded).__name__}")
        raw = loaded or {}
    for override in overrides:
        _override(raw, override)
    return build(RunConfig, raw, source)


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A config with overrides such as `batch.stages=2`."""
    raw = to_dict(config)
    for override in overrides:
        _override(raw, override)
    return build(RunConfig, raw, "overrides")


def build(cls: type, raw: Mapping[str, Any], source: str, prefix: str = "") -> Any:
    """Build a config dataclass from plain data, checking names and types."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in raw.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"{source}: unknown key {prefix}{name}; {hint}")
        values[name] = _convert(hints[name], value, source, prefix + name)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {prefix}{error}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {prefix.rstrip('.') or 'config'}: {error}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested data, as it stands in a YAML file."""
    out = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        out[field.name] = to_dict(value) if nested else dict(value) if isinstance(value, Mapping) else value
    return out


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the keys in which two plain configs differ."""
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
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not valid YAML") from None


def _convert(hint: Any, value: Any, source: str, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{source}: {name} is a section with keys, got {value!r}")
        return build(typing.cast(type, hint), value, source, name + ".")
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{source}: {name} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(arg for arg in args if arg is not type(None)), value, source, name)
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{source}: {name} must be keys and values, got {value!r}")
        return dict(value)
    if hint is float:
        value = _number(value)
    kinds = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    if hint in kinds and (type(value) is not hint):
        raise ConfigError(f"{source}: {name} must be {kinds[hint]}, got {value!r}")
    return value


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-6` as text; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if type(value) is int else value
