"""The work of one sampler: claim shards of the stages whose policies are published, and write them."""

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mugrpo_jax.files import PATIENCE_S, LineFile, plain_errors
from mugrpo_jax.loop.claimed_rollouts import ClaimedRollouts
from mugrpo_jax.loop.failed_rewards import check_failed
from mugrpo_jax.loop.sampling_context import SamplingContext
from mugrpo_jax.loop.sampling_passes import sample_claimed
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.run_folder import SameRun, stage_folder
from mugrpo_jax.runs.run_lock import trainer_sign
from mugrpo_jax.runs.sampler_claims import Claims, SignOfLife, signs_of_life
from mugrpo_jax.runs.stop import Stopped
from mugrpo_jax.runs.waiting import Waiting
from mugrpo_jax.setup.published_policies import PublishedPolicies, served_stages

_MANIFEST = "manifest"  # the work of completing a stage, which is claimed like a shard


def start_trainer(run: Path) -> str:
    """Return what to do if a sampler finds no trainer, for the end of an error."""
    return f"start the trainer with mugrpo train CONFIG --out {run} --rollouts wait"


class SamplerWork:
    """The work of one sampler: find a stage with free shards, sample them, complete stages, or wait."""

    def __init__(
        self, context: SamplingContext, run: Path, sign: SignOfLife, waiting: Waiting, *, watch: bool
    ) -> None:
        self._context, self._run, self._sign, self._waiting, self._watch = context, run, sign, waiting, watch
        self._policies = PublishedPolicies(run, context.setup)
        self._same_run = SameRun(run, context.config)
        self._policy: tuple[int, Any] | None = None  # the weights that were loaded last
        self._claims: dict[int, Claims] = {}
        self._looked_at: set[int] = set()  # stages whose files this process has checked
        self._log = LineFile(run / "samplers" / f"{sign.owner['token']}.jsonl")
        self._waited = {"policy": waiting.seconds}  # so far only for the first policy

    def work(self) -> None:
        """Sample until all stages are complete, or there is nothing to do and we shall not wait."""
        try:
            self._work()
        finally:
            with contextlib.suppress(OSError), plain_errors():  # keep the error that ends the work
                self._record_waits()

    def _work(self) -> None:
        lag, left = self._context.config.batch.lag, self._open(self._context.config.stages)
        while left := self._still_left(left):
            self._sign.moved()
            self._same_run.check()
            if self._context.stop.requested:
                raise Stopped("all shards that were written are kept")
            if any(self._work_on(stage) for stage in left[: lag + 1]):
                self._waiting.restart()
            elif not self._watch:
                progress.say(f"{self._run}: nothing more to sample now; stage {left[0]} is not complete")
                return
            else:
                self._wait(left[0])
        progress.say(f"{self._run}: all {len(self._context.config.stages)} stages are sampled")

    def _still_left(self, left: Sequence[int]) -> list[int]:
        """Return the stages that are not complete. A trainer that finds damage opens a complete one again."""
        config = self._context.config
        served = [s for version in self._policies.stages() for s in served_stages(config, version)]
        near = {*left[: config.batch.lag + 2], *served}
        return [*self._open(sorted(near)), *[stage for stage in left if stage not in near]]

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
            sign: object = signs_of_life(self._run, but=self._sign)
        else:
            name, what = "policy", f"the policy at the start of stage {version}, which writes stage {stage}"
            sign = trainer_sign(self._run)
        self._waiting.pause(what, (stage, name, sign), lambda: start_trainer(self._run))
        self._waited[name] = self._waited.get(name, 0.0) + self._waiting.seconds - before

    def _work_on(self, stage: int) -> bool:
        """Sample the free shards of a stage, and complete it; return False if there is nothing to do now."""
        version = self._context.config.policy_stage(stage)
        if not self._policies.has(version):
            return False
        claims = self._claims.setdefault(stage, Claims(self._sign, stage))
        rollouts = self._rollouts(stage, claims)
        if stage not in self._looked_at:
            self._looked_at.add(stage)
            rollouts.delete_damaged()
        started = time.monotonic()
        seconds: dict[str, float] = {}
        examples: dict[str, str] = {}
        try:
            free = self._free_shards(rollouts)
            first = next(free, None)
            if first is not None:
                shards = itertools.chain([first], free)
                weights = self._weights(version)
                seconds, examples = sample_claimed(self._context, weights, rollouts, stage, shards)
                seconds["generate"] = time.monotonic() - started
                self._record(rollouts, stage, sorted(rollouts.written), seconds)
        finally:
            claims.release()
        completed = self._complete(rollouts, claims, seconds, examples)
        return first is not None or completed

    def _rollouts(self, stage: int, claims: Claims) -> ClaimedRollouts:
        config = self._context.config
        return ClaimedRollouts(
            same_run=self._same_run,
            sign=self._sign,
            claims=claims,
            folder=self._folder(stage),
            identity=config.rollout_identity(stage),
            prompts=config.prompts_per_stage,
            prompts_per_shard=config.sampling.prompts_per_shard,
            patience_s=PATIENCE_S,
        )

    def _free_shards(self, rollouts: ClaimedRollouts) -> Iterator[int]:
        """Claim one missing shard after the other, each when the iterator is asked for it."""
        for shard in range(rollouts.shards):
            self._sign.moved()
            if self._context.stop.requested:
                return
            if rollouts.path(shard).exists() or not rollouts.claim(shard):
                continue
            if not rollouts.path(shard).exists():  # its last owner may have written it before our claim
                yield shard

    def _weights(self, version: int) -> Any:
        if self._policy is None or self._policy[0] != version:
            self._policy = None  # before the next one is loaded: there may be room for one only
            self._policy = version, self._policies.load(version)
        return self._policy[1]

    def _complete(
        self, rollouts: ClaimedRollouts, claims: Claims, seconds: dict[str, float], examples: dict[str, str]
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
        if not claims.holds(_MANIFEST):
            return False  # this process hung, and another sampler took over
        manifest = rollouts.commit(seconds)
        if claims.holds(_MANIFEST):
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
        self, rollouts: ClaimedRollouts, stage: int, shards: Sequence[int], seconds: dict[str, float]
    ) -> None:
        """Append what this sampler did, and what it waited for, to its own log."""
        summaries = [json.loads(rollouts.path(s).with_suffix(".json").read_bytes()) for s in shards]
        record = {
            "stage": stage,
            "policy_stage": rollouts.identity["policy_stage"],
            "shards": list(shards),
            "responses": sum(summary["responses"] for summary in summaries),
            "response_tokens": sum(summary["response_tokens"] for summary in summaries),
            "seconds": seconds,
        }
        self._append(record)

    def _record_waits(self) -> None:
        """Append what this sampler waited for after its last shards, if anything, to its own log."""
        if any(self._waited.values()):
            self._append({"shards": [], "responses": 0, "response_tokens": 0, "seconds": {"generate": 0.0}})

    def _append(self, record: dict[str, Any]) -> None:
        waited, self._waited = {f"wait/{name}": value for name, value in self._waited.items()}, {}
        self._log.append(json.dumps(record | {"seconds": record["seconds"] | waited}) + "\n")
        self._log.sync()
