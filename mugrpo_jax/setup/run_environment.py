"""Open and check the environment that a config names."""

from collections.abc import Sequence

from mugrpo_jax.config import ConfigError, EnvironmentSection, RunConfig
from mugrpo_jax.models import Tokenizer
from mugrpo_jax.rollouts.conversations import Conversations
from mugrpo_jax.sampling.messages import encode_message, stop_tokens
from mugrpo_jax.sampling.requests import MAX_STOPS
from mugrpo_jax.tasks import Problem, conversation_of, load_environment, open_environment


def open_conversations(
    section: EnvironmentSection, tokenizer: Tokenizer, memory_mb: int, *, workers: int | None = None
) -> Conversations | None:
    """Open the environment of a config, which the caller must close; None if it has none.

    `memory_mb` is `task.scorer_memory_mb`, and `workers` replaces `environment.workers`.
    """
    if section.name is None:
        return None
    environment = open_environment(
        section.name,
        section.options,
        workers=section.workers if workers is None else workers,
        deadline_s=section.deadline,
        memory_mb=memory_mb,
    )
    return Conversations(environment, tokenizer, section.max_turns, section.role, section.stop)


def turn_ends(section: EnvironmentSection, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a turn of the model at once."""
    if (count := len(tokenizer.eos_ids)) > MAX_STOPS:
        raise ConfigError(
            f"the model's tokenizer has {count} end tokens, at most {MAX_STOPS} are possible; name fewer as "
            "eos_token_id in its generation_config.json"
        )
    try:
        return stop_tokens(tokenizer, section.stop)
    except ValueError as error:  # the tiny model does not have all characters
        raise ConfigError(f"environment.stop: {error}") from None


def check_environment(config: RunConfig, tokenizer: Tokenizer, problems: Sequence[Problem]) -> str:
    """Import the environment and call it once, with the worked solution or the answer as the model's turn.

    Returns a line of text about its reply; empty without an environment or without problems.
    """
    section = config.environment
    if section.name is None:
        return ""
    try:
        load_environment(section.name, section.options)
    except ValueError as error:
        raise ConfigError(f"environment.name: {error}") from error
    if not problems or config.task.max_failed == 1:
        return ""
    problem = problems[0]
    turn = next(iter(problem.turns), problem.solution or problem.answer)
    workers = 0 if section.workers == 0 else 1
    conversations = open_conversations(section, tokenizer, config.task.scorer_memory_mb, workers=workers)
    assert conversations is not None
    with conversations.environment as environment:
        said = conversation_of(problem.prompt, [turn], section.role)
        answer = environment.ask(said, problem).result()
    if answer.status == "ok" and answer.message is not None:
        try:
            chat = not isinstance(problem.prompt, str)
            last = tokenizer.end_id(chat=chat)
            encode_message(tokenizer, answer.message, chat=chat, last=last, role=section.role)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"environment {section.name!r}: its message has no tokens: {error}") from error
    if answer.status != "ok":
        raise ConfigError(
            f"environment {section.name!r} fails for {problem} after the turn {turn[:60]!r}: {answer.status} "
            f"({answer.detail}); mend it, or allow such failures with task.max_failed=1"
        )
    said_next = "ends the response" if answer.message is None else f"says {answer.message[:60]!r}"
    return f"environment {section.name} {said_next} after the turn {turn[:60]!r}"
