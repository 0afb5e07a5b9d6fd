"""The command line: `mugrpo train | sft | ...`, thin shells around functions of the package.

Nothing heavy is imported before a command runs, so that `mugrpo --help` answers at once.
"""

import argparse
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mugrpo_jax.config import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors a user can mend are one line and exit code 2."""
    arguments = _parse(argv)
    logging.getLogger("absl").setLevel(logging.ERROR)  # checkpoints would tell of their every step
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where a user's own reward function lies
    from mugrpo_jax.runs.folder import Stopped

    try:
        arguments.run(arguments)
    except Stopped:
        return 0
    except KeyboardInterrupt:
        print("mugrpo: interrupted; the same command continues", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"mugrpo: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes the overrides only where they stand together; people write them anywhere.
    if rest and hasattr(arguments, "overrides") and not any(text.startswith("-") for text in rest):
        arguments.overrides = [*arguments.overrides, *rest]
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mugrpo",
        description="µ-GRPO for JAX: reinforcement learning for language models on very stale rollouts.",
        epilog="mugrpo COMMAND --help explains a command and gives an example.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_train,
        _add_sft,
        _add_generate,
        _add_eval,
        _add_rollouts,
        _add_replay,
        _add_export,
        _add_report,
        _add_plan,
    ):
        add(commands)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], *, help: str, more: str, example: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(f"{help[0].upper()}{help[1:]}. {more}", 80),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


# -- training


def _add_train(commands: Any) -> None:
    train = _command(
        commands,
        "train",
        _train,
        help="run, or continue, all stages of a config",
        more="Killed or stopped, the same command continues where it was. The plan is printed first.",
        example="mugrpo train configs/quickstart.yaml batch.stages=2 --out runs/first",
    )
    _config_arguments(train)
    _out_argument(train)
    _host_arguments(train)
    train.add_argument("--dry-run", action="store_true", help="print the plan, look at the data and stop")


def _add_sft(commands: Any) -> None:
    sft = _command(
        commands,
        "sft",
        _sft,
        help="only the supervised warm start of a config",
        more="`train` with the same --out continues from it.",
        example="mugrpo sft configs/quickstart.yaml warm_start.updates=500 --out runs/first",
    )
    _config_arguments(sft)
    _out_argument(sft)
    _host_arguments(sft)


def _add_replay(commands: Any) -> None:
    replay = _command(
        commands,
        "replay",
        _replay,
        help="optimise a stage of a run again without generating",
        more="It starts from the run's checkpoint before that stage (checkpoints.keep_stage_starts=true "
        "keeps them all), with the run's config and your changes to it.",
        example="mugrpo replay runs/first --stage 1 objective.name=grpo --out runs/first-grpo",
    )
    replay.add_argument("source", type=Path, metavar="RUN", help="the folder of the run")
    _override_arguments(replay)
    replay.add_argument("--stage", type=int, default=0, help="which stage, from 0 (default: 0)")
    replay.add_argument("--out", type=Path, required=True, help="the new run's folder")
    _host_arguments(replay)
    replay.add_argument("--dry-run", action="store_true", help="print the plan, look at the data and stop")


def _add_plan(commands: Any) -> None:
    plan = _command(
        commands,
        "plan",
        _plan,
        help="what a config will do and need, before anything runs",
        more="Updates, tokens, compiled programs, sampler, memory and disk on the devices of this machine; "
        "of a model, only its shape is read. With --topology everything is compiled for other devices, "
        "which need not be there: memory, FLOPs, messages, hours, and what to change if it does not fit.",
        example="mugrpo plan configs/quickstart.yaml --topology v5e:2x2",
    )
    _config_arguments(plan)
    plan.add_argument(
        "--topology",
        metavar="KIND:SHAPE",
        help="such as v5e:8x8, v5p:2x2x4, v6e:4x4 (chips), h100:8, h200:1, gpu:8, cpu:8",
    )
    plan.add_argument("--json", action="store_true", help="one JSON object; needs --topology")


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
    _override_arguments(parser)


def _override_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as batch.stages=2")


def _out_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="the run's folder (default: runs/NAME_OF_THE_CONFIG)")


def _host_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of a run on several hosts."""
    hosts = parser.add_argument_group(
        "several hosts", "the same command on each; SLURM, Open MPI and TPU slices need none of these"
    )
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, port of your choice")
    hosts.add_argument("--processes", type=int, metavar="N", help="how many there are")
    hosts.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    hosts.add_argument(
        "--host-timeout",
        type=float,
        default=100.0,
        metavar="SECONDS",
        help="how long to wait for the others, and for their next sign of life (default: 100)",
    )


def _hosts(arguments: argparse.Namespace) -> Any:
    """The context in which a command runs on all its hosts; the environment may name them too."""
    from mugrpo_jax import distributed

    return distributed.hosts(
        arguments.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        _integer("JAX_NUM_PROCESSES") if arguments.processes is None else arguments.processes,
        _integer("JAX_PROCESS_ID") if arguments.process is None else arguments.process,
        timeout_s=arguments.host_timeout,
    )


def _integer(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdigit():
        raise ValueError(f"environment variable {variable}: expected a number, got {text!r}")
    return None if text is None else int(text)


def _load(arguments: argparse.Namespace) -> "RunConfig":
    from mugrpo_jax import config as configs

    return configs.load(arguments.config, arguments.overrides)


def _folder(arguments: argparse.Namespace) -> Path:
    return arguments.out or Path("runs") / Path(arguments.config).stem


def _train(arguments: argparse.Namespace) -> None:
    with _hosts(arguments):
        _run(_load(arguments), _folder(arguments), dry=arguments.dry_run)


def _run(config: "RunConfig", folder: Path, *, dry: bool) -> None:
    import jax

    from mugrpo_jax.loop import stages
    from mugrpo_jax.loop.preflight import describe_data
    from mugrpo_jax.planning import check_memory, plan_run

    plan = plan_run(config)
    if jax.process_index() == 0:
        print(plan, flush=True)
        if dry:
            print(describe_data(config))
    if dry:
        return
    if plan.problem is not None or jax.default_backend() != "cpu":  # a CPU's memory has no hard end
        check_memory(plan)
    stages.train(config, folder)


def _sft(arguments: argparse.Namespace) -> None:
    from mugrpo_jax.loop import stages

    with _hosts(arguments):
        stages.warm_start(_load(arguments), _folder(arguments))


def _replay(arguments: argparse.Namespace) -> None:
    from mugrpo_jax import config as configs
    from mugrpo_jax.runs.folder import read_config

    replay = [f"replay.run={arguments.source.resolve()}", f"replay.stage={arguments.stage}"]
    with _hosts(arguments):
        read_config(arguments.source)  # a folder that is no run is named as such
        config = configs.load(arguments.source / "config.yaml", [*arguments.overrides, *replay])
        _run(config, arguments.out, dry=arguments.dry_run)


def _plan(arguments: argparse.Namespace) -> None:
    config = _load(arguments)
    if arguments.json and not arguments.topology:
        raise ValueError("--json: only a compiled plan has this form; name a --topology")
    if arguments.topology:
        _offline(arguments.topology)
    from mugrpo_jax.planning import compile_plan, plan_run

    if not arguments.topology:
        print(plan_run(config))
        return
    plan = compile_plan(config, arguments.topology, progress=not arguments.json)
    print(plan.as_json() if arguments.json else plan)


def _offline(topology: str) -> None:
    """Set jax up to compile for devices that are elsewhere; nothing may have used it before."""
    import jax

    kind, _, count = topology.partition(":")
    if kind == "cpu" and count.isdigit() and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", int(count))
    if kind not in ("gpu", "h100", "h200"):  # these are compiled for where they are
        jax.config.update("jax_platforms", "cpu")


# -- using a model


def _add_generate(commands: Any) -> None:
    generate = _command(
        commands,
        "generate",
        _generate,
        help="sample responses to the prompts of a file",
        more="One JSON object a line in (`prompt` text or `prompt_tokens`), one a response out. Interrupted, "
        "the same command continues.",
        example="mugrpo generate --model smollm2-135m --prompts in.jsonl --out out.jsonl --samples 8",
    )
    generate.add_argument(
        "--model", required=True, help="a Hugging Face folder, a .gguf file, or a name such as smollm2-135m"
    )
    generate.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="prompts, JSON lines")
    generate.add_argument("--out", type=Path, required=True, metavar="FILE", help="responses, JSON lines")
    generate.add_argument("--samples", type=int, default=1, help="responses per prompt (default: 1)")
    _sampling_arguments(generate, max_tokens=512)
    generate.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all")


def _add_eval(commands: Any) -> None:
    evaluate = _command(
        commands,
        "eval",
        _eval,
        help="score a model on the held-out problems of tasks",
        more="avg@k, pass@k and majority@k with confidence intervals, of each task and their average. "
        "Interrupted, it continues.",
        example="mugrpo eval runs/first --best --task arithmetic --option difficulty=3 --out eval.jsonl",
    )
    evaluate.add_argument(
        "model",
        help="the folder of a run, a Hugging Face folder, a .gguf file, or a name such as smollm2-135m",
    )
    _checkpoint_arguments(evaluate)
    evaluate.add_argument(
        "--task",
        required=True,
        type=lambda text: text.split(","),
        metavar="TASK,TASK,...",
        help="a generator, a preset, or `dataset`; of several, the average is shown too",
    )
    evaluate.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="key=value",
        help="an option of the tasks, or TASK.key=value of one of them; repeatable",
    )
    evaluate.add_argument("--reward", help="math, exact, or your own module:function (default: the task's)")
    evaluate.add_argument("--problems", type=int, help="only so many problems of each task (default: all)")
    evaluate.add_argument("--samples", type=int, default=1, help="responses per problem (default: 1)")
    evaluate.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="every scored response, JSON lines, with the summary in FILE.summary.json; several tasks have a "
        "file each, with .TASK before the suffix, and FILE.summary.json has their average",
    )
    _sampling_arguments(evaluate, max_tokens=512)


def _sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help=f"longest response (default: {max_tokens})"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="0 is greedy (default: 1, the model's own distribution)",
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus truncation; 1 keeps all")
    parser.add_argument("--seed", type=int, default=0, help="fixes every response (default: 0)")
    parser.add_argument("--slots", type=int, help="sequences decoded at once (default: as many as fit)")
    parser.add_argument("--dtype", help="bfloat16 or float32 (default: float32 on CPU, bfloat16 elsewhere)")


def _checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, help="the run's checkpoint after so many updates (default: newest)"
    )
    which.add_argument("--best", action="store_true", help="its checkpoint of best held-out accuracy")


def _generate(arguments: argparse.Namespace) -> None:
    from mugrpo_jax.sampling import generate_file

    names = ("samples", "max_tokens", "temperature", "top_k", "top_p", "seed", "dtype", "slots")
    written = generate_file(
        arguments.model,
        arguments.prompts,
        arguments.out,
        **{name: getattr(arguments, name) for name in names},
    )
    print(f"{written} responses written to {arguments.out}")


def _eval(arguments: argparse.Namespace) -> None:
    from mugrpo_jax import evaluation
    from mugrpo_jax.evaluation.benchmarks import benchmark, named_tasks
    from mugrpo_jax.runs import progress

    names = ("reward", "problems", "samples", "max_tokens", "temperature", "top_p", "seed", "dtype")
    settings = {name: getattr(arguments, name) for name in (*names, "slots", "step", "best")}
    tasks = named_tasks(arguments.task, arguments.option, arguments.out)
    results = []
    for file, result in zip(tasks, benchmark(arguments.model, tasks, **settings)):
        Path(f"{file}.summary.json").write_text(result.as_json() + "\n")
        progress.say_unscored(result.name, result.statuses, result.examples)
        results.append(result)
    if len(results) > 1:
        Path(f"{arguments.out}.summary.json").write_text(evaluation.average_as_json(results) + "\n")
    print(evaluation.as_table(results))


def _add_export(commands: Any) -> None:
    export = _command(
        commands,
        "export",
        _export,
        help="write a run's model as a Hugging Face folder",
        more="`transformers` loads it.",
        example="mugrpo export runs/first models/first --best --dtype bfloat16",
    )
    export.add_argument("source", type=Path, metavar="RUN", help="the folder of the run")
    export.add_argument("out", type=Path, help="the folder to make")
    _checkpoint_arguments(export)
    export.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32, as trained)")


def _export(arguments: argparse.Namespace) -> None:
    from mugrpo_jax.setup.trained_model import export

    export(arguments.source, arguments.out, step=arguments.step, best=arguments.best, dtype=arguments.dtype)
    print(f"{arguments.out}: written")


# -- looking at runs


def _add_rollouts(commands: Any) -> None:
    rollouts = _command(
        commands,
        "rollouts",
        _rollouts,
        help="what a run generated",
        more="Counts, lengths, rewards, finish reasons, scoring statuses, sample texts.",
        example="mugrpo rollouts runs/first --stage 0 --show 5 --reward 1:1",
    )
    rollouts.add_argument("source", type=Path, metavar="RUN", help="the folder of the run")
    rollouts.add_argument("--stage", type=int, help="one stage, from 0 (default: all)")
    rollouts.add_argument("--show", type=int, default=0, metavar="K", help="print K responses of each stage")
    rollouts.add_argument(
        "--reward", type=_interval, metavar="LOW:HIGH", help="only rewards from LOW to HIGH"
    )


def _interval(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(low or "-inf"), float(high or "inf")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected LOW:HIGH, such as 0.5:1") from None


def _rollouts(arguments: argparse.Namespace) -> None:
    from mugrpo_jax.report import describe_rollouts

    print(
        describe_rollouts(
            arguments.source, stage=arguments.stage, show=arguments.show, rewards=arguments.reward
        )
    )


def _add_report(commands: Any) -> None:
    report = _command(
        commands,
        "report",
        _report,
        help="a page about one run, or several side by side",
        more="One HTML file that needs nothing else: learning, everything against staleness, time, samples "
        "token by token, config. A run that is going on keeps RUN/report.html up to date by itself.",
        example="mugrpo report runs/first runs/first-grpo -o comparison.html",
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    report.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="the page, or with .png, .svg or .pdf one figure of the essentials "
        "(default: RUN/report.html, for several runs ./report.html)",
    )
    report.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="also write every figure there, as SVG and PNG"
    )


def _report(arguments: argparse.Namespace) -> None:
    from mugrpo_jax import report

    runs = [report.read_run(folder) for folder in arguments.runs]
    out = arguments.out or (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    report.write(runs, out, figures=arguments.figures)
    print("\n\n".join(report.summary(run) for run in runs), f"\n\nreport: {out}", sep="")


if __name__ == "__main__":
    sys.exit(main())
