"""Checks that a run or a study resumes with the options, data, files and secrets of its beginning."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from concord.errors import InputError
from concord.options import NEEDED, flag_of, option_values
from concord.record import require_record
from concord.redaction import HIDDEN, is_hidden, is_secret
from concord.runs.run_folder import recorded_config
from concord.storage import Folder, resolve
from concord.training.options import RunConfig


def require_resumable(
    job: str, config: RunConfig, kept: Folder, placement: Collection[str], defaults: RunConfig
) -> dict[str, Any]:
    """The record of a run that can resume with this configuration; ``placement`` has the options that may differ."""
    record = require_record(kept)
    if record["job"] != job:
        raise InputError(f"--name {config.run.name}: is a run of job {record['job']}, not of {job}")
    ours = json.loads(json.dumps(recorded_config(config.resolve())))
    theirs = json.loads(json.dumps(recorded_config(_at_defaults(config, defaults).resolve()))) | record["config"]
    require_secrets(f"the run {config.run.name}", ours, record["config"])
    for option in ours:
        if is_secret(option) or option in placement:  # the record has no values of secrets
            continue
        if ours[option] != theirs[option]:
            raise InputError(
                f"{flag_of(option)} {ours[option]}: the run {config.run.name} was started with "
                f"{theirs[option]}; a resumed run keeps its options"
                + (f", and {HIDDEN} is not recorded" if is_hidden(theirs[option]) else "")
            )
    require_same_sources(f"the run {config.run.name}", config.sources(), record.get("sources", {}))
    return record


def _at_defaults(config: RunConfig, defaults: RunConfig) -> RunConfig:
    """The configuration with every option at its default; required options stay."""
    values = {name: value for name, value in option_values(defaults).items() if value is not NEEDED}
    paths = {name: resolve(value) for name, value in values.items() if isinstance(value, Path)}
    return config.with_options(**(values | paths))


def require_secrets(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse to resume without a secret option that was given at the start, since no record has it (InputError).

    Both configurations are as :func:`recorded_config` gives them.
    """
    for option, value in theirs.items():
        if is_secret(option) and is_hidden(value) and not is_hidden(ours.get(option)):
            named = flag_of(option)
            raise InputError(f"{named}: {what} was started with one, and secrets are not recorded; give it again")


def require_same_data(name: str, ours: str | None, theirs: str | None) -> None:
    """Refuse to resume a run with another version of its data (InputError); None is unknown."""
    if ours is not None and theirs is not None and ours != theirs:
        raise InputError(
            f"--name {name}: the run was started with data of version {theirs}, and these have version {ours}; restore "
            "the data, or give another name without --resume"
        )


def require_same_sources(what: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Refuse to resume if a file that an option names has changed (InputError)."""
    for name, source in ours.items():
        if source != theirs.get(name):
            raise InputError(
                f"{name}: {what} was started with another text of this file; leave it out to resume with that text"
            )
