"""Load the reference policy of a run, with weights in the compute dtype, sharded over the mesh."""

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax import models
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import Decoder, Model, ModelConfig, check_mesh, param_sharding
from mugrpo_jax.models.io.loading import load_model, model_shape
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.setup.initial_model import initial_model, run_model_shape
from mugrpo_jax.setup.lora import trainable_model
from mugrpo_jax.training import CheckpointStore


def load_reference(config: RunConfig, mesh: Mesh, run: Path, base: Any = None) -> tuple[Model, Any]:
    """Return the model and the weights that `config.reference` names.

    Args:
      run: the folder of the run whose start is meant by `start`: this run, or the run that it replays.
      base: the frozen weights of a LoRA run. The start of such a run has the same frozen weights, so that it
        needs no second copy of them.
    """
    dtype = jnp.dtype(config.model.compute_dtype)
    if config.reference.source != "start":
        loaded = load_model(config.reference.source, dtype=dtype, mesh=mesh)
        return loaded.model, loaded.params
    model = trainable_model(config, Decoder(run_model_shape(config)))
    if config.warm_start.updates:
        params = _warm_started(config, model, mesh, run)
    elif config.lora.rank:
        params = models.random_params(model, seed=config.seed, mesh=mesh)  # A·B is 0
    else:
        params = initial_model(config, mesh).params
    params = jax.jit(models.cast, static_argnames="dtype")(params, dtype=dtype)
    return model, params if base is None else params | {"base": base}


def check_reference(config: RunConfig, mesh: Mesh) -> None:
    """Raise an error if the reference policy cannot score the responses of the run's model."""
    source = config.reference.source
    if not config.uses_reference or source == "start":
        return
    if source == "tiny":
        raise ConfigError("reference.source: tiny has random weights; use start, or name a trained model")
    theirs, ours = reference_shape(config), run_model_shape(config)
    if theirs.vocab_size != ours.vocab_size:
        raise ConfigError(
            f"reference.source: {source} has a vocabulary of {theirs.vocab_size} tokens, the run's model "
            f"one of {ours.vocab_size}; name a model with the same tokenizer"
        )
    check_mesh(theirs, mesh)


def reference_shape(config: RunConfig) -> ModelConfig:
    """Return the shape of the reference policy's model, without reading weights."""
    if config.reference.source == "start":
        return run_model_shape(config)
    try:
        return model_shape(config.reference.source)
    except ValueError as error:
        raise ConfigError(f"reference.source: {error}") from None


def check_start(config: RunConfig, run: Path) -> None:
    """Raise an error if a run had a warm start, but its last weights are not in the run's folder any more."""
    folder = run / "warm_start"
    if config.warm_start.updates and _newest(folder) != config.warm_start.updates:
        raise ConfigError(
            f"{folder}: the weights after the warm start are gone, which kl_coef needs as the reference "
            "policy; restore the folder, or name another reference.source"
        )


def _newest(folder: Path) -> int | None:
    if not folder.is_dir():
        return None
    with contextlib.closing(CheckpointStore(folder)) as store:
        return store.latest()


def _warm_started(config: RunConfig, model: Model, mesh: Mesh, run: Path) -> Any:
    """Load the weights at the end of the warm start, which stay in the folder of the run."""
    check_start(config, run)
    abstract = models.abstract_params(model)
    targets = placed(abstract, param_sharding(mesh, model, abstract))
    with contextlib.closing(CheckpointStore(run / "warm_start")) as store:
        store.check(config.warm_start.updates)
        return store.restore_params(targets, config.warm_start.updates)
