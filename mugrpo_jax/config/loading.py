"""Load a config from a YAML file, or by the name of a shipped config, with overrides."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

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
    return _with_overrides(raw, overrides, "defaults" if path is None else str(path))


def _read(path: str | Path) -> dict[str, Any]:
    content = _file(path).read_bytes()
    try:
        text = content.decode()
        loaded = yaml.load(text, _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        line, reason = _yaml_problem(error, text)
        raise ConfigError(f"{path}:{line}: not valid YAML: {reason}") from None
    except ValueError as error:  # such as a date with month 13
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
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


class _Loader(yaml.SafeLoader):
    """Reads YAML, but refuses a key that occurs twice; else the second section would replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the dict of a mapping; raise an error with the line of the second key."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {key.value} occurs twice; put all that belongs to it into one place"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml_problem(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the line of a YAML error and its reason, without the names that YAML gives to texts."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        reason = ", ".join(filter(None, [error.context, error.problem]))
        hint = "; indent with spaces, not with tabs" if "\\t" in reason else ""
        if "mapping values are not allowed" in reason:
            (line,) = text.splitlines()[error.problem_mark.line :][:1] or [""]
            quotes = "; put a text that contains a colon and a space into quotes"
            hint = quotes if line.count(": ") > 1 else "; check the indentation and the colons, also above it"
        return error.problem_mark.line + 1, " ".join(reason.split()) + hint
    position = getattr(error, "position", 0)  # of a character that YAML does not allow
    return text.count("\n", 0, position) + 1, f"the character {text[position]!r} is not allowed"


def _file(path: str | Path) -> Path:
    """Return the file at `path`, or the shipped config with this name; a file comes first."""
    file = to_path(path)
    if file.exists() and not file.is_dir():
        return file
    if str(path) in (shipped := shipped_configs.files()):
        return shipped[str(path)]
    if (file / "config.yaml").exists():
        raise ConfigError(
            f"{path}: the folder of a run, not a config file; to continue it: "
            f"mugrpo train {path}/config.yaml --out {path}"
        )
    name = re.sub(r"^configs/|\.ya?ml$", "", str(path))
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if name != str(path):
        raise ConfigError(f"{path}: no such config file; {hint}`mugrpo init FILE` writes a starting config")
    raise ConfigError(f"{path}: no such config file; {hint}configs known by name: {', '.join(shipped)}")


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a copy of a config with overrides such as `batch.stages=2`."""
    return _with_overrides(to_dict(config), overrides, "config")


def _with_overrides(raw: dict[str, Any], overrides: Sequence[str], source: str) -> RunConfig:
    for override in overrides:
        _override(raw, override)
    given = {override.partition("=")[0]: override[:80] for override in overrides}
    return cast(RunConfig, build(RunConfig, raw, source, given))


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
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        quotes = "; close each bracket, and put the whole argument into quotes" if text[:1] in "{[" else ""
        raise ConfigError(f"override {override[:80]!r}: {text[:60]!r} is not valid YAML{quotes}") from None
    if isinstance(value, dict) and any(":" in str(key) and item is None for key, item in value.items()):
        raise ConfigError(
            f"override {override[:80]!r}: write a space behind the colon of a key, as in {{veto: none}}, "
            'and a name with a colon as in {"mine.py:f": 1}; put the whole argument into quotes'
        )
    raw[last] = value
