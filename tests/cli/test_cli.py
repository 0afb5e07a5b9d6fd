"""Every command through `main`, on one tiny run that several tests share."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import huggingface_hub
import jax
import numpy as np
import pytest
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax import models, planning
from mugrpo_jax.cli.main import main
from mugrpo_jax.loop.preflight import dry_run
from mugrpo_jax.models.io.loading import load_model, tiny_shape
from mugrpo_jax.planning import disk_space
from mugrpo_jax.report import token_history as token_histories
from mugrpo_jax.report.token_history import token_history
from mugrpo_jax.rollouts import open_stage, read_groups
from mugrpo_jax.runs import environment as environments
from mugrpo_jax.sampling import generate
from mugrpo_jax.setup import trained_model as trained_models
from mugrpo_jax.setup.model_card import model_card
from mugrpo_jax.setup.trained_model import trained_model
from mugrpo_jax.tasks import load_task
from mugrpo_jax.training import CheckpointStore, Cursor, TrainState

CONFIG = {
    "model": {
        "source": "tiny",
        "tiny": {
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "intermediate_size": 48,
        },
        "compute_dtype": "float32",
        "sampling_dtype": "float32",
        "remat": "none",
    },
    "task": {
        "name": "arithmetic",
        "options": {"difficulty": 2, "train": 100, "test": 16},
        "reward": "cli_rewards:even",
        "scorers": 0,
    },
    "sampling": {"max_prompt_tokens": 15, "max_response_tokens": 17, "slots": 8, "prompts_per_shard": 4},
    "batch": {
        "prompts_per_update": 4,
        "responses_per_prompt": 4,
        "updates_per_stage": 2,
        "stages": 2,
        "tokens_per_micro_batch": 512,
        "length_multiple": 32,
    },
    "optimizer": {"learning_rate": 1e-3},
    "evaluation": {"problems": 8},
    "checkpoints": {"keep_last": 1, "keep_stage_starts": True},
}
MISSING = "the following arguments are required"
COMMANDS = [
    "init",
    "config",
    "train",
    "sft",
    "generate",
    "eval",
    "rollouts",
    "rollouts export",
    "rollouts import",
    "replay",
    "export",
    "report",
    "plan",
]
REWARDS = """
    import time

    def even(text, problem):
        return float(len(text) % 2 == 0)

    def raises(text, problem):
        raise RuntimeError("no idea")

    def only_answers(text, problem):
        if len(text) > 2 and text != problem.solution:
            raise ValueError("no answer")
        return float(text == problem.solution) if text in ("", problem.solution) else text / 2

    def nan(text, problem):
        return float("nan")

    def hangs(text, problem):
        if len(text) % 8 == 0:
            time.sleep(60)
        return 1.0
"""


@pytest.fixture(scope="module")
def place(program_folder):
    """A folder with a config and reward functions; programs compiled once for all runs in it."""
    folder = program_folder
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "cli_rewards.py").write_text(textwrap.dedent(REWARDS))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def run(place):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(["train", str(place / "tiny.yaml"), "--out", str(place / "run")]) == 0
    (place / "shown.txt").write_text(shown.getvalue())
    return place / "run"


@pytest.fixture(scope="module")
def exported(run):
    """The newest checkpoint of the run as a Hugging Face folder."""
    assert main(["export", str(run), str(run.parent / "exported")]) == 0
    return run.parent / "exported"


@pytest.fixture
def command(place, capsys):
    """Runs a command; returns its exit code and what it printed."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def refused(command):
    """Runs a command that must fail; returns its one line."""

    def call(*arguments):
        code, _, error = command(*arguments)
        assert code == 2
        lines = [line for line in error.split("\n") if line.startswith("mugrpo: ")]
        assert len(lines) == 1 and error.endswith(lines[0] + "\n")
        return lines[0].removeprefix("mugrpo: ")

    return call


def journal(folder, kind):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


def final_params(folder, step):
    return jax.device_get(trained_model(folder, step).params)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# -- help


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from mugrpo_jax.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    )
    code += (
        "heavy = {'jax', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"    {name} " in done.stdout.replace("\n", " ")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  mugrpo {name} " in shown


def test_a_run_notes_the_commit_of_its_source_tree(run, tmp_path, monkeypatch):
    noted = json.loads((run / "environment.json").read_text())
    assert noted["jax"] == jax.__version__
    root = Path(__file__).parents[2]
    if shutil.which("git") and (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True)
        assert head.stdout.startswith(noted["commit"].removesuffix("-dirty"))
        someone = ["-c", "user.name=n", "-c", "user.email=e"]
        for words in (["init", "-q"], [*someone, "commit", "-q", "--allow-empty", "-m", "theirs"]):
            subprocess.run(["git", "-C", tmp_path, *words], check=True)
    package = tmp_path / "site-packages" / "mugrpo_jax"  # installed inside another project's tree
    package.mkdir(parents=True)
    monkeypatch.setattr(environments, "__file__", str(package / "runs" / "environment.py"))
    assert "commit" not in environments.environment()


# -- the plan


def test_a_dry_run_prints_the_plan_and_leaves_nothing(place, command):
    arguments = [place / "tiny.yaml", "batch.epochs_per_stage=2"]
    before = {id(array) for array in jax.live_arrays()}
    code, shown, _ = command("train", *arguments, "--out", place / "dry", "--dry-run")
    assert code == 0 and not (place / "dry").exists()
    # Some jax set-up may keep scalars; no array of the model's size appeared.
    assert not [a for a in jax.live_arrays() if id(a) not in before and a.size > 100]
    assert "2 stages × 2 updates = 4 updates" in shown
    assert "generates 16 responses to 4 prompts, at most 272 tokens; trains on 32 responses" in shown
    assert "micro-batches of 512, 256" in shown and "tokens, in rows of up to 32; compiled" in shown
    assert "8 slots" in shown
    hosts, _, shown = shown.partition("\n")
    assert hosts == f"hosts: 1 process, {jax.device_count()} cpu devices"
    plan, about_data = shown[: shown.index("data   ")], shown[shown.index("data   ") :]
    assert command("plan", *arguments) == (0, plan, "")
    assert about_data.startswith("data        ") and " problems to train on, " in about_data
    assert "; the first: '" in about_data and about_data.count("\n") == 5
    lengths = "median 7, 95 % have at most 7, 99 % at most 7, longest 7"
    assert f"prompts     16 checked, their tokens: {lengths}; limit 15" in about_data
    start = f"train {place / 'tiny.yaml'} batch.epochs_per_stage=2 --out {place / 'dry'}"
    assert about_data.endswith(f"nothing was written\nstart       mugrpo {start}\n")
    assert (
        "reward      cli_rewards:even gives 1 for the worked solution of problem arithmetic-train-"
        in about_data
    )


def test_a_closed_pipe_ends_no_work(run, tmp_path, closed_pipe, monkeypatch):
    """`mugrpo rollouts export ... | true` writes everything; `mugrpo rollouts ... | true` may stop early."""
    monkeypatch.setattr(sys, "stdout", closed_pipe())
    assert main(["rollouts", str(run)]) == 0
    monkeypatch.setattr(sys, "stdout", closed_pipe())
    monkeypatch.setattr(sys, "stderr", closed_pipe())
    assert main(["rollouts", "export", str(run), "--out", str(tmp_path / "open")]) == 0
    assert len(list((tmp_path / "open").glob("stage-*"))) == CONFIG["batch"]["stages"]


def test_the_place_of_an_error_in_the_code_is_printed_on_request(command, monkeypatch):
    monkeypatch.setenv("MUGRPO_TRACEBACK", "1")
    code, _, error = command("train", "no_such_config.yaml")
    first, *_, last = error.strip().split("\n")
    assert (code, first) == (2, "Traceback (most recent call last):")
    assert last.startswith("mugrpo: ") and "no_such_config.yaml" in last


def test_a_broken_pipe_to_another_process_is_an_error(run, refused, monkeypatch):
    def broken(arguments):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("mugrpo_jax.cli.export.run", broken)
    assert refused("export", run, "models/x") == "[Errno 32] Broken pipe"


def test_back_to_and_overwrite_contradict_each_other_before_anything_is_moved(run, place, refused):
    message = refused("train", place / "tiny.yaml", "seed=5", "--out", run, "--back-to", 2, "--overwrite")
    assert message.startswith(
        f"--back-to: {run} cannot go back, because --overwrite would move it away (seed"
    )
    assert run.is_dir() and not run.with_name("run.old-1").exists()


def test_a_replay_has_no_rollouts_to_replay_or_to_sample(run, tmp_path, refused):
    replayed = configs.to_dict(configs.load(run / "config.yaml", [f"replay.run={run}"]))
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.yaml").write_text(yaml.safe_dump(replayed))
    message = refused("replay", tmp_path / "again", "--out", tmp_path / "more")
    assert message == f"{tmp_path / 'again'}: is itself a replay of {run} and has no rollouts; replay {run}"
    assert "is a replay, which has its rollouts already" in refused("sample", tmp_path / "again")


def test_a_dry_run_says_that_the_disk_is_too_small(place, command, monkeypatch):
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    code, shown, _ = command("train", place / "tiny.yaml", "--out", place / "full", "--dry-run")
    assert code == 0 and f"disk        {place / 'full'}: the run needs up to " in shown


def test_memory_that_is_too_small_is_said_in_a_dry_run_and_refused_by_train(place, refused, capsys):
    large = {"hidden_size": 32768, "num_layers": 100, "num_heads": 64, "num_kv_heads": 64}
    huge = f"model.tiny={json.dumps(large | {'intermediate_size': 98304})}"
    command = "train", place / "tiny.yaml", huge, "--out", place / "huge"
    assert main([*map(str, command), "--dry-run"]) == 0
    said = "everything except the memory, which is too small on this machine; nothing was written"
    assert said in capsys.readouterr().out
    assert refused(*command).startswith("memory: the training state takes ")
    assert not (place / "huge").exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8k", {}, "on the Hub; a dry run does not fetch it"),
        (
            "dataset",
            {"train": "hub:a/b:train", "test": "hub:a/b:test"},
            "on the Hub; a dry run does not fetch",
        ),
        (
            "dataset",
            {"train": "hub:a/b:train", "test": "FILE"},
            "0 problems to train on, 2 held out; the rest is",
        ),
        (
            "dataset",
            {"train": "FILE"},
            "2 problems to train on (each about 8 times), none held out to measure accuracy; the first: ",
        ),
    ],
)
def test_a_dry_run_reads_what_is_here(place, tmp_path, name, options, message):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+2=", "answer": "3"}\n{"question": "2+2=", "answer": "4"}')
    options = {key: value.replace("FILE", str(file)) for key, value in options.items()}
    config = configs.load(place / "tiny.yaml", [f"task.name={name}", f"task.options={json.dumps(options)}"])
    lines: list[str] = []
    unchecked = dry_run(config, tmp_path / "new", say=lines.append)
    assert lines[0].startswith(f"data        {message}")
    assert unchecked == ("the data on the Hub" if "a dry run does not fetch" in message else "")


def test_the_plan_counts_what_the_run_writes(run, place):
    plan = planning.plan_run(configs.load(place / "tiny.yaml"))
    stages, updates = journal(run, "stage"), journal(run, "update")
    assert len(updates) == plan.updates
    assert [stage["responses"] for stage in stages] == [plan.responses_per_stage] * plan.stages
    most = plan.responses_per_stage * CONFIG["sampling"]["max_response_tokens"]
    assert all(stage["response_tokens"] <= most for stage in stages)
    params = sum(leaf.size * 4 for leaf in jax.tree.leaves(final_params(run, 4)))
    # Weights, two moments, the anchor and the last gradient, and a few counters.
    assert 5 * params <= plan.checkpoint_bytes <= 5 * params + 64


def test_the_plan_of_a_folder_reads_only_its_config(tmp_path, place):
    shape = models.model_config.to_hf(tiny_shape(load_model("tiny").tokenizer, hidden_size=512))
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = configs.load(place / "tiny.yaml", [f"model.source={tmp_path}"])
    one = models.make_mesh(devices=jax.devices()[:1])
    plan = planning.plan_run(config, mesh=one)
    assert plan.memory.weights == 4 * plan.model.num_params
    assert plan.memory.optimizer == 2 * plan.memory.weights + 8  # two counters
    sharded = planning.plan_run(config, mesh=models.make_mesh(fsdp=4, tensor=2))
    # Matrices are split eight ways, norms are on every device.
    norms = 4 * plan.model.hidden_size * (2 * plan.model.num_layers + 1)
    assert sharded.memory.weights == (plan.memory.weights - norms) // 8 + norms


# -- training, and what comes of it


def test_a_finished_run_is_left_as_it_is(run, place, command):
    before = (run / "metrics.jsonl").read_bytes()
    code, shown, _ = command("train", place / "tiny.yaml", "--out", run)
    assert code == 0 and "2 stages" in shown
    assert (run / "metrics.jsonl").read_bytes() == before
    assert f"{run}: this run is finished, all its updates are done" in shown and "continuing" not in shown
    assert shown.endswith(ending((place / "shown.txt").read_text()))


def test_the_guide_lists_every_file_of_a_run(run):
    text = (Path(__file__).parents[2] / "docs" / "guides" / "resume.md").read_text()
    block = text.partition("```text\nruns/mine/")[2].partition("```")[0]
    listed = {*re.findall(r"^  ([\w.]+)", block, re.M), "environment.json"}
    assert {"chosen.json", "rollouts"} <= {path.name for path in run.iterdir()} <= listed
    [choice] = json.loads((run / "chosen.json").read_text())
    assert choice["key"] == "model.scan_layers" and choice["reason"].startswith("a scan over the layers")


def ending(shown):
    return shown[shown.index("finished    ") :]


def test_a_run_ends_with_a_summary_and_says_before_how_long_it_will_take(run, place):
    shown = (place / "shown.txt").read_text()
    first, *_, last = (
        f"{record['accuracy']:.3f} ± {record['standard_error']:.3f}" for record in journal(run, "evaluation")
    )
    before, after = (f"{record['reward']:.3f}" for record in journal(run, "stage"))
    accuracies = {record["updates"]: record["accuracy"] for record in journal(run, "evaluation")}
    best = max(accuracies, key=lambda updates: (accuracies[updates], updates))
    about = (
        f"after {best} updates, accuracy {accuracies[best]:.3f}: mugrpo export {run} models/run --step {best}"
    )
    better = [] if accuracies[best] == accuracies[4] else [f"best        {about}"]
    lines = ending(shown).splitlines()
    assert lines[0].startswith(f"finished    {run}: 2 stages, 4 updates, in ")
    assert lines[1].startswith("start       first token after ") and ", first update after " in lines[1]
    assert lines[2:] == [
        f"accuracy    {first} before, {last} after (on held-out problems)",
        f"reward      {before} before, {after} after (mean of the first and the last stage)",
        f"report      {run / 'report.html'}",
        *better,
        f"next        mugrpo export {run} models/run",
    ]
    (line,) = [line for line in shown.splitlines() if line.startswith("stage 1: 32 responses")]
    assert line.endswith(" left for the whole run")


def test_another_config_in_the_same_folder_is_refused(run, place, refused):
    message = refused("train", place / "tiny.yaml", "--out", run, "seed=3")
    assert "seed (0 there, 3 here)" in message and "config.yaml" in message


def test_rollouts_are_described(run, command, refused):
    code, shown, _ = command("rollouts", run)
    assert code == 0
    assert shown.count("32 responses to 8 prompts") == 2
    assert "scored    ok × 32" in shown and "median" in shown and "length × " in shown
    assert "-- prompt" not in shown
    code, shown, _ = command("rollouts", run, "--stage", 1, "--show", 3, "--reward", "1:1")
    assert "stage 0" not in shown and shown.count("-- prompt") == 3 == shown.count("reward 1,")
    rewarded = round(journal(run, "stage")[1]["reward"] * 32)
    assert f"{rewarded} with a reward from 1 to 1" in shown and 0 < rewarded < 32
    assert "+" in shown  # the prompts, as text
    assert refused("rollouts", run, "--stage", 9) == f"{run}: no stage 9; it has 0, 1"


def test_a_response_is_followed_through_the_checkpoints_of_its_stage(run, command):
    """The run itself wrote the log-probs of some responses after update 2 into `samples`."""
    sample = json.loads((run / "samples" / "stage-000.json").read_text())[0]
    stage = open_stage(run / "rollouts" / "stage-000")
    stored = [rollout for group in read_groups(stage) for rollout in group.rollouts]
    behavior = [[round(float(value), 4) for value in rollout.logprobs] for rollout in stored]
    number = behavior.index(sample["behavior"])
    found = token_history(run, stage=0, response=number)
    assert found.updates.tolist() == [0, 2] and found.first_triggers == [None, None]
    assert found.reward == sample["reward"] and found.pieces == sample["pieces"]
    assert abs(found.log_ratio[0]).max() < 1e-4
    moved = np.array(sample["logp"]) - sample["behavior"]
    assert abs(moved).max() > 1e-3
    np.testing.assert_allclose(found.log_ratio[1], moved, atol=2e-4)
    (first,) = generate(trained_model(run, 0), [found.prompt], temperature=0.0, max_tokens=17, progress=False)
    assert found.texts[0] == first["text"]
    shown = command("rollouts", run, "--stage", 0, "--show", 32)[1]
    assert f"response {number}: reward {found.reward:g}" in shown


def test_a_planted_trigger_with_the_longest_suffix_is_followed(run, command, monkeypatch, tmp_path):
    wrong = []

    def planted(self, params, rows):
        if len(rows) == 1:
            return [np.zeros(len(rows[0].rollout.tokens), np.float32)]
        wrong.extend(rows)
        ratios = [np.zeros(len(row.rollout.tokens), np.float32) for row in rows]
        ratios[0][-1] = -30.0  # a lower ratio, but nothing behind it
        ratios[-1][-4] = -10.0
        return ratios

    monkeypatch.setattr(token_histories._Policies, "log_ratios", planted)
    code, shown, _ = command("rollouts", run, "--history", "-o", tmp_path / "new" / "map.html")
    assert code == 0 and "no token becomes a trigger" in shown
    assert all(row.advantage < 0 for row in wrong) and len(wrong) > 1
    chosen = int(shown.split()[1])
    assert token_history(run, response=chosen).advantage == wrong[-1].advantage
    assert wrong[-1].group.index == chosen // 4
    assert wrong[-1].rollout == wrong[-1].group.rollouts[chosen % 4]
    assert (tmp_path / "new" / "map.html").read_text().count("<svg") == 1


def test_a_history_that_cannot_be_shown_is_refused_in_one_line(run, refused, tmp_path):
    assert "no response 32; it has 0 to 31" in refused("rollouts", run, "--history", 32)
    assert "no stage 2; it has 0, 1" in refused("rollouts", run, "--history", "--stage", 2)
    assert "possible: .png, .svg" in refused("rollouts", run, "--history", "-o", tmp_path / "map.txt")
    assert "add --history" in refused("rollouts", run, "-o", tmp_path / "map.png")
    shutil.copy(run / "config.yaml", tmp_path)
    assert "not complete yet" in refused("rollouts", tmp_path, "--history")
    shutil.copytree(run / "rollouts", tmp_path / "rollouts")
    message = refused("rollouts", tmp_path, "--history")
    assert "keeps 0 of the checkpoints from update 0 to 2" in message
    assert "checkpoints.every=16 checkpoints.keep_last=100 checkpoints.keep_stage_starts=true" in message


def test_an_exported_model_is_the_trained_one(run, tmp_path, command):
    assert command("export", run, tmp_path / "out", "--step", 2)[0] == 0
    assert same(load_model(tmp_path / "out").params, final_params(run, 2))
    assert not same(load_model(tmp_path / "out").params, final_params(run, 4))
    assert command("export", run, tmp_path / "half", "--best", "--dtype", "bfloat16")[0] == 0
    assert load_model(tmp_path / "half").params["embed"].dtype == "bfloat16"


def test_transformers_loads_an_exported_model(run, tmp_path, command):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert command("export", run, tmp_path / "out")[0] == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_model(tmp_path / "out")
    tokens = tokenizer("12+34=")["input_ids"]
    assert tokens == ours.tokenizer.encode("12+34=", start=True)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    found = models.logits(ours.model, ours.params, np.array([tokens]))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_best_checkpoint_is_kept_and_found(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", configs.CheckpointsSection(keep_last=1, keep_best=1))
    count = jax.numpy.zeros((), int)
    state = TrainState({"w": jax.numpy.zeros(2)}, (), count, count, None, None)
    for updates, accuracy in ((0, None), (1, 0.5), (2, 0.9), (3, 0.1), (4, None)):
        store.save(state, Cursor(updates=updates), accuracy=accuracy)
        store.wait()
    store.close()
    store = CheckpointStore(tmp_path / "checkpoints")
    assert (store.steps(), store.best(), store.latest()) == ([2, 4], 2, 4)
    store.close()


def test_every_stage_start_is_kept_when_asked_for(run):
    store = CheckpointStore(run / "checkpoints")
    assert store.steps() == [0, 2, 4]
    store.close()


def test_eval_scores_a_run_and_continues(run, tmp_path, command, refused):
    out = tmp_path / "eval.jsonl"
    task = [
        "--task",
        "arithmetic",
        "--option",
        "difficulty=2",
        "--option",
        "train=100",
        "--option",
        "test=16",
    ]
    how = ["--reward", "cli_rewards:even", "--samples", 2, "--max-tokens", 17, "--slots", 8, "--out", out]
    code, shown, _ = command("eval", run, "--step", 2, *task, *how)
    assert code == 0 and "avg@2" in shown and "arithmetic  16        2" in shown
    summary = json.loads((tmp_path / "eval.jsonl.summary.json").read_text())
    rows = out.read_text().splitlines()
    assert len(rows) == 32 and summary["problems"] == 16
    mean = np.mean([json.loads(row)["value"] for row in rows])
    assert summary["metrics"]["avg@2"]["mean"] == pytest.approx(mean)
    out.write_text("\n".join(rows[:5]) + "\n" + rows[5][:10])  # killed in the middle of a line
    assert command("eval", run, "--step", 2, *task, *how)[1] == shown
    assert out.read_text().splitlines()[:5] == rows[:5]
    assert "was begun with step=2, now it is 4" in refused("eval", run, *task, *how)
    assert "no checkpoint after 3 updates; kept: 0, 2, 4" in refused("eval", run, "--step", 3, *task, *how)


def test_eval_of_a_run_takes_its_task_options_reward_and_limits(run, tmp_path, command, refused):
    out = tmp_path / "eval.jsonl"
    code, shown, _ = command("eval", run, "--slots", 8, "--out", out)
    assert code == 0 and "arithmetic  16        1" in shown
    settings = json.loads((tmp_path / "eval.jsonl.settings.json").read_text())
    assert settings["max_tokens"] == 17 and settings["reward"] == "cli_rewards:even"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    problems = {problem.id: problem for problem in load_task("arithmetic", **CONFIG["task"]["options"]).test}
    assert {row["problem"] for row in rows} == problems.keys()
    assert all(row["prompt"] == problems[row["problem"]].prompt for row in rows)
    same = ["--task", "arithmetic", "--out", out]  # with its name, the run's task has the run's options too
    assert "was begun with max_tokens=17, now it is 4" in refused("eval", run, *same, "--max-tokens", 4)
    assert "was begun with other prompts" in refused("eval", run, *same, "--option", "difficulty=3")
    assert "was begun with reward='cli_rewards:even'" in refused("eval", run, *same, "--reward", "exact")
    for name in ("tiny", "runs/nope"):
        message = refused("eval", name, "--out", out)
        named = "only a run has a task of its own; name a --task; possible: arithmetic,"
        assert message.startswith(f"{name}: not the folder of a run; {named}")


def test_eval_never_reports_old_scores_for_something_new(place, exported, tmp_path, command, refused):
    model, out, data = tmp_path / "model", tmp_path / "eval.jsonl", tmp_path / "test.jsonl"
    shutil.copytree(exported, model)
    code, weights = place / "eval_rewards.py", model / "model.safetensors"
    how = ["--task", "dataset", "--option", f"test={data}", "--reward", "eval_rewards:one", "--out", out]
    how = ["eval", model, *how, "--max-tokens", 17, "--slots", 8]
    code.write_text("def one(text, problem): return 1.0")
    data.write_text('{"question": "1+2=", "answer": "3"}\n')
    status, shown, _ = command(*how)
    assert status == 0
    results = out.read_bytes()

    def refused_for(what, *more):
        fits = f"{out}: was begun with other {what} than now, so its responses would not fit; "
        assert refused(*how, *more) == fits + "choose another output or delete it"

    refused_for("prompts", "--option", "columns={template: '{question}='}")
    for what, file, change in (
        ("answers", data, lambda old: old.replace(b'"3"', b'"4"')),
        ("reward code", code, lambda old: old.replace(b"1.0", b"0.5")),
        ("weights", weights, lambda old: old[:-4] + bytes([old[-4] ^ 1]) + old[-3:]),  # the last bit of one
    ):
        old = file.read_bytes()
        file.write_bytes(change(old))
        refused_for(what)
        file.write_bytes(old)
    assert command(*how)[1] == shown  # all as before: nothing is left to do
    assert out.read_bytes() == results
    code.write_text("def one(text, problem): return str(problem.answer)")
    assert refused(*how[:-4], "--out", tmp_path / "new.jsonl") == (
        f"reward 'eval_rewards:one' fails for {data}:1: problem 0, with the right answer and with an empty "
        "response: invalid (returned '3'; possible: a finite number, at most 1e+30); mend it"
    )
    assert not (tmp_path / "new.jsonl").exists()


def test_eval_of_several_tasks_shows_their_average(run, tmp_path, command, refused):
    (tmp_path / "mine.jsonl").write_text(
        '{"question": "1+2=", "answer": "3"}\n{"question": "2+2=", "answer": "4"}'
    )
    files = [tmp_path / "mine.jsonl", tmp_path / "none.jsonl"]
    tasks = ["--task", "arithmetic,dataset", "--option", "arithmetic.test=8", "--option", f"test={files[0]}"]
    few = ["--option", "arithmetic.train=10", "--problems", 4, "--slots", 8]
    how = [*tasks, *few, "--reward", "cli_rewards:even", "--max-tokens", 8, "--out", tmp_path / "e.jsonl"]
    code, shown, _ = command("eval", run, *how)
    assert code == 0 and [line.split()[0] for line in shown.splitlines()[-4:]] == [
        "benchmark",
        "arithmetic",
        "dataset",
        "average",
    ]
    means = []
    for name, problems in (("arithmetic", 4), ("dataset", 2)):
        rows = [json.loads(row) for row in (tmp_path / f"e.{name}.jsonl").read_text().splitlines()]
        assert len(rows) == problems
        means.append(np.mean([row["value"] for row in rows]))
        summary = json.loads((tmp_path / f"e.{name}.jsonl.summary.json").read_text())
        assert summary["metrics"]["avg@1"]["mean"] == pytest.approx(means[-1])
    whole = json.loads((tmp_path / "e.jsonl.summary.json").read_text())
    assert whole["average"]["avg@1"]["mean"] == pytest.approx(np.mean(means))
    assert [b["name"] for b in whole["benchmarks"]] == ["arithmetic", "dataset"]
    assert whole["benchmarks"][1]["metrics"]["avg@1"]["mean"] == pytest.approx(means[1])
    assert "each task may be named once" in refused("eval", run, *how, "--task", "dataset,dataset")
    for option, message in (
        ("amc23.folder=x", "no --task amc23; possible: arithmetic, dataset"),
        ("dataset.columns={a", "'{a' is not valid YAML"),
        (f"dataset.test={files[1]}", f"{files[1]}: no such file"),
    ):
        assert message in refused("eval", run, *how, "--option", option)


def test_eval_checks_all_tasks_before_the_first_response(run, tmp_path, refused):
    (tmp_path / "mine.jsonl").write_text('{"question": "1+2=", "answer": "3"}')
    how = ["--task", "arithmetic,dataset", "--reward", "cli_rewards:even", "--max-tokens", 8]
    mine, out = ["--option", f"dataset.train={tmp_path / 'mine.jsonl'}"], ["--out", tmp_path / "e.jsonl"]
    assert "task dataset: no held-out problems to evaluate" in refused("eval", run, *how, *mine, *out)
    (tmp_path / "e.dataset.jsonl").write_text("{}\n")
    mine = ["--option", f"dataset.test={tmp_path / 'mine.jsonl'}"]
    assert "e.dataset.jsonl: exists, but not" in refused("eval", run, *how, *mine, *out)
    assert not (tmp_path / "e.arithmetic.jsonl").read_text()


def test_eval_names_an_answer_that_cannot_be_read(run, tmp_path, command):
    (tmp_path / "mine.jsonl").write_text('{"question": "1+2=", "answer": "\\\\frac{"}')
    task = ["--task", "dataset", "--option", f"test={tmp_path / 'mine.jsonl'}", "--reward", "math"]
    code, shown, _ = command("eval", run, *task, "--max-tokens", 8, "--out", tmp_path / "eval.jsonl")
    assert (
        code == 0
        and "dataset: 1 answer could not be scored; a failed reward counts as 0: error × 1 (" in shown
    )
    assert "answer '\\\\frac{' cannot be read as mathematics)" in shown


def test_generate_writes_responses(exported, tmp_path, command):
    (tmp_path / "in.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n')
    flags = ["--samples", 2, "--max-tokens", 5, "--seed", 1, "--dtype", "float32", "--slots", 4]
    where = ["--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"]
    code, shown, _ = command("generate", "--model", exported, *where, *flags)
    assert code == 0 and "4 responses written" in shown
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {(row["index"], row["sample"]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_generate_takes_one_prompt_and_the_folder_of_a_run(run, tmp_path, command, refused):
    how = ["--prompt", "1+2=", "--slots", 4, "--samples", 2]
    code, shown, plan = command("generate", "--model", run, "--step", 2, *how)
    assert "4 slots × 32 cache entries" in plan  # 5 of the prompt + 17, the longest response of the run
    records = generate(trained_model(run, 2), "1+2=", samples=2, max_tokens=17, slots=4, progress=False)
    assert code == 0 and shown == "".join(f"--- response {i}\n{r['text']}\n" for i, r in enumerate(records))
    out = ["--out", tmp_path / "out.jsonl"]
    assert "2 responses written" in command("generate", "--model", run, "--step", 2, *how, *out)[1]
    message = refused("generate", "--model", run, *how, *out)
    assert f"was begun with model='{run} after 2 updates', now it is '{run} after 4 updates'" in message
    assert "only runs have checkpoints" in refused("generate", "--model", "tiny", "--best", *how)
    assert refused("generate", "--model", "tiny", "--prompts", tmp_path / "in.jsonl").startswith(
        "--out is missi"
    )


def test_export_takes_any_model(exported, tmp_path, command, monkeypatch):
    monkeypatch.setattr(trained_models, "loading_mesh", lambda shape: None)  # one device is faster to compile
    assert command("export", "tiny", tmp_path / "tiny")[0] == 0
    ours, theirs = load_model("tiny"), load_model(tmp_path / "tiny")
    assert same(theirs.params, ours.params) and theirs.tokenizer.alphabet == ours.tokenizer.alphabet
    assert command("export", exported, tmp_path / "again", "--dtype", "bfloat16")[0] == 0
    assert same(load_model(tmp_path / "again").params, load_model(exported, dtype="bfloat16").params)


def test_export_pushes_to_the_hub_with_a_model_card(run, tmp_path, command, refused, monkeypatch):
    api = create_autospec(huggingface_hub.HfApi, instance=True)  # refuses arguments that the real one refuses
    stand_in = type("HfApi", (), {"__new__": lambda cls: api})  # a class: transformers uses it in a type
    monkeypatch.setattr(huggingface_hub, "HfApi", stand_in)
    out = tmp_path / "out"
    code, shown, _ = command("export", run, out, "--step", 2, "--push", "me/first", "--private")
    pushed = "written from the checkpoint after 2 updates and pushed to me/first on the Hugging Face Hub\n"
    assert code == 0 and f"{out}: {pushed}" in shown
    api.create_repo.assert_called_once_with("me/first", private=True, exist_ok=True)
    pushed = api.upload_folder.call_args.kwargs
    assert (pushed["repo_id"], pushed["folder_path"]) == ("me/first", out)
    card = (out / "README.md").read_text()
    about = yaml.safe_load(card.split("---\n")[1])
    assert about["library_name"] == "transformers" and "base_model" not in about  # `tiny` is not on the Hub
    first, middle, _ = journal(run, "evaluation")
    for text in (
        "`mu_grpo`",
        "`arithmetic` (difficulty: 2,",
        "2 of 2 stages × 2",
        'from_pretrained("me/first")',
    ):
        assert text in card
    assert f"{first['accuracy']:.1%} ± " in card and f"{middle['accuracy']:.1%} ± " in card

    api.upload_folder.side_effect = OSError("no network\ntoday")
    message = refused("export", run, tmp_path / "kept", "--push", "me/first")
    assert "me/first: the Hugging Face Hub did not take it (OSError: no network today); the model" in message
    assert f"hf upload me/first {tmp_path / 'kept'}" in message and load_model(tmp_path / "kept")
    api.create_repo.side_effect = PermissionError("401")
    message = refused("export", run, tmp_path / "none", "--push", "me/first")
    assert message.endswith("log in with `hf auth login` or set HF_TOKEN to a token that may write")
    assert "expected OWNER/NAME" in refused("export", run, tmp_path / "none", "--push", "first")
    assert not (tmp_path / "none").exists()


def test_a_model_card_tells_nothing_about_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = CONFIG | {
        "model": {"source": "models/mine"},
        "task": {"name": "gsm8k", "options": {"folder": "/home/me/gsm8k"}},
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    card = model_card("run", 2, "me/first")
    assert "`mine`" in card and "folder: gsm8k" in card and "/home" not in card and "models/" not in card
    assert "was not measured" in card
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in model_card("smollm2-135m", None, "me/copy")
    assert "base_model: Qwen/Qwen3-8B-Base" in model_card("Qwen/Qwen3-8B-Base", None, "me/copy")


def test_report_prints_a_summary_and_draws(run, command):
    code, shown, _ = command("report", run)
    assert code == 0 and "held-out accuracy" in shown
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert command("report", run, "-o", run / "overview.png")[0] == 0
    assert (run / "overview.png").read_bytes().startswith(b"\x89PNG")


# -- replay


def test_a_replay_with_the_same_settings_ends_with_the_same_parameters(run, tmp_path, command):
    for stage, end in ((0, 2), (1, 4)):
        out = tmp_path / f"again-{stage}"
        code, shown, _ = command("replay", run, "--stage", stage, "--out", out)
        assert code == 0 and f"replays stage {stage} of {run}" in shown
        assert same(final_params(out, end), final_params(run, end))
        assert not (out / "rollouts").exists()
        mine = [record["loss"] for record in journal(out, "update")]
        assert mine == [record["loss"] for record in journal(run, "update") if record["stage"] == stage]


def test_an_exported_and_imported_stage_replays_to_the_same_parameters(
    run, place, tmp_path, command, refused
):
    code, shown, _ = command("rollouts", "export", run, "--stage", 0, "--out", tmp_path)
    assert code == 0 and f"{tmp_path / 'stage-000.jsonl'}: 32 responses" in shown
    stage = tmp_path / "stage"
    code, shown, _ = command("rollouts", "import", tmp_path / "stage-000.jsonl", "--out", stage)
    assert code == 0 and "32 responses to 8 prompts, written by mugrpo" in shown
    shown = command("rollouts", stage, "--show", 1, "--model", run)[1]
    assert shown == command("rollouts", run, "--stage", 0, "--show", 1)[1]
    assert "name its model with --model" in refused("rollouts", stage, "--show", 1)
    replay = ["replay", stage, "--out", tmp_path / "again"]
    assert "name one with --config" in refused(*replay)
    replay += ["--config", place / "tiny.yaml"]
    for override, named in (
        ("batch.responses_per_prompt=2", "batch.responses_per_prompt: 2 does not fit"),
        ("batch.updates_per_stage=3", "batch.updates_per_stage: 3 does not fit"),
        ("sampling.max_response_tokens=2", "sampling.max_response_tokens: 2 is too small"),
    ):
        assert named in refused(*replay, override)
    code, shown, _ = command(*replay)
    assert code == 0 and "comparison.html" not in shown
    assert same(final_params(tmp_path / "again", 2), final_params(run, 2))
    rows = list(map(json.loads, (tmp_path / "stage-000.jsonl").read_text().splitlines()))
    rows[0]["reward"] += 1.0
    (tmp_path / "edited.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(stage)
    assert command("rollouts", "import", tmp_path / "edited.jsonl", "--out", stage)[0] == 0
    assert "what it contains has changed" in refused(*replay)


def test_a_replay_with_another_objective_ends_elsewhere(run, tmp_path, command):
    code, _, _ = command("replay", run, "objective.name=dr_grpo", "--stage", 1, "--out", tmp_path / "other")
    assert code == 0
    assert not same(final_params(tmp_path / "other", 4), final_params(run, 4))
    assert same(final_params(tmp_path / "other", 2), final_params(run, 2))
    assert "32 responses" in command("rollouts", tmp_path / "other")[1]
    mine, theirs = (token_history(folder, stage=1, response=5) for folder in (tmp_path / "other", run))
    assert mine.updates.tolist() == theirs.updates.tolist() == [0, 2]
    np.testing.assert_array_equal(mine.log_ratio[0], theirs.log_ratio[0])
    assert (mine.log_ratio[1] != theirs.log_ratio[1]).any()


def test_a_replay_may_leave_out_what_has_no_signal_and_penalise_length(place, tmp_path, command):
    run = tmp_path / "pairs"  # two responses per prompt often have the same reward
    pairs = ["batch.responses_per_prompt=2", "batch.stages=1"]
    assert command("train", place / "tiny.yaml", "--out", run, *pairs)[0] == 0
    keys = ["batch.equal_groups=drop", "overlong_buffer=17"]
    code, shown, _ = command("replay", run, *keys, "--stage", 0, "--out", tmp_path / "shaped")
    assert code == 0 and "groups with equal rewards are left out" in shown
    before, after = (journal(folder, "update")[:2] for folder in (run, tmp_path / "shaped"))
    assert all(record["overlong_penalty"] < 0 for record in after)
    assert [record["reward"] for record in after] == [record["reward"] for record in before]
    code, _, _ = command("replay", run, *keys[:1], "--stage", 0, "--out", tmp_path / "fewer")
    fewer = journal(tmp_path / "fewer", "update")
    silent = [record["equal_groups"] for record in before]
    assert code == 0 and max(silent) > 0
    for there, here in zip(before, fewer):
        assert here["equal_groups"] == there["equal_groups"]
        assert (here["tokens"] < there["tokens"]) == (there["equal_groups"] > 0)


def test_a_replay_does_no_warm_start_and_takes_no_knobs_of_another_objective(run, tmp_path, command, refused):
    knobs = {"objective": {"name": "mu_grpo", "knobs": {"veto": "none", "clip_high": 3.0}}}
    changed = yaml.safe_load((run / "config.yaml").read_text()) | knobs
    changed["warm_start"]["updates"] = 3
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(changed))
    (tmp_path / "rollouts").symlink_to(run / "rollouts")
    dry = ["replay", tmp_path, "--out", tmp_path / "out", "--dry-run"]
    code, shown, _ = command(*dry, "objective.name=grpo", "objective.knobs.clip_low=0.7")
    assert code == 0 and "warm start" not in shown and "objective grpo" in shown
    assert "objective grpo: the run's knobs of mu_grpo (clip_high: 3.0, veto: none) are not used" in shown
    assert "are not used" not in command(*dry, "objective.knobs.clip_high=4")[1]
    assert "grpo has no knob 'veto'" in refused(*dry, "objective.name=grpo", "objective.knobs.veto=none")
    own = configs.changed(configs.load(tmp_path / "config.yaml"), ["objective.knobs={}"])
    assert "warm start  3 updates" in str(planning.plan_run(own))


def test_a_replay_of_another_policy_is_refused(run, place, tmp_path, refused):
    out = ["--out", tmp_path / "out"]
    for override, named in (
        ("seed=1", "seed (0 there, 1 here)"),
        ("model.tiny.num_layers=2", "model.tiny.num_layers (1 there, 2 here)"),
        ("sampling.temperature=0.5", "sampling.temperature (1.0 there, 0.5 here)"),
        ("warm_start.updates=1", "warm_start.updates (0 there, 1 here)"),
    ):
        assert named in refused("replay", run, override, *out)
    stage = run / "rollouts" / "stage-000"
    too_small = f"sampling.max_prompt_tokens: 1 is too small for {stage}; possible: 7 or more"
    short = ["sampling.max_prompt_tokens=1", "evaluation.problems=0"]  # no held-out prompt is too long
    for dry in ([], ["--dry-run"]):
        assert refused("replay", run, *short, *dry, *out) == too_small
    assert "holds 8 prompts" in refused("replay", run, "batch.prompts_per_update=2", *out)
    assert "replay.stage: 5 is not one of the 2 stages" in refused("replay", run, "--stage", 5, *out)
    assert "not the folder of a run" in refused("replay", place, *out)
    lost = tmp_path / "lost"
    shutil.copytree(run, lost)
    shutil.rmtree(lost / "checkpoints" / "000002")
    message = refused("replay", lost, "--stage", 1, *out)
    assert "before stage 1 (2 updates) is not kept, only 0, 4" in message


# -- bad input


def test_bad_input_is_one_line_and_claims_no_folder(place, tmp_path, refused):
    config, out = place / "tiny.yaml", ["--out", tmp_path / "new"]
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n{"question": \n')
    held_out = tmp_path / "test.jsonl"
    held_out.write_text('{"question": "1+1=", "answer": "2"}\n')
    for overrides, message in (
        (["batch.stage=2"], "did you mean batch.stages?"),
        (["batch.stages=x"], "batch.stages must be an integer, got 'x'"),
        (["objective.knobs={veto:none}"], "write a space behind the colon of a key, as in {veto: none}"),
        (["task.reward={mine.py:f}"], 'a name with a colon as in {"mine.py:f": 1}; put the whole argument'),
        (
            ["objective.knobs={veto:"],
            "'{veto:' is not valid YAML; close each bracket, and put the whole argument",
        ),
        (["sampling.slots=7"], "slots=7 must be a positive multiple of the 8 devices"),
        (["batch.tokens_per_micro_batch=8"], "does not hold one row of 32 tokens"),
        (["model.source=nowhere"], "model 'nowhere': not found; possible: a Hugging Face folder"),
        (
            ["sampling.max_response_tokens=2000", "batch.tokens_per_micro_batch=4096"],
            "1,024 positions;",
        ),
        (["task.name=arithmetics"], "task is 'arithmetics'; did you mean arithmetic? possible: "),
        (
            ["task.options.dificulty=1"],
            "task 'arithmetic' has no option 'dificulty'; did you mean difficulty?",
        ),
        (["task.name=dataset", f"task.options={{train: {data}}}"], f"{data}:2: not JSON"),
        (["task.name=dataset", "task.options={train: no.jsonl}"], "no.jsonl: no such file"),
        (["task.name=dataset", f"task.options={{test: {held_out}}}"], "task dataset: no training problems"),
        (["task.name=gsm8k", "task.options={foldr: x}"], "task 'gsm8k' has no option 'foldr'"),
        (["mesh.fsdp=3"], "mesh: data=1 × fsdp=3 × tensor=1 does not multiply to the 8 devices"),
    ):
        for dry in ([], ["--dry-run"]):
            assert message in refused("train", config, *overrides, *out, *dry)
            assert not (tmp_path / "new").exists()
    assert "no such config file" in refused("train", place / "no.yaml", *out)
    for more in ((), ("--dry-run",)):
        message = refused("train", config, "--out", config / "below", *more)
        assert message == f"{config / 'below'}: cannot be written ({config} is a file)"


def test_bad_arguments_of_other_commands_are_one_line(run, place, tmp_path, refused):
    assert "not the folder of a run" in refused("rollouts", place)
    assert "not the folder of a run" in refused("report", place)
    _, _, inside = refused("report", run.parent).partition("(it has no config.yaml); runs in it: ")
    assert run.name in inside.split(", ")
    assert "not the folder of a run" in refused("export", place, tmp_path / "out")
    assert "exists already" in refused("export", run, run)
    again = refused("replay", run, "--out", run, "--overwrite", "--dry-run")
    assert again == f"--out: {run} holds the rollouts to replay; name another folder"
    assert "expected key=value" in refused("eval", run, "--task", "arithmetic", "--option", "x", "--out", "o")
    only = ["--task", "arithmetic", "--out", tmp_path / "o", "--best"]
    assert "only runs have checkpoints" in refused("eval", "tiny", *only)
    with pytest.raises(SystemExit, match="2"):
        main(["rollouts", str(run), "--reward", "high"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["eval", "RUN", "--task", "arithmetic", "--out", "o", "--problems", "-1"],
            "--problems: '-1': expected",
        ),
        (["eval", "RUN", "--task", "arithmetic", "--out", "o", "--samples", "0"], "--samples: '0': expected"),
        (["eval", "RUN", "--task", "arithmetic", "--out", ""], "--out: the path is empty"),
        (["eval", "RUN", "--task", "arithmetic", "--out", "o", "--seed", "9" * 20], "--seed: '9999"),
        (
            ["eval", "RUN", "--task", "arithmetic", "--out", "o", "--temperature", "nan"],
            "--temperature: 'nan'",
        ),
        (["generate", "--model", "tiny", "--prompts", "", "--out", "o"], "--prompts: the path is empty"),
        (["train", "CONFIG", "--out", ""], "--out: the path is empty"),
        (
            ["replay", "RUN", "--out", "o", "--stage", "-1"],
            "--stage: '-1': expected a whole number, at least 0",
        ),
        (["rollouts", "RUN", "--show", "x"], "--show: 'x': expected a whole number, at least 0"),
        (["export", "RUN", ""], "out: the path is empty"),
        (["report", ""], "RUN: the path is empty"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"argument {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (
            ["train", "quickstart", "--batch.stages=2"],
            "; a key of the config has no dashes: batch.stages=2\n",
        ),
        (["train", "quickstart", "--seed=2"], "; a key of the config has no dashes: seed=2\n"),
        (["train", "quickstart", "--track_drift=no"], " of the config has no dashes: track_drift=no\n"),
        (["train", "quickstart", "--batch.stages", "2"], " has no dashes: batch.stages=VALUE\n"),
        (["train", "quickstart", "--ouut=runs/x"], ": --ouut=runs/x\n"),
        (["report", "runs/x", "--a.b=c"], ": --a.b=c\n"),  # a command without keys of the config
    ],
)
def test_a_key_of_the_config_given_with_dashes_is_named_without(capsys, arguments, end):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.endswith(end)


def test_sft_without_updates_saves_the_model_as_it_is_and_names_the_next_command(place, tmp_path, command):
    code, shown, _ = command("sft", place / "tiny.yaml", "--out", tmp_path / "s", "warm_start.updates=0")
    assert code == 0 and "warm_start.updates is 0: the model is evaluated and saved as it is" in shown
    then = f"mugrpo train {place / 'tiny.yaml'} --out {tmp_path / 's'} warm_start.updates=0"
    assert shown.splitlines()[-2:] == [f"finished    {tmp_path / 's'}: the warm start", f"next        {then}"]
    assert [record["updates"] for record in journal(tmp_path / "s", "evaluation")] == [0]


def test_a_missing_config_is_the_only_thing_that_is_missing(capsys):
    for name in ("train", "plan", "sft"):
        with pytest.raises(SystemExit, match="2"):
            main([name])
        assert capsys.readouterr().err.endswith(f"mugrpo {name}: error: {MISSING}: config\n")


def test_no_file_in_the_working_folder_hides_a_package(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert command("rollouts", run)[0] == 0
    assert not {"", ".", str(tmp_path)} & set(sys.path)
    (tmp_path / "argparse.py").write_text("raise SystemExit(7)")
    root = str(Path(__file__).parents[2])
    code = [sys.executable, "-m", "mugrpo_jax", "--version"]
    done = subprocess.run(code, capture_output=True, text=True, env={"PYTHONPATH": root})
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("mugrpo ")


def test_a_reward_that_always_fails_stops_the_run_before_and_while_it_scores(
    place, tmp_path, refused, command
):
    raises = ["task.reward=cli_rewards:raises", "evaluation.problems=0", "batch.stages=1"]
    message = refused("train", place / "tiny.yaml", "--out", tmp_path / "run", *raises)
    assert message.startswith("reward 'cli_rewards:raises' fails for problem arithmetic-train-")
    some = ["task.reward=cli_rewards:only_answers", *raises[1:]]
    message = refused("train", place / "tiny.yaml", "--out", tmp_path / "run", *some)
    failed = r"stage 0: the reward failed for 3\d of 32 responses, more than the share task.max_"
    assert re.match(failed, message)  # an empty response does not fail
    assert "most often: error (problem arithmetic-train-" in message and "ValueError: no answer" in message
    assert f"remove {tmp_path / 'run' / 'rollouts' / 'stage-000'} and start again" in message
    assert refused("train", place / "tiny.yaml", "--out", tmp_path / "run", *some).startswith("stage 0: ")
    # Rollouts are work, so another reward needs another folder, or --overwrite.
    mended = ["train", place / "tiny.yaml", "--out", tmp_path / "run", *raises[1:]]
    assert "task.reward ('cli_rewards:only_answers' there, 'cli_rewards:even' here)" in refused(*mended)
    code, shown, _ = command(*mended, "--overwrite")
    assert code == 0 and f"is now in {tmp_path / 'run.old-1'}, because of --overwrite: task.reward" in shown
    assert (tmp_path / "run.old-1" / "rollouts" / "stage-000").is_dir()
    assert len(journal(tmp_path / "run", "update")) == 2


def test_a_prompt_that_is_too_long_is_named_by_its_problem(place, tmp_path, refused):
    small = ["sampling.max_prompt_tokens=6", "sampling.max_response_tokens=26"]
    message = refused("train", place / "tiny.yaml", *small, "--out", tmp_path / "long")
    assert "problem arithmetic-train-" in message
    assert "its prompt has 7 tokens, sampling.max_prompt_tokens is 6; 24 of 24 prompts are too" in message


def test_several_rewards_are_logged_stored_and_shown_each_by_itself(place, tmp_path, command):
    rewards = "[{name: arithmetic, weight: 1}, {name: 'cli_rewards:even', weight: 0.25}]"
    less = ["batch.stages=1", "evaluation.problems=2", "report.samples=0"]
    out = ["--out", tmp_path / "run"]
    code, shown, _ = command("train", place / "tiny.yaml", *out, f"task.reward={rewards}", *less)
    assert code == 0
    (stage,) = journal(tmp_path / "run", "stage")
    even, right = stage["reward/cli_rewards:even"], stage["reward/arithmetic"]
    assert 0 < even < 1 and stage["reward"] == pytest.approx(right + 0.25 * even)
    assert journal(tmp_path / "run", "update")[0]["reward"] != right
    for record in journal(tmp_path / "run", "evaluation"):
        assert record["accuracy"] == record["reward/arithmetic"]  # the first reward says what is right
        assert record["reward"] == record["accuracy"] + 0.25 * record["reward/cli_rewards:even"]
    assert f" (arithmetic {right:.3g}, cli_rewards:even {even:.3g})" in shown
    described = command("rollouts", tmp_path / "run", "--show", 2)[1]
    assert f"cli_rewards:even: mean {even:.3f}; " in described
    assert described.count(" (arithmetic ") == 2 == described.count(", cli_rewards:even ")
    assert "0.25 × cli_rewards:even" in (tmp_path / "run" / "report.html").read_text()
    # The code of the start is known, so a change of it is named.
    again = ["train", place / "tiny.yaml", *out, f"task.reward={rewards}", *less]
    assert "has changed" not in command(*again)[1]
    code = tmp_path / "run" / "code.json"
    assert list(json.loads(code.read_text())) == ["cli_rewards:even"]
    code.write_text('{"cli_rewards:even": "another"}')
    assert "cli_rewards:even: its file has changed since the run in " in command(*again)[1]


@pytest.mark.parametrize(
    ("reward", "scorers", "status"), [("raises", 0, "error"), ("nan", 0, "invalid"), ("hangs", 2, "timeout")]
)
def test_a_reward_that_fails_is_counted_and_the_run_goes_on(
    place, tmp_path, command, reward, scorers, status
):
    settings = [f"task.reward=cli_rewards:{reward}", f"task.scorers={scorers}", "task.deadline=0.5"]
    settings.append("task.max_failed=1")
    less = ["batch.stages=1", "evaluation.problems=2"]
    code, shown, _ = command("train", place / "tiny.yaml", "--out", tmp_path / "run", *settings, *less)
    assert code == 0
    (stage,) = journal(tmp_path / "run", "stage")
    assert stage["status"][status] > 0 and sum(stage["status"].values()) == 32
    assert f"{status} × {stage['status'][status]}" in command("rollouts", tmp_path / "run")[1]
    why = {"raises": "RuntimeError: no idea", "nan": "returned nan", "hangs": "no verdict within 0.5 s"}
    told = [line for line in shown.splitlines() if line.startswith("stage 0: ") and "not be scored" in line]
    assert len(told) == 1 and f"× {stage['status'][status]} (problem arithmetic-train-" in told[0]
    assert why[reward] in told[0]
    if reward == "raises":
        assert "evaluation after 0 updates: 2 answers could not be scored" in shown
        assert "error × 2 (problem arithmetic-test-" in shown
    assert len(journal(tmp_path / "run", "update")) == 2
    counts = [record["status"] for record in journal(tmp_path / "run", "evaluation")]
    assert all(sum(count.values()) == 2 for count in counts) and (reward == "hangs" or counts[0][status] == 2)
