"""A run's folder and its entry in MLflow: reserved, begun or found again, and closed so that both say how it ended."""

import contextlib
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

import concord
from concord import logs
from concord.errors import InputError, RunFailedError, StoppedError
from concord.options import NEEDED, OptionGroup, defaults_of, flag_of, from_plain, option_values, options_of
from concord.redaction import HIDDEN, is_hidden, is_secret, without_secrets
from concord.runs.termination import Termination, sigterm_as_interrupt
from concord.storage import LOCK, OWNER, Folder, StorageError, TakenOverError, display_path, is_remote, resolve
from concord.tracking import Store, redact
from concord.tracking.store import Status
from concord.training.options import RUNTIME_OPTIONS, RunConfig

Config = TypeVar("Config", bound=OptionGroup)

RECORD = "run.json"
# What the folder of a run may have before there is a record of it.
_BEFORE_RECORD = frozenset({LOCK, OWNER, f"{RECORD}.new"})


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


@dataclass(frozen=True)
class RunFolder:
    """A run that is begun.

    Attributes:
        name: the run's name.
        kept: where its files are kept.
        store: MLflow's.
        run_id: in MLflow.
        resumed: whether it was there before.
    """

    name: str
    kept: Folder
    store: Store
    run_id: str
    resumed: bool

    @property
    def folder(self) -> Path:
        """Where its files are on this machine."""
        return self.kept.path

    def record(self, **more: Any) -> None:
        """Add to what is recorded of the run; other files that are to last are kept before."""
        write_record(self.folder, (read_record(self.folder) if (self.folder / RECORD).exists() else {}) | more)
        self.kept.keep(RECORD)


def run_folder(output: Path, name: str) -> Folder:
    """Where a run of this name is kept."""
    return Folder(output) / "runs" / name


def new_name(job: str, config: RunConfig, kind: str | None = None) -> str:
    """A name from the job, what kind of run it is, and the time; runs at an address get one that no other has."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", job).strip("-._") or "run"
    name = "-".join([plain, *([kind] if kind else []), f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}"])
    # An address may be out of this machine's reach, and not of the one that will run it.
    return f"{name}-{secrets.token_hex(3)}" if is_remote(config.run.output) else name


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
        _resumed(job, config, given, placement, defaults) if config.run.resume else _require_new(given, config)
    store = Store.open(config.run.output, config.run.tracking_uri)
    with contextlib.ExitStack() as held:
        termination = held.enter_context(sigterm_as_interrupt())
        record = None
        if given is not None and config.run.resume:
            folder = given
            held.enter_context(folder.locked("run"))
            record = _resumed(job, config, folder, placement, defaults)  # who had it may have gone on with it until now
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
def run_lifecycle(reserved: ReservedRun, tags: Mapping[str, str], experiment: str | None = None) -> Iterator[RunFolder]:
    """Begin a run or go on with it, and see that MLflow says how it ended.

    Wrong input that is found before anything was done leaves nothing of a new run. Everything else is kept: a run that
    was there before, and what is left of one whose folder went away.

    Args:
        reserved: the run.
        tags: what is to be known of it, in MLflow.
        experiment: in MLflow; None takes the job's name.

    Raises:
        StoppedError: by Ctrl-C or SIGTERM.
    """
    run = _begun(reserved, tags, experiment)
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


def _begun(reserved: ReservedRun, tags: Mapping[str, str], experiment: str | None) -> RunFolder:
    config, store = reserved.config, reserved.store
    kept = reserved.folder.claimed()
    if reserved.record is not None:
        run_id: str = reserved.record["run_id"]
        store.resume_run(run_id)
        return RunFolder(reserved.name, kept, store, run_id, True)
    recorded = recorded_config(config)
    left_out = config.unused()
    parameters = {key: value for key, value in recorded.items() if value is not None and key not in left_out}
    run_id = store.start_run(experiment or reserved.job, reserved.name, parameters, tags)
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


def missing_run(folder: Folder) -> str | None:
    """What became of a run that was begun in this folder and is not there any more, in a line; None if it is there."""
    with contextlib.suppress(StorageError):  # which is said where it stands in the way
        if RECORD not in folder.names():
            return f"{folder.display_path}: was removed while the run was at work"
    return None


def _is_untouched(run: RunFolder) -> bool:
    """Whether nothing was done in a run, as far as can be told: the folder is its own, and has no checkpoint."""
    try:
        run.kept.check_claim()
        done = [name for name in run.kept.names("checkpoints") if name.startswith("checkpoint_")]
        return kept_record(run.kept)["run_id"] == run.run_id and not done
    except (StorageError, TakenOverError, InputError):
        return False


def _close(run: RunFolder, status: Status) -> None:
    """Say in MLflow how the run ended, unless another process went on with it."""
    try:
        run.kept.check_claim()
    except TakenOverError:
        if missing_run(run.kept) is None:
            return
    except StorageError:
        pass  # what cannot be asked has not changed, as far as anybody knows
    with contextlib.suppress(RunFailedError):
        run.store.finish_run(run.run_id, status)


def _resumed(
    job: str, config: RunConfig, kept: Folder, placement: Collection[str], defaults: RunConfig
) -> dict[str, Any]:
    record = kept_record(kept)
    if record["job"] != job:
        raise InputError(f"--name {config.run.name}: is a run of job {record['job']}, not of {job}")
    ours = recorded_config(config.resolved())
    # A run of a version that did not have an option yet was one with what is its default now, and earlier versions
    # recorded what was asked for instead of what it stood for.
    recorded = recorded_config(_at_defaults(config, defaults)) | without_secrets(record["config"])
    theirs = recorded_config(restored_config(config, recorded).resolved())
    theirs |= {option: value for option, value in recorded.items() if option in theirs and is_hidden(value)}
    require_secrets(f"the run {config.run.name}", ours, recorded)
    for option in ours:
        if is_secret(option):  # what is recorded of it is only that it was given
            continue
        if option not in placement and json.loads(json.dumps(ours[option])) != json.loads(json.dumps(theirs[option])):
            raise InputError(
                f"{flag_of(option)} {ours[option]}: the run {config.run.name} was started with "
                f"{theirs[option]}; a resumed run keeps its options"
                + (f", and {HIDDEN} is not recorded" if is_hidden(theirs[option]) else "")
            )
    require_same_sources(f"the run {config.run.name}", config.sources(), record.get("sources", {}))
    return record


def _at_defaults(config: RunConfig, defaults: RunConfig) -> RunConfig:
    """The configuration with every option at its default; one that has none stays."""
    values = {name: value for name, value in option_values(defaults).items() if value is not NEEDED}
    paths = {name: resolve(value) for name, value in values.items() if isinstance(value, Path)}
    return config.with_options(**(values | paths))


def require_secrets(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse to go on without an option that was a secret at the start, since no record has it (InputError).

    Args:
        what: that goes on.
        ours, theirs: the configuration now and then, each as :func:`recorded_config` gives it.
    """
    for option, value in theirs.items():
        if is_secret(option) and is_hidden(value) and not is_hidden(ours.get(option)):
            named = flag_of(option)
            raise InputError(f"{named}: {what} was started with one, and secrets are not recorded; give it again")


def require_same_sources(what: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Refuse to go on with another text of a file that an option names (InputError).

    Args:
        what: that goes on.
        ours, theirs: the files' texts by their names, now and at the start, see :meth:`RunConfig.sources`.
    """
    for name, source in ours.items():
        if source != theirs.get(name):
            raise InputError(
                f"{name}: {what} was started with another text of this file; leave it out to go on with that text"
            )


def kept_record(kept: Folder) -> dict[str, Any]:
    """What :func:`read_record` gives, of a run that may have been begun on another machine.

    Raises:
        InputError: there is no run there, or the storage does not answer.
    """
    try:
        kept.fetch(RECORD)
    except StorageError as error:
        raise InputError(f"--output {error}") from error
    try:
        return read_record(kept.path)
    except InputError:
        if kept.remote and not (kept.path / RECORD).exists():
            output = display_path(kept.place.parent.parent)
            raise InputError(f"--name {kept.place.name}: there is no such run in {output}") from None
        raise


def read_record(folder: Path) -> dict[str, Any]:
    """What is recorded of a run at its start: ``job``, ``run_id``, ``config``.

    Raises:
        InputError: there is no run there.
    """
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
        if not (isinstance(record, dict) and record.keys() >= {"job", "run_id", "config"}):
            raise ValueError("it is no record of a run")
    except FileNotFoundError as error:
        raise InputError(f"--name {folder.name}: there is no such run in {folder.parent.parent}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"--name {folder.name}: {folder / RECORD} cannot be read ({error})") from error
    return record


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace a run's record, at once and as a whole."""
    new = folder / f"{RECORD}.new"
    new.write_text(json.dumps(record, indent=1))
    new.replace(folder / RECORD)


def recorded_config(config: RunConfig) -> dict[str, Any]:
    """A configuration as JSON, without what is secret or of this machine."""
    # A tracking URI may hold a password; a run's record needs none.
    values = {key: value for key, value in option_values(config).items() if key not in {"tracking_uri", "address"}}
    return without_secrets(
        {key: display_path(value) if isinstance(value, Path) else value for key, value in values.items()}
    )


def restored_config(defaults: Config, recorded: Mapping[str, Any]) -> Config:
    """The options from their form in a record, over these; what there is no option for is left out.

    A secret, which is not recorded, stays as it is.
    """
    known = {name: value for name, value in recorded.items() if not is_hidden(value)}
    return defaults.with_options(**from_plain(options_of(type(defaults)), known))


def run_tags(job: str, path: str, environments: int | None = None, data: str | None = None) -> dict[str, str]:
    """What is to be known of any run of a job: versions, of its data too, training environments, the file's commit."""
    tags = {
        "concord.version": concord.__version__,
        "concord.job": job,
        **({"concord.environments": str(environments)} if environments is not None else {}),
        **({"concord.data": data} if data is not None else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        # MLflow's own, for its interface.
        "mlflow.source.name": _source_name(Path(path)),
        "mlflow.source.type": "LOCAL",
    }
    if "CONCORD_SUBMISSION" in os.environ:
        submission, dashboard = os.environ["CONCORD_SUBMISSION"], os.environ.get("CONCORD_DASHBOARD", "")
        tags |= {"ray.submission": submission, "ray.dashboard": f"{dashboard}/#/jobs/{submission}"}
    commit = _git(Path(path).parent, "rev-parse", "HEAD")
    if commit is None:
        return tags
    # MLflow's own tag for its interface, and one that also says whether anything was changed since the commit.
    described = _git(Path(path).parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return tags | {"mlflow.source.git.commit": commit, "concord.commit": described or commit}


def _source_name(path: Path) -> str:
    """The job's file, from the top of its checkout if it is in one: the rest of the path is of one machine."""
    top = _git(path.parent, "rev-parse", "--show-toplevel")
    return str(path.relative_to(top)) if top is not None and path.is_relative_to(top) else path.name


def _git(folder: Path, *words: str) -> str | None:
    """What git says of the checkout the job lives in, if it lives in one."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
