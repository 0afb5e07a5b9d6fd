"""Hugging Face folders in and out: `config.json`, safetensors, tokenizer files.

Everything the headers can tell is checked before the first weight is read. Weights go one by one into the
stacked, sharded arrays of the decoder; no second copy of the model exists on the host.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mugrpo_jax.models import config as configs
from mugrpo_jax.models import decoder
from mugrpo_jax.models.config import ModelConfig
from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.io import safetensors_file as tensorfile
from mugrpo_jax.models.io.safetensors_file import Stored
from mugrpo_jax.models.model import Params, param_sharding
from mugrpo_jax.models.sharding import check_mesh
from mugrpo_jax.models.tokenizer import TOKENIZER_FILES, Tokenizer

SHARD_BYTES = 5_000_000_000
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")

_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def load(folder: Path | str, *, dtype: Any = None, mesh: Mesh | None = None) -> tuple[Decoder, Params]:
    """A checkpoint as `(model, params)`.

    Args:
      folder: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`.
      dtype: of the parameters; None keeps what is stored.
      mesh: shard over it by the table in `sharding`; None puts everything on the default device.
    """
    folder = Path(folder)
    config = configs.read_hf(folder)
    return assemble(config, stored_tensors(folder), source=str(folder), dtype=dtype, mesh=mesh)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name, from the headers of its safetensors files."""
    if (folder / _SINGLE).exists():
        return tensorfile.read_header(folder / _SINGLE)
    if not (folder / _INDEX).exists():
        raise ValueError(_no_weights(folder))
    index = folder / _INDEX
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index}: not a safetensors index (no table 'weight_map')") from None
    for file in files:
        if Path(file).name != file or not (folder / file).exists():
            raise ValueError(f"{folder}: shard {file} is missing; {_INDEX} names {len(files)} shards")
    found: dict[str, Stored] = {}
    for file in files:
        for name, tensor in tensorfile.read_header(folder / file).items():
            if weight_map.get(name) != file:
                raise ValueError(f"{folder / file}: tensor {name} is not where {_INDEX} says")
            found[name] = tensor
    lost = sorted(weight_map.keys() - found.keys())
    if lost:
        raise ValueError(f"{folder / weight_map[lost[0]]}: tensor {lost[0]} named by {_INDEX} is not in it")
    return found


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder / pickles[0]}: pickle checkpoints are never opened, they can run code; "
            f"convert it to safetensors"
        )
    return f"{folder}: no weights found; expected {_SINGLE} or {_INDEX}"


def assemble(
    config: ModelConfig,
    tensors: Mapping[str, Stored],
    *,
    source: str,
    dtype: Any = None,
    mesh: Mesh | None = None,
) -> tuple[Decoder, Params]:
    """Stacked (and sharded) parameters from tensors under their Hugging Face names."""
    model, shapes = decoder.abstract(config)
    plan = {path: names for path, _, names in _leaves(config, shapes)}
    dtype = None if dtype is None else _dtype(dtype)
    _check(config, shapes, tensors, source, dtype)
    if mesh is not None:
        check_mesh(config, mesh)
    if config.tie_embeddings and _TOP["head"] in tensors:
        _check_tied(tensors[_TOP["embed"]], tensors[_TOP["head"]])
    shardings = None if mesh is None else param_sharding(mesh, model, shapes)

    def read(path: tuple[Any, ...], leaf: Any, sharding: NamedSharding | None = None) -> jax.Array:
        parts = [tensors[name] for name in plan[path]]
        return _place(leaf.shape, parts, dtype or parts[0].dtype, sharding)

    trees = (shapes,) if shardings is None else (shapes, shardings)
    return model, jax.tree.map_with_path(read, *trees)


def _leaves(config: ModelConfig, params: Params) -> Iterator[tuple[tuple[Any, ...], Any, list[str]]]:
    """Path, leaf and Hugging Face names (one, or one a layer) of every parameter."""
    for path, leaf in jax.tree.leaves_with_path(params):
        key = path[-1].key
        if key in _TOP:
            yield path, leaf, [_TOP[key]]
        else:
            yield path, leaf, [f"model.layers.{i}.{_LAYER[key]}" for i in range(config.num_layers)]


def _stored_shape(path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of one tensor of a leaf in a file: layers lie apart, and as [out, in] where ours are [in, out]."""
    return shape[:0:-1] if path[0].key == "layers" else shape


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in tensorfile.DTYPES.values():
        raise ValueError(f"dtype: {dtype} is not supported; possible: float32, float16, bfloat16")
    return found


def _check(
    config: ModelConfig, shapes: Params, tensors: Mapping[str, Stored], source: str, dtype: np.dtype | None
) -> None:
    leaves = [(_stored_shape(path, leaf.shape), names) for path, leaf, names in _leaves(config, shapes)]
    wanted = {name for _, names in leaves for name in names}
    missing = [name for _, names in leaves for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{source}: tensor {missing[0]} is missing{_and_more(missing)}")
    unknown = [name for name in tensors if name not in wanted and not _redundant(name)]
    if unknown:
        raise ValueError(
            f"{source}: tensor {unknown[0]} has no place in this architecture{_and_more(unknown)}"
        )
    for expected, names in leaves:
        for name in names:
            tensor = tensors[name]
            if tensor.shape != expected:
                raise ValueError(
                    f"{tensor.where}: {name} has shape {list(tensor.shape)}, the config says {list(expected)}"
                )
            if dtype is None and tensor.dtype != tensors[names[0]].dtype:
                raise ValueError(
                    f"{tensor.where}: {name} is {tensor.dtype} but {names[0]} is {tensors[names[0]].dtype}; "
                    f"layers of one dtype are needed, or a dtype to convert to"
                )


def _redundant(name: str) -> bool:
    """Stored by some checkpoints although another tensor or the config determines it."""
    return name == _TOP["head"] or name.endswith("rotary_emb.inv_freq")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_tied(embed: Stored, head: Stored) -> None:
    """Some tied checkpoints store the head again; it must be the embedding."""
    same = embed.shape == head.shape and embed.dtype == head.dtype
    if not same or not np.array_equal(embed.read().view(np.uint8), head.read().view(np.uint8)):
        raise ValueError(
            f"{head.where}: tie_word_embeddings is on but {_TOP['head']} differs from {_TOP['embed']}"
        )


def _place(
    shape: tuple[int, ...], parts: list[Stored], dtype: np.dtype, sharding: NamedSharding | None
) -> jax.Array:
    """One leaf on its devices; the host holds one device's piece at a time."""
    if sharding is None:
        whole = tuple(slice(0, size) for size in shape)
        return jax.block_until_ready(jax.device_put(_read_piece(parts, dtype, whole)))
    owners: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape))
        owners.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in owners.items():
        piece = _read_piece(parts, dtype, tuple(slice(*bound) for bound in bounds))
        arrays += [jax.block_until_ready(jax.device_put(piece, device)) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_piece(parts: list[Stored], dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """The slice `index` of a leaf: of a plain tensor, or of the stack of its transposed layers."""
    piece = _aligned(tuple(part.stop - part.start for part in index), dtype)
    if len(index) == len(parts[0].shape):
        piece[...] = parts[0].read()[index]
        return piece
    for row, part in enumerate(parts[index[0]]):
        _transpose_into(piece[row], part.read()[index[:0:-1]])
    return piece


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array on a 64-byte boundary, which the CPU back end adopts instead of copying."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _transpose_into(out: np.ndarray, source: np.ndarray) -> None:
    # In strips that stay in the CPU's cache: several times faster than one assignment.
    for row in range(0, source.shape[0], 64):
        out[..., row : row + 64] = source[row : row + 64].T


def save(
    params: Params,
    out: Path | str,
    *,
    config: ModelConfig,
    source: Path | str | None = None,
    tokenizer: Tokenizer | None = None,
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `transformers` loads; it appears whole, by renaming, or not at all.

    Args:
      params: the parameter tree, on devices of this process or in NumPy arrays.
      out: the folder to make; must not exist, or be empty.
      config: the model's shape.
      source: the Hugging Face folder the model came from. Its `config.json` (but for the dtype), generation
        config and tokenizer files are copied unchanged.
      tokenizer: written when `source` has none.
      dtype: convert weights to it; None keeps that of `params`.
      shard_bytes: start another safetensors file beyond this size.
    """
    out, source = Path(out), None if source is None else Path(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists already; choose another folder or remove it")
    tensors = _to_store(config, params, dtype)
    config_json = _config_json(config, source, next(iter(tensors.values())).dtype)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        (temporary / "config.json").write_text(config_json)
        _write_texts(temporary, source, tokenizer)
        _write_weights(temporary, tensors, shard_bytes)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _to_store(config: ModelConfig, params: Params, dtype: Any) -> dict[str, Stored]:
    """Every tensor as the file will hold it, layer by layer; nothing is fetched yet."""
    wanted = {path: leaf.shape for path, leaf in jax.tree.leaves_with_path(decoder.abstract(config)[1])}
    if {path for path, _ in jax.tree.leaves_with_path(params)} != wanted.keys():
        raise ValueError("save: the parameters do not have the structure that the config describes")
    found: dict[str, Stored] = {}
    for path, leaf, names in _leaves(config, params):
        if leaf.shape != wanted[path]:
            raise ValueError(
                f"save: {jax.tree_util.keystr(path)} has shape {leaf.shape}, the config says {wanted[path]}"
            )
        if not getattr(leaf, "is_fully_addressable", True):
            raise ValueError("save: parameters are spread over several hosts; export on one host")
        kind, shape = _dtype(dtype or leaf.dtype), _stored_shape(path, leaf.shape)
        stacked = path[0].key == "layers"
        for layer, name in enumerate(names):
            found[name] = Stored(name, shape, kind, _fetch(leaf, layer if stacked else None, kind))
    return dict(sorted(found.items(), key=lambda item: _file_order(item[0])))


def _fetch(leaf: Any, layer: int | None, dtype: np.dtype) -> Any:
    def fetch() -> np.ndarray:
        if layer is None:
            return np.asarray(leaf).astype(dtype, copy=False)
        array = np.asarray(leaf[layer])
        out = np.empty(array.shape[::-1], dtype)
        _transpose_into(out, array)
        return out

    return fetch


def _file_order(name: str) -> tuple[int, int]:
    """Embedding, layers in their order, final norm, head."""
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


def _write_texts(folder: Path, source: Path | None, tokenizer: Tokenizer | None) -> None:
    """Tokenizer files and generation config: the source's own, else the tokenizer's."""
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


def _write_weights(folder: Path, tensors: Mapping[str, Stored], shard_bytes: int) -> None:
    shards: list[dict[str, Stored]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensorfile.tensor_bytes(tensor)
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    if len(shards) == 1:
        tensorfile.write(folder / _SINGLE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensorfile.write(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(map(tensorfile.tensor_bytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
