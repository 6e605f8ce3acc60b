"""The tags of a run in MLflow: versions, the job's file, its commit, the submission."""

import os
import platform
import subprocess
from pathlib import Path

import torch

import concord
from concord.machine import machine

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
        "mlflow.source.name": _source_name(Path(path)),
        "mlflow.source.type": "LOCAL",
    }
    if "CONCORD_SUBMISSION" in os.environ:
        submission, dashboard = os.environ["CONCORD_SUBMISSION"], os.environ.get("CONCORD_DASHBOARD", "")
        tags |= {"ray.submission": submission, "ray.dashboard": f"{dashboard}/#/jobs/{submission}"}
    commit = _git(Path(path).parent, "rev-parse", "HEAD")
    if commit is None:
        return tags
    # MLflow's own tag for its UI, and one that marks changes since the commit.
    return tags | {
        "mlflow.source.git.commit": commit,
        "concord.commit": _described(Path(path).parent) or commit,
    }


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
