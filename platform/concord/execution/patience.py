"""Waits for a server or a storage that is away for a moment when a run begins or ends; in between training goes on."""

import time
from collections.abc import Callable
from typing import TypeVar

from concord.backoff import pauses
from concord.errors import UnansweredError
from concord.logs import info

Found = TypeVar("Found")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 8.0


def wait_for_answer(ask: Callable[[], Found], minutes: float) -> Found:
    """Ask again until there is an answer, for at most these minutes after the first failure; say in a line for what.

    ``ask`` must leave nothing behind, or go on where it was, if it raises UnansweredError, which is raised in the end.
    """
    end: float | None = None
    for pause in pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
        try:
            return ask()
        except UnansweredError as error:
            waited, end = end is not None, end or time.monotonic() + 60 * minutes
            if (left := end - time.monotonic()) <= 0:
                raise
            if not waited:
                info(f"{error}; an answer is waited for, for up to {minutes:g} minutes (--tracking-patience)")
        time.sleep(min(pause, left))
    raise AssertionError  # the pauses have no end
