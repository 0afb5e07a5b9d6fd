"""A script: run one program on its tests, isolated, and write one line of JSON per test.

`run_program` starts it with `python -I -S`, or bubblewrap does. Standard input has the request. The process
that supervises the program has dropped its privileges too, and is process 1 of its own namespace: programs
cannot signal it, and it can kill all of them at once.
"""

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from child import run_test  # type: ignore[import-not-found]  # noqa: E402  # this is a script

_LINUX = sys.platform == "linux"
if _LINUX:
    import isolation  # type: ignore[import-not-found]
    import seccomp  # type: ignore[import-not-found]
sys.path.pop(0)

_CODES = {101: "memory_limit", 102: "file_limit", 103: "syntax_error"}


def main() -> None:
    """Read the request, isolate this process as it says, and run the tests."""
    request = json.load(sys.stdin.buffer)
    out = os.dup(1)
    try:
        isolated = request["mode"] != "unsafe"
        if _LINUX:
            isolation.die_with_parent()
        if request["mode"] == "namespaces":
            user = isolation.enter_namespaces()
            first = os.fork()
            if first:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 255)
            isolation.die_with_parent()
            isolation.build_root(request["visible"], user, request["limits"]["folder_mb"])
            isolation.drop_privileges(user)
            isolation.die_with_parent()  # a change of the user has cleared it
        elif isolated:
            isolation.drop_privileges(os.getuid())
        if isolated:
            seccomp.forbid_calls(isolation.libc)
    except OSError as error:
        _write(out, {"failed": str(error)})
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores it then
    with contextlib.nullcontext("/sandbox") if isolated else tempfile.TemporaryDirectory() as folder:
        for test in request["tests"]:
            result = _supervise(request, test, folder, isolated)
            _write(out, result)
            if result["status"] == "time_limit":
                break  # the other tests would probably take as long


def _write(out: int, reply: dict[str, object]) -> None:
    line = json.dumps(reply).encode() + b"\n"
    while line:
        line = line[os.write(out, line) :]


def _supervise(request: dict, test: dict, folder: str, isolated: bool) -> dict[str, object]:
    """Run the program on one test in a process of its own, and kill all that is left of it."""
    limits = request["limits"]
    with tempfile.TemporaryFile(dir=folder) as stdin:
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
    _clear(folder)
    output, errors, value = (bytes(text).decode(errors="replace") for text in texts.values())
    status = stopped or _status(code)
    if status == "ok" and "stdin" not in test and not value:
        status, errors = "program_error", "the program ended before the function returned"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), f"exit code {code}")
    return {"status": status, "output": output if "stdin" in test else value, "detail": last[-200:]}


def _start(request: dict, test: dict, folder: str, stdin: int, pipes: list[int]) -> None:
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
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _watch(child: int, texts: dict[int, bytearray], limits: dict) -> tuple[str, int | None]:
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


def _clear(folder: str) -> None:
    """Delete what the program left in its folder, as far as possible. Links are not followed."""
    import shutil

    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def _status(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "time_limit"
    if code < 0:
        return "program_killed"
    return _CODES.get(code, "program_error") if code else "ok"


if __name__ == "__main__":
    main()
