"""Tokenizers: one small interface over characters, Hugging Face folders and what is exported."""

import dataclasses
import json
import os
import sys

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints as tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mugrpo_jax import config as configs
from mugrpo_jax.models import make_mesh
from mugrpo_jax.models import tokenizer as tokenizers
from mugrpo_jax.models.io import huggingface_export as hf_export
from mugrpo_jax.models.io.loading import load_model, tiny_model
from mugrpo_jax.models.tokenizer import CharTokenizer, HFTokenizer, load_tokenizer
from mugrpo_jax.sampling.messages import encode_message
from mugrpo_jax.setup.problem_tokens import solution_tokens
from mugrpo_jax.tasks import Problem

ALPHABET = "0123456789+-*/=() \n\té日\u0301x"
CHAT = [
    {"role": "system", "content": "12"},
    {"role": "user", "content": "3+4= "},
    {"role": "assistant", "content": "7\n"},
]


def test_character_ids_are_pad_end_begin_then_the_alphabet():
    tokenizer = CharTokenizer("ab")
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, {1}, 5)
    assert tokenizer.encode("ba") == [4, 3]
    assert tokenizer.encode("", start=True) == [2]
    assert tokenizer.decode([2, 3, 4, 1, 0, 0, 99]) == "ab"
    assert tokenizer.chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == [
        2,
        3,
        4,
        1,
    ]


def test_unknown_characters_and_bad_alphabets_are_named():
    with pytest.raises(ValueError, match=r"character 'z' is not in the alphabet 'ab'"):
        CharTokenizer("ab").encode("az")
    with pytest.raises(ValueError, match=r"distinct characters, got 'a' twice"):
        CharTokenizer("aba")
    with pytest.raises(ValueError, match=r"alphabet is empty"):
        CharTokenizer("")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The character tokenizer, and what `transformers` makes of its exported files."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("char")
    tokenizer = CharTokenizer(ALPHABET)
    tokenizer.save(folder)
    assert load_tokenizer(folder).alphabet == ALPHABET
    return tokenizer, HFTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))


@settings(deadline=None, max_examples=50)
@given(text=st.text(alphabet=ALPHABET, max_size=30))
@example(text="\n\n1  \n\n")
def test_the_exported_character_tokenizer_is_the_same(pair, text):
    ours, theirs = pair
    for start in (False, True):
        assert theirs.encode(text, start=start) == ours.encode(text, start=start)
    assert ours.decode(ours.encode(text, start=True)) == text
    assert theirs.decode([*ours.encode(text, start=True), 1, 0]) == text


def test_the_exported_character_tokenizer_chats_the_same(pair):
    ours, theirs = pair
    assert theirs.chat(CHAT) == ours.chat(CHAT)
    assert theirs.chat_text(CHAT) == ours.chat_text(CHAT) == "<|bos|>123+4= 7\n<|eos|>"
    assert (theirs.pad_id, theirs.eos_ids, theirs.vocab_size) == (ours.pad_id, ours.eos_ids, ours.vocab_size)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {1, 5, 6}),
        ({"eos_token_id": 5}, {}, {1, 5}),
        ({}, {"eos_token_id": 7}, {1, 7}),
        (None, {"eos_token_id": [7, 8]}, {1, 7, 8}),
        (None, {}, {1}),
    ],
)
def test_every_stop_token_of_a_folder_counts(generation, config, expected, tmp_path):
    CharTokenizer(ALPHABET).save(tmp_path)
    (tmp_path / "char_tokenizer.json").unlink()  # now it is any Hugging Face folder
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HFTokenizer)
    assert tokenizer.eos_ids == expected


TURNS = {
    # ChatML: the turn ends with a token of its own, and the last one with a line break behind it.
    "{% for m in messages %}+{{ m.role }}\n{{ m.content }}={{ '\n' }}{% endfor %}": "=",
    # As Llama 2: a turn ends with the tokenizer's own end-of-text.
    "{% for m in messages %}{{ m.content }}{{ eos_token if m.role != 'user' }}{% endfor %}": "",
    # Only earlier turns end with a token.
    "{% for m in messages %}{{ m.content }}{% if not loop.last %}*{% endif %}{% endfor %}": "*",
    # For prompts only: it has no place for an answer.
    "{{ messages[0].content }}=": "",
    "{{ messages[1].nothing.nowhere }}": "",
    # No stop token behind a turn.
    "{% for m in messages %}({{ m.content }}){% endfor %}": "",
}


@pytest.mark.parametrize(("template", "end"), TURNS.items())
def test_a_solution_ends_as_the_chat_template_ends_a_turn(pair, template, end):
    letters = CharTokenizer(ALPHABET + "abcdefghijklmnopqrstuvwy")
    fast = letters._to_fast()
    fast.chat_template = template
    stops = letters.encode("=*/")
    tokenizer = HFTokenizer(fast, eos_ids=stops)
    assert tokenizer.end_id(chat=True) == (letters.encode(end)[0] if end else 1)
    assert tokenizer.end_id(chat=False) == fast.eos_token_id == 1
    assert letters.end_id(chat=True) == letters.end_id(chat=False) == 1
    problem = Problem("p", ({"role": "user", "content": "1+1"},), "2", solution="2")
    config = configs.load(None)
    assert solution_tokens(config, tokenizer, problem).tokens[-1] == tokenizer.end_id(chat=True)
    plain = dataclasses.replace(problem, prompt="1+1")
    assert solution_tokens(config, tokenizer, plain).tokens[-1] == 1
    if not end and "eos_token" not in template:
        with pytest.raises(
            ValueError, match=r"does not put an end token behind an answer|the chat template fails"
        ):
            encode_message(tokenizer, "34", chat=True, last=1)
        return
    # A message of an environment is what the template writes between the end token and the next answer.
    message = encode_message(tokenizer, "34", chat=True, last=tokenizer.end_id(chat=True))
    chat = [
        {"role": role, "content": text} for role, text in (("user", "5"), ("assistant", "6"), ("user", "34"))
    ]
    whole = tokenizer.chat(chat)
    before = whole.index(letters.encode("6")[0]) + 2
    assert message == whole[before:] and letters.encode("3")[0] in message
    assert encode_message(tokenizer, "34", chat=True, last=letters.encode("6")[0]) == whole[before - 1 :]
    assert encode_message(tokenizer, "34", chat=False, last=1) == letters.encode("34")


def test_a_message_follows_an_answer_whatever_the_system_prompt_of_the_template_says():
    letters = CharTokenizer(ALPHABET + "abcdefghijklmnopqrstuvwy")
    fast, tokens = letters._to_fast(), []
    for system in ("", "a question gets the answer and the answer ends with * before another question"):
        fast.chat_template = system + (
            "{% for m in messages %}{{ m.role }}={{ m.content }}*{% endfor %}assistant="
        )
        tokenizer = HFTokenizer(fast, eos_ids=letters.encode("*"))
        tokens.append(encode_message(tokenizer, "34", chat=True, last=letters.encode("*")[0]))
    assert tokens == [letters.encode("user=34*assistant=")] * 2


@pytest.mark.parametrize(
    "template, text",
    [
        (
            "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
            "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}"
            "{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}Today Date: {{ date_string }}",
            "Today Date: 26 Jul 2024",
        ),
        ("\n{%- set today = strftime_now('%Y-%m-%d %H:%M') %} {{ today }}", " 2024-07-26 00:00"),
        (
            "\n {% macro day() %}{{ strftime_now('%A, %-d %B') }}{% endmacro %}\n{{ day() }}",
            "\nFriday, 26 July",
        ),
        ('{{ strftime_now( format="%b %e, %Y: 100 %%" ) }}', "Jul 26, 2024: 100 %"),
        ({"default": "{{ strftime_now('%y') }}", "tool_use": "{{ tools }}"}, "24"),
    ],
    ids=["llama", "iso", "words", "keyword", "several"],
)
def test_a_chat_template_with_the_date_gives_the_same_prompt_on_every_day(template, text):
    fast = CharTokenizer(ALPHABET)._to_fast()
    fast.chat_template = template
    assert HFTokenizer(fast).chat_text(CHAT) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no\nroles') }}", "here: the chat template fails: TemplateError: no roles"),
        ("{% if %}", "here: the chat template fails: TemplateSyntaxError: Expected an expression"),
        ("{{ messages.a.b }}", "here: the chat template fails: UndefinedError"),
        ("{{ 1 / 0 }}", "here: the chat template fails: ZeroDivisionError"),
        ("{{ 'a' * 10**10 }}", "here: the chat template cannot be used: it takes more than 1024 MB"),
        ("{{ messages[0].content * 10**7 }}", "here: the chat template cannot be used: it makes 20,000,000"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "here: the chat template cannot be used: it takes more than 2 s",
        ),
    ],
)
def test_a_template_that_cannot_work_is_one_line(template, message):
    fast = CharTokenizer(ALPHABET)._to_fast()
    fast.chat_template = template
    with pytest.raises(ValueError) as error:
        HFTokenizer(fast, source="here").chat(CHAT)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", b"[]", "generation_config.json: a JSON list; expected an object"),
        ("generation_config.json", b"\xff\x00", "generation_config.json: not valid JSON"),
        ("generation_config.json", b"[" * 100_000, "generation_config.json: not valid JSON (nested too"),
        ("generation_config.json", b'{"eos_token_id": "2"}', "eos_token_id is '2'; possible: a token id"),
        ("generation_config.json", b'{"eos_token_id": [1, null]}', "eos_token_id is [1, None]; possible"),
        (
            "generation_config.json",
            b'{"eos_token_id": 999}',
            "the end-of-text token 999 is not one of the 27",
        ),
        ("generation_config.json", b'{"eos_token_id": -1}', "the end-of-text token -1 is not one of the 27"),
        ("tokenizer_config.json", b"3", "the tokenizer cannot be loaded"),
        ("tokenizer_config.json", b"\xff\x00", "the tokenizer cannot be loaded"),
        ("chat_template.jinja", b"\xff\x00", "the tokenizer cannot be loaded"),
        ("char_tokenizer.json", b'{"alphabet": [1, 2]}', "not a character tokenizer"),
    ],
)
def test_tokenizer_files_of_wrong_types_are_one_line(file, content, message, pair, tmp_path):
    pair[1].save(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert message in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_tokenizer_saves_itself(pair, tmp_path):
    _, theirs = pair
    theirs.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.chat(CHAT) == theirs.chat(CHAT)
    assert again.encode("1+1", start=True) == theirs.encode("1+1", start=True)


def test_a_folder_that_names_its_tokenizer_needs_nobody_to_find_it(pair, tmp_path, monkeypatch):
    import transformers

    _, theirs = pair
    theirs.save(tmp_path)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    loaded = load_tokenizer(tmp_path)
    assert type(found) is transformers.PreTrainedTokenizerFast  # the class that is taken without asking
    assert (loaded.encode("1+1=2"), loaded.eos_ids) == (theirs.encode("1+1=2"), theirs.eos_ids)


def test_tokenizers_that_cannot_work_are_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(ValueError, match=r"no tokenizer files; expected tokenizer.json"):
        load_tokenizer(tmp_path)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    with pytest.raises(ValueError, match=r"here: no end-of-text token"):
        HFTokenizer(bare, source="here")
    silent = HFTokenizer(bare, eos_ids=[0], source="here")
    assert silent.pad_id == 0
    with pytest.raises(ValueError, match=r"here: the tokenizer has no chat template"):
        silent.chat(CHAT)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "char_tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"char_tokenizer.json: not a character tokenizer"):
        load_tokenizer(tmp_path)


def test_a_model_is_loaded_by_folder_and_exported_with_its_tokenizer(tmp_path):
    config = tiny.FAMILIES["qwen3-tied"]
    _, params = tiny.write(tmp_path / "a", config)
    model = load_model(str(tmp_path / "a"), dtype=jnp.float32, mesh=make_mesh(fsdp=8))
    assert (model.config, model.source) == (config, tmp_path / "a")
    assert model.tokenizer.encode("1+2") == tiny.TOKENIZER.encode("1+2")
    hf_export.save_huggingface(
        model.params, tmp_path / "b", config=config, source=model.source, dtype=jnp.bfloat16
    )
    again = load_model(tmp_path / "b")
    np.testing.assert_array_equal(again.params["embed"], params["embed"])
    assert again.tokenizer.encode("1+2") == tiny.TOKENIZER.encode("1+2")
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == {
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def test_the_tiny_model_depends_on_its_seed_and_fits_a_mesh():
    one, two = load_model("tiny", seed=1), load_model("tiny", seed=2)
    assert one.tokenizer.decode(one.tokenizer.encode("What is 2 + 2?\n")) == "What is 2 + 2?\n"
    assert one.config.vocab_size >= one.tokenizer.vocab_size
    assert not np.array_equal(one.params["embed"], two.params["embed"])
    sharded = load_model("tiny", seed=1, mesh=make_mesh(fsdp=4, tensor=2))
    np.testing.assert_array_equal(one.params["embed"], sharded.params["embed"])
    assert not sharded.params["embed"].sharding.is_fully_replicated
    other = tiny_model(
        CharTokenizer("01"), vocab_size=one.config.vocab_size, max_positions=77, dtype=jnp.bfloat16
    )
    assert (other.config.max_positions, other.params["embed"].dtype) == (77, jnp.bfloat16)


def test_unusable_model_names_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").touch()
    # A path is no name on the Hub, so the Hub is not asked.
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: pytest.fail(name))
    for name in ("./nofolder", "../no/folder", str(tmp_path / "no")):
        with pytest.raises(
            ValueError, match=r": this folder does not exist; possible: a Hugging Face folder,"
        ):
            load_model(name)
    with pytest.raises(ValueError, match=r"model './note.txt': is a file; possible: a Hugging Face folder"):
        load_model("./note.txt")

    def no_network(*_, **__):
        raise OSError("no connection (" + "word " * 100)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ValueError) as error:
        load_model("owner/name")
    assert str(error.value).startswith(
        "model 'owner/name': this folder does not exist, and the Hugging Face Hub"
    )
    assert " word …); possible: a Hugging Face folder" in str(error.value)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match=r"^model 'runs/none': this folder does not exist; possible: a Hug"):
        load_model("runs/none")
    with pytest.raises(ValueError, match=r"model 'nowhere': not found; possible: a Hugging Face folder"):
        load_model("nowhere")
    with pytest.raises(ValueError, match=r"config.json: not found"):
        load_model(tmp_path)
    small = dataclasses.replace(tiny.FAMILIES["llama-tied"], vocab_size=16)
    tiny.write(tmp_path / "a", small)
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ tokens, the model only 16"):
        load_model(tmp_path / "a")


def test_nobody_is_told_to_install_torch_for_a_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("import os; at_import = dict(os.environ)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "0")
    assert tokenizers._transformers().at_import["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == "1"
    assert os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == "0"
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    tokenizers._transformers()
    assert "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ
