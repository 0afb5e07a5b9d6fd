"""The figure about each of several rewards of a run."""

import itertools
from collections.abc import Sequence

import numpy as np

from mugrpo_jax.report.panel_data import STYLES, Line, Panel
from mugrpo_jax.report.run_history import History


def rewards(runs: Sequence[History]) -> Panel:
    """Panel: the mean of each of several rewards over the rollouts of a stage, against updates."""
    lines = []
    for i, run in enumerate(runs):
        for name, style in zip(_weights(run), itertools.cycle((*STYLES, "dashdot"))):
            x, y = _steps(run, f"reward/{name}")
            lines.append(Line(i, name, x, y, style=style))
    weights = {name: weight for run in runs for name, weight in _weights(run).items()}
    listed = ", ".join(f"{weight:g} × {name}" for name, weight in weights.items())
    note = (
        "Mean of each reward over the rollouts of a stage, without its weight. The reward of a response is "
        f"the sum of {listed}. The first reward says which responses are right."
    )
    return Panel("Rewards", "updates", "reward", tuple(lines), note=note, wanted=bool(lines))


def _weights(run: History) -> dict[str, float]:
    chosen = run.config.task.reward
    return {part.name: part.weight for part in chosen} if isinstance(chosen, tuple) else {}


def _steps(run: History, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a level line for each stage. NaN between two stages keeps their lines apart."""
    mu = run.config.batch.updates_per_stage
    x = [place for r in run.generations for place in (r["updates"], r["updates"] + mu, np.nan)]
    y = [value for r in run.generations for value in (*[r.get(metric, np.nan)] * 2, np.nan)]
    return np.array(x, float), np.array(y, float)
