"""Claims about rollouts: bytes and back, whole or absent on disk, complete updates at a saved position."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mugrpo_jax import rollouts
from mugrpo_jax.rollouts import Group, Rollout, RolloutError, RolloutFolder, row_reader, table_files
from mugrpo_jax.rollouts.micro_batches import Buckets, Row, _outlines, _plan, arrange
from mugrpo_jax.rollouts.stage_index import StageIndex
from mugrpo_jax.rollouts.update_stream import _fitted


def group(index: int, responses: int = 4) -> Group:
    rng = np.random.default_rng(index)
    made = tuple(
        Rollout(
            tokens=rng.integers(0, 50, n).astype(np.int32),
            logprobs=-rng.random(n).astype(np.float32),
            reward=float(rng.integers(0, 2)),
            finish="stop" if n % 2 else "length",
        )
        for n in rng.integers(1, 60, responses)
    )
    return Group(index, f"problem-{index}", rng.integers(0, 50, 1 + index % 9).astype(np.int32), made)


GROUPS = [group(i) for i in range(20)]


@pytest.fixture
def stage(tmp_path):
    stage = RolloutFolder(tmp_path / "stage-000", {"fingerprint": "abc"}, prompts=20, prompts_per_shard=8)
    for shard in range(stage.shards):
        stage.write_shard(shard, [GROUPS[i] for i in stage.shard_prompts(shard)])
    stage.commit()
    return stage


def stream(stage, **changes):
    settings = {
        "seed": 0,
        "stage_index": 0,
        "epochs": 2,
        "prompts_per_update": 3,
        "buckets": rollouts.plan_buckets(70, 256, unit=16),
        "advantage": "std",
        "aggregation": "token_mean",
        "max_response": 60,
    }
    return rollouts.UpdateStream(stage, **(settings | changes))


def rows(update):
    """The responses of an update as a set of byte strings."""
    return {
        (unpacked(b, i).tobytes(), b["behavior_logp"][i].tobytes().rstrip(b"\0"))
        for b in update.micro_batches
        for i in range(len(b["mask"]))
        if b["mask"][i].any()
    }


def unpacked(batch, row):
    """The tokens of one row of a micro-batch."""
    packed = batch["tokens"][row * len(batch["tokens"]) // len(batch["mask"])]
    places = batch["padded_from"][row]
    return packed[places[places < len(packed)]]


def same(a, b) -> bool:
    return len(a.micro_batches) == len(b.micro_batches) and all(
        np.array_equal(x[name], y[name]) for x, y in zip(a.micro_batches, b.micro_batches) for name in x
    )


def test_a_group_survives_the_way_through_bytes():
    found = rollouts.decode(rollouts.encode(GROUPS[3]))
    assert rollouts.encode(found) == rollouts.encode(GROUPS[3])
    assert found.problem == "problem-3"
    np.testing.assert_array_equal(found.rollouts[1].logprobs, GROUPS[3].rollouts[1].logprobs)


def test_a_stage_comes_back_in_order_with_its_totals(stage):
    manifest = stage.manifest()
    found = list(rollouts.read_groups(rollouts.open_stage(stage.folder)))
    assert [rollouts.encode(g) for g in found] == [rollouts.encode(g) for g in GROUPS]
    assert manifest["responses"] == 80
    assert manifest["response_tokens"] == sum(g.response_tokens for g in GROUPS)
    assert manifest["reward"] == sum(g.rewards.sum() for g in GROUPS)


def test_a_damaged_shard_is_named_and_missing_again_while_the_stage_is_generated(stage, capsys):
    (stage.folder / "manifest.json").unlink()
    path = stage.path(1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert stage.missing_shards() == [1]
    assert "shard-00001.arrayrecord: its checksum differs" in capsys.readouterr().out
    for text in ("{}", "[1]", '{"sha', ""):
        stage.path(0).with_suffix(".json").write_text(text)
        assert "shard-00000.arrayrecord: its summary is damaged" in stage.problems([0])[0]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_shard_of_a_complete_stage_is_refused_by_name(stage, damage):
    path = stage.path(2)
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[100] ^= 1
        path.write_bytes(data if damage == "flip" else data[:-7])
    with pytest.raises(rollouts.DamagedRollouts, match=r"shard-00002\.arrayrecord"):
        rollouts.open_stage(stage.folder)
    (stage.folder / "manifest.json").write_text('{"identity": {}}')
    with pytest.raises(rollouts.DamagedRollouts, match=r"manifest\.json: damaged"):
        rollouts.open_stage(stage.folder)


@pytest.mark.parametrize("content", [None, b"", b"no records" * 10_000])
def test_a_file_of_records_that_is_lost_or_damaged_is_named(stage, content):
    stage.path(1).unlink()
    if content is not None:
        stage.path(1).write_bytes(content)
    with pytest.raises(RolloutError, match=r"shard-00001\.arrayrecord: cannot be read \(") as error:
        list(rollouts.read_groups(stage))
    assert "\n" not in str(error.value)


def test_an_export_does_not_replace_that_of_another_process(tmp_path):
    out = tmp_path / "rows.jsonl"

    def rows():
        with pytest.raises(ValueError, match=r"rows\.jsonl\.tmp: another process is writing it"):
            table_files.write_rows(out, [], columns={})
        out.write_text("of a program that does not ask")
        yield {"a": 2}

    with pytest.raises(RolloutError, match=r"rows\.jsonl: another process has written it in the meantime"):
        table_files.write_rows(out, rows(), columns={"a": "int32"})
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert out.read_text() == "of a program that does not ask"


def test_a_shard_that_a_slow_network_disk_shows_late_is_waited_for(stage, tmp_path):
    stage.commit()
    stage.path(1).rename(tmp_path / "late")
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(rollouts.open_stage, stage.folder, patience_s=60)
        time.sleep(0.5)
        (tmp_path / "late").rename(stage.path(1))
        assert opened.result().patience_s == 60


def test_rollouts_of_another_run_are_refused(stage):
    other = RolloutFolder(stage.folder, {"fingerprint": "other"}, 20, 8)
    with pytest.raises(rollouts.RolloutError, match="expected"):
        other.manifest()
    with pytest.raises(rollouts.RolloutError, match="expected"):
        other.missing_shards()


def test_an_incomplete_stage_cannot_be_opened(tmp_path):
    with pytest.raises(rollouts.RolloutError, match=r"manifest\.json: not found"):
        rollouts.open_stage(tmp_path)


def test_every_update_is_complete_and_an_epoch_uses_each_response_once(stage):
    updates = list(stream(stage))
    assert len(updates) == 12  # 20 prompts give 6 whole updates of 3 in each of 2 epochs
    seen = [rows(update) for update in updates]
    assert all(len(update) == 12 for update in seen)
    for epoch in (seen[:6], seen[6:]):
        assert len(set().union(*epoch)) == 72
    assert seen[:6] != seen[6:]


def test_masks_come_back_from_disk_and_only_written_tokens_count(tmp_path):
    def answered(group):
        masks = [np.arange(len(r.tokens)) % 5 != 3 for r in group.rollouts]
        members = tuple(dataclasses.replace(r, mask=m) for r, m in zip(group.rollouts, masks))
        return dataclasses.replace(group, rollouts=members)

    stage = RolloutFolder(tmp_path / "stage-000", {"fingerprint": "abc"}, prompts=8, prompts_per_shard=8)
    stage.write_shard(0, [answered(group) for group in GROUPS[:8]])
    stage.commit()
    written = 0
    for update in stream(stage, prompts_per_update=4, epochs=1):
        for batch in update.micro_batches:
            for row in np.flatnonzero(batch["mask"].any(1)):
                first = int(np.argmax(batch["mask"][row]))
                response = batch["mask"][row, first : int(np.flatnonzero(batch["mask"][row])[-1]) + 1]
                np.testing.assert_array_equal(response, np.arange(len(response)) % 5 != 3)
        tokens = sum(batch["mask"].sum() for batch in update.micro_batches)
        assert tokens == update.denominator == update.metrics["response_tokens"]
        written += tokens
    assert written == stage.manifest()["response_tokens"] < sum(g.response_tokens for g in GROUPS[:8])


def test_the_order_depends_on_seed_and_stage(stage):
    first = next(stream(stage))
    assert same(first, next(stream(stage)))
    assert not same(first, next(stream(stage, seed=1)))
    assert not same(first, next(stream(stage, stage_index=1)))


@pytest.mark.parametrize("done", [0, 1, 7, 11])
def test_a_stream_continues_from_its_saved_position(stage, done):
    whole = list(stream(stage))
    started = stream(stage)
    for _ in range(done):
        next(started)
    resumed = stream(stage)
    resumed.seek(started.position())
    rest = list(resumed)
    assert len(rest) == 12 - done
    assert all(same(a, b) for a, b in zip(rest, whole[done:]))


@pytest.mark.parametrize("share", [False, True])
def test_hosts_read_only_their_own_rows_and_together_the_whole_update(stage, monkeypatch, share):
    decoded = []
    original = row_reader.decode_rollout
    monkeypatch.setattr(row_reader, "decode_rollout", lambda data: decoded.append(1) or original(data))
    settings = {"buckets": rollouts.plan_buckets(70, 1024, 4, unit=16, share=share), "prompts_per_update": 10}
    settings |= {"epochs": 1, "equal_groups": "skip"}
    whole, counts = list(stream(stage, **settings)), []
    for parts in ({0, 1}, {2}, {3}):
        decoded.clear()
        own = list(stream(stage, **settings, parts=parts))
        counts.append(len(decoded))
        for mine, everything in zip(own, whole, strict=True):
            assert (mine.denominator, mine.metrics) == (everything.denominator, everything.metrics)
            for a, b in zip(mine.micro_batches, everything.micro_batches, strict=True):
                for name in b:
                    for part, (x, y) in enumerate(zip(np.split(a[name], 4), np.split(b[name], 4))):
                        if part in parts or name not in ("tokens", "behavior_logp"):
                            np.testing.assert_array_equal(x, y, err_msg=name)
                        else:
                            assert not x.any()
    rows = sum(int(b["mask"].any(1).sum()) for update in whole for b in update.micro_batches)
    assert sum(counts) == rows and counts[0] < 0.6 * rows and max(counts[1:]) < 0.35 * rows


@pytest.mark.parametrize("share", [False, True])
def test_the_number_of_rows_follows_the_lengths_of_a_stage(tmp_path, share):
    """Responses of 100 to 110 tokens, prompts of 40: at most a third of the rows is empty."""
    rng = np.random.default_rng(0)

    def group(index):
        made = [
            Rollout(np.full(n, index, np.int32), np.full(n, -0.5, np.float32), float(i % 2), "stop")
            for i, n in enumerate(rng.integers(100, 111, 8))
        ]
        return Group(index, str(index), np.full(40, index, np.int32), tuple(made))

    stage = RolloutFolder(tmp_path, {}, prompts=20, prompts_per_shard=20)
    stage.write_shard(0, [group(i) for i in range(20)])
    stage.commit()

    def updates(fit_rows):
        plan = rollouts.plan_buckets(160, 2048, unit=40, share=share, fit_rows=fit_rows)
        return list(stream(stage, buckets=plan, prompts_per_update=10, epochs=1, max_response=120))

    def taken(batch):
        return int(batch["mask"].any(1).sum())

    usual, fitted = updates(False), updates(True)
    for before, after in zip(usual, fitted, strict=True):
        assert rows(after) == rows(before) and after.denominator == before.denominator
        assert len(after.micro_batches) == len(before.micro_batches)
        full = [batch for batch in after.micro_batches if batch["tokens"].size == 2048]
        assert full and all(len(batch["mask"]) <= 1.5 * taken(batch) for batch in full)
    first, same_first = (update[0].micro_batches[0] for update in (usual, fitted))
    assert len(first["mask"]) > (2.3 if share else 1.7) * taken(first)
    assert first["tokens"].tobytes() == same_first["tokens"].tobytes()


@pytest.mark.parametrize("share", [False, True])
def test_no_shape_has_more_rows_than_an_update(stage, share):
    def updates(most_rows):
        plan = rollouts.plan_buckets(70, 1024, unit=16, share=share, most_rows=most_rows)
        return plan, list(stream(stage, buckets=plan, prompts_per_update=5, epochs=1))

    (usual, before), (plan, after) = updates(None), updates(20)
    assert max(shape.rows for shape in plan.shapes) == 20 < max(shape.rows for shape in usual.shapes)
    for one, other in zip(before, after, strict=True):
        assert rows(one) == rows(other) and one.denominator == other.denominator
        assert [b["tokens"].tobytes() for b in one.micro_batches] == [
            b["tokens"].tobytes() for b in other.micro_batches
        ]


@pytest.mark.parametrize(("share", "most"), [(False, 2), (True, 4)])
def test_no_stage_needs_more_rows_than_were_planned(share, most):
    """Prompts of 1 token and responses of 1 to 3: many more rows than usual would fit into the tokens."""
    plan = rollouts.plan_buckets(128, 2048, unit=64, share=share, fit_rows=True)
    fitted = plan.fitted(np.full(90, 1), np.tile([1, 2, 3], (90, 1)), prompts_per_update=90)
    assert fitted.room == (most, most)  # the second length has no rows
    assert fitted.shapes == plan.shapes


def fitted_room(prompts, responses, **options):
    buckets = Buckets((32, 64, 128), 1024, fit_rows=True, **options)
    return buckets.fitted(np.array(prompts), np.array(responses), len(prompts)).room


def test_room_for_rows_is_what_the_micro_batches_of_a_stage_use():
    """Rows · length / tokens, rounded up; the usual room where there are no rows."""
    assert fitted_room([10], [[54] * 16]) == (2.0, 1.25, 2.0)  # 16 · 64 / 1024
    assert fitted_room([10], [[30] * 30]) == (2.0, 1.75, 2.0)  # 25 rows of 40 tokens: 25 · 64 / 1024
    assert fitted_room([4], [[28] * 40]) == (1.25, 2.0, 2.0)  # a row that fills its length is not of the next
    assert fitted_room([10], [[54] + [20] * 30]) == (2.0, 2.0, 2.0)  # one long row, and short ones behind it
    assert fitted_room([1], [[2] * 500]) == (2.0, 2.0, 2.0)  # 32 / 3, and there is no more than 2
    # Shared prompts of 40 tokens: two rows have 70 + 31 tokens, so 20 rows fit; five have 194, so 25 or 26.
    assert fitted_room([40] * 10, [[30] * 2] * 10, share=True) == (4.0, 4.0, 2.5)
    assert fitted_room([40] * 10, [[30] * 5] * 10, share=True) == (4.0, 4.0, 4.0)
    shapes = Buckets((32, 64, 128), 1024, room=(2.0, 1.25, 2.0)).shapes
    assert [shape.rows for shape in shapes[::3]] == [64, 20, 16]  # 2 · 1024 / 32, 1.25 · 1024 / 64, 2 · ...


def test_rows_are_fitted_to_the_groups_that_updates_compute():
    """Groups with equal rewards have long responses here. Without them, more rows fit into the tokens."""
    equal = np.arange(8) % 2 == 1
    lengths = np.where(equal[:, None], 54, np.full((8, 13), 30))
    rewards = np.where(equal[:, None], 1.0, np.arange(13) % 2.0)
    flags = np.zeros((8, 13), bool)
    index = StageIndex(np.full(8, 10), lengths, rewards, flags, lengths)
    buckets = Buckets((32, 64, 128), 1024, fit_rows=True)
    assert (
        _fitted(buckets, index, 4, "keep").room[1] == 1.5
    )  # 12 of the last 17 rows in a half: 12 · 64 / 512
    for way in ("skip", "drop"):
        assert _fitted(buckets, index, 4, way).room[1] == 1.75  # 25 rows of 40 tokens: 25 · 64 / 1024
    never = dataclasses.replace(index, rewards=np.ones((8, 13)))
    assert _fitted(buckets, never, 4, "skip").shapes == buckets.shapes  # no update computes anything


@pytest.mark.parametrize("share", [False, True])
def test_long_tailed_responses_need_no_more_micro_batches_with_fitted_rows(share):
    """Short responses of a long one's group are in its micro-batches, so that these need many rows."""
    rng = np.random.default_rng(0)
    prompts = np.full(64, 12)
    responses = np.clip(np.exp(rng.normal(3.0, 0.8, (64, 8))), 4, 116).astype(int)
    usual = Buckets((32, 64, 128), 2048, share=share, fit_rows=True)
    fitted = usual.fitted(prompts, responses, prompts_per_update=16)
    for start in range(0, 64, 16):
        rows = _outlines(prompts[start : start + 16], responses[start : start + 16])
        (before, after) = ([shape for _, shape in _plan(rows, plan)] for plan in (usual, fitted))
        assert [shape.tokens for shape in after] == [shape.tokens for shape in before]
        assert sum(shape.rows for shape in after) <= sum(shape.rows for shape in before)


def planned_rows(lengths, buckets):
    """The response lengths in each part of each micro-batch, with its shape; prompts have one token."""
    prompt, empty = np.zeros(1, np.int32), np.zeros(0, np.float32)
    rows = [Row(prompt.copy(), np.zeros(n - 1, np.int32), empty, 1.0) for n in lengths]
    return [
        ([[row.length for row in part] for part in taken], shape) for taken, shape in _plan(rows, buckets)
    ]


def test_a_micro_batch_takes_a_smaller_shape_only_where_that_leaves_little_empty():
    buckets = Buckets((8,), 32)  # 32 tokens in 8 rows, 16 in 4 and 8 in 2
    assert [shape.tokens for shape in buckets.sizes(8)] == [32, 16, 8]
    assert planned_rows([7, 7], buckets) == [([[7, 7]], (4, 8, 16))]  # 14 of 16 tokens
    assert planned_rows([6, 6], buckets) == [([[6]], (2, 8, 8)), ([[6]], (2, 8, 8))]  # 12 of 16 are too few
    assert planned_rows([4, 3], buckets) == [([[4, 3]], (2, 8, 8))]
    assert planned_rows([8] * 4, buckets) == [([[8] * 4], (8, 8, 32))]  # every token is used
    # Five rows have 15 of 16 tokens, but that shape has only 4 rows.
    assert [len(part) for (part,), _ in planned_rows([3] * 5, buckets)] == [2, 2, 1]
    assert planned_rows([1, 1, 1], buckets) == [([[1, 1]], (2, 8, 8)), ([[1]], (2, 8, 8))]


def test_a_row_that_is_longer_than_every_bucket_is_one_clear_line():
    reason = "a prompt with its response has 9 tokens, a row at most 8; raise sampling.max_prompt_tokens or"
    with pytest.raises(ValueError, match=reason):
        planned_rows([9, 3], Buckets((4, 8), 32))


def test_devices_get_about_as_many_tokens_each():
    two = Buckets((8,), 32, parts=2)
    (taken, shape), *_ = planned_rows([8, 6, 5, 4, 3, 2], two)
    assert taken == [[8, 4, 2], [6, 5, 3]] and shape == (8, 8, 32)
    assert sum(len(part) for taken, _ in planned_rows([7] * 9, two) for part in taken) == 9


def test_rows_with_the_same_prompt_go_to_one_device_which_stores_the_prompt_once():
    buckets = Buckets((8,), 32, parts=2, share=True)
    empty, prompts = np.zeros(0, np.float32), [np.full(3, n, np.int32) for n in range(2)]
    lengths = [(0, 4), (0, 4), (1, 5), (1, 5)]  # the prompt and the tokens of each response
    rows = [Row(prompts[n], np.zeros(m, np.int32), empty, 1.0) for n, m in lengths]
    ((taken, shape),) = _plan(rows, buckets)
    assert [[(row.prompt[0], len(row.response)) for row in part] for part in taken] == [
        [(1, 5), (1, 5)],  # the prompt with the longest row comes first
        [(0, 4), (0, 4)],
    ]
    (batch,) = arrange([row._replace(behavior_logp=np.zeros(len(row.response))) for row in rows], buckets)
    packed = (batch["packed_from"] < 8 * shape.rows // 2).sum(axis=1)
    # Prompt, response, last token of the prompt, response.
    assert packed.tolist() == [3 + 5 + 1 + 5, 3 + 4 + 1 + 4]


def test_a_damaged_index_is_made_again_from_the_summaries(stage):
    first = next(stream(stage))
    (stage.folder / "index.npz").write_bytes(b"")
    assert same(first, next(stream(stage)))
    stage.path(1).with_suffix(".json").write_text(stage.path(0).with_suffix(".json").read_text())
    with pytest.raises(rollouts.RolloutError, match=r"index\.npz: its checksum differs"):
        stream(stage)


@pytest.mark.parametrize("name", ["manifest.json", "shard-00001.json", "shard-00001.arrayrecord"])
def test_a_file_that_a_slow_network_disk_shows_empty_is_waited_for(stage, capsys, name):
    path, patient = stage.folder / name, dataclasses.replace(stage, patience_s=5.0)
    content = path.read_bytes()
    expected = patient.manifest(), next(stream(patient)).denominator
    path.write_bytes(b"")
    with pytest.raises(rollouts.RolloutError, match=name):  # nothing is taken as empty
        assert (
            stage.commit()
            if name.startswith("shard-00001.json")
            else next(stream(stage, prompts_per_update=20))
        )
    threading.Timer(0.5, path.write_bytes, [content]).start()
    if name == "shard-00001.json":
        patient.commit()
    assert (
        patient.manifest(complete=True),
        next(stream(patient, prompts_per_update=3)).denominator,
    ) == expected
    next(stream(patient, prompts_per_update=20))
    assert f"{name}: missing or incomplete here; waiting" in capsys.readouterr().out


def test_a_manifest_that_never_comes_is_an_error_and_not_an_empty_one(stage):
    (stage.folder / "manifest.json").unlink()
    assert stage.manifest() is None
    with pytest.raises(rollouts.RolloutError, match=r"manifest\.json: not found after 0.2 s"):
        dataclasses.replace(stage, patience_s=0.2).manifest(complete=True)


def test_hosts_share_the_work_of_checking_a_stage(stage):
    stage.path(1).write_bytes(b"damaged")
    assert rollouts.open_stage(stage.folder, share=(0, 2)) == stage  # checks shards 0 and 2
    with pytest.raises(rollouts.RolloutError, match=r"shard-00001\.arrayrecord"):
        rollouts.open_stage(stage.folder, share=(1, 2))


def test_micro_batches_have_the_planned_shapes_and_hold_what_was_stored(stage):
    buckets = rollouts.plan_buckets(70, 256, 2, unit=16)
    update = rollouts.make_update(
        GROUPS[:5], buckets, advantage="mean", aggregation="seq_mean_token_mean", max_response=60
    )
    found_shapes = {(*b["mask"].shape, b["tokens"].size) for b in update.micro_batches}
    assert found_shapes <= {tuple(shape) for shape in buckets.shapes}
    assert all(shape.rows % 2 == 0 and shape.tokens <= 256 for shape in buckets.shapes)
    assert all(len(b["tokens"]) == 2 for b in update.micro_batches)
    assert update.denominator == 20
    total = sum(b["mask"].sum() for b in update.micro_batches)
    assert total == sum(g.response_tokens for g in GROUPS[:5]) == update.metrics["response_tokens"]
    rewards = np.concatenate([g.rewards - g.rewards.mean() for g in GROUPS[:5]])
    found = np.concatenate([b["advantages"] for b in update.micro_batches])
    np.testing.assert_allclose(np.sort(found[found != 0]), np.sort(rewards[rewards != 0]), atol=1e-6)


def test_long_responses_are_penalised_before_advantages_are_taken():
    buckets = rollouts.plan_buckets(70, 4096)
    settings = {"advantage": "mean", "aggregation": "constant", "max_response": 60}
    plain = rollouts.make_update(GROUPS[:5], buckets, **settings)
    update = rollouts.make_update(GROUPS[:5], buckets, **settings, overlong_buffer=40)
    expected = []
    for group in GROUPS[:5]:
        lengths = np.array([len(rollout.tokens) for rollout in group.rollouts])
        shaped = group.rewards - np.clip((lengths - 20) / 40, 0, None)
        expected += list(shaped - shaped.mean())
    found = np.concatenate([b["advantages"] for b in update.micro_batches])
    np.testing.assert_allclose(np.sort(found[found != 0]), np.sort(expected), atol=1e-6)
    assert update.metrics["reward"] == plain.metrics["reward"]  # of the task alone
    assert update.metrics["overlong_penalty"] < 0 and "overlong_penalty" not in plain.metrics
    assert update.denominator == plain.denominator == 20 * 60
    # Rewards that are equal before the penalty need not be equal after it.
    some = dataclasses.replace(
        GROUPS[0], rollouts=tuple(dataclasses.replace(r, reward=1.0) for r in GROUPS[0].rollouts)
    )
    kept = rollouts.make_update([some], buckets, **settings, overlong_buffer=40, equal_groups="skip")
    assert kept.metrics["equal_groups"] == 0 and sum(b["mask"].any(1).sum() for b in kept.micro_batches) == 4
    with pytest.raises(ValueError, match=r"equal_groups.*Drop"):
        rollouts.make_update(GROUPS[:2], buckets, **settings, equal_groups="Drop")


def test_packed_tokens_are_those_of_the_rows_and_little_is_empty():
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.2, 0.8, 256)), 32, 512).astype(int)
    rows = [
        Row(np.full(128, i), np.full(n, 1000 + i), np.full(n, float(i), np.float32), float(i + 1))
        for i, n in enumerate(lengths)
    ]
    for parts in (1, 4):
        batches = arrange(rows, rollouts.plan_buckets(640, 32_768, parts))
        seen = {}
        for batch in batches:
            for r in range(len(batch["mask"])):
                tokens = unpacked(batch, r)
                if not len(tokens):
                    assert batch["advantages"][r] == 0 and not batch["mask"][r].any()
                    continue
                i = tokens[0]
                assert (tokens == np.concatenate([rows[i].prompt, rows[i].response])).all()
                assert batch["mask"][r].sum() == lengths[i] and not batch["mask"][r, :128].any()
                assert batch["advantages"][r] == i + 1
                seen[i] = True
        assert len(seen) == 256
        empty = 1 - sum(128 + n for n in lengths) / sum(b["tokens"].size for b in batches)
        assert empty < 0.1
        assert all(batch["mask"].size <= 2 * batch["tokens"].size for batch in batches)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_shared_prompt_is_packed_once_and_stands_in_every_row(parts):
    rng = np.random.default_rng(0)
    rows = []
    for p in range(32):
        prompt = np.full(100, p)
        for n in rng.integers(20, 90, 8):
            rows.append(Row(prompt, np.full(n, 1000 + p), np.full(n, 1.0, np.float32), float(len(rows) + 1)))
    buckets = rollouts.plan_buckets(200, 8192, parts, unit=100, share=True)
    batches = arrange(rows, buckets)
    assert {(*b["mask"].shape, b["tokens"].size) for b in batches} <= {tuple(s) for s in buckets.shapes}
    seen = set()
    for batch in batches:
        for r in np.flatnonzero(batch["advantages"]):
            row = rows[int(batch["advantages"][r]) - 1]
            np.testing.assert_array_equal(unpacked(batch, r), np.concatenate([row.prompt, row.response]))
            np.testing.assert_array_equal(np.flatnonzero(batch["mask"][r]), np.arange(100, row.length))
            seen.add(batch["advantages"][r])
    assert len(seen) == 256
    # Each prompt whole at least once, its last token in every row, each response once; little beside that.
    least = 32 * 99 + sum(1 + len(row.response) for row in rows)
    assert least <= sum(b["tokens"].size for b in batches) < 1.25 * least
