"""A run's life: reserved, begun or found again, and closed so that its folder and MLflow both say how it ended."""

import contextlib
import itertools
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from concord import logs
from concord.errors import InputError, RunFailedError, StoppedError
from concord.options import defaults_of
from concord.runs.folder import RECORD, RunFolder, kept_record, missing_run, new_name, recorded_config, run_folder
from concord.runs.resume import require_resumable
from concord.runs.termination import Termination, sigterm_as_interrupt
from concord.storage import LOCK, Folder, StorageError, display_path
from concord.tracking import Store, redact
from concord.tracking.store import Status
from concord.training.options import RUNTIME_OPTIONS, RunConfig

# What the folder of a run may have before there is a record of it.
_BEFORE_RECORD = frozenset({LOCK, f"{RECORD}.new"})


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
class ReservedRun:
    """A run that this process alone has. Nothing of it is changed until :func:`run_lifecycle`.

    Attributes:
        job: the job's name.
        config: the options, with the run's name.
        folder: where its files are kept.
        store: MLflow's.
        record: what is recorded of it; None for a new one.
        termination: whether this process was told to end.
        begun: whether it was begun, or went on.
    """

    job: str
    config: RunConfig
    folder: Folder
    store: Store
    record: dict[str, Any] | None
    termination: Termination
    begun: bool = False

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.place.name

    @property
    def report(self) -> dict[str, Any] | None:
        """What the run reported, as JSON, if it is finished."""
        return self.record.get("report") if self.record is not None else None


@contextlib.contextmanager
def reserved_run(
    job: str,
    config: RunConfig,
    kind: str | None = None,
    *,
    placement: Collection[str] = RUNTIME_OPTIONS,
    defaults: RunConfig | None = None,
) -> Iterator[ReservedRun]:
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
    if given is not None:  # before the store is opened, which makes one
        require_resumable(job, config, given, placement, defaults) if config.run.resume else _require_new(given, config)
    store = Store.open(config.run.output, config.run.tracking_uri)
    with contextlib.ExitStack() as held:
        termination = held.enter_context(sigterm_as_interrupt())
        record = None
        if given is not None and config.run.resume:
            folder = given
            held.enter_context(folder.locked("run"))
            record = require_resumable(
                job, config, folder, placement, defaults
            )  # who had it may have gone on with it until now
            if "report" not in record and record.get("store", redact(store.uri)) != redact(store.uri):
                raise InputError(
                    f"--tracking-uri {redact(store.uri)}: the run {folder.place.name} was started with "
                    f"{record['store']}; a resumed run goes on there"
                )
        else:
            folder = given or _made_up(job, config, kind)
            folder.make()
            held.enter_context(folder.locked("run"))
            _require_new(folder, config)
            folder.empty()  # at an address: of a run of this name that was removed from the storage
        name = folder.place.name
        logs.bind_context(run=name, job=job)
        reserved = ReservedRun(job, config.with_options(name=name), folder, store, record, termination)
        try:
            yield reserved
        finally:
            if record is None and not reserved.begun:
                shutil.rmtree(folder.path, ignore_errors=True)


def _made_up(job: str, config: RunConfig, kind: str | None) -> Folder:
    """A folder of its own for a new run, made in the moment in which its name is chosen."""
    name = new_name(job, config, kind)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for each in names if (folder := run_folder(config.run.output, each)).make())


def _require_new(folder: Folder, config: RunConfig) -> None:
    """Refuse a name that a run has (InputError). A folder that has no record yet is of a process that was killed."""
    try:
        names = set(folder.names())
    except StorageError as error:
        raise InputError(f"--output {error}") from error
    output = display_path(config.run.output)
    if RECORD in names:
        name = folder.place.name
        raise InputError(f"--name {name}: there is a run of this name in {output}; add --resume to continue it")
    if names - _BEFORE_RECORD:
        raise InputError(
            f"--name {folder.place.name}: {folder.display_path} is there, and is no run; give another name"
        )


@contextlib.contextmanager
def run_lifecycle(
    reserved: ReservedRun,
    tags: Mapping[str, str],
    experiment: str | None = None,
    derived: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[RunFolder]:
    """Begin a run or go on with it, and see that MLflow says how it ended.

    Wrong input that is found before anything was done leaves nothing of a new run. Everything else is kept: a run that
    was there before, and what is left of one whose folder went away.

    Args:
        reserved: the run.
        tags: what is to be known of it, in MLflow.
        experiment: in MLflow; None takes the job's name.
        derived: parameters in MLflow beside the options, which follow from them.

    Raises:
        StoppedError: by Ctrl-C or SIGTERM.
    """
    run = _begun(reserved, tags, experiment, derived)
    reserved.begun = True
    try:
        if not run.resumed:
            run.store.log_json(run.run_id, recorded_config(reserved.config), "config.json")
            for name, source in reserved.config.sources().items():
                run.store.log_text(run.run_id, source, name)
        yield run
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or reserved.termination.requested:
            _close(run, "KILLED")
            raise StoppedError(f"stopped; continue with --name {run.name} --resume") from None
        if isinstance(error, InputError) and not run.resumed and _is_untouched(run):
            run.store.delete_run(run.run_id)
            run.kept.delete()
            raise
        _close(run, "FAILED")
        if isinstance(error, Exception) and (gone := missing_run(run.kept)):
            raise RunFailedError(gone) from error
        raise


def _begun(
    reserved: ReservedRun, tags: Mapping[str, str], experiment: str | None, derived: Mapping[str, object]
) -> RunFolder:
    config, store = reserved.config, reserved.store
    kept = reserved.folder
    if reserved.record is not None:
        run_id: str = reserved.record["run_id"]
        store.resume_run(run_id)
        return RunFolder(reserved.name, kept, store, run_id, True)
    recorded = recorded_config(config)
    left_out = config.unused()
    parameters = {key: value for key, value in recorded.items() if value is not None and key not in left_out}
    run_id = store.start_run(experiment or reserved.job, reserved.name, {**parameters, **derived}, tags)
    run = RunFolder(reserved.name, kept, store, run_id, False)
    try:
        sources = {"sources": named} if (named := config.sources()) else {}
        run.record(job=reserved.job, run_id=run_id, store=redact(store.uri), config=recorded, **sources)
    except BaseException as error:
        with contextlib.suppress(RunFailedError):
            store.delete_run(run_id)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise InputError(
                f"--output {display_path(config.run.output)}: cannot be written to ({error.strerror})"
            ) from error
        raise
    return run


def _is_untouched(run: RunFolder) -> bool:
    """Whether nothing was done in a run, as far as can be told: the folder is its own, and has no checkpoint."""
    try:
        done = [name for name in run.kept.names("checkpoints") if name.startswith("checkpoint_")]
        return kept_record(run.kept)["run_id"] == run.run_id and not done
    except (StorageError, InputError):
        return False


def _close(run: RunFolder, status: Status) -> None:
    """Say in MLflow how the run ended."""
    with contextlib.suppress(RunFailedError):
        run.store.finish_run(run.run_id, status)
