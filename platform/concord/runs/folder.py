"""A run's folder, and what is recorded there of the run."""

import contextlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from concord.errors import InputError
from concord.options import OptionGroup, from_plain, option_values, options_of
from concord.redaction import is_hidden, without_secrets
from concord.storage import Folder, StorageError, display_path, is_remote
from concord.tracking import Store
from concord.training.options import RunConfig

Config = TypeVar("Config", bound=OptionGroup)

RECORD = "run.json"


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


def missing_run(folder: Folder) -> str | None:
    """What became of a run that was begun in this folder and is not there any more, in a line; None if it is there."""
    with contextlib.suppress(StorageError):  # which is said where it stands in the way
        if RECORD not in folder.names():
            return f"{folder.display_path}: was removed while the run was at work"
    return None


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
