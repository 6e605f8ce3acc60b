"""Commands ``models`` and ``ui``: the model registry, and MLflow's UI."""

import contextlib
import http.client
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import tyro

from concord.cli.output import require_consent, table
from concord.cli.parsing import parse
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, RunFailedError
from concord.exit_watchdog import run_group
from concord.logs import info, said_after
from concord.redaction import redact


@dataclass(frozen=True, kw_only=True)
class Models:
    """The model registry: list the versions, show one, promote one to champion, or delete one."""

    do: tyro.conf.Positional[Literal["list", "show", "promote", "delete"]] = "list"
    """Action."""
    name: tyro.conf.Positional[str | None] = None
    """Name of the registered model, for show, promote and delete."""
    version: tyro.conf.Positional[str | None] = None
    """Number of the version, or (for show) an alias; show takes the champion by default."""
    or_better: bool = False
    """With promote: a better version, present or later, replaces the promoted one."""
    yes: bool = False
    """With delete: do not ask. Needed where no terminal can be asked."""
    output: Path = DEFAULT_OUTPUT
    """Folder of MLflow's store, without a tracking URI."""
    tracking_uri: str | None = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI)."""


def models(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """The model registry."""
    options = parse(Models, words, "concord models")
    from concord.tracking import Store, models, promote, show
    from concord.tracking.registry import delete_version, require_deletable

    if options.do != "list" and options.name is None:
        raise InputError(f"models {options.do}: no model is named; give a name; concord models lists them")
    if options.do in ("promote", "delete") and not (options.version or "").isdecimal():
        given = "no version is given" if options.version is None else f"version {options.version}: is not a number"
        raise InputError(f"models {options.do} {options.name}: {given}; give the version's number")
    if options.or_better and options.do != "promote":
        raise InputError(f"--or-better: applies to models promote, not {options.do}; leave it out")
    store = Store.existing(options.output, options.tracking_uri)
    if options.yes and options.do != "delete":
        raise InputError(f"--yes: applies to models delete, not {options.do}; leave it out")
    if options.do == "list":
        versions = models(store)
    elif options.do == "show":
        versions = [show(store, str(options.name), options.version or "champion")]
    elif options.do == "delete":
        versions = [show(store, str(options.name), str(options.version))]
        require_deletable(versions[0])
        require_consent([f"model {versions[0].uri}"], options.yes)
        delete_version(store, versions[0])
    else:
        versions = [promote(store, str(options.name), int(str(options.version)), options.or_better)]
    if not as_json and options.do == "show":
        version = versions[0]
        print(f"{version.uri}  {_aliases(version)}")
        described = {
            "trained by": version.trained_by,
            "judged by": _criterion(version),
            "scored on": version.scored_on,
            "takes": version.inputs,
            "gives": version.outputs,
            "data": version.data,
            "registered": f"{version.created:%Y-%m-%d %H:%M} UTC",
            "run": " ".join(filter(None, (version.run, version.run_id))),
            "owner": version.owner,
        }
        for name, text in described.items():
            if text:
                print(f"{name:<11} {text}")
        table(["metric", "value"], [[name, f"{value:.4f}"] for name, value in sorted(version.metrics.items())])
    elif not as_json:
        rows = [
            [
                *(v.name, str(v.version), _aliases(v), _criterion(v)),
                *(v.trained_by, f"{v.inputs} → {v.outputs}" if v.inputs else ""),
                *(v.run or "", v.owner or "", f"{v.created:%F}"),
            ]
            for v in versions
        ]
        table(["model", "version", "aliases", "judged by", "trained by", "signature", "run", "owner", "date"], rows)
    return {"models": [_as_json(version) for version in versions]}


def _as_json(version: Any) -> dict[str, Any]:
    shown = ("name", "version", "promoted", "metrics", "criterion", "scored_on", "aggregator", "objective", "data")
    written = {"aliases": list(version.aliases), "created": version.created.isoformat(timespec="seconds")}
    return {name: getattr(version, name) for name in (*shown, "run", "run_id", "owner", "inputs", "outputs")} | written


def _aliases(version: Any) -> str:
    return " ".join(version.aliases) + (" (promoted)" if version.promoted else "")


def _criterion(version: Any) -> str:
    value = version.metrics.get(version.criterion)
    return "" if value is None else f"{version.criterion} {value:.4f}"


# MLflow's experiments, in its mode for training models.
_EXPERIMENTS = "#/experiments?workflowType=machine_learning"
_USUAL_SECONDS = 5.0  # until MLflow's server answers
_ANSWER_SECONDS, _ASK_EVERY_SECONDS = 5.0, 0.2


@dataclass(frozen=True, kw_only=True)
class Ui:
    """The MLflow UI on this machine's store; Ctrl-C stops it."""

    output: Path = DEFAULT_OUTPUT
    """Folder of MLflow's store."""
    host: str = "127.0.0.1"
    """Address to listen on. Anyone who reaches it can read and change the store."""
    port: int = 5000
    """Port to listen on."""
    tracking_uri: str | None = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI); a server has its own UI, whose address is shown."""


def ui(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:  # noqa: ARG001
    """The MLflow UI, with its address once it answers, and the addresses of Ray dashboards."""
    options = parse(Ui, words, "concord ui")
    if not 0 < options.port < 2**16:
        raise InputError(f"--port {options.port}: must lie between 1 and {2**16 - 1}")
    if not (options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")).startswith("http"):
        _require_free(options.host, options.port)  # before the store is opened, which takes seconds
    from concord.tracking import Store

    store = Store.existing(options.output, options.tracking_uri)
    from concord.execution.submission.profile import described, running_dashboards
    from concord.tracking.registry import CHAMPION, champions, serve_command

    dashboards = [each for each in running_dashboards(os.environ.get("RAY_ADDRESS", "")) if _answers(each)]
    shown_dashboards = ", ".join(map(described, dashboards)) or "no Ray of yours answers here; a run shows the address"
    info(f"Ray dashboard: {shown_dashboards}")
    own = not store.uri.startswith("http")
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{options.port}" if own else redact(store.uri)
    with contextlib.suppress(RunFailedError):  # a server that shows no models
        for name in champions(store)[:1]:
            info(f"to serve the champion of {name}:")
            for line in serve_command(store.uri, f"models:/{name}@{CHAMPION}").splitlines():
                info(line)
    result = {"mlflow": address, "ray": next(iter(dashboards), None)}
    if not own:
        _show_address(address)
        return result
    server = [sys.executable, "-m", "mlflow", "ui", "--host", options.host, "--port", str(options.port)]
    server += ["--workers", "1"]  # a worker takes about 300 MiB, and one suffices
    # The store's address may hold a password, and other users can read a command's words, so pass it by environment.
    environment = {**os.environ, "MLFLOW_BACKEND_STORE_URI": store.uri}
    # MLflow's job queues are for language models.
    environment.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    over = threading.Event()
    threading.Thread(target=_show_once_it_answers, args=(address, over), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            status = run_group(server, environment)
        finally:
            over.set()
        if status != 0:
            raise RunFailedError(f"the MLflow UI stopped with status {status}; is port {options.port} taken?")
    return result


def _show_address(address: str) -> None:
    info(f"MLflow UI: {address}/{_EXPERIMENTS}")
    info("hint: an address without its end opens MLflow's pages for language models; choose Model training, top left")


def _show_once_it_answers(address: str, over: threading.Event) -> None:
    """Show the address of a server that is starting, unless the server is over before it answers."""
    with said_after(_USUAL_SECONDS, f"starting the MLflow UI on port {urlsplit(address).port}; it does not answer yet"):
        while not _answers(address):
            if over.wait(_ASK_EVERY_SECONDS):
                return
    _show_address(address)


def _answers(address: str) -> bool:
    """Whether a server of this machine answers there, whatever it says; no proxy is asked."""
    place = urlsplit(address)
    with contextlib.closing(
        http.client.HTTPConnection(str(place.hostname), place.port, timeout=_ANSWER_SECONDS)
    ) as connection:
        try:
            connection.request("GET", "/")
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return False
    return True


def _require_free(host: str, port: int) -> None:
    """Refuse an address where no server can listen (InputError): MLflow's would end without a word."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            listener.bind((host, port))
    except OSError as error:
        option = f"--host {host}" if isinstance(error, socket.gaierror) else f"--port {port}"
        raise InputError(f"{option}: no server can listen at {host}:{port} ({error.strerror}); give another") from error
