"""Compute the sizes and the memory of a run from its config. No arrays are allocated."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax import models
from mugrpo_jax.config import RunConfig
from mugrpo_jax.models import Decoder, ModelConfig, check_mesh
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.planning.run_memory import Memory, abstract_state, bytes_on_device, kept_reference
from mugrpo_jax.planning.run_plan import RunPlan, SamplingDevices
from mugrpo_jax.planning.units import human
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.sampling.sampler_plan import free_memory, sampler_dtypes
from mugrpo_jax.setup.auto_settings import choose_settings
from mugrpo_jax.setup.behavior_policy import behavior_shape, check_behaviors, other_sources
from mugrpo_jax.setup.devices import local_device, run_mesh, sampling_only_mesh
from mugrpo_jax.setup.initial_model import run_model_shape
from mugrpo_jax.setup.lora import abstract_run_base, trainable_model
from mugrpo_jax.setup.reference_policy import check_reference
from mugrpo_jax.setup.sizes import sampler_plan, update_buckets


def plan_run(
    config: RunConfig,
    model: ModelConfig | None = None,
    mesh: Mesh | None = None,
    *,
    device_memory: int | None = None,
    apart: Mesh | None = None,
) -> RunPlan:
    """Compute the plan of a run. No arrays are allocated and no weights are loaded.

    Args:
      model: shape of the model; if None, the shape of the model that the config names.
      mesh: the devices that train; if None, this machine's devices in the config's mesh shape.
      device_memory: free bytes on each device; if None, the free memory that the device reports.
      apart: the devices that only sample, if the config has any; if None, those of this machine.
    """
    model = run_model_shape(config) if model is None else model
    mesh = run_mesh(config) if mesh is None else mesh
    check_mesh(model, mesh)
    check_reference(config, mesh)
    config, choices = choose_settings(config, model, mesh, memory=device_memory)
    check_behaviors(config, mesh)
    state = abstract_state(config, model, mesh)
    weights, optimizer = bytes_on_device(state.params), bytes_on_device(state.opt_state)
    drift = bytes_on_device((state.anchor, state.previous))
    frozen = bytes_on_device((state.proximal, kept_reference(config, mesh)))
    base = bytes_on_device(abstract_run_base(config, Decoder(model), mesh))
    base_sampling = 0 if mesh.size == 1 else base
    device = free_memory(local_device(mesh)) if device_memory is None else device_memory
    kept = weights + optimizer + drift + frozen + base_sampling
    sampler, problem = _sampler(config, model, mesh, kept, device)
    where, beside, devices = mesh, kept, None
    if problem is None and config.mesh.sampling_devices and config.replay.run is None:
        where = sampling_only_mesh(config, model) if apart is None else apart
        beside = _published_bytes(config, model, where)
        found, problem = _sampler(config, model, where, beside, device, evaluates=False)
        if found is not None:
            devices = SamplingDevices(dataclasses.replace(found, mesh=found.mesh or where), beside)
    behaviors: dict[str, SamplerPlan] = {}
    for source in other_sources(config) if problem is None else ():
        other, loaded = _behavior(config, source, where)
        plan, problem = _sampler(config, other, where, beside + loaded, device, evaluates=False)
        if plan is None:
            problem = f"the behavior {source}: {problem}"
            break
        behaviors[source] = plan
    memory = Memory(
        weights=weights,
        base=base,
        base_sampling=base_sampling,
        optimizer=optimizer,
        drift=drift,
        frozen=frozen,
        gradients=weights,
        compute=2 * weights * jnp.dtype(config.model.compute_dtype).itemsize // 4,
        sampler=max(map(_sampler_bytes, (sampler, *(behaviors.values() if devices is None else ())))),
        device=device,
    )
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    if problem is None and device is not None and memory.updating > device:
        problem = (
            f"an update takes {human(memory.updating)} on each device without activations, and "
            f"{human(device)} are free; {_smaller(config)}"
        )
    buckets = update_buckets(config, mesh)
    return RunPlan(config, model, mesh, buckets, sampler, memory, whole, problem, choices, behaviors, devices)


def _behavior(config: RunConfig, source: str, mesh: Mesh) -> tuple[ModelConfig, int]:
    """Return the shape of another model that writes responses, and the bytes of its loaded weights."""
    shape = behavior_shape(source)
    model, params = models.abstract(shape, dtype=sampler_dtypes(config.model.sampling_dtype)["dtype"])
    return shape, bytes_on_device(placed(params, models.param_sharding(mesh, model, params)))


def _published_bytes(config: RunConfig, shape: ModelConfig, mesh: Mesh) -> int:
    """Return the bytes on a device of the weights that the trainer publishes, with LoRA's frozen ones."""
    model, kinds = trainable_model(config, Decoder(shape)), sampler_dtypes(config.model.sampling_dtype)
    exact = config.lora.rank or kinds["matrices"] is not None
    params = models.abstract_params(model, dtype=jnp.dtype(jnp.float32) if exact else kinds["dtype"])
    base = abstract_run_base(config, Decoder(shape), mesh)
    return bytes_on_device((placed(params, models.param_sharding(mesh, model, params)), base))


def _sampler_bytes(plan: SamplerPlan | None) -> int:
    return 0 if plan is None else plan.weight_bytes + plan.cache_bytes + plan.work_bytes


def _sampler(
    config: RunConfig,
    model: ModelConfig,
    mesh: Mesh,
    kept: int,
    device: int | None,
    *,
    evaluates: bool = True,
) -> tuple[SamplerPlan | None, str | None]:
    """Plan a sampler that fits beside other arrays of `kept` bytes, or return why no sampler fits.

    With `evaluates`, it is the sampler beside the training state, which also samples for evaluations.
    """
    only_trains = config.replay.run is not None or bool(config.mesh.sampling_devices)
    if evaluates and only_trains and not config.evaluation.problems:
        return None, None
    if device is not None and device <= kept:
        what = "the training state takes" if evaluates else "what stays beside the sampler takes"
        return None, f"{what} {human(kept)} on each device, and {human(device)} are free; {_smaller(config)}"
    left = None if device is None else device - kept
    try:
        return sampler_plan(config, model, mesh, memory=left), None
    except ValueError as error:
        if "does not fit" not in str(error):
            raise
        return None, str(error)


def _smaller(config: RunConfig) -> str:
    """Return what makes the training state smaller."""
    other = "lora.base_dtype=int8" if config.lora.rank else "track_drift=false or LoRA (lora.rank=16)"
    return f"more devices along mesh.fsdp, or {other}, would help"
