"""LoRA in a run: which model is trained, and where its frozen weights are while the run samples."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import Decoder, LoraDecoder
from mugrpo_jax.models.decoder import fuse as join_matrices
from mugrpo_jax.models.decoder import unstack
from mugrpo_jax.models.eight_bits import stored_layer
from mugrpo_jax.models.frozen_weights import abstract_base, base_weights, quantised
from mugrpo_jax.models.io.loading import LoadedModel
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.models.weights import weight_sharding
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.setup.initial_model import initial_model


def trainable_model(config: RunConfig, decoder: Decoder) -> Decoder | LoraDecoder:
    """Return the model whose weights are trained: the decoder, or with LoRA the adapters of its matrices."""
    lora = config.lora
    if not lora.rank:
        return decoder
    try:
        return LoraDecoder(decoder, lora.rank, lora.alpha, lora.targets)
    except ValueError as error:
        raise ConfigError(f"lora.rank: {error}") from None


def load_base(config: RunConfig, mesh: Mesh | None) -> LoadedModel:
    """Load the frozen weights of a LoRA run in the dtype that they have in memory."""
    loaded = initial_model(config, mesh, loaded_dtype(config))
    if config.lora.base_dtype == "int8":
        quantised(loaded.params)
    return loaded


def loaded_dtype(config: RunConfig) -> Any:
    """Return the dtype in which the frozen weights are read; those with 8 bits are made from bfloat16."""
    dtype = config.lora.base_dtype
    return jnp.dtype(jnp.bfloat16 if dtype == "int8" else dtype)


def abstract_run_base(config: RunConfig, decoder: Decoder, mesh: Mesh) -> Any:
    """Return the frozen weights of a run as abstract arrays with shardings; None without LoRA."""
    if not config.lora.rank:
        return None
    dtype = config.lora.base_dtype
    return placed(abstract_base(decoder, dtype), weight_sharding(mesh, base_weights(decoder, dtype)))


class BaseWeights:
    """The frozen weights of a LoRA run.

    On one device, they are in host memory while the run samples, because the sampler has a merged copy of
    them: the device never holds the model twice. On several devices, each device keeps its shard.
    """

    def __init__(self, model: LoraDecoder, params: Any, mesh: Mesh) -> None:
        self.model, self.moves = model, mesh.size == 1
        self._on_devices, self._on_host = params, None
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, params)

    def on_devices(self) -> Any:
        """Return the weights on the devices, and copy them there if they are not."""
        if self._on_devices is None:
            self._on_devices = jax.device_put(self._on_host, self._shardings)
        return self._on_devices

    def leave_devices(self) -> None:
        """Free the memory of the device, if there is only one. The first call copies them to the host."""
        if self.moves and self._on_devices is not None:
            if self._on_host is None:
                self._on_host = jax.tree.map(np.asarray, self._on_devices)
            self._on_devices = None

    def merged_on_device(self, adapters: Any, plan: SamplerPlan) -> Any:
        """Return the merged weights in the sampler's layout, on one device.

        The frozen weights are copied to the device layer by layer, so that it never holds more than one layer
        of them.
        """
        self.leave_devices()
        assert self._on_host is not None
        layers = []
        for number, adapter in enumerate(jax.jit(unstack)(adapters["layers"])):
            layer = jax.tree.map(lambda leaf: leaf[number], self._on_host["layers"])  # noqa: B023
            merged = merge_for_sampling(self.model, layer, adapter, **plan.layout)
            layers.append(jax.block_until_ready(merged))  # before the next layer is copied
        rest = {name: leaf for name, leaf in self._on_host.items() if name != "layers"}
        return {name: jnp.asarray(leaf, plan.dtype) for name, leaf in rest.items()} | {"layers": layers}


@functools.partial(jax.jit, static_argnames=("model", "dtype", "fuse", "matrices"))
def merge_for_sampling(
    model: LoraDecoder, layer: Any, adapter: Any, *, dtype: Any, fuse: bool, matrices: Any
) -> Any:
    """Return the merged weights of one layer; the keyword arguments are `SamplerPlan.layout`."""
    merged = model.merge_layer(layer, adapter, dtype if matrices is None else jnp.float32)
    return stored_layer(join_matrices(merged) if fuse else merged, dtype, matrices)


def merged_params(model: LoraDecoder, params: Any, *, dtype: Any, **layout: Any) -> Any:
    """Do the same as `sampling_params` for adapters with their frozen weights under the key `base`."""
    base, adapters = params["base"], unstack(params["layers"])
    layers = [
        merge_for_sampling(model, layer, adapter, dtype=dtype, **layout)
        for layer, adapter in zip(unstack(base["layers"]), adapters, strict=True)
    ]
    rest = {name: leaf.astype(dtype) for name, leaf in base.items() if name != "layers"}
    return rest | {"layers": layers}
