"""Load the other models that write responses (`sampling.behaviors`), and check that they can.

A source is the checkpoint `RUN@UPDATES` of a run, or the name of any model. Its tokens must be those of the
run's own model, because their ids are trained on.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.config.behaviors import CURRENT
from mugrpo_jax.files import read_json_object, to_path, write_atomically
from mugrpo_jax.models import Decoder, ModelConfig, Tokenizer, check_mesh
from mugrpo_jax.models.io.loading import LoadedModel, load_model
from mugrpo_jax.models.weights import Weight, weight_sharding, weights_fingerprint
from mugrpo_jax.sampling.sampler_plan import sampler_dtypes
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.stored_rollouts import shape_of, tokenizer_of
from mugrpo_jax.setup.trained_model import checkpoint_step, is_run, trained_model


def other_sources(config: RunConfig) -> tuple[str, ...]:
    """Return the sources of behaviors that are not the current policy, each once, in their order."""
    if config.replay.run is not None:
        return ()
    sources = (behavior.source for behavior in config.sampling.all_behaviors)
    return tuple(dict.fromkeys(source for source in sources if source != CURRENT))


def load_behavior(config: RunConfig, source: str, mesh: Mesh) -> LoadedModel:
    """Load the model of a source, sharded over the mesh; the sampler's copy of it has the sampling dtype."""
    dtype = sampler_dtypes(config.model.sampling_dtype)["dtype"]
    run = _checkpoint(source)
    if run is None:
        loaded = load_model(source, dtype=dtype, mesh=mesh)
    else:
        loaded = trained_model(run[0], run[1], dtype=dtype, mesh=lambda _: mesh)
    return _without_padding(loaded, run_model_shape(config).vocab_size, mesh)


def _without_padding(loaded: LoadedModel, rows: int, mesh: Mesh) -> LoadedModel:
    """Return the model with the first `rows` rows of its embedding and head, if it has more.

    Models of one family may have the same tokenizer, but embeddings that are padded to different sizes. A row
    of the padding stands for no token, and must not be drawn.
    """
    if loaded.config.vocab_size <= rows:
        return loaded
    model = Decoder(dataclasses.replace(loaded.config, vocab_size=rows))

    def cut(leaf: jax.Array, weight: Weight) -> jax.Array:
        return leaf[tuple(map(slice, weight.shape))]

    shardings = weight_sharding(mesh, model.weights())
    params = jax.jit(lambda tree: jax.tree.map(cut, tree, model.weights()), out_shardings=shardings)
    return dataclasses.replace(loaded, model=model, params=params(loaded.params))


def check_same_weights(config: RunConfig, source: str, params: Any, file: Path) -> None:
    """Store a fingerprint of the weights of a source in `file`; if it has one of this source, compare them.

    A run that continues would otherwise mix the responses of two models under one name. The file of a run
    that did no work, and started anew with other sources, is written again.
    """
    found = weights_fingerprint(params)
    stored = read_json_object(file) if file.exists() else {}
    if stored.get("source") != source:
        if jax.process_index() == 0:
            write_atomically(file, json.dumps({"source": source, "weights_sha256": found}) + "\n")
    elif stored["weights_sha256"] != found:
        raise ConfigError(
            f"{_key(config, source)}: the weights of {source} have changed since this run sampled with them; "
            "restore them, or use another --out"
        )


def check_behaviors(config: RunConfig, mesh: Mesh) -> None:
    """Raise an error if a source is not there, does not fit the mesh, or has other tokens than the run."""
    for source in other_sources(config):
        key = _key(config, source)
        try:
            shape, tokenizer = behavior_shape(source), tokenizer_of(_model_name(source))
            check_mesh(shape, mesh)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
        _check_tokens(f"{key}: {source}", shape, tokenizer, config)


def behavior_shape(source: str) -> ModelConfig:
    """Return the shape of the model of a source, without reading weights."""
    return shape_of(_model_name(source))


def _model_name(source: str) -> str | Path:
    run = _checkpoint(source)
    return source if run is None else run[0]


def _checkpoint(source: str) -> tuple[Path, int] | None:
    """Return the run and the checkpoint that a source names; None if it names another model."""
    folder, _, step = source.rpartition("@")
    if folder and step.isdecimal() and is_run(folder):
        run = to_path(folder)
        return run, checkpoint_step(run, step=int(step))
    if is_run(source):
        newest = checkpoint_step(to_path(source))
        raise ConfigError(f"{source} is a run; name one of its checkpoints, such as {source}@{newest}")
    if source == "tiny":
        raise ConfigError("tiny has random weights; use current, or name a trained model")
    return None


def _key(config: RunConfig, source: str) -> str:
    listed = config.sampling.behaviors or ()
    return f"sampling.behaviors[{[behavior.source for behavior in listed].index(source)}].source"


def _check_tokens(what: str, shape: ModelConfig, tokenizer: Tokenizer, config: RunConfig) -> None:
    if shape.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{what} has a vocabulary of {shape.vocab_size} tokens, but its tokenizer has "
            f"{tokenizer.vocab_size}; name a model with the tokenizer of the run's model"
        )
    here, there = dict(run_model_tokenizer(config).tokens()), dict(tokenizer.tokens())
    differing: list[Any] = [
        token for token in here.keys() | there.keys() if here.get(token) != there.get(token)
    ]
    if differing:
        token = min(differing)
        raise ConfigError(
            f"{what} has another tokenizer: {token!r} has the id {there.get(token)}, and {here.get(token)} "
            "in the run's model; name a model with the same tokenizer"
        )
