"""The phase between generation and updates, only with a KL term: store the reference policy's log-probs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mugrpo_jax import distributed
from mugrpo_jax.compiling.compile_clock import compile_clock
from mugrpo_jax.files import to_path
from mugrpo_jax.loop.resume import leave_if_stopped, save
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.rollouts import ReferenceFolder, RolloutFolder, read_groups
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.run_folder import reference_folder
from mugrpo_jax.setup.reference_policy import check_start, load_reference
from mugrpo_jax.training import Cursor, ResponseScorer, TrainState


def reference_logprobs(
    run: RunContext, state: TrainState, stage: int, rollouts: RolloutFolder, cursor: Cursor
) -> ReferenceFolder | None:
    """Compute the log-probs of the reference policy that are not on disk yet, and return their folder.

    Return None if the loss has no KL term. A replay reads the log-probs of the run that it replays, if that
    run has them for the same reference policy; otherwise it computes them and writes them to its own folder.
    """
    config = run.config
    if not config.uses_reference:
        return None
    # With "start", the identity does not name the weights, but they follow from the run of the rollouts.
    identity = {
        "source": config.reference.source,
        "dtype": config.model.compute_dtype,
        "temperature": config.training_temperature,
    }
    own = ReferenceFolder(reference_folder(run.folder.folder, stage), identity, rollouts)
    if config.replay.run is not None:
        other = ReferenceFolder(reference_folder(to_path(config.replay.run), stage), identity, rollouts)
        if not _missing(other):
            return other
    started, compiled = time.monotonic(), compile_clock().seconds
    if missing := _missing(own):
        _compute(run, state, own, missing, stage, cursor)
    if not cursor.update and run.journal.find("reference", cursor.updates) is None:
        run.journal.write(
            {
                "kind": "reference",
                "stage": stage,
                "updates": cursor.updates,
                "seconds": {
                    "reference": time.monotonic() - started,
                    "compile": compile_clock().seconds - compiled,
                },
            }
        )
    return own


def check_reference_weights(run: RunContext) -> None:
    """Raise an error if the reference policy cannot be loaded, before anything is trained or generated."""
    config, resumed = run.config, run.checkpoints.latest() is not None
    if not config.uses_reference:
        return
    with distributed.together("reference weights"):
        if config.reference.source != "start" and not resumed:
            _weights(run)
        if config.reference.source == "start" and (resumed or config.replay.run is not None):
            check_start(config, run.start_folder)


def keep_reference(run: RunContext) -> None:
    """Load the reference policy now if it stays in memory, so that the sampler leaves room for it."""
    if run.config.uses_reference and run.config.reference.keep_in_memory:
        _weights(run)


def _weights(run: RunContext) -> tuple[Any, Any]:
    """Return model and weights of the reference policy. With `reference.keep_in_memory`, keep them.

    The start of a LoRA run is not kept: it shares the frozen weights, which leave the device for sampling.
    """
    frozen = run.setup.frozen() if run.config.reference.source == "start" else None
    found = run.reference or load_reference(run.config, run.setup.mesh, run.start_folder, frozen)
    run.reference = found if run.config.reference.keep_in_memory and frozen is None else None
    return found


def _missing(folder: ReferenceFolder) -> list[int]:
    """Return the missing shards. Each host checks its own shards, those that it also writes."""
    mine = range(jax.process_index(), folder.rollouts.shards, jax.process_count())
    found = distributed.gather("reference", folder.missing_shards(mine))
    return sorted(shard for part in found for shard in part)


def _compute(
    run: RunContext,
    state: TrainState,
    folder: ReferenceFolder,
    shards: Sequence[int],
    stage: int,
    cursor: Cursor,
) -> None:
    """Score some shards on all hosts together. Each host writes its own shards."""
    model, params = _weights(run)
    if run.reference_scorer is None:  # built once, so that its programs are compiled once
        setup = run.setup
        run.reference_scorer = ResponseScorer(model, setup.step_options(), setup.mesh, setup.buckets())
    waiting: tuple[int, Callable[[], list[np.ndarray]]] | None = None
    with progress.bar(len(shards), f"stage {stage}: reference", "shard") as bar:
        for shard in shards:
            groups = list(read_groups(folder.rollouts, [shard]))
            started = shard, run.reference_scorer.start(params, groups)
            _write(folder, waiting, bar)  # while the devices score the next shard
            waiting = started
            run.stop.agree(any(distributed.gather("scored", run.stop.requested)))
            if run.stop.agreed:
                break
        _write(folder, waiting, bar)
    if run.stop.agreed:
        save(run, state, cursor)
        leave_if_stopped(run)
    distributed.gather("referenced", None)  # all files must exist before any host reads them


def _write(folder: ReferenceFolder, scored: tuple[int, Any] | None, bar: Any) -> None:
    if scored is not None:
        shard, logprobs = scored
        if shard % jax.process_count() == jax.process_index():
            folder.write_shard(shard, logprobs())
        bar.update()
