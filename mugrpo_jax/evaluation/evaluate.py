"""The one way to evaluate: problems and a sampler give scored responses, and these give an `EvalResult`.

`evaluate` is for one process. In a run on several hosts, each host calls `score_problems` for its own
problems, and every host calls `summarise` with the rows of all hosts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mugrpo_jax.evaluation.results import EvalResult, ResultsFile, ScoredResponse, summarise
from mugrpo_jax.models import Tokenizer
from mugrpo_jax.runs import progress
from mugrpo_jax.sampling import Request, Sampler, SamplingSettings, make_request
from mugrpo_jax.tasks import Problem, Score, Scorer


@dataclass(frozen=True)
class WantedResponse:
    """A response to generate: problem `index`, sample number `sample`."""

    index: int
    sample: int
    problem: Problem


@dataclass(frozen=True)
class GeneratedResponse:
    """A response that was generated; `finish_reason` is `stop` or `length`, `length` counts tokens."""

    index: int
    sample: int
    text: str
    finish_reason: str
    length: int


Generate = Callable[[list[WantedResponse]], Iterable[GeneratedResponse]]


def sampled_responses(
    open_sampler: Callable[[list[Request]], AbstractContextManager[Sampler]],
    tokens: Callable[[Problem], Sequence[int] | np.ndarray],
    tokenizer: Tokenizer,
    settings: SamplingSettings,
    *path: int,
    title: str,
) -> Generate:
    """A `generate` for `evaluate`, whose responses depend only on their own problem and sample.

    Args:
      open_sampler: a sampler for some requests.
      tokens: the prompt tokens of a problem.
      tokenizer: for the texts of responses and the tokens that end them.
      settings: how to sample.
      path: integers for the seeds, before the problem's index.
      title: of the progress bar.
    """

    def generate(wanted: list[WantedResponse]) -> Iterator[GeneratedResponse]:
        numbers: dict[int, list[int]] = {}
        for item in wanted:
            numbers.setdefault(item.index, []).append(item.sample)
        problems = {item.index: item.problem for item in wanted}
        requests = [
            make_request(tokens(problems[i]), settings, *path, i, stop=tokenizer.eos_ids, numbers=numbers[i])
            for i in numbers
        ]
        with open_sampler(requests) as sampler, progress.bar(len(wanted), title, "resp") as bar:
            for response in sampler.run(requests):
                yield GeneratedResponse(
                    index=response.index,
                    sample=response.sample,
                    text=tokenizer.decode(response.tokens.tolist()),
                    finish_reason=response.finish_reason,
                    length=len(response.tokens),
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

    With `out`, every result is appended to that JSON-lines file as soon as it is scored, and results that the
    file contains are not generated again. So an interrupted evaluation continues. It gives the same numbers
    if `generate` makes every response depend only on its own index and sample.

    Args:
      problems: to solve.
      generate: takes the responses that are wanted and yields them in any order.
      scorer: scores the responses while more are generated.
      samples: responses per problem.
      ks: for which k to compute pass@k, each at most `samples`.
      out: the results file.
      name: of the benchmark.
      answer_of: extracts a response's answer for a majority vote; an entry of `ANSWER_READERS`.
      confidence: of the intervals.
    """
    if samples < 1 or any(not 1 <= k <= samples for k in ks):
        raise ValueError(f"{name}: samples={samples}, ks={list(ks)}; possible: 1 <= k <= samples")
    rows = score_problems(
        problems, generate, scorer, samples=samples, out=out, name=name, answer_of=answer_of
    )
    assert rows is not None
    vote = answer_of is not None
    return summarise(name, rows, samples=samples, ks=ks, vote=vote, confidence=confidence)


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
    """Generate and score responses; the arguments are those of `evaluate`.

    Args:
      indices: the problems to evaluate here, by index; None evaluates all.
      stopped: whether to stop early, asked after every response.

    Returns:
      The scored responses by problem and sample; None if it was stopped early.
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
        results.add(ScoredResponse(problem=problem, answer=answer, **vars(score), **vars(response)))
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
    """Responses with their scores; scoring runs in the background while the next ones are generated."""
    waiting: deque[tuple[GeneratedResponse, Future[Score]]] = deque()
    for response in responses:
        waiting.append((response, scorer.submit(response.text, problems[response.index])))
        while waiting and waiting[0][1].done():
            yield waiting[0][0], waiting.popleft()[1].result()
        if stopped():
            return
    for response, future in waiting:
        yield response, future.result()
