"""Rotary position embeddings (RoPE), with Llama 3's frequency scaling."""

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax.models.model_config import ModelConfig


def frequencies(config: ModelConfig) -> np.ndarray:
    """Return the rotation angle per position of each rotated pair, `[head_dim / 2]` in float32."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    inverse = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    # Short wavelengths stay, long wavelengths grow by `factor`, and between them we interpolate.
    wavelength = 2 * np.pi / inverse
    turns = scaling.original_max_positions / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * inverse / scaling.factor + blend * inverse).astype(np.float32)


def rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine `[B, T, 1, head_dim / 2]` of the angles at `positions [B, T]`, in float32."""
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply RoPE to `x [B, T, heads, head_dim]`. Elements `i` of the two halves of a head are a pair."""
    cos, sin = rotation
    # Swap the halves by a reversal, so that XLA compiles the rotation to one elementwise kernel.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    signed = jnp.stack([-sin, sin], axis=-2)
    rotated = halves * cos[..., None, :] + halves[..., ::-1, :] * signed
    return rotated.reshape(x.shape).astype(x.dtype)
