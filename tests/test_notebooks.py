"""Every notebook runs from top to bottom in a clean kernel; what it claims, its cells assert."""

import importlib
import os
import sys
from pathlib import Path

import nbformat
import pytest
import quick_programs
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
sys.path.insert(0, str(FOLDER.parent / "docs" / "generate"))
pages = importlib.import_module("pages")
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 300_000


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["1_method", "2_losses", "3_run", "4_staleness"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_small_complete_and_clean(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert path.stat().st_size < LARGEST
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
    assert any("assert " in cell.source for cell in cells)
    assert os.fspath(FOLDER.parent) not in path.read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_checks_are_in_cells_that_readers_do_not_see(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    hidden = [cell for cell in cells if "remove-cell" in cell.metadata.get("tags", [])]
    assert hidden and all(cell.metadata["jupyter"]["source_hidden"] for cell in hidden)
    assert not [cell.source for cell in cells if "assert" in cell.source and cell not in hidden]
    (page,) = (text for name, text in pages.notebook_page(path).items() if name.endswith(".md"))
    assert "assert" not in page and hidden[0].source not in page and cells[0].source in page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_needs_no_file_beside_it(path):
    """Colab has the notebook alone; its first cell installs the package."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert 'find_spec("mugrpo_jax") is None' in cells[0].source
    assert "%pip install -q mugrpo-jax" in cells[0].source
    assert not [cell.source for cell in cells if "../" in cell.source] and not list(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, monkeypatch):
    # One device; other tests have eight. The run trains so long that optimised programs save time.
    monkeypatch.setenv("XLA_FLAGS", "" if path.stem == "3_run" else quick_programs.flags())
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert last.execution_count is not None
