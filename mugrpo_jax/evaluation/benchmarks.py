"""Evaluate a model or checkpoint on the held-out problems of one or more tasks, for `mugrpo eval`."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mugrpo_jax import evaluation
from mugrpo_jax.config import EnvironmentSection, RunConfig, to_dict
from mugrpo_jax.evaluation.fingerprints import code_fingerprint, problem_fingerprints
from mugrpo_jax.files import hold, to_path
from mugrpo_jax.models import Tokenizer
from mugrpo_jax.models.io.loading import LoadedModel
from mugrpo_jax.models.weights import weights_fingerprint
from mugrpo_jax.rollouts.conversations import Conversations
from mugrpo_jax.runs.run_folder import read_config
from mugrpo_jax.sampling import (
    Request,
    Sampler,
    SamplingSettings,
    encode_prompt,
    plan_for_requests,
    sampling_settings,
)
from mugrpo_jax.sampling.prompt_files import check_output, claim_output
from mugrpo_jax.sampling.requests import NO_RUN
from mugrpo_jax.sampling.sampler_plan import sampler_dtypes
from mugrpo_jax.setup.run_environment import open_conversations, turn_ends
from mugrpo_jax.setup.sizes import evaluation_settings
from mugrpo_jax.setup.trained_model import chosen_step, is_run, load_any_model
from mugrpo_jax.tasks import (
    ANSWER_READERS,
    CODE_REWARDS,
    FAILURES,
    REWARDS,
    Problem,
    Task,
    check_sandbox,
    load_environment,
    load_reward,
    load_task,
    make_scorer,
)

_TRIED = 8  # problems with which a reward is tried
_MEMORY_MB = 2048  # of a worker process of an environment


def run_config(name: str | Path) -> RunConfig | None:
    """Return the config of a run, from which an evaluation takes its defaults; None if it is no run."""
    return read_config(to_path(name)) if is_run(name) else None


def default_settings(run: RunConfig | None) -> dict[str, Any]:
    """Return how a run samples responses to held-out problems, as settings for `benchmark`."""
    if run is None:
        return {}
    held_out = evaluation_settings(run)
    names = ("samples", "max_tokens", "temperature", "top_p")
    sandbox = {"unsafe_sandbox": run.task.unsafe_sandbox, "environment": run.environment}
    sandbox["max_failed"] = run.task.max_failed
    return {name: getattr(held_out, name) for name in names} | sandbox


def named_tasks(
    names: Sequence[str] | None, pairs: Sequence[str], out: Path, run: RunConfig | None = None
) -> dict[Path, Task]:
    """Load tasks by name and return them by results file.

    Args:
      names: names for `load_task`; None takes the task of the run, which must be there.
      pairs: options for all tasks, `key=value`, or for one task, `TASK.key=value`.
      out: the results file of a single task; several tasks get `out` with their name before the suffix.
      run: config of the run that is evaluated. Its task keeps the run's options, unless `pairs` change them,
        and the run's reward.
    """
    names = [run.task.name] if names is None and run is not None else names or []
    if len(set(names)) < len(names):
        raise ValueError(f"--task {','.join(names)}: each task may be named once")
    options = _options(names, pairs)
    if run is not None and run.task.name in names:
        given = options[run.task.name]
        own = {
            key: value for key, value in run.task.options.items() if key != "holdout" or "test" not in given
        }
        options[run.task.name] = own | given
    files = [out] if len(names) == 1 else [out.with_suffix(f".{name}{out.suffix}") for name in names]
    tasks = {file: load_task(name, **options[name]) for file, name in zip(files, names)}
    if run is None or run.task.reward is None:
        return tasks
    mine, reward = run.task.name, run.task.reward
    if not isinstance(reward, str):
        reward = reward[0].name  # of several rewards, the first one says whether an answer is right
    return {
        file: dataclasses.replace(task, reward=reward) if name == mine else task
        for (file, task), name in zip(tasks.items(), names)
    }


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
    unsafe_sandbox: bool = False,
    environment: EnvironmentSection | None = None,
    max_failed: float = 0.9,
    **settings: Any,
) -> Iterator[evaluation.EvalResult]:
    """Evaluate a model on the held-out problems of tasks; yield one result per task.

    The same call resumes an interrupted evaluation. Arguments are checked before the first response.

    Args:
      name: a model for `load_model`, or the folder of a run.
      tasks: maps a results file (one JSON line per scored response) to a task; its `test` problems are used.
        The settings are stored beside each file, with fingerprints of the prompts as the model gets them, the
        answers, the code of the reward and the weights; if any of these is another now, an error says which.
      step, best: the checkpoint of a run; see `checkpoint_step`.
      reward: name of a reward that replaces the tasks' own reward.
      problems: number of problems of each task; None takes all.
      slots: sequences decoded at once; None takes as many as fit.
      unsafe_sandbox: whether rewards in `CODE_REWARDS` may run programs without isolation.
      environment: answers the model after each turn, in all tasks; None: every response has one turn.
      max_failed: 1 allows a reward that always fails.
      **settings: fields of `sampling.SamplingSettings`.
    """
    environment = environment or EnvironmentSection()
    chosen = sampling_settings(settings)
    step = chosen_step(name, step=step, best=best)
    for out, task in tasks.items():
        check_output(out)
        if out.exists():
            with hold(out):
                pass  # says at once if another process writes it
        load_reward(reward or task.reward)
        runs_programs = (reward or task.reward) in CODE_REWARDS
        if runs_programs and (warning := check_sandbox(unsafe=unsafe_sandbox)):
            print(warning, file=sys.stderr)
        if not len(task.test):
            raise ValueError(
                f"task {task.name}: no held-out problems to evaluate; name a file: --option test=FILE"
            )
        if environment.name is None and max_failed < 1:
            _check_reward(reward or task.reward, task.test[: min(problems or _TRIED, _TRIED)])
    model = load_any_model(name, step=step, dtype=sampler_dtypes(chosen.dtype)["dtype"])
    origin = {"model": str(name), "step": step, **dataclasses.asdict(chosen)}
    weights = {"weights_sha256": weights_fingerprint(model.params)}
    with contextlib.ExitStack() as held:
        for out, task in tasks.items():
            held.enter_context(hold(out))
            identity = _identity(task, reward, problems, model.tokenizer) | _environment_identity(environment)
            claim_output(out, origin | identity | weights)
        for out, task in tasks.items():
            judge = reward or task.reward
            with contextlib.ExitStack() as opened:
                scorer = opened.enter_context(make_scorer(judge, unsafe_sandbox=unsafe_sandbox))
                asked = open_conversations(environment, model.tokenizer, _MEMORY_MB)
                if asked is not None:
                    opened.enter_context(asked.environment)
                ends = turn_ends(environment, model.tokenizer)
                yield evaluation.evaluate(
                    task.test[:problems],
                    _responses(model, chosen, task.name, slots, asked, ends),
                    scorer,
                    samples=chosen.samples,
                    ks=sorted({1, chosen.samples}),
                    out=out,
                    name=task.name,
                    answer_of=ANSWER_READERS.get(judge),
                )


def _check_reward(name: str, problems: Sequence[Problem]) -> None:
    """Raise an error if a reward of the user's own fails for right responses and for empty ones."""
    if name in REWARDS:
        return
    responses = [(text, problem) for problem in problems for text in (problem.solution or problem.answer, "")]
    with make_scorer(name, workers=1) as scorer:
        scores = scorer.score_all(responses)
    if all(score.status in FAILURES for score in scores):
        raise ValueError(
            f"reward {name!r} fails for {problems[0]}, with the right answer and with an empty response: "
            f"{scores[0].status} ({scores[0].detail}); mend it"
        )


def _identity(task: Task, reward: str | None, problems: int | None, tokenizer: Tokenizer) -> dict[str, str]:
    """Return settings that identify the problems and the reward of a results file."""
    judge = reward or task.reward
    return {
        "task": task.name,
        "reward": judge,
        "reward_code_sha256": code_fingerprint(load_reward(judge)),
        **problem_fingerprints(list(task.test[:problems]), tokenizer),
    }


def _environment_identity(environment: EnvironmentSection) -> dict[str, Any]:
    """Return settings that identify the environment; nothing if there is none."""
    if environment.name is None:
        return {}
    code = code_fingerprint(load_environment(environment.name, environment.options))
    return {"environment": to_dict(environment), "environment_code_sha256": code}


def _responses(
    model: LoadedModel,
    settings: SamplingSettings,
    name: str,
    slots: int | None,
    asked: Conversations | None,
    ends: Sequence[int],
) -> evaluation.Generate:
    """Return a `generate` for `evaluate` whose sampler is planned for the requests it gets."""

    def open_sampler(requests: list[Request]) -> Sampler:
        options = sampler_dtypes(settings.dtype) | {"turns": asked is not None}
        plan = plan_for_requests(model.config, requests, slots=slots, **options)
        return Sampler(model.model, model.params, plan)

    def tokens(problem: Problem) -> list[int]:
        return encode_prompt(model.tokenizer, problem.prompt)

    return evaluation.sampled_responses(
        open_sampler,
        tokens,
        model.tokenizer,
        settings,
        NO_RUN,
        title=name,
        conversations=asked,
        stop=ends,
    )
