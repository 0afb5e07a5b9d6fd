"""A sampler of its own: write the rollouts of a run while another process trains (`mugrpo sample`).

The folder of the run is the queue. The trainer publishes the policy at the start of each stage. A stage is
sampled once its policy is there, which is that of `batch.lag` stages earlier. So a sampler never runs ahead
of the lag, and the rollouts are those of a run in one process. Several samplers share the shards of a stage.
"""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from mugrpo_jax import config as configs
from mugrpo_jax.compiling.compile_cache import use_compile_cache
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import LineFile, make_folder
from mugrpo_jax.loop.failed_rewards import check_failed
from mugrpo_jax.loop.preflight import check_problems, check_reward
from mugrpo_jax.loop.sampling_context import SamplingContext
from mugrpo_jax.loop.sampling_passes import sample_claimed
from mugrpo_jax.rollouts import RolloutFolder
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.owned_files import read
from mugrpo_jax.runs.run_data import check_same_data
from mugrpo_jax.runs.run_folder import check_same_config, read_config, stage_folder
from mugrpo_jax.runs.run_lock import LOCK
from mugrpo_jax.runs.sampler_claims import Claims, SignOfLife, signs_of_life
from mugrpo_jax.runs.stop import Stopped, StopRequest
from mugrpo_jax.runs.waiting import WAIT_LIMIT_S, Waiting
from mugrpo_jax.setup.behavior_policy import check_behaviors
from mugrpo_jax.setup.devices import loading_mesh
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.published_policies import PublishedPolicies
from mugrpo_jax.setup.run_setup import load_sampling_setup
from mugrpo_jax.tasks import Task, load_task

_MANIFEST = "manifest"  # the work of completing a stage, which is claimed like a shard


def sample(
    run: Path, *, overrides: Sequence[str] = (), watch: bool = True, wait_limit_s: float = WAIT_LIMIT_S
) -> None:
    """Sample all stages of a run as its trainer publishes their policies.

    Args:
      run: the folder of the run.
      overrides: `key=value` texts for settings on which no rollout depends, such as the mesh.
      watch: wait for policies that are not published yet; False: sample what is possible now.
      wait_limit_s: how long to wait for a sign of life of the trainer.
    """
    with StopRequest() as stop, contextlib.ExitStack() as resources:
        waiting = Waiting(wait_limit_s)
        _wait_for_trainer(run, waiting, stop, watch)
        sign = resources.enter_context(SignOfLife(run))
        context = open_context(run, overrides, stop, resources)
        SamplerProcess(context, run, sign, waiting, watch=watch).work()


def _wait_for_trainer(run: Path, waiting: Waiting, stop: StopRequest, watch: bool) -> None:
    """Wait until the run has a policy: from then on, its config does not change any more."""
    while not any(True for _ in run.glob("policies/*/policy.json")) and not _is_sampled(run):
        if stop.requested:
            raise Stopped
        if not watch:
            raise ConfigError(f"{run}: no policy is published; {_remedy(run)}, or wait for it with --watch")
        waiting.pause(f"the trainer to publish a policy in {run}", read(run / LOCK), lambda: _remedy(run))


def _is_sampled(run: Path) -> bool:
    if not (run / "config.yaml").exists():
        return False
    return all((stage_folder(run, stage) / "manifest.json").exists() for stage in read_config(run).stages)


def _remedy(run: Path) -> str:
    return f"start the trainer with mugrpo train CONFIG --out {run} --rollouts wait"


def open_context(
    run: Path, overrides: Sequence[str], stop: StopRequest, resources: contextlib.ExitStack
) -> SamplingContext:
    """Load model and task of a run as its trainer did; raise an error if config or data are others."""
    config = configs.changed(read_config(run), list(overrides))
    check_same_config(run, config)
    use_compile_cache(config.compile_cache)
    task = load_task(config.task.name, **config.task.options)
    check_same_data(run, task.sources)
    task, _ = check_problems(config, task, run_model_tokenizer(config))
    check_reward(config, task)
    mesh = loading_mesh(run_model_shape(config))  # of all devices; a sampler needs no other kind of mesh
    check_behaviors(config, mesh)
    return sampling_context(run, config, task, mesh, stop, resources)


def sampling_context(
    run: Path, config: RunConfig, task: Task, mesh: Mesh, stop: StopRequest, resources: contextlib.ExitStack
) -> SamplingContext:
    """Return what a sampler on the devices of a mesh needs."""
    setup = load_sampling_setup(config, mesh)
    devices = f"{setup.mesh.devices.flat[0].device_kind}-{setup.mesh.size}".replace(" ", "-").replace(
        "/", "-"
    )
    slots = run / "samplers" / "slots"
    make_folder(slots)
    setup = dataclasses.replace(setup, sampler_file=slots / f"{devices}.json")
    resources.callback(setup.programs.close)
    return SamplingContext(setup, task, stop, resources)


class SamplerProcess:
    """The work of one sampler: find a stage with free shards, sample them, complete stages, or wait."""

    def __init__(
        self, context: SamplingContext, run: Path, sign: SignOfLife, waiting: Waiting, *, watch: bool
    ) -> None:
        self._context, self._run, self._sign, self._waiting, self._watch = context, run, sign, waiting, watch
        self._policies = PublishedPolicies(run, context.setup)
        self._policy: tuple[int, Any] | None = None  # the weights that were loaded last
        self._claims: dict[int, Claims] = {}
        self._looked_at: set[int] = set()  # stages whose files this process has checked
        self._log = LineFile(run / "samplers" / f"{sign.owner['token']}.jsonl")
        self._waited: dict[str, float] = {}

    def work(self) -> None:
        """Sample until all stages are complete, or there is nothing to do and we shall not wait."""
        lag, left = self._context.config.batch.lag, self._open(self._context.config.stages)
        while left := [*self._open(left[: lag + 2]), *left[lag + 2 :]]:
            if self._context.stop.requested:
                raise Stopped
            if any(self._work_on(stage) for stage in left[: lag + 1]):
                self._waiting.restart()
            elif not self._watch:
                progress.say(f"{self._run}: nothing more to sample now; stage {left[0]} is not complete")
                return
            else:
                self._wait(left[0])
        progress.say(f"{self._run}: all {len(self._context.config.stages)} stages are sampled")

    def _open(self, stages: Sequence[int]) -> list[int]:
        return [stage for stage in stages if not (self._folder(stage) / "manifest.json").exists()]

    def _folder(self, stage: int) -> Path:
        return stage_folder(self._run, stage)

    def _wait(self, stage: int) -> None:
        """Wait a moment for what the first open stage needs: its policy, or the shards of other samplers."""
        before = self._waiting.seconds
        version = self._context.config.policy_stage(stage)
        if self._policies.has(version):
            name, what = "samplers", f"other samplers, which write the last shards of stage {stage}"
            sign: object = signs_of_life(self._run)
        else:
            name, what = "policy", f"the policy at the start of stage {version}, which writes stage {stage}"
            sign = read(self._run / LOCK)
        self._waiting.pause(what, (stage, name, sign), lambda: _remedy(self._run))
        self._waited[name] = self._waited.get(name, 0.0) + self._waiting.seconds - before

    def _work_on(self, stage: int) -> bool:
        """Sample the free shards of a stage, and complete it; return False if there is nothing to do now."""
        version = self._context.config.policy_stage(stage)
        if not self._policies.has(version):
            return False
        rollouts, claims = self._rollouts(stage), self._claims.setdefault(stage, Claims(self._sign, stage))
        if stage not in self._looked_at:
            self._looked_at.add(stage)
            rollouts.missing_shards([s for s in range(rollouts.shards) if rollouts.path(s).exists()])
        started = time.monotonic()
        seconds: dict[str, float] = {}
        examples: dict[str, str] = {}
        try:
            taken: list[int] = []
            free = self._free_shards(rollouts, claims, taken)
            first = next(free, None)
            if first is not None:
                shards = itertools.chain([first], free)
                weights = self._weights(version)
                seconds, examples = sample_claimed(self._context, weights, rollouts, stage, shards)
                seconds["generate"] = time.monotonic() - started
                self._record(rollouts, stage, [s for s in taken if rollouts.path(s).exists()], seconds)
        finally:
            claims.release()
        completed = self._complete(rollouts, claims, seconds, examples)
        return first is not None or completed

    def _rollouts(self, stage: int) -> RolloutFolder:
        config = self._context.config
        return RolloutFolder(
            folder=self._folder(stage),
            identity=config.rollout_identity(stage),
            prompts=config.prompts_per_stage,
            prompts_per_shard=config.sampling.prompts_per_shard,
        )

    def _free_shards(self, rollouts: RolloutFolder, claims: Claims, taken: list[int]) -> Iterator[int]:
        """Claim one missing shard after the other, each when the iterator is asked for it; fill `taken`."""
        for shard in range(rollouts.shards):
            if self._context.stop.requested:
                return
            if rollouts.path(shard).exists() or not claims.claim(f"{shard:05d}"):
                continue
            if not rollouts.path(shard).exists():  # its last owner may have written it before our claim
                taken.append(shard)
                yield shard

    def _weights(self, version: int) -> Any:
        if self._policy is None or self._policy[0] != version:
            self._policy = None  # before the next one is loaded: there may be room for one only
            self._policy = version, self._policies.load(version)
        return self._policy[1]

    def _complete(
        self, rollouts: RolloutFolder, claims: Claims, seconds: dict[str, float], examples: dict[str, str]
    ) -> bool:
        """Write the manifest if all shards are there; return whether this process did it."""
        complete = rollouts.folder / "manifest.json"
        if not all(rollouts.path(shard).exists() for shard in range(rollouts.shards)) or complete.exists():
            return False
        if not claims.claim(_MANIFEST):
            return False
        if complete.exists():  # another sampler completed the stage just now, and removed the claims
            claims.remove()
            return False
        manifest = rollouts.commit(seconds)
        claims.remove()
        stage, responses = rollouts.identity["stage"], manifest["responses"]
        progress.say(
            f"stage {stage}: {responses} responses of the policy at the start of stage "
            f"{rollouts.identity['policy_stage']}, reward {manifest['reward'] / responses:.3f}"
        )
        progress.say_unscored(f"stage {stage}", manifest["status"], examples)
        again = f"mend it, remove {rollouts.folder} and start again"
        check_failed(self._context.config, f"stage {stage}", manifest["status"], examples, again)
        return True

    def _record(
        self, rollouts: RolloutFolder, stage: int, shards: Sequence[int], seconds: dict[str, float]
    ) -> None:
        """Append what this sampler did, and what it waited for, to its own log."""
        summaries = [json.loads(rollouts.path(s).with_suffix(".json").read_bytes()) for s in shards]
        waited, self._waited = {f"wait/{name}": value for name, value in self._waited.items()}, {}
        record = {
            "stage": stage,
            "policy_stage": rollouts.identity["policy_stage"],
            "shards": list(shards),
            "responses": sum(summary["responses"] for summary in summaries),
            "response_tokens": sum(summary["response_tokens"] for summary in summaries),
            "seconds": seconds | waited,
        }
        self._log.append(json.dumps(record) + "\n")
        self._log.sync()
