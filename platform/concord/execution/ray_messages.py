"""What Ray's own processes print is kept in a file, not shown among a run's lines, and nodes that are lost are named.

Ray sends the lines of all its processes to the driver: those of workers, which are the user's, and those of its
raylets, controllers and C++ threads, which are dozens when a node dies. The file is beside Ray's other logs on the
driver's node, where Ray's dashboard shows it.
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
_HANDLER = "ray_print_logs"
_LOOK_EVERY_SECONDS = 5.0


def is_own(process: str, actor: str, line: str) -> bool:
    """Whether a line is of Ray itself, by the process and the actor that print it."""
    rays = process in _PROCESSES or actor.startswith(_ACTORS) or _LINE.match(line) is not None
    return rays and not _SHOWN.search(line)


@contextlib.contextmanager
def kept_apart() -> Iterator[None]:
    """Keep Ray's own lines in a file while the body runs, in a connected driver; a failure of the body names it."""
    import ray
    from ray._private import ray_logging

    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if (folder := local_ray.logs_folder()) is None:
        yield
        return
    file = folder / f"concord-{ray.get_runtime_context().get_job_id()}.log"
    messages = _Messages(file, local_ray.print_lines)
    # Ray has no public way to choose among the lines; it removes the handler by its name.
    ray_logging.global_worker_stdstream_dispatcher.remove_handler(_HANDLER)
    ray_logging.global_worker_stdstream_dispatcher.add_handler(_HANDLER, messages)
    try:
        yield
    except Exception as error:
        if file.exists() and not isinstance(error, InputError | StoppedError):
            info(f"what Ray said of itself is kept in {file} on {socket.gethostname()}")
        raise


class _Messages:
    """Takes batches of lines: those of Ray go to the file, the others are shown."""

    def __init__(self, file: Path, show: Callable[[Mapping[str, Any]], None]) -> None:
        self._file, self._show = file, show

    def __call__(self, batch: Mapping[str, Any]) -> None:
        process, actor = str(batch.get("pid")), str(batch.get("actor_name") or "")
        own = {line for line in batch["lines"] if is_own(process, actor, line)}
        kept = [line for line in batch["lines"] if line in own]
        if own and self._keep(f"{actor} {process} {batch.get('ip')}".strip(), kept):
            batch = {**batch, "lines": [line for line in batch["lines"] if line not in own]}
        if not sys.stderr.isatty():
            batch = {**batch, "lines": [_COLOR.sub("", line) for line in batch["lines"]]}
        if batch["lines"]:
            self._show(batch)

    def _keep(self, origin: str, lines: Sequence[str]) -> bool:
        try:
            with self._file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"({origin}) {_COLOR.sub('', line)}\n" for line in lines)
        except OSError:  # a cluster of another user: then the lines are shown
            return False
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
