"""Compute causal attention with one of three back ends: XLA (the reference), cuDNN (GPU), splash (TPU).

Right-padded rows need only the causal mask, which hides padding from real tokens. Packed rows also need the
segment of each token, so that a token sees only its own row. Decoding passes the number of filled KV cache
entries of each row.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
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
    """Compute scaled dot-product attention with grouped heads; the result is `[B, T, heads, head_dim]`.

    Args:
      q: queries `[B, T, heads, head_dim]`.
      k: keys `[B, S, kv_heads, head_dim]`; `S == T` unless `lengths` is given.
      v: values, with the shape of `k`.
      lengths: filled KV cache entries in each row `[B]`, for decoding (`T == 1`). None: causal attention.
      rows: number of real tokens in each row `[B]`, for causal self-attention. The result at padding is then
        undefined, because cuDNN skips padding. None computes every position.
      backend: the implementation. `auto` chooses the best implementation for the platform.
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
    """Return `backend`, or for `auto` the best back end for `dtype` on the platform that we compile for."""
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


def on_cpu() -> bool:
    """Return whether we compile for a CPU."""
    return _target_platform() == "cpu"


def _target_platform() -> str:
    """Return `gpu`, `tpu` or `cpu`, from the current mesh or, without a mesh, from the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    kind = device.device_kind.lower()
    return "tpu" if "tpu" in kind else "cpu" if "cpu" in kind else "gpu"


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array | None) -> jax.Array:
    # cuDNN needs a length that is a multiple of 128. The causal mask hides the padding from real tokens.
    length = q.shape[1]
    pad = -length % _LANES
    if pad:
        q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, query_seq_lengths=rows, key_value_seq_lengths=rows, implementation="cudnn"
    )
    return out[:, :length]


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, longest: int
) -> jax.Array:
    """Compute causal attention inside the segments of packed rows with splash; other shapes as `attention`.

    The kernel computes a band below the diagonal that is as wide as the longest segment. This is as much work
    as right-padded rows that are filled by half, but nothing is copied.

    Args:
      q: queries `[P, N, heads, head_dim]`, and `k`, `v` likewise: the tokens of many segments in a row.
      segments: `[P, N]` int32, the number of each token's segment. A token sees only its own segment.
      longest: no segment has more tokens than this.
    """
    return _splash(q, k, v, segments, window=longest)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array, window: int = 0) -> jax.Array:
    """Call the splash kernel on each device (`shard_map`), because XLA does not partition Pallas kernels."""
    mesh = current_mesh()
    # On a CPU, Pallas interprets the kernel: slow, but tests can compare it with the other back ends.
    local = functools.partial(_splash_local, window=window, interpret=_target_platform() == "cpu")
    if mesh is None:
        return local(q, k, v, *segments)
    heads, rows = P(RULES["batch"], None, RULES["heads"], None), P(RULES["batch"], None)
    specs = heads, heads, heads, *[rows for _ in segments]
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(
        q, k, v, *segments
    )


def _splash_local(
    q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array, window: int, interpret: bool
) -> jax.Array:
    """Compute attention on one device. The kernel reads the keys and values of a group of heads in place."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    length, heads, width = q.shape[1:]
    pad_length, pad_width = -length % _LANES, -width % _LANES
    padding = ((0, 0), (0, pad_length), (0, 0), (0, pad_width))
    q = q * jnp.asarray(width**-0.5, q.dtype)
    q, k, v = (jnp.pad(x, padding).swapaxes(1, 2) for x in (q, k, v))  # [B, heads, T, width]
    kernel = _splash_kernel(heads, length + pad_length, window, interpret)
    ids = [jnp.pad(x, ((0, 0), (0, pad_length)), constant_values=-1) for x in segments]
    out = jax.vmap(kernel)(q, k, v, *[splash.SegmentIds(x, x) for x in ids])
    return out.swapaxes(1, 2)[:, :length, :, :width]


def _splash_kernel(heads: int, length: int, window: int, interpret: bool) -> Any:
    """Return the kernel for rows of this length; `window` 0 lets a token see all tokens before it."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    # The kernel computes every block that the band touches. Smaller blocks reach less far beyond the band.
    most = max(_LANES, window // 2) if window else length
    block = next(size for size in (512, 256, _LANES) if size <= most and length % size == 0)
    names = "q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq"
    blocks: dict[str, Any] = {f"block_{name}": block for name in names}
    sizes = splash.BlockSizes(**blocks)
    square = length, length
    one = _band_mask()(square, (window - 1, 0), 0) if window else masks.CausalMask(square)
    mask = masks.MultiHeadMask([one] * heads)
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)


@functools.cache  # one class, because splash keeps what it derives from equal masks of the same class
def _band_mask() -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class Band(masks.LocalMask):
        """A local mask that computes a block only if the band may cross it; splash asks for every block."""

        def __getitem__(self, index: Any) -> Any:
            (first, last), (start, end) = ((part.start, part.stop) for part in index)
            if last <= start or end < first - self.window_size[0]:
                return np.zeros((1, 1), bool)  # splash only asks whether any entry is True
            return super().__getitem__(index)

    return Band
