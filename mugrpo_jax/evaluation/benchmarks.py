"""Models on benchmarks: any model or checkpoint, one task or several, a file of responses for each."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import yaml
from tqdm import tqdm

from mugrpo_jax import evaluation
from mugrpo_jax.config import ConfigError
from mugrpo_jax.models.io.loading import LoadedModel, load_model
from mugrpo_jax.sampling import Request, Sampler, Settings, plan_sampler, request_seeds
from mugrpo_jax.sampling.generate import claim_output
from mugrpo_jax.setup.run_setup import prompt_tokens
from mugrpo_jax.setup.trained_model import checkpoint_step, is_run, trained_model
from mugrpo_jax.tasks import ANSWERS, Task, load_reward, load_task, make_scorer


def named_tasks(names: Sequence[str], pairs: Sequence[str], out: Path) -> dict[Path, Task]:
    """Tasks by name, each with the file of its responses: `out`, or `out` with its name before the suffix.

    Args:
      names: as `load_task` understands them.
      pairs: options of all tasks, `key=value`, or of one, `TASK.key=value`.
      out: the file of one task; several have one each.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"--task {','.join(names)}: each task may be named once")
    options = _options(names, pairs)
    files = [out] if len(names) == 1 else [out.with_suffix(f".{name}{out.suffix}") for name in names]
    return {file: load_task(name, **options[name]) for file, name in zip(files, names)}


def _options(names: Sequence[str], pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each task: the options of all, then those with its name before them."""
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
        except yaml.YAMLError:
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
    """Evaluate a model on the held-out problems of tasks, one result after the other.

    Interrupted, the same call continues. What can be checked is checked before the first response.

    Args:
      name: what `load_model` takes, or the folder of a run.
      tasks: whose `test` parts are used, each with its file: one JSON line a scored response. The settings
        are kept beside it, and others are refused.
      step, best: of a run, which checkpoint; see `checkpoint_step`.
      reward: in place of the tasks' own.
      problems: only so many of each; None takes all.
      slots: sequences decoded at once; None takes as many as fit.
      **settings: fields of `sampling.Settings`.
    """
    chosen = Settings(**settings)
    if is_run(name):
        step = checkpoint_step(Path(name), step=step, best=best)
    elif step is not None or best:
        raise ConfigError(f"{name}: not the folder of a run; only runs have checkpoints to choose from")
    for task in tasks.values():
        load_reward(reward or task.reward)
        if not len(task.test):
            raise ValueError(f"task {task.name}: no held-out problems to evaluate")
    dtype = jnp.dtype(chosen.dtype)
    model = load_model(name, dtype=dtype) if step is None else trained_model(Path(name), step, dtype=dtype)
    origin = {"model": str(name), "step": step, **dataclasses.asdict(chosen)}
    for out, task in tasks.items():
        claim_output(out, origin | _identity(task, reward, problems))
    for out, task in tasks.items():
        judge = reward or task.reward
        with make_scorer(judge) as scorer:
            yield evaluation.evaluate(
                task.test[:problems],
                responder(model, chosen, slots=slots),
                scorer,
                samples=chosen.samples,
                ks=sorted({1, chosen.samples}),
                out=out,
                name=task.name,
                answer_of=ANSWERS.get(judge),
            )


def _identity(task: Task, reward: str | None, problems: int | None) -> dict[str, str]:
    """What a file of results is about."""
    answers = "\n".join(f"{problem.id} {problem.answer}" for problem in task.test[:problems])
    return {
        "task": task.name,
        "reward": reward or task.reward,
        "answers_sha256": hashlib.sha256(answers.encode()).hexdigest(),
    }


def responder(model: LoadedModel, settings: Settings, *, slots: int | None = None) -> evaluation.Generate:
    """A `generate` for `evaluation.evaluate`: a response depends on its problem and sample alone."""

    def generate(wanted: list[evaluation.Request]) -> Iterator[evaluation.Response]:
        groups: dict[int, list[evaluation.Request]] = {}
        for item in wanted:
            groups.setdefault(item.index, []).append(item)
        requests = [_request(model, settings, group) for group in groups.values()]
        longest = max(len(request.prompt) for request in requests)
        plan = plan_sampler(
            model.config,
            max_prompt=longest,
            max_length=longest + settings.max_tokens,
            slots=slots,
            samples=len(wanted),
            dtype=jnp.dtype(settings.dtype),
        )
        with Sampler(model.model, model.params, plan) as sampler:
            for response in tqdm(sampler.run(requests), total=len(wanted), unit=" responses"):
                yield evaluation.Response(
                    index=response.index,
                    sample=groups[response.index][response.sample].sample,
                    text=model.tokenizer.decode(response.tokens.tolist()),
                    finish_reason=response.finish_reason,
                    length=len(response.tokens),
                )

    return generate


def _request(model: LoadedModel, settings: Settings, group: list[evaluation.Request]) -> Request:
    """The samples of one problem that are still wanted."""
    first = group[0]
    seeds = request_seeds(settings.seed, first.index, samples=settings.samples)
    return Request(
        prompt=prompt_tokens(model.tokenizer, first.problem),
        seeds=seeds[[item.sample for item in group]],
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        stop=sorted(model.tokenizer.eos_ids),
        index=first.index,
    )
