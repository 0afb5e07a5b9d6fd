"""The sampler's own copy of the weights: its dtypes, its layout, and how a mesh splits it."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models import Decoder, Weight, abstract, cast, decode_params, decode_weights
from mugrpo_jax.models.eight_bits import stored_layer
from mugrpo_jax.models.sharding import RULES, placed
from mugrpo_jax.sampling.sampler_plan import SamplerPlan


@functools.partial(jax.jit, static_argnames=("dtype", "fuse", "matrices"))
def sampling_params(params: Any, *, dtype: Any, fuse: bool, matrices: Any) -> Any:
    """Copy trained parameters into the dtypes and layout that decoding uses: `SamplerPlan.layout`."""
    if matrices is None:
        return decode_params(cast(params, dtype), fuse=fuse)
    ready = decode_params(params, fuse=fuse)
    layers = [stored_layer(layer, dtype, matrices) for layer in ready.pop("layers")]
    return cast(ready, dtype) | {"layers": layers}


def params_sharding(plan: SamplerPlan) -> Any:
    """Return the shardings of the weights from `sampling_params`.

    Only the mesh axis `tensor` splits the weights. If `fsdp` did too, every decode step would gather them.
    """

    assert plan.mesh is not None
    return sampler_shardings(plan, plan.mesh, only="tensor")


def sampler_shardings(plan: SamplerPlan, mesh: Mesh, *, only: str | None = None) -> Any:
    """Return the shardings over any mesh of weights in the plan's layout; `only` ignores the other axes."""

    def one(weight: Weight) -> NamedSharding:
        axes = (RULES[axis] for axis in weight.axes)
        return NamedSharding(mesh, P(*(axis if only in (axis, None) else None for axis in axes)))

    eight_bits = plan.matrices is not None
    return jax.tree.map(one, decode_weights(Decoder(plan.config), fuse=plan.fuse, eight_bits=eight_bits))


def abstract_params(plan: SamplerPlan) -> tuple[Decoder, Any]:
    """Return the decoder, and the weights from `sampling_params` as `ShapeDtypeStruct`s with shardings."""
    model, params = abstract(plan.config, dtype=plan.dtype)
    weights = jax.eval_shape(functools.partial(sampling_params, **plan.layout), params)
    return model, weights if plan.mesh is None else placed(weights, params_sharding(plan))
