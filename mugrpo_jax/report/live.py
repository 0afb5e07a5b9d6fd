"""The report of a run that is going on: samples and the page, after each stage."""

import sys
import time
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax.policy import Policy
from mugrpo_jax.report.history import read_run
from mugrpo_jax.report.samples import SampleScorer, write_samples
from mugrpo_jax.rollouts import Stage
from mugrpo_jax.training import StepOptions

_SHARE = 0.05  # of a run's time that may go into drawing


class LiveReport:
    """Writes `samples/` and `report.html` into a run's folder.

    The page is drawn by the first process, and not so often that it would take more than a small share of the
    run's time; the last stage is always drawn. What goes wrong here is said, and training goes on.
    """

    def __init__(self, folder: Path, policy: Policy, options: StepOptions) -> None:
        self.folder, self.policy = folder, policy
        self._scorer = SampleScorer(policy, options)
        self._quiet_until = 0.0

    def after_stage(self, params: Any, stage_index: int, rollouts: Stage, *, last: bool) -> None:
        """Look at the stage that has just ended."""
        try:
            if self.policy.config.report.samples:
                path = self.folder / "samples" / f"stage-{stage_index:03d}.json"
                write_samples(self._scorer, params, self.policy.config, rollouts, path)
            if jax.process_index() == 0 and (last or time.monotonic() >= self._quiet_until):
                self._draw()
        except Exception as error:  # a picture is never worth a run
            print(f"report: {type(error).__name__}: {error}; training goes on", file=sys.stderr)

    def _draw(self) -> None:
        from mugrpo_jax.report.page import write_page  # and with it a plotting library

        started = time.monotonic()
        write_page([read_run(self.folder)], self.folder / "report.html")
        ended = time.monotonic()
        self._quiet_until = ended + (ended - started) / _SHARE
