"""The objectives that compute a statistic from all tokens of a batch, and the function for each statistic.

A loss with such a statistic depends on which tokens are in the call. If an update has several micro-batches,
compute the statistics of the whole update first and pass them to the loss of every micro-batch:

    statistics = ObjectiveConfig("m2po").statistics()
    found = statistics(log_ratio, advantages, mask)     # of the whole update
    objective(*micro_batch, denominator=denominator, **found)

All other objectives, and all weights in `importance_corrections`, use only the tokens of one response. A
learning-rate factor, `vcpo_factor`, also needs the whole update; the trainer does not use it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax.typing import ArrayLike

from mugrpo_jax.objectives.batch_bound_losses import bapo_bounds, m2po_bound
from mugrpo_jax.objectives.ess import effective_sample_size

Statistics = Callable[[ArrayLike, ArrayLike, ArrayLike], dict[str, Any]]
"""A function of log_ratio `[B, T]`, advantages `[B]` or `[B, T]`, and mask `[B, T]`.

It returns keyword arguments for the objective. The order of the tokens and their rows have no effect.
"""

# The functions below take all knobs of their objective, and ignore those that do not change the statistic.


def _p3o(log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike, **_: Any) -> dict[str, Any]:
    del advantages
    return {"ess": effective_sample_size(log_ratio, mask)}


def _m2po(
    log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike, *, threshold: float, form: str, **_: Any
) -> dict[str, Any]:
    return {"log_bound": m2po_bound(log_ratio, advantages, mask, threshold=threshold, form=form)}


def _bapo(log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike, **knobs: Any) -> dict[str, Any]:
    names = ("clip_low", "clip_low_max", "clip_high", "clip_high_max", "step", "target")
    return {"bounds": bapo_bounds(log_ratio, advantages, mask, **{name: knobs[name] for name in names})}


STATISTICS: Mapping[str, Callable[..., dict[str, Any]]] = MappingProxyType(
    {"p3o": _p3o, "m2po": _m2po, "bapo": _bapo}
)
"""The name of each objective with batch statistics, and the function that computes them."""
