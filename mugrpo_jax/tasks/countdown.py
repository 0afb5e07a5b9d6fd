"""Generate and score the task `countdown`: combine all given numbers with + - * / to reach a target."""

import ast
import random
import re
from fractions import Fraction
from operator import add, mul, sub, truediv

from mugrpo_jax.tasks.synthetic_task import check_integer, generated_task
from mugrpo_jax.tasks.task import Problem, Task, as_prompt

_LONGEST = 200  # most characters of an expression, so that parsing cannot exceed Python's recursion limit
_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


def countdown(
    *, seed: int = 0, difficulty: int = 3, train: int = 100_000, test: int = 512, chat: bool = True
) -> Task:
    """Make a task whose problems have `difficulty` (2 to 6) numbers and a whole target from 1 to 999.

    The answer lists the target and the numbers. Each line of the worked solution combines two numbers. With
    `chat`, a prompt is a chat message, otherwise plain text.

    >>> countdown(difficulty=3, chat=False).train[0].answer
    '98 from 6 13 20'
    """
    check_integer("countdown", "difficulty", difficulty, 2, 6)

    def draw(rng: random.Random) -> tuple[str, Problem]:
        while True:
            numbers = [rng.randint(1, 25) for _ in range(difficulty)]
            target, expression, lines = _combine(rng, numbers)
            if 1 <= target <= 999 and target not in numbers:
                break
        listed = ", ".join(map(str, numbers))
        text = (
            f"Reach {target} with the numbers {listed}. Use each number exactly once, with + - * / and "
            "brackets. End with #### and the expression."
        )
        answer = f"{target} from {' '.join(map(str, sorted(numbers)))}"
        solution = "\n".join([*lines, f"#### {expression}"])
        return answer, Problem("", as_prompt(text, chat), answer, solution)

    return generated_task("countdown", draw, "countdown", seed=seed, train=train, test=test)


def _combine(rng: random.Random, numbers: list[int]) -> tuple[int, str, list[str]]:
    """Combine random pairs until one number remains. Return this number, its expression, and all steps."""
    pile = [(number, str(number)) for number in numbers]
    lines = []
    while len(pile) > 1:
        rng.shuffle(pile)
        (a, left), (b, right) = pile.pop(), pile.pop()
        if a < b:
            a, left, b, right = b, right, a, left
        exact = b > 0 and a % b == 0
        operator = rng.choice("+-*/" if exact else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if exact else 0}[operator]
        lines.append(f"{a}{operator}{b}={value}")
        pile.append((value, f"({left}{operator}{right})"))
    value, expression = pile[0]
    return value, expression[1:-1], lines


def countdown_reward(response: str, problem: Problem) -> float:
    """Return 1.0 if the text after the last `####` is a right expression, otherwise 0.0.

    A right expression uses each given number exactly once and equals the target. If the text is an equation,
    such as `2*(3+4) = 14`, only its left side is evaluated.

    >>> problem = Problem("1", "", "14 from 2 3 4")
    >>> countdown_reward("#### 2*(3+4)", problem), countdown_reward("#### 2*7", problem)
    (1.0, 0.0)
    """
    match = re.fullmatch(r"(\d+) from ([\d ]+)", problem.answer)
    if match is None:
        raise ValueError(f"{problem.id}: answer is {problem.answer!r}; possible: '14 from 2 3 4'")
    target, numbers = int(match[1]), sorted(map(int, match[2].split()))
    try:
        value, used = evaluate_expression(_expression(response))
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and sorted(used) == numbers)


def countdown_answer(response: str) -> str | None:
    """Return the expression after the last `####` without spaces, or None if there is no valid expression.

    >>> countdown_answer("3+4=7\\n#### 2 * (3+4) = 14"), countdown_answer("#### 2*"), countdown_answer("14")
    ('2*(3+4)', None, None)
    """
    text = _expression(response)
    try:
        evaluate_expression(text)
    except (ValueError, ZeroDivisionError):
        return None
    return "".join(text.split())


def _expression(response: str) -> str:
    """Return the text after the last `####`, up to the end of the line or `=`; empty without `####`."""
    _, mark, tail = response.rpartition("####")
    return tail.strip().split("\n")[0].split("=")[0] if mark else ""


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression of whole numbers and + - * / ( ), and the numbers in it.

    Any other text raises a `ValueError`. The text is parsed, never executed.

    >>> evaluate_expression("(1 + 2) / 6")
    (Fraction(1, 2), [1, 2, 6])
    """
    text = text.strip()
    if len(text) > _LONGEST or re.fullmatch(r"[\d\s+\-*/()]+", text) is None:
        raise ValueError(f"not an expression of whole numbers: {text[:40]!r}")
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not an expression: {text[:40]!r}") from error
    used: list[int] = []
    return _value(tree, used), used


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"not one of + - * /: {ast.unparse(node)[:40]!r}")
