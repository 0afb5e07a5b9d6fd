"""Claims about rollout files: out and back bit by bit, other systems' rows, and bad rows named by line."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from mugrpo_jax import rollouts
from mugrpo_jax.rollouts import Group, Rollout, RolloutError, RolloutFolder, other_formats, table_files
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
    identity = {"fingerprint": "abc", "stage": 2, "policy_stage": 1, "policy_updates": 64}
    identity |= {"imported": "trl", "left_out": 3}
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
def test_a_stage_imported_from_its_own_export_is_the_original_bit_by_bit(stage, tmp_path, kind, monkeypatch):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(table_files, "_ROWS", 10)  # several row groups in a Parquet file
    exported = tmp_path / f"out.{kind}"
    assert export_rollouts(stage, exported, vocab_size=50) == 44
    found = import_rollouts([exported], tmp_path / "again")
    assert files(tmp_path / "again") == files(stage.folder)
    assert found.stage.manifest() == stage.manifest()
    with pytest.raises(RolloutError, match=r"again: exists already"):
        import_rollouts([exported], tmp_path / "again")
    with pytest.raises(RolloutError, match=r"out\.\w+: exists already"):
        export_rollouts(stage, exported)
    with pytest.raises(RolloutError, match=r"under\.\w+: cannot be written \(File exists\)"):
        export_rollouts(stage, exported / f"under.{kind}")
    exported.write_bytes(b"PAR1 but not Parquet")
    with pytest.raises(RolloutError, match=r"out\.(jsonl:1: not valid JSON|parquet: not a Parquet file)"):
        import_rollouts([exported], tmp_path / "damaged")


def test_rows_may_come_in_any_order_and_from_several_files(stage, tmp_path):
    export_rollouts(stage, tmp_path / "out.jsonl", vocab_size=50)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    np.random.default_rng(1).shuffle(lines)
    for part in (0, 1):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines[part::2]))
    import_rollouts([tmp_path / "0.jsonl", tmp_path / "1.jsonl"], tmp_path / "again")
    assert files(tmp_path / "again") == files(stage.folder)


def test_rows_that_do_not_say_how_old_the_policy_is_are_of_its_start(stage, tmp_path):
    export_rollouts(stage, tmp_path / "out.jsonl")
    rows = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    bare = [json.dumps(row | {"stage": {"vocab_size": 50, "policy_updates": None}}) for row in rows]
    (tmp_path / "bare.jsonl").write_text("\n".join(bare))
    found = import_rollouts([tmp_path / "bare.jsonl"], tmp_path / "again").stage
    assert found.identity == {"stage": 0, "policy_updates": 0} == found.manifest()["identity"]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"group": "0"}, "the field 'group' is '0'"),
        (
            {"finish": "eos"},
            "the field 'finish' is 'eos'; possible: stop, length, turns, timeout, environment",
        ),
        ({"stage": 2}, "the field 'stage' has no keys and values"),
        ({"stage": {"vocab_size": "50"}}, "the field 'vocab_size' of 'stage' is '50'"),
        (
            {"behavior": "a/b"},
            "the behavior 'a/b' has characters other than letters, digits, '.', '-' and '_'",
        ),
        ({"tokens": [[1, 2]], "logprobs": [-1.0]}, "the response is not a list of token ids"),
        ({"reward_parts": {"math": "x", "length": 0.5}}, "the reward math 'x' is not a finite number"),
        ({"reward_parts": {"math": 1.0}}, "its rewards are not math, length, as in most rows here"),
        ({"prompt": [1, 2]}, "the responses of its group have different prompts"),
        ({"sample": 1}, "two responses of its group have the same sample number"),
        (
            {"tokens": [1, 2], "logprobs": [-1.0, -1.0], "mask": [True]},
            "2 response tokens, but 1 entries in the mask",
        ),
    ],
)
def test_a_changed_row_of_our_own_is_left_out_with_the_reason(stage, tmp_path, change, reason):
    export_rollouts(stage, tmp_path / "out.jsonl", vocab_size=50)
    first, *lines = (tmp_path / "out.jsonl").read_text().splitlines()
    first = json.loads(first) | change
    del first["malformed"]  # the only field that may be missing
    (tmp_path / "out.jsonl").write_text("\n\n".join([json.dumps(first), *lines]))  # with empty lines
    with pytest.raises(RolloutError, match=r"out\.jsonl:\d: .*; mend it") as error:
        import_rollouts([tmp_path / "out.jsonl"], tmp_path / "again")
    found = import_rollouts([tmp_path / "out.jsonl"], tmp_path / "again", skip_bad=True)
    assert reason in found.left_out and reason in str(error.value)
    # The whole group is left out: with one response less, it is not as large as the others.
    assert found.responses == 40 and sum(found.left_out.values()) == 4
    assert found.stage.identity["left_out"] == 7  # three were left out before
    assert found.stage.folder.is_dir() and "math" in next(rollouts.read_groups(found.stage)).rollouts[0].parts


def test_a_behavior_that_rows_of_our_own_do_not_name_is_refused(stage, tmp_path):
    export_rollouts(stage, tmp_path / "out.jsonl", vocab_size=50)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    with pytest.raises(
        RolloutError, match=r"out\.jsonl:4: .* the behavior 'teacher-t1.3' wrote it, not 'current'; leave"
    ):
        import_rollouts([tmp_path / "out.jsonl"], tmp_path / "again", behavior="current", skip_bad=True)
    assert not (tmp_path / "again").exists()
    for name in ("mine", ""):  # an empty name is none
        path = write(tmp_path, *[row | {"behavior": name} for row in rows])
        found = import_rollouts([path], tmp_path / f"as-{name}", behavior="mine")
        assert list(found.stage.manifest()["behaviors"]) == ["mine"]


def test_rows_of_two_stages_and_tokens_of_another_model_are_refused(stage, tmp_path):
    for number in (2, 3):
        other = dataclasses.replace(stage, identity={**stage.identity, "stage": number})
        export_rollouts(other, tmp_path / f"{number}.jsonl", vocab_size=50)
    files = [tmp_path / "2.jsonl", tmp_path / "3.jsonl"]
    with pytest.raises(
        RolloutError, match=r"3\.jsonl:1: of another stage than .*2\.jsonl:1; import each stage"
    ):
        import_rollouts(files, tmp_path / "again", skip_bad=True)
    with pytest.raises(RolloutError, match="outside the vocabulary of 10"):
        import_rollouts(files[:1], tmp_path / "again", vocab_size=10)
    with pytest.raises(RolloutError, match=r"4\.jsonl: not found"):
        import_rollouts([tmp_path / "4.jsonl"], tmp_path / "again")
    files[0].rename(tmp_path / "2.csv")
    with pytest.raises(RolloutError, match=r"2\.csv: unknown kind of file"):
        import_rollouts([tmp_path / "2.csv"], tmp_path / "again")


def test_parquet_without_pyarrow_is_one_clear_line(stage, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RolloutError, match=r"Parquet needs pyarrow: pip install 'mugrpo-jax\[parquet\]'"):
        export_rollouts(stage, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


# A log-prob may be above 0 by rounding.
ROW = {"prompt_ids": [3, 4], "completion_ids": [5, 1], "logprobs": [-0.5, 2**-11], "reward": 1.0}
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
        ({"logprobs": "ab"}, "the log-probs are not a list of numbers"),
        ({"prompt_ids": [[3, 4]]}, "not as trl writes it"),
        ({"reward": None}, "no reward"),
        ({"env_mask": [1, 0, 1]}, "2 tokens, but 3 entries in the mask .env_mask."),
        ({"env_mask": [1]}, "2 tokens, but 1 entries in the mask .env_mask."),
        ({"env_mask": [0, 0]}, "the mask says that the policy wrote no token"),
        ({"reward": "1"}, "the reward '1' is not a finite number"),
        ({"reward": 10**400}, "the reward 1000+ is not a finite number"),
        ({"reward": -1e300}, r"the reward -1e\+300 is not a finite number, at most 1e\+30"),
        ({"prompt_ids": [3, 4, 5]}, "the only response of its group"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"reward": NaN}', "not valid JSON"),
        ("[1]", "a list, not an object"),
        ({"format": "mugrpo-rollouts/2"}, "format is 'mugrpo-rollouts/2'; this version reads"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line_or_left_out_and_counted(tmp_path, bad, reason):
    last = bad if isinstance(bad, str) else ROW | bad
    path = write(tmp_path, *SECOND, ROW, OTHER, last)
    (tmp_path / "stage.tmp").mkdir()
    (tmp_path / "stage.tmp" / "mine.txt").write_text("the user's")
    with pytest.raises(RolloutError, match=rf"rows\.jsonl:5: {reason}.*; mend it, or leave such rows out"):
        import_rollouts([path], tmp_path / "stage", **VOCABULARY)
    assert not (tmp_path / "stage").exists()
    found = import_rollouts([path], tmp_path / "stage", skip_bad=True, **VOCABULARY)
    assert (found.responses, sum(found.left_out.values())) == (4, 1) and "rows.jsonl:5" in str(found)
    assert found.stage.identity["left_out"] == 1
    assert sorted(item.name for item in tmp_path.glob("*.tmp*/*")) == ["mine.txt"]
    with pytest.raises(RolloutError, match=r"rows\.jsonl: exists already"):
        import_rollouts([path], path, **VOCABULARY)


def test_groups_of_another_size_are_refused_or_left_out(tmp_path):
    path = write(tmp_path, *SECOND, ROW, OTHER, ROW, *(r | {"prompt_ids": [8]} for r in (ROW, ROW)))
    with pytest.raises(RolloutError, match=r"rows\.jsonl:3: a group of 3 responses; most groups here have 2"):
        import_rollouts([path], tmp_path / "stage", **VOCABULARY)
    found = import_rollouts([path], tmp_path / "stage", skip_bad=True, **VOCABULARY)
    assert found.responses == 4 and sum(found.left_out.values()) == 3
    # Responses alone in their group do not make 1 the usual size.
    path = write(tmp_path, ROW, OTHER, *(ROW | {"prompt_ids": [n]} for n in (5, 6, 7)))
    found = import_rollouts([path], tmp_path / "pair", skip_bad=True, **VOCABULARY)
    assert found.responses == 2 and sum(found.left_out.values()) == 3
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
        "rewards": [reward for _, _, reward in pairs],
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
    masked = [  # with tokens behind the response that the policy did not write
        {"prompt_ids": [3, 4], "completion_ids": [*t, 6], "logprobs": [*v, 0.0], "reward": r}
        | {"env_mask": [1] * len(t) + [0]}
        for t, v, r in pairs
    ]
    return {
        "trl": [ROW, OTHER],
        "trl, tokens of a tool at the end": masked,
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
        row = {"uid": "u", "prompts": [0, 3], "responses": tokens, "response_mask": wrote}
        row["attention_mask"] = [0, 1, 1, 1, 1, 1, 0]
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
        assert rollout.malformed is None and not rollout.parts  # unknown
    assert [rollout.finish for rollout in group.rollouts] == ["stop", "length"]
    assert found.stage.manifest()["behaviors"][name]["responses"] == 2


TOKENS = {"prompt_ids": [3], "completion_ids": [5, 6, 0], "completion_logprobs": [-1.0, -2.0, 0.0]}
CHOICE = {"token_ids": [5], "logprobs": [-1.0], "prompt_token_ids": [3], "finish_reason": "length"}
VERL = {"prompts": [0, 3], "responses": [5, 6, 0], "attention_mask": [0, 1, 1, 1, 0]}


@pytest.mark.parametrize(
    "system, row, wanted",
    [
        ("verl", VERL | {"response_mask": [1, 0, 0]}, {"tokens": [5], "group": (3,), "reward": None}),
        ("verl", VERL | {"score": 2.0, "token_level_scores": [1.0]}, {"reward": 2.0, "tokens": [5, 6]}),
        ("verl", VERL | {"score": None, "token_level_scores": [1, 0, 9]}, {"reward": 1.0}),
        ("verl", VERL | {"response_mask": [1, 0, 0], "token_level_scores": [0, 1, 9]}, {"reward": 1.0}),
        ("verl", VERL | {"loss_mask": [1, 0, 0]}, {"tokens": [5]}),
        ("trl", ROW | {"tool_mask": [0, 1], "completion_mask": [1, 1]}, {"mask": [False, True]}),
        ("trl", ROW | {"completion_mask": [1, 0]}, {"tokens": [5]}),
        ("prime-rl", TOKENS | {"example_id": 7, "env_name": "e"}, {"group": ("e", 7)}),
        ("verl", VERL | {"uid": "u"}, {"group": "u", "problem": "u"}),
        ("trl", ROW | {"step": 4}, {"group": (4, (3, 4))}),
        ("trl", ROW | {"logprobs": [[-1.0], [-2.0]]}, {"logprobs": [-1.0, -2.0]}),
        ("prime-rl", TOKENS | {"completion_mask": [1, 1, 0]}, {"tokens": [5, 6], "logprobs": [-1.0, -2.0]}),
        ("prime-rl", TOKENS | {"is_truncated": False}, {"finish": "stop", "group": (3,)}),
        ("prime-rl", {"trajectory": [{"tokens": TOKENS | {"is_truncated": True}}]}, {"finish": "length"}),
        ("prime-rl", TOKENS | {"example_id": 7, "task": "a"}, {"group": ("a", 7), "problem": "7"}),
        ("vllm", {"choices": [CHOICE], "prompt_token_ids": [4]}, {"prompt": [3], "finish": "length"}),
        ("vllm", {"outputs": [CHOICE | {"reward": 0.5}], "rewards": [1.0]}, {"reward": 0.5, "group": (3,)}),
        (
            "vllm",
            {"choices": [CHOICE | {"logprobs": {"content": [{"logprob": -3.0}]}}], "id": "q"},
            {"logprobs": [-3.0], "group": "q"},
        ),
        ("vllm", {"choices": [CHOICE | {"logprobs": [{"5": -3.0, "6": -1.0}]}]}, {"logprobs": [-3.0]}),
    ],
)
def test_fields_that_a_system_may_also_write_are_read(system, row, wanted):
    assert other_formats.detect(row) == system
    (found,) = other_formats.read(row, "auto")[1]
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    path = write(tmp_path, ROW, OTHER)
    with pytest.raises(RolloutError, match="named twice"):
        import_rollouts([path, path.parent / "." / path.name], tmp_path / "stage", **VOCABULARY)


def test_the_same_prompt_in_two_files_of_another_system_is_two_groups(tmp_path):
    for name, rows in (("a", [ROW, OTHER]), ("b", [OTHER, ROW])):
        write(tmp_path, *rows).rename(tmp_path / f"{name}.jsonl")
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    both = import_rollouts(files, tmp_path / "both", behavior="teacher", **VOCABULARY)
    assert (both.stage.prompts, both.responses) == (2, 4)
    assert list(both.stage.manifest()["behaviors"]) == ["teacher"]
    one = import_rollouts(files[:1], tmp_path / "one", **VOCABULARY)
    assert one.stage.identity["fingerprint"] != both.stage.identity["fingerprint"]


@pytest.mark.parametrize(
    "row, reason",
    [
        (
            VERL | {"rollout_log_probs": [-1.0, -2.0, 0.0], "uid": ["u"]},
            "not as verl writes it .TypeError",
        ),
        ({"prompts": [0, 3], "responses": [5], "response_mask": [1], "score": 1.0}, "no 'attention_mask'"),
        (VERL | {"attention_mask": [1, 1]}, "5 tokens, but 2 entries in the mask 'attention_mask'"),
        (ROW | {"env_mask": ["0", "1"]}, "the mask 'env_mask' has other values than 0 and 1"),
        (ROW | {"logprobs": [[-1.0, -2.0], [-1.0, -2.0]]}, "several log-probs for each token, but no"),
        (
            ROW | {"logprobs": [[-9.0, -1.0]] * 2, "logprob_token_ids": [[5], [1]]},
            "several log-probs for each",
        ),
        (ROW | {"logprobs": [[-1.0]] * 3}, "2 response tokens, but 3 log-probs"),
        ({"outputs": [CHOICE | {"logprobs": [{"5": -3.0}] * 2}]}, "1 response tokens, but 2 log-probs"),
        (
            {"choices": [CHOICE | {"logprobs": {"content": [{"token": "token_id:9", "logprob": -3.0}]}}]},
            "the log-prob of token_id:9 stands at the token 5",
        ),
        (TOKENS | {"example_id": 7, "reward": 1.0, "error": "no answer"}, "its rollout failed: no answer"),
        (
            {"example_id": 7, "task": "a", "completion": "2", "reward": 1.0},
            "no token ids .field completion_ids",
        ),
        (
            {"prompt_ids": [[3]], "completion_ids": [[5]], "logprobs": [[-1.0]], "reward": [1.0, 0.0]},
            "1 completions, but 2 entries in 'reward'",
        ),
        ({"outputs": [CHOICE], "rewards": [1.0, 0.0]}, "1 outputs, but 2 rewards"),
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
def test_what_cannot_be_used_of_other_systems_is_refused_with_the_reason(tmp_path, row, reason):
    with pytest.raises(RolloutError, match=rf"rows\.jsonl:1: .*{reason}"):
        import_rollouts([write(tmp_path, row)], tmp_path / "stage", **VOCABULARY)
