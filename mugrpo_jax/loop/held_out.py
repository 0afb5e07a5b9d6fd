"""Measure the accuracy on held-out problems during a run."""

import contextlib
import time

import jax

from mugrpo_jax import distributed, evaluation
from mugrpo_jax.compiling.compile_clock import compile_clock
from mugrpo_jax.loop.failed_rewards import answer_reader, check_failed
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.runs import progress
from mugrpo_jax.setup.sizes import evaluation_settings
from mugrpo_jax.tasks.scoring import STATUSES
from mugrpo_jax.training import Cursor, TrainState

_SEED_PATH = 1 << 20  # used instead of a stage number to derive the seeds of held-out problems


def held_out_accuracy(run: RunContext, state: TrainState, cursor: Cursor) -> float | None:
    """Return the held-out accuracy of the current weights, or None if no evaluation is due at this cursor.

    If the journal already has the accuracy for this number of updates, it is not measured again.
    """
    if not evaluation_due(run, cursor):
        return None
    if (known := run.journal.find("evaluation", cursor.updates)) is not None:
        return known["accuracy"]
    if run.stop.agreed:
        return None  # the resumed run measures it
    run.pending.flush()
    started, compiled = time.monotonic(), compile_clock().seconds
    result = _evaluate(run, state, f"evaluate after {cursor.updates} updates")
    if result is None:
        run.stop.agree(True)
        return None
    accuracy, after = result.accuracy, f"after {cursor.updates} updates"
    # Before the record, so that the run evaluates again once the reward is mended.
    again = "mend it and start again"
    check_failed(run.config, f"evaluation {after}", result.statuses, result.examples, again)
    run.journal.write(
        {
            "kind": "evaluation",
            "updates": cursor.updates,
            "stage": cursor.stage,
            "accuracy": accuracy.mean,
            "standard_error": accuracy.standard_error,
            **({"reward": result.reward} if result.reward_parts else {}),
            **{f"reward/{name}": value for name, value in result.reward_parts.items()},
            "problems": result.problems,
            "truncated": result.truncated,
            **({} if result.malformed is None else {"malformed": result.malformed}),
            **({"answered": result.answered} if run.conversations is not None else {}),
            "status": dict.fromkeys(STATUSES, 0) | result.statuses,
            "seconds": {
                "evaluate": time.monotonic() - started,
                "compile": compile_clock().seconds - compiled,
                **run.start_times.take(),
            },
        }
    )
    rewards = f", reward {result.reward:.3f}{progress.reward_parts(result.reward_parts)}"
    rewards = rewards if result.reward_parts else ""
    broken = "" if result.malformed is None else f", {result.malformed:.0%} malformed"
    answered = "" if run.conversations is None else f", {result.answered:.0%} answered by the environment"
    progress.say(
        f"held-out accuracy {after}: {accuracy.mean:.3f}{rewards} ({result.problems} problems; responses: "
        f"{result.truncated:.0%} unfinished{broken}{answered}){run.time_left.clause()}"
    )
    progress.say_unscored(f"evaluation {after}", result.statuses, result.examples)
    run.pending.restart()
    return accuracy.mean


def _evaluate(run: RunContext, state: TrainState, title: str) -> evaluation.EvalResult | None:
    """Split the problems between the hosts and evaluate them; return None if any host was asked to stop."""
    settings, reader = evaluation_settings(run.config), answer_reader(run.config, run.task)
    problems = list(run.task.test[: run.config.evaluation.problems])
    # A host without problems opens a sampler too: other hosts need its part of the weights.
    with run.setup.sampler(state.params) as sampler:
        rows = evaluation.score_problems(
            problems,
            evaluation.sampled_responses(
                lambda requests: contextlib.nullcontext(sampler),
                run.setup.prompt_tokens,
                run.setup.tokenizer,
                settings,
                _SEED_PATH,
                title=title,
                conversations=run.conversations,
                stop=run.setup.stop_ids,
            ),
            run.scorer,
            samples=settings.samples,
            indices=range(jax.process_index(), len(problems), jax.process_count()),
            answer_of=reader,
            stopped=lambda: run.stop.requested,
        )
    parts = distributed.gather("evaluated", None if rows is None else evaluation.pack_rows(rows))
    if any(part is None for part in parts):
        return None
    rows = evaluation.unpack_rows(parts)
    return evaluation.summarise("held-out", rows, samples=settings.samples, answers=reader is not None)


def evaluation_due(run: RunContext, cursor: Cursor) -> bool:
    """Return whether to evaluate now; not after the last update of a stage, but at the next stage's start."""
    every, stages = run.config.evaluation.every, run.config.stages
    if not (run.config.evaluation.problems and len(run.task.test)):
        return False
    if cursor.update:
        inside = cursor.update < run.config.batch.updates_per_stage
        return inside and every is not None and cursor.updates % every == 0
    return every is None or cursor.stage in (stages.start, stages.stop) or cursor.updates % every == 0
