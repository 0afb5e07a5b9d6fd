"""Convert the messages of an environment to tokens, as they follow a turn of the model."""

from mugrpo_jax.models import Tokenizer

_EXAMPLE = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": "the answer"})
_MORE = "another question"


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


def stop_tokens(tokenizer: Tokenizer, stops: tuple[str, ...]) -> list[int]:
    """Return the tokens that end a turn: the end tokens, and the token of each text in `stops`."""
    found = set(tokenizer.eos_ids)
    for text in stops:
        ids = tokenizer.encode(text)
        if len(ids) != 1:
            raise ValueError(
                f"{text!r} is {len(ids)} tokens of this model; possible: texts that are one token, such as a "
                "special token, or an empty list, if the model ends its turns with its end token"
            )
        found.add(ids[0])
    return sorted(found)
