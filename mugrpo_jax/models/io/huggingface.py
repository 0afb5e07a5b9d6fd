"""Load Hugging Face folders, which hold `config.json`, safetensors files and tokenizer files.

Names, shapes and dtypes of all tensors are checked before weights are loaded. Each parameter is copied to its
devices before the next parameter is read, so that host memory never holds a second copy of the model.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mugrpo_jax.files import read_json_object
from mugrpo_jax.models import decoder
from mugrpo_jax.models import model_config as configs
from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.io import safetensors_file
from mugrpo_jax.models.io.safetensors_file import LazyTensor
from mugrpo_jax.models.model_config import ModelConfig
from mugrpo_jax.models.sharding import check_mesh
from mugrpo_jax.models.weights import Params, param_sharding

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")

_TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER_NAMES = {
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


def load_huggingface(
    folder: Path | str, *, dtype: Any = None, mesh: Mesh | None = None
) -> tuple[Decoder, Params]:
    """Load a Hugging Face folder and return `(model, params)`.

    `folder` holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`.
    `dtype` None keeps the dtype of the files. `mesh` None puts all parameters on the default device.
    """
    folder = Path(folder)
    config = configs.read_hf(folder)
    return params_from_tensors(config, tensors_in_folder(folder), source=str(folder), dtype=dtype, mesh=mesh)


def check_folder(folder: Path) -> ModelConfig:
    """Check names, shapes and dtypes of all tensors in a folder, without reading them; return the config."""
    config = configs.read_hf(folder)
    _, shapes = decoder.abstract(config)
    _check_tensors(config, shapes, tensors_in_folder(folder), str(folder), np.dtype(np.float32))
    return config


def tensors_in_folder(folder: Path) -> dict[str, LazyTensor]:
    """Return all tensors in a folder by name. Only the headers of its safetensors files are read."""
    if (folder / WEIGHTS_FILE).exists():
        return safetensors_file.tensors_in_file(folder / WEIGHTS_FILE)
    if not (folder / INDEX_FILE).exists():
        raise ValueError(_no_weights(folder))
    index = folder / INDEX_FILE
    try:
        weight_map: Any = read_json_object(index).get("weight_map")
    except ValueError as error:
        raise ValueError(
            f"{index}: not a safetensors index ({str(error).removeprefix(f'{index}: ')})"
        ) from None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: not a safetensors index (no table 'weight_map' of file names)")
    files = sorted(set(weight_map.values()))
    for file in files:
        if Path(file).name != file or not (folder / file).exists():
            raise ValueError(f"{folder}: shard {file} is missing; {INDEX_FILE} names {len(files)} shards")
    found: dict[str, LazyTensor] = {}
    for file in files:
        for name, tensor in safetensors_file.tensors_in_file(folder / file).items():
            if weight_map.get(name) != file:
                raise ValueError(f"{folder / file}: tensor {name} is not where {INDEX_FILE} says")
            found[name] = tensor
    lost = sorted(weight_map.keys() - found.keys())
    if lost:
        raise ValueError(
            f"{folder / weight_map[lost[0]]}: tensor {lost[0]} named by {INDEX_FILE} is not in it"
        )
    return found


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder / pickles[0]}: pickle checkpoints are never opened, they can run code; "
            f"convert it to safetensors"
        )
    return f"{folder}: no weights found; expected {WEIGHTS_FILE} or {INDEX_FILE}"


def params_from_tensors(
    config: ModelConfig,
    tensors: Mapping[str, LazyTensor],
    *,
    source: str,
    dtype: Any = None,
    mesh: Mesh | None = None,
) -> tuple[Decoder, Params]:
    """Do the same as `load_huggingface` for tensors by Hugging Face name; error messages name `source`."""
    model, shapes = decoder.abstract(config)
    names_of = tensor_names(config, shapes)
    dtype = None if dtype is None else supported_dtype(dtype)
    _check_tensors(config, shapes, tensors, source, dtype)
    if mesh is not None:
        check_mesh(config, mesh)
    if config.tie_embeddings and _TOP_NAMES["head"] in tensors:
        _check_tied(tensors[_TOP_NAMES["embed"]], tensors[_TOP_NAMES["head"]])
    shardings = None if mesh is None else param_sharding(mesh, model, shapes)

    def read(path: tuple[Any, ...], leaf: Any, sharding: NamedSharding | None = None) -> jax.Array:
        parts = [tensors[name] for name in names_of[path]]
        return _load_leaf(leaf.shape, parts, dtype or parts[0].dtype, sharding)

    trees = (shapes,) if shardings is None else (shapes, shardings)
    return model, jax.tree.map_with_path(read, *trees)


def tensor_names(config: ModelConfig, params: Params) -> dict[tuple[Any, ...], list[str]]:
    """Return the Hugging Face names of each parameter by path. A stacked parameter has a name per layer."""
    return {path: names for path, _, names in named_leaves(config, params)}


def named_leaves(config: ModelConfig, params: Params) -> Iterator[tuple[tuple[Any, ...], Any, list[str]]]:
    """Yield path, leaf and Hugging Face names of each parameter. A stacked parameter has a name per layer."""
    for path, leaf in jax.tree.leaves_with_path(params):
        key = path[-1].key
        if key in _TOP_NAMES:
            yield path, leaf, [_TOP_NAMES[key]]
        else:
            yield path, leaf, layer_names(config, key)


def layer_names(config: ModelConfig, key: str) -> list[str]:
    """Return the Hugging Face name of a stacked parameter in each layer."""
    return [f"model.layers.{i}.{_LAYER_NAMES[key]}" for i in range(config.num_layers)]


def stored_shape(path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a parameter's shape in the file, where layers are not stacked and matrices are transposed."""
    return shape[:0:-1] if path[0].key == "layers" else shape


def supported_dtype(dtype: Any) -> np.dtype:
    """Return the dtype with this name; raise ValueError if weights cannot have it."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in safetensors_file.DTYPES.values():
        raise ValueError(f"dtype: {dtype} is not supported; possible: float32, float16, bfloat16")
    return found


def _check_tensors(
    config: ModelConfig,
    shapes: Params,
    tensors: Mapping[str, LazyTensor],
    source: str,
    dtype: np.dtype | None,
) -> None:
    leaves = [(stored_shape(path, leaf.shape), names) for path, leaf, names in named_leaves(config, shapes)]
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
                    f"{tensor.origin}: {name} has shape {list(tensor.shape)}, "
                    f"the config says {list(expected)}"
                )
            if dtype is None and tensor.dtype != tensors[names[0]].dtype:
                raise ValueError(
                    f"{tensor.origin}: {name} is {tensor.dtype} but {names[0]} is {tensors[names[0]].dtype}; "
                    f"layers of one dtype are needed, or a dtype to convert to"
                )


def _redundant(name: str) -> bool:
    """Return whether a tensor is not needed, because the embedding or the config determines its values."""
    return name == _TOP_NAMES["head"] or name.endswith("rotary_emb.inv_freq")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_tied(embed: LazyTensor, head: LazyTensor) -> None:
    """Raise ValueError if the stored head of a model with tied embeddings differs from the embedding."""
    same = embed.shape == head.shape and embed.dtype == head.dtype
    if not same or not np.array_equal(embed.read().view(np.uint8), head.read().view(np.uint8)):
        raise ValueError(
            f"{head.origin}: tie_word_embeddings is on but {_TOP_NAMES['head']} differs "
            f"from {_TOP_NAMES['embed']}"
        )


def _load_leaf(
    shape: tuple[int, ...], parts: list[LazyTensor], dtype: np.dtype, sharding: NamedSharding | None
) -> jax.Array:
    """Load one parameter onto its devices. The host holds the part for one device at a time."""
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


def _read_piece(parts: list[LazyTensor], dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """Read the slice `index` of a parameter. `parts` is one tensor, or one transposed tensor per layer."""
    piece = _aligned(tuple(part.stop - part.start for part in index), dtype)
    if len(index) == len(parts[0].shape):
        piece[...] = parts[0].read()[index]
        return piece
    for row, part in enumerate(parts[index[0]]):
        transpose_into(piece[row], part.read()[index[:0:-1]])
    return piece


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array whose address is a multiple of 64. JAX on a CPU uses such an array without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def transpose_into(out: np.ndarray, source: np.ndarray) -> None:
    """Write the transpose of `source` to `out`."""
    # Transpose 64 rows at a time, because so few rows fit into the CPU's cache.
    for row in range(0, source.shape[0], 64):
        out[..., row : row + 64] = source[row : row + 64].T
