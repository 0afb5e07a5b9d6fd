"""µ-GRPO, top to bottom: a few large stages of *generate everything, then optimise many times*.

How it departs from GRPO (arXiv 2402.03300):

1. A stage generates all its rollouts at once, from one frozen policy, and then takes µ updates on them
   (1024 by default; GRPO is this same loop with µ = 4). One pass over the data unless asked for more.
2. The sampler and the optimizer never share the device: the sampler's weights and cache are gone before the
   first update.
3. Log-probs of the behavior policy are recorded while decoding and never recomputed.
4. Ratios are kept up to 5 instead of 1.2, and nothing is clipped from below: stale tokens still teach.
5. In a response with negative advantage, everything behind the first token that the policy has abandoned
   (ratio < 1e-4) is vetoed, recomputed at every update with the current weights.
6. There is no KL term and no dual clip. The optimizer's state carries over between stages.
7. Rollouts are files: a stage can be inspected, optimised again, or replayed with another objective.

4 and 5 are `objectives.mu_grpo`; the rest is below.
"""

from pathlib import Path

import jax

from mugrpo_jax import training
from mugrpo_jax.config import RunConfig
from mugrpo_jax.loop.job import Job
from mugrpo_jax.runs.stop import StopRequest
from mugrpo_jax.training import Cursor


def train(config: RunConfig, folder: Path) -> Path:
    """Run, or continue, everything that `config` describes; returns the run's folder."""
    with StopRequest() as stop, Job.open(config, folder, stop) as job, jax.set_mesh(job.policy.mesh):
        state, cursor = job.resume()
        for stage in range(cursor.stage, config.stages.stop):
            if cursor.update == 0:
                job.save_if_due(state, cursor, accuracy=job.evaluate(state, cursor))
                state = training.start_stage(state)  # θ becomes b, the behavior policy
            rollouts = job.generate(state, stage, cursor)
            for state, cursor in job.optimise(state, stage, rollouts, cursor):  # noqa: B020
                job.save_if_due(state, cursor, accuracy=job.evaluate(state, cursor))
            cursor = Cursor(stage=stage + 1, updates=cursor.updates)
            job.report(state, stage, rollouts, cursor)
        job.save_if_due(state, cursor, accuracy=job.evaluate(state, cursor))
    return folder


def warm_start(config: RunConfig, folder: Path) -> Path:
    """Only the supervised part of `train` and an evaluation; `train` continues from it."""
    with StopRequest() as stop, Job.open(config, folder, stop) as job, jax.set_mesh(job.policy.mesh):
        state, cursor = job.resume()
        job.evaluate(state, cursor)
    return folder
