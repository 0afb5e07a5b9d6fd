"""Time `generate` of transformers on torch, for comparison; `bench_generate.py --torch` calls this."""

import time

import jax.numpy as jnp
from generate_cases import Case, say

from mugrpo_jax.models.model_config import to_hf


def measure_torch(case: Case) -> None:
    """`generate` of transformers: the first number of slots, plain sampling, every row to full length."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        say(what="torch", model=case.name, skipped=str(error))
        return
    hf = to_hf(case.config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = AutoConfig.for_model(hf.pop("model_type"), **hf)
    with torch.device(device):  # draw random weights on the device; the CPU takes minutes for it
        model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, jnp.dtype(case.dtype).name))
    model = model.eval()
    rows = case.slots[0]
    prompts = torch.randint(0, case.config.vocab_size, (rows, case.prompt), device=device)

    def generate(tokens: int) -> float:
        start = time.perf_counter()
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        assert out.cpu().shape == (rows, case.prompt + tokens)
        return time.perf_counter() - start

    with torch.no_grad():
        generate(4)
        seconds = generate(case.response)
    rate = rows * case.response / seconds
    say(what="torch", model=case.name, slots=rows, seconds=seconds, tokens_per_s=rate, device=device)
