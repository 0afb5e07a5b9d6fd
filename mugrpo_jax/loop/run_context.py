"""Open and close a run, and hold the objects that all its phases share."""

import contextlib
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mugrpo_jax import config as configs
from mugrpo_jax import distributed, training
from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import to_path, write_atomically
from mugrpo_jax.loop import replay
from mugrpo_jax.loop.pending_metrics import PendingMetrics
from mugrpo_jax.loop.preflight import check_problems, check_reward, unusual_advantage, unusual_data
from mugrpo_jax.loop.sampler_thread import SamplerThread
from mugrpo_jax.loop.sampling_context import SamplingContext
from mugrpo_jax.loop.whole_checkpoints import move_unusable
from mugrpo_jax.report.live import LiveReport
from mugrpo_jax.rollouts import RolloutFolder
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.journal import Journal
from mugrpo_jax.runs.run_data import changed_code, check_data, claim_code, claim_data
from mugrpo_jax.runs.run_folder import RunFolder, check_config, check_place, is_sampled, keep_choices
from mugrpo_jax.runs.run_lock import RunLock
from mugrpo_jax.runs.sampler_claims import SamplerWatch, refuse_samplers
from mugrpo_jax.runs.set_aside import reason_to_move, set_aside
from mugrpo_jax.runs.start_times import FIRST_TOKEN, StartTimes
from mugrpo_jax.runs.stop import Stopped, StopRequest
from mugrpo_jax.runs.time_left import TimeLeft
from mugrpo_jax.runs.trackers import check_trackers, open_trackers
from mugrpo_jax.runs.waiting import WAIT_LIMIT_S, Waiting
from mugrpo_jax.setup.auto_settings import Choice, choose_settings
from mugrpo_jax.setup.behavior_policy import check_behaviors
from mugrpo_jax.setup.devices import run_mesh
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.published_policies import PublishedPolicies
from mugrpo_jax.setup.reference_policy import check_reference
from mugrpo_jax.setup.run_environment import check_environment
from mugrpo_jax.setup.run_setup import load_run_model
from mugrpo_jax.setup.stored_rollouts import behavior_names
from mugrpo_jax.tasks import load_task
from mugrpo_jax.tasks.own_functions import code_digests


@dataclasses.dataclass
class Waits:
    """What a trainer needs that waits for the rollouts of samplers: `waiting` is its patience.

    `thread` is the sampler on other devices of this process, if there is one. `seconds` is how long the
    trainer waited for the rollouts of each stage. `samplers` tells which samplers are alive.
    """

    waiting: Waiting
    thread: SamplerThread | None = None
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    samplers: SamplerWatch = dataclasses.field(default_factory=SamplerWatch)


@dataclasses.dataclass
class RunContext(SamplingContext):
    """The objects that all phases of an open run share, beside those that sampling needs.

    Attributes:
      params: the initial weights to train; None once the training state contains them.
      learning_rates: the learning rate of every update, see `training.learning_rates`.
      time_left: estimates the time that the whole run still needs; only process 0 has an estimate.
      start_times: the time from the start of the command to the first token and the first update.
      pending: the updates whose metrics are not in the journal yet.
      saved: the number of updates at the newest checkpoint.
      generated: folder and manifest of each stage that is ready to train on, but was not trained on yet.
      policies: the weights that are published for samplers.
      waits: how to wait for rollouts that samplers of their own write; None: this process generates them.
      step: computes one update; None before the first update.
      reference: model and weights of the reference policy, if they stay in memory.
      reference_scorer: computes the log-probs of the reference policy; None before it is first needed.
      first_skip: number and loss of the first update whose gradient was not finite; None if there was none.
    """

    folder: RunFolder
    params: Any
    optimizer: Any
    learning_rates: np.ndarray
    checkpoints: training.CheckpointStore
    report: LiveReport
    time_left: TimeLeft
    start_times: StartTimes
    policies: PublishedPolicies
    pending: PendingMetrics = dataclasses.field(default_factory=lambda: PendingMetrics(lambda *_: None))
    saved: int = 0
    generated: dict[int, tuple[RolloutFolder, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    waits: Waits | None = None
    step: training.UpdateStep | None = None
    reference: tuple[Any, Any] | None = None
    reference_scorer: training.ResponseScorer | None = None
    first_skip: tuple[int, float] | None = None

    @property
    def journal(self) -> Journal:
        """The run's journal."""
        return self.folder.journal

    @property
    def state_fields(self) -> dict[str, Any]:
        """The optional fields of the training state, as `training.make_state` takes them."""
        return {"track_drift": self.config.track_drift, "proximal": self.config.proximal_dtype}

    def abstract_state(self) -> training.TrainState:
        """Return the training state as abstract arrays with shardings."""
        return training.abstract_state(
            self.optimizer, self.setup.mesh, self.setup.trainable, **self.state_fields
        )

    @property
    def start_folder(self) -> Path:
        """Folder of the run whose start is the reference policy `start`: this run, or the replayed run."""
        return self.folder.folder if self.config.replay.run is None else to_path(self.config.replay.run)

    @functools.cached_property
    def behaviors(self) -> tuple[str, ...]:
        """The names of the behaviors whose diagnostics are recorded; () if all responses have the same."""
        return behavior_names(self.config)

    @functools.cached_property
    def _vote(self) -> distributed.Vote | None:
        return None if jax.process_count() == 1 else distributed.Vote(self.setup.mesh)

    def stop_metric(self) -> dict[str, jax.Array]:
        """Return the metric `stop`, which is 1 on all hosts if any host was asked to stop; {} on one host."""
        return {} if self._vote is None else {"stop": self._vote(self.stop.requested)}


@contextlib.contextmanager
def open_run(
    config: RunConfig,
    path: Path,
    *,
    back_to: int | None = None,
    overwrite: bool = False,
    started: float | None = None,
    wait_limit_s: float | None = None,
) -> Iterator[RunContext]:
    """Load the model and the task, and open the run's folder; leaving the context closes everything.

    With `back_to`, the checkpoints after so many updates are moved away, so that the run goes back to there.
    With `overwrite`, a run in the folder that cannot continue with this config is moved aside. `started` is
    when the user's command started, on the clock of `time.monotonic`; None: now. With `wait_limit_s`, other
    processes write the rollouts, and the run waits so many seconds for a sign of life of them.
    """
    start_times = StartTimes(time.monotonic() if started is None else started)
    if config.mesh.sampling_devices and config.replay.run is None and wait_limit_s is None:
        wait_limit_s = WAIT_LIMIT_S
    with StopRequest() as stop, contextlib.ExitStack() as resources:
        distributed.check_same("config", configs.to_dict(config))
        with distributed.together("load"):
            check_place(path)
            config, choices = _chosen(keep_choices(path, config))
            if not overwrite:
                check_config(path, config)
            check_trackers(config, path)
            if wait_limit_s is not None and config.replay.run is not None:
                raise ConfigError("--rollouts wait: a replay has its rollouts already; leave this option out")
            task = load_task(config.task.name, **config.task.options)
            sources = dict(task.sources)
            if config.replay.run is not None:
                stage = replay.rollouts(config)
                sources[f"rollouts of {config.replay.run}"] = stage.content_hash()
            if not len(task.train):
                raise ConfigError(f"task {task.name}: no training problems")
            if not overwrite:
                check_data(path, sources)
            elif back_to is not None and (reason := reason_to_move(path, config, sources)):
                raise ConfigError(
                    f"--back-to: {path} cannot go back, because --overwrite would move it away ({reason}); "
                    "leave out one of the two"
                )
            tokenizer = run_model_tokenizer(config)
            task, lengths = check_problems(config, task, tokenizer)
            environment = check_environment(config, tokenizer, task.train)
            reward = check_reward(config, task)
            code = code_digests(config.own_functions)
            notes = unusual_data(task), lengths, environment, reward, unusual_advantage(config)
            about = "\n".join(filter(None, notes))
        distributed.check_same("chosen settings", configs.to_dict(config))
        distributed.check_same("data", sources)
        distributed.check_same("code", code)
        if about:
            progress.say(about)
        with distributed.together("model"):  # after the data: from here on, devices may wait for other hosts
            setup, params = load_run_model(config)
            check_reference(config, setup.mesh)
            check_behaviors(config, setup.mesh)
        # After everything else: a config that cannot run must not claim the folder.
        with distributed.together("overwrite"):
            if overwrite and jax.process_index() == 0:
                set_aside(path, config, sources)
        folder = _open_folder(path, config, resources, samples=wait_limit_s is None)
        if wait_limit_s is None and jax.process_index() == 0 and not is_sampled(path, config):
            refuse_samplers(path)
        with distributed.together("data"):
            if choices and jax.process_index() == 0:
                text = json.dumps([dataclasses.asdict(choice) for choice in choices], indent=1)
                write_atomically(path / "chosen.json", text + "\n")
            claim_data(path, sources)
            if line := changed_code(path, code):
                progress.say(line)
            claim_code(path, code)
        move_unusable(path / "checkpoints", back_to)
        setup = dataclasses.replace(
            setup,
            sampler_file=path / "sampler.json",
            programs=CompiledPrograms(progress.say),
            on_tokens=functools.partial(start_times.reached, FIRST_TOKEN),
        )
        resources.callback(setup.programs.close)
        checkpoints = training.CheckpointStore(
            path / "checkpoints", config.checkpoints, updates_per_stage=config.batch.updates_per_stage
        )
        gc.freeze()  # garbage collections need not visit the model, the task and the modules again
        resources.callback(gc.unfreeze)
        report = LiveReport(path, setup, task.train)
        resources.push(lambda kind, *_: report.finish(failed=kind not in (None, Stopped)))
        resources.callback(folder.journal.sync)
        time_left = TimeLeft(config)
        trackers = [time_left, *open_trackers(config, path)] if jax.process_index() == 0 else []
        for tracker in trackers:
            folder.journal.follow(tracker)
            resources.callback(tracker.close)
        resources.callback(checkpoints.close)
        optimizer = training.make_optimizer(config.optimizer, config.total_updates, setup.trainable)
        waits = None
        if wait_limit_s is not None:
            waits = Waits(Waiting(wait_limit_s))
            if config.mesh.sampling_devices:
                waits.thread = SamplerThread(path, config, task, wait_limit_s)
                resources.callback(waits.thread.close)
        run = RunContext(
            setup,
            task,
            stop,
            resources,
            folder,
            params,
            optimizer,
            training.learning_rates(config.optimizer, config.total_updates),
            checkpoints,
            report,
            time_left,
            start_times,
            PublishedPolicies(path, setup),
            waits=waits,
        )
        del params  # this frame lives as long as the run and must not keep the initial weights in memory
        with jax.set_mesh(setup.mesh):
            yield run


def _chosen(config: RunConfig) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Choose the settings that the config leaves to us, without loading the model."""
    return choose_settings(config, run_model_shape(config), run_mesh(config))


def _open_folder(
    path: Path, config: RunConfig, resources: contextlib.ExitStack, *, samples: bool
) -> RunFolder:
    """Open the folder of the run. The first host creates and locks it before the other hosts open it."""
    folder: RunFolder | None = None
    for first in (True, False):
        with distributed.together("claim"):
            if first == (jax.process_index() == 0):
                if first:
                    resources.enter_context(RunLock(path, samples=samples))
                folder = RunFolder(path, config)
    assert folder is not None
    return folder
