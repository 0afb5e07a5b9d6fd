"""List all programs of a run that decide about its memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mugrpo_jax.config import ConfigError
from mugrpo_jax.models import make_mesh
from mugrpo_jax.planning.model_programs import model_programs
from mugrpo_jax.planning.programs import Program, UpdatePrograms, sampler_programs
from mugrpo_jax.planning.run_plan import APART, RunPlan
from mugrpo_jax.rollouts import abstract_update
from mugrpo_jax.sampling import SamplerPlan


def programs_of(run: RunPlan, host: Sequence[Any] | None = None) -> list[Program]:
    """Return the programs to compile for a run. If `host` is given, the sampler uses these devices.

    A new program that makes or moves arrays of the model's size belongs in this list: a test compiles the
    list and fails if a device gets more than its shard.
    """
    updates = UpdatePrograms(run.config, run.model, run.mesh)
    programs = list(updates.programs())
    sampler = run.sampler
    if sampler is not None:
        sampler = _on_devices(run, sampler, host)
        programs += sampler_programs(sampler, run.config, updates.sampling_bytes)
    beside, apart = updates.sampling_bytes, run.apart
    if apart is not None:
        beside, host = apart.loaded, apart.devices
        others = sampler_programs(apart.sampler, run.config, beside, evaluates=False)
        programs += [dataclasses.replace(other, name=APART + other.name) for other in others]
    for source, plan in run.behaviors.items():
        others = sampler_programs(_on_devices(run, plan, host), run.config, beside, evaluates=False)
        programs += [dataclasses.replace(other, name=f"behavior {source}: {other.name}") for other in others]
    return [*programs, *model_programs(updates, sampler)]


def _on_devices(run: RunPlan, sampler: SamplerPlan, host: Sequence[Any] | None) -> SamplerPlan:
    if sampler.mesh is not None and host is None:
        return sampler
    devices = host or [run.mesh.devices.flat[0]]  # without a mesh, jax would take this machine's device
    mesh = make_mesh(data=-1, tensor=run.config.mesh.sampling_tensor, devices=devices)
    return dataclasses.replace(sampler, mesh=mesh)


def check_loss(run: RunPlan) -> None:
    """Trace the loss of a run; raise an error if it cannot be computed with the settings of the config."""
    programs = UpdatePrograms(run.config, run.model, run.mesh)
    try:
        update = abstract_update(
            run.buckets, reference=run.config.uses_reference, behaviors=bool(programs.behaviors)
        )
        programs.step.metric_names(programs.state, update, programs.base)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"objective: {error}") from None
