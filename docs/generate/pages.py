"""Make reference pages from the code: config keys, commands, notebooks.

The pages of config keys and commands are kept in the repository, for readers on a code host. After a change
of a key or a command, write them again:

    python docs/generate/pages.py
"""

import argparse
import base64
import dataclasses
import json
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mugrpo_jax import objectives
from mugrpo_jax.cli import main as cli
from mugrpo_jax.config import RunConfig
from mugrpo_jax.config.commented_config import (
    OBJECTIVE_TEMPERATURE,
    as_json,
    first_paragraph,
    kind,
    knobs_of,
    meaning,
)

HIDDEN = "remove-cell"  # the tag of cells that only check a notebook; pages leave them out
REFERENCE = Path(__file__).parents[1] / "reference"
_TABLE = "| key | type | default | meaning |\n|---|---|---|---|"


def config_page() -> str:
    """Every key of a config with its type, default and meaning, and the knobs of every objective."""
    head = (
        "# Config\n\nEvery key of a config file and of `key=value` on the command line, as "
        "[`mugrpo_jax.config`](training.md#configs) defines them. Keys of a section are written with a dot: "
        "`batch.stages=2`.\n"
    )
    return "\n".join([head, *_section(RunConfig, ""), _knobs()])


def _section(cls: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    plain: list[Any] = []
    nested: list[Any] = []
    for field in dataclasses.fields(cls):
        # The knobs depend on the objective, so they have their own table.
        inner = (
            dataclasses.is_dataclass(hints[field.name])
            and hints[field.name] is not objectives.ObjectiveConfig
        )
        (nested if inner else plain).append(field)
    if plain:
        yield f"## {prefix.rstrip('.') or 'The run'}\n\n{first_paragraph(cls)}\n\n{_TABLE}"
        yield "\n".join(_row(field, hints[field.name], prefix) for field in plain) + "\n"
    for field in nested:
        yield from _section(hints[field.name], f"{prefix}{field.name}.")


def _row(field: Any, hint: Any, prefix: str) -> str:
    name = f"{prefix}{field.name}"
    default = field.default
    if default is dataclasses.MISSING:
        default = field.default_factory()
    about = meaning(field)
    if hint is objectives.ObjectiveConfig:
        about = f"{about}; knobs [below](#knobs)"
        kind_of, _, temperature = OBJECTIVE_TEMPERATURE.partition(": ")
        return (
            f"| `{name}.name` | name | `{as_json(default.name)}` | {_cell(about)} |\n"
            f"| `{name}.temperature` | {kind_of} | `{as_json(default.temperature)}` | {_cell(temperature)} |"
        )
    return f"| `{name}` | {kind(hint)} | `{as_json(default)}` | {_cell(about)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _knobs() -> str:
    """The settings of each objective, read from its signature."""
    lines = [
        "## knobs\n",
        "`objective.knobs` takes the settings of the objective that `objective.name` names, for instance",
        "`objective.knobs={veto: sequence}`. Their meaning is in the [reference](objectives.md).\n",
        "| objective.name | what it is | knobs and their defaults |\n|---|---|---|",
    ]
    for name, function in objectives.OBJECTIVES.items():
        knobs = ", ".join(f"`{knob}={value}`" for knob, value in knobs_of(name).items())
        lines.append(f"| `{name}` | {_cell(first_paragraph(function))} | {knobs} |")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Every command with its arguments, read from argparse."""
    parser = cli.parser()
    parts = ["# Command line", f"{parser.description} `mugrpo COMMAND --help` says the same in a terminal."]
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        parts.append(f"## {name}\n\n{command.description}")
        usage = " ".join(command.format_usage().removeprefix("usage: ").split())
        wrapped = textwrap.fill(usage, 96, subsequent_indent="    ", break_on_hyphens=False)
        parts.append(f"```text\n{wrapped}\n```")
        rows = [_argument(action) for action in command._actions if action.dest != "help"]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
        example = (command.epilog or "").removeprefix("example:").strip()
        parts.append(f"```bash\n{example}\n```")
    return "\n\n".join(parts) + "\n"


def _argument(action: argparse.Action) -> str:
    shown = action.metavar or action.dest
    if action.option_strings:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        shown = f"{', '.join(action.option_strings)}{value}"
    return f"| `{shown}` | {_cell(action.help or '')} |"


def notebook_page(path: Path) -> dict[str, str | bytes]:
    """A notebook as a Markdown page and its pictures, by their paths in the documentation."""
    files: dict[str, str | bytes] = {}
    parts = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        if HIDDEN in cell["metadata"].get("tags", []):
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(map(_text, cell["outputs"])).strip("\n")
        if printed:
            parts.append(f"```text\n{printed}\n```")
        for output in cell["outputs"]:
            picture = _picture(output)
            if picture is not None:
                suffix, content = picture
                files[f"notebooks/{path.stem}-{number}.{suffix}"] = content
                parts.append(f"![]({path.stem}-{number}.{suffix})")
    return {f"notebooks/{path.stem}.md": "\n\n".join(parts) + "\n", **files}


def _text(output: Mapping[str, Any]) -> str:
    if _picture(output) is not None:
        return ""
    return "".join(output.get("text", output.get("data", {}).get("text/plain", [])))


def _picture(output: Mapping[str, Any]) -> tuple[str, str | bytes] | None:
    """Suffix and content of a picture."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return "svg", "".join(data["image/svg+xml"])
    return ("png", base64.b64decode(data["image/png"])) if "image/png" in data else None


def reference_pages() -> dict[str, str]:
    """Return the pages of `docs/reference` that are made from the code, by their file names."""
    return {"config.md": config_page(), "commands.md": commands_page()}


if __name__ == "__main__":
    for name, text in reference_pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
