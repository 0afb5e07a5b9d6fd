"""The scripts of the reproduction: queue, collected files, tables and figures, on runs that cost nothing."""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import re
import shutil
import sys
from decimal import Decimal
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from mugrpo_jax.objectives import effective_updates, updates_until_drift

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "report")]
reproduce = importlib.import_module("reproduce")
reproduce_collect = importlib.import_module("reproduce_collect")
reproduce_draw = importlib.import_module("reproduce_draw")
reproduce_queue = importlib.import_module("reproduce_queue")
reproduce_held_out = importlib.import_module("reproduce_held_out")
reproduce_rates = importlib.import_module("reproduce_rates")
reproduce_rates_figures = importlib.import_module("reproduce_rates_figures")
reproduce_regimes = importlib.import_module("reproduce_regimes")
reproduce_stages = importlib.import_module("reproduce_stages")
reproduce_tables = importlib.import_module("reproduce_tables")
reproduce_times = importlib.import_module("reproduce_times")
write_run = importlib.import_module("synthetic").write_run
Queue, Work = reproduce_queue.Queue, reproduce_queue.Work

# What `mugrpo` does, in small: it ends well, fails, or waits until it is asked to stop (and ends next time).
FAKE = """
import os, signal, sys, time
from pathlib import Path
what, folder = sys.argv[1], Path(sys.argv[2])
(folder / "memory").write_text(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
if what == "fails":
    sys.exit("\\n".join(f"line {i}" for i in range(40)) + "\\rlast words")
if what == "stopped":
    sys.exit(3)
if what == "waits" and not (folder / "half").exists():
    signal.signal(signal.SIGTERM, lambda *_: ((folder / "half").touch(), sys.exit(3)))
    (folder / "ready").touch()
    time.sleep(60)
time.sleep(float(what) if what[0].isdigit() else 0)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setattr(reproduce_queue, "MUGRPO", (sys.executable, "-c", FAKE))
    monkeypatch.setattr(reproduce_queue.signal, "signal", lambda *_: None)  # pytest keeps its own

    def make(name, what="ends", dropped=()):
        return Work(tmp_path / name, (what, tmp_path / name), dropped)

    return make


def queue(jobs, seconds):
    return Queue(jobs, seconds, Path("programs"))


def said(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_failed_run_tells_its_last_words_and_stops_no_other(work, capsys):
    works = [work("a", "fails"), work("b", "1.5"), work("c", dropped=("checkpoints",))]
    (works[2].folder / "checkpoints").mkdir(parents=True)
    both = queue(jobs=2, seconds=60)
    assert not both.run(works)
    assert both.failed == ["a"] and [w.done.exists() for w in works] == [False, True, True]
    (failure,) = [record for record in said(capsys) if record["what"] == "failed"]
    assert failure["status"] == 1 and len(failure["tail"]) == 15 and failure["tail"][-1] == "last words"
    assert not (works[2].folder / "checkpoints").exists()
    # All three had company at some time, and each its share of the memory.
    assert all((w.folder / "shared_gpu").exists() for w in works)
    assert (works[0].folder / "memory").read_text() == "0.450"


def test_runs_one_at_a_time_were_alone(work, monkeypatch):
    works = [work("a"), work("b")]
    assert queue(jobs=1, seconds=60).run(works)
    assert not any((w.folder / "shared_gpu").exists() for w in works)
    assert reproduce_collect.summary(works[0].folder)["alone"]
    assert (works[0].folder / "memory").read_text() == "0.900"


def test_runs_share_the_memory_that_the_user_allows(work, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    works = [work("a"), work("b")]
    assert queue(jobs=2, seconds=60).run(works)
    assert [(w.folder / "memory").read_text() for w in works] == ["0.150", "0.150"]


def test_a_run_that_left_before_its_last_update_is_not_done(work, capsys):
    asked = work("b", "stopped")
    outside = queue(jobs=1, seconds=60)
    assert not outside.run([asked]) and not outside.failed and not asked.done.exists()
    assert [(record["what"], record.get("status")) for record in said(capsys)][1:] == [("stopped", 3)]
    early = dataclasses.replace(work("a", dropped=("checkpoints",)), updates=5)
    (early.folder / "checkpoints").mkdir(parents=True)
    (early.folder / "metrics.jsonl").write_text('{"kind": "update", "updates": 4}\n')
    assert not queue(jobs=1, seconds=60).run([early])
    assert [record["what"] for record in said(capsys)] == ["start", "stopped"]
    assert (early.folder / "checkpoints").exists()
    end = {"kind": "update", "updates": 5, "tokens": 1, "seconds": {"update": 1}}
    (early.folder / "metrics.jsonl").write_text(json.dumps(end) + "\n")
    assert queue(jobs=1, seconds=60).run([early]) and not reproduce_collect.summary(early.folder)["alone"]


def test_what_is_stopped_at_the_deadline_is_continued_by_the_next_call(work, capsys, monkeypatch):
    monkeypatch.setattr(reproduce_queue, "EVERY", 0.5)
    works = [work("a"), work("b", "waits"), work("c")]
    assert not queue(jobs=1, seconds=25 + 2).run(works)  # a margin of 25 s is left to save in
    records = said(capsys)
    assert [r["run"] for r in records if r["what"] == "stopped"] == ["b"]
    assert any("b" in r["running"] for r in records if r["what"] == "progress")
    assert works[0].done.exists() and (works[1].folder / "half").exists() and not works[1].done.exists()
    assert queue(jobs=1, seconds=60).run(works)
    assert [r["run"] for r in said(capsys) if r["what"] == "start"] == ["b", "c"]  # what is done stays so


def test_a_replay_waits_for_its_source_and_lets_others_go_first(work, capsys):
    source, fails = work("source", "2.5"), work("fails", "fails")
    replay, lost = (
        dataclasses.replace(work(name), after=other.folder)
        for name, other in (("replay", source), ("lost", fails))
    )
    both = queue(jobs=2, seconds=60)
    assert not both.run([source, replay, fails, lost, work("other")])
    assert [record["run"] for record in said(capsys) if record["what"] == "start"] == [
        "source",
        "fails",
        "other",
        "replay",
    ]
    assert replay.done.exists() and not lost.folder.exists() and both.failed == ["fails"]


def test_the_queue_has_the_order_that_was_asked_for(monkeypatch):
    parse = reproduce._parser().parse_args
    both = parse(["run", "--runs", "r", "--arms", "p3o", "m2po", "--seeds", "1", "0"])
    assert [name for name, _, _ in reproduce._arms(both)] == [
        "p3o-seed1",
        "m2po-seed1",
        "p3o-seed0",
        "m2po-seed0",
    ]
    named = parse(["run", "--runs", "r", "--queue", "grpo-mu4:2", "mu_grpo:0"])
    assert [(name, mu) for name, mu, _ in reproduce._arms(named)] == [
        ("grpo-mu4-seed2", 4),
        ("mu_grpo-seed0", 1024),
    ]
    rated = parse(["run", "--runs", "r", "--queue", "mu_grpo:0:2e-5", "--mu", "256"])
    ((name, mu, keys),) = reproduce._arms(rated)
    assert (name, mu) == ("mu_grpo-lr2e-05-seed0", 256) and "optimizer.learning_rate=2e-05" in keys
    with pytest.raises(SystemExit):
        parse(["run", "--runs", "r", "--queue", "mu_grpo:0:fast"])
    grid = list(reproduce._grid(parse(["grid", "--runs", "r"])))
    assert len(grid) == 16 and grid[3][0] == "law/mu_grpo-mu512-lr1e-06-seed0"
    late = parse(
        ["grid", "--runs", "r", "--mu", "8", "--lags", "0", "7", "--protected-mu", "--rates", "2e-5"]
    )
    (_, mu, at_once), (name, _, keys) = reproduce._grid(late)
    assert (name, mu) == ("law/grpo-mu8-lag7-lr2e-05-seed0", 8) and "batch.lag=7" in keys
    assert not any("lag" in key for key in at_once)
    with pytest.raises(SystemExit, match="not a multiple of µ = 1000"):
        reproduce._work(Path("x"), 1000, both, [], Path("model"))


def test_an_arm_keeps_the_knobs_of_the_config_that_its_objective_has():
    knobs = {}
    for arm, keys in reproduce.ARMS.items():
        config = reproduce.configs.load("quickstart", ["objective.knobs={veto_ratio: 0.25}", *keys])
        knobs[arm] = config.objective.name, dict(config.objective.knobs)
    ratio = {"veto_ratio": 0.25}
    assert knobs.pop("mu_grpo") == knobs.pop("mu_grpo-lora") == ("mu_grpo", ratio)
    for scope in ("none", "trigger", "suffix_non_trigger", "sequence"):
        arm = "relaxed-no-veto" if scope == "none" else f"mu_grpo-{scope}"
        assert knobs.pop(arm) == ("mu_grpo", ratio | {"veto": scope})
    assert knobs == {
        "grpo-mu4": ("grpo", {}),
        "grpo-stale": ("grpo", {}),
        "m2po": ("m2po", {}),
        "p3o": ("p3o", {}),
    }


def test_stale_arms_replay_the_rollouts_of_the_first_one_of_their_seed():
    arms = ["relaxed-no-veto", "grpo-mu4", "mu_grpo"]
    given = ["run", "--runs", "r", "--replay", "--updates", "8", "--arms", *arms, "--seeds", "0", "1"]
    arguments = reproduce._parser().parse_args([*given, "--mu", "8"])
    settings = list(reproduce._arms(arguments))
    works = [reproduce._work(Path(name), mu, arguments, keys, Path("model")) for name, mu, keys in settings]
    shared = reproduce._replays(works, arguments)
    replayed = {work.folder.name: [k for k in map(str, work.command) if "replay" in k] for work in shared}
    assert replayed == {
        "relaxed-no-veto-seed0": [],
        "grpo-mu4-seed0": [],
        "mu_grpo-seed0": ["replay.run=relaxed-no-veto-seed0"],
        "relaxed-no-veto-seed1": [],
        "grpo-mu4-seed1": [],
        "mu_grpo-seed1": ["replay.run=relaxed-no-veto-seed1"],
    }
    source, fresh, replay = shared[:3]
    assert replay.after == source.folder and fresh.after is source.after is None
    assert not source.dropped and fresh.dropped == replay.dropped == reproduce.HEAVY
    with pytest.raises(SystemExit, match="needs a single stage"):
        reproduce._replays(works, reproduce._parser().parse_args([*given, "--mu", "4"]))


def test_several_runs_on_one_gpu_take_as_many_slots_as_fit_into_their_share():
    parse = reproduce._parser().parse_args
    assert parse(["run", "--runs", "r", "--config", "a.yaml"]).config.is_absolute()
    found = sorted(reproduce.CONFIG.parent.glob("*.yaml"))
    assert len(found) == 3 and {reproduce.configs.load(path).sampling.slots for path in found} == {"auto"}
    arguments = parse(["run", "--runs", "r", "--config", str(found[0]), "--jobs", "4"])
    command = reproduce._work(Path("x"), 4, arguments, [], Path("model")).command
    assert command[:2] == ("train", found[0]) and not [key for key in command if "slots" in str(key)]


def test_a_warm_start_of_another_task_is_not_taken(tmp_path):
    start = tmp_path / "warm-start"
    start.mkdir()
    wanted = ["task.options={difficulty: 2}", "model.remat=none"]
    config = reproduce.configs.load(reproduce.CONFIG, wanted)
    (start / "config.yaml").write_text(json.dumps(reproduce.configs.to_dict(config)))  # JSON is YAML
    reproduce._check_start(start, reproduce.CONFIG, wanted[:1])  # how it is computed may differ
    with pytest.raises(SystemExit, match=r"task\.options\.difficulty .2 there, 3 here.*--runs"):
        reproduce._check_start(start, reproduce.CONFIG, ["task.options={difficulty: 3}"])


def test_a_run_that_was_copied_without_its_environment_is_collected(tmp_path):
    folder = write_run(tmp_path / "mu_grpo-seed0")
    (folder / "environment.json").unlink()
    reproduce_collect.collect(tmp_path, tmp_path / "out")
    about = json.loads((tmp_path / "out" / "mu_grpo-seed0.jsonl").read_text().splitlines()[0])
    assert about["environment"] is None and about["seed"] == 0 and "abandoned_ratio" not in about
    write_run(tmp_path / "mu_grpo-seed1", overrides=["report.abandoned_ratio=0.01"])
    reproduce_collect.collect(tmp_path, tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "mu_grpo-seed1.jsonl").read_text().splitlines()[0])["abandoned_ratio"]
        == 0.01
    )


def cut_last_record(folder):
    kept = list(reproduce_collect.records(folder))[:-1]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))


def test_a_run_is_finished_when_its_journal_has_its_last_update_and_evaluation(tmp_path):
    killed_in_the_end = write_run(tmp_path / "mu_grpo-seed0", stages=2, mu=8)
    stopped = write_run(tmp_path / "mu_grpo-seed1", stages=2, mu=8, done=15)
    assert reproduce_collect.summary(killed_in_the_end)["finished"]
    assert not reproduce_collect.summary(stopped)["finished"]
    cut_last_record(killed_in_the_end)  # the evaluation after its last update
    assert reproduce_collect.last(killed_in_the_end)["updates"] == 16
    assert not reproduce_collect.summary(killed_in_the_end)["finished"]


def test_the_results_say_which_runs_are_finished():
    found = 0
    for path in (ROOT / "docs" / "results").glob("**/*-seed*.jsonl"):
        about, *rows = map(json.loads, path.read_text().splitlines())
        planned = about["batch"]["updates_per_stage"] * about["batch"]["stages"]
        ends = [row["updates"] for row in rows if row["kind"] == "evaluation"]
        assert about["finished"] == (ends[-1] == planned), path
        found += 1
    assert found > 300


def test_a_lag_counts_as_staleness_in_the_grid_of_the_law(tmp_path):
    name = "grpo-mu8-lag2-lr1e-05-seed0"
    keys = ["objective.name=grpo", "batch.lag=2"]
    write_run(tmp_path / "law" / name, stages=4, mu=8, rate=1e-5, overrides=keys)
    reproduce_collect.collect(tmp_path, tmp_path / "out")
    line = json.loads((tmp_path / "out" / "law.jsonl").read_text())
    assert line["mu"] == 24 and line["lag_times_rate"] == pytest.approx(24e-5)  # (L + 1) · µ


def test_runs_without_the_veto_have_a_name_of_their_own_in_the_grid(tmp_path):
    given = ["grid", "--runs", "r", "--mu", "--protected-mu", "8", "--no-veto-mu", "8", "--rates", "1e-5"]
    settings = list(reproduce._grid(reproduce._parser().parse_args(given)))
    assert [name for name, _, _ in settings] == [
        "law/relaxed-no-veto-mu8-lr1e-05-seed0",
        "law/mu_grpo-mu8-lr1e-05-seed0",
    ]
    for name, mu, keys in settings:
        wanted = [key for key in keys if key.startswith("objective.")]
        write_run(tmp_path / name, mu=mu, rate=1e-5, overrides=wanted)
    reproduce_collect.collect(tmp_path, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "law.jsonl").read_text().splitlines()]
    assert [line["objective"] for line in lines] == ["mu_grpo", "relaxed-no-veto"]


def test_runs_may_take_the_warm_start_of_another_folder(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(reproduce, "_warm_start", lambda *given: seen.append(given) or True)
    monkeypatch.setattr(reproduce.Queue, "run", lambda self, works: seen.extend(works) or True)
    monkeypatch.setattr(reproduce_queue.signal, "signal", lambda *_: None)  # pytest keeps its own
    given = ["run", "--runs", str(tmp_path / "b"), "--start", str(tmp_path / "a"), "--queue", "mu_grpo:0"]
    assert reproduce._train(reproduce._parser().parse_args(given), []) == 0
    (_, begun, _, _, start), work = seen
    assert begun == tmp_path / "a" and f"model.source={start}" in work.command
    assert start == tmp_path / "a" / "warm-start-export" / "model" and work.folder.parent == tmp_path / "b"


def test_settings_are_compared_in_one_table(tmp_path, capsys):
    weaker = "sampling.behaviors=[{source: current, share: 0.5}, {source: /home/me/weaker, share: 0.5}]"
    for setting, arm, seed, keys in (
        ("mixed", "p3o", 0, [weaker]),
        ("mixed", "p3o", 1, [weaker]),
        ("cold", "m2po", 0, ["sampling.temperature=0.6"]),
    ):
        folder = tmp_path / setting / f"{arm}-lr1e-05-seed{seed}"
        write_run(folder, mu=32, rate=1e-5, seed=seed, overrides=[f"seed={seed}", *keys])
    for setting in ("mixed", "cold"):
        reproduce_collect.collect(tmp_path / setting, tmp_path / "out" / setting)
    text = (tmp_path / "out" / "mixed" / "p3o-lr1e-05-seed0.jsonl").read_text()
    assert '"source": "weaker"' in text and "/home/me" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    accuracy = [line["accuracy"] for line in lines if line["kind"] == "evaluation"]
    capsys.readouterr()
    pytest.importorskip("matplotlib")
    from reproduce_draw import draw

    draw(tmp_path / "out", list(reproduce.ARMS), level=0.5)
    head, _, mixed, cold = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("| arm | responses sampled | seeds | start | mean of the last 3 evaluations |")
    end = sum(accuracy[-3:]) / 3
    wanted = f"| p3o | half by a weaker model | 2 | {accuracy[0]:.3f} | {end:.3f} | {end:.3f}, {end:.3f} |"
    assert head.split(" | ")[7] == "collapsed" and mixed.split(" | ")[7] == "0 of 2"
    assert mixed.startswith(wanted) and cold.startswith("| m2po | at temperature 0.6 | 1 |")
    assert (tmp_path / "out" / "settings.png").stat().st_size > 10_000


def rated(arm, seed, accuracy, reward, mu=96):
    points = [
        {"updates": 32 * i, "accuracy": value, "standard_error": 0.01 * i} for i, value in enumerate(accuracy)
    ]
    bins = [{"updates": 32, "reward": reward}]
    return {
        "arm": arm,
        "seed": seed,
        "rate": 2e-5,
        "updates": 96,
        "evaluations": points,
        "bins": bins,
        "batch": {"updates_per_stage": mu},
    }


def test_the_table_of_rates_says_who_shares_rollouts_and_who_collapsed():
    runs = [
        rated("mu_grpo", 0, [0.2, 0.1, 0.3, 0.2], 0.5),
        rated("mu_grpo", 1, [0.2, 0.6, 0.4, 0.25], 0.4),  # above its start, but below half of its best
        rated("relaxed-no-veto", 0, [0.2, 0.3, 0.05, 0.1], 0.5),
        rated("relaxed-no-veto", 1, [0.2, 0.3, 0.05, 0.3], 0.3),
        rated("grpo-mu4", 1, [0.2, 0.2, 0.2, 0.2], 0.4, mu=4),
    ]
    assert reproduce_rates.rollouts(runs) == ["A", "A", "A", "B", "–"]
    shown = list(reproduce_rates.tables(runs))
    assert shown[2] == "| mu_grpo | 2e-05 | 0 | A | 0.200 | 0.100 | 0.300 | 0.200 | 0 % |"
    assert "Standard error of an evaluation with an accuracy above 0.05: 0.000 to 0.030." in shown
    first = next(i for i, line in enumerate(shown) if "triggers, most" in line)
    ends = {line.split(" | ")[0]: line.split(" | ")[7] for line in shown[first + 2 : first + 5]}
    assert ends == {"| mu_grpo": "1 of 2", "| relaxed-no-veto": "1 of 2", "| grpo-mu4": "0 of 1"}


def test_it_is_shown_which_runs_had_collapsed_before_their_end():
    runs = [
        rated("mu_grpo", 0, [0.2, 0.05, 0.3, 0.2], 0.5),
        rated("relaxed-no-veto", 0, [0.2, 0.3, 0.05, 0.1], 0.5),
        rated("relaxed-no-veto", 1, [0.2, 0.3, 0.05, 0.3], 0.3),
        rated("grpo-stale", 0, [0.2, 0.2, 0.2, 0.2], 0.4),
    ]
    assert list(reproduce_rates._earlier_end_table(runs)) == [
        "| arm | η | collapsed, if the run ended after 0 | 32 | 64 | 96 |",
        "|---|---|---|---|---|---|",
        "| mu_grpo | 2e-05 | 0 of 1 | 1 of 1 | 0 of 1 | 0 of 1 |",
        "| relaxed-no-veto | 2e-05 | 0 of 2 | 0 of 2 | 2 of 2 | 1 of 2 (seed 0) |",
    ]
    assert not list(reproduce_rates._earlier_end_table(runs[-1:]))


def test_the_ends_over_the_rates_have_the_spread_of_the_seeds_and_the_collapses():
    runs = [
        rated("mu_grpo", 0, [0.1, 0.3, 0.3, 0.3], 0.5),
        rated("mu_grpo", 1, [0.1, 0.2, 0.2, 0.2], 0.4),
        rated("mu_grpo", 0, [0.4, 0.1, 0.1, 0.1], 0.5) | {"rate": 4e-5},
        rated("grpo-stale", 1, [0.2, 0.2, 0.2, 0.2], 0.4) | {"rate": 4e-5},
    ]
    assert list(reproduce_rates._summary_table(runs))[2:] == [
        "| mu_grpo | 0.250 (0.200–0.300) | 0.100, only 1 seed, 1 of 1 collapsed |",
        "| grpo-stale | – | 0.200, only 1 seed |",
    ]
    assert not list(reproduce_rates._summary_table(runs[:2]))


def test_a_run_that_collapses_has_its_diagnostics_and_a_stage_its_reward_and_drift():
    run = rated("mu_grpo", 0, [0.4, 0.4, 0.1], 0.5, mu=32)
    run["evaluations"][-1] |= {"truncated": 0.98, "malformed": 0.07}
    run["batch"] |= {"prompts_per_update": 2, "responses_per_prompt": 4}
    line = {"abandoned/negative_responses": 0.5, "abandoned/positive_responses": 0.25, "entropy/tokens": 0.1}
    line |= {"behind_abandoned/negative_pull": 0.125, "ratio/before_abandoned_tokens": 1.0}
    bins = [{"updates": end, "reward": end / 128, "drift": end / 64, **line} for end in (16, 32, 48, 64)]
    run |= {"bins": bins, "updates": 64}
    table = list(reproduce_rates._collapse_table([run]))
    assert table[-1] == "| mu_grpo | 2e-05 | 0 | 64 | 50 % | 25 % | 12 % | 98 % | 7 % | 1.00 | – | 0.100 |"
    held = run | {"evaluations": run["evaluations"][:-1]}
    assert len(table) == 6 and not list(reproduce_rates._collapse_table([held]))
    assert list(reproduce_rates._stage_table([run]))[2:] == [
        "| mu_grpo | 2e-05 | 0 | 1 | 256 | 0.188 | 0.500 |",  # rewards of 16/128 and 32/128
        "| mu_grpo | 2e-05 | 0 | 2 | 256 | 0.438 | 1.000 |",
    ]
    short = run | {"batch": run["batch"] | {"updates_per_stage": 4}}  # lines are longer than its stages
    assert not list(reproduce_rates._stage_table([short]))


def test_a_run_that_was_stopped_after_its_first_evaluation_has_a_line():
    begun = rated("p3o", 0, [0.2], 0.1) | {"bins": []}
    curve, end = [line for line in reproduce_rates.tables([begun]) if "p3o" in line]
    assert "| 0.200 |" in curve
    assert "0 of 1" in end


def test_an_accuracy_at_exactly_half_of_the_best_is_no_collapse():
    half = float(f"{35 / 512:.5g}"), float(f"{70 / 512:.5g}")  # as `collect` rounds them
    assert half[0] < 0.5 * half[1]
    assert reproduce_regimes.collapse_of([0, 32], [half[1], half[0]]) is None
    assert reproduce_regimes.collapse_of([0, 32], [half[1], 34 / 512]) is not None


def test_a_run_of_one_stage_has_no_quickest_stage():
    """Its stage includes compiling."""
    bins = [{"updates": 32, "clock": 2.0}, {"updates": 64, "clock": 3.0}]
    run = {"seed": 0, "alone": True, "updates": 64, "seconds": {"sample": 1.0, "update": 1.0}, "bins": bins}
    run |= {"optimizer": {"learning_rate": 1e-6}}
    runs = [
        run | {"arm": arm, "batch": {"updates_per_stage": mu}} for arm, mu in (("grpo-mu4", 32), ("p3o", 64))
    ]
    _, _, fresh, whole = reproduce_times.time_table(runs)
    assert fresh.endswith("| 31.2 ms | 1.00× | 31.2 ms | 1.00× |")
    assert whole.endswith("| 31.2 ms | 1.00× | – | – |")


def test_the_exponents_of_the_age_that_order_runs_are_found():
    """Runs collapse from √S·η = 1 on; S is 1, 16 and 256."""
    rows = [
        {
            "objective": "grpo",
            "mu": age,
            "learning_rate": rate,
            "collapse": 9 if age**0.5 * rate >= 1 else None,
        }
        for age in (1, 16, 256)
        for rate in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
    ]
    (line,) = reproduce_held_out.exponents(rows)
    # From η = 1/32 and S = 256, which holds, to η = 1 and S = 1, which does not: 256^p < 32, so p < 0.625.
    assert (
        line == "grpo: the best limit on S^p·η has 0 of 21 runs on the wrong side, with p from 0.38 to 0.62."
    )
    held = [row | {"collapse": None} for row in rows]
    assert list(reproduce_held_out.exponents(held)) == []


def test_runs_are_collected_and_drawn(tmp_path, capsys):
    runs, out = tmp_path / "runs", tmp_path / "out"
    for name, seed in (
        ("mu_grpo", 0),
        ("mu_grpo", 1),
        ("grpo-mu4", 0),
        ("grpo-mu4", 1),
        ("m2po", 0),
        ("p3o", 2),
    ):
        write_run(runs / f"{name}-seed{seed}", mu=32, seed=seed, overrides=[f"seed={seed}"])
    (runs / "mu_grpo-seed1" / "shared_gpu").touch()
    for mu, rate in ((8, 1e-5), (8, 1e-3), (32, 1e-5), (32, 1e-3)):
        folder = write_run(
            runs / "law" / f"grpo-mu{mu}-lr{rate:g}-seed0",
            stages=64 // mu,
            mu=mu,
            rate=rate,
            overrides=["objective.name=grpo"],
        )
    lose_all(folder)
    unfinished = runs / "law" / "grpo-mu32-lr1-seed1"
    shutil.copytree(folder, unfinished)
    cut_last_record(unfinished)

    reproduce_collect.collect(runs, out)
    lines = [json.loads(line) for line in (out / "law.jsonl").read_text().splitlines()]
    assert len(lines) == 5 and [line["collapse"] for line in lines[-2:]] == [16, 16]
    assert sum(line["collapsed"] for line in lines) == 2
    assert [made["equal_groups"] for made in lines[0]["generations"]] == [0.25 + i / 100 for i in range(8)]
    stages = reproduce_collect.records(runs / "law" / "grpo-mu8-lr1e-05-seed0")
    rewards = [record["reward"] for record in stages if record["kind"] == "stage"]
    assert [made["reward"] for made in lines[0]["generations"]] == pytest.approx(rewards, rel=1e-4)
    assert lines[0]["lag_times_rate"] == 8e-5 and lines[0]["update_size"] == pytest.approx(1000)
    curve = lines[0]["curve"]
    assert curve["updates"] == list(range(1, 65)) and curve["age"] == [*range(1, 9)] * 8
    assert curve["drift"][9] == pytest.approx(0.1 * 2**0.5, rel=1e-4) and lines[0]["momentum"] == 0.9
    capsys.readouterr()

    pytest.importorskip("matplotlib")
    from reproduce_draw import draw

    draw(out, list(reproduce.ARMS), level=0.5)
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.startswith("| mu_grpo")]
    assert [row.count("–") for row in rows[:3]] == [0, 5, 5]  # times of the run that was alone
    curves = [
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("mu_grpo-seed1", "grpo-mu4-seed0")
    ]
    ours, fresh = ([p["accuracy"] for p in curve if p["kind"] == "evaluation"][1:] for curve in curves)
    apart = sum(ours) / len(ours) - sum(fresh) / len(fresh)
    ahead = sum(here > there for here, there in zip(ours, fresh, strict=True))
    assert rows[4] == f"| mu_grpo | 1 | {apart:+.4f} | – | {ahead} of {len(ours)} |"
    assert rows[5].startswith(f"| mu_grpo | mean of 2 | {apart / 2:+.4f} ± ")  # seed 0 has a distance of 0
    sizes = [point["ess/tokens"] for point in curves[0] if point["kind"] == "updates"]
    assert f" | {sum(sizes) / len(sizes):.3f} |\n" in shown
    assert "mean of 2" in rows[2]
    spent = {curve[0]["run"]: curve[0] for curve in curves}["grpo-mu4-seed0"]
    parts = [spent["seconds"].get(part, 0.0) for part in ("sample", "score_wait", "update", "switch")]
    assert f"{1e3 * sum(parts) / spent['updates']:.1f} ms | 1.00× |" in shown
    clock = {p["updates"]: p["clock"] for p in curves[1] if p["kind"] == "updates"}
    stages = [(clock[end] - clock.get(end - 32, 0.0)) / 32 for end in clock if end % 32 == 0]
    assert f"| {1e3 * min(stages):.1f} ms | 1.00× |" in shown
    low = min(point["accuracy"] for point in curves[1] if point["kind"] == "evaluation" and point["updates"])
    assert f"| grpo-mu4 | 0 | {low:.3f} | " in shown
    assert "S·η up to 0.016 (between 0.008 and 0.032)" in shown
    # The drift of the synthetic runs is 0.1 √S, a random walk; µ = 8 alone has no collapse to fit a limit to.
    exponents = [
        line.split(" | ")[6:8] for line in shown.splitlines() if line.startswith("| grpo | 0 | 32 |")
    ]
    assert [cells[1] for cells in exponents] == ["0.50", "0.50"]
    assert (
        "| grpo | 4 | 1 | 0 | 0 | 1 |" in shown
    )  # µ = 8 at the rate of the collapse holds: η alone errs once
    assert "| grpo | η alone | 1 | 1 | µ = 8, η = 0.001 |" in shown
    for name in ("accuracy", "staleness", "law", "regimes"):
        assert (out / f"{name}.png").stat().st_size > 10_000


PAGES = tuple(f"results{name}.md" for name in ("", "-chains", "-law", "-short-responses", "-tables"))
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e-\d+)?")
QUICKSTARTS = ["quickstart", "quickstart_again", "quickstart_slower", "quickstart_slower_again"]


@functools.cache
def shown_by_draw(folder):
    """The tables of a folder of docs/results, as lines; `A --fitted B` as on the command line of `draw`."""
    folder, _, fitted = folder.partition(" --fitted ")
    runs, grid = read_results(folder)
    lines = list(reproduce_tables.tables(runs, grid, 0.5))
    return [*lines, *reproduce_held_out.other_grid_table(grid, read_results(fitted)[1])] if fitted else lines


def read_results(folder):
    return reproduce_tables.read(ROOT / "docs" / "results" / folder, list(reproduce.ARMS), 0.5)


@pytest.mark.parametrize(
    ("begin", "end", "folders"),
    [
        ("## Chains: one generation", "## The quickstart", ["chains"]),
        ("## One generation, three", "## With 64 prompts", ["chains"]),
        ("## With 64 prompts", "## Scopes of the veto", ["chains_64"]),
        ("## Scopes of the veto", "## Stages of 1,024", ["chains"]),
        ("## Stages of 1,024", "## Time to the same", ["chains_long", "chains_long_first"]),
        ("## The quickstart", "## How stale may", QUICKSTARTS),
        ("## How stale may", "## Four objectives", ["quickstart_mu"]),
        ("## Four objectives", "## Time", ["quickstart_arms"]),
        ("On word problems, two runs", "On GSM8K, likewise", ["times"]),
        ("On GSM8K, likewise", "## The staleness law", ["gsm8k"]),
        ("## The law with a lag", "## A check on runs", ["lag"]),
        ("## A check on runs", "## The law with larger", ["quickstart_mu --fitted lag"]),
        ("## The law with larger", "## The law on chains", ["lag-large"]),
        ("## The law on chains", "", ["lag-chains"]),
        ("## Chains, 256 updates", "## The quickstart", ["chains", "chains_first", "chains_again"]),
        ("`docs/results/quickstart`:", "## How stale may", QUICKSTARTS),
        ("`docs/results/quickstart_mu`)", "## Four objectives", ["quickstart_mu"]),
        ("`docs/results/quickstart_arms`)", "## The law with a lag", ["quickstart_arms"]),
        ("`docs/results/lag`)", "## The law with larger", ["lag"]),
        ("`docs/results/lag-large`)", "## The law on chains", ["lag-large"]),
        ("`docs/results/lag-chains`)", "", ["lag-chains"]),
        ("## Responses of other policies", "## LoRA on chains", ["settings"]),
        ("## LoRA on chains", "", ["chains_lora"]),
        ("### What came out", "### Five times", ["."]),
        ("### Five times", "## The same on a laptop", ["rate-5e-6", "rate-5e-6-again"]),
        ("At the learning rate of the config", "At four times that", ["laptop"]),
        ("At four times that", "With four stages", ["laptop-2e-4"]),
        ("With four stages", "## Times", ["laptop-mu64"]),
        ("## The staleness law", "", ["."]),
    ],
)
def test_the_page_of_results_says_what_its_files_say(begin, end, folders):
    """Each number of a table is one that `draw` prints for that arm (or line of the grid), maybe rounded."""

    def rows(lines):
        cells = [[cell.strip(" *`") for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
        return [row[row[0] in ("", "first", "again", "slower", "slower again") :] for row in cells]

    printed = {}
    for folder in folders:
        for name, *cells in rows(shown_by_draw(folder)):
            for key in (name, (name, cells[0])):  # of an arm, of one of its seeds
                printed.setdefault(key, set()).update(NUMBER.findall(" ".join(cells)))
    pages = [(ROOT / "docs" / name).read_text() for name in PAGES]
    text = next(page for page in pages if begin in page)
    section = text[text.index(begin) :].removeprefix(begin)
    section = section[: section.index(end)] if end else section
    checked = 0
    for name, *cells in rows(section.splitlines()):
        if name in {"grpo", *reproduce.ARMS}:
            there = printed.get((name, cells[0])) or printed[name]
            for number in NUMBER.findall(" ".join(cells)):
                wrong = 0.5001 * 10.0 ** Decimal(number).as_tuple().exponent
                close = [value for value in there if abs(float(value) - float(number)) <= wrong]
                assert close, f"{name}: {number} in {cells}"
                checked += 1
    assert checked > 10


def test_each_accuracy_in_the_table_of_claims_is_one_that_draw_prints():
    """A row names its folders in its last cell; `*-seed*.jsonl` are the files of docs/results itself.

    A mean with its range, as 0.228 (0.215–0.236), must be the mean and two of the seeds of one printed cell.
    """
    text = (ROOT / "docs" / "results.md").read_text()
    table = text[text.index("| claim | verdict |") :].split("\n\n")[0].splitlines()[2:]
    checked = 0
    for line in table:
        _, _, said, places = (cell.strip() for cell in line.split("|")[1:-1])
        folders = [name.replace("*-seed*.jsonl", ".") for name in re.findall(r"`([^`]+)`", places)]
        if any("*" in folder for folder in folders):
            continue  # the row about time: its tables have a test of their own
        lines = [line for name in folders for line in shown_by_draw(name) if line[:1] == "|"]
        cells = [{float(n) for n in NUMBER.findall(cell)} for line in lines for cell in line.split("|")]
        for group in re.findall(r"(\d+\.\d+)(?: \((\d+\.\d+)–(\d+\.\d+)\))?", said):
            wanted = [float(number) for number in group if number]
            close = (all(any(abs(x - w) < 0.00051 for x in cell) for w in wanted) for cell in cells)
            assert any(close), f"{group} in {line[:60]}"
            assert group[1] or "of 3 collapse" in said or "±" in said, f"{group} has no range in {line[:60]}"
            checked += 1
    assert checked > 15


def test_the_letters_of_the_rollouts_hold_for_all_runs_on_chains():
    folders = {"": "chains", "first": "chains_first", "again": "chains_again"}
    runs = [(mark, run) for mark, folder in folders.items() for run in read_results(folder)[0]]
    letters = reproduce_rates.rollouts([run for _, run in runs])
    known = {
        (mark, run["arm"], f"{run['rate']:g}", str(run["seed"])): letter
        for (mark, run), letter in zip(runs, letters, strict=True)
    }
    page = (ROOT / "docs" / "results-tables.md").read_text()
    section = page[page.index("## Chains, 256") : page.index("## The quickstart")]
    table = [line for line in section.splitlines() if line.startswith("|") and "0." in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    rows = [row if row[0] in folders else ["", *row] for row in rows]
    shown = {tuple(row[:4]): row[4] for row in rows}
    assert shown == known and len(set(known.values())) > 10


def collapses(arm, rate, *folders):
    """How many runs of an arm collapse at this rate with one generation, "1 of 3"; over several folders."""
    gone = []
    for folder in folders:
        runs, grid = read_results(folder)
        gone += [reproduce_rates.collapsed(run) for run in runs if (run["arm"], run["rate"]) == (arm, rate)]
        same = [row for row in grid if (row["objective"], row["learning_rate"]) == (arm, rate)]
        gone += [row["collapse"] is not None for row in same if row["mu"] == 256]
    return f"{sum(gone)} of {len(gone)}"


def test_what_is_said_of_all_objectives_on_the_same_responses_is_in_the_files():
    page = (ROOT / "docs" / "results.md").read_text()
    section = page[page.index("## Four objectives") : page.index("## Time\n")]
    table = [line for line in section.splitlines() if line.startswith("|")]
    printed = shown_by_draw("quickstart_arms")
    assert len(table) == 10 and all(line in printed for line in table)
    arms = ["relaxed-no-veto", "mu_grpo-trigger", "mu_grpo", "mu_grpo-suffix_non_trigger", "mu_grpo-sequence"]
    lost = {rate: [collapses(arm, rate, "quickstart_arms") for arm in arms] for rate in (5e-4, 1e-3)}
    assert lost == {5e-4: ["3 of 3"] * 2 + ["0 of 3"] * 3, 1e-3: ["3 of 3"] * 2 + ["2 of 3"] * 2 + ["0 of 3"]}
    ends = {
        (run["arm"], run["rate"], run["seed"]): reproduce_rates.end(run)
        for run in read_results("quickstart_arms")[0]
    }
    grid = read_results("quickstart_mu")[1]
    same = [row for row in grid if row["mu"] == 256 and row["learning_rate"] != 5e-4]
    assert len(same) == 3 * 4 * 3  # objectives, rates, seeds
    for row in same:
        arm = "grpo-stale" if row["objective"] == "grpo" else row["objective"]
        assert reproduce_stages.end(row) == ends[arm, row["learning_rate"], row["seed"]]


def test_the_table_of_the_veto_counts_the_runs_of_the_files():
    pairs = [row.strip("| ").split(" | ") for row in shown_by_draw("lag-chains")]
    start = next(i for i, row in enumerate(pairs) if row[-2:] == ["collapsed: mu_grpo", "relaxed-no-veto"])
    rows = list(itertools.takewhile(lambda row: len(row) == 5, pairs[start + 2 :]))
    oldest = [row for row in rows if row[:2] == ["2e-05", "256"]]
    rest = [row for row in rows if row not in oldest]
    paired = [
        [f"{sum(int(row[i]) for row in some)} of {sum(int(row[2]) for row in some)}" for i in (3, 4)]
        for some in (oldest, rest)
    ]
    settings = [
        (2e-5, ["chains"], None),
        (2e-5, ["chains_64"], None),
        (5e-4, ["quickstart", "quickstart_again"], None),
        (3.5e-4, ["quickstart_slower", "quickstart_slower_again"], None),
        (2.5e-4, ["quickstart_mu"], None),
        (1e-3, ["quickstart_mu"], None),
        (5e-4, ["quickstart_ratio"], ["quickstart_mu"]),
    ]
    wanted = [
        [collapses("mu_grpo", rate, *ours), collapses("relaxed-no-veto", rate, *(theirs or ours))]
        for rate, ours, theirs in settings
    ]
    text = (ROOT / "docs" / "results.md").read_text()
    table = text[text.index("| runs | with the veto | without |") :].split("\n\n")[0].splitlines()[2:]
    chains, tiny = wanted[:2] + paired, wanted[2:]
    assert [line.strip("| ").split(" | ")[1:] for line in table] == chains + tiny

    one_generation = [[part.split(" of ") for part in row] for row in chains[:3]]
    ours, theirs = (sum(int(row[i][0]) for row in one_generation) for i in (0, 1))
    runs = sum(int(row[0][1]) for row in one_generation)
    assert f"fewer runs collapse with it, {ours} of {runs} against {theirs} of {runs}," in text
    (line,) = (row for row in (ROOT / "README.md").read_text().splitlines() if "| the veto prevents" in row)
    assert f"on chains at 2e-5 with one generation {ours} and {theirs} of {runs};" in line
    younger = [part.split(" of ") for part in chains[3]]
    assert f"or 1e-5 {younger[0][0]} and {younger[1][0]} of {younger[0][1]} |" in line


def predicted_right(folder):
    """For each rule, how many runs without the veto it predicts right; from the last table about this."""
    rows = [line.strip("| ").split(" | ") for line in shown_by_draw(folder)]
    *_, start = (i for i, row in enumerate(rows) if "predicted right" in " ".join(row))
    (column,) = (i for i, name in enumerate(rows[start]) if "predicted right" in name)
    table = itertools.takewhile(lambda row: len(row) > 1, rows[start + 2 :])
    return {row[1]: int(row[column]) for row in table if row[0] == "relaxed-no-veto"}


def test_the_predictions_of_the_law_are_those_that_draw_prints():
    tiny, chains = predicted_right("quickstart_mu --fitted lag"), predicted_right("lag-chains")
    (line,) = (line for line in (ROOT / "README.md").read_text().splitlines() if "not reproduced" in line)
    for found in (tiny, chains):
        assert f"{found['√S·η']}, {found['η alone']} and {found['S·η']} of " in line
    page = (ROOT / "docs" / "results.md").read_text()
    constant = f"*always holds* {tiny['none: all hold']}"
    assert f"√S·η {tiny['√S·η']} right, η alone {tiny['η alone']}, {constant}, S·η {tiny['S·η']}." in page
    constant = f"*always collapses* {chains['none: all collapse']}"
    assert f"η alone {chains['η alone']}, √S·η {chains['√S·η']}, {constant}, S·η {chains['S·η']} |" in page


def test_each_line_about_equal_accuracy_is_one_that_draw_prints(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def cells(lines):
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]

    fresh = tmp_path / "chains_small"
    printed = {}
    for folder in ("chains", "chains_long", "chains_small", "chains_small_mu32", "chains_small_mu16"):
        copied = shutil.copytree(ROOT / "docs" / "results" / folder, tmp_path / folder)
        given = ["draw", "--results", str(copied), "--fresh", str(fresh if "_mu" in folder else copied)]
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *given])
        assert reproduce.main() == 0
        printed[folder] = cells(capsys.readouterr().out.splitlines())
    everything = [row for rows in printed.values() for row in rows]
    marks = {"": fresh.name, "µ = 64": fresh.name} | {f"µ = {µ}": f"chains_small_mu{µ}" for µ in (32, 16)}
    page = (ROOT / "docs" / "results-chains.md").read_text()
    section = page[page.index("## Time to the same") : page.index("## Responses of")]
    pairs = [row for row in cells(section.splitlines()) if row[0] in reproduce.ARMS]
    assert len(pairs) == 12 and all(row in everything for row in pairs)
    curves = [row for row in cells(section.splitlines()) if row[0] in marks and row[1] in reproduce.ARMS]
    assert len(curves) == 8
    for mark, arm, rate, seed, *curve in curves:
        assert [arm, rate, seed, "–", *curve] in printed[marks[mark]]

    overview = (ROOT / "docs" / "results.md").read_text()
    ends = cells(
        overview[overview.index("## Chains: one") : overview.index("## The quickstart")].splitlines()
    )
    assert len(ends) == 11 and all(row in printed["chains"] for row in ends)
    speeds = {}  # of stale data, per update and to the same accuracy, by prompts per update and µ
    for arm, prompts, µ, *_, per_update, _, _, to_accuracy, _, _ in pairs:
        if arm == "mu_grpo":
            speeds.setdefault((prompts, µ), []).append((per_update.rstrip("×"), to_accuracy.rstrip("×")))
    times = cells(overview[overview.index("## Time\n") : overview.index("## The law")].splitlines())
    shown = {(prompts, µ): (*parts, seeds) for task, prompts, µ, *parts, seeds in times if task == "chains"}
    assert shown == {
        key: (*(", ".join(part) for part in zip(*found)), str(len(found))) for key, found in speeds.items()
    }


def test_a_long_run_of_the_grid_is_thinned():
    updates = [
        {
            "updates": i + 1,
            "staleness": i % 600,
            "drift": 0.1 * i,
            "update_norm": 2.0 * i,
            "gradient_cosine": None,
        }
        for i in range(1200)
    ]
    curve = reproduce_collect._curve(updates, 600)
    assert len(curve["updates"]) == 240 and curve["updates"][:2] == [5, 10] and curve["age"][120] == 5
    assert curve["drift"][0] == 0.4 and curve["update_norm"][0] == 4.0 and curve["gradient_cosine"][0] is None


def grid_row(lag, rate, collapse):
    """A run of a grid whose drift is exactly that of noise with Adam's momentum."""
    at = range(1, lag + 1)
    later, first = (effective_updates(at, 0.0, 0.9, first_stage=early) for early in (False, True))
    ages = [i % lag + 1 for i in range(512)]
    drift = [rate * 2000 * float((first if i < lag else later)[age - 1]) for i, age in enumerate(ages)]
    curve = {"updates": list(range(1, 513)), "age": ages, "drift": drift, "gradient_cosine": [0.001] * 512}
    settings = {"objective": "grpo", "seed": 0, "mu": lag, "learning_rate": rate, "updates": 512}
    return settings | {"momentum": 0.9, "update_size": 2000.0, "curve": curve, "collapse": collapse}


def test_limits_are_checked_on_runs_that_were_not_fitted():
    """Runs collapse at a drift of 1.6 since the start, whatever their µ."""

    grid = []
    for lag, rate in itertools.product((16, 128, 512), (1e-6, 1e-5, 3e-5)):
        told = updates_until_drift(1.6, rate, 2000.0, 0.0, 0.9, first_stage=True, most=512)
        grid.append(grid_row(lag, rate, told if math.isfinite(told) else None))
    regimes = list(reproduce_regimes.regime_table(map(reproduce_regimes.measured_row, grid)))
    assert regimes[-5:-3] == ["Runs by the cosine: noise 6, between 3.", "Runs by the drift: noise 9."]
    cells = [cell.strip() for cell in regimes[-7].split("|")[1:-1] if cell != " 0 "]
    assert cells[:6] == ["grpo", "512", "3e-05", "2000", "0.0010 ± 0.0000", "between"]
    assert cells[6] == cells[7] and cells[8] == "noise"
    assert cells[9] == "1.00" and float(cells[10]) > 1.1 and cells[11] == "1.00"
    held = {line.split(" | ")[1]: line for line in list(reproduce_held_out.held_out_table(grid))[2:]}
    assert held["predicted drift since the start"].endswith("| 9 | 0 | – |")
    assert "| grpo | η alone | 9 | 0 |" in held["η alone"] and "| 9 | 0 |" not in held["S·η"]
    assert held["none: all collapse"] == "| grpo | none: all collapse | 6 | 3 | – |"
    *table, _, summary = reproduce_held_out.time_table(grid)
    assert summary == "Right up to a factor of two, of 6: 3 by T·η, 6 by the drift."
    times = [line.split(" | ") for line in table[2:]]
    for _, _, _, seen, straight, walk in times:
        assert int(walk.rstrip(" |")) == pytest.approx(int(seen), rel=0.05)  # updates are whole
        assert straight == "never" or int(straight) != pytest.approx(int(seen), rel=0.3)
    assert len(times) == 6


def test_limits_of_one_grid_are_checked_on_another():
    """In the fitted grid runs collapse above S·η = 1e-3, in the other one above η = 2e-5."""
    pairs = list(itertools.product((16, 64, 256), (4e-6, 1e-5, 4e-5, 1e-4)))
    fitted = [grid_row(lag, rate, 9 if lag * rate > 1e-3 else None) for lag, rate in pairs]
    other = [grid_row(lag, rate, 9 if rate > 2e-5 else None) for lag, rate in pairs]
    unknown = [row | {"objective": "m2po"} for row in other]  # the fitted grid has no such run
    _, _, *lines = reproduce_held_out.other_grid_table(other + unknown, fitted)
    found = {cells[1]: cells[3:] for line in lines if (cells := line.strip("| ").split(" | "))}
    told = sum((lag * rate > 1e-3) == (rate > 2e-5) for lag, rate in pairs)
    assert found["S·η"] == [str(told), str(12 - told)]
    assert found["none: all hold"] == ["6", "6"] and len(lines) == len(reproduce_held_out.RULES) + 1
    assert not list(reproduce_held_out.other_grid_table(other, [row | {"collapse": None} for row in fitted]))[
        2:
    ]


def test_the_advice_after_a_collapse_is_checked_on_the_other_runs_of_its_stage_length():
    """A quarter of the drift needs a quarter of the rate, 2.5e-5; the report says to try half of this."""
    ends = [(1e-5, None, 0), (2e-5, 99, 0), (2e-5, None, 1), (3e-5, None, 0), (1e-4, 64, 0), (5e-5, None, 0)]
    grid = [
        grid_row(64, rate, at) | {"seed": seed, "batch_drift": None, "critical_drift": None}
        for rate, at, seed in [*ends, (1.2e-5, 9, 2)]
    ]
    grid[-1]["mu"] = 16  # runs of another µ do not count
    longest = grid[4]["curve"]["drift"]
    grid[4]["critical_drift"] = longest[-1] * 8**0.5 / 4  # a quarter of the way of 8 stages at random
    assert reproduce_held_out._advised(grid[4]) == pytest.approx(2.5e-5, rel=0.1)
    _, _, line = reproduce_held_out.advice_check_table(grid)
    assert line == "| grpo | 1 | 0 of 1 | 1 of 5 | 1 of 3 |"  # 5e-5 is half of its own η
    assert reproduce_held_out._advised(grid[4] | {"critical_drift": 1e9}) == 1e-4  # never above its own η
    calm = [row | {"collapse": None} for row in grid]
    assert len(list(reproduce_held_out.advice_check_table(calm))) == 2


def test_collapsed_runs_are_counted_by_age_and_learning_rate():
    border = [(16, 1e-5, None), (16, 3e-5, 40), (16, 3e-5, None), (512, 1e-5, 7), (512, 1e-5, 9)]
    header, _, *lines = reproduce_held_out.border_table([grid_row(*run) for run in border])
    assert header == "| objective | µ | η = 1e-05 | η = 3e-05 |"
    assert lines == ["| grpo | 16 | 0 of 1 | 1 of 2 |", "| grpo | 512 | 2 of 2 | – |"]


def test_the_veto_is_compared_on_runs_of_the_same_age_rate_and_seed():
    def row(objective, lag, rate, seed, collapse):
        return grid_row(lag, rate, collapse) | {"objective": objective, "seed": seed}

    pairs = [
        *(row("mu_grpo", 16, 1e-5, 0, None), row("relaxed-no-veto", 16, 1e-5, 0, 7)),
        *(row("mu_grpo", 64, 1e-5, 1, 9), row("relaxed-no-veto", 64, 1e-5, 1, 8)),
        *(row("mu_grpo", 64, 3e-5, 0, 9), row("relaxed-no-veto", 64, 3e-5, 1, 8)),  # of two seeds: no pair
        *(row("mu_grpo", 16, 3e-5, 1, 9), row("relaxed-no-veto", 16, 3e-5, 1, None)),
    ]
    _, _, *lines = reproduce_held_out.pairs_table(pairs)
    assert lines == ["| 1e-05 | 16 | 1 | 0 | 1 |", "| 1e-05 | 64 | 1 | 1 | 1 |", "| 3e-05 | 16 | 1 | 1 | 0 |"]
    assert not list(reproduce_held_out.pairs_table(pairs[::2]))  # nothing to compare


def test_the_time_to_equal_accuracy_compares_timed_runs_of_one_seed():
    def run(arm, accuracy, **more):
        points = [{"updates": 32 * i, "clock": 10.0 * i, "accuracy": a} for i, a in enumerate(accuracy)]
        about = {
            "arm": arm,
            "seed": 1,
            "rate": 5e-6,
            "alone": True,
            "updates": 128,
            "seconds": {"sample": 9.0, "update": 1.0},
            "batch": {"prompts_per_update": 8, "responses_per_prompt": 8, "updates_per_stage": 64},
        }
        return about | {"evaluations": points} | more

    def table(*runs):
        return list(reproduce_times.equal_accuracy_table(runs))

    fresh = run("grpo-mu4", [0.1, 0.2, 0.3, 0.4, 0.4])  # means of three: 0.2, 0.3, 0.367
    seconds = {"sample": 4.0, "update": 1.0, "compile": 7.0}
    stale = run("mu_grpo", [0.1, 0.1, 0.1, 0.4, 0.25], seconds=seconds)  # 0.1, 0.2, 0.25
    about = "| 8 | 64 | 5e-06 | 1 |"
    compared = table(fresh, stale)
    assert len(compared) == 4
    line = f"| grpo-mu4 {about} 78.1 ms | 1.00× | 0.25 | 25 s (80 updates) | 1.00× | – | 0 s |"
    assert compared[2] == line
    # 40 s less 7 s of compiling. At 0.24 it is 24 s against 31 s, at 0.22 22 s against 27 s.
    line = f"| mu_grpo {about} 39.1 ms | 2.00× | 0.25 | 33 s (128 updates) | 0.76× | 0.77× to 0.81× | 7 s |"
    assert compared[3] == line
    assert table(fresh) == [] and table(stale) == []
    for other in (
        run("mu_grpo", [0.1] * 5, alone=False),
        run("mu_grpo", [0.1] * 5, seed=2),
        run("mu_grpo", [0.1] * 5, rate=1e-5),
        run("mu_grpo", [0.1] * 5, batch=fresh["batch"] | {"prompts_per_update": 4}),
        run("mu_grpo-trigger", [0.1] * 5, seconds={"update": 1.0}),  # it replayed rollouts
        run("mu_grpo", [0.1] * 3),  # one mean only
    ):
        assert table(fresh, other) == [] and table(fresh, other, stale) == compared
    # Each stale run is compared at a level of its own. Compiling may come late.
    good = run("mu_grpo", [0.1, 0.4, 0.4, 0.4, 0.4], seconds=seconds)  # 0.3, 0.4, 0.4
    for point in good["evaluations"]:
        point["compiled"] = 7.0 if point["updates"] > 64 else 2.0
    both = table(fresh, stale, good)
    assert both[:4] == compared and len(both) == 6
    assert "| 0.36 | 39 s (125 updates) | 1.00× | – |" in both[4]
    assert "| 0.36 | 21 s (83 updates) | 1.86× | 1.77× to 1.83× |" in both[5]  # 34.5 s against 19.5 s at 0.33
    # A run that only falls does not reach an accuracy above its start.
    falls = run("mu_grpo", [0.4, 0.2, 0.1, 0.0, 0.0])
    assert table(fresh, falls) == [] and table(fresh, falls, stale) == compared


def test_runs_with_fresh_data_may_be_in_another_folder(tmp_path):
    def write(folder, arm, seed):
        (tmp_path / folder).mkdir(exist_ok=True)
        name = f"{arm}-lr5e-06-seed{seed}"
        (tmp_path / folder / f"{name}.jsonl").write_text(
            json.dumps({"kind": "run", "run": name, "seed": seed})
        )

    write("here", "mu_grpo", 0)
    for arm, seed in (("grpo-mu4", 0), ("grpo-mu4", 1), ("mu_grpo", 0)):
        write("there", arm, seed)
    arms, here, there = list(reproduce.ARMS), tmp_path / "here", tmp_path / "there"
    runs, _ = reproduce_tables.read(here, arms, 0.5, there)
    found = [(run["arm"], run["seed"], run["path"].parent.name) for run in runs]
    assert found == [("grpo-mu4", 0, "there"), ("grpo-mu4", 1, "there"), ("mu_grpo", 0, "here")]
    own, _ = reproduce_tables.read(there, arms, 0.5, there)
    assert len(own) == 3  # none of them twice
    with pytest.raises(SystemExit, match="here: no run of grpo-mu4 in it"):
        reproduce_tables.read(there, arms, 0.5, here)
    assert reproduce_tables.read(tmp_path / "nowhere", arms, 0.5, there) == ([], [])


def test_the_quickest_stage_is_found_by_the_clock():
    _quickest = reproduce_times.quickest
    lines = [{"updates": 32 * i, "clock": clock} for i, clock in enumerate((10, 11, 20, 21, 22), start=1)]
    assert _quickest({"bins": lines, "batch": {"updates_per_stage": 64}}) == 1e3 * (21 - 11) / 64
    assert _quickest({"bins": lines, "batch": {"updates_per_stage": 4}}) == 1e3 * 1 / 32


def test_compiling_is_a_part_of_its_own(tmp_path):
    def record(kind, **seconds):
        return {"kind": kind, "updates": 1, "response_tokens": 3, "tokens": 2, "seconds": seconds}

    lines = [
        record("evaluation", evaluate=9.0, compile=8.0) | {"accuracy": 0.5},
        record("stage", sample=5.0, score_wait=1.0, switch=0.5, generate=6.5, compile=4.0),
        record("update", update=3.0, compile=2.5),
        record("update", update=1.0, compile=0.0),
        record("evaluation", evaluate=9.0, compile=8.0) | {"accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert reproduce_collect.summary(tmp_path)["seconds"] == {
        "sample": 1.0,
        "score_wait": 1.0,
        "switch": 0.5,
        "update": 1.5,
        "compile": 6.5,
        "training": 10.5,
    }
    assert reproduce_collect.summary(tmp_path)["tokens"] == {"generated": 3, "trained": 4}
    times = [(point["clock"], point["compiled"]) for point in reproduce_collect._binned(tmp_path)]
    assert times == [(0.0, 0.0), (10.5, 6.5)]  # evaluations do not count


def lose_all(folder):
    """Let the accuracy of a run be 0 from its second evaluation on."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    for line in [line for line in lines if line["kind"] == "evaluation"][1:]:
        line["accuracy"] = 0.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_grid_with_a_lag_has_ages_in_its_tables_and_one_without_has_stages():
    assert reproduce_regimes.lag_name([(8, 8), (16, 16)]) == "µ"
    assert reproduce_regimes.lag_name([(2, 2), (64, 8)]) == "S + 1"
    for folder, name in {"lag": "S + 1", ".": "µ"}.items():
        shown = "\n".join(shown_by_draw(folder))
        assert f"| objective | {name} | η |" in shown and f"| {name} = " in shown


def test_titles_of_a_grid_count_objectives_that_need_a_limit_and_with_a_lag_only_the_largest():
    def row(objective, collapse, lag=8):
        return {"objective": objective, "collapse": collapse, "mu": lag, "stage_updates": 8}

    grid = [row("grpo", 9), row("grpo", None), row("p3o", None), row("p3o", None), row("p3o", None)]
    grid += [row("mu_grpo", 9), row("mu_grpo", None), row("mu_grpo", None), *[row("m2po", 9)] * 4]
    assert reproduce_draw._compared(grid) == {"grpo", "mu_grpo"}
    assert reproduce_draw._compared([*grid, row("p3o", None, lag=16)]) == {"mu_grpo"}
    assert reproduce_draw._compared([row("p3o", None, lag=16)]) == set()


def test_the_time_of_a_collapse_is_hollow_and_a_run_that_held_is_at_its_end():
    def row(objective, lag, collapse):
        return {
            "objective": objective,
            "mu": lag,
            "learning_rate": 0.5,
            "updates": 64,
            "collapse": collapse,
        }

    figure, axis = plt.subplots()
    rows = [row("grpo", 2, None), row("grpo", 16, 8), row("mu_grpo", 2, 4)]
    colors, sizes = {"grpo": "#ff0000", "mu_grpo": "#0000ff"}, {"grpo": 8, "mu_grpo": 6}
    reproduce_draw._draw_times(axis, rows, colors, sizes, {2: "o", 16: "^"})
    marks = [(*line.get_xydata()[0], line.get_markerfacecolor()) for line in axis.get_lines()]
    assert marks[:2] == [(2, 32, "#ff0000"), (16, 4, "white")]
    assert marks[2] == (pytest.approx(2.24), 2, "white")  # beside the mark of the other objective
    plt.close(figure)


def test_draw_compares_runs_by_the_length_of_stages(tmp_path, capsys):
    shutil.copy(ROOT / "docs" / "results" / "quickstart_mu" / "law.jsonl", tmp_path)
    reproduce_draw.draw(tmp_path, list(reproduce.ARMS), level=0.5)
    shown = capsys.readouterr().out
    assert shown.count("| objective | η | µ = 4 | µ = 16 | µ = 64 | µ = 256 |") == 1
    assert {path.name for path in tmp_path.glob("*.png")} == {"stages.png", "rates.png"}
    assert (tmp_path / "stages.png").stat().st_size > 10_000


def test_runs_that_differ_only_in_the_length_of_stages_are_compared_by_it():
    def row(objective, mu, *accuracy, collapse=None, rate=0.5, stage=None):
        return {
            "objective": objective,
            "mu": mu,
            "stage_updates": stage or mu,
            "learning_rate": rate,
            "updates": 64,
            "accuracy_start": 0.2,
            "evaluations": {"accuracy": [0.2, *accuracy]},
            "collapse": collapse,
        }

    rows = [row("mu_grpo", 4, 0.3, 0.6, 0.9), row("grpo", 64, 0.2, 0.3, 0.4), row("grpo", 4, 0.8, 0.8, 0.8)]
    rows += [row("grpo", 64, 0.6, 0.1, 0.1, collapse=40), row("mu_grpo", 64, 0.9, 0.9, 0.9)]
    assert reproduce_stages.are(rows)
    assert not reproduce_stages.are([]) and not reproduce_stages.are(rows[:1])
    assert not reproduce_stages.are([row for row in rows if row["objective"] == "grpo"])
    assert not reproduce_stages.are([*rows, row("grpo", 16, 0.1)])  # µ-GRPO was not run with this µ
    assert not reproduce_stages.are([*rows, row("grpo", 4, 0.1) | {"updates": 128}])
    assert not reproduce_stages.are([*rows, row("grpo", 128, 0.1, stage=64)])  # with a lag
    assert list(reproduce_stages.table(rows)) == [
        "| objective | η | µ = 4 | µ = 64 |",
        "|---|---|---|---|",
        "| grpo | 0.5 | 0.800 (0.800) | 0.283 (0.300, 0.267; 1 of 2 collapsed) |",
        "| mu_grpo | 0.5 | 0.600 (0.600) | 0.900 (0.900) |",
    ]
    assert list(reproduce_stages.table(rows[:2]))[2:] == [
        "| grpo | 0.5 | – | 0.300 (0.300) |",
        "| mu_grpo | 0.5 | 0.600 (0.600) | – |",
    ]
    made = [{"reward": 0.25, "equal_groups": 0.5}, {"reward": 0.75, "equal_groups": 0.125}]
    known = [row("grpo", 32, 0.1) | {"seed": 3, "generations": made}, rows[0] | {"generations": made * 8}]
    known.append(rows[1] | {"generations": made[:1]})  # a single generation says nothing new
    assert list(reproduce_stages.generations([*rows, *known]))[2:] == [
        "| grpo | 0.5 | 32 | 3 | 0.250, 0.750 | 50 %, 12 % |",
    ]
    assert list(reproduce_stages.generations(rows)) == []  # files of earlier grids do not have this
    figure, axis = plt.subplots()
    legend = [line.get_label() for line in reproduce_stages.plot(axis, rows)]
    assert legend[1:] == ["µ-GRPO: relaxed clip, veto", "collapsed"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
    assert lines["narrow clip [0.8, 1.2]"] == [[4, pytest.approx(0.8)], [64, pytest.approx(0.85 / 3)]]
    hollow = [line.get_xydata()[0] for line in axis.get_lines() if line.get_markerfacecolor() == "white"]
    assert np.allclose(hollow, [[64, 0.8 / 3]])
    (start,) = (line for line in axis.get_lines() if line.get_linestyle() == ":")
    assert start.get_ydata() == pytest.approx([0.2, 0.2])
    assert [text.get_text() for text in axis.texts] == ["before training"]
    assert axis.get_title() == "µ = 64: narrow clip 0.28, µ-GRPO 0.90 (learning rate 0.5)"
    plt.close(figure)

    slower = [row("grpo", 4, 0.6, rate=0.25), row("grpo", 64, 0.7, rate=0.25)]
    slower += [row("mu_grpo", 4, 0.8, rate=0.25), row("mu_grpo", 64, 0.1, rate=0.25)]
    assert reproduce_stages.are([*rows, *slower])
    assert list(reproduce_stages.table([*rows, *slower]))[2:] == [
        "| grpo | 0.25 | 0.400 (0.400) | **0.450** (0.450) |",
        "| grpo | 0.5 | **0.800** (0.800) | 0.283 (0.300, 0.267; 1 of 2 collapsed) |",
        "| mu_grpo | 0.25 | 0.500 (0.500) | 0.150 (0.150) |",
        "| mu_grpo | 0.5 | **0.600** (0.600) | **0.900** (0.900) |",
    ]
    assert list(reproduce_stages.table([*rows, slower[1]]))[2:4] == [
        "| grpo | 0.25 | – | **0.450** (0.450) |",
        "| grpo | 0.5 | 0.800 (0.800) | 0.283 (0.300, 0.267; 1 of 2 collapsed) |",
    ]
    figure, axis = plt.subplots()
    reproduce_stages.plot(axis, [*rows, *slower])
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
    assert lines["narrow clip [0.8, 1.2]"] == [[4, pytest.approx(0.8)], [64, pytest.approx(0.45)]]
    assert axis.get_title() == "µ = 64: narrow clip 0.45, µ-GRPO 0.90 (best of 2 learning rates)"
    axis.clear()
    reproduce_stages.plot(axis, [*rows, slower[1]])  # a rate that was not run for all
    assert axis.get_title() == "µ = 64: narrow clip 0.28, µ-GRPO 0.90 (learning rate 0.5)"
    plt.close(figure)


def test_objectives_are_drawn_over_the_learning_rate_where_several_were_tried():
    def row(objective, mu, rate, accuracy, collapse=None):
        found = {"objective": objective, "mu": mu, "stage_updates": mu, "learning_rate": rate, "updates": 64}
        accuracy = {"accuracy_start": 0.2, "evaluations": {"accuracy": [accuracy] * 3}}
        return found | accuracy | {"collapse": collapse}

    fresh = [row("grpo", 4, rate, accuracy) for rate, accuracy in ((0.25, 0.95), (0.5, 0.9), (1.0, 0.5))]
    rows = [*fresh, row("mu_grpo", 4, 0.5, 0.9)]  # µ-GRPO has only one rate with µ = 4
    for rate, narrow, ours in ((0.25, 0.3, 0.6), (0.5, 0.4, 0.8), (1.0, 0.2, 0.1)):
        rows += [row("grpo", 64, rate, narrow), row("mu_grpo", 64, rate, ours, 40 if rate == 1 else None)]
    assert reproduce_stages.are(rows) and reproduce_stages.tuned(rows) == [64]
    figure, axis = plt.subplots()
    labels = [line.get_label() for line in reproduce_stages.plot_rates([axis], rows)]
    assert labels[:3] == ["narrow clip [0.8, 1.2]", "µ-GRPO: relaxed clip, veto", "GRPO, fresh data (µ = 4)"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
    ours = [[0.25, pytest.approx(0.6)], [0.5, pytest.approx(0.8)], [1.0, pytest.approx(0.1)]]
    assert lines["µ-GRPO: relaxed clip, veto"] == ours
    assert [y for _, y in lines["GRPO, fresh data (µ = 4)"]] == pytest.approx([0.95, 0.95])
    hollow = [line.get_xydata()[0] for line in axis.get_lines() if line.get_markerfacecolor() == "white"]
    assert np.allclose(hollow, [[1, 0.1]])
    assert axis.get_title() == "µ = 64: narrow clip 0.40, µ-GRPO 0.80 (best rates)"
    plt.close(figure)


def test_arms_are_drawn_over_the_learning_rate_if_three_were_tried(tmp_path, monkeypatch):
    def run(arm, rate, *accuracy, seed=0):
        points = [{"updates": 32 * i, "accuracy": value} for i, value in enumerate(accuracy)]
        return {"arm": arm, "rate": rate, "seed": seed, "evaluations": points, "bins": []}

    runs = [run("mu_grpo", 0.25, 0.4, 0.4, 0.7), run("mu_grpo", 0.25, 0.6, 0.6, 0.6, seed=1)]
    runs += [run("mu_grpo", 0.5, 0.3, 0.3, 0.3), run("m2po", 0.5, 0.1, 0.1, 0.1)]
    runs += [run("relaxed-no-veto", 0.25, 0.4, 0.4, 0.1)]
    names = ("draw_methods", "draw_scopes", "draw_ends")
    drawn = []
    for name in names:
        monkeypatch.setattr(reproduce_rates_figures, name, lambda *_, name=name: drawn.append(name))
    reproduce_rates_figures.draw(runs, tmp_path)
    assert drawn == ["draw_methods"]
    reproduce_rates_figures.draw([*runs, run("mu_grpo", 1.0, 0.1, 0.1, 0.1)], tmp_path)
    assert drawn[1:] == ["draw_methods", "draw_ends"]
    monkeypatch.undo()
    monkeypatch.setattr(plt, "close", lambda figure: None)
    reproduce_rates_figures.draw_ends(runs, tmp_path / "ends.png")
    left, right = plt.gcf().axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.get_lines()}
    # Beside each other on the logarithmic axis, in the middle the rate.
    near, side = pytest.approx, reproduce_rates_figures.SIDE**0.5
    assert lines["µ-GRPO"] == [[near(0.25 / side), near(0.55)], [near(0.5 / side), near(0.3)]]
    assert lines["M2PO"] == [[near(0.5 * side), near(0.1)]]
    hollow = [line.get_xydata()[0] for line in right.get_lines() if line.get_markerfacecolor() == "white"]
    assert np.allclose(hollow, [[0.25 / side, 0.3]])
    assert left.get_title() == "at 0.5: µ-GRPO 0.30, M2PO 0.10"  # the only rate that both have
    assert right.get_title() == "at 0.25: no veto 0.30, µ-GRPO 0.55"
    ends = {0.25: [(0.4, False), (0.5, True)], 0.5: [(0.3, False), (0.5, False)], 1.0: [(0.9, False)]}
    assert reproduce_rates_figures.best_of(ends, [0.25, 0.5]) == pytest.approx(0.45)
    assert [text.get_text() for text in left.get_legend().get_texts()][-1] == "collapsed"
    monkeypatch.undo()
    plt.close("all")


def test_titles_name_the_ends_of_the_longest_runs_of_each_arm():
    def run(arm, updates, accuracy):
        return {"arm": arm, "updates": updates, "evaluations": [{"accuracy": accuracy}] * 3}

    runs = [run("mu_grpo", 64, 0.5), run("mu_grpo", 64, 0.25), run("mu_grpo", 32, 0.9), run("m2po", 64, 0.5)]
    arms = ("mu_grpo", "m2po", "p3o")
    assert reproduce_rates_figures.ends_of(runs, arms) == "ends: M2PO 0.500, µ-GRPO 0.375"
    runs.append(run("p3o", 1024, 0.25))
    ends = "M2PO 0.500 after 64 updates, µ-GRPO 0.375 after 64 updates, P3O 0.250 after 1,024 updates"
    assert reproduce_rates_figures.ends_of(runs, arms) == f"ends: {ends}"


def test_an_arm_with_one_seed_is_dashed_where_others_have_several():
    def run(arm, seed):
        return {"arm": arm, "seed": seed, "evaluations": [{"updates": u, "accuracy": 0.1} for u in (0, 8)]}

    figure, axis = plt.subplots()
    runs = [run("mu_grpo", 0), run("mu_grpo", 1), run("grpo-stale", 0)]
    names = {"mu_grpo": "several", "grpo-stale": "one"}
    for seeds, style in ((2, "--"), (1, "-")):
        axis.clear()
        reproduce_rates_figures._draw_panels(np.array([axis]), ["held-out accuracy"], runs, names, seeds)
        styles = {line.get_label(): line.get_linestyle() for line in axis.get_lines()}
        assert (styles["several"], styles["one"]) == ("-", style)
    plt.close(figure)


def test_titles_of_figures_count_the_runs_that_collapse():
    def run(arm, *accuracy):
        return {"arm": arm, "evaluations": [{"updates": u, "accuracy": a} for u, a in enumerate(accuracy)]}

    runs = [
        run("relaxed-no-veto", 0.2, 0.3, 0.1),
        run("relaxed-no-veto", 0.2, 0.1, 0.3),
        run("grpo-stale", 0.2),
    ]
    assert reproduce_rates_figures._rescue(runs) == ""
    runs.append(run("mu_grpo", 0.2, 0.3, 0.2))
    title = "without the veto 1 of 2 runs collapse, with it 0 of 1"
    assert reproduce_rates_figures._rescue(runs) == title
