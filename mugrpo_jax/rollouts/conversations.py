"""Between the sampler, which knows tokens, and an environment, which knows text."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from mugrpo_jax.models import Tokenizer
from mugrpo_jax.sampling import Dialogue, Reply, Response, Turns
from mugrpo_jax.sampling.messages import encode_message, turn_end
from mugrpo_jax.tasks import Answer, Environment, Message, Problem, Prompt, Score, Scorer, conversation_of


@dataclasses.dataclass(frozen=True)
class Conversations:
    """Asks an environment for the sampler, see `sampling.turns`, and prepares its responses for the scorer.

    Attributes:
      max_turns: most turns of the model in a response.
      role: role of the environment's messages.
      stop: texts that end a turn, besides the stop tokens of a request.
    """

    environment: Environment
    tokenizer: Tokenizer
    max_turns: int
    role: str = "user"
    stop: tuple[str, ...] = ()

    def dialogue(self, problems: Mapping[int, Problem]) -> Dialogue:
        """Return what `Sampler.run` takes; `problems` maps `Request.index` to a problem."""
        ends = functools.partial(turn_end, self.tokenizer, self.stop) if self.stop else None
        return Dialogue(functools.partial(self.ask, problems), ends)

    def ask(self, problems: Mapping[int, Problem], turns: Turns) -> "Future[Reply]":
        """Ask what follows the last turn; `problems` maps `Request.index` to a problem."""
        problem = problems[turns.request.index]
        reply: Future[Reply] = Future()

        def finish(answer: "Future[Answer]") -> None:
            try:
                reply.set_result(self._reply(answer.result(), problem.prompt, turns))
            except BaseException as error:  # the sampler raises it, for example because no worker could start
                reply.set_exception(error)

        said = self.conversation(problem.prompt, turns.tokens[::2], turns.messages)
        self.environment.ask(said, problem).add_done_callback(finish)
        return reply

    def _reply(self, answer: Answer, prompt: Prompt, turns: Turns) -> Reply:
        if answer.status != "ok":
            finish = "timeout" if answer.status == "timeout" else "environment"
            return Reply(None, "", finish, answer.status, f"environment: {answer.detail}")
        if answer.message is None:
            return Reply()
        if len(turns.tokens) // 2 + 1 >= self.max_turns:
            return Reply(finish="turns")
        chat, last = not isinstance(prompt, str), int(turns.tokens[-1][-1])
        try:
            ids = encode_message(self.tokenizer, answer.message, chat=chat, last=last, role=self.role)
            if not ids:
                raise ValueError("the tokenizer gives none")
        except (ValueError, TypeError) as error:  # for example a character that the tiny model does not have
            detail = f"environment: the message {answer.message[:40]!r} has no tokens: {error}"
            return Reply(None, "", "environment", "invalid", detail)
        return Reply(np.asarray(ids, np.int32), answer.message)

    def conversation(
        self, prompt: Prompt, turns: Sequence[np.ndarray], messages: Sequence[str]
    ) -> tuple[Message, ...]:
        """Return the prompt, the model's turns and the messages between them as messages of a chat."""
        said: list[str] = []
        for place, turn in enumerate(turns):
            said += [self.tokenizer.decode(turn.tolist()), *messages[place : place + 1]]
        return conversation_of(prompt, said, self.role)

    def last_turn(self, response: Response, problem: Problem) -> tuple[str, Problem]:
        """Return what the reward gets: the model's last turn, and the problem with the whole conversation."""
        turns = split_turns(response.tokens, response.mask)[::2]
        said = self.conversation(problem.prompt, turns, response.messages)
        return said[-1]["content"], dataclasses.replace(problem, conversation=said)


def split_turns(tokens: np.ndarray, mask: np.ndarray | None) -> list[np.ndarray]:
    """Split a response into the model's turns and the messages between them.

    >>> [part.tolist() for part in split_turns(np.arange(5), np.array([True, True, False, True, True]))]
    [[0, 1], [2], [3, 4]]
    """
    return [tokens] if mask is None else np.split(tokens, np.flatnonzero(np.diff(mask)) + 1)


def submit(
    scorer: Scorer, response: Response, problem: Problem, tokenizer: Tokenizer, asked: Conversations | None
) -> tuple["Future[Score]", str]:
    """Start to score a response; return the future of its score, and the text that is scored."""
    if asked is None:
        text = tokenizer.decode(response.tokens.tolist())
        return scorer.submit(text, problem), text
    text, problem = asked.last_turn(response, problem)
    if response.status != "ok":
        return scorer.fail(response.status, response.detail), text
    return scorer.submit(text, problem), text
