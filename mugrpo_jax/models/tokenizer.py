"""Text to tokens and back: Hugging Face tokenizers, and a character-level one for tiny models."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Message = Mapping[str, str]

# Tokenizer files of a Hugging Face folder; `char_tokenizer.json` is our own format.
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


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
      vocab_size: number of token ids; the model has at least as many.
      pad_id: fills rows on the right.
      eos_ids: each of these ends a response.
    """

    vocab_size: int
    pad_id: int
    eos_ids: frozenset[int]

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """Tokens of `text`; `start` puts the beginning-of-text token first, if the model uses one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of tokens, without control tokens."""
        ...

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Messages (`role`, `content`) through the model's chat template."""
        ...

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Tokens of `chat_text`."""
        ...

    def save(self, folder: Path) -> None:
        """Write files from which `transformers.AutoTokenizer` loads the same tokenizer."""
        ...


class HFTokenizer:
    """A fast tokenizer of `transformers`."""

    def __init__(self, fast: Any, *, eos_ids: Iterable[int] = (), source: str = "tokenizer") -> None:
        self._fast = fast
        # Called directly: for one text, the wrappers of `transformers` cost more than the encoding.
        self._backend = fast.backend_tokenizer
        self._source = source
        self._start = [i for i in fast.encode("", add_special_tokens=True) if i == fast.bos_token_id]
        known = {fast.eos_token_id, *eos_ids} - {None}
        if not known:
            raise ValueError(f"{source}: no end-of-text token; a response would never end")
        self.eos_ids = frozenset(known)
        self.pad_id = min(known) if fast.pad_token_id is None else fast.pad_token_id
        self.vocab_size = len(fast)

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
        return str(
            self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """See `Tokenizer.chat`."""
        return self.encode(self.chat_text(messages, add_generation_prompt=add_generation_prompt))

    def save(self, folder: Path) -> None:
        """See `Tokenizer.save`."""
        self._fast.save_pretrained(folder)


class CharTokenizer:
    """One token per character, for tiny models with random weights.

    Ids: 0 pads, 1 ends a response, 2 begins a text, then the characters of `alphabet` in their order.

    >>> tokenizer = CharTokenizer("0123456789+=")
    >>> tokenizer.encode("1+2=", start=True)
    [2, 4, 13, 5, 14]
    >>> tokenizer.decode([6, 1, 0])
    '3'
    """

    PAD, EOS, BOS = "<|pad|>", "<|eos|>", "<|bos|>"
    _TEMPLATE = (
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )

    def __init__(self, alphabet: str) -> None:
        twice = [char for char in alphabet if alphabet.count(char) > 1]
        if not alphabet or twice:
            raise ValueError(
                f"CharTokenizer: alphabet must be distinct characters, got {twice[0]!r} twice"
                if twice
                else "CharTokenizer: alphabet is empty"
            )
        self.alphabet = alphabet
        self.pad_id, self.eos_ids, self._bos = 0, frozenset({1}), 2
        self._ids = {char: 3 + i for i, char in enumerate(alphabet)}
        self.vocab_size = 3 + len(alphabet)

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """See `Tokenizer.encode`; a character outside the alphabet is an error."""
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
        """The contents one after the other; the end token follows each message of the assistant."""
        ends = (self.EOS if message["role"] == "assistant" else "" for message in messages)
        return self.BOS + "".join(message["content"] + end for message, end in zip(messages, ends))

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """See `Tokenizer.chat`."""
        ids = [self._bos]
        for message in messages:
            ids += self.encode(message["content"])
            ids += [1] if message["role"] == "assistant" else []
        return ids

    def save(self, folder: Path) -> None:
        """Write `char_tokenizer.json`, and an equal fast tokenizer for `transformers`."""
        text = json.dumps({"alphabet": self.alphabet}, ensure_ascii=False)
        (folder / "char_tokenizer.json").write_text(text + "\n", encoding="utf-8")
        self._to_fast().save_pretrained(folder)

    @classmethod
    def load(cls, file: Path) -> "CharTokenizer":
        """Read `char_tokenizer.json`."""
        try:
            return cls(json.loads(file.read_text(encoding="utf-8"))["alphabet"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: not a character tokenizer ({error})") from None

    def _to_fast(self) -> Any:
        from tokenizers import Regex, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as Backend

        vocab = {self.PAD: 0, self.EOS: 1, self.BOS: 2, **self._ids}
        backend = Backend(models.WordLevel(vocab))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.post_processor = processors.TemplateProcessing(
            single=f"{self.BOS} $A", special_tokens=[(self.BOS, self._bos)]
        )
        return fast_tokenizer(
            backend, bos_token=self.BOS, eos_token=self.EOS, pad_token=self.PAD, chat_template=self._TEMPLATE
        )


def fast_tokenizer(backend: Any, **settings: Any) -> Any:
    """A tokenizer of `transformers` around one of `tokenizers`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **settings)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a model folder; local files only, never remote code."""
    folder = Path(folder)
    if (folder / "char_tokenizer.json").is_file():
        return CharTokenizer.load(folder / "char_tokenizer.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder}: no tokenizer files; expected tokenizer.json")
    try:
        fast = _tokenizer_class(folder).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types; tell the user the folder and the reason
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error
    return HFTokenizer(fast, eos_ids=_stop_ids(folder), source=str(folder))


def _tokenizer_class(folder: Path) -> Any:
    """The class that `AutoTokenizer` would choose; asking `AutoTokenizer` would import torch."""
    settings, own = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if own.is_file() and settings.is_file():
        named = json.loads(settings.read_text()).get("tokenizer_class")
        if named in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _stop_ids(folder: Path) -> set[int]:
    """The end-of-text ids in `generation_config.json`, or else in `config.json`."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            ids = json.loads(file.read_text()).get("eos_token_id")
            if ids is not None:
                return set(ids) if isinstance(ids, list) else {ids}
    return set()
