"""Follows a submission through deaths of the head node: when it is back, the same submission is sent again.

It has the same id, and Ray takes an id once, so it never runs twice at the same time. The command on the cluster knows
the run of its own submission and continues it, or shows that it has finished.
"""

import time
from collections.abc import Callable

from concord.backoff import pauses
from concord.errors import InputError, RunFailedError
from concord.execution.submission.admission import Submission, wait_for_admission
from concord.execution.submission.cluster import Cluster, ConnectionLostError, TakenError

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 15.0
# A head that is not back after this time is given up.
_BACK_SECONDS = 3600.0


def follow_restarting(
    cluster: Cluster,
    identity: str,
    show: Callable[[str], None],
    submit: Callable[[], object],
    restarts: int,
    info: Callable[[str], None],
) -> Submission:
    """Show a submission's log until it ends; after a death of the head submit it again, at most this number of times.

    Raises:
        InputError, RunFailedError: the connection broke, and no restart is left or the head did not come back.
    """
    shown = _ShownOnce(show)
    while True:
        try:
            wait_for_admission(cluster, identity, info)
            ended = cluster.follow(identity, shown)
            if not ended.lost or restarts == 0:
                return ended
        except (InputError, RunFailedError):  # the connection broke, or none was made
            if restarts == 0:
                raise
        info(f"{identity}: the head node is gone; waiting until it is back (--restart, Ctrl-C ends the waiting)")
        found = _after_outage(cluster, identity)
        if found is not None and not found.lost:
            shown.repeat()
            continue
        restarts -= 1
        left = "this was the last time" if restarts == 0 else f"{restarts} more at most"
        info(f"{identity}: is submitted again, with what its run has kept; {left}")
        try:
            if found is not None:
                cluster.forget(identity)
            submit()
        except TakenError:  # an answer was lost
            pass
        except (InputError, RunFailedError):  # the head is gone again
            if restarts == 0:
                raise
        shown = _ShownOnce(show)


def _after_outage(cluster: Cluster, identity: str) -> Submission | None:
    """The submission as the head knows it when it answers again; None if it does not know it."""
    end = time.monotonic() + _BACK_SECONDS
    for pause in pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
        time.sleep(pause)
        try:
            return next((each for each in cluster.submissions() if each.id == identity), None)
        except (InputError, RunFailedError) as error:
            if time.monotonic() > end:
                raise ConnectionLostError(f"{identity}: the head node is not back after an hour ({error})") from error
    raise AssertionError  # the pauses have no end


class _ShownOnce:
    """Shows a log of which a new connection gives all from its beginning."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._length, self._known = show, 0, 0

    def repeat(self) -> None:
        """What comes next is the log from its beginning."""
        self._known, self._length = self._length, 0

    def __call__(self, text: str) -> None:
        new = text[max(self._known - self._length, 0) :]
        self._length += len(text)
        if new:
            self._show(new)
