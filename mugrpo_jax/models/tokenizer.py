"""Convert text to token ids and back, with a Hugging Face tokenizer or with one token per character."""

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mugrpo_jax.files import read_json_object
from mugrpo_jax.models.chat_template_check import problem_with_template, with_fixed_date

Message = Mapping[str, str]

# The tokenizer files in a Hugging Face folder, and `char_tokenizer.json`, which `CharTokenizer` writes.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "char_tokenizer.json",
)


_EXAMPLE = (("user", "first question"), ("assistant", "the answer"), ("user", "second question"))


class Tokenizer(Protocol):
    """The interface that every tokenizer implements.

    `vocab_size` is the number of token ids. `pad_id` is the id that fills the right side of padded rows. A
    response ends at the first token whose id is in `eos_ids`. `has_chat_template` tells whether the model
    comes with a template for chats.
    """

    vocab_size: int
    pad_id: int
    eos_ids: frozenset[int]
    has_chat_template: bool

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """Return the token ids of `text`; `start=True` puts the beginning-of-text token (if any) first."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens such as end-of-text."""
        ...

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Format messages (dicts with `role` and `content`) with the model's chat template.

        With `add_generation_prompt`, the text ends where the assistant's next message starts.
        """
        ...

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of `chat_text` with the same arguments."""
        ...

    def end_id(self, *, chat: bool) -> int:
        """Return the token that ends a response to a plain text or, with `chat`, to chat messages."""
        ...

    def tokens(self) -> Mapping[str, int]:
        """Return the id of each token. Two tokenizers with equal tokens have ids with the same meaning."""
        ...

    def save(self, folder: Path) -> None:
        """Write files to `folder` from which `transformers.AutoTokenizer` loads the same tokenizer."""
        ...


class HFTokenizer:
    """A `Tokenizer` around a fast tokenizer from `transformers`.

    `eos_ids` are more ids that end a response. `source` names the tokenizer in error messages.
    """

    def __init__(self, fast: Any, *, eos_ids: Iterable[int] = (), source: str = "tokenizer") -> None:
        self._fast = fast
        # For one text, the Python wrappers of `transformers` would take longer than the encoding itself.
        self._backend = fast.backend_tokenizer
        self._source = source
        self._template_checked = False
        self._start = [i for i in fast.encode("", add_special_tokens=True) if i == fast.bos_token_id]
        known = {fast.eos_token_id, *eos_ids} - {None}
        if not known:
            raise ValueError(f"{source}: no end-of-text token; a response would never end")
        self.vocab_size = len(fast)
        self.has_chat_template = fast.chat_template is not None
        if outside := [i for i in known if not 0 <= i < self.vocab_size]:
            raise ValueError(
                f"{source}: the end-of-text token {outside[0]} is not one of the {self.vocab_size} tokens"
            )
        self.eos_ids = frozenset(known)
        self.pad_id = min(known) if fast.pad_token_id is None else fast.pad_token_id

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """See `Tokenizer.encode`."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return (self._start if start else []) + ids

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """See `Tokenizer.chat_text`."""
        if self._fast.chat_template is None:
            raise ValueError(f"{self._source}: the tokenizer has no chat template; use plain text prompts")
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        chat = [dict(message) for message in messages]
        with self._named_errors():
            template = with_fixed_date(self._fast.get_chat_template())  # of several, that named `default`
        if not self._template_checked:
            self._check_template(template, chat)
        with self._named_errors():
            return str(self._fast.apply_chat_template(chat, chat_template=template, **options))

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the template is a program, and may raise anything
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{self._source}: the chat template fails: {type(error).__name__}: {reason}"
            ) from error

    def _check_template(self, template: str, chat: list[dict[str, str]]) -> None:
        """Render the first conversation in a child process, which has limits on time and memory."""
        names = {name: str(token) for name, token in self._fast.special_tokens_map.items()}
        problem = problem_with_template(template, json.dumps(chat), json.dumps(names))
        if problem is not None:
            raise ValueError(f"{self._source}: the chat template cannot be used: {problem}")
        self._template_checked = True

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """See `Tokenizer.chat`."""
        return self.encode(self.chat_text(messages, add_generation_prompt=add_generation_prompt))

    def end_id(self, *, chat: bool) -> int:
        """See `Tokenizer.end_id`. In a chat it is the stop token that the template puts after an answer."""
        return self._end_of_turn if chat else self._end_of_text

    @property
    def _end_of_text(self) -> int:
        own = self._fast.eos_token_id
        return min(self.eos_ids) if own is None else own

    @functools.cached_property
    def _end_of_turn(self) -> int:
        question, answer, more = ({"role": role, "content": text} for role, text in _EXAMPLE)
        for chat in ([question, answer], [question, answer, more]):  # some templates end only earlier turns
            try:
                text = self.chat_text(chat, add_generation_prompt=False)
            except ValueError:  # the template is for other roles, or for prompts only
                continue
            _, found, after = text.rpartition(answer["content"])
            after = after.partition(more["content"])[0]
            if found and (stops := [i for i in self.encode(after) if i in self.eos_ids]):
                return stops[0]
        return self._end_of_text

    def tokens(self) -> Mapping[str, int]:
        """See `Tokenizer.tokens`."""
        return self._fast.get_vocab()

    def save(self, folder: Path) -> None:
        """See `Tokenizer.save`."""
        self._fast.save_pretrained(folder)


class CharTokenizer:
    """A tokenizer with one token per character, for tiny models with random weights.

    Id 0 is padding, 1 is end-of-text, 2 is beginning-of-text, and the characters of `alphabet` follow from 3.

    >>> tokenizer = CharTokenizer("0123456789+=")
    >>> tokenizer.encode("1+2=", start=True)
    [2, 4, 13, 5, 14]
    >>> tokenizer.decode([6, 1, 0])
    '3'
    """

    has_chat_template = False  # `chat_text` adds no roles, so a chat is the same as its text
    PAD, EOS, BOS = "<|pad|>", "<|eos|>", "<|bos|>"
    _TEMPLATE = (
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )

    def __init__(self, alphabet: str) -> None:
        twice = [char for char in alphabet if alphabet.count(char) > 1]
        if twice:
            raise ValueError(f"CharTokenizer: alphabet must be distinct characters, got {twice[0]!r} twice")
        if not alphabet:
            raise ValueError("CharTokenizer: alphabet is empty")
        self.alphabet = alphabet
        self.pad_id, self.eos_ids, self._bos = 0, frozenset({1}), 2
        self._ids = {char: 3 + i for i, char in enumerate(alphabet)}
        self.vocab_size = 3 + len(alphabet)

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """See `Tokenizer.encode`. A character that is not in the alphabet raises ValueError."""
        try:
            return [self._bos] * start + [self._ids[char] for char in text]
        except KeyError as error:
            raise ValueError(
                f"CharTokenizer: character {error.args[0]!r} is not in the alphabet {self.alphabet!r}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return "".join(self.alphabet[i - 3] for i in ids if 3 <= i < self.vocab_size)

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """See `Tokenizer.chat_text`. The template adds end-of-text after each assistant message."""
        ends = (self.EOS if message["role"] == "assistant" else "" for message in messages)
        return self.BOS + "".join(message["content"] + end for message, end in zip(messages, ends))

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """See `Tokenizer.chat`."""
        ids = [self._bos]
        for message in messages:
            ids += self.encode(message["content"])
            ids += [1] if message["role"] == "assistant" else []
        return ids

    def end_id(self, *, chat: bool) -> int:
        """See `Tokenizer.end_id`. Plain text and chats end with the same token."""
        return 1

    def tokens(self) -> Mapping[str, int]:
        """See `Tokenizer.tokens`."""
        return {self.PAD: 0, self.EOS: 1, self.BOS: 2, **self._ids}

    def save(self, folder: Path) -> None:
        """Write `char_tokenizer.json`, and the files of an equal tokenizer for `transformers`."""
        text = json.dumps({"alphabet": self.alphabet}, ensure_ascii=False)
        (folder / "char_tokenizer.json").write_text(text + "\n", encoding="utf-8")
        self._to_fast().save_pretrained(folder)

    @classmethod
    def load(cls, file: Path) -> "CharTokenizer":
        """Load the tokenizer that `save` wrote; `file` is the path of `char_tokenizer.json`."""
        try:
            alphabet = json.loads(file.read_text(encoding="utf-8"))["alphabet"]
            if not isinstance(alphabet, str):
                raise TypeError("its alphabet is not text")
            return cls(alphabet)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file}: not a character tokenizer ({error})") from None

    def _to_fast(self) -> Any:
        from tokenizers import Regex, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as Backend

        backend = Backend(models.WordLevel(dict(self.tokens())))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.post_processor = processors.TemplateProcessing(
            single=f"{self.BOS} $A", special_tokens=[(self.BOS, self._bos)]
        )
        return fast_tokenizer(
            backend, bos_token=self.BOS, eos_token=self.EOS, pad_token=self.PAD, chat_template=self._TEMPLATE
        )


def _transformers() -> Any:
    """Import `transformers` without its advice to install PyTorch, which tokenizers do not need."""
    name, given = "TRANSFORMERS_NO_ADVISORY_WARNINGS", os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ[name] = "1"
    try:
        import transformers
    finally:
        del os.environ[name]
        if given is not None:
            os.environ[name] = given
    return transformers


def fast_tokenizer(backend: Any, **settings: Any) -> Any:
    """Wrap a `tokenizers.Tokenizer` for `transformers`; `settings` go to `PreTrainedTokenizerFast`."""
    kind = _transformers().PreTrainedTokenizerFast
    return kind(tokenizer_object=backend, clean_up_tokenization_spaces=False, **settings)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer in a model folder. Nothing is downloaded, and no code from the folder is run."""
    folder = Path(folder)
    if (folder / "char_tokenizer.json").is_file():
        return CharTokenizer.load(folder / "char_tokenizer.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder}: no tokenizer files; expected tokenizer.json")
    try:
        kind = _tokenizer_class(folder)
        fast = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    # `transformers` raises many types, and a panic in the Rust code of `tokenizers` is no Exception.
    except BaseException as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error
    return HFTokenizer(fast, eos_ids=_stop_ids(folder), source=str(folder))


def _tokenizer_class(folder: Path) -> Any:
    """Return the class that loads the tokenizer. Avoid `AutoTokenizer` if possible: it imports torch."""
    transformers = _transformers()
    settings, own = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if own.is_file() and settings.is_file():
        named = read_json_object(settings).get("tokenizer_class")
        if named in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def _stop_ids(folder: Path) -> set[int]:
    """Return the end-of-text ids in `generation_config.json` or, if it has no such ids, in `config.json`."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            ids = read_json_object(file).get("eos_token_id")
            if ids is not None:
                found = ids if isinstance(ids, list) else [ids]
                if not all(type(i) is int for i in found):
                    raise ValueError(
                        f"{file}: eos_token_id is {ids!r}; possible: a token id, or a list of ids"
                    )
                return set(found)
    return set()
