"""The life of a run or a group of runs: reserved, begun or continued, and closed so that record and MLflow agree."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concord import logs
from concord.errors import InputError, RunFailedError, StoppedError
from concord.record import FOLDERS, RECORD, Kind, OpenRun, Run, folder_of, read_record, read_run, write_record
from concord.redaction import redact
from concord.runs.execute import CHECKPOINTS, checkpoint_step
from concord.runs.key import index_run, require_same, require_secrets
from concord.runs.spec import RunSpec, new_names
from concord.runs.termination import Termination, sigterm_as_interrupt
from concord.storage import (
    LOCK,
    Folder,
    FullDiskError,
    StorageError,
    display_path,
)
from concord.tracking import Mirror, Store
from concord.tracking.mirror import retrack, track
from concord.tracking.store import Status
from concord.training.options import RunConfig

Info = Callable[[str], None]
# Files that a run's folder may have before its record.
_BEFORE_RECORD = frozenset({LOCK, f"{RECORD}.new"})
# How long the end retries to send events to the store; the second if a disk, perhaps the store's, is full.
_SENDING_SECONDS, _FULL_DISK_SENDING_SECONDS = 30.0, 2.0


@dataclass
class Reserved:
    """A folder locked by this process. Nothing in it changes until :func:`open_run`.

    Attributes:
        run: the run or group as it is; None for a new one.
        same_source: whether the job's text is that of the beginning.
        begun: whether it began or resumed.
    """

    kind: Kind
    folder: Folder
    store: Store
    run: Run | None
    termination: Termination
    same_source: bool = True
    begun: bool = False

    @property
    def name(self) -> str:
        """The name of the run or group."""
        return self.folder.place.name


@contextlib.contextmanager
def reserved_run(spec: RunSpec) -> Iterator[Reserved]:
    """Reserve a new run, or with ``--resume`` an earlier one, for this process while the body runs.

    The name of a new run is taken from here on. If the body does not begin the run, the name is free again. In the body
    SIGTERM acts as Ctrl-C.
    """
    config = spec.config
    given = folder_of(config.run.output, config.run.name) if config.run.name is not None else None
    same = True

    def check(folder: Folder) -> Run | None:
        nonlocal same
        if not config.run.resume:
            _require_new(folder, config)
            return None
        name = folder.place.name
        run = read_run(folder)
        if run is None:
            raise InputError(f"--name {name}: there is no such run in {display_path(config.run.output)}")
        require_secrets(f"the run {name}", config, run.record)
        same = require_same(f"the run {name}", spec.key, run.record, name, "a resumed run keeps its options")
        return run

    def choose() -> Folder:
        """The given folder, or one with a new name, created at once so that no other run takes it."""
        names = new_names(spec.job.name, config, config.method)
        return given or next(folder for name in names if (folder := folder_of(config.run.output, name)).make())

    if given is not None:  # before the store is opened, which creates it
        check(given)
    with _reserved("run", config, choose, check) as reserved:
        logs.bind_context(run=reserved.name, job=spec.job.name)
        reserved.same_source = same
        yield reserved


def reserved_group(kind: Kind, config: RunConfig, folder: Folder) -> contextlib.AbstractContextManager[Reserved]:
    """Reserve a group of runs, new or earlier, for this process while the body runs; SIGTERM acts as Ctrl-C."""
    return _reserved(kind, config, lambda: folder, lambda locked: read_run(locked, kind))


@contextlib.contextmanager
def _reserved(
    kind: Kind, config: RunConfig, choose: Callable[[], Folder], check: Callable[[Folder], Run | None]
) -> Iterator[Reserved]:
    """Lock the folder, then check it: another process may have changed it before."""
    new_output = not config.run.output.exists()
    store = Store.open(config.run.output, config.run.tracking_uri)
    with sigterm_as_interrupt() as termination:
        folder = choose()
        folder.make()
        with folder.locked(kind):
            run = check(folder)
            if run is None:
                folder.empty()  # at an address: left from a run of this name that was removed from the storage
            elif run.record["store"] != redact(store.uri):
                begun = f"the {kind} {folder.place.name} was started with {run.record['store']}"
                raise InputError(f"--tracking-uri {redact(store.uri)}: {begun}")
            reserved = Reserved(kind, folder, store, run, termination)
            try:
                yield reserved
            finally:
                if run is None and not reserved.begun:
                    shutil.rmtree(folder.path, ignore_errors=True)
                with contextlib.suppress(OSError):  # a folder that is not empty
                    for above in list(folder.path.parents)[: 1 + new_output]:
                        above.rmdir()


def is_interrupted(output: Path, name: str, run_id: str) -> bool:
    """Whether a run or group that MLflow shows as running was killed here: no process holds its folder."""
    for kind in FOLDERS:
        folder = folder_of(output, name, kind)
        if folder.remote or not (folder.path / RECORD).exists():
            continue
        with contextlib.suppress(InputError), folder.locked(kind):
            record = read_record(folder, kind)
            if record is not None and record.get("run_id") == run_id:
                return True
    return False


def _require_new(folder: Folder, config: RunConfig) -> None:
    """Refuse the name of an existing run (InputError). A folder without a record is left from a killed process."""
    name, output = folder.place.name, display_path(config.run.output)
    if read_record(folder) is not None:
        raise InputError(f"--name {name}: there is a run of this name in {output}; add --resume to continue it")
    if set(folder.names()) - _BEFORE_RECORD:
        raise InputError(f"--name {name}: {folder.display_path} exists and is not a run; give another name")


@dataclass
class Open:
    """An open run or group, its store, and the mirror that sends its events, and those of a group's runs, to MLflow.

    Attributes:
        resumed: whether it had begun before.
        report: the fields of its end event.
    """

    run: OpenRun
    store: Store
    mirror: Mirror
    resumed: bool
    report: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def open_run(reserved: Reserved, record: Mapping[str, Any], info: Info) -> Iterator[Open]:
    """Begin or resume a run or group; at the end, record in its folder and in MLflow how it ended.

    ``record`` is that of a new one. An InputError before the first evaluation removes a new run; else all is kept.
    """
    new = reserved.run is None
    run = _create(reserved, record) if new else _resume(reserved, info)
    reserved.begun = True
    mirror = Mirror(reserved.store)
    mirror.add(run)
    opened = Open(run, reserved.store, mirror, resumed=not new)
    seconds = _SENDING_SECONDS
    try:
        run.append("began", resumed=not new)
        yield opened
        _end(opened, "FINISHED")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | StoppedError) or reserved.termination.requested:
            _close(opened, "KILLED")
            again = f"--name {run.name} --resume"
            if reserved.kind == "run" and not run.checkpoints:
                raise StoppedError(f"stopped before the first checkpoint; {again} begins again") from None
            raise StoppedError(f"stopped; continue with {again}") from None
        untouched = not (run.evaluations or run.checkpoints or run.asked)
        if isinstance(error, InputError) and new and untouched and not _removed(run.folder):
            mirror.discard()
            with contextlib.suppress(RunFailedError):
                opened.store.delete_run(str(run.run_id))
            run.folder.delete()
            raise
        seconds = _FULL_DISK_SENDING_SECONDS if isinstance(error, FullDiskError) else seconds
        _close(opened, "FAILED")
        if isinstance(error, Exception) and (gone := _removed(run.folder)):
            seconds = 0.0  # the events are also gone
            raise RunFailedError(gone) from error
        raise
    finally:
        unsent = mirror.close(seconds)
        run.close()
        if unsent and run.folder.exists():
            again = f"--name {run.name}" + (" --resume" if reserved.kind == "run" else "")
            info(f"tracking did not answer: {unsent} events are kept in {run.folder.display_path} and sent by {again}")


def _create(reserved: Reserved, record: Mapping[str, Any]) -> OpenRun:
    """Create the record and its MLflow run; if one fails, both are removed."""
    folder = reserved.folder
    try:
        run = OpenRun(folder, write_record(folder, reserved.kind, record))
        track(reserved.store, run)
    except BaseException as error:
        folder.delete()
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            where = display_path(folder.place.parent.parent)
            raise InputError(f"--output {where}: cannot be written to ({error.strerror})") from error
        raise
    return run


def _resume(reserved: Reserved, info: Info) -> OpenRun:
    """An earlier run or group, open; if the store has lost its MLflow run, a new one takes all events."""
    assert reserved.run is not None
    run = OpenRun(reserved.folder, reserved.run.record)
    if run.run_id is None:  # a run of a group, which ended before MLflow had it
        track(reserved.store, run)
    elif not reserved.store.resume_run(run.run_id):
        uri = redact(reserved.store.uri)
        info(f"tracking at {uri} has lost run {run.run_id}; a new run takes the whole record")
        retrack(reserved.store, run)
    if not reserved.same_source:
        info("warning: the job's file has changed since the run began; what it learned with the earlier text is kept")
        run.describe(key={})  # the result is of neither text alone
    return run


def _end(opened: Open, status: Status) -> None:
    opened.run.append("ended", status=status, **opened.report)
    opened.run.sync()
    if status == "FINISHED" and opened.run.record["kind"] == "run":
        index_run(opened.run.folder.place.parent.parent, opened.run)


def _close(opened: Open, status: Status) -> None:
    """Record the end; if the folder is gone, in MLflow alone."""
    opened.report = {}
    try:
        _end(opened, status)
    except RunFailedError:
        with contextlib.suppress(RunFailedError):
            opened.store.finish_run(str(opened.run.run_id), status)


def _removed(folder: Folder) -> str | None:
    """The error for a folder that was removed during its run; None if its record exists."""
    with contextlib.suppress(StorageError):  # reported where it matters
        if RECORD not in folder.names():
            return f"{folder.display_path}: was removed while the run was at work"
    return None


class Member:
    """A run of an open group, locked and open in the group's process; other processes train it."""

    def __init__(self, spec: RunSpec, group: Open) -> None:
        """Begin it, or go on with what an earlier process left of it."""
        assert spec.name is not None
        self.spec, self._group = spec, group
        output = group.run.folder.place.parent.parent
        folder = folder_of(output, spec.name)
        folder.make()
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(folder.locked("run"))
        try:
            earlier = None
            with contextlib.suppress(InputError):  # of an earlier version, or damaged
                earlier = read_run(folder)
            if earlier is None or earlier.status == "FAILED" or any(spec.key.differences(earlier.record)):
                folder.empty()
                record = {**spec.record(group.store), "group": group.run.name}
                self.run = OpenRun(folder, write_record(folder, "run", record))
            else:
                self.run = OpenRun(folder, earlier.record)
        except BaseException:
            self._lock.close()
            raise
        group.mirror.add(self.run, group.run)  # before its first event: the mirror sees whether it had events
        self.begin()

    def begin(self) -> None:
        """Note that it begins, or that it goes on from its last checkpoint.

        The event of a checkpoint may be lost with the process that wrote it. It is complete when it has its name, and
        counts if the evaluations up to it are recorded: training does not repeat them.
        """
        evaluated = max((step for _, step in self.run.evaluations), default=-1)
        for name in sorted({*self.run.folder.names(CHECKPOINTS)} - {*self.run.checkpoints}):
            path = self.run.folder.path / CHECKPOINTS / name
            if path.exists() and not name.endswith(".new") and checkpoint_step(name) <= evaluated:
                self.run.append("checkpoint", round(1000 * path.stat().st_mtime), name=name, step=checkpoint_step(name))
        self.run.append("began", resumed=bool(self.run.checkpoints))

    def end(self, status: Status, **why: str) -> None:
        """Note its end, and let it go."""
        with contextlib.suppress(RunFailedError) if status == "KILLED" else contextlib.nullcontext():
            self.run.append("ended", None, status=status, **why)
            self.run.sync()
        self._group.mirror.finish(self.run)
        self.run.close()
        self._lock.close()
