"""Ends two of Ray's processes that outlive a driver which was killed (-9): its agents, children of the raylet.

Ray's other processes end with the driver. The agents notice it as fast, and then try for a minute to report it to a
server that ended too, which no setting of Ray's changes. A small process beside the driver learns of its end by a pipe,
and ends them. It knew them while the driver lived, by number and time of start (psutil), so it never takes others for
them.
"""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator

import psutil

_RAYLET, _AGENTS = "raylet", ("ray::DashboardA", "ray::RuntimeEnv")  # Linux may cut names to 15 letters
_LOOK_EVERY_SECONDS, _LOOKS = 1.0, 120


@contextlib.contextmanager
def ended_with_driver() -> Iterator[None]:
    """Should this process be killed in the body, the agents of the Ray that it started end with it (on Linux)."""
    if not psutil.LINUX:
        yield
        return
    # In a session of its own, so that Ctrl-C in a terminal does not end it. Its other end of the pipe closes with it.
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as watcher:
        assert watcher.stdin is not None
        try:
            yield
        finally:
            watcher.kill()


def _watch(driver: int) -> None:
    """Wait until standard input ends; agents that are still there then are killed."""
    agents: list[psutil.Process] = []
    for look in range(_LOOKS + 1):
        complete = len(agents) == len(_AGENTS) or look == _LOOKS
        if select.select([sys.stdin], [], [], None if complete else _LOOK_EVERY_SECONDS)[0]:
            break
        agents = _agents(driver)
    for agent in agents:
        with contextlib.suppress(psutil.Error):  # which tells it from another process with its number
            agent.kill()


def _agents(driver: int) -> list[psutil.Process]:
    """The agents of the driver's raylet."""
    try:
        raylets = [each for each in psutil.Process(driver).children() if each.name() == _RAYLET]
        return [agent for raylet in raylets for agent in raylet.children() if agent.name().startswith(_AGENTS)]
    except psutil.Error:  # one has ended meanwhile
        return []


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
