"""Sample and score the responses of a stage, and write them to disk as shards."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from mugrpo_jax.models import Tokenizer
from mugrpo_jax.rollouts.conversations import Conversations, submit
from mugrpo_jax.rollouts.shard_writer import ShardFolder, ShardWriter
from mugrpo_jax.runs import progress
from mugrpo_jax.sampling import Request, Sampler, SamplingSettings, make_request, read_ahead
from mugrpo_jax.tasks import Problem, Scorer


@dataclasses.dataclass(frozen=True)
class StageRequests:
    """An iterator over requests, and a dict from prompt index to problem for the requests made so far."""

    requests: Iterator[Request]
    problems: Mapping[int, Problem]


def stage_requests(
    stage_index: int,
    prompts: Sequence[int],
    problem: Callable[[int], Problem],
    tokens: Callable[[Problem], np.ndarray],
    settings: SamplingSettings,
    *,
    stop: Iterable[int],
    thread: Executor,
    split: Callable[[int], Sequence[tuple[Sequence[int], float]]] | None = None,
) -> StageRequests:
    """Return the requests for some prompts of a stage, and start to make these requests in another thread.

    Args:
      stage_index: number of the stage, from which the seeds are derived.
      prompts: indices of the prompts in the stage.
      problem: returns the problem for a prompt index.
      tokens: returns the prompt tokens of a problem.
      stop: token ids that end a response.
      thread: the executor in which the requests are made.
      split: returns for a prompt index the sample numbers to request, with a temperature for each list of
        them; None: all samples, with the temperature in `settings`.
    """
    problems: dict[int, Problem] = {}

    def make() -> Iterator[Request]:
        for index in prompts:
            problems[index] = problem(index)
            prompt = tokens(problems[index])
            if split is None:
                yield make_request(prompt, settings, stage_index, index, stop=stop)
                continue
            for numbers, temperature in split(index):
                own = dataclasses.replace(settings, temperature=temperature)
                yield make_request(prompt, own, stage_index, index, stop=stop, numbers=numbers)

    return StageRequests(read_ahead(make(), thread), problems)


def training_problem(train: Sequence[Problem], seed: int, position: int) -> Problem:
    """Return the problem at a position in an endless sequence of epochs, each with its own random order."""
    epoch, place = divmod(position, len(train))
    return train[int(training_order(seed, epoch, len(train))[place])]


@functools.lru_cache(maxsize=2)
def training_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order of the training problems in an epoch, as indices."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def write_shards(
    sampler: Sampler,
    stage: ShardFolder,
    wanted: StageRequests,
    scorer: Scorer,
    *,
    behaviors: Callable[[int], Mapping[int, str]],
    tokenizer: Tokenizer,
    conversations: Conversations | None,
    answer_of: Callable[[str], str | None] | None,
    stopped: Callable[[], bool],
    bar: Any,
) -> tuple[dict[str, float], dict[str, str]]:
    """Sample and score all requests, write their shards to `stage`, and show the progress in `bar`.

    Args:
      sampler: a sampler with the weights of the behavior policy.
      wanted: the requests for all prompts of the shards to write.
      behaviors: returns for a prompt index the requested sample numbers, each with the name of its behavior.
      scorer: scores finished responses while other responses are sampled.
      tokenizer: converts tokens to text.
      conversations: asks the environment after each turn; None if there is none.
      answer_of: returns the answer in a response or None, an entry of `ANSWER_READERS`; None if unknown.
      stopped: returns True if the run was asked to stop. Then incomplete shards are not written.

    Returns:
      Seconds and counts for the journal, and a dict from each status except `ok` to a text about one example.
    """
    with ShardWriter(stage, wanted.problems, behaviors, answer_of) as writer:
        started = time.monotonic()
        dialogue = None if conversations is None else conversations.dialogue(wanted.problems)
        for response in sampler.run(wanted.requests, dialogue):
            problem = wanted.problems[response.index]
            writer.add(response, *submit(scorer, response, problem, tokenizer, conversations))
            progress.show_sampling(
                bar,
                tokens=sampler.stats.tokens,
                occupancy=sampler.stats.occupancy,
                rewards=writer.reward,
                scored=writer.scored,
            )
            if stopped():
                break
        seconds = {
            "sample": time.monotonic() - started,
            "score_wait": writer.finish(stopped),
            "write": writer.write_seconds,
            "device_idle": sampler.stats.host_seconds,
            "occupancy": sampler.stats.occupancy,
            "decode_steps": sampler.stats.steps,
            "slot_steps": sampler.stats.slot_steps,
        }
        return seconds, writer.examples
