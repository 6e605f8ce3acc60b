"""Where runs are kept: one MLflow store, found, checked and spoken to with short names.

Nothing has to be set up first. With no address given, runs go to an SQLite file in the output folder and their
files to a folder beside it; with one, to an MLflow server or a database. `Store.open` finds out whether the store
answers, before any work is done that would have nowhere to go: within seconds, but for a server that takes the
connection and is slow to answer, as one is that has just started.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

from concord.errors import InputError
from concord.metric_name import metric_name
from concord.redaction import redact, without_secrets
from concord.storage import display_path, is_remote, resolve
from concord.tracking.client import connect, error_code, failures, import_mlflow, one_line, pages, post

_logger = logging.getLogger("concord.tracking")

_DATABASES = ("postgresql", "mysql", "mssql")
_RIGHT = "give http(s)://HOST:PORT of an MLflow server, sqlite:///FILE or postgresql://…, or leave it out"
_CONNECT_SECONDS = 3.0
# To answer, once it took the connection. A server that has just started, or that many ask at once, takes 15 s and more;
# the user is told after the first time. Where nothing listens is refused at once, or after the seconds above.
_ANSWER_SECONDS, _LATE_ANSWER_SECONDS = 5.0, 60.0
_LONGEST_PARAMETER = 6000  # characters, MLflow's limit
_LONGEST_DATASET_NAME = 500
_CONTEXT = "mlflow.data.context"

# Begins the name of a tag that marks points of a run as of a branch that was left: those logged from the time in its
# name on, and before the time that is its value (ms since 1970). The run went on from a checkpoint before them.
LEFT = "concord.left."

# The order of runs, in MLflow's language, if none is asked for.
NEWEST = "attributes.start_time DESC"

Status = Literal["FINISHED", "FAILED", "KILLED"]

# What kind of experiment it is: trainings, not the traces of agents.
_KIND, _TRAINING = "mlflow.experimentKind", "custom_model_development"


@dataclass(frozen=True)
class Run:
    """One tracked run, as it was when asked for.

    `metrics` has the latest value of each; `started` is in UTC.
    """

    run_id: str
    name: str
    status: str
    parameters: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    started: datetime


@dataclass(frozen=True)
class TrackedData:
    """Data of a run, as MLflow records them.

    Attributes:
        name: of the dataset.
        digest: at most 36 characters; other data have another one.
        purpose: what the run used them for.
        schema: of its tensors, in MLflow's form, if there is one.
        profile: sizes.
    """

    name: str
    digest: str
    purpose: str
    schema: Mapping[str, object] | None
    profile: Mapping[str, int]


@dataclass(frozen=True, repr=False)
class Store:
    """An MLflow store that answered when it was opened. Made by `Store.open`.

    `uri` is absolute and complete (with a password, if it has one), so that a worker elsewhere can use it; it is
    never shown. `artifacts` is the folder for files, or None where a server decides that.

    Every method raises RunFailedError, with one line, when the store refuses or no longer answers.
    """

    uri: str
    artifacts: Path | None

    def __repr__(self) -> str:
        return f"Store({redact(self.uri)!r})"

    @classmethod
    def open(cls, output: Path, tracking_uri: str | None = None) -> "Store":
        """Open the store at `tracking_uri`, else at MLFLOW_TRACKING_URI, else ``mlflow.db`` in `output`.

        Tables and folders that are missing are created. Raises InputError with one line that names the option, the
        value without its password, and what would be right.
        """
        output = resolve(output)
        elsewhere = is_remote(output)
        option, given = "--tracking-uri", tracking_uri
        if not given and (given := os.environ.get("MLFLOW_TRACKING_URI")):
            option = "--tracking-uri (from MLFLOW_TRACKING_URI)"
        right = _RIGHT
        if elsewhere and (not given or given.split("+")[0].split(":")[0] in _DATABASES):
            raise InputError(
                f"--output {display_path(output)}: MLflow cannot keep its store there; give --tracking-uri (or "
                "MLFLOW_TRACKING_URI), http(s)://HOST:PORT of an MLflow server"
            )
        if not given:
            option, given = "--output", f"sqlite:///{output / 'mlflow.db'}"
            right = "give a folder that can be written"

        def refuse(reason: str) -> NoReturn:
            shown = output if option == "--output" else redact(given)
            raise InputError(f"{option} {shown}: {reason}; {right}")

        try:
            scheme = urlsplit(given).scheme.split("+")[0]
        except ValueError as error:
            refuse(one_line(error))
        path = given.split(":", 1)[-1]
        if scheme == "sqlite" and path != "//" and not path.startswith("///"):
            refuse("SQLite's path follows three slashes")
        if scheme in ("http", "https"):
            _check_server(given, refuse)
            return cls(given.rstrip("/"), None)
        if scheme == "sqlite":
            file = _check_sqlite(given, refuse)
            store = cls(f"{given.split(':')[0]}:///{file}", file.parent / "artifacts")
        elif scheme in _DATABASES:
            _check_database(given, scheme, refuse)
            store = cls(given, output / "artifacts")
        else:
            refuse(f"no store is known by the scheme {scheme!r}" if scheme else "not a URI")
        try:
            assert store.artifacts is not None
            store.artifacts.mkdir(parents=True, exist_ok=True)
            with _alone(store.artifacts):  # two that create tables at once spoil them
                store.client.search_experiments(max_results=1)  # creates the tables of a new database
        except Exception as error:  # whatever the driver raises, the store cannot be used
            refuse(one_line(error))
        return store

    @cached_property
    def client(self) -> Any:
        """MLflow's own client of this store, for what has no short name here."""
        return connect(self.uri)

    def start_run(self, experiment: str, name: str, parameters: Mapping[str, object], tags: Mapping[str, str]) -> str:
        """Create a running run and return its id; create the experiment if it is missing.

        A parameter's value is stored as text of at most 6000 characters. Values named like secrets (``token``,
        ``api_key``) and passwords inside URIs are stored as ``***``.
        """
        import_mlflow()
        from mlflow.entities import Param

        with failures(self.uri, f"start run {name!r}"):
            made = self.client.create_run(self._experiment(experiment), run_name=name, tags=_clean(tags))
            run_id = str(made.info.run_id)
            try:
                values = [Param(key, value) for key, value in clean_parameters(parameters).items()]
                self.client.log_batch(run_id, params=values, synchronous=True)
            except Exception:
                self.client.delete_run(run_id)  # a run without its parameters would only mislead
                raise
        return run_id

    def resume_run(self, run_id: str) -> None:
        """Set the run's status to running again."""
        with failures(self.uri, f"resume run {run_id}"):
            self.client.update_run(run_id, status="RUNNING")

    def finish_run(self, run_id: str, status: Status = "FINISHED") -> None:
        """End the run now, with `status` FINISHED, FAILED or KILLED. Raises ValueError for another."""
        if status not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status {status!r} is not FINISHED, FAILED or KILLED")
        with failures(self.uri, f"finish run {run_id}"):
            self.client.set_terminated(run_id, status)

    def delete_run(self, run_id: str) -> None:
        """Take the run out of every view; MLflow keeps it restorable until ``mlflow gc``."""
        with failures(self.uri, f"delete run {run_id}"):
            self.client.delete_run(run_id)

    def log_files(self, run_id: str, path: Path, artifact_path: str | None = None) -> None:
        """Copy a file, or what a folder holds, to the run's artifacts, under the folder `artifact_path`.

        Raises FileNotFoundError if `path` does not exist.
        """
        if not path.exists():
            raise FileNotFoundError(f"nothing to log at {path}")
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        with failures(self.uri, f"keep the files of {path}"):
            log(run_id, str(path), artifact_path)

    def log_json(self, run_id: str, data: object, name: str) -> None:
        """Write `data` as the JSON artifact `name` (``folder/file.json``) of the run."""
        with failures(self.uri, f"keep {name}"):
            self.client.log_dict(run_id, data, name)

    def read_json(self, run_id: str, name: str) -> Any:
        """What :meth:`log_json` wrote; None if the run has no such file."""
        with failures(self.uri, f"read {name} of run {run_id}"), tempfile.TemporaryDirectory() as folder:
            below = name.rpartition("/")[0] or None
            if name not in {each.path for each in self.client.list_artifacts(run_id, below)}:
                return None
            return json.loads(Path(self.client.download_artifacts(run_id, name, folder)).read_text())

    def note(self, run_id: str, text: str) -> None:
        """Set the run's description, which MLflow's page of the run shows."""
        with failures(self.uri, f"describe run {run_id}"):
            self.client.set_tag(run_id, "mlflow.note.content", text)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Write `text` as the artifact `name` (``folder/file.py``) of the run."""
        with failures(self.uri, f"keep {name}"):
            self.client.log_text(run_id, text, name)

    def log_data(self, run_id: str, data: Sequence[TrackedData]) -> None:
        """Log what a run was trained and evaluated on; what was logged before is not logged again."""
        import_mlflow()
        from mlflow.entities import Dataset, DatasetInput, InputTag

        with failures(self.uri, f"keep what the data of run {run_id} were"):
            tags = self.client.get_run(run_id).data.tags
            source = json.dumps({"tags": {key: tags[key] for key in sorted(tags) if key.startswith("mlflow.source.")}})
            inputs = [
                DatasetInput(
                    Dataset(
                        name=each.name[:_LONGEST_DATASET_NAME],
                        digest=each.digest,
                        source_type="code",
                        source=source,
                        schema=json.dumps(each.schema) if each.schema else None,
                        profile=json.dumps(each.profile),
                    ),
                    [InputTag(_CONTEXT, each.purpose)],
                )
                for each in data
            ]
            if inputs:
                self.client.log_inputs(run_id, inputs)

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log `metrics` at `step` now, waiting for the store (a training loop uses MetricLog instead)."""
        import_mlflow()
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        values = [Metric(metric_name(key), float(value), now, step) for key, value in metrics.items()]
        with failures(self.uri, f"log metrics of run {run_id}"):
            for start in range(0, len(values), 1000):  # MLflow's limit for one call
                self.client.log_batch(run_id, metrics=values[start : start + 1000], synchronous=True)

    def metrics(self, run_id: str) -> dict[str, float]:
        """Return the value of each metric at its highest step, but for those of branches that were left."""
        with failures(self.uri, f"read run {run_id}"):
            return self._latest(self.client.get_run(run_id))

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric in the order of steps; the last logged value where there are several.

        What was logged after the checkpoint from which the run went on later is left out.
        """
        with failures(self.uri, f"read metric {key!r} of run {run_id}"):
            left = _left(self.client.get_run(run_id).data.tags)
            return self._history(run_id, metric_name(key), left)

    def _history(self, run_id: str, key: str, left: "_Left") -> list[tuple[int, float]]:
        logged = self.client.get_metric_history(run_id, key)
        points = sorted((point for point in logged if point.timestamp not in left), key=lambda point: point.timestamp)
        return sorted({point.step: _value(point.value) for point in points}.items())

    def _latest(self, entry: Any) -> dict[str, float]:
        """The latest value of each metric of a run."""
        left = _left(entry.data.tags)
        if not left.ranges:
            return {key: _value(value) for key, value in entry.data.metrics.items()}
        found = {}
        for point in entry.data.to_proto().metrics:  # the values alone do not say when they were logged
            if point.timestamp not in left:
                found[point.key] = _value(point.value)
            elif history := self._history(entry.info.run_id, point.key, left):
                found[point.key] = history[-1][1]
        return found

    def run(self, run_id: str) -> Run:
        """Return one run."""
        with failures(self.uri, f"read run {run_id}"):
            return self._run(self.client.get_run(run_id))

    def _run(self, entry: Any) -> Run:
        tags = {key: value for key, value in entry.data.tags.items() if not key.startswith(("mlflow.", LEFT))}
        return Run(
            run_id=entry.info.run_id,
            name=entry.info.run_name,
            status=entry.info.status,
            parameters=dict(entry.data.params),
            metrics=self._latest(entry),
            tags=tags,
            started=datetime.fromtimestamp(entry.info.start_time / 1000, UTC),
        )

    def runs(self, experiment: str, finished_only: bool = True) -> list[Run]:
        """Return the experiment's runs, newest first; an empty list if there is no such experiment."""
        with failures(self.uri, f"read experiment {experiment!r}"):
            entry = self.client.get_experiment_by_name(experiment)
        if entry is None:
            return []
        condition = "attributes.status = 'FINISHED'" if finished_only else ""
        return list(self.search(condition, within=[entry.experiment_id]))

    def search(
        self, condition: str, order: str = NEWEST, within: Sequence[str] | None = None, page: int = 1000
    ) -> Iterator[Run]:
        """Return the runs that fulfil a condition, asked for as they are taken.

        Args:
            condition: in MLflow's language; empty for all runs.
            order: in MLflow's language.
            within: ids of experiments; None takes all.
            page: how many runs to ask for at a time.
        """
        with failures(self.uri, "search runs"):
            if within is None:
                experiments = pages(lambda token: self.client.search_experiments(page_token=token))
                within = [each.experiment_id for each in experiments]
            if within:
                found = pages(lambda token: self.client.search_runs(within, condition, 1, page, [order], token))
                yield from map(self._run, found)

    def _experiment(self, name: str) -> str:
        """Return the experiment's id, creating it, or bringing it back if it was deleted."""
        from mlflow.exceptions import MlflowException

        entry = self.client.get_experiment_by_name(name)
        if entry is None:
            location = self.artifacts.as_uri() if self.artifacts else None
            try:
                return str(self.client.create_experiment(name, artifact_location=location, tags={_KIND: _TRAINING}))
            except MlflowException as error:
                if error_code(error) != "RESOURCE_ALREADY_EXISTS":
                    raise
                entry = self.client.get_experiment_by_name(name)  # another process was first
        if entry.lifecycle_stage == "deleted":
            self.client.restore_experiment(entry.experiment_id)
        if _KIND not in entry.tags:  # made by another program, or by MLflow itself
            self.client.set_experiment_tag(entry.experiment_id, _KIND, _TRAINING)
        return str(entry.experiment_id)


_Refuse = Callable[[str], NoReturn]


def _check_server(uri: str, refuse: _Refuse) -> None:
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port  # an impossible port raises here
    except ValueError as error:
        refuse(str(error))
    if not host:
        refuse("no host in it")

    def ask(seconds: float) -> None:
        post(uri, "/api/2.0/mlflow/experiments/search", {"max_results": 1}, (_CONNECT_SECONDS, seconds))

    try:
        try:
            ask(_ANSWER_SECONDS)
        except Exception as error:
            if "read timeout" not in str(error).lower():
                raise
            _logger.warning(
                "tracking at %s took the connection and does not answer yet; waiting for it, %.0f s at most",
                redact(uri),
                _LATE_ANSWER_SECONDS,
            )
            ask(_LATE_ANSWER_SECONDS)
    except Exception as error:  # whatever the network or a proxy answers
        if error_code(error) in ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED"):
            refuse("the server refuses the login (MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN)")
        refuse(f"no MLflow server answers ({one_line(error)})")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this machine at a time; where the file system knows no lock of a folder, several."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_sqlite(uri: str, refuse: _Refuse) -> Path:
    """Return the database's absolute path, after taking and releasing a write lock on it."""
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    if not name or name == ":memory:":
        refuse("a database in memory cannot be shared with training")
    file = Path(name).absolute()  # a worker has another working directory
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(file, timeout=_CONNECT_SECONDS)) as connection:
            connection.execute("BEGIN IMMEDIATE")
    except (OSError, sqlite3.Error) as error:
        if "locked" not in str(error):  # a busy store is a store
            refuse(f"not a writable SQLite file ({one_line(error)})")
    return file


def _check_database(uri: str, scheme: str, refuse: _Refuse) -> None:
    """Connect once: MLflow itself tries for two minutes."""
    import sqlalchemy

    timeout = {} if scheme == "mssql" else {"connect_timeout": int(_CONNECT_SECONDS)}
    try:
        engine = sqlalchemy.create_engine(uri, connect_args=timeout)
        with engine.connect():
            pass
        engine.dispose()
    except ModuleNotFoundError as error:
        refuse(f"its driver is not installed ({error})")
    except Exception as error:  # each driver has its own
        refuse(f"no database answers ({one_line(error)})")


def clean_parameters(parameters: Mapping[str, object]) -> dict[str, str]:
    """Parameters as they are stored: as text that is not too long, without secrets."""
    return {key: value[:_LONGEST_PARAMETER] for key, value in _clean(parameters).items()}


def _clean(values: Mapping[str, object]) -> dict[str, str]:
    return {key: redact(str(value)) for key, value in without_secrets(values).items()}


def _value(stored: float) -> float:
    """Undo MLflow's stand-in for infinity, which its databases cannot hold: the largest finite number."""
    return math.copysign(math.inf, stored) if abs(stored) == sys.float_info.max else float(stored)


@dataclass(frozen=True)
class _Left:
    """When points of branches that were left were logged, in milliseconds since 1970."""

    ranges: tuple[range, ...]

    def __contains__(self, timestamp: int) -> bool:
        return any(timestamp in each for each in self.ranges)


def _left(tags: Mapping[str, str]) -> _Left:
    """What the tags of a run say of the branches that were left; tags of this name that say nothing are passed over."""
    found = ((key.removeprefix(LEFT), until) for key, until in tags.items() if key.startswith(LEFT))
    return _Left(tuple(range(int(since), int(until)) for since, until in found if (since + until).isdecimal()))
