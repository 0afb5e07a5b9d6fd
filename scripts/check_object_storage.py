"""Kill a run in a bucket again and again, and compare its end with a run on a local disk.

    python scripts/check_object_storage.py --rounds 3

The bucket is the stand-in of the tests (`tests/fake_gcs.py`). gcsfs and TensorStore talk to it over HTTP, as
to the real service. In each round, a run is killed (SIGKILL) at moments of a list and at random times. The
same command continues each time, until the run ends. Its parameters, journal and rollouts must be those of
the local run, bit by bit. The script prints one line per round, and exits with status 1 if one differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import quick_programs  # noqa: E402
from fake_gcs import FakeGcs  # noqa: E402  (a file of the tests)
from tiny_run import TINY_RUN, UPDATES  # noqa: E402

POINTS = (
    ["before an upload", "after an upload"] * 4
    + ["while saving", "before a shard", "inside a shard", "before the manifest", "journal"]
    + ["before an update", "after an update"]
)
LIMIT_S = 1800  # longest time of one run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs to kill and compare (default: 3)")
    parser.add_argument("--kills", type=int, default=6, help="kills in each run (default: 6)")
    parser.add_argument("--minutes", type=float, default=30, help="start no new round after this time")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, end, failures = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes, 0
    with tempfile.TemporaryDirectory() as name, FakeGcs() as server:
        place = Path(name)
        (place / "config.yaml").write_text(TINY_RUN)
        os.environ.update(server.environment)
        started = time.monotonic()
        train(place, str(place / "local"))
        whole_s = time.monotonic() - started
        expected = outcome(str(place / "local"))
        for number in range(arguments.rounds):
            if time.monotonic() > end:
                break
            out = f"gs://bucket/run-{number}"
            kills = [kill(place, out, chance, whole_s) for _ in range(arguments.kills)]
            train(place, out)
            found = outcome(out)
            differing = [name for name, value in found.items() if value != expected[name]]
            failures += bool(differing)
            result = f"DIFFERENT: {', '.join(differing)}" if differing else "same"
            print(f"round {number}: killed {', '.join(kills)}: {result}", flush=True)
    return 1 if failures else 0


def kill(place: Path, out: str, chance: random.Random, whole_s: float) -> str:
    """Run until a moment from the list, or for a random time, and kill; return what was done."""
    if chance.random() < 0.4:
        seconds = chance.uniform(0.2, 1.0) * whole_s
        code = train(place, out, seconds=seconds)
        return f"after {seconds:.0f} s" if code else "not at all: it had ended"
    point, count = chance.choice(POINTS), chance.randint(1, 12)
    code = train(place, out, point, count)
    return f"{point} {count}" if code else f"not at all: no {point} {count}"


def train(place: Path, out: str, point: str = "none", count: int = 0, seconds: float | None = None) -> int:
    """Run the command; return 0, or -9 if it was killed. Any other status ends the script."""
    command = [sys.executable, str(ROOT / "tests" / "kill_driver.py"), point, str(count), "--"]
    command += [str(place / "config.yaml"), "--out", out]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(place / "programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": quick_programs.flags(),
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        shown, _ = process.communicate(timeout=seconds or LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        shown, _ = process.communicate()
        assert seconds is not None, f"no end within {LIMIT_S} s:\n{shown}"
    if process.returncode not in (0, -9):
        sys.exit(f"{out}: exit status {process.returncode}\n{shown}")
    return process.returncode


def outcome(out: str) -> dict[str, Any]:
    """Return everything that must be the same: parameters, journal without seconds, rollouts."""
    import jax

    from mugrpo_jax import files, rollouts
    from mugrpo_jax.setup.trained_model import trained_model

    folder = files.to_path(out)
    weights = [
        leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(trained_model(folder, UPDATES).params))
    ]
    journal = [value for _, value in files.read_json_lines(folder / "metrics.jsonl")]
    stages = [folder / "rollouts" / f"stage-{stage:03d}" for stage in range(2)]
    groups = [
        rollouts.encode(g) for stage in stages for g in rollouts.read_groups(rollouts.open_stage(stage))
    ]
    records = [json.dumps(record | {"seconds": None}) for record in journal]
    return {"weights": weights, "journal": records, "rollouts": groups}


if __name__ == "__main__":
    sys.exit(main())
