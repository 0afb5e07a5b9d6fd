"""Declare config keys: a dataclass field with a default, a meaning and limits is a key."""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

LARGEST_INTEGER, LARGEST_FLOAT = 2**31 - 1, 3.4e38  # of the int32 and float32 numbers on the devices
_LIMITS = (
    ("least", operator.lt, "at least"),
    ("most", operator.gt, "at most"),
    ("above", operator.le, "above"),
    ("below", operator.ge, "below"),
)


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field with a default, a meaning for the docs, and the limits of its values.

    `least` and `most` are allowed values themselves; `above` and `below` are not.
    """
    metadata = {"meaning": meaning, "least": least, "most": most, "above": above, "below": below}
    if isinstance(default, (dict, list)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(meaning: str) -> Any:
    """Return a dataclass field without a default; an entry of a list in a config must have it."""
    return dataclasses.field(metadata={"meaning": meaning})


class ConfigError(ValueError):
    """An error that the user can fix; its message names the key, file or argument and the remedy."""


class Section:
    """Base class of config sections; `__post_init__` checks the limits of all numbers."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                _check_limits(field.name, value, field.metadata)


def _check_limits(name: str, value: float, limits: Mapping[str, Any]) -> None:
    if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
        raise ConfigError(f"{name}: must be a finite number, got {value}")
    if isinstance(value, int) and limits.get("most") is None:
        limits = {**limits, "most": LARGEST_INTEGER}
    for key, wrong, what in _LIMITS:
        limit = limits.get(key)
        if limit is not None and wrong(value, limit):
            raise ConfigError(f"{name}: must be {what} {limit}, got {value}")
