"""Ports for the servers of tests."""

import random
import socket

# Below those that the system gives to other processes, and above those of Ray's workers: what was free stays so.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port of loopback where nobody listens."""
    while True:
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", random.choice(_PORTS)))
            except OSError:
                continue
            port: int = free.getsockname()[1]
            return port
