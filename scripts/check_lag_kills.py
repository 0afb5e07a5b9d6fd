"""SIGKILL a tiny run with `batch.lag` at random moments, and compare the end with a run without kills.

    python scripts/check_lag_kills.py [--lags 1,3] [--rounds 2] [--kills 4] [--seed 0]

Each lag is tried with µ = 1 and µ = 2. In a round, the run is killed `--kills` times; each time the same
command continues it. Then it may end. Weights and optimizer state, the journal without its times, and all
rollouts must be bit-identical to those of a run without kills, and no committed rollout may be written again.

Prints a table row per round, with the updates done at each kill, and exits with 1 if anything differs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import quick_programs
from tiny_run import TINY_RUN

STAGES = 6
LONGEST_S = 600.0  # a machine may be busy


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lags", default="1,3")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, wrong = random.Random(arguments.seed), 0
    print("| L | µ | round | updates done at the kills | bit-identical | rollouts written again |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "run.yaml").write_text(TINY_RUN)
        for lag in map(int, arguments.lags.split(",")):
            for updates in (1, 2):
                settings = [f"batch.lag={lag}", f"batch.updates_per_stage={updates}"]
                whole = work / f"whole-{lag}-{updates}"
                finish(work, whole, settings)
                for number in range(arguments.rounds):
                    folder = work / f"killed-{lag}-{updates}-{number}"
                    done, again = kills(work, folder, settings, arguments.kills, chance)
                    finish(work, folder, settings)
                    same = ending(folder) == ending(whole)
                    wrong += not same or again > 0
                    at = ", ".join(map(str, done))
                    print(f"| {lag} | {updates} | {number} | {at} | {same} | {again} |", flush=True)
    return int(wrong > 0)


def start(work: Path, folder: Path, settings: list[str]) -> subprocess.Popen[bytes]:
    program = "from mugrpo_jax.cli.main import program; program()"
    sizes = [f"batch.stages={STAGES}", "sampling.prompts_per_shard=1", "report.samples=0"]
    command = [sys.executable, "-c", program, "train", str(work / "run.yaml"), "--out", str(folder)]
    environment = {
        **os.environ,
        "XLA_FLAGS": quick_programs.flags(),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with (work / "log.txt").open("ab") as log:
        return subprocess.Popen([*command, *sizes, *settings], env=environment, stdout=log, stderr=log)


def finish(work: Path, folder: Path, settings: list[str]) -> None:
    if code := start(work, folder, settings).wait(LONGEST_S):
        raise SystemExit(f"{folder.name} ended with {code}\n{(work / 'log.txt').read_text()[-2000:]}")


def kills(
    work: Path, folder: Path, settings: list[str], count: int, chance: random.Random
) -> tuple[list[int], int]:
    """Kill the run `count` times; return the updates done at each kill, and the rollouts written again.

    A kill comes a random time after the run has written something, because the start of a process takes much
    longer than all its stages. The random times are short compared with the rest of the run.
    """
    done, again, before = [], 0, committed(folder)
    for _ in range(count):
        process, seen = start(work, folder, settings), progress(folder)
        deadline = time.monotonic() + LONGEST_S
        while process.poll() is None and progress(folder) == seen and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.expovariate(1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        after = committed(folder)
        again += sum(after.get(path) != when for path, when in before.items())
        before = after
        done.append(updates_done(folder))
    return done, again


def progress(folder: Path) -> tuple[int, int]:
    """Return how much the run has written: files of rollouts, also unfinished ones, and journal bytes."""
    journal = folder / "metrics.jsonl"
    files = sum(1 for _ in folder.glob("rollouts/*/*"))
    return files, journal.stat().st_size if journal.exists() else 0


def committed(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("rollouts/*/*.arrayrecord")}


def updates_done(folder: Path) -> int:
    return sum(record["kind"] == "update" for record in journal(folder))


def journal(folder: Path) -> list[dict[str, object]]:
    from mugrpo_jax.runs.journal import read_journal

    records = list(read_journal(folder / "metrics.jsonl"))
    for record in records:
        record.pop("seconds", None)
    return records


def ending(folder: Path) -> tuple[object, ...]:
    """Return the state in the last checkpoint, the journal without times, and the checksums of rollouts."""
    import jax
    import orbax.checkpoint as ocp

    from mugrpo_jax.training import checkpoint_folders

    last = checkpoint_folders(folder / "checkpoints")[-1]
    state = ocp.StandardCheckpointer().restore(last / "state")
    leaves = [(leaf.dtype, leaf.tobytes()) for leaf in jax.tree.leaves(jax.device_get(state))]
    shards = sorted(folder.glob("rollouts/*/shard-*.json"))
    sums = [(path.parent.name, json.loads(path.read_text())["sha256"]) for path in shards]
    return last.name, leaves, journal(folder), sums


if __name__ == "__main__":
    sys.exit(main())
