"""The decoder in Flax NNX: Llama 3.x, Qwen2/2.5 and Qwen3 are one architecture with a few switches.

Layers are stored stacked, `[layers, ...]` a leaf: training scans over them, decoding unrolls them, and
both read the same tree. Jitted programs take `(graphdef, params)`, where `params` is a plain nested dict:

    graphdef, params = decoder.create(config, seed=0)
    hidden = decoder.hidden_states(graphdef, params, tokens)

A model of your own trains here if it is an NNX module with `hidden(tokens, ...) -> [B, T, D]` and
`head_matrix() -> [V, D]`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mugrpo_jax.models.attention import Backend, attention
from mugrpo_jax.models.config import ModelConfig
from mugrpo_jax.models.packing import Packing
from mugrpo_jax.models.rope import rotate, rotation
from mugrpo_jax.models.sharding import constrain

Params = dict[str, Any]
Remat = Literal["none", "dots", "full"]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nnx.Module):
    """One transformer layer; `attend` decides where keys and values come from."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        d, hd = config.hidden_size, config.head_dim
        q_width, kv_width = config.num_heads * hd, config.num_kv_heads * hd
        self.attn_norm = _ones(d)
        self.q, self.k, self.v = (
            _dense(rngs, d, q_width),
            _dense(rngs, d, kv_width),
            _dense(rngs, d, kv_width),
        )
        self.o = _dense(rngs, q_width, d, scale=(2 * config.num_layers) ** -0.5)
        if config.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = _zeros(q_width), _zeros(kv_width), _zeros(kv_width)
        if config.qk_norm:
            self.q_norm, self.k_norm = _ones(hd), _ones(hd)
        self.mlp_norm = _ones(d)
        self.gate, self.up = (
            _dense(rngs, d, config.intermediate_size),
            _dense(rngs, d, config.intermediate_size),
        )
        self.down = _dense(rngs, config.intermediate_size, d, scale=(2 * config.num_layers) ** -0.5)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        """`apply_layer` with this block's weights."""
        return apply_layer(self.config, split(self)[1], x, rope, attend)


class Decoder(nnx.Module):
    """A causal language model: embedding, stacked layers, final norm, tied or untied head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Param(_normal(rngs, (config.vocab_size, config.hidden_size)))
        stack = nnx.split_rngs(splits=config.num_layers)(
            nnx.vmap(lambda rngs: Block(config, rngs=rngs), in_axes=0, out_axes=0)
        )
        self.layers = stack(rngs)
        self.norm = _ones(config.hidden_size)
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Param(_normal(rngs, (config.vocab_size, config.hidden_size)))
        )

    def hidden(
        self,
        tokens: jax.Array,
        *,
        packing: Packing | None = None,
        remat: Remat = "none",
        scan: bool = True,
        backend: Backend = "auto",
    ) -> jax.Array:
        """Final hidden states `[B, T, D]` of right-padded rows `tokens [B, T]`, or of packed ones."""
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
        _, stacked = split(self.layers)
        x = embed_tokens(self.embed[...], tokens)
        if scan:
            x, _ = jax.lax.scan(layer, x, stacked)
        else:
            for weights in unstack(stacked):
                x, _ = layer(x, weights)
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def head_matrix(self) -> jax.Array:
        """Output embedding `[V, D]`; logits are `hidden @ head_matrix().T`."""
        return self.embed[...] if self.head is None else self.head[...]


def embed_tokens(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Input vectors `[B, T, D]` from the embedding `[V, D]`."""
    # Whole rows on every device: looking up half-rows would reshard the result from width to batch.
    table = constrain(table, "vocab", None)
    return constrain(jnp.take(table, tokens, axis=0), "batch", None, None)


def model_config(graphdef: Any) -> ModelConfig:
    """The shape that a decoder's static definition carries."""
    return nnx.merge(graphdef, [None] * graphdef.num_leaves).config


def apply_layer(
    config: ModelConfig, w: Params, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend
) -> jax.Array:
    """One layer on `x [B, T, D]` with the weights `w`, plain or from `fuse`.

    `attend(q, k, v) -> [B, T, heads, head_dim]` decides where keys and values are kept.
    """
    h = rms_norm(x, w["attn_norm"], config.norm_eps)
    widths = [
        heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    q, k, v = _project(h, w, ("q", "k", "v"), "qkv", widths)
    if config.qkv_bias:
        q, k, v = q + w["q_bias"], k + w["k_bias"], v + w["v_bias"]
    q, k, v = (y.reshape(*y.shape[:-1], -1, config.head_dim) for y in (q, k, v))
    if config.qk_norm:
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    out = attend(rotate(q, rope), rotate(k, rope), v)
    x = x + out.reshape(*x.shape[:-1], -1) @ w["o"]
    h = rms_norm(x, w["mlp_norm"], config.norm_eps)
    gate, up = _project(h, w, ("gate", "up"), "gate_up", [config.intermediate_size] * 2)
    x = x + (jax.nn.silu(gate) * up) @ w["down"]
    return constrain(x, "batch", None, None)


def _attend_packed(packing: Packing, backend: Backend, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = packing.unpack(q), packing.unpack_keys(k), packing.unpack_keys(v)
    return packing.pack(attention(q, k, v, rows=packing.lengths, backend=backend))


def fuse(w: Params) -> Params:
    """A layer's weights with the matrices that read the same input side by side: fewer, wider products.

    For decoding only. In training the gradients of the parts would have to be copied together again, which
    costs what the wider products gain. With a `tensor` axis the parts cannot be joined.
    """
    rest = {name: leaf for name, leaf in w.items() if name not in ("q", "k", "v", "gate", "up")}
    qkv = jnp.concatenate([w["q"], w["k"], w["v"]], axis=-1)
    return rest | {"qkv": qkv, "gate_up": jnp.concatenate([w["gate"], w["up"]], axis=-1)}


def _project(
    h: jax.Array, w: Params, names: Sequence[str], fused: str, widths: Sequence[int]
) -> Sequence[jax.Array]:
    if fused not in w:
        return [h @ w[name] for name in names]
    return jnp.split(h @ w[fused], np.cumsum(widths)[:-1], axis=-1)


def create(config: ModelConfig, *, seed: int = 0, dtype: Any = jnp.float32) -> tuple[Any, Params]:
    """A freshly initialised decoder as `(graphdef, params)`."""
    graphdef, params = split(Decoder(config, rngs=nnx.Rngs(params=seed)))
    return graphdef, cast(params, dtype)


def abstract(config: ModelConfig, *, dtype: Any = jnp.float32) -> tuple[Any, Params]:
    """As `create`, with shapes in place of arrays: nothing is allocated."""
    graphdef, params = split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))))
    return graphdef, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


def split(module: nnx.Module) -> tuple[Any, Params]:
    """An NNX module as a static graph definition and a plain nested dict of arrays."""
    graphdef, state = nnx.split(module, nnx.Param)
    return graphdef, nnx.to_pure_dict(state)


def cast(params: Params, dtype: Any) -> Params:
    """Parameters in another dtype; those that have it already are returned as they are."""
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)


def unstack(stacked: Params) -> list[Params]:
    """The stacked layers as a list of single-layer trees."""
    # One split, not one slice a layer: its gradient is one concatenation, not a sum of padded arrays.
    leaves, tree = jax.tree.flatten(stacked)
    parts = [[part[0] for part in jax.lax.split(leaf, [1] * leaf.shape[0])] for leaf in leaves]
    return [jax.tree.unflatten(tree, layer) for layer in zip(*parts)]


def hidden_states(graphdef: Any, params: Params, tokens: jax.Array, **options: Any) -> jax.Array:
    """`Decoder.hidden` as a pure function of `(graphdef, params)`."""
    return nnx.merge(graphdef, params).hidden(tokens, **options)


def logits(graphdef: Any, params: Params, tokens: jax.Array, **options: Any) -> jax.Array:
    """Full float32 logits `[B, T, V]`: for tests and small models only; losses use `token_logprobs`."""
    model = nnx.merge(graphdef, params)
    return jnp.einsum(
        "btd,vd->btv",
        model.hidden(tokens, **options),
        model.head_matrix(),
        preferred_element_type=jnp.float32,
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation, in float32 up to the final scaling."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    return 0.02 * scale * jax.random.normal(rngs.params(), shape)


def _dense(rngs: nnx.Rngs, rows: int, columns: int, scale: float = 1.0) -> nnx.Param:
    return nnx.Param(_normal(rngs, (rows, columns), scale))


def _ones(width: int) -> nnx.Param:
    return nnx.Param(jnp.ones(width))


def _zeros(width: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(width))
