"""Ends two of Ray's processes that outlive a driver which was killed (-9): its agents, children of the raylet.

Ray's other processes end with the driver. The agents notice it as fast, and then try for a minute to report it to a
server that ended too, which no setting of Ray's changes. A small process beside the driver learns of its end by a pipe,
and ends them. It knew them by number and time of start while the driver lived, so it never takes others for them.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_PROCESSES = Path("/proc")
_RAYLET, _AGENTS = "raylet", ("ray::DashboardA", "ray::RuntimeEnv")  # as Linux has it, cut to 15 letters
_LOOK_EVERY_SECONDS, _LOOKS = 1.0, 120


@contextlib.contextmanager
def ended_with_driver() -> Iterator[None]:
    """Should this process be killed in the body, the agents of the Ray that it started end with it (on Linux)."""
    if not (_PROCESSES / "self" / "stat").exists():
        yield
        return
    # In a session of its own, so that Ctrl-C in a terminal does not end it. Its other end of the pipe closes with it.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as watcher:
        assert watcher.stdin is not None
        try:
            yield
        finally:
            watcher.kill()


def _watch(driver: int) -> None:
    """Wait until standard input ends; agents that are still there then are killed."""
    agents: dict[int, str] = {}
    for look in range(_LOOKS + 1):
        complete = len(agents) == len(_AGENTS) or look == _LOOKS
        if select.select([sys.stdin], [], [], None if complete else _LOOK_EVERY_SECONDS)[0]:
            break
        agents = _agents(driver)
    running = _running()
    for process, started in agents.items():
        if process in running and running[process][2] == started:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _agents(driver: int) -> dict[int, str]:
    """The agents of the driver's raylet, and when each was started."""
    running = _running()
    raylets = {process for process, (name, parent, _) in running.items() if name == _RAYLET and parent == driver}
    return {
        process: started
        for process, (name, parent, started) in running.items()
        if name.startswith(_AGENTS) and parent in raylets
    }


def _running() -> dict[int, tuple[str, int, str]]:
    """Name, parent and time of start of every process."""
    found = {}
    for folder in _PROCESSES.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                fields = rest.split()
                found[int(folder.name)] = (name, int(fields[1]), fields[19])
    return found


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
