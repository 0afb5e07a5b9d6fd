"""Run a program on one test in a process of its own, watch its limits, and kill all that is left of it.

Imports only what starts fast, because every program needs a new interpreter.
"""

import contextlib
import os
import select
import signal
import sys
import time
from typing import IO, Any

from child import FILES, MEMORY, SYNTAX, run_test  # `runner.py` is a script, so no package

_CODES = {MEMORY: "memory_limit", FILES: "file_limit", SYNTAX: "syntax_error"}


def supervise(
    request: dict[str, Any], test: dict[str, Any], folder: str, stdin: IO[bytes], isolated: bool
) -> dict[str, object]:
    """Run the program on one test in a process of its own, and kill all that is left of it.

    `stdin` is the file of `input_file`.
    """
    limits = request["limits"]
    stdin.seek(0)
    stdin.truncate()
    stdin.write(test.get("stdin", "").encode())
    stdin.seek(0)
    pipes = [os.pipe() for _ in range(3)]
    child = os.fork()
    if child == 0:
        _start(request, test, folder, stdin.fileno(), [write for _, write in pipes])
    for _, write in pipes:
        os.close(write)
    texts = {read: bytearray() for read, _ in pipes}
    stopped, code = _watch(child, texts, limits)
    _kill_all(child, isolated)
    if code is None:
        code = -signal.SIGKILL
    if not stopped:
        _read_rest(texts, limits["output_kb"] * 1024)
    for read in texts:
        os.close(read)
    cleared = _clear(folder)
    output, errors, value = (bytes(text).decode(errors="replace") for text in texts.values())
    status = stopped or _status(code)
    if status == "ok" and not cleared:
        status, errors = "file_limit", "the program left files that cannot be deleted"
    if status == "ok" and "stdin" not in test and not value:
        status, errors = "program_error", "the program ended before the function returned"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), f"exit code {code}")
    return {"status": status, "output": output if "stdin" in test else value, "detail": last[-200:]}


def _start(request: dict[str, Any], test: dict[str, Any], folder: str, stdin: int, pipes: list[int]) -> None:
    """Run the test in this process, the child, with standard input and output of its own."""
    code = 1
    try:
        os.setsid()
        for target, source in enumerate([stdin, *pipes]):  # higher numbers than 3, so none is overwritten
            os.dup2(source, target)
        os.closerange(4, 4096)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(request["environment"], HOME=folder, TMPDIR=folder)
        code = run_test(request, test)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(code)


def _watch(child: int, texts: dict[int, bytearray], limits: dict[str, Any]) -> tuple[str, int | None]:
    """Collect the output until the program ends or reaches a limit. Return the limit and the exit code."""
    end = time.monotonic() + limits["time_s"]
    most = limits["output_kb"] * 1024
    poll = select.poll()
    for read in texts:
        os.set_blocking(read, False)
        poll.register(read, select.POLLIN)
    left = len(texts)
    while True:
        for read, _ in poll.poll(20 if left else 1):
            part = os.read(read, 65536)
            texts[read] += part
            if not part:
                poll.unregister(read)
                left -= 1
        if sum(map(len, texts.values())) > most:
            return "output_limit", None
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "", os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return "time_limit", None


def _read_rest(texts: dict[int, bytearray], most: int) -> None:
    for read, text in texts.items():
        with contextlib.suppress(BlockingIOError):
            while len(text) <= most and (part := os.read(read, 65536)):
                text += part


def _kill_all(child: int, isolated: bool) -> None:
    """Kill the program and every process that it started, and wait for their end."""
    if isolated and os.getpid() == 1:  # -1 means all processes of the namespace, so never without one
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _clear(folder: str) -> bool:
    """Delete what the program left in its folder; return whether nothing is left. Links are not followed."""
    with contextlib.suppress(OSError, RecursionError):
        _delete_all(folder)
    return not os.listdir(folder)


def _delete_all(folder: str) -> None:
    os.chmod(folder, 0o700)
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            _delete_all(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def _status(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "time_limit"
    if code < 0:
        return "program_killed"
    return _CODES.get(code, "program_error") if code else "ok"


def input_file() -> IO[bytes]:
    """Return a file without a name for the standard input of the program, used again by every test."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("stdin"), "w+b")
    import tempfile

    return tempfile.TemporaryFile()
