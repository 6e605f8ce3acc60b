"""The key of a run: a hash of all that its result depends on. It answers whether something is the same as before.

The parts of a key are the job's name, the values of the options that decide results, the definitions in the job's files
that training can reach, and the version of the data. A resumed run, a continued study, a run that another group has
trained, and made data are compared by the parts (:meth:`Key.differences`), which also say *what* differs.

A folder ``keys`` beside the runs names the finished run of each key. It is an index: the records are the truth.
"""

import ast
import functools
import hashlib
import itertools
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, Literal, NamedTuple

from concord.errors import InputError
from concord.execution.definitions import Definition, definitions
from concord.options import RESULT, Role, flag_of, names_of, option_values, options_of
from concord.record import OpenRun, Run, folder_of, read_run
from concord.redaction import HIDDEN, is_hidden, is_secret, without_secrets
from concord.storage import Folder, display_path
from concord.training.job import Job, JobFile
from concord.training.options import ResolvedConfig, RunConfig, TrainConfig

_SOURCE = "job.py"
KEYS = "keys"  # the index, in the output folder
# The parts of a Job that decide what is shown of runs, or which runs are made, but not what a run learns.
_NOT_TRAINED = frozenset({"callbacks", "comparisons", "data", "figures", "name", "report", "reproduces", "studies"})


class Difference(NamedTuple):
    """What differs between a key and a recorded one, with both values."""

    part: Literal["job", "option", "source", "data"]
    name: str
    current: Any
    recorded: Any


@dataclass(frozen=True)
class Key:
    """All that a result depends on.

    Attributes:
        job: the job's name.
        options: the values by name, as JSON, without secrets and options without an effect.
        usual: the names of the options at their declared defaults. They are not hashed, so that an option that is newer
            than a record changes no key.
        sources: the hash of each file's text, by name.
        data: the version of the data; None if unknown.
    """

    job: str
    options: Mapping[str, Any]
    usual: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)
    data: str | None = None

    @cached_property
    def without_data(self) -> str:
        """The hash of the other parts: equal for the same run on other data."""
        options = {name: value for name, value in self.options.items() if name not in self.usual}
        numbers_as_floats = json.loads(json.dumps(options), parse_int=float)  # 1 is 1.0
        return _hash([self.job, numbers_as_floats, self.sources])

    @property
    def value(self) -> str:
        """The key."""
        return self.without_data if self.data is None else f"{self.without_data}-{_hash(self.data)[:8]}"

    def as_json(self) -> dict[str, Any]:
        """The parts that a record keeps beside the job and the options."""
        return {"key": self.value, "sources": dict(self.sources), "data": self.data}

    def differences(self, record: Mapping[str, Any]) -> Iterator[Difference]:
        """What differs from a record with ``job``, ``config`` (the options) and ``key``.

        An option that is newer than the record had its default there; unknown data are the same.
        """
        recorded, key = record["config"], record.get("key") or {}
        if record["job"] != self.job:
            yield Difference("job", self.job, self.job, record["job"])
        for name, value in self.options.items():
            if name in recorded or name not in self.usual:
                before = recorded.get(name)
                if value != before:
                    yield Difference("option", name, value, before)
        sources = key.get("sources", {})
        for name in {**self.sources, **sources}:
            if self.sources.get(name) != sources.get(name):
                yield Difference("source", name, self.sources.get(name), sources.get(name))
        data = key.get("data")
        if self.data is not None and data is not None and self.data != data:
            yield Difference("data", "data", self.data, data)


def run_key(
    job: JobFile,
    config: ResolvedConfig,
    data: str | None,
    recorded: Mapping[str, Any],
    unused: frozenset[str],
    **further: Any,
) -> Key:
    """The key of a run with these options, as they are recorded; ``further`` are other values that decide its result.

    The number of workers counts only where they draw the environments of a step.
    """
    kind = type(config)
    names = names_of(kind, *RESULT) - unused
    if isinstance(config, TrainConfig) and config.data.environments_per_step > 0:
        names |= {"workers"}
    values, declared = option_values(config), options_of(kind)
    # Addresses without their passwords, as in a record: whoever renews one trains the same.
    options = {name: plain(value) for name, value in recorded.items() if name in names and not is_secret(name)}
    usual = frozenset(name for name in options if values[name] == declared[name].default)
    given = {name: plain(value) for name, value in further.items() if value}
    rule = {name: _hash(text) for name, text in config.sources().items()}
    return Key(job.name, options | given, usual, {**_sources_of(job), **rule}, data)


def plain(value: Any) -> Any:
    """A value as it is after a round trip through JSON."""
    return json.loads(json.dumps(display_path(value) if isinstance(value, Path) else value, default=str))


def recorded_config(config: Any) -> dict[str, Any]:
    """Options as JSON, without secrets and those that are never kept."""
    unkept = names_of(type(config), Role.UNKEPT)
    values = {name: value for name, value in option_values(config).items() if name not in unkept}
    return without_secrets(
        {name: display_path(value) if isinstance(value, Path) else value for name, value in values.items()}
    )


def require_same(what: str, key: Key, record: Mapping[str, Any], name: str, advice: str) -> bool:
    """Refuse to continue what a record describes if it differs (InputError); return whether the job's text is the same.

    ``what`` names it, such as ``the run NAME``; ``advice`` says what to do about an option.
    """
    for part, differs, current, recorded in key.differences(record):
        if part == "job":
            raise InputError(f"--name {name}: is a {what.split()[1]} of job {recorded}, not of {current}")
        if part == "option":
            hidden = f", and {HIDDEN} is not recorded" if is_hidden(recorded) else ""
            started = f"{what} was started with {_shown(recorded)}"
            raise InputError(f"{flag_of(differs)} {_shown(current)}: {started}; {advice}{hidden}")
        if part == "data":
            raise InputError(
                f"--name {name}: {what} was started with data of version {recorded}, and these have version {current}; "
                "restore the data, or give another name without --resume"
            )
        if differs in record.get("sources", {}):
            raise InputError(
                f"{differs}: {what} was started with another text of this file; leave it out to resume with that text"
            )
    return all(each.part != "source" for each in key.differences(record))


def require_secrets(what: str, config: RunConfig, record: Mapping[str, Any]) -> None:
    """Refuse to continue without a secret option that was given at the start, since no record has it (InputError)."""
    given = recorded_config(config)
    for option, value in record["config"].items():
        if is_secret(option) and is_hidden(value) and not is_hidden(given.get(option)):
            raise InputError(
                f"{flag_of(option)}: {what} was started with one, and secrets are not recorded; give it again"
            )


def finished_run(output: Path, key: Key) -> Run | None:
    """The finished run of this key in an output folder, if there is one."""
    index = Folder(output) / KEYS
    file = index.fetch(key.value)
    try:
        run = read_run(folder_of(output, file.read_text().strip()))
    except (OSError, ValueError):  # there is none; or its file or the run is damaged, or of another version
        return None
    if run is None or run.status != "FINISHED" or run.key != key.value or any(key.differences(run.record)):
        return None
    return run


def index_run(run: Run) -> None:
    """Name a finished run under its key."""
    if run.key:
        (Folder(run.output) / KEYS).write(run.key, run.name, durable=False)


def _sources_of(job: JobFile) -> Mapping[str, str]:
    """The hashes of what training can reach of a job, by file, or by name if no file defines the job."""
    if not job.made_here:
        return job_sources(job.path, job.source)
    found: dict[str, list[str]] = {}
    for each in job_definitions(job.job):
        found.setdefault(each.name, []).append(each.content)
    return {name: _hash(contents) for name, contents in found.items()}


def keep_source(job: JobFile, run: OpenRun) -> None:
    """Keep the text of a job that no file defines with its run, as far as Python can give it."""
    if job.made_here:
        texts = [each.source for each in job_definitions(job.job) if each.source is not None]
        run.folder.write(_SOURCE, "\n\n".join(map(textwrap.dedent, texts)))
        run.keep_artifact(_SOURCE)


def job_definitions(job: Job[Any]) -> list[Definition]:
    """What training can reach of a job that no file defines."""
    trained = {name: part for name, part in vars(job).items() if name not in {*_NOT_TRAINED, "config"}}
    return definitions({**trained, "config": type(job.config)})


@functools.lru_cache(maxsize=64)
def job_sources(path: str, source: str) -> Mapping[str, str]:
    """The hash of the definitions that training can reach, by file: the job's own, and modules in its folder that it
    imports. Comments, docstrings, tables, figures and search spaces do not count."""
    tree = ast.parse(source)
    statements = _reached(tree)
    found = {Path(path).name: _hash([ast.dump(_without_docstrings(each)) for each in statements])}
    _add_imports(statements, Path(path).parent, found)
    return found


def _reached(tree: ast.Module) -> list[ast.stmt]:
    """The top-level statements that the trained parts of ``job = Job(…)`` need; all if there is no such line."""
    defines: dict[str, list[ast.stmt]] = {}
    always: list[ast.stmt] = []
    call: ast.Call | None = None
    for statement in tree.body:
        names = _defined(statement)
        if names == ["job"] and isinstance(value := getattr(statement, "value", None), ast.Call):
            call = value
        elif names is None:
            always.append(statement)
        for name in names or ():
            defines.setdefault(name, []).append(statement)
    if call is None:
        return tree.body
    trained = [*call.args, *(each.value for each in call.keywords if each.arg not in _NOT_TRAINED)]
    waiting: list[ast.AST] = [*always, *trained]
    reached: dict[int, ast.stmt] = {id(each): each for each in always}
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Name):
                for statement in defines.get(node.id, ()):
                    if id(statement) not in reached:
                        reached[id(statement)] = statement
                        waiting.append(statement)
    in_order = [each for each in tree.body if id(each) in reached and _defined(each) != ["job"]]
    return [*in_order, *(ast.Expr(each) for each in trained)]


def _defined(statement: ast.stmt) -> list[str] | None:
    """The names that a statement defines; None if it does something else."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = [(each.asname or each.name).split(".")[0] for each in statement.names]
        return None if "*" in names else names
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    if isinstance(statement, ast.Assign) and all(isinstance(each, ast.Name) for each in statement.targets):
        return [each.id for each in statement.targets if isinstance(each, ast.Name)]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return []  # a docstring
    return None


def _without_docstrings(tree: ast.AST) -> Any:
    """The tree without texts that stand alone, in a copy."""

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
            return None if isinstance(node.value, ast.Constant) else node

    return Remove().visit(ast.parse(ast.unparse(tree)))


def _add_imports(statements: list[ast.stmt], folder: Path, found: dict[str, str], package: str = "") -> None:
    """Add the modules in this folder that the statements of a package's module import, and theirs."""
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.level == 0 or package):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names = [module, *(f"{module}.{each.name}" for each in node.names)]
        else:
            continue
        # An import of a module also runs the packages around it.
        parts = (itertools.accumulate(each.split("."), "{}.{}".format) for each in names)
        for name in dict.fromkeys(itertools.chain.from_iterable(parts)):
            module_of = sys.modules.get(name)
            file = getattr(module_of, "__file__", None)
            if file is None or not Path(file).is_relative_to(folder):
                continue
            shown = Path(file).relative_to(folder)
            if str(shown) in found or "site-packages" in shown.parts:  # an environment may lie beside the job
                continue
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
            found[str(shown)] = _hash(ast.dump(_without_docstrings(tree)))
            _add_imports(tree.body, folder, found, getattr(module_of, "__package__", None) or "")


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
