"""The life of a run or a group of runs: reserved, begun or continued, and closed so that record and MLflow agree."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concord import logs
from concord.errors import InputError, RunFailedError, StoppedError
from concord.options import defaults_of
from concord.record import RECORD, Events, Kind, read_record, write_record
from concord.runs.resume import require_resumable
from concord.runs.run_folder import new_name, recorded_config, run_folder
from concord.runs.termination import Termination, sigterm_as_interrupt
from concord.storage import LOCK, Folder, FullDiskError, StorageError, display_path
from concord.tracking import Mirror, Store, redact
from concord.tracking.store import Status
from concord.training.options import RUNTIME_OPTIONS, RunConfig

# What the folder of a run may have before there is a record of it.
_BEFORE_RECORD = frozenset({LOCK, f"{RECORD}.new"})
# How long the end goes on trying to send what a store did not take; the second where a disk, perhaps its own, is full.
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
    """A folder that this process alone has. Nothing of it is changed until :func:`opened`.

    Attributes:
        kind: of what it is the record.
        job: the job's name.
        config: the options, of a run with its name.
        folder: where its files are kept.
        store: MLflow's.
        record: what is recorded of it; None for a new one.
        termination: whether this process was told to end.
        begun: whether it was begun, or went on.
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
    """What a new record says, and how MLflow shows it.

    Attributes:
        experiment: in MLflow.
        parameters, tags: of the MLflow run.
        record: what is recorded beside kind, job, name, store and configuration.
        artifacts: JSON values kept with the MLflow run, by file name, beside the configuration.
    """

    experiment: str
    parameters: Mapping[str, object]
    tags: Mapping[str, str]
    record: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Opened:
    """A run or a group at work.

    Attributes:
        name: its name.
        kept: where its files are kept.
        store: MLflow's.
        record: what it is.
        events: what happened; written here.
        resumed: whether it was there before.
        status: how it ended, as MLflow calls it; set before the end.
        report: what is recorded with its end.
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
        """In MLflow."""
        run_id: str = self.record["run_id"]
        return run_id

    @property
    def folder(self) -> Path:
        """Where its files are on this machine."""
        return self.kept.path

    def describe(self, **more: Any) -> None:
        """Add to what is recorded of it."""
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
    """Have a new run, or with ``--resume`` an earlier one, to this process alone while the body runs.

    A name that a new run is given is taken from here on. If the body does not begin the run, nothing is left of that.
    SIGTERM is as Ctrl-C in the body.

    Args:
        job: the job's name.
        config: the options, resolved; without a name one is made up.
        kind: what kind of run it is, for a name that is made up.
        placement: options that may differ when the run is resumed.
        defaults: the job's, for options that are newer than the run; those of the class if not given.

    Raises:
        InputError: the name is taken, there is nothing to resume, it was begun with other options, or another process
            is at work on it.
    """
    defaults = defaults_of(type(config)) if defaults is None else defaults
    given = run_folder(config.run.output, config.run.name) if config.run.name is not None else None

    def check(folder: Folder) -> dict[str, Any] | None:
        if config.run.resume:
            return require_resumable(job, config, folder, placement, defaults)
        _require_new(folder, config)
        return None

    if given is not None:  # before the store is opened, which makes one
        check(given)
    with _reserved("run", job, config, lambda: given or _made_up(job, config, kind), check) as reserved:
        logs.bind_context(run=reserved.name, job=job)
        reserved.config = config.with_options(name=reserved.name)
        yield reserved


def is_interrupted(output: Path, name: str, run_id: str) -> bool:
    """Whether a run that MLflow takes for running has ended here without a word: no process has its folder."""
    folder = run_folder(output, name)
    if folder.remote or not (folder.path / RECORD).exists():
        return False
    try:
        with folder.locked("run"):
            record = read_record(folder)
    except InputError:
        return False
    return record is not None and record["run_id"] == run_id


@contextlib.contextmanager
def reserved_group(kind: Kind, job: str, config: RunConfig, folder: Folder) -> Iterator[Reserved]:
    """Have a group of runs, new or earlier, to this process alone while the body runs; SIGTERM is as Ctrl-C there.

    Args:
        kind: study or comparison.
        job: the job's name.
        config: that every run of it starts from.
        folder: of the group.

    Raises:
        InputError: another process is at work on it, or it cannot be read or written.
    """
    with _reserved(kind, job, config, lambda: folder, lambda locked: read_record(locked, kind)) as reserved:
        yield reserved


@contextlib.contextmanager
def _reserved(
    kind: Kind,
    job: str,
    config: RunConfig,
    choose: Callable[[], Folder],
    check: Callable[[Folder], dict[str, Any] | None],
) -> Iterator[Reserved]:
    """Lock the chosen folder and check it: another process may have changed it until now."""
    new_output = not config.run.output.exists()
    store = Store.open(config.run.output, config.run.tracking_uri)
    with sigterm_as_interrupt() as termination:
        folder = choose()
        folder.make()
        with folder.locked(kind):
            record = check(folder)
            if record is None:
                folder.empty()  # at an address: of one of this name that was removed from the storage
            elif record["store"] != redact(store.uri):
                begun = f"the {kind} {folder.place.name} was started with {record['store']}"
                raise InputError(f"--tracking-uri {redact(store.uri)}: {begun}")
            reserved = Reserved(kind, job, config, folder, store, record, termination)
            try:
                yield reserved
            finally:
                if record is None and not reserved.begun:
                    shutil.rmtree(folder.path, ignore_errors=True)
                with contextlib.suppress(OSError):  # where something is in them
                    for above in list(folder.path.parents)[: 1 + new_output]:
                        above.rmdir()


def _made_up(job: str, config: RunConfig, kind: str | None) -> Folder:
    """A folder of its own for a new run, made in the moment in which its name is chosen."""
    name = new_name(job, config, kind)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for each in names if (folder := run_folder(config.run.output, each)).make())


def _require_new(folder: Folder, config: RunConfig) -> None:
    """Refuse a name that a run has (InputError). A folder that has no record yet is of a process that was killed."""
    name, output = folder.place.name, display_path(config.run.output)
    if read_record(folder) is not None:
        raise InputError(f"--name {name}: there is a run of this name in {output}; add --resume to continue it")
    if set(folder.names()) - _BEFORE_RECORD:
        raise InputError(f"--name {name}: {folder.display_path} is there, and is no run; give another name")


def run_description(
    config: RunConfig,
    job: str,
    tags: Mapping[str, str],
    lineage: Lineage | None = None,
    derived: Mapping[str, object] | None = None,
) -> Description:
    """How a run is shown: by the options that it looks at, and parameters that follow from them."""
    left_out = config.unused()
    recorded = recorded_config(config)
    parameters = {key: value for key, value in recorded.items() if value is not None and key not in left_out}
    tags = {**tags, **(lineage.tags if lineage else {})}
    return Description(lineage.experiment if lineage else job, {**parameters, **(derived or {})}, tags)


@contextlib.contextmanager
def opened(reserved: Reserved, description: Description, info: Callable[[str], None]) -> Iterator[Opened]:
    """Begin a run or group, or go on with it, and see that record and MLflow say how it ended.

    Wrong input that is found before anything was done leaves nothing of a new one. Everything else is kept.

    Raises:
        StoppedError: by Ctrl-C or SIGTERM.
    """
    new = reserved.record is None
    record = reserved.record if reserved.record is not None else _create(reserved, description)
    reserved.begun = True
    events = Events(reserved.folder)
    mirror = Mirror(reserved.store, record["run_id"], reserved.folder)
    run = Opened(reserved.name, reserved.folder, reserved.store, record, events, resumed=not new)
    seconds = _SENDING_SECONDS
    try:
        if not new:
            reserved.store.resume_run(run.run_id)
        events.append("began", resumed=not new)
        yield run
        _end(run)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | StoppedError) or reserved.termination.requested:
            _close(run, "KILLED")
            raise StoppedError(f"stopped; continue with --name {run.name} --resume") from None
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
            raise RunFailedError(gone) from error
        raise
    finally:
        unsent = mirror.close(seconds)
        events.close()
        if unsent and run.kept.exists():
            again = f"--name {run.name}" + (" --resume" if reserved.kind == "run" else "")
            info(f"tracking did not answer: {unsent} events are kept in {run.kept.display_path} and sent by {again}")


def _create(reserved: Reserved, description: Description) -> dict[str, Any]:
    """Begin a new record and its run in MLflow; nothing is left of either where one of them fails."""
    config, store = reserved.config, reserved.store
    recorded, sources = recorded_config(config), config.sources()
    run_id = store.start_run(description.experiment, reserved.name, description.parameters, description.tags)
    try:
        about = {"job": reserved.job, "name": reserved.name, "run_id": run_id, "store": redact(store.uri)}
        record = {**about, "config": recorded, **({"sources": sources} if sources else {}), **description.record}
        written = write_record(reserved.folder, reserved.kind, record)
        for name, value in {"config.json": recorded, **description.artifacts}.items():
            store.log_json(run_id, value, name)
        for name, source in sources.items():
            store.log_text(run_id, source, name)
    except BaseException as error:
        with contextlib.suppress(RunFailedError):
            store.delete_run(run_id)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            where = display_path(config.run.output)
            raise InputError(f"--output {where}: cannot be written to ({error.strerror})") from error
        reserved.folder.delete()
        raise
    return written


def _end(run: Opened) -> None:
    run.events.append("ended", status=run.status, **run.report)
    run.events.sync()


def _close(run: Opened, status: Status) -> None:
    """Record how it ended; where the folder is gone, say it in MLflow alone."""
    run.status, run.report = status, {}
    try:
        _end(run)
    except RunFailedError:
        with contextlib.suppress(RunFailedError):
            run.store.finish_run(run.run_id, status)


def _removed(folder: Folder) -> str | None:
    """The line about a folder that was removed while its run was at work; None if its record is there."""
    with contextlib.suppress(StorageError):  # which is reported where it stands in the way
        if RECORD not in folder.names():
            return f"{folder.display_path}: was removed while the run was at work"
    return None
