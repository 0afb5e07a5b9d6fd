"""Save LoRA adapters as a folder that `peft` can load. `peft` itself is not needed."""

import json
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax.models.io import safetensors_file
from mugrpo_jax.models.io.huggingface import layer_names, supported_dtype
from mugrpo_jax.models.io.huggingface_export import (
    check_new_folder,
    on_this_host,
    temporary_folder,
    tensor_reader,
)
from mugrpo_jax.models.io.safetensors_file import LazyTensor
from mugrpo_jax.models.lora import TARGETS, LoraDecoder
from mugrpo_jax.models.weights import Params

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def save_peft(
    model: LoraDecoder, adapters: Params, out: Path | str, *, base_name: str, dtype: Any = None
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` can load on top of the base model.

    Args:
      adapters: A and B of every target. If they are on devices of several hosts, all hosts must call this
        function, and the first host writes the folder.
      out: the path of the new folder, which must not exist or must be empty.
      base_name: the folder or the Hub name of the base model, which `peft` loads if it is asked to.
      dtype: the dtype of the written adapters; None keeps their dtype.
    """
    out = Path(out)
    check_new_folder(out)
    tensors = _tensors(model, adapters, dtype)
    if jax.process_index() and not on_this_host(adapters):
        for tensor in tensors.values():
            tensor.read()  # the first host reads the same tensors in the same order, and needs our shards
        return
    with temporary_folder(out) as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(_config(model, base_name), indent=2) + "\n")
        safetensors_file.write_tensors(folder / WEIGHTS_FILE, tensors)


def _config(model: LoraDecoder, base_name: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": model.rank,
        "lora_alpha": int(model.alpha) if model.alpha == int(model.alpha) else model.alpha,
        "target_modules": sorted(model.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _tensors(model: LoraDecoder, adapters: Params, dtype: Any) -> dict[str, LazyTensor]:
    """Return all tensors by their names in PEFT, where matrices are transposed and layers are not stacked."""
    found: dict[str, LazyTensor] = {}
    for target in model.targets:
        for part, leaf in adapters["layers"][TARGETS[target]].items():
            kind, (_, rows, columns) = supported_dtype(dtype or leaf.dtype), leaf.shape
            for layer, name in enumerate(layer_names(model.decoder.config, TARGETS[target])):
                name = f"base_model.model.{name.removesuffix('.weight')}.lora_{part.upper()}.weight"
                found[name] = LazyTensor(name, (columns, rows), kind, tensor_reader(leaf, layer, kind))
    return found
