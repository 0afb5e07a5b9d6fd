import sys

import pytest
from answer_pairs import EQUAL, RESPONSES, UNEQUAL

from mugrpo_jax.tasks import (
    ANSWER_READERS,
    REWARDS,
    Problem,
    arithmetic_reward,
    exact_reward,
    final_answer,
    load_reward,
    math_reward,
    same_answer,
)
from mugrpo_jax.tasks.math_answers import fast_math_reward
from mugrpo_jax.tasks.own_functions import code_digests

PAIRS = [(gold, answer, True) for gold, answer in EQUAL] + [(gold, answer, False) for gold, answer in UNEQUAL]


def test_the_table_is_large_and_says_each_pair_once():
    assert len(PAIRS) >= 150 and len({pair[:2] for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize(("gold", "answer", "equal"), PAIRS)
def test_no_verdict_of_the_table_is_wrong(gold, answer, equal):
    assert same_answer(gold, answer) is equal


@pytest.mark.parametrize(("gold", "response", "right"), RESPONSES)
def test_the_final_answer_of_a_response_counts(gold, response, right):
    assert math_reward(response, Problem("1", "", gold)) == float(right)


def test_what_is_settled_without_algebra_is_the_verdict_and_numbers_always_are():
    settled = 0
    cases = [(gold, f"#### {answer}") for gold, answer, _ in PAIRS] + [pair[:2] for pair in RESPONSES]
    for gold, response in cases:
        problem = Problem("1", "", gold)
        found = fast_math_reward(response, problem)
        settled += found is not None
        assert found is None or found == math_reward(response, problem)
    assert settled > 100
    assert fast_math_reward("1 + 1 = 2\n#### 2", Problem("1", "", "2")) == 1.0
    assert fast_math_reward("I do not know", Problem("1", "", "2")) == 0.0
    assert fast_math_reward("9" * 100_000, Problem("1", "", "2")) is None


def test_a_boxed_or_marked_answer_gets_the_verdict_of_the_answer():
    for gold, answer, equal in PAIRS[::7]:
        if answer.count("{") == answer.count("}"):
            problem = Problem("1", "", gold)
            assert math_reward(f"So $x$ is 3.\nHence \\boxed{{{answer}}}.", problem) == float(equal), (
                gold,
                answer,
            )
            assert math_reward(f"3 + 4 = 7\n#### {answer}\n", problem) == float(equal), (gold, answer)


def test_long_texts_without_an_answer_cost_little():
    problem = Problem("1", "", "5")
    assert math_reward("\\boxed{" + "x" * 100_000 + "}", problem) == 0.0
    assert math_reward("7 $" * 33_000, problem) == 0.0
    assert math_reward("a " * 50_000 + "the answer is 5", problem) == 1.0
    assert final_answer("(" * 100_000) is None


@pytest.mark.parametrize("gold", ["", "  ", "$$", r"\frac{", r"\begin{pmatrix}1", "=/="])
def test_a_gold_answer_that_cannot_be_read_is_an_error_that_names_the_problem(gold):
    with pytest.raises(
        ValueError, match=r"^problem q7: answer .* (is empty|cannot be read as mathematics)$"
    ) as error:
        math_reward("#### 5", Problem("q7", "", gold))
    assert "\n" not in str(error.value)


def test_exact_and_arithmetic_rewards():
    problem = Problem("1", "", "95")
    assert [exact_reward(t, problem) for t in ("95", " 95\n", "095", "95.", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]
    texts = ("7+8+0=15,3+5+1=09;95", ";95", "95", ";9;95", ";95;", ";095", "95;")
    assert [arithmetic_reward(t, problem) for t in texts] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_votes_are_counted_by_value():
    vote = ANSWER_READERS["math"]
    assert (
        len({vote(t) for t in ("#### 1,200", r"\boxed{1200}", "The answer is $1200.00.", "#### 1200 km")})
        == 1
    )
    assert vote("#### 50%") != vote("#### 50") and vote("no idea") is None
    assert vote(r"\boxed{x+1}") == "x+1"
    assert ANSWER_READERS["arithmetic"]("1+1+0=02;2") == "2" and ANSWER_READERS["arithmetic"]("2") is None


def test_every_reward_can_tell_a_response_without_an_answer():
    empty = {"exact": " ", "arithmetic": "1+1+0=02; ", "countdown": "#### 2*(3+", "math": "no idea"}
    empty |= {"reasoning_gym": "<answer>3", "code": "print(1)", "code_partial": "```python\n```"}
    assert empty.keys() == REWARDS.keys() == ANSWER_READERS.keys()
    assert [ANSWER_READERS[name](text) for name, text in empty.items()] == [None] * 7
    assert ANSWER_READERS["exact"](" so ") == "so"
    assert ANSWER_READERS["countdown"]("#### (3 + 4)*2 = 14") == "(3+4)*2"


def test_the_module_of_a_reward_may_be_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "more_rewards").mkdir()
    code = {
        "mine": "def good(text, problem):\n    return 1.0\n",
        "torn": "x = 1\ndef f(:\n",
        "sick": "x = 1\n1 / 0\n",
    }
    for name, text in code.items():
        (tmp_path / "more_rewards" / f"{name}.py").write_text(text)
    names = [
        "more_rewards.mine",
        "more_rewards/mine.py",
        "./more_rewards/mine",
        f"{tmp_path}/more_rewards/mine.py",
    ]
    assert len({load_reward(f"{name}:good") for name in names[1:]}) == 1
    assert load_reward(f"{names[0]}:good")("", None) == 1.0
    assert len({*code_digests(f"{name}:good" for name in names).values()}) == 1
    with pytest.raises(ValueError, match=r"cannot import 'no/mine.py': no such file: .*/no/mine.py$"):
        load_reward("no/mine.py:f")
    with pytest.raises(ValueError, match=r"cannot import 'no.mine': .*; it must be in this folder, "):
        load_reward("no.mine:f")
    (tmp_path / "reward_7.py").write_text(code["mine"])
    with pytest.raises(ValueError, match=r"no such file: rewrad_7.py; did you mean reward_7\? it must be in"):
        load_reward("rewrad_7.py:good")
    (tmp_path / "reward.v2.py").write_text(code["mine"])
    with pytest.raises(ValueError, match=r"cannot import 'reward.v2.py': a name with dots needs a path, ./r"):
        load_reward("reward.v2.py:good")
    assert load_reward("./reward.v2.py:good")("", None) == 1.0
    (tmp_path / "json").mkdir()  # the name of an installed package, which has a module of this name too
    (tmp_path / "json" / "decoder.py").write_text(code["mine"])
    assert load_reward("json/decoder.py:good")("", None) == 1.0
    with pytest.raises(ValueError, match=r"the module has no 'cosh'$"):  # what it imports is not offered
        (tmp_path / "more_rewards" / "maths.py").write_text("from math import cos\n\n\ndef tanh(): ...\n")
        load_reward("more_rewards/maths.py:cosh")
    with pytest.raises(
        ValueError, match=r"cannot import 'more_rewards/torn.py': .*torn.py:2: invalid syntax$"
    ):
        load_reward("more_rewards/torn.py:f")
    with pytest.raises(ValueError, match=r"ZeroDivisionError\('division by zero'\) \(sick.py:2\)$"):
        load_reward("more_rewards/sick.py:f")


def test_rewards_are_loaded_by_name():
    import strange_rewards

    assert load_reward("math") is REWARDS["math"]
    assert load_reward("strange_rewards:reward") is strange_rewards.reward


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "maths",
            "reward is 'maths'; did you mean math? possible: exact, arithmetic, countdown, math, reason",
        ),
        (
            "no_such_module:f",
            "reward 'no_such_module:f': cannot import 'no_such_module': ModuleNotFoundError",
        ),
        ("strange_rewards:f", "reward 'strange_rewards:f': the module has no 'f'"),
        (
            "strange_rewards:NOT_A_FUNCTION",
            "reward 'strange_rewards:NOT_A_FUNCTION' is a int; possible: a func",
        ),
        ("strange_rewards:", "reward is 'strange_rewards:'; possible: exact"),
        ("nofile.py:f", "reward 'nofile.py:f': cannot import 'nofile.py': no such file: nofile.py"),
        ("../mine.py:f", "reward '../mine.py:f': cannot import '../mine.py': no such file: /"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_one_clear_line(name, message):
    with pytest.raises(ValueError) as error:
        load_reward(name)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
