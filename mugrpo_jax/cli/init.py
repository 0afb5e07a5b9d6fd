"""`mugrpo init`: write a starting config for a model and a task."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mugrpo_jax.cli import arguments as shared

# The tiny model reads digits and signs only; these tasks have problems for it.
_TINY_TASKS: dict[str, dict[str, Any]] = {
    "arithmetic": {"difficulty": 2, "slips": 0.35, "train": 8192, "test": 256},
    "chains": {"difficulty": 6, "compact": True, "slips": 0.35, "train": 8192, "test": 256},
}
# Usual names of the columns in a user's own data; the first that is there and is a text is taken.
_QUESTIONS = ("question", "problem", "prompt", "query", "input")
_ANSWERS = ("answer", "target", "label", "output")
_HOLDOUT = 256  # problems of a user's own data that measure accuracy; at most a tenth of all
_SIZES: dict[str, dict[str, Any]] = {
    "sampling": {"max_prompt_tokens": 512, "max_response_tokens": 1024},
    "batch": {
        "prompts_per_update": 64,
        "responses_per_prompt": 8,
        "updates_per_stage": 256,
        "stages": 4,
        "tokens_per_micro_batch": "auto",
    },
    "objective": {"name": "mu_grpo"},
    "optimizer": {"learning_rate": 1e-6},
    "warm_start": {"updates": 0},
    "evaluation": {"problems": 256},
    "checkpoints": {"every": 64},
}


def add(commands: shared.Commands) -> None:
    """Add `mugrpo init` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "init",
        run,
        help="write a starting config for a model and a task",
        more="The file has the keys that most runs set, each with its meaning. A file that exists is never "
        "overwritten.",
        example="mugrpo init mine.yaml --model Qwen/Qwen2.5-1.5B-Instruct --task gsm8k",
    )
    parser.add_argument("file", type=shared.local_path, metavar="FILE", help="the config file to write")
    parser.add_argument(
        "--model",
        default="tiny",
        help="a Hub name, a Hugging Face folder, a .gguf file, smollm2-135m, or tiny (default: tiny)",
    )
    parser.add_argument(
        "--task",
        default="arithmetic",
        help="the name of a task, or your own problems: a .jsonl or .parquet file, or hub:OWNER/NAME:SPLIT "
        "(default: arithmetic)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo init` with the parsed arguments."""
    from mugrpo_jax import config as configs
    from mugrpo_jax import files
    from mugrpo_jax.config.commented_config import commented_yaml

    path: Path = arguments.file
    values = starting_values(arguments.model, arguments.task)
    configs.build(configs.RunConfig, values, str(path))
    if not path.parent.is_dir():
        raise configs.ConfigError(f"{path}: the folder {path.parent} does not exist; make it first")
    text = f"{_head(arguments)}\n{commented_yaml(values)}\n"
    if not files.create(path, text.encode()):
        raise configs.ConfigError(f"{path}: exists already and is not overwritten; name another file")
    print(f"{path}: written. Edit it, then check it with: mugrpo train {shlex.quote(str(path))} --dry-run")


def starting_values(model: str, task: str) -> dict[str, Any]:
    """Return the keys of a starting config, as nested dicts."""
    if model == "tiny":
        return _tiny_values(task)
    return {"model": {"source": model}, "task": _task(task), **_SIZES}


def _tiny_values(task: str) -> dict[str, Any]:
    """Return the values of the config `arithmetic` with this task."""
    import yaml

    from mugrpo_jax.config import ConfigError, shipped_configs

    own = task.endswith((".jsonl", ".parquet"))
    if task not in _TINY_TASKS and not own:
        raise ConfigError(
            f"--task {task}: the tiny model reads only digits and + - = , ; so possible are "
            f"{', '.join(_TINY_TASKS)} and a .jsonl or .parquet file of such problems; or name another "
            "--model"
        )
    values = yaml.safe_load(shipped_configs.files()["arithmetic"].read_text(encoding="utf-8"))
    values["task"] = _task(task) if own else {"name": task, "options": _TINY_TASKS[task]}
    if own and "solution" not in values["task"]["options"]["columns"]:
        values["warm_start"]["updates"] = 0
    values["sampling"]["max_prompt_tokens"] = 16
    return values


def _task(task: str) -> dict[str, Any]:
    """Return the section `task` for the name of a task or a source of problems."""
    from mugrpo_jax import tasks
    from mugrpo_jax.config import ConfigError

    if task.startswith("hub:") or task.endswith((".jsonl", ".parquet")):
        if not task.startswith("hub:") and not Path(task).is_file():
            raise ConfigError(f"--task {task}: no such file")
        there = [] if task.startswith("hub:") else tasks.first_columns(task)
        # In the format of Alpaca, `input` is only the second part of a question.
        questions = [name for name in _QUESTIONS if name != "input" or "instruction" not in there]
        question, answer = (_column(there, names) for names in (questions, _ANSWERS))
        columns = {"template": f"{{{question}}}", "answer": answer}
        if "solution" in there:
            columns["solution"] = "solution"
        most = 10 * _HOLDOUT if task.startswith("hub:") else tasks.count_problems(task)
        holdout = {"holdout": min(_HOLDOUT, most // 10)} if most >= 10 else {}
        options = {"train": task, **holdout, "columns": columns, "reward": "math"}
        return {"name": "dataset", "options": options}
    known = [*tasks.GENERATORS, *(name for name, preset in tasks.PRESETS.items() if preset.train)]
    if task not in known:
        raise ConfigError(
            f"--task {task}: unknown; possible: {', '.join(known)}, a .jsonl or .parquet file, or "
            "hub:OWNER/NAME:SPLIT"
        )
    return {"name": task}


def _column(there: Sequence[str], names: Sequence[str]) -> str:
    """Return the first of the usual names that the data has; the most usual one if it has none."""
    return next((name for name in names if name in there), names[0])


def _head(arguments: argparse.Namespace) -> str:
    name = shlex.quote(str(arguments.file))
    lines = [
        f"# A starting config for {arguments.model} on {arguments.task}, written by `mugrpo init`.",
        f"#   mugrpo train {name} --dry-run    check everything and print the plan",
        f"#   mugrpo train {name}              train; if the run stops, the same command continues",
        "# All other keys have defaults: `mugrpo config` lists every key with its meaning.",
    ]
    if "." in arguments.task or ":" in arguments.task:
        lines += [
            "# In task.options.columns, name the columns of your data. A template can also be a list of chat",
            "# messages: [{role: user, content: '{question}'}]. `extra: [NAME]` gives your reward a column.",
            "# holdout takes problems out of the data to measure accuracy; test names a file instead.",
        ]
    return "\n".join(lines) + "\n"
