"""Make the reference files of the parity tests: tiny random checkpoints and the results of `transformers`.

    python scripts/make_parity_fixtures.py tests/models/fixtures/parity

Needs torch; the package itself does not. Every model family gets a folder with a checkpoint in bfloat16 and
`reference.npz`: prompts (zero-padded), their lengths, float32 logits, and 16 greedily chosen next tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_LENGTHS = (5, 23, 44)
NEW_TOKENS = 16
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# With heads of 16 these settings keep the first frequency, blend the second and stretch the rest.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 1_000_000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-scaled": ("Llama", {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": PLAIN}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": PLAIN}),
    "qwen3-untied": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
}


def random_model(family: str, seed: int) -> Any:
    """A `transformers` model in which every weight is random, including norms and biases."""
    import torch
    import transformers

    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SHAPE | extra))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in label:
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(noise * (weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.5))
    return model.to(torch.bfloat16)


def reference(folder: Path, seed: int) -> dict[str, np.ndarray]:
    """Prompts, and the outputs of the checkpoint in `folder` for them, in float32."""
    import torch

    model = load(folder)
    rng = np.random.default_rng(seed)
    prompts = np.zeros((len(PROMPT_LENGTHS), max(PROMPT_LENGTHS)), np.int32)
    continuations = np.zeros((len(PROMPT_LENGTHS), NEW_TOKENS), np.int32)
    for row, length in enumerate(PROMPT_LENGTHS):
        prompts[row, :length] = rng.integers(0, SHAPE["vocab_size"], length)
        tokens = prompts[row, :length].tolist()
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        continuations[row] = tokens[length:]
    return {
        "prompts": prompts,
        "lengths": np.array(PROMPT_LENGTHS, np.int32),
        "logits": prompt_logits(model, prompts),
        "continuations": continuations,
    }


def load(folder: Path) -> Any:
    """The checkpoint as `transformers` loads it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompt_logits(model: Any, prompts: np.ndarray) -> np.ndarray:
    """Logits of right-padded prompts, zero on the padding."""
    import torch

    logits = np.zeros((*prompts.shape, SHAPE["vocab_size"]), np.float32)
    for row, length in enumerate(PROMPT_LENGTHS):
        with torch.no_grad():
            logits[row, :length] = model(torch.tensor(prompts[row : row + 1, :length])).logits[0].numpy()
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for number, family in enumerate(FAMILIES):
        folder, seed = arguments.out / family, arguments.seed + number
        random_model(family, seed).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(folder / "reference.npz", allow_pickle=False, **reference(folder, seed))
        print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir())} bytes")


if __name__ == "__main__":
    main()
