"""Notice that the data of a run, or the code of its reward, has changed since the run was started."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import read_json_object, write_atomically
from mugrpo_jax.runs.work_done import has_responses, has_work


def claim_data(run: Path, sources: Mapping[str, str]) -> None:
    """Store the hashes of the data in the folder of a run without work; in others, compare them.

    `sources` maps the name of a file or Hub dataset to a hash of its problems, as `Task.sources`, and the
    name of replayed rollouts to their hash.
    """
    check_data(run, sources)
    if jax.process_index() == 0 and not ((run / "data.json").exists() and has_work(run)):
        write_atomically(run / "data.json", json.dumps(dict(sources), indent=1) + "\n")


def check_data(run: Path, sources: Mapping[str, str]) -> None:
    """Raise an error that names the file if its contents differ from those that the run started with."""
    for name in changed_data(run, sources):
        raise ConfigError(
            f"{name}: what it contains has changed since the run in {run} was started; restore it, use "
            "another --out, or move the run aside with --overwrite"
        )


def check_same_data(run: Path, sources: Mapping[str, str]) -> None:
    """Raise an error that names the file if a sampler has other problems than its run."""
    stored = run / "data.json"
    before = _hashes(stored) if stored.exists() else {}
    for name, digest in sources.items():
        if before.get(name) != digest:
            raise ConfigError(f"{name}: its problems are not those of the run in {run}; copy them from there")


def changed_data(run: Path, sources: Mapping[str, str]) -> list[str]:
    """Return the names of the sources whose problems differ from those that a run with work started with."""
    stored = run / "data.json"
    if not stored.exists() or not has_work(run):
        return []
    before = _hashes(stored)
    return [name for name, digest in sources.items() if before.get(name) != digest]


def claim_code(run: Path, code: Mapping[str, str]) -> None:
    """Store the hashes of the user's own functions in the folder of a run without responses."""
    if code and jax.process_index() == 0 and not ((run / "code.json").exists() and has_responses(run)):
        write_atomically(run / "code.json", json.dumps(dict(code), indent=1) + "\n")


def changed_code(run: Path, code: Mapping[str, str]) -> str:
    """Return a line of text about each of the user's functions whose file differs from that of the start.

    This is no error, unlike other data: a reward that failed must be mended before the run can go on.
    """
    stored = run / "code.json"
    if not stored.exists() or not has_responses(run):
        return ""
    try:
        before = read_json_object(stored)
    except ValueError as error:
        return f"{error}; whether functions of your own have changed is not known"
    changed = [name for name, digest in code.items() if before.get(name, digest) != digest]
    return "\n".join(
        f"{name}: its file has changed since the run in {run} was started; earlier rewards are kept"
        for name in changed
    )


def _hashes(stored: Path) -> dict[str, Any]:
    try:
        return read_json_object(stored)
    except ValueError as error:
        raise ConfigError(
            f"{error}; if the data is surely still the same, remove this file and start the trainer again"
        ) from None
