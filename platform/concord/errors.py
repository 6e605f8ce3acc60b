"""The failures of a command; the class gives the exit status."""

import sys
from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """The text in one line: control characters, and what is not UTF-8, as escapes such as ``\\n``."""
    shown = (letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return text if text.isprintable() else "".join(shown)


class InputError(ValueError):
    """Invalid input. One line: the option, its value, what is wrong, what to do (exit status 2)."""

    def _render_traceback_(self) -> list[str]:
        """The error in a notebook, which asks for this: the line."""
        return [f"concord: {format_for_cli(self)}"]

    def __str__(self) -> str:
        return printable(super().__str__())


class InputWarning(UserWarning):
    """What a user should know of the input that was read.

    A command says it once, in one line, since its checks read the input; its workers read it again and say nothing.
    """


class UnansweredError(Exception):
    """A server or a storage does not answer; it may in a moment."""


class UnreachableError(InputError, UnansweredError):
    """Nothing answers at an address of the input."""


class ArgumentError(InputError):
    """An invalid argument: ``threshold=2: must lie in [0, 1]``; on the command line ``--threshold 2: …``."""

    def __init__(self, argument: str, value: object, expected: str) -> None:
        super().__init__(argument, value, expected)  # the arguments of unpickling
        self.argument, self.value, self.expected = argument, value, expected

    def __str__(self) -> str:
        return printable(f"{self.argument}={self.value}: {self.expected}")


class CheckpointError(InputError):
    """A file of a checkpoint is missing, damaged, or not Concord's; an earlier checkpoint may be usable."""


def require_posix() -> None:
    """Refuse Windows, before an import of what it lacks: locks of files, signals, forks (InputError)."""
    if sys.platform == "win32":
        raise InputError("Concord does not run on Windows; install it in WSL (the command wsl --install)")


def picklable(error: InputError) -> InputError:
    """The same error in a form that any process can unpickle: values are text."""
    if isinstance(error, ArgumentError):
        value = error.value
        if value is not None:
            value = tuple(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
        return ArgumentError(error.argument, value, error.expected)
    return CheckpointError(str(error)) if isinstance(error, CheckpointError) else InputError(str(error))


def format_for_cli(error: Exception) -> str:
    """The message of an error, with an argument as an option: ``--threshold 2: …``."""
    if not isinstance(error, ArgumentError):
        return str(error)
    values = error.value if isinstance(error.value, (tuple, list)) else (error.value,)
    given = "".join(f" {value}" for value in values if value is not None)
    return printable(f"--{error.argument.replace('_', '-')}{given}: {error.expected}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def last_line(error: BaseException) -> str:
    """The last line of an error's message that has a letter, as at the end of a traceback, or its type without one."""
    lines = [line.strip() for line in str(error).split("\n") if any(map(str.isalpha, line))]
    return lines[-1] if lines else type(error).__name__


class RunFailedError(RuntimeError):
    """The work failed, although the input was valid (exit status 1)."""

    def _render_traceback_(self) -> list[str]:
        """The error in a notebook, which asks for this: the line."""
        return [f"concord: {self}"]


class TrainingFailedError(RunFailedError):
    """Training failed: the reason in one line, with the traceback if the job's own code raised it."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)  # the arguments of unpickling
        self.reason, self.traceback = reason, traceback

    def __str__(self) -> str:
        return f"training failed: {self.reason}"


class StoppedError(RunFailedError):
    """The user stopped the work (Ctrl-C); finished parts are kept."""


class UnfinishedError(RunFailedError):
    """A part of the work failed or was stopped; ``result`` has the finished parts, in the usual form."""

    def __init__(self, problem: str, result: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.result = result
