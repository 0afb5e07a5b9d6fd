"""The estimate of the time that a run still needs."""

import pytest

from mugrpo_jax import config as configs
from mugrpo_jax.runs.time_left import TimeLeft

SIZES = ["batch.updates_per_stage=4", "batch.stages=3"]


def update(number, seconds, compiled=0.0):
    return {"kind": "update", "updates": number, "seconds": {"update": seconds, "compile": compiled}}


def evaluation(updates):
    return {"kind": "evaluation", "updates": updates, "seconds": {"evaluate": 12.0, "compile": 2.0}}


def stage(number, seconds):
    return {"kind": "stage", "updates": 4 * number, "stage": number, "seconds": {"generate": seconds}}


def test_the_estimate_counts_updates_generations_and_evaluations_of_all_stages():
    left = TimeLeft(configs.load(None, SIZES))
    start = [evaluation(0), stage(0, 100.0)]
    left.restart(start)
    assert left.seconds() is None and left.headline() == {} and left.clause() == ""  # no update yet
    left.write(update(1, 31.0, compiled=30.0))
    assert left.seconds() == 11 * 1.0 + 2 * 100.0 + 3 * 10.0
    left.write(update(2, 3.0))  # the mean of both is 2
    assert left.seconds() == 10 * 2.0 + 2 * 100.0 + 3 * 10.0
    assert left.headline() == {"whole run": "4 min 10 s left"}
    for record in (update(3, 2.0), update(4, 2.0), evaluation(4), stage(1, 50.0)):
        left.write(record)
    assert left.clause() == "; about 1 min 26 s left for the whole run"  # 8 updates, 1 stage, 2 evaluations
    left.restart([*start, update(1, 1.0)])  # the run resumes from an earlier checkpoint
    assert left.seconds() == 241.0


@pytest.mark.parametrize(("every", "count"), [(None, 3), (3, 4), (5, 3), (100, 1)])
def test_evaluations_inside_stages_are_counted(every, count):
    left = TimeLeft(configs.load(None, [*SIZES, f"evaluation.every={every or 'null'}"]))
    left.restart([evaluation(0), update(1, 0.0)])
    assert left.seconds() == 10.0 * count  # at 12 and at the multiples of `every` before


def test_a_replay_has_one_stage_and_generates_nothing():
    left = TimeLeft(configs.load(None, [*SIZES, "replay.run=other", "replay.stage=1"]))
    left.restart([update(5, 2.0)])
    assert left.seconds() == 3 * 2.0
    left.write(update(8, 2.0))
    assert left.headline() == {} and left.clause() == ""
