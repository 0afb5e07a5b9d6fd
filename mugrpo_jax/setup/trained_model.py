"""Load a model from a run's checkpoint or by its name, or export it as a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from mugrpo_jax import models
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import is_remote, to_path
from mugrpo_jax.models import Decoder, LoraDecoder, ModelConfig, lora
from mugrpo_jax.models.io import huggingface, huggingface_export, peft_export
from mugrpo_jax.models.io.loading import LoadedModel, load_model, model_shape
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.runs.run_folder import read_config
from mugrpo_jax.setup import hub_push
from mugrpo_jax.setup.devices import loading_mesh
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.lora import load_base, loaded_dtype, trainable_model
from mugrpo_jax.setup.model_card import BASES, model_card
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

    The adapters of a LoRA run are merged, and `dtype` None means the dtype in which frozen weights are read.
    `mesh` maps the shape of the model to the devices that share the weights; None is the default device.
    """
    config = read_config(run)
    shape = run_model_shape(config)
    devices, model = None if mesh is None else mesh(shape), Decoder(shape)
    adapted = trainable_model(config, model)
    if isinstance(adapted, LoraDecoder):
        adapters = trained_params(run, step, config, jnp.float32, devices)
        base, kind = load_base(config, devices).params, dtype or loaded_dtype(config)
        params = lora.merge(adapted, base, adapters, jnp.dtype(kind))
    else:
        params = trained_params(run, step, config, jnp.dtype(dtype or jnp.float32), devices)
    source = Path(config.model.source)
    return LoadedModel(
        model=model,
        params=params,
        tokenizer=run_model_tokenizer(config),
        source=source if source.is_dir() else None,
    )


def trained_params(run: Path, step: int, config: RunConfig, dtype: Any, mesh: Mesh | None) -> Any:
    """Load what a run has trained from its checkpoint: all weights, or with LoRA the adapters."""
    model = trainable_model(config, Decoder(run_model_shape(config)))
    abstract = models.abstract_params(model, dtype=dtype)
    place = SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: place, abstract)
    if mesh is not None:
        shardings = models.param_sharding(mesh, model, abstract)
    store = CheckpointStore(run / "checkpoints")
    try:
        store.check(step)
        return store.restore_params(placed(abstract, shardings), step)
    finally:
        store.close()


def chosen_step(name: str | Path, *, step: int | None = None, best: bool = False) -> int | None:
    """Return the step of the checkpoint to load if `name` is the folder of a run, otherwise None."""
    if is_run(name):
        return checkpoint_step(to_path(name), step=step, best=best)
    path = to_path(name)
    if is_remote(path) or (path.is_dir() and not (path / "config.json").is_file()):
        raise ConfigError(
            f"{name}: not the folder of a run (it has no config.yaml), and not a Hugging Face folder on a "
            "local disk (it has no config.json)"
        )
    if step is not None or best:
        raise ConfigError(f"{name}: not the folder of a run; only runs have checkpoints to choose from")
    return None


def load_any_model(
    name: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: Any = None,
    mesh: Callable[[ModelConfig], Mesh] | None = None,
) -> LoadedModel:
    """Load the model in the folder of a run, or a model by any name that `load_model` knows.

    Args:
      step, best: the checkpoint of a run; see `checkpoint_step`.
      dtype: dtype of the parameters; None keeps the dtype of the files. For a run, see `trained_model`.
      mesh: maps the shape of the model to the devices that share the weights; None is the default device.
    """
    found = chosen_step(name, step=step, best=best)
    if found is not None:
        return trained_model(to_path(name), found, dtype=dtype, mesh=mesh)
    return load_model(name, dtype=dtype, mesh=None if mesh is None else mesh(model_shape(name)))


def export(
    name: str | Path,
    out: Path,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: str | None = None,
    push: str | None = None,
    private: bool = False,
    adapter: bool = False,
) -> int | None:
    """Write a model as a Hugging Face folder; `name`, `step` and `best` are those of `load_any_model`.

    Returns the updates of the checkpoint; None if `name` is not the folder of a run.

    The weights are split over all devices. Several hosts call this together and write one folder.

    Args:
      adapter: write only the adapters of a LoRA run, as a folder that `peft` loads, not the merged model.
      push: a repository on the Hub (`OWNER/NAME`), to which the folder goes with a model card, or None.
      private: whether a repository that does not exist yet becomes private.
    """
    huggingface_export.check_new_folder(out)  # before the weights are read
    kind = None if dtype is None else huggingface.supported_dtype(dtype)
    step = chosen_step(name, step=step, best=best)
    if adapter and (step is None or not read_config(to_path(name)).lora.rank):
        raise ConfigError(f"--adapter: {name} is not the folder of a run with LoRA (lora.rank above 0)")
    repository = push if jax.process_index() == 0 else None  # one host makes it and uploads
    if repository is not None:
        hub_push.make_repository(repository, private=private)  # asks for the login before the work
    if adapter:
        assert step is not None
        _export_adapter(to_path(name), step, out, kind or jnp.float32)
    else:
        model = load_any_model(name, step=step, dtype=kind, mesh=loading_mesh)
        huggingface_export.save_huggingface(
            model.params, out, config=model.config, source=model.source, tokenizer=model.tokenizer
        )
    if repository is not None:
        card = model_card(name, step, repository, adapter=adapter)
        (out / "README.md").write_text(card, encoding="utf-8")
        hub_push.push_folder(out, repository)
    return step


def _export_adapter(run: Path, step: int, out: Path, dtype: Any) -> None:
    config = read_config(run)
    shape = run_model_shape(config)
    model = trainable_model(config, Decoder(shape))
    assert isinstance(model, LoraDecoder)
    adapters = trained_params(run, step, config, jnp.float32, loading_mesh(shape))
    source = BASES.get(config.model.source, config.model.source)
    peft_export.save_peft(model, adapters, out, base_name=source, dtype=dtype)
