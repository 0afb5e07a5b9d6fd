"""What a run shows while it goes on: bars with the few numbers that matter, and lines beside them."""

from collections.abc import Mapping
from typing import Any

import jax
from tqdm import tqdm


def headline(record: dict[str, Any]) -> dict[str, str]:
    """The few numbers that matter while a stage is optimised."""
    chosen = {"reward": "reward", "veto": "vetoed/tokens", "ess": "ess/tokens", "gap": "gap/tokens"}
    return {name: f"{record[metric]:.3f}" for name, metric in chosen.items() if metric in record}


def say_unscored(what: str, status: Mapping[str, int], examples: Mapping[str, str]) -> None:
    """No zero is silent: answers without an honest score are counted, one of each kind is named."""
    failed = {name: count for name, count in status.items() if name != "ok" and count}
    if failed:
        counts = ", ".join(
            f"{name} × {count}{f' ({examples[name]})' if name in examples else ''}"
            for name, count in failed.items()
        )
        total = sum(failed.values())
        answers = "1 answer" if total == 1 else f"{total} answers"
        say(f"{what}: {answers} could not be scored, counted as 0: {counts}")


def bar(total: int, title: str, unit: str, initial: int = 0) -> Any:
    """A progress bar, on the first host."""
    quiet = jax.process_index() > 0
    return tqdm(total=total, desc=title, unit=unit, initial=initial, disable=quiet, mininterval=0.5)


def say(text: str) -> None:
    """A line beside the bars, on the first host."""
    if jax.process_index() == 0:
        tqdm.write(text)
