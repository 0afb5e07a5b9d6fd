"""Claims about responses from several policies: their log-probs, ratios, names, resuming and refusals."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from tiny_run import TINY_MODEL

from mugrpo_jax import config as configs
from mugrpo_jax import models, planning
from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop import sampling_passes, stages
from mugrpo_jax.loop.generation_phase import generate_stage
from mugrpo_jax.loop.resume import resume
from mugrpo_jax.loop.run_context import open_run
from mugrpo_jax.models.eight_bits import EIGHT_BITS, StoredMatrix, in_eight_bits
from mugrpo_jax.models.frozen_weights import MATRICES
from mugrpo_jax.models.io.huggingface_export import save_huggingface
from mugrpo_jax.models.tokenizer import CharTokenizer
from mugrpo_jax.report import panels, read_run
from mugrpo_jax.report.live import LiveReport
from mugrpo_jax.rollouts import encode, open_stage, read_groups
from mugrpo_jax.sampling.engine import Engine
from mugrpo_jax.setup import behavior_policy, run_setup, sizes
from mugrpo_jax.setup.auto_settings import choose_settings
from mugrpo_jax.setup.devices import run_mesh
from mugrpo_jax.setup.initial_model import initial_model, run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.sizes import step_options
from mugrpo_jax.setup.stored_rollouts import behavior_names
from mugrpo_jax.setup.trained_model import load_any_model
from mugrpo_jax.training import Cursor

CONFIG = (
    TINY_MODEL
    + """\
task: {name: arithmetic, options: {difficulty: 1, train: 64, test: 4}, reward: own_rewards:short, scorers: 0}
sampling: {max_prompt_tokens: 8, max_response_tokens: 24, slots: 16, prompts_per_shard: 2}
batch: {prompts_per_update: 4, responses_per_prompt: 4, updates_per_stage: 1, stages: 1,
        tokens_per_micro_batch: 63, length_multiple: 32}
objective: {name: mu_grpo}
evaluation: {problems: 0}
report: {samples: 0}
track_drift: false
"""
)


@pytest.fixture(scope="module")
def place(program_folder):
    """A folder with a config, a reward, and another model with the same tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        yield from prepared(program_folder, patch)


def prepared(program_folder, patch):
    (program_folder / "run.yaml").write_text(CONFIG)
    reward = "def short(text, problem):\n    return 1.0 / (1 + len(text))\n"
    (program_folder / "own_rewards.py").write_text(reward)
    patch.syspath_prepend(program_folder)
    # One device is faster to compile for.
    patch.setattr(run_setup, "run_mesh", lambda _: models.make_mesh(devices=jax.devices()[:1]))
    config = configs.load(program_folder / "run.yaml")
    other = initial_model(dataclasses.replace(config, seed=7), models.make_mesh(devices=jax.devices()[:1]))
    folder = program_folder / "other"
    save_huggingface(other.params, folder, config=other.config, source=None, tokenizer=other.tokenizer)
    yield program_folder


def load(place, behaviors, *overrides):
    listed = json.dumps(behaviors)
    return configs.load(place / "run.yaml", [f"sampling.behaviors={listed}", *overrides])


def groups(run):
    return list(read_groups(open_stage(run / "rollouts" / "stage-000")))


def records(run, kind):
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if record["kind"] == kind]


def generate(config, folder):
    """Only the first phase of a run."""
    with open_run(config, folder) as run:
        generate_stage(run, *resume(run)[:1], 0, Cursor())
    return folder


MIXED = [
    {"source": "current", "share": 0.4},
    {"source": "OTHER", "share": 0.6, "temperature": 0.7},
]
HOT = ["sampling.temperature=1.5", "objective.temperature=0.8"]


@pytest.fixture(scope="module")
def mixed(place):
    """A run with two models and three temperatures."""
    behaviors = [b | {"source": b["source"].replace("OTHER", str(place / "other"))} for b in MIXED]
    config = load(place, behaviors, *HOT)
    return config, stages.train(config, place / "mixed")


@functools.partial(jax.jit, static_argnums=0)
def log_softmax(model, params, tokens, temperature):
    return jax.nn.log_softmax(models.logits(model, params, tokens) / temperature)


def teacher_forced(policy, group, rollout, temperature):
    """The log-probs of the response's tokens, from one pass over the whole row; padded to compile once."""
    tokens = np.concatenate([group.prompt, rollout.tokens])
    padded = np.pad(tokens, (0, 32 - len(tokens)))[None]
    logp = np.asarray(log_softmax(policy.model, policy.params, padded, temperature)[0])
    return logp[np.arange(len(tokens) - 1), tokens[1:]][len(group.prompt) - 1 :]


def on_host(loaded):
    return dataclasses.replace(loaded, params=jax.device_get(loaded.params))  # so that they compile once


def policies(place, config):
    here = on_host(initial_model(config, models.make_mesh(devices=jax.devices()[:1])))
    there = on_host(load_any_model(place / "other"))
    return {"current": (here, 1.5), "other-t0.7": (there, 0.7)}


def test_each_response_has_the_log_probs_of_the_distribution_it_was_drawn_from(place, mixed):
    config, run = mixed
    found, names = policies(place, config), []
    for group in groups(run):
        for rollout in group.rollouts:
            policy, temperature = found[rollout.behavior]
            names.append(rollout.behavior)
            wanted = teacher_forced(policy, group, rollout, temperature)
            np.testing.assert_allclose(rollout.logprobs, wanted, atol=1e-5)
    assert sorted({len(group.rollouts) for group in groups(run)}) == [4]
    assert 5 <= names.count("current") <= 8 and len(names) == 16  # 0.4 of 4 is 1 or 2


def test_ratios_are_those_of_the_trained_temperature_and_the_behavior_that_wrote(place, mixed):
    config, run = mixed
    (update,) = records(run, "update")
    here = policies(place, config)["current"][0]
    ratios = {"current": [], "other-t0.7": []}
    for group in groups(run):
        for rollout in group.rollouts:
            logp = teacher_forced(here, group, rollout, 0.8)
            ratios[rollout.behavior] += np.exp(logp - rollout.logprobs).tolist()
    both = [value for values in ratios.values() for value in values]
    np.testing.assert_allclose(update["ratio/tokens"], np.mean(both), rtol=1e-4)
    for name, values in ratios.items():
        assert update[f"tokens@{name}"] == len(values)
        np.testing.assert_allclose(update[f"ratio/tokens@{name}"], np.mean(values), rtol=1e-4)
        np.testing.assert_allclose(update[f"ratio_max@{name}"], np.max(values), rtol=1e-4)
        np.testing.assert_allclose(update[f"ratio_min@{name}"], np.min(values), rtol=1e-4)
    assert update["ratio_max"] == max(update[f"ratio_max@{name}"] for name in ratios)
    for key in ("entropy/tokens", "gap/tokens", "k3/tokens"):
        parts = [update[f"{key}@{name}"] for name in ratios]
        mean = np.average(parts, weights=[len(values) for values in ratios.values()])
        np.testing.assert_allclose(update[key], mean, rtol=1e-4)
        assert abs(parts[0] - parts[1]) > 1e-3 * mean
    plain = {key for key in update if "@" not in key and f"{key}@current" in update}
    assert {"ess/tokens", "k3/tokens", "vetoed/tokens", "entropy/tokens", "gap_max"} <= plain
    (stage,) = records(run, "stage")
    total = sum(stage[f"reward@{name}"] * stage[f"responses@{name}"] for name in ratios)
    np.testing.assert_allclose(total / 16, stage["reward"])


def test_counts_of_several_passes_add_up_and_the_occupancy_is_that_of_all_slots():
    one, two = (
        {"tokens": 5, "slot_steps": 2, "occupancy": 1.0},
        {"tokens": 7, "slot_steps": 6, "occupancy": 0.2},
    )
    assert sampling_passes._add([one, two]) == {
        "tokens": 12,
        "slot_steps": 8,
        "occupancy": pytest.approx(0.4),
    }
    assert sampling_passes._add([]) == {}


def test_the_report_shows_every_diagnostic_by_behavior(mixed):
    history = read_run(mixed[1])
    shown = {maker.__name__: maker([history]) for maker in panels.SECTIONS["By behavior"]}
    assert all({line.name for line in panel.lines} == {"current", "other-t0.7"} for panel in shown.values())
    page = (mixed[1] / "report.html").read_text()
    assert "By behavior" in page and "other-t0.7" in page
    (update,) = history.updates
    for key in update:
        assert "@" not in key or key.partition("@")[0] in page


def test_a_killed_generation_goes_on_without_sampling_anything_twice(place, mixed, monkeypatch):
    config, whole = mixed
    run, sampled = place / "killed", []
    original = sampling_passes.write_shards

    def watched(sampler, folder, *arguments, **keywords):
        sampled.append(folder.number)
        if len(sampled) == 2:  # the second model has begun
            raise KeyboardInterrupt
        return original(sampler, folder, *arguments, **keywords)

    monkeypatch.setattr(sampling_passes, "write_shards", watched)
    monkeypatch.setattr(LiveReport, "_draw", lambda self, **_: None)
    with pytest.raises(KeyboardInterrupt):
        generate(config, run)
    left = {path.name for path in (run / "rollouts" / "stage-000").iterdir()}
    assert left and all(name.startswith("part-0-shard-") for name in left)
    generate(config, run)
    assert sampled == [0, 1, 1]  # the responses of the first model are kept
    assert [encode(group) for group in groups(run)] == [encode(group) for group in groups(whole)]
    names = {path.name for path in (run / "rollouts" / "stage-000").iterdir()}
    assert names == {path.name for path in (whole / "rollouts" / "stage-000").iterdir()}


def test_a_model_whose_weights_have_changed_is_refused(place, mixed, monkeypatch):
    """Else a run that continues would mix the responses of two models."""
    config, run, load = mixed[0], place / "changed", run_setup.load_behavior
    monkeypatch.setattr(LiveReport, "_draw", lambda self, **_: None)
    generate(config, run)
    shutil.rmtree(run / "rollouts")
    generate(config, run)  # the same weights are fine

    def changed(*arguments):
        loaded = load(*arguments)
        return dataclasses.replace(loaded, params=jax.tree.map(lambda leaf: leaf * 1.5, loaded.params))

    monkeypatch.setattr(run_setup, "load_behavior", changed)
    shutil.rmtree(run / "rollouts")
    stored = json.loads((run / "weights-0.json").read_text())
    assert stored["source"] == str(place / "other")
    with pytest.raises(
        ConfigError, match=r"behaviors\[1\].source: the weights of .* have changed since this"
    ):
        generate(config, run)


def rounded(policy):
    layers = policy.params["layers"]
    matrices = {name: StoredMatrix(**jax.device_get(in_eight_bits(layers[name]))) for name in MATRICES}
    return dataclasses.replace(policy, params={**policy.params, "layers": layers | matrices})


def test_with_int8_every_response_has_the_log_probs_of_its_rounded_model(place, mixed, monkeypatch):
    """Also those that are sampled after a kill. Activations are in float32 here, for a sharp comparison."""
    wide = {"dtype": np.dtype("float32"), "matrices": EIGHT_BITS["int8"]}
    for module in (sizes, behavior_policy):
        monkeypatch.setattr(module, "sampler_dtypes", {"int8": wide}.__getitem__)
    monkeypatch.setattr(LiveReport, "_draw", lambda self, **_: None)
    config, original, passes = configs.changed(mixed[0], ["model.sampling_dtype=int8"]), Engine.__init__, []

    def watched(engine, *arguments, **keywords):
        original(engine, *arguments, **keywords)
        passes.append({leaf.dtype.name for leaf in jax.tree.leaves(engine._params)})
        if len(passes) == 2:  # the second model has begun
            raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "__init__", watched)
    with pytest.raises(KeyboardInterrupt):
        generate(config, place / "int8")
    found = groups(generate(config, place / "int8"))
    assert passes == [{"float32", "int8"}] * 3  # each model is rounded once, the second again after the kill
    exact = policies(place, config)
    small = {name: rounded(policy) for name, (policy, _) in exact.items()}
    for group in found:
        for rollout in group.rollouts:
            policy, temperature = exact[rollout.behavior]
            wanted = teacher_forced(small[rollout.behavior], group, rollout, temperature)
            np.testing.assert_allclose(rollout.logprobs, wanted, atol=1e-5)
            gap = np.abs(rollout.logprobs - teacher_forced(policy, group, rollout, temperature))
            assert gap.max() > 1e-4  # it is not the model before rounding
    whole = groups(generate(config, place / "int8-whole"))
    assert [encode(group) for group in found] == [encode(group) for group in whole]


def test_two_behaviors_that_are_the_same_policy_are_one(place, monkeypatch):
    monkeypatch.setattr(LiveReport, "_draw", lambda self, **_: None)
    plain = configs.load(place / "run.yaml")
    half = {"source": "current", "share": 0.5, "temperature": 1.0}
    twice = load(place, [half, half], "objective.temperature=1")
    found = [groups(generate(config, place / name)) for name, config in (("plain", plain), ("twice", twice))]
    assert [encode(group) for group in found[1]] == [encode(group) for group in found[0]]
    assert step_options(chosen(twice)) == step_options(chosen(plain)) and not behavior_names(twice)


def chosen(config):
    return choose_settings(config, run_model_shape(config), run_mesh(config))[0]


def test_rows_that_pad_the_embedding_of_another_model_are_never_drawn(place, tmp_path, monkeypatch):
    monkeypatch.setattr(LiveReport, "_draw", lambda self, **_: None)
    other = load_any_model(place / "other")
    shape = dataclasses.replace(other.config, vocab_size=other.config.vocab_size + 8)

    def padded(leaf, weight):  # likely tokens, if they were drawn
        return np.pad(leaf, [(0, a - b) for a, b in zip(weight.shape, leaf.shape)], constant_values=3.0)

    params = jax.tree.map(padded, jax.device_get(other.params), models.Decoder(shape).weights())
    save_huggingface(params, tmp_path / "padded", config=shape, source=None, tokenizer=other.tokenizer)
    found = []
    for source in (place / "other", tmp_path / "padded"):
        config = load(place, [{"source": str(source), "share": 1.0}])
        found.append(groups(generate(config, tmp_path / f"run-{source.name}")))
    assert all(rollout.behavior == "padded" for group in found[1] for rollout in group.rollouts)
    for here, there in zip(*found, strict=True):
        for mine, plain in zip(there.rollouts, here.rollouts, strict=True):
            np.testing.assert_array_equal(mine.tokens, plain.tokens)
            np.testing.assert_array_equal(mine.logprobs, plain.logprobs)


def test_a_checkpoint_of_a_run_writes_responses(place, mixed, monkeypatch):
    monkeypatch.setattr(LiveReport, "_draw", lambda self, **_: None)
    config = load(place, [{"source": f"{mixed[1]}@1", "share": 1.0}], "seed=3")
    policy = on_host(load_any_model(mixed[1], step=1))
    for group in groups(generate(config, place / "older"))[:2]:
        for rollout in group.rollouts:
            assert rollout.behavior == "mixed-1"
            np.testing.assert_allclose(
                rollout.logprobs, teacher_forced(policy, group, rollout, 1.0), atol=1e-5
            )


def test_a_behavior_that_cannot_write_responses_is_refused_in_one_line(place, mixed, tmp_path):
    alphabet = run_model_tokenizer(configs.load(place / "run.yaml")).alphabet
    shutil.copytree(place / "other", tmp_path / "swapped")
    CharTokenizer(alphabet[1] + alphabet[0] + alphabet[2:]).save(tmp_path / "swapped")
    shutil.copytree(place / "other", tmp_path / "smaller")
    shape = json.loads((tmp_path / "smaller" / "config.json").read_text())
    (tmp_path / "smaller" / "config.json").write_text(json.dumps(shape | {"vocab_size": 8}))
    for source, reason in (
        (tmp_path / "swapped", "has another tokenizer: "),
        (tmp_path / "smaller", "has a vocabulary of 8 tokens"),
        (place / "mixed", f"is a run; name one of its checkpoints, such as {place / 'mixed'}@1"),
        (f"{place / 'mixed'}@9", "no checkpoint after 9 updates; kept: 0, 1"),
        (tmp_path / "nothing", "this folder does not exist"),
        ("tiny", "tiny has random weights"),
    ):
        config = load(place, [{"source": str(source), "share": 1.0}])
        with pytest.raises(ConfigError, match=r"^sampling\.behaviors\[0\]\.source: ") as error:
            planning.plan_run(config)
        assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_behavior_must_fit_the_devices_and_a_replay_needs_none(place):
    config = load(place, [{"source": str(place / "other"), "share": 1.0}])
    with pytest.raises(
        ConfigError, match=r"^sampling\.behaviors\[0\]\.source: mesh: tensor=8 does not divide"
    ):
        behavior_policy.check_behaviors(config, models.make_mesh(tensor=8))
    assert behavior_policy.other_sources(config) == (str(place / "other"),)
    replayed = dataclasses.replace(config, replay=dataclasses.replace(config.replay, run="some/run"))
    assert behavior_policy.other_sources(replayed) == ()


def test_the_plan_counts_one_model_after_the_other(place):
    config = load(place, [{"source": str(place / "other"), "share": 1.0}])
    plan = planning.plan_run(config)
    assert list(plan.behaviors) == [str(place / "other")]
    assert "one model after the other" in str(plan)
    # Enough memory for the sampler of the run's own model, but not beside the loaded weights of the other.
    sampler = plan.sampler.weight_bytes + plan.sampler.cache_bytes + plan.sampler.work_bytes
    small = planning.plan_run(config, device_memory=plan.memory.state + int(sampler / 0.92) + 1)
    assert small.sampler is not None and small.problem.startswith("the behavior ")
    assert "does not fit" in small.problem
