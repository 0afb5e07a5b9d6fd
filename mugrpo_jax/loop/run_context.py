"""Open and close a run, and hold the objects that all its phases share."""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax import config as configs
from mugrpo_jax import distributed, training
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.loop import replay
from mugrpo_jax.loop.failed_rewards import run_scorer
from mugrpo_jax.loop.pending_metrics import PendingMetrics
from mugrpo_jax.loop.preflight import check_problems, check_reward
from mugrpo_jax.report.live import LiveReport
from mugrpo_jax.rollouts.generate_rollouts import StageRequests
from mugrpo_jax.runs.journal import Journal
from mugrpo_jax.runs.run_data import check_data, claim_data
from mugrpo_jax.runs.run_folder import RunFolder, check_config
from mugrpo_jax.runs.stop import StopRequest
from mugrpo_jax.runs.trackers import check_trackers, open_trackers
from mugrpo_jax.setup.initial_model import run_model_tokenizer
from mugrpo_jax.setup.run_setup import RunSetup, load_run_model
from mugrpo_jax.tasks import Scorer, Task, load_task


@dataclasses.dataclass
class RunContext:
    """The objects that all phases of an open run share.

    Attributes:
      params: the initial weights; None once the training state contains them.
      resources: closes files, threads and trackers at the end of the run.
      pending: the updates whose metrics are not in the journal yet.
      saved: the number of updates at the newest checkpoint.
      next_requests: ((stage, prompts), requests) for the next stage, made while this stage is optimised.
      step: computes one update; None before the first update.
      first_skip: number and loss of the first update whose gradient was not finite; None if there was none.
    """

    folder: RunFolder
    setup: RunSetup
    params: Any
    task: Task
    optimizer: Any
    checkpoints: training.CheckpointStore
    stop: StopRequest
    report: LiveReport
    resources: contextlib.ExitStack
    pending: PendingMetrics = dataclasses.field(default_factory=lambda: PendingMetrics(lambda *_: None))
    saved: int = 0
    next_requests: tuple[Any, StageRequests] | None = None
    step: training.UpdateStep | None = None
    first_skip: tuple[int, float] | None = None

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.folder.config

    @property
    def journal(self) -> Journal:
        """The run's journal."""
        return self.folder.journal

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer of responses, which is started when it is first used."""
        return self.resources.enter_context(run_scorer(self.config, self.task))

    @functools.cached_property
    def request_thread(self) -> ThreadPoolExecutor:
        """The thread that prepares the sampling requests of the next stage while this one is trained on."""
        thread = ThreadPoolExecutor(1, "requests")
        self.resources.callback(thread.shutdown, cancel_futures=True)
        return thread

    @functools.cached_property
    def _vote(self) -> distributed.Vote | None:
        return None if jax.process_count() == 1 else distributed.Vote(self.setup.mesh)

    def stop_metric(self) -> dict[str, jax.Array]:
        """Return the metric `stop`, which is 1 on all hosts if any host was asked to stop; {} on one host."""
        return {} if self._vote is None else {"stop": self._vote(self.stop.requested)}


@contextlib.contextmanager
def open_run(config: RunConfig, path: Path) -> Iterator[RunContext]:
    """Load the model and the task, and open the run's folder; leaving the context closes everything."""
    with StopRequest() as stop, contextlib.ExitStack() as resources:
        distributed.check_same("config", configs.to_dict(config))
        with distributed.together("load"):
            check_config(path, config)
            check_trackers(config)
            if config.replay.run is not None:
                replay.rollouts(config)
            task = load_task(config.task.name, **config.task.options)
            if not len(task.train):
                raise ConfigError(f"task {task.name}: no training problems")
            check_data(path, task.sources)
            task, _ = check_problems(config, task, run_model_tokenizer(config))
            check_reward(config, task)
            setup, params = load_run_model(config)
        distributed.check_same("data", task.sources)
        folder = _open_folder(path, config)  # last: a config that cannot run must not claim the folder
        with distributed.together("data"):
            claim_data(path, task.sources)
        checkpoints = training.CheckpointStore(
            path / "checkpoints", config.checkpoints, updates_per_stage=config.batch.updates_per_stage
        )
        gc.freeze()  # garbage collections need not visit the model, the task and the modules again
        resources.callback(gc.unfreeze)
        report = LiveReport(path, setup)
        resources.callback(report.finish)
        for tracker in open_trackers(config, path) if jax.process_index() == 0 else ():
            folder.journal.follow(tracker)
            resources.callback(tracker.close)
        resources.callback(checkpoints.close)
        optimizer = training.make_optimizer(config.optimizer, config.total_updates, setup.model)
        run = RunContext(folder, setup, params, task, optimizer, checkpoints, stop, report, resources)
        del params  # this frame lives as long as the run and must not keep the initial weights in memory
        with jax.set_mesh(setup.mesh):
            yield run


def _open_folder(path: Path, config: RunConfig) -> RunFolder:
    """Open the folder of the run. The first host creates it before the other hosts open it."""
    folder: RunFolder | None = None
    for first in (True, False):
        with distributed.together("claim"):
            if first == (jax.process_index() == 0):
                folder = RunFolder(path, config)
    assert folder is not None
    return folder
