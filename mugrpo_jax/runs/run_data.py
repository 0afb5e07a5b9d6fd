"""Notice that the data of a run has changed since the run was started."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax

from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import read_json_object, write_atomically


def claim_data(run: Path, sources: Mapping[str, str]) -> None:
    """Store the hashes of the data in a new run's folder; in an old folder, compare them.

    `sources` maps the name of a file or Hub dataset to a hash of its problems, as `Task.sources`.
    """
    check_data(run, sources)
    if jax.process_index() == 0 and not (run / "data.json").exists():
        write_atomically(run / "data.json", json.dumps(dict(sources), indent=1) + "\n")


def check_data(run: Path, sources: Mapping[str, str]) -> None:
    """Raise an error that names the file if its problems differ from those that the run started with."""
    stored = run / "data.json"
    before = read_json_object(stored) if stored.exists() else dict(sources)
    for name, digest in sources.items():
        if before.get(name) != digest:
            raise ConfigError(
                f"{name}: its problems have changed since the run in {run} was started; restore them, or use "
                "another --out"
            )
