"""Claims about the run loop: it is GRPO at µ = 4, it compiles once, and it does not wait for the device."""

import json
import shutil
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import TINY_MODEL

from mugrpo_jax import config as configs
from mugrpo_jax import models, rollouts, training
from mugrpo_jax.compiling.compiled_programs import CompiledPrograms, in_background
from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop import stages, update_phase
from mugrpo_jax.loop.pending_metrics import PendingMetrics
from mugrpo_jax.loop.run_context import open_run
from mugrpo_jax.report.live import LiveReport
from mugrpo_jax.rollouts import update_stream
from mugrpo_jax.runs.journal import Journal
from mugrpo_jax.setup.run_setup import load_run_model
from mugrpo_jax.setup.trained_model import trained_model
from mugrpo_jax.training import CheckpointStore, Cursor, UpdateStep

CONFIG = (
    TINY_MODEL
    + """\
task: {name: arithmetic, options: {difficulty: 1, train: 64, test: 4}, reward: run_rewards:short, scorers: 0}
sampling: {max_prompt_tokens: 8, max_response_tokens: 24, slots: 16, prompts_per_shard: 8}
batch: {prompts_per_update: 4, responses_per_prompt: 4, updates_per_stage: 4, stages: 3,
        tokens_per_micro_batch: 512, length_multiple: 32}
objective: {name: grpo}
optimizer: {learning_rate: 1.0e-2, eps: 1.0e-3, weight_decay: 0.1, grad_clip: 0.5}
evaluation: {problems: 4}
checkpoints: {every: 5, keep_best: 0, keep_last: 9}
report: {samples: 4}
track_drift: false
"""
)


@pytest.fixture(scope="module")
def place(program_folder):
    """A folder with a config and a reward; programs compiled once for all runs in it."""
    folder = program_folder
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "run_rewards.py").write_text("def short(text, problem):\n    return 1.0 / (1 + len(text))\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


class Spy:
    """What happened in a run, in order: journal records, dispatches, saves, compilations."""

    def __init__(self, patch):
        self.events, self.alive, self.phases, self.background = [], [], [], []
        before = jax.live_arrays()
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        self._wrap(patch, Journal, "write", lambda record: ("record", record["kind"], record["updates"]))
        self._wrap(patch, UpdateStep, "__call__", lambda state, update, base: ("dispatch",))
        self._wrap(patch, CheckpointStore, "save", lambda state, cursor, **_: ("save", cursor.updates))
        self._wrap(patch, stages, "generate_stage", lambda state, stage, cursor: ("generate", stage))
        self._wrap(patch, CompiledPrograms, "_failed", lambda name, error: ("failed", name))
        patch.setattr(LiveReport, "_draw", lambda self, **_: None)  # reads the config, which traces the loss
        optimise = stages.optimise

        def timed(run, *arguments):
            here = {id(array) for array in before}
            # Single shards are views that a checkpoint took of whole arrays.
            whole = [a for a in jax.live_arrays() if len(a.sharding.device_set) == len(jax.devices())]
            self.alive.append([(a.shape, a.nbytes) for a in whole if id(a) not in here])
            started = time.monotonic()
            yield from optimise(run, *arguments)
            self.phases.append(time.monotonic() - started)

        patch.setattr(stages, "optimise", timed)

    def _compiled(self, name, seconds, **_):
        if name.startswith("/jax/core/compile/"):
            self.events.append(("compile", name.rsplit("/", 1)[1]))
            self.background.append(in_background() and "backend" in name)

    def _wrap(self, patch, owner, name, event):
        original = getattr(owner, name)

        def wrapped(this, *arguments, **keywords):
            self.events.append(event(*arguments, **keywords))
            return original(this, *arguments, **keywords)

        patch.setattr(owner, name, wrapped)


@pytest.fixture(scope="module")
def watched(place):
    """The whole run, with a spy in it."""
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        patch.setattr("mugrpo_jax.loop.compile_ahead.usable_processors", lambda: 4)
        jax.clear_caches()  # what other tests of this process compiled
        stages.train(configs.load(place / "run.yaml"), place / "whole")
        jax.monitoring.unregister_event_duration_listener(spy._compiled)
    return spy


def records(folder, kind):
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if record["kind"] == kind]


# -- what it computes


def by_hand(config, folder, monkeypatch):
    """GRPO without anything of the run loop but the rollouts it stored and the order it read them in."""
    setup, params = load_run_model(config)
    params = jax.device_get(params)
    decayed = {"embed", "head", "q", "k", "v", "o", "gate", "up", "down"}
    mask = jax.tree.map_with_path(lambda path, _: path[-1].key in decayed, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=mask)
    )
    opt_state = optimizer.init(params)

    def log_probs(params, tokens):
        logits = models.logits(setup.model, params, tokens)
        return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=2)[..., 0]

    @jax.jit
    def update(params, opt_state, tokens, stored, mask, advantages):
        def loss(params):
            ratio = jnp.exp((log_probs(params, tokens) - stored) * mask)
            gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
            return -((gain * mask).sum(1) / mask.sum(1)).mean()

        gradient = jax.grad(loss)(params)
        changes, opt_state_after = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, changes), opt_state_after

    with monkeypatch.context() as patch:
        patch.setattr(update_stream, "make_update", lambda groups, **_: groups)
        for index in range(3):
            stage = rollouts.open_stage(folder / "rollouts" / f"stage-{index:03d}")
            stream = rollouts.UpdateStream(
                stage,
                seed=0,
                stage_index=index,
                epochs=1,
                prompts_per_update=4,
                buckets=rollouts.plan_buckets(64, 64),
            )
            stored = list(rollouts.read_groups(stage))
            order = [[stored[outline.index] for outline in next(stream)] for _ in range(4)]
            assert sorted(group.index for groups in order for group in groups) == list(range(16))
            fresh = True
            for groups in order:
                tokens, sampled, mask, advantages = rectangle(groups)
                if fresh:  # the rollouts came from these very weights
                    found = jax.jit(log_probs)(params, tokens)
                    np.testing.assert_allclose(found * mask, sampled, atol=3e-5)
                    fresh = False
                params, opt_state = update(params, opt_state, tokens, sampled, mask, advantages)
    return params


def rectangle(groups, width=32):
    """Responses as padded rows; column t of the results speaks of token t + 1."""
    rows = [(group.prompt, r) for group in groups for r in group.rollouts]
    tokens = np.zeros((len(rows), width), np.int32)
    stored, mask = np.zeros((2, len(rows), width - 1), np.float32)
    for i, (prompt, response) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(response.tokens)
        tokens[i, :start], tokens[i, start:end] = prompt, response.tokens
        stored[i, start - 1 : end - 1], mask[i, start - 1 : end - 1] = response.logprobs, 1
    rewards = np.array([[r.reward for r in group.rollouts] for group in groups])
    spread = rewards.std(axis=1, ddof=1, keepdims=True)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-6)
    return tokens, stored, mask, advantages.reshape(-1, 1).astype(np.float32)


def test_four_updates_a_stage_are_a_plain_grpo_loop(place, watched, monkeypatch):
    config = configs.load(place / "run.yaml")
    expected = by_hand(config, place / "whole", monkeypatch)
    found = jax.device_get(trained_model(place / "whole", 12).params)
    start = jax.device_get(load_run_model(config)[1])
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(start), strict=True)]
    assert max(moved) > 0.05
    assert max(record["clipped/tokens"] for record in records(place / "whole", "update")) > 0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


# -- how it spends its time


def test_nothing_is_traced_or_compiled_after_the_first_stage(watched):
    first = watched.events.index(("generate", 1))
    assert ("compile", "backend_compile_duration") in watched.events[:first]
    assert [event for event in watched.events[first:] if event[0] == "compile"] == []


def test_an_update_is_dispatched_before_the_last_one_is_read(watched):
    dispatched, ahead = 0, []
    for event in watched.events:
        dispatched += event == ("dispatch",)
        if event[:2] == ("record", "update"):
            ahead.append(dispatched - event[2])
    # Two updates are under way, but for the end of a stage and a checkpoint after the fifth and tenth update.
    # The first update of all is read at once, to tell the time until it is done.
    assert ahead == [0, 2, 1, 0, 0, 2, 1, 0, 1, 0, 1, 0]


def test_programs_are_compiled_in_the_background_without_a_failure(watched):
    assert sum(watched.background) >= 5  # prefill, insert, decode, prepare, optimizer
    assert [event for event in watched.events if event[0] == "failed"] == []


def test_the_first_token_and_the_first_update_are_timed_once(place, watched):
    found = [json.loads(line) for line in (place / "whole" / "metrics.jsonl").read_text().splitlines()]
    token = [(r["kind"], r["updates"]) for r in found if "to_first_token" in r["seconds"]]
    update = [(r["kind"], r["updates"]) for r in found if "to_first_update" in r["seconds"]]
    assert (token, update) == ([("evaluation", 0)], [("update", 1)])
    first, after = (records(place / "whole", kind)[0]["seconds"] for kind in ("evaluation", "update"))
    assert 0 < first["to_first_token"] < after["to_first_update"]


def test_settings_left_to_the_run_are_stored_with_their_values_and_reasons(place, watched):
    assert configs.load(place / "run.yaml").model.scan_layers == configs.AUTO
    assert configs.load(place / "whole" / "config.yaml").model.scan_layers is True
    (chosen,) = json.loads((place / "whole" / "chosen.json").read_text())
    assert (chosen["key"], chosen["value"]) == ("model.scan_layers", True)
    assert "compiles faster" in chosen["reason"]


def test_checkpoints_are_counted_over_the_run_and_come_after_their_records(watched):
    saves = [event[1] for event in watched.events if event[0] == "save"]
    assert saves == [0, 5, 10, 12]  # every 5 updates whatever the stage, and the end
    for updates in saves[1:]:
        place = watched.events.index(("save", updates))
        assert ("record", "update", updates) in watched.events[:place]
        assert ("record", "update", updates + 1) not in watched.events[:place]


def test_seconds_of_the_updates_add_up_to_the_time_of_the_phase(place, watched):
    updates = records(place / "whole", "update")
    for stage, seconds in enumerate(watched.phases):
        found = sum(record["seconds"]["update"] for record in updates if record["stage"] == stage)
        assert found <= seconds + 1e-3
        assert found == pytest.approx(seconds, abs=0.05)


def test_the_sampler_is_gone_before_the_updates_start(place, watched):
    weights = sum(a.nbytes for a in jax.tree.leaves(trained_model(place / "whole", 12).params))
    cache = (16, 32, 1, 8)  # slots, length, heads, width: 16 kB, twice
    assert 2 * 4 * np.prod(cache) > weights
    assert len(watched.alive) == 3
    for arrays in watched.alive:
        # Weights, two moments, some counters; a sampler would add its weights and its cache.
        assert 3 * weights <= sum(size for _, size in arrays) < 3 * weights + 1000, arrays
        assert cache not in [shape for shape, _ in arrays]


def test_the_record_of_a_stage_says_what_was_generated_and_where_the_time_went(place, watched):
    for record in records(place / "whole", "stage"):
        groups = list(
            rollouts.read_groups(rollouts.open_stage(place / f"whole/rollouts/stage-{record['stage']:03d}"))
        )
        found = [rollout for group in groups for rollout in group.rollouts]
        lengths = [len(rollout.tokens) for rollout in found]
        assert record["responses"] == len(found) == 64
        assert record["response_tokens"] == sum(lengths)
        assert record["response_length"] == pytest.approx(np.mean(lengths))
        assert record["longest_response"] == max(lengths)
        assert record["reward"] == pytest.approx(np.mean([rollout.reward for rollout in found]))
        stopped = sum(rollout.finish == "stop" for rollout in found)
        assert record["finish"] == {"length": 64 - stopped, "stop": stopped}
        assert record["truncated"] == 1 - stopped / 64
        assert "malformed" not in record  # a reward of the user's own has no reader of answers
        assert record["status"] == {"ok": 64, "timeout": 0, "crash": 0, "error": 0, "invalid": 0}
        seconds = record["seconds"]
        assert 0 < seconds["occupancy"] <= 1
        assert (seconds["compile"] == 0) if record["stage"] else (seconds["compile"] <= seconds["sample"])
        assert min(seconds[name] for name in ("sample", "score_wait", "write", "switch")) >= 0
        parts = seconds["sample"] + seconds["score_wait"] + seconds["switch"]
        assert parts <= seconds["generate"] + 1e-6


def test_compiling_is_told_where_it_happened(place, watched):
    first, *later = records(place / "whole", "evaluation")
    assert 0 < first["seconds"]["compile"] < first["seconds"]["evaluate"]  # the sampler's programs
    assert all(record["seconds"]["compile"] == 0 for record in later)
    assert "truncated" in first and "malformed" not in first
    compiled = [record["seconds"]["compile"] for record in records(place / "whole", "update")]
    assert compiled[0] > 0 and not any(compiled[4:])  # after the first stage


def test_records_follow_two_updates_behind_and_flush_in_order():
    seen = []
    pending = PendingMetrics(lambda about, metrics, seconds: seen.append((about, metrics)))
    for update in range(4):
        pending.add(update, {"loss": jnp.float32(update)})
        assert [about for about, _ in seen] == list(range(max(0, update - 1)))
    pending.flush()
    assert seen == [(update, {"loss": float(update)}) for update in range(4)]


def test_a_resumed_run_keeps_the_slots_that_were_planned(place, monkeypatch):
    config = configs.changed(configs.load(place / "run.yaml"), ["sampling.slots=auto"])
    planned, memory = [], [10**9]
    monkeypatch.setattr("mugrpo_jax.sampling.sampler_plan.free_memory", lambda device: memory[-1])
    for _ in range(2):
        with open_run(config, place / "slots") as run:
            plan = run.setup.sampler_plan
        planned.append(plan.slots)
        # For the second time, too little to plan so many anew.
        memory.append(plan.weight_bytes + plan.cache_bytes + plan.work_bytes)
    assert planned == [64, 64] and (place / "slots" / "sampler.json").exists()


def test_too_many_skipped_updates_stop_the_run(place):
    settings = ["optimizer.learning_rate=1e30", "optimizer.max_skipped=1", "evaluation.problems=0"]
    jax.clear_caches()  # what earlier runs of this process compiled
    with pytest.raises(
        ConfigError,
        match=r"update \d+: 2 updates had a non-finite gradient.* first seen was update \d; its loss was ",
    ):
        stages.train(configs.load(place / "run.yaml", settings), place / "skipped")
    assert records(place / "skipped", "update")[-1]["skipped"] == 2
    # Nothing was evaluated before it.
    seconds = records(place / "skipped", "stage")[0]["seconds"]
    assert 0 < seconds["compile"] < seconds["sample"]


def test_the_recorded_learning_rate_is_that_of_the_updates_that_were_applied():
    settings = configs.OptimizerSection(learning_rate=1.0, schedule="linear")
    run = types.SimpleNamespace(learning_rates=training.learning_rates(settings, 4))
    found = [update_phase._law(run, Cursor(0, n, n), 3, skipped) for n, skipped in [(1, 0), (3, 1), (9, 0)]]
    assert [law["learning_rate"] for law in found] == [1.0, 0.75, 0.0]  # one was skipped; after the last one
    assert found[1] == {
        "staleness": 5,
        "lag": 3,
        "learning_rate": 0.75,
        "staleness_times_rate": 3.75,
        "updates_times_rate": 2.25,
    }


# -- what the loss needs beside the rollouts: a reference policy, entropies, a proximal policy

KINDS = {
    "kl": ("grpo", "{kl_coef: 0.3, aggregation: token_mean}"),
    "entropy": ("grpo", "{entropy_coef: 0.05, aggregation: token_mean}"),
    "proximal": ("decoupled_ppo", "{clip_high: 1.02}"),
}


@pytest.fixture(scope="module")
def hand_written(place, watched):
    """The gradient of the fourth update of a replay, as the formulas say it: row by row, from full logits."""
    model = load_run_model(configs.load(place / "run.yaml"))[0].model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_stream, "make_update", lambda groups, **_: groups)
        stage = rollouts.open_stage(place / "whole" / "rollouts" / "stage-000")
        stream = rollouts.UpdateStream(
            stage,
            seed=0,
            stage_index=0,
            epochs=1,
            prompts_per_update=1,
            buckets=rollouts.plan_buckets(64, 64),
        )
        outlines = [next(stream) for _ in range(4)][3]
    found = {group.index: group for group in rollouts.read_groups(stage)}
    groups = [found[outline.index] for outline in outlines]
    total = sum(len(r.tokens) for group in groups for r in group.rollouts)

    def response(params, group, r):
        tokens = np.concatenate([group.prompt, r.tokens])
        logp = jax.nn.log_softmax(models.logits(model, params, tokens[None])[0, len(group.prompt) - 1 : -1])
        return logp[np.arange(len(r.tokens)), r.tokens], -(jnp.exp(logp) * logp).sum(-1)

    def loss(params, start, proximal, *, decoupled, kl_coef, entropy_coef):
        value, means = 0.0, jnp.zeros(2)
        for group in groups:
            rewards = np.array([r.reward for r in group.rollouts])
            for r in group.rollouts:
                a = (r.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                policies = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, start, proximal)
                found = jax.vmap(lambda policy, group=group, r=r: response(policy, group, r))(policies)
                (logp, reference, other), entropy = found[0], found[1][0]
                x = logp - reference
                k3 = jnp.exp(-x) - 1 + x
                before = jnp.where(decoupled, other, r.logprobs)
                weight = jnp.minimum(jnp.exp(before - r.logprobs), 5.0)
                ratio, high = jnp.exp(logp - before), jnp.where(decoupled, 1.02, 1.2)
                gain = weight * jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, high) * a)
                value += (kl_coef * k3 - entropy_coef * entropy - gain).sum() / total
                means += jnp.stack([entropy.sum(), k3.sum()]) / total
        return value, means

    function = jax.jit(jax.grad(loss, has_aux=True))

    def gradient(kind, params, start, proximal):
        settings = {"kl_coef": 0.3 * (kind == "kl"), "entropy_coef": 0.05 * (kind == "entropy")}
        return jax.device_get(function(params, start, proximal, decoupled=kind == "proximal", **settings))

    return gradient


def largest(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b)))


@pytest.mark.parametrize("kind", KINDS)
def test_kl_entropy_and_proximal_policy_have_the_gradient_of_a_plain_loop(
    place, hand_written, kind, monkeypatch
):
    name, knobs = KINDS[kind]
    source, seen = place / "whole", []
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    settings = [f"replay.run={source}", f"objective.name={name}", f"objective.knobs={knobs}"]
    settings += ["proximal_every=2", "batch.prompts_per_update=1", "batch.updates_per_stage=16"]
    settings += ["evaluation.problems=0", "report.samples=0"]

    def spied(self, state, update, base, gradient=UpdateStep.gradient):
        found = gradient(self, state, update, base)
        seen.append(jax.device_get((state.params, found[0])))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(UpdateStep, "gradient", spied)
        stages.train(configs.load(place / "run.yaml", settings), place / kind)
    # In the fourth update, the policy, the proximal policy (two updates old) and the start are all different.
    (start, _), (proximal, _), (params, gradient) = seen[0], seen[2], seen[3]
    exact, (entropy, kl) = hand_written(kind, params, start, proximal)
    scale = float(optax.tree.norm(exact))
    assert largest(gradient, exact) < 2e-6 * max(scale, 1)
    if kind != "entropy":  # the policies matter
        assert largest(hand_written(kind, params, params, start)[0], exact) > 1e-4 * scale
    record = records(place / kind, "update")[3]
    assert record["entropy/tokens"] == pytest.approx(float(entropy), rel=1e-5)
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before  # nothing written there
    if kind == "kl":
        assert record["reference_kl/tokens"] == pytest.approx(float(kl), rel=1e-3) and kl > 1e-3
        assert len(list((place / kind / "reference" / "stage-000").glob("*.arrayrecord"))) == 2


def test_a_replay_of_the_first_stage_needs_only_the_weights_after_the_warm_start(place):
    small = ["evaluation.problems=0", "report.samples=0", "batch.stages=1", "batch.updates_per_stage=2"]
    small += ["warm_start={updates: 2, rows_per_update: 4, learning_rate: 1.0e-2}", "checkpoints.keep_last=1"]
    small += ["track_drift=true", "objective.name=decoupled_ppo", "proximal_every=2"]  # more state
    warm, again = place / "warm", place / "again"
    stages.train(configs.load(place / "run.yaml", small), warm)
    assert [path.name for path in (warm / "checkpoints").iterdir() if path.is_dir()] == ["000002"]
    config = configs.load(place / "run.yaml", [*small, f"replay.run={warm}"])
    stages.train(config, again)
    ended = [trained_model(folder, 2).params for folder in (warm, again)]
    assert largest(*ended) == 0
    assert not records(again, "warm_start")
    first, second = ([record["drift"] for record in records(folder, "update")] for folder in (warm, again))
    assert first == second and min(first) > 0
    shutil.rmtree(warm / "warm_start")
    with pytest.raises(
        ConfigError, match=r"the checkpoint before stage 0 \(0 updates\) is not kept, only 2;"
    ):
        stages.train(config, place / "lost")
