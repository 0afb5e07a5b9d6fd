"""Runs `mugrpo train` and kills itself at a chosen point: `kill_driver.py POINT COUNT [term] -- ARGUMENTS`.

POINT names a moment of the run, COUNT which of its occurrences; `none` runs to the end, and then prints how
many rows this process read for its updates. The environment variable LARGEST_FILE makes writing fail beyond
so many bytes, as on a disk that is full.
"""

import atexit
import itertools
import os
import resource
import signal
import sys
from pathlib import Path

import jax

import mugrpo_jax.loop.stages
import mugrpo_jax.planning
import mugrpo_jax.report.page  # noqa: F401 (the command imports these when it runs)
from mugrpo_jax import files
from mugrpo_jax.cli.main import program
from mugrpo_jax.rollouts import reference_folder as store_reference
from mugrpo_jax.rollouts import rollout_folder as store
from mugrpo_jax.rollouts import row_reader
from mugrpo_jax.runs.journal import Journal
from mugrpo_jax.tasks.scoring import InlineScorer
from mugrpo_jax.training import CheckpointStore, UpdateStep


def at(owner, name, count, signal_number, *, after=False):
    """Make the `count`-th call of a function the last thing this process does (SIGTERM: lets it go on)."""
    original, seen = getattr(owner, name), [0]

    def wrapped(*arguments, **keywords):
        seen[0] += 1
        mine = seen[0] == count
        if mine and not after:
            os.kill(os.getpid(), signal_number)
        result = original(*arguments, **keywords)
        if mine and after:
            os.kill(os.getpid(), signal_number)
        return result

    setattr(owner, name, wrapped)


POINTS = {
    "scoring": (InlineScorer, "submit", False),
    "before a shard": (store.RolloutFolder, "write_shard", False),
    "inside a shard": (store, "write_json", False),  # the records are written, nothing is renamed
    "before a reference shard": (store_reference.ReferenceFolder, "write_shard", False),
    "before the manifest": (store.RolloutFolder, "commit", False),
    "before an update": (UpdateStep, "gradient", False),
    "after an update": (UpdateStep, "gradient", True),
    "before an upload": (files, "_upload", False),  # to a bucket
    "after an upload": (files, "_upload", True),
    "journal": (Journal, "write", True),
    "while saving": (CheckpointStore, "save", True),  # the write goes on in the background
}
FOLDERS = [str(Path(__file__).parents[i]) for i in range(2)]  # where this and the package are
# What JAX reads from the environment when it is imported, and how.
FROM_ENVIRONMENT = {
    "jax_platforms": str,
    "jax_compilation_cache_dir": str,
    "jax_persistent_cache_min_compile_time_secs": float,
}
PROCESS = os.getpid()  # which imported this


def drive(point, count, *more):
    """Arrange the end, then be the program `mugrpo train`; `more` is [term] -- ARGUMENTS."""
    if "LARGEST_FILE" in os.environ:
        largest = int(os.environ["LARGEST_FILE"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    term, command = more[: more.index("--")], more[more.index("--") + 1 :]
    if point != "none":
        owner, name, after = POINTS[point]
        at(owner, name, int(count), signal.SIGTERM if term else signal.SIGKILL, after=after)
    original, read = row_reader.decode_rollout, itertools.count()
    row_reader.decode_rollout = lambda record: (next(read), original(record))[1]
    sys.argv[1:] = ["train", *command]
    atexit.register(lambda: print(f"rows read: {next(read)}", flush=True))
    program()


def drive_fork(arguments, variables, shown, said):
    """Drive in a fork of a process that has imported everything, as if it had just been started."""
    for number, name, writer in ((1, "stdout", shown), (2, "stderr", said)):
        os.dup2(writer.fileno(), number)
        writer.close()
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    assert os.getpid() != PROCESS, "imported again: the process that is forked had not done it"
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = variables.get("PYTHONPATH", "").split(os.pathsep)
    for name, read in FROM_ENVIRONMENT.items():
        if name.upper() in variables:
            jax.config.update(name, read(variables[name.upper()]))
    try:
        drive(*arguments)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


if __name__ == "__main__":
    drive(*sys.argv[1:])
