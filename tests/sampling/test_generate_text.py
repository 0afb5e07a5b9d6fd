"""Prompts in a file, responses in another, with interruptions in between."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mugrpo_jax import files
from mugrpo_jax.evaluation.benchmarks import benchmark
from mugrpo_jax.models.io.loading import load_model
from mugrpo_jax.models.tokenizer import HFTokenizer
from mugrpo_jax.sampling import generate, generate_file, request_seeds, requests
from mugrpo_jax.tasks import load_task

SETTINGS = {"samples": 3, "max_tokens": 12, "seed": 5, "dtype": "float32", "slots": 4, "progress": False}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": "1+1="}, {"prompt_tokens": [2, 40, 41]}, {"prompt": "a longer line"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return path


def by_name(out):
    records = [json.loads(line) for line in out.read_text().split("\n") if line]
    return {(record["index"], record["sample"]): record for record in records}


def test_file_and_call_agree_and_carry_everything(prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    assert generate_file("tiny", prompts, out, **SETTINGS) == 9
    model = load_model("tiny")
    records = generate(model, ["1+1=", [2, 40, 41], "a longer line"], **SETTINGS)
    assert [(r["index"], r["sample"]) for r in records] == [(i, s) for i in range(3) for s in range(3)]
    assert by_name(out) == {(r["index"], r["sample"]): r for r in records}
    for r in records:
        assert len(r["tokens"]) == len(r["logprobs"]) <= 12
        assert r["text"] == model.tokenizer.decode(r["tokens"])
        assert r["finish_reason"] == ("stop" if r["tokens"][-1] in model.tokenizer.eos_ids else "length")
    assert records[0]["prompt_tokens"] == model.tokenizer.encode("1+1=", start=True)
    assert len({tuple(r["tokens"]) for r in records}) == 9


def test_one_text_is_one_prompt_and_its_record_can_be_read():
    [record] = generate("tiny", "1+1=", **SETTINGS | {"samples": 1})
    assert record["prompt"] == "1+1=" and record["index"] == record["sample"] == 0
    assert isinstance(record["text"], str)


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_model():
    """The tiny model with a tokenizer that has a chat template."""
    model = load_model("tiny")
    fast = model.tokenizer._to_fast()
    fast.chat_template = TEMPLATE
    return replace(model, tokenizer=HFTokenizer(fast))


def test_texts_go_through_the_chat_template_of_a_chat_model_unless_raw(tmp_path):
    model, few = chat_model(), SETTINGS | {"samples": 1, "max_tokens": 2}
    chat = [{"role": "system", "content": "sum"}, {"role": "user", "content": "1+1="}]
    lines = [{"prompt": "1+1="}, {"messages": chat}, {"prompt_tokens": [2, 40]}, {"prompt": chat}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert generate_file(model, *files, name="chat", **few) == 4
    records = [by_name(files[1])[i, 0] for i in range(4)]
    texts = ["<user>1+1=<assistant>", "<system>sum<user>1+1=<assistant>", model.tokenizer.decode([2, 40])]
    assert [record["prompt"] for record in records] == [*texts, texts[1]]
    assert [record["prompt_tokens"] for record in records[:2]] == [
        model.tokenizer.encode(t) for t in texts[:2]
    ]
    with pytest.raises(ValueError, match="was begun with raw=False, now it is True"):
        generate_file(model, *files, name="chat", raw=True, **few)
    model.tokenizer._fast.chat_template = TEMPLATE.replace("<assistant>", "<answer>")
    with pytest.raises(ValueError, match="was begun with other prompts than now"):
        generate_file(model, *files, name="chat", **few)
    with pytest.raises(ValueError, match="a loaded model needs the argument name"):
        generate_file(model, *files, **few)
    with pytest.raises(ValueError, match="prompt 0: possible: a text, a list of chat messages, or token ids"):
        generate(model, [[{"role": "user"}]], **few)


@pytest.mark.parametrize(
    ("model", "raw", "prompt", "hint"),
    [
        (lambda: load_model("tiny"), False, "1+1=", "this model has no chat template, so it continues"),
        (chat_model, True, "1+1=", "this model has a chat template: leave out --raw"),
        (chat_model, False, "<user>1+1=<assistant>", "look at `prompt` in the output"),
    ],
)
def test_empty_responses_come_with_a_hint(model, raw, prompt, hint, capfd, monkeypatch):
    model = model()
    monkeypatch.setattr(model.tokenizer, "decode", lambda ids: " ")
    [record] = generate(
        model, "1+1=", raw=raw, **SETTINGS | {"samples": 1, "max_tokens": 2, "progress": True}
    )
    assert record["prompt"] == prompt
    assert record["prompt_tokens"] == model.tokenizer.encode(prompt, start=prompt == "1+1=")
    assert f"1 of 1 responses are empty; {hint}" in capfd.readouterr().err


def test_an_interrupted_file_continues_where_it_was(prompts, tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    generate_file("tiny", prompts, whole, **SETTINGS)
    generate_file("tiny", prompts, broken, **SETTINGS)
    lines = broken.read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:4])
    broken.write_bytes(kept + lines[4][:25])  # killed in the middle of a line
    assert generate_file("tiny", prompts, broken, **SETTINGS) == 5
    assert broken.read_bytes().startswith(kept)
    # Fewer rows in company may round the last bit of a log-prob differently; tokens are the same.
    assert {k: v["tokens"] for k, v in by_name(broken).items()} == {
        k: v["tokens"] for k, v in by_name(whole).items()
    }
    for name, record in by_name(whole).items():
        np.testing.assert_allclose(by_name(broken)[name]["logprobs"], record["logprobs"], atol=1e-6)
    before = broken.read_bytes()
    assert generate_file("tiny", prompts, broken, **SETTINGS) == 0
    assert broken.read_bytes() == before


def test_other_settings_are_refused_and_nothing_is_lost(prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    generate_file("tiny", prompts, out, **SETTINGS)
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"out.jsonl: was begun with temperature=1.0, now it is 0.5; choose"):
        generate_file("tiny", prompts, out, **SETTINGS, temperature=0.5)
    prompts.write_text('{"prompt": "other"}\n')
    with pytest.raises(ValueError, match=r"out.jsonl: was begun with other prompts than now, so .*; choose"):
        generate_file("tiny", prompts, out, **SETTINGS)
    out.with_name("out.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match=r"out.jsonl: exists, but not out.jsonl.settings.json"):
        generate_file("tiny", prompts, out, **SETTINGS)
    assert out.read_bytes() == before


def test_other_weights_are_refused_even_if_nothing_is_left_to_do(prompts, tmp_path):
    """A run may have trained on, or another run may be in its folder now."""
    out, model = tmp_path / "out.jsonl", load_model("tiny")
    generate_file(model, prompts, out, name="runs/mine", **SETTINGS)
    before = out.read_bytes()
    assert generate_file(model, prompts, out, name="runs/mine", **SETTINGS) == 0
    norm = model.params["norm"].at[0].multiply(1.001)
    other = replace(model, params=model.params | {"norm": norm})
    for kept in (before, before[: before.index(b"\n") + 1]):
        out.write_bytes(kept)
        with pytest.raises(
            ValueError, match=r"out.jsonl: was begun with other weights than now, so .*; choose"
        ):
            generate_file(other, prompts, out, name="runs/mine", **SETTINGS)
        assert out.read_bytes() == kept


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"in.jsonl, line 2: not valid JSON"),
        ("[1]", r"in.jsonl, line 2: needs 'prompt' \(text\) or 'prompt_tokens'"),
        ('{"prompt": ""}', r"in.jsonl, line 2: needs"),
        ('{"prompt_tokens": ["a"]}', r"in.jsonl, line 2: needs"),
        ('{"messages": [{"role": "user"}]}', r"in.jsonl, line 2: needs .* or 'messages'"),
        ('{"prompt": 5}', r"in.jsonl, line 2: needs"),
        (json.dumps({"prompt": "x" * 1020}), r"prompt 1: 1021 tokens \+ max_tokens of 12 exceed .*=1024"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path, line, message):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        generate_file("tiny", path, tmp_path / "out.jsonl", **SETTINGS)


def test_bad_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"in.jsonl: not found"):
        generate_file("tiny", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match=r"dtype: 'int4' is not possible; possible: bfloat16, float32, int8"):
        generate("tiny", ["1"], dtype="int4")
    with pytest.raises(ValueError, match=r"samples: must be at least 1, got 0"):
        generate("tiny", ["1"], samples=0)
    with pytest.raises(
        ValueError, match=r"no setting 'max_token', did you mean 'max_tokens'\? possible: samp"
    ):
        generate("tiny", ["1"], max_token=8)
    with pytest.raises(ValueError, match=r"no setting 'slot', did you mean 'slots'\?"):
        generate_file("tiny", tmp_path / "in.jsonl", tmp_path / "out.jsonl", slot=8)
    with pytest.raises(
        ValueError, match=r"no setting 'zzz'; possible: samples, .*, slots, mesh, progress, raw$"
    ):
        generate("tiny", ["1"], zzz=8)
    assert generate("tiny", []) == []


def test_the_bar_shows_rate_and_occupancy(capfd):
    generate("tiny", ["1+1="], **SETTINGS | {"progress": True})
    shown = capfd.readouterr().err
    assert "3/3" in shown and "tokens/s" in shown and "occupied" in shown and "are empty" not in shown


def test_an_output_without_a_response_can_be_begun_again_with_other_settings(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="model 'tinny': not found"):
        generate_file("tinny", prompts, tmp_path / "out.jsonl", max_tokens=2, progress=False)
    assert generate_file("tiny", prompts, tmp_path / "out.jsonl", max_tokens=2, progress=False) == 1
    with pytest.raises(ValueError, match="was begun with max_tokens=2, now it is 3"):
        generate_file("tiny", prompts, tmp_path / "out.jsonl", max_tokens=3, progress=False)


def test_a_missing_folder_of_the_output_is_named(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"out\.jsonl: there is no folder"):
        generate_file("tiny", prompts, tmp_path / "no" / "out.jsonl", progress=False)


def test_prompts_of_no_run_share_no_seed_with_the_stages_of_a_run(tmp_path, monkeypatch):
    run = {tuple(request_seeds(0, stage, index, samples=2)) for stage in range(4) for index in range(8)}
    seeds = []

    def spy(*path, samples):
        found = request_seeds(*path, samples=samples)
        seeds.append(tuple(found))
        return found

    monkeypatch.setattr(requests, "request_seeds", spy)
    generate("tiny", ["1+1=", "2+2="], samples=2, max_tokens=1, progress=False)
    task = load_task("arithmetic", difficulty=1, train=1, test=2)
    list(benchmark("tiny", {tmp_path / "out.jsonl": task}, samples=2, max_tokens=1))
    assert len(run) == 32 and len(seeds) == 4 and not run & set(seeds)


def test_two_processes_do_not_write_the_same_output(prompts, tmp_path):
    """Their models may differ: then the settings beside the file would be those of only one of them."""
    out, task = tmp_path / "out.jsonl", load_task("arithmetic", test=2, train=2)
    with files.hold(out):
        with pytest.raises(ValueError, match=r"out\.jsonl: another process is writing it; wait"):
            generate_file("tiny", prompts, out, **SETTINGS)
        with pytest.raises(ValueError, match=r"out\.jsonl: another process is writing it; wait"):
            list(benchmark("no model", {out: task}))  # said before a model is loaded
    assert generate_file("tiny", prompts, out, **SETTINGS) == 9
    results = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    running = benchmark("tiny", dict.fromkeys(results, task), samples=1, max_tokens=1)
    next(running)
    for path in results:  # both are held until the last one is done
        with pytest.raises(ValueError, match="another process is writing it"), files.hold(path):
            pass
    next(running)
    assert next(running, None) is None
    for path in results:
        path.chmod(0o400)  # results that are complete may be read again
    assert len(list(benchmark("tiny", dict.fromkeys(results, task), samples=1, max_tokens=1))) == 2
