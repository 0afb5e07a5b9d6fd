"""Write the report of a run while it trains: after stages samples and the page, at the end the page."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax import distributed
from mugrpo_jax.report.page import write_page
from mugrpo_jax.report.run_history import read_run
from mugrpo_jax.report.samples import SampleScorer, pick_samples, write_samples
from mugrpo_jax.rollouts import RolloutFolder
from mugrpo_jax.setup.run_setup import RunSetup
from mugrpo_jax.tasks.task import Problem

_SHARE = 0.05  # largest share of a run's time that may be spent on writing pages
_SAMPLED = 64  # most stages with samples, because samples of a thousand short stages would take too long
_FIRST = 30.0  # seconds before the first page may be written


class LiveReport:
    """Writes `samples/` and the page `report.html` into the folder of a run while the run trains.

    Process 0 writes the page after a stage, unless pages would take more than `_SHARE` of the run's time,
    and always when the run ends, stops or fails. An error in writing is printed and does not stop training.
    """

    def __init__(self, folder: Path, policy: RunSetup, problems: Sequence[Problem] = ()) -> None:
        self.folder, self.policy, self.problems = folder, policy, problems
        self._scorer = SampleScorer(policy, policy.step_options())
        self._quiet_until = time.monotonic() + _FIRST

    def after_stage(self, params: Any, stage_index: int, rollouts: RolloutFolder) -> None:
        """Write samples of the stage that has just ended, and the page unless the last page is too recent."""
        config = self.policy.config
        apart = -(-config.batch.stages // _SAMPLED)
        if config.report.samples and (stage_index + 1) % apart == 0:
            path = self.folder / "samples" / f"stage-{stage_index:03d}.json"
            rows = _try(lambda: pick_samples(self._scorer, config, rollouts))
            # Scoring is a program on all devices, so either all hosts execute it or no host does.
            if all(distributed.gather("samples", rows is not None)):
                _try(lambda: write_samples(self._scorer, params, config, rows, path, self.problems))
        if time.monotonic() >= self._quiet_until:
            self._draw()

    def finish(self, *, failed: bool = False) -> None:
        """Write the page for the last time, unless the run recorded no metrics.

        If the run failed, nothing is printed about the page, so that the run's own error stands alone.
        """
        if (self.folder / "metrics.jsonl").exists():
            self._draw(quiet=failed)

    def _draw(self, *, quiet: bool = False) -> None:
        if jax.process_index() == 0:
            started = time.monotonic()
            _try(lambda: write_page([read_run(self.folder)], self.folder / "report.html"), quiet=quiet)
            ended = time.monotonic()
            self._quiet_until = ended + (ended - started) / _SHARE


def _try(action: Callable[[], Any], *, quiet: bool = False) -> Any:
    try:
        return action()
    except Exception as error:  # a failed report must not stop the training
        if not quiet:
            print(f"report: {type(error).__name__}: {error}; training goes on", file=sys.stderr)
        return None
