"""The table of runs whose responses do not come from the policy that is trained, as in P3O's paper."""

from collections.abc import Iterable, Sequence

import numpy as np
from reproduce_rates import LAST, TRIGGERED, collapsed, end
from reproduce_regimes import Run, row_of

SETTINGS = {  # the folder's name: who sampled
    "mixed": "half by a weaker model",
    "cold": "at temperature 0.6",
    "hot": "at temperature 1.4",
    "int8": "with weights in int8",
}


def setting(run: Run) -> str:
    """The name of its folder."""
    return str(run["path"].parent.name)


def are(runs: Sequence[Run]) -> bool:
    """Whether these runs are of several settings."""
    return bool(runs) and all(setting(run) in SETTINGS for run in runs)


def sort(runs: Iterable[Run], arms: Sequence[str]) -> list[Run]:
    """Runs of the known settings, by setting, arm and seed."""
    order = list(SETTINGS)
    known = [run for run in runs if setting(run) in SETTINGS]
    return sorted(known, key=lambda run: (order.index(setting(run)), arms.index(run["arm"]), run["seed"]))


def tables(runs: Sequence[Run]) -> Iterable[str]:
    """One row per setting and arm."""
    first = runs[0]["bins"][0]["updates"]
    yield (
        f"| arm | responses sampled | seeds | start | mean of the last {LAST} evaluations | by seed "
        f"| lowest | collapsed | ESS, first {first} updates | triggers, most | reward, first {first} updates "
        f"| entropy, last {first} updates |"
    )
    yield f"|{'---|' * 12}"
    for place, arm in dict.fromkeys((setting(run), run["arm"]) for run in runs):
        same = [run for run in runs if (setting(run), run["arm"]) == (place, arm)]
        ends = [end(run) for run in same]
        start = np.mean([run["evaluations"][0]["accuracy"] for run in same])
        lowest = min(point["accuracy"] for run in same for point in run["evaluations"])
        effective = np.mean([run["bins"][0]["ess/tokens"] for run in same])
        reward = np.mean([run["bins"][0]["reward"] for run in same])
        entropy = np.mean([run["bins"][-1]["entropy/tokens"] for run in same])
        most = max(point.get(TRIGGERED, 0.0) for run in same for point in run["bins"])
        yield row_of(
            *(arm, SETTINGS[place], len(same), f"{start:.3f}", f"{np.mean(ends):.3f}"),
            *(", ".join(f"{value:.3f}" for value in ends), f"{lowest:.3f}"),
            f"{sum(map(collapsed, same))} of {len(same)}",
            *(f"{effective:.3f}", f"{100 * most:.0f} %", f"{reward:.2f}", f"{entropy:.3f}"),
        )
