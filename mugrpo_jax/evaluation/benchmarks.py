"""Evaluate a model or checkpoint on the held-out problems of one or more tasks, for `mugrpo eval`."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import yaml

from mugrpo_jax import evaluation
from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import to_path
from mugrpo_jax.models.io.loading import LoadedModel, load_model
from mugrpo_jax.sampling import Request, Sampler, SamplingSettings, encode_prompt, plan_for_requests
from mugrpo_jax.sampling.generate_text import check_output, claim_output
from mugrpo_jax.sampling.requests import NO_RUN
from mugrpo_jax.setup.trained_model import checkpoint_step, is_run, trained_model
from mugrpo_jax.tasks import ANSWER_READERS, Problem, Task, load_reward, load_task, make_scorer


def named_tasks(names: Sequence[str], pairs: Sequence[str], out: Path) -> dict[Path, Task]:
    """Load tasks by name and return them by results file.

    Args:
      names: names for `load_task`.
      pairs: options for all tasks, `key=value`, or for one task, `TASK.key=value`.
      out: the results file of a single task; several tasks get `out` with their name before the suffix.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"--task {','.join(names)}: each task may be named once")
    options = _options(names, pairs)
    files = [out] if len(names) == 1 else [out.with_suffix(f".{name}{out.suffix}") for name in names]
    return {file: load_task(name, **options[name]) for file, name in zip(files, names)}


def _options(names: Sequence[str], pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each task; an option with a task's name overrides one for all tasks."""
    of_all: dict[str, Any] = {}
    of_one: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--option {pair}: expected key=value, such as difficulty=3")
        task, dot, rest = key.partition(".")
        if dot and task not in of_one:
            raise ValueError(f"--option {pair}: no --task {task}; possible: {', '.join(names)}")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ValueError(f"--option {pair}: {text!r} is not valid YAML") from None
        if dot:
            of_one[task][rest] = value
        else:
            of_all[key] = value
    return {name: of_all | named for name, named in of_one.items()}


def benchmark(
    name: str | Path,
    tasks: Mapping[Path, Task],
    *,
    step: int | None = None,
    best: bool = False,
    reward: str | None = None,
    problems: int | None = None,
    slots: int | None = None,
    **settings: Any,
) -> Iterator[evaluation.EvalResult]:
    """Evaluate a model on the held-out problems of tasks; yield one result per task.

    The same call resumes an interrupted evaluation. Arguments are checked before the first response.

    Args:
      name: a model for `load_model`, or the folder of a run.
      tasks: maps a results file (one JSON line per scored response) to a task; its `test` problems are used.
        The settings are stored beside each file; a call with other settings raises an error.
      step, best: the checkpoint of a run; see `checkpoint_step`.
      reward: name of a reward that replaces the tasks' own reward.
      problems: number of problems of each task; None takes all.
      slots: sequences decoded at once; None takes as many as fit.
      **settings: fields of `sampling.SamplingSettings`.
    """
    chosen = SamplingSettings(**settings)
    if is_run(name):
        step = checkpoint_step(to_path(name), step=step, best=best)
    elif step is not None or best:
        raise ConfigError(f"{name}: not the folder of a run; only runs have checkpoints to choose from")
    for out, task in tasks.items():
        check_output(out)
        load_reward(reward or task.reward)
        if not len(task.test):
            raise ValueError(f"task {task.name}: no held-out problems to evaluate")
    dtype = jnp.dtype(chosen.dtype)
    model = load_model(name, dtype=dtype) if step is None else trained_model(to_path(name), step, dtype=dtype)
    origin = {"model": str(name), "step": step, **dataclasses.asdict(chosen)}
    for out, task in tasks.items():
        claim_output(out, origin | _identity(task, reward, problems))
    for out, task in tasks.items():
        judge = reward or task.reward
        with make_scorer(judge) as scorer:
            yield evaluation.evaluate(
                task.test[:problems],
                _responses(model, chosen, task.name, slots),
                scorer,
                samples=chosen.samples,
                ks=sorted({1, chosen.samples}),
                out=out,
                name=task.name,
                answer_of=ANSWER_READERS.get(judge),
            )


def _identity(task: Task, reward: str | None, problems: int | None) -> dict[str, str]:
    """Return settings that identify the problems and the reward of a results file."""
    answers = "\n".join(f"{problem.id} {problem.answer}" for problem in task.test[:problems])
    return {
        "task": task.name,
        "reward": reward or task.reward,
        "answers_sha256": hashlib.sha256(answers.encode()).hexdigest(),
    }


def _responses(
    model: LoadedModel, settings: SamplingSettings, name: str, slots: int | None
) -> evaluation.Generate:
    """Return a `generate` for `evaluate` whose sampler is planned for the requests it gets."""

    def open_sampler(requests: list[Request]) -> Sampler:
        plan = plan_for_requests(model.config, requests, slots=slots, dtype=jnp.dtype(settings.dtype))
        return Sampler(model.model, model.params, plan)

    def tokens(problem: Problem) -> list[int]:
        return encode_prompt(model.tokenizer, problem.prompt)

    return evaluation.sampled_responses(open_sampler, tokens, model.tokenizer, settings, NO_RUN, title=name)
