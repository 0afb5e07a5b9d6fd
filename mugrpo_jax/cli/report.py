"""`mugrpo report`: write a page about one run, or a page that compares several runs."""

import argparse
from pathlib import Path

from mugrpo_jax.cli import arguments as shared


def add(commands: shared.Commands) -> None:
    """Add `mugrpo report` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "report",
        run,
        help="write a page about one run, or a comparison of several runs",
        more="Writes one self-contained HTML file with learning curves, metrics against staleness, times, "
        "responses token by token, and the config. While a run is going on, it keeps its own RUN/report.html "
        "up to date.",
        example="mugrpo report runs/first runs/first-grpo -o comparison.html",
    )
    parser.add_argument("runs", type=shared.path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument(
        "-o",
        "--out",
        type=shared.path,
        metavar="FILE",
        help="the HTML page; with .png, .svg or .pdf, one figure with the main curves "
        "(default: RUN/report.html, for several runs ./report.html)",
    )
    parser.add_argument(
        "--figures",
        type=shared.local_path,
        metavar="FOLDER",
        help="also write every figure there, as SVG and PNG",
    )


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo report` with the parsed arguments."""
    from mugrpo_jax import report

    runs = [report.read_run(folder) for folder in arguments.runs]
    out = arguments.out or (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    report.write(runs, out, figures=arguments.figures)
    print(report.summary(runs[0]) if len(runs) == 1 else report.comparison(runs))
    print(f"\nreport: {out}")
