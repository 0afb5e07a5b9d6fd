"""Make the reference of the LoRA test: the logits that `peft` computes with an adapter folder of ours.

    python scripts/make_peft_fixture.py

Needs torch and peft; the package itself does not. The base model is one of the parity checkpoints. The folder
`tests/models/fixtures/peft` gets our adapter folder and `reference.npz` with float32 logits.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mugrpo_jax import models
from mugrpo_jax.models import LoraDecoder, lora
from mugrpo_jax.models.io import peft_export

FIXTURES = Path(__file__).parents[1] / "tests" / "models" / "fixtures"
BASE, OUT = FIXTURES / "parity" / "qwen2-untied", FIXTURES / "peft"
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 20))


def adapted_model() -> tuple[LoraDecoder, Any]:
    """Return a model with adapters beside all matrices, and random adapters, of which none is zero."""
    model = LoraDecoder(models.Decoder(models.read_hf(BASE)), 3, 7.5, tuple(lora.TARGETS))
    rng = np.random.default_rng(1)
    shapes = models.abstract_params(model)
    return model, jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), shapes)


def peft_logits(base: Path, adapter: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of `peft` for an adapter folder, and those after it has merged the adapter."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        tokens = torch.tensor(TOKENS)
        return model(tokens).logits.numpy(), model.merge_and_unload()(tokens).logits.numpy()


def main() -> None:
    """Write the folder anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    peft_export.save_peft(*adapted_model(), OUT, base_name="the base model")
    logits, merged = peft_logits(BASE, OUT)
    print("largest difference of merged and unmerged logits:", np.abs(logits - merged).max())
    np.savez_compressed(OUT / "reference.npz", logits=logits)


if __name__ == "__main__":
    main()
