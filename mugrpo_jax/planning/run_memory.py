"""The memory of a run on one device, from abstract arrays; nothing is allocated."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax import models, training
from mugrpo_jax.config import RunConfig
from mugrpo_jax.models import Decoder, ModelConfig
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.setup.lora import trainable_model
from mugrpo_jax.setup.reference_policy import reference_shape


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes in use on one device, without the activations of updates, which only the compiler knows.

    Attributes:
      weights: float32 weights that are trained; with LoRA only the adapters.
      base: frozen weights of a LoRA run during updates.
      base_sampling: frozen weights during generation; 0 on one device, where they are in host memory then.
      optimizer: both moments of AdamW.
      drift: weights at the start of the stage and the last gradient; 0 if `track_drift` is False.
      frozen: weights of the proximal policy, and of the reference policy if they stay in memory.
      gradients: float32 gradient, summed over micro-batches.
      compute: weights and the gradient of one micro-batch, both in the compute dtype.
      sampler: weights, KV cache and temporary arrays of the sampler, which are freed before updates start.
      device: free memory of a device; None if unknown.
    """

    weights: int
    base: int
    base_sampling: int
    optimizer: int
    drift: int
    frozen: int
    gradients: int
    compute: int
    sampler: int
    device: int | None

    @property
    def state(self) -> int:
        """Return the bytes in use during the whole run, without the frozen weights of LoRA."""
        return self.weights + self.optimizer + self.drift + self.frozen

    @property
    def generating(self) -> int:
        """Return the bytes in use during generation."""
        return self.state + self.base_sampling + self.sampler

    @property
    def updating(self) -> int:
        """Return the bytes in use during updates, without activations."""
        return self.state + self.base + self.gradients + self.compute


def abstract_state(config: RunConfig, shape: ModelConfig, mesh: Mesh) -> training.TrainState:
    """Return the training state as abstract arrays with shardings."""
    model = trainable_model(config, Decoder(shape))
    optimizer = training.make_optimizer(config.optimizer, config.total_updates, model)
    return training.abstract_state(
        optimizer, mesh, model, track_drift=config.track_drift, proximal=config.proximal_dtype
    )


def abstract_reference(config: RunConfig, mesh: Mesh) -> tuple[models.Model, Any]:
    """Return the reference policy's model, and its weights as abstract arrays with shardings.

    The start of a LoRA run shares the frozen weights, so that only its adapters are weights of its own.
    """
    dtype, decoder = jnp.dtype(config.model.compute_dtype), Decoder(reference_shape(config))
    model = trainable_model(config, decoder) if config.reference.source == "start" else decoder
    params = models.abstract_params(model, dtype=dtype)
    return model, placed(params, models.param_sharding(mesh, model, params))


def kept_reference(config: RunConfig, mesh: Mesh) -> Any:
    """Return the abstract weights of the reference policy if they stay on the devices, else None."""
    shared = config.lora.rank > 0 and config.reference.source == "start"
    kept = config.uses_reference and config.reference.keep_in_memory and not shared
    return abstract_reference(config, mesh)[1] if kept else None


def bytes_on_device(tree: Any) -> int:
    """Return the bytes that a tree of abstract arrays takes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
