"""Claims about the update step: micro-batches, buckets and meshes give the gradient of one padded batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mugrpo_jax import models, objectives, rollouts, training
from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.config import OptimizerSection

MODEL = models.ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
)
# Adam divides by |g| + eps. With the default of 1e-8, gradients that are only rounding noise would move the
# weights as far as real gradients, and differently on every machine and mesh.
SETTINGS = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, grad_clip=0.5, eps=1e-6)


def groups(count=8):
    rng = np.random.default_rng(0)
    return [
        rollouts.Group(
            i,
            str(i),
            rng.integers(0, 48, 5).astype(np.int32),
            tuple(
                rollouts.Rollout(
                    rng.integers(0, 48, n).astype(np.int32),
                    (-3.9 - 0.5 * rng.standard_normal(n)).astype(np.float32),
                    float(rng.integers(0, 2)),
                    "stop",
                )
                for n in rng.integers(3, 50, 4)
            ),
        )
        for i in range(count)
    ]


def update(tokens: int, unit: int = 32, multiple: int = 1, share: bool = False, **changes):
    buckets = rollouts.plan_buckets(64, tokens, multiple, unit=unit, share=share)
    settings = {"advantage": "std", "aggregation": "token_mean", "max_response": 50}
    return rollouts.make_update(changes.pop("of", groups()), buckets, **settings | changes)


@functools.cache
def setup(shape=(1, 1, 1), objective="mu_grpo", share=False):
    data, fsdp, tensor = shape
    devices = jax.devices()[: data * fsdp * tensor]
    mesh = models.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)
    model, params = models.create(MODEL, mesh=mesh)
    params = jax.tree.map(lambda leaf: 0.1 * leaf if leaf.ndim > 1 else leaf, params)  # gradients below 0.1
    optimizer = training.make_optimizer(SETTINGS, 10, model)
    with jax.set_mesh(mesh):
        state = training.make_state(params, optimizer, mesh, model, track_drift=True)
        step = training.UpdateStep(
            model,
            objectives.ObjectiveConfig(objective).build(),
            optimizer,
            mesh,
            training.StepOptions(share_prompts=share),
            state=state,
        )
    return model, step, state


def copy(state):
    return jax.tree.map(jnp.copy, state)


def difference(a, b) -> float:
    a, b = jax.device_get(a), jax.device_get(b)
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b)))


def padded(update):
    """All rows of an update in one rectangle."""
    length = max(b["mask"].shape[1] for b in update.micro_batches)
    pad = lambda x: np.pad(x, ((0, 0), (0, length - x.shape[1]))) if x.ndim == 2 else x  # noqa: E731
    batches = [b | {"tokens": unpacked(b)} for b in update.micro_batches]
    names = ("tokens", "mask", "behavior_logp", "advantages")
    return {name: np.concatenate([pad(b[name]) for b in batches]) for name in names}


def unpacked(batch):
    """Tokens in their rows, by plain indexing."""
    rows = np.zeros(batch["mask"].shape, np.int32)
    per_group = len(rows) // len(batch["tokens"])
    for row, places in enumerate(batch["padded_from"]):
        packed = batch["tokens"][row // per_group]
        real = places < len(packed)
        rows[row, real] = packed[places[real]]
    return rows


def plain_gradient(model, params, batch):
    """One padded batch, full logits, autodiff: nothing of the update step is used."""

    def loss(params):
        logp = jax.nn.log_softmax(models.logits(model, params, batch["tokens"]))[:, :-1]
        logp = jnp.take_along_axis(logp, batch["tokens"][:, 1:, None], axis=2)[..., 0]
        logp = jnp.pad(logp, ((0, 0), (1, 0)))
        return objectives.mu_grpo(logp, batch["behavior_logp"], batch["advantages"], batch["mask"])[0]

    return jax.jit(jax.grad(loss))(params)


def test_bucketed_micro_batches_give_the_gradient_of_one_padded_batch():
    model, step, state = setup()
    small = update(512)
    assert len(small.micro_batches) > 2
    assert len({b["tokens"].shape for b in small.micro_batches}) > 1
    found, metrics = step.gradient(state, small)
    exact = plain_gradient(model, state.params, padded(small))
    scale = float(optax.tree.norm(exact))
    assert difference(found, exact) < 1e-6 * max(scale, 1)
    whole, whole_metrics = step.gradient(state, update(100_000, unit=64))
    assert difference(found, whole) < 1e-6 * max(scale, 1)
    for name in ("loss", "tokens", "vetoed/tokens", "ratio/negative_tokens", "ratio_min"):
        np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-5, atol=1e-7)


def with_equal_rewards(some, which):
    """The same groups, some of which got one reward for all their responses."""
    return [
        dataclasses.replace(
            group, rollouts=tuple(dataclasses.replace(r, reward=float(i % 2)) for r in group.rollouts)
        )
        if i in which
        else group
        for i, group in enumerate(some)
    ]


@pytest.mark.parametrize("share", [False, True])
def test_groups_without_signal_need_not_be_computed(share):
    _, step, state = setup(share=share)
    mixed = with_equal_rewards(groups(), {0, 3, 4, 6})
    whole, skipped = (update(1024, 64, share=share, of=mixed, equal_groups=how) for how in ("keep", "skip"))
    assert skipped.metrics["equal_groups"] == 0.5 and skipped.metrics["reward"] == whole.metrics["reward"]
    rows = [sum(b["mask"].any(1).sum() for b in u.micro_batches) for u in (whole, skipped)]
    assert rows == [32, 16] and skipped.denominator == whole.denominator
    (exact, seen), (found, counted) = (step.gradient(state, u) for u in (whole, skipped))
    assert difference(found, exact) < 1e-6 * max(float(optax.tree.norm(exact)), 1)
    assert float(optax.tree.norm(exact)) > 1e-3
    np.testing.assert_allclose(seen["loss"], counted["loss"], atol=1e-6)
    assert seen["negative_tokens"] == counted["negative_tokens"] and counted["tokens"] < seen["tokens"]


def test_dropped_groups_leave_the_denominator_too():
    _, step, state = setup()
    mixed = with_equal_rewards(groups(), {0, 3, 4, 6})
    rest = [mixed[i] for i in (1, 2, 5, 7)]
    dropped, alone = update(1024, 64, of=mixed, equal_groups="drop"), update(1024, 64, of=rest)
    assert dropped.denominator == alone.denominator < update(1024, 64, of=mixed).denominator
    (exact, _), (found, _) = (step.gradient(state, u) for u in (alone, dropped))
    assert difference(found, exact) == 0


@pytest.mark.parametrize("how", ["skip", "drop"])
def test_an_update_without_any_signal_is_an_update_with_a_gradient_of_zero(how):
    _, step, state = setup()
    silent = with_equal_rewards(groups(), range(8))
    one = update(1024, 64, of=silent, equal_groups=how)
    assert sum(b["mask"].any(1).sum() for b in one.micro_batches) == 1
    gradient, metrics = step.gradient(state, one)
    assert float(optax.tree.norm(gradient)) == 0 and np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_prompts_computed_once_for_all_their_responses_give_the_same_gradient(shape):
    model, step, state = setup(shape, share=True)
    devices = shape[0] * shape[1]
    shared, apart = update(2048, 64, devices, share=True), update(2048, 64, devices)
    packed, rows = (sum((b["tokens"] != 0).sum() for b in u.micro_batches) for u in (shared, apart))
    assert packed < 0.95 * rows  # prompts of 5 tokens, of which 4 are shared by 4 responses
    found, metrics = step.gradient(state, shared)
    exact = plain_gradient(model, jax.device_get(state.params), padded(apart))
    assert difference(found, exact) < 1e-6 * max(float(optax.tree.norm(exact)), 1)
    assert metrics["tokens"] == sum(b["mask"].sum() for b in apart.micro_batches)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 4, 2), (2, 2, 2)], ids=str)
def test_any_mesh_gives_the_parameters_of_one_device(shape):
    _, step, state = setup()
    expected, expected_metrics = step(copy(state), update(512))
    _, sharded_step, sharded = setup(shape)
    found, metrics = sharded_step(copy(sharded), update(512, multiple=shape[0] * shape[1]))
    assert difference(expected.params, found.params) < 2e-5
    one = step.gradient(state, update(512))[0]
    many = sharded_step.gradient(sharded, update(512, multiple=shape[0] * shape[1]))[0]
    assert difference(one, many) < 1e-7
    for name in ("gradient_norm", "drift", "loss"):
        np.testing.assert_allclose(expected_metrics[name], metrics[name], rtol=1e-4, atol=1e-6)
    assert found.params["layers"]["q"].sharding.shard_shape((2, 32, 32)) == (
        2,
        32 // shape[1],
        32 // shape[2],
    )
    mu = jax.tree.leaves(found.opt_state)[1:]
    assert all(len(leaf.sharding.device_set) == 8 for leaf in mu)


def test_a_proximal_policy_in_the_state_can_be_the_policy_before_the_update():
    objective = objectives.ObjectiveConfig("decoupled_ppo", {"kl_coef": 0.1, "entropy_coef": 0.01}).build()
    model, step, state = setup()
    optimizer, batch = training.make_optimizer(SETTINGS, 10, model), update(100_000, 64)
    reference = [b | {"reference_logp": b["behavior_logp"] - 0.1 * b["mask"]} for b in batch.micro_batches]
    batch = dataclasses.replace(batch, micro_batches=tuple(reference))
    found = []
    for proximal, start in (("policy", state), ("state", training.with_proximal(state, "float32"))):
        options = training.StepOptions(entropy="gradient", proximal=proximal)
        own = training.UpdateStep(model, objective, optimizer, step.mesh, options, state=start)
        found.append(own.gradient(start, batch))
    (one, metrics), (other, same) = found
    assert difference(one, other) < 1e-6 * max(float(optax.tree.norm(one)), 1)
    for name in ("entropy/tokens", "reference_kl/tokens", "behavior_weight/tokens", "loss"):
        np.testing.assert_allclose(metrics[name], same[name], rtol=1e-5)
    assert 0 < float(metrics["entropy/tokens"]) < np.log(48)


def test_two_updates_are_those_of_a_plain_optax_loop():
    model, step, state = setup()
    batch = update(512)
    optimizer = training.make_optimizer(SETTINGS, 10, model)
    params, opt_state = state.params, optimizer.init(state.params)
    found = copy(state)
    for _ in range(2):
        changes, opt_state = optimizer.update(plain_gradient(model, params, padded(batch)), opt_state, params)
        params = optax.apply_updates(params, changes)
        found, _ = step(found, batch)
    assert difference(found.params, params) < 5e-5  # Adam divides by the size of tiny gradients
    assert int(found.updates) == 2


def test_a_non_finite_gradient_is_skipped_and_counted():
    _, step, state = setup()
    poisoned = update(512)
    poisoned.micro_batches[0]["advantages"][0] = np.nan
    before = copy(state)
    after, metrics = step(copy(state), poisoned)
    assert int(after.skipped) == int(metrics["skipped"]) == 1
    assert int(after.updates) == 1
    assert difference(after.params, before.params) == 0
    assert difference(after.opt_state, before.opt_state) == 0
    clean, _ = step(after, update(512))
    expected, _ = step(before, update(512))
    assert difference(clean.params, expected.params) == 0


def test_programs_lowered_before_there_is_data_are_those_of_an_update(monkeypatch):
    _, step, state = setup((1, 4, 2))
    data, called = update(512, multiple=4), {}
    for name in ("prepare", "accumulate", "apply"):
        program = getattr(step, name)

        def call(*arguments, program=program, name=name, **static):
            called.setdefault(name, program.lower(*arguments, **static).as_text())
            return program(*arguments, **static)

        monkeypatch.setattr(step, name, call)
    asked = Asked()
    monkeypatch.setattr(step, "_programs", asked)
    with jax.set_mesh(step.mesh):  # as in a run
        step(copy(state), data)
    monkeypatch.undo()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    buckets, ahead = rollouts.plan_buckets(64, 512, 4, unit=32), Lowered()
    shapes = [s for s in buckets.shapes if s[:2] == data.micro_batches[0]["mask"].shape]
    training.compile_step_ahead(step, ahead, abstract, buckets, shapes, reference=False)
    assert ahead.texts == list(called.values())
    assert len(ahead.names) == 3 and set(ahead.names) <= set(asked.names)  # so that the step finds them


class Lowered:
    """Takes the place of `CompiledPrograms`: lowers programs at once, and does not compile them."""

    def __init__(self):
        self.names, self.texts = [], []

    def ahead(self, name, lower):
        self.names.append(name)
        self.texts.append(lower().as_text())


class Asked(CompiledPrograms):
    """Remembers the names of the programs that are asked for, each once."""

    def __init__(self):
        super().__init__()
        self.names = {}

    def get(self, name, otherwise):
        self.names[name] = True
        return super().get(name, otherwise)


def test_no_program_is_compiled_twice_for_a_shape():
    _, step, state = setup()
    state = copy(state)
    state, _ = step(state, update(512))
    sizes = step.accumulate._cache_size(), step.apply._cache_size(), step.prepare._cache_size()
    for _ in range(2):
        state, _ = step(state, update(512))
    assert sizes == (step.accumulate._cache_size(), step.apply._cache_size(), step.prepare._cache_size())


def test_drift_is_measured_from_the_start_of_the_stage_and_cosine_between_gradients():
    _, step, state = setup()
    batch = update(512)
    gradient, _ = step.gradient(state, batch)
    one, first = step(copy(state), batch)
    np.testing.assert_allclose(first["drift"], first["update_norm"], rtol=1e-4)
    assert first["gradient_cosine"] == 0
    restarted = training.start_stage(one)
    next_gradient, _ = step.gradient(restarted, batch)
    _, second = step(restarted, batch)
    np.testing.assert_allclose(second["drift"], second["update_norm"], rtol=1e-3)
    a, b = (np.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in (gradient, next_gradient))
    np.testing.assert_allclose(
        second["gradient_cosine"], a @ b / np.linalg.norm(a) / np.linalg.norm(b), rtol=1e-4
    )


def test_norms_and_biases_are_not_decayed():
    mask = training.optimizer.decay_mask(models.Decoder(MODEL))
    assert mask["layers"]["q"]
    assert mask["embed"]
    assert not mask["norm"]
    assert not mask["layers"]["attn_norm"]


@dataclasses.dataclass(frozen=True)
class Bigram:
    """A model of a user: the next token depends on the last one alone, so packing changes nothing."""

    width: int = 16

    def weights(self):
        return {
            "table": models.Weight((48, self.width), ("vocab", "embed"), decays=True, std=0.5),
            "mix": {"inner": models.Weight((self.width, 32), ("embed", "mlp"), decays=False, std=0.5)},
            "out": models.Weight((48, 32), (None, None), decays=True, std=0.5),
        }

    def hidden(self, params, tokens, *, packing=None, remat="none", scan=True, backend="auto"):
        return jnp.tanh(params["table"][tokens] @ params["mix"]["inner"])

    def head_matrix(self, params):
        return params["out"]


def test_a_model_of_ones_own_trains_by_its_three_methods():
    model = Bigram()
    params = models.random_params(model)
    optimizer = training.make_optimizer(SETTINGS, 10, model)
    mesh = models.make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        drawn = models.random_params(model, mesh=mesh)
        state = training.make_state(drawn, optimizer, mesh, model, track_drift=True)
        options = training.StepOptions()
        step = training.UpdateStep(model, objectives.mu_grpo, optimizer, mesh, options, state=state)
    batch = update(512, multiple=4)
    found, _ = step.gradient(state, batch)
    exact = plain_gradient(model, params, padded(batch))
    assert difference(found, exact) < 1e-6 * max(float(optax.tree.norm(exact)), 1)
    state, _ = step(state, batch)
    assert state.opt_state[1][0].mu["mix"]["inner"].sharding.shard_shape((16, 32)) == (8, 16)
    assert training.optimizer.decay_mask(model) == {"table": True, "mix": {"inner": False}, "out": True}


def test_abandoned_tokens_are_the_triggers_of_a_veto_with_the_same_ratio():
    model, mesh = Bigram(), models.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    optimizer = training.make_optimizer(SETTINGS, 10, model)
    objective = objectives.ObjectiveConfig("mu_grpo", {"veto_ratio": 0.2}).build()
    with jax.set_mesh(mesh):
        state = training.make_state(models.random_params(model), optimizer, mesh, model, track_drift=False)
        options = training.StepOptions(abandoned_ratio=0.2)
        step = training.UpdateStep(model, objective, optimizer, mesh, options, state=state)
    _, metrics = step.gradient(state, update(512))
    triggered = float(metrics["triggered/negative_responses"])
    assert 0 < triggered < 1 and metrics["abandoned/negative_responses"] == triggered


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_schedules_warm_up_and_end(schedule):
    settings = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_updates=4)
    rate = training.optimizer.learning_rate_schedule(settings, 20)
    assert rate(0) == 0
    assert float(rate(4)) == 1
    np.testing.assert_allclose(rate(20), 1.0 if schedule == "constant" else 0.0, atol=1e-6)
    np.testing.assert_array_equal(training.learning_rates(settings, 20), [float(rate(i)) for i in range(21)])


def with_messages(behavior: float = 0.0):
    """The groups, with two messages of an environment in the long responses; their log-probs are given."""

    def answered(rollout):
        place = np.arange(len(rollout.tokens))
        mask = ~(((place > 3) & (place < 9)) | (place == 12)) | (place == len(place) - 1)
        logprobs = np.where(mask, rollout.logprobs, np.float32(behavior) * place)
        return dataclasses.replace(rollout, mask=mask, logprobs=logprobs.astype(np.float32))

    return [dataclasses.replace(g, rollouts=tuple(map(answered, g.rollouts))) for g in groups()]


def test_log_probs_in_messages_of_an_environment_change_neither_loss_nor_gradient_nor_diagnostics():
    _, step, state = setup()
    kept, other = (step.gradient(state, update(512, of=with_messages(value))) for value in (0.0, -3.0))
    assert difference(kept[0], other[0]) == 0
    assert {name: float(value) for name, value in kept[1].items()} == {
        name: float(value) for name, value in other[1].items()
    }
    written = sum(rollout.written for group in with_messages() for rollout in group.rollouts)
    total = sum(len(rollout.tokens) for group in groups() for rollout in group.rollouts)
    found = update(512, of=with_messages())
    assert (
        float(kept[1]["tokens"]) == found.denominator == found.metrics["response_tokens"] == written < total
    )
    assert sum(batch["mask"].sum() for batch in found.micro_batches) == written
    assert difference(kept[0], step.gradient(state, update(512))[0]) > 1e-4
