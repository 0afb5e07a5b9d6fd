"""`mugrpo config`: print the config keys with their defaults and meanings."""

import argparse
from collections.abc import Mapping
from typing import Any

from mugrpo_jax.cli import arguments as shared


def add(commands: shared.Commands) -> None:
    """Add `mugrpo config` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "config",
        run,
        help="print the config keys with their defaults and meanings",
        more="Prints YAML, so you can copy the lines that you want to change into your config file.",
        example="mugrpo config batch",
    )
    parser.add_argument(
        "key", nargs="?", metavar="KEY", help="only this section or key, such as batch or batch.stages"
    )


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo config` with the parsed arguments."""
    from mugrpo_jax.config import RunConfig, to_dict
    from mugrpo_jax.config.commented_config import commented_yaml

    values = to_dict(RunConfig())
    print(commented_yaml(_only(arguments.key, values) if arguments.key else values))
    if arguments.key == "objective":
        print(_objectives())


def _only(key: str, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the nested dict with nothing but one section or key; raise an error if there is none."""
    from mugrpo_jax.config import ConfigError, RunConfig
    from mugrpo_jax.config.key_errors import UnknownKeyError, near_key

    name, _, rest = key.partition(".")
    if name not in values:
        wrong = UnknownKeyError(f"{prefix}{name}", values)
        raise ConfigError(f"unknown key {wrong.key}; {near_key(wrong, RunConfig)}")
    value = values[name]
    if rest and not (isinstance(value, Mapping) and value):
        raise ConfigError(f"unknown key {prefix}{key}; {prefix}{name} has no keys of its own")
    return {name: _only(rest, value, f"{prefix}{name}.") if rest else value}


def _objectives() -> str:
    """Describe every objective and its knobs, as comments."""
    from mugrpo_jax.config.commented_config import first_paragraph, knobs_of
    from mugrpo_jax.objectives import OBJECTIVES

    lines = ["", "# The objectives, and their knobs with the defaults:"]
    for name, function in OBJECTIVES.items():
        knobs = ", ".join(f"{knob}: {value}" for knob, value in knobs_of(name).items())
        lines += [f"#   {name}: {first_paragraph(function)}", f"#     {{{knobs}}}"]
    return "\n".join(lines)
