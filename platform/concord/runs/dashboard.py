"""Finds the dashboard of this user's Ray on this machine, and where its token is."""

import os
import re
import urllib.error
import urllib.request
from pathlib import Path

ANSWER_SECONDS = 2.0
RAY_TOKEN = Path("~/.ray/auth_token")
"""The file in which Ray keeps its token."""


def running_dashboard() -> str | None:
    """The address of the dashboard of a Ray that this user runs on this machine, if there is one.

    It is found among this user's own processes, not by a request to Ray's usual port: another user may listen there,
    and a request would give away the token.
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
        except (psutil.Error, OSError):  # the process ended meanwhile, or belongs to another user
            continue
    if not found:
        return None
    host, port = min(found, key=lambda place: (not place[0].startswith("127."), place[1]))
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"


def described(address: str) -> str:
    """The address, with the place of the token if one is needed; never the token itself."""
    try:
        with urllib.request.urlopen(f"{address}/api/version", timeout=ANSWER_SECONDS):
            return address
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return f"{address} (enter the token in {_token_place()})"
    except OSError:
        pass
    return address


def _token_place() -> str:
    """The place of Ray's token, in Ray's order of precedence."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or str(RAY_TOKEN)


def _option(words: list[str], name: str) -> str | None:
    return next((found[1] for word in words if (found := re.fullmatch(rf"--{name}=(.*)", word))), None)
