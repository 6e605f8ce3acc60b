"""The folder and the name of a run, and the form of its options in the record."""

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from concord.options import OptionGroup, from_plain, option_values, options_of
from concord.record import Kind
from concord.redaction import is_hidden, without_secrets
from concord.storage import Folder, display_path, is_remote
from concord.training.options import RunConfig

Config = TypeVar("Config", bound=OptionGroup)
# They belong to the machine that gives the command, and a tracking URI may hold a password.
NOT_RECORDED = frozenset({"tracking_uri", "address"})
FOLDERS: Mapping[Kind, str] = {"run": "runs", "study": "studies", "comparison": "comparisons"}  # in the output folder


def run_folder(output: Path, name: str) -> Folder:
    """The folder of a run of this name."""
    return Folder(output) / FOLDERS["run"] / name


def plain_name(job: str, otherwise: str) -> str:
    """A job's name with plain letters, digits and ``-_.`` alone; ``otherwise`` if it has none of them."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", job).strip("-._") or otherwise


def new_names(job: str, config: RunConfig, kind: str | None = None) -> Iterator[str]:
    """A name of job, kind of run and time, at an address with a random part; then the same name with numbers."""
    name = "-".join([plain_name(job, "run"), *([kind] if kind else []), f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}"])
    # This machine may not reach the address, so it cannot check for a unique name.
    name = f"{name}-{secrets.token_hex(3)}" if is_remote(config.run.output) else name
    return itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))


def recorded_config(config: OptionGroup) -> dict[str, Any]:
    """A configuration as JSON, without secrets and options of this machine."""
    values = {key: value for key, value in option_values(config).items() if key not in NOT_RECORDED}
    return without_secrets(
        {key: display_path(value) if isinstance(value, Path) else value for key, value in values.items()}
    )


def restored_config(defaults: Config, recorded: Mapping[str, Any]) -> Config:
    """These options with the values of a record; values of unknown options are left out.

    Secrets, which are not recorded, keep their values.
    """
    known = {name: value for name, value in recorded.items() if not is_hidden(value)}
    return defaults.with_options(**from_plain(options_of(type(defaults)), known))
