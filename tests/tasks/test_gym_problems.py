"""The task `reasoning_gym`: with a stand-in for the package, and with the package if it is installed."""

import dataclasses
import importlib.util
import json
import sys
import types

import pytest

from mugrpo_jax.tasks import InlineScorer, gym_problems, load_task


@dataclasses.dataclass
class DoubleConfig:
    seed: int | None = None
    size: int = 500
    largest: int = 1000

    def validate(self):
        assert self.largest > 0, "largest must be positive"


class Double:
    """A generator whose answers may be written in two ways."""

    def __init__(self, config):
        config.validate()
        self.config = config

    def __getitem__(self, index):
        number = (self.config.seed + index) % self.config.largest
        return {"question": f"Twice {number}?", "answer": str(2 * number), "metadata": {"number": number}}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.5 * (answer == f"{entry['metadata']['number']}+same")


@pytest.fixture
def stand_in(monkeypatch):
    gym, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"double_up": (Double, DoubleConfig, None)}
    gym.create_dataset = lambda name, **options: factory.DATASETS[name][0](DoubleConfig(**options))
    for name, module in {"reasoning_gym": gym, "reasoning_gym.factory": factory}.items():
        monkeypatch.setitem(sys.modules, name, module)
    clear()
    yield
    clear()


def clear():
    gym_problems._dataset.cache_clear()
    gym_problems._entry.cache_clear()


def test_problems_are_those_of_the_generator_and_its_own_scorer_is_the_reward(stand_in):
    task = load_task("reasoning_gym", generator="double_up", options={"largest": 500}, train=200, test=20)
    problem = task.train[7]
    assert problem == task.train[7] != task.train[8]
    question, rest = problem.prompt.split("?", 1)
    right = json.loads(problem.answer)["answer"]
    assert right == str(2 * int(question.removeprefix("Twice "))) and gym_problems.INSTRUCTION in rest
    responses = {
        f"<answer>{right}</answer>": 1.0,
        f"<answer>0x</answer> or <answer> {right} </answer>!": 1.0,
        right: 1.0,
        f"<answer>{int(right) // 2}+same</answer>": 0.5,
        "<answer>7x</answer>": 0.0,
        "": 0.0,
    }
    with InlineScorer(task.reward) as scorer:
        scores = scorer.score_all((text, problem) for text in responses)
    assert [(score.value, score.status) for score in scores] == [
        (value, "ok") for value in responses.values()
    ]


def test_no_held_out_question_is_a_training_question_with_any_seed(stand_in):
    tasks = [
        load_task("reasoning_gym", generator="double_up", seed=seed, train=400, test=30) for seed in (0, 1)
    ]
    held_out = {problem.prompt for task in tasks for problem in task.test}
    trained = {problem.prompt for task in tasks for problem in task.train}
    assert all(len({problem.prompt for problem in task.test}) == 30 for task in tasks)
    assert not held_out & trained and tasks[0].test[0].prompt != tasks[1].test[0].prompt
    chat = load_task("reasoning_gym", generator="double_up", train=1, test=0, chat=True, instruction="")
    assert chat.train[0].prompt[0]["content"].endswith("?")


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"generator": "double_pu"}, "generator is 'double_pu'; did you mean double_up"),
        ({}, "reasoning_gym: generator is ''; possible: double_up"),
        (
            {"generator": "double_up", "options": {"lagest": 3}},
            r"has no option 'lagest'; did you mean largest\? possible: largest$",
        ),
        ({"generator": "double_up", "options": {"seed": 3}}, "has no option 'seed'; possible: largest$"),
        (
            {"generator": "double_up", "options": {"largest": 0}},
            "refuses its options: AssertionError: largest must",
        ),
    ],
)
def test_a_wrong_generator_or_option_is_one_clear_line(stand_in, options, reason):
    with pytest.raises(ValueError, match=reason) as error:
        load_task("reasoning_gym", **options)
    assert "\n" not in str(error.value)


def test_without_the_package_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    clear()
    with pytest.raises(ValueError, match=r"pip install 'mugrpo-jax\[reasoning-gym\]'"):
        load_task("reasoning_gym", generator="chain_sum")


@pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
@pytest.mark.parametrize("generator", ["chain_sum", "word_sorting", "simple_equations"])
def test_generators_of_the_package_give_their_own_answers_full_marks(generator):
    clear()
    task = load_task("reasoning_gym", generator=generator, train=16, test=8)
    with InlineScorer(task.reward) as scorer:
        for problem in [*task.train, *task.test]:
            right = json.loads(problem.answer)["answer"]
            pairs = [(f"<answer>{right}</answer>", problem), ("<answer>?</answer>", problem)]
            assert [score.value >= 0.99 for score in scorer.score_all(pairs)] == [True, False]
