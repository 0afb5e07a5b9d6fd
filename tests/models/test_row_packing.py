"""Claims about packed rows: the log-probs and gradients of padded rows, on one device and on a mesh."""

import contextlib
import functools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import models
from mugrpo_jax.models.attention import packed_attention

LENGTHS = np.array([19, 7, 1, 12, 18, 3, 9, 0])
WIDTH = 19


def value(model, options):
    """A scalar of the log-probs of real tokens, to differentiate."""
    weights = jax.random.normal(jax.random.key(7), (len(LENGTHS), WIDTH))
    real = jnp.arange(WIDTH) < LENGTHS[:, None]

    def of(params, tokens, packing=None):
        logp, entropy = models.token_logprobs(
            model, params, tokens, packing=packing, entropy=True, chunk=11, **options
        )
        return (jnp.where(real, logp + 0.3 * entropy, 0.0) * weights).sum()

    return of


def packed(parts, tokens_per_part):
    rows = np.asarray(cases.tokens(rows=len(LENGTHS), length=WIDTH))
    packing = models.plan_packing(LENGTHS.tolist(), rows.shape, tokens=tokens_per_part, parts=parts)
    return rows, np.asarray(packing.pack(jnp.asarray(rows))), packing


@pytest.mark.parametrize(
    ("family", "options"), [("qwen2", {"scan": False}), ("llama", {"remat": "full"})], ids=str
)
def test_packed_rows_give_the_value_and_gradient_of_padded_rows(family, options):
    model, params = cases.make(cases.FAMILIES[family])
    rows, tokens, packing = packed(parts=2, tokens_per_part=41)
    of = jax.jit(jax.value_and_grad(value(model, options)))
    assert cases.scaled_difference(of(params, rows), of(params, tokens, packing)) < 5e-5


@pytest.mark.parametrize("shape", [None, (2, 1, 2)], ids=str)
def test_splash_attention_on_packed_rows_is_attention_on_each_row(shape):
    """Odd lengths over blocks of 256 tokens; the longest row reaches over more than one block."""
    lengths = [301, 77, 1, 50, 0, 190, 33, 20] if shape is None else [61, 7, 1, 50]
    width, parts = max(lengths), 1 if shape is None else 2
    packing = models.plan_packing(
        lengths, (len(lengths), width), tokens=680 if shape is None else 70, parts=parts
    )
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weights = (
        jax.random.normal(key, (*packing.packed_from.shape, heads, 24))
        for key, heads in zip(keys, (4, 2, 2, 4))
    )
    real = packing.packed_from < len(lengths) // parts * width

    def total(attend):
        def of(*inputs):
            return (jnp.where(real[..., None, None], attend(*inputs), 0.0) * weights).sum()

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2)))(q, k, v)

    def padded(*inputs):
        return packing.pack(models.attention(*map(packing.unpack, inputs), backend="xla"))

    def segments(*inputs):
        return packed_attention(*inputs, packing.segments, longest=width)

    expected = total(padded)
    mesh = shape and models.make_mesh(data=shape[0], tensor=shape[2], devices=jax.devices()[:4])
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        assert cases.scaled_difference(expected, total(segments)) < 1e-5
        assert (
            cases.scaled_difference(
                expected,
                total(functools.partial(packed_attention, segments=packing.segments * 0, longest=width)),
            )
            > 1e-2
        )


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_with_splash_attention_takes_packed_rows(shared):
    """With shared prompts, its rows are padded first."""
    model, params = cases.make(cases.QWEN2)
    rows = np.asarray(cases.tokens(rows=len(LENGTHS), length=WIDTH)).copy()
    prefixes = [0, 2, 0, 0, 5, 0, 0, 0] if shared else None
    for row, count in enumerate(prefixes or ()):
        rows[row, :count] = rows[row - 1, :count]
    packing = models.plan_packing(LENGTHS.tolist(), rows.shape, tokens=80, shared=prefixes)
    tokens = np.asarray(packing.pack(jnp.asarray(rows)))
    expected, found = (
        jax.jit(jax.value_and_grad(value(model, {"backend": backend})))(params, tokens, packing)
        for backend in ("xla", "splash")
    )
    assert cases.scaled_difference(expected, found) < 5e-5


def test_the_first_token_of_a_packed_row_has_no_logprob():
    model, params = cases.make(cases.QWEN2)
    _, tokens, packing = packed(parts=1, tokens_per_part=80)
    logp, _ = models.token_logprobs(model, params, tokens, packing=packing)
    assert (np.asarray(logp)[:, 0] == 0).all() and (np.asarray(logp)[0, 1:] < 0).all()


@pytest.mark.parametrize("shape", [(2, 4, 1), (1, 2, 2)], ids=str)
def test_packed_rows_on_a_mesh_are_those_of_one_device_and_stay_where_they_are(shape):
    model, params = cases.make(cases.QWEN2)
    data, fsdp, tensor = shape
    mesh = models.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: np.prod(shape)])
    rows, tokens, packing = packed(parts=data * fsdp, tokens_per_part=40)
    of = value(model, {})
    expected = jax.jit(jax.value_and_grad(of))(params, rows)
    batch = NamedSharding(mesh, P(("data", "fsdp")))
    sharded = jax.device_put(params, models.param_sharding(mesh, model, params))
    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(of))
        inputs = sharded, *jax.device_put((tokens, packing), batch)
        assert cases.scaled_difference(expected, program(*inputs)) < 5e-5
        padded = program.lower(sharded, jax.device_put(rows, batch)).compile().as_text()
        assert collectives(program.lower(*inputs).compile().as_text()) <= collectives(padded)


@pytest.mark.parametrize("shape", [None, (2, 2, 2)], ids=str)
def test_log_probs_nobody_wants_are_left_out_and_the_others_stay_as_they_are(shape):
    model, params = cases.make(cases.QWEN2)
    mesh = shape and models.make_mesh(data=shape[0], fsdp=shape[1], tensor=shape[2])
    _, tokens, packing = packed(parts=4, tokens_per_part=40)
    weights = jax.random.normal(jax.random.key(7), (len(LENGTHS), WIDTH))
    position = jnp.arange(WIDTH)
    response = (position < LENGTHS[:, None]) & (position > LENGTHS[:, None] // 2)

    def of(params, tokens, packing, wanted):
        logp, ent = models.token_logprobs(
            model, params, tokens, packing=packing, wanted=wanted, entropy=True, chunk=3
        )
        return (jnp.where(response, logp + 0.3 * ent, 0.0) * weights).sum(), logp

    program = jax.jit(jax.value_and_grad(of, has_aux=True))
    (expected, whole), gradient = program(params, tokens, packing, None)
    inputs = params, tokens, packing, response
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        if mesh is not None:
            batch = NamedSharding(mesh, P(("data", "fsdp")))
            inputs = (
                jax.device_put(params, models.param_sharding(mesh, model, params)),
                *jax.device_put(inputs[1:], batch),
            )
        (found, logp), found_gradient = program(*inputs)
    assert cases.scaled_difference((expected, gradient), (found, found_gradient)) < 5e-5
    # A chunk without any response is not computed: zeros come out of it.
    assert (np.asarray(whole) < 0).sum() > 1.3 * (np.asarray(logp) < 0).sum()


def collectives(text):
    """How often devices talk to each other in a compiled program."""
    return len(re.findall(r"= \S+ (?:all-gather|all-to-all|collective-permute|all-reduce)\(", text))


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="packed row 0: 26 tokens or more, room for 25"):
        models.plan_packing([19, 7], (2, 19), tokens=25)
