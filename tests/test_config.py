"""Configs: what is read, what is refused, and in which words."""

import dataclasses
import re

import numpy as np
import pytest
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError, shipped_configs
from mugrpo_jax.config.behaviors import Behavior, BehaviorSection, assign, behaviors_of
from mugrpo_jax.objectives import ObjectiveConfig


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("batch: {stages: 3}\noptimizer: {learning_rate: 1e-5}\n")
    return path


def test_a_file_and_overrides_make_a_config(file):
    config = configs.load(file, ["batch.updates_per_stage=8", "objective.knobs.clip_high=3", "seed=7"])
    assert (config.batch.stages, config.batch.updates_per_stage, config.total_updates) == (3, 8, 24)
    assert config.optimizer.learning_rate == 1e-5  # YAML 1.1 reads it as text
    assert config.objective.settings["clip_high"] == 3
    assert config.seed == 7


def test_what_is_written_reads_back_the_same(file):
    config = configs.load(file, ["objective.name=grpo", "task.options.difficulty=2"])
    file.write_text(yaml.safe_dump(configs.to_dict(config)))
    assert configs.load(file) == config
    assert configs.load(file).fingerprint() == config.fingerprint()


def test_only_what_decides_rollouts_is_in_their_fingerprint(file):
    before = configs.load(file)
    assert configs.load(file, ["objective.name=grpo"]).rollout_fingerprint() == before.rollout_fingerprint()
    for override in ("seed=1", "sampling.temperature=0.5", "task.name=countdown"):
        assert configs.load(file, [override]).rollout_fingerprint() != before.rollout_fingerprint()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.stage=2", "unknown key batch.stage; did you mean batch.stages?"),
        ("optimiser.eps=1", "unknown key optimiser; did you mean optimizer?"),
        ("optimizer.lr=1", "unknown key optimizer.lr; did you mean optimizer.learning_rate?"),
        ("learning_rate=1", "unknown key learning_rate; did you mean optimizer.learning_rate?"),
        ("batch.max_prompt_tokens=9", "did you mean sampling.max_prompt_tokens?"),
        ("zzz=1", "unknown key zzz; known: seed, model,"),
        ("batch.stages=two", "batch.stages must be an integer, got 'two'"),
        ("batch.stages=2.5", "batch.stages must be an integer, got 2.5"),
        ("batch.stages=true", "batch.stages must be an integer, got True"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate must be a number, got 'fast'"),
        ("model.remat=some", "model.remat must be one of auto, none, dots, full, got 'some'"),
        ("model=tiny", "model is a section with keys, got 'tiny'"),
        ("task.options=3", "task.options must be keys and values, got 3"),
        ("task.reward=[]", "task.reward: the list is empty; name a reward, or leave the key out"),
        ("task.reward={math: 1}", "task.reward must be text or a list, got keys and values"),
        ("task.reward=3", "task.reward must be text, got 3"),
        ("task.reward=[math]", "task.reward[0] is a section with keys, got 'math'; its keys: name, weight"),
        ("task.reward=[{name: math}]", "task.reward[0].weight is missing"),
        ("task.reward=[{weight: 1}]", "task.reward[0].name is missing"),
        ("task.reward=[{name: math, wight: 1}]", "did you mean task.reward[0].weight?"),
        (
            "task.reward=[{name: math, weight: heavy}]",
            "task.reward[0].weight must be a number, got 'heavy'",
        ),
        ("task.reward=[{name: math, weight: .inf}]", "task.reward[0].weight: must be a finite number"),
        (
            "task.reward=[{name: math, weight: 1}, {name: math, weight: 2}]",
            "task.reward: math is listed twice; list each reward once",
        ),
        ("task.reward=[{name: math, weight: 0}]", "task.reward: all weights are 0; at least one must not be"),
        ("batch.stages=0", "batch.stages: must be at least 1, got 0"),
        ("batch.responses_per_prompt=1", "batch.responses_per_prompt: must be at least 2, got 1"),
        ("batch.epochs_per_stage=0", "batch.epochs_per_stage: must be at least 1, got 0"),
        (
            "batch.epochs_per_stage=3",
            "batch.epochs_per_stage: 3 does not divide batch.updates_per_stage=1024",
        ),
        ("batch.tokens_per_micro_batch=100", "does not hold one row of 4096 tokens"),
        ("batch.equal_groups=Drop", "batch.equal_groups must be one of keep, skip, drop, got 'Drop'"),
        ("overlong_buffer=5000", "overlong_buffer: 5000 is more than sampling.max_response_tokens=2560"),
        ("batch.length_multiple=0", "batch.length_multiple: must be at least 1, got 0"),
        ("checkpoints.every=0", "checkpoints.every: must be at least 1, got 0"),
        ("sampling.temperature=0", "sampling.temperature: must be above 0, got 0.0"),
        ("model.tiny.num_heads=0", "model.tiny.num_heads: must be at least 1, got 0"),
        ("model.tiny.num_kv_heads=3", "model.tiny.num_kv_heads: 3 does not divide model.tiny.num_heads=4"),
        ("model.tiny.num_heads=5", "model.tiny.num_heads: twice 5 must divide model.tiny.hidden_size=128"),
        ("replay.stage=3", "replay.stage: 3 is not one of the 3 stages"),
        ("seed=9223372036854775808", "seed: must be at most 9223372036854775807, got 9223372036854775808"),
        ("batch.stages=3000000000", "batch.stages: must be at most 2147483647, got 3000000000"),
        ("optimizer.beta1=1", "optimizer.beta1: must be below 1, got 1.0"),
        ("optimizer.beta2=1.5", "optimizer.beta2: must be below 1, got 1.5"),
        ("optimizer.eps=0", "optimizer.eps: must be above 0, got 0.0"),
        ("optimizer.learning_rate=1e39", "optimizer.learning_rate: must be a finite number, got 1e+39"),
        (f"optimizer.learning_rate=1{'0' * 400}", "optimizer.learning_rate must be a number, got 1000"),
        ("evaluation.top_p=0", "evaluation.top_p: must be above 0, got 0.0"),
        ("task.deadline=0", "task.deadline: must be above 0, got 0.0"),
        ("task.deadline=1e9", "task.deadline: must be at most 86400, got 1000000000.0"),
        ("task.max_failed=2", "task.max_failed: must be at most 1, got 2.0"),
        ("task.reward=''", "task.reward must not be empty; leave the key out for its default"),
        ("task.options.day=2024-01-31", "task.options.day is a date; put text into quotation marks"),
        ("task.options.columns.x=.inf", "task.options.columns.x: must be a finite number, got inf"),
        ("task.options={1: 2}", "task.options: the key 1 must be text"),
        ("task.options.x=[[[[[[[[[[1]]]]]]]]]]", "task.options.x.0.0.0.0.0.0.0 is nested too deeply"),
        (
            "task.options={a: &a [1,1,1,1,1,1,1,1], b: &b [*a,*a,*a,*a,*a,*a], c: &c [*b,*b,*b,*b,*b,*b], "
            "d: &d [*c,*c,*c,*c,*c,*c], e: &e [*d,*d,*d,*d,*d,*d], f: [*e,*e,*e,*e]}",
            ": more than 10000 values",
        ),
        ("objective.knobs.clip_high=.inf", "objective.knobs.clip_high: must be a finite number, got inf"),
        (
            "batch.length_multiple=1000000000",
            "batch.length_multiple: rows of 1000000000 tokens are longer than batch.tokens_per_micro_batch",
        ),
        ("objective.name=ppo", "objective: name is 'ppo'; possible: 'mu_grpo', 'grpo'"),
        ("objective.knobs.clip=2", "objective: mu_grpo has no knob 'clip'; possible: clip_low, clip_high"),
    ],
)
def test_a_wrong_value_is_named(file, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        configs.load(file, [override])
    place = f"override {override[:80]!r}: "
    assert str(caught.value).startswith((place, f"{file} with {place}objective: "))
    assert "\n" not in str(caught.value)


def test_an_error_names_the_file_or_the_override_that_it_comes_from(file):
    file.write_text("batch: {stages: 3, lag: 2}\nobjective: {name: grpo}\n")
    for overrides, place in (
        (["batch.stages=two"], "override 'batch.stages=two': batch.stages must be"),
        (["batch.stages=2"], f"{file} with override 'batch.stages=2': batch.lag: 2 is not below"),
        (["seed=1", "batch.lag=5", "batch.stages=9", "batch.lag=9"], "override 'batch.lag=9': batch.lag: 9"),
        (
            ["objective.knobs.veto_ratio=1"],
            f"{file} with override 'objective.knobs.veto_ratio=1': objective: ",
        ),
        (["task.reward=[{name: math}]"], "override 'task.reward=[{name: math}]': task.reward[0].weight"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(place)}"):
            configs.load(file, overrides)
    for text, message in (("batch: {stage: 3}", "unknown key batch.stage;"), ("seed: x", "seed must be")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"^{re.escape(f'{file}: {message}')}"):
            configs.load(file, ["batch.lag=0", "report.samples=2"])
    with pytest.raises(ConfigError, match=r"^override 'seed=-1': seed: must be at least 0"):
        configs.changed(configs.load(None), ["seed=-1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.stages", "override 'batch.stages': expected key=value"),
        ("a=[1", "override 'a=[1': '[1' is not valid YAML"),
        ("a=2024-13-01", "override 'a=2024-13-01': '2024-13-01' is not valid YAML"),
        ("a=" + "[" * 500, "override 'a=[[["),
        ("batch.stages.x=1", "override 'batch.stages.x=1': stages is a value, not a section"),
    ],
)
def test_a_wrong_override_is_named(file, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        configs.load(file, [override])


@pytest.mark.parametrize("knob", ["kl_coef", "entropy_coef"])
def test_a_term_without_an_advantage_needs_equal_groups_too(file, knob):
    changes = [f"objective.knobs={{{knob}: 0.1}}"]
    configs.load(file, [*changes, "batch.equal_groups=drop"])
    with pytest.raises(ConfigError, match=r"equal_groups: skip does not go with kl_coef or entropy_coef"):
        configs.load(file, [*changes, "batch.equal_groups=skip"])


def test_a_run_knows_which_policies_its_loss_needs(file):
    plain = configs.load(file, ["reference.keep_in_memory=true", "proximal_every=8"])
    assert not plain.uses_reference and plain.proximal_dtype is None
    both = ["objective.name=decoupled_ppo", "objective.knobs={kl_coef: 0.1}", "model.compute_dtype=bfloat16"]
    assert configs.load(file, both).uses_reference and configs.load(file, both).proximal_dtype == "bfloat16"
    assert configs.load(file, [*both, "proximal_every=1"]).proximal_dtype is None


def test_p3o_cannot_leave_out_groups_without_an_advantage(file):
    configs.load(file, ["objective.name=p3o"])
    for how in ("skip", "drop"):
        with pytest.raises(ConfigError, match=f"batch.equal_groups: {how} does not go with p3o"):
            configs.load(file, ["objective.name=p3o", f"batch.equal_groups={how}"])


def test_a_shipped_config_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configs.load("arithmetic", ["batch.stages=2"]).batch.updates_per_stage == 64
    assert configs.load("paper/qwen3_1.7b_base_mu_grpo").model.source == "Qwen/Qwen3-1.7B-Base"
    (tmp_path / "arithmetic_grpo").mkdir()  # a folder is no config
    assert configs.load("arithmetic_grpo").objective.name == "grpo"
    (tmp_path / "quickstart").write_text("seed: 3")  # a file comes first
    assert configs.load("quickstart").seed == 3


def test_an_unknown_config_name_lists_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        configs.load("quikstart")
    message = str(caught.value)
    assert message.startswith(
        "quikstart: no such config file; did you mean quickstart? configs known by name:"
    )
    assert set(shipped_configs.files()) <= set(re.split(r"[ ,]+", message)) and "\n" not in message
    with pytest.raises(ConfigError, match=r"^configs/quickstart.yaml: no such .*; did you mean quickstart\?"):
        configs.load("configs/quickstart.yaml")
    with pytest.raises(ConfigError, match=r"mine.yaml: no such config file; `mugrpo init FILE` writes"):
        configs.load("mine.yaml")


def test_the_folder_of_a_run_is_no_config_but_has_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("seed: 3")
    with pytest.raises(
        ConfigError,
        match=r"^runs/mine: the folder of a run, .*: mugrpo train runs/mine/config.yaml --out runs/mine$",
    ):
        configs.load("runs/mine")
    assert configs.load("runs/mine/config.yaml").seed == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match=r"x.yaml: no such config file"):
        configs.load(path)
    for content, message in (
        (b"a: [1", r"x.yaml:1: not valid YAML: while parsing a flow sequence, expected ',' or '\]', but got"),
        (
            b"seed: 1\nbatch:\n\tstages: 2\n",
            r"x.yaml:3: not valid YAML: .*; indent with spaces, not",
        ),
        (
            b"task:\n  reward: mine: f\n",
            r"x.yaml:2: .*; put a text that contains a colon and a space into quotes$",
        ),
        (b"batch: 3\n  stages: 2\n", r"x.yaml:2: .*; check the indentation and the colons, also above it$"),
        (b"seed: 1\nbatch: \x01\n", r"x.yaml:2: not valid YAML: the character '\\x01' is not allowed$"),
        (
            b"batch: {lag: 0}\nseed: 1\nbatch:\n  stages: 2\n",
            r"x.yaml:3: not valid YAML: the key batch occurs ",
        ),
        (b"batch:\n  lag: 0\n  lag: 1\n", r"x.yaml:3: not valid YAML: the key lag occurs twice; put all"),
        (b"? [a, b]\n: 1\n", r"x.yaml:1: not valid YAML: while constructing a mapping, found unhashable key"),
        (b"- 1", r"x.yaml: expected keys and values at the top, got list"),
        (b"\xff\xfe\x00", r"x.yaml: not UTF-8 text"),
        (b"a: 2024-13-01", r"x.yaml: not valid YAML: month must be in 1..12"),
        (b"[" * 500, r"x.yaml: not a config: nested too deeply"),
        (
            b"",
            r"x.yaml: no keys in this file; set at least model.source and task.name. `mugrpo config` lists",
        ),
        (b"# batch: {stages: 2}\n", r"x.yaml: no keys in this file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            configs.load(path)


def test_differing_keys_are_listed_with_both_values(file):
    there, here = configs.load(file), configs.load(file, ["batch.stages=5", "seed=1"])
    assert configs.differing_keys(configs.to_dict(there), configs.to_dict(here)) == [
        "batch.stages (3 there, 5 here)",
        "seed (0 there, 1 here)",
    ]


def test_a_replay_goes_through_one_stage(file):
    assert configs.load(file).stages == range(3)
    assert configs.load(file, ["replay.run=runs/a", "replay.stage=1"]).stages == range(1, 2)


def float_keys(section, prefix=""):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, configs.Section):
            yield from float_keys(value, f"{prefix}{field.name}.")
        elif isinstance(value, float):
            yield prefix + field.name


def test_no_number_may_be_nan_or_infinite():
    keys = list(float_keys(configs.RunConfig()))
    assert len(keys) >= 10 and "optimizer.weight_decay" in keys
    for key in keys:
        for value in (".nan", ".inf", "-.inf"):
            with pytest.raises(ConfigError, match=f"{key}: must be a finite number, got"):
                configs.load(None, [f"{key}={value}"])
    for value in (float("nan"), float("inf"), 1e60):
        message = re.escape(f"knob 'clip_high' is {value}; possible: a finite number of type float32")
        with pytest.raises(ValueError, match=message):
            ObjectiveConfig("grpo", {"clip_high": value})


def test_the_policy_that_is_trained_has_the_sampling_temperature_or_its_own(file):
    for changes, trained in (
        ([], 1.0),
        (["sampling.temperature=1.5"], 1.5),
        (["objective.temperature=1"], 1.0),
    ):
        assert configs.load(file, changes).training_temperature == trained
    both = configs.load(file, ["sampling.temperature=1.5", "objective.temperature=0.8"])
    assert (both.sampling.temperature, both.training_temperature) == (1.5, 0.8)
    assert (
        both.rollout_fingerprint() == configs.load(file, ["sampling.temperature=1.5"]).rollout_fingerprint()
    )
    with pytest.raises(ConfigError, match=r"objective: temperature is 0\.0; possible: a positive number"):
        configs.load(file, ["objective.temperature=0"])


def test_limits_may_change_when_a_run_resumes_and_nothing_that_decides_its_data(file):
    before = configs.load(file)
    for change in (
        "task.scorers=3",
        "task.deadline=60",
        "task.scorer_memory_mb=9999",
        "task.max_failed=1",
        "task.unsafe_sandbox=true",
    ):
        after = configs.load(file, [change])
        assert after.fingerprint() == before.fingerprint()
        assert after.rollout_fingerprint() == before.rollout_fingerprint()
    longer = ["sampling.max_prompt_tokens=2000"]
    assert configs.load(file, longer).rollout_fingerprint() == before.rollout_fingerprint()
    drop = ["sampling.overlong_prompts=drop"]  # then the limit decides which problems there are
    assert configs.load(file, drop).fingerprint() != configs.load(file, drop + longer).fingerprint()


def test_several_rewards_survive_the_way_to_a_file_and_back():
    several = "task.reward=[{name: math, weight: 1}, {name: 'mine:short', weight: -1e-1}]"
    config = configs.load(None, [several])
    assert [(part.name, part.weight) for part in config.task.reward] == [("math", 1.0), ("mine:short", -0.1)]
    plain = configs.to_dict(config)
    assert plain["task"]["reward"][1] == {"name": "mine:short", "weight": -0.1}
    assert configs.build(configs.RunConfig, plain, "again") == config
    assert configs.load(None, [several.replace("-1e-1", "1")]).rollout_fingerprint() != (
        config.rollout_fingerprint()
    )
    assert configs.load(None, ["task.reward=math"]).task.reward == "math"


def test_words_beside_numbers_and_what_yaml_makes_of_off():
    config = configs.load(
        None, ["sampling.slots=auto", "batch.tokens_per_micro_batch=8192", "compile_cache=off"]
    )
    assert (config.sampling.slots, config.batch.tokens_per_micro_batch) == ("auto", 8192)
    assert config.compile_cache is False  # YAML reads `off` as false; both turn the cache off
    assert configs.load(None, ["model.scan_layers=false"]).model.scan_layers is False
    with pytest.raises(ConfigError, match=r"sampling\.slots must be an integer, got 'many'"):
        configs.load(None, ["sampling.slots=many"])


@pytest.mark.parametrize(
    ("behaviors", "message"),
    [
        ("[]", "behaviors: the list is empty; name a behavior, or leave the key out"),
        ("[{source: current, share: 0}, {source: a, share: 1}]", r"behaviors\[0\].share: must be above 0"),
        ("[{source: current, share: 1.5}]", r"behaviors\[0\].share: must be above 0 and at most 1, got 1.5"),
        ("[{source: current, share: 0.5}, {source: a, share: 0.4}]", "the shares add up to 0.9; they must"),
        ("[{source: current, share: 1, temperature: 0}]", "temperature"),
    ],
)
def test_behaviors_need_shares_that_add_up_to_one(file, behaviors, message):
    with pytest.raises(ConfigError, match=message):
        configs.load(file, [f"sampling.behaviors={behaviors}"])


def named(*behaviors, temperature=1.0):
    listed = tuple(BehaviorSection(*behavior) for behavior in behaviors)
    return [behavior.name for behavior in behaviors_of(listed, temperature)]


def test_behaviors_have_short_names_without_slashes():
    assert named(("a/big/", 0.5), ("b/small@9", 0.5)) == ["big", "small-9"]
    assert named(("a/big", 0.5), ("b/big", 0.5)) == ["a-big", "b-big"]  # one would stand for two models
    assert named(("current", 0.5), ("/runs/current", 0.5)) == ["current", "runs-current"]
    assert named(("/runs/current", 1.0)) == ["runs-current"]  # it is not the current policy
    assert named(("m", 0.3), ("m", 0.3, 0.7), ("m", 0.4, 2.0), temperature=0.7) == ["m", "m", "m-t2"]
    assert named(("runs/big@512", 0.5), ("models/big-512", 0.5)) == ["big-512", "big-512-2"]
    assert named(("other", 0.5, 0.7), ("models/other-t0.7", 0.5)) == ["other-t0.7", "other-t0.7-2"]
    assert named(("x/@@@", 1.0)) == ["model"]


def test_every_prompt_gets_its_responses_and_shares_are_right_on_average():
    behaviors = tuple(
        Behavior(name, name, share, 1.0) for name, share in (("a", 0.1), ("b", 0.2), ("c", 0.7))
    )
    found = ["".join(behavior.name for behavior in assign(behaviors, prompt, 4)) for prompt in range(200)]
    assert all(len(names) == 4 and names == "".join(sorted(names)) for names in found)
    assert {names.count("c") for names in found} == {2, 3} and {names.count("a") for names in found} == {0, 1}
    counts = [sum(names.count(name) for names in found) for name in "abc"]
    assert np.abs(np.array(counts) - [80, 160, 560]).max() <= 3
    assert found[:100] != found[100:]
    assert all(
        assign(behaviors, prompt, 10) == assign(behaviors, 0, 10) for prompt in range(9)
    )  # whole numbers
