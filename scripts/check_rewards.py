"""Score gold answers of GSM8K, AMC23 and AIME24 against themselves and against each other.

    python scripts/check_rewards.py DATA_FOLDER

DATA_FOLDER has `gsm8k`, `amc23` and `aime24`, each with a `test.jsonl`. Prints one JSON line per benchmark:
how many answers got reward 1 against their own gold answer (all should), how many against a different gold
answer of another problem (none should), and how fast the pool was. Exits with 1 if a verdict is wrong.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from mugrpo_jax.tasks import Problem, Scorer, load_task, make_scorer

BENCHMARKS = ("gsm8k", "amc23", "aime24")


def response_of(name: str, problem: Problem) -> str:
    """The gold answer as a response: the worked solution if it ends with the answer, else a boxed answer."""
    if name == "gsm8k" and problem.solution is not None:
        return problem.solution
    return f"Therefore the answer is $\\boxed{{{problem.answer}}}$."


def number(problem: Problem) -> float:
    """The gold answer, read without the code under test; all three benchmarks have plain numbers."""
    return float(problem.answer.replace(",", ""))


def check(name: str, folder: Path, scorer: Scorer, shifts: int) -> dict[str, object]:
    problems = load_task(name, test=str(folder / name / "test.jsonl")).test
    responses = [response_of(name, problem) for problem in problems]
    start = time.perf_counter()
    own = scorer.score_all(zip(responses, problems))
    others = [
        (responses[i], problems[(i + shift) % len(problems)])
        for shift in range(1, shifts + 1)
        for i in range(len(problems))
        if number(problems[(i + shift) % len(problems)]) != number(problems[i])
    ]
    crossed = scorer.score_all(others)
    seconds = time.perf_counter() - start
    return {
        "benchmark": name,
        "problems": len(problems),
        "own_full_marks": sum(score.value == 1.0 for score in own),
        "others": len(others),
        "others_full_marks": sum(score.value != 0.0 for score in crossed),
        "not_ok": sum(score.status != "ok" for score in [*own, *crossed]),
        "items_per_second": round((len(own) + len(crossed)) / seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with gsm8k, amc23 and aime24")
    parser.add_argument("--workers", type=int, help="scoring processes; default: one per core")
    parser.add_argument(
        "--shifts", type=int, default=5, help="how many other problems each answer is tried on"
    )
    arguments = parser.parse_args()
    wrong = 0
    with make_scorer("math", workers=arguments.workers) as scorer:
        for name in BENCHMARKS:
            try:
                result = check(name, arguments.folder, scorer, arguments.shifts)
            except ValueError as error:
                print(f"check_rewards: {error}", file=sys.stderr)
                return 1
            print(json.dumps(result), flush=True)
            wrong += result["own_full_marks"] != result["problems"]
            wrong += result["others_full_marks"] != 0 or result["not_ok"] != 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
