"""The Ray that this process started on this machine, and its end by a signal.

Slurm, systemd and ``timeout`` send SIGTERM to all processes of a job: to this one and to Ray's own. Many calls of Ray
then wait for 60 s, whatever signal comes, and Ray aborts this process. So this process must make no such call.
"""

import sys
import time
from typing import Any

# How long Ray's first process may take to end after SIGTERM. Its log monitor has no handler and ends at once.
_NOTICE_SECONDS, _LOOK_EVERY_SECONDS = 2.0, 0.05


def has_ended() -> bool:
    """Whether a process of this process's own Ray has ended. A cluster at an address has none of them."""
    node = _node()
    return node is not None and not node.remaining_processes_alive()


def await_end() -> None:
    """After SIGTERM, wait until it is known whether Ray's processes have received it as well."""
    deadline = time.monotonic() + _NOTICE_SECONDS
    while _started() and not has_ended() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_SECONDS)


def kill() -> None:
    """Kill what is left of a Ray that has ended, so that ``ray.shutdown`` waits for no process."""
    if has_ended() and (node := _node()) is not None:
        node.kill_all_processes(check_alive=False)


def _started() -> bool:
    return (node := _node()) is not None and node.any_processes_alive()


def _node() -> Any:
    """The node of this process; Ray has no public name for it."""
    worker: Any = sys.modules.get("ray._private.worker")
    return getattr(worker, "_global_node", None)
