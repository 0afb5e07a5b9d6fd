"""Show how much of an update is signal: smoothed gradient cosines, the growth of the drift, and a table.

`objectives.step_signal` explains the estimates.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mugrpo_jax import objectives
from mugrpo_jax.objectives.diagnostics import PARITY_BANDS
from mugrpo_jax.report.against_staleness import for_all
from mugrpo_jax.report.panel_data import Panel, drawn_stages
from mugrpo_jax.report.run_history import History

WINDOW = 8  # number of updates over which a cosine is averaged, because a single cosine is noisy


@dataclasses.dataclass(frozen=True)
class StageSignal:
    """Signal and noise in the updates of a stage; NaN if a number was not recorded.

    Attributes:
      share, error: `objectives.signal_share` of the gradients, and its standard error.
      exponent: `objectives.drift_exponent` of the stage.
      walk: the exponent that a random walk with the same momentum would have, see `effective_updates`.
      bands: {distance from 1: share of the tokens whose ratio was this close to 1 at staleness 0}.
    """

    stage: int
    share: float
    error: float
    exponent: float
    walk: float
    bands: dict[float, float]


def stage_signal(run: History, stage: int) -> StageSignal:
    """Measure signal and noise in the updates of one stage."""
    part = run.stage_slices[stage]
    staleness = run.values("staleness")[part]
    share, error = objectives.signal_share(cosines(run)[part].tolist())
    place = (staleness - np.nan_to_num(run.values("lag")[part])).astype(int)  # of each update in the stage
    drift = np.full(place.max() + 1, np.nan)
    drift[place] = run.values("drift")[part]
    exponent = objectives.drift_exponent(drift.tolist())
    momentum, first = run.config.optimizer.beta1, stage == run.config.stages.start
    walk = objectives.effective_updates(np.arange(1, len(drift) + 1), 0.0, momentum, first_stage=first)
    bands = {band: run.values(f"within_{band}/tokens")[part.start] for band in PARITY_BANDS}
    return StageSignal(
        stage=stage,
        share=share,
        error=error,
        exponent=exponent,
        walk=math.nan if math.isnan(exponent) else objectives.drift_exponent(walk.tolist()),
        bands={band: share if staleness[0] == 0 else math.nan for band, share in bands.items()},
    )


def cosines(run: History) -> np.ndarray:
    """Return the cosine of consecutive gradients at every update; NaN where a gradient was 0 or missing."""
    found = run.values("gradient_cosine")
    return np.where(found == 0, np.nan, found)  # the first update of a run has no gradient before it


def smoothed_cosines(run: History) -> np.ndarray:
    """Return the mean of up to `WINDOW` cosines of one stage at every update."""
    found = cosines(run)
    for part in run.stage_slices.values():
        found[part] = objectives.smoothed(found[part].tolist(), WINDOW)
    return found


def gradient_cosine(runs: Sequence[History]) -> Panel:
    """Panel: the smoothed cosine of consecutive gradients, which may rise before a collapse."""
    note = (
        f"Mean of up to {WINDOW} updates: an estimate of the share of signal in a gradient, before Adam. "
        "The paper of the law reports values above 0.5 before a collapse."
    )
    said = " ".join(filter(None, (note, _signal_sentence(runs[0]) if len(runs) == 1 else "")))
    title, metrics = "Cosine of consecutive gradients, smoothed", {"cosine": smoothed_cosines}
    return for_all(runs, title, "cosine", metrics, levels=(("0.5", 0.5),), note=said)


def _signal_sentence(run: History) -> str:
    share, error = objectives.signal_share(cosines(run).tolist())
    if not math.isfinite(error):
        return ""
    after = until_signal(share, error)
    return f"Over the whole run {share:.3f} ± {error:.3f}: signal outweighs noise after {after} updates."


def until_signal(share: float, error: float) -> str:
    """Return after how many updates the signal outweighs the noise; a lower bound if no signal was measured.

    >>> until_signal(0.02, 0.001), until_signal(0.001, 0.002), until_signal(-0.5, 0.1)
    ('49', 'more than 199', 'very many')
    """
    if share > 2 * error:
        return f"{objectives.updates_until_signal(share):,.0f}"
    least = objectives.updates_until_signal(share + 2 * error)
    return f"more than {least:,.0f}" if math.isfinite(least) else "very many"


def drift(runs: Sequence[History]) -> Panel:
    """Panel: the drift, the distance from the weights at the start of the stage, against staleness."""
    note = ""
    if len(runs) == 1 and (found := [s for s in signals(runs[0]) if math.isfinite(s.exponent)]):
        least, most = (pick(s.exponent for s in found) for pick in (min, max))
        span = f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
        walk = max(s.walk for s in found)
        note = (
            f"It grows as a power of the updates: {span} in the stages. A straight line has 1, a random walk "
            f"with this momentum {walk:.2f}."
        )
    return for_all(runs, "Drift", "‖θ − θ_b‖", {"drift": "drift"}, low=0, note=note)


def signals(run: History) -> list[StageSignal]:
    """Return the `StageSignal` of each stage that figures draw."""
    return [stage_signal(run, stage) for stage in drawn_stages(run)]


def signal_table(runs: Sequence[History], called: Sequence[str]) -> list[list[str]]:
    """Return a table with a header and, for each drawn stage, its signal, its drift and its parity bands."""
    bands = [f"{100 * band:g} %" for band in PARITY_BANDS]
    rows = [
        [
            *("run", "stage", "signal", "signal > noise after"),
            *("drift exponent", "of a random walk", *(f"ρ = 1 ± {band}" for band in bands)),
        ]
    ]
    for run, name in zip(runs, called):
        for found in signals(run):
            known = math.isfinite(found.error)
            rows.append(
                [
                    *(name, str(found.stage)),
                    f"{found.share:.3f} ± {found.error:.3f}" if known else "–",
                    until_signal(found.share, found.error) if known else "–",
                    *("–" if math.isnan(value) else f"{value:.2f}" for value in (found.exponent, found.walk)),
                    *("–" if math.isnan(share) else f"{share:.2%}" for share in found.bands.values()),
                ]
            )
    return rows
