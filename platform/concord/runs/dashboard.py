"""The dashboard of a Ray on this machine: where it is, without asking a stranger, and what it wants to know."""

import os
import re
import urllib.error
import urllib.request
from pathlib import Path

_ANSWER_SECONDS = 2.0
_TOKEN = Path("~/.ray/auth_token")


def running_dashboard() -> str | None:
    """The address of the dashboard of a Ray that this user runs on this machine, if there is one.

    It is looked for among this user's own processes, and not by asking who listens where Ray usually does: that may be
    anybody, and whoever asks there with the user's token has given it away.
    """
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid():
                continue
            words = process.cmdline()
            if not any(word.endswith("ray/dashboard/dashboard.py") for word in words):
                continue
            begin = int(_option(words, "port") or 0)
            last = begin + int(_option(words, "port-retries") or 0)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and begin <= connection.laddr.port <= last:
                    found.append((connection.laddr.ip, connection.laddr.port))
        except (psutil.Error, OSError):  # it has ended meanwhile, or is another's
            continue
    if not found:
        return None
    host, port = min(found, key=lambda place: (not place[0].startswith("127."), place[1]))
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"


def described(address: str) -> str:
    """The address, with where the token is that is asked for there; never the token itself."""
    try:
        with urllib.request.urlopen(f"{address}/api/version", timeout=_ANSWER_SECONDS):
            return address
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return f"{address} (it asks for the token in {_token_place()})"
    except OSError:
        pass
    return address


def _token_place() -> str:
    """Where Ray finds its token, in the order in which it looks."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or str(_TOKEN)


def _option(words: list[str], name: str) -> str | None:
    return next((found[1] for word in words if (found := re.fullmatch(rf"--{name}=(.*)", word))), None)
