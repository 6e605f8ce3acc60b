"""Progress and log records as JSON, one object a line, for log collectors: ``CONCORD_LOG=json``.

The fields have the names of Ray's own JSON logs (``ray.LoggingConfig(encoding="JSON")``): ``asctime``, ``levelname``,
``message``, ``filename``, ``lineno``, ``process``, ``timestamp_ns``, ``job_id``, and in workers ``worker_id`` and
``node_id``. Concord adds ``run`` or ``study``, ``job``, ``submission``, ``rank``.
"""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from concord.errors import InputError, InputWarning, printable
from concord.submitted import SUBMISSION, is_submitted

VARIABLE = "CONCORD_LOG"
_OWN = "concord"
_PACKAGE = Path(__file__).parent
_as_python_does = warnings.formatwarning

_known: dict[str, Any] = {}


class Context(NamedTuple):
    """The log settings that a process passes to its workers.

    Attributes:
        known: the fields of every record.
    """

    as_json: bool
    known: Mapping[str, Any]


def as_json() -> bool:
    """Whether lines are to be JSON."""
    return os.environ.get(VARIABLE) == "json"


def check() -> None:
    """Refuse an invalid CONCORD_LOG (InputError)."""
    value = os.environ.get(VARIABLE, "text")
    if value not in {"json", "text"}:
        raise InputError(f"{VARIABLE}={value}: must be json or text")


def use_json() -> None:
    """Write this process's logs and warnings to standard error as JSON, and remove other handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    ray = logging.getLogger("ray")
    ray.handlers[:], ray.propagate = [], True
    logging.captureWarnings(True)
    if is_submitted():
        bind_context(submission=os.environ[SUBMISSION])


def bind_context(**fields: Any) -> None:
    """Add fields to every later record of this process."""
    _known.update(fields)


def context() -> Context:
    """The context for a worker's :func:`inherit_context`."""
    return Context(as_json(), dict(_known))


def inherit_context(given: Context, **fields: Any) -> None:
    """Log as the parent process does, with more fields; what to know of the input that process has said."""
    show_warnings_in_one_line()
    warnings.filterwarnings("ignore", category=InputWarning)
    if given.as_json:
        use_json()
    bind_context(**given.known, **fields)


def info(text: str, level: int = logging.INFO) -> None:
    """Print a line of progress, or of an error: a line break in a name does not split it; or a traceback as it is."""
    text = text if text.startswith("Traceback ") else printable(text)
    if as_json():
        write(text, level)
    else:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def said_after(seconds: float, text: str) -> Iterator[None]:
    """Print a line if the body takes longer than this."""
    timer = threading.Timer(seconds, info, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write(line: str, level: int = logging.INFO) -> None:
    """Log a line of Concord's own."""
    logging.getLogger(_OWN).log(level, line, stacklevel=3)  # the caller's caller


def show_warnings_in_one_line() -> None:
    """Show the warnings of this package, and of a user's input, in one line, without the place in a file; those of
    other code as before.

    What Pillow says of an image above 89 megapixels is not shown: the image is read, and a much larger one is refused.
    """
    warnings.formatwarning = _in_one_line
    warnings.filterwarnings("ignore", r"Image size \(\d+ pixels\) exceeds limit")


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if issubclass(category, InputWarning):  # once: Python forgets what it has shown whenever a filter changes
        warnings.filterwarnings("ignore", re.escape(str(message)), InputWarning)
    if issubclass(category, InputWarning) or Path(filename).is_relative_to(_PACKAGE):
        return f"warning: {printable(' '.join(str(message).split()))}\n"
    return _as_python_does(message, category, filename, lineno, line)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
            "timestamp_ns": int(record.created * 1e9),
        }
        if record.exc_info:
            fields["exc_text"] = self.formatException(record.exc_info)
        return json.dumps(fields | _known, default=str)
