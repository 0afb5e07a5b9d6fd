"""The objects that are needed to sample the rollouts of a run, in a trainer or in a sampler of its own."""

import contextlib
import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mugrpo_jax.config import RunConfig
from mugrpo_jax.loop.failed_rewards import run_scorer
from mugrpo_jax.rollouts.conversations import Conversations
from mugrpo_jax.rollouts.generate_rollouts import StageRequests
from mugrpo_jax.runs.stop import StopRequest
from mugrpo_jax.setup.run_environment import open_conversations
from mugrpo_jax.setup.run_setup import RunSetup
from mugrpo_jax.tasks import Scorer, Task


@dataclasses.dataclass
class SamplingContext:
    """The objects that sampling needs.

    Attributes:
      resources: closes files, threads and trackers at the end.
      next_requests: ((stage, prompts), requests) for the next stage, made while this stage is optimised.
    """

    setup: RunSetup
    task: Task
    stop: StopRequest
    resources: contextlib.ExitStack
    next_requests: tuple[Any, StageRequests] | None = dataclasses.field(default=None, kw_only=True)

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.setup.config

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer of responses, which is started when it is first used."""
        return self.resources.enter_context(run_scorer(self.config, self.task))

    @functools.cached_property
    def conversations(self) -> Conversations | None:
        """Asks the environment, which is started when it is first used; None if the run has none."""
        memory = self.config.task.scorer_memory_mb
        found = open_conversations(self.config.environment, self.setup.tokenizer, memory)
        if found is not None:
            self.resources.enter_context(found.environment)
        return found

    @functools.cached_property
    def request_thread(self) -> ThreadPoolExecutor:
        """The thread that prepares the sampling requests of the next stage while this one is trained on."""
        thread = ThreadPoolExecutor(1, "requests")
        self.resources.callback(thread.shutdown, cancel_futures=True)
        return thread
