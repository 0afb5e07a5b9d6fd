"""The folder of a run: which config may continue it."""

import json

import pytest

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError
from mugrpo_jax.runs.run_folder import RunFolder, SameRun, check_config, keep_choices, read_config
from mugrpo_jax.runs.run_lock import RunLock
from mugrpo_jax.runs.set_aside import set_aside


def record(folder, kind="stage"):
    """Make a run one with work."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "updates": 0}) + "\n")


def test_a_run_may_continue_with_other_display_settings_and_nothing_else(tmp_path):
    RunFolder(tmp_path, configs.load(None))
    record(tmp_path)
    other = configs.load(None, ["tracking.tensorboard=true", "report.samples=0"])
    RunFolder(tmp_path, other)
    assert other.fingerprint() == configs.load(None).fingerprint()
    with pytest.raises(ConfigError, match=r"another config: seed"):
        RunFolder(tmp_path, configs.load(None, ["seed=1"]))


def test_a_setting_that_only_one_of_two_configs_fixes_is_no_difference(tmp_path):
    refuse = ["sampling.max_prompt_tokens=16"]
    RunFolder(tmp_path, configs.load(None, refuse))
    record(tmp_path)
    (tmp_path / "rollouts" / "stage_000").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path, configs.load(None, [*refuse, "sampling.overlong_prompts=drop"]))
    assert "overlong_prompts ('refuse' there, 'drop' here)" in str(caught.value)
    assert "max_prompt_tokens" not in str(caught.value)


def test_a_run_that_is_older_than_a_key_continues_with_its_default(tmp_path):
    folder = RunFolder(tmp_path, configs.load(None)).folder
    path = folder / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    older = [line for line in lines if "overlong_buffer" not in line and "equal_groups" not in line]
    assert len(lines) - len(older) == 2
    path.write_text("".join(older))
    record(tmp_path)
    RunFolder(tmp_path, configs.load(None))
    with pytest.raises(ConfigError, match=r"config: batch.equal_groups \('keep' there, 'skip' here\)"):
        RunFolder(tmp_path, configs.load(None, ["batch.equal_groups=skip"]))


def test_a_run_that_failed_before_any_work_starts_anew_with_the_corrected_config(tmp_path):
    RunFolder(tmp_path, configs.load(None))
    (tmp_path / "checkpoints" / "000000").mkdir(parents=True)  # a copy of the initial weights
    (tmp_path / "policies" / "00000").mkdir(parents=True)  # and one for samplers
    RunFolder(tmp_path, configs.load(None))
    assert (tmp_path / "checkpoints").exists() and (tmp_path / "policies").exists()
    RunFolder(tmp_path, configs.load(None, ["seed=1"]))
    assert read_config(tmp_path).seed == 1 and not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "policies").exists()
    (tmp_path / "checkpoints" / "000004").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"seed \(1 there, 2 here\)"):
        RunFolder(tmp_path, configs.load(None, ["seed=2"]))


def test_a_sampler_notices_that_its_run_is_gone_or_another_one(tmp_path):
    config = configs.load(None, ["mesh.tensor=1"])
    RunFolder(tmp_path, config)
    same = SameRun(tmp_path, config)
    same.check()
    RunFolder(tmp_path, configs.load(None, ["mesh.tensor=1", "report.samples=0"]))
    same.check()
    RunFolder(tmp_path, configs.load(None, ["model.source=other"]))
    with pytest.raises(ConfigError, match=r"another run was started here \(model.source"):
        same.check()
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="the folder of the run is gone"):
        same.check()


def test_the_reward_may_change_after_a_warm_start_until_there_are_responses(tmp_path):
    warm = ["warm_start.updates=3"]
    RunFolder(tmp_path, configs.load(None, warm))
    for name in ("warm_start/000003", "checkpoints/000000"):
        (tmp_path / name).mkdir(parents=True)
    record(tmp_path, "warm_start")
    other = [*warm, "task.reward=exact", "sampling.max_response_tokens=9"]
    RunFolder(tmp_path, configs.load(None, other))
    assert read_config(tmp_path).task.reward == "exact" and (tmp_path / "checkpoints" / "000000").exists()
    with pytest.raises(ConfigError, match="this run was started with another config: seed"):
        check_config(tmp_path, configs.load(None, [*other, "seed=1"]))
    record(tmp_path, "evaluation")
    with pytest.raises(ConfigError, match=r"task.reward \('exact' there, None here\); use another --out"):
        check_config(tmp_path, configs.load(None, [*warm, "sampling.max_response_tokens=9"]))
    for stages, end in {99: "; to train longer, export its model and start a new run from it", 1: ""}.items():
        with pytest.raises(ConfigError, match=rf"move the run aside with --overwrite{end}$"):
            check_config(tmp_path, configs.load(None, [*other, f"batch.stages={stages}"]))
    for keys, end in {
        (
            "optimizer.learning_rate=1.0",
            "objective.name=grpo",
        ): "; its rollouts do not depend on these: `mugrpo re",
        ("optimizer.learning_rate=1.0",): "; its rollouts do not depend on this: `mugrpo replay ",
        ("optimizer.learning_rate=1.0", "seed=1"): "$",
    }.items():
        with pytest.raises(ConfigError, match=rf"move the run aside with --overwrite{end}"):
            check_config(tmp_path, configs.load(None, [*other, *keys]))
    check_config(tmp_path, configs.load(None, [*other, "optimizer.max_skipped=3", "task.deadline=9"]))


def test_overwrite_moves_a_run_only_if_it_cannot_continue(tmp_path, capsys):
    folder, mine, other = tmp_path / "run", configs.load(None), configs.load(None, ["seed=1"])
    RunFolder(folder, mine)
    record(folder)
    (folder / "data.json").write_text('{"train.jsonl": "a"}')
    set_aside(folder, mine, {"train.jsonl": "a"})
    assert (folder / "metrics.jsonl").exists() and capsys.readouterr().out == ""
    with RunLock(folder), pytest.raises(ConfigError, match="is training here"):
        set_aside(folder, other, {})
    with pytest.raises(ConfigError, match="holds the rollouts to replay"):
        set_aside(folder, configs.load(None, ["seed=1", f"replay.run={folder}"]), {})
    set_aside(folder, other, {})
    moved = tmp_path / "run.old-1"
    assert not folder.exists() and read_config(moved).seed == 0 and not (moved / "lock.json").exists()
    assert "is now in" in (told := capsys.readouterr().out) and "seed (0 there, 1 here)" in told
    moved.rename(folder)
    (tmp_path / "run.old-1").mkdir()
    set_aside(folder, mine, {"train.jsonl": "b"})
    assert (tmp_path / "run.old-2" / "metrics.jsonl").exists()
    assert "train.jsonl has changed" in capsys.readouterr().out


def test_overwrite_moves_the_folder_behind_a_link_and_keeps_the_link(tmp_path):
    """The link may lead to a larger disk, where the new run belongs too."""
    disk, link = tmp_path / "disk" / "real", tmp_path / "runs" / "link"
    disk.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to(disk)
    RunFolder(link, configs.load(None))
    record(link)
    set_aside(link, configs.load(None, ["seed=1"]), {})
    assert link.is_symlink() and disk.is_dir() and not list(disk.iterdir())
    assert (tmp_path / "disk" / "real.old-1" / "metrics.jsonl").exists()
    assert [path.name for path in link.parent.iterdir()] == ["link"]


def test_what_was_chosen_at_the_first_start_is_kept(tmp_path):
    chosen = ["model.remat=dots", "model.scan_layers=false", "batch.tokens_per_micro_batch=4224"]
    RunFolder(tmp_path, configs.load(None, ["seed=3", *chosen]))
    given = configs.load(None, ["seed=3", "model.remat=full"])
    assert keep_choices(tmp_path, given) == given  # no work depends on them yet
    record(tmp_path)
    kept = keep_choices(tmp_path, configs.load(None, ["seed=3", "model.remat=dots"]))
    assert (kept.model.scan_layers, kept.batch.tokens_per_micro_batch) == (False, 4224)
    check_config(tmp_path, kept)
    # The user's own value, with which the run cannot continue, is the only difference that is named.
    assert keep_choices(tmp_path, given) == given
    with pytest.raises(ConfigError, match=r"another config: model.remat \('dots' there, 'full' here\);"):
        check_config(tmp_path, given)
