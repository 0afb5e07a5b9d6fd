"""The weights that a trainer publishes for the samplers of its run, one folder for each policy:

    policies/00003/
      weights/       the weights at the start of stage 3, as an Orbax checkpoint
      policy.json    which policy it is; written last, so a folder without it does not count

The weights have the dtype in which the sampler computes. There are two exceptions, so that the responses are
those of a run in one process: a sampler with 8-bit matrices rounds float32 weights itself, and with LoRA the
float32 adapters travel, which each sampler merges into its own copy of the frozen weights.
"""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from mugrpo_jax import distributed, models
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import absolute, make_folder, read_json_object, remove_folder, write_atomically
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.models.weights import weights_fingerprint
from mugrpo_jax.sampling.sampler_plan import sampler_dtypes
from mugrpo_jax.setup.run_setup import RunSetup
from mugrpo_jax.tasks.own_functions import code_digests
from mugrpo_jax.training import copy_weights
from mugrpo_jax.training.checkpoints import not_written
from mugrpo_jax.training.checksums import damage, write_checksums


class PublishedPolicies:
    """The folder `policies` of a run. One trainer writes it, samplers read it."""

    def __init__(self, run: Path, setup: RunSetup) -> None:
        self.folder, self._setup = absolute(run) / "policies", setup

    def path(self, stage: int) -> Path:
        """Return the folder of the policy at the start of a stage."""
        return self.folder / f"{stage:05d}"

    def has(self, stage: int) -> bool:
        """Return whether the policy at the start of a stage is published."""
        return (self.path(stage) / "policy.json").exists()

    def publish(self, params: Any, stage: int) -> None:
        """Write the weights of the policy at the start of a stage; if they are there already, do nothing.

        All hosts call this together. A folder of another run, or that a kill left unfinished, is replaced.
        """
        path, about = self.path(stage), self.about(stage)
        with distributed.together("publish"):
            kept = self.has(stage) and _same(_read(path / "policy.json"), about)
        if distributed.gather("published", kept)[0]:  # other hosts may see the files late
            return
        with distributed.together("policy"), _plain_error(path):
            if jax.process_index() == 0:
                make_folder(path)
                (path / "policy.json").unlink(missing_ok=True)
            dtype = _dtype(self._setup)
            weights = params if dtype == jnp.float32 else copy_weights(params, dtype)
            with ocp.StandardCheckpointer() as writer:
                writer.save(path / "weights", weights, force=True)
            if jax.process_index() == 0:
                write_checksums(path / "weights")
                write_atomically(path / "policy.json", json.dumps(about, indent=1) + "\n")

    def load(self, stage: int) -> Any:
        """Load the weights of a published policy, sharded over the devices of this process."""
        path, about, setup = self.path(stage), self.about(stage), self._setup
        found = _read(path / "policy.json")
        if not _same(found, about):
            differing = [f"{name} {found.get(name)}, here {value}" for name, value in about.items()]
            wrong = [text for text, name in zip(differing, about) if found.get(name) != about[name]]
            raise ConfigError(
                f"{path / 'policy.json'}: published with another config, other weights or other code than "
                f"this sampler has: {'; '.join(wrong)}; start the sampler again, with the trainer's files"
            )
        if (problem := damage(path / "weights")) is not None:
            raise ConfigError(f"{problem}; remove {path} and start the trainer again, it tells what to do")
        abstract = models.abstract_params(setup.trainable, dtype=_dtype(setup))
        shardings = models.param_sharding(setup.mesh, setup.trainable, abstract)
        with ocp.StandardCheckpointer() as reader:
            return reader.restore(path / "weights", placed(abstract, shardings))

    def remove(self, stage: int) -> None:
        """Remove a policy that no stage needs any more, first the file that makes it count."""
        (self.path(stage) / "policy.json").unlink(missing_ok=True)
        remove_folder(self.path(stage))

    def stages(self) -> list[int]:
        """Return the stages at whose start the published policies were, also of unfinished folders."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def about(self, stage: int) -> dict[str, Any]:
        """Return what `policy.json` says about the policy at the start of a stage."""
        config = self._setup.config
        return {
            "policy_stage": stage,
            "policy_updates": stage * config.batch.updates_per_stage,
            "rollout_settings": config.rollout_fingerprint(),
            "frozen_weights": self._frozen,
            "code": self._code,
        }

    @functools.cached_property
    def _code(self) -> dict[str, str] | None:
        """The user's own functions that determine rollouts, with hashes of their files."""
        return code_digests(self._setup.config.own_functions) or None

    @functools.cached_property
    def _frozen(self) -> str | None:
        frozen = self._setup.frozen()
        return None if frozen is None else weights_fingerprint(frozen)[:12]


def served_stages(config: RunConfig, policy_stage: int) -> list[int]:
    """Return the stages whose rollouts the policy at the start of a stage writes.

    >>> served_stages(RunConfig(), 2)
    [2]
    """
    near = range(policy_stage, min(policy_stage + config.batch.lag + 1, config.stages.stop))
    return [stage for stage in near if config.policy_stage(stage) == policy_stage]


def _dtype(setup: RunSetup) -> Any:
    kinds = sampler_dtypes(setup.config.model.sampling_dtype)
    exact = setup.base is not None or kinds.get("matrices") is not None
    return jnp.dtype(jnp.float32 if exact else kinds["dtype"])


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}


def _same(found: dict[str, Any], about: dict[str, Any]) -> bool:
    return all(found.get(name) == value for name, value in about.items())


@contextlib.contextmanager
def _plain_error(path: Path) -> Any:
    """Turn an error of Orbax into one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise not_written(path, error) from None
