"""Load the model in a run's checkpoint, or export the model as a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from mugrpo_jax import models
from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import to_path
from mugrpo_jax.models import ModelConfig
from mugrpo_jax.models.io import huggingface, huggingface_export
from mugrpo_jax.models.io.loading import LoadedModel
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.runs.run_folder import read_config
from mugrpo_jax.setup.devices import loading_mesh
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.training import CheckpointStore


def is_run(path: str | Path) -> bool:
    """Return whether a path is the folder of a run."""
    return (to_path(path) / "config.yaml").is_file()


def checkpoint_step(run: Path, *, step: int | None = None, best: bool = False) -> int:
    """Return the step of a kept checkpoint: `step`, or the best by held-out accuracy, or the newest."""
    if not (run / "checkpoints").is_dir():
        raise ConfigError(f"{run}: no checkpoint yet")
    store = CheckpointStore(run / "checkpoints")
    try:
        steps, found = store.steps(), store.best() if best else step
    finally:
        store.close()
    if not steps:
        raise ConfigError(f"{run}: no checkpoint yet")
    if best and found is None:
        raise ConfigError(f"{run}: no kept checkpoint has a held-out accuracy; choose one by its updates")
    if found is not None and found not in steps:
        raise ConfigError(f"{run}: no checkpoint after {found} updates; kept: {', '.join(map(str, steps))}")
    return steps[-1] if found is None else found


def trained_model(
    run: Path, step: int, *, dtype: Any = None, mesh: Callable[[ModelConfig], Mesh] | None = None
) -> LoadedModel:
    """Load the model in a run's checkpoint; `dtype` None keeps float32.

    `mesh` maps the shape of the model to the devices that share the weights; None is the default device.
    """
    config = read_config(run)
    shape = run_model_shape(config)
    model, abstract = models.abstract(shape, dtype=jnp.dtype(dtype or jnp.float32))
    place = SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: place, abstract)
    if mesh is not None:
        shardings = models.param_sharding(mesh(shape), model, abstract)
    targets = placed(abstract, shardings)
    store = CheckpointStore(run / "checkpoints")
    try:
        store.check(step)
        params = store.restore_params(targets, step)
    finally:
        store.close()
    source = Path(config.model.source)
    return LoadedModel(
        model=model,
        params=params,
        tokenizer=run_model_tokenizer(config),
        source=source if source.is_dir() else None,
    )


def export(
    run: Path, out: Path, *, step: int | None = None, best: bool = False, dtype: str | None = None
) -> None:
    """Write the model in a run's checkpoint as a Hugging Face folder; `checkpoint_step` chooses it.

    The weights are split over all devices. Several hosts call this together and write one folder.
    """
    huggingface_export.check_new_folder(out)  # before the weights are read
    read_config(run)
    step = checkpoint_step(run, step=step, best=best)
    kind = None if dtype is None else huggingface.supported_dtype(dtype)
    model = trained_model(run, step, dtype=kind, mesh=loading_mesh)
    huggingface_export.save_huggingface(
        model.params, out, config=model.config, source=model.source, tokenizer=model.tokenizer
    )
