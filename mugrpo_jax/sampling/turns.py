"""Responses of several turns: after a turn of the model, an environment may answer, and the model goes on.

A response stays one sequence of tokens: the model's turns, and between them the environment's messages. It
keeps its slot and the KV cache in it, so that only the message is computed before the next turn.
"""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from mugrpo_jax.sampling.programs import pack_message
from mugrpo_jax.sampling.requests import Request, Response
from mugrpo_jax.sampling.sampler_plan import SamplerPlan


@dataclasses.dataclass(frozen=True)
class Reply:
    """What an environment says after a turn.

    Attributes:
      tokens: the message, at least one token; None ends the response.
      text: the message as the environment said it, for `Response.messages`.
      finish: why the response ends, for `Response.finish_reason`; only used without a message.
      status, detail: `ok`, or how and why the environment failed; see `Response.status`.
    """

    tokens: np.ndarray | None = None
    text: str = ""
    finish: str = "stop"
    status: str = "ok"
    detail: str = ""


class Turns:
    """One response so far: tokens and log-probs of the model's turns (even places) and of the messages."""

    def __init__(self, request: Request, number: int) -> None:
        self.request, self.number = request, number
        self.tokens: list[np.ndarray] = []
        self.messages: list[str] = []
        self.logprobs: list[np.ndarray] = []

    @property
    def sample(self) -> int:
        """The number of the sample, as in `Response.sample`."""
        return self.number if self.request.numbers is None else int(self.request.numbers[self.number])

    @property
    def left(self) -> int:
        """How many more tokens the response may have."""
        return self.request.limits[self.number] - sum(map(len, self.tokens))

    def add(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Add a turn or a message."""
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)

    def response(self, reply: Reply) -> Response:
        """Return the finished response; the last part is a turn of the model."""
        wrote = [np.full(len(part), place % 2 == 0) for place, part in enumerate(self.tokens)]
        return Response(
            index=self.request.index,
            sample=self.sample,
            prompt_tokens=np.asarray(self.request.prompt),
            tokens=np.concatenate(self.tokens),
            logprobs=np.concatenate(self.logprobs),
            finish_reason=reply.finish,
            mask=np.concatenate(wrote) if len(wrote) > 1 else None,
            messages=tuple(self.messages),
            status=reply.status,
            detail=reply.detail,
        )


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """How an environment talks to the model.

    Attributes:
      ask: asks the environment what follows the last turn; several replies may be awaited at the same time.
      turn_end: returns after how many of the tokens of a turn the turn ends, because its text has a stop text
        there; None if it goes on. None in place of the function: only stop tokens end a turn.
    """

    ask: Callable[[Turns], "Future[Reply]"]
    turn_end: Callable[[np.ndarray], int | None] | None = None


class OpenTurns:
    """The responses of several turns that are under way, by their slots.

    `asked` are the slots whose environment has not replied yet. Such a slot is neither busy nor free.
    """

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._so_far: dict[int, Turns] = {}
        self.asked: dict[int, Future[Reply]] = {}

    @property
    def by_text(self) -> bool:
        """Whether a text can end a turn, so that unfinished turns must be looked at."""
        return self._dialogue.turn_end is not None

    def ends(self, tokens: np.ndarray) -> int | None:
        """Return after how many tokens a turn ends because of its text; None if it goes on."""
        return None if self._dialogue.turn_end is None else self._dialogue.turn_end(tokens)

    def end_turn(
        self, slot: int, request: Request, number: int, tokens: np.ndarray, logprobs: np.ndarray
    ) -> Response | None:
        """Add a turn that has ended and ask the environment; return the response if it has ended too."""
        turns, cut = self._so_far.setdefault(slot, Turns(request, number)), self.ends(tokens)
        turns.add(tokens[:cut], logprobs[:cut])
        if cut is None and int(tokens[-1]) not in request.stop:
            return self._end(slot, Reply(finish="length"))
        self.asked[slot] = self._dialogue.ask(turns)
        return None

    def replies(self, *, patient: bool) -> Iterator[tuple[int, Turns | Response]]:
        """Yield each slot whose environment has replied: how its response goes on, or the whole response.

        With `patient`, wait until at least one environment has replied.
        """
        if patient and self.asked:
            wait(self.asked.values(), return_when=FIRST_COMPLETED)
        for slot in [slot for slot, future in self.asked.items() if future.done()]:
            reply, turns = self.asked.pop(slot).result(), self._so_far[slot]
            if reply.tokens is None:
                yield slot, self._end(slot, reply)
            elif len(reply.tokens) >= turns.left:  # no room for the message and one more token
                yield slot, self._end(slot, Reply(finish="length"))
            else:
                turns.add(np.asarray(reply.tokens, np.int32), np.zeros(len(reply.tokens), np.float32))
                turns.messages.append(reply.text)
                yield slot, turns

    def _end(self, slot: int, reply: Reply) -> Response:
        return self._so_far.pop(slot).response(reply)


def message_entries(plan: SamplerPlan, messages: dict[int, Turns]) -> Iterator[list[Any]]:
    """Yield the entries for calls of `extend` that put the last message of each response into its slot.

    A long message needs several calls. Its pieces do not depend on the other messages.
    """
    waiting = {slot: _pieces(plan, slot, turns) for slot, turns in messages.items()}
    while waiting:
        now = list(waiting)[: plan.message_rows]
        yield [waiting[slot].pop(0) for slot in now]
        waiting = {slot: pieces for slot, pieces in waiting.items() if pieces}


def _pieces(plan: SamplerPlan, slot: int, turns: Turns) -> list[np.ndarray]:
    message, size = turns.tokens[-1], plan.message_tokens
    # The last token of the turn is not in the cache yet. The last token of the message is fed by `decode`.
    fed = np.concatenate([turns.tokens[-2][-1:], message])
    before = len(turns.request.prompt) + sum(map(len, turns.tokens)) - len(fed)
    return [
        pack_message(size, slot, before + start, fed[start : start + size + 1], turns.left)
        for start in range(0, len(message), size)
    ]
