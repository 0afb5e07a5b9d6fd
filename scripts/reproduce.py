#!/usr/bin/env python3
"""Reproduce the paper's comparison and the staleness law on one GPU.

    python scripts/reproduce.py run --runs runs/reproduce --jobs 4 --seconds 560    # until it says "all done"
    python scripts/reproduce.py grid --runs runs/reproduce --jobs 4 --seconds 560   # likewise
    python scripts/reproduce.py collect --runs runs/reproduce    # small files into docs/results/
    python scripts/reproduce.py draw                             # tables and figures from them

`run` compares fresh data with stale data, with and without relaxed clipping and veto. Every arm starts from
the same warm-started SmolLM2-135M, sees the same prompts and takes the same number of updates.
`grid` searches for the largest stable learning rate of each µ, from the same start.
With `--config` both train another model or task, such as configs/experiments/smollm2_gsm8k.yaml; choose
`--mu` to fit it.

Both work through their queue until the time is over. Then they stop the current runs with SIGTERM; the next
call continues them. Config keys such as `optimizer.learning_rate=3e-6` may be anywhere among the arguments.
With `--jobs` above 1 several runs share the GPU; then only their accuracies are valid, not their times.
`collect` and `draw` need no GPU.
"""

import argparse
import dataclasses
import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reproduce_collect import collect, say
from reproduce_queue import ROOT, Queue, Work

from mugrpo_jax import config as configs

CONFIG = ROOT / "configs" / "experiments" / "smollm2_word_problems.yaml"
RESULTS = ROOT / "docs" / "results"
HEAVY = ("checkpoints", "rollouts")  # deleted after a run: one checkpoint here is 2.7 GB

RELAXED = ["objective.name=mu_grpo"]  # with the knobs of the config, such as another ratio of the veto
OTHER = ["objective.knobs={}"]  # behind the name of another objective, which does not have these knobs
FRESH = {"grpo-mu4": 4}  # arms with a µ of their own
ARMS = {
    "grpo-mu4": ["objective.name=grpo", *OTHER],
    "mu_grpo": RELAXED,
    "grpo-stale": ["objective.name=grpo", *OTHER],
    "relaxed-no-veto": [*RELAXED, "objective.knobs.veto=none"],
    "mu_grpo-trigger": [*RELAXED, "objective.knobs.veto=trigger"],
    "mu_grpo-suffix_non_trigger": [*RELAXED, "objective.knobs.veto=suffix_non_trigger"],
    "mu_grpo-sequence": [*RELAXED, "objective.knobs.veto=sequence"],
    "m2po": ["objective.name=m2po", *OTHER],
    "p3o": ["objective.name=p3o", *OTHER, "batch.equal_groups=keep"],  # it also uses equal groups
    # The rate is ten times that of the chains config: adapters need larger steps than all weights.
    "mu_grpo-lora": [*RELAXED, "lora.rank=16", "lora.alpha=32", "optimizer.learning_rate=5e-5"],
}
PAPER = [arm for arm in ARMS if arm != "mu_grpo-lora"]


def main() -> int:
    """Run the command; the exit status is 1 if a run failed."""
    given = sys.argv[1:]
    overrides = [text for text in given if "=" in text and not text.startswith("-")]
    arguments = _parser().parse_args([text for text in given if text not in overrides])
    if arguments.command == "collect":
        collect(arguments.runs, arguments.out)
        return 0
    if arguments.command == "draw":
        from reproduce_draw import draw

        folders = {"fresh": arguments.fresh, "fitted": arguments.fitted}
        draw(arguments.results, list(ARMS), level=arguments.level, **folders)
        return 0
    try:
        return _train(arguments, overrides)
    except configs.ConfigError as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="train the arms until the time is over")
    run.add_argument("--arms", nargs="+", choices=ARMS, default=PAPER, help="train these, in this order")
    run.add_argument("--seeds", nargs="+", type=int, default=[0], help="all arms of the first come first")
    run.add_argument(
        "--queue", nargs="+", type=_queued, metavar="ARM:SEED[:RATE]", help="train exactly these"
    )
    run.add_argument("--updates", type=int, default=4096, help="updates of each arm")
    run.add_argument("--mu", type=int, default=1024, help="updates per stage of the stale arms")
    run.add_argument("--rates", nargs="+", type=float, help="learning rates (default: that of the config)")
    run.add_argument(
        "--replay",
        action="store_true",
        help="generate once per seed: all stale arms use the rollouts of the first one (a single stage)",
    )
    grid = commands.add_parser("grid", help="train the grid of the staleness law until the time is over")
    grid.add_argument("--mu", nargs="*", type=int, default=[16, 128, 512], help="µ of the GRPO runs")
    grid.add_argument("--protected-mu", nargs="*", type=int, default=[512], help="µ of the µ-GRPO runs")
    grid.add_argument(
        "--no-veto-mu", nargs="*", type=int, default=[], help="µ of the runs with a relaxed clip and no veto"
    )
    grid.add_argument(
        "--lags", nargs="+", type=int, default=[0], help="batch.lag L of all runs: S = L·µ + µ - 1"
    )
    grid.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[1e-6, 3e-6, 1e-5, 3e-5],
        help="all µ of the first rate come first",
    )
    grid.add_argument("--updates", type=int, default=512, help="updates of each run")
    grid.add_argument("--seeds", nargs="+", type=int, default=[0])
    for command in (run, grid):
        command.add_argument(
            "--config", type=lambda text: Path(text).resolve(), default=CONFIG, help="config of all runs"
        )
        command.add_argument("--model", default="smollm2-135m", help="model before the warm start")
        command.add_argument(
            "--start", type=Path, help="folder of runs whose warm start is used (default: --runs)"
        )
        command.add_argument("--jobs", type=int, default=1, help="runs at the same time")
        command.add_argument("--seconds", type=float, default=1e9, help="save and stop before this time")
        command.add_argument("--keep", action="store_true", help="keep checkpoints and rollouts after a run")
    gather = commands.add_parser("collect", help="summarise runs into small files")
    gather.add_argument("--out", type=Path, default=RESULTS)
    for command in (run, grid, gather):
        command.add_argument("--runs", type=Path, required=True, help="folder of all runs")
    draw = commands.add_parser("draw", help="print the tables and draw the figures")
    draw.add_argument("--results", type=Path, default=RESULTS)
    draw.add_argument(
        "--fresh", type=Path, help="another folder of results, whose runs with fresh data are added"
    )
    draw.add_argument(
        "--fitted", type=Path, help="another folder with a grid, whose limits predict the runs of this grid"
    )
    draw.add_argument(
        "--level",
        type=float,
        default=0.5,
        help="a run whose accuracy ends below this share of its best collapsed",
    )
    return parser


def _queued(text: str) -> tuple[str, int, float | None]:
    arm, seed, rate = [*text.split(":"), "", ""][:3]
    try:
        if arm in ARMS and text.count(":") <= 2:
            return arm, int(seed), float(rate) if rate else None
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}; possible: ARM:SEED[:RATE] with one of {', '.join(ARMS)}")


def _train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    runs = arguments.runs.resolve()
    queue = Queue(arguments.jobs, arguments.seconds, runs / "programs")
    settings = _arms(arguments) if arguments.command == "run" else _grid(arguments)
    begun = (arguments.start or runs).resolve()  # the folder with the warm start
    start = begun / "warm-start-export" / "model"
    works = [_work(runs / name, mu, arguments, [*keys, *overrides], start) for name, mu, keys in settings]
    if arguments.command == "run" and arguments.replay:
        works = _replays(works, arguments)
    keys = [f"model.source={arguments.model}", *overrides]
    if _warm_start(queue, begun, arguments.config, keys, start) and queue.run(works):
        if not arguments.keep:
            _drop_heavy(works)
        say(what="all done")
    if queue.failed:
        say(what="failed", runs=queue.failed)
    return 1 if queue.failed else 0


def _warm_start(queue: Queue, runs: Path, config: Path, overrides: list[str], model: Path) -> bool:
    """Make the model that every run starts from; False if it failed or there was no time to finish it."""
    tuned, exported = runs / "warm-start", model.parent
    tune = Work(tuned, ("sft", config, "--out", tuned, *overrides), updates=0)
    export = Work(exported, ("export", tuned, model, "--dtype", "float32"))
    _check_start(tuned, config, overrides)
    if not export.done.exists():
        shutil.rmtree(exported, ignore_errors=True)  # a killed export may have left files
    return queue.run([tune]) and queue.run([export])


def _check_start(tuned: Path, config: Path, overrides: list[str]) -> None:
    """Check that all runs of a folder start from one model; another task or model needs another folder."""
    if (tuned / "config.yaml").exists():
        there, here = configs.load(tuned / "config.yaml"), configs.load(config, overrides)
        differing = configs.differing_keys(_start(there), _start(here))
        if differing:
            sys.exit(f"{tuned}: made with another config: {'; '.join(differing)}; use another --runs")


def _start(config: configs.RunConfig) -> dict[str, Any]:
    """The settings that determine the model that runs start from."""
    whole = configs.to_dict(config)
    return {"model.source": config.model.source, "task": whole["task"], "warm_start": whole["warm_start"]}


Setting = tuple[str, int, list[str]]  # the folder's name, µ, config keys


def _arms(arguments: argparse.Namespace) -> Iterator[Setting]:
    chosen = arguments.queue or [
        (arm, seed, rate)
        for seed, rate, arm in itertools.product(arguments.seeds, arguments.rates or [None], arguments.arms)
    ]
    for arm, seed, rate in chosen:
        keys = [f"seed={seed}", *ARMS[arm]]
        if rate is not None:
            keys.append(f"optimizer.learning_rate={rate}")
        name = arm if rate is None else f"{arm}-lr{rate:g}"
        yield f"{name}-seed{seed}", FRESH.get(arm, arguments.mu), keys


def _grid(arguments: argparse.Namespace) -> Iterator[Setting]:
    """The runs of the grid. They evaluate few problems, but often, to see when a run collapses."""
    evaluation = ["evaluation.every=128", "evaluation.problems=256", "evaluation.samples=2"]
    sizes = {
        "grpo": arguments.mu,
        "relaxed-no-veto": arguments.no_veto_mu,
        "mu_grpo": arguments.protected_mu,
    }
    pairs = [(objective, mu) for objective, several in sizes.items() for mu in several]
    settings = itertools.product(arguments.seeds, arguments.rates, pairs, arguments.lags)
    for seed, rate, (objective, mu), lag in settings:
        named = ARMS["grpo-stale" if objective == "grpo" else objective]
        keys = [f"seed={seed}", *named, f"optimizer.learning_rate={rate}"]
        rare = f"checkpoints.every={arguments.updates}"  # only at a stop and at the end
        late, lagged = (f"-lag{lag}", [f"batch.lag={lag}"]) if lag else ("", [])
        name = f"law/{objective}-mu{mu}{late}-lr{rate:g}-seed{seed}"
        yield name, mu, [*keys, *lagged, *evaluation, rare]


def _work(folder: Path, mu: int, arguments: argparse.Namespace, keys: list[str], start: Path) -> Work:
    stages, rest = divmod(arguments.updates, mu)
    if rest:
        sys.exit(f"--updates: {arguments.updates} is not a multiple of µ = {mu}")
    sizes = [f"batch.updates_per_stage={mu}", f"batch.stages={stages}"]
    last_words = [f"model.source={start}", "warm_start.updates=0"]  # overrides are for the warm start too
    command = ("train", arguments.config, "--out", folder, *keys, *sizes, *last_words)
    return Work(folder, command, () if arguments.keep else HEAVY, arguments.updates)


def _replays(works: list[Work], arguments: argparse.Namespace) -> list[Work]:
    """Let all stale runs of a seed replay the rollouts of the first one, when it has finished.

    The rollouts of a stage depend on the seed and the start, which all runs of a seed share.
    """
    if arguments.updates != arguments.mu:
        sys.exit(f"--replay: needs a single stage; --updates {arguments.updates} is not --mu {arguments.mu}")
    sources: dict[str, Path] = {}
    shared = []
    for work in works:
        seed = work.folder.name.rpartition("-seed")[2]
        if work.folder.name.startswith(tuple(FRESH)):
            shared.append(work)
        elif seed not in sources:
            sources[seed] = work.folder
            shared.append(dataclasses.replace(work, dropped=()))  # its rollouts are needed until the end
        else:
            command = (*work.command, f"replay.run={sources[seed]}")
            shared.append(dataclasses.replace(work, command=command, dropped=HEAVY, after=sources[seed]))
    return shared


def _drop_heavy(works: list[Work]) -> None:
    for work in works:
        for part in HEAVY:
            shutil.rmtree(work.folder / part, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
