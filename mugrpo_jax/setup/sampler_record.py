"""Record the number of slots that was planned from the free memory, so that a resumed run keeps it.

The number of slots decides the shapes of the sampler's batches. In bfloat16, other shapes give slightly
different log-probs, and so other responses. The free memory changes from start to start, so that the same
command could plan another number of slots.
"""

import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mugrpo_jax import distributed
from mugrpo_jax.config import AUTO, ConfigError, RunConfig
from mugrpo_jax.files import create
from mugrpo_jax.models import ModelConfig
from mugrpo_jax.runs import owned_files, progress
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.setup.sizes import sampler_plan


def recorded_sampler_plan(config: RunConfig, model: ModelConfig, mesh: Mesh, file: Path) -> SamplerPlan:
    """Plan this host's sampler with the slots in `file`, or else with as many as fit, and write `file`.

    All hosts call this together and get the same number of slots. If the devices of a host have changed, or
    the recorded slots do not fit any more, the sampler is planned again.
    """
    if config.sampling.slots != AUTO:
        return sampler_plan(config, model, mesh)
    here = _devices(config, mesh)
    content = owned_files.read(file) if jax.process_index() == 0 else None
    found = distributed.gather("sampler record", _parse(file, content))[0]
    plan, reason = None, None
    if found is not None and found["devices"] != here:
        reason = f"the sampler was planned for {_text(found['devices'])}, here are {_text(here)}"
    elif found is not None:
        try:
            plan = sampler_plan(config, model, mesh, slots=found["slots"], usable=1.0)
        except ValueError as error:
            reason = str(error)
    reasons = [text for text in distributed.gather("sampler kept", reason) if text is not None]
    if found is not None and not reasons and plan is not None:
        return plan
    plan = sampler_plan(config, model, mesh)
    slots = min(distributed.gather("sampler slots", plan.slots))
    text = json.dumps({"slots": slots, "devices": here}, indent=1) + "\n"
    made = jax.process_index() > 0 or _replace(file, content, text.encode())
    if not distributed.gather("sampler recorded", made)[0]:  # another sampler was faster
        return recorded_sampler_plan(config, model, mesh, file)
    if reasons:
        progress.say(f"{file}: {found['slots']} slots are not kept, now {slots}: {reasons[0]}")
    return plan if plan.slots == slots else sampler_plan(config, model, mesh, slots=slots)


def _devices(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return {
        "kind": local[0].device_kind,
        "per host": len(local),
        "mesh.sampling_tensor": config.mesh.sampling_tensor,
    }


def _text(devices: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in devices.items())


def _replace(file: Path, content: bytes | None, new: bytes) -> bool:
    """Write the file, if it still has this content; None: if it does not exist."""
    return create(file, new) if content is None else owned_files.take(file, content, new)


def _parse(file: Path, content: bytes | None) -> dict[str, Any] | None:
    if not content:  # a file may be empty if its writer was killed, on a disk without links
        return None
    try:
        found = json.loads(content)
        return {"slots": int(found["slots"]), "devices": dict(found["devices"])}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file}: not the record of a sampler; remove it to plan the slots again") from None
