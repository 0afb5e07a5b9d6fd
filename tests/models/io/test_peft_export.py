"""`peft` loads an exported adapter folder and computes what our model computes."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax import models
from mugrpo_jax.models.io import peft_export, safetensors_file

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_peft_fixture.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_peft_fixture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_logits_are_those_of_peft_for_the_same_folder(script, tmp_path):
    model, adapters = script.adapted_model()
    peft_export.save_peft(model, adapters, tmp_path / "adapter", base_name="the base model")
    for name in (peft_export.WEIGHTS_FILE, peft_export.CONFIG_FILE):  # the files that `peft` has loaded
        assert (tmp_path / "adapter" / name).read_bytes() == (script.OUT / name).read_bytes()
    _, base = models.load_huggingface(script.BASE, dtype=jnp.float32)
    wanted = np.load(script.OUT / "reference.npz", allow_pickle=False)["logits"]
    found = jax.jit(lambda params: models.logits(model, params, script.TOKENS))(adapters | {"base": base})
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
    plain = jax.jit(lambda base: models.logits(model.decoder, base, script.TOKENS))(base)
    assert np.abs(plain - wanted).max() > 1
    half = dataclasses.replace(model, alpha=2.5)
    peft_export.save_peft(half, adapters, tmp_path / "half", base_name="", dtype=jnp.bfloat16)
    tensors = safetensors_file.tensors_in_file(tmp_path / "half" / peft_export.WEIGHTS_FILE).values()
    assert {tensor.dtype for tensor in tensors} == {np.dtype(jnp.bfloat16)}
    assert json.loads((tmp_path / "half" / peft_export.CONFIG_FILE).read_text())["lora_alpha"] == 2.5
    with pytest.raises(ValueError, match="adapter: exists already"):
        peft_export.save_peft(model, adapters, tmp_path / "adapter", base_name="the base model")


def test_peft_itself_loads_the_folder(script):
    for package in ("torch", "peft"):
        pytest.importorskip(
            package, reason=f"{package} is not installed: only its stored results are compared"
        )
    found, merged = script.peft_logits(script.BASE, script.OUT)
    wanted = np.load(script.OUT / "reference.npz", allow_pickle=False)["logits"]
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
    np.testing.assert_allclose(merged, wanted, atol=1e-4, rtol=0)
