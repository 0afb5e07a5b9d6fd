"""Define the shape of a decoder, and convert it from and to the `config.json` in a Hugging Face folder."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
    heads = config["num_attention_heads"]
    theta, scaling = _rope(config, source)
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate_size=config["intermediate_size"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family == "Qwen2",
        qk_norm=family == "Qwen3",
        max_positions=config.get("max_position_embeddings", 4096),
    )


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
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; a Hugging Face model folder has a config.json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    return from_hf(raw, source=str(path))


_SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def _family(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures") or [f"(none; model_type {config.get('model_type')!r})"]
    if names[0] not in _SUPPORTED:
        raise ValueError(
            f"{source}: architecture {names[0]!r} is not supported; supported: {', '.join(_SUPPORTED)}"
        )
    return names[0].removesuffix("ForCausalLM")


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Return RoPE base and scaling, from `rope_theta` and `rope_scaling` or the newer `rope_parameters`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{source}: rope type {kind!r} is not supported; supported: 'default', 'llama3'")
    try:
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ValueError(f"{source}: rope scaling 'llama3' lacks the key {error.args[0]!r}") from None
    return theta, scaling
