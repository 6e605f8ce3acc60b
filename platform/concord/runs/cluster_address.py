"""Checks within seconds whether a Ray cluster answers at an address; Ray itself tries for many minutes."""

import os
import socket
from typing import NoReturn
from urllib.parse import urlsplit

from concord.errors import InputError, first_line
from concord.training.options import RunConfig

LOCAL = "local"
_CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 10.0
_RIGHT = "give HOST:PORT of a Ray head (its port is 6379 by default), auto, or local"
# The first bytes of an HTTP/2 client (Ray speaks gRPC), with an empty frame of settings; a server answers with its own
# frame of settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4  # the fourth byte of such a frame


def cluster_address(config: RunConfig) -> tuple[str, str]:
    """The address of a run's cluster and the option that gives it; ``local`` starts Ray here."""
    if config.run.address:
        return config.run.address, "--address"
    if address := os.environ.get("RAY_ADDRESS"):
        return address, "--address (from RAY_ADDRESS)"
    return LOCAL, "--address"


def check_cluster(config: RunConfig) -> None:
    """Refuse an address at which no Ray cluster answers (InputError)."""
    address, option = cluster_address(config)
    if address == LOCAL:
        return
    import ray

    if not ray.is_initialized():  # otherwise that session is used
        require_cluster(address, option)


def require_cluster(address: str, option: str) -> None:
    """Refuse the address of an option if no Ray cluster answers there (InputError)."""

    def refuse(why: str, error: Exception | None = None) -> NoReturn:
        raise InputError(f"{option} {address}: {why}; {_RIGHT}") from error

    try:
        host, port = _resolved(address)
    except (ConnectionError, ValueError) as error:
        refuse(first_line(error), error)
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # with TLS Ray itself checks the connection
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(_GREETING)
            answer = connection.recv(9)
    except TimeoutError as error:
        refuse("no Ray cluster answers there (no answer in time)", error)
    except OSError as error:
        refuse(f"no Ray cluster answers there ({error.strerror or first_line(error)})", error)
    if len(answer) < 4 or answer[3] != _SETTINGS:
        refuse("another service answers there, not a Ray cluster")


def _resolved(address: str) -> tuple[str, int]:
    """Host and port to which Ray would connect (ValueError, ConnectionError)."""
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme != "ray":
        raise ValueError(f"a Ray cluster has no {scheme} address")
    if not separator and address != "auto" and not _host_and_port(address)[1]:
        raise ValueError("the address has no port")
    if not separator:
        from ray._private import services  # Ray has no public function for `auto` and its own address of 127.0.0.1

        rest = services.canonicalize_bootstrap_address(address) or address
    host, port = _host_and_port(rest)
    if port is None:
        if not separator:
            raise ConnectionError("none was found on this machine")
        port = 10001  # of Ray's clients
    return host, port


def _host_and_port(address: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port
