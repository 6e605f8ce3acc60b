"""What a run is before it begins: its job, resolved options and key; its name, and what MLflow is told of it."""

import dataclasses
import itertools
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import concord
from concord.execution.key import Key, recorded_config, run_key
from concord.execution.patience import wait_for_answer
from concord.machine import machine
from concord.options import as_text, flag_of, option_values
from concord.record import Kind
from concord.redaction import redact, without_secrets
from concord.storage import display_path, is_remote, require_reachable, resolve
from concord.submitted import SUBMISSION, SUBMISSION_TAG, is_submitted
from concord.tracking import Store
from concord.tracking.mirror import tracking_key
from concord.tracking.store import OWNER
from concord.training.job import JobFile
from concord.training.options import ResolvedConfig, RunConfig, TrainConfig, device_of
from concord.user import user_name

_LONGEST_NAME = 150


@dataclass(frozen=True)
class GroupSpec:
    """What is recorded of a group of runs: a job, the options as given that its runs start from, and their key.

    Attributes:
        key: of all that the result depends on.
        stop_when: conditions that end a run early; they are part of its key.
        experiment: in MLflow, unless the user names another.
        parameters, tags: of its MLflow run.
        artifacts: JSON values that MLflow keeps with it, by file name.
        origin: machine, commit and version of the data, for kept results.
    """

    job: JobFile
    config: RunConfig
    key: Key
    stop_when: str = ""
    experiment: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)

    def record(self, store: Store, kind: Kind = "run") -> dict[str, Any]:
        """The record of the run before it begins, or of a group that starts from these options."""
        sources = self.config.sources()
        run = self.config.run
        named = run.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        tracking = {
            "experiment": named or self.experiment or self.job.name,
            "parameters": {name: as_text(value) for name, value in self.parameters.items()},
            "tags": {**self.tags, **tf32_tag(self.config), **without_secrets(run.tags)},
            "key": tracking_key(),
            **({"artifacts": self.artifacts} if self.artifacts else {}),
        }
        return {
            "kind": kind,
            "job": self.job.name,
            "store": redact(store.uri),
            "config": recorded_config(self.config),
            "key": self.key.as_json(),
            **({"stop_when": self.stop_when} if self.stop_when else {}),
            **({"sources": sources} if sources else {}),
            **({"origin": dict(self.origin)} if self.origin else {}),
            "tracking": tracking,
        }


@dataclass(frozen=True)
class RunSpec(GroupSpec):
    """A run to train: a job, its resolved options, and their key.

    Attributes:
        config: the options; a fold's have the environment that is left out.
        place: its place in the group that asks for it.
    """

    config: ResolvedConfig
    name: str | None = None
    place: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(job: JobFile, config: ResolvedConfig, data: str | None, stop_when: str = "", **further: Any) -> "RunSpec":
        """The run of these options; ``data`` is the version of its data, if known.

        Data without a version are told apart by their folder.
        """
        folder = config.data.data if isinstance(config, TrainConfig) else None
        if data is None and folder is not None:
            data = f"in {display_path(resolve(folder))}"
        unused, recorded = config.unused(), recorded_config(config)
        empty: tuple[object, ...] = (None, "", (), [])
        parameters = {name: value for name, value in recorded.items() if value not in empty and name not in unused}
        key = run_key(job, config, data, recorded, unused, stop_when=stop_when)
        spec = RunSpec(job, config, key, stop_when, parameters=parameters)
        return dataclasses.replace(spec, **further)


def resolved_paths(config: RunConfig) -> dict[str, Any]:
    """The options that are paths, made absolute (InputError if their storage cannot be reached)."""
    paths = {key: resolve(value) for key, value in option_values(config).items() if isinstance(value, Path)}
    for option in ("output", "data"):
        if option in paths:
            ask = partial(require_reachable, flag_of(option).removeprefix("--"), paths[option])
            wait_for_answer(ask, config.run.tracking_patience)
    return paths


def plain_name(text: str, otherwise: str) -> str:
    """A text with plain letters, digits and ``-_.`` alone; ``otherwise`` if it has none of them."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._")[:_LONGEST_NAME] or otherwise


def new_names(job: str, config: RunConfig, kind: str | None = None) -> Iterator[str]:
    """A name of job, kind of run and time, at an address with a random part; then the same name with numbers."""
    name = "-".join([plain_name(job, "run"), *([kind] if kind else []), f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}"])
    # This machine may not reach the address, so it cannot check for a unique name.
    name = f"{name}-{secrets.token_hex(3)}" if is_remote(config.run.output) else name
    return itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))


JOB = "concord.job"
"""The tag of the runs that are listed: all but those of groups, unless their models are registered."""


def run_tags(job: str, path: str, environments: int | None = None, data: str | None = None) -> dict[str, str]:
    """The tags of a job's run: versions (the data's included), training environments, the file's commit."""
    tags = {
        "concord.version": concord.__version__,
        JOB: job,
        **({"concord.environments": str(environments)} if environments is not None else {}),
        **({"concord.data": data} if data is not None else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        # MLflow's own tags, for its UI.
        **({OWNER: user} if (user := user_name()) is not None else {}),
        "mlflow.source.name": _source_name(Path(path)),
        "mlflow.source.type": "LOCAL",
    }
    if is_submitted():
        submission, dashboard = os.environ[SUBMISSION], os.environ.get("CONCORD_DASHBOARD", "")
        tags |= {SUBMISSION_TAG: submission, "ray.dashboard": f"{dashboard}/#/jobs/{submission}"}
    commit = _git(Path(path).parent, "rev-parse", "HEAD")
    if commit is None:
        return tags
    # MLflow's own tag for its UI, and one that marks changes since the commit.
    return tags | {
        "mlflow.source.git.commit": commit,
        "concord.commit": _described(Path(path).parent) or commit,
    }


def tf32_tag(config: RunConfig) -> dict[str, str]:
    """The operations that use TF32 in place of float32 on a GPU, by PyTorch's default or the user's setting."""
    if device_of(config) != "cuda":
        return {}
    precisions = {
        "matrix products": torch.backends.cuda.matmul.fp32_precision,
        "convolutions": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    }
    return {"torch.tf32": ", ".join(name for name, used in precisions.items() if used == "tf32") or "none"}


def run_origin(path: str, data: str | None = None) -> dict[str, str]:
    """The machine, the commit of the job's file (else Concord's version) and the data's version, for kept results."""
    commit = _described(Path(path).parent) or f"version {concord.__version__}"
    return {"machine": machine(), "commit": commit, **({} if data is None else {"data": data})}


def _described(folder: Path) -> str | None:
    """The commit of a checkout, marked if files were changed since; None without one."""
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _source_name(path: Path) -> str:
    """The job's file, relative to its git checkout if there is one: the rest of the path is of one machine."""
    top = _git(path.parent, "rev-parse", "--show-toplevel")
    return str(path.relative_to(top)) if top is not None and path.is_relative_to(top) else path.name


def _git(folder: Path, *words: str) -> str | None:
    """The output of git for the job's checkout; None without one."""
    try:
        found = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
