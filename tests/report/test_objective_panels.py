"""The figures of a run show the bounds, the veto and the quantities of its own objective."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synthetic import write_run

from mugrpo_jax import objectives, report
from mugrpo_jax.objectives import OBJECTIVES, ObjectiveConfig
from mugrpo_jax.report import objective_panels, panels
from mugrpo_jax.report.page import page

# Which figures an objective has: clipped tokens, the veto, and the metrics that `adapted` draws.
TABLE = {
    "mu_grpo": ("clipped", "vetoed"),
    "grpo": ("clipped",),
    "dr_grpo": ("clipped",),
    "dapo": ("clipped",),
    "gspo": ("clipped",),
    "gmpo": ("clipped",),
    "cispo": ("clipped",),
    "gppo": ("clipped",),
    "pnpo": ("clipped",),
    "ctpo": ("clipped",),
    "p3o": ("clipped", "cap/tokens"),
    "m2po": ("clipped", "clip_low_max"),
    "bapo": ("clipped", "clip_low/tokens", "clip_high/tokens"),
    "decoupled_ppo": ("clipped", "behavior_weight/tokens"),
    "dppo": ("clipped", "divergence/tokens"),
    "topr": ("response_weight/tokens",),
    "vespo": ("response_weight/tokens",),
    "minpro": ("prefix_log_ratio/tokens",),
    "sapo": (),
}
BATCH = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 3), (2, 3), (2,), (2, 3))]


def recorded(name, **knobs):
    """The names of the metrics that a run with this objective records."""
    extra = {"proximal_logp": BATCH[0]} if name == "decoupled_ppo" else {}
    objective = ObjectiveConfig(name, knobs).build()
    found = jax.eval_shape(objective, *BATCH, **extra)[1]
    return set(found) | set(jax.eval_shape(objectives.diagnostics, *BATCH))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_metrics_of_an_objective_are_those_that_its_figures_draw(name):
    shown = TABLE[name]
    adapted = [metric for metric in shown if "/" in metric or metric.endswith("_max")]
    assert list(objective_panels.ADAPTED.get(name, {}).values()) == adapted
    assert (name in objective_panels.CLIPPED) == ("clipped" in shown)
    found = recorded(name)
    assert {metric for metric in found if metric.startswith("clipped/")} == (
        {f"clipped/{sign}tokens" for sign in ("", "positive_", "negative_")} if "clipped" in shown else set()
    )
    assert ("vetoed/tokens" in found) == ("vetoed" in shown) and found >= set(adapted)
    assert "vetoed/tokens" not in recorded("mu_grpo", veto="none")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objectives")

    def make(name, *overrides):
        given = (f"objective.name={name}", *overrides)
        place = folder / "-".join(given).replace("=", "-")
        if not place.exists():
            write_run(place, mu=4, stages=1, overrides=given)
        return report.read_run(place)

    return make


def lines(panel):
    return list(dict.fromkeys((line.run, line.name) for line in panel.lines))


def test_runs_are_drawn_with_what_their_own_objective_does(run_of):
    runs = [run_of("mu_grpo"), run_of("p3o"), run_of("sapo"), run_of("mu_grpo", "objective.knobs.veto=none")]
    shares = ("all tokens", "A > 0", "A < 0")
    assert lines(panels.clipped(runs)) == [(run, name) for run in (0, 1, 3) for name in shares]
    assert lines(panels.vetoed(runs)) == [(0, "vetoed tokens"), (0, "triggered responses")]
    assert lines(panels.adapted(runs)) == [(1, "cap e")]
    assert lines(panels.abandoned(runs)) == [
        (run, name) for run in range(4) for name in ("wrong, A < 0", "right, A > 0")
    ]
    note = panels.clipped(runs).note
    assert note.startswith("mu_grpo: tokens whose ratio is outside [0, 5] on the side")
    assert "p3o: tokens whose ratio is above the cap e; they keep a gradient." in note


def test_titles_name_the_ratio_below_which_a_token_is_abandoned(run_of):
    def title(*runs):
        return panels.abandoned(runs).title

    usual, early = run_of("mu_grpo"), run_of("mu_grpo", "objective.knobs={veto_ratio: 0.01}")
    own = run_of("grpo", "report.abandoned_ratio=0.0025")
    assert title(usual, run_of("grpo")) == "Responses with a token of ρ < 1e-4"
    assert title(early) == "Responses with a token of ρ < 1e-2"  # that of its veto
    assert title(own) == "Responses with a token of ρ < 2.5e-3"
    assert title(early, usual) == "Responses with a token of ρ < 1e-4 or 1e-2"
    assert "wrong, ρ < 1e-2" in report.comparison([early, early])
    named = report.comparison([run_of("mu_grpo", "objective.knobs={veto: suffix, veto_ratio: 0.01}"), usual])
    assert " mu_grpo veto_ratio=0.01 " in named and "veto=suffix" not in named  # that is the default
    assert "fell below τ = 1e-4 or 1e-2." in panels.vetoed([early, usual]).note
    # The records say what was counted: old ones do not name it, and a resumed run may have changed it.
    old, changed = (
        dataclasses.replace(early, updates=tuple(map(change, early.updates)))
        for change in (
            lambda record: {key: value for key, value in record.items() if key != "abandoned_ratio"},
            lambda record: record | {"abandoned_ratio": 0.5 if record["updates"] > 3 else 0.01},
        )
    )
    assert title(old) == "Responses with a token of ρ < 1e-4"
    assert title(changed) == "Responses with a token of ρ < 1e-2 or 5e-1"


def test_a_page_leaves_out_figures_that_its_objectives_do_not_have(run_of):
    shown = page([run_of("grpo")])
    assert 'id="figure-clipped"' in shown and "[0.8, 1.2]" in shown
    assert 'id="figure-vetoed"' not in shown and "Vetoed" not in shown and "figure-adapted" not in shown
    assert '<label hidden><input name="vetoed"' in shown and 'class="token veto">' not in shown
    assert "vetoed" not in report.summary(run_of("grpo")) and "clipped" in report.summary(run_of("grpo"))
    assert "vetoed" in report.summary(run_of("mu_grpo"))
    assert not panels.vetoed([run_of("grpo")]).wanted and panels.clipped([run_of("sapo")]).empty


def test_clipped_shares_by_hand():
    """Ratios and advantages of six tokens; each objective clips with its own bounds."""
    ratio = jnp.array([[6.0, 1.25, 1.0], [0.7, 1.0, 2.5]])
    batch = (jnp.log(ratio), jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), jnp.ones((2, 3)))

    def shares(name, **knobs):
        metrics = ObjectiveConfig(name, knobs).build()(*batch)[1]
        return [round(float(metrics[f"clipped/{sign}tokens"]), 4) for sign in ("", "positive_", "negative_")]

    assert shares("mu_grpo") == [0.1667, 0.3333, 0.0]  # 6 > 5
    assert shares("grpo") == [0.5, 0.6667, 0.3333]  # 6 and 1.25 > 1.2; 0.7 < 0.8
    assert shares("grpo", dual_clip=2.0) == [0.6667, 0.6667, 0.6667]  # 2.5 > 2 with A < 0
    assert shares("dapo") == [0.3333, 0.3333, 0.3333]  # 6 > 1.28; 0.7 < 0.8
    assert shares("gspo") == [0.5, 1.0, 0.0]  # both geometric means are above 1.0004
    # e = (12.45)² / (6 · 46.3025) = 0.5579 is below every ratio
    assert shares("p3o") == [1.0, 1.0, 1.0]


def test_a_limit_of_staleness_is_not_read_from_tokens_that_keep_a_gradient(run_of):
    from mugrpo_jax.report import staleness_position as law

    found = []
    for name in ("grpo", "p3o"):
        run = run_of(name)
        for record in run.updates:
            record |= {"clipped/tokens": 0.9, "ess/tokens": 1.0}
        found.append(law.position(run).batch_drift)
    assert np.isfinite(found[0]) and np.isinf(found[1])
