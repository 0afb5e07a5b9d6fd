"""Read the tests of a code problem from its answer, in the forms of APPS, LiveCodeBench and MBPP.

The answer is JSON (which is what a list column becomes), or a Python literal:

- `{"inputs": [...], "outputs": [...]}`: standard input and output; with `"fn_name"`, arguments and results of
  a function (APPS);
- `[{"input": ..., "output": ..., "testtype": "stdin"}, ...]`: the same, one by one; with `"functional"`, the
  input has one argument per line, as JSON (LiveCodeBench);
- `["assert f(1) == 2", ...]`: calls with their results (MBPP).

`{"tests": ANY OF THESE, "time_s": 4, "memory_mb": 1024}` also has limits, and `"fn_name"` for LiveCodeBench.
"""

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mugrpo_jax.tasks.code_answers import same_output, same_value
from mugrpo_jax.tasks.sandbox import Limits, Outcome
from mugrpo_jax.tasks.task import Problem


@dataclass(frozen=True)
class CodeTest:
    """One test: what the program gets (see `run_program`), and what is right.

    `close` are the tolerances of a call of `math.isclose`: `rel_tol` and `abs_tol`, if the test has them.
    `wrapped`: the right value may stand in a list of its own, as in parts of APPS.
    """

    given: Mapping[str, Any]
    expected: Any
    close: Mapping[str, float] = field(default_factory=dict)
    wrapped: bool = False

    def passed(self, outcome: Outcome) -> bool:
        """Return whether the program ended well, with the right output or value."""
        if outcome.status != "ok":
            return False
        if "stdin" in self.given:
            return same_output(outcome.output, self.expected)
        possible = [self.expected]
        if self.wrapped and isinstance(self.expected, list) and len(self.expected) == 1:
            possible += self.expected
        return any(same_value(outcome.output, right, **self.close) for right in possible)


def read_tests(problem: Problem) -> tuple[list[CodeTest], Limits]:
    """Return the tests and limits of a problem. The text of a ValueError names the problem.

    >>> tests, limits = read_tests(Problem("1", "", '["assert f(2) == 4"]'))
    >>> tests
    [CodeTest(given={'expression': 'f(2)'}, expected=4, close={}, wrapped=False)]
    """
    try:
        form = _parsed(problem.answer)
        limits = Limits()
        name = None
        if isinstance(form, dict) and "tests" in form:
            chosen = {known.name: form[known.name] for known in fields(Limits) if known.name in form}
            for key, value in chosen.items():
                kinds = (int, float) if key == "time_s" else int
                if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e6:
                    whole = "" if key == "time_s" else "whole "
                    raise ValueError(f"{key} is {value!r}; possible: a {whole}number above 0")
            limits, name, form = replace(limits, **chosen), form.get("fn_name"), form["tests"]
        tests = _tests(form, name)
    except ValueError as error:
        raise ValueError(f"{problem}: its answer has no tests that can be read: {error}") from None
    if not tests:
        raise ValueError(f"{problem}: its answer has no tests")
    return tests, limits


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        raise ValueError(f"neither JSON nor a Python literal: {text[:40]!r}") from None


def _tests(form: Any, name: str | None) -> list[CodeTest]:
    if isinstance(form, dict) and {"inputs", "outputs"} <= form.keys():
        pairs = _pairs(form["inputs"], form["outputs"])
        name = form.get("fn_name") or name
        return [_call(given, right, name) if name else _stdin(given, right) for given, right in pairs]
    if isinstance(form, list) and all(isinstance(item, str) for item in form):
        return [_assertion(item) for item in form]
    if isinstance(form, list) and all(isinstance(item, dict) for item in form):
        return [_one(item, name) for item in form]
    raise ValueError("possible: inputs and outputs, a list of input and output, or a list of assert lines")


def _pairs(inputs: Any, outputs: Any) -> list[tuple[Any, Any]]:
    for key, value in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(value, list):
            raise ValueError(f"{key} is {value!r}; possible: a list")
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    return list(zip(inputs, outputs, strict=True))


def _one(item: dict[str, Any], name: str | None) -> CodeTest:
    if not {"input", "output"} <= item.keys():
        raise ValueError(f"a test has the keys {', '.join(item)}; needed: input and output")
    given, right, kind = item["input"], item["output"], item.get("testtype", "stdin")
    if kind == "stdin":
        return _stdin(given, right)
    if kind != "functional":
        raise ValueError(f"testtype is {kind!r}; possible: stdin, functional")
    for key, value in (("input", given), ("output", right)):
        if not isinstance(value, str):
            raise ValueError(f"the {key} of a functional test is {value!r}; possible: a text of JSON")
    arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
    return CodeTest({"function": name, "arguments": arguments}, json.loads(right))


def _stdin(given: Any, right: Any) -> CodeTest:
    texts = ["\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (given, right)]
    return CodeTest({"stdin": texts[0]}, texts[1])


def _call(given: Any, right: Any, name: str) -> CodeTest:
    if not isinstance(given, list):
        raise ValueError(f"the input of function {name} is {given!r}; possible: a list of arguments")
    arguments = [_whole_keys(argument) for argument in given]
    return CodeTest({"function": name, "arguments": arguments}, _whole_keys(right), wrapped=True)


def _whole_keys(value: Any) -> Any:
    """Make the keys of a dict numbers again, if JSON has made texts of them."""
    if isinstance(value, list):
        return [_whole_keys(item) for item in value]
    try:
        return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value
    except ValueError:
        return value


def _assertion(line: str) -> CodeTest:
    """Split an assert line into what the program computes and what is right, which it never sees.

    Imports before the assert are kept.
    """
    try:
        *setup, last = ast.parse(line.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"not Python: {line[:60]!r}") from None
    imports = [statement for statement in setup if isinstance(statement, (ast.Import, ast.ImportFrom))]
    if not isinstance(last, ast.Assert) or imports != setup:
        raise ValueError(f"not an assert line: {line[:60]!r}")
    left, right, close = _sides(last.test, line)
    given = {"expression": ast.unparse(left)}
    if setup:
        given["setup"] = "\n".join(map(ast.unparse, setup))
    return CodeTest(given, right, close)


def _sides(test: ast.expr, line: str) -> tuple[ast.expr, Any, dict[str, float]]:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            return left, _constant(right, line), {}
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ast.Call(ast.Name("bool"), [operand], []), False, {}
        case ast.Call(
            func=ast.Attribute(attr="isclose") | ast.Name(id="isclose"),
            args=[left, right],
            keywords=tolerances,
        ) if {tolerance.arg for tolerance in tolerances} <= {"rel_tol", "abs_tol"}:
            close = {str(tolerance.arg): _number(tolerance.value, line) for tolerance in tolerances}
            return left, _number(right, line), close
        case ast.Call():
            return ast.Call(ast.Name("bool"), [test], []), True, {}
    raise ValueError(f"possible: assert CALL == VALUE, assert CALL or assert not CALL, not {line[:60]!r}")


def _constant(node: ast.expr, line: str) -> Any:
    """Evaluate a literal, or set(...), tuple(...) and the like of a literal."""
    makers: dict[str, Callable[[Any], Any]] = {"set": set, "tuple": tuple, "list": list, "sorted": sorted}
    try:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in makers:
                return makers[name](ast.literal_eval(inner))
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError(f"the right side is not a plain value: {line[:60]!r}") from None


def _number(node: ast.expr, line: str) -> float:
    value = _constant(node, line)
    if not isinstance(value, (int, float)):
        raise ValueError(f"isclose compares numbers: {line[:60]!r}")
    return float(value)
