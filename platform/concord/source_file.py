"""Runs a user's Python file from its text, since another node may not have the file."""

import contextlib
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from concord.errors import InputError
from concord.redaction import redact


def read_source(path: Path, refusal: Callable[[str], InputError]) -> str:
    """The text of a file; ``refusal`` makes the error from a problem."""
    if not path.is_file():
        raise refusal("there is no such file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"cannot be read ({reason(error, str(path))})") from error


def run_source(path: str, source: str, kind: str, refusal: Callable[[str], InputError]) -> ModuleType:
    """Run a file's text as a module; ``refusal`` makes the error from a problem.

    With an absolute path the text may import the file's neighbours. Modules of two kinds, such as ``job``, do not share
    a name.
    """
    folder = Path(path).parent
    module = ModuleType(re.sub(r"\W", "_", f"concord_{kind}_{folder.name}_{Path(path).stem}"))
    module.__file__ = path
    if folder.is_absolute() and str(folder) not in sys.path:
        sys.path.append(str(folder))
    sys.modules[module.__name__] = module
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)  # for tracebacks on other nodes
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # the file is the user's: anything can be raised
        raise refusal(f"cannot be loaded ({reason(error, path)})") from error
    return module


def hidden_module(folder: Path) -> tuple[Path, str] | None:
    """A file or package in a folder with the name of another module that this process uses; None without one.

    A process that imports from this folder first would get it in place of that module.
    """
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")]):
        own = path.parent if path.name == "__init__.py" else path
        used = getattr(sys.modules.get(own.stem), "__spec__", None)
        if used is not None and own.stem != "__main__" and Path(used.origin or "").resolve() != path.resolve():
            return own, own.stem
    return None


@contextlib.contextmanager
def refusing(problem: str, path: str, refusal: Callable[[str], InputError]) -> Iterator[None]:
    """Turn an exception of the user's code in the body into one line: the problem, and its reason with the line number.

    An InputError is one already. The code is the file's of this path; ``refusal`` makes the error.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise refusal(f"{problem} ({reason(error, path)})") from error


def reason(error: BaseException, path: str | None = None) -> str:
    """The exception in one line without secrets, with the line number in the file of this path."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    message = redact(str(error).strip().split("\n")[0])
    return type(error).__name__ + (f": {message}" if message else "") + (f", line {lines[-1]}" if lines else "")


def own_traceback(error: BaseException, path: str) -> str:
    """The traceback from the first frame in the file of this path on, without secrets."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    shown = traceback.TracebackException(type(error), error, frames or error.__traceback__)
    return redact("".join(shown.format(chain=False)).rstrip())
