"""A report as files: the page, one figure of the essentials, or every figure by itself."""

from collections.abc import Sequence
from pathlib import Path

from mugrpo_jax.config import ConfigError
from mugrpo_jax.report import panels
from mugrpo_jax.report.page import write_page
from mugrpo_jax.report.run_history import History

_PICTURES = (".png", ".svg", ".pdf")


def write(runs: Sequence[History], out: Path, *, figures: Path | None = None) -> None:
    """Write the report of these runs; the ending of `out` says what it is, `figures` is a folder for all."""
    if out.suffix not in (".html", *_PICTURES):
        raise ConfigError(f"{out}: {out.suffix or 'no ending'}; possible: .html, {', '.join(_PICTURES)}")
    folders = [run.folder.resolve() for run in runs]
    for run, folder in zip(runs, folders):
        if folders.count(folder) > 1:
            raise ConfigError(f"{run.folder}: given {folders.count(folder)} times; name each run once")
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        write_page(runs, out)
    else:
        from mugrpo_jax.report.figures import overview

        overview(runs).savefig(out)
    if figures is not None:
        write_figures(runs, figures)


def write_figures(runs: Sequence[History], folder: Path) -> None:
    """Every figure that has something to show, as SVG and PNG, named after its function in `figures`."""
    from mugrpo_jax.report import figures

    folder.mkdir(parents=True, exist_ok=True)
    for maker in (maker for makers in panels.SECTIONS.values() for maker in makers):
        if not maker(runs).empty:
            figure = getattr(figures, maker.__name__)(runs)
            for ending in (".svg", ".png"):
                figure.savefig(folder / f"{maker.__name__}{ending}")
