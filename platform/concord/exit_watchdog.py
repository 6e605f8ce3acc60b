"""Acts when this process ends for any reason, also when it is killed.

The process itself cannot do that. So this file runs as a program beside it, which waits on a pipe: the pipe closes when
the process that started the program ends.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_LINE = (
    "concord: the command's process ended without an error message: it was killed, crashed, or its job called "
    "os._exit; what was recorded is kept, concord runs lists it"
)
# How long terminated processes may take to end before they are killed.
_ENDING_SECONDS = 5.0
_RAYLET, _AGENTS = "raylet", ("ray::DashboardA", "ray::RuntimeEnv")  # Linux may cut names to 15 letters
_LOOK_EVERY_SECONDS, _LOOKS = 1.0, 120


@contextlib.contextmanager
def reported_death() -> Iterator[None]:
    """Print a line to standard error if this process ends inside the body."""
    with _watchdog("report") as watchdog:
        try:
            yield
        finally:
            watchdog.kill()


@contextlib.contextmanager
def ray_agents_ended() -> Iterator[None]:
    """End Ray's agents (children of the raylet) if this process is killed in the body (on Linux).

    Ray's other processes end with the driver. The agents try for a minute to report its end to a server that has ended
    as well; no setting of Ray changes this.
    """
    if sys.platform != "linux":
        yield
        return
    with _watchdog("end-ray-agents", str(os.getpid())) as watchdog:
        try:
            yield
        finally:
            watchdog.kill()


def run_group(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and return its exit status; its standard output is dropped.

    A server starts processes, which start others. None of them is left, even after an interrupt (KeyboardInterrupt) or
    if this process is killed: they are a process group, which the watchdog leads.
    """
    with _watchdog("lead", *command, env=dict(environment)) as group:
        assert group.stdin is not None
        try:
            return group.wait()
        finally:
            group.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                group.wait(2 * _ENDING_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # the server may have ended on its own
                os.killpg(group.pid, signal.SIGKILL)


def _watchdog(action: str, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start this file as a program, in a session of its own, which Ctrl-C in a terminal does not end."""
    command = [sys.executable, "-I", __file__, action, *words]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, **options
    )


def _wait() -> None:
    """Wait until the pipe closes."""
    while os.read(0, 1024):
        pass


def _report() -> None:
    _wait()
    print(_LINE, file=sys.stderr)


def _lead(*command: str) -> int:
    """Lead the group: run the command, and end all processes when the pipe closes."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end() -> None:
        _wait()
        os.killpg(0, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_ENDING_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    return server.wait()


def _end_ray_agents(driver: str) -> None:
    """Find the agents while the driver lives, by number and start time, so that no other process is ever killed."""
    import psutil

    agents: list[psutil.Process] = []
    for look in range(_LOOKS + 1):
        complete = len(agents) == len(_AGENTS) or look == _LOOKS
        if select.select([0], [], [], None if complete else _LOOK_EVERY_SECONDS)[0]:
            break
        with contextlib.suppress(psutil.Error):  # one ended meanwhile
            raylets = [each for each in psutil.Process(int(driver)).children() if each.name() == _RAYLET]
            agents = [each for raylet in raylets for each in raylet.children() if each.name().startswith(_AGENTS)]
    for agent in agents:
        with contextlib.suppress(psutil.Error):  # psutil checks the start time
            agent.kill()


if __name__ == "__main__":
    # Sent to all processes of a job. Handlers, not SIG_IGN, which a command would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    actions: Mapping[str, Callable[..., int | None]]
    actions = {"report": _report, "lead": _lead, "end-ray-agents": _end_ray_agents}
    sys.exit(actions[sys.argv[1]](*sys.argv[2:]))
