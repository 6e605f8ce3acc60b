"""A server in a process group of its own, all of which ends when whoever started it ends, however that may be.

A server starts processes, and these start others: ending the first leaves the rest. So a process stands between, this
file as a program, which leads their group and reads from a pipe. When its starter closes the pipe, or is killed and the
system closes it, it ends the group.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

# How long processes that are asked to end may take, before they are killed.
_ENDING_SECONDS = 5.0


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and give its exit status; what it printed to standard output is thrown away.

    Nothing of what it started is left, also when this is interrupted (KeyboardInterrupt) or this process killed.
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
        with contextlib.suppress(ProcessLookupError):  # what an end of the server by itself has left
            os.killpg(group.pid, signal.SIGKILL)
        group.wait()


def _lead(command: Sequence[str]) -> int:
    """Be the leader of the group: run the command, and end all of it when standard input ends."""
    # A handler, and no SIG_IGN, which the command would inherit.
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
