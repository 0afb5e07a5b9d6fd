"""Kill lagged runs with SIGKILL at random moments; compare the end with a run in one process without kills.

    python scripts/check_lag_kills.py [--lags 0,1,3] [--ways one,apart,split] [--samplers 1] [--stages 6]
                                      [--rounds 1] [--kills 4] [--seed 0] [--longest 300] [--bucket]

The ways: `one` process, the commands `train --rollouts wait` and `sample` `apart`, and one process that
`split`s its devices; `mixed` kills all processes and goes on in a random one of these ways. Each lag is tried
with µ = 1 and µ = 2. In a round, a random process is killed `--kills` times; each time the same command
starts it again. Then the run may end. Weights and optimizer state, the journal without its times, and all
rollouts must be bit-identical to those of the run without kills, and no committed rollout may be written
again. With `--bucket`, the folders of the killed runs are in a bucket, of which the stand-in of the tests
plays the server; the run without kills is on the local disk.

Prints a JSON line per round, and exits with 1 if anything differs. A round that takes longer than `--longest`
seconds is stopped and counts as wrong.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import quick_programs
from tiny_run import TINY_RUN

from mugrpo_jax.files import is_remote, to_path

REWARD = (
    "def short(text, problem):\n    return 1.0 / (1 + len(text))\n"  # so that every update has a gradient
)
WAYS = ("one", "apart", "split")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lags", default="0,1,3")
    parser.add_argument("--ways", default="one,apart,split")
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--stages", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=300.0)
    parser.add_argument("--bucket", action="store_true")
    arguments = parser.parse_args()
    chance, wrong = random.Random(arguments.seed), 0
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as server:
        work = Path(temporary)
        place = bucket(server) if arguments.bucket else str(work)
        (work / "run.yaml").write_text(TINY_RUN)
        (work / "lag_rewards.py").write_text(REWARD)
        for lag in map(int, arguments.lags.split(",")):
            for updates in (1, 2):
                settings = [
                    f"batch.lag={lag}",
                    f"batch.updates_per_stage={updates}",
                    f"batch.stages={arguments.stages}",
                ]
                whole = Round(work, work / f"whole-{lag}-{updates}", "one", settings, 0)
                whole.finish(time.monotonic() + arguments.longest)
                writes = sum(progress(whole.folder)[:1]) + len(journal(whole.folder))
                for way in arguments.ways.split(","):
                    for number in range(arguments.rounds):
                        name = f"{way}-{lag}-{updates}-{number}"
                        tried = Round(work, to_path(f"{place}/{name}"), way, settings, arguments.samplers)
                        tried.writes = writes
                        about = tried.kills(arguments.kills, chance, arguments.longest)
                        same = "error" not in about and ending(tried.folder) == ending(whole.folder)
                        wrong += not same or about["written_again"] > 0
                        case = {"way": way, "lag": lag, "mu": updates, "round": number}
                        print(json.dumps(case | about | {"bit_identical": same}), flush=True)
    return int(wrong > 0)


def bucket(server: contextlib.ExitStack) -> str:
    """Start the stand-in of a bucket, until the stack is closed; return the bucket's URL."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    from fake_gcs import FakeGcs

    os.environ.update(server.enter_context(FakeGcs()).environment)
    return "gs://bucket"


class Round:
    """A run and its processes: a trainer, and with the way `apart` some samplers."""

    def __init__(self, work: Path, folder: Path, way: str, settings: list[str], samplers: int) -> None:
        self.work, self.folder = work, folder
        sizes = ["sampling.prompts_per_shard=1", "report.samples=0", "task.reward=lag_rewards:short"]
        self.train = ["train", str(work / "run.yaml"), "--out", str(self.folder), *settings, *sizes]
        self.mixed, self.samplers = way == "mixed", samplers
        self.choose("apart" if self.mixed else way)
        self.environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": os.pathsep.join([str(work), os.environ.get("PYTHONPATH", "")]),
        }
        self.running: list[subprocess.Popen[bytes]] = []
        self.writes = 0  # of a whole run, about

    def choose(self, way: str) -> None:
        """Choose the way of the next start."""
        limit = ["--wait-limit", "120"]
        self.commands = [[*self.train, *(["mesh.sampling_devices=1"] if way == "split" else [])]]
        if way == "apart":
            self.commands = [[*self.train, "--rollouts", "wait", *limit]]
            self.commands += [["sample", str(self.folder), "--watch", *limit]] * self.samplers
        self.prefixes: list[list[str]] = [[] for _ in self.commands]  # of the command lines
        devices = 2 if way == "split" else 1
        self.flags = f"--xla_force_host_platform_device_count={devices} {quick_programs.flags()}"

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Start the trainer (number 0) or a sampler."""
        program = "from mugrpo_jax.cli.main import program; program()"
        command = [*self.prefixes[number], sys.executable, "-c", program, *self.commands[number]]
        with (self.work / f"{self.folder.name}-{number}.txt").open("ab") as log:
            environment = self.environment | {"XLA_FLAGS": self.flags}
            return subprocess.Popen(command, env=environment, cwd=self.work, stdout=log, stderr=log)

    def finish(self, end: float) -> str | None:
        """Wait until all processes have ended; return what went wrong."""
        self.running = self.running or [self.start(number) for number in range(len(self.commands))]
        error = None
        try:
            for number, process in enumerate(self.running):
                if code := process.wait(max(end - time.monotonic(), 0.1)):
                    log = (self.work / f"{self.folder.name}-{number}.txt").read_text().splitlines()
                    error = f"process {number} ended with {code}: {log[-1] if log else ''}"
        except subprocess.TimeoutExpired:
            error = f"process {number} did not end in time"
        finally:
            for process in self.running:
                process.kill()
                process.wait()
        return error

    def kills(self, count: int, chance: random.Random, longest: float) -> dict[str, Any]:
        """Kill random processes `count` times, then let the run end; return what happened.

        A kill comes when the run has written a random number of times, and a short random time later: the
        start of a process takes much longer than all its stages. In a bucket, where every look is a request,
        a kill comes after a random time.
        """
        begun = time.monotonic()
        end, killed, again, before = begun + longest, [], 0, committed(self.folder)
        self.running = [self.start(number) for number in range(len(self.commands))]
        for _ in range(count):
            if is_remote(self.folder):
                time.sleep(chance.uniform(3.0, 25.0))
            else:
                self.wait_for_writes(chance.randint(1, 2 * self.writes // (count + 1)), end)
                time.sleep(chance.expovariate(10.0))
            alive = [number for number, process in enumerate(self.running) if process.poll() is None]
            if not alive or self.running[0].poll() == 0:
                break
            numbers = alive if self.mixed else [chance.choice(alive)]
            for number in numbers:
                self.running[number].send_signal(signal.SIGKILL)
                self.running[number].wait()
            after = committed(self.folder)
            again += sum(after.get(path) != when for path, when in before.items())
            before = after
            killed.append(
                f"{'trainer' if number == 0 else 'sampler'} after {updates_done(self.folder)} updates"
            )
            if self.mixed:
                self.choose(way := chance.choice(WAYS))
                killed[-1] = f"all after {updates_done(self.folder)} updates, then {way}"
                self.running = [self.start(number) for number in range(len(self.commands))]
            else:
                self.running[number] = self.start(number)
        error = self.finish(end)
        after = committed(self.folder)
        again += sum(after.get(path) != when for path, when in before.items())
        waited = [
            record["seconds"].get("wait", 0.0) for record in journal(self.folder) if record["kind"] == "stage"
        ]
        about: dict[str, Any] = {"killed": killed, "written_again": again}
        about |= {"longest_wait_s": round(max(waited, default=0.0), 1), "left_over": left_over(self.folder)}
        about |= {"seconds": round(time.monotonic() - begun, 1)}
        return about if error is None else about | {"error": error}

    def wait_for_writes(self, steps: int, end: float) -> None:
        """Wait until the run has written so many times, or the trainer has ended."""
        seen = progress(self.folder)
        while steps and self.running[0].poll() is None and time.monotonic() < end:
            time.sleep(0.002)
            steps -= (now := progress(self.folder)) != seen
            seen = now


def progress(folder: Path) -> tuple[int, int]:
    """Return how much the run has written: files of rollouts, also unfinished ones, and journal bytes."""
    journal = folder / "metrics.jsonl"
    files = sum(1 for _ in folder.glob("rollouts/*/*"))
    return files, journal.stat().st_size if journal.exists() else 0


def committed(folder: Path) -> dict[str, object]:
    """Return the complete shards, each with something that changes when it is written again."""
    if not is_remote(folder):
        return {str(path): path.stat().st_mtime_ns for path in folder.glob("rollouts/*/*.arrayrecord")}
    import fsspec

    storage = fsspec.filesystem("gcs")
    return {
        str(path): storage.info(str(path))["generation"] for path in folder.glob("rollouts/*/*.arrayrecord")
    }


def left_over(folder: Path) -> list[str]:
    """Return files that no process needs any more: policies, claims and signs of life."""
    found = [*folder.glob("policies/*"), *folder.glob("samplers/claims/*/*"), *folder.glob("samplers/*.json")]
    return [str(path.relative_to(folder)) for path in found]


def updates_done(folder: Path) -> int:
    return sum(record["kind"] == "update" for record in journal(folder))


def journal(folder: Path) -> list[dict[str, Any]]:
    from mugrpo_jax.runs.journal import read_journal

    return list(read_journal(folder / "metrics.jsonl"))


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
    records = [{name: value for name, value in r.items() if name != "seconds"} for r in journal(folder)]
    return last.name, leaves, records, sums


if __name__ == "__main__":
    sys.exit(main())
