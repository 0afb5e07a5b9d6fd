"""The generation phase of a trainer whose rollouts other processes write (`--rollouts wait`).

At the start of a stage, the trainer publishes its weights for the samplers (`mugrpo sample`), and then waits
until the rollouts of the stage are complete. The folder of the run is all that the processes share.
"""

import contextlib

import jax

from mugrpo_jax import distributed
from mugrpo_jax.files import plain_errors
from mugrpo_jax.loop.resume import save_if_due
from mugrpo_jax.loop.run_context import RunContext, Waits
from mugrpo_jax.rollouts import RolloutFolder
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.run_folder import stage_folder
from mugrpo_jax.runs.sampler_claims import last_error, remove_claims, signs_of_life
from mugrpo_jax.runs.time_left import duration
from mugrpo_jax.setup.published_policies import served_stages
from mugrpo_jax.training import Cursor, TrainState


def publish_policy(run: RunContext, waits: Waits, state: TrainState, cursor: Cursor) -> None:
    """Write the weights at the start of a stage, if rollouts of them are missing.

    The policy is on disk before the first update of the stage, because after it the weights are gone.
    """
    needed = distributed.gather("needed", _missing(run, cursor.stage))[0]
    if needed and not cursor.update:
        run.policies.publish(state.params, cursor.stage)
    if waits.thread is not None:
        waits.thread.start()  # with what it needs for the stages ahead, also if this stage is complete


def remove_policies(run: RunContext) -> None:
    """Remove the published policies whose rollouts are complete, and what killed samplers left of them."""
    if jax.process_index() == 0:
        for stage in run.policies.stages():
            if not _missing(run, stage):
                with contextlib.suppress(OSError), plain_errors():  # then the next stage removes it
                    run.policies.remove(stage)
                for sampled in served_stages(run.config, stage):
                    remove_claims(run.folder.folder, sampled)


def _missing(run: RunContext, policy_stage: int) -> bool:
    stages = served_stages(run.config, policy_stage)
    return not all((stage_folder(run.folder.folder, stage) / "manifest.json").exists() for stage in stages)


def wait_for_samplers(
    run: RunContext, waits: Waits, state: TrainState, rollouts: RolloutFolder, cursor: Cursor
) -> None:
    """Wait until samplers have written all shards of a stage and its manifest."""
    stage, waiting, complete = rollouts.identity["stage"], waits.waiting, rollouts.folder / "manifest.json"
    waiting.restart()
    run.pending.flush()  # the metrics of the last updates are known, so they are not kept until the wait ends
    with progress.bar(rollouts.shards, f"stage {stage}: wait for samplers", "shard") as bar:
        while not any(distributed.gather("sampled", complete.exists())):
            run.stop.agree(any(distributed.gather("stop", run.stop.requested)))
            if run.stop.agreed:
                save_if_due(run, state, cursor)  # and leaves
            if waits.thread is not None:
                waits.thread.check()
            bar.update(sum(1 for _ in rollouts.folder.glob("shard-*.arrayrecord")) - bar.n)
            signs = signs_of_life(run.folder.folder)
            living = waits.samplers.living(signs)
            samplers = _samplers(living, waits.samplers.silent_s(), last_error(run.folder.folder))
            what = f"the rollouts of stage {stage} ({bar.n} of {rollouts.shards} shards; {samplers})"
            waiting.pause(what, (signs, bar.n), lambda: _remedy(run), alone=not living)
        bar.update(rollouts.shards - bar.n)
    waits.seconds[stage] = waits.seconds.get(stage, 0.0) + waiting.seconds
    run.pending.restart()


def _samplers(living: int, silent: float | None, error: str | None) -> str:
    """Return a text about the samplers that are alive, and what is known of one that has ended."""
    text = f"{living} sampler{'' if living == 1 else 's'}"
    if error is not None:
        return f"{text}; {error}"
    if living or silent is None:
        return text
    return f"{text}, the last sign of life was seen {duration(silent)} ago"


def _remedy(run: RunContext) -> str:
    return (
        f"start a sampler with mugrpo sample {run.folder.folder} --watch, then the same command continues; "
        "or leave --rollouts wait out"
    )
