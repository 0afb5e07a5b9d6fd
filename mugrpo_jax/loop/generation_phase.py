"""The first phase of a stage: generate rollouts with the current weights, and write them to disk.

With `batch.lag` = L, the start of stage j generates the rollouts of stage j + L. The start of stage 0
generates those of stages 0 to L. So the folders of the stages are the queue of rollouts, and no old weights
are kept. If samplers of their own write the rollouts, the same policies write the same rollouts, see
`awaited_rollouts`; then the trainer waits for one stage at a time.
"""

import functools
import operator
import time
from typing import Any

import jax

from mugrpo_jax import distributed
from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import PATIENCE_S
from mugrpo_jax.loop import replay
from mugrpo_jax.loop.awaited_rollouts import publish_policy, remove_policies, wait_for_samplers
from mugrpo_jax.loop.failed_rewards import check_failed
from mugrpo_jax.loop.resume import save_if_due
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.loop.sampling_passes import prepare_next, sample_shards
from mugrpo_jax.rollouts import DamagedRollouts, RolloutFolder, open_stage
from mugrpo_jax.runs import progress
from mugrpo_jax.tasks.scoring import STATUSES
from mugrpo_jax.training import Cursor, TrainState


def generate_stage(run: RunContext, state: TrainState, stage: int, cursor: Cursor) -> RolloutFolder:
    """Generate the rollouts that are due at the start of a stage; return those that the stage trains on.

    Each folder is checked once, when this process first needs it. So a run that resumes knows at once whether
    the rollouts of the stages ahead, whose policies are gone, are still whole.
    """
    config = run.config
    if config.replay.run is not None:
        with distributed.together("replay"):
            return replay.rollouts(config)
    if run.waits is not None:
        publish_policy(run, run.waits, state, cursor)
    for ahead in range(stage, min(stage + config.batch.lag + 1, config.stages.stop)):
        if ahead not in run.generated and (ahead == stage or not _still_sampled(run, ahead)):
            run.generated[ahead] = _whole_stage(run, state, ahead, cursor)
    remove_policies(run)
    rollouts, manifest = run.generated.pop(stage)
    if not cursor.update and run.journal.find("stage", cursor.updates) is None:
        _record(run, manifest, stage, cursor)
    return rollouts


def _still_sampled(run: RunContext, stage: int) -> bool:
    """Return whether samplers of their own still write a stage, or have yet to begin."""
    if run.waits is None:
        return False
    complete = (run.folder.stage_folder(stage) / "manifest.json").exists()
    published = run.policies.has(run.config.policy_stage(stage))
    return distributed.gather("still sampled", not complete and published)[0]  # all hosts go the same way


def _whole_stage(
    run: RunContext, state: TrainState, stage: int, cursor: Cursor
) -> tuple[RolloutFolder, dict[str, Any]]:
    """Return the folder of a stage and its manifest; generate what is missing, if its policy is there.

    If samplers of their own generate, wait for them instead.
    """
    config = run.config
    rollouts = RolloutFolder(
        folder=run.folder.stage_folder(stage),
        identity=config.rollout_identity(stage),
        prompts=config.prompts_per_stage,
        prompts_per_shard=config.sampling.prompts_per_shard,
        patience_s=PATIENCE_S if jax.process_count() > 1 or _sampled_elsewhere(run) else 0.0,
    )
    manifest = _checked_manifest(run, rollouts, cursor)
    while manifest is None:
        if run.waits is None:
            manifest = _generate(run, state, rollouts, stage, cursor)
        else:
            wait_for_samplers(run, run.waits, state, rollouts, cursor)
            manifest = _checked_manifest(run, rollouts, cursor)
    again = f"mend it, remove {rollouts.folder} and start again"
    check_failed(config, f"stage {stage}", manifest["status"], manifest.get("examples", {}), again)
    return rollouts, manifest


def _sampled_elsewhere(run: RunContext) -> bool:
    return run.waits is not None and run.waits.thread is None


def _checked_manifest(run: RunContext, rollouts: RolloutFolder, cursor: Cursor) -> dict[str, Any] | None:
    """Check all files of the stage; return its manifest, or None if shards must be generated.

    Once the policy that generated its shards has been updated, it is gone, unless it was published. If it is
    gone, a damaged shard is an error.
    """
    gone = cursor.updates > rollouts.identity["policy_updates"] and not _published(run, rollouts)
    manifest, problem = None, None
    seen = distributed.gather("complete", (rollouts.folder / "manifest.json").exists())
    try:
        manifest = rollouts.manifest(complete=any(seen))
        if manifest is not None:  # the hosts share the work of checking the files
            share = jax.process_index(), jax.process_count()
            open_stage(rollouts.folder, share=share, patience_s=rollouts.patience_s)
        elif gone:
            problem = f"{rollouts.folder}: the rollouts of stage {rollouts.identity['stage']} are gone"
    except DamagedRollouts as error:
        problem = str(error)
    found = [problem for problem in distributed.gather("rollouts", problem) if problem is not None]
    if not found:
        return manifest
    if gone and (shards := rollouts.problems()):
        raise ConfigError(f"{next(iter(shards.values()))}; {_remedy(run, rollouts, cursor)}")
    progress.say(f"{found[0]}; it is made again")
    if jax.process_index() == 0:
        if run.waits is not None:
            rollouts.missing_shards()  # deletes the damaged ones, before samplers look for work
        (rollouts.folder / "manifest.json").unlink(missing_ok=True)
        if gone:
            rollouts.commit()  # all shards are there
    distributed.gather("repaired", None)
    return rollouts.manifest(complete=gone)


def _published(run: RunContext, rollouts: RolloutFolder) -> bool:
    """Return whether the policy that writes a stage is on disk, for samplers or from an earlier start."""
    return distributed.gather("published", run.policies.has(rollouts.identity["policy_stage"]))[0]


def _remedy(run: RunContext, rollouts: RolloutFolder, cursor: Cursor) -> str:
    """Return what to do about a damaged shard whose policy has been updated since."""
    wrote = rollouts.identity["policy_updates"]
    before = [step for step in run.checkpoints.steps() if step <= wrote]
    if not before:
        return (
            "restore the file from a backup, because no checkpoint is kept that leads to the policy that "
            f"generated it, after {wrote} updates"
        )
    return (
        f"restore the file from a backup, or add --back-to {before[-1]} to the same command: then "
        f"{cursor.updates - before[-1]} updates are done again, and the shard is generated again"
    )


def _generate(
    run: RunContext, state: TrainState, rollouts: RolloutFolder, stage: int, cursor: Cursor
) -> dict[str, Any]:
    """Generate the missing shards of this host; return the manifest once all hosts are done.

    The policy is that of the state, or a published one if the run waited for samplers when it was killed.
    """
    params, wrote = state.params, rollouts.identity["policy_updates"]
    if cursor.updates > wrote:
        params = run.policies.load(rollouts.identity["policy_stage"])
    else:
        assert cursor.updates == wrote, "the state is not the policy of the stage"
    started = time.monotonic()
    mine = range(jax.process_index(), rollouts.shards, jax.process_count())
    missing = rollouts.missing_shards(mine)
    seconds: dict[str, float] = {}
    examples: dict[str, str] = {}
    # If any host has missing shards, every host must open a sampler, because the weights come from all hosts.
    if any(distributed.gather("missing", bool(missing))):
        seconds, examples = sample_shards(run, params, rollouts, stage, missing)
    run.stop.agree(any(distributed.gather("generated", run.stop.requested)))
    if run.stop.agreed:
        save_if_due(run, state, cursor)  # and leaves
    seconds["generate"] = time.monotonic() - started
    seconds["switch"] = seconds["generate"] - seconds.get("sample", 0.0) - seconds.get("score_wait", 0.0)
    manifest = rollouts.commit(seconds) if jax.process_index() == 0 else None
    examples = functools.reduce(operator.or_, distributed.gather("manifest", examples), {})
    if stage + 1 < run.config.stages.stop:
        prepare_next(run, rollouts, stage + 1, mine)
    return (manifest or rollouts.manifest(complete=True) or {}) | {"examples": examples}


def _record(run: RunContext, manifest: dict[str, Any], stage: int, cursor: Cursor) -> None:
    responses, tokens = manifest["responses"], manifest["response_tokens"]
    status = dict.fromkeys(STATUSES, 0) | manifest["status"]
    seconds = dict(manifest["seconds"])
    if run.waits is not None:  # the time of samplers is not that of this process
        seconds = {f"sampler/{name}": value for name, value in seconds.items()}
        seconds["wait"] = run.waits.seconds.get(stage, 0.0)
    parts = {name: total / responses for name, total in manifest.get("reward_parts", {}).items()}
    run.journal.write(
        {
            "kind": "stage",
            "stage": stage,
            "updates": cursor.updates,
            "policy_updates": manifest["identity"]["policy_updates"],
            "reward": manifest["reward"] / responses,
            **{f"reward/{name}": value for name, value in parts.items()},
            "response_length": tokens / responses,
            "longest_response": manifest["longest_response"],
            "truncated": manifest["finish"].get("length", 0) / responses,
            **({"malformed": manifest["malformed"] / responses} if "malformed" in manifest else {}),
            **_answered(run, manifest),
            "equal_groups": manifest["equal_groups"] / manifest["groups"],
            "responses": responses,
            "response_tokens": tokens,
            **_by_behavior(manifest),
            "finish": manifest["finish"],
            "status": status,
            "seconds": seconds | run.start_times.take(),
        }
    )
    progress.say(
        f"stage {stage}: {responses} responses, reward {manifest['reward'] / responses:.3f}"
        f"{progress.reward_parts(parts)}, {_speed(tokens, manifest['seconds'], seconds.get('wait'))}"
        f"{run.time_left.clause()}"
    )
    progress.say_equal_groups(
        f"stage {stage}", manifest["equal_groups"], manifest["groups"], manifest["reward"] / responses
    )
    progress.say_unscored(f"stage {stage}", status, manifest.get("examples", {}))


def _answered(run: RunContext, manifest: dict[str, Any]) -> dict[str, float]:
    """Return the share of responses with messages of the environment, and its messages per response."""
    if run.config.environment.name is None:
        return {}
    names = {"answered": "answered_responses", "messages": "messages", "message_tokens": "message_tokens"}
    return {name: manifest.get(key, 0) / manifest["responses"] for name, key in names.items()}


def _speed(tokens: int, seconds: dict[str, float], waited: float | None) -> str:
    """Return a text about how fast a stage was generated, and how long the trainer waited for it."""
    times = [
        f"{name.replace('_', ' ')} {seconds[name]:.2f} s"
        for name in ("sample", "score_wait", "write", "switch")
        if name in seconds
    ]
    times += [] if waited is None else [f"the trainer waited {waited:.2f} s"]
    total = seconds.get("generate", 0.0)
    return f"{tokens / max(total, 1e-9):,.0f} tokens/s in {total:.1f} s ({', '.join(times)})"


def _by_behavior(manifest: dict[str, Any]) -> dict[str, float]:
    """Return the means of each behavior; nothing if the current policy wrote all responses."""
    found: dict[str, float] = {}
    for name, sums in manifest.get("behaviors", {}).items():
        count = sums["responses"]
        found |= {
            f"responses@{name}": count,
            f"reward@{name}": sums["reward"] / count,
            f"response_length@{name}": sums["response_tokens"] / count,
            f"truncated@{name}": sums["truncated"] / count,
        }
    return found
