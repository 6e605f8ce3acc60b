"""The life of a run or a group of runs: reserved, begun or continued, and closed so that record and MLflow agree."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from concord import logs
from concord.errors import CheckpointError, InputError, RunFailedError, StoppedError
from concord.execution.execute import CHECKPOINTS, checkpoint_step
from concord.execution.failures import Termination, sigterm_as_interrupt
from concord.execution.key import index_run, require_same, require_secrets
from concord.execution.patience import wait_for_answer
from concord.execution.spec import RunSpec, new_names
from concord.execution.taken_names import BEFORE_RECORD, is_of_this_submission, require_new, require_no_other_files
from concord.record import (
    EVENTS,
    FOLDERS,
    RECORD,
    Kind,
    OpenRun,
    Run,
    folder_of,
    read_record,
    read_run,
    require_run,
    write_record,
)
from concord.redaction import redact, without_secrets
from concord.storage import (
    DiskError,
    Folder,
    HeldError,
    StorageError,
    disk_errors_in_one_line,
    display_path,
    leased,
)
from concord.submitted import BEGUN, is_submitted
from concord.tracking import Mirror, Store
from concord.tracking.mirror import CURSOR, recover, track
from concord.tracking.store import Status
from concord.training.checkpoint import read_progress
from concord.training.options import RunConfig, TrainConfig
from concord.user import user_name

Info = Callable[[str], None]
# How long an earlier process of the same submission may outlive its head node.
_EARLIER_SECONDS, _EVERY_SECONDS = 300.0, 1.0
# How long the end retries to send events to the store; the second if a disk, perhaps the store's, has failed.
_SENDING_SECONDS, _DISK_SENDING_SECONDS = 30.0, 2.0


@dataclass
class ActiveRun:
    """A run or group of runs whose folder this process has locked. Nothing in it changes until the run begins.

    Attributes:
        earlier: the run or group as it was; None for a new one.
        spec: of a run; None for a group.
        run: its record, open for events; from its beginning on.
        mirror: sends its events, and those of a group's runs, to MLflow; from its beginning on.
        report: the fields of its end event.
        patience: the minutes to wait for MLflow and the storage before it begins.
    """

    kind: Kind
    folder: Folder
    store: Store
    earlier: Run | None
    spec: RunSpec | None = None
    termination: Termination = field(default_factory=Termination)
    report: dict[str, Any] = field(default_factory=dict)
    patience: float = 0.0
    run: OpenRun = field(init=False)
    mirror: Mirror = field(init=False)

    @property
    def name(self) -> str:
        """The name of the run or group."""
        return self.folder.place.name

    @property
    def resumed(self) -> bool:
        """Whether it had begun before."""
        return self.earlier is not None

    def is_stop(self, error: BaseException) -> bool:
        """Whether this exception is the user's end of it: by Ctrl-C, or by SIGTERM."""
        return isinstance(error, KeyboardInterrupt | StoppedError) or self.termination.requested

    def end(self, status: Status, **fields: Any) -> None:
        """Record how it ended."""
        self.run.append("ended", status=status, **fields)
        self.run.sync()


@contextlib.contextmanager
def reserved_run(spec: RunSpec) -> Iterator[ActiveRun]:
    """Reserve a new run, or with ``--resume`` an earlier one, for this process while the body runs.

    The name of a new run is taken from here on. If the body does not begin the run, the name is free again. In the body
    SIGTERM acts as Ctrl-C.
    """
    config = spec.config
    given = folder_of(config.run.output, config.run.name) if config.run.name is not None else None

    def check(folder: Folder) -> Run | None:
        if not config.run.resume and not is_of_this_submission(folder):
            require_new(config.run.output, folder.place.name)
            return None
        name = folder.place.name
        run = require_run(folder)
        require_secrets(f"the run {name}", config, run.record)
        require_same(f"the run {name}", spec.key, run.record, name, "a resumed run keeps its options")
        return run

    def choose() -> Folder:
        """The given folder, or one with a new name, created at once so that no other run takes it."""
        names = new_names(spec.job.name, config, config.method)
        return given or next(folder for name in names if (folder := folder_of(config.run.output, name)).make())

    if given is not None:  # before the store is opened, which creates it
        wait_for_answer(partial(check, given), config.run.tracking_patience)
    with _reserved("run", config, choose, check) as reserved:
        logs.bind_context(run=reserved.name, job=spec.job.name)
        reserved.spec = spec
        yield reserved


def reserved_group(kind: Kind, config: RunConfig, folder: Folder) -> contextlib.AbstractContextManager[ActiveRun]:
    """Reserve a group of runs, new or earlier, for this process while the body runs; SIGTERM acts as Ctrl-C."""
    return _reserved(kind, config, lambda: folder, lambda locked: read_run(locked, kind))


@contextlib.contextmanager
def _reserved(
    kind: Kind, config: RunConfig, choose: Callable[[], Folder], check: Callable[[Folder], Run | None]
) -> Iterator[ActiveRun]:
    """Lock the folder, then check it: another process may have changed it before."""
    new_output, patience = not config.run.output.exists(), config.run.tracking_patience
    store = wait_for_answer(partial(Store.open, config.run.output, config.run.tracking_uri), patience)
    with sigterm_as_interrupt() as termination:
        folder = choose()
        folder.make()
        with _held(folder, kind):
            run = wait_for_answer(partial(check, folder), patience)
            if run is None:
                folder.empty()  # at an address: left from a run of this name that was removed from the storage
            else:
                wait_for_answer(partial(_require_same_store, store, run), patience)
                _require_same_place(config, run)
            reserved = ActiveRun(kind, folder, store, run, termination=termination, patience=patience)
            try:
                yield reserved
            finally:
                if run is None and not hasattr(reserved, "run"):  # it has not begun
                    shutil.rmtree(folder.path, ignore_errors=True)
                with contextlib.suppress(OSError):  # a folder that is not empty
                    for above in list(folder.path.parents)[: 1 + new_output]:
                        above.rmdir()


def _held(folder: Folder, kind: Kind) -> contextlib.ExitStack:
    """Hold the folder alone. An earlier process of this submission, which the head node may have left, is waited for.

    Raises HeldError if another process works there.
    """
    end, waited = time.monotonic() + _EARLIER_SECONDS, False
    while True:
        try:
            with contextlib.ExitStack() as held:
                held.enter_context(folder.locked(kind, user_name()))
                held.enter_context(leased(folder, kind, user_name()))
                return held.pop_all()
        except HeldError as error:
            if not error.holder.same_submission or time.monotonic() > end:
                raise
            if not waited:
                logs.info(f"{error.line}; it is of this submission, and its end is waited for")
            waited = True
        time.sleep(_EVERY_SECONDS)


def _require_same_store(store: Store, run: Run) -> None:
    """Refuse a store (InputError) that lacks the run since it is another one, not the run's at another address."""
    if run.record["store"] == redact(store.uri) or run.run_id is None or store.recover_run(run.run_id) != "lost":
        return
    begun = f"the {run.record['kind']} {run.name} was started with {run.record['store']}"
    raise InputError(f"--tracking-uri {redact(store.uri)}: {begun}")


def _require_same_place(config: RunConfig, run: Run) -> None:
    """Refuse another experiment or tag (InputError) than MLflow's run was made with."""
    what, tracking = f"the {run.record['kind']} {run.name}", run.record["tracking"]
    if config.run.experiment not in (None, tracking["experiment"]):
        raise InputError(f"--experiment {config.run.experiment}: {what} is in {tracking['experiment']}; leave it out")
    for name, value in without_secrets(config.run.tags).items():
        if tracking["tags"].get(name) != value:
            raise InputError(f"--tag {name}={value}: {what} was started without it; leave it out, or add it in MLflow")


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


def require_own(folder: Folder, group: str) -> None:
    """Refuse a folder for a run of a group that has something else: a run of its own, or no run (InputError)."""
    try:
        record = read_record(folder)
    except InputError:  # damaged: a run of the group begins again, anything else stays as it is
        if not _names_group(folder, group):
            raise
        return
    if record is None:  # in a power failure a group's run may lose its record alone
        require_no_other_files(folder, group, BEFORE_RECORD | {EVENTS, CURSOR, CHECKPOINTS})
    elif record.get("group") != group:
        raise InputError(f"--name {group}: {folder.display_path} is a run of its own; give another name")


def _names_group(folder: Folder, group: str) -> bool:
    """Whether a record that cannot be read names this group, or is empty, as a power failure leaves it."""
    text = (folder.path / RECORD).read_text(encoding="utf-8", errors="replace")
    return not text.strip("\0 \n") or f'"group": {json.dumps(group)}' in text


@contextlib.contextmanager
def open_run(active: ActiveRun, record: Mapping[str, Any], info: Info) -> Iterator[ActiveRun]:
    """Begin or resume a run or group; at the end, record in its folder and in MLflow how it ended.

    ``record`` is that of a new one. An InputError before the first evaluation removes a new run; else all is kept.
    """
    run = _create(active, record) if active.earlier is None else _resume(active, active.earlier, info)
    active.run, active.mirror = run, Mirror(active.store)
    active.mirror.add(run)
    seconds = _SENDING_SECONDS
    try:
        with disk_errors_in_one_line(run.folder.path):
            run.append("began", resumed=active.resumed)
            if is_submitted():
                info(f"{BEGUN}{active.kind} {run.name}")
            yield active
            active.end("FINISHED", **active.report)
            seconds = max(seconds, 60 * active.patience)
            if active.kind == "run":
                index_run(run)
    except BaseException as error:
        if active.is_stop(error):
            _close(active, "KILLED")
            again = _continuation(active)
            if active.kind == "run" and not run.checkpoints:
                raise StoppedError(f"stopped before the first checkpoint; {again} begins again") from None
            raise StoppedError(f"stopped; continue with {again}") from None
        untouched = not (active.resumed or run.evaluations or run.checkpoints or run.asked)
        if isinstance(error, InputError) and untouched and not _removed(run.folder):
            active.mirror.discard()
            with contextlib.suppress(RunFailedError):
                active.store.delete_run(str(run.run_id))
            run.folder.delete()
            raise
        seconds = _DISK_SENDING_SECONDS if isinstance(error, DiskError) else seconds
        _close(active, "FAILED")
        if isinstance(error, Exception) and (gone := _removed(run.folder)):
            seconds = 0.0  # the events are also gone
            raise RunFailedError(gone) from error
        raise
    finally:
        unsent = active.mirror.close(seconds)
        run.close()
        if unsent and run.folder.exists():
            again = f"--name {run.name}" + (" --resume" if active.kind == "run" else "")
            info(f"tracking did not answer: {unsent} events are kept in {run.folder.display_path} and sent by {again}")


def _continuation(active: ActiveRun) -> str:
    """How to continue a run that was stopped: options for the same command, or the call of Python's interface."""
    if active.spec is None or not active.spec.job.from_python:
        return f"--name {active.name} --resume"
    options = {"name": active.name, "resume": True, "output": active.spec.config.run.output}
    return active.spec.job.continuation("train", options=options)


def _create(active: ActiveRun, record: Mapping[str, Any]) -> OpenRun:
    """Create the record and its MLflow run; if one fails, both are removed."""
    folder, asked = active.folder, False

    def start() -> OpenRun:
        nonlocal asked
        written = write_record(folder, active.kind, record)
        with contextlib.ExitStack() as opened:
            run = opened.enter_context(contextlib.closing(OpenRun(folder, written)))
            unsure, asked = asked, True  # an answer may be lost
            track(active.store, run, unsure=unsure)
            opened.pop_all()
        return run

    try:
        run = wait_for_answer(start, active.patience)
    except BaseException as error:
        folder.delete()
        if isinstance(error, DiskError):
            where = display_path(folder.place.parent.parent)
            raise InputError(f"--output {where}: cannot be written to; {error}") from error
        raise
    return run


def _resume(active: ActiveRun, earlier: Run, info: Info) -> OpenRun:
    """An earlier run or group, open; if the store has lost its MLflow run, a new one takes all events."""
    run = OpenRun(active.folder, earlier.record)

    def resume() -> None:
        if line := recover(active.store, run):
            info(line)
        if run.run_id is None:  # or a run of a group, which ended before MLflow had it
            track(active.store, run, unsure=True)
        else:
            active.store.resume_run(run.run_id)

    try:
        wait_for_answer(resume, active.patience)
    except BaseException:
        run.close()
        raise
    if run.record["store"] != redact(active.store.uri):  # the output folder was moved
        run.describe(store=redact(active.store.uri))
    if active.spec is not None and any(each.part == "source" for each in active.spec.key.differences(run.record)):
        info("warning: the job's file has changed since the run began; what it learned with the earlier text is kept")
        run.describe(key={})  # the result is of neither text alone
    return run


def _close(active: ActiveRun, status: Status) -> None:
    """Record that the run did not finish; if its folder is gone, in MLflow alone."""
    try:
        active.end(status)
    except RunFailedError:
        with contextlib.suppress(RunFailedError):
            active.store.finish_run(str(active.run.run_id), status)


def _removed(folder: Folder) -> str | None:
    """The error for a folder that was removed during its run; None if its record exists."""
    with contextlib.suppress(StorageError):  # reported where it matters
        if RECORD not in folder.names():
            return f"{folder.display_path}: was removed while the run was at work"
    return None


@contextlib.contextmanager
def reopened(run: Run, mirror: Mirror, group: OpenRun | None = None) -> Iterator[OpenRun]:
    """A run that ended, open for a later end; MLflow gets the events that it does not have."""
    with contextlib.closing(OpenRun(run.folder, run.record)) as opened:
        mirror.add(opened, group)
        yield opened
        mirror.finish(opened)


def send_again(run: Run, store: Store) -> tuple[Run, int]:
    """Give MLflow what it lacks of a run that ended, or all of it if its MLflow run was deleted or lost.

    Returns the run, perhaps with another MLflow run, and the number of events that are still not sent.
    """
    mirror = Mirror(store)
    with reopened(run, mirror) as opened:
        return opened, mirror.close(_SENDING_SECONDS)


def tracked_id(folder: Folder, store: Store) -> str:
    """The id of a finished run's MLflow run, which exists: one that was deleted or lost is restored or made again."""
    with folder.locked("run"):
        run = require_run(folder)
        _require_same_store(store, run)
        run, unsent = send_again(run, store)
    if run.run_id is None:
        raise RunFailedError(f"tracking at {redact(store.uri)} did not take run {run.name}: {unsent} events are kept")
    return run.run_id


class Member(ActiveRun):
    """A run of an open group, locked and open in the group's process; other processes train it."""

    def __init__(self, spec: RunSpec, group: ActiveRun) -> None:
        """Begin it, or go on with what an earlier process left of it."""
        assert spec.name is not None
        folder = folder_of(group.run.output, spec.name)
        folder.make()
        with contextlib.ExitStack() as lock:
            lock.enter_context(folder.locked("run", user_name()))
            lock.enter_context(leased(folder, "run", user_name()))
            earlier = None
            with contextlib.suppress(InputError):  # of an earlier version, or damaged
                earlier = read_run(folder)
            if earlier is None or earlier.status == "FAILED" or any(spec.key.differences(earlier.record)):
                earlier = None
                folder.empty()
                record = {**spec.record(group.store), "group": group.name}
                record["tracking"]["experiment"] = group.run.record["tracking"]["experiment"]
            super().__init__("run", folder, group.store, earlier, spec)
            self.run = OpenRun(folder, write_record(folder, "run", record) if earlier is None else earlier.record)
            self._lock = lock.pop_all()
        self.spec: RunSpec = spec
        self.mirror = group.mirror
        self.mirror.add(self.run, group.run)  # before its first event: the mirror sees whether it had events
        self.begin()

    def begin(self) -> None:
        """Note that it begins, or that it goes on from its last checkpoint.

        The event of a checkpoint may be lost with the process that wrote it, which sends its events with each
        evaluation. It is complete when it has its name, and counts if the evaluations up to it are recorded: training
        does not repeat them.
        """
        for name in sorted({*self.run.folder.names(CHECKPOINTS)} - {*self.run.checkpoints}):
            path = self.run.folder.path / CHECKPOINTS / name
            if path.exists() and not name.endswith(".new") and self._is_evaluated_up_to(path):
                self.run.append("checkpoint", round(1000 * path.stat().st_mtime), name=name, step=checkpoint_step(name))
        self.run.append("began", resumed=bool(self.run.checkpoints))

    def _is_evaluated_up_to(self, checkpoint: Path) -> bool:
        epoch, step = max(self.run.evaluations, default=(0, -1))
        config = self.spec.config
        if checkpoint_step(checkpoint.name) <= step:
            return True
        if self.spec.job.job.loop is not None or not isinstance(config, TrainConfig):
            return False  # the job's own loop evaluates when it will
        with contextlib.suppress(CheckpointError):
            reached = read_progress(checkpoint).epoch
            return not any(epoch < due <= reached for due in config.schedule.evaluated_after)
        return False

    def end(self, status: Status, **fields: Any) -> None:
        """Record its end, and let it go."""
        with contextlib.suppress(RunFailedError) if status == "KILLED" else contextlib.nullcontext():
            super().end(status, **fields)
        self.mirror.finish(self.run)
        self.run.close()
        self._lock.close()
