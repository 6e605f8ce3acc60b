"""Where a run is kept, what it is called, and its options as its record has them."""

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from concord.options import OptionGroup, from_plain, option_values, options_of
from concord.redaction import is_hidden, without_secrets
from concord.storage import Folder, display_path, is_remote
from concord.training.options import RunConfig

Config = TypeVar("Config", bound=OptionGroup)


def run_folder(output: Path, name: str) -> Folder:
    """Where a run of this name is kept."""
    return Folder(output) / "runs" / name


def new_name(job: str, config: RunConfig, kind: str | None = None) -> str:
    """A name from the job, what kind of run it is, and the time; runs at an address get one that no other has."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", job).strip("-._") or "run"
    name = "-".join([plain, *([kind] if kind else []), f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}"])
    # An address may be out of this machine's reach, and not of the one that will run it.
    return f"{name}-{secrets.token_hex(3)}" if is_remote(config.run.output) else name


def recorded_config(config: OptionGroup) -> dict[str, Any]:
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
