"""A run's folder and its entry in MLflow: begun or found again, and closed such that both say how it ended."""

import contextlib
import dataclasses
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
from typing import Any, get_type_hints

import torch

import concord
from concord import logs
from concord.errors import InputError, RunFailedError, StoppedError
from concord.redaction import HIDDEN, is_hidden, is_secret, without_secrets
from concord.storage import Folder, StorageError, is_remote, settled, shown
from concord.tracking import Store, redact
from concord.training.config import PLACEMENT_OPTIONS, RunConfig

RECORD = "run.json"


@dataclass(frozen=True)
class Lineage:
    """Where a run's configuration came from.

    Attributes:
        experiment: in MLflow, in place of the job's.
        tags: of the run and of the registered version.
    """

    experiment: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class RunFolder:
    """A run that is begun.

    Attributes:
        name: the run's name.
        kept: where its files are kept.
        store: MLflow's.
        run_id: in MLflow.
        resumed: whether it was there before.
        report: what the run reported, as JSON, if it is finished.
    """

    name: str
    kept: Folder
    store: Store
    run_id: str
    resumed: bool
    report: dict[str, Any] | None = None

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
    """A name that no run in the output folder has, from the job, what kind of run it is, and the time."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", job).strip("-._") or "run"
    name = "-".join([plain, *([kind] if kind else []), f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}"])
    if is_remote(config.output):  # which may be out of this machine's reach, and not of the one that will run it
        return f"{name}-{secrets.token_hex(3)}"
    taken = run_folder(config.output, name).exists()
    return f"{name}-{os.getpid()}" if taken else name


def open_run(
    job: str,
    config: RunConfig,
    tags: Mapping[str, str],
    *,
    experiment: str | None = None,
    placement: Collection[str] = PLACEMENT_OPTIONS,
) -> RunFolder:
    """Begin a run, its folder and its entry in MLflow; or with ``config.resume`` find it again.

    Args:
        job: the job's name.
        config: the options, resolved; it has a name.
        tags: what is to be known of the run, in MLflow.
        experiment: in MLflow; None takes the job's name.
        placement: options that may differ when the run is resumed.

    Raises:
        InputError: the name is taken, or there is nothing to resume, or it was begun with other options.
    """
    name = config.name
    assert name is not None
    logs.know(run=name, job=job)
    kept = run_folder(config.output, name)
    record = _resumed(job, config, kept, placement) if config.resume else None
    if record is None and kept.exists():
        shown_output = shown(config.output)
        raise InputError(f"--name {name}: there is a run of this name in {shown_output}; add --resume to continue it")
    store = Store.open(config.output, config.tracking_uri)
    if record is not None:
        run_id: str = record["run_id"]
        if "report" in record:
            return RunFolder(name, kept, store, run_id, True, record["report"])
        if record.get("store", redact(store.uri)) != redact(store.uri):
            raise InputError(
                f"--tracking-uri {redact(store.uri)}: the run {name} was started with {record['store']}; "
                "a resumed run goes on there"
            )
        kept = kept.claimed()
        store.resume_run(run_id)
        return RunFolder(name, kept, store, run_id, True)
    kept = _begun(kept, config)
    recorded = recorded_config(config)
    try:
        left_out = config.unused()
        parameters = {key: value for key, value in recorded.items() if value is not None and key not in left_out}
        run_id = store.start_run(experiment or job, name, parameters, tags)
    except BaseException:
        kept.delete()
        raise
    return RunFolder(name, kept, store, run_id, False)


def _begun(kept: Folder, config: RunConfig) -> Folder:
    if kept.remote:
        shutil.rmtree(kept.path, ignore_errors=True)  # of a run of this name that was removed from the storage
        return kept.claimed()
    try:
        kept.path.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"--output {config.output}: not a folder to write to ({error.strerror})") from error
    return kept


@contextlib.contextmanager
def kept_honest(run: RunFolder, job: str, config: RunConfig) -> Iterator[None]:
    """Record how the run was begun, see that MLflow says how it ended, and that wrong input leaves nothing behind."""
    store, run_id = run.store, run.run_id
    try:
        if not run.resumed:
            recorded = recorded_config(config)
            run.record(job=job, run_id=run_id, store=redact(store.uri), config=recorded)
            store.log_json(run_id, recorded, "config.json")
        yield
    except InputError:
        if any(
            name.startswith("checkpoint_") for name in run.kept.names("checkpoints")
        ):  # work was done: that is kept, whatever is wrong now
            with contextlib.suppress(RunFailedError):
                store.finish_run(run_id, "FAILED")
        else:
            store.delete_run(run_id)
            run.kept.delete()
        raise
    except KeyboardInterrupt:
        with contextlib.suppress(RunFailedError):
            store.finish_run(run_id, "KILLED")
        raise StoppedError(f"stopped; continue with --name {run.name} --resume") from None
    except BaseException:
        with contextlib.suppress(RunFailedError):
            store.finish_run(run_id, "FAILED")
        raise


def _resumed(job: str, config: RunConfig, kept: Folder, placement: Collection[str]) -> dict[str, Any]:
    record = kept_record(kept)
    if record["job"] != job:
        raise InputError(f"--name {config.name}: is a run of job {record['job']}, not of {job}")
    ours = recorded_config(config)
    # A run of a version that did not have an option yet was one with what is its default now, and earlier versions
    # recorded what was asked for instead of what it stood for.
    recorded = recorded_config(_defaults(config)) | without_secrets(record["config"])
    theirs = recorded_config(restored_config(type(config), recorded).resolved())
    require_secrets(f"the run {config.name}", ours, recorded)
    for option in ours:
        if is_secret(option):  # what is recorded of it is only that it was given
            continue
        if option not in placement and json.loads(json.dumps(ours[option])) != json.loads(json.dumps(theirs[option])):
            raise InputError(
                f"--{option.replace('_', '-')} {ours[option]}: the run {config.name} was started with "
                f"{theirs[option]}; a resumed run keeps its options"
                + (f", and {HIDDEN} is not recorded" if is_hidden(theirs[option]) else "")
            )
    return record


def _defaults(config: RunConfig) -> RunConfig:
    """The configuration with every option at its default; one that has none stays."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    paths = {name: settled(value) for name, value in values.items() if isinstance(value, Path)}
    return dataclasses.replace(config, **(values | paths))


def require_secrets(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse to go on without an option that was a secret at the start, since no record has it (InputError).

    Args:
        what: that goes on.
        ours, theirs: the configuration now and then, each as :func:`recorded_config` gives it.
    """
    for option, value in theirs.items():
        if is_secret(option) and is_hidden(value) and not is_hidden(ours.get(option)):
            named = f"--{option.replace('_', '-')}"
            raise InputError(f"{named}: {what} was started with one, and secrets are not recorded; give it again")


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
            output = shown(kept.place.parent.parent)
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
    values = {key: value for key, value in vars(config).items() if key not in {"tracking_uri", "address"}}
    return without_secrets({key: shown(value) if isinstance(value, Path) else value for key, value in values.items()})


def restored_config(kind: type[Any], recorded: Mapping[str, Any], missing: Any = HIDDEN) -> Any:
    """An instance of a dataclass of options from its form in a record; what it has no option for is left out.

    A secret, which is not recorded, is the option's default; ``missing`` where it has none.
    """
    hints = get_type_hints(kind)
    values = {
        name: Path(value) if hints[name] in (Path, Path | None) and value is not None else value
        for name, value in recorded.items()
        if name in hints and not is_hidden(value)
    }
    for field in dataclasses.fields(kind):
        defaults = (field.default, field.default_factory)
        if is_hidden(recorded.get(field.name)) and all(default is dataclasses.MISSING for default in defaults):
            values[field.name] = missing
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


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
