"""Run a program on tests in a sandbox: no network, hardly any files, limits on everything it can use up.

Three ways: `bwrap` (bubblewrap, where it is installed), `namespaces` (Linux, as root or where ordinary users
may make user namespaces) and `unsafe`. Unsafe has the limits but no isolation: programs can read your files,
write them and use the network.
"""

import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROGRAM_STATUSES = (
    *("time_limit", "memory_limit", "output_limit", "file_limit"),
    *("program_error", "program_killed", "syntax_error"),
)

_FOLDER = Path(__file__).resolve().parent
_START_S = 20.0  # most seconds to start a sandbox, on a busy machine
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"} | dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
_PROBE = """
import os, time
try:
    for _ in range(8):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
    print("the number of processes is not limited:")
except OSError:
    print("limited")
"""


@dataclass(frozen=True)
class Limits:
    """What a program may use for each test.

    Attributes:
      time_s: seconds, by the clock and of processor time.
      memory_mb: megabytes of address space of each process.
      processes: processes and threads at a time, with the supervisor.
      output_kb: kilobytes that it may print.
      folder_mb: megabytes of the temporary folder, and of each file.
    """

    time_s: float = 2.0
    memory_mb: int = 512
    processes: int = 8
    output_kb: int = 1024
    folder_mb: int = 32


@dataclass(frozen=True)
class Outcome:
    """How a program ended on one test.

    Attributes:
      status: `ok`, which only means that it ended in time and without an error, or a `PROGRAM_STATUSES`.
      output: what it printed, or the value of the call as a Python literal.
      detail: the last line of its errors.
    """

    status: str
    output: str
    detail: str


class SandboxError(RuntimeError):
    """The sandbox itself failed, so nothing is known about the program."""


def run_program(
    code: str, tests: Sequence[Mapping[str, Any]], *, limits: Limits | None = None, unsafe: bool = False
) -> Generator[Outcome, None, None]:
    """Run a Python program on tests, each in a process of its own; yield the outcomes one by one.

    After a test that reaches the time limit, the others are not run. Closing the generator ends the program.

    Args:
      code: the text of the program.
      tests: each has `stdin` (a text), or `expression` (and `setup`, imports that it needs), or `arguments`
        (a list) and `function` (None: the only public method of the class `Solution`).
      limits: for each test; None means the defaults.
      unsafe: without isolation, if no other way is possible.
    """
    limits = limits or Limits()
    return _outcomes(code, tests, limits, isolation_mode() or ("unsafe" if unsafe else _refuse()))


def check_sandbox(*, unsafe: bool = False) -> str:
    """Raise a ValueError that says what to do, if programs cannot be isolated here and `unsafe` is False.

    Returns a warning if programs will run without isolation, otherwise an empty text.
    """
    if isolation_mode() is not None:
        return ""
    if not unsafe:
        _refuse()
    return "warning: programs run without isolation; they can read your files, write them and use the network"


@functools.cache
def isolation_mode() -> str | None:
    """Return the way in which programs are isolated here: `bwrap`, `namespaces`, or None if none works.

    root tries its own namespaces first, because in bubblewrap it stays the user 0, for whom the kernel does
    not limit the number of processes.
    """
    for mode in ("namespaces", "bwrap") if os.geteuid() == 0 else ("bwrap", "namespaces"):
        if _problem(mode) is None:
            return mode
    return None


@functools.cache
def _problem(mode: str) -> str | None:
    """Run a program in this way that tries to exceed the limit of processes; return why it fails, or None."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    if mode == "bwrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        outcome = next(_outcomes(_PROBE, [{"stdin": ""}], Limits(time_s=20.0, processes=3), mode))
    except SandboxError as error:
        return str(error)
    return None if outcome.output == "limited\n" else f"{outcome.output} {outcome.detail}".strip()


def _refuse() -> str:
    raise ValueError(
        f"programs cannot be isolated on this machine ({_problem('namespaces')}); install bubblewrap or "
        "allow user namespaces (in a container: docker run --security-opt seccomp=unconfined), or set "
        "task.unsafe_sandbox=true (mugrpo eval --unsafe-sandbox) if you trust the programs"
    )


def _outcomes(
    code: str, tests: Sequence[Mapping[str, Any]], limits: Limits, mode: str
) -> Generator[Outcome, None, None]:
    request = {
        "mode": mode,
        "code": code,
        "tests": list(map(_sent, tests)),
        "limits": asdict(limits) | {"processes": limits.processes + 1},
        "visible": _visible(),
        "packages": _packages(),
        "environment": _ENVIRONMENT,
    }
    command = [os.path.realpath(sys.executable), "-I", "-S", str(_FOLDER / "runner.py")]
    process = subprocess.Popen(
        [*_bubblewrap(limits), *command] if mode == "bwrap" else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
    )
    try:
        _send(process, request)
        patience, buffer = _START_S + limits.time_s, bytearray()
        for _ in tests:
            reply = _receive(process, buffer, patience)
            if "failed" in reply:
                raise SandboxError(f"the sandbox did not start: {reply['failed']}")
            yield Outcome(**reply)
            if reply["status"] == "time_limit":
                return
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def _sent(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return a test as JSON can carry it: arguments as a literal, because JSON has only texts as keys."""
    return {name: repr(value) if name == "arguments" else value for name, value in test.items()}


def _send(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died, and `_receive` says why


def _receive(process: subprocess.Popen[bytes], buffer: bytearray, patience: float) -> dict[str, Any]:
    """Read one line of JSON, or raise a SandboxError. Bytes after the line stay in the buffer."""
    assert process.stdout is not None and process.stderr is not None
    end, file = time.monotonic() + patience, process.stdout.fileno()
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while b"\n" not in buffer:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise SandboxError(f"the sandbox gave no answer within {patience:g} s")
        part = os.read(file, 65536)
        if not part:
            lines = process.stderr.read().decode(errors="replace").strip().splitlines()
            raise SandboxError(f"the sandbox died: {lines[-1] if lines else 'no message'}")
        buffer += part
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return json.loads(line)


def _packages() -> list[str]:
    """Return the folders of this Python's installed packages, such as numpy."""
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


def _visible() -> list[str]:
    """Return the paths that programs may read: the system's programs, this Python and its packages."""
    python = os.path.realpath(sys.base_prefix)
    return sorted({*_SYSTEM, python, *_packages(), str(_FOLDER)})


def _bubblewrap(limits: Limits) -> list[str]:
    command = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--dev", "/dev"]
    for path in _visible():
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    command += ["--perms", "0700", "--size", str(limits.folder_mb * 2**20), "--tmpfs", "/sandbox"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/"]
