"""One run under way: the steps that `stages.train` is made of, and what they share."""

import contextlib
import dataclasses
import functools
import gc
import operator
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from mugrpo_jax import config as configs
from mugrpo_jax import distributed, training
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.loop import replay
from mugrpo_jax.loop.pending_metrics import InFlight
from mugrpo_jax.loop.warm_start import WarmStart
from mugrpo_jax.report.live import LiveReport
from mugrpo_jax.rollouts import Stage, UpdateStream, open_stage
from mugrpo_jax.rollouts.generate import Responses
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.compile_clock import compile_clock
from mugrpo_jax.runs.folder import RunFolder, Stopped, StopRequest
from mugrpo_jax.runs.trackers import check_trackers, open_trackers
from mugrpo_jax.setup.run_setup import Policy, load_policy
from mugrpo_jax.tasks import Task, load_task
from mugrpo_jax.tasks.scoring import STATUSES
from mugrpo_jax.training import Cursor, TrainState


@dataclasses.dataclass
class Job:
    """One run under way: what the steps of `train` share. A context manager: leaving it closes everything."""

    run: RunFolder
    policy: Policy
    params: Any
    task: Task
    optimizer: Any
    checkpoints: training.CheckpointStore
    stop: StopRequest

    @classmethod
    def open(cls, config: RunConfig, folder: Path, stop: StopRequest) -> "Job":
        """Load the model and the task, and claim the folder."""
        distributed.check_same("config", configs.to_dict(config))
        with distributed.together("load"):
            check_trackers(config)
            if config.replay.run is not None:
                replay.rollouts(config)
            task = load_task(config.task.name, **config.task.options)
            if not len(task.train):
                raise ConfigError(f"task {task.name}: no training problems")
            policy, params = load_policy(config)
        return cls(
            run=_claim(folder, config),  # last: a config that cannot be run claims no folder
            policy=policy,
            params=params,
            task=task,
            optimizer=training.make_optimizer(config.optimizer, config.total_updates, policy.model),
            checkpoints=training.CheckpointStore(
                folder / "checkpoints",
                config.checkpoints,
                updates_per_stage=config.batch.updates_per_stage,
            ),
            stop=stop,
        )

    def __post_init__(self) -> None:
        self._resources = contextlib.ExitStack()
        gc.freeze()  # model, task and modules stay: collections need not walk through them again and again
        self._resources.callback(gc.unfreeze)
        self._report = LiveReport(self.run.folder, self.policy)
        self._resources.callback(self._report.finish)
        for tracker in open_trackers(self.config, self.run.folder) if jax.process_index() == 0 else ():
            self.run.journal.follow(tracker)
            self._resources.callback(tracker.close)
        self._resources.callback(self.checkpoints.close)
        self._responses = Responses(self.config, self.policy, self.task, self.stop)
        self._resources.callback(self._responses.close)
        self._in_flight = InFlight(lambda *_: None)  # of the stage under way
        self._saved = 0  # updates done at the newest checkpoint
        self._built: training.UpdateStep | None = None

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.run.config

    @functools.cached_property
    def _vote(self) -> distributed.Vote | None:
        return None if jax.process_count() == 1 else distributed.Vote(self.policy.mesh)

    # -- where the run stands

    def resume(self) -> tuple[TrainState, Cursor]:
        """The newest checkpoint, or a warm-started beginning."""
        make = jax.jit(
            lambda params: training.init_state(params, self.optimizer, track_drift=self.config.track_drift)
        )
        abstract = jax.eval_shape(make, self.params)
        shardings = training.state_sharding(self.policy.mesh, self.policy.model, abstract)
        targets = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract,
            shardings,
        )
        if self.checkpoints.latest() is None:
            replayed = self.config.replay.run is not None and replay.restore_start(self.config, targets)
            if replayed:
                state, cursor = replayed
            else:
                params = self._warm_start() if self.config.warm_start.updates else self.params
                state, cursor = jax.device_put(make(params), shardings), Cursor()
            self.save(state, cursor)
        else:
            state, cursor = self.checkpoints.restore(targets)
            self.run.journal.rewind(cursor.updates)
            self._saved = cursor.updates
            progress.say(f"continuing at stage {cursor.stage}, update {cursor.update}")
        self.params = None  # the state owns the weights from here on
        return state, cursor

    def save_if_due(self, state: TrainState, cursor: Cursor, *, accuracy: float | None = None) -> None:
        """Checkpoint when enough updates have passed, at moments worth keeping, and when asked to stop.

        A stage's last update is saved as the start of the next one.
        """
        keep, batch = self.config.checkpoints, self.config.batch
        if cursor.update == batch.updates_per_stage:
            return
        due = (
            cursor.updates - self._saved >= keep.every
            or cursor.stage == self.config.stages.stop
            or (keep.keep_stage_starts and cursor.update == 0)
            or (keep.keep_best > 0 and accuracy is not None)
        )
        if due or self.stop.agreed:
            self.save(state, cursor, accuracy=accuracy)
        self._leave_if_stopped()

    def save(self, state: TrainState, cursor: Cursor, *, accuracy: float | None = None) -> None:
        """Checkpoint now; the write goes on in the background."""
        self._in_flight.flush()  # what the journal misses after a kill is what comes after the checkpoint
        self.checkpoints.save(state, cursor, accuracy=accuracy)
        self._saved = cursor.updates

    def report(self, state: TrainState, stage_index: int, rollouts: Stage, cursor: Cursor) -> None:
        """Samples of the stage that has ended, and the page of the run so far with its accuracy."""
        self.evaluate(state, cursor)
        self._report.after_stage(state.params, stage_index, rollouts)

    def _leave_if_stopped(self) -> None:
        if self.stop.agreed:
            self.checkpoints.wait()
            raise Stopped

    # -- generation

    def generate(self, state: TrainState, stage_index: int, cursor: Cursor) -> Stage:
        """All rollouts of a stage, on disk: what is there already is kept, the rest is generated."""
        if self.config.replay.run is not None:
            return replay.rollouts(self.config)
        stage = Stage(
            folder=self.run.stage_folder(stage_index),
            identity=self.config.rollout_identity(stage_index),
            prompts=self.config.prompts_per_stage,
            prompts_per_shard=self.config.sampling.prompts_per_shard,
        )
        manifest = stage.manifest()
        if manifest is not None:
            open_stage(stage.folder)  # checks every file
        elif cursor.update:
            raise ConfigError(f"{stage.folder}: the rollouts of the stage under way are gone; restore them")
        else:
            manifest = self._generate(state, stage, stage_index, cursor)
        if not cursor.update and self.run.journal.find("stage", cursor.updates) is None:
            self._record_stage(manifest, stage_index, cursor)
        return stage

    def _generate(self, state: TrainState, stage: Stage, stage_index: int, cursor: Cursor) -> dict[str, Any]:
        started = time.monotonic()
        mine = range(jax.process_index(), stage.shards, jax.process_count())
        missing = stage.missing_shards(mine)
        seconds: dict[str, float] = {}
        examples: dict[str, str] = {}
        if any(distributed.gather("missing", bool(missing))):  # weights come from all hosts to any
            seconds, examples = self._responses.write_shards(state.params, stage, stage_index, missing)
        self.stop.agree(any(distributed.gather("generated", self.stop.requested)))
        if self.stop.agreed:
            self.save(state, cursor)
            self._leave_if_stopped()
        seconds["generate"] = time.monotonic() - started
        seconds["switch"] = seconds["generate"] - seconds.get("sample", 0.0) - seconds.get("score_wait", 0.0)
        manifest = stage.commit(seconds) if jax.process_index() == 0 else None
        examples = _merged(distributed.gather("manifest", examples))
        if stage_index + 1 < self.config.stages.stop:
            self._responses.read_ahead(stage, stage_index + 1, mine)
        return (manifest or stage.manifest() or {}) | {"examples": examples}

    def _record_stage(self, manifest: dict[str, Any], stage_index: int, cursor: Cursor) -> None:
        responses, tokens = manifest["responses"], manifest["response_tokens"]
        status = {name: manifest["status"].get(name, 0) for name in STATUSES}
        seconds = manifest["seconds"]
        self.run.journal.write(
            {
                "kind": "stage",
                "stage": stage_index,
                "updates": cursor.updates,
                "reward": manifest["reward"] / responses,
                "response_length": tokens / responses,
                "longest_response": manifest["longest_response"],
                "truncated": manifest["finish"].get("length", 0) / responses,
                "equal_groups": manifest["equal_groups"] / manifest["groups"],
                "responses": responses,
                "response_tokens": tokens,
                "finish": manifest["finish"],
                "status": status,
                "seconds": seconds,
            }
        )
        parts = ", ".join(
            f"{name.replace('_', ' ')} {seconds[name]:.2f} s"
            for name in ("sample", "score_wait", "write", "switch")
            if name in seconds
        )
        progress.say(
            f"stage {stage_index}: {responses} responses, reward {manifest['reward'] / responses:.3f}, "
            f"{tokens / seconds['generate']:,.0f} tokens/s in {seconds['generate']:.1f} s ({parts})"
        )
        progress.say_unscored(f"stage {stage_index}", status, manifest.get("examples", {}))

    # -- optimisation

    def optimise(
        self, state: TrainState, stage_index: int, rollouts: Stage, cursor: Cursor
    ) -> Iterator[tuple[TrainState, Cursor]]:
        """The stage's µ updates, from where the cursor stands; yields once each is dispatched.

        The device may still be working on it: metrics are read, and recorded, some updates later.
        """
        config, batch = self.config, self.config.batch
        with progress.bar(
            batch.updates_per_stage, f"stage {stage_index}: update", "upd", cursor.update
        ) as bar:
            self._in_flight = InFlight(functools.partial(self._record_update, bar))
            step = self._step(state)
            stream = UpdateStream(
                rollouts,
                seed=config.seed,
                stage_index=stage_index,
                epochs=batch.epochs_per_stage,
                prompts_per_update=batch.prompts_per_update,
                buckets=self.policy.buckets(),
                advantage=config.advantage,
                aggregation=config.objective.settings["aggregation"],
                max_response=config.sampling.max_response_tokens,
                overlong_buffer=config.overlong_buffer,
                equal_groups=batch.equal_groups,
            )
            if cursor.data is not None:
                stream.seek(cursor.data)
            while cursor.update < batch.updates_per_stage:
                update = next(stream)
                state, metrics = step(state, update)
                cursor = Cursor(stage_index, cursor.update + 1, cursor.updates + 1, stream.position())
                self._in_flight.add((cursor, update.metrics), metrics | self._ask_to_stop())
                yield state, cursor
            self._in_flight.flush()

    def _ask_to_stop(self) -> dict[str, jax.Array]:
        """With several hosts, a metric beside the others: all read the same answer at the same update."""
        return {} if self._vote is None else {"stop": self._vote(self.stop.requested)}

    def _record_update(
        self, bar: Any, about: tuple[Cursor, Any], metrics: dict[str, float], seconds: dict[str, float]
    ) -> None:
        cursor, data = about
        self.stop.agree(metrics.pop("stop", 0.0) > 0)
        record = {
            "kind": "update",
            "stage": cursor.stage,
            "updates": cursor.updates,
            "staleness": cursor.update - 1,
            **data,
            **metrics,
            "seconds": seconds,
        }
        self.run.journal.write(record)
        bar.set_postfix(progress.headline(record), refresh=False)
        bar.update()
        if metrics["skipped"] > self.config.optimizer.max_skipped:
            raise ConfigError(
                f"update {cursor.updates}: {metrics['skipped']:.0f} updates had a non-finite gradient, more "
                "than optimizer.max_skipped; lower optimizer.learning_rate"
            )

    def _step(self, state: TrainState) -> training.UpdateStep:
        """The update step, built once so that its programs are compiled once."""
        if self._built is None:
            self._built = training.UpdateStep(
                self.policy.model,
                self.config.objective.build(),
                self.optimizer,
                self.policy.mesh,
                self.policy.step_options(),
                state=state,
            )
        return self._built

    # -- supervised start

    def _warm_start(self) -> Any:
        """Weights after supervised training on the task's worked solutions; it too resumes."""
        total = self.config.warm_start.updates
        start = WarmStart(self.policy, self.params, self.task, self.run.folder / "warm_start")
        self.run.journal.rewind(start.done - total)
        with contextlib.closing(start), progress.bar(total, "warm start", "upd", start.done) as bar:
            in_flight = InFlight(functools.partial(self._record_warm_start, bar))
            for metrics in start.updates():
                in_flight.add(start.done - total, {"loss": metrics["loss"]} | self._ask_to_stop())
                if start.due or self.stop.agreed:
                    in_flight.flush()
                    start.save()
                if self.stop.agreed:
                    raise Stopped
        return start.state.params

    def _record_warm_start(
        self, bar: Any, updates: int, metrics: dict[str, float], seconds: dict[str, float]
    ) -> None:
        self.stop.agree(metrics.pop("stop", 0.0) > 0)
        self.run.journal.write({"kind": "warm_start", "updates": updates, **metrics, "seconds": seconds})
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)
        bar.update()

    # -- evaluation

    def evaluate(self, state: TrainState, cursor: Cursor) -> float | None:
        """Held-out accuracy of the current weights, where the config asks for it and once a place."""
        wanted, journal = self.config.evaluation, self.run.journal
        if not (wanted.problems and len(self.task.test) and self._evaluation_due(cursor)):
            return None
        if (known := journal.find("evaluation", cursor.updates)) is not None:
            return known["accuracy"]
        self._in_flight.flush()
        started, compiled = time.monotonic(), compile_clock().seconds
        title = f"evaluate after {cursor.updates} updates"
        parts = distributed.gather("evaluated", self._responses.held_out(state.params, title))
        if any(part is None for part in parts):
            self.stop.agree(True)
            return None
        problems = {int(i): scores for part in parts for i, scores in part["scores"].items()}
        scores = np.array([problems[i] for i in sorted(problems)])
        status = sum((Counter(part["status"]) for part in parts), Counter())
        accuracy = float(scores.mean())
        journal.write(
            {
                "kind": "evaluation",
                "updates": cursor.updates,
                "stage": cursor.stage,
                "accuracy": accuracy,
                "standard_error": float(scores.mean(1).std(ddof=1) / np.sqrt(len(scores))),
                "problems": len(scores),
                "status": {name: status[name] for name in STATUSES},
                "seconds": {
                    "evaluate": time.monotonic() - started,
                    "compile": compile_clock().seconds - compiled,
                },
            }
        )
        progress.say(
            f"held-out accuracy after {cursor.updates} updates: {accuracy:.3f} ({len(scores)} problems)"
        )
        examples = _merged(part["examples"] for part in parts)
        progress.say_unscored(f"evaluation after {cursor.updates} updates", status, examples)
        self._in_flight.restart()
        return accuracy

    def _evaluation_due(self, cursor: Cursor) -> bool:
        """A stage's last update is evaluated as the start of the next stage, or the end of the run."""
        every = self.config.evaluation.every
        if cursor.update:
            inside = cursor.update < self.config.batch.updates_per_stage
            return inside and every is not None and cursor.updates % every == 0
        ends = (self.config.stages.start, self.config.stages.stop)
        return every is None or cursor.stage in ends or cursor.updates % every == 0


def _merged(examples: Iterable[dict[str, str]]) -> dict[str, str]:
    """What hosts say of items that could not be scored, one of each status."""
    return functools.reduce(operator.or_, examples, {})


def _claim(folder: Path, config: RunConfig) -> RunFolder:
    """The folder of the run; the first host makes it before the others look."""
    run: RunFolder | None = None
    for turn in (True, False):
        with distributed.together("claim"):
            if turn == (jax.process_index() == 0):
                run = RunFolder(folder, config)
    assert run is not None
    return run
