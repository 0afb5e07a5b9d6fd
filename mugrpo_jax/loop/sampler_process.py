"""A sampler of its own: write the rollouts of a run while another process trains (`mugrpo sample`).

The folder of the run is the queue. The trainer publishes the policy at the start of each stage. A stage is
sampled once its policy is there, which is that of `batch.lag` stages earlier. So a sampler never runs ahead
of the lag, and the rollouts are those of a run in one process. Several samplers share the shards of a stage.
"""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from mugrpo_jax import config as configs
from mugrpo_jax.compiling.compile_cache import use_compile_cache
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import make_folder
from mugrpo_jax.loop.preflight import check_problems, check_reward
from mugrpo_jax.loop.sampler_work import SamplerWork, start_trainer
from mugrpo_jax.loop.sampling_context import SamplingContext
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.run_data import check_same_data
from mugrpo_jax.runs.run_folder import check_same_config, is_sampled, read_config
from mugrpo_jax.runs.run_lock import refuse_beside_trainer, trainer_sign, watch_trainer
from mugrpo_jax.runs.sampler_claims import SignOfLife
from mugrpo_jax.runs.stop import Stopped, StopRequest
from mugrpo_jax.runs.waiting import LONGEST_STAGE_S, WAIT_LIMIT_S, Waiting
from mugrpo_jax.setup.behavior_policy import check_behaviors
from mugrpo_jax.setup.devices import loading_mesh
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.run_environment import check_environment
from mugrpo_jax.setup.run_setup import load_sampling_setup
from mugrpo_jax.tasks import Task, load_task


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
    if run.is_file():
        raise ConfigError(
            f"{run}: a file; mugrpo sample needs the folder of the run, the --out of its trainer"
        )
    with StopRequest() as stop, contextlib.ExitStack() as resources:
        waiting, trainer = Waiting(wait_limit_s, LONGEST_STAGE_S), refuse_beside_trainer(run)
        if (run / "config.yaml").exists() and read_config(run).replay.run is not None:
            raise ConfigError(
                f"{run}: is a replay, which has its rollouts already; there is nothing to sample"
            )
        _wait_for_trainer(run, waiting, stop, watch, trainer)
        sign = resources.enter_context(SignOfLife(run))
        # A trainer may have started before it could see our sign of life.
        watch_trainer(run, trainer, lambda: stop.requested)
        if stop.requested:
            raise Stopped("nothing was sampled yet")
        context = open_context(run, overrides, stop, resources, sign)
        SamplerWork(context, run, sign, waiting, watch=watch).work()


def _wait_for_trainer(
    run: Path, waiting: Waiting, stop: StopRequest, watch: bool, trainer: bytes | None
) -> None:
    """Wait until the run has a policy: from then on, its config does not change any more.

    `trainer` is the first sign of life of a trainer, if there was one.
    """
    while not any(True for _ in run.glob("policies/*/policy.json")) and not _sampled(run):
        if stop.requested:
            raise Stopped("nothing was sampled yet")
        if not watch:
            raise ConfigError(
                f"{run}: no policy is published; {start_trainer(run)}, or wait for it with --watch"
            )
        sign = refuse_beside_trainer(run, before=trainer)
        trainer = trainer or sign
        where = run if run.exists() else f"{run}, which does not exist yet"
        found = trainer_sign(run)
        waiting.pause(
            f"the trainer to publish a policy in {where}", found, lambda: start_trainer(run), alone=not found
        )


def _sampled(run: Path) -> bool:
    return (run / "config.yaml").exists() and is_sampled(run, read_config(run))


def open_context(
    run: Path,
    overrides: Sequence[str],
    stop: StopRequest,
    resources: contextlib.ExitStack,
    sign: SignOfLife,
) -> SamplingContext:
    """Load model and task of a run as its trainer did; raise an error if config or data are others."""
    config = configs.changed(read_config(run), list(overrides))
    check_same_config(run, config)
    use_compile_cache(config.compile_cache)
    task = load_task(config.task.name, **config.task.options)
    check_same_data(run, task.sources)
    tokenizer = run_model_tokenizer(config)
    task, _ = check_problems(config, task, tokenizer)
    check_environment(config, tokenizer, task.train)
    if line := check_reward(config, task):
        progress.say(line)
    mesh = loading_mesh(run_model_shape(config))  # of all devices; a sampler needs no other kind of mesh
    check_behaviors(config, mesh)
    return sampling_context(run, config, task, mesh, stop, resources, sign)


def sampling_context(
    run: Path,
    config: RunConfig,
    task: Task,
    mesh: Mesh,
    stop: StopRequest,
    resources: contextlib.ExitStack,
    sign: SignOfLife,
) -> SamplingContext:
    """Return what a sampler on the devices of a mesh needs."""
    setup = load_sampling_setup(config, mesh)
    devices = re.sub(r"\W+", "-", f"{mesh.devices.flat[0].device_kind} {mesh.size}")
    slots = run / "samplers" / "slots"
    make_folder(slots)
    setup = dataclasses.replace(setup, sampler_file=slots / f"{devices}.json", on_tokens=sign.moved)
    resources.callback(setup.programs.close)
    return SamplingContext(setup, task, stop, resources)
