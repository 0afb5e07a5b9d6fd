"""Figures for papers, and the numbers they draw."""

import dataclasses

import numpy as np
import pytest
from synthetic import write_run

from mugrpo_jax import objectives, report
from mugrpo_jax.config import ConfigError, WeightedReward
from mugrpo_jax.report import colors, figures, panels
from mugrpo_jax.report import staleness_position as law
from mugrpo_jax.report.page import page
from mugrpo_jax.report.panel_data import MOST_POINTS, MOST_STAGES, Line
from mugrpo_jax.report.step_signal_panels import signal_table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return report.read_run(write_run(tmp_path_factory.mktemp("figures") / "run", stages=3, mu=4))


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return report.read_run(write_run(tmp_path_factory.mktemp("figures") / "long", stages=20, mu=100))


def test_the_learning_curve_shows_accuracy_reward_and_stages(run):
    (axes,) = figures.learning([run]).axes
    (accuracy,) = (line for line in axes.lines if line.get_marker() == "o")
    assert list(accuracy.get_xdata()) == [0, 4, 8, 12]
    assert list(accuracy.get_ydata()) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    (reward,) = (line for line in axes.lines if line.get_linestyle() == "--")
    x, y = reward.get_data()
    assert x.tolist() == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 9, 10, 11, 12]
    assert np.flatnonzero(np.isnan(y)).tolist() == [4, 9]  # no line from one stage's rollouts to the next
    assert y[~np.isnan(y)] == pytest.approx([record["reward"] for record in run.updates])
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [5, 9]
    assert [text.get_text() for text in axes.texts] == ["stage 1", "stage 2"]
    assert axes.get_xlabel() == "updates" and axes.get_ylabel()


def test_each_of_several_rewards_has_a_line_that_breaks_between_stages(run):
    assert not panels.rewards([run]).wanted
    several = (WeightedReward("math", 1.0), WeightedReward("mine:short", -0.1))
    task = dataclasses.replace(run.config.task, reward=several)
    parts = [r | {"reward/math": 0.5, "reward/mine:short": 10.0 * r["stage"]} for r in run.generations]
    config = dataclasses.replace(run.config, task=task)
    panel = panels.rewards([dataclasses.replace(run, config=config, generations=tuple(parts))])
    right, short = panel.lines
    assert (right.name, short.name) == ("math", "mine:short") and panel.wanted
    assert np.nan_to_num(short.x, nan=-1).tolist() == [0, 4, -1, 4, 8, -1, 8, 12, -1]
    assert np.nan_to_num(short.y, nan=-1).tolist() == [0, 0, -1, 10, 10, -1, 20, 20, -1]
    assert "the sum of 1 × math, -0.1 × mine:short. The first reward says" in panel.note


def test_wall_clock_is_the_sum_of_what_the_run_took(run):
    reward, accuracy = panels.learning_by_time([run]).lines
    assert reward.x[0] == pytest.approx(4.5 + 13 + 0.6) and accuracy.x[0] == pytest.approx(4.5)
    assert accuracy.x[-1] == pytest.approx(run.seconds)


def test_against_staleness_there_is_a_line_for_each_stage(run):
    panel = panels.effective_sample_size([run])
    assert [(line.name, line.stage) for line in panel.lines] == [
        (name, stage) for name in ("tokens", "responses") for stage in range(3)
    ]
    assert panel.lines[0].x.tolist() == [0, 1, 2, 3]
    assert panel.lines[0].y == pytest.approx(np.exp(-np.arange(4) / 4))
    assert panel.styles == {"tokens": "solid", "responses": "dashed"}


def test_the_kl_from_a_reference_policy_is_drawn_only_if_it_was_recorded(run):
    (line,) = panels.kl([run]).lines
    assert line.name == "from the policy that sampled"
    assert line.y[:5] == pytest.approx([0, 0.05 / 16, 0.05 / 4, 0.05 * 9 / 16, np.nan], nan_ok=True)
    updates = tuple(record | {"reference_kl/tokens": 0.1} for record in run.updates)
    lines = panels.kl([dataclasses.replace(run, updates=updates)]).lines
    assert [line.name for line in lines] == ["from the policy that sampled", "from the reference"]


def test_loss_entropy_and_equal_groups_are_drawn_over_updates(run):
    (loss,), (entropy,), (equal,) = (
        maker([run]).lines for maker in (panels.loss, panels.entropy, panels.equal_groups)
    )
    assert loss.y[:4] == pytest.approx([record["loss"] for record in run.updates[:4]])
    assert entropy.y[:2] == pytest.approx([0.5, 0.475])
    assert equal.y[[0, 5, 10]] == pytest.approx([0.3, 0.4, 0.5]) and equal.x[[0, 5, 10]].tolist() == [1, 5, 9]


def test_the_sampler_trainer_gap_is_shown_only_where_the_weights_are_equal(run):
    mean, largest = panels.gap([run]).lines
    assert mean.x.tolist() == largest.x.tolist() == [0, 1, 2]  # one point per stage, before its first update
    assert mean.y == pytest.approx([1e-6] * 3) and largest.y == pytest.approx([1e-5] * 3)
    distance = panels.log_ratio([run])
    assert "gap" not in f"{distance.title} {distance.note}" and distance.lines[0].y[-1] > 0.1


def test_reduction_keeps_means_and_extremes_and_says_so(long):
    reward = panels.learning([long]).lines[0]
    values = long.values("reward")
    assert (
        np.count_nonzero(~np.isnan(reward.y)) <= MOST_POINTS
        and "mean of 4 updates" in panels.learning([long]).note
    )
    assert reward.y[:2] == pytest.approx([values[:4].mean(), values[4:8].mean()])
    assert np.nanmin(reward.low) == values.min() and np.nanmax(reward.high) == values.max()
    panel = panels.vetoed([long])
    assert len({line.stage for line in panel.lines}) == MOST_STAGES
    assert {0, 19} <= {line.stage for line in panel.lines} and "12 of 20 stages" in panel.note


def test_points_do_not_mix_stages(long):
    line = panels.learning([long]).lines[0]
    x = line.x[~np.isnan(line.y)]
    edges = np.flatnonzero(np.diff((x - 1) // 100))  # the last point of each stage
    assert len(edges) == 19 and np.allclose(x[edges], 100 * np.arange(1, 20) - 1.5)


def test_every_figure_is_a_function_and_a_file(run, long, tmp_path):
    report.write_figures([run, long], tmp_path)
    expected = [maker.__name__ for makers in panels.SECTIONS.values() for maker in makers]
    expected.remove("adapted")  # µ-GRPO adapts nothing
    expected.remove("rewards")  # the runs have a single reward
    expected = [name for name in expected if not name.startswith("behavior_")]  # and a single behavior
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == sorted(expected)
    assert all(path.stat().st_size > 5_000 for path in tmp_path.glob("*.png"))


def test_several_runs_share_a_figure_in_different_colors(run, long, tmp_path):
    figure = figures.overview([run, long])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["run", "long"]
    assert {line.get_color() for line in figure.axes[0].lines} == set(colors.COLORS[:2])
    report.write([run, long], tmp_path / "new" / "overview.png")
    assert (tmp_path / "new" / "overview.png").stat().st_size > 10_000


def test_bars_add_up(run):
    bars = panels.time_spent([run])
    assert [label for _, label in bars.groups] == ["start", "0", "1", "2"] and bars.y == "seconds"
    assert sum(bars.parts.values()) == pytest.approx([sum(p.values()) for p in run.phases.values()])
    shares = panels.finish_reasons([run])
    assert shares.parts["cut at the limit"] == pytest.approx([0.1] * 3) and "not scored" not in shares.parts
    assert shares.parts["ended without an answer"] == pytest.approx([0.0, 0.05, 0.1])
    assert shares.parts["ended with an answer"] == pytest.approx([0.9, 0.85, 0.8])


def test_triggers_are_drawn_by_sign_and_ratios_before_and_behind_them(run):
    names = {line.name: line.y.tolist() for line in panels.abandoned([run]).lines if line.stage == 2}
    assert names["wrong, A < 0"] == pytest.approx([0, 0.025, 0.05, 0.075])
    assert names["right, A > 0"] == pytest.approx([0, 0.0025, 0.005, 0.0075])
    pull = panels.pull_behind_trigger([run]).lines[0]
    assert pull.y == pytest.approx([0, 0.0125, 0.025, 0.0375])
    lines = [line for line in panels.mean_ratio_negative([run]).lines if line.stage == 0]
    assert [line.name for line in lines] == ["all", "before a trigger", "behind it"]
    assert np.isnan(lines[1].y[0]) and lines[1].y[1:] == pytest.approx([0.875, 0.75, 0.625])  # no trigger yet


def test_broken_responses_of_held_out_problems_are_drawn(run):
    malformed, unfinished = panels.broken_responses([run]).lines
    assert (malformed.name, unfinished.name) == ("malformed", "unfinished")
    assert malformed.x.tolist() == [0, 4, 8, 12] and malformed.y == pytest.approx([0, 0.1 / 3, 0.2 / 3, 0.1])
    assert unfinished.y == pytest.approx([0.05] * 4)


def test_signal_drift_and_parity_of_each_stage(run):
    cosine = 0.1 * np.sin(np.arange(1, 5))
    smooth = panels.gradient_cosine([run])
    assert smooth.lines[1].y == pytest.approx([cosine[: i + 1].mean() for i in range(4)])
    header, first, *more = signal_table([run], ["run"])
    assert len(more) == 2 and header[6:] == ["ρ = 1 ± 0.1 %", "ρ = 1 ± 1 %", "ρ = 1 ± 5 %"]
    share, error = objectives.signal_share(cosine.tolist())
    least = 1 / (share + 2 * error) - 1  # no signal could be measured
    assert first[:4] == ["run", "0", f"{share:.3f} ± {error:.3f}", f"more than {least:.0f}"]
    walk = objectives.effective_updates(range(1, 5), 0.0, 0.9, first_stage=True)
    assert first[4:6] == ["0.50", f"{objectives.drift_exponent(walk):.2f}"]
    assert first[6:] == ["99.90%"] * 3
    assert "signal outweighs noise after" in smooth.note and "0.50 in the stages" in panels.drift([run]).note
    assert "Signal, drift and parity of each stage" in page([run])


def test_the_cosine_of_an_update_without_a_gradient_before_it_is_no_measurement(run):
    updates = tuple(record | {"gradient_cosine": 0.0} for record in run.updates[:1]) + run.updates[1:]
    found = dataclasses.replace(run, updates=updates)
    assert np.isnan(panels.gradient_cosine([found]).lines[0].y[0])
    assert panels.gradient_cosine([found]).lines[0].y[1] == pytest.approx(run.values("gradient_cosine")[1])


def test_a_run_without_evaluation_or_some_metrics_is_drawn(tmp_path):
    folder = write_run(tmp_path / "run", mu=4)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if '"evaluation"' not in line))
    run = report.read_run(folder)
    for record in run.updates:
        for name in ("clipped/tokens", "clipped/positive_tokens", "clipped/negative_tokens", "drift"):
            del record[name]
        for name in [name for name in record if "_abandoned" in name or name.startswith("within")]:
            del record[name]
        del record["gradient_cosine"], record["abandoned/positive_responses"]
    for record in run.generations:
        del record["malformed"]
    for old in (panels.pull_behind_trigger, panels.gradient_cosine, panels.drift, panels.broken_responses):
        assert old([run]).empty
    assert {line.name for line in panels.mean_ratio_negative([run]).lines} == {"all"}
    assert {line.name for line in panels.abandoned([run]).lines} == {"wrong, A < 0"}
    assert "ended by itself" in panels.finish_reasons([run]).parts
    assert {cell for row in signal_table([run], ["old"])[1:] for cell in row[2:]} == {"–"}
    assert "Nothing recorded" in page([run])
    assert "held-out" not in report.summary(run) and panels.clipped([run]).empty
    assert len(figures.overview([run]).axes) == 3


def test_colors_can_be_told_from_both_backgrounds():
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    def contrast(a, b):
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    stages = [colors.ramp(i / 11) for i in range(12)]
    for color in (*colors.COLORS, *stages):
        assert contrast(color, "#f6f7f9") >= 3 and contrast(color, "#1d2027") >= 3, color
    assert len(set(stages)) == 12


def test_colors_name_the_run_or_the_stage():
    line = Line(1, "x", np.zeros(1), np.zeros(1), stage=3, age=0.0)
    assert colors.line_color(line, runs=1) == colors.ramp(0.0)
    assert colors.line_color(line, runs=2) == colors.COLORS[1] and colors.line_strength(line, runs=2) < 0.5


def test_an_unknown_kind_of_file_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"report.txt: .txt; possible: .html, .png, .svg, .pdf"):
        report.write([run], tmp_path / "report.txt")


def test_the_law_is_drawn_with_the_limits_that_are_known(run, tmp_path):
    (panel,) = [panels.staleness_law([run])]
    assert [label for label, *_ in panel.marks] == ["measured"] and not panel.levels  # nothing of the paper
    place = law.position(run)
    in_stage = place.effective(place.lag, first_stage=False)
    in_run = place.effective(place.updates, first_stage=True)
    assert (panel.lines[0].x[0], panel.lines[0].y[0]) == (in_stage, in_run)
    # 12 updates, from the first of the run, where Adam's steps are longer than later.
    moved = objectives.effective_updates(12, place.share, 0.9, first_stage=True)
    assert in_run == pytest.approx(1e-4 * moved)
    lost = report.read_run(write_run(tmp_path / "lost", stages=1, mu=64))
    for record, accuracy in zip(lost.evaluations, (0.4, 0.0)):
        record["accuracy"] = accuracy
    ((_, _), (label, level)) = panels.staleness_law([lost]).levels
    advised = law.position(lost).advised
    moved = law.position(lost).effective(64, first_stage=True) / 1e-4
    assert label == "measured" and level == pytest.approx(moved * advised.run_limit)
    other = report.read_run(write_run(tmp_path / "other", stages=3, mu=4, rate=1e-6))
    panel = panels.staleness_law([run, other])
    assert [label for label, *_ in panel.marks] == [label for label, _ in panel.levels] == ["fitted"]
    assert "the paper" not in page([run, other]) and "the paper" not in panel.note
    for record in other.evaluations[2:]:
        record["accuracy"] = 0.0
    panel = panels.staleness_law([run, other])
    assert [label for label, *_ in panel.marks] == [label for label, _ in panel.levels] == ["paper", "fitted"]
    assert "the paper, GRPO without protection" in page([run, other])


def test_a_run_given_twice_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"run: given 2 times; name each run once"):
        report.write([run, run], tmp_path / "report.html")
