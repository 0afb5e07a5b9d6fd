import os
import subprocess
import sys
import time

import pytest

from mugrpo_jax.tasks import (
    STATUSES,
    InlineScorer,
    Problem,
    Score,
    ScoringPool,
    WeightedScorer,
    make_scorer,
)
from mugrpo_jax.tasks.processors import usable_processors

STRANGE = "strange_rewards:reward"
HARMLESS = {
    "fine": (1.0, "ok"),
    "length " + "x" * 100_000: (100_000.0, "ok"),
    "same 42": (1.0, "ok"),
    "same \ud800é": (0.0, "ok"),
    "raise": (-1.0, "error"),
    "nan": (-1.0, "invalid"),
    "text": (-1.0, "invalid"),
    "none": (-1.0, "invalid"),
    "quit": (-1.0, "error"),
    "surrogate": (-1.0, "error"),
    "no-text": (-1.0, "error"),
}


@pytest.fixture(scope="module")
def pool():
    with ScoringPool(STRANGE, workers=2, deadline_s=2.0, memory_mb=512, failed=-1.0) as pool:
        pool.score_all([("fine", Problem("0", "", ""))] * 2)
        yield pool


def test_both_scorers_give_the_same_scores_in_order_and_count_them(pool, problem):
    pairs = [(text, problem) for text in HARMLESS] * 3
    before = pool.counts.copy()
    with InlineScorer(STRANGE, failed=-1.0) as inline:
        scores = inline.score_all(pairs)
        assert [(s.value, s.status) for s in scores] == list(HARMLESS.values()) * 3
        assert pool.score_all(pairs) == scores
        assert inline.counts == {"ok": 12, "timeout": 0, "crash": 0, "error": 12, "invalid": 9}
        assert pool.counts - before == +inline.counts
        assert set(inline.counts) == set(STATUSES)
    assert scores[4].detail == "RuntimeError: no idea (strange_rewards.py:43)"
    assert scores[6].detail == "returned '1.0'; possible: a finite number, at most 1e+30"
    lines = ["(strange_rewards.py:35)", "(strange_rewards.py:37)"]
    texts = [
        f"SystemExit: 0 {lines[0]}",
        f"RuntimeError: half of an emoji: \\ud83d {lines[1]}",
        "Unprintable",
    ]
    assert [score.detail for score in scores[8:11]] == texts


def test_the_pool_survives_hangs_memory_and_crashes_counts_them_and_goes_on(pool, problem):
    before = pool.counts.copy()
    texts = ["hang", "fine", "memory", "fine", "exit", "fine", "hang-in-c", "length " + "y" * 100_000, "fine"]
    scores = pool.score_all([(text, problem) for text in texts])
    statuses = [score.status for score in scores]
    assert statuses[2] in ("error", "timeout")  # out of memory, or over the deadline on a slow machine
    del statuses[2]
    assert statuses == ["timeout", "ok", "ok", "crash", "ok", "timeout", "ok", "ok"]
    assert all((score.value == -1.0) == (score.status != "ok") for score in scores)
    assert scores[0].detail == "no verdict within 2 s" and "died with code 3" in scores[4].detail
    counted = pool.counts - before
    assert counted["ok"] == 5 and counted["crash"] == 1 and counted.total() == 9

    start = time.perf_counter()
    assert all(score.status == "ok" for score in pool.score_all([("fine", problem)] * 500))
    assert time.perf_counter() - start < 10.0


def test_a_worker_has_no_more_memory_than_it_was_given(pool, problem):
    score = pool.submit("memory-at-once", problem).result()  # 1 GiB of 512 MiB
    assert (score.status, score.value) == ("error", -1.0) and score.detail.startswith("MemoryError")


def test_one_hang_does_not_hold_up_the_others(pool, problem):
    hang = pool.submit("hang", problem)
    quick = [pool.submit("fine", problem) for _ in range(50)]
    assert all(future.result().value == 1.0 for future in quick)
    assert not hang.done()
    assert hang.result().status == "timeout"


def test_a_worker_killed_while_idle_costs_no_item(problem):
    with ScoringPool(STRANGE, workers=1, deadline_s=30.0) as pool:
        assert pool.submit("fine", problem).result().status == "ok"
        worker = pool._pool.workers[0]._process
        worker.kill()
        worker.wait()
        assert pool.submit("fine", problem).result().status == "ok"


def test_workers_import_no_jax_and_may_print(pool, problem, capfd):
    assert pool.submit("jax", problem).result().value == 0.0
    assert pool.submit("print", problem).result().value == 1.0
    assert capfd.readouterr().out == ""


def test_closing_ends_hanging_workers_at_once(problem):
    pool = ScoringPool(STRANGE, workers=1, deadline_s=60.0)
    assert pool.submit("fine", problem).result().status == "ok"
    running, waiting = pool.submit("hang", problem), pool.submit("fine", problem)
    time.sleep(0.2)
    start = time.perf_counter()
    pool.close()
    assert time.perf_counter() - start < 5.0
    assert waiting.cancelled() and running.done()
    assert pool._pool.workers[0]._process.poll() is not None


def test_processes_that_a_reward_started_end_with_their_worker(problem):
    pool = ScoringPool(STRANGE, workers=1, deadline_s=1.0)
    child = int(pool.submit("child", problem).result().value)
    assert running(child)
    assert pool.submit("hang", problem).result().status == "timeout"  # the worker and its group are killed
    assert ended(child)
    child = int(pool.submit("child", problem).result().value)
    pool.close()
    assert ended(child)


def test_a_worker_whose_parent_is_gone_ends_with_its_children():
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from mugrpo_jax.tasks import Problem, ScoringPool\n"
        f"pool = ScoringPool({STRANGE!r}, workers=1)\n"
        "child = pool.submit('child', Problem('1', '', '')).result().value\n"
        "print(pool._pool.workers[0]._process.pid, int(child), flush=True); os._exit(9)"
    )
    command = [sys.executable, "-c", code, os.path.dirname(__file__)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert all(ended(int(pid)) for pid in done.stdout.split())


def ended(pid: int) -> bool:
    """True if the process ends within some seconds."""
    end = time.monotonic() + 10
    while running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not running(pid)


def running(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_verifier_hangs_on_some_answers_and_the_pool_says_so():
    gold = Problem("1", "", "7")
    with make_scorer("math", workers=2, deadline_s=2.0) as pool:
        hang, fine, huge = pool.score_all(
            [(r"\boxed{9^{9^{9^{9}}}}", gold), (r"\boxed{\frac{14}{2}}", gold), ("7" * 100_000, gold)]
        )
        unread = pool.submit("#### 7", Problem("q1", "", r"\frac{")).result()
    assert (hang.status, fine.value, huge.value, huge.status) == ("timeout", 1.0, 0.0, "ok")
    assert unread.status == "error" and "problem q1: answer '\\\\frac{' cannot be read" in unread.detail


def test_cheap_rewards_are_scored_inline_and_bad_settings_are_one_line():
    assert isinstance(make_scorer("arithmetic"), InlineScorer)
    for options, message in (
        ({"workers": -1}, "workers is -1; possible: a number above 0"),
        ({"workers": 1, "deadline_s": 0}, "deadline_s is 0; possible: a number above 0"),
        ({"workers": 1, "deadline_s": float("inf")}, "deadline_s is inf; possible: a number above 0"),
        ({"workers": 1, "memory_mb": -5}, "memory_mb is -5; possible: a number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make_scorer("exact", **options)
    with pytest.raises(ValueError, match="no_such_module"):
        make_scorer("no_such_module:reward", workers=1)


def test_a_reward_that_fails_for_most_responses_stops_the_scorer(problem):
    with InlineScorer(STRANGE, max_failed=0.9) as scorer:
        scorer.score_all([("raise", problem)] * 230 + [("nan", problem)] * 25)
        with pytest.raises(
            ValueError, match=r"failed for 256 of the last 256 .* most often: RuntimeError: no idea"
        ):
            scorer.submit("quit", problem)
    with InlineScorer(STRANGE, max_failed=0.9) as scorer:
        scorer.score_all([("fine" if i % 8 == 0 else "raise", problem) for i in range(600)])


def test_several_rewards_are_a_weighted_sum_and_one_that_fails_counts_as_0(pool, problem):
    weights, long = {"exact": 2.0, STRANGE: -0.5}, "length " + "x" * 10
    with make_scorer(weights, workers=0) as scorer:
        assert scorer.submit("42", problem).result() == Score(1.5, parts=(("exact", 1.0), (STRANGE, 1.0)))
        assert scorer.submit(long, problem).result().value == -5.0
        failed = scorer.submit("raise", problem).result()
        nothing = (("exact", 0.0), (STRANGE, 0.0))
        assert failed == Score(
            0.0, "error", f"{STRANGE}: RuntimeError: no idea (strange_rewards.py:43)", nothing
        )
        assert scorer.counts["ok"] == 2 and scorer.counts["error"] == 1
    # A reward in worker processes, whose failures count as -1: the sum waits for its last part.
    mixed = WeightedScorer({"exact": InlineScorer("exact"), STRANGE: pool}, weights, max_failed=0.9)
    scores = mixed.score_all([(text, problem) for text in ("42", long, "exit")])
    assert [(score.value, score.status) for score in scores] == [(1.5, "ok"), (-5.0, "ok"), (0.5, "crash")]
    # A scorer of its own: the last 256 responses of `mixed` may still include those that were right.
    failing = WeightedScorer({"exact": InlineScorer("exact"), STRANGE: pool}, weights, max_failed=0.9)
    with pytest.raises(ValueError, match=r"256 of the last 256 .* most often: .*: RuntimeError: no idea"):
        failing.score_all([("raise", problem)] * 300)
    with pytest.raises(ValueError, match="reward is 'none'; possible: exact"):
        make_scorer({"exact": 1.0, "none": 1.0})


def test_a_worker_that_cannot_start_is_one_line_with_the_reason(problem, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        f"import os\nos.getpid() == {os.getpid()} or exit(3)\nreward = len"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with (
        make_scorer("only_here:reward", workers=1) as pool,
        pytest.raises(ValueError, match=r"'only_here:reward' did not start: ValueError: .*SystemExit\(3\)"),
    ):
        pool.submit("", problem).result()


def test_only_processors_that_this_process_may_use_are_counted(tmp_path):
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert usable_processors(tmp_path) == allowed  # no limit of a container
    for limit, expected in (("max 100000", allowed), ("50000 100000", 1), ("broken", allowed)):
        (tmp_path / "cpu.max").write_text(limit)
        assert usable_processors(tmp_path) == expected
    if hasattr(os, "sched_getaffinity") and allowed > 1:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            assert usable_processors() == 1
        finally:
            os.sched_setaffinity(0, before)
