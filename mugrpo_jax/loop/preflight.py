"""Describe the data of a run before training starts, reading only local files."""

import textwrap

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.loop import replay
from mugrpo_jax.tasks import PRESETS, Problem, load_task, task_maker

_SOURCES = ("folder", "train", "test")


def describe_data(config: RunConfig) -> str:
    """Return a line of text with the number of problems and a shortened first problem, without downloads."""
    if config.replay.run is not None:
        stage = replay.rollouts(config)
        return f"data        {stage.prompts:,} prompts with their responses in {stage.folder}"
    name, options = config.task.name, config.task.options
    task_maker(name, options)
    given = {key for key in _SOURCES if options.get(key) is not None}
    fetched = {key for key in given if str(options[key]).startswith("hub:")}
    if (name in PRESETS and not given) or (fetched and given == fetched):
        return "data        on the Hub; a dry run does not fetch it"
    task = load_task(name, **{key: value for key, value in options.items() if key not in fetched})
    if not len(task.train) and "train" not in fetched:
        raise ConfigError(f"task {task.name}: no training problems")
    counts = f"{len(task.train):,} problems to train on, {len(task.test):,} held out"
    rest = "; the rest is on the Hub" if fetched else ""
    first = f"; the first: {_abridged(task.train[0])}" if len(task.train) else ""
    return f"data        {counts}{rest}{first}"


def _abridged(problem: Problem) -> str:
    prompt = problem.prompt
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return f"{textwrap.shorten(' / '.join(texts), 200)!r}, answer {textwrap.shorten(problem.answer, 60)!r}"
