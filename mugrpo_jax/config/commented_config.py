"""Write config values as YAML with the meaning of each key as a comment, for people to read and edit."""

import dataclasses
import json
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import yaml

from mugrpo_jax.config.run_config import RunConfig
from mugrpo_jax.objectives import OBJECTIVES, ObjectiveConfig

_WIDTH = 100
_LIMITS = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
OBJECTIVE_TEMPERATURE = (
    "number or null: divides the logits of the policy that is trained; null: sampling.temperature. With "
    "another value, sampling is hotter or colder than the policy that is trained, and ratios account for it"
)
_OBJECTIVE = {
    "name": f"one of {', '.join(OBJECTIVES)}",
    "knobs": "settings of this objective; `mugrpo config objective` lists them",
    "temperature": OBJECTIVE_TEMPERATURE,
}


def commented_yaml(values: Mapping[str, Any], cls: type = RunConfig, indent: str = "") -> str:
    """Return the values as YAML; a comment above each key says what it means and which values it takes.

    >>> print(commented_yaml({"seed": 1, "batch": {"stages": 2}}))
    # integer: all random numbers are derived from it; at least 0; at most 9.22337e+18
    seed: 1
    <BLANKLINE>
    # The four batch sizes, how often a stage uses its data, and the shape of micro-batches.
    batch:
      # integer: generations in the run; at least 1
      stages: 2
    """
    hints, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    lines: list[str] = []
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            section = typing.cast(type, hints[name])
            lines += ["", *_comment(first_paragraph(section), indent), f"{indent}{name}:"]
            lines.append(commented_yaml(value, section, indent + "  "))
        else:
            lines += _comment(_explained(cls, fields[name], hints[name]), indent)
            lines.append(f"{indent}{name}: {_yaml(value, indent)}")
    return "\n".join(lines).removeprefix("\n")


def _explained(cls: type, field: Any, hint: Any) -> str:
    if cls is ObjectiveConfig:
        return _OBJECTIVE[field.name]
    return f"{kind(hint)}: {meaning(field)}"


def _comment(text: str, indent: str) -> Iterator[str]:
    return (f"{indent}# {line}" for line in textwrap.wrap(text, _WIDTH - len(indent) - 2))


def _yaml(value: Any, indent: str) -> str:
    """Return a value as YAML on one line, or keys with keys of their own on one line each."""
    nested = isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values())
    if nested:
        return "".join(f"\n{indent}  {name}: {_yaml(item, indent + '  ')}" for name, item in value.items())
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def meaning(field: Any) -> str:
    """Return the meaning of a key and the limits of its values."""
    given = {words: field.metadata[key] for key, words in _LIMITS.items()}
    limits = [f"{words} {limit:g}" for words, limit in given.items() if limit is not None]
    return "; ".join([field.metadata["meaning"], *limits])


def kind(hint: Any) -> str:
    """Return the type of a key in words."""
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{_yaml(choice, '')}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"list of {kind(typing.get_args(hint)[0])}"
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if named := [arg for arg in args if typing.get_origin(arg) is Literal]:
        return " or ".join(kind(arg) for arg in [*(arg for arg in args if arg not in named), *named])
    if len(args) < len(typing.get_args(hint)):
        return f"{kind(args[0])}, list or null" if len(args) > 1 else f"{kind(args[0])} or null"
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names.get(hint, "keys and values")


def knobs_of(objective: str) -> dict[str, str]:
    """Return the knobs of an objective with their defaults, as JSON."""
    return {knob: as_json(value) for knob, value in ObjectiveConfig(objective).settings.items()}


def as_json(value: Any) -> str:
    """Return a value as in a config file on one line."""
    return json.dumps(value, ensure_ascii=False)


def first_paragraph(thing: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((thing.__doc__ or "").split("\n\n")[0].split())
