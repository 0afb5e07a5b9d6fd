"""One decoder for Llama 3.x, Qwen2/2.5 and Qwen3, which differ only in a few options of `ModelConfig`.

The weights of all layers are stacked in arrays `[layers, ...]`. Training scans over the layers, decoding
unrolls them, and both use the same nested dict of parameters:

    model, params = decoder.create(config, seed=0)
    hidden = model.hidden(params, tokens)
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mugrpo_jax.models.attention import Backend, attention, packed_attention, resolve_backend
from mugrpo_jax.models.model_config import ModelConfig
from mugrpo_jax.models.rope import rotate, rotation
from mugrpo_jax.models.row_packing import Packing
from mugrpo_jax.models.sharding import constrain
from mugrpo_jax.models.weights import Model, Params, Remat, Weight, Weights, abstract_params, random_params

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# Name of a joined weight -> the weights that `fuse` joins, because they multiply the same input.
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def _save_products(primitive: Any, *arrays: Any, **options: Any) -> bool:
    """Return whether the policy `dots` keeps a result: products of matrices, without attention.

    The wide product of a LoRA adapter, whose inner axis is short, is cheap and is computed again. With it,
    twice as many results would be kept.
    """
    if not jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *arrays, **options):
        return False
    (left, right), _ = options["dimension_numbers"]
    inner = math.prod(arrays[0].shape[axis] for axis in left)
    columns = math.prod(arrays[1].shape) // math.prod(arrays[1].shape[axis] for axis in right)
    return 8 * inner > columns


_REMAT_POLICIES = {"dots": _save_products, "full": jax.checkpoint_policies.nothing_saveable}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A causal language model. It holds no arrays, so that it can be a static argument of `jax.jit`."""

    config: ModelConfig

    def weights(self) -> Weights:
        """Declare every weight. The weights of all layers are stacked in arrays `[layers, ...]`."""
        config = self.config
        layers = {
            name: dataclasses.replace(
                weight, shape=(config.num_layers, *weight.shape), axes=("layers", *weight.axes)
            )
            for name, weight in layer_weights(config).items()
        }
        table = _matrix(config.vocab_size, config.hidden_size, "vocab", "embed", std=config.hidden_size**-0.5)
        head = {} if config.tie_embeddings else {"head": table}
        return {"embed": table, "layers": layers, "norm": _norm(config.hidden_size), **head}

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        *,
        packing: Packing | None = None,
        remat: Remat = "none",
        scan: bool = True,
        backend: Backend = "auto",
    ) -> jax.Array:
        """Return the final hidden states `[B, T, D]` of `tokens [B, T]`; see `Model.hidden`."""
        if remat not in ("none", *_REMAT_POLICIES):
            raise ValueError(f"remat: unknown policy {remat!r}; possible: none, dots, full")
        positions = jnp.arange(tokens.shape[1])[None] if packing is None else packing.positions
        rope = rotation(self.config, positions)
        attend: Attend = functools.partial(attention, backend=backend)
        if packing is not None:
            attend = functools.partial(_attend_packed, packing, backend)

        def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
            return apply_layer(self.config, weights, x, rope, attend), None

        if remat != "none":
            # Inside a scan, XLA cannot undo the recomputation by merging it with the forward pass.
            layer = jax.checkpoint(layer, policy=_REMAT_POLICIES[remat], prevent_cse=not scan)
        x = embed_tokens(params["embed"], tokens)
        if scan:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        else:
            for weights in unstack(params["layers"]):
                x, _ = layer(x, weights)
        return rms_norm(x, params["norm"], self.config.norm_eps)

    def head_matrix(self, params: Params) -> jax.Array:
        """Return the output embedding `[V, D]`, with which logits are `hidden @ head_matrix.T`."""
        return params["embed"] if self.config.tie_embeddings else params["head"]


def layer_weights(config: ModelConfig, *, fused: bool = False) -> dict[str, Weight]:
    """Declare the weights of one layer; `fused=True` declares the weights that `fuse` returns."""
    d, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    branches = 2 * config.num_layers  # each layer adds two branches to the residual stream
    table = {
        "attn_norm": _norm(d),
        "q": _matrix(d, q, "embed", "heads"),
        "k": _matrix(d, kv, "embed", "kv_heads"),
        "v": _matrix(d, kv, "embed", "kv_heads"),
        "o": _matrix(q, d, "heads", "embed", std=(branches * q) ** -0.5),
        "mlp_norm": _norm(d),
        "gate": _matrix(d, mlp, "embed", "mlp"),
        "up": _matrix(d, mlp, "embed", "mlp"),
        "down": _matrix(mlp, d, "mlp", "embed", std=(branches * mlp) ** -0.5),
    }
    if config.qkv_bias:
        table |= {"q_bias": _bias(q, "heads")} | dict.fromkeys(("k_bias", "v_bias"), _bias(kv, "kv_heads"))
    if config.qk_norm:
        table |= {"q_norm": _norm(config.head_dim), "k_norm": _norm(config.head_dim)}
    if fused:
        for name, parts in _FUSED.items():
            width = sum(table.pop(part).shape[1] for part in parts)
            table[name] = _matrix(d, width, "embed", None)
    return table


def _matrix(rows: int, columns: int, *axes: str | None, std: float | None = None) -> Weight:
    return Weight((rows, columns), axes, decays=True, std=rows**-0.5 if std is None else std)


def _norm(width: int) -> Weight:
    return Weight((width,), (None,), decays=False, mean=1.0)


def _bias(width: int, axis: str) -> Weight:
    return Weight((width,), (axis,), decays=False)


def embed_tokens(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Look up `tokens [B, T]` in the embedding `table [V, D]`; the result is `[B, T, D]`."""
    # All-gather the width before the lookup, because afterwards the result would have to be resharded.
    table = constrain(table, "vocab", None)
    return constrain(jnp.take(table, tokens, axis=0), "batch", None, None)


def apply_layer(
    config: ModelConfig, w: Params, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend
) -> jax.Array:
    """Compute one layer on `x [B, T, D]` with the layer's weights `w`, which may come from `fuse`.

    `rope` comes from `rotation`. `attend(q, k, v)` returns the attention output `[B, T, heads, head_dim]`;
    with a KV cache, `attend` also stores the keys and values.
    """
    h = rms_norm(x, w["attn_norm"], config.norm_eps)
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = _project(h, w, "qkv", [q_width, kv_width, kv_width])
    if config.qkv_bias:
        q, k, v = q + w["q_bias"], k + w["k_bias"], v + w["v_bias"]
    q, k, v = (y.reshape(*y.shape[:-1], -1, config.head_dim) for y in (q, k, v))
    if config.qk_norm:
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    out = attend(rotate(q, rope), rotate(k, rope), v)
    x = x + out.reshape(*x.shape[:-1], -1) @ w["o"]
    h = rms_norm(x, w["mlp_norm"], config.norm_eps)
    gate, up = _project(h, w, "gate_up", [config.intermediate_size] * 2)
    x = x + (jax.nn.silu(gate) * up) @ w["down"]
    return constrain(x, "batch", None, None)


def _attend_packed(packing: Packing, backend: Backend, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    segments = packing.segments
    if segments is not None and resolve_backend(backend, q.dtype) == "splash":
        return packed_attention(q, k, v, segments, longest=packing.padded_from.shape[1])
    q, k, v = packing.unpack(q), packing.unpack_keys(k), packing.unpack_keys(v)
    return packing.pack(attention(q, k, v, rows=packing.lengths, backend=backend))


def fuse(w: Params) -> Params:
    """Join the matrices of a layer that multiply the same input, so that there are fewer, wider products.

    This is for decoding only, because in training the extra copies would cost as much time as the wider
    products save. It needs `tensor=1`, because `tensor` splits the axis along which matrices are joined.
    """
    joined = {name: jnp.concatenate([w[part] for part in parts], axis=-1) for name, parts in _FUSED.items()}
    parts = {part for parts in _FUSED.values() for part in parts}
    return {name: leaf for name, leaf in w.items() if name not in parts} | joined


def _project(h: jax.Array, w: Params, fused: str, widths: Sequence[int]) -> Sequence[jax.Array]:
    """Multiply `h` with each matrix in `_FUSED[fused]`, in one product if `w` holds the joined matrix."""
    if fused not in w:
        return [h @ w[name] for name in _FUSED[fused]]
    return jnp.split(h @ w[fused], np.cumsum(widths)[:-1], axis=-1)


def create(
    config: ModelConfig, *, seed: int = 0, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[Decoder, Params]:
    """Return a decoder and random parameters for it, sharded over the mesh if there is one."""
    model = Decoder(config)
    return model, random_params(model, seed=seed, dtype=dtype, mesh=mesh)


def abstract(config: ModelConfig, *, dtype: Any = jnp.float32) -> tuple[Decoder, Params]:
    """Return a decoder and its parameters as `jax.ShapeDtypeStruct`, so that nothing is allocated."""
    model = Decoder(config)
    return model, abstract_params(model, dtype=dtype)


def unstack(stacked: Params) -> list[Params]:
    """Split the stacked layers into a list with one tree of weights per layer."""
    # We split instead of slicing, because the gradient of a split is a cheap concatenation.
    leaves, tree = jax.tree.flatten(stacked)
    parts = [[part[0] for part in jax.lax.split(leaf, [1] * leaf.shape[0])] for leaf in leaves]
    return [jax.tree.unflatten(tree, layer) for layer in zip(*parts)]


def logits(model: Model, params: Params, tokens: jax.Array, **options: Any) -> jax.Array:
    """Return all float32 logits `[B, T, V]`, for tests and small models. Losses use `token_logprobs`."""
    hidden, head = model.hidden(params, tokens, **options), model.head_matrix(params)
    return jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Apply root-mean-square normalisation in float32, then multiply by `weight` in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)
