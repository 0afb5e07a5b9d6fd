"""Build the wheel, install it into a fresh virtual environment, and take a new user's first steps with it.

First the core is installed and measured: size, import times, the losses, and the error of a command that
needs the extra `train`. Then `[train]` is installed: its size, and every first step in an empty folder, from
`mugrpo train quickstart --dry-run` to a short run with report, export and a question to the exported model.
Then come own problems with one that is too long, an own reward with a misspelt name, `kill -9`, Ctrl-C, and
the same command each time. pip must find the packages. Takes about 20 minutes on two busy cores, most of it
for pip and for compiling. The first step that fails ends the script with status 1.

    python scripts/check_wheel.py
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_SOURCE = {".git", ".venv", "build", "dist", "runs"}  # in the checkout, not in folders below
SHORT = ["batch.stages=1", "batch.updates_per_stage=2", "warm_start.updates=4", "evaluation.problems=16"]
IMPORTS = """
import time
times = [time.perf_counter()]
import mugrpo_jax; times.append(time.perf_counter())
import jax; times.append(time.perf_counter())
import mugrpo_jax.objectives; times.append(time.perf_counter())
print(*(f"{b - a:.3f}" for a, b in zip(times, times[1:])))
"""
LOSS = """
import jax.numpy as jnp
from mugrpo_jax import objectives
x = jnp.full((2, 3), -1.0)
print(float(objectives.mu_grpo(x, x, jnp.array([1.0, -1.0]), jnp.ones((2, 3)))[0]))
"""


def clean() -> dict[str, str]:
    """Return the variables of this shell without those that lead to other packages; JAX takes the CPU."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"JAX_PLATFORMS": "cpu"}


def call(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Run a command and return what it printed; end the script if its exit status is another."""
    started = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    words = [word.name if isinstance(word, Path) else word.partition("\n")[0] for word in command]
    print(f"{time.monotonic() - started:6.1f} s  {' '.join(words)}", flush=True)
    if done.returncode != status:
        sys.exit(f"status {done.returncode}, expected {status}:\n{done.stdout[-4000:]}")
    return done.stdout


def expect(wanted: str, shown: str) -> None:
    """End the script unless this text was printed."""
    if wanted not in shown:
        sys.exit(f"expected {wanted!r} in:\n{shown[-4000:]}")


def megabytes(env: Path) -> float:
    """Return the size of the packages that are installed in a virtual environment, without pip."""
    [folder] = (env / "lib").glob("*/site-packages")
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    kept = (path for path in files if not path.relative_to(folder).parts[0].startswith(("pip", "setuptools")))
    return sum(path.stat().st_size for path in kept) / 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        env, empty = place / "env", place / "empty"
        empty.mkdir()
        venv.create(env, with_pip=True)
        wheel = build(place, env)
        check_core(wheel, env, empty)
        check_train(wheel, env, empty)
        check_own_problems(env / "bin" / "mugrpo", empty)
    print("all steps work")


def build(place: Path, env: Path) -> Path:
    """Build the wheel from a copy of the checkout, which has no remains of older builds."""
    skip = {str(ROOT): NOT_SOURCE}
    shutil.copytree(ROOT, place / "source", ignore=lambda folder, _: skip.get(str(folder), set()))
    pip_wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, "./source")
    call(env / "bin" / "python", *pip_wheel, cwd=place)
    [wheel] = place.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def install(what: str, env: Path, empty: Path) -> None:
    """Install a wheel as a user does."""
    pip_install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    call(env / "bin" / "python", *pip_install, what, cwd=empty)


def check_core(wheel: Path, env: Path, empty: Path) -> None:
    """Install the core; measure it, use a loss, and call a command that needs more."""
    python, mugrpo = env / "bin" / "python", env / "bin" / "mugrpo"
    install(str(wheel), env, empty)
    print(f"core: {megabytes(env):.0f} MB")
    times = [call(python, "-c", IMPORTS, cwd=empty).split() for _ in range(3)]
    package, jax, losses = (min(map(float, column)) for column in zip(*times))
    print(f"import mugrpo_jax {package} s; import jax {jax} s; then mugrpo_jax.objectives {losses} s")
    if package > 0.2 or losses > 0.2:
        sys.exit("an import takes more than 0.2 s")
    call(python, "-c", LOSS, cwd=empty)
    call(mugrpo, "--help", cwd=empty)
    missing = call(mugrpo, "train", "quickstart", cwd=empty, status=2)
    expect("run: pip install 'mugrpo-jax[train]'", missing)
    print(missing, end="")


def check_train(wheel: Path, env: Path, empty: Path) -> None:
    """Install the extra `train` too; take the first steps in an empty folder."""
    mugrpo = env / "bin" / "mugrpo"
    install(f"{wheel}[train]", env, empty)
    print(f"[train]: {megabytes(env):.0f} MB")
    expect("256 updates", call(mugrpo, "train", "quickstart", "--dry-run", cwd=empty))
    if list(empty.iterdir()):
        sys.exit(f"the dry run left files: {list(empty.iterdir())}")
    expect("configs known by name: quickstart,", call(mugrpo, "train", "quikstart", cwd=empty, status=2))
    expect("stages: 4", call(mugrpo, "config", "batch", cwd=empty))
    call(mugrpo, "init", "mine.yaml", cwd=empty)
    expect("exists already", call(mugrpo, "init", "mine.yaml", cwd=empty, status=2))
    call(mugrpo, "train", "mine.yaml", *SHORT, cwd=empty)
    expect("report: ", call(mugrpo, "report", "runs/mine", cwd=empty))
    call(mugrpo, "export", "runs/mine", "models/mine", cwd=empty)
    call(mugrpo, "generate", "--model", "models/mine", "--prompt", "1+2=", "--max-tokens", "8", cwd=empty)


def check_own_problems(mugrpo: Path, empty: Path) -> None:
    """Train on own problems with an own reward; stop the run in two ways and continue it."""
    sums = [[i, i % 7] for i in range(99)] + [[1] * 40]
    rows = [
        {"question": f"{'+'.join(map(str, s))}=", "answer": str(sum(s)), "solution": str(sum(s))}
        for s in sums
    ]
    (empty / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (empty / "own_reward.py").write_text(
        "def right(text, problem):\n    return float(text == problem.answer)\n"
    )
    call(mugrpo, "init", "own.yaml", "--task", "own.jsonl", cwd=empty)
    long = call(mugrpo, "train", "own.yaml", "--dry-run", cwd=empty, status=2)
    expect("own.jsonl:100: problem 99: its prompt has 81 tokens", long)
    own: list[str | Path] = [
        mugrpo,
        "train",
        "own.yaml",
        *SHORT,
        "batch.updates_per_stage=40",
        "checkpoints.every=2",
    ]
    own.append("sampling.overlong_prompts=drop")
    wrong = call(*own, "task.reward=own_reward:rihgt", "--dry-run", cwd=empty, status=2)
    expect("did you mean right?", wrong)
    own.append("task.reward=own_reward:right")
    expect("nothing was written", call(*own, "--dry-run", cwd=empty))
    stop_after(2, own, empty, signal.SIGKILL, status=-9)
    shown = stop_after(8, own, empty, signal.SIGINT, status=3)
    expect("continuing at stage 0", shown)
    expect("mugrpo: stopped before the end, saved after ", shown)
    expect("finished    runs/own", call(*own, cwd=empty))
    expect("no stage 9; it has 0", call(mugrpo, "rollouts", "runs/own", "--stage", "9", cwd=empty, status=2))


def stop_after(
    updates: int, command: list[str | Path], cwd: Path, number: signal.Signals, *, status: int
) -> str:
    """Start a run, send it a signal after so many updates are saved, and return what it printed."""
    saved, started = cwd / "runs" / "own" / "checkpoints", time.monotonic()
    with subprocess.Popen(
        [*map(str, command)],
        cwd=cwd,
        env=clean(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        names = [""]
        while run.poll() is None and max(names) < f"{updates:06d}" and time.monotonic() < started + 900:
            time.sleep(0.05)
            names = ["", *(path.name for path in saved.glob("*") if path.name.isdigit())]
        run.send_signal(number)
        shown = run.communicate(timeout=600)[0]
    print(f"{time.monotonic() - started:6.1f} s  {number.name} after {updates} updates", flush=True)
    if run.returncode != status:
        sys.exit(f"status {run.returncode}, expected {status}:\n{shown[-4000:]}")
    return shown


if __name__ == "__main__":
    main()
