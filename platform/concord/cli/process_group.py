"""Runs a server in a process group of its own, which ends when its starter ends for any reason.

A server starts processes, which start others: ending the first leaves the rest. So this file runs as a program between
them: it leads the group and reads from a pipe. When the starter closes the pipe, or is killed, it ends the group.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

# How long terminated processes may take to end before they are killed.
_ENDING_SECONDS = 5.0


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and return its exit status; its standard output is dropped.

    None of its processes is left, even after an interrupt (KeyboardInterrupt) or if this process is killed.
    """
    group = subprocess.Popen(
        [sys.executable, "-P", __file__, *command],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert group.stdin is not None
    try:
        return group.wait()
    finally:
        group.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            group.wait(2 * _ENDING_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # the server may have ended on its own
            os.killpg(group.pid, signal.SIGKILL)
        group.wait()


def _lead(command: Sequence[str]) -> int:
    """Lead the group: run the command, and end all processes when standard input ends."""
    # A handler, not SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = subprocess.Popen(list(command), stdin=subprocess.DEVNULL)

    def end() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(0, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_ENDING_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    sys.exit(_lead(sys.argv[1:]))
