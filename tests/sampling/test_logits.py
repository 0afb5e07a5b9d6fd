"""Temperature, top-k, top-p and the draw against plain definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mugrpo_jax.sampling import draw, transform_logits
from mugrpo_jax.sampling.logits import token_keys

transform = jax.jit(transform_logits)


def by_sorting(logits, temperature, top_k, top_p):
    """The distribution sampled from, in float64, the textbook way."""
    z = np.asarray(logits, np.float64) / (temperature or 1)
    if top_k:
        z = np.where(z >= np.sort(z)[::-1][:top_k][-1], z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        count = np.searchsorted(np.cumsum(p[order]), top_p) + 1
        p = np.where(p >= p[order[min(count, len(p)) - 1]], p, 0)
    return p / p.sum()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1.0),
    ties=st.booleans(),
)
def test_transform_is_what_sorting_gives(seed, temperature, top_k, top_p, ties):
    logits = np.random.default_rng(seed).normal(0, 3, 64).astype(np.float32)
    top_p = float(np.float32(top_p))
    if ties:  # a tie at a boundary is kept whole; cumulative sums land on it by rounding, so keep top-p away
        logits, top_p = np.round(logits), 1.0
    got = transform(logits[None], *(np.float32([temperature]), np.int32([top_k]), np.float32([top_p])))
    # Where the sum of the likeliest comes within float32 of top-p, rounding decides about one token more.
    wanted = [by_sorting(logits, temperature, top_k, top_p + near) for near in (0, -1e-6, 1e-6)]
    apart = [np.abs(jax.nn.softmax(got)[0] - p).max() for p in wanted]
    assert min(apart) < 2e-6, f"{apart=}"


def test_off_means_untouched():
    z = jnp.asarray(np.random.default_rng(0).normal(size=(3, 50)), jnp.float32)
    one = jnp.ones(3)
    np.testing.assert_array_equal(transform(z, one, jnp.zeros(3, jnp.int32), one), z)
    np.testing.assert_array_equal(transform(z, one), z)
    np.testing.assert_array_equal(transform(z, 0 * one), z)


@jax.jit
def draw_rows(seed, logits, temperature, top_k, top_p, positions):
    """One token a position, all from the same logits and the same request."""
    rows = positions.shape[0]
    keys = token_keys(jnp.tile(jnp.stack([jnp.uint32(0), seed]), (rows, 1)), positions)
    z = transform_logits(
        jnp.tile(logits, (rows, 1)), *(jnp.full(rows, x) for x in (temperature, top_k, top_p))
    )
    return draw(keys, z, jnp.full(rows, temperature == 0))


def chi_square(tokens, p):
    """The p-value of the tokens under `p`, rare tokens taken together."""
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    expected = p * len(tokens)
    common = expected >= 5
    seen, wanted = counts[common], expected[common]
    if (rest := expected[~common].sum()) > 0:
        seen, wanted = np.append(seen, counts[~common].sum()), np.append(wanted, rest)
    return stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize("vocab", [12, 300])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 7, 1.0), (1.0, 0, 0.75), (0.8, 9, 0.9)],
)
def test_frequencies_match_probabilities(vocab, temperature, top_k, top_p):
    logits = np.random.default_rng(vocab).normal(0, 1.5, vocab).astype(np.float32)
    settings = np.float32(temperature), np.int32(top_k), np.float32(top_p)
    tokens, logp = draw_rows(np.uint32(5), logits, *settings, np.arange(20_000))
    p = by_sorting(logits, *(float(x) for x in settings[:1]), top_k, top_p)
    assert chi_square(np.asarray(tokens), p) > 1e-3
    np.testing.assert_allclose(logp, np.log(p[np.asarray(tokens)]), atol=1e-5)
    # The test can tell: a temperature 15 % off is found out.
    assert chi_square(np.asarray(tokens), by_sorting(logits, temperature * 1.15, top_k, 1.0)) < 1e-6


def test_greedy_takes_the_first_of_the_most_likely():
    z = np.random.default_rng(3).normal(size=(4, 300)).astype(np.float32)
    z[0, [7, 250]] = 9.0
    keys = token_keys(np.zeros((4, 2), np.uint32), np.arange(4))
    tokens, logp = jax.jit(draw)(keys, jnp.asarray(z), jnp.ones(4, bool))
    np.testing.assert_array_equal(tokens, z.argmax(-1))
    np.testing.assert_allclose(logp, jax.nn.log_softmax(z)[np.arange(4), z.argmax(-1)], atol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(4)
    z = jnp.asarray(rng.normal(size=(6, 200)), jnp.float32)
    raw = rng.integers(0, 2**32, (6, 2), dtype=np.uint32)
    order = np.array([5, 3, 0, 1, 4, 2])
    tokens, _ = jax.jit(draw)(token_keys(raw, np.arange(6)), z, jnp.zeros(6, bool))
    moved, _ = jax.jit(draw)(token_keys(raw[order], order), z[order], jnp.zeros(6, bool))
    np.testing.assert_array_equal(moved, tokens[order])


def test_the_key_of_a_token_is_its_position_folded_into_the_request_key():
    seed = (7 << 32) + 9
    got = token_keys(np.array([[seed >> 32, seed & 0xFFFFFFFF], [0, 11]], np.uint32), np.array([30, 31]))
    wanted = jax.random.fold_in(jax.random.key(11), 31)
    np.testing.assert_array_equal(jax.random.key_data(got[1]), jax.random.key_data(wanted))
    assert (jax.random.key_data(got[0]) != jax.random.key_data(got[1])).any()
