"""One run under way: the steps that `stages.train` is made of, and what they share."""

import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from mugrpo_jax import replay, training
from mugrpo_jax.collect import ShardCollector
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.policy import Policy, load_policy
from mugrpo_jax.rollouts import Stage, UpdateStream, open_stage, plan_buckets
from mugrpo_jax.rollouts.store import read_json
from mugrpo_jax.run import RunFolder, Stopped, StopRequest
from mugrpo_jax.sampling import Request, Sampler, request_seeds
from mugrpo_jax.tasks import Problem, Task, load_task
from mugrpo_jax.tasks.scoring import Scorer, make_scorer
from mugrpo_jax.training import Cursor, TrainState


@dataclasses.dataclass
class Job:
    """One run under way: what the steps of `train` share."""

    run: RunFolder
    policy: Policy
    params: Any
    task: Task
    optimizer: Any
    checkpoints: training.CheckpointStore
    stop: StopRequest
    step: training.UpdateStep | None = None

    @classmethod
    def open(cls, config: RunConfig, folder: Path, stop: StopRequest) -> "Job":
        """Load the model and the task, and claim the folder."""
        if config.replay.run is not None:
            replay.rollouts(config)
        task = load_task(config.task.name, **config.task.options)
        if not len(task.train):
            raise ConfigError(f"task {task.name}: no training problems")
        policy, params = load_policy(config)
        return cls(
            run=RunFolder(folder, config),  # last: a config that cannot be run claims no folder
            policy=policy,
            params=params,
            task=task,
            optimizer=training.make_optimizer(config.optimizer, config.total_updates),
            checkpoints=training.CheckpointStore(
                folder / "checkpoints",
                config.checkpoints,
                updates_per_stage=config.batch.updates_per_stage,
            ),
            stop=stop,
        )

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.run.config

    # -- where the run stands

    def resume(self) -> tuple[TrainState, Cursor]:
        """The newest checkpoint, or a warm-started beginning."""
        make = jax.jit(
            lambda params: training.init_state(params, self.optimizer, track_drift=self.config.track_drift)
        )
        abstract = jax.eval_shape(make, self.params)
        shardings = training.state_sharding(self.policy.mesh, abstract)
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
            _say(f"continuing at stage {cursor.stage}, update {cursor.update}")
        self.params = None  # the state owns the weights from here on
        return state, cursor

    def maybe_save(self, state: TrainState, cursor: Cursor) -> None:
        """Checkpoint inside a stage, when one is due or the run was asked to stop."""
        if cursor.update == self.config.batch.updates_per_stage:
            return
        if self.stop.requested or cursor.update % self.config.checkpoints.every == 0:
            self.save(state, cursor)
            self.check_stop()

    def save(self, state: TrainState, cursor: Cursor, *, accuracy: float | None = None) -> None:
        """Checkpoint now; the write goes on in the background."""
        self.checkpoints.save(state, cursor, accuracy=accuracy)

    def check_stop(self) -> None:
        """Leave when asked to, with everything on disk."""
        if self.stop.requested:
            self.close()
            raise Stopped

    def close(self) -> None:
        """Wait for the last checkpoint."""
        self.checkpoints.wait()
        self.checkpoints.close()

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
        started = time.monotonic()
        figures: dict[str, Any] = {}
        if stage.manifest() is None:
            if cursor.update:
                raise ConfigError(
                    f"{stage.folder}: the rollouts of the stage under way are gone; restore them"
                )
            mine = [s for s in stage.missing_shards() if s % jax.process_count() == jax.process_index()]
            figures = self._generate_shards(state.params, stage, stage_index, mine) if mine else {}
            _barrier(f"stage-{stage_index}")
            if jax.process_index() == 0:
                stage.commit()
            _barrier(f"stage-{stage_index}-manifest")
        if not cursor.update and not self.run.journal.has("stage", cursor.updates):
            self._record_stage(stage, stage_index, cursor, figures, time.monotonic() - started)
        return open_stage(stage.folder)

    def _generate_shards(
        self, params: Any, stage: Stage, stage_index: int, shards: list[int]
    ) -> dict[str, Any]:
        problems = {i: self._problem(stage_index, i) for shard in shards for i in stage.shard_prompts(shard)}
        requests = [self._request(stage_index, i, problem) for i, problem in problems.items()]
        collector = ShardCollector(
            stage, {i: problem.id for i, problem in problems.items()}, self.config.batch.responses_per_prompt
        )
        total = len(requests) * self.config.batch.responses_per_prompt
        with self.policy.sampler(params) as sampler, self._scorer() as scorer:
            with _bar(total, f"stage {stage_index}: generate", "resp") as bar:
                for response in sampler.run(requests):
                    text = self.policy.tokenizer.decode(response.tokens)
                    score = scorer.submit(text, problems[response.index])
                    collector.add(response, score)
                    _show_sampling(bar, sampler, collector)
                    if self.stop.requested:
                        collector.finish(wait=False)
                        self.check_stop()
            collector.finish()
            return {"occupancy": sampler.stats.occupancy, "decode_steps": sampler.stats.steps}

    def _record_stage(
        self, stage: Stage, stage_index: int, cursor: Cursor, figures: dict[str, Any], seconds: float
    ) -> None:
        manifest = read_json(stage.folder / "manifest.json")
        responses = manifest["responses"]
        self.run.journal.write(
            {
                "kind": "stage",
                "stage": stage_index,
                "updates": cursor.updates,
                "reward": manifest["reward"] / responses,
                "response_length": manifest["response_tokens"] / responses,
                "truncated": manifest["truncated"] / responses,
                "equal_groups": manifest["equal_groups"] / manifest["groups"],
                "responses": responses,
                "response_tokens": manifest["response_tokens"],
                "status": manifest["status"],
                "seconds": {"generate": seconds, **figures},
            }
        )
        _say(
            f"stage {stage_index}: {responses} responses, reward {manifest['reward'] / responses:.3f}, "
            f"{manifest['response_tokens'] / seconds:,.0f} tokens/s"
        )

    def _problem(self, stage_index: int, index: int) -> Problem:
        """The training set in a new order on every pass; stages continue where the last one stopped."""
        train = self.task.train
        passes, place = divmod(stage_index * self.config.prompts_per_stage + index, len(train))
        return train[int(_order(self.config.seed, passes, len(train))[place])]

    def _request(self, stage_index: int, index: int, problem: Problem) -> Request:
        group = self.config.batch.responses_per_prompt
        return Request(
            prompt=self.policy.prompt_tokens(problem),
            seeds=request_seeds(self.config.seed, stage_index, index, samples=group),
            max_tokens=self.config.sampling.max_response_tokens,
            temperature=self.config.sampling.temperature,
            stop=tuple(sorted(self.policy.tokenizer.eos_ids)),
            index=index,
        )

    def _scorer(self) -> Scorer:
        task = self.config.task
        return make_scorer(task.reward or self.task.reward, workers=task.scorers, deadline_s=task.deadline)

    # -- optimisation

    def optimise(
        self, state: TrainState, stage_index: int, rollouts: Stage, cursor: Cursor
    ) -> Iterator[tuple[TrainState, Cursor]]:
        """The stage's µ updates, from where the cursor stands; yields after each."""
        config, batch = self.config, self.config.batch
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
        )
        if cursor.data is not None:
            stream.seek(cursor.data)
        with _bar(batch.updates_per_stage, f"stage {stage_index}: update", "upd", cursor.update) as bar:
            while cursor.update < batch.updates_per_stage:
                started = time.monotonic()
                update = next(stream)
                state, metrics = step(state, update)
                cursor = Cursor(stage_index, cursor.update + 1, cursor.updates + 1, stream.position())
                record = self._record_update(cursor, update.metrics, metrics, started)
                bar.set_postfix(_headline(record), refresh=False)
                bar.update()
                yield state, cursor

    def _record_update(
        self, cursor: Cursor, data: Any, metrics: dict[str, jax.Array], started: float
    ) -> dict[str, Any]:
        found = {name: float(value) for name, value in jax.device_get(metrics).items()}
        record = {
            "kind": "update",
            "stage": cursor.stage,
            "updates": cursor.updates,
            "staleness": cursor.update - 1,
            **data,
            **found,
            "seconds": {"update": time.monotonic() - started},
        }
        self.run.journal.write(record)
        if found["skipped"] > self.config.optimizer.max_skipped:
            raise ConfigError(
                f"update {cursor.updates}: {found['skipped']:.0f} updates had a non-finite gradient, more "
                "than optimizer.max_skipped; lower optimizer.learning_rate"
            )
        return record

    def _step(self, state: TrainState) -> training.UpdateStep:
        """The update step, built once so that its programs are compiled once."""
        if self.step is None:
            self.step = training.UpdateStep(
                self.policy.graphdef,
                self.config.objective.build(),
                self.optimizer,
                self.policy.mesh,
                self._step_options(),
                state=state,
            )
        return self.step

    def _step_options(self) -> training.StepOptions:
        model = self.config.model
        return training.StepOptions(
            compute_dtype=model.compute_dtype,
            temperature=self.config.sampling.temperature,
            remat=model.remat,
            scan=model.scan_layers,
            attention=model.attention,
        )

    # -- supervised start

    def _warm_start(self) -> Any:
        """Weights after supervised training on the task's worked solutions; it too resumes."""
        config, warm = self.config, self.config.warm_start
        count = len(self.task.train) if warm.problems is None else min(warm.problems, len(self.task.train))
        rows = [
            (self.policy.prompt_tokens(problem), self.policy.solution_tokens(problem))
            for problem in (self.task.train[i] for i in range(count))
        ]
        settings = dataclasses.replace(
            config.optimizer, learning_rate=warm.learning_rate, schedule="cosine", warmup_updates=0
        )
        optimizer = training.make_optimizer(settings, warm.updates)
        state = training.init_state(self.params, optimizer, track_drift=False)
        shardings = training.state_sharding(self.policy.mesh, state)
        state = jax.device_put(state, shardings)
        store = training.CheckpointStore(self.run.folder / "warm_start", config.checkpoints)
        cursor = Cursor()
        if store.latest() is not None:
            state, cursor = store.restore(state)
        self.run.journal.rewind(cursor.updates - warm.updates)
        longest = max(len(prompt) + len(solution) for prompt, solution in rows)
        buckets = plan_buckets(
            longest,
            config.batch.tokens_per_micro_batch,
            self.policy.buckets().rows_multiple,
            unit=config.batch.length_multiple,
        )
        step = training.UpdateStep(
            self.policy.graphdef,
            training.cross_entropy,
            optimizer,
            self.policy.mesh,
            self._step_options(),
            state=state,
            diagnose=False,
        )
        updates = training.solution_updates(
            rows, buckets, rows_per_update=warm.rows_per_update, seed=config.seed, start=cursor.updates
        )
        with _bar(warm.updates, "warm start", "upd", cursor.updates) as bar:
            for number in range(cursor.updates + 1, warm.updates + 1):
                started = time.monotonic()
                state, metrics = step(state, next(updates))
                loss = float(metrics["loss"])
                self.run.journal.write(
                    {
                        "kind": "warm_start",
                        "updates": number - warm.updates,
                        "loss": loss,
                        "seconds": {"update": time.monotonic() - started},
                    }
                )
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
                due = number % config.checkpoints.every == 0 or number == warm.updates
                if self.stop.requested or due:
                    store.save(state, Cursor(updates=number))
                    if self.stop.requested:
                        store.close()
                        self.check_stop()
        store.close()
        return state.params

    # -- evaluation

    def evaluate(self, state: TrainState, cursor: Cursor, *, due: bool = True) -> float | None:
        """Held-out accuracy of the current weights, once per place in the run."""
        wanted, journal = self.config.evaluation, self.run.journal
        problems = list(self.task.test[: wanted.problems])
        if not (problems and due):
            return None
        for record in journal.read("evaluation"):
            if record["updates"] == cursor.updates:
                return record["accuracy"]
        started = time.monotonic()
        requests = [
            Request(
                prompt=self.policy.prompt_tokens(problem),
                seeds=request_seeds(self.config.seed, 1 << 20, i, samples=wanted.samples),
                max_tokens=self.config.sampling.max_response_tokens,
                temperature=wanted.temperature,
                top_p=wanted.top_p,
                stop=tuple(sorted(self.policy.tokenizer.eos_ids)),
                index=i,
            )
            for i, problem in enumerate(problems)
        ]
        scores = np.zeros((len(problems), wanted.samples))
        title = f"evaluate after {cursor.updates} updates"
        with (
            self.policy.sampler(state.params) as sampler,
            self._scorer() as scorer,
            _bar(scores.size, title, "resp") as bar,
        ):
            waiting = []
            for response in sampler.run(requests):
                text = self.policy.tokenizer.decode(response.tokens)
                waiting.append((response, scorer.submit(text, problems[response.index])))
                bar.update()
            for response, score in waiting:
                scores[response.index, response.sample] = score.result().value
        accuracy = float(scores.mean())
        journal.write(
            {
                "kind": "evaluation",
                "updates": cursor.updates,
                "stage": cursor.stage,
                "accuracy": accuracy,
                "standard_error": float(scores.mean(1).std(ddof=1) / np.sqrt(len(problems))),
                "problems": len(problems),
                "seconds": {"evaluate": time.monotonic() - started},
            }
        )
        _say(f"held-out accuracy after {cursor.updates} updates: {accuracy:.3f} ({len(problems)} problems)")
        return accuracy


@functools.lru_cache(maxsize=2)
def _order(seed: int, passes: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, passes)).permutation(count)


def _show_sampling(bar: Any, sampler: Sampler, collector: ShardCollector) -> None:
    bar.update()
    if bar.n % 64 == 0:
        reward = f"{collector.reward / collector.scored:.3f}" if collector.scored else "–"
        rate = sampler.stats.tokens / max(bar.format_dict["elapsed"], 1e-9)
        occupancy = f"{sampler.stats.occupancy:.0%}"
        bar.set_postfix({"tok/s": f"{rate:,.0f}", "slots": occupancy, "reward": reward}, refresh=False)


def _headline(record: dict[str, Any]) -> dict[str, str]:
    """The few numbers that matter while a stage is optimised."""
    chosen = {"reward": "reward", "veto": "vetoed/tokens", "ess": "ess/tokens", "gap": "gap/tokens"}
    return {name: f"{record[metric]:.3f}" for name, metric in chosen.items() if metric in record}


def _bar(total: int, title: str, unit: str, initial: int = 0) -> Any:
    quiet = jax.process_index() > 0
    return tqdm(total=total, desc=title, unit=unit, initial=initial, disable=quiet, mininterval=0.5)


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _say(text: str) -> None:
    if jax.process_index() == 0:
        tqdm.write(text)
