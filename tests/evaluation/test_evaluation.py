import itertools
import json
import math
import random
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from mugrpo_jax.evaluation import (
    Estimate,
    GeneratedResponse,
    WantedResponse,
    as_table,
    average_at_k,
    average_results,
    estimate_average,
    estimate_mean,
    evaluate,
    majority,
    pack_rows,
    pass_at_k,
    score_problems,
    summarise,
    unpack_rows,
    wilson,
)
from mugrpo_jax.evaluation.fingerprints import problem_fingerprints
from mugrpo_jax.models import CharTokenizer
from mugrpo_jax.tasks import ANSWER_READERS, InlineScorer, Problem, load_task, make_scorer

PROBLEMS = load_task("arithmetic", train=0, test=12, seed=5).test


def respond(request):
    """A response that depends on its own request alone: right, wrong, without answer, or cut off."""
    rng = random.Random(f"{request.index}/{request.sample}")
    right = rng.random() < (request.index + 1) / 14
    text = request.problem.solution if right else rng.choice(["1+1+0=02;2", "1+1+0", ";7", "7"])
    return GeneratedResponse(
        request.index, request.sample, text, "length" if text == "1+1+0" else "stop", len(text)
    )


def generate(requests):
    """Responses in another order than the requests, as a sampler with slots gives them."""
    return iter(sorted(map(respond, requests), key=lambda r: (r.length, -r.index, r.sample)))


def run(problems=PROBLEMS, generate=generate, scorer="arithmetic", **options):
    options = {"samples": 4, "ks": (1, 2, 4), "answer_of": ANSWER_READERS["arithmetic"]} | options
    with InlineScorer(scorer) as inline:
        return evaluate(problems, generate, inline, **options)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    for n in range(1, 9):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == sum(map(any, subsets)) / len(subsets)


def test_pass_at_k_is_unbiased_and_exact_for_large_n():
    p, n, k = 0.3, 10, 4
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(chances)) == pytest.approx(1 - (1 - p) ** k)
    assert pass_at_k(10_000, 1, 5_000) == 0.5
    assert pass_at_k(1000, 3, 1) == 3 / 1000


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}; possible"):
        pass_at_k(n, c, k)


def test_average_and_majority():
    assert average_at_k([1.0, 0.0, 0.0, 1.0]) == 0.5 and average_at_k([0.1] * 10) == pytest.approx(0.1, abs=0)
    assert majority(["a", "b", "b"], [1.0, 0.0, 0.0]) == 0.0
    assert majority(["a", "a", "b"], [1.0, 1.0, 0.0]) == 1.0
    assert majority(["a", "b", "c"], [1.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert majority([None, None, "a"], [0.0, 0.0, 1.0]) == 1.0
    assert majority([None, None], [0.0, 0.0]) == 0.0
    assert majority(["a", "a", "b"], [0.5, 0.5, 1.0]) == 0.0
    with pytest.raises(ValueError, match="values is empty"):
        average_at_k([])


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    for confidence, low, high in ((0.95, 0.91, 0.975), (0.8, 0.74, 0.85)):
        hits = 0
        for trial in range(250):
            skill = rng.beta(2, 3, size=60)  # problems differ; the truth is the mean over all problems, 0.4
            values = rng.binomial(4, skill) / 4
            estimate = estimate_mean(values, confidence=confidence, resamples=250, seed=trial)
            hits += estimate.low <= 0.4 <= estimate.high
        assert low < hits / 250 < high


def test_intervals_agree_with_the_normal_one_and_with_a_seed():
    values = np.random.default_rng(0).random(500)
    estimate = estimate_mean(values, resamples=2500)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert estimate.mean == pytest.approx(values.mean())
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert estimate_mean(values, resamples=2500) == estimate != estimate_mean(values, resamples=2500, seed=1)


def test_intervals_have_a_width_at_0_and_at_100_percent():
    for solved in (0.0, 1.0):
        estimate = estimate_mean([solved] * 16)
        assert estimate.mean == solved and 0 <= estimate.low <= solved <= estimate.high <= 1
        assert estimate.high - estimate.low == pytest.approx(0.1936, abs=1e-4)
        average = estimate_average([[solved] * 16, [solved] * 16])
        assert 0.1 < average.high - average.low < 0.1936
    assert wilson(0.0, 16) == pytest.approx((0.0, 0.1936), abs=1e-4)
    assert wilson(0.1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)  # Newcombe 1998
    assert estimate_mean([0.0] * 9 + [1.0]).high == pytest.approx(0.4042, abs=1e-4)
    same = estimate_mean([0.5, 0.5])  # two problems, each solved in one of two samples
    assert same.low < 0.5 < same.high
    assert estimate_mean([2.0, 2.0]).high == 2.0  # a reward that is no share has no such interval


def test_intervals_cover_a_rare_success_as_often_as_they_say():
    rng = np.random.default_rng(2)
    solved = rng.random((2000, 40)) < 0.03
    hits = [e.low <= 0.03 <= e.high for e in map(estimate_mean, solved.astype(float))]
    assert np.mean(hits) > 0.9  # resampling alone reaches 0.70: every run without a success misses


def test_the_standard_error_is_that_of_the_mean_over_problems():
    values = [0.0, 0.25, 1.0, 0.5]
    estimate = estimate_mean(values)
    assert estimate.standard_error == pytest.approx(np.std(values, ddof=1) / 2)
    assert estimate_mean([0.5]).standard_error == 0.0
    average = estimate_average([values, [1.0, 0.0]])
    assert average.standard_error == pytest.approx(math.hypot(estimate.standard_error, 0.5) / 2)


def test_every_benchmark_counts_the_same_in_the_average():
    large, small = [1.0] * 100, [0.0, 0.5]
    estimate = estimate_average([large, small])
    assert estimate.mean == pytest.approx((1.0 + 0.25) / 2)
    # The large one is not known to be exactly 1: Wilson's interval of 100 problems begins at 0.963.
    assert estimate.low == pytest.approx(0.625 - math.hypot(1 - wilson(1.0, 100)[0], 0.25) / 2)
    assert estimate.high == pytest.approx(0.75)
    with pytest.raises(ValueError, match="benchmarks is empty"):
        estimate_average([])


@pytest.mark.parametrize(("values", "options"), [([], {}), ([[1.0]], {}), ([1.0], {"confidence": 1.0})])
def test_an_estimate_refuses_what_it_cannot_do(values, options):
    with pytest.raises(ValueError, match="possible"):
        estimate_mean(values, **options)


def test_the_result_is_the_statistics_of_its_responses():
    result = run()
    rows = [[respond(WantedResponse(i, s, PROBLEMS[i])) for s in range(4)] for i in range(len(PROBLEMS))]
    right = [[r.text.partition(";")[2] == PROBLEMS[r.index].answer for r in row] for row in rows]
    assert result.problems == 12 and result.samples == 4
    assert result.per_problem["avg@4"] == [sum(row) / 4 for row in right]
    assert result.per_problem["pass@2"] == [pass_at_k(4, sum(row), 2) for row in right]
    assert result.metrics["pass@1"].mean == pytest.approx(result.metrics["avg@4"].mean)
    assert result.metrics["pass@4"].mean == pytest.approx(np.mean([any(row) for row in right]))
    flat = [r for row in rows for r in row]
    assert result.truncated == pytest.approx(np.mean([r.finish_reason == "length" for r in flat]))
    assert 0 < result.malformed == np.mean([r.text == "7" for r in flat])
    assert 0 < result.truncated < 1 and 0 < result.metrics["majority@4"].mean < 1
    assert result.mean_length == pytest.approx(np.mean([r.length for r in flat]))
    assert result.statuses == {"ok": 48}
    assert json.loads(result.as_json())["metrics"]["avg@4"]["mean"] == result.metrics["avg@4"].mean


def test_the_first_of_several_rewards_says_what_is_right(tmp_path):
    alone, out = run(), tmp_path / "several.jsonl"
    asked = {"samples": 4, "ks": (1, 2, 4), "answer_of": ANSWER_READERS["arithmetic"]}
    with make_scorer({"arithmetic": 0.5, "exact": 3.0}, workers=0) as scorer:
        several = evaluate(PROBLEMS, generate, scorer, out=out, **asked)
        again = evaluate(PROBLEMS, generate, scorer, out=out, **asked)
    assert several.metrics == alone.metrics and several.per_problem == alone.per_problem
    assert several.reward_parts["arithmetic"] == pytest.approx(alone.accuracy.mean) and again == several
    assert several.reward == pytest.approx(0.5 * alone.accuracy.mean + 3 * several.reward_parts["exact"])
    assert json.loads(out.read_text().splitlines()[0])["parts"].keys() == {"arithmetic", "exact"}
    assert alone.reward == pytest.approx(alone.accuracy.mean) and alone.reward_parts == {}


def test_the_shares_of_two_hosts_give_the_result_of_one():
    failing = (*PROBLEMS[:4], replace(PROBLEMS[4], answer="unreadable"))

    def share(host):
        with InlineScorer("countdown") as scorer:
            indices = range(host, 5, 2)
            return score_problems(failing, generate, scorer, samples=4, indices=indices, answer_of=read)

    def read(text):
        return None if text == "7" else 100 * text

    parts = [json.loads(json.dumps(pack_rows(share(host)))) for host in (0, 1)]
    found = summarise("test", unpack_rows(parts), samples=4, ks=(1, 2, 4), answers=True)
    assert found == run(failing, scorer="countdown", answer_of=read)
    assert max(len(json.dumps(row)) for part in parts for row in part) < 400


def test_an_evaluation_that_is_stopped_gives_no_rows():
    with InlineScorer("arithmetic") as scorer:
        rows = score_problems(PROBLEMS, generate, scorer, samples=2, stopped=lambda: scorer.counts["ok"] == 5)
    assert rows is None and scorer.counts["ok"] == 5


def test_a_stop_request_ends_the_wait_for_scores():
    class Slow(InlineScorer):
        def submit(self, text, problem):
            return Future()  # a reward that takes very long

    asked = time.monotonic() + 0.3
    with Slow("arithmetic") as scorer:
        stopped = lambda: time.monotonic() > asked  # noqa: E731
        assert score_problems(PROBLEMS, generate, scorer, samples=2, stopped=stopped) is None
    assert time.monotonic() < asked + 2


class Killed(Exception):
    pass


@pytest.mark.parametrize("stop_after", [0, 1, 17, 47])
@pytest.mark.parametrize("torn", [b"", b'{"index": 3, "samp'])
def test_resumed_equals_uninterrupted(stop_after, torn, tmp_path):
    whole = run(out=tmp_path / "whole.jsonl")
    out, asked = tmp_path / "deep" / "parts.jsonl", []

    def killed(requests):
        yield from itertools.islice(generate(requests), stop_after)
        raise Killed

    def counting(requests):
        asked.extend(requests)
        return generate(requests)

    with pytest.raises(Killed):
        run(generate=killed, out=out)
    if stop_after:
        with out.open("ab") as file:
            file.write(torn)
    assert run(generate=counting, out=out) == whole
    assert len(asked) == 48 - stop_after
    assert sorted(out.read_text().splitlines()) == sorted((tmp_path / "whole.jsonl").read_text().splitlines())
    assert run(generate=lambda requests: pytest.fail("nothing is left to generate"), out=out) == whole


def test_failures_of_the_reward_are_counted_and_shown(tmp_path):
    failing = tuple(replace(p, answer="unreadable") for p in PROBLEMS[:2])
    result = run(failing, scorer="countdown", answer_of=None)
    assert result.statuses == {"error": 8} and "majority@4" not in result.metrics
    assert result.malformed is None  # nobody looked for answers
    assert result.examples.keys() == {"error"}
    assert result.examples["error"].startswith(f"problem {failing[0].id}: ")  # the first of them
    header, line = as_table([result]).splitlines()
    assert header.endswith("not scored") and line.endswith(" 8")


@pytest.mark.parametrize("first", [0, 1])
def test_a_failed_environment_counts_as_the_failure_of_every_reward(first):
    def fails(requests):
        """The first, or the second, response has no reply of the environment."""
        for number, response in enumerate(map(respond, requests)):
            yield replace(response, failure=("error", "environment: Oops") if number == first else None)

    with make_scorer({"arithmetic": 0.5, "exact": 3.0}, workers=0) as scorer:
        result = evaluate(PROBLEMS, fails, scorer, samples=4)
    assert result.statuses == {"error": 1, "ok": 47} and result.reward_parts.keys() == {"arithmetic", "exact"}
    assert result.reward_parts["arithmetic"] == pytest.approx(result.accuracy.mean)


def test_results_of_another_evaluation_are_refused(tmp_path):
    out = tmp_path / "results.jsonl"
    run(out=out)
    for options in ({"samples": 2, "ks": (1,)}, {"problems": PROBLEMS[::-1]}, {"problems": PROBLEMS[:3]}):
        with pytest.raises(ValueError, match=r"results\.jsonl:\d+: result of problem .* use another file"):
            run(out=out, **options)
    out.write_text("[]\n")
    with pytest.raises(ValueError, match=r"results\.jsonl:1: not a result"):
        run(out=out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problems": ()}, "test: no problems to evaluate"),
        ({"ks": (1, 5)}, r"test: samples=4, ks=\[1, 5\]; possible: 1 <= k <= samples"),
        ({"samples": 0, "ks": ()}, "samples=0"),
        ({"generate": lambda requests: generate(requests[1:])}, "generate left out 1 of 48 responses"),
        (
            {"generate": lambda r: map(respond, [*r, r[0]])},
            r"generate returned \(index, sample\) \(0, 0\), not",
        ),
    ],
)
def test_bad_input_is_one_clear_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        run(**options)
    assert "\n" not in str(error.value)


def test_the_table_shows_benchmarks_and_their_average():
    one, two = run(name="one"), run(PROBLEMS[:5], name="two", answer_of=None)
    header, *lines = as_table([one, two]).splitlines()
    assert header.split()[:4] == ["benchmark", "problems", "samples", "avg@4"]
    assert [line.split()[0] for line in lines] == ["one", "two", "average"]
    assert average_results([one, two]).keys() == {"avg@4", "pass@1", "pass@2", "pass@4"}
    expected = 50 * (one.metrics["avg@4"].mean + two.metrics["avg@4"].mean)
    assert f"{expected:.1f}% [" in lines[2] and "–" in lines[1]
    assert f" {one.truncated:.1%} " in lines[0] and f" {one.malformed:.1%} " in lines[0]
    assert len(as_table([one]).splitlines()) == 2 and average_results([]) == {}
    assert isinstance(average_results([one])["avg@4"], Estimate)


def test_an_extra_column_belongs_to_the_answers_of_a_results_file():
    def answers(**extra):
        problem = Problem("1", "1+2=", "3", extra=extra)
        return problem_fingerprints([problem], CharTokenizer("123+="))["answers_sha256"]

    assert len({answers(), answers(tests=[1]), answers(tests=[2])}) == 3
