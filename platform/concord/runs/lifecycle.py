"""The life of a run or a group of runs: reserved, begun or continued, and closed so that record and MLflow agree."""

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concord import logs
from concord.errors import InputError, RunFailedError, StoppedError
from concord.options import defaults_of
from concord.record import RECORD, Events, Kind, read_record, write_record
from concord.redaction import redact
from concord.runs.resume import require_resumable
from concord.runs.run_folder import FOLDERS, new_names, recorded_config, run_folder
from concord.runs.termination import Termination, sigterm_as_interrupt
from concord.storage import LOCK, Folder, FullDiskError, StorageError, display_path
from concord.tracking import Mirror, Store
from concord.tracking.mirror import send_again
from concord.tracking.store import Status
from concord.training.options import RUNTIME_OPTIONS, RunConfig

# Files that a run's folder may have before its record.
_BEFORE_RECORD = frozenset({LOCK, f"{RECORD}.new"})
# How long the end retries to send events to the store; the second if a disk, perhaps the store's, is full.
_SENDING_SECONDS, _FULL_DISK_SENDING_SECONDS = 30.0, 2.0


@dataclass(frozen=True)
class Lineage:
    """Where a run's configuration came from.

    Attributes:
        experiment: in MLflow, in place of the job's.
        tags: of the run and of the registered version.
    """

    experiment: str
    tags: Mapping[str, str]


@dataclass
class Reserved:
    """A folder locked by this process. Nothing in it changes until :func:`open_run`.

    Attributes:
        config: the options; a run's have its name.
        record: the record; None for a new run or group.
        begun: whether it began or resumed.
    """

    kind: Kind
    job: str
    config: RunConfig
    folder: Folder
    store: Store
    record: dict[str, Any] | None
    termination: Termination
    begun: bool = False

    @property
    def name(self) -> str:
        """The name of the run or group."""
        return self.folder.place.name


@dataclass(frozen=True)
class Description:
    """The content of a new record, and its form in MLflow.

    Attributes:
        experiment: in MLflow.
        record: further fields beside kind, job, name, store and configuration.
        artifacts: JSON values kept with the MLflow run, by file name, beside the configuration.
    """

    experiment: str
    parameters: Mapping[str, object]
    tags: Mapping[str, str]
    record: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Opened:
    """An open run or group.

    Attributes:
        resumed: whether it had begun before.
        status: MLflow's status; set before the end.
        report: the fields of its end event.
    """

    name: str
    kept: Folder
    store: Store
    record: dict[str, Any]
    events: Events
    resumed: bool
    status: Status = "FINISHED"
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The id of its MLflow run."""
        run_id: str = self.record["run_id"]
        return run_id

    def describe(self, **more: Any) -> None:
        """Add fields to the record."""
        self.record = write_record(self.kept, self.record["kind"], {**self.record, **more})

    def keep_artifact(self, path: str) -> None:
        """Keep a file of the folder, by its path in it, and show it in MLflow."""
        self.kept.keep(path)
        self.events.append("artifact", path=path)


@contextlib.contextmanager
def reserved_run(
    job: str,
    config: RunConfig,
    kind: str | None = None,
    *,
    placement: Collection[str] = RUNTIME_OPTIONS,
    defaults: RunConfig | None = None,
) -> Iterator[Reserved]:
    """Reserve a new run, or with ``--resume`` an earlier one, for this process while the body runs.

    The name of a new run is taken from here on. If the body does not begin the run, the name is free again. In the body
    SIGTERM acts as Ctrl-C. ``placement`` has the options that may differ when a run is resumed; ``defaults`` has the
    values of options that are newer than the run.
    """
    defaults = defaults_of(type(config)) if defaults is None else defaults
    given = run_folder(config.run.output, config.run.name) if config.run.name is not None else None

    def check(folder: Folder) -> dict[str, Any] | None:
        if config.run.resume:
            return require_resumable(job, config, folder, placement, defaults)
        _require_new(folder, config)
        return None

    if given is not None:  # before the store is opened, which creates it
        check(given)
    with _reserved("run", job, config, lambda: given or _made_up(job, config, kind), check) as reserved:
        logs.bind_context(run=reserved.name, job=job)
        reserved.config = config.with_options(name=reserved.name)
        yield reserved


def is_interrupted(output: Path, name: str, run_id: str) -> bool:
    """Whether a run or group that MLflow shows as running was killed here: no process holds its folder."""
    for kind, above in FOLDERS.items():
        folder = Folder(output) / above / name
        if folder.remote or not (folder.path / RECORD).exists():
            continue
        with contextlib.suppress(InputError), folder.locked(kind):
            record = read_record(folder, kind)
            if record is not None and record["run_id"] == run_id:
                return True
    return False


def reserved_group(
    kind: Kind, job: str, config: RunConfig, folder: Folder
) -> contextlib.AbstractContextManager[Reserved]:
    """Reserve a group of runs, new or earlier, for this process while the body runs; SIGTERM acts as Ctrl-C."""
    return _reserved(kind, job, config, lambda: folder, lambda locked: read_record(locked, kind))


@contextlib.contextmanager
def _reserved(
    kind: Kind,
    job: str,
    config: RunConfig,
    choose: Callable[[], Folder],
    check: Callable[[Folder], dict[str, Any] | None],
) -> Iterator[Reserved]:
    """Lock the folder, then check it: another process may have changed it before."""
    new_output = not config.run.output.exists()
    store = Store.open(config.run.output, config.run.tracking_uri)
    with sigterm_as_interrupt() as termination:
        folder = choose()
        folder.make()
        with folder.locked(kind):
            record = check(folder)
            if record is None:
                folder.empty()  # at an address: left from a run of this name that was removed from the storage
            elif record["store"] != redact(store.uri):
                begun = f"the {kind} {folder.place.name} was started with {record['store']}"
                raise InputError(f"--tracking-uri {redact(store.uri)}: {begun}")
            reserved = Reserved(kind, job, config, folder, store, record, termination)
            try:
                yield reserved
            finally:
                if record is None and not reserved.begun:
                    shutil.rmtree(folder.path, ignore_errors=True)
                with contextlib.suppress(OSError):  # a folder that is not empty
                    for above in list(folder.path.parents)[: 1 + new_output]:
                        above.rmdir()


def _made_up(job: str, config: RunConfig, kind: str | None) -> Folder:
    """A folder with a new name, created at once so that no other run takes it."""
    folders = (run_folder(config.run.output, name) for name in new_names(job, config, kind))
    return next(folder for folder in folders if folder.make())


def _require_new(folder: Folder, config: RunConfig) -> None:
    """Refuse the name of an existing run (InputError). A folder without a record is left from a killed process."""
    name, output = folder.place.name, display_path(config.run.output)
    if read_record(folder) is not None:
        raise InputError(f"--name {name}: there is a run of this name in {output}; add --resume to continue it")
    if set(folder.names()) - _BEFORE_RECORD:
        raise InputError(f"--name {name}: {folder.display_path} exists and is not a run; give another name")


def run_description(
    config: RunConfig,
    job: str,
    tags: Mapping[str, str],
    lineage: Lineage | None = None,
    derived: Mapping[str, object] | None = None,
    artifacts: Mapping[str, Any] | None = None,
    data: str | None = None,
) -> Description:
    """The description of a run: the options with an effect, parameters derived from them, the data's version."""
    left_out = config.unused()
    recorded = recorded_config(config)
    parameters = {key: value for key, value in recorded.items() if value is not None and key not in left_out}
    tags = {**tags, **(lineage.tags if lineage else {})}
    experiment = lineage.experiment if lineage else job
    record = {} if data is None else {"data": data}
    return Description(experiment, {**parameters, **(derived or {})}, tags, record, artifacts or {})


@contextlib.contextmanager
def open_run(reserved: Reserved, description: Description, info: Callable[[str], None]) -> Iterator[Opened]:
    """Begin or resume a run or group; at the end, record in its folder and in MLflow how it ended.

    An InputError before the first evaluation removes a new run. Otherwise everything is kept.
    """
    new = reserved.record is None
    record = _create(reserved, description) if reserved.record is None else _resume(reserved, description, info)
    reserved.begun = True
    events = Events(reserved.folder)
    mirror = Mirror(reserved.store, record["run_id"], reserved.folder)
    run = Opened(reserved.name, reserved.folder, reserved.store, record, events, resumed=not new)
    seconds = _SENDING_SECONDS
    try:
        events.append("began", resumed=not new)
        yield run
        _end(run)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | StoppedError) or reserved.termination.requested:
            _close(run, "KILLED")
            again = f"--name {run.name} --resume"
            if reserved.kind == "run" and not events.own.checkpoints:
                raise StoppedError(f"stopped before the first checkpoint; {again} begins again") from None
            raise StoppedError(f"stopped; continue with {again}") from None
        untouched = not any(each.evaluations or each.checkpoints for each in events.history.values())
        if isinstance(error, InputError) and new and untouched and not _removed(run.kept):
            mirror.discard()
            with contextlib.suppress(RunFailedError):
                run.store.delete_run(run.run_id)
            run.kept.delete()
            raise
        seconds = _FULL_DISK_SENDING_SECONDS if isinstance(error, FullDiskError) else seconds
        _close(run, "FAILED")
        if isinstance(error, Exception) and (gone := _removed(run.kept)):
            seconds = 0.0  # the events are also gone
            raise RunFailedError(gone) from error
        raise
    finally:
        unsent = mirror.close(seconds)
        events.close()
        if unsent and run.kept.exists():
            again = f"--name {run.name}" + (" --resume" if reserved.kind == "run" else "")
            info(f"tracking did not answer: {unsent} events are kept in {run.kept.display_path} and sent by {again}")


def _create(reserved: Reserved, description: Description) -> dict[str, Any]:
    """Create the record and its MLflow run; if one fails, both are removed."""
    config, store = reserved.config, reserved.store
    recorded, sources = recorded_config(config), config.sources()
    run_id = _track(reserved, description, recorded, sources)
    try:
        about = {"job": reserved.job, "name": reserved.name, "run_id": run_id, "store": redact(store.uri)}
        record = {**about, "config": recorded, **({"sources": sources} if sources else {}), **description.record}
        return write_record(reserved.folder, reserved.kind, record)
    except BaseException as error:
        with contextlib.suppress(RunFailedError):
            store.delete_run(run_id)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            where = display_path(config.run.output)
            raise InputError(f"--output {where}: cannot be written to ({error.strerror})") from error
        reserved.folder.delete()
        raise


def _resume(reserved: Reserved, description: Description, info: Callable[[str], None]) -> dict[str, Any]:
    """The record of an earlier run or group; if the store has lost its MLflow run, a new one takes all events."""
    record = reserved.record
    assert record is not None
    if reserved.store.resume_run(record["run_id"]):
        return record
    info(f"tracking at {redact(reserved.store.uri)} has lost run {record['run_id']}; a new run takes the whole record")
    send_again(reserved.folder)
    run_id = _track(reserved, description, record["config"], record.get("sources", {}))
    return write_record(reserved.folder, reserved.kind, {**record, "run_id": run_id})


def _track(reserved: Reserved, description: Description, config: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Create an MLflow run with its description, and return its id; if that fails, it is removed."""
    store = reserved.store
    run_id = store.start_run(description.experiment, reserved.name, description.parameters, description.tags)
    try:
        for name, value in {"config.json": config, **description.artifacts}.items():
            store.log_text(run_id, json.dumps(value, indent=2, default=str), name)
        for name, source in sources.items():
            store.log_text(run_id, source, name)
    except BaseException:
        with contextlib.suppress(RunFailedError):
            store.delete_run(run_id)
        raise
    return run_id


def _end(run: Opened) -> None:
    run.events.append("ended", status=run.status, **run.report)
    run.events.sync()


def _close(run: Opened, status: Status) -> None:
    """Record the end; if the folder is gone, in MLflow alone."""
    run.status, run.report = status, {}
    try:
        _end(run)
    except RunFailedError:
        with contextlib.suppress(RunFailedError):
            run.store.finish_run(run.run_id, status)


def _removed(folder: Folder) -> str | None:
    """The error for a folder that was removed during its run; None if its record exists."""
    with contextlib.suppress(StorageError):  # reported where it matters
        if RECORD not in folder.names():
            return f"{folder.display_path}: was removed while the run was at work"
    return None
