"""Attack the sandbox: every attack must be contained, get a status, and leave nothing behind.

    python scripts/check_sandbox.py                  # the list, as root also as an ordinary user
    python scripts/check_sandbox.py --programs 1000  # also many programs at once, and the throughput

All limits of the attacks are small, and tiny attacks come first: if one of them is not contained, the script
stops. It only talks to addresses of this machine. It ends with exit code 1 if an attack is not contained.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mugrpo_jax.tasks import Problem, load_task, make_scorer
from mugrpo_jax.tasks.sandbox import Limits, isolation_mode, run_program

LIMITS = Limits(time_s=3.0, memory_mb=256, processes=8, output_kb=256, folder_mb=8)
ORDINARY = 65534  # the user id of `nobody`
_ENDED = {"ok", "program_error", "program_killed", "time_limit", "memory_limit", "output_limit", "file_limit"}

# Each attack: a program that prints "escaped" if it succeeds, and the statuses that it may end with.
TINY = {
    "one process too many": (
        "import os, time\npids = 0\ntry:\n    while pids < 20:\n"
        "        if os.fork() == 0: time.sleep(9); os._exit(0)\n"
        "        pids += 1\nexcept OSError: pass\nprint('escaped' if pids >= 20 else pids)",
        {"ok"},
    ),
    "300 MB of memory": ("x = bytearray(300 * 2**20)\nprint('escaped')", {"memory_limit"}),
}
ATTACKS = {
    "network: this machine": (
        "import socket\ns = socket.create_connection(('127.0.0.1', {port}), 1)\nprint('escaped')",
        {"program_error"},
    ),
    "network: abstract socket": (
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0{abstract}')\nprint('escaped')",
        {"program_error"},
    ),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"time_limit"}),
    "thread bomb": (
        "from threading import Thread\nfrom time import sleep\n"
        "for _ in range(500): Thread(target=sleep, args=(9,)).start()\nprint('escaped')",
        {"program_error", "time_limit", "memory_limit"},
    ),
    "read home": ("print('escaped' if open({file_at_home!r}) else '')", {"program_error"}),
    "read a file of all": ("print('escaped' if open({secret!r}) else '')", {"program_error"}),
    "read secrets of the system": (
        "import os\nfor p in ('/etc/shadow', '/etc/passwd', '/proc/1/environ', '/var/log', '/old'):\n"
        "    if os.path.exists(p): print('escaped', p)",
        {"ok"},
    ),
    "write outside": (
        "import os, sys\nok = []\n"
        "for p in ['/', '/usr', '/usr/lib', '/etc', '/dev', sys.prefix, {home!r}, {folder!r}]:\n"
        "    try: open(os.path.join(p, 'x'), 'w').write('x'); ok.append(p)\n    except OSError: pass\n"
        "print('escaped' if ok else '', ok)",
        {"ok"},
    ),
    "10 GB of memory": ("x = bytearray(10 * 2**30)\nprint('escaped')", {"memory_limit"}),
    "10 GB of memory in parts": (
        "x = []\nwhile len(x) < 10240: x.append(bytearray(2**20))\nprint('escaped')",
        {"memory_limit"},
    ),
    "10 GB of memory without a process": (
        "import os\nfiles = []\nwhile len(files) < 1280:\n    files.append(os.memfd_create('x'))\n"
        "    os.write(files[-1], bytes(2**23))\nprint('escaped')",
        {"program_error"},
    ),
    "10 GB of shared memory": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\n"
        "for _ in range(160):\n    number = libc.shmget(0, 2**26, 0o1600)\n    if number < 0: break\n"
        "    place = libc.shmat(number, None, 0)\n    ctypes.memset(place, 1, 2**26)\n"
        "    libc.shmdt(ctypes.c_void_p(place))\n    print('escaped')",
        {"ok"},
    ),
    "10 GB of files": (
        "for i in range(10240): open(str(i), 'wb').write(bytes(2**20))\nprint('escaped')",
        {"file_limit"},
    ),
    "endless output": ("while True: print('x' * 1000)", {"output_limit"}),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"output_limit"}),
    "endless loop": ("while True: pass", {"time_limit"}),
    "endless sleep": ("import time\ntime.sleep(10**6)", {"time_limit"}),
    "ignores all signals": (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: pass",
        {"time_limit", "program_killed"},
    ),
    "kill the parent": (
        "import os, signal\nfor n in (2, 15, 9, 19): os.kill(os.getppid(), n)\nprint('alive')",
        {"ok"},
    ),
    "kill the scorer": (
        "import os\nos.kill({scorer}, 9)\nprint('escaped')",
        {"program_error"},
    ),
    "kill everything": ("import os\nos.kill(-1, 9)\nprint('alive')", _ENDED - {"time_limit"}),
    "stop itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"time_limit"}),
    "ptrace the parent": (
        "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print('escaped')",
        {"ok"},
    ),
    "new user namespace": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('escaped')",
        {"ok"},
    ),
    "mount": (
        "import ctypes\n"
        "if ctypes.CDLL(None).mount(b'tmpfs', b'/usr', b'tmpfs', 0, None) == 0: print('escaped')",
        {"ok"},
    ),
    "symlink escape": (
        "import os\nos.symlink({folder!r}, 'out')\nos.symlink('/', 'root')\n"
        "open('out/x', 'w').write('escaped')\nprint('escaped')",
        {"program_error"},
    ),
    "leave through ..": (
        "import os\nfd = os.open('/', os.O_RDONLY)\nfor _ in range(50): os.chdir('..')\n"
        "print('escaped' if os.path.exists({secret!r}[1:]) else '')",
        {"ok"},
    ),
    "stay behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.closerange(0, 64); time.sleep(1000)\n    os._exit(0)\nprint('done')",
        {"ok"},
    ),
}


def main() -> None:
    """Run the list as this user and, as root, as an ordinary user; then many programs at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=0, help="number of programs at once")
    parser.add_argument("--workers", type=int, default=2, help="scoring processes for them")
    parser.add_argument(
        "--python", default="/usr/bin/python3", help="a Python that an ordinary user can start"
    )
    arguments = parser.parse_args()
    user = "root" if os.getuid() == 0 else f"user {os.getuid()}"
    mode = isolation_mode()
    if mode is None:
        sys.exit("programs cannot be isolated on this machine")
    bad = attack_all(f"{user}, {mode}")
    if arguments.programs:
        bad += many_at_once(arguments.programs, arguments.workers)
    if os.getuid() == 0:
        bad += as_ordinary_user(arguments.python)
    print("all attacks contained" if not bad else f"NOT CONTAINED: {bad}")
    sys.exit(bool(bad))


def attack_all(title: str) -> int:
    """Run every attack once; return how many were not contained."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket() as server,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        os.chmod(folder, 0o777)
        home, secret = Path.home(), Path(folder) / "secret"
        secret.write_text("secret")
        server.bind(("127.0.0.1", 0))
        server.listen()
        unix.bind(f"\0check-sandbox-{os.getpid()}")
        unix.listen()
        words = {
            "port": server.getsockname()[1],
            "abstract": f"check-sandbox-{os.getpid()}",
            "secret": str(secret),
            "file_at_home": str(next(filter(Path.is_file, home.glob("*")), secret)),
            "home": str(home),
            "folder": folder,
            "scorer": os.getpid(),
        }
        bad = 0
        for name, (code, possible) in (TINY | ATTACKS).items():
            for word, value in words.items():
                code = code.replace("{" + word + "}", str(value)).replace("{" + word + "!r}", repr(value))
            bad += attack(title, name, code, possible)
            if bad and name in TINY:
                sys.exit(f"{name}: not contained, so the larger attacks are not tried")
        if sorted(os.listdir(folder)) != ["secret"]:
            print("FILES WERE WRITTEN:", os.listdir(folder))
            bad += 1
    return bad


def attack(title: str, name: str, code: str, possible: set[str]) -> int:
    """Run one attack; return 1 if it was not contained."""
    before, started = nested_processes(), time.monotonic()
    with closing(run_program(code, [{"stdin": ""}], limits=LIMITS)) as outcomes:
        outcome = next(outcomes)
    seconds = time.monotonic() - started
    left = left_behind(before)
    contained = outcome.status in possible and "escaped" not in outcome.output and not left
    print(
        f"{title}: {name:28} {outcome.status:15} {seconds:5.1f} s  {'contained' if contained else 'ESCAPED'}"
        f"{'' if contained else f' {outcome} left: {left}'}",
        flush=True,
    )
    return not contained


def nested_processes() -> set[int]:
    """Return the processes of this machine that have a process namespace below that of this script."""
    found, depth = set(), 0
    for pid in ["self", *filter(str.isdigit, os.listdir("/proc"))]:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        numbers = next((len(line.split()) for line in lines if line.startswith("NSpid")), 0)
        depth = numbers if pid == "self" else depth
        if numbers > depth:
            found.add(int(pid))
    return found


def left_behind(before: set[int]) -> list[int]:
    """Return processes that an attack left: children of this script, or new ones in namespaces.

    The kernel ends a namespace a moment after its first process is killed.
    """
    end = time.monotonic() + 5
    while (left := {*descendants(), *(nested_processes() - before)}) and time.monotonic() < end:
        time.sleep(0.02)
    return sorted(left)


def descendants() -> list[int]:
    """Return the processes that this one started, and theirs, as far as they are left."""
    parents = {}
    for entry in os.listdir("/proc"):
        try:
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except (ValueError, OSError):
            continue
    found: list[int] = []
    front = {os.getpid()}
    while front := {pid for pid, parent in parents.items() if parent in front}:
        found += front
    return sorted(found)


def many_at_once(count: int, workers: int) -> int:
    """Score so many programs at once, a tenth of them harmful; return 1 if a status is wrong."""
    task = load_task("programs", train=count, test=0)
    hostile = [
        "while True: pass",
        "x = bytearray(10 * 2**30)",
        "while True: print('x' * 1000)",
        "import os\nos.abort()",
    ]
    limits = {"time_s": 1.0}
    pairs: list[tuple[str, Problem]] = []
    for i, problem in enumerate(task.train):
        code = hostile[i // 10 % 4] if i % 10 == 0 else None
        answer = f'{{"tests": {problem.answer}, "time_s": {limits["time_s"]}}}'
        text = problem.solution or "" if code is None else f"```python\n{code}\n```"
        pairs.append((text, Problem(problem.id, problem.prompt, answer)))
    with make_scorer("code", workers=workers, deadline_s=30.0) as scorer:
        scorer.score_all(pairs[1:2])
        before, started = os.times(), time.monotonic()
        scores = scorer.score_all(pairs)
        seconds = time.monotonic() - started
        right = [score.value for i, score in enumerate(scores) if i % 10]
        started = time.monotonic()
        scorer.score_all([pair for i, pair in enumerate(pairs[: max(count // 5, 10)]) if i % 10])
        plain = len([i for i in range(max(count // 5, 10)) if i % 10]) / (time.monotonic() - started)
    after = os.times()
    processor = after.children_user - before.children_user + after.children_system - before.children_system
    print(
        f"{count} programs at once, {count // 10} of them harmful, {workers} workers: {seconds:.0f} s, "
        f"{count / seconds:.1f} programs/s; harmless alone: {plain:.1f} programs/s; "
        f"processor time {processor:.0f} s; statuses {dict(Counter(score.status for score in scores))}; "
        f"load {os.getloadavg()[0]:.1f}; processes left: {len(descendants())}",
        flush=True,
    )
    return int(min(right) < 1.0 or bool(descendants()))


def as_ordinary_user(python: str) -> int:
    """Run the list again as the user `nobody`, in a copy of the package that this user can read."""
    if not Path(python).exists():
        print(f"as an ordinary user: not run, because there is no {python}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).resolve().parents[1]
        os.chmod(folder, 0o755)
        subprocess.run(["cp", "-r", str(root / "mugrpo_jax"), folder], check=True)
        script = Path(folder) / "scripts" / "check_sandbox.py"
        script.parent.mkdir()
        script.write_bytes(Path(__file__).read_bytes())
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        ended = subprocess.run(
            [python, str(script)], user=ORDINARY, group=ORDINARY, extra_groups=[], cwd="/", timeout=600
        )
    return int(ended.returncode != 0)


if __name__ == "__main__":
    main()
