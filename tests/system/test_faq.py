"""The lines that the FAQ quotes are those of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = re.findall(r"^\*\*`(.*?)`\*\*", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)


@cache
def texts() -> str:
    """All strings of the code, one a line; an f-string is several, divided at its values."""
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "platform" / "concord").rglob("*.py")]
    nodes = (node for module in modules for node in ast.walk(module))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_the_faq_quotes_lines() -> None:
    assert len(LINES) > 20


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_faq_is_one_of_the_code(line: str) -> None:
    parts = [part for part in re.split("…", line) if len(part.strip()) > 3]
    assert parts
    assert [part for part in parts if part not in texts()] == []
