"""Shards leave for the disk when their last score is in, whatever the order in which responses come."""

import dataclasses
import errno
import threading
from concurrent.futures import Future

import msgpack
import numpy as np
import pytest

from mugrpo_jax import files
from mugrpo_jax.rollouts import Group, Rollout, RolloutError, RolloutFolder, read_groups, record_files
from mugrpo_jax.rollouts.behavior_parts import PartFolder, join_parts
from mugrpo_jax.rollouts.records import decode, encode
from mugrpo_jax.rollouts.shard_writer import ShardWriter
from mugrpo_jax.rollouts.summaries import summarise
from mugrpo_jax.sampling import Response
from mugrpo_jax.tasks import Problem, Score, make_scorer

PROBLEMS = {i: Problem(f"problem-{i}", "", "") for i in range(5)}


@pytest.fixture
def stage(tmp_path):
    return RolloutFolder(tmp_path / "stage-000", {"fingerprint": "abc"}, prompts=5, prompts_per_shard=2)


def three(_):
    """The behaviors of a prompt: three samples of the current policy."""
    return dict.fromkeys(range(3), "current")


def response(index: int, sample: int) -> Response:
    tokens = np.arange(1 + index + sample, dtype=np.int32)
    return Response(index, sample, np.full(3, index, np.int32), tokens, -tokens.astype(np.float32), "stop")


def scored(value: float) -> "Future[Score]":
    future: Future[Score] = Future()
    future.set_result(Score(value))
    return future


def fill(writer: ShardWriter, shards: tuple[int, ...]) -> None:
    names = [(i, n) for shard in shards for i in writer.stage.shard_prompts(shard) for n in range(3)]
    for at in np.random.default_rng(0).permutation(len(names)):
        index, sample = names[at]
        writer.add(response(index, sample), scored(10 * index + sample))


def test_groups_are_in_order_with_their_own_scores(stage):
    with ShardWriter(stage, PROBLEMS, three) as writer:
        fill(writer, (0, 1, 2))
        writer.finish()
        assert (writer.scored, writer.reward) == (
            15,
            sum(10 * i + n for i in range(5) for n in range(3)),
        )
    stage.commit()
    for index, group in enumerate(read_groups(stage)):
        assert (group.index, group.problem) == (index, f"problem-{index}")
        assert group.prompt.tolist() == [index] * 3
        assert group.rewards.tolist() == [10 * index, 10 * index + 1, 10 * index + 2]
        assert [len(rollout.tokens) for rollout in group.rollouts] == [1 + index, 2 + index, 3 + index]


def test_responses_that_end_without_an_answer_are_counted(stage):
    """Right answers and unfinished responses are never malformed; without a reader nobody knows."""
    cut = dataclasses.replace(response(1, 2), finish_reason="length")
    added = [(response(0, 0), 0.0, "so 7"), (response(0, 1), 0.0, "so"), (response(0, 2), 1.0, "so")]
    added += [(response(1, 0), 0.0, "so"), (response(1, 1), 0.5, "9"), (cut, 0.0, "so")]
    with ShardWriter(stage, PROBLEMS, three, lambda text: text if text[-1].isdigit() else None) as writer:
        for made, value, text in added:
            writer.add(made, scored(value), text)
        writer.finish()
        writer.answer_of = None
        fill(writer, (1, 2))
        writer.finish()
    groups = list(read_groups(stage))
    found = [[rollout.malformed for rollout in group.rollouts] for group in groups]
    assert found == [[False, True, False], [True, False, False]] + [[None] * 3] * 3
    assert summarise(groups[:2])["malformed"] == 2 and "malformed" not in summarise(groups[2:])


def test_each_of_several_rewards_is_stored_with_its_response_and_added_up(stage):
    with ShardWriter(stage, PROBLEMS, three, lambda text: None) as writer:
        for index in range(5):
            for sample in range(3):
                parts = (("right", float(sample > 1)), ("short", -0.5 * index))
                score: Future[Score] = Future()
                score.set_result(Score(parts[0][1] + 2 * parts[1][1], parts=parts))
                writer.add(response(index, sample), score, "no answer")
        writer.finish()
    manifest = stage.commit()
    assert manifest["reward_parts"] == {"right": 5.0, "short": -15.0} and manifest["reward"] == -25.0
    *_, last = read_groups(stage)
    assert [r.parts for r in last.rollouts] == [{"right": float(n > 1), "short": -2.0} for n in range(3)]
    # The first reward says what is right, whatever the sum is.
    assert [rollout.malformed for rollout in last.rollouts] == [True, True, False]
    # A single reward is stored as it always was, without parts.
    (single,) = last.rollouts[:1]
    records = encode(dataclasses.replace(last, rollouts=(dataclasses.replace(single, parts={}),)))
    assert "parts" not in msgpack.unpackb(records[1]) and decode(records).rollouts[0].parts == {}


def test_a_response_whose_environment_failed_has_a_part_of_every_reward(stage):
    weights = {"arithmetic": 2.0, "exact": 0.5}
    with (
        make_scorer(weights, workers=0, failed=-1.0) as scorer,
        ShardWriter(stage, PROBLEMS, three) as writer,
    ):
        for index in range(5):
            for sample in range(3):
                failed = (index, sample) in [(0, 0), (2, 1)]  # the first of a stage, and one inside a shard
                score = (
                    scorer.fail("error", "environment: Oops")
                    if failed
                    else scorer.submit("", Problem("p", "", "3"))
                )
                writer.add(response(index, sample), score, "")
        writer.finish()
    manifest = stage.commit()
    assert manifest["reward_parts"] == {"arithmetic": -2.0, "exact": -2.0}
    assert manifest["reward"] == 2 * -2.5 and manifest["status"] == {"error": 2, "ok": 13}


def test_a_shard_waits_for_its_last_score_and_holds_up_no_other(stage):
    late: Future[Score] = Future()
    with ShardWriter(stage, PROBLEMS, three) as writer:
        for index in (0, 1):
            for sample in range(3):
                writer.add(response(index, sample), late if (index, sample) == (0, 1) else scored(1.0))
        fill(writer, (1,))
        writer.add(response(4, 0), scored(1.0))  # a shard that is not complete
        assert writer.finish(lambda: True) < 1.0
        assert stage.missing_shards() == [0, 2]
        threading.Timer(0.2, late.set_result, [Score(7.0)]).start()
        assert writer.finish() > 0.1
        assert stage.missing_shards() == [2]


def test_what_fails_while_writing_is_raised_where_responses_are_added(stage):
    stage.folder.mkdir()
    files.temporary_for(stage.path(0)).mkdir()  # where the first shard would be written
    failure = pytest.raises(RolloutError, match=r"shard-00000\.arrayrecord: cannot be written")
    with ShardWriter(stage, PROBLEMS, three) as writer, failure:
        fill(writer, (0,))
        writer.finish()  # if it was not written before the last response came


@pytest.mark.parametrize("full", ["flush", "publish", "write_json"])
def test_a_shard_that_does_not_fit_on_the_disk_leaves_nothing_behind(stage, monkeypatch, full):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_files, full, fail)
    path = stage.path(0)
    with pytest.raises(
        RolloutError, match=r"0\.arrayrecord: cannot be written \(No space left on device\); "
    ):
        record_files.write_records(path, [b"one", b"two"], {})
    assert not list(path.parent.glob("*.tmp")) and not path.exists()


def test_parts_of_several_models_are_joined_in_the_order_of_the_samples(stage):
    """The first model writes samples 0 and 2, the second one sample 1, but nothing for the second prompt."""
    stage = dataclasses.replace(stage, prompts=2)
    samples = {0: [[0, 2], [1]], 1: [[0, 1, 2], []]}
    parts = [PartFolder(number, source, stage) for number, source in enumerate(("a", "b"))]
    assert [part.missing_shards([0]) for part in parts] == [[0], [0]]

    def rollout(index, sample):
        found = response(index, sample)
        return Rollout(found.tokens, found.logprobs, float(sample), "stop", behavior=f"model-{sample % 2}")

    for part in parts:
        groups = [
            Group(
                i, f"problem-{i}", np.full(3, i, np.int32), tuple(rollout(i, n) for n in split[part.number])
            )
            for i, split in samples.items()
            if split[part.number]
        ]
        part.write_shard(0, groups)
    assert [part.missing_shards([0]) for part in parts] == [[], []]
    # A part of another model, or of another run, is not taken for this one.
    assert PartFolder(0, "b", stage).missing_shards([0]) == [0]
    other = dataclasses.replace(stage, identity={"fingerprint": "def"})
    assert PartFolder(0, "a", other).missing_shards([0]) == [0]
    join_parts(parts, 0, samples)
    stage.commit()
    for group in read_groups(stage):
        assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0]
        assert [len(rollout.tokens) for rollout in group.rollouts] == [1 + group.index + n for n in range(3)]
    assert not list(stage.folder.glob("part-*"))


def test_parts_may_be_removed_by_one_process_while_another_one_writes(stage, monkeypatch):
    """Samplers that share a stage are at different shards, so nothing that both need may be removed."""
    mine, other = (PartFolder(0, "a", stage) for _ in range(2))
    found = response(0, 0)
    group = Group(
        0, "problem-0", np.zeros(3, np.int32), (Rollout(found.tokens, found.logprobs, 0.5, "stop"),)
    )
    other.write_shard(1, [group])
    made = record_files.make_folder

    def then_the_other_one_removes(path):
        made(path)
        other.remove_shard(1)
        other.remove_shard(1)  # of a shard that is removed already

    monkeypatch.setattr(record_files, "make_folder", then_the_other_one_removes)
    mine.write_shard(0, [group])
    assert mine.missing_shards([0, 1]) == [1]


def test_a_shard_of_one_model_alone_needs_no_part_of_the_other(stage):
    parts = [PartFolder(number, source, stage) for number, source in enumerate(("a", "b"))]
    found = response(0, 0)
    rollouts = (Rollout(found.tokens, found.logprobs, 0.5, "stop"),) * 2
    parts[1].write_shard(2, [Group(4, "problem-4", np.zeros(3, np.int32), rollouts)])
    join_parts(parts, 2, {4: [[], [0, 1]]})
    assert stage.missing_shards() == [0, 1] and not parts[1].path(2).exists()
