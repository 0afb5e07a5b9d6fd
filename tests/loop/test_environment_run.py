"""A run with an environment: masks on disk, every end counted, and a kill changes nothing."""

import json
import sys

import jax
import numpy as np
import pytest
from tiny_run import TINY_MODEL

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError
from mugrpo_jax.evaluation.benchmarks import benchmark, default_settings, named_tasks
from mugrpo_jax.loop import preflight, stages
from mugrpo_jax.loop.generation_phase import generate_stage
from mugrpo_jax.loop.held_out import held_out_accuracy
from mugrpo_jax.loop.resume import resume, save_if_due
from mugrpo_jax.loop.run_context import open_run
from mugrpo_jax.report.live import LiveReport
from mugrpo_jax.report.rollout_text import describe_rollouts
from mugrpo_jax.rollouts import RolloutFolder, encode, open_stage, read_groups

CONFIG = (
    TINY_MODEL
    + """\
task: {name: tool_sums, options: {difficulty: 2, train: 64, test: 4}, reward: own_environments:odd,
       scorers: 0}
environment: {name: "own_environments:count", stop: ["=", "+", "-", ",", ";"], max_turns: 3, workers: 0}
sampling: {max_prompt_tokens: 8, max_response_tokens: 24, slots: 8, prompts_per_shard: 2}
batch: {prompts_per_update: 4, responses_per_prompt: 4, updates_per_stage: 1, stages: 1,
        tokens_per_micro_batch: 128, length_multiple: 32}
evaluation: {problems: 2}
report: {samples: 0}
track_drift: false
"""
)
ENVIRONMENTS = """
def count(conversation, problem):
    assert problem.answer and conversation[0] == {"role": "user", "content": problem.prompt}
    turn = conversation[-1]["content"]
    if turn.endswith("-") and len(turn) % 3 == 0:
        raise ValueError("no minus")
    return None if turn.endswith(";") else str(10 + len(conversation))
def odd(text, problem):
    assert text == problem.conversation[-1]["content"]
    return float((len(text) + len(problem.conversation)) % 4 > 1)
def raises(conversation, problem): raise KeyError("x")
def number(conversation, problem): return 7
def letters(conversation, problem): return "hello"
"""


@pytest.fixture(scope="module")
def place(program_folder):
    (program_folder / "run.yaml").write_text(CONFIG)
    (program_folder / "own_environments.py").write_text(ENVIRONMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(program_folder)
        patch.setattr(sys, "path", [*sys.path, str(program_folder)])
        patch.setattr(LiveReport, "_draw", lambda self, **_: None)
        one = jax.devices()[:1]  # so that `benchmark` uses the programs that the run has compiled
        patch.setattr(jax, "devices", lambda *_: one)
        yield program_folder
    sys.modules.pop("own_environments", None)


def begin(place, folder):
    """The start of a run: everything before its first update."""
    with open_run(configs.load(place / "run.yaml"), folder) as run:
        state, cursor = resume(run)
        save_if_due(run, state, cursor, accuracy=held_out_accuracy(run, state, cursor))
        generate_stage(run, state, 0, cursor)
    return folder


@pytest.fixture(scope="module")
def whole(place):
    return begin(place, place / "whole")


def outcome(run):
    """Everything that must be the same: metrics without seconds, rollouts."""
    journal = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in journal:
        record.pop("seconds", None)
    groups = read_groups(open_stage(run / "rollouts" / "stage-000"))
    return journal, [encode(group) for group in groups]


def test_every_end_of_a_response_is_counted_and_masks_are_stored(whole):
    journal = outcome(whole)[0]
    (stage,) = (record for record in journal if record["kind"] == "stage")
    rollouts = [r for g in read_groups(open_stage(whole / "rollouts" / "stage-000")) for r in g.rollouts]
    finishes = {r.finish for r in rollouts}
    assert {"turns", "environment"} < finishes <= {"turns", "environment", "length", "stop"}
    assert stage["finish"] == {name: sum(r.finish == name for r in rollouts) for name in sorted(finishes)}
    failed = [r for r in rollouts if r.finish == "environment"]
    assert {(r.status, r.reward) for r in failed} == {("error", 0.0)} and stage["status"]["error"] == len(
        failed
    )
    masked = [r for r in rollouts if r.mask is not None]
    assert stage["answered"] == len(masked) / 16 > 0.3 and stage["equal_groups"] < 1
    assert all((r.logprobs[~r.mask] == 0).all() and (r.logprobs[r.mask] < 0).all() for r in masked)
    assert all(1 <= np.diff(r.mask).sum() // 2 <= 2 for r in masked)  # at most three turns
    assert stage["response_tokens"] == sum(r.written for r in rollouts)
    assert "[environment: 1" in describe_rollouts(whole, show=16)
    (held_out,) = (record for record in journal if record["kind"] == "evaluation")
    assert held_out["answered"] > 0


def test_a_run_that_is_killed_between_two_shards_ends_as_if_nothing_had_happened(place, whole, monkeypatch):
    write, written = RolloutFolder.write_shard, []

    def killed(self, shard, groups):
        if written:
            raise KeyboardInterrupt
        written.append(shard)
        write(self, shard, groups)

    monkeypatch.setattr(RolloutFolder, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        begin(place, place / "killed")
    monkeypatch.setattr(RolloutFolder, "write_shard", write)
    begin(place, place / "killed")
    assert len(written) == 1 and outcome(place / "killed") == outcome(whole)


def test_a_run_that_is_killed_between_two_updates_ends_as_if_nothing_had_happened(place, monkeypatch):
    keys = ["batch.updates_per_stage=2", "batch.prompts_per_update=2", "checkpoints.every=1"]
    config, save = configs.load(place / "run.yaml", keys), stages.save_if_due

    def weights(run):
        saved = []

        def watched(context, state, cursor, **more):
            save(context, state, cursor, **more)
            saved.append(jax.device_get(state.params))
            if run == "cut" and cursor.updates == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(stages, "save_if_due", watched)
        stages.train(config, place / run)
        return saved[-1]

    with pytest.raises(KeyboardInterrupt):
        weights("cut")
    monkeypatch.setattr(stages, "save_if_due", save)
    (place / "cut").rename(place / "resumed")
    jax.tree.map(np.testing.assert_array_equal, weights("resumed"), weights("straight"))
    journal, rollouts = outcome(place / "resumed")
    assert (journal, rollouts) == outcome(place / "straight")
    assert [record["updates"] for record in journal if record["kind"] == "update"] == [1, 2]


def test_the_command_eval_asks_the_environment_of_the_run(place, whole):
    config = configs.load(place / "run.yaml")
    tasks = named_tasks(None, [], place / "eval.jsonl", config)
    settings = default_settings(config) | {"samples": 2, "slots": 8}
    (result,) = benchmark(whole, tasks, **settings)
    rows = [json.loads(line) for line in (place / "eval.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and result.answered == np.mean([row["messages"] > 0 for row in rows]) > 0
    row = max(rows, key=lambda row: row["messages"])
    assert row["conversation"][2] == {"role": "user", "content": "12"}
    assert row["text"] == row["conversation"][-1]["content"]


@pytest.mark.parametrize(
    "changes, reason",
    [
        (["environment.name=own_environments:cont"], "has no 'cont'; did you mean count"),
        (["environment.name=calculater"], "environment.name: environment is 'calculater'; did you mean"),
        (
            ["environment.name=own_environments:raises"],
            "fails for problem .*: error \\(KeyError: 'x' \\(\\w+.py:\\d+\\)\\); mend",
        ),
        (["environment.name=own_environments:number"], "invalid \\(returned 7; possible: text, or None"),
        (
            ["environment.name=own_environments:letters"],
            "its message has no tokens: CharTokenizer: character",
        ),
        (["environment.options={a: 1}"], "unexpected keyword argument 'a'"),
        (["environment.stop=['x']"], "environment.stop: CharTokenizer: character 'x' is not in the alphabet"),
        (["environment.stop=['']"], "environment.stop.0. must not be empty"),
        (["environment.name=null"], "environment.*stop: it is set, but name is null"),
    ],
)
def test_an_environment_that_cannot_run_is_one_clear_line_before_any_work(place, changes, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        preflight.dry_run(configs.load(place / "run.yaml", changes), place / "none")
    assert "\n" not in str(error.value) and not (place / "none").exists()
