"""`mugrpo eval`: sample responses to the held-out problems of tasks and score them."""

import argparse
from pathlib import Path

from mugrpo_jax.cli import arguments as shared

SETTINGS = (
    *("reward", "problems", "samples", "max_tokens", "temperature", "top_p"),
    *("seed", "dtype", "slots", "step", "best", "unsafe_sandbox"),
)


def add(commands: shared.Commands) -> None:
    """Add `mugrpo eval` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "eval",
        run,
        help="score a model on the held-out problems of tasks",
        more="Shows avg@k, pass@k and majority@k in percent with 95 % intervals for each task, and their "
        "average. The folder of a run brings its own task, options, reward and sampling settings. If the "
        "evaluation is interrupted, the same command resumes it.",
        example="mugrpo eval runs/first --best --samples 4 --out eval.jsonl",
    )
    parser.add_argument(
        "model",
        help="the folder of a run, a Hugging Face folder, a .gguf file, or a name such as smollm2-135m",
    )
    shared.add_checkpoint(parser)
    parser.add_argument(
        "--task",
        type=lambda text: text.split(","),
        metavar="TASK,TASK,...",
        help="a generator, a preset, or `dataset`; with several tasks, the average is shown too (default: "
        "the run's task)",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="key=value",
        help="an option for all tasks, or with TASK.key=value for one task; may be repeated; the "
        "other options of the run's task are those of the run",
    )
    parser.add_argument(
        "--reward", help="math, exact, code, or your own module:function (default: the run's, or the task's)"
    )
    parser.add_argument(
        "--problems", type=shared.at_least(1), help="number of problems of each task (default: all)"
    )
    parser.add_argument(
        "--samples", type=shared.at_least(1), help="responses per problem (default: as in the run, or 1)"
    )
    parser.add_argument(
        "--out",
        type=shared.local_path,
        required=True,
        metavar="FILE",
        help="file for the scored responses (JSON lines); statistics go to FILE.summary.json; of several "
        "tasks, each has its own files, with .TASK before the suffix, and FILE.summary.json has the average",
    )
    parser.add_argument(
        "--unsafe-sandbox",
        action="store_true",
        default=None,
        help="run the programs of code rewards without isolation where none is possible",
    )
    shared.add_sampling(parser, of_run=True)


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo eval` with the parsed arguments."""
    from mugrpo_jax import evaluation
    from mugrpo_jax.compiling.compile_cache import use_compile_cache
    from mugrpo_jax.config import ConfigError
    from mugrpo_jax.evaluation.benchmarks import benchmark, default_settings, named_tasks, run_config
    from mugrpo_jax.runs import progress
    from mugrpo_jax.setup.trained_model import chosen_step
    from mugrpo_jax.tasks import GENERATORS, PRESETS

    use_compile_cache()
    config = run_config(arguments.model)
    given = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name) is not None}
    settings = default_settings(config) | given
    if arguments.task is None and config is None:
        chosen_step(arguments.model)  # says what is wrong with a folder
        raise ConfigError(
            f"{arguments.model}: not the folder of a run; only a run has a task of its own; name a --task; "
            f"possible: {', '.join([*GENERATORS, 'dataset', *PRESETS])}"
        )
    tasks = named_tasks(arguments.task, arguments.option, arguments.out, config)
    results = []
    for file, result in zip(tasks, benchmark(arguments.model, tasks, **settings)):
        Path(f"{file}.summary.json").write_text(result.as_json() + "\n")
        progress.say_unscored(result.name, result.statuses, result.examples)
        results.append(result)
    if len(results) > 1:
        Path(f"{arguments.out}.summary.json").write_text(evaluation.average_as_json(results) + "\n")
    print(evaluation.as_table(results))
