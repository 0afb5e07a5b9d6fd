"""Claims about LoRA: its gradient is that of full tuning, projected; merged and unmerged weights agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_update_step import MODEL, SETTINGS, update

from mugrpo_jax import models, objectives, training
from mugrpo_jax.models import LoraDecoder, frozen_weights, lora
from mugrpo_jax.models.eight_bits import EIGHT_BITS, dequantised, in_eight_bits
from mugrpo_jax.sampling import plan_sampler
from mugrpo_jax.sampling.sampler_weights import sampling_params
from mugrpo_jax.setup.lora import BaseWeights, merged_params

ALL = tuple(lora.TARGETS)


def whole_update():
    """One micro-batch, so that one shape is compiled."""
    return update(4096, unit=64, multiple=4)


def make_mesh(shape=(1, 1, 1)):
    data, fsdp, tensor = shape
    return models.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: np.prod(shape)])


@functools.cache
def frozen(mesh):
    return models.create(MODEL, mesh=mesh)[1]


def random_adapters(model, mesh=None):
    """Adapters that change the model: B is not zero."""
    rng, shapes = np.random.default_rng(1), models.abstract_params(model)
    drawn = jax.tree.map(lambda leaf: 0.1 * rng.standard_normal(leaf.shape, np.float32), shapes)
    return jax.device_put(drawn, models.param_sharding(mesh or make_mesh(), model, shapes))


def merged(model, base, adapters):
    layers = jax.jit(functools.partial(model.merge_layer, dtype=jnp.float32))
    return base | {"layers": layers(base["layers"], adapters["layers"])}


def logprobs(model, params):
    tokens = np.arange(24).reshape(2, 12)
    return jax.jit(lambda params: models.token_logprobs(model, params, tokens)[0])(params)


@functools.cache
def make_step(model, mesh):
    """Return the update step and its optimizer. Without weight decay and clipping, which see all weights."""
    settings = dataclasses.replace(SETTINGS, weight_decay=0.0, grad_clip=0.0)
    optimizer = training.make_optimizer(settings, 10, model)
    state = training.abstract_state(optimizer, mesh, model, track_drift=False)
    objective = objectives.ObjectiveConfig("mu_grpo").build()
    options = training.StepOptions()
    step = training.UpdateStep(model, objective, optimizer, mesh, options, state=state, diagnose=False)
    return step, optimizer


def gradient(model, params, mesh, *base):
    step = make_step(model, mesh)[0]
    # One micro-batch, so that one shape is compiled.
    data = update(4096, unit=64, multiple=4)
    state = training.TrainState(params, None, jnp.zeros(()), jnp.zeros(()), None, None)
    return step.gradient(state, data, *base)[0]


def first_step(model, params, mesh, *base):
    optimizer = make_step(model, mesh)[1]
    slope = gradient(model, params, mesh, *base)
    changes = jax.jit(lambda g: optimizer.update(g, optimizer.init(params), params)[0])(slope)
    return jax.tree.map(np.add, params, changes)


def test_the_gradient_is_that_of_full_tuning_projected():
    mesh, decoder = make_mesh(), models.Decoder(MODEL)
    model, base = LoraDecoder(decoder, 4, 6.0, ALL), frozen(make_mesh())
    adapters = random_adapters(model, mesh)
    ours = gradient(model, adapters, mesh, base)
    full = gradient(decoder, merged(model, base, adapters), mesh)
    assert ours.keys() == {"layers"} and ours["layers"].keys() == set(lora.TARGETS.values())
    for name, found in jax.device_get(ours["layers"]).items():
        g, adapter = np.asarray(full["layers"][name]), jax.device_get(adapters["layers"][name])
        assert np.abs(g).max() > 1e-3
        a, b = np.swapaxes(adapter["a"], 1, 2), np.swapaxes(adapter["b"], 1, 2)
        np.testing.assert_allclose(found["a"], 1.5 * g @ b, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found["b"], 1.5 * a @ g, rtol=1e-4, atol=1e-6)


def test_full_rank_takes_the_first_step_of_full_tuning():
    """With A = I and B = 0, or B = I where W has fewer columns than rows, A·B moves as W does."""
    mesh, decoder, base = make_mesh(), models.Decoder(MODEL), frozen(make_mesh())
    model = LoraDecoder(decoder, 32, 32.0, ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    adapters = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), models.abstract_params(model))
    for adapter in adapters["layers"].values():
        square = next(part for part in ("a", "b") if adapter[part].shape[1] == adapter[part].shape[2])
        adapter[square] += np.eye(32, dtype=np.float32)
    ours = merged(model, base, first_step(model, adapters, mesh, base))
    full = first_step(decoder, base, mesh)
    for name in adapters["layers"]:
        before, after = np.asarray(base["layers"][name]), np.asarray(full["layers"][name])
        assert np.abs(after - before).mean() > 5e-3
        np.testing.assert_allclose(ours["layers"][name], after, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_merged_and_unmerged_log_probs_agree(dtype):
    decoder = models.Decoder(MODEL)
    model = LoraDecoder(decoder, 4, 8.0, ("q_proj", "down_proj"))
    plain = models.cast(frozen(make_mesh()), jnp.bfloat16)
    base = {**plain, "layers": dict(plain["layers"])}
    if dtype == "int8":
        base = frozen_weights.quantised(base)
        stored, before = base["layers"]["up"], np.asarray(plain["layers"]["up"], np.float32)
        assert stored["values"].dtype == jnp.int8
        error = np.abs(np.asarray(stored["values"]) * np.asarray(stored["scales"]) - before)
        assert (error <= 1.01 * np.abs(before).max(axis=1, keepdims=True) / 127 / 2).all()
        assert jax.tree.map(jnp.shape, base) == jax.tree.map(
            jnp.shape, frozen_weights.abstract_base(decoder, dtype)
        )
    adapters = random_adapters(model)
    unmerged = logprobs(model, adapters | {"base": base})
    weights = BaseWeights(model, base, make_mesh())
    plan = plan_sampler(MODEL, max_prompt=8, max_length=16, slots=8, dtype=jnp.dtype("float32"))
    sampled = weights.merged_on_device(adapters, plan)
    assert weights._on_devices is None  # in host memory while the sampler has its copy
    jax.tree.map(np.testing.assert_array_equal, weights.on_devices(), base)
    given = {**base, "layers": dict(base["layers"])}
    parts = given["layers"]
    whole = lora.merge(model, given, adapters, jnp.float32)
    assert not given and not parts  # each weight was released as soon as it was merged
    assert {leaf.dtype for leaf in jax.tree.leaves(whole)} == {np.dtype("float32")}
    np.testing.assert_allclose(logprobs(decoder, whole), unmerged, atol=1e-5)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), adapters)
    assert np.abs(logprobs(model, zeros | {"base": base}) - unmerged).max() > 0.1
    layout = sampling_params(whole, **plan.layout)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), sampled, layout)
    on_mesh = jax.eval_shape(
        functools.partial(merged_params, model, **plan.layout), adapters | {"base": base}
    )
    for found in (sampled, on_mesh):
        assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, layout)
    eight = dataclasses.replace(plan, matrices=EIGHT_BITS["int8"], dtype=jnp.dtype("bfloat16"))
    small = weights.merged_on_device(adapters, eight)
    for found, wide in zip(small["layers"], layout["layers"], strict=True):
        matrix, exact = found["down"], np.asarray(wide["down"])  # rounded once, after merging in float32
        assert matrix.values.dtype == jnp.int8
        error = np.abs(np.asarray(matrix.values) * np.asarray(matrix.scales) - exact)
        assert (error <= 1.01 * np.abs(exact).max(axis=0) / 127 / 2).all()


def test_any_mesh_gives_the_gradient_of_one_device():
    model, one, mesh = LoraDecoder(models.Decoder(MODEL), 4, 6.0, ALL), make_mesh(), make_mesh((2, 2, 2))
    base, adapters = frozen(mesh), random_adapters(model, mesh)
    found = gradient(model, adapters, mesh, base)
    wanted = gradient(model, random_adapters(model, one), one, frozen(one))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, wanted)
    shards = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(found["layers"]["up"])}
    assert shards == {(2, 16, 4), (2, 4, 20)}  # A along fsdp, B along tensor
    weights = BaseWeights(model, base, mesh)
    weights.leave_devices()
    assert weights._on_devices is base  # each device keeps its shard
    up = base["layers"]["up"]
    stored = in_eight_bits(up)
    whole = lora.stack_merger(model, "up", stored, jnp.float32)(stored, None)
    assert whole.sharding == up.sharding
    np.testing.assert_array_equal(whole, stored["values"] * np.asarray(stored["scales"]))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_dtype_of_the_adapters_is_that_of_the_computation(dtype):
    model = LoraDecoder(models.Decoder(MODEL), 4, 8.0, ("q_proj",))
    params = models.abstract_params(model, dtype=jnp.bfloat16)
    params["base"] = frozen_weights.abstract_base(model.decoder, dtype)
    assert params["base"]["embed"].dtype == ("bfloat16" if dtype == "int8" else "float32")
    hidden = jax.eval_shape(lambda params: model.hidden(params, np.zeros((1, 4), np.int32)), params)
    assert hidden.dtype == jax.eval_shape(model.head_matrix, params).dtype == jnp.bfloat16


def test_eight_bits_use_their_whole_range_and_columns_of_zeros_stay_zeros():
    matrix = np.linspace(-3, 5, 60, dtype=np.float32).reshape(20, 3) * [0, 1, 1000]
    for dtype, largest, error in (("int8", 127, 0.5 / 127), ("fp8", 448, 2**-4)):
        stored = jax.device_get(in_eight_bits(matrix, EIGHT_BITS[dtype]))
        assert stored["values"].dtype == EIGHT_BITS[dtype]
        assert np.abs(stored["values"].astype(np.float32)).max(axis=0).tolist() == [0, largest, largest]
        found = np.asarray(dequantised(stored))
        assert not found[:, 0].any()
        np.testing.assert_allclose(found, matrix, atol=1.01 * error * 5000)
        np.testing.assert_allclose(found[:, 1], matrix[:, 1], atol=1.01 * error * 5)


def test_remat_keeps_one_result_per_matrix():
    """The wide product of an adapter is computed again: kept, it would double the memory of `dots`."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64), (64, 96), (64, 4), (4, 96))]
    products = jax.make_jaxpr(lambda x, w, a, b: (x @ w, (x @ a) @ b))(*shapes).eqns
    policy = models.decoder._REMAT_POLICIES["dots"]
    kept = [policy(e.primitive, *(v.aval for v in e.invars), **e.params) for e in products]
    assert kept == [True, True, False]


def test_only_adapters_have_gradients_moments_and_decay():
    model = LoraDecoder(models.Decoder(MODEL), 2, 4.0, ("v_proj",))
    optimizer = training.make_optimizer(SETTINGS, 10, model)
    state = training.abstract_state(optimizer, make_mesh(), model, track_drift=True)
    assert jax.tree.map(jnp.shape, state.params) == {"layers": {"v": {"a": (2, 32, 2), "b": (2, 2, 16)}}}
    sizes = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert sizes == 5 * (2 * 32 * 2 + 2 * 2 * 16) + 4  # with both moments, anchor and last gradient
    start = jax.device_get(models.random_params(model))["layers"]["v"]
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), state.params)
    still = jax.tree.map(np.zeros_like, ones)
    changes = jax.jit(lambda p: optimizer.update(still, optimizer.init(p), p)[0])(ones)["layers"]["v"]
    assert changes["a"].max() < 0 and changes["b"].max() < 0  # both decay
    assert not start["b"].any() and abs(start["a"].std() - (3 * 32) ** -0.5) < 0.02


@pytest.mark.parametrize(
    ("rank", "targets", "message"),
    [
        (17, ("v_proj",), "rank 17 does not fit v_proj, a matrix of 32 × 16; at most 16 is possible"),
        (0, ("v_proj",), "rank 0 does not fit v_proj"),
        (4, ("w_proj",), "unknown target 'w_proj'; possible: q_proj, k_proj, v_proj"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(rank, targets, message):
    with pytest.raises(ValueError, match=message):
        LoraDecoder(models.Decoder(MODEL), rank, 1.0, targets)
