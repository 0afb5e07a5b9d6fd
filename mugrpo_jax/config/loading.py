"""Load a config from a YAML file, or by the name of a shipped config, with overrides."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mugrpo_jax.config import shipped_configs
from mugrpo_jax.config.nested_dicts import build, to_dict
from mugrpo_jax.config.run_config import RunConfig
from mugrpo_jax.config.settings import ConfigError
from mugrpo_jax.files import to_path


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config and apply overrides such as `batch.stages=2`.

    `path` is a YAML file, or the name of a shipped config such as `quickstart`; None: all defaults.
    """
    raw = {} if path is None else _read(path)
    for override in overrides:
        _override(raw, override)
    return build(RunConfig, raw, "defaults" if path is None else str(path))


def _read(path: str | Path) -> dict[str, Any]:
    content = _file(path).read_bytes()
    try:
        loaded = yaml.safe_load(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as a date with month 13
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a config: nested too deeply") from None
    if loaded is None or loaded == {}:
        raise ConfigError(
            f"{path}: no keys in this file; set at least model.source and task.name. `mugrpo config` lists "
            "all keys, `mugrpo init FILE` writes a starting config"
        )
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, got {type(loaded).__name__}")
    return loaded


def _file(path: str | Path) -> Path:
    """Return the file at `path`, or the shipped config with this name; a file comes first."""
    file = to_path(path)
    if file.exists() and not file.is_dir():
        return file
    if str(path) in (shipped := shipped_configs.files()):
        return shipped[str(path)]
    name = re.sub(r"^configs/|\.ya?ml$", "", str(path))
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if name != str(path):
        raise ConfigError(f"{path}: no such config file; {hint}`mugrpo init FILE` writes a starting config")
    raise ConfigError(f"{path}: no such config file; {hint}configs known by name: {', '.join(shipped)}")


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a copy of a config with overrides such as `batch.stages=2`."""
    raw = to_dict(config)
    for override in overrides:
        _override(raw, override)
    return build(RunConfig, raw, "overrides")


def _override(raw: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r}: expected key=value, such as batch.stages=2")
    *parents, last = name.split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    try:
        raw[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"override {override[:80]!r}: {text[:60]!r} is not valid YAML") from None
