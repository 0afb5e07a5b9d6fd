"""Fingerprints of what a results file depends on, so that old scores are never reported for something new."""

import functools
import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

from mugrpo_jax.models import Tokenizer
from mugrpo_jax.sampling import encode_prompt, prompt_text
from mugrpo_jax.tasks import Problem


def problem_fingerprints(problems: list[Problem], tokenizer: Tokenizer) -> dict[str, str]:
    """Return hashes of the answers (with extra columns), and of the prompts as text and tokens."""
    prompts, answers = hashlib.sha256(), hashlib.sha256()
    for problem in problems:
        try:
            prompt = [prompt_text(tokenizer, problem.prompt), encode_prompt(tokenizer, problem.prompt)]
        except (ValueError, TypeError) as error:  # a TypeError for text that is not Unicode
            raise ValueError(f"{problem}: its prompt cannot be made into tokens: {error}") from error
        prompts.update(json.dumps(prompt).encode())
        extra = [problem.extra] if problem.extra else []
        answers.update(json.dumps([problem.id, problem.answer, *extra]).encode())
    return {"prompts_sha256": prompts.hexdigest(), "answers_sha256": answers.hexdigest()}


def code_fingerprint(function: Any) -> str:
    """Return a hash of the file that defines a function; empty if there is none."""
    if isinstance(function, functools.partial):
        function = function.func
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (TypeError, OSError):  # defined in C, in a notebook, or the file is gone
        return ""
