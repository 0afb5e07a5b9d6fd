"""Samples token by token, and the report that a run writes about itself."""

import dataclasses
import json

import numpy as np
import pytest

from mugrpo_jax import config as configs
from mugrpo_jax import report
from mugrpo_jax.loop import stages
from mugrpo_jax.report import live, samples
from mugrpo_jax.rollouts import Group, Rollout, open_stage, read_groups, shaped_rewards
from mugrpo_jax.setup.run_setup import load_run_model
from mugrpo_jax.tasks.task import Problem

CONFIG = [
    "model.source=tiny",
    "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 24}",
    "model.compute_dtype=float32",
    "model.sampling_dtype=float32",
    "model.remat=none",
    "task={name: arithmetic, options: {difficulty: 1, train: 64, test: 4}, scorers: 0}",
    "sampling={max_prompt_tokens: 8, max_response_tokens: 24, slots: 16, prompts_per_shard: 8}",
    "batch={prompts_per_update: 4, responses_per_prompt: 4, updates_per_stage: 1, stages: 2, "
    "tokens_per_micro_batch: 128, length_multiple: 32}",
    "optimizer.learning_rate=0",
    "evaluation.problems=4",
    "report.samples=6",
    "tracking.tensorboard=true",
]


@pytest.fixture(scope="module")
def config():
    return configs.load(None, CONFIG)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run whose weights never change, so that every ratio is 1."""
    scored = []
    score = samples.SampleScorer._score

    def counted(self, params, tokens):
        found = score(self, params, tokens)
        scored.append(self._logprobs._cache_size())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples.SampleScorer, "_score", counted)
        folder = stages.train(config, tmp_path_factory.mktemp("live") / "run")
    assert set(scored) == {1}  # one program for the whole run
    return folder


def test_a_run_leaves_samples_of_each_stage_under_the_policy_that_it_has(run):
    files = sorted(path.name for path in (run / "samples").iterdir())
    assert files == ["stage-000.json", "stage-001.json"]
    for name in files:
        found = json.loads((run / "samples" / name).read_text())
        assert len(found) == 6
        for sample in found:
            assert len(sample["pieces"]) == len(sample["logp"]) == len(sample["behavior"])
            assert sample["logp"] == pytest.approx(sample["behavior"], abs=2e-4)
            assert sample["vetoed"] == sample["triggers"] == []
            assert int(sample["answer"]) == eval(sample["prompt"].removesuffix("="))


def test_a_run_says_how_many_responses_are_malformed(run, config):
    tokenizer = load_run_model(config)[0].tokenizer
    for record in report.read_run(run).generations:
        groups = read_groups(open_stage(run / "rollouts" / f"stage-{record['stage']:03d}"))
        found = [rollout for group in groups for rollout in group.rollouts]
        texts = [tokenizer.decode(rollout.tokens) for rollout in found if rollout.finish == "stop"]
        malformed = sum(not text.rpartition(";")[2].strip() or ";" not in text for text in texts)
        assert record["malformed"] == malformed / len(found) > 0
    for record in report.read_run(run).evaluations:
        assert 0 < record["malformed"] + record["truncated"] <= 1 - record["accuracy"]


def test_a_run_leaves_its_page(run):
    page = (run / "report.html").read_text()
    assert "2 of 2" in page and "finished" in page and "CPU" in page.upper()
    assert page.count('"pieces"') == 12
    found = report.read_run(run)
    assert found.environment["jax"] and found.finished
    assert sum(sum(phases.values()) for phases in found.phases.values()) >= found.seconds > 0
    assert list((run / "tensorboard").glob("events*"))


def test_a_report_that_fails_is_said_and_harms_nobody(config, run, capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no space left")

    policy, params = load_run_model(config)
    monkeypatch.setattr(live, "write_page", broken)
    monkeypatch.setattr(live, "pick_samples", broken)
    monkeypatch.setattr(live, "_FIRST", 0.0)
    reporter = live.LiveReport(run, policy)
    reporter.after_stage(params, 0, None)
    reporter.finish()
    said = capsys.readouterr().err
    assert said == "report: RuntimeError: no space left; training goes on\n" * 3


def test_pages_take_a_small_share_of_a_run(config, run, monkeypatch):
    drawn, now = [], [0.0]

    def slow(*_):
        drawn.append(now[0])
        now[0] += 2.0

    policy, params = load_run_model(dataclasses.replace(config, report=configs.ReportSection(samples=0)))
    monkeypatch.setattr(live, "write_page", slow)
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    reporter = live.LiveReport(run, policy)
    for _ in range(100):
        now[0] += 1.0  # a stage
        reporter.after_stage(params, 0, None)
    assert drawn == [30.0, 72.0]  # 40 s of silence after 2 s of drawing
    reporter.finish()
    assert len(drawn) == 3


def group(index, rewards):
    tokens = np.array([5, 6, 7, 1], np.int32)
    rollouts = [Rollout(tokens, np.full(4, -0.5, np.float32), reward, "stop") for reward in rewards]
    return Group(index, f"p{index}", np.array([2, 3], np.int32), tuple(rollouts))


def test_candidates_are_best_and_worst_of_groups_that_teach_something():
    groups = [group(0, [1, 1, 1]), group(1, [0, 1, 0]), group(2, [0.5, 1, 0])]
    found = samples.candidates(groups, shaped_rewards(groups, 24, 0), 5, "mean")
    assert [(row.group.index, row.rollout.reward) for row in found] == [
        (1, 1),
        (1, 0),
        (2, 1),
        (2, 0),
        (0, 1),
    ]
    assert found[1].advantage == pytest.approx(-1 / 3) and found[-1].advantage == 0


def test_candidates_have_the_advantages_that_the_updates_have():
    groups = [group(0, [1, 1])]
    long = dataclasses.replace(groups[0].rollouts[0], tokens=np.arange(9, dtype=np.int32))
    groups = [dataclasses.replace(groups[0], rollouts=(long, groups[0].rollouts[1]))]
    found = samples.candidates(groups, shaped_rewards(groups, 10, 5), 2, "mean")
    assert [row.advantage for row in found] == pytest.approx([0.4, -0.4])  # 9 of 10 tokens: 0.8 less


def test_half_of_the_samples_are_wrong_the_most_abandoned_first():
    groups = [group(i, [0, 1]) for i in range(4)]
    scored = []
    for row in samples.candidates(groups, shaped_rewards(groups, 24, 0), 8, "mean"):
        drop = float(row.group.index) if row.advantage < 0 else 0.0
        scored.append((row, row.rollout.logprobs - drop * np.array([0, 0, 1, 0])))
    chosen = [(row.group.index, row.advantage > 0) for row, _ in samples.choose(scored, 4)]
    assert chosen == [(3, False), (2, False), (0, True), (1, True)]
    assert len(samples.choose(scored, 100)) == 8


def test_a_sample_shows_what_the_objective_vetoes(config):
    groups = [group(0, [0, 1])]
    (right, wrong) = samples.candidates(groups, shaped_rewards(groups, 24, 0), 2, "mean")
    tokenizer = load_run_model(config)[0].tokenizer
    logp = np.array([-0.5, -20.0, -0.5, -0.5], np.float32)
    found = samples.describe(wrong, logp, config, tokenizer)
    assert (found["triggers"], found["vetoed"]) == ([1], [2, 3])
    found = samples.describe(right, logp, config, tokenizer)
    assert (found["triggers"], found["vetoed"]) == ([], [])
    grpo = configs.load(None, [*CONFIG, "objective.name=grpo"])
    assert samples.describe(wrong, logp, grpo, tokenizer)["vetoed"] == []


def test_only_wanted_answers_are_looked_up_and_long_ones_are_cut():
    problems = [Problem("a", "", "1"), Problem("b", "", "x" * 900), Problem("c", "", "3")]
    found = samples.expected_answers(iter(problems), {"a", "b"})
    assert found == {"a": "1", "b": "x" * samples.MOST_ANSWER + "…"}


def test_pieces_join_to_the_text_and_split_no_character():
    class Bytes:
        """A tokenizer whose tokens are bytes."""

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    text = "2·3 = 6 ✓ 🙂!"
    found = samples.pieces(Bytes(), list(text.encode()))
    assert "".join(found) == text and len(found) == len(text.encode())
    assert "\ufffd" not in "".join(found)
    assert samples.pieces(Bytes(), [0xFF, 65, 66]) == ["", "\ufffdA", "B"]


def test_a_page_shows_as_many_samples_as_it_can_hold(run, tmp_path, monkeypatch):
    history = report.read_run(run)
    size = sum(path.stat().st_size for path in (run / "samples").iterdir())
    monkeypatch.setattr(samples, "PAGE_BYTES", size // 2 + 1)
    shown, left_out = samples.page_samples([history])
    assert left_out == 1 and {sample["stage"] for sample in shown} == {1}
    monkeypatch.setattr(samples, "MOST_TOKENS", 3)
    shown, _ = samples.page_samples([history])
    assert max(len(sample["pieces"]) for sample in shown) == 3
    assert any("the first 3 of" in sample.get("cut", "") for sample in shown)
