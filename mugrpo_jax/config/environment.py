"""The section `environment` of a config: who answers the model, and how long."""

import dataclasses
from typing import Any, Literal

from mugrpo_jax.config.settings import ConfigError, Section, setting


@dataclasses.dataclass(frozen=True)
class EnvironmentSection(Section):
    """An environment, which answers the model after each turn, so that a response has several turns."""

    name: str | None = setting(
        None, "calculator, or your own module:function; null: none, every response has one turn"
    )
    options: dict[str, Any] = setting({}, "keyword arguments of the environment")
    stop: tuple[str, ...] = setting(
        (),
        "texts that end a turn, besides the model's end token; a text that is not one token of the model is "
        "found after some more tokens, which are thrown away",
    )
    role: Literal["user", "tool"] = setting("user", "role of the environment's messages in a chat template")
    max_turns: int = setting(
        8,
        "most turns of the model in one response; if the environment says something after the last of them, "
        "the response ends with the finish reason `turns`",
        least=1,
    )
    deadline: float = setting(
        5.0,
        "seconds for one message; a slower one ends the response with the finish reason `timeout`, reward 0",
        above=0,
        most=86_400,
    )
    workers: int | None = setting(
        None,
        "number of worker processes; 0: the main process, without a deadline; null: 0 for built-in "
        "environments, one per usable processor for your own",
        least=0,
        most=4096,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is None and (self.options or self.stop):
            key = "options" if self.options else "stop"
            raise ConfigError(f"{key}: it is set, but name is null; name an environment, or leave it out")
