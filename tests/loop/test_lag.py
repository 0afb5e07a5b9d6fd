"""With `batch.lag` = L, a stage trains on rollouts of the policy from L stages earlier, also after a kill."""

import contextlib
import errno
import functools
import itertools
import json
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from tiny_run import TINY_RUN

from mugrpo_jax import config as configs
from mugrpo_jax import report, rollouts, training
from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed import Absent
from mugrpo_jax.loop import sampler_process
from mugrpo_jax.loop.resume import resume
from mugrpo_jax.loop.run_context import open_run
from mugrpo_jax.loop.sampler_process import sample
from mugrpo_jax.loop.sampling_passes import sample_shards
from mugrpo_jax.loop.stages import train
from mugrpo_jax.loop.update_phase import optimise
from mugrpo_jax.models.sharding import make_mesh
from mugrpo_jax.planning import plan_run
from mugrpo_jax.report import staleness_position
from mugrpo_jax.report.live import LiveReport
from mugrpo_jax.report.sampler_log import sampler_facts
from mugrpo_jax.rollouts import RolloutFolder
from mugrpo_jax.runs import owned_files
from mugrpo_jax.runs.run_lock import RunLock
from mugrpo_jax.runs.sampler_claims import SignOfLife
from mugrpo_jax.runs.time_left import TimeLeft
from mugrpo_jax.runs.waiting import Waiting
from mugrpo_jax.setup.devices import run_mesh
from mugrpo_jax.setup.initial_model import run_model_shape
from mugrpo_jax.setup.trained_model import trained_model
from mugrpo_jax.training import Cursor, UpdateStep, checkpoint_folders

SETTINGS = [
    *("warm_start.updates=0", "evaluation.problems=0", "report.samples=0", "task.reward=lag_rewards:short"),
    *("batch.tokens_per_micro_batch=512", "batch.length_multiple=32"),  # one shape for all updates
    "sampling.prompts_per_shard=2",
    "checkpoints={every: 3, keep_last: 9, keep_best: 0}",  # not at the starts of stages
]


@pytest.fixture(scope="module")
def place(program_folder):
    (program_folder / "run.yaml").write_text(TINY_RUN)
    reward = "def short(text, problem):\n    return 1.0 / (1 + len(text))\n"
    (program_folder / "lag_rewards.py").write_text(reward)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(program_folder)
        patch.setattr(LiveReport, "_draw", lambda self, **_: None)  # takes longer than these runs
        one = functools.partial(make_mesh, devices=jax.devices()[:1])  # compiles faster
        patch.setattr("mugrpo_jax.setup.devices.make_mesh", one)
        patch.setattr("mugrpo_jax.loop.sampler_process.loading_mesh", lambda _: one())
        patch.setattr("mugrpo_jax.runs.waiting._LONGEST_PAUSE_S", 0.05)
        yield program_folder


def load(place, lag, mu, stages):
    sizes = [f"batch.lag={lag}", f"batch.updates_per_stage={mu}", f"batch.stages={stages}"]
    return configs.load(place / "run.yaml", [*SETTINGS, *sizes])


def weights(folder):
    last = int(checkpoint_folders(folder / "checkpoints")[-1].name)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(trained_model(folder, last).params))]


def raw(folder, kind):
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if record["kind"] == kind]


def records(folder, kind):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in raw(folder, kind)]


def stored(folder):
    return [
        rollouts.encode(group)
        for stage in sorted((folder / "rollouts").iterdir())
        for group in rollouts.read_groups(rollouts.open_stage(stage))
    ]


def by_schedule(config, folder):
    """Train with an explicit schedule that keeps the weights at every stage's start; return the last ones."""
    lag, cursor, starts = config.batch.lag, Cursor(), []
    with open_run(config, folder) as run:
        state, _ = resume(run)
        for stage in config.stages:
            starts.append(jax.device_get(state.params))
            old = starts[max(0, stage - lag)]
            place = jax.tree.map(lambda now, then: jax.device_put(then, now.sharding), state.params, old)
            names = {"fingerprint": "by hand", "stage": stage, "policy_updates": 0}
            path = run.folder.stage_folder(stage)
            made = RolloutFolder(path, names, config.prompts_per_stage, config.sampling.prompts_per_shard)
            sample_shards(run, place, made, stage, range(made.shards))
            made.commit()
            state = training.start_stage(state)
            *_, (state, cursor) = optimise(run, state, stage, made, None, cursor)
            cursor = Cursor(stage=stage + 1, updates=cursor.updates)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(state.params))]


@pytest.fixture(scope="module")
def in_one_process(place):
    """Return a function that gives config and folder of a run in one process."""

    @functools.cache
    def run(lag, mu, stages):
        config, folder = load(place, lag, mu, stages), place / f"lag-{lag}-{mu}"
        train(config, folder)
        return config, folder

    return run


@pytest.fixture(scope="module")
def whole(in_one_process):
    """A run with four stages of two updates and a lag of one stage."""
    return in_one_process(1, 2, 4)


@pytest.mark.parametrize(("lag", "mu", "stages"), [(1, 2, 4), (3, 1, 7)])
def test_a_lagged_run_is_the_loop_that_keeps_old_weights(place, in_one_process, lag, mu, stages):
    config, folder = in_one_process(lag, mu, stages)
    expected = by_schedule(config, place / f"by-hand-{lag}-{mu}")
    assert all((a == b).all() for a, b in zip(weights(folder), expected, strict=True))
    assert stored(folder) == stored(place / f"by-hand-{lag}-{mu}")
    updates = records(folder, "update")
    ages = [
        min(record["stage"], lag) * mu + record["updates"] - 1 - record["stage"] * mu for record in updates
    ]
    assert [record["staleness"] for record in updates] == ages
    rate = config.optimizer.learning_rate
    assert [record["staleness_times_rate"] for record in updates] == [age * rate for age in ages]
    assert [record["updates_times_rate"] for record in updates] == [
        (number + 1) * rate for number in range(len(updates))
    ]
    assert max(ages) == config.largest_staleness == lag * mu + mu - 1
    for stage in config.stages:
        manifest = json.loads((folder / f"rollouts/stage-{stage:03d}/manifest.json").read_text())
        version = max(0, stage - lag)
        assert manifest["identity"]["policy_stage"] == version
        assert manifest["identity"]["policy_updates"] == version * mu
    assert [record["policy_updates"] for record in records(folder, "stage")] == [
        max(0, stage - lag) * mu for stage in config.stages
    ]


class Killed(Exception):
    """Raised in place of a kill."""


def killed(owner, name, count, config, folder, *, after=False, **settings):
    """Train until the `count`-th call of a function, which ends the run."""
    original, calls = getattr(owner, name), Counter()

    def wrapped(*arguments, **keywords):
        calls[name] += 1
        result = original(*arguments, **keywords) if after or calls[name] != count else None
        if calls[name] == count:
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        with pytest.raises(Killed):
            train(config, folder, **settings)


def committed(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("rollouts/*/*.arrayrecord")}


def test_a_killed_lagged_run_continues_and_generates_only_what_is_missing(place, whole):
    config, folder = whole[0], place / "killed"
    killed(RolloutFolder, "write_shard", 4, config, folder)  # stage 1, in the generation at the start
    kept = committed(folder)
    assert len(kept) == 3
    killed(UpdateStep, "__call__", 4, config, folder, after=True)  # the checkpoint is that of update 3
    assert kept.items() <= committed(folder).items()
    # Stage 1 is under way. The policy that wrote stage 2 is gone, so damage is told before stage 1 goes on.
    shard = folder / "rollouts" / "stage-002" / "shard-00001.arrayrecord"
    before = shard.read_bytes()
    shard.write_bytes(before[:-9])
    with pytest.raises(ConfigError, match=r"shard-00001.arrayrecord: its checksum.*add --back-to 0 to"):
        train(config, folder)
    assert [record["updates"] for record in records(folder, "update")] == [1, 2, 3]
    kept = {path: when for path, when in committed(folder).items() if path != shard}
    train(config, folder, back_to=0)
    assert kept.items() <= committed(folder).items() and shard.read_bytes() == before
    assert all((a == b).all() for a, b in zip(weights(folder), weights(whole[1]), strict=True))
    assert stored(folder) == stored(whole[1])
    for kind in ("stage", "update"):
        assert records(folder, kind) == records(whole[1], kind)


def test_a_replay_of_a_lagged_stage_gives_the_same_updates(place, whole):
    config, folder = whole
    train(configs.changed(config, [f"replay.run={folder}", "replay.stage=3"]), place / "replayed")
    assert all((a == b).all() for a, b in zip(weights(place / "replayed"), weights(folder), strict=True))
    ages = [record["staleness"] for record in records(place / "replayed", "update")]
    assert ages == [2, 3] == [record["staleness"] for record in records(folder, "update")[-2:]]


def test_the_report_has_the_lag_and_the_times_of_the_stages(whole):
    run = report.read_run(whole[1])
    where = staleness_position.position(run)
    assert (where.lag, where.updates) == (3, 8)
    assert where.lag_times_rate == pytest.approx(3e-3) and where.updates_times_rate == pytest.approx(8e-3)
    assert np.isnan(where.batch_drift)  # the drift is not measured from the policy that wrote the rollouts
    spent = sum(sum(phases.values()) for phases in run.phases.values())
    assert spent == pytest.approx(run.seconds, rel=0.01)  # generation ahead is counted once
    assert "<td>3</td>" in report.page.page([run])
    left = TimeLeft(run.config)
    left.restart([{"kind": "stage", "stage": 2, "updates": 4, "seconds": {"generate": 9.0}}])
    left.write({"kind": "update", "updates": 5, "seconds": {"update": 1.0}})
    assert left.seconds() == 3  # updates; the rollouts of stage 3 are there


def test_the_plan_tells_the_room_of_many_small_stages(whole):
    config, folder = whole
    planned = plan_run(config, run_model_shape(config), run_mesh(config)).rollout_bytes
    used = sum(path.stat().st_size for path in (folder / "rollouts").rglob("*") if path.is_file())
    assert 0.7 * planned < used <= planned


def test_a_lag_as_long_as_the_run_is_refused(place):
    with pytest.raises(ConfigError, match=r"batch.lag: 3 is not below batch.stages=3, .*use at most 2"):
        load(place, 3, 1, 3)


def same_end(folder, whole):
    assert all((a == b).all() for a, b in zip(weights(folder), weights(whole), strict=True))
    assert stored(folder) == stored(whole)
    for kind in ("stage", "update"):
        assert records(folder, kind) == records(whole, kind)


def wait_for_a_policy(patch, samplers):
    """Return a function that waits until so many samplers have waited for a policy."""
    original, waiting = Waiting.pause, set()

    def note(self, what, *rest, **known):
        original(self, what, *rest, **known)
        if re.match(r"the policy at the start|the trainer to publish a policy", what):
            waiting.add(id(self))

    def wait():
        end = time.monotonic() + 60
        while len(waiting) < samplers:
            assert time.monotonic() < end
            time.sleep(0.05)

    patch.setattr(Waiting, "pause", note)
    return wait


def continued_apart(config, folder):
    """Start a run in one process that splits its devices; after a kill, a trainer and two samplers go on.

    The kill comes at the last update of stage 0. Threads stand for the processes of the samplers.
    """
    mu = config.batch.updates_per_stage
    with pytest.MonkeyPatch.context() as patch:
        local = jax.devices()[:2]
        patch.setattr(jax, "devices", lambda: local)
        killed(UpdateStep, "__call__", mu, configs.changed(config, ["mesh.sampling_devices=1"]), folder)
        with pytest.raises(
            ConfigError, match="sampling_devices: 2 of the 2 devices here leave none to train"
        ):
            run_mesh(configs.changed(config, ["mesh.sampling_devices=2"]))
    made = committed(folder)
    assert len(made) >= mu  # stage 0 has a shard for each update
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        wait = wait_for_a_policy(patch, samplers=2)
        working = [threads.submit(sample, folder, wait_limit_s=60) for _ in range(2)]
        wait()
        train(config, folder, wait_limit_s=60)
        assert [sampler.result() for sampler in working] == [None, None]
    assert made.items() <= committed(folder).items()  # nothing was sampled twice
    return folder


@pytest.fixture(scope="module")
def apart(place, whole):
    return continued_apart(whole[0], place / "apart")


@pytest.mark.parametrize(("lag", "mu", "stages"), [(0, 1, 4), (1, 2, 4), (3, 1, 7)])
def test_split_devices_and_two_samplers_with_a_trainer_end_like_one_process(
    place, in_one_process, apart, lag, mu, stages
):
    config, whole = in_one_process(lag, mu, stages)
    folder = apart if lag == 1 else continued_apart(config, place / f"apart-{lag}")
    same_end(folder, whole)
    assert list((folder / "policies").iterdir()) == [] == list((folder / "samplers").glob("claims/*"))


def test_the_logs_and_the_report_say_what_samplers_did_and_waited_for(apart):
    done = [
        json.loads(line) for log in apart.glob("samplers/*.jsonl") for line in log.read_text().splitlines()
    ]
    shards = Counter((record["stage"], shard) for record in done for shard in record["shards"])
    assert shards == dict.fromkeys(itertools.product(range(4), range(2)), 1)
    assert sum(record["seconds"].get("wait/policy", 0.0) for record in done) > 0
    run = report.read_run(apart)
    assert run.stages()[0].wait_seconds > 0 and run.stages()[0].generate_seconds > 0
    spent = sum(sum(phases.values()) for phases in run.phases.values())
    assert spent == pytest.approx(run.seconds, rel=0.01)  # the time of samplers is not counted
    page = report.page.page([run])
    assert re.search(r"3 with a log: 8 shards, [\d,]+ tokens/s .*; waited .* for policies and", page)
    fact = sampler_facts(apart, 100.0, 10.0, run.generations, 2)
    tokens = sum(record["response_tokens"] for record in done)
    alone = 90 + sum(record["seconds"]["generate"] for record in done)
    assert f"The run: {tokens / 100:,.0f} tokens/s in" in fact and f", {tokens / alone:,.0f} tokens/s" in fact
    killed = sampler_facts(apart, 100.0, 10.0, run.generations, 3)  # as if a third shard was in no log
    assert f"The run: {tokens / 100:,.0f} tokens/s in" in killed
    assert "; 4 shards are in no log, because a sampler was killed or the run" in killed


def test_what_does_not_fit_together_is_refused_in_one_line(place, whole, apart):
    config = whole[0]
    with pytest.raises(ConfigError, match=r"depend on sampling.temperature.*leave these overrides out"):
        sample(apart, overrides=["sampling.temperature=0.5"])
    with RunLock(apart), pytest.raises(ConfigError, match="is training here"):
        train(config, apart, wait_limit_s=1)
    with (
        RunLock(apart, samples=True),
        pytest.raises(ConfigError, match=r"trains here and samples itself.*--rollouts wait"),
    ):
        sample(apart)
    with SignOfLife(place / "beside"), pytest.raises(ConfigError, match="samples for this run"):
        train(config, place / "beside")
    with pytest.raises(ConfigError, match=r"config.yaml: a file; mugrpo sample needs the folder"):
        sample(apart / "config.yaml")
    with pytest.raises(
        ConfigError, match=r"no policy is published; start the trainer with .* --rollouts wait"
    ):
        sample(place / "nothing", watch=False)
    with pytest.raises(Absent, match=r"to publish a policy in .*without a sign of life.*start the trainer"):
        sample(place / "nothing", wait_limit_s=0.1)


@pytest.mark.parametrize("machine", ["this", "another"])
@pytest.mark.parametrize("first", ["trainer", "sampler"])
def test_a_sampler_is_refused_beside_a_trainer_that_samples_itself(tmp_path, monkeypatch, machine, first):
    monkeypatch.setattr("mugrpo_jax.runs.run_lock._BEAT_S", 0.05)
    original, trainer, resources = Waiting.pause, RunLock(tmp_path, samples=True), contextlib.ExitStack()
    if machine == "another":  # there a trainer is known to be alive when its sign changes
        trainer._owner["machine"] = "far".ljust(len(trainer._owner["machine"]))

    pauses = itertools.count()

    def pause(self, *rest, **known):
        assert next(pauses) < 30, "a sampler waits for as long as the trainer lives"
        if not (tmp_path / "lock.json").exists():
            resources.enter_context(trainer)
        original(self, *rest, **known)

    monkeypatch.setattr(Waiting, "pause", pause)
    with resources, pytest.raises(ConfigError, match=r"trains here and samples itself.*--rollouts wait"):
        if first == "trainer":
            resources.enter_context(trainer)
        sample(tmp_path, wait_limit_s=10)


def test_a_sampler_looks_again_for_a_trainer_when_its_own_sign_of_life_can_be_seen(whole, monkeypatch):
    """The trainer looked for samplers just before, and did not find this one."""
    with contextlib.ExitStack() as resources:

        class Slow(SignOfLife):
            def __enter__(self):
                resources.enter_context(RunLock(whole[1], samples=True))
                return super().__enter__()

        monkeypatch.setattr(sampler_process, "SignOfLife", Slow)
        with pytest.raises(ConfigError, match=r"trains here and samples itself.*--rollouts wait"):
            sample(whole[1])
    assert not list((whole[1] / "samplers").glob("*.json"))


def test_a_finished_run_does_not_wait_for_a_dead_sampler_of_another_machine(whole, apart, capsys):
    sign = apart / "samplers" / "elsewhere.json"
    sign.write_bytes(owned_files.text_of(owned_files.this_process() | {"machine": "far"}))
    train(whole[0], apart)
    sign.unlink()
    assert "finished" in (said := capsys.readouterr().out) and "sign of life" not in said


def test_a_trainer_without_a_sampler_and_a_sampler_without_the_right_weights(place, whole):
    config, folder = whole[0], place / "alone"
    with pytest.raises(
        ConfigError, match=r"rollouts of stage 0 \(0 of 2 shards; 0 samplers\).*mugrpo sample"
    ):
        train(config, folder, wait_limit_s=0.1)
    policy = folder / "policies" / "00000"
    about = json.loads((policy / "policy.json").read_text())
    (policy / "policy.json").write_text(json.dumps(about | {"rollout_settings": "other"}))
    with pytest.raises(ConfigError, match=r"another config, other weights .*rollout_settings other, here"):
        sample(folder, wait_limit_s=5)
    (policy / "policy.json").write_text(json.dumps(about))
    reward, text = place / "lag_rewards.py", (place / "lag_rewards.py").read_text()
    reward.write_text(text.replace("1.0 /", "2.0 /"))
    with pytest.raises(
        ConfigError, match=r"or other code .*code {'lag_rewards:short': '\w+'}, here {'lag_rew"
    ):
        sample(folder, wait_limit_s=5)
    reward.write_text(text)
    weights = max((policy / "weights").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"damaged, its checksum differs.*start the trainer again"):
        sample(folder, wait_limit_s=5)
    assert not list(folder.glob("samplers/claims/*/*")) and not list(folder.glob("samplers/*.json"))
    with pytest.raises(ConfigError, match="--rollouts wait: a replay has its rollouts already"):
        train(configs.changed(config, [f"replay.run={whole[1]}"]), place / "no", wait_limit_s=1)


def test_a_waiting_trainer_says_why_no_sampler_is_alive(place, whole, monkeypatch):
    config, folder = whole[0], place / "ended"
    (folder / "samplers").mkdir(parents=True)
    sign = folder / "samplers" / "elsewhere.json"
    sign.write_bytes(owned_files.text_of(owned_files.this_process() | {"machine": "far"}))
    monkeypatch.setattr("mugrpo_jax.runs.sampler_claims._DEAD_S", 0.1)
    with pytest.raises(
        Absent, match=r"\(0 of 2 shards; 0 samplers, the last sign of life was seen \d s ago\)"
    ):
        train(config, folder, wait_limit_s=0.5)
    sign.unlink()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
        patch.setattr(RolloutFolder, "write_shard", full)
        sample(folder)
    with pytest.raises(
        Absent, match=r"shards; 0 samplers; process \d+ on \S+ ended: .*No space left on device\)"
    ):
        train(config, folder, wait_limit_s=0.1)


def test_a_sampler_is_alive_while_it_works_and_its_last_wait_is_in_its_log(place, whole, monkeypatch):
    config, folder = whole[0], place / "last-wait"
    with pytest.raises(ConfigError, match="mugrpo sample"):
        train(config, folder, wait_limit_s=0.1)
    original, moved = SignOfLife.moved, set()

    def note(self):
        moved.add(sys._getframe(1).f_code.co_name)
        original(self)

    monkeypatch.setattr(SignOfLife, "moved", note)
    with pytest.raises(ConfigError, match="for the policy at the start of stage 1"):
        sample(folder, wait_limit_s=0.3)
    # It is alive while it waits, claims shards, samples tokens and writes a shard after the last score.
    assert moved == {"_work", "_free_shards", "_serve", "write_shard"}
    (log,) = folder.glob("samplers/*.jsonl")
    *done, last = map(json.loads, log.read_text().splitlines())
    assert [(record["stage"], record["shards"]) for record in done] == [(0, [0, 1]), (1, [0, 1])]
    assert last["shards"] == [] and 0.3 <= last["seconds"]["wait/policy"] < 5
    assert "1 with a log: 4 shards, " in sampler_facts(folder, 100.0, 10.0, (), 2)
    for manifest in folder.glob("rollouts/*/manifest.json"):  # has only the time of the work
        assert not any(name.startswith("wait/") for name in json.loads(manifest.read_text())["seconds"])
