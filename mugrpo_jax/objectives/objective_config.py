"""An objective by name with its knobs, as the config of a run names it."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.objectives._checks import check_choice
from mugrpo_jax.objectives._objective import Objective
from mugrpo_jax.objectives.batch_bound_losses import bapo, m2po
from mugrpo_jax.objectives.clipped_losses import dapo, decoupled_ppo, dr_grpo, grpo
from mugrpo_jax.objectives.dppo_loss import dppo
from mugrpo_jax.objectives.mu_grpo_loss import mu_grpo
from mugrpo_jax.objectives.p3o_loss import p3o
from mugrpo_jax.objectives.prefix_losses import ctpo, minpro, pnpo
from mugrpo_jax.objectives.sequence_losses import gmpo, gspo, topr, vespo
from mugrpo_jax.objectives.soft_losses import cispo, gppo, sapo

OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            *(mu_grpo, grpo, dr_grpo, dapo, gspo, cispo, m2po, p3o, bapo, topr, gppo, sapo, pnpo, minpro),
            *(decoupled_ppo, gmpo, vespo, ctpo, dppo),
        )
    }
)

# Arrays of a batch and statistics of an update are arguments of a call, not settings of a run.
_PER_CALL = (
    "denominator",
    "weights",
    "reference_logp",
    "entropy",
    "proximal_logp",
    "ess",
    "log_bound",
    "bounds",
)


class _FixedDict(dict[str, Any]):
    """A dict that cannot be changed, yet is a dict to `asdict`, json and pickle."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("the knobs of an ObjectiveConfig are fixed; build another one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return _FixedDict, (dict(self),)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Names an objective and the knobs that differ from its defaults.

    Validated when built: an unknown name, an unknown knob or a value the objective refuses is a `ValueError`.
    Hashable by content, so it can be a static argument of a jitted function.

    Attributes:
      name: a key of `OBJECTIVES`.
      knobs: settings passed to it by keyword: numbers, strings, booleans, None.

    >>> config = ObjectiveConfig("grpo", {"clip_high": 1.28})
    >>> objective = config.build()
    >>> batch = [jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), jnp.ones((2, 3))]
    >>> loss, metrics = objective(*batch, denominator=2)
    >>> config.settings["clip_high"], config.settings["aggregation"]
    (1.28, 'seq_mean_token_mean')
    >>> ObjectiveConfig("grpo", {"clip_max": 2})
    Traceback (most recent call last):
    ValueError: grpo has no knob 'clip_max'; possible: clip_low, clip_high, dual_clip, ...
    """

    name: str = "mu_grpo"
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check names and values; the objective itself checks the values, on abstract arrays."""
        check_choice("name", self.name, OBJECTIVES)
        object.__setattr__(self, "knobs", _FixedDict(self.knobs))
        function = OBJECTIVES[self.name]
        known = _defaults(function)
        for knob, value in self.knobs.items():
            if knob in _PER_CALL:
                raise ValueError(f"knob {knob!r} is an argument of each call; possible: {', '.join(known)}")
            if knob not in known:
                raise ValueError(f"{self.name} has no knob {knob!r}; possible: {', '.join(known)}")
            if not isinstance(value, (int, float, str, bool, type(None))):
                raise ValueError(
                    f"knob {knob!r} is {value!r}; possible: a number, a string, a boolean or None"
                )
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        wanted = ("reference_logp", "entropy", "proximal_logp")
        arrays = {name: tokens for name in wanted if name in inspect.signature(function).parameters}
        jax.eval_shape(self.build(), tokens, tokens, tokens, tokens, **arrays)

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.knobs.items())))

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the objective: the given knobs, and the defaults of the others."""
        return _defaults(OBJECTIVES[self.name]) | dict(self.knobs)

    def build(self) -> Objective:
        """The objective with these knobs, to be called like any other."""
        return functools.partial(OBJECTIVES[self.name], **self.knobs)


def _defaults(function: Objective) -> dict[str, Any]:
    """The settings of an objective: what it takes by keyword, without the arguments of a call."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _PER_CALL}
