"""Convert configs from and to nested dicts, as in a YAML file.

An unknown key raises an error that names the nearest known key. The error for a value of the wrong type names
the type that is expected.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mugrpo_jax.config.key_errors import UnknownKeyError, near_key, place_of, place_of_error
from mugrpo_jax.config.settings import ConfigError

_NO_OVERRIDES: Mapping[str, str] = types.MappingProxyType({})
_MOST_VALUES = 10_000  # in a free-form key such as task.options; YAML aliases can make billions


def build(
    cls: type, raw: Mapping[str, Any], source: str, overrides: Mapping[str, str] = _NO_OVERRIDES
) -> Any:
    """Build a config dataclass from nested dicts.

    An error begins with the place of its key: `source`, or an override. `overrides` maps each key that an
    argument has set, such as `batch.stages`, to the argument, such as `batch.stages=2`.
    """
    try:
        return _build(cls, raw, "")
    except UnknownKeyError as error:
        place = place_of(error.key, source, overrides)
        raise ConfigError(f"{place}: unknown key {error.key}; {near_key(error, cls)}") from None
    except ConfigError as error:
        raise ConfigError(f"{place_of_error(str(error), source, overrides)}: {error}") from None


def _build(cls: type, raw: Mapping[str, Any], prefix: str) -> Any:
    """Build a dataclass; errors begin with the name of a key, whose first part is `prefix`."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in raw.items():
        if name not in fields:
            raise UnknownKeyError(f"{prefix}{name}", fields)
        values[name] = _convert(hints[name], value, prefix + name)
    for name, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING and name not in values:
            raise ConfigError(f"{prefix}{name} is missing")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None
    except ValueError as error:
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: {error}") from None


def value_of(config: Any, key: str) -> Any:
    """Return the value of a key, such as `batch.stages`."""
    return functools.reduce(getattr, key.split("."), config)


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to nested dicts, as in a YAML file."""
    out = {}
    for field in dataclasses.fields(config):
        out[field.name] = _to_plain(getattr(config, field.name))
    return out


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of the keys in which two nested dicts differ, with both values as text."""
    out = []
    for name in sorted(set(a) | set(b)):
        left, right = a.get(name), b.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            out += differing_keys(left, right, f"{prefix}{name}.")
        elif left != right:
            out.append(f"{prefix}{name} ({left!r} there, {right!r} here)")
    return out


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, Mapping):
            keys = ", ".join(field.name for field in dataclasses.fields(hint))
            raise ConfigError(f"{name} is a section with keys, got {value!r}; its keys: {keys}")
        return _build(typing.cast(type, hint), value, name + ".")
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{name} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        names = [name for arg in args if typing.get_origin(arg) is Literal for name in typing.get_args(arg)]
        if any(value is name or (isinstance(value, str) and value == name) for name in names):
            return value
        plain, *lists = (
            arg for arg in args if arg is not type(None) and typing.get_origin(arg) is not Literal
        )
        if lists and isinstance(value, Mapping):
            raise ConfigError(f"{name} must be text or a list, got keys and values")
        return _convert(lists[0] if isinstance(value, list) and lists else plain, value, name)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} must be a list, got {value!r}")
        return tuple(_convert(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be keys and values, got {value!r}")
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{name}: the key {key!r} must be text")
        _check_plain(value, name, iter(range(_MOST_VALUES)))
        return dict(value)
    if hint is float:
        value = _number(value)
    kinds = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    if hint in kinds and (type(value) is not hint):
        raise ConfigError(f"{name} must be {kinds[hint]}, got {value!r}")
    if value == "":
        raise ConfigError(f"{name} must not be empty; leave the key out for its default")
    return value


def _check_plain(value: Any, name: str, left: Iterator[int], depth: int = 8) -> None:
    """Raise an error unless a value is text, a finite number, true, false, null, or lists and keys of such.

    YAML has more types, such as dates, which cannot be stored with the run. Each value takes one of `left`.
    """
    if next(left, None) is None:
        raise ConfigError(f"{name}: more than {_MOST_VALUES} values")
    if isinstance(value, (Mapping, list)) and depth:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            _check_plain(item, f"{name}.{key}", left, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: must be a finite number, got {value}")
    elif not isinstance(value, (str, int, float, bool, type(None))):
        kind = "nested too deeply" if isinstance(value, (Mapping, list)) else f"a {type(value).__name__}"
        raise ConfigError(f"{name} is {kind}; put text into quotation marks")


def _number(value: Any) -> Any:
    """Convert to float what YAML 1.1 reads as text (`1e-6`) or as an integer (`1`)."""
    if isinstance(value, str) or type(value) is int:
        try:
            return float(value)
        except (ValueError, OverflowError):
            return value
    return value
