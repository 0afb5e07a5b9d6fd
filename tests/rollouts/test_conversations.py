"""Between tokens and text: what the environment is asked, what the model gets, and what the reward sees."""

import functools
from concurrent.futures import Future

import numpy as np
import pytest

from mugrpo_jax.models import CharTokenizer
from mugrpo_jax.rollouts.conversations import Conversations, split_turns, submit
from mugrpo_jax.sampling import Request, Turns
from mugrpo_jax.tasks import Answer, InlineScorer, Problem

LETTERS = CharTokenizer("0123456789+=;")
PROBLEM = Problem("p", "1+2=", "3")


class Scripted:
    """An environment with one answer for each number of messages."""

    def __init__(self, *answers):
        self.answers, self.asked = answers, []

    def ask(self, conversation, problem):
        assert problem is PROBLEM
        self.asked.append(conversation)
        future = Future()
        future.set_result(self.answers[len(conversation) // 2 - 1])
        return future


def played(*answers, turns=("1+2=", "4=", ";3"), max_turns=3):
    """Play the turns of a model against an environment; return the response and all that was asked."""
    environment = Scripted(*answers)
    asked = Conversations(environment, LETTERS, max_turns)
    so_far = Turns(Request([1], [0], 99, stop=[1], index=7), 0)
    for turn in turns:
        ids = np.array(LETTERS.encode(turn) + [1] * (turn == ";3"), np.int32)
        so_far.add(ids, np.full(len(ids), -1, np.float32))
        reply = asked.ask({7: PROBLEM}, so_far).result()
        if reply.tokens is None:
            break
        so_far.add(reply.tokens, np.zeros(len(reply.tokens), np.float32))
        so_far.messages.append(reply.text)
    return so_far.response(reply), environment.asked, asked


def test_masks_tokens_and_texts_of_a_conversation_of_three_turns_by_hand():
    response, asked, conversations = played(Answer("3"), Answer("44"), Answer())
    assert LETTERS.decode(response.tokens.tolist()) == "1+2=34=44;3"
    assert "".join("m" if wrote else "e" for wrote in response.mask) == "mmmmemmeemmm"
    assert response.logprobs.tolist() == np.where(response.mask, -1.0, 0.0).tolist()
    assert [part.tolist() for part in split_turns(response.tokens, response.mask)][1::2] == [
        LETTERS.encode("3"),
        LETTERS.encode("44"),
    ]
    said = [("user", "1+2="), ("assistant", "1+2="), ("user", "3"), ("assistant", "4=")]
    said += [("user", "44"), ("assistant", ";3")]
    whole = tuple({"role": role, "content": text} for role, text in said)
    assert asked == [whole[:2], whole[:4], whole]
    text, problem = conversations.last_turn(response, PROBLEM)
    assert text == ";3" and problem.conversation == whole and problem == PROBLEM
    with InlineScorer("arithmetic") as scorer:
        score, scored = submit(scorer, response, PROBLEM, LETTERS, conversations)
        assert (score.result().value, scored) == (1.0, ";3")
    assert (response.finish_reason, response.status) == ("stop", "ok")


@pytest.mark.parametrize(
    "answer, max_turns, finish, status, detail",
    [
        (Answer("3"), 1, "turns", "ok", ""),
        (Answer(), 1, "stop", "ok", ""),
        (Answer(None, "timeout", "no reply"), 3, "timeout", "timeout", "environment: no reply"),
        (Answer(None, "error", "Oops"), 3, "environment", "error", "environment: Oops"),
        (
            Answer("x"),
            3,
            "environment",
            "invalid",
            "environment: the message 'x' has no tokens: CharTokenizer",
        ),
    ],
)
def test_every_end_has_its_finish_reason_and_a_failed_environment_is_counted(
    answer, max_turns, finish, status, detail
):
    response, _, conversations = played(answer, max_turns=max_turns)
    assert (response.finish_reason, response.status) == (finish, status)
    assert response.detail.startswith(detail) and response.mask is None
    with InlineScorer("arithmetic", failed=-1.0) as scorer:
        start = functools.partial(submit, scorer, response, PROBLEM, LETTERS, conversations)
        assert start()[0].result().value == (0.0 if status == "ok" else -1.0)
        assert scorer.counts[status] == 1 and scorer.counts.total() == 1


def test_a_message_without_tokens_is_a_failure():
    class Silent(CharTokenizer):
        def encode(self, text, *, start=False):
            return []

    asked = Conversations(Scripted(Answer("3")), Silent("0123456789+=;"), 3)
    so_far = Turns(Request([1], [0], 99, stop=[1], index=7), 0)
    so_far.add(np.array([4, 1], np.int32), np.zeros(2, np.float32))
    reply = asked.ask({7: PROBLEM}, so_far).result()
    assert (reply.tokens, reply.finish, reply.status) == (None, "environment", "invalid")
