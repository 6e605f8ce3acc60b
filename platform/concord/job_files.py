"""Reads the built-in jobs' descriptions from their source text: to import a job takes seconds (PyTorch)."""

import ast
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class JobText:
    """A job's description, read from its file without running it."""

    name: str
    source: str

    @cached_property
    def _module(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def title(self) -> str:
        """The first line of the file's docstring."""
        return (ast.get_docstring(self._module) or "").split("\n")[0]

    @cached_property
    def parts(self) -> dict[str, ast.expr]:
        """The argument expressions of ``job = Job(…)``, by name."""
        for line in self._module.body:
            if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call) and _is_job(line):
                return {part.arg: part.value for part in line.value.keywords if part.arg is not None}
        return {}

    @property
    def reproduces(self) -> str:
        """The papers' results that the job is for, a literal; empty without any."""
        value = self.parts.get("reproduces")
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _is_job(line: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "job" for target in line.targets)


def jobs_folder() -> Path:
    """The folder of the built-in jobs' package, without importing it."""
    found = find_spec("concord_jobs")
    assert found is not None, "concord_jobs is not installed; put jobs/ on PYTHONPATH beside platform/"
    assert found.origin is not None
    return Path(found.origin).parent


def built_in_jobs() -> dict[str, Path]:
    """The files of the built-in jobs by the jobs' names."""
    folder = jobs_folder()
    files = [path for path in folder.glob("*.py") if path.stem != "__init__"] + [*folder.glob("*/job.py")]
    return dict(sorted((job_name(path), path) for path in files))


def job_name(path: Path) -> str:
    """The name of the job in this file: a recipe's folder's for its ``job.py``, otherwise the file's."""
    of_folder = path.name == "job.py" and path.parent.parent.name == "concord_jobs"
    return (path.parent.name if of_folder else path.stem).replace("_", "-")


def job_texts() -> list[JobText]:
    """The built-in jobs, by name."""
    return [JobText(name, path.read_text(encoding="utf-8")) for name, path in built_in_jobs().items()]
