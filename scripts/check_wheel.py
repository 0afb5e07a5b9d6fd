"""Build the wheel, install it into a fresh virtual environment, and take a new user's first steps with it.

First the core is installed and measured: size, import times, the losses, and the error of a command that
needs the extra `train`. Then `[train]` is installed: its size, and every first step in an empty folder, from
`mugrpo train quickstart --dry-run` to a short run with report and export. pip must find the packages. Took
14 minutes on two busy cores, most of it pip. The first step that fails ends the script with status 1.

    python scripts/check_wheel.py
"""

import os
import shutil
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


def call(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Run a command and return what it printed; end the script if its exit status is another."""
    # No variable of this shell may lead the new environment to other packages.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    started = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean, "JAX_PLATFORMS": "cpu"},
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


if __name__ == "__main__":
    main()
