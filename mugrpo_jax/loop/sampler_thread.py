"""Sample on some devices of this process while the others train (`mesh.sampling_devices`).

A thread does what a sampler of its own does, see `sampler_process`, and the run waits for it like for one.
The policies go through the folder of the run too, so that a killed run finds the ones that it still needs.
"""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from mugrpo_jax.config import RunConfig
from mugrpo_jax.loop.sampler_process import sampling_context
from mugrpo_jax.loop.sampler_work import SamplerWork
from mugrpo_jax.runs.sampler_claims import SignOfLife
from mugrpo_jax.runs.stop import Stopped, StopRequest
from mugrpo_jax.runs.waiting import Waiting
from mugrpo_jax.setup.devices import sampling_only_mesh
from mugrpo_jax.setup.initial_model import run_model_shape
from mugrpo_jax.tasks import Task


class SamplerThread:
    """A sampler in a thread of this process, on the devices that only sample."""

    def __init__(self, run: Path, config: RunConfig, task: Task, wait_limit_s: float) -> None:
        self._run, self._stop, self._resources = run, StopRequest(), contextlib.ExitStack()
        mesh = sampling_only_mesh(config, run_model_shape(config))
        self._sign = SignOfLife(run)
        self._context = sampling_context(run, config, task, mesh, self._stop, self._resources, self._sign)
        self._waiting, self._device = Waiting(wait_limit_s), mesh.devices.flat[0]
        self._thread = ThreadPoolExecutor(1, "sampler")
        self._result: Future[None] | None = None

    def start(self) -> None:
        """Start to sample; more calls do nothing."""
        if self._result is None:
            self._result = self._thread.submit(self._work)

    def check(self) -> None:
        """Raise the error of the sampler, if it has failed."""
        if self._result is not None and self._result.done():
            self._result.result()

    def close(self) -> None:
        """Let the sampler finish what is under way, and wait for it."""
        self._stop.requested = True
        self._thread.shutdown()
        self._resources.close()

    def _work(self) -> None:
        with (
            contextlib.suppress(Stopped),
            jax.default_device(self._device),
            self._sign as sign,
        ):
            SamplerWork(self._context, self._run, sign, self._waiting, watch=True).work()
