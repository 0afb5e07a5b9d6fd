"""Only the owner of a claim writes or deletes a shard, so what is committed stays what it is."""

import types

import numpy as np
import pytest

from mugrpo_jax.files import storage
from mugrpo_jax.loop.claimed_rollouts import ClaimedRollouts
from mugrpo_jax.rollouts import DamagedRollouts, Group, Rollout, read_groups, record_files
from mugrpo_jax.rollouts.behavior_parts import PartFolder, join_parts
from mugrpo_jax.runs.sampler_claims import Claims, SignOfLife


@pytest.fixture
def samplers(tmp_path):
    """Two samplers of one stage; the first one can be made to look dead."""

    def rollouts(sign):
        return ClaimedRollouts(
            tmp_path / "stage-000",
            {"stage": 0},
            prompts=2,
            prompts_per_shard=1,
            same_run=types.SimpleNamespace(check=lambda: None),
            sign=sign,
            claims=Claims(sign, 0),
        )

    with SignOfLife(tmp_path) as one, SignOfLife(tmp_path) as two:
        one.owner["started"] = "1"  # its claims look like those of a process that was killed
        yield rollouts(one), rollouts(two)


def groups(shard, reward):
    rollout = Rollout(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), reward, "stop")
    return [Group(shard, f"problem-{shard}", np.zeros(2, np.int32), (rollout, rollout))]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_sampler_that_hung_does_not_replace_the_shard_of_its_successor(samplers, capsys):
    late, successor = samplers
    assert late.claim(0) and successor.claim(0)
    successor.write_shard(0, groups(0, 1.0))
    before = content(successor.folder)
    late.write_shard(0, groups(0, 0.0))
    assert content(successor.folder) == before
    successor.claims.remove()  # the stage is complete
    late.write_shard(0, groups(0, 0.0))
    assert content(successor.folder) == before
    assert "shard-00000.arrayrecord: not written, another sampler took it over" in capsys.readouterr().out


def test_a_sampler_that_hangs_between_the_two_files_of_a_shard_leaves_that_of_its_successor(
    samplers, monkeypatch
):
    late, successor = samplers
    assert late.claim(0)
    write = record_files.write_json

    def hang(*arguments, **options):
        monkeypatch.setattr(record_files, "write_json", write)
        write(*arguments, **options)
        assert successor.claim(0)
        successor.write_shard(0, groups(0, 1.0))

    monkeypatch.setattr(record_files, "write_json", hang)
    late.write_shard(0, groups(0, 0.0))
    assert successor.missing_shards() == [1]
    assert [group.rollouts[0].reward for group in read_groups(successor, [0])] == [1.0]


def test_parts_are_left_to_the_successor_too(samplers):
    late, successor = samplers
    parts = [[PartFolder(n, source, rollouts) for n, source in enumerate("ab")] for rollouts in samplers]
    assert late.claim(0)
    parts[0][0].write_shard(0, groups(0, 1.0))
    assert successor.claim(0) and parts[1][0].missing_shards([0]) == []  # its work is not lost
    parts[0][1].write_shard(0, groups(0, 0.0))
    assert parts[1][1].missing_shards([0]) == [0]
    parts[1][1].write_shard(0, groups(0, 1.0))
    samples = {0: [[0, 1], [2, 3]]}
    join_parts(parts[0], 0, samples)
    assert successor.missing_shards([0]) == [0]  # and the parts are still there
    join_parts(parts[1], 0, samples)
    assert successor.missing_shards([0]) == [] and (late.written, successor.written) == ([], [0])
    join_parts(parts[0], 0, samples)  # the parts are gone
    assert successor.claim(1)
    with pytest.raises(DamagedRollouts, match="part-0-shard-00001"):
        join_parts(parts[1], 1, {1: [[0], [1]]})


def test_a_shard_that_is_there_is_not_replaced_even_by_one_that_hangs_while_it_gets_its_name(
    samplers, monkeypatch
):
    late, successor = samplers
    assert late.claim(0)
    publish = record_files.publish_new

    def hang(*arguments):
        monkeypatch.setattr(record_files, "publish_new", publish)
        assert successor.claim(0)
        with monkeypatch.context() as patch:
            patch.setattr(storage, "_PROCESS", "successor")  # its temporary files have names of their own
            successor.write_shard(0, groups(0, 1.0))
        return publish(*arguments)

    monkeypatch.setattr(record_files, "publish_new", hang)
    late.write_shard(0, groups(0, 0.0))
    assert [group.rollouts[0].reward for group in read_groups(successor, [0])] == [1.0]
    assert (late.written, successor.written) == ([], [0])
    assert not list(successor.folder.glob("*.tmp"))


def test_two_samplers_that_find_the_same_damage_keep_what_one_of_them_wrote_again(samplers, monkeypatch):
    late, successor = samplers
    late.sign.owner["started"] = successor.sign.owner["started"]  # both are alive
    assert late.claim(0)
    late.write_shard(0, groups(0, 1.0))
    late.claims.release()
    late.path(0).write_bytes(b"damaged")
    problems = ClaimedRollouts.problems

    def slow(self, shards=None):
        found = problems(self, shards)
        if self is late and found:
            monkeypatch.setattr(ClaimedRollouts, "problems", problems)
            successor.delete_damaged()
            assert successor.claim(0)
            successor.write_shard(0, groups(0, 1.0))
            successor.claims.release()
        return found

    monkeypatch.setattr(ClaimedRollouts, "problems", slow)
    late.delete_damaged()
    assert successor.missing_shards([0]) == []
    late.path(0).write_bytes(b"damaged")
    assert late.claim(0)
    successor.delete_damaged()  # left to the owner of the claim
    assert successor.path(0).exists()
