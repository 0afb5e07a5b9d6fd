"""Models in use: from a run's checkpoint, or any model, to responses and to a Hugging Face folder."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from mugrpo_jax import evaluation, models
from mugrpo_jax.config import ConfigError
from mugrpo_jax.models import hf
from mugrpo_jax.models.loading import LoadedModel, load_model
from mugrpo_jax.models.tokenizer import Tokenizer
from mugrpo_jax.policy import policy_shape, policy_tokenizer
from mugrpo_jax.run import read_config
from mugrpo_jax.sampling import Request, Sampler, Settings, plan_sampler, request_seeds
from mugrpo_jax.sampling.generate import claim_output
from mugrpo_jax.tasks import ANSWERS, Problem, Task, load_reward, make_scorer
from mugrpo_jax.training import CheckpointStore


def is_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run."""
    return (Path(path) / "config.yaml").is_file()


def checkpoint_step(run: Path, *, step: int | None = None, best: bool = False) -> int:
    """The checkpoint that is meant: after `step` updates, the best by held-out accuracy, or the newest."""
    if not (run / "checkpoints").is_dir():
        raise ConfigError(f"{run}: no checkpoint yet")
    store = CheckpointStore(run / "checkpoints")
    try:
        steps, found = store.steps(), store.best() if best else step
    finally:
        store.close()
    if not steps:
        raise ConfigError(f"{run}: no checkpoint yet")
    if best and found is None:
        raise ConfigError(f"{run}: no kept checkpoint has a held-out accuracy; choose one by its updates")
    if found is not None and found not in steps:
        raise ConfigError(f"{run}: no checkpoint after {found} updates; kept: {', '.join(map(str, steps))}")
    return steps[-1] if found is None else found


def trained_model(run: Path, step: int, *, dtype: Any = None) -> LoadedModel:
    """The policy of a run at one of its checkpoints, on the default device."""
    config = read_config(run)
    shape = policy_shape(config)
    graphdef, abstract = models.abstract(shape)
    place = SingleDeviceSharding(jax.devices()[0])
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), abstract)
    store = CheckpointStore(run / "checkpoints")
    try:
        params = store.restore_params(targets, step)
    finally:
        store.close()
    source = Path(config.model.source)
    return LoadedModel(
        config=shape,
        graphdef=graphdef,
        params=params if dtype is None else models.cast(params, jnp.dtype(dtype)),
        tokenizer=policy_tokenizer(config),
        source=source if source.is_dir() else None,
    )


def export(
    run: Path, out: Path, *, step: int | None = None, best: bool = False, dtype: str | None = None
) -> None:
    """Write a run's checkpoint as a Hugging Face folder."""
    read_config(run)
    model = trained_model(run, checkpoint_step(run, step=step, best=best))
    hf.save(
        model.params, out, config=model.config, source=model.source, tokenizer=model.tokenizer, dtype=dtype
    )


def prompt_tokens(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Tokens of a problem's prompt: plain text, or messages through the chat template."""
    prompt = problem.prompt
    return tokenizer.encode(prompt, start=True) if isinstance(prompt, str) else tokenizer.chat(prompt)


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
        with Sampler(model.graphdef, model.params, plan) as sampler:
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
