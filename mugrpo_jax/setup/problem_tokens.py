"""Convert problems to tokens: their prompts, and their worked solutions for a warm start."""

import numpy as np

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import Tokenizer
from mugrpo_jax.sampling import encode_prompt
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


def solution_tokens(config: RunConfig, tokenizer: Tokenizer, problem: Problem) -> np.ndarray:
    """Return the tokens of a worked solution and the end token; raise an error if it is too long.

    The end token is the one with which the model ends a response to this kind of prompt, see `end_id`.
    """
    if problem.solution is None:
        raise ConfigError(
            f"{problem}: no worked solution; a warm start needs one for each problem: name their column in "
            "task.options.columns.solution, or turn the warm start off with warm_start.updates=0"
        )
    end = tokenizer.end_id(chat=not isinstance(problem.prompt, str))
    try:
        tokens = [*tokenizer.encode(problem.solution), end]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{problem}: its solution cannot be made into tokens: {error}") from error
    limit = config.sampling.max_response_tokens
    if len(tokens) > limit:
        raise ConfigError(
            f"{problem}: its solution has {len(tokens)} tokens, sampling.max_response_tokens is {limit}; "
            "raise it or filter the data"
        )
    return np.asarray(tokens, np.int32)
