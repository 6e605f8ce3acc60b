"""What Ray's own processes print is kept in a file, not shown among a run's lines, and nodes that are lost are named.

Ray sends the lines of all its processes to the driver: those of workers, which are the user's, and those of its
raylets, controllers and C++ threads, which are dozens when a node dies. Raylets send it messages besides. The file is
beside Ray's other logs on the driver's node, where Ray's dashboard shows it.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from concord.errors import InputError, StoppedError
from concord.execution import local_ray
from concord.logs import info

# Processes of Ray, by the name that it gives with their lines.
_PROCESSES = {"raylet", "gcs_server"}
_ACTORS = ("TrainController", "PreemptionWatcher", "PlacementGroupCleaner", "_AutoscalingCoordinator", "_StatsActor")
# A line of Ray's C++ code, [2026-11-29 12:40:28,886 E 22810 22857] core_worker.cc:2465: …, or of PyTorch's sockets.
_LINE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z] \d+ \d+\] |\[[A-Z]\d{4} .*\] \[c10d\] |.*\[c10d\] ")
# What users need of it: a worker that was killed since its node had no memory left.
_SHOWN = re.compile(r"memory pressure|OOM|out of memory", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_LOOK_EVERY_SECONDS = 5.0


def is_own(process: str, actor: str, line: str) -> bool:
    """Whether a line is of Ray itself, by the process and the actor that print it."""
    rays = process in _PROCESSES or actor.startswith(_ACTORS) or _LINE.match(line) is not None
    return rays and not _SHOWN.search(line)


@contextlib.contextmanager
def kept_apart() -> Iterator[None]:
    """Keep Ray's own lines in a file while the body runs, in which the driver connects; a failure names the file."""
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    messages = _Messages(_driver_file)
    try:
        with local_ray.lines_chosen(messages):
            yield
    except Exception as error:
        if messages.file is not None and not isinstance(error, InputError | StoppedError):
            info(f"what Ray said of itself is kept in {messages.file} on {socket.gethostname()}")
        raise


def _driver_file() -> Path | None:
    """The file of this driver; None if it has no node."""
    import ray

    folder = local_ray.logs_folder()
    return None if folder is None else folder / f"concord-{ray.get_runtime_context().get_job_id()}.log"


class _Messages:
    """Takes batches of lines: those of Ray go to the file, and it returns the others, to be shown.

    Attributes:
        file: where the first line of Ray went; None before, and where it cannot be written.
    """

    def __init__(self, find: Callable[[], Path | None]) -> None:
        self.file: Path | None = None
        self._find = find

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        process, actor = str(batch.get("pid")), str(batch.get("actor_name") or "")
        own = {line for line in batch["lines"] if is_own(process, actor, line)}
        kept = [line for line in batch["lines"] if line in own]
        if own and self._keep(f"{actor} {process} {batch.get('ip')}".strip(), kept):
            batch = {**batch, "lines": [line for line in batch["lines"] if line not in own]}
        if not sys.stderr.isatty():
            batch = {**batch, "lines": [_COLOR.sub("", line) for line in batch["lines"]]}
        return batch

    def _keep(self, origin: str, lines: Sequence[str]) -> bool:
        file = self.file or self._find()
        if file is None:
            return False
        try:
            with file.open("a", encoding="utf-8", errors="backslashreplace") as opened:
                opened.writelines(f"({origin}) {_COLOR.sub('', line)}\n" for line in lines)
        except OSError:  # a cluster of another user: then the lines are shown
            return False
        self.file = file
        return True


@contextlib.contextmanager
def lost_nodes_named() -> Iterator[None]:
    """Say which nodes the cluster loses while the body runs."""
    import ray

    over, names = threading.Event(), dict[str, str]()

    def watch() -> None:
        while not over.wait(_LOOK_EVERY_SECONDS):
            with contextlib.suppress(Exception):  # Ray's server is away
                for name in lost(names, ray.nodes()):
                    info(f"node {name} died, or was taken away", logging.WARNING)

    lost(names, ray.nodes())
    thread = threading.Thread(target=watch, name="concord-nodes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LOOK_EVERY_SECONDS)


def lost(names: dict[str, str], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the nodes that were alive at the last look and no longer are; ``names`` has those alive, by id."""
    alive = {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in nodes
        if node["Alive"]
    }
    gone = [name for identity, name in names.items() if identity not in alive]
    names.clear()
    names.update(alive)
    return gone
