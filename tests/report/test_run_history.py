"""Runs as numbers and text."""

import dataclasses
import json
import math

import numpy as np
import pytest
from synthetic import write_run

from mugrpo_jax import config as configs
from mugrpo_jax import report
from mugrpo_jax.config import ConfigError
from mugrpo_jax.objectives import WrongSide, effective_updates
from mugrpo_jax.report import run_history as history
from mugrpo_jax.report import staleness_position as law
from mugrpo_jax.report.staleness_advice import advice


def cut(folder, lines):
    """Keep the first lines of a journal, as if the run had been killed there."""
    kept = (folder / "metrics.jsonl").read_text().splitlines()[:lines]
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")


def test_a_run_in_numbers(tmp_path):
    run = report.read_run(write_run(tmp_path / "run", stages=3, mu=4))
    assert [stage.stage for stage in run.stages()] == [0, 1, 2]
    last = run.stages()[-1]
    assert (last.updates, last.reward, last.generate_seconds) == (4, pytest.approx(0.6), 12.0)
    assert last.vetoed == pytest.approx(0.02 * np.mean([0, 1 / 16, 4 / 16, 9 / 16]))
    assert last.ess == pytest.approx(math.exp(-0.75))  # at its last update
    assert last.update_seconds == pytest.approx(2.0) and last.accuracy == pytest.approx(0.8)
    text = report.summary(run)
    assert "held-out accuracy 0.200 ± 0.020 → 0.800 ± 0.020 on 50 problems" in text
    row = ["2", "4", "0.600", "0.38", "%", "0.44", "%", "0.472", "12.0", "2.0", "0.800"]
    assert text.splitlines()[-1].split() == row
    assert run.finished and run.done == 12
    long = report.read_run(write_run(tmp_path / "long", stages=1, mu=40)).stages()[0]
    assert long.ess == pytest.approx(np.mean([math.exp(-i / 40) for i in range(36, 40)]))  # its last tenth
    begun = report.read_run(write_run(tmp_path / "begun", stages=3, mu=4, done=2))
    assert "held-out accuracy 0.200 ± 0.020 on 50 problems" in report.summary(begun)  # evaluated once


def test_several_runs_are_one_table(tmp_path):
    runs = [report.read_run(write_run(tmp_path / name, stages=3, mu=4)) for name in ("first", "second")]
    cut(runs[1].folder, 1)
    header, first, second = report.comparison([runs[0], report.read_run(runs[1].folder)]).splitlines()
    assert header.split()[:4] == ["run", "objective", "updates", "accuracy"]
    share = f"{100 * np.nanmean(runs[0].values('vetoed/tokens')):.2f}"
    assert first.split()[:6] == ["first", "mu_grpo", "12", "0.200", "→", "0.800"] and share in first.split()
    assert second.split()[:3] == ["second", "mu_grpo", "0"] and second.split()[-1] == "–"


def test_a_run_under_way_has_no_accuracy_for_its_open_stage(tmp_path):
    folder = write_run(tmp_path / "run", mu=4)
    cut(folder, 6)  # two updates into stage 0
    run = report.read_run(folder)
    (stage,) = run.stages()
    assert stage.updates == 2 and math.isnan(stage.accuracy) and not run.finished
    assert "–" in report.summary(run)


def test_every_second_is_in_one_phase(tmp_path):
    run = report.read_run(write_run(tmp_path / "run", stages=2, mu=4))
    start = {"warm start": 2.0, "evaluation": 2.0, "switching": 0.5}
    stage = {"generation": 9.0, "scoring": 2.0, "update": 2.0, "evaluation": 2.0, "switching": 2.9}
    assert {k: v for k, v in run.phases[-1].items() if v} == pytest.approx(start)
    assert {k: v for k, v in run.phases[0].items() if v} == pytest.approx(stage)
    assert sum(sum(phases.values()) for phases in run.phases.values()) == pytest.approx(run.seconds)
    assert run.updates[0]["seconds"]["clock"] == pytest.approx(4.5 + 13 + 0.6)


def test_compiling_is_taken_out_of_the_phase_it_happened_in(tmp_path):
    folder = write_run(tmp_path / "run", stages=1, mu=4)
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()[:-1]]  # the last is cut short
    compiled = {"evaluation": 1.5, "stage": 3.0, "update": 0.4}
    for record in records:
        record["seconds"]["compile"] = compiled.pop(record["kind"], 0.0)  # the first of each kind
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = report.read_run(folder)
    assert not compiled and run.phases[-1]["evaluation"] == pytest.approx(0.5)
    assert run.phases[-1]["compiling"] == pytest.approx(1.5)
    found = {name: run.phases[0][name] for name in ("generation", "update", "compiling")}
    assert found == pytest.approx({"generation": 6.0, "update": 1.6, "compiling": 3.4})
    assert sum(sum(phases.values()) for phases in run.phases.values()) == pytest.approx(run.seconds)


def test_lost_and_damaged_records_are_named(tmp_path):
    folder = write_run(tmp_path / "run", stages=1, mu=4)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()[:-1]
    cursor = folder / "checkpoints" / "000004" / "cursor"
    cursor.mkdir(parents=True)
    journal = {"records": len(lines), "updates": 4, "sha256": "0", "losses": ["an older loss"]}
    (cursor / "metadata").write_text(json.dumps({"updates": 4, "journal": journal}))
    updates = [number for number, line in enumerate(lines) if '"update"' in line[:20]]
    lines[updates[1]] = lines[updates[1]].replace('"reward"', '"rewarf"')  # one flipped bit
    del lines[updates[2]]
    path.write_text("".join(f"{line}\n" for line in lines))
    run = report.read_run(folder)
    assert len(run.updates) == 2  # the damaged record is not shown
    text = f"1 of the {len(lines) + 1} records up to update 4 are missing, among them update 3"
    assert "an older loss\n" in report.summary(run) and text in report.summary(run)
    assert "lost records" in report.page.page([run])


def test_older_journals_have_a_clock_too(tmp_path):
    folder = write_run(tmp_path / "run", stages=1, mu=2)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]]
    for record in records:
        del record["seconds"]["elapsed"]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "environment.json").unlink()
    run = report.read_run(folder)
    assert run.seconds == pytest.approx(2 * 1.0 + 2 * 2.0 + 12.0 + 2 * 0.5) and run.environment == {}


def test_a_mean_over_nothing_is_no_value(tmp_path):
    folder = write_run(tmp_path / "run", stages=1, mu=2)
    run = report.read_run(folder)
    run.updates[0].update({"negative_tokens": 0.0, "ratio/negative_tokens": 0.0})
    run.updates[1].update({"negative_tokens": 5.0, "ratio/negative_tokens": 0.0})
    assert np.array_equal(run.values("ratio/negative_tokens"), [np.nan, 0.0], equal_nan=True)
    assert np.isnan(run.values("never/recorded")).all()


def test_runs_of_the_same_name_are_called_by_their_paths(tmp_path):
    runs = [report.read_run(write_run(tmp_path / name)) for name in ("a", "b", "c/a")]
    assert history.names(runs) == [str(tmp_path / "a"), "b", str(tmp_path / "c/a")]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"not the folder of a run"):
        report.read_run(tmp_path)
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"metrics.jsonl: nothing recorded yet"):
        report.read_run(folder)
    with pytest.raises(ConfigError, match=r"no rollouts yet"):
        report.describe_rollouts(folder)


def test_where_a_run_stands_on_the_law(tmp_path):
    run = report.read_run(write_run(tmp_path / "run", stages=2, mu=100, rate=1e-4))
    place = law.position(run)
    assert (place.lag, place.updates, place.update_size) == (99, 200, pytest.approx(100.0))
    # ESS = exp(-i / 100) falls below a half at i = 69.3, where the drift is 0.1 √70.3.
    assert place.batch_drift == pytest.approx(0.1 * math.sqrt(70.3), rel=1e-3)
    assert place.collapse is None
    # The drift is a random walk without momentum, slower than one with β₁ = 0.9.
    assert place.growth.signal < 0.002 and place.growth.exponent == pytest.approx(0.5)
    assert place.walk_exponent > 0.6 and place.regime == "noise"
    # From the fitted drift at update 70 to that at update 100: the rate falls a little, not to 70 %.
    assert 0.75 < place.advised.stage_limit / 1e-4 < 0.95 and place.advised.binding == "stage"
    said = " ".join(advice(run))
    assert f"grows with the exponent 0.50 (random walk: {place.walk_exponent:.2f}, straight line: 1)" in said
    assert "This is the noise regime at µ = 100" in said and "falls as 1/√µ" in said
    limit = place.advised.stage_limit
    assert f"advised learning rate for µ = 100 is at most {limit:.2g} (now 0.0001)" in said
    for record in run.updates:
        record["ess/tokens"] = 1.0
    calm = " ".join(advice(run))
    assert "there was no warning at this learning rate and µ" in calm and "at most" not in calm
    # This run is healthy, so it is not compared with constants of another method.
    assert "The paper" not in said and "1.6e-06" not in said


@pytest.mark.parametrize(
    ("cosine", "power", "words"),
    [
        (0.0, 0.5, ["This is the noise regime", "The cosine agrees", "no signal can be told from 0"]),
        (
            0.1,
            0.5,
            [
                "This is the noise regime",
                "The cosine alone would say ballistic",
                "drift of the steps decides",
            ],
        ),
        (0.5, 1.0, ["This is the ballistic regime", "as in the paper", "The cosine agrees"]),
        (
            0.1,
            None,
            ["The mean cosine of consecutive gradients is 0.1 ±", "By it the run is in the ballistic regime"],
        ),
    ],
)
def test_the_regime_is_told_by_the_drift_and_by_the_cosine(tmp_path, cosine, power, words):
    run = report.read_run(write_run(tmp_path / "run", stages=2, mu=100))
    for record in run.updates:
        record["gradient_cosine"] = cosine + 0.01 * (-1) ** record["updates"]
        record["drift"] = None if power is None else 0.01 * (record["staleness"] + 1) ** power
    said = " ".join(advice(run))
    assert all(word in said for word in words), said


def test_constants_are_fitted_to_runs_of_one_objective(tmp_path):
    runs = [
        report.read_run(write_run(tmp_path / f"r{rate}", stages=1, mu=64, rate=rate)) for rate in (1e-5, 1e-4)
    ]
    assert law.fit(runs[:1]) is None
    constants = law.fit(runs).constants
    # Nobody collapsed: the furthest that any run came, as a random walk with Adam's momentum.
    share = law.position(runs[0]).share
    assert constants.horizon == pytest.approx(1e-4 * effective_updates(64, share, 0.9, first_stage=True))
    fit = law.fit(runs)
    said = advice(runs[0], fit)
    assert "Fitted to these runs: for this run a learning rate below" in said[-1]
    wrong = advice(runs[0], fit._replace(runs_on_the_wrong_side=WrongSide(2, 1, 0, 1)))
    assert wrong[:-1] == said and wrong[-1].startswith("Runs on the wrong side of the best limit: 2 by S·η")
    assert "the age of the data may not be what limits them" in wrong[-1]
    for record in runs[1].updates[20:]:
        record["reward"] = 0.0
    assert law.position(runs[1]).collapse == pytest.approx(24, abs=3)
    # Means of 8 of 0.1 sin(i) swing by 0.1 |sin 4| / (8 sin ½).
    assert law.position(runs[1]).cosine == pytest.approx(0.01973, abs=1e-4)
    grpo = report.read_run(write_run(tmp_path / "grpo", mu=8, overrides=["objective.name=grpo"]))
    assert law.fit([*runs, grpo]) is None


def test_a_collapse_inside_a_stage_shows_in_the_held_out_accuracy(tmp_path):
    run = report.read_run(write_run(tmp_path / "run", stages=2, mu=100))
    assert math.isnan(law.position(run).critical_drift)
    for record, accuracy in zip(run.evaluations, (0.4, 0.4, 0.0)):  # after 0, 100 and 200 updates
        record["accuracy"] = accuracy
    place = law.position(run)
    assert place.collapse == 150
    # 100 updates of the first stage and 50 of the second, each 0.1 √(updates) from its beginning.
    assert place.critical_drift == pytest.approx(0.1 * (math.sqrt(100) + math.sqrt(50)))
    said = " ".join(advice(run))
    assert "held-out accuracy fell below half of its best for good at update 150" in said
    assert (
        "had then moved by 1.71. To stay below this, the learning rate for 200 updates with µ = 100" in said
    )
    limit = min(place.advised.learning_rate, 1e-4)
    assert f"must be well below {limit:.2g} (now 0.0001); try {limit / 2:.2g} first." in said
    assert "stages of" not in said
    # With a lag no drift of a batch is known; the limit follows from that of the collapse alone.
    older = dataclasses.replace(run, config=configs.changed(run.config, ["batch.lag=1"]))
    lagged = law.position(older)
    assert math.isnan(lagged.batch_drift) and lagged.critical_drift == place.critical_drift
    alone = lagged.advised
    assert f"try {min(alone.learning_rate, 1e-4) / 2:.2g} first." in " ".join(advice(older))
    assert alone.learning_rate == alone.run_limit == place.advised.run_limit < alone.stage_limit
    # A run that collapsed is compared with the constants of the paper, and told what they are worth.
    assert "S·η = 0.0099 and T·η = 0.02. The paper reports limits of 1.6e-06 and 3.2e-05" in said
    assert (
        "do not hold for other methods and models. Another model can be far beyond them and healthy" in said
    )
