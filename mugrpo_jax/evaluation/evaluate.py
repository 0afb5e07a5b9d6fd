"""Evaluate a model: sample responses to problems, score the responses, and compute an `EvalResult`.

`evaluate` is for one process. In a run on several hosts, each host calls `score_problems` for its own
problems, and every host calls `summarise` with the rows of all hosts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mugrpo_jax.evaluation.results import EvalResult, ResultsFile, ScoredResponse, summarise
from mugrpo_jax.models import Tokenizer
from mugrpo_jax.rollouts.conversations import Conversations
from mugrpo_jax.runs import progress
from mugrpo_jax.sampling import Request, Sampler, SamplingSettings, make_request, prompt_text
from mugrpo_jax.tasks import Message, Problem, Score, Scorer
from mugrpo_jax.tasks.scoring import known_score


@dataclass(frozen=True)
class WantedResponse:
    """A request for one response: sample number `sample` (from 0) for problem number `index`."""

    index: int
    sample: int
    problem: Problem


@dataclass(frozen=True)
class GeneratedResponse:
    """A generated response.

    `length` is in tokens, `finish_reason` is `stop`, or `length` at the limit, and `prompt` is the prompt as
    the model got it, which results files keep. If an environment answered the model, `text` is the last turn,
    `length` counts the tokens that the model wrote, `messages` the messages of the environment, and
    `conversation` has everything that was said. `failure` is the status of an environment that failed, and
    the reason.
    """

    index: int
    sample: int
    text: str
    finish_reason: str
    length: int
    prompt: str = ""
    messages: int = 0
    conversation: tuple[Message, ...] = ()
    failure: tuple[str, str] | None = None


Generate = Callable[[list[WantedResponse]], Iterable[GeneratedResponse]]


def sampled_responses(
    open_sampler: Callable[[list[Request]], AbstractContextManager[Sampler]],
    tokens: Callable[[Problem], Sequence[int] | np.ndarray],
    tokenizer: Tokenizer,
    settings: SamplingSettings,
    *path: int,
    title: str,
    conversations: Conversations | None = None,
    stop: Iterable[int] | None = None,
) -> Generate:
    """Return a `generate` for `evaluate`; each response depends only on its problem and sample number.

    Args:
      open_sampler: returns a sampler for a list of requests.
      tokens: returns the prompt tokens of a problem.
      path: integers from which, with the problem's index, the seeds are derived.
      title: title of the progress bar.
      conversations: asks the environment after each turn; None if there is none.
      stop: token ids that end a turn; None: the end tokens of the tokenizer.
    """
    ends = tokenizer.eos_ids if stop is None else stop

    def generate(wanted: list[WantedResponse]) -> Iterator[GeneratedResponse]:
        numbers: dict[int, list[int]] = {}
        for item in wanted:
            numbers.setdefault(item.index, []).append(item.sample)
        problems = {item.index: item.problem for item in wanted}
        requests = [
            make_request(tokens(problems[i]), settings, *path, i, stop=ends, numbers=numbers[i])
            for i in numbers
        ]
        prompts = {i: prompt_text(tokenizer, problem.prompt) for i, problem in problems.items()}
        with open_sampler(requests) as sampler, progress.bar(len(wanted), title, "resp") as bar:
            dialogue = None if conversations is None else conversations.dialogue(problems)
            for response in sampler.run(requests, dialogue):
                text = tokenizer.decode(response.tokens.tolist())
                said: tuple[Message, ...] = ()
                if conversations is not None:
                    text, judged = conversations.last_turn(response, problems[response.index])
                    said = judged.conversation
                yield GeneratedResponse(
                    index=response.index,
                    sample=response.sample,
                    text=text,
                    finish_reason=response.finish_reason,
                    length=len(response.tokens) if response.mask is None else int(response.mask.sum()),
                    prompt=prompts[response.index],
                    messages=len(response.messages),
                    conversation=said,
                    failure=None if response.status == "ok" else (response.status, response.detail),
                )
                bar.update()

    return generate


def evaluate(
    problems: Sequence[Problem],
    generate: Generate,
    scorer: Scorer,
    *,
    samples: int,
    ks: Sequence[int] = (1,),
    out: str | Path | None = None,
    name: str = "test",
    answer_of: Callable[[str], str | None] | None = None,
    confidence: float = 0.95,
) -> EvalResult:
    """Generate `samples` responses to every problem, score them and compute their statistics.

    With `out`, every scored response is appended to that JSON-lines file at once, and responses in the file
    are not generated again, so that the same call resumes an interrupted evaluation. The result is the same
    if each response of `generate` depends only on its own index and sample.

    Args:
      generate: takes a list of requested responses and yields the responses in any order.
      scorer: scores responses in the background.
      ks: the values of k for pass@k, each at most `samples`.
      name: name of the benchmark.
      answer_of: returns the answer in a response or None, for a majority vote and for the share of malformed
        responses; an entry of `ANSWER_READERS`.
      confidence: level of the confidence intervals.
    """
    if samples < 1 or any(not 1 <= k <= samples for k in ks):
        raise ValueError(f"{name}: samples={samples}, ks={list(ks)}; possible: 1 <= k <= samples")
    rows = score_problems(
        problems, generate, scorer, samples=samples, out=out, name=name, answer_of=answer_of
    )
    assert rows is not None
    answers = answer_of is not None
    return summarise(name, rows, samples=samples, ks=ks, answers=answers, confidence=confidence)


def score_problems(
    problems: Sequence[Problem],
    generate: Generate,
    scorer: Scorer,
    *,
    samples: int,
    indices: Iterable[int] | None = None,
    out: str | Path | None = None,
    name: str = "test",
    answer_of: Callable[[str], str | None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[ScoredResponse] | None:
    """Generate and score responses; return them ordered by problem and sample, or None if stopped early.

    The arguments are those of `evaluate`, and two more. `indices` are the indices of the problems that this
    host evaluates (None: all). `stopped` is called after every response and returns True to stop early.
    """
    if not problems:
        raise ValueError(f"{name}: no problems to evaluate")
    results = ResultsFile(None if out is None else Path(out), name, problems, samples)
    wanted = [
        WantedResponse(i, sample, problems[i])
        for i in (range(len(problems)) if indices is None else indices)
        for sample in range(samples)
        if (i, sample) not in results.rows
    ]
    missing = {(item.index, item.sample) for item in wanted}
    for response, score in _scored(generate(wanted), problems, scorer, stopped) if wanted else ():
        if (key := (response.index, response.sample)) not in missing:
            raise ValueError(f"{name}: generate returned (index, sample) {key}, not or no longer wanted")
        missing.remove(key)
        answer = None if answer_of is None else answer_of(response.text)
        problem = problems[response.index].id
        scored = {**vars(score), "parts": dict(score.parts)}
        generated = {name: value for name, value in vars(response).items() if name != "failure"}
        results.add(ScoredResponse(problem=problem, answer=answer, **scored, **generated))
    if missing and stopped():
        return None
    if missing:
        raise ValueError(f"{name}: generate left out {len(missing)} of {len(wanted)} responses")
    return results.ordered()


def _scored(
    responses: Iterable[GeneratedResponse],
    problems: Sequence[Problem],
    scorer: Scorer,
    stopped: Callable[[], bool],
) -> Iterator[tuple[GeneratedResponse, Score]]:
    """Yield responses with their scores; responses are scored while the next responses are generated."""
    waiting: deque[tuple[GeneratedResponse, Future[Score]]] = deque()
    for response in responses:
        waiting.append((response, _submit(scorer, response, problems[response.index])))
        while waiting and waiting[0][1].done():
            yield waiting[0][0], waiting.popleft()[1].result()
        if stopped():
            return
    for response, future in waiting:
        if not known_score(future, stopped):
            return
        yield response, future.result()


def _submit(scorer: Scorer, response: GeneratedResponse, problem: Problem) -> "Future[Score]":
    if response.failure is not None:
        return scorer.fail(*response.failure)
    if response.conversation:
        problem = replace(problem, conversation=response.conversation)
    return scorer.submit(response.text, problem)
