"""A queue of `mugrpo` runs on one GPU, one or several at a time, with a time limit."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from reproduce_collect import last, say, summary

from mugrpo_jax.cli.main import STOPPED

ROOT = Path(__file__).resolve().parent.parent
MUGRPO = (sys.executable, "-m", "mugrpo_jax")
EVERY = 30.0  # seconds between two progress lines
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
DONE = "done"  # in the folder of a run that has finished
SHOWN = 15  # last log lines printed for a failed run


@dataclasses.dataclass(frozen=True)
class Work:
    """A run: its folder and the `mugrpo` arguments that start or continue it.

    `updates` is the number of its last update, if it takes any (updates of a warm start count up to 0).
    `dropped` are the parts of the folder that are deleted when it has finished. `after` is the folder of
    another run that must have finished before this one starts.
    """

    folder: Path
    command: tuple[Any, ...]
    dropped: tuple[str, ...] = ()
    updates: int | None = None
    after: Path | None = None

    @property
    def log(self) -> Path:
        """The file for its output, beside its folder."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def done(self) -> Path:
        """A file that exists when the run has finished."""
        return self.folder / DONE

    @property
    def ready(self) -> bool:
        """Whether the run may start."""
        return self.after is None or (self.after / DONE).exists()


class Queue:
    """Run the works in order, `jobs` at a time, until the time is over.

    A work that must wait for another one lets those behind it go first. It does not run if that other one
    failed.

    When the time is over, the current runs get SIGTERM: they save, and the next call continues them. Runs
    that have not ended after `seconds` are killed. A run that shared the GPU at any time has a file
    `shared_gpu` in its folder; a run that was continued has a file `resumed`. The wall-clock figures of such
    runs are not valid. Compiled programs are kept in `programs`. The runs share the part of the GPU's memory
    that `XLA_PYTHON_CLIENT_MEM_FRACTION` allows (default 0.9).

    Attributes:
      failed: names of the runs that ended with an error; the next call tries them again.
    """

    def __init__(self, jobs: int, seconds: float, programs: Path) -> None:
        self._jobs = jobs
        share = float(os.environ.get(MEMORY, 0.9)) / jobs
        programs_kept = {"JAX_COMPILATION_CACHE_DIR": str(programs)}  # a continued run does not compile again
        self._environment = programs_kept | os.environ | {MEMORY: f"{share:.3f}"}
        self._margin = 20.0 + 5.0 * jobs  # time for saving; all runs save to the same disk
        self._end = time.monotonic() + seconds
        self._running: dict[Work, subprocess.Popen[bytes]] = {}
        self.failed: list[str] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hurry)

    def run(self, works: Iterable[Work]) -> bool:
        """Run all works; True if all of them are done."""
        works = list(works)
        waiting = [work for work in works if not work.done.exists()]
        told = time.monotonic()
        while self._left() > 0:
            ready = [work for work in waiting if work.ready][: self._jobs - len(self._running)]
            for work in ready:
                waiting.remove(work)
                self._start(work)
            if not self._running:
                break
            time.sleep(0.5)
            for work, process in list(self._running.items()):
                if process.poll() is not None and self._left() > 0:  # later it was stopped, not done
                    del self._running[work]
                    self._ended(work, process.returncode)
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                self._tell(len(waiting))
        self._stop()
        return all(work.done.exists() for work in works)

    def _left(self) -> float:
        return self._end - self._margin - time.monotonic()

    def _hurry(self, number: int, frame: FrameType | None) -> None:
        self._end = min(self._end, time.monotonic() + self._margin)

    def _start(self, work: Work) -> None:
        work.folder.mkdir(parents=True, exist_ok=True)
        if (work.folder / "metrics.jsonl").exists():
            (work.folder / "resumed").touch()
        with work.log.open("ab") as log:
            self._running[work] = subprocess.Popen(
                [*MUGRPO, *map(str, work.command)],
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if len(self._running) > 1:
            for together in self._running:
                (together.folder / "shared_gpu").touch()
        say(what="start", run=work.folder.name, updates=_updates(work))

    def _ended(self, work: Work, status: int) -> None:
        early = status == 0 and work.updates is not None and _updates(work) < work.updates
        if status == STOPPED or early:  # it was stopped from outside
            self._tell_stopped(work, status)
            return
        if status:
            self.failed.append(work.folder.name)
            say(what="failed", run=work.folder.name, status=status, log=str(work.log), tail=tail(work.log))
            return
        work.done.touch()
        for part in work.dropped:
            shutil.rmtree(work.folder / part, ignore_errors=True)
        say(what="done", run=work.folder.name, **summary(work.folder))

    def _tell(self, waiting: int) -> None:
        about = {
            work.folder.name: {
                "updates": _updates(work),
                "accuracy": last(work.folder, "evaluation").get("accuracy"),
            }
            for work in self._running
        }
        say(what="progress", seconds_left=round(self._left()), waiting=waiting, running=about)

    def _stop(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for work, process in self._running.items():
            try:
                process.wait(max(self._end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._tell_stopped(work, process.returncode)
        self._running.clear()

    def _tell_stopped(self, work: Work, status: int) -> None:
        say(what="stopped", run=work.folder.name, status=status, updates=_updates(work))


def tail(log: Path) -> list[str]:
    """The last lines of a log; each state of a progress bar counts as one line."""
    lines = re.split(r"[\r\n]+", log.read_bytes()[-65536:].decode(errors="replace"))
    return [line for line in lines if line.strip()][-SHOWN:]


def _updates(work: Work) -> int:
    """Updates done; updates of a warm start count up to 0."""
    return last(work.folder).get("updates", 0)
