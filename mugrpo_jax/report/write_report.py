"""Write a report to files: the page, the overview figure, or every figure in a file of its own."""

import io
from collections.abc import Sequence
from pathlib import Path

from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import absolute, make_folder, write_atomically
from mugrpo_jax.report import panels
from mugrpo_jax.report.page import write_page
from mugrpo_jax.report.run_history import History

_PICTURES = (".png", ".svg", ".pdf")


def write(runs: Sequence[History], out: Path, *, figures: Path | None = None) -> None:
    """Write the page (.html) or the overview figure to `out`, and all figures into the folder `figures`."""
    if out.suffix not in (".html", *_PICTURES):
        raise ConfigError(f"{out}: {out.suffix or 'no ending'}; possible: .html, {', '.join(_PICTURES)}")
    folders = [absolute(run.folder) for run in runs]
    for run, folder in zip(runs, folders):
        if folders.count(folder) > 1:
            raise ConfigError(f"{run.folder}: given {folders.count(folder)} times; name each run once")
    make_folder(out.parent)
    if out.suffix == ".html":
        write_page(runs, out)
    else:
        from mugrpo_jax.report.figures import overview  # here, because matplotlib loads slowly

        file = io.BytesIO()
        overview(runs).savefig(file, format=out.suffix[1:])
        write_atomically(out, file.getvalue())
    if figures is not None:
        write_figures(runs, figures)


def write_figures(runs: Sequence[History], folder: Path) -> None:
    """Write every figure that has data, as SVG and PNG, named after its function in `figures`."""
    from mugrpo_jax.report import figures

    folder.mkdir(parents=True, exist_ok=True)
    for maker in (maker for makers in panels.SECTIONS.values() for maker in makers):
        if not maker(runs).empty:
            figure = getattr(figures, maker.__name__)(runs)
            for ending in (".svg", ".png"):
                figure.savefig(folder / f"{maker.__name__}{ending}")
