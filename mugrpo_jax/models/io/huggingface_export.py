"""Save Hugging Face folders that `transformers` can load. The weights may be on devices of several hosts."""

import contextlib
import glob
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models import decoder
from mugrpo_jax.models import model_config as configs
from mugrpo_jax.models.io import safetensors_file
from mugrpo_jax.models.io.huggingface import (
    INDEX_FILE,
    WEIGHTS_FILE,
    named_leaves,
    stored_shape,
    supported_dtype,
    transpose_into,
)
from mugrpo_jax.models.io.safetensors_file import LazyTensor
from mugrpo_jax.models.model_config import ModelConfig
from mugrpo_jax.models.tokenizer import TOKENIZER_FILES, Tokenizer
from mugrpo_jax.models.weights import Params

SHARD_BYTES = 5_000_000_000


def save_huggingface(
    params: Params,
    out: Path | str,
    *,
    config: ModelConfig,
    source: Path | str | None = None,
    tokenizer: Tokenizer | None = None,
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `transformers` can load. A complete temporary folder is renamed to `out`.

    Args:
      params: the parameter tree, on devices or in NumPy arrays. If the devices belong to several hosts, all
        hosts must call this function, and the first host writes the folder.
      out: the path of the new folder, which must not exist or must be empty.
      source: the Hugging Face folder from which the model was loaded, or None. Its `config.json` (except for
        the dtype), generation config and tokenizer files are copied.
      tokenizer: the tokenizer to write if `source` has no tokenizer files.
      dtype: the dtype of the written weights; None keeps the dtype of `params`.
      shard_bytes: the maximum size of one safetensors file, unless a single tensor is larger.
    """
    out, source = Path(out), None if source is None else Path(source)
    check_new_folder(out)
    tensors = tensors_to_write(config, params, dtype)
    config_json = _config_json(config, source, next(iter(tensors.values())).dtype)
    if jax.process_index() and not on_this_host(params):
        for tensor in tensors.values():
            tensor.read()  # the first host reads the same tensors in the same order, and needs our shards
        return
    with temporary_folder(out) as folder:
        (folder / "config.json").write_text(config_json)
        _write_tokenizer_files(folder, source, tokenizer)
        _write_weights(folder, tensors, shard_bytes)


@contextlib.contextmanager
def temporary_folder(out: Path) -> Iterator[Path]:
    """Make a folder that is renamed to `out` at the end of the context, or removed after an error."""
    _remove_unfinished(out)
    temporary = out.with_name(f".{out.name}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_new_folder(out: Path) -> None:
    """Raise ValueError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists already; choose another folder or remove it")


def _remove_unfinished(out: Path) -> None:
    """Remove the temporary folders of exports to `out` on this machine whose processes are gone."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.{_host()}.*.*.tmp"):
        process = folder.name.split(".")[-3]
        if process.isdigit() and not _runs(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _host() -> str:
    return re.sub(r"\W", "-", socket.gethostname())


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only checks whether the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def tensors_to_write(config: ModelConfig, params: Params, dtype: Any) -> dict[str, LazyTensor]:
    """Return all tensors by Hugging Face name, in file order. `read()` copies a tensor from its devices."""
    wanted = {path: leaf.shape for path, leaf in jax.tree.leaves_with_path(decoder.abstract(config)[1])}
    if {path for path, _ in jax.tree.leaves_with_path(params)} != wanted.keys():
        raise ValueError("save: the parameters do not have the structure that the config describes")
    found: dict[str, LazyTensor] = {}
    for path, leaf, names in named_leaves(config, params):
        if leaf.shape != wanted[path]:
            raise ValueError(
                f"save: {jax.tree_util.keystr(path)} has shape {leaf.shape}, the config says {wanted[path]}"
            )
        kind, shape = supported_dtype(dtype or leaf.dtype), stored_shape(path, leaf.shape)
        stacked = path[0].key == "layers"
        for layer, name in enumerate(names):
            found[name] = LazyTensor(name, shape, kind, tensor_reader(leaf, layer if stacked else None, kind))
    return dict(sorted(found.items(), key=lambda item: _file_order(item[0])))


def tensor_reader(leaf: Any, layer: int | None, dtype: np.dtype) -> Callable[[], np.ndarray]:
    """Return a function that copies a parameter, or one layer of it transposed, from its devices."""

    def read() -> np.ndarray:
        if on_this_host(leaf):
            array = np.asarray(leaf if layer is None else leaf[layer])
        else:
            array = np.asarray(tensor_gatherer(leaf.sharding)(leaf, layer))
        if layer is None:
            return array.astype(dtype, copy=False)
        out = np.empty(array.shape[::-1], dtype)
        transpose_into(out, array)
        return out

    return read


def on_this_host(tree: Any) -> bool:
    """Return whether all arrays are on devices of this process, or in its memory."""
    return all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(tree))


def tensor_gatherer(sharding: NamedSharding) -> Any:
    """Return the program that copies one tensor, a layer of a parameter or all of it, to every device."""
    return jax.jit(_tensor, out_shardings=NamedSharding(sharding.mesh, P()))


def _tensor(leaf: jax.Array, layer: int | None) -> jax.Array:
    return leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)


def _file_order(name: str) -> tuple[int, int]:
    """Return the sort key of a tensor name: embedding, layers in order, then final norm and head."""
    parts = name.split(".")
    return (1, int(parts[2])) if parts[1] == "layers" else (0 if "embed_tokens" in name else 2, 0)


def _config_json(config: ModelConfig, source: Path | None, dtype: np.dtype) -> str:
    if source is None:
        return json.dumps(configs.to_hf(config) | {"dtype": dtype.name}, indent=2) + "\n"
    if configs.read_hf(source) != config:
        raise ValueError(f"{source / 'config.json'}: describes another model than the one being saved")
    text = (source / "config.json").read_text()
    raw = json.loads(text)
    keys = [key for key in ("dtype", "torch_dtype") if key in raw] or ["dtype"]
    if all(raw.get(key) == dtype.name for key in keys):
        return text
    return json.dumps(raw | dict.fromkeys(keys, dtype.name), indent=2) + "\n"


def _write_tokenizer_files(folder: Path, source: Path | None, tokenizer: Tokenizer | None) -> None:
    """Copy tokenizer files and generation config from `source`, or else write them from `tokenizer`."""
    copied = set()
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
            copied.add(name)
    if tokenizer is None:
        return
    if not copied & set(TOKENIZER_FILES):
        tokenizer.save(folder)
    if "generation_config.json" not in copied:
        eos = sorted(tokenizer.eos_ids)
        ids = {"eos_token_id": eos if len(eos) > 1 else eos[0], "pad_token_id": tokenizer.pad_id}
        (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def _write_weights(folder: Path, tensors: Mapping[str, LazyTensor], shard_bytes: int) -> None:
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    if len(shards) == 1:
        safetensors_file.write_tensors(folder / WEIGHTS_FILE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors_file.write_tensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
