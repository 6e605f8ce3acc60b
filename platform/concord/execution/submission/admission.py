"""Submissions that wait for the head node's memory: the position of each, and what it waits for.

A command on the cluster reserves memory of the head node before it starts (``--driver-memory``). Until that much is
free, Ray holds it back and does not say so.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from concord.backoff import pauses
from concord.errors import InputError

_GIB = 2**30
_STARTING_SECONDS = 5.0
# Between two looks at a submission that waits.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0


@dataclasses.dataclass(frozen=True)
class Submission:
    """A job that was submitted.

    Attributes:
        status: pending, running, succeeded, failed or stopped.
        command: Concord's command (``train``, ``tune``), or another program's command line.
        job: Concord's job; empty for other programs.
        owner: the user who submitted it; empty for other programs.
        started, ended: Unix times in seconds; None before.
        exit_status: the command's; None before its end.
        message: Ray's message on its state.
        again: the command that continues it if it was lost; empty for other programs.
        lost: whether it ended with the process of Ray that watched it, as with the head node.
        memory: bytes of the head node that it reserves; 0 for other programs.
        waits: of a pending one, its position and what it waits for, in words.
    """

    id: str
    status: str
    command: str
    job: str
    name: str
    owner: str
    started: float | None
    ended: float | None
    exit_status: int | None
    message: str
    again: str
    lost: bool = False
    memory: int = 0
    waits: str = ""


def with_waits(found: Iterable[Submission], head_memory: float) -> list[Submission]:
    """The submissions, the newest first; those that wait for memory of the head node, in bytes, with their position."""
    newest = sorted(found, key=lambda each: -(each.started or 0))
    running = [each for each in newest if each.status == "running" and each.memory]
    reserved = sum(each.memory for each in running)
    free, waiting = head_memory - reserved, list[Submission]()
    for each in reversed(newest):
        if each.status == "pending" and (waiting or each.memory > free):
            waiting.append(each)
        elif each.status == "pending":  # it is starting
            free -= each.memory
    has = f"{_gib(reserved)} of {_gib(head_memory)} GiB are reserved by {len(running)} running"
    reasons = {
        each.id: f"{number} of {len(waiting)} for {_gib(each.memory)} GiB of the head node, of which {has}"
        for number, each in enumerate(waiting, start=1)
    }
    return [dataclasses.replace(each, waits=reasons.get(each.id, "")) for each in newest]


def check_memory(memory: int, head_memory: float) -> None:
    """Refuse more memory than the head node has (InputError): the submission would wait for ever."""
    if memory > head_memory:
        has = f"the head node has {_gib(head_memory)} GiB for commands"
        raise InputError(f"--driver-memory {_gib(memory)}: {has}; give less")


def _gib(size: float) -> str:
    """Bytes as a number of GiB, with three digits or all before the point."""
    return f"{size / _GIB:.3g}" if size < 1000 * _GIB else f"{size / _GIB:.0f}"


class Listing(Protocol):
    """What knows the submissions of a cluster."""

    def status(self, identity: str) -> str:
        """The status of one."""

    def submissions(self) -> list[Submission]:
        """All of them."""


def position(cluster: Listing, identity: str) -> str:
    """The position of a submission and what it waits for, in words; empty if it does not wait."""
    return next((each.waits for each in cluster.submissions() if each.id == identity), "")


def wait_for_admission(cluster: Listing, identity: str, info: Callable[[str], None]) -> None:
    """Wait until a submission has started, or ended; say its position and what it waits for when they change."""
    begun, said = time.monotonic(), ""
    for pause in pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
        if cluster.status(identity) != "pending":
            return
        if time.monotonic() - begun > _STARTING_SECONDS:
            waits = position(cluster, identity)
            if waits not in ("", said):
                info(f"{identity}: waits as {waits}")
                said = waits
        time.sleep(pause)
