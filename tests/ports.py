"""Ports for the servers of tests."""

import random
import socket

# Below those that the system gives to other processes, and above those of Ray's workers: what was free stays so.
_PORTS = range(20_000, 32_000)
_random = random.SystemRandom()  # runs seed Python's own generator, and several processes would draw the same ports
_given: set[int] = set()


def free_port() -> int:
    """A port of loopback where nobody listens, and that this process has not been given."""
    while True:
        port = _random.choice(_PORTS)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port
