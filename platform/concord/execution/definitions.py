"""What a job that a notebook or program has made consists of: its functions and classes, and the values that they use.

Such a job has no file whose text says what it is. Its definitions are read from the objects: the code of each function
that is not of an installed package, and the variables that it reads. So the same cell, run again, is the same job.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import linecache
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

# Parts of a class's namespace that Python or the place of its text decides.
_OF_PYTHON = frozenset(
    {"__dict__", "__doc__", "__firstlineno__", "__module__", "__static_attributes__", "__weakref__", "__qualname__"}
)


class Definition(NamedTuple):
    """A function, class or value that a job uses.

    Attributes:
        name: as the program has it.
        content: what it is, as text; equal for equal definitions in any process.
        source: its text; None if Python cannot give it.
    """

    name: str
    content: str
    source: str | None = None


def definitions(parts: Mapping[str, Any]) -> list[Definition]:
    """The functions and classes that these parts of a job reach, by name, and the parts themselves."""
    reader = _Reader()
    found = [Definition(name, reader.text(part)) for name, part in parts.items()]
    return sorted([*found, *reader.found.values()])


def own_modules(*values: Any) -> set[str]:
    """The modules of the functions and classes that these values reach, but for installed ones and the program."""
    reader = _Reader()
    for value in values:
        reader.text(value)
    return reader.modules - {"__main__"}


class _Reader:
    """Reads values as text, and collects the functions and classes among them."""

    def __init__(self) -> None:
        self.found: dict[int, Definition] = {}
        self.modules: set[str] = set()
        self._seen: dict[int, Any] = {}  # the objects are kept, so that no other takes an address

    def text(self, value: Any) -> str:
        """A value as text, with the names of functions and classes in place of them."""
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes() | Path():
                return repr(value)
            case set() | frozenset():
                return f"{{{', '.join(sorted(map(self.text, value)))}}}"
            case list() | tuple():
                return f"[{', '.join(map(self.text, value))}]"
            case Mapping():
                return self._fields("mapping", {repr(key): each for key, each in value.items()})
            case torch.Tensor():
                return _bytes(value.detach().cpu().numpy())
            case np.ndarray() if value.dtype != object:
                return _bytes(value)
            case functools.partial():
                return f"partial{self.text([value.func, value.args, value.keywords])}"
            case MethodType():
                return f"method{self.text([value.__func__, value.__self__])}"
            case ModuleType():
                file = getattr(value, "__file__", None)
                own = file is not None and not _installed(file)
                return Path(file).read_text(encoding="utf-8") if own and file else value.__name__
            case type() | FunctionType():
                if not _installed(_file_of(value)):
                    self._add(value)
                return f"{value.__module__}.{value.__qualname__}"
        if id(value) in self._seen:
            return "again"
        self._seen[id(value)] = value
        kind = self.text(type(value))
        if dataclasses.is_dataclass(value):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return self._fields(kind, fields)
        try:
            return f"{kind} {hashlib.sha256(pickle.dumps(value)).hexdigest()}"
        except Exception:  # a lock, a lambda inside: the object's own choice of an error
            return self._fields(kind, getattr(value, "__dict__", {}))

    def _fields(self, kind: str, values: Mapping[str, Any]) -> str:
        return f"{kind}({', '.join(f'{name}={self.text(value)}' for name, value in values.items())})"

    def _add(self, value: Any) -> None:
        if id(value) in self.found:
            return
        name = value.__qualname__
        self.modules.add(value.__module__)
        self.found[id(value)] = Definition(name, "", _source(value))  # it may refer to itself
        self._seen[id(value)] = value
        content = self._function(value) if isinstance(value, FunctionType) else self._class(value)
        self.found[id(value)] = self.found[id(value)]._replace(content=content)

    def _function(self, function: FunctionType) -> str:
        """A function's code, and the values that it is called with or reads."""
        names = set(_names(function.__code__))
        read = {name: value for name, value in sorted(function.__globals__.items()) if name in names}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: cell.cell_contents for name, cell in cells}
        defaults = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
        return self._fields(_code(function.__code__, function.__doc__), {**read, **closure, **defaults})

    def _class(self, kind: type[Any]) -> str:
        kept = {name: value for name, value in sorted(vars(kind).items()) if name not in _OF_PYTHON}
        return self._fields("class", {"bases": kind.__bases__, **kept})


def _names(code: CodeType) -> Iterator[str]:
    """The variables that code, and functions inside it, may read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _code(code: CodeType, docstring: str | None = None) -> str:
    """Code as text, without the place of its lines and its docstring."""
    constants = [
        _code(each) if isinstance(each, CodeType) else repr(sorted(each) if isinstance(each, frozenset) else each)
        for each in code.co_consts
        if each is None or each != docstring
    ]
    return repr((code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars))


def _bytes(array: Any) -> str:
    content = np.ascontiguousarray(array)
    return f"{content.dtype} {content.shape} {hashlib.sha256(content.tobytes()).hexdigest()}"


def _file_of(value: Any) -> str | None:
    """The file of a function or class; None in a notebook or program."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    return None if value.__module__ == "__main__" else getattr(sys.modules.get(value.__module__), "__file__", "<frozen")


def _installed(file: str | None) -> bool:
    """Whether a file is Python's, Concord's or an installed package's."""
    folders = (*sysconfig.get_paths().values(), *site.getsitepackages(), str(Path(__file__).parents[1]))
    return file is not None and file.startswith(("<frozen", *folders))


def _source(value: Any) -> str | None:
    """The text of a function or class; None where Python cannot give it."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        return _source_of_class(value) if isinstance(value, type) else None


def _source_of_class(kind: type[Any]) -> str | None:
    """The text of a class in a notebook, from that of the cell with one of its methods."""
    for method in filter(inspect.isfunction, vars(kind).values()):
        cell = "".join(linecache.getlines(method.__code__.co_filename))
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                return ast.get_source_segment(cell, node)
    return None
