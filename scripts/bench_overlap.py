"""Measure what it saves to sample while training: one process against `train` and `sample` side by side.

    python scripts/bench_overlap.py [--stages 24] [--updates 8] [--lag 1] [--work LENGTH] [--rounds 3]
                                       [--longest 900]

Each process is pinned to one processor (`taskset`). The run in one process samples and trains in turn on
processor 0; side by side, the trainer has processor 0 and the sampler processor 1. A stage has `--updates`
updates. `--work` is the length of a loop in the reward, which the sampler computes. By default, it is chosen
so that sampling costs as much as training: two short runs with different lengths say how. The machine must be
idle otherwise.

Prints JSON lines: seconds of a run from its first to its last update, so without the start and the first
generation, and the seconds of sampling, updates and waiting; then the share of the time that is left, and
whether both ends are bit-identical.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from check_lag_kills import Round, ending, journal
from tiny_run import TINY_RUN

REWARD = """\
def short(text, problem):
    for _ in range({work}):  # the sampler also scores
        pass
    return 1.0 / (1 + len(text))
"""
LENGTHS = (10_000, 50_000)  # of the loop, in the runs that measure what it costs
SIZES = [
    "model.tiny.hidden_size=64",
    "model.tiny.num_layers=2",
    "model.tiny.intermediate_size=192",
    "warm_start.updates=0",
    "evaluation.problems=0",
    "checkpoints.every=1000000",
    "sampling.max_response_tokens=56",
    "sampling.slots=1",
    "sampling.prompts_per_shard=4",
    "batch.prompts_per_update=8",
    "batch.responses_per_prompt=8",
    "batch.tokens_per_micro_batch=512",
    "batch.length_multiple=32",
    "track_drift=false",
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=24)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--work", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=float, default=900.0)
    arguments = parser.parse_args()
    same = True
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "run.yaml").write_text(TINY_RUN)
        settings = [
            *SIZES,
            f"batch.lag={arguments.lag}",
            f"batch.updates_per_stage={arguments.updates}",
        ]
        make_reward(work, LENGTHS[0])
        for way in ("one", "apart"):  # compiles
            measured(work, f"first-{way}", way, [*settings, f"batch.stages={arguments.lag + 1}"], arguments)
        length = balanced(work, settings, arguments) if arguments.work is None else arguments.work
        make_reward(work, length)
        settings.append(f"batch.stages={arguments.stages}")
        for number in range(arguments.rounds):
            apart = measured(work, f"apart-{number}", "apart", settings, arguments)
            one = measured(work, f"one-{number}", "one", settings, arguments)
            equal = ending(work / f"one-{number}") == ending(work / f"apart-{number}")
            share = round(apart["seconds"] / one["seconds"], 3)
            print(json.dumps({"round": number, "share": share, "bit_identical": equal}), flush=True)
            same &= equal
    return int(not same)


def make_reward(work: Path, length: int) -> None:
    (work / "lag_rewards.py").write_text(REWARD.format(work=length))


def balanced(work: Path, settings: list[str], arguments: argparse.Namespace) -> int:
    """Return the length of the loop with which a stage costs as much to sample as to train on."""
    sampling, updating = [], []
    for length in LENGTHS:
        make_reward(work, length)
        name = f"costs-{length}"
        measured(work, name, "one", [*settings, f"batch.stages={arguments.lag + 9}"], arguments)
        records = journal(work / name)
        stages = [record["seconds"]["generate"] for record in records if record["kind"] == "stage"]
        updates = [record["seconds"]["update"] for record in records if record["kind"] == "update"]
        sampling.append(statistics.median(stages[arguments.lag + 1 :]))
        updating.append(arguments.updates * statistics.median(updates))
    slope = (sampling[1] - sampling[0]) / (LENGTHS[1] - LENGTHS[0])
    if slope <= 0:
        sys.exit(f"a longer loop did not take longer ({sampling} s): the machine is not idle; choose --work")
    length = max(round(LENGTHS[0] + (statistics.mean(updating) - sampling[0]) / slope), 0)
    costs = {"sampling": sampling, "updating": updating}
    print(json.dumps({"seconds_per_stage": costs, "lengths": LENGTHS, "chosen": length}), flush=True)
    return length


def measured(
    work: Path, name: str, way: str, settings: list[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    run = Round(work, work / name, way, settings, samplers=1)
    run.prefixes = [["taskset", "-c", "0"], ["taskset", "-c", "1"]]
    if (error := run.finish(time.monotonic() + arguments.longest)) is not None:
        raise SystemExit(error)
    records = journal(run.folder)
    updates = [record["seconds"] for record in records if record["kind"] == "update"]
    stages = [record["seconds"] for record in records if record["kind"] == "stage"]
    first = next(number for number, record in enumerate(records) if record["kind"] == "update")
    about = {
        "way": way,
        "stages": len(stages),
        "seconds": round(sum(record["seconds"]["elapsed"] for record in records[first + 1 :]), 2),
        "sampling": round(sum(s.get("generate", s.get("sampler/generate", 0.0)) for s in stages), 2),
        "updating": round(sum(s["update"] for s in updates[1:]), 2),
        "trainer_waited": [round(s["wait"], 2) for s in stages if "wait" in s],
    }
    logs = [json.loads(line) for path in run.folder.glob("samplers/*.jsonl") for line in path.open()]
    about["sampler_waited"] = [round(log["seconds"].get("wait/policy", 0.0), 2) for log in logs]
    print(json.dumps(about), flush=True)
    return about


if __name__ == "__main__":
    sys.exit(main())
