"""Damage the checkpoints of a tiny run at random, and check that every damage is noticed and recovered from.

    python scripts/check_damage.py [--trials 90] [--recoveries 12] [--seed 0]

Trains a tiny model for a few updates. Then each trial copies the run, and flips a bit of a file in its newest
checkpoint, or cuts the file off, or deletes it. `export` must refuse the checkpoint and name a file in it. In
the first trials, training is resumed too: it must name the file, take the checkpoint before, and end with the
same weights as the undamaged run. Two files that Orbax writes last have no checksum, because nothing reads
them: damage to these must change nothing. Prints a JSON line per kind of damage; exits with 1 on a failure.
"""

import argparse
import contextlib
import io
import json
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny_run import TINY_RUN

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop import train
from mugrpo_jax.setup.trained_model import checkpoint_step, export, trained_model

# Two short stages with a checkpoint after every update.
SETTINGS = ["batch.updates_per_stage=2", "warm_start.updates=0", "checkpoints={every: 1, keep_last: 2}"]
NOT_READ = ("_CHECKPOINT_METADATA", "commit_success.txt")


def quietly(action: Any) -> tuple[str, str | None]:
    """Return what the action printed, and its error in words."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        try:
            action()
        except ConfigError as error:
            return out.getvalue(), str(error)
    return out.getvalue(), None


def damage(path: Path, kind: str, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if kind == "delete" or not content:
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(content[: chance.randrange(len(content))])
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def weights(run: Path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trained_model(run, checkpoint_step(run)).params)]


def trial(whole: Path, run: Path, kind: str, chance: random.Random, *, recover: bool) -> Counter[str]:
    shutil.copytree(whole, run)
    newest = max((run / "checkpoints").iterdir())
    path = chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    needed = path.parent != newest or path.name not in NOT_READ
    if kind == "delete" and path.name == "accuracy.txt":
        needed = False  # as before the evaluation
    damage(path, kind, chance)
    found = Counter({"trials": 1, "needed_files": int(needed)})
    said, error = quietly(lambda: export(run, run.parent / "exported"))
    # A damaged accuracy is named and not used; the weights are intact.
    noticed = error if path.name != "accuracy.txt" else said
    found["noticed"] += bool(noticed)
    found["named"] += str(newest) in (noticed or "")
    found["wrong"] += bool(noticed) != needed
    if recover:
        said, error = quietly(lambda: train(configs.load(whole.parent / "run.yaml", SETTINGS), run))
        same = all((a == b).all() for a, b in zip(weights(run), weights(whole), strict=True))
        found["resumed"] += 1
        found["recovered"] += error is None and same and (str(newest) in said or not needed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=90, help="trials for each of flip, truncate and delete")
    parser.add_argument("--recoveries", type=int, default=12, help="trials of each kind that resume training")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    chance, failed = random.Random(arguments.seed), False
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "run.yaml").write_text(TINY_RUN)
        quietly(lambda: train(configs.load(place / "run.yaml", SETTINGS), place / "whole"))
        for kind in ("flip", "truncate", "delete"):
            total: Counter[str] = Counter()
            for number in range(arguments.trials):
                recover = number < arguments.recoveries
                total += trial(place / "whole", place / "trial", kind, chance, recover=recover)
                shutil.rmtree(place / "trial")
                shutil.rmtree(place / "exported", ignore_errors=True)
            print(json.dumps({"damage": kind, **{name: total[name] for name in FIELDS}}), flush=True)
            failed |= bool(total["wrong"]) or total["recovered"] != total["resumed"]
    return int(failed)


FIELDS = ("trials", "needed_files", "noticed", "named", "wrong", "resumed", "recovered")

if __name__ == "__main__":
    sys.exit(main())
