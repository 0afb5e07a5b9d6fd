"""Responses of several turns: masks and log-probs are exact, in any company, and every end has a reason."""

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
import pytest

from mugrpo_jax.models import token_logprobs
from mugrpo_jax.sampling import Dialogue, Reply, Request, Sampler, request_seeds

STOP = tuple(range(8))  # about one token in twenty ends a turn


@pytest.fixture(scope="module")
def turns_sampler(model, plan):
    with Sampler(*model, plan(turns=True)) as sampler:
        yield sampler


def done(reply):
    future = Future()
    future.set_result(reply)
    return future


def message(turns):
    """A message that depends on the turn, of 1 to 21 tokens; the longest needs two calls of `extend`."""
    last = turns.tokens[-1]
    return (int(last[-1]) + np.arange(1 + 5 * (len(last) % 5))) % 150 + 8


def three_turns(turns):
    return done(Reply(message(turns)) if len(turns.tokens) < 5 else Reply())


def requests(count, limit=80):
    seeds = [request_seeds(0, i, samples=2) for i in range(count)]
    prompts = [np.arange(1 + i % 7) + i for i in range(count)]
    return [Request(p, s, limit, stop=STOP, index=i) for i, (p, s) in enumerate(zip(prompts, seeds))]


def test_three_turns_are_one_sequence_whose_logprobs_are_the_training_forward_pass(turns_sampler, model):
    asked = []

    def ask(turns):
        asked.append(([part.tolist() for part in turns.tokens], turns.request.index, turns.sample))
        return three_turns(turns)

    responses = list(turns_sampler.run(requests(6), Dialogue(ask)))
    assert len(responses) == 12
    padded = np.zeros((12, 96), np.int32)
    for row, r in zip(padded, responses):
        row[: len(r.prompt_tokens) + len(r.tokens)] = np.concatenate([r.prompt_tokens, r.tokens])
    taught = np.asarray(jax.jit(token_logprobs, static_argnames="model")(*model, padded)[0])
    whole = [r for r in responses if r.finish_reason == "stop"]
    assert len(whole) >= 3
    for row, r in zip(taught, responses):
        start, wrote = len(r.prompt_tokens), np.ones(len(r.tokens), bool) if r.mask is None else r.mask
        row = row[start : start + len(r.tokens)]
        np.testing.assert_allclose(r.logprobs[wrote], row[wrote], atol=1e-5, rtol=0)
        assert not r.logprobs[~wrote].any() and (r.logprobs[wrote] < 0).all()
    for r in whole:
        # By hand: cut at the stop tokens of the model and at the messages that follow from them.
        place, mask = 0, []
        (parts, _, _) = next(a for a in asked if a[1:] == (r.index, r.sample) and len(a[0]) == 5)
        for number, part in enumerate(parts):
            assert r.tokens[place : place + len(part)].tolist() == part
            assert (part[-1] in STOP) == (number % 2 == 0) and not set(part[:-1]) & set(STOP)
            mask += [number % 2 == 0] * len(part)
            place += len(part)
        assert r.mask.tolist() == mask and place == len(r.tokens) and r.status == "ok"


def test_a_response_of_several_turns_does_not_depend_on_its_company_or_on_when_it_is_answered(turns_sampler):
    def found(sampler, wanted, ask):
        return {
            (r.index, r.sample): (r.tokens.tolist(), r.finish_reason)
            for r in sampler.run(wanted, Dialogue(ask))
        }

    wanted = found(turns_sampler, requests(6), three_turns)
    with ThreadPoolExecutor(3) as threads:

        def slow(turns):
            seconds = 0.002 * (turns.request.index % 3)
            return threads.submit(lambda: time.sleep(seconds) or three_turns(turns).result())

        assert found(turns_sampler, requests(6)[::-1], slow) == wanted
    alone = requests(6)[3]
    assert found(turns_sampler, [alone], three_turns) == {k: v for k, v in wanted.items() if k[0] == 3}


def test_a_prefix_is_not_computed_again(turns_sampler, monkeypatch):
    appended = []
    extend = turns_sampler._engine.extend
    monkeypatch.setattr(
        turns_sampler._engine, "extend", lambda entries: (appended.extend(entries), extend(entries))
    )
    responses = list(turns_sampler.run(requests(4), Dialogue(three_turns)))
    messages = sum(int((~r.mask).sum()) for r in responses if r.mask is not None)
    assert sum(entry[2] for entry in appended) == messages > 0
    assert turns_sampler.stats.prompts == 4


@pytest.mark.parametrize(
    "reply, reason",
    [
        (Reply(), "stop"),
        (Reply(finish="turns"), "turns"),
        (Reply(finish="timeout", status="timeout", detail="slow"), "timeout"),
        (Reply(np.full(79, 9)), "length"),  # no room for the message and one more token
    ],
)
def test_an_environment_can_end_a_response(turns_sampler, reply, reason):
    [response] = turns_sampler.run([Request([5, 9], [1], 80, stop=STOP)], Dialogue(lambda turns: done(reply)))
    assert response.finish_reason == reason and response.mask is None
    assert (response.status, response.detail) == (reply.status, reply.detail)
    assert int(response.tokens[-1]) in STOP


def test_a_response_of_several_turns_is_never_longer_than_its_limit(turns_sampler):
    responses = list(
        turns_sampler.run(requests(6, limit=30), Dialogue(lambda turns: done(Reply(message(turns)))))
    )
    assert {r.finish_reason for r in responses} == {"length"}
    assert max(len(r.tokens) for r in responses) <= 30


def test_a_plan_for_one_turn_takes_no_environment(sampler):
    with pytest.raises(ValueError, match="turns=True"):
        sampler.run(requests(1), Dialogue(three_turns))


def test_a_turn_that_ends_by_its_text_is_the_turn_that_ends_by_its_token(turns_sampler):
    """The same tokens end a turn, once on the device and once on the host, which throws the rest away."""

    def turn_end(tokens):
        places = np.flatnonzero(np.isin(tokens, STOP))
        return int(places[0]) + 1 if len(places) else None

    def found(wanted, dialogue):
        run = turns_sampler.run(wanted, dialogue)
        return {(r.index, r.sample): (r.tokens.tolist(), r.logprobs.tolist(), r.finish_reason) for r in run}

    by_token = found(requests(6), Dialogue(three_turns))
    free = [dataclasses.replace(request, stop=()) for request in requests(6)]
    by_text = found(free, Dialogue(three_turns, turn_end))
    assert by_text.keys() == by_token.keys() and {reason for _, _, reason in by_text.values()} == {
        "stop",
        "length",
    }
    for name, (tokens, logprobs, reason) in by_token.items():
        assert by_text[name][0] == tokens and by_text[name][2] == reason
        np.testing.assert_allclose(by_text[name][1], logprobs, atol=1e-5)
    assert found(requests(6), Dialogue(three_turns)) == by_token  # nothing is left behind in the slots
