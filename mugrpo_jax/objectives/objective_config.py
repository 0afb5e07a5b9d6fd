"""Build an objective from its name and its knobs, as they are written in the config of a run."""

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
from mugrpo_jax.objectives.batch_statistics import STATISTICS, Statistics
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

LARGEST = float(jnp.finfo(jnp.float32).max)

# These keywords are arrays or statistics of a batch. They are passed in each call, so a config has none.
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
    """A dict that cannot be changed, but that `asdict`, json and pickle handle like any dict."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("the knobs of an ObjectiveConfig are fixed; build another one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return _FixedDict, (dict(self),)


def _number(value: Any) -> Any:
    """Convert a number such as `1e-2`, which YAML 1.1 reads as text; no knob has texts that are numbers."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@dataclass(frozen=True)
class ObjectiveConfig:
    """The name of an objective, and the knobs that differ from the defaults of the objective.

    The constructor raises a `ValueError` for an unknown name, an unknown knob or an invalid value. Equal
    configs have equal hashes, so a config can be a static argument of a jitted function.

    Attributes:
      name: a key of `OBJECTIVES`.
      knobs: keyword arguments for the objective; the values are numbers, strings, booleans or None.
      temperature: divides the logits of the policy that is trained, before its log-probs go to the objective;
        None: the temperature at which the responses are sampled. `build` does not use it.

    >>> config = ObjectiveConfig("grpo", {"clip_high": 1.28})
    >>> objective = config.build()
    >>> batch = [jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), jnp.ones((2, 3))]
    >>> loss, metrics = objective(*batch, denominator=2)
    >>> config.settings["clip_high"], config.settings["aggregation"]
    (1.28, 'seq_mean_token_mean')
    >>> ObjectiveConfig("mu_grpo", {"veto_ratio": "1e-2"}).settings["veto_ratio"]  # as YAML reads 1e-2
    0.01
    >>> ObjectiveConfig("grpo", {"clip_max": 2})
    Traceback (most recent call last):
    ValueError: grpo has no knob 'clip_max'; possible: clip_low, clip_high, dual_clip, ...
    """

    name: str = "mu_grpo"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None

    def __post_init__(self) -> None:
        """Check the names here, and the values by tracing the objective with abstract arrays."""
        check_choice("name", self.name, OBJECTIVES)
        if self.temperature is not None and not 0 < self.temperature <= LARGEST:
            raise ValueError(f"temperature is {self.temperature}; possible: a positive number, or None")
        object.__setattr__(self, "knobs", _FixedDict({k: _number(v) for k, v in self.knobs.items()}))
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
            if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
                raise ValueError(f"knob {knob!r} is {value}; possible: a finite number of type float32")
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        wanted = ("reference_logp", "entropy", "proximal_logp")
        arrays = {name: tokens for name in wanted if name in inspect.signature(function).parameters}
        jax.eval_shape(self.build(), tokens, tokens, tokens, tokens, **arrays)

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.knobs.items()), self.temperature))

    @property
    def settings(self) -> dict[str, Any]:
        """All knobs with their values: the values in `knobs`, and the defaults of all other knobs."""
        return _defaults(OBJECTIVES[self.name]) | dict(self.knobs)

    @property
    def arrays(self) -> frozenset[str]:
        """The keywords among `reference_logp`, `entropy` and `proximal_logp` that each call must pass.

        >>> sorted(ObjectiveConfig("decoupled_ppo", {"kl_coef": 0.1}).arrays)
        ['proximal_logp', 'reference_logp']
        """
        terms = {"reference_logp": "kl_coef", "entropy": "entropy_coef"}
        needed = {array for array, coefficient in terms.items() if self.settings[coefficient] != 0}
        proximal = {"proximal_logp"} & set(inspect.signature(OBJECTIVES[self.name]).parameters)
        return frozenset(needed | proximal)

    def build(self) -> Objective:
        """Return the objective with these knobs, a function that is called like any objective."""
        return functools.partial(OBJECTIVES[self.name], **self.knobs)

    def statistics(self) -> Statistics | None:
        """Return the function that computes the batch statistics of this objective; None if it has none.

        >>> batch = [jnp.array([[0.05, 0.1, 0.1, 0.2, 0.3, 0.9]]), jnp.array([1.0]), jnp.ones((1, 6))]
        >>> round(float(ObjectiveConfig("m2po").statistics()(*batch)["log_bound"]), 3)
        0.2
        >>> ObjectiveConfig("grpo").statistics() is None
        True
        """
        found = STATISTICS.get(self.name)
        return None if found is None else functools.partial(found, **self.settings)


def _defaults(function: Objective) -> dict[str, Any]:
    """Return the default of each knob that a config may set."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _PER_CALL}
