"""One function for causal attention: XLA (the reference), cuDNN on GPU, splash attention on TPU.

Rows are right-padded, so the causal mask alone hides padding from real tokens: training and prefill need no
other mask. Decoding passes the number of filled cache entries of each row instead.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models.sharding import RULES, current_mesh

Backend = Literal["auto", "xla", "cudnn", "splash"]
_LANES = 128


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    lengths: jax.Array | None = None,
    rows: jax.Array | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """Scaled dot-product attention with grouped heads.

    Args:
      q: queries `[B, T, heads, head_dim]`.
      k: keys `[B, S, kv_heads, head_dim]`; `S == T` unless `lengths` is given.
      v: values, as `k`.
      lengths: filled cache entries per row `[B]` for decoding (`T == 1`); None means causal self-attention.
      rows: number of tokens of each row `[B]` in causal self-attention, if known. Positions behind them may
        be skipped, and their result is undefined.
      backend: `auto` chooses the best one for the platform (`resolve_backend`).

    Returns:
      `[B, T, heads, head_dim]`.
    """
    backend = resolve_backend(backend, q.dtype, decode=lengths is not None)
    if lengths is not None:
        kind: Literal["cudnn", "xla"] = "cudnn" if backend == "cudnn" else "xla"
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation=kind)
    if backend == "splash":
        return _splash(q, k, v)
    if backend == "cudnn":
        return _cudnn(q, k, v, rows)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def resolve_backend(backend: Backend, dtype: jnp.dtype, *, decode: bool = False) -> Backend:
    """The back end that `auto` means on the platform that we compile for."""
    if backend not in ("auto", "xla", "cudnn", "splash"):
        raise ValueError(f"attention: unknown backend {backend!r}; possible: auto, xla, cudnn, splash")
    if backend != "auto":
        return backend
    platform = _target_platform()
    if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16):
        return "cudnn"
    if platform == "tpu" and not decode:
        return "splash"
    return "xla"


def _target_platform() -> str:
    """`gpu`, `tpu` or `cpu`: the platform of the current mesh if one is set, else of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    kind = device.device_kind.lower()
    return "tpu" if "tpu" in kind else "cpu" if "cpu" in kind else "gpu"


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array | None) -> jax.Array:
    # The length must be a multiple of 128. The causal mask hides padding on the right from real tokens.
    length = q.shape[1]
    pad = -length % _LANES
    if pad:
        q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=rows,
        key_value_seq_lengths=rows,
        implementation="cudnn",
    )
    return out[:, :length]


def _splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Splash attention with one kernel call per device, because Pallas kernels are not partitioned by XLA."""
    mesh = current_mesh()
    if mesh is None:
        return _splash_local(q, k, v)
    heads = P(RULES["batch"], None, RULES["heads"], None)
    return jax.shard_map(
        _splash_local, mesh=mesh, in_specs=(heads, heads, heads), out_specs=heads, check_vma=False
    )(q, k, v)


def _splash_local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    length, heads, width = q.shape[1:]
    repeats = heads // k.shape[2]
    pad_length, pad_width = -length % _LANES, -width % _LANES
    padding = ((0, 0), (0, pad_length), (0, 0), (0, pad_width))
    q = q * jnp.asarray(width**-0.5, q.dtype)
    q, k, v = (jnp.pad(x, padding).swapaxes(1, 2) for x in (q, k, v))  # [B, heads, T, width]
    k, v = (jnp.repeat(x, repeats, axis=1) for x in (k, v)) if repeats > 1 else (k, v)
    kernel = _splash_kernel(heads, length + pad_length)
    out = jax.vmap(kernel)(q, k, v)
    return out.swapaxes(1, 2)[:, :length, :, :width]


def _splash_kernel(heads: int, length: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = next(size for size in (512, 256, 128) if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
