"""µ-GRPO, top to bottom: a few large stages of *generate everything, then optimise many times*.

How it departs from GRPO (arXiv 2402.03300):

1. A stage generates all its rollouts at once, from one frozen policy, and then takes µ updates on them
   (1024 by default; GRPO is this same loop with µ = 4). Each rollout is used once unless the config asks for
   more epochs.
2. The sampler and the optimizer never share the device: the memory of the sampler's weights and cache is free
   before the first update.
3. Log-probs of the behavior policy are recorded while decoding and never recomputed.
4. The upper clip of the ratio is 5 instead of 1.2, and there is no lower clip: stale tokens still contribute.
5. In a response with negative advantage, the veto finds the first token whose ratio fell below 1e-4 and drops
   all later tokens from the loss. Every update computes the veto again with the current weights.
6. There is no KL term and no dual clip. The optimizer's state carries over between stages.
7. Rollouts are files: a stage can be inspected, optimised again, or replayed with another objective.

4 and 5 are `objectives.mu_grpo`; the rest is below.
"""

from pathlib import Path

from mugrpo_jax import training
from mugrpo_jax.config import RunConfig
from mugrpo_jax.loop.generation_phase import generate_stage
from mugrpo_jax.loop.held_out import held_out_accuracy
from mugrpo_jax.loop.resume import resume, save_if_due
from mugrpo_jax.loop.run_context import open_run
from mugrpo_jax.loop.update_phase import optimise
from mugrpo_jax.training import Cursor


def train(config: RunConfig, folder: Path) -> Path:
    """Start or resume the run that `config` describes; return the folder of the run."""
    with open_run(config, folder) as run:
        state, cursor = resume(run)
        for stage in range(cursor.stage, config.stages.stop):
            if cursor.update == 0:
                save_if_due(run, state, cursor, accuracy=held_out_accuracy(run, state, cursor))
                state = training.start_stage(state)  # θ becomes b, the behavior policy
            rollouts = generate_stage(run, state, stage, cursor)
            for state, cursor in optimise(run, state, stage, rollouts, cursor):  # noqa: B020
                save_if_due(run, state, cursor, accuracy=held_out_accuracy(run, state, cursor))
            cursor = Cursor(stage=stage + 1, updates=cursor.updates)
            held_out_accuracy(run, state, cursor)  # before the report, which shows it
            run.report.after_stage(state.params, stage, rollouts)
        save_if_due(run, state, cursor, accuracy=held_out_accuracy(run, state, cursor))
    return folder


def warm_start(config: RunConfig, folder: Path) -> Path:
    """Do only the warm start and an evaluation. A later `train` in the same folder continues from there."""
    with open_run(config, folder) as run:
        state, cursor = resume(run)
        held_out_accuracy(run, state, cursor)
    return folder
