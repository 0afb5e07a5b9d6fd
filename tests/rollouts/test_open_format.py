"""Claims about rollout files: out and back bit by bit, other systems' rows, and bad rows named by line."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from mugrpo_jax import rollouts
from mugrpo_jax.rollouts import Group, Rollout, RolloutError, RolloutFolder
from mugrpo_jax.rollouts.export_rollouts import export_rollouts
from mugrpo_jax.rollouts.import_rollouts import import_rollouts

VOCABULARY = {"vocab_size": 50, "eos_ids": {1}}


def response(rng, number) -> Rollout:
    length = int(rng.integers(1, 30))
    made = Rollout(
        tokens=rng.integers(0, 50, length).astype(np.int32),
        logprobs=-(rng.exponential(3.0, length).astype(np.float32) ** 5),  # all magnitudes
        reward=float(rng.normal()),
        finish="stop" if number % 2 else "length",
        status="ok" if number % 3 else "timeout",
        malformed=number % 2 == 0,
        parts={"math": float(rng.normal()), "length": 0.5},
        behavior="teacher-t1.3" if number == 3 else "current",
    )
    if number != 2 or length < 3:
        return made
    mask = np.arange(length) % 3 != 1  # messages of an environment
    return dataclasses.replace(made, mask=mask, logprobs=np.where(mask, made.logprobs, np.float32(0)))


@pytest.fixture
def stage(tmp_path):
    rng = np.random.default_rng(0)
    identity = {"fingerprint": "abc", "stage": 2, "policy_updates": 64}
    stage = RolloutFolder(tmp_path / "stage", identity, prompts=11, prompts_per_shard=4)
    for shard in range(stage.shards):
        groups = [
            Group(
                i, f"é{i}", rng.integers(0, 50, 5).astype(np.int32), tuple(response(rng, n) for n in range(4))
            )
            for i in stage.shard_prompts(shard)
        ]
        stage.write_shard(shard, groups)
    stage.commit()
    return stage


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_stage_imported_from_its_own_export_is_the_original_bit_by_bit(stage, tmp_path, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    exported = tmp_path / f"out.{kind}"
    assert export_rollouts(stage, exported, vocab_size=50) == 44
    found = import_rollouts([exported], tmp_path / "again")
    assert files(tmp_path / "again") == files(stage.folder)
    assert found.stage.manifest() == stage.manifest()
    with pytest.raises(RolloutError, match=r"again: exists already"):
        import_rollouts([exported], tmp_path / "again")
    with pytest.raises(RolloutError, match=r"out\.\w+: exists already"):
        export_rollouts(stage, exported)


def test_rows_may_come_in_any_order_and_from_several_files(stage, tmp_path):
    export_rollouts(stage, tmp_path / "out.jsonl", vocab_size=50)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    np.random.default_rng(1).shuffle(lines)
    for part in (0, 1):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines[part::2]))
    import_rollouts([tmp_path / "0.jsonl", tmp_path / "1.jsonl"], tmp_path / "again")
    assert files(tmp_path / "again") == files(stage.folder)


def test_parquet_without_pyarrow_is_one_clear_line(stage, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RolloutError, match=r"Parquet needs pyarrow: pip install 'mugrpo-jax\[parquet\]'"):
        export_rollouts(stage, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


ROW = {"prompt_ids": [3, 4], "completion_ids": [5, 1], "logprobs": [-0.5, -0.25], "reward": 1.0}
OTHER = ROW | {"completion_ids": [7, 8, 9], "logprobs": [-1.0, -2.0, -3.0], "reward": 0.0}
SECOND = [row | {"prompt_ids": [9, 9, 9]} for row in (ROW, OTHER)]


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "bad, reason",
    [
        ({"logprobs": None}, "no log-probs; without them no ratio can be computed"),
        ({"logprobs": [-0.5]}, "2 response tokens, but 1 log-probs"),
        ({"logprobs": [-0.5, 0.5]}, r"the log-prob 0.5 is not a finite number of at most 0"),
        ({"logprobs": [-0.5, -1e300]}, r"the log-prob -1e\+300 is not a finite number"),
        ({"completion_ids": [5, 50]}, "the response has the token 50, outside the vocabulary of 50"),
        ({"prompt_ids": [-1]}, "the prompt has the token -1, outside the vocabulary"),
        ({"completion_ids": [5, 1.5]}, "the response is not a list of token ids"),
        ({"completion_ids": [], "logprobs": []}, "the response has no tokens"),
        ({"reward": None}, "no reward"),
        ({"env_mask": [1, 0, 1]}, "2 response tokens, but 3 entries in the mask"),
        ({"env_mask": [0, 0]}, "the mask says that the policy wrote no token"),
        ({"prompt_ids": [3, 4, 5]}, "the only response of its group"),
        ("{", "not valid JSON"),
        ('{"reward": NaN}', "not valid JSON"),
        ("[1]", "a list, not an object"),
        ({"format": "mugrpo-rollouts/2"}, "format is 'mugrpo-rollouts/2'; this version reads"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line_or_left_out_and_counted(tmp_path, bad, reason):
    last = bad if isinstance(bad, str) else ROW | bad
    path = write(tmp_path, *SECOND, ROW, OTHER, last)
    with pytest.raises(RolloutError, match=rf"rows\.jsonl:5: {reason}.*; mend it, or leave such rows out"):
        import_rollouts([path], tmp_path / "stage", **VOCABULARY)
    assert not (tmp_path / "stage").exists()
    found = import_rollouts([path], tmp_path / "stage", skip_bad=True, **VOCABULARY)
    assert (found.responses, sum(found.left_out.values())) == (4, 1) and "rows.jsonl:5" in str(found)
    assert found.stage.identity["left_out"] == 1


def test_groups_of_another_size_are_refused_or_left_out(tmp_path):
    path = write(tmp_path, *SECOND, ROW, OTHER, ROW, *(r | {"prompt_ids": [8]} for r in (ROW, ROW)))
    with pytest.raises(RolloutError, match=r"rows\.jsonl:3: a group of 3 responses; most groups here have 2"):
        import_rollouts([path], tmp_path / "stage", **VOCABULARY)
    assert import_rollouts([path], tmp_path / "stage", skip_bad=True, **VOCABULARY).responses == 4
    with pytest.raises(RolloutError, match="no usable group of responses; 2 responses: the only"):
        import_rollouts([write(tmp_path, ROW, SECOND[0])], tmp_path / "none", skip_bad=True, **VOCABULARY)
    with pytest.raises(RolloutError, match="unknown; name the model with --model"):
        import_rollouts([write(tmp_path, ROW)], tmp_path / "none")


def by_system():
    """The responses of `ROW` and `OTHER` as each system writes them."""
    pairs = [(row["completion_ids"], row["logprobs"], row["reward"]) for row in (ROW, OTHER)]
    trl_batch = {
        "prompt_ids": [[3, 4]] * 2,
        "completion_ids": [tokens for tokens, _, _ in pairs],
        "logprobs": [[[-9.0, value] for value in values] for _, values, _ in pairs],
        "logprob_token_ids": [[[0, token] for token in tokens] for tokens, _, _ in pairs],
        "reward": [reward for _, _, reward in pairs],
    }
    verl = [
        {
            "uid": "u",
            "prompts": [0, 3, 4],
            "responses": [*tokens, 0, 0][:3],
            "rollout_log_probs": [*values, 0.0, 0.0][:3],
            "attention_mask": [0, 1, 1] + [1] * len(tokens) + [0] * (3 - len(tokens)),
            "token_level_scores": [0.0] * (len(tokens) - 1) + [reward],
        }
        for tokens, values, reward in pairs
    ]
    samples = [
        {"prompt_ids": [3, 4], "completion_ids": t, "completion_mask": [1] * len(t), "completion_logprobs": v}
        for t, v, _ in pairs
    ]
    prime = [{"example_id": 7, "reward": p[2], "trajectory": [{"tokens": s}]} for p, s in zip(pairs, samples)]
    outputs = [
        {"token_ids": t, "logprobs": [{str(i): {"logprob": x}, "2": {"logprob": -9}} for i, x in zip(t, v)]}
        for t, v, _ in pairs
    ]
    choices = [{"token_ids": t, "logprobs": {"token_logprobs": v}, "reward": r} for t, v, r in pairs]
    served = {"custom_id": "q", "response": {"body": {"prompt_token_ids": [3, 4], "choices": choices}}}
    return {
        "trl": [ROW, OTHER],
        "trl, a batch in a row": [trl_batch],
        "verl": verl,
        "prime-rl": prime,
        "prime-rl, samples": [s | {"reward": p[2]} for p, s in zip(pairs, samples)],
        "vllm": [{"request_id": "1", "prompt_token_ids": [3, 4], "outputs": outputs, "rewards": [1.0, 0.0]}],
        "vllm, its server": [served],
    }


@pytest.mark.parametrize("system", ["trl", "verl"])
def test_tokens_that_the_policy_did_not_write_are_masked_and_padding_is_cut(tmp_path, system):
    tokens, wrote, logprobs = [5, 6, 7, 1, 0], [1, 0, 0, 1, 0], [-1.0] * 5
    row = {"prompt_ids": [3], "completion_ids": tokens, "env_mask": wrote, "logprobs": logprobs}
    if system == "verl":
        row = {"uid": "u", "prompts": [3], "responses": tokens, "response_mask": wrote}
        row["rollout_log_probs"] = logprobs
    field = "score" if system == "verl" else "reward"
    path = write(tmp_path, row | {field: 1.0}, row | {field: 0.0})
    found = import_rollouts([path], tmp_path / "stage", **VOCABULARY)
    (group,) = rollouts.read_groups(rollouts.open_stage(found.stage.folder))
    for rollout in group.rollouts:
        assert rollout.tokens.tolist() == [5, 6, 7, 1] and rollout.mask.tolist() == [True, False, False, True]
        assert rollout.logprobs.tolist() == [-1, 0, 0, -1] and rollout.written == 2
    manifest = found.stage.manifest()
    assert (manifest["response_tokens"], manifest["messages"], manifest["message_tokens"]) == (4, 2, 4)


@pytest.mark.parametrize("system", by_system())
def test_rows_of_other_systems_become_the_same_group(tmp_path, system):
    path = write(tmp_path, *by_system()[system])
    found = import_rollouts([path], tmp_path / "stage", **VOCABULARY)
    name = system.partition(",")[0]
    assert found.system == found.stage.identity["imported"] == name
    (group,) = rollouts.read_groups(rollouts.open_stage(found.stage.folder))
    assert group.prompt.tolist() == [3, 4] and group.problem.startswith(name)
    for rollout, row in zip(group.rollouts, (ROW, OTHER), strict=True):
        assert rollout.tokens.tolist() == row["completion_ids"]
        assert rollout.logprobs.tolist() == row["logprobs"]
        assert rollout.reward == row["reward"] and rollout.behavior == name
    assert [rollout.finish for rollout in group.rollouts] == ["stop", "length"]
    assert found.stage.manifest()["behaviors"][name]["responses"] == 2


@pytest.mark.parametrize(
    "row, reason",
    [
        (
            {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 1},
            "no token ids and no log-probs",
        ),
        ({"prompt": "1+1=", "completion": "2", "reward": 1.0}, "completions that TRL logs have no token ids"),
        ({"trajectory": [{}, {}], "reward": 1.0}, "2 turns; only one response to one prompt"),
        ({"choices": [{"text": "2"}]}, "no token ids; ask the server for them with return_token_ids=true"),
        ({"text": "?"}, "unknown fields"),
        ({"outputs": 3}, "not as vllm writes it"),
    ],
)
def test_what_other_systems_write_without_log_probs_is_refused_with_the_remedy(tmp_path, row, reason):
    with pytest.raises(RolloutError, match=rf"rows\.jsonl:1: .*{reason}"):
        import_rollouts([write(tmp_path, row)], tmp_path / "stage", **VOCABULARY)
