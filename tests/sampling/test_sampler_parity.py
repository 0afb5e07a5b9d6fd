"""Greedy responses are those of `transformers` on the committed checkpoints."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax.models.io import huggingface as hf
from mugrpo_jax.models.model_config import read_hf
from mugrpo_jax.sampling import Request, Sampler, plan_sampler

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures" / "parity"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_responses_are_those_of_transformers(family):
    reference = np.load(FIXTURES / family / "reference.npz", allow_pickle=False)
    wanted, lengths = reference["continuations"], reference["lengths"]
    model, params = hf.load_huggingface(FIXTURES / family, dtype=jnp.float32)
    steps = wanted.shape[1]
    plan = plan_sampler(
        read_hf(FIXTURES / family),
        max_prompt=int(lengths.max()),
        max_length=int(lengths.max()) + steps,
        slots=2,
        dtype=jnp.float32,
    )
    requests = [
        Request(prompt[:length], [0], steps, temperature=0.0, index=i)
        for i, (prompt, length) in enumerate(zip(reference["prompts"], lengths))
    ]
    with Sampler(model, params, plan) as sampler:
        responses = list(sampler.run(requests))
    assert len(responses) == len(wanted)
    for response in responses:
        np.testing.assert_array_equal(response.tokens, wanted[response.index])
