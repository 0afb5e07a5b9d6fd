"""Check arguments at trace time. Each error message has the argument, its value and the possible values."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


def known_number(value: Any) -> Any:
    """Return a concrete number as a NumPy or Python number, and None for traced values and everything else.

    Inside `jax.jit`, comparing a concrete `jax.Array` is traced. Comparing the result is not.
    """
    if isinstance(value, (jax.Array, np.ndarray)):
        known = not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0
        return np.asarray(value)[()] if known else None
    return value if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) else None


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise an error if the value is not one of the choices."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        shown = type(value).__name__ if np.ndim(value) else repr(value)
        raise ValueError(f"{name} is {shown}; possible: {', '.join(map(repr, choices))}")


def check_flag(name: str, value: Any) -> None:
    """Raise an error if the value is not a boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; possible: True, False")


def check_number(name: str, value: Any, *, low: float = 0.0, strict: bool = False) -> None:
    """Raise an error for NaN and numbers below `low`, if `strict` also for `low`. Accept traced values."""
    if isinstance(value, (str, bool)) or value is None:
        raise ValueError(f"{name} is {value!r}; possible: a number")
    if np.ndim(value) != 0:
        raise ValueError(f"{name} has shape {np.shape(value)}; possible: a single number")
    known = known_number(value)
    if known is not None and not (known > low if strict else known >= low):
        raise ValueError(
            f"{name} is {value}; possible: a number {'above' if strict else 'not below'} {low:g}"
        )


def check_bounds(clip_low: Any, clip_high: Any, names: tuple[str, str] = ("clip_low", "clip_high")) -> None:
    """Raise an error unless 0 <= clip_low <= clip_high. Accept traced values."""
    low_name, high_name = names
    check_number(low_name, clip_low)
    check_number(high_name, clip_high, low=-math.inf)
    low, high = known_number(clip_low), known_number(clip_high)
    if low is not None and high is not None and not low <= high:
        raise ValueError(
            f"{low_name}={clip_low}, {high_name}={clip_high} are the wrong way round; "
            f"possible: absolute ratios with 0 <= {low_name} <= {high_name}"
        )


def check_clip(clip_low: Any, clip_high: Any) -> None:
    """Raise an error unless 0 <= clip_low <= 1 <= clip_high. Accept traced values.

    Fresh data has ratios of 1. With both bounds on one side of 1, half of it would have no gradient.
    """
    check_bounds(clip_low, clip_high)
    low, high = known_number(clip_low), known_number(clip_high)
    if (low is not None and low > 1) or (high is not None and high < 1):
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high} are both on one side of 1; "
            "possible: absolute ratios such as 0.8 and 1.28, not distances from 1 such as 0.2 and 0.28"
        )


def check_shape(name: str, array: Any, *shapes: tuple[int, ...]) -> None:
    """Raise an error if the shape of the array is not one of `shapes`."""
    if tuple(np.shape(array)) not in shapes:
        possible = " or ".join(map(str, shapes))
        raise ValueError(f"{name} has shape {tuple(np.shape(array))}; possible: {possible}")


def check_rank(name: str, array: Any, rank: int, axes: str) -> None:
    """Raise an error if the array does not have `rank` axes; the message shows `axes`, such as "[B, T]"."""
    if np.ndim(array) != rank:
        raise ValueError(f"{name} has shape {tuple(np.shape(array))}; possible: {axes}")
