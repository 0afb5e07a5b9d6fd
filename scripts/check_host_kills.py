"""Kill a random process of a tiny run again and again, continue on other hosts, and compare the end.

    python scripts/check_host_kills.py [--objectives mu_grpo,p3o,m2po] [--rounds 2] [--kills 3] [--seed 0]

A round: a run of 4 processes with 2 devices each loses a random process to SIGKILL at a random moment,
`--kills` times; each time the same command continues it. Then 2 processes with 4 devices each continue and
lose one. Then 1 process with 8 devices ends the run. The end must be that of a run without kills.

After each kill, every other process must end within seconds, with status 75 and one line of ours. A process
that is killed before all have found each other never came: the others say so at their time limit, also
with status 75.

`--loops N` does N kills first on processes that only exchange arrays, which is quick.

Prints one line per kill, one table row per round, and exits with 1 if anything is wrong.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import imitated_hosts as hosts

GONE = 75
WITHIN_S = 5.0  # after a kill, the others end within this time; on an idle machine in less than a second
HOST_TIMEOUT_S = 60
TOLERANCE = 1e-5  # sums over devices are taken in another order, so float32 differs in its last digits
LONGEST_S = 900.0  # a machine may be busy


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objectives", default="mu_grpo")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--loops", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    chance, rows, right = random.Random(arguments.seed), [], True
    objectives = arguments.objectives.split(",") if arguments.objectives else []
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        hosts.prepare(work)
        times = [loop_kill(work / f"loop-{number}", number % 2, chance) for number in range(arguments.loops)]
        if times:
            wrong = sum(took is None for took in times)
            slowest = max((took for took in times if took is not None), default=0.0)
            print(
                f"{len(times)} kills of exchanging processes: {wrong} wrong, slowest end {slowest:.2f} s",
                flush=True,
            )
            right = wrong == 0
        for objective in objectives:
            override = f"objective.name={objective}"
            reference = work / f"{objective}-undisturbed"
            printed = undisturbed(reference, override)
            for number in range(arguments.rounds):
                good, row = one_round(reference, number, override, printed, arguments.kills, chance)
                right &= good
                rows.append(f"| {objective} | {number} | {row} |")
    print("| objective | round | kills | before the start | slowest end | same tokens | weights differ by |")
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")
    return int(not right)


def undisturbed(out: Path, override: str) -> int:
    """Run once without kills, and return how much process 0 printed, which serves as a clock."""
    shutil.rmtree(out, ignore_errors=True)
    codes = hosts.wait(hosts.start(out, hosts.flags(4), 2, override, timeout=HOST_TIMEOUT_S), LONGEST_S)
    if any(codes):
        raise SystemExit(f"the run without kills failed: {codes}\n{hosts.log(out, 0).read_text()[-2000:]}")
    return hosts.log(out, 0).stat().st_size


LOOP = """
import sys, jax, numpy as np
from mugrpo_jax import distributed, models
with distributed.hosts(sys.argv[1], 2, int(sys.argv[2]), timeout_s=60):
    vote = distributed.Vote(models.make_mesh(fsdp=jax.device_count()))
    while True:
        float(vote(True))
        if int(sys.argv[2]) == 0:
            print("exchanged", flush=True)
"""


def loop_kill(out: Path, victim: int, chance: random.Random) -> float | None:
    """Kill one of two exchanging processes; return when the other ended, or None if it ended wrongly."""
    where = f"localhost:{hosts.free_port()}"
    running = []
    for i in range(2):
        with hosts.log(out, i).open("wb") as shown:
            command = [sys.executable, "-c", LOOP, where, str(i)]
            running.append(
                subprocess.Popen(command, env=hosts.environment(out, 2), stdout=shown, stderr=shown)
            )
    end = time.monotonic() + LONGEST_S
    while "exchanged" not in hosts.log(out, 0).read_text() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(chance.uniform(0.0, 0.5))
    running[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    status = hosts.wait(running, 60)[1 - victim]
    took = time.monotonic() - began
    text = hosts.log(out, 1 - victim).read_text()
    good = status == GONE and text.count(f"mugrpo: another host is gone: process {victim}, ") == 1
    if not good or "Terminating process" in text:
        print(f"process {victim} killed, the other ended with {status}:\n{text[-1500:]}", flush=True)
        return None
    return took


def one_round(
    reference: Path, number: int, override: str, printed: int, kills: int, chance: random.Random
) -> tuple[bool, str]:
    out = reference.with_name(f"{reference.name}-killed-{number}")
    shutil.rmtree(out, ignore_errors=True)
    absent, slowest, right = 0, 0.0, True
    for processes in [4] * kills + [2]:
        good, came, took = one_kill(out, processes, override, printed, chance)
        right &= good
        absent, slowest = absent + (not came), max(slowest, took)
    codes = hosts.wait(hosts.start(out, [hosts.Place()], 8, override), LONGEST_S)
    if any(codes):
        print(hosts.log(out, 0).read_text()[-2000:])
        return False, f"{kills + 1} | the last process failed: {codes} | | |"
    same, apart = hosts.difference(reference, out)
    right &= same and apart <= TOLERANCE
    said = "yes" if same else "NO"
    return right, f"{kills + 1} | {absent} | {slowest:.1f} s | {said} | {apart:.1e}"


def one_kill(
    out: Path, processes: int, override: str, printed: int, chance: random.Random
) -> tuple[bool, bool, float]:
    """Kill one process; return whether the others ended as they should, whether all had come, and when."""
    running = hosts.start(out, hosts.flags(processes), 8 // processes, override, timeout=HOST_TIMEOUT_S)
    victim, moment = chance.randrange(processes), chance.uniform(0.0, 0.6)
    end = time.monotonic() + LONGEST_S
    while hosts.log(out, 0).stat().st_size < moment * printed and time.monotonic() < end:
        if all(process.poll() is not None for process in running):
            break
        time.sleep(0.01)
    running[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    codes = hosts.wait(running, LONGEST_S)
    took = time.monotonic() - began
    texts = [hosts.log(out, i).read_text() for i in range(processes)]
    others = [i for i in range(processes) if i != victim]
    line = f"mugrpo: another host is gone: process {victim}, "
    if all(codes[i] == 0 for i in others):
        good, came = True, True  # the run was over before the kill
    elif any("did not come within" in texts[i] or "not reached within" in texts[i] for i in others):
        came = False
        good = all(codes[i] == GONE for i in others) and took < HOST_TIMEOUT_S + 30
    else:
        came = True
        good = took < WITHIN_S and all(codes[i] == GONE and texts[i].count(line) == 1 for i in others)
    clean = not any("Terminating process" in text or "Traceback" in text for text in texts)
    print(
        f"{out.name}: process {victim} of {processes} killed at {moment:.0%} of the output; the others "
        f"ended after {took:.1f} s with {[codes[i] for i in others]}{'' if good and clean else ' WRONG'}",
        flush=True,
    )
    if not (good and clean):
        print(*[text[-1500:] for text in texts], sep="\n----\n")
    return good and clean, came, took if came else 0.0


if __name__ == "__main__":
    sys.exit(main())
