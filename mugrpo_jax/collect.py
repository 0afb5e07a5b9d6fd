"""Responses on their way from the sampler and the scorer into shards."""

import time
from collections.abc import Mapping
from concurrent.futures import Future

from mugrpo_jax.rollouts import Group, Rollout, Stage
from mugrpo_jax.sampling import Response
from mugrpo_jax.tasks import Score


class ShardCollector:
    """Commits a shard when its last response is scored.

    Attributes:
      reward: sum of the rewards committed so far.
      scored: how many they are.
      write_seconds: spent on putting shards on disk.
    """

    def __init__(self, stage: Stage, problem_ids: Mapping[int, str], group: int) -> None:
        """Collect for `stage`; `problem_ids` by prompt index, `group` responses to each prompt."""
        self.stage, self.problem_ids, self.group = stage, problem_ids, group
        self.responses: dict[int, dict[int, tuple[Response, Future[Score]]]] = {}
        self.full: list[int] = []
        self.reward, self.scored, self.write_seconds = 0.0, 0, 0.0
        self._left: dict[int, int] = {}

    def add(self, response: Response, score: "Future[Score]") -> None:
        """Take a response and the future of its score; commit the shards that are complete."""
        self.responses.setdefault(response.index, {})[response.sample] = (response, score)
        shard = response.index // self.stage.prompts_per_shard
        left = self._left.setdefault(shard, len(self.stage.shard_prompts(shard)) * self.group) - 1
        self._left[shard] = left
        if not left:
            self.full.append(shard)
        self.finish(wait=False)

    def finish(self, *, wait: bool = True) -> None:
        """Commit complete shards; without `wait`, only those whose scores are all in."""
        for shard in list(self.full):
            prompts = self.stage.shard_prompts(shard)
            futures = [score for i in prompts for _, score in self.responses[i].values()]
            if wait or all(future.done() for future in futures):
                groups = [self._group(i) for i in prompts]
                started = time.monotonic()
                self.stage.write_shard(shard, groups)
                self.write_seconds += time.monotonic() - started
                self.full.remove(shard)

    def _group(self, index: int) -> Group:
        responses = self.responses.pop(index)
        rollouts = []
        for sample in range(self.group):
            response, future = responses[sample]
            score = future.result()
            self.reward += score.value
            self.scored += 1
            rollouts.append(
                Rollout(response.tokens, response.logprobs, score.value, response.finish_reason, score.status)
            )
        return Group(index, self.problem_ids[index], response.prompt_tokens, tuple(rollouts))
