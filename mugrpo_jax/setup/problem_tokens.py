"""Convert problems to tokens: their prompts, and their worked solutions for a warm start."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import Tokenizer
from mugrpo_jax.sampling import encode_prompt
from mugrpo_jax.sampling.messages import encode_message
from mugrpo_jax.setup.run_environment import turn_ends
from mugrpo_jax.tasks import Problem


def prompt_tokens(config: RunConfig, tokenizer: Tokenizer, problem: Problem) -> np.ndarray:
    """Return the tokens of a problem's prompt; raise an error if the prompt is too long."""
    tokens = prompt_of_any_length(tokenizer, problem)
    limit = config.sampling.max_prompt_tokens
    if len(tokens) > limit:
        raise ConfigError(
            f"{problem}: its prompt has {len(tokens)} tokens, sampling.max_prompt_tokens is {limit}; "
            "raise it or filter the data"
        )
    return np.asarray(tokens, np.int32)


def prompt_of_any_length(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Return the tokens of a problem's prompt; an error names the problem."""
    try:
        tokens = encode_prompt(tokenizer, problem.prompt)
    except (ValueError, TypeError) as error:  # a TypeError for text that is not Unicode
        raise ConfigError(f"{problem}: its prompt cannot be made into tokens: {error}") from error
    if not tokens:
        raise ConfigError(f"{problem}: its prompt is empty")
    return tokens


class Solution(NamedTuple):
    """The tokens of a worked solution, and which of them the model writes; None if it writes all of them."""

    tokens: np.ndarray
    wrote: np.ndarray | None


def solution_tokens(config: RunConfig, tokenizer: Tokenizer, problem: Problem) -> Solution:
    """Return the tokens of a worked solution and the end token; raise an error if it is too long.

    The end token is the one with which the model ends a response to this kind of prompt, see `end_id`. With
    an environment, the messages in `Problem.turns` have the tokens that they have in a response.
    """
    if problem.solution is None:
        raise ConfigError(
            f"{problem}: no worked solution; a warm start needs one for each problem: name their column in "
            "task.options.columns.solution, or turn the warm start off with warm_start.updates=0"
        )
    turns = problem.turns if config.environment.name is not None and problem.turns else (problem.solution,)
    try:
        parts = _parts(config, tokenizer, problem, turns)
        tokens = [token for part in parts for token in part]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{problem}: its solution cannot be made into tokens: {error}") from error
    limit = config.sampling.max_response_tokens
    if len(tokens) > limit:
        raise ConfigError(
            f"{problem}: its solution has {len(tokens)} tokens, sampling.max_response_tokens is {limit}; "
            "raise it or filter the data"
        )
    wrote = np.concatenate([np.full(len(part), place % 2 == 0) for place, part in enumerate(parts)])
    return Solution(np.asarray(tokens, np.int32), None if wrote.all() else wrote)


def _parts(
    config: RunConfig, tokenizer: Tokenizer, problem: Problem, turns: Sequence[str]
) -> list[list[int]]:
    """Return the tokens of the model's turns and of the messages between them."""
    chat, ends = not isinstance(problem.prompt, str), turn_ends(config.environment, tokenizer)
    parts: list[list[int]] = []
    for place, text in enumerate(turns):
        if place % 2:
            last = parts[-1][-1]
            parts.append(encode_message(tokenizer, text, chat=chat, last=last, role=config.environment.role))
            continue
        ids = tokenizer.encode(text)
        stopped = (ids and ids[-1] in ends) or text.endswith(config.environment.stop or ("\0",))
        ended = stopped and place < len(turns) - 1
        parts.append(ids if ended else [*ids, tokenizer.end_id(chat=chat)])
    return parts
