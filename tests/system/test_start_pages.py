"""The tutorials, run as the notebooks that they also are."""

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from notebooks import START, as_text, notebook_of

PAGES = sorted(START.glob("*.md"))
# As in this process, see torchvision_operators.py; and few epochs, folds and trials.
FIRST = f"import sys; sys.path += {sys.path!r}; import torchvision_operators"
QUICK = {'"epochs": 40': '"epochs": 2', "epochs=40": "epochs=2", "trials=8": "trials=2"}
QUICK |= {"folds=20": "folds=2", "folds=4": "folds=2"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_notebook_beside_a_page_is_the_page(page: Path) -> None:
    assert page.with_suffix(".ipynb").read_text(encoding="utf-8") == as_text(page), "make notebooks writes it"


@pytest.mark.slow  # kernels start PyTorch, and one of them Ray
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_cells_of_a_tutorial_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    notebook: Any = notebook_of(page)
    for cell in notebook.cells:
        for usual, quick in QUICK.items():
            cell.source = cell.source.replace(usual, quick)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(FIRST))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
