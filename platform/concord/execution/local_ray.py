"""The Ray that this process starts on this machine, and that ends with it.

Slurm, systemd and ``timeout`` send SIGTERM to all processes of a job. If Ray's own processes ended by it, calls of Ray
in this process would wait for a minute, or Ray would end this process without a message. So they do not receive
SIGTERM, and this process ends them. Ray does the same for Ctrl-C.
"""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_SIGTERM = {signal.SIGTERM}


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Processes and threads that start in the body do not receive SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_running() -> bool:
    """Whether this process started the Ray that it is connected to."""
    import ray

    worker: Any = ray._private.worker
    return worker._global_node is not None and worker._global_node.any_processes_alive()


def receive_sigterm() -> None:
    """Let this worker of Ray receive SIGTERM, and the processes that it starts."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)


def show_lines(shown: bool) -> None:
    """Show what Ray's processes print, or hide it: if all processes of a job receive SIGTERM, Ray's dashboard ends, and
    others print for as long as they live that it does not answer.
    """
    import ray

    worker: Any = ray._private.worker
    worker._worker_logs_enabled = shown


@contextlib.contextmanager
def lines_chosen(choose: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Iterator[None]:
    """While the body runs, Ray prints of each batch of its processes' lines what ``choose`` leaves of it.

    Ray has no public way to choose. Its processes' lines and the messages of its raylets meet in this function alone.
    """
    import ray

    worker: Any = ray._private.worker
    printed = worker.print_worker_logs

    @functools.wraps(printed)
    def print_chosen(batch: Mapping[str, Any], *place: Any) -> None:
        chosen = choose(batch)
        if chosen["lines"]:
            printed(chosen, *place)

    worker.print_worker_logs = print_chosen
    try:
        yield
    finally:
        worker.print_worker_logs = printed


def logs_folder() -> Path | None:
    """The folder of Ray's logs on the connected node; None for a client of Ray, to which no lines are sent."""
    import ray

    node: Any = ray._private.worker._global_node
    return None if node is None else Path(node.get_logs_dir_path())


def shutdown() -> None:
    """Disconnect this process, and kill Ray's processes; ``ray.shutdown`` would wait for each after a SIGTERM."""
    import psutil
    import ray

    worker: Any = ray._private.worker
    node, worker._global_node = worker._global_node, None
    ray.shutdown()
    show_lines(True)
    if node is None:  # it did not start
        return
    workers: list[psutil.Process] = []
    for kind, process in node.live_processes():
        if kind == "raylet":
            with contextlib.suppress(psutil.Error):
                workers = psutil.Process(process.pid).children(recursive=True)
    node.destroy_external_storage()
    node.kill_all_processes(check_alive=False)
    for each in workers:  # they notice the end of the raylet late, and its agents after a minute
        with contextlib.suppress(psutil.Error):
            each.kill()
