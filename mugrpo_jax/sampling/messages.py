"""Convert the messages of an environment to tokens, as they follow a turn of the model."""

import bisect
from collections.abc import Sequence

import numpy as np

from mugrpo_jax.models import Tokenizer
from mugrpo_jax.sampling.requests import MAX_STOPS

# These texts are searched for in what a template writes. The number is there because a template may have a
# system prompt of its own, with words such as "the answer".
_EXAMPLE = (
    {"role": "user", "content": "example question 83b1"},
    {"role": "assistant", "content": "example answer 83b1"},
)
_MORE = "next question 83b1"


def encode_message(
    tokenizer: Tokenizer, message: str, *, chat: bool, last: int, role: str = "user"
) -> list[int]:
    """Return the tokens between the end of a turn and the start of the next turn.

    For plain text prompts these are the tokens of the message. For chats it is the message as the chat
    template writes it behind an answer, with everything that the template puts around it.

    Args:
      chat: whether the prompt is a chat.
      last: the last token of the turn. If it is not an end token, the template's end token comes first.
      role: role of the message in a chat.
    """
    if not (chat and tokenizer.has_chat_template):
        return tokenizer.encode(message)
    before = tokenizer.encode(_behind_answer(tokenizer, _MORE, role).partition(_MORE)[0])
    ends = [place for place, token in enumerate(before) if token in tokenizer.eos_ids]
    if not ends:
        raise ValueError(
            "the chat template does not put an end token behind an answer, so that no message can follow it; "
            "use plain text prompts"
        )
    return tokenizer.encode(_behind_answer(tokenizer, message, role))[ends[0] + (last in tokenizer.eos_ids) :]


def _behind_answer(tokenizer: Tokenizer, message: str, role: str) -> str:
    """Return what the chat template writes behind an answer if this message follows it."""
    text = tokenizer.chat_text([*_EXAMPLE, {"role": role, "content": message}])
    return text.partition(_EXAMPLE[1]["content"])[2]


def stop_tokens(tokenizer: Tokenizer, stops: Sequence[str]) -> list[int]:
    """Return the tokens that end a turn at once: end tokens, and the texts in `stops` that are one token.

    At most `MAX_STOPS` tokens are returned, so the tokenizer must not have more end tokens. Texts that are
    left out end a turn too, see `turn_end`.
    """
    found = sorted(tokenizer.eos_ids)
    ids = [tokenizer.encode(text) for text in stops]
    single = dict.fromkeys(one[0] for one in ids if len(one) == 1 and one[0] not in found)
    return [*found, *single][:MAX_STOPS]


def turn_end(tokenizer: Tokenizer, stops: Sequence[str], tokens: np.ndarray) -> int | None:
    """Return the number of tokens after which the text of a turn has one of `stops`; None if it has none."""

    def stopped(count: int) -> bool:
        text = tokenizer.decode(tokens[:count].tolist())
        return any(stop in text for stop in stops)

    if not stopped(len(tokens)):
        return None
    return bisect.bisect_left(range(len(tokens)), True, lo=1, key=stopped)
