"""Prompts as users write them (texts, chat messages or token ids), and as the model gets them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mugrpo_jax.models import Tokenizer
from mugrpo_jax.sampling.requests import Message, encode_prompt, prompt_text

Prompt = str | Sequence[int] | Sequence[Message]


@dataclasses.dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as the model gets it: its text, with the chat template, and its tokens."""

    text: str
    tokens: list[int]


def render_prompts(tokenizer: Tokenizer, prompts: Sequence[Prompt], *, raw: bool) -> list[RenderedPrompt]:
    """Apply the chat template and tokenize; with `raw`, or without a template, texts stay as they are."""
    found = []
    for index, prompt in enumerate(prompts):
        chat: Any = prompt
        if is_tokens(prompt):
            tokens = [int(token) for token in chat]
            found.append(RenderedPrompt(tokenizer.decode(tokens), tokens))
            continue
        if not is_chat(prompt) and not isinstance(prompt, str):
            raise ValueError(f"prompt {index}: possible: a text, a list of chat messages, or token ids")
        if isinstance(prompt, str) and tokenizer.has_chat_template and not raw:
            chat = [{"role": "user", "content": prompt}]
        try:
            found.append(RenderedPrompt(prompt_text(tokenizer, chat), encode_prompt(tokenizer, chat)))
        except TypeError as error:  # raised by `tokenizers` for text that is not Unicode
            raise ValueError(f"prompt {index}: cannot be made into tokens: {error}") from None
    return found


def is_tokens(prompt: Any) -> bool:
    """Return whether a prompt is a list of token ids."""
    several = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str)
    return several and len(prompt) > 0 and all(isinstance(token, int | np.integer) for token in prompt)


def is_chat(prompt: Any) -> bool:
    """Return whether a prompt is a list of chat messages, each with the texts `role` and `content`."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(map(_is_message, prompt))


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in ("role", "content"))
