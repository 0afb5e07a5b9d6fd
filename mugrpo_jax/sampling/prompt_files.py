"""The files of `generate_file`: prompts to read, and responses to write in several attempts."""

import json
from pathlib import Path
from typing import Any

from mugrpo_jax import files
from mugrpo_jax.sampling.prompts import Prompt, is_chat, is_tokens

Name = tuple[int, int]  # (index of the prompt, number of the sample)


def read_prompts(path: Path) -> list[Prompt]:
    """Read one prompt per JSON line: `prompt` (a text), `messages` (a chat) or `prompt_tokens`."""
    if not path.is_file():
        raise ValueError(f"{path}: not found; it should hold one JSON object per line")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None
    return [_prompt(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _prompt(place: str, line: str) -> Prompt:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON ({error})") from None
    keys = ("prompt_tokens", "messages", "prompt")
    given = [item[key] for key in keys if key in item] if isinstance(item, dict) else []
    prompt: Any = given[0] if given else None
    if not (isinstance(prompt, str) and prompt) and not is_tokens(prompt) and not is_chat(prompt):
        raise ValueError(
            f"{place}: needs 'prompt' (text) or 'prompt_tokens' (integers), not empty, or 'messages' "
            "(a list of objects with 'role' and 'content')"
        )
    return prompt


def check_output(out: Path) -> None:
    """Raise an error if no file can be written at this path."""
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; give the path of a file")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.parent}; make it first")


def claim_output(out: Path, settings: dict[str, Any]) -> None:
    """Write the settings beside a new output file; raise an error if an old file has other settings.

    Keys that end in `_sha256` are fingerprints. If one differs, the error names only what has changed.
    """
    check_output(out)
    note = out.with_name(out.name + ".settings.json")
    if not out.exists() or b"\n" not in out.read_bytes():  # without a response, any settings are allowed
        files.write_atomically(note, json.dumps(settings, indent=2) + "\n")
        out.touch()
        return
    if not note.is_file():
        raise ValueError(f"{out}: exists, but not {note.name}; choose another output or delete it")
    before = files.read_json_object(note)
    for key, value in settings.items():
        if before.get(key) == value:
            continue
        change = f"{key}={before.get(key)!r}, now it is {value!r}"
        if key.endswith("_sha256"):
            what = key.removesuffix("_sha256").replace("_", " ")
            change = f"other {what} than now, so its responses would not fit"
        raise ValueError(f"{out}: was begun with {change}; choose another output or delete it")


def finished(out: Path) -> set[Name]:
    """Remove an incomplete last line from the file, then return the names of the samples in it."""
    files.cut_unfinished_line(out)
    return {(record["index"], record["sample"]) for _, record in files.read_json_lines(out)}
