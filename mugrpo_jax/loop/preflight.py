"""Check data, reward and model of a run before it starts, and describe the data for a dry run.

What a dry run accepts, training can run: both call the functions of this module.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.loop import replay
from mugrpo_jax.loop.failed_rewards import reward_scorer, reward_weights
from mugrpo_jax.models import Tokenizer
from mugrpo_jax.models.io.loading import check_weights
from mugrpo_jax.rollouts.generate_rollouts import training_order
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.run_data import changed_code, check_data
from mugrpo_jax.runs.run_folder import check_config, check_place
from mugrpo_jax.runs.set_aside import place_beside, reason_to_move
from mugrpo_jax.runs.trackers import check_trackers
from mugrpo_jax.setup.initial_model import run_model_tokenizer
from mugrpo_jax.setup.problem_tokens import prompt_of_any_length, solution_tokens
from mugrpo_jax.setup.run_environment import check_environment, turn_ends
from mugrpo_jax.tasks import (
    ANSWER_CHECKS,
    CODE_REWARDS,
    FAILURES,
    PRESETS,
    REWARDS,
    Problem,
    Task,
    check_sandbox,
    conversation_of,
    load_reward,
    load_task,
    task_maker,
)
from mugrpo_jax.tasks.own_functions import code_digests
from mugrpo_jax.tasks.scoring import Score

_SOURCES = ("folder", "train", "test")
_MANY = 5000  # prompts; checking more shows a progress bar
_TRIED = 8  # problems, until a reward gives one more than 0


def dry_run(
    config: RunConfig, folder: Path, *, overwrite: bool = False, say: Callable[[str], object] = print
) -> str:
    """Check everything that needs no download and no weights; `say` lines of text about it.

    The run's folder comes last, so that the data is also checked if the folder holds another run. With
    `overwrite`, say whether that run would be moved. Returns text about what could not be checked, or "".
    """
    check_place(folder)
    check_trackers(config, folder)
    check_weights(config.model.source)
    task, about = _local_task(config)
    say(about)
    if task is not None:
        tokenizer = run_model_tokenizer(config)
        checked, lengths = check_problems(config, task, tokenizer)
        environment = check_environment(config, tokenizer, checked.train)
        reward = check_reward(config, checked)
        notes = unusual_data(checked), lengths, environment, reward, unusual_advantage(config)
        for line in filter(None, notes):
            say(line)
    sources = {} if task is None else task.sources
    if not overwrite:
        check_config(folder, config)
        check_data(folder, sources)
    elif reason := reason_to_move(folder, config, sources):
        say(f"folder      {folder} would be moved to {place_beside(folder)}: {reason}")
        return "the data on the Hub" if task is None else ""
    if task is not None and (changed := changed_code(folder, code_digests(config.own_functions))):
        say(changed)
    return "the data on the Hub" if task is None else ""


def unusual_advantage(config: RunConfig) -> str:
    """Return a line if the objective is defined with other advantages than the config has; else "".

    >>> unusual_advantage(RunConfig())
    ''
    """
    if config.objective.name != "dr_grpo" or config.advantage == "mean":
        return ""
    return f"advantage   Dr. GRPO is meant to have advantage: mean; this run has {config.advantage}"


def check_problems(config: RunConfig, task: Task, tokenizer: Tokenizer) -> tuple[Task, str]:
    """Tokenize all prompts and worked solutions that the run can use, once.

    Returns:
      The task with the problems that the run uses (`sampling.overlong_prompts` says which), and a line of
      text about the lengths of the prompts; empty if the run uses none.
    """
    turn_ends(config.environment, tokenizer)  # raises an error if there are too many
    drop, limit = config.sampling.overlong_prompts == "drop", config.sampling.max_prompt_tokens
    train = [task.train[i] for i in (range(len(task.train)) if drop else _used(config, len(task.train)))]
    test = list(task.test[: config.evaluation.problems])
    sizes = _prompt_sizes([*train, *test], tokenizer)
    overlong = [(problem, size) for problem, size in zip([*train, *test], sizes) if size > limit]
    if overlong and not drop:
        first, size = overlong[0]
        raise ConfigError(
            f"{first}: its prompt has {size:,} tokens, sampling.max_prompt_tokens is {limit:,}; "
            f"{len(overlong):,} of {len(sizes):,} prompts {_are(overlong)} too long ({_percentiles(sizes)}); "
            "raise the limit, or leave such problems out with sampling.overlong_prompts=drop"
        )
    if overlong:
        kept = [problem for problem, size in zip(train, sizes) if size <= limit]
        if not kept:
            raise ConfigError(f"task {task.name}: no training prompt has at most {limit:,} tokens")
        fitting = [problem for problem, size in zip(test, sizes[len(train) :]) if size <= limit]
        task = dataclasses.replace(task, train=kept, test=fitting)
    for index in warm_start_problems(config, len(task.train)):
        solution_tokens(config, tokenizer, task.train[index])
    if not sizes:
        return task, ""
    are = _are(overlong)
    over = (
        f"{len(overlong):,} {are} over the limit and {are} left out" if overlong else "none is over the limit"
    )
    about = f"{len(sizes):,} checked, their tokens: {_percentiles(sizes)}; limit {limit:,}, {over}"
    return task, f"prompts     {about}"


def unusual_data(task: Task) -> str:
    """Return lines of text about training prompts that are held out too or occur again; "" without any.

    Only problems that were read from data are compared. Generators make no such problems, or mean it.
    """
    if not task.sources:
        return ""
    trained: dict[str, Problem] = {}
    again = []
    for problem in task.train:
        first = trained.setdefault(repr(problem.prompt), problem)
        again += [] if first is problem else [(problem, first)]
    shared = [problem for problem in task.test if repr(problem.prompt) in trained]
    lines = []
    if again:
        contrary = [pair for pair in again if pair[0].answer != pair[1].answer]
        other = f", {len(contrary):,} with another answer" if contrary else ""
        problem, first = (contrary or again)[0]
        repeat = "repeats an earlier one" if len(again) == 1 else "repeat earlier ones"
        about = f"{len(again):,} of {len(task.train):,} prompts {repeat}{other}"
        lines.append(f"repeated    {about}, the first: {problem}, as {first}")
    if shared:
        about = f"{len(shared):,} of {len(task.test):,} {_are(shared)} also in the training data"
        lines.append(f"held out    {about}, the first: {shared[0]}; leave them out of one of the two")
    return "\n".join(lines)


def _are(items: Sequence[object]) -> str:
    return "is" if len(items) == 1 else "are"


def _percentiles(sizes: Sequence[int]) -> str:
    shown = {"median": 50, "95 % have at most": 95, "99 % at most": 99, "longest": 100}
    values = np.percentile(sizes, list(shown.values()), method="higher")
    return ", ".join(f"{name} {value:,.0f}" for name, value in zip(shown, values))


def _prompt_sizes(problems: Sequence[Problem], tokenizer: Tokenizer) -> list[int]:
    sizes = []
    with progress.bar(len(problems), "check prompts", "prompt", quiet=len(problems) < _MANY) as bar:
        for problem in problems:
            sizes.append(len(prompt_of_any_length(tokenizer, problem)))
            bar.update()
    return sizes


def _used(config: RunConfig, count: int) -> Iterable[int]:
    """Return the indices of the training problems that the run samples or trains on."""
    warm = warm_start_problems(config, count)
    sampled = len(config.stages) * config.prompts_per_stage if config.replay.run is None else 0
    if sampled >= count:
        return range(count)
    order = training_order(config.seed, 0, count)[:sampled] if sampled else ()
    return sorted({*warm, *map(int, order)})


def warm_start_problems(config: RunConfig, count: int) -> list[int]:
    """Return the indices of the training problems whose solutions the warm start uses.

    If the warm start needs fewer than there are, it takes the last ones of a random order. The first stage
    begins at the other end of the same order. A replay has no warm start.
    """
    settings = config.warm_start
    if config.replay.run is not None:
        return []
    most = count if settings.problems is None else min(settings.problems, count)
    needed = settings.updates * settings.rows_per_update
    if needed >= most:
        return list(range(most))
    return sorted(map(int, training_order(config.seed, 0, most)[most - needed :]))


def check_reward(config: RunConfig, task: Task) -> str:
    """Import each reward and call it with the worked solution or answer of a problem, and with no response.

    A built-in reward is not called, but those that need answers of a certain form check all of them, and
    those that run programs check the sandbox. `task.max_failed=1` allows a reward that always fails. Returns
    a line of text about each reward that was called, or that runs programs without isolation.
    """
    problems, lines = task.train or task.test, []
    for position, name in enumerate(reward_weights(config, task)):
        try:
            load_reward(name)
            if name in CODE_REWARDS:
                lines.append(check_sandbox(unsafe=config.task.unsafe_sandbox))
        except ValueError as error:
            of_task = config.task.reward is None and "reward" in config.task.options
            key = "task.options.reward" if of_task else "task.reward"
            raise ConfigError(f"{key}: {error}") from error
        if task.sources and (check := ANSWER_CHECKS.get(name)):
            for problem in [*task.train, *task.test]:
                _check_answer(check, problem)
        if not (name in REWARDS or config.task.max_failed == 1 or not problems):
            tried = [problems[i] for i in range(min(_TRIED, len(problems)))]
            lines.append(_call_reward(config, name, tried, main=not position))
    return "\n".join(filter(None, lines))


def _check_answer(check: Callable[[Problem], object], problem: Problem) -> None:
    try:
        check(problem)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _call_reward(config: RunConfig, name: str, problems: Sequence[Problem], *, main: bool) -> str:
    """Try a reward. `main`: it decides the accuracy, and right responses should get most."""
    empty = None
    with reward_scorer(config, name, workers=0 if config.task.scorers == 0 else 1) as scorer:
        for problem in problems:  # worked solutions may have mistakes
            said = problem.turns or (problem.solution or problem.answer,)
            what = "worked solution" if problem.turns or problem.solution else "answer"
            if config.environment.name is not None:
                whole = conversation_of(problem.prompt, said, config.environment.role)
                problem = dataclasses.replace(problem, conversation=whole)
            score = scorer.submit(said[-1], problem).result()
            right = _value(score, f"reward {name!r} fails for {problem} with the {what} as the response")
            if right > 0:
                break
        about = f"reward      {name} gives {right:g} for the {what} of {problem}"
        if config.environment.name is None:  # else what was said before the last turn may decide
            score = scorer.submit("", problem).result()
            remedy = "give wrong responses a number too, such as 0.0"
            empty = _value(score, f"reward {name!r} fails for {problem} with an empty response", remedy)
            about += f", and {empty:g} for an empty response"
    return about + (_remark(right, empty, len(problems)) if main else "")


def _value(score: Score, what: str, remedy: str = "mend it") -> float:
    if score.status in FAILURES:
        remedy += ", or allow such failures with task.max_failed=1"
        raise ConfigError(f"{what}: {score.status} ({score.detail}); {remedy}")
    return score.value


def _remark(right: float, empty: float | None, tried: int) -> str:
    """Return what is odd about the rewards of a right response and an empty one; "" if nothing is."""
    if right <= 0:
        few = f"none of the first {tried} got more than 0" if tried > 1 else "not more than 0"
        return f"; {few}: is that meant?"
    if empty is not None and empty >= right:
        return "; is an empty response meant to get as much as a right one?"
    if empty is not None and right != 1:
        return "; accuracies are then mean rewards, not shares of right answers"
    return ""


def _local_task(config: RunConfig) -> tuple[Task | None, str]:
    """Load the task without downloads; return it, or None if it needs some, and a line of text about it."""
    stored = ""
    if config.replay.run is not None:
        stage = replay.rollouts(config)
        stored = f"data        {stage.prompts:,} prompts with their responses in {stage.folder}"
    name, options = config.task.name, config.task.options
    task_maker(name, options)
    given = {key for key in _SOURCES if options.get(key) is not None}
    fetched = {key for key in given if str(options[key]).startswith("hub:")}
    if (name in PRESETS and not given) or (fetched and given == fetched):
        return None, stored or "data        on the Hub; a dry run does not fetch it"
    task = load_task(name, **{key: value for key, value in options.items() if key not in fetched})
    if not len(task.train) and "train" not in fetched:
        raise ConfigError(f"task {task.name}: no training problems")
    held_out = f"{len(task.test):,} held out" if len(task.test) else "none held out to measure accuracy"
    times = len(config.stages) * config.prompts_per_stage / max(len(task.train), 1)
    repeated = f" (each about {times:,.0f} times)" if len(task.train) and times >= 2 else ""
    counts = f"{len(task.train):,} problems to train on{repeated}, {held_out}"
    rest = "; the rest is on the Hub" if fetched else ""
    first = f"; the first: {_abridged(task.train[0])}" if len(task.train) else ""
    return task, stored or f"data        {counts}{rest}{first}"


def _abridged(problem: Problem) -> str:
    prompt = problem.prompt
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return f"{textwrap.shorten(' / '.join(texts), 200)!r}, answer {textwrap.shorten(problem.answer, 60)!r}"
