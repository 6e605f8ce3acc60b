"""The built-in jobs as their files' texts describe them: to run a job imports PyTorch, which takes seconds."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import concord


@dataclass(frozen=True)
class JobText:
    """What a job's file says of the job, without being run.

    Attributes:
        name: of the job, by which commands know it.
        source: the file's text.
    """

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
        """The expressions that ``job = Job(…)`` is made of, by the names of its arguments."""
        for line in self._module.body:
            if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call) and _names(line, "job"):
                return {part.arg: part.value for part in line.value.keywords if part.arg is not None}
        return {}

    @property
    def reproduces(self) -> str | None:
        """What of which paper the job reproduces; None where only the running file knows."""
        value = self.parts.get("reproduces")
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _names(line: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in line.targets)


def jobs_folder() -> Path:
    """Where the built-in jobs are: inside an installed package, or beside ``platform/`` in a source tree."""
    package = Path(concord.__file__).parent
    inside = package / "jobs"
    return inside if inside.is_dir() else package.parent.parent / "jobs"


def built_in_jobs() -> dict[str, Path]:
    """The files of the built-in jobs by the jobs' names."""
    files = sorted(jobs_folder().glob("*.py"))
    return {path.stem.replace("_", "-"): path for path in files if not path.stem.startswith("_")}


def job_texts() -> list[JobText]:
    """The built-in jobs, by name."""
    return [JobText(name, path.read_text(encoding="utf-8")) for name, path in built_in_jobs().items()]
