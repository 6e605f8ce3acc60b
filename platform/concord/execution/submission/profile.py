"""The cluster and the credentials of a submission: from options, the environment or a profile file, in this order.

Without an address the cluster is a Ray that this user runs on this machine.
"""

import os
import re
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.redaction import redact

ANSWER_SECONDS = 2.0
RAY_TOKEN = Path("~/.ray/auth_token")
"""The file in which Ray keeps its token."""
PROFILES = Path("~/.config/concord/profiles.toml")
# The keys, and what each must be.
_KEYS = {
    **dict.fromkeys(("address", "token-file", "tracking-uri", "output", "data", "verify", "runtime-env"), "a text"),
    "env": "a table of texts by name",
    "pip": "a list of texts",
}


@dataclass(frozen=True)
class Profile:
    """A cluster, and the settings of a submission.

    Attributes:
        address: address of the Ray dashboard, with its scheme; None means the Ray on this machine.
        token: the cluster's token; None if none was found.
        token_source: the origin of the token, in words.
        tracking_uri: URI of the MLflow server, from the cluster's view; None leaves it to the cluster.
        output: folder for runs on the cluster's nodes; None leaves it to the cluster.
        data: folder of datasets on the nodes.
        verify: whether the dashboard's certificate is checked, or the file or folder of the authorities to trust.
        env, pip, runtime_env: variables, packages and the file of Ray's runtime environment, for the user's code.
    """

    address: str | None
    token: str | None = field(repr=False)
    token_source: str
    tracking_uri: str | None
    output: str | None
    data: str | None
    verify: bool | str = True
    env: Mapping[str, str] = field(default_factory=dict)
    pip: Sequence[str] = ()
    runtime_env: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request, with the token if there is one."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    @staticmethod
    def find(
        name: str | None = None,
        address: str | None = None,
        token_file: Path | None = None,
        tracking_uri: str | None = None,
        verify: str | None = None,
    ) -> "Profile":
        """Combine options, environment and profile, in this order of precedence.

        The environment variables are Ray's and MLflow's: RAY_API_SERVER_ADDRESS (or RAY_ADDRESS, if it is an http
        address), RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, MLFLOW_TRACKING_URI. ``name`` is a profile in
        ``~/.config/concord/profiles.toml`` (or the file CONCORD_PROFILES names); None takes CONCORD_PROFILE, or
        ``default`` if there is one and no other address is given.
        """
        name = name or os.environ.get("CONCORD_PROFILE")
        profile = _profile(name)
        ray_address = os.environ.get("RAY_ADDRESS", "")
        elsewhere = (
            address
            or os.environ.get("RAY_API_SERVER_ADDRESS")
            or (ray_address if ray_address.startswith(("http://", "https://")) else None)
        )
        if name is None and elsewhere is not None:
            profile = {}  # a profile's settings, above all credentials, are only for its own cluster
        address = elsewhere or profile.get("address")
        token, source = _token(token_file, profile.get("token-file"))
        tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or profile.get("tracking-uri")
        return Profile(
            address=None if address is None else _http(address),
            token=token,
            token_source=source,
            tracking_uri=tracking_uri,
            output=profile.get("output"),
            data=profile.get("data"),
            verify=_verified(verify or profile.get("verify")),
            env=profile.get("env", {}),
            pip=profile.get("pip", ()),
            runtime_env=profile.get("runtime-env"),
        )


def _profile(name: str | None) -> dict[str, Any]:
    path = Path(os.environ.get("CONCORD_PROFILES", PROFILES)).expanduser()
    if not path.exists():
        if name is None:
            return {}
        raise InputError(f"--profile {name}: there is no file {path}")
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as TOML ({error})") from error
    if name is None and "default" not in profiles:
        return {}
    profile = profiles.get(name or "default")
    if not isinstance(profile, dict):
        raise InputError(f"--profile {name}: {path} has no such profile; it has {', '.join(profiles) or 'none'}")
    for key, value in profile.items():
        if key not in _KEYS:
            raise InputError(f"{path}, profile {name or 'default'}: {key} is unknown; give one of {', '.join(_KEYS)}")
        texts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        kind = _KEYS["env" if isinstance(value, dict) else "pip" if isinstance(value, list) else "address"]
        if kind != _KEYS[key] or not all(isinstance(each, str) for each in texts):
            raise InputError(f"{path}, profile {name or 'default'}: {key} {value}: must be {_KEYS[key]}")
    return profile


def _verified(given: str | None) -> bool | str:
    """How the dashboard's certificate is checked: by the authorities of this machine, by those in a file, or not."""
    if given in (None, "yes", "no"):
        return given != "no"
    path = Path(str(given)).expanduser()
    if not path.exists():
        raise InputError(f"--verify {given}: there is no such file; give the certificates of an authority, or no")
    return str(path)


def _token(given: Path | None, in_profile: str | None) -> tuple[str | None, str]:
    """The token and its origin."""
    if given is None and os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip(), "RAY_AUTH_TOKEN"
    own_file = RAY_TOKEN.expanduser()
    sources = {
        "--token-file": given,
        "RAY_AUTH_TOKEN_PATH": os.environ.get("RAY_AUTH_TOKEN_PATH"),
        "token-file of the profile": in_profile,
        "token file": own_file if own_file.exists() else None,
    }
    for source, path in sources.items():
        if path:
            return _read(Path(path), source), f"{source} {path}"
    return None, ""


def _read(path: Path, source: str) -> str:
    try:
        token = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source} {path}: cannot be read ({error.__class__.__name__})") from error
    if not token or len(token.split()) != 1:
        raise InputError(f"{source} {path}: must hold a token and nothing else")
    return token


def _http(address: str) -> str:
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise InputError(f"--address {redact(address)}: must be the dashboard's, http://HOST:8265 or https://…")
    if redact(address) != address:
        raise InputError(f"--address {redact(address)}: must hold no password")
    return address.rstrip("/")


def running_dashboard() -> str | None:
    """The address of the dashboard of a Ray that this user runs on this machine, if there is one."""
    return next(iter(running_dashboards()), None)


def running_dashboards(cluster: str = "") -> list[str]:
    """The addresses of the dashboards of this user's Rays on this machine; of one cluster if this is its HOST:PORT.

    They are found among this user's own processes, not by a request to Ray's usual port: another user may listen there,
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
            if ":" in cluster and "://" not in cluster and _option(words, "gcs-address") != cluster:
                continue
            begin = int(_option(words, "port") or 0)
            last = begin + int(_option(words, "port-retries") or 0)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and begin <= connection.laddr.port <= last:
                    found.append((connection.laddr.ip, connection.laddr.port))
        except (psutil.Error, OSError):  # the process ended meanwhile, or belongs to another user
            continue
    found.sort(key=lambda place: (not place[0].startswith("127."), place[1]))
    return [f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}" for host, port in found]


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
