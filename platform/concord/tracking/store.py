"""An MLflow store of runs: opened, checked, and used by short methods.

No setup is needed. Without an address, runs go to an SQLite file in the output folder and their files to a folder
beside it; with one, to an MLflow server or a database. `Store.open` checks within seconds whether the store answers,
before any work is done.
"""

import json
import math
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from concord.errors import InputError, UnreachableError
from concord.metric_name import metric_name
from concord.options import as_text
from concord.process_environment import environment_variables
from concord.redaction import redact, without_secrets
from concord.storage import display_path, is_remote, one_at_a_time, resolve
from concord.tracking.client import (
    LOGIN_CODES,
    connect,
    failures,
    import_mlflow,
    is_final,
    one_line,
    pages,
    post,
    unless,
)
from concord.tracking.database import (
    CONNECT_SECONDS,
    check_database,
    create_tables,
    follow_move,
    sqlite_file,
    sqlite_uri,
)

_DATABASES = ("postgresql", "mysql", "mssql")
_RIGHT = "give http(s)://HOST:PORT of an MLflow server, sqlite:///FILE or postgresql://…, or leave it out"
# For a server to answer once connected: a new server is slow.
ANSWER_SECONDS = 15.0
_LONGEST_PARAMETER = 6000  # characters, MLflow's limit


# The default order of runs, in MLflow's syntax.
NEWEST = "attributes.start_time DESC"
PARENT = "mlflow.parentRunId"  # the tag by which MLflow shows a run below its group
NOTE = "mlflow.note.content"  # the tag that MLflow shows as a run's description
OWNER = "mlflow.user"  # the tag that MLflow shows as a run's user
KEY = "concord.key"  # the tag by which a run or a model is found whose creation was not answered
# MLflow's client repeats a request that fails, also one that was carried out.
_ONCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
_creating = threading.Lock()  # of these variables, which all threads have
_PAUSES = (0.0, 1.0, 4.0)  # seconds between requests to create something

Made = TypeVar("Made")

Status = Literal["FINISHED", "FAILED", "KILLED"]

# The kind of experiment: training, not traces of agents.
_KIND, _TRAINING = "mlflow.experimentKind", "custom_model_development"


@dataclass(frozen=True)
class TrackedRun:
    """One tracked run, at the time of the request.

    `metrics` has the latest values; `started` is in UTC. `experiment` is the job's name, for runs of groups with the
    kind of group. `group` is the id of the group's run, for a run of a group. `owner` is the user, if known.
    """

    run_id: str
    name: str
    status: str
    parameters: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    started: datetime
    experiment: str
    group: str | None = None
    owner: str | None = None


@dataclass(frozen=True)
class Store:
    """An open MLflow store. Made by `Store.open`.

    `uri` is absolute and complete, perhaps with a password, so that any worker can use it; it is never shown.
    `artifacts` is the folder for files, or None if a server decides it.

    Every method raises RunFailedError, with one line, when the store refuses or no longer answers.
    """

    uri: str = field(repr=False)
    artifacts: Path | None

    @classmethod
    def open(cls, output: Path, tracking_uri: str | None = None) -> "Store":
        """Open the store at `tracking_uri`, else at MLFLOW_TRACKING_URI, else ``mlflow.db`` in `output`.

        Missing tables and folders are created. Raises InputError with one line: the option, the value without its
        password, what is wrong, and what to do; an UnreachableError if no server or database answers.
        """
        output = resolve(output)
        given = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if is_remote(output) and (not given or given.split("+")[0].split(":")[0] in _DATABASES):
            raise InputError(
                f"--output {display_path(output)}: MLflow cannot keep its store there; give --tracking-uri (or "
                "MLFLOW_TRACKING_URI), http(s)://HOST:PORT of an MLflow server"
            )
        if given:
            option = f"--tracking-uri{'' if tracking_uri else ' (from MLFLOW_TRACKING_URI)'} {redact(given)}"
            right = _RIGHT
        else:
            option, right = f"--output {output}", "give a folder that can be written"
        try:
            return _open(given or sqlite_uri(output / "mlflow.db"), output)
        except InputError:
            raise
        except Exception as error:  # any error of network, proxy or driver makes the store unusable
            kind = UnreachableError if isinstance(error, ConnectionError) else InputError
            raise kind(f"{option}: {one_line(error)}; {right}") from None

    @classmethod
    def existing(cls, output: Path, tracking_uri: str | None = None) -> "Store":
        """Open a store, see :meth:`open`; a folder without one is refused (InputError)."""
        local = tracking_uri is None and "MLFLOW_TRACKING_URI" not in os.environ
        if local and not (output / "mlflow.db").exists():
            raise InputError(f"--output {display_path(output)}: has no MLflow store; a run of concord train makes one")
        return cls.open(output, tracking_uri)

    @cached_property
    def client(self) -> Any:
        """MLflow's own client of this store, for operations without a method here."""
        return connect(self.uri)

    def require_answer(self) -> None:
        """Ask a server whether it answers (TrackingError if not)."""
        if self.uri.startswith(("http://", "https://")):
            with failures(self.uri, "be reached"):
                _ask_server(self.uri)

    def create(self, make: Callable[[], Made], find: Callable[[], Made | None], unsure: bool = False) -> Made:
        """Create something once: a request that a server answers by an error may have been carried out.

        So it is searched by `find` before it is asked for again; with `unsure` before it is asked for.
        """
        pauses = iter(_PAUSES if self.uri.startswith(("http://", "https://")) else ())
        if unsure and (found := find()) is not None:
            return found
        while True:
            try:
                with _creating, environment_variables(_ONCE):
                    return make()
            except Exception as error:
                if is_final(error):
                    raise
                if (found := find()) is not None:
                    return found
                if (pause := next(pauses, None)) is None:
                    raise
            time.sleep(pause)

    def start_run(
        self,
        experiment: str,
        name: str,
        parameters: Mapping[str, object],
        tags: Mapping[str, str],
        began: int | None = None,
        key: str | None = None,
        unsure: bool = False,
    ) -> str:
        """Create a running run and return its id; create the experiment if it is missing.

        ``began`` is the time of its beginning, in milliseconds since 1970; None is now. ``key`` is of this run alone;
        with ``unsure`` an earlier request may have created it.

        A parameter's value is stored as text of at most 6000 characters. Values named like secrets (``token``,
        ``api_key``) and passwords inside URIs are stored as ``***``.
        """
        with failures(self.uri, f"start run {name!r}"):
            key = key or uuid.uuid4().hex

            def start() -> str:
                place, about = self._experiment(experiment), (began, {**_clean(tags), KEY: key}, name)

                def find() -> str | None:
                    found = self.client.search_runs([place], f"tags.`{KEY}` = '{key}'", max_results=1)
                    return str(found[0].info.run_id) if found else None

                return self.create(lambda: str(self.client.create_run(place, *about).info.run_id), find, unsure)

            try:
                run_id = start()
            except Exception as error:
                if not is_final(error):
                    raise
                self._experiments.pop(experiment, None)  # it may have been deleted in the meantime
                run_id = start()
            try:
                if parameters:
                    self.log_parameters(run_id, parameters)
            except Exception:
                self.client.delete_run(run_id)  # a run without its parameters would be misleading
                raise
        return run_id

    def log_parameters(self, run_id: str, parameters: Mapping[str, object]) -> None:
        """Keep a run's parameters; those that it has already may be among them."""
        from mlflow.entities import Param

        values = [Param(key, value) for key, value in clean_parameters(parameters).items()]
        self.client.log_batch(run_id, params=values, synchronous=True)

    def recover_run(self, run_id: str) -> Literal["present", "restored", "lost"]:
        """Restore the run if it was deleted, with its experiment; return what was found."""
        with failures(self.uri, f"find run {run_id}"), unless("RESOURCE_DOES_NOT_EXIST"):
            entry = self.client.get_run(run_id)
            if entry.info.lifecycle_stage == "active":
                return "present"
            self._restore_experiment(self.client.get_experiment(entry.info.experiment_id))
            self.client.restore_run(run_id)
            return "restored"
        return "lost"

    def resume_run(self, run_id: str) -> None:
        """Set the run's status to running again."""
        with failures(self.uri, f"resume run {run_id}"):
            self.client.update_run(run_id, status="RUNNING")

    def finish_run(self, run_id: str, status: Status = "FINISHED") -> None:
        """End the run now, with `status` FINISHED, FAILED or KILLED."""
        with failures(self.uri, f"finish run {run_id}"):
            self.client.set_terminated(run_id, status)

    def end_silent_run(self, run: TrackedRun, tags: Mapping[str, str], at: int) -> None:
        """End a run whose process is gone: killed at this time, in milliseconds since 1970.

        Nothing if the run has ended or changed these tags since it was read.
        """
        run_id = run.run_id
        with failures(self.uri, f"finish run {run_id}"):
            now = self.client.get_run(run_id)
            if now.info.status != "RUNNING" or any(now.data.tags.get(name) != run.tags.get(name) for name in tags):
                return
            for name, value in tags.items():
                self.client.set_tag(run_id, name, value)
            self.client.set_terminated(run_id, "KILLED", at)

    def delete_run(self, run_id: str) -> None:
        """Delete the run; MLflow can restore it until ``mlflow gc``."""
        with failures(self.uri, f"delete run {run_id}"):
            self.client.delete_run(run_id)

    def delete_with_models(self, run_id: str) -> None:
        """Delete the run and its logged models; nothing if the store has lost it, or has deleted it before."""
        with failures(self.uri, f"delete run {run_id}"), unless("RESOURCE_DOES_NOT_EXIST"):
            run = self.client.get_run(run_id)
            if run.info.lifecycle_stage != "active":
                return
            for output in run.outputs.model_outputs if run.outputs is not None else ():
                with unless("RESOURCE_DOES_NOT_EXIST"):
                    self.client.delete_logged_model(output.model_id)
            self.client.delete_run(run_id)

    def log_files(self, run_id: str, path: Path, artifact_path: str | None = None) -> None:
        """Copy a file, or the content of a folder, to the run's artifacts, under the folder `artifact_path`."""
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        with failures(self.uri, f"keep the files of {path}"):
            log(run_id, str(path), artifact_path)

    def read_json(self, run_id: str, name: str) -> Any:
        """Read a JSON artifact; None if the run has no such file."""
        with failures(self.uri, f"read {name} of run {run_id}"), tempfile.TemporaryDirectory() as folder:
            below = name.rpartition("/")[0] or None
            if name not in {each.path for each in self.client.list_artifacts(run_id, below)}:
                return None
            return json.loads(Path(self.client.download_artifacts(run_id, name, folder)).read_text())

    def set_tag(self, run_id: str, tag: str, value: str) -> None:
        """Set a tag of the run."""
        with failures(self.uri, f"describe run {run_id}"):
            self.client.set_tag(run_id, tag, value)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Write `text` as the artifact `name` (``folder/file.py``) of the run."""
        with failures(self.uri, f"keep {name}"):
            self.client.log_text(run_id, text, name)

    def log_metrics(
        self,
        run_id: str,
        metrics: Mapping[str, float],
        step: int = 0,
        at: int | None = None,
        model_id: str | None = None,
    ) -> None:
        """Log `metrics` at `step` and wait for the store; a run's own events go through the mirror.

        `at` is in milliseconds since 1970; None is now. With `model_id` they are also the model's, but for NaN, which
        MLflow's databases store of a model as 0.
        """
        import_mlflow()
        from mlflow.entities import Metric

        at = time.time_ns() // 1_000_000 if at is None else at
        named = {metric_name(key): float(value) for key, value in metrics.items()}
        of_model = {key: None if math.isnan(value) else model_id for key, value in named.items()}
        values = [Metric(key, value, at, step, model_id=of_model[key]) for key, value in named.items()]
        with failures(self.uri, f"log metrics of run {run_id}"):
            self.client.log_batch(run_id, metrics=values, synchronous=True)

    def run(self, run_id: str) -> TrackedRun:
        """Return one run."""
        with failures(self.uri, f"read run {run_id}"):
            entry = self.client.get_run(run_id)
            return self._run(entry, self.client.get_experiment(entry.info.experiment_id).name)

    def _run(self, entry: Any, experiment: str) -> TrackedRun:
        return TrackedRun(
            run_id=entry.info.run_id,
            name=entry.info.run_name,
            status=entry.info.status,
            parameters=dict(entry.data.params),
            metrics={key: stored_value(value) for key, value in entry.data.metrics.items()},
            tags={key: value for key, value in entry.data.tags.items() if not key.startswith(("mlflow.", KEY))},
            started=datetime.fromtimestamp(entry.info.start_time / 1000, UTC),
            experiment=experiment,
            group=entry.data.tags.get(PARENT),
            owner=entry.data.tags.get(OWNER),
        )

    def search(self, condition: str, order: str = NEWEST, page: int = 1000) -> Iterator[TrackedRun]:
        """Yield the runs that fulfil a condition, on demand."""
        with failures(self.uri, "search runs"):
            listed = pages(lambda token: self.client.search_experiments(page_token=token))
            if names := {each.experiment_id: each.name for each in listed}:
                found = pages(lambda token: self.client.search_runs([*names], condition, 1, page, [order], token))
                yield from (self._run(entry, names[entry.info.experiment_id]) for entry in found)

    @cached_property
    def _experiments(self) -> dict[str, str]:
        return {}

    def _experiment(self, name: str) -> str:
        """Return the experiment's id; create it, or restore it if it was deleted."""
        if name not in self._experiments:
            self._experiments[name] = self._find_experiment(name)
        return self._experiments[name]

    def _find_experiment(self, name: str) -> str:
        location = self.artifacts.as_uri() if self.artifacts else None
        with unless("RESOURCE_ALREADY_EXISTS"):
            self.client.create_experiment(name, artifact_location=location, tags={_KIND: _TRAINING})
        entry = self.client.get_experiment_by_name(name)
        self._restore_experiment(entry)
        if _KIND not in entry.tags:  # made by another program, or by MLflow itself
            self.client.set_experiment_tag(entry.experiment_id, _KIND, _TRAINING)
        return str(entry.experiment_id)

    def _restore_experiment(self, entry: Any) -> None:
        if entry.lifecycle_stage == "deleted":
            self.client.restore_experiment(entry.experiment_id)


def _open(uri: str, output: Path) -> Store:
    scheme = urlsplit(uri).scheme.split("+")[0]
    if scheme in ("http", "https"):
        _check_server(uri)
        return Store(uri.rstrip("/"), None)
    if scheme == "sqlite":
        file = sqlite_file(uri)
        store, artifacts = sqlite_uri(file), file.parent / "artifacts"
    elif scheme in _DATABASES:
        check_database(uri)
        store, artifacts = uri, output / "artifacts"
    else:
        raise ValueError(f"the scheme {scheme!r} is unknown" if scheme else "not a URI")
    opened = Store(store, artifacts)
    with one_at_a_time(artifacts):
        if scheme == "sqlite":
            create_tables(opened.uri)
            follow_move(sqlite_file(uri), artifacts)
        opened.client.search_experiments(max_results=1)  # creates the tables of any other new database
    return opened


def _check_server(uri: str) -> None:
    parts = urlsplit(uri)
    host, _ = parts.hostname, parts.port  # an impossible port raises here
    if not host:
        raise ValueError("the URI has no host")
    try:
        _ask_server(uri)
    except Exception as error:
        kind: type[Exception] = ValueError if is_final(error) else ConnectionError
        reason = f"no MLflow server answers ({one_line(error)})"
        if getattr(error, "error_code", None) in LOGIN_CODES:
            reason = "the server refuses the login (MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN)"
        elif "read timeout" in str(error).lower():
            reason = f"it took the connection and did not answer within {ANSWER_SECONDS:g} s"
        raise kind(reason) from None


def _ask_server(uri: str) -> None:
    post(uri, "/api/2.0/mlflow/experiments/search", {"max_results": 1}, (CONNECT_SECONDS, ANSWER_SECONDS))


def clean_parameters(parameters: Mapping[str, object]) -> dict[str, str]:
    """Parameters in stored form: text of limited length, without secrets."""
    return {key: value[:_LONGEST_PARAMETER] for key, value in _clean(parameters).items()}


def _clean(values: Mapping[str, object]) -> dict[str, str]:
    return {key: redact(as_text(value)) for key, value in without_secrets(values).items()}


def stored_value(stored: float) -> float:
    """Restore infinity, for which MLflow's databases store the largest finite number."""
    return math.copysign(math.inf, stored) if abs(stored) == sys.float_info.max else float(stored)
