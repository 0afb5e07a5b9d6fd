"""The sampler with a KV cache in int8: its log-probs are those of a pass with rounded keys and values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_turns import requests as turn_requests
from test_turns import three_turns

from mugrpo_jax.models import (
    ModelConfig,
    attention,
    cache_bytes,
    create,
    decoder,
    make_mesh,
    token_logprobs,
)
from mugrpo_jax.models.rope import rotation
from mugrpo_jax.sampling import Dialogue, Request, Sampler, request_seeds
from mugrpo_jax.sampling.engine import Engine

INT8 = jnp.dtype("int8")


@pytest.fixture(scope="module")
def eight(model, plan):
    with Sampler(*model, plan(cache_dtype=INT8)) as sampler:
        yield sampler


def in_steps(x):
    """Round every head of every token to 127 steps on each side of zero."""
    step = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / step) * step


def to_tie(x):
    """Return how far a token's numbers are from a tie, the middle of two steps: the nearest one, in steps."""
    places = 127 * x / jnp.abs(x).max(-1, keepdims=True)
    return jnp.abs(places - jnp.floor(places) - 0.5).min((-2, -1))


@functools.partial(jax.jit, static_argnames="config")
def rounded_pass(params, tokens, config):
    """Return the log-prob of each token in a pass over whole rows, whose attention reads rounded entries.

    Also return whether one of the entries that it reads, those of earlier tokens, is close to a tie.
    """
    ties = []

    def attend(q, k, v):
        ties.extend([to_tie(k), to_tie(v)])
        return attention(q, in_steps(k), in_steps(v), backend="xla")

    rope = rotation(config, jnp.arange(tokens.shape[1])[None])
    x = params["embed"][tokens]
    for weights in decoder.unstack(params["layers"]):
        x = decoder.apply_layer(config, weights, x, rope, attend)
    x = decoder.rms_norm(x, params["norm"], config.norm_eps)
    logp = jax.nn.log_softmax(x @ decoder.Decoder(config).head_matrix(params).T)
    chosen = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    behind = jax.lax.cummin(jnp.array(ties).min(0), axis=1)[:, :-1] < 2e-4
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(behind, ((0, 0), (1, 0)))


def test_reading_only_as_far_as_the_longest_response_changes_no_token(plan, monkeypatch):
    """A TPU has a decode program for 256, 512, ... entries of the cache; a CPU would read all in int8."""
    config = ModelConfig(96, 32, 2, 2, 1, 16, 48, max_positions=1024)
    whole = plan(slots=2, config=config, max_prompt=520, max_length=700, cache_dtype=INT8)
    assert whole.read_buckets == (704,)
    rng = np.random.default_rng(0)
    # The first loops read 256 entries; the second request crosses from 512 to the whole cache.
    requests = [
        Request(rng.integers(3, 90, prompt), seeds=[number], max_tokens=tokens, index=number)
        for number, (prompt, tokens) in enumerate([(180, 60), (400, 120)])
    ]
    found, reads, decode = [], [], Engine.decode
    monkeypatch.setattr(
        Engine,
        "decode",
        lambda *given, read, **more: (reads.append(read), decode(*given, read=read, **more))[1],
    )
    for buckets in (whole.read_buckets, (256, 512, 704)):
        with Sampler(*create(config, seed=1), dataclasses.replace(whole, read_buckets=buckets)) as sampler:
            alone = sampler.run(requests[:1])
            found.append([*alone, *sorted(sampler.run(requests), key=lambda response: response.index)])
        assert set(reads) == set(buckets) and reads[0] == buckets[0]
        reads.clear()
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def compared(responses, model):
    """Yield for each response the log-probs of its tokens as stored, and those of the rounded pass.

    Then come the tokens behind a tie, and the log-probs of the training pass.
    """
    rows = np.zeros((len(responses), 96), np.int32)
    for row, r in zip(rows, responses):
        row[: len(r.prompt_tokens) + len(r.tokens)] = np.concatenate([r.prompt_tokens, r.tokens])
    own, behind = map(np.asarray, rounded_pass(model[1], rows, model[0].config))
    whole = np.asarray(jax.jit(token_logprobs, static_argnames="model")(*model, rows)[0])
    for row, r in enumerate(responses):
        wrote = np.flatnonzero(np.ones(len(r.tokens), bool) if r.mask is None else r.mask)
        at = row, len(r.prompt_tokens) + wrote
        yield r.logprobs[wrote], own[at], behind[at], whole[at]


def check_own(responses):
    """Sums differ in order, so a number in the middle of two steps may be rounded to the other one.

    This moves all later tokens of its response a little. Most responses have no such number.
    """
    gaps, ties, apart = [], [], []
    for stored, own, behind, whole in responses:
        gaps.append(np.abs(stored - own))
        ties.append(behind)
        apart.append(np.abs(stored - whole))
    assert np.mean([gap.max() < 1e-5 for gap in gaps]) >= 0.75
    every, behind = np.concatenate(gaps), np.concatenate(ties)
    assert every[~behind].max() < 1e-5 and every.max() < 2e-3 and 0.1 < behind.mean() < 0.9
    assert 2e-3 < np.concatenate(apart).mean() < 0.03  # the gap to the policy that is trained


def test_stored_logprobs_are_a_pass_with_rounded_keys_and_values(eight, model):
    prompts = [5, 9, 2, 44], list(range(16)), [7]
    asked = [Request(p, request_seeds(1, i, samples=4), 60, index=i) for i, p in enumerate(prompts)]
    check_own(compared(list(eight.run(asked)), model))


def test_a_message_is_rounded_too(model, plan):
    with Sampler(*model, plan(turns=True, cache_dtype=INT8)) as sampler:
        responses = list(sampler.run(turn_requests(6), Dialogue(three_turns)))
    assert any(r.mask is not None for r in responses)
    check_own(compared(responses, model))


def test_company_fewer_slots_and_a_mesh_do_not_matter(eight, model, plan, mixed, results):
    few_long = [80 if slot in (9, 20, 22, 31) else 2 for slot in range(32)]
    asked = [*mixed, Request([5, 9], request_seeds(7, samples=32), few_long, index=99)]
    wanted = results(eight, asked)
    assert results(eight, asked[::-1]) == wanted
    for mesh in (None, make_mesh(data=2, fsdp=2, tensor=2)):
        with Sampler(*model, plan(32, mesh=mesh, shrink=True, cache_dtype=INT8)) as sampler:
            before = jax.tree.map(lambda x: x.sharding, sampler._engine._slots)
            assert results(sampler, asked) == wanted
            assert results(sampler, asked[-1:]) == {key: wanted[key] for key in wanted if key[0] == 99}
            assert sampler._engine.slots == 8
            assert jax.tree.map(lambda x: x.sharding, sampler._engine._slots) == before


def test_the_plan_counts_a_cache_in_int8(eight, model, plan):
    held = jax.tree.leaves((eight._engine._slots.keys, eight._engine._slots.values))
    wide, planned = plan(), eight.plan
    assert sum(leaf.nbytes for leaf in held) == planned.cache_bytes < 0.4 * wide.cache_bytes
    assert {leaf.dtype.name for leaf in held} == {"int8", "float32"}
    assert planned.cache_bytes == cache_bytes(model[0].config, 4, planned.cache_length, INT8)
    assert ", float32, cache in int8;" in str(planned) and "cache in" not in str(wide)
