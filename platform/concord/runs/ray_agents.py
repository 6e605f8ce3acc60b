"""Ends Ray's agents (children of the raylet), which outlive a driver that was killed with SIGKILL.

Ray's other processes end with the driver. The agents try for a minute to report its end to a server that has ended as
well; no setting of Ray changes this. So a small process notices the driver's end by a pipe and ends the agents. It
identified them while the driver lived, by number and start time (psutil), so it never ends other processes.
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
    """End Ray's agents if this process is killed in the body (on Linux)."""
    if not psutil.LINUX:
        yield
        return
    # A new session, so that Ctrl-C in a terminal does not end it. The pipe closes when this process ends.
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
    """Wait until standard input ends, then kill the remaining agents."""
    agents: list[psutil.Process] = []
    for look in range(_LOOKS + 1):
        complete = len(agents) == len(_AGENTS) or look == _LOOKS
        if select.select([sys.stdin], [], [], None if complete else _LOOK_EVERY_SECONDS)[0]:
            break
        agents = _agents(driver)
    for agent in agents:
        with contextlib.suppress(psutil.Error):  # psutil checks the start time
            agent.kill()


def _agents(driver: int) -> list[psutil.Process]:
    """The agents of the driver's raylet."""
    try:
        raylets = [each for each in psutil.Process(driver).children() if each.name() == _RAYLET]
        return [agent for raylet in raylets for agent in raylet.children() if agent.name().startswith(_AGENTS)]
    except psutil.Error:  # one ended meanwhile
        return []


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
