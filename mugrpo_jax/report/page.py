"""Write the report of one or several runs as one HTML file that loads no other files."""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from mugrpo_jax import config as configs
from mugrpo_jax.files import to_path, write_atomically
from mugrpo_jax.report import panels
from mugrpo_jax.report import staleness_position as law
from mugrpo_jax.report.behavior_panels import behavior_table
from mugrpo_jax.report.bokeh_charts import chart
from mugrpo_jax.report.colors import nth_color, ramp
from mugrpo_jax.report.panel_data import MOST_STAGES, Bars, Panel, drawn_stages, spread, time_unit
from mugrpo_jax.report.run_history import History, names
from mugrpo_jax.report.run_summary import stage_table
from mugrpo_jax.report.sampler_log import sampler_facts
from mugrpo_jax.report.samples import page_samples
from mugrpo_jax.report.staleness_advice import advice
from mugrpo_jax.report.step_signal_panels import signal_table


def write_page(runs: Sequence[History], path: str | Path) -> Path:
    """Write the report of these runs atomically, so that readers never see half a page. Return the path."""
    write_atomically(to_path(path), page(runs))
    return to_path(path)


def page(runs: Sequence[History]) -> str:
    """Return the report of these runs as HTML."""
    called = names(runs)
    sections, charts = _figures(runs, called)
    samples, left_out = page_samples(runs)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_asset("page.html.j2"))
    fitted = law.fit(runs)
    return template.render(
        title=", ".join(called),
        runs=[_run(run, name, nth_color(i)) for i, (run, name) in enumerate(zip(runs, called))],
        sections=sections,
        stages=_stage_colors(runs),
        signal_table=signal_table(runs, called),
        behavior_table=behavior_table(runs, called),
        law=[(name, advice(run, fitted)) for name, run in zip(called, runs)],
        law_table=_law_table(runs, called),
        configs=_table([_flat(configs.to_dict(run.config)) for run in runs]),
        environments=_table([run.environment | {"fingerprint": run.config.fingerprint()} for run in runs]),
        samples=samples,
        veto=any(run.has_veto for run in runs),
        samples_left_out=left_out,
        written=time.strftime("%Y-%m-%d %H:%M"),
        css=_asset("page.css"),
        javascript=_asset("page.js"),
        charts=_asset("charts.js"),
        bokeh=_bokeh("bokeh.min.js") + _bokeh("bokeh-api.min.js"),
        data=_json({"charts": charts, "samples": samples, "runs": called}),
    )


def _asset(name: str) -> str:
    return resources.files("mugrpo_jax.report").joinpath("assets", name).read_text(encoding="utf-8")


def _bokeh(name: str) -> str:
    """Read the JavaScript file `name` of BokehJS from the installed Python package."""
    static = resources.files("bokeh").joinpath("server", "static", "js", name)
    return static.read_text(encoding="utf-8") + "\n"


def _json(value: Any) -> str:
    """Convert a value to JSON that is safe inside an HTML script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@dataclasses.dataclass(frozen=True)
class _Shown:
    """What the template needs to show a figure: element id, texts, legend, and a table of the numbers."""

    id: str
    title: str
    note: str
    empty: bool
    wide: bool
    styles: Mapping[str, str]
    parts: Mapping[str, str]
    rows: Sequence[Sequence[str]]


def _figures(runs: Sequence[History], called: list[str]) -> tuple[dict[str, list[_Shown]], list[Any]]:
    sections: dict[str, list[_Shown]] = {}
    charts = []
    for section, makers in panels.SECTIONS.items():
        for maker in makers:
            panel = maker(runs)
            if isinstance(panel, Panel) and not panel.wanted:
                continue
            shown = _shown(maker.__name__.replace("_", "-"), panel, called, wide=section == "Learning")
            sections.setdefault(section, []).append(shown)
            if not panel.empty:
                charts.append(chart(panel, shown.id, called))
    return sections, charts


def _shown(name: str, panel: Panel | Bars, called: list[str], *, wide: bool) -> _Shown:
    if isinstance(panel, Panel):
        styles = panel.styles if len(panel.styles) > 1 else {}
        parts, rows = {}, _line_rows(panel, called)
    else:
        styles = {}
        parts = {part: nth_color(i) for i, part in enumerate(panel.parts)}
        rows = _bar_rows(panel, called)
    return _Shown(f"figure-{name}", panel.title, panel.note, panel.empty, wide, styles, parts, rows)


def _line_rows(panel: Panel, called: list[str]) -> list[list[str]]:
    rows = [["run", "stage", "line", "first", "last", "least", "largest"]]
    for line in panel.lines:
        values = line.y[~np.isnan(line.y)]
        if len(values):
            stage = "all" if line.stage is None else str(line.stage)
            figures = [values[0], values[-1], values.min(), values.max()]
            rows.append([called[line.run], stage, line.name, *map(number, figures)])
    return rows


def _bar_rows(bars: Bars, called: list[str]) -> list[list[str]]:
    rows = [["run", "stage", *bars.parts]]
    for i, (run, label) in enumerate(bars.groups):
        rows.append([called[run], label, *(number(values[i]) for values in bars.parts.values())])
    return rows


def _run(run: History, name: str, color: str) -> dict[str, Any]:
    first, last = (run.evaluations[0], run.evaluations[-1]) if run.evaluations else (None, None)
    total = len(run.config.stages) * run.config.batch.updates_per_stage
    state = "finished" if run.finished else "not finished: still going on, stopped or crashed"
    unit, factor = time_unit(run.seconds)
    facts = {
        "objective": run.config.objective.name,
        "updates": f"{len(run.updates):,} of {total:,}",
        "state": state,
        "time": f"{run.seconds / factor:.1f} {unit}",
        **({"start": run.start} if run.start else {}),
        "held-out accuracy": "not evaluated"
        if first is None or last is None
        else f"{first['accuracy']:.3f} → {last['accuracy']:.3f} ± {last['standard_error']:.3f}"
        if first is not last
        else f"{last['accuracy']:.3f} ± {last['standard_error']:.3f}",
        "µ × stages": f"{run.config.batch.updates_per_stage} × {run.config.batch.stages}",
        "learning rate": f"{run.config.optimizer.learning_rate:g}",
    }
    waited = sum(phases.get("waiting", 0.0) for phases in run.phases.values())
    shards = run.config.shards_per_stage
    if samplers := sampler_facts(run.folder, run.seconds, waited, run.generations, shards):
        facts["samplers"] = samplers
    if run.losses:
        facts["lost records"] = "; ".join(run.losses)
    return {"name": name, "color": color, "facts": facts, "stages": _stage_rows(run)}


def _stage_rows(run: History) -> list[list[str]]:
    header, *rows = stage_table(run)
    return [header, *spread(rows, 2 * MOST_STAGES)]


def _stage_colors(runs: Sequence[History]) -> list[tuple[int, str]]:
    """Return (stage, colour) for each drawn stage; empty for several runs, where colours mean runs."""
    return [] if len(runs) > 1 else [(stage, ramp(age)) for stage, age in drawn_stages(runs[0]).items()]


def _law_table(runs: Sequence[History], called: list[str]) -> list[list[str]]:
    """Return the measured quantities of the law and, if a run collapsed, the limits of the paper."""
    measured = ["G = ‖Δθ‖ / η", "cosine", "drift exponent", "signal by drift", "regime", "R_batch"]
    rows = [["run", "µ", "S", "T", "η", "S·η", "T·η", *measured, "η at most"]]
    positions = [law.position(run) for run in runs]
    for name, p in zip(called, positions):
        growth = (math.nan, math.nan) if p.growth is None else (p.growth.exponent, p.growth.signal)
        cells = [p.update_size, p.signal, *growth]
        rates = [p.learning_rate, p.lag_times_rate, p.updates_times_rate]
        limit = math.nan if p.advised is None else p.advised.learning_rate
        settings = [name, str(p.per_stage), str(p.lag), str(p.updates), *(f"{v:.2g}" for v in rates)]
        limits = [p.regime or "–", number(p.batch_drift), number(limit)]
        rows.append([*settings, *map(number, cells), *limits])
    if not law.shows_reported(positions):
        return rows
    reported = [f"{law.REPORTED.stale:.2g}", f"{law.REPORTED.horizon:.2g}"]
    rows.append(["the paper, GRPO without protection", "", "", "", "", *reported, *[""] * 7])
    return rows


def number(value: float) -> str:
    """Convert a number to text for a table.

    >>> number(0.1234567), number(1234567.0), number(2e-7), number(float("nan")), number(float("inf"))
    ('0.1235', '1,234,567', '2.00e-07', '–', 'not reached')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "not reached"
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _table(columns: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str], bool]]:
    """Return a row for each key: the key, its value in each run, and True if the values differ."""
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [
        (key, ["–" if column.get(key) is None else str(column[key]) for column in columns]) for key in keys
    ]
    return [(key, values, len(set(values)) > 1) for key, values in rows]
