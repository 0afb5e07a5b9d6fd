"""The µ-GRPO loop. A run has a few stages; each stage generates all its rollouts and then takes µ updates.

µ-GRPO differs from GRPO (arXiv 2402.03300) in these points:

1. A stage generates all its rollouts with one frozen policy, the behavior policy, and then takes µ updates on
   these rollouts. µ is 1024 by default; GRPO is the same loop with µ = 4. Each rollout is used in one update,
   unless the config sets more epochs. With `batch.lag` = L, the policy of L stages earlier generates them.
2. The sampler frees its weights and KV cache before the first update, so that the optimizer has all memory.
3. The log-probs of the behavior policy are stored during decoding and never computed again.
4. The upper clip bound is 5 instead of 1.2, and there is no lower bound, so that stale tokens still count.
5. In a response with negative advantage, the veto finds the first token whose ratio fell below 1e-4 and drops
   all later tokens from the loss. Every update computes the veto again with the current weights.
6. By default there is no KL term and no dual clip. A new stage continues with the optimizer state of the
   last stage.
7. Rollouts are stored in files, so that a stage can be inspected, or replayed with another objective.

Points 4 and 5 are in `objectives.mu_grpo`. This module and the modules it calls contain the other points.
"""

from pathlib import Path

from mugrpo_jax import training
from mugrpo_jax.config import RunConfig
from mugrpo_jax.loop.compile_ahead import compile_ahead
from mugrpo_jax.loop.ending import ending
from mugrpo_jax.loop.generation_phase import generate_stage
from mugrpo_jax.loop.held_out import held_out_accuracy
from mugrpo_jax.loop.reference_phase import check_reference_weights, keep_reference, reference_logprobs
from mugrpo_jax.loop.resume import resume, save_if_due
from mugrpo_jax.loop.run_context import open_run
from mugrpo_jax.loop.update_phase import check_loss, optimise
from mugrpo_jax.runs import progress
from mugrpo_jax.training import Cursor


def train(
    config: RunConfig,
    folder: Path,
    *,
    back_to: int | None = None,
    overwrite: bool = False,
    started: float | None = None,
    wait_limit_s: float | None = None,
) -> Path:
    """Start or resume the run that `config` describes; return the folder of the run.

    With `back_to`, a run goes back to its checkpoint after so many updates. With `overwrite`, a run in the
    folder that cannot continue with this config is moved to a folder beside it. `started` is when the user's
    command started, on the clock of `time.monotonic`; None: now. With `wait_limit_s`, samplers of their own
    (`loop.sampler_process`) write the rollouts, and the run waits so many seconds for a sign of life of them.
    """
    with open_run(
        config,
        folder,
        back_to=back_to,
        overwrite=overwrite,
        started=started,
        wait_limit_s=wait_limit_s,
    ) as run:
        step = check_loss(run)
        check_reference_weights(run)
        compile_ahead(run, step, has_state=False)
        state, cursor = resume(run)
        compile_ahead(run, step, has_state=True)
        keep_reference(run)
        for stage in range(cursor.stage, config.stages.stop):
            # At the start of a stage, or inside a stage if an evaluation was interrupted.
            save_if_due(run, state, cursor, accuracy=held_out_accuracy(run, state, cursor))
            if cursor.update == 0:
                state = training.start_stage(state)  # the drift is measured from here
            rollouts = generate_stage(run, state, stage, cursor)  # those of stage + lag; returns this stage's
            reference = reference_logprobs(run, state, stage, rollouts, cursor)  # None without a KL term
            for state, cursor in optimise(run, state, stage, rollouts, reference, cursor):  # noqa: B020
                save_if_due(run, state, cursor, accuracy=held_out_accuracy(run, state, cursor))
            cursor = Cursor(stage=stage + 1, updates=cursor.updates)
            held_out_accuracy(run, state, cursor)  # before the report, which shows it
            run.report.after_stage(state.params, stage, rollouts)
        save_if_due(run, state, cursor, accuracy=held_out_accuracy(run, state, cursor))
    progress.say(ending(config, folder))
    return folder


def warm_start(config: RunConfig, folder: Path, *, overwrite: bool = False) -> Path:
    """Do only the warm start and an evaluation. A later `train` with the same folder resumes after them."""
    with open_run(config, folder, overwrite=overwrite) as run:
        state, cursor = resume(run)
        save_if_due(run, state, cursor, accuracy=held_out_accuracy(run, state, cursor))
    return folder
