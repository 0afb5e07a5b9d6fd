"""List the shapes of some models on the Hugging Face Hub, so that a run can be planned without a network.

The numbers come from each model's `config.json`. For other models, `model_shape` downloads `config.json`.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from mugrpo_jax.models.model_config import ModelConfig, RopeScaling

_QWEN2_7B = ModelConfig(
    vocab_size=152_064,
    hidden_size=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=18_944,
    rope_theta=10_000.0,
    tie_embeddings=False,
    qkv_bias=True,
    max_positions=4096,
)

KNOWN_SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "meta-llama/Llama-3.2-3B-Instruct": ModelConfig(
            vocab_size=128_256,
            hidden_size=3072,
            num_layers=28,
            num_heads=24,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=8192,
            rope_theta=500_000.0,
            rope_scaling=RopeScaling(
                factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
            ),
            norm_eps=1e-5,
            max_positions=131_072,
        ),
        "Qwen/Qwen2.5-Math-7B": _QWEN2_7B,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": dataclasses.replace(_QWEN2_7B, max_positions=131_072),
        "Qwen/Qwen3-1.7B-Base": ModelConfig(
            vocab_size=151_936,
            hidden_size=2048,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=6144,
            rope_theta=1e6,
            qk_norm=True,
            max_positions=32_768,
        ),
        "Qwen/Qwen3-8B-Base": ModelConfig(
            vocab_size=151_936,
            hidden_size=4096,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=12_288,
            rope_theta=1e6,
            tie_embeddings=False,
            qk_norm=True,
            max_positions=32_768,
        ),
        "Qwen/Qwen2.5-1.5B": ModelConfig(
            vocab_size=151_936,
            hidden_size=1536,
            num_layers=28,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            intermediate_size=8960,
            rope_theta=1e6,
            qkv_bias=True,
            max_positions=131_072,
        ),
        "HuggingFaceTB/SmolLM2-135M": ModelConfig(
            vocab_size=49_152,
            hidden_size=576,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            intermediate_size=1536,
            rope_theta=100_000.0,
            norm_eps=1e-5,
            max_positions=8192,
        ),
    }
)
