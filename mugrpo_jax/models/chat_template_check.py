"""Check a chat template before it is used, and give it a fixed date.

It is rendered once in a child process with limits on time and memory. A template comes with the model and is
a program. A few nested loops can run for years, and `'a' * 10**10` fills the memory. The sandbox of Jinja,
which `transformers` uses, limits neither.
"""

import datetime
import functools
import json
import re
import subprocess
import sys

_SECONDS, _MEMORY_MB, _CHARACTERS = 2, 1024, 10_000_000
_TODAY = datetime.datetime(2024, 7, 26)  # Llama's template takes this day too, if it knows no other
_NOW = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(?P<quote>["'])(?P<form>.*?)(?P=quote)\s*\)""")


def with_fixed_date(template: str) -> str:
    """Return the template with the same date on every day, so that prompts do not change at midnight.

    `transformers` gives templates the function `strftime_now`, which reads the clock. Its calls are replaced
    by their text.

    >>> with_fixed_date("Today: {{ strftime_now('%-d %B %Y') }}")
    "Today: {{ '26 July 2024' }}"
    """
    return _NOW.sub(lambda call: call["quote"] + _TODAY.strftime(call["form"]) + call["quote"], template)


@functools.lru_cache(maxsize=64)
def problem_with_template(template: str, messages: str, names: str) -> str | None:
    """Return why a template cannot be used, or None.

    Other errors of the template are not reported here: they are raised when it is rendered in this process.

    Args:
      template: the text of the template.
      messages: a conversation to render, as JSON.
      names: more variables for the template, as JSON.
    """
    command = [sys.executable, "-P", __file__]
    task = json.dumps({"template": template, "messages": json.loads(messages), "names": json.loads(names)})
    try:
        done = subprocess.run(command, input=task, capture_output=True, text=True, timeout=30 * _SECONDS)
    except subprocess.TimeoutExpired:
        return f"it takes more than {_SECONDS} s for one conversation"
    if done.returncode < 0:
        return f"it takes more than {_SECONDS} s or {_MEMORY_MB} MB for one conversation"
    return done.stdout.strip() or None


def main() -> None:
    """Render the template that standard input describes; print why it cannot be used, or nothing."""
    task = json.load(sys.stdin)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_MB * 2**20, _MEMORY_MB * 2**20))
    try:
        text = _render(**task)
    except MemoryError:
        print(f"it takes more than {_MEMORY_MB} MB for one conversation")
    except Exception:  # raised again, and reported, where the template is used
        return
    else:
        if len(text) > _CHARACTERS:
            print(f"it makes {len(text):,} characters of one conversation")


def _render(template: str, messages: list[dict[str, str]], names: dict[str, str]) -> str:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}` of `transformers`, whose content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's own form

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["strftime_now"] = lambda form: form
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **names)


if __name__ == "__main__":
    main()
