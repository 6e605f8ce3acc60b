"""Web servers of a few lines."""

import contextlib
import ssl
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Quiet(SimpleHTTPRequestHandler):
    """Serves the files of a folder, and logs nothing."""

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def serving(
    handler: Callable[..., Quiet] = Quiet, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Answer requests at a port, by default a free one of loopback, while the body runs."""
    with ThreadingHTTPServer((host, port), handler) as server:
        server.socket = server.socket if tls is None else tls.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
