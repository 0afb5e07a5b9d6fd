"""What is checked before a run starts: prompts, data files and the reward."""

import sys

import pytest

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop import preflight, stages
from mugrpo_jax.loop.failed_rewards import check_failed
from mugrpo_jax.loop.preflight import check_problems, dry_run, warm_start_problems
from mugrpo_jax.runs.run_data import claim_code, claim_data
from mugrpo_jax.runs.run_folder import RunFolder
from mugrpo_jax.setup.auto_settings import choose_settings
from mugrpo_jax.setup.devices import run_mesh
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.tasks import load_task
from mugrpo_jax.tasks.own_functions import code_digests

TINY = "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2, intermediate_size: 24}"
SIZES = ["sampling.max_prompt_tokens=6", "batch.prompts_per_update=2", "batch.updates_per_stage=1"]
LENGTHS = "median 5, 95 % have at most 9, 99 % at most 9, longest 9"
REWARDS = """
import sys
def fine(text, problem): return float(text == problem.answer)
def raises(text, problem): raise RuntimeError("no idea")
def leaves(text, problem): sys.exit(0)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working folder, with data and rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    prompts = ["1+1=", "2+2=", "11111+1=", "3+3=", "22222+2="]
    rows = [f'{{"question": "{prompt}", "answer": "2", "solution": "2"}}\n' for prompt in prompts]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    (tmp_path / "test.jsonl").write_text('{"question": "4+4=", "answer": "8"}\n')
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def config(*overrides, train="train.jsonl"):
    data = [f"task.options={{train: {train}, test: test.jsonl, reward: exact}}", "task.name=dataset"]
    return configs.load(None, [TINY, *SIZES, *data, *overrides])


def told(config, folder, **options):
    """Return what a dry run says."""
    lines = []
    assert dry_run(config, folder, **options, say=lines.append) == ""
    return "\n".join(lines)


def checked(config):
    task = load_task(config.task.name, **config.task.options)
    return check_problems(config, task, run_model_tokenizer(config))


def test_every_prompt_is_measured_before_the_start(place):
    for start in (lambda: dry_run(config(), place / "run"), lambda: stages.train(config(), place / "run")):
        with pytest.raises(ConfigError) as error:
            start()
        assert str(error.value).startswith("train.jsonl:3: problem 2: its prompt has 9 tokens, sampling.max_")
        about = f"2 of 6 prompts are too long ({LENGTHS}); raise the limit, or"
        assert about in str(error.value)
    assert not (place / "run").exists()
    with pytest.raises(ConfigError, match=r"; 1 of 6 prompts is too long \("):
        (place / "one.jsonl").write_text((place / "train.jsonl").read_text().replace("22222+", "2+"))
        checked(config(train="one.jsonl"))
    _, about = checked(config("sampling.max_prompt_tokens=9"))
    assert about == f"prompts     6 checked, their tokens: {LENGTHS}; limit 9, none is over the limit"


def test_more_end_tokens_than_the_sampler_takes_are_refused_before_the_start(place, monkeypatch):
    tokenizer = run_model_tokenizer(config())
    monkeypatch.setattr(preflight, "run_model_tokenizer", lambda _: tokenizer)
    tokenizer.eos_ids = frozenset(range(9))
    reason = "has 9 end tokens, at most 8 are possible; name fewer as eos_token_id in its generation_config"
    with pytest.raises(ConfigError, match=reason):
        dry_run(config("sampling.max_prompt_tokens=9"), place / "run")
    tokenizer.eos_ids = frozenset(range(8))
    assert "6 checked" in told(config("sampling.max_prompt_tokens=9"), place / "run")


def test_only_problems_that_the_run_uses_are_refused(place):
    few = ["batch.stages=1", "evaluation.problems=0"]
    used = {str(seed): checked_count(config(*few, f"seed={seed}")) for seed in range(24)}
    assert set(used.values()) == {2, None}  # with some seeds, a run of two prompts has no overlong one


def test_a_warm_start_reads_only_the_solutions_that_it_trains_on():
    short = config("warm_start.updates=3", "warm_start.rows_per_update=2")
    chosen = warm_start_problems(short, 100)
    assert len(set(chosen)) == 6 and chosen == sorted(chosen) and chosen != list(range(6))
    assert warm_start_problems(short, 6) == [0, 1, 2, 3, 4, 5]
    assert warm_start_problems(config("warm_start.updates=0"), 100) == []


def checked_count(config):
    try:
        return int(checked(config)[1].split()[1])
    except ConfigError:
        return None


def test_overlong_prompts_are_dropped_if_asked_for(place):
    drop = "sampling.overlong_prompts=drop"
    task, about = checked(config(drop))
    assert [problem.id for problem in task.train] == ["0", "1", "3"] and len(task.test) == 1
    assert about.endswith(f"their tokens: {LENGTHS}; limit 6, 2 are over the limit and are left out")
    with pytest.raises(ConfigError, match=r"task dataset: no training prompt has at most 2 tokens"):
        checked(config(drop, "sampling.max_prompt_tokens=2"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["warm_start.updates=1"], "name their column in task.options.columns.solution, or turn"),
        (["task.reward=my_rewards:raises"], "reward 'my_rewards:raises' fails for train.jsonl:1: problem 0 "),
        (["task.reward=my_rewards:leaves"], "error (SystemExit: 0 (my_rewards.py:5)); mend it, or allow"),
        (["task.reward=leaves:reward"], "reward 'leaves:reward': cannot import 'leaves': SystemExit(0)"),
        (["task.reward=my_rewards:fin"], "the module has no 'fin'; did you mean fine?"),
        (["task.reward=my_rewards:other"], "reward 'my_rewards:other': the module has no 'other'"),
        (["task.reward=nowhere:reward"], "reward 'nowhere:reward': cannot import 'nowhere'"),
        (["task.reward=my_reward:fine"], "; did you mean my_rewards? it must be in this folder, "),
        (["task.reward=maths"], "task.reward: reward is 'maths'; did you mean math? possible: exact, "),
        (
            ["task.options.reward=maths"],
            "task.options.reward: reward is 'maths'; did you mean math? possible: ",
        ),
        (["task.options.anser=1"], "task 'dataset' has no option 'anser'; "),
        (
            ["task.reward=[{name: exact, weight: 1}, {name: exakt, weight: 1}]"],
            "task.reward: reward is 'exakt'; did you mean exact? possible: exact, arithmetic, countdown,",
        ),
        (
            ["task.reward=[{name: 'my_rewards:fine', weight: 1}, {name: 'my_rewards:raises', weight: 1}]"],
            "reward 'my_rewards:raises' fails for train.jsonl:1: problem 0 ",
        ),
        (
            ["task.reward=code", "task.unsafe_sandbox=true"],
            "train.jsonl:1: problem 0: its answer has no tests that can be read: possible: inputs and ",
        ),
        (["model.attention=cudnn"], "model.attention: cudnn needs a GPU, this machine has a CPU; use auto"),
        (["model.attention=splash"], "model.attention: splash needs a TPU, this machine has a CPU; use auto"),
        (
            ["task.options.train=odd.jsonl"],
            "odd.jsonl:1: problem 0: its prompt cannot be made into tokens: Char",
        ),
    ],
)
def test_what_would_fail_later_is_one_line_before_the_start(place, overrides, message):
    (place / "odd.jsonl").write_text('{"question": "what?", "answer": "2"}\n')
    long = ["sampling.max_prompt_tokens=9", "task.scorers=0"]
    for start in (dry_run, stages.train):
        if start is dry_run and "model.attention" in message:
            continue  # the plan of a dry run says it
        with pytest.raises(ValueError) as error:
            start(config(*long, *overrides), place / "run")
        assert message in str(error.value) and "\n" not in str(error.value)
    assert not (place / "run").exists()


def test_a_reward_may_fail_if_the_config_allows_it(place):
    long = ["sampling.max_prompt_tokens=9", "task.scorers=0", "task.reward=my_rewards:raises"]
    assert "prompts     6 checked" in told(config(*long, "task.max_failed=1"), place / "run")
    text = told(config(*long[:2], "task.reward=my_rewards:fine"), place / "run")
    line = (
        "\nreward      my_rewards:fine gives 1 for the answer of train.jsonl:1: problem 0, and 0 for an empty"
    )
    assert line in text and text.endswith(" response")
    columns = "task.options.columns={template: '{question}', answer: answer, solution: solution}"
    (place / "test.jsonl").write_text('{"question": "4+4=", "answer": "8", "solution": "8"}\n')
    text = told(config(*long[:2], columns, "task.reward=my_rewards:fine"), place / "run")
    assert "my_rewards:fine gives 1 for the worked solution of train.jsonl:1: problem 0, and 0 for" in text


def test_a_reward_of_the_task_that_the_config_replaces_is_not_loaded(place):
    fits = ["sampling.max_prompt_tokens=9", "task.options.reward=nowhere:reward"]
    with pytest.raises(ConfigError, match=r"^task.options.reward: reward 'nowhere:reward': cannot import"):
        told(config(*fits), place / "run")
    assert "6 checked" in told(config(*fits, "task.reward=exact"), place / "run")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "0.0",
            "gives 0 for the answer of train.jsonl:5: problem 4, and 0 for an empty response; none of the "
            "first 5 got more than 0: is that meant?",
        ),
        (
            "5.0 * (text != '')",
            "gives 5 for the answer of {}, and 0 for an empty response; accuracies are then mean rewards, "
            "not shares of right answers",
        ),
        (
            "Verdict(float(text != ''), 'odd')",
            "gives 1 for the answer of {}, and 0 for an empty response",
        ),
        (
            "0.5",
            "gives 0.5 for the answer of {}, and 0.5 for an empty response; is an empty response meant to "
            "get as much as a right one?",
        ),
    ],
)
def test_a_reward_that_does_not_tell_right_from_wrong_is_questioned(place, value, said):
    code = f"from mugrpo_jax.tasks import Verdict\ndef same(text, problem): return {value}\n"
    (place / "my_rewards.py").write_text(code)
    mine = config("sampling.max_prompt_tokens=9", "task.scorers=0", "task.reward=my_rewards:same")
    assert told(mine, place / "run").endswith(said.format("train.jsonl:1: problem 0"))


def test_a_reward_is_tried_until_a_solution_is_right(place):
    text = "def second(text, problem): return float(problem.id != '0' and text == problem.answer)\n"
    (place / "my_rewards.py").write_text(text)
    mine = config("sampling.max_prompt_tokens=9", "task.scorers=0", "task.reward=my_rewards:second")
    line = "gives 1 for the answer of train.jsonl:2: problem 1, and 0 for an empty response"
    assert told(mine, place / "run").endswith(line)


def test_only_the_first_reward_is_asked_whether_it_tells_right_from_wrong(place):
    (place / "my_rewards.py").write_text("def half(text, problem): return 0.5\n")
    several = "task.reward=[{name: exact, weight: 0}, {name: 'my_rewards:half', weight: 1}]"
    mine = config("sampling.max_prompt_tokens=9", "task.scorers=0", several)
    assert told(mine, place / "run").endswith("problem 0, and 0.5 for an empty response")


def test_a_reward_that_forgets_wrong_responses_is_refused(place):
    (place / "my_rewards.py").write_text(
        "def forgets(text, problem):\n    if text == problem.answer:\n        return 1.0\n"
    )
    mine = config("sampling.max_prompt_tokens=9", "task.scorers=0", "task.reward=my_rewards:forgets")
    with pytest.raises(ConfigError) as error:
        told(mine, place / "run")
    assert "fails for train.jsonl:1: problem 0 with an empty response: invalid (returned None; " in str(
        error.value
    )
    assert "give wrong responses a number too, such as 0.0, or allow" in str(error.value)
    assert not (place / "run").exists()


def test_a_dry_run_says_how_often_problems_repeat(place):
    fits = ["sampling.max_prompt_tokens=9", "batch.prompts_per_update=5"]
    assert "5 problems to train on, 1 held out" in told(config(*fits, "batch.stages=1"), place / "run")
    text = told(config(*fits, "batch.stages=1000"), place / "run")
    assert "5 problems to train on (each about 1,000 times), 1 held out" in text


def test_held_out_problems_that_are_trained_on_are_counted(place):
    fits = config("sampling.max_prompt_tokens=9")
    assert "also in the training" not in told(fits, place / "run")
    with (place / "test.jsonl").open("a") as file:
        file.write('{"question": "3+3=", "answer": "6"}\n{"question": "1+1=", "answer": "2"}\n')
    about = "held out    2 of 3 are also in the training data, the first: test.jsonl:2: problem 1; leave them"
    assert about in told(fits, place / "run")


def test_training_prompts_that_are_there_twice_are_counted(place):
    fits = config("sampling.max_prompt_tokens=9")
    assert "repeated" not in told(fits, place / "run")
    with (place / "train.jsonl").open("a") as file:
        file.write('{"question": "1+1=", "answer": "2"}\n')
    about = (
        "repeated    1 of 6 prompts repeats an earlier one, the first: train.jsonl:6: problem 5, as train.jso"
    )
    assert about in told(fits, place / "run")
    with (place / "train.jsonl").open("a") as file:
        file.write('{"question": "1+1=", "answer": "3"}\n')
    about = "repeated    2 of 7 prompts repeat earlier ones, 1 with another answer, the first: train.jsonl:7"
    assert about in told(fits, place / "run")


def test_a_reward_whose_file_changed_since_the_start_is_named(place):
    mine = config("sampling.max_prompt_tokens=9", "task.scorers=0", "task.reward=my_rewards:fine")
    chosen, _ = choose_settings(mine, run_model_shape(mine), run_mesh(mine))
    RunFolder(place / "run", chosen)
    claim_data(place / "run", load_task("dataset", **mine.task.options).sources)
    assert "has changed" not in told(mine, place / "run")
    claim_code(place / "run", code_digests(mine.own_functions))
    (place / "my_rewards.py").write_text(REWARDS + "# better\n")
    assert "has changed" not in told(mine, place / "run")  # nothing depends on it yet
    (place / "run" / "metrics.jsonl").write_text('{"kind": "stage", "updates": 0}\n')
    text = told(mine, place / "run")
    about = (
        f"my_rewards:fine: its file has changed since the run in {place / 'run'} was started; earlier rewards"
    )
    assert text.splitlines()[-1].startswith(about)
    claim_code(place / "run", code_digests(mine.own_functions))  # the first one counts
    assert told(mine, place / "run", overwrite=True).splitlines()[-1].startswith(about)


def test_data_that_changed_since_the_start_is_refused_by_its_name(place):
    mine = config("sampling.max_prompt_tokens=9")
    chosen, _ = choose_settings(mine, run_model_shape(mine), run_mesh(mine))
    RunFolder(place / "run", chosen)
    claim_data(place / "run", load_task("dataset", **mine.task.options).sources)
    dry_run(mine, place / "run")
    (place / "run" / "metrics.jsonl").write_text('{"kind": "stage", "updates": 0}\n')
    with (place / "train.jsonl").open("a") as file:
        file.write('{"question": "5+5=", "answer": "10"}\n')
    for start in (dry_run, stages.train):
        with pytest.raises(ConfigError, match=r"^train.jsonl: what it contains has changed since the run"):
            start(mine, place / "run")
    stored = (place / "run" / "data.json").read_bytes()
    (place / "run" / "data.json").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"data.json: not valid JSON \(.*\); if the data .* remove this file"
    ):
        dry_run(mine, place / "run")
    (place / "run" / "data.json").write_bytes(stored)
    lines = []  # the data is checked and described also if the folder holds another run
    with pytest.raises(ConfigError, match=r"seed \(0 there, 1 here\)"):
        dry_run(config("sampling.max_prompt_tokens=9", "seed=1"), place / "run", say=lines.append)
    assert [line.split()[0] for line in lines] == ["data", "prompts"]
    with pytest.raises(ConfigError, match=r"2 of 7 prompts are too long"):
        dry_run(config("seed=1"), place / "run")
    moved = told(mine, place / "run", overwrite=True)
    assert moved.endswith(f"run would be moved to {place / 'run.old-1'}: train.jsonl has changed")
    (place / "run" / "metrics.jsonl").unlink()  # nothing depends on the data yet
    claim_data(place / "run", load_task("dataset", **mine.task.options).sources)
    assert "moved" not in told(mine, place / "run", overwrite=True)


def test_too_many_failed_rewards_are_one_line_with_the_most_frequent_reason():
    statuses, examples = {"ok": 1, "error": 20, "timeout": 3}, {"error": "problem 3: KeyError: 'x'"}
    with pytest.raises(
        ConfigError, match=r"stage 0: the reward failed for 23 of 24 .*: error \(problem 3: Key"
    ):
        check_failed(configs.load(None), "stage 0", statuses, examples, "mend it")
    check_failed(configs.load(None, ["task.max_failed=1"]), "stage 0", statuses, examples, "mend it")
    check_failed(configs.load(None), "stage 0", {"ok": 3, "error": 20}, examples, "mend it")
    check_failed(configs.load(None), "stage 0", {"error": 4}, examples, "mend it")  # too few to say
