"""What the policy answers, sampled and scored: the rollouts of a stage, and held-out problems."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from mugrpo_jax.config import RunConfig
from mugrpo_jax.rollouts import Stage
from mugrpo_jax.rollouts.shard_writer import ShardCollector
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.compile_clock import compile_clock
from mugrpo_jax.runs.stop import StopRequest
from mugrpo_jax.sampling import Request, read_ahead, request_seeds
from mugrpo_jax.setup.run_setup import Policy
from mugrpo_jax.tasks import Problem, Task
from mugrpo_jax.tasks.scoring import Scorer, failure, make_scorer

_EVALUATION = 1 << 20  # in the place of a stage's number, for the seeds of held-out problems


class Responses:
    """Samples from weights and scores what comes out; this host's share of it.

    What it holds on the device, the sampler, is gone when a method returns; scorers stay until `close`.
    """

    def __init__(self, config: RunConfig, policy: Policy, task: Task, stop: StopRequest) -> None:
        self.config, self.policy, self.task, self.stop = config, policy, task, stop
        self._resources = contextlib.ExitStack()
        # Requests of the next stage: made while this one is optimised.
        self._ahead: dict[Any, tuple[dict[int, Problem], Iterator[Request]]] = {}

    def close(self) -> None:
        """End the scorers."""
        self._resources.close()

    # What is built once, when it is first needed, and serves every stage.

    @functools.cached_property
    def _scorer(self) -> Scorer:
        task = self.config.task
        scorer = make_scorer(task.reward or self.task.reward, workers=task.scorers, deadline_s=task.deadline)
        return self._resources.enter_context(scorer)

    @functools.cached_property
    def _requests_thread(self) -> ThreadPoolExecutor:
        thread = ThreadPoolExecutor(1, "requests")
        self._resources.callback(thread.shutdown, cancel_futures=True)
        return thread

    @functools.cached_property
    def _held_out(self) -> tuple[list[Problem], list[Request]]:
        """This host's share of the problems to evaluate, and their requests."""
        wanted = self.config.evaluation
        problems = list(self.task.test[: wanted.problems])
        mine = range(jax.process_index(), len(problems), jax.process_count())
        requests = [
            self._request(_EVALUATION, i, problems[i], wanted.samples, wanted.temperature, wanted.top_p)
            for i in mine
        ]
        return problems, requests

    # -- rollouts

    def write_shards(
        self, params: Any, stage: Stage, stage_index: int, shards: Sequence[int]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Sample, score and write some shards of a stage.

        Returns how long its parts took, and of each status but `ok` an item and what happened to it. Asked to
        stop, it leaves the shards that are not complete.
        """
        group = self.config.batch.responses_per_prompt
        wanted = stage_index, _prompts(stage, shards)
        problems, requests = self._ahead.pop(wanted) if wanted in self._ahead else self._requests(*wanted)
        with (
            self.policy.sampler(params) as sampler,
            ShardCollector(stage, problems, group) as collector,
            progress.bar(len(wanted[1]) * group, f"stage {stage_index}: generate", "resp") as bar,
        ):
            started, compiled = time.monotonic(), compile_clock().seconds
            for response in sampler.run(requests):
                text = self.policy.tokenizer.decode(response.tokens)
                collector.add(response, self._scorer.submit(text, problems[response.index]))
                progress.show_sampling(
                    bar,
                    tokens=sampler.stats.tokens,
                    occupancy=sampler.stats.occupancy,
                    rewards=collector.reward,
                    scored=collector.scored,
                )
                if self.stop.requested:
                    break
            sampled = time.monotonic()
            seconds = {
                "sample": sampled - started,
                "compile": compile_clock().seconds - compiled,
                "score_wait": collector.finish(wait=not self.stop.requested),
                "write": collector.write_seconds,
                "device_idle": sampler.stats.host_seconds,
                "occupancy": sampler.stats.occupancy,
                "decode_steps": sampler.stats.steps,
            }
            return seconds, collector.examples

    def read_ahead(self, stage: Stage, stage_index: int, shards: Sequence[int]) -> None:
        """Start to make the requests of the stage that comes next, a stage of the same size."""
        following = stage_index, _prompts(stage, shards)
        self._ahead = {following: self._requests(*following)}

    def _problem(self, stage_index: int, index: int) -> Problem:
        """The training set in a new order on every pass; stages continue where the last one stopped."""
        train = self.task.train
        passes, place = divmod(stage_index * self.config.prompts_per_stage + index, len(train))
        return train[int(_order(self.config.seed, passes, len(train))[place])]

    def _requests(
        self, stage_index: int, prompts: Sequence[int]
    ) -> tuple[dict[int, Problem], Iterator[Request]]:
        """Requests of a stage, made as they are needed, and the problems of those that have been made."""
        problems: dict[int, Problem] = {}
        group, temperature = self.config.batch.responses_per_prompt, self.config.sampling.temperature

        def make() -> Iterator[Request]:
            for i in prompts:
                problems[i] = self._problem(stage_index, i)
                yield self._request(stage_index, i, problems[i], group, temperature)

        return problems, read_ahead(make(), self._requests_thread)

    def _request(
        self,
        stage_index: int,
        index: int,
        problem: Problem,
        samples: int,
        temperature: float,
        top_p: float = 1.0,
    ) -> Request:
        return Request(
            prompt=self.policy.prompt_tokens(problem),
            seeds=request_seeds(self.config.seed, stage_index, index, samples=samples),
            max_tokens=self.config.sampling.max_response_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=tuple(sorted(self.policy.tokenizer.eos_ids)),
            index=index,
        )

    # -- held-out problems

    def held_out(self, params: Any, title: str) -> dict[str, Any] | None:
        """Scores of this host's problems by index, statuses with examples; None if asked to stop."""
        problems, requests = self._held_out
        waiting = []
        with (
            self.policy.sampler(params) as sampler,
            progress.bar(len(requests) * self.config.evaluation.samples, title, "resp") as bar,
        ):
            for response in sampler.run(requests):
                text = self.policy.tokenizer.decode(response.tokens)
                waiting.append((response, self._scorer.submit(text, problems[response.index])))
                bar.update()
                if self.stop.requested:
                    return None
        scores = {request.index: [0.0] * len(request.seeds) for request in requests}
        status: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for response, future in waiting:
            score = future.result()
            scores[response.index][response.sample] = score.value
            status[score.status] += 1
            if score.status != "ok":
                examples.setdefault(score.status, failure(problems[response.index].id, score.detail))
        return {"scores": scores, "status": status, "examples": examples}


def _prompts(stage: Stage, shards: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for shard in shards for i in stage.shard_prompts(shard))


@functools.lru_cache(maxsize=2)
def _order(seed: int, passes: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, passes)).permutation(count)
