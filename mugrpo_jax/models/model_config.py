"""Define the shape of a decoder, and convert it from and to the `config.json` in a Hugging Face folder."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mugrpo_jax.files import read_json_object

_LARGEST = {"num_hidden_layers": 4096}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Parameters of Llama 3's RoPE scaling, which lowers frequencies so that contexts can be longer."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and options of a decoder. Hashable, so that a `Decoder` can be a static argument of jit."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 4096

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"ModelConfig: {field} must be positive, got {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig: num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig: head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def num_params(self) -> int:
        """Return the number of parameters. Tied input and output embeddings are counted once."""
        d, f, hd = self.hidden_size, self.intermediate_size, self.head_dim
        h, k = self.num_heads, self.num_kv_heads
        layer = d * hd * (2 * h + 2 * k) + 3 * d * f + 2 * d
        layer += hd * (h + 2 * k) * self.qkv_bias + 2 * hd * self.qk_norm
        return self.num_layers * layer + d + self.vocab_size * d * (1 if self.tie_embeddings else 2)


def from_hf(config: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """Convert the content of a Hugging Face `config.json` of a Llama, Qwen2 or Qwen3 model.

    An option that the decoder does not support raises a ValueError that starts with `source`.

    >>> hf = dict(architectures=["Qwen3ForCausalLM"], vocab_size=32, hidden_size=16, num_hidden_layers=2,
    ...           num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=24)
    >>> from_hf(hf).qk_norm
    True
    >>> from_hf(hf | dict(architectures=["MixtralForCausalLM"]))
    Traceback (most recent call last):
      ...
    ValueError: config.json: architecture 'MixtralForCausalLM' is not supported; supported: ...
    """
    family = _family(config, source)
    if config.get("use_sliding_window"):
        raise ValueError(f"{source}: use_sliding_window is on; sliding-window attention is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{source}: hidden_act {activation!r} is not supported; supported: 'silu'")
    if config.get("mlp_bias"):
        raise ValueError(f"{source}: mlp_bias is not supported")
    if config.get("attention_bias"):
        raise ValueError(f"{source}: attention_bias (which includes the output projection) is not supported")
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [key for key in needed if key not in config]
    if missing:
        raise ValueError(f"{source}: missing key {missing[0]!r}")
    sizes = {key: _size(config, key, source) for key in needed}
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    theta, scaling = _rope(config, source)
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"{source}: tie_word_embeddings is {tied!r}; possible: true, false")
    return ModelConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=width,
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", source, heads),
        head_dim=_size(config, "head_dim", source, width // heads),
        intermediate_size=sizes["intermediate_size"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", source),
        tie_embeddings=tied,
        qkv_bias=family == "Qwen2",
        qk_norm=family == "Qwen3",
        max_positions=_size(config, "max_position_embeddings", source, 4096),
    )


def _size(config: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    """Return a size; `default` replaces a size that is missing, null or 0."""
    value = config.get(key)
    if default is not None and not value and not isinstance(value, (bool, str)):
        return default
    largest = _LARGEST.get(key, 2**31 - 1)
    if type(value) is not int or not 1 <= value <= largest:
        raise ValueError(f"{source}: {key} is {value!r}; possible: a whole number from 1 to {largest}")
    return value


def _positive(value: Any, key: str, source: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{source}: {key} is {value!r}; possible: a finite number above 0")
    return float(value)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the content of a `config.json` with which `transformers` loads a model of this shape."""
    family = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    hf: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
    }
    if config.rope_scaling is not None:
        hf["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    return hf


def read_hf(folder: Path) -> ModelConfig:
    """Return the model config that `config.json` in a Hugging Face folder describes."""
    path = folder / "config.json"
    try:
        return from_hf(read_json_object(path), source=str(path))
    except FileNotFoundError:
        remedy = "a Hugging Face model folder has a config.json"
        if (folder / "config.yaml").is_file():
            remedy = f"{folder} is the folder of a run; export its model first: mugrpo export {folder} MODEL"
        raise ValueError(f"{path}: not found; {remedy}") from None


_SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def _family(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures") or [f"(none; model_type {config.get('model_type')!r})"]
    if not isinstance(names, list):
        raise ValueError(f"{source}: architectures is {names!r}; possible: a list with one name")
    if names[0] not in _SUPPORTED:
        raise ValueError(
            f"{source}: architecture {names[0]!r} is not supported; supported: {', '.join(_SUPPORTED)}"
        )
    return names[0].removesuffix("ForCausalLM")


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Return RoPE base and scaling, from `rope_theta` and `rope_scaling` or the newer `rope_parameters`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{source}: {key} is {rope!r}; possible: keys and values")
    theta = _positive(rope.get("rope_theta", config.get("rope_theta", 10_000.0)), "rope_theta", source)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{source}: rope type {kind!r} is not supported; supported: 'default', 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for name in names:
        if name not in rope:
            raise ValueError(f"{source}: rope scaling 'llama3' lacks the key {name!r}")
    factor, low, high, positions = (_positive(rope[name], name, source) for name in names)
    return theta, RopeScaling(factor, low, high, int(positions))
