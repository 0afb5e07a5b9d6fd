"""The model shapes that the benchmarks measure, with random weights."""

from mugrpo_jax.models import ModelConfig

QWEN_1_5B = ModelConfig(
    vocab_size=151_936,
    hidden_size=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=8960,
    rope_theta=1e6,
    qkv_bias=True,
)
SMOLLM2_135M = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=1e5,
    norm_eps=1e-5,
)
