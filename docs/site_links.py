"""Pages of the site from files outside ``docs/``, and links that hold both in the repository and on the site.

A hook of MkDocs. A link to a file that is not on the site, such as a module, becomes its text.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages by their file in the repository.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "cluster/README.md": "cluster-launchers.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>")  # of Sphinx, in docstrings
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """The page with its links as the site needs them."""
    source = {name: path for path, name in OUTSIDE.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    shown = {f"docs/{file.src_uri}": file.src_uri for file in files if file.inclusion.is_included()} | OUTSIDE

    def linked(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups(default="")
        path = normpath(join(dirname(source), target)) if target and ":" not in target else ""
        if path in shown:
            return f"{image}[{text}]({relpath(shown[path], dirname(page.file.src_uri) or '.')}{anchor})"
        return text if path and (ROOT / path).exists() else found[0]  # MkDocs reports a link to nothing

    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(linked, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """The names that docstrings refer to, as code."""
    return _ROLE.sub(r"<code>\1</code>", html)
