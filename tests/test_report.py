"""Summaries and figures of runs whose journals are written by hand."""

import json
import math

import pytest
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax import report
from mugrpo_jax.config import ConfigError
from mugrpo_jax.report import figures


@pytest.fixture
def write(tmp_path):
    """Writes a run of `done` of its 3 stages of 4 updates; every number follows from its place."""

    def run(name="run", *, done=3, evaluated=True, start=0.2):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = configs.load(None, ["batch.stages=3", "batch.updates_per_stage=4"])
        (folder / "config.yaml").write_text(yaml.safe_dump(configs.to_dict(config)))
        records = [{"kind": "warm_start", "updates": -1, "loss": 1.0, "seconds": {"update": 1.0}}]
        for stage in range(done):
            first = 4 * stage
            records.append(_evaluation(first, start + 0.1 * stage))
            records.append(_stage(stage, first, start + 0.1 * stage))
            records += [_update(stage, i, start + 0.1 * stage) for i in range(4)]
        records.append(_evaluation(4 * done, start + 0.1 * done))
        kept = [record for record in records if evaluated or record["kind"] != "evaluation"]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept) + '{"kin')
        return folder

    return run


def _evaluation(updates, accuracy):
    return {
        "kind": "evaluation",
        "updates": updates,
        "accuracy": accuracy,
        "standard_error": 0.02,
        "problems": 50,
        "seconds": {"evaluate": 1.0},
    }


def _stage(stage, updates, reward):
    return {
        "kind": "stage",
        "stage": stage,
        "updates": updates,
        "reward": reward,
        "seconds": {"generate": 7.5},
    }


def _update(stage, i, reward):
    return {
        "kind": "update",
        "stage": stage,
        "updates": 4 * stage + i + 1,
        "staleness": i,
        "reward": reward + 0.01 * i,
        "vetoed/tokens": 0.01 * i,
        "clipped/tokens": 0.02 * i,
        "ess/tokens": 1 - 0.1 * i,
        "seconds": {"update": 0.5},
    }


def test_a_run_in_numbers(write):
    run = report.read_run(write())
    assert [stage.stage for stage in run.stages()] == [0, 1, 2] and run.boundaries == [4, 8]
    last = run.stages()[-1]
    assert (last.updates, last.reward, last.generate_seconds) == (4, pytest.approx(0.4), 7.5)
    assert last.vetoed == pytest.approx(0.015)  # mean of 0, 1, 2, 3 hundredths
    assert last.ess == pytest.approx(0.7)  # at its last update
    assert last.update_seconds == pytest.approx(2.0)
    assert last.accuracy == pytest.approx(0.5)
    text = report.summary(run)
    assert "held-out accuracy 0.200 ± 0.020 → 0.500 ± 0.020 on 50 problems" in text
    assert text.splitlines()[-1].split() == ["2", "4", "0.400", "1.50", "%", "0.700", "7.5", "2.0", "0.500"]


def test_a_run_under_way_has_no_accuracy_for_its_open_stage(write):
    folder = write(done=1)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n")  # two updates into stage 0
    (stage,) = report.read_run(folder).stages()
    assert stage.updates == 2 and math.isnan(stage.accuracy)
    assert "–" in report.summary(report.read_run(folder))
    assert len(report.overview([report.read_run(folder)]).axes) == 3


def test_the_learning_curve_shows_accuracy_reward_and_stages(write):
    run = report.read_run(write())
    (axes,) = report.learning_curve([run]).axes
    (accuracy,) = (line for line in axes.lines if line.get_marker() == "o")
    assert list(accuracy.get_xdata()) == [0, 4, 8, 12]
    assert list(accuracy.get_ydata()) == pytest.approx([0.2, 0.3, 0.4, 0.5])
    rewards = [line for line in axes.lines if list(line.get_xdata()) == [1, 2, 3, 4]]
    raw, smooth = (list(line.get_ydata()) for line in rewards)
    assert raw == pytest.approx([0.2, 0.21, 0.22, 0.23])
    assert smooth == pytest.approx([0.205, 0.21, 0.22, 0.225])
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [4, 8]
    assert [text.get_text() for text in axes.texts] == ["stage 0", "stage 1", "stage 2"]
    assert axes.get_xlabel() == "updates" and axes.get_ylabel()


def test_staleness_is_averaged_over_stages(write):
    left, right = report.staleness([report.read_run(write())]).axes
    means = [line for line in (*left.lines, *right.lines) if line.get_linewidth() > 1.5]
    assert [list(line.get_xdata()) for line in means] == [[0, 1, 2, 3]] * 3
    vetoed, clipped, ess = (list(line.get_ydata()) for line in means)
    assert vetoed == pytest.approx([0, 0.01, 0.02, 0.03])
    assert clipped == pytest.approx([0, 0.02, 0.04, 0.06])
    assert ess == pytest.approx([1, 0.9, 0.8, 0.7])


def test_several_runs_share_a_figure_in_different_colors(write, tmp_path):
    runs = [report.read_run(write(name, start=0.1 * i)) for i, name in enumerate(("a", "b", "c/a"))]
    figure = report.overview(runs)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [str(run.folder) for run in runs]  # two are called `a`, so whole paths
    assert report.overview(runs[:2]).legends[0].get_texts()[1].get_text() == "b"
    colors = {line.get_color() for line in figure.axes[0].lines} - {"0.6"}
    assert colors == set(figures.COLORS[:3])
    figure.savefig(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_a_run_without_evaluation_or_some_metrics_is_drawn(write):
    run = report.read_run(write(evaluated=False))
    for record in run.updates:
        del record["clipped/tokens"]
    assert "held-out" not in report.summary(run)
    assert len(report.overview([run]).axes) == 3


def test_what_is_no_run_is_named(write, tmp_path):
    with pytest.raises(ConfigError, match=r"not the folder of a run"):
        report.read_run(tmp_path)
    folder = write()
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"metrics.jsonl: nothing recorded yet"):
        report.read_run(folder)
    with pytest.raises(ConfigError, match=r"no rollouts yet"):
        report.describe_rollouts(folder)
