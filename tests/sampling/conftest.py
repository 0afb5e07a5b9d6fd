"""A tiny model whose distributions are neither flat nor peaked, and short ways to sample from it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax.models import ModelConfig, create
from mugrpo_jax.sampling import Request, Sampler, plan_sampler, request_seeds

CONFIG = ModelConfig(
    vocab_size=160,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_positions=256,
)
# For tests that count tokens and slots, whatever the tokens are.
SMALL = dataclasses.replace(
    CONFIG, vocab_size=16, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=8
)


@pytest.fixture(scope="session")
def model():
    return create(CONFIG, seed=1)


@pytest.fixture(scope="session")
def small_model():
    return create(SMALL, seed=1)


@pytest.fixture(scope="session")
def plan():
    def build(slots=4, config=CONFIG, **options):
        return plan_sampler(
            config, **{"max_prompt": 16, "max_length": 96, "dtype": jnp.float32} | options, slots=slots
        )

    return build


@pytest.fixture(scope="session")
def sampler(model, plan):
    with Sampler(*model, plan()) as sampler:
        yield sampler


@pytest.fixture
def mixed():
    """Requests of every kind: greedy, plain, tempered, truncated; short and long; with and without stops."""
    kinds = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    ]
    rng = np.random.default_rng(0)
    return [
        Request(
            prompt=rng.integers(0, CONFIG.vocab_size, 1 + 3 * i % 16),
            seeds=request_seeds(0, i, samples=1 + i % 4),
            max_tokens=int(rng.integers(1, 40)),
            stop=(3, 4) if i % 2 else (),
            index=i,
            **kinds[i % len(kinds)],
        )
        for i in range(12)
    ]


@pytest.fixture(scope="session")
def results():
    def run(sampler, requests):
        return {(r.index, r.sample): (r.tokens.tolist(), r.finish_reason) for r in sampler.run(requests)}

    return run
