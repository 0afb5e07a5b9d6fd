"""Start a tiny run of two stages through every imitated launcher, and compare it with a run of one process.

    python scripts/check_launch.py [--work FOLDER] [--only NAME]

Prints one row per launcher: what the program found, the exit statuses, and the largest difference between the
weights at the end and those of one process. Takes some minutes; exits with 1 if a row is wrong. One row runs
in a network namespace without IPv6 (`unshare`), and is left out where that is not permitted.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import imitated_hosts as hosts

TOLERANCE = 1e-5  # sums over devices are taken in another order, so float32 differs in its last digits
ROWS: dict[str, tuple[Callable[[], list[hosts.Place]], int]] = {
    "one process": (lambda: [hosts.Place()], 8),
    "--coordinator": (lambda: hosts.flags(2), 4),
    "JAX's variables": (lambda: hosts.variables(4), 2),
    "SLURM, 1 task per node, 2 nodes": (lambda: hosts.slurm(2, 1), 4),
    "SLURM, 1 task per device": (lambda: hosts.slurm(1, 4), 1),
    "SLURM, 2 tasks per node, 2 nodes": (lambda: hosts.slurm(2, 2), 2),
    "Open MPI 4, 2 nodes": (lambda: hosts.open_mpi(2, 4), 4),
    "Open MPI 5, 1 node": (lambda: hosts.open_mpi(2, 5), 4),
    "GKE, TPU slice of 2 hosts": (lambda: hosts.gke(1, 2), 4),
    "GKE, 2 TPU slices": (lambda: hosts.gke(2, 1), 4),
    "TPU VM, 2 hosts": (lambda: hosts.flags(2), 4),  # replaced below, by hosts with metadata servers
    "IPv4 only": (lambda: hosts.flags(2, "127.0.0.1"), 4),
}
NO_IPV6 = "ip link set lo up && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", help="only rows whose name contains this; `one process` always runs")
    parser.add_argument("--quick", action="store_true", help="only connect and print the plan; no run")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        hosts.prepare(work)
        if not arguments.inside:
            print("| launcher | what process 0 printed | exit | same tokens | weights differ by |")
            print("|---|---|---|---|---|")
        names = [name for name in ROWS if name == "one process" or (arguments.only or "") in name]
        chosen = [arguments.only] if arguments.inside else names
        right = [row(name, work, quick=arguments.quick, inside=arguments.inside) for name in chosen]
        return int(not all(right))


def row(name: str, work: Path, *, quick: bool, inside: bool) -> bool:
    """Run and print one row; return whether it is right."""
    if name == "IPv4 only" and not inside:
        return without_ipv6(name, work, quick=quick)
    out = work / "".join(letter if letter.isalnum() else "-" for letter in name)
    shutil.rmtree(out, ignore_errors=True)
    places, devices = ROWS[name]
    with hosts.tpu_vm(2) if name.startswith("TPU VM") else contextlib.nullcontext(places()) as found:
        codes = hosts.wait(hosts.start(out, found, devices, *["--dry-run"] * quick), 400)
    shown = hosts.log(out, 0).read_text()
    line = next((text for text in shown.splitlines() if text.startswith("hosts: ")), shown[-300:])
    if any(codes) or not line.startswith(f"hosts: {len(codes)} process"):
        print(f"| {name} | `{line}` | {codes} | – | – |", flush=True)
        return False
    if quick:
        print(f"| {name} | `{line}` | {codes} | – | – |", flush=True)
        return True
    same, apart = (True, 0.0) if name == "one process" else hosts.difference(work / "one-process", out)
    print(f"| {name} | `{line}` | {codes} | {'yes' if same else 'NO'} | {apart:.1e} |", flush=True)
    return same and apart <= TOLERANCE


def without_ipv6(name: str, work: Path, *, quick: bool) -> bool:
    if subprocess.run(["unshare", "-rn", "sh", "-c", NO_IPV6], capture_output=True).returncode:
        print(f"| {name} | left out: `unshare -rn` is not permitted here | | | |", flush=True)
        return True
    again = [sys.executable, __file__, "--inside", "--only", name, "--work", str(work), *["--quick"] * quick]
    command = ["unshare", "-rn", "sh", "-c", f'{NO_IPV6} && exec "$@"', "sh", *again]
    return subprocess.run(command, env=os.environ).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
