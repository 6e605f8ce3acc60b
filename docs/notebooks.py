"""Writes the notebooks of the pages in docs/start: the Python blocks become cells, and what is between them text.

``make notebooks`` writes them beside their pages, without outputs.
"""

import re
from pathlib import Path
from typing import Any

import nbformat

START = Path(__file__).parent / "start"


def notebook_of(page: Path) -> Any:
    """The notebook of a page."""
    text = page.read_text(encoding="utf-8")
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    parts = re.split(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    for number, part in enumerate(parts):
        make = nbformat.v4.new_code_cell if number % 2 else nbformat.v4.new_markdown_cell
        if part.strip():
            notebook.cells.append(make(part.strip(), id=f"part-{number}"))
    return notebook


def as_text(page: Path) -> str:
    """The notebook of a page as its file holds it."""
    return str(nbformat.writes(notebook_of(page))) + "\n"


def write() -> None:
    """Write the notebooks of all pages."""
    for page in sorted(START.glob("*.md")):
        page.with_suffix(".ipynb").write_text(as_text(page), encoding="utf-8")


if __name__ == "__main__":
    write()
