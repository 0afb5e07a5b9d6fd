"""What holds for every objective: padding, micro-batches, extremes, precision, and the on-policy gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import SHAPE, VARIANTS, aggregation_of, extra_arrays, name_of, random_batch, run
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_reference import count, reference

from mugrpo_jax import objectives
from mugrpo_jax.objectives import OBJECTIVES, combine_metrics

few = settings(max_examples=6, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def same(actual, expected, *, scale):
    """Equal up to the rounding of sums in another order, relative to the scale of what is summed."""
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-7 * scale)


def largest(gradient):
    return np.abs(gradient).max()


def loss_scale(variant, batch):
    """The sum of the absolute values of the terms of the loss, which may cancel in the loss itself."""
    name, knobs = variant
    settings = {**knobs, "aggregation": aggregation_of(variant), **extra_arrays(name, batch)}
    return reference(name, *batch, **settings)[2]


@every_variant
@few
@given(seed=seeds, garbage=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_what_stands_on_padding_changes_nothing(variant, seed, garbage):
    logp, behavior_logp, advantages, mask = batch = random_batch(seed)
    dirty = (np.where(mask, logp, garbage), np.where(mask, behavior_logp, -garbage), advantages, mask)
    loss, gradient, metrics = run(variant, batch)
    dirty_loss, dirty_gradient, dirty_metrics = run(
        variant, [x.astype(np.float32) for x in dirty[:3]] + [mask]
    )
    assert dirty_loss == loss
    np.testing.assert_array_equal(dirty_gradient, gradient)
    assert dirty_metrics == metrics


@every_variant
@pytest.mark.parametrize("row", [0, 1], ids=["right", "wrong"])
def test_a_log_prob_that_is_no_number_shows_in_the_loss(variant, row):
    """Also where the loss does not depend on the token: behind a trigger, or if only π counts."""
    for wrong in (np.nan, np.inf):
        for place in (0, 1):
            batch = list(random_batch(0))
            batch[place] = batch[place].copy()
            batch[place][row, np.flatnonzero(batch[3][row])[-1]] = wrong
            assert np.isnan(run(variant, batch)[0]), (wrong, place)


def test_statistics_of_the_log_ratio_are_those_of_the_loss_itself():
    """Also for log-probs of −∞ under both policies, where the plain difference is NaN, and in bfloat16."""
    logp, behavior_logp, advantages, mask = random_batch(0)
    logp, behavior_logp = (jnp.asarray(x, jnp.bfloat16).at[0, 2].set(-jnp.inf) for x in (logp, behavior_logp))
    assert mask[0, 2]
    log_ratio = objectives.log_ratio(logp, behavior_logp, mask)
    for name in ("p3o", "m2po", "bapo"):
        found = objectives.ObjectiveConfig(name).statistics()(log_ratio, advantages, mask)
        batch = logp, behavior_logp, advantages, mask
        assert OBJECTIVES[name](*batch, **found)[0] == OBJECTIVES[name](*batch)[0]


def test_the_length_budget_may_be_traced():
    batch = random_batch(0)
    loss = jax.jit(lambda length: objectives.dr_grpo(*batch, max_length=length)[0])
    same(loss(100), objectives.dr_grpo(*batch, max_length=100)[0], scale=1)


def test_stacked_metrics_are_one_part():
    parts = [objectives.mu_grpo(*random_batch(seed))[1] for seed in range(3)]
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *parts)
    for key, value in combine_metrics(parts).items():
        assert combine_metrics([stacked])[key] == value


@every_objective
def test_a_denominator_of_zero_is_no_denominator_of_tokens(name):
    logp, behavior_logp, advantages, mask = random_batch(0)
    extra = extra_arrays(name, (logp, behavior_logp, advantages, mask))
    loss, _ = OBJECTIVES[name](logp, behavior_logp, advantages, mask, denominator=0, **extra)
    assert not np.isfinite(loss)
    loss, _ = OBJECTIVES[name](logp, behavior_logp, advantages, 0 * mask, denominator=0, **extra)
    assert loss == 0


@every_variant
def test_added_rows_and_columns_of_padding_change_nothing(variant):
    name, knobs = variant
    batch = random_batch(0)
    rows, length = batch[3].shape
    fixed = (name, {"max_length": length} | knobs)  # the budget of `constant` is not the width
    loss, gradient, _ = run(fixed, batch)
    wide = [np.pad(x, ((1, 2), (0, 5))) if x.ndim == 2 else np.pad(x, (1, 2)) for x in batch]
    padded_loss, padded_gradient, _ = run(fixed, wide)
    inside = padded_gradient[1 : rows + 1, :length]
    same(padded_loss, loss, scale=np.abs(gradient).sum())
    same(inside, gradient, scale=largest(gradient))
    added = np.ones(padded_gradient.shape, bool)
    added[1 : rows + 1, :length] = False
    assert (padded_gradient[added] == 0).all()


@every_variant
@few
@given(seed=seeds)
def test_a_masked_token_has_exactly_zero_gradient(variant, seed):
    batch = random_batch(seed)
    _, gradient, _ = run(variant, batch)
    assert np.all(gradient[~batch[3]] == 0)
    assert np.isfinite(gradient).all()


def pooled_statistics(variant, batch):
    """The statistics of the whole update for the objectives that read them from the batch."""
    statistics = statistics_program(variant[0], tuple(variant[1].items()))
    logp, behavior_logp, advantages, mask = batch
    return {} if statistics is None else statistics(logp - behavior_logp, advantages, mask)


@functools.cache
def statistics_program(name, knobs):
    statistics = objectives.ObjectiveConfig(name, dict(knobs)).statistics()
    return None if statistics is None else jax.jit(statistics)


@every_variant
@few
@given(seed=seeds)
def test_micro_batches_add_up_to_the_full_batch(variant, seed):
    batch = random_batch(seed)
    mask, knobs = batch[3], variant[1]
    denominator = count(mask, aggregation_of(variant), knobs.get("max_length", SHAPE[1]))
    pooled = pooled_statistics(variant, batch)
    part_of = np.random.default_rng(seed).integers(0, 3, SHAPE[0])
    parts = [
        run(variant, (*batch[:3], mask & (part_of == k)[:, None]), denominator=denominator, **pooled)
        for k in range(3)
    ]
    losses, gradients, metrics = zip(*parts)
    loss, gradient, whole = run(variant, batch)

    same(sum(losses), loss, scale=loss_scale(variant, batch))
    same(sum(gradients), gradient, scale=largest(gradient))
    combined = combine_metrics(metrics)
    assert combined.keys() == whole.keys()
    for key in whole:
        np.testing.assert_allclose(combined[key], whole[key], rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", objectives.STATISTICS)
def test_statistics_of_a_call_are_those_of_its_micro_batch(name):
    """Without the pooled form, the gradient depends on the split."""
    variant = name, {}
    first = np.arange(SHAPE[0]) < 4
    near, far = random_batch(3, low=0.75, high=1.33), random_batch(3)
    logp, behavior_logp = (np.where(first[:, None], a, b) for a, b in zip(near[:2], far[:2]))
    batch = logp, behavior_logp, *near[2:]
    _, whole, _ = run(variant, batch)
    _, part, _ = run(
        variant, (*batch[:3], batch[3] & first[:, None]), denominator=count(batch[3], "token_mean", 0)
    )
    assert largest((part - whole)[first]) > 1e-2 * largest(part)


@pytest.mark.parametrize("name", ["mu_grpo", "dr_grpo", "gspo"])
def test_buckets_of_different_widths_add_up(name):
    """A padded batch against its rows in two micro-batches, each cut to its own length."""
    rows = np.arange(SHAPE[0])
    logp, behavior_logp, advantages, _ = random_batch(11, low=0.2, high=5.0)
    mask = np.arange(SHAPE[1]) < np.where(rows < 4, 6, 13)[:, None]
    batch = logp, behavior_logp, advantages, mask
    aggregation = aggregation_of((name, {}))
    budget = {"max_length": 40} if aggregation == "constant" else {}
    denominator = objectives.denominator(mask, aggregation, **budget)
    objective = functools.partial(OBJECTIVES[name], denominator=denominator)
    gradient_of = jax.jit(jax.value_and_grad(objective, has_aux=True))

    (loss, _), gradient = gradient_of(*batch)
    total = 0.0
    for chosen, width in ((rows < 4, 6), (rows >= 4, 13)):
        part = [x[chosen, :width] if x.ndim == 2 else x[chosen] for x in batch]
        (part_loss, _), part_gradient = gradient_of(*part)
        total += part_loss
        same(part_gradient, gradient[chosen, :width], scale=largest(gradient))
    same(total, loss, scale=largest(gradient) * mask.sum())
    by_default, _ = jax.jit(functools.partial(OBJECTIVES[name], **budget))(*batch)
    same(by_default, loss, scale=largest(gradient) * mask.sum())


@every_variant
def test_huge_log_ratios_give_finite_losses_and_gradients(variant):
    random = np.random.default_rng(0)
    _, _, advantages, mask = random_batch(0)
    log_ratio = random.choice([-80.0, 80.0], SHAPE).astype(np.float32)
    behavior_logp = np.full(SHAPE, -90.0, np.float32)
    for logp in (behavior_logp + log_ratio, behavior_logp + 80, behavior_logp - 80, behavior_logp + 1e4):
        loss, gradient, metrics = run(variant, (logp, behavior_logp, advantages, mask))
        assert np.isfinite(loss)
        assert np.isfinite(gradient).all()
        assert all(np.isfinite(value) for value in metrics.values()), metrics


@every_variant
@pytest.mark.parametrize("policy, behavior", [(-np.inf, -1), (-1, -np.inf), (-np.inf, -np.inf), (-1e30, -1)])
def test_impossible_tokens_give_finite_losses_and_gradients(variant, policy, behavior):
    """A policy or a sampler may give a token the probability 0, for example if it masks logits."""
    logp, behavior_logp, advantages, mask = random_batch(4, low=0.5, high=2.0)
    impossible = mask & (np.arange(SHAPE[1]) % 5 == 2)
    logp, behavior_logp = np.where(impossible, policy, logp), np.where(impossible, behavior, behavior_logp)
    batch = logp.astype(np.float32), behavior_logp.astype(np.float32), advantages, mask
    shared = {"reference_logp": np.where(impossible, -np.inf, -1.0)} if variant[0] == "mu_grpo" else {}
    for scale in (1.0, 0.0):
        loss, gradient, metrics = run(variant, (*batch[:2], scale * advantages, mask), **shared)
        assert np.isfinite(loss) and np.isfinite(gradient).all()
        assert all(np.isfinite(value) for value in metrics.values()), metrics
    if policy < -1e4:
        assert (gradient[impossible] == 0).all()


@every_objective
def test_numbers_from_outside_a_traced_function_are_accepted(name):
    """Denominator and statistics of an update are JAX scalars, which a jitted function may close over."""
    batch = tuple(map(jnp.asarray, random_batch(5)))
    log_ratio, advantages, mask = batch[0] - batch[1], batch[2], batch[3]
    statistics = objectives.ObjectiveConfig(name).statistics()
    knobs = {} if statistics is None else statistics(log_ratio, advantages, mask)
    knobs["denominator"] = objectives.denominator(mask, aggregation_of((name, {})), max_length=SHAPE[1])
    knobs |= {"kl_coef": jnp.float32(0.0), **extra_arrays(name, batch)}
    if name == "mu_grpo":
        knobs |= {"clip_high": jnp.float32(5.0), "veto_ratio": jnp.float32(1e-4)}

    def loss(logp):
        return OBJECTIVES[name](logp, *batch[1:], **knobs)[0]

    expected = loss(batch[0])
    in_scan = jax.lax.scan(lambda total, logp: (total + loss(logp), None), jnp.float32(0.0), batch[0][None])[
        0
    ]
    for found in (jax.jit(loss)(batch[0]), jax.checkpoint(loss)(batch[0]), in_scan):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@every_objective
def test_devices_that_see_their_own_rows_add_up(name):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, everywhere = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    batch = tuple(map(jnp.asarray, random_batch(6)))
    more = extra_arrays(name, batch)
    aggregation, statistics = aggregation_of((name, {})), objectives.ObjectiveConfig(name).statistics()
    denominator = objectives.denominator(batch[3], aggregation, max_length=SHAPE[1])

    def of_device(logp, behavior_logp, advantages, mask, more):
        found = {}
        if statistics is not None:
            own = logp - behavior_logp, advantages, mask
            found = statistics(*(jax.lax.all_gather(x, "data", tiled=True) for x in own))
        call = functools.partial(OBJECTIVES[name], denominator=denominator, **found, **more)
        (loss, _), gradient = jax.value_and_grad(call, has_aux=True)(logp, behavior_logp, advantages, mask)
        objectives.diagnostics(logp, behavior_logp, advantages, mask)
        return jax.lax.psum(loss, "data"), gradient

    split = jax.shard_map(of_device, mesh=mesh, in_specs=rows, out_specs=(everywhere, rows))
    loss, gradient = jax.jit(split)(*batch, more)
    whole, expected, _ = run((name, {}), batch)
    same(loss, whole, scale=loss_scale((name, {}), tuple(map(np.asarray, batch))))
    same(gradient, expected, scale=largest(expected))


@every_objective
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_a_batch_without_tokens_is_zero(name, shape):
    empty = jnp.zeros(shape)
    more = {"proximal_logp": empty} if name == "decoupled_ppo" else {}
    loss, metrics = OBJECTIVES[name](empty, empty, jnp.zeros(shape[:1]), empty, **more)
    assert loss == 0 and metrics["tokens"] == 0


@every_variant
def test_a_fully_masked_batch_is_zero(variant):
    logp, behavior_logp, advantages, mask = random_batch(0)
    loss, gradient, metrics = run(variant, (logp, behavior_logp, advantages, np.zeros_like(mask)))
    assert loss == 0
    assert np.all(gradient == 0)
    assert all(np.isfinite(value) for value in metrics.values())


@every_variant
def test_on_policy_gradient_is_the_plain_policy_gradient(variant):
    """At π = b every method here weighs each token by its advantage alone."""
    logp, _, advantages, mask = random_batch(2)
    aggregation = aggregation_of(variant)
    _, gradient, _ = run(variant, (logp, logp, advantages, mask))
    denominator = count(mask, aggregation, variant[1].get("max_length", SHAPE[1]))
    share = mask / denominator
    if aggregation == "seq_mean_token_mean":
        share = share / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    np.testing.assert_allclose(gradient, -share * advantages[:, None], rtol=1e-6, atol=1e-9)


@every_objective
def test_bfloat16_is_computed_in_float32(name):
    """Nothing but the conversion touches a bfloat16."""
    tokens = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    extra = {"proximal_logp": tokens} if name == "decoupled_ppo" else {}
    batch = (tokens, tokens, jax.ShapeDtypeStruct(SHAPE[:1], jnp.bfloat16), tokens)
    jaxpr = jax.make_jaxpr(functools.partial(OBJECTIVES[name], kl_coef=0.1))(
        *batch, reference_logp=tokens, **extra
    )
    assert low_precision_operations(jaxpr.jaxpr) <= {
        "convert_element_type",
        "stop_gradient",
        "ne",
        "broadcast_in_dim",
    }
    assert jaxpr.out_avals[0].dtype == jnp.float32


def low_precision_operations(jaxpr):
    found = set()
    for equation in jaxpr.eqns:
        inner = [
            v.jaxpr if hasattr(v, "jaxpr") else v for v in equation.params.values() if hasattr(v, "eqns")
        ]
        inner += [v.jaxpr for v in equation.params.values() if hasattr(v, "jaxpr")]
        for sub in inner:
            found |= low_precision_operations(sub)
        touches = any(v.aval.dtype == jnp.bfloat16 for v in equation.invars if hasattr(v.aval, "dtype"))
        if touches and not inner:
            found.add(equation.primitive.name)
    return found


def test_bfloat16_values():
    logp, behavior_logp, advantages, mask = random_batch(4, low=0.5, high=2.0)
    short = [jnp.asarray(x, jnp.bfloat16) for x in (logp, behavior_logp)]
    program = jax.jit(jax.value_and_grad(objectives.mu_grpo, has_aux=True))
    (loss, _), gradient = program(*short, advantages, mask)
    (exact, _), exact_gradient = program(*(x.astype(jnp.float32) for x in short), advantages, mask)
    assert loss == exact
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient, exact_gradient.astype(jnp.bfloat16))


@every_objective
def test_sharded_over_batch_and_sequence_equals_one_device(name):
    batch = random_batch(7)
    mesh = jax.make_mesh((2, 4), ("data", "time"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    both, rows = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data", "time"), ("data",)))
    placed = [jax.device_put(x, both if x.ndim == 2 else rows) for x in batch]
    extra = {key: jax.device_put(x, both) for key, x in extra_arrays(name, batch).items()}
    loss, gradient, metrics = run((name, {}), batch)
    (split_loss, split_metrics), split_gradient = jax.jit(jax.value_and_grad(OBJECTIVES[name], has_aux=True))(
        *placed, **extra
    )
    assert len(split_gradient.sharding.device_set) == 8
    same(split_loss, loss, scale=largest(gradient) * batch[3].sum())
    same(split_gradient, gradient, scale=largest(gradient))
    for key, value in metrics.items():
        np.testing.assert_allclose(split_metrics[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_vmap_equals_a_loop():
    batches = [random_batch(seed) for seed in range(3)]
    stacked = [jnp.stack(x) for x in zip(*batches)]
    losses, _ = jax.jit(jax.vmap(objectives.mu_grpo))(*stacked)
    np.testing.assert_allclose(losses, [run(("mu_grpo", {}), batch)[0] for batch in batches], rtol=2e-6)


def test_weights_compose_and_carry_no_gradient():
    logp, behavior_logp, advantages, mask = (jnp.asarray(x) for x in random_batch(8))

    def corrections(logp):
        log_ratio = logp - behavior_logp
        kept = (
            objectives.veto_mask(log_ratio, advantages, mask)
            & objectives.mis_mask(log_ratio, mask, low=0.0, high=100.0)
            & objectives.icepop_mask(log_ratio, mask, low=1e-7, high=100.0)
            & objectives.sequence_veto_mask(log_ratio, mask, ratio=1e-9)
            & objectives.opsm_mask(log_ratio, advantages, mask, delta=20.0)
        )
        return jnp.where(kept, objectives.tis_weights(log_ratio, mask), 0.0)

    def gradient(weights):
        loss = lambda x: objectives.cispo(x, behavior_logp, advantages, mask, weights=weights(x))[0]  # noqa: E731
        return jax.jit(jax.grad(loss))(logp)

    fixed = corrections(logp)
    plain = gradient(lambda x: jnp.ones_like(x))
    np.testing.assert_allclose(gradient(corrections), plain * fixed, rtol=1e-6)
    assert 0 < np.mean(np.asarray(fixed)[mask] == 0) < 1
    np.testing.assert_allclose(gradient(lambda x: x), gradient(lambda _: logp), rtol=1e-6)


def test_the_veto_is_the_same_as_a_knob_and_as_weights():
    batch = random_batch(9)
    keep = objectives.veto_mask(batch[0] - batch[1], batch[2], batch[3])
    by_knob = run(("mu_grpo", {}), batch)
    by_weights = run(("mu_grpo", {"veto": "none"}), batch, weights=np.asarray(keep, np.float32))
    np.testing.assert_allclose(by_weights[0], by_knob[0], rtol=1e-6)
    np.testing.assert_allclose(by_weights[1], by_knob[1], rtol=1e-6)


@every_variant
def test_responses_without_an_advantage_have_no_gradient_but_for_p3o(variant):
    logp, behavior_logp, advantages, mask = random_batch(3)
    _, gradient, _ = run(variant, (logp, behavior_logp, np.zeros_like(advantages), mask))
    assert (largest(gradient) > 0) == (variant[0] == "p3o")
