"""Deletes runs, studies and comparisons: their folders, their runs in MLflow, and the models that come from them.

MLflow comes first and the folder, which names the MLflow run, last: after a kill the same command goes on.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from concord.errors import InputError
from concord.record import FOLDERS, RECORD, Kind, Run, folder_of, read_run
from concord.storage import Folder, display_path, leased
from concord.tracking import ModelVersion, Store
from concord.tracking.registry import delete_version, require_deletable, versions_of_runs
from concord.user import user_name


@dataclass(frozen=True)
class Deletion:
    """What is to be deleted.

    Attributes:
        named: the runs and groups that were named, with their kinds.
        runs: these, and the runs of the groups.
        shared: runs of the groups that other groups have as well, which stay.
        versions: the versions of registered models that come from the runs.
    """

    named: Sequence[tuple[Kind, Run]]
    runs: Sequence[tuple[Kind, Run]]
    shared: Sequence[str]
    versions: Sequence[ModelVersion]

    def lines(self) -> Iterator[str]:
        """What will be gone, for a question."""
        for kind, run in self.named:
            members = sum(each.record.get("group") == run.name for _, each in self.runs)
            yield f"{kind} {run.name}" + (f" with {members} runs" if kind != "run" else "")
        for version in self.versions:
            yield f"model {version.uri}"
        if self.shared:
            yield f"{len(self.shared)} runs stay, since other groups have them: {', '.join(self.shared[:3])}"


def plan_deletion(store: Store, output: Path, names: Sequence[str]) -> Deletion:
    """Find what is to be deleted (InputError for an unknown name, a run of a group, and what a champion needs)."""
    named = [_find(output, name) for name in dict.fromkeys(names)]
    groups = {run.name for kind, run in named if kind != "run"}
    elsewhere = _asked_by_others(output, groups)
    members = {each["run"]: None for kind, run in named if kind != "run" for each in run.asked}
    runs, shared = list(named), list[str]()
    for name in members:
        run = read_run(folder_of(output, name))
        if run is None or run.record.get("group") not in groups:
            continue
        if name in elsewhere:
            shared.append(name)
        else:
            runs.append(("run", run))
    owners = {str(run.run_id): run for _, run in runs if run.run_id is not None}
    versions = versions_of_runs(store, owners.keys())
    for version in versions:
        try:
            require_deletable(version)
        except InputError as error:
            raise InputError(f"delete {owners[str(version.run_id)].name}: {error}") from error
    return Deletion(named, runs, shared, versions)


def delete(store: Store, deletion: Deletion) -> None:
    """Delete it (InputError if a process is at work on one of the runs; nothing is deleted then)."""
    with ExitStack() as locks:
        for kind, run in deletion.named:  # a group's process holds its runs
            locks.enter_context(run.folder.locked(kind, user_name()))
            locks.enter_context(leased(run.folder, kind, user_name()))
        for version in deletion.versions:
            delete_version(store, version)
        # The groups last: they name their runs.
        for _, run in reversed(deletion.runs):
            if run.run_id is not None:
                store.delete_with_models(run.run_id)
            run.folder.delete()


def _find(output: Path, name: str) -> tuple[Kind, Run]:
    for kind in FOLDERS:
        run = read_run(folder_of(output, name, kind), kind)
        if run is None:
            continue
        if (group := run.record.get("group")) is not None and _group(output, group) is not None:
            raise InputError(f"delete {name}: is a run of {group}; delete that, or leave the run")
        return kind, run
    raise InputError(f"delete {name}: no run, study or comparison in {display_path(output)} has this name")


def _group(output: Path, name: str) -> Run | None:
    kinds: tuple[Kind, ...] = ("study", "comparison")
    return next((run for kind in kinds if (run := read_run(folder_of(output, name, kind), kind)) is not None), None)


def _asked_by_others(output: Path, groups: set[str]) -> set[str]:
    """The runs that groups other than these have."""
    found: set[str] = set()
    kinds: tuple[Kind, ...] = ("study", "comparison")
    for kind in kinds:
        above = Folder(output) / FOLDERS[kind]
        for name in above.names():
            if name in groups or RECORD not in (above / name).names():
                continue
            other = read_run(above / name, kind)
            found |= {each["run"] for each in other.asked} if other is not None else set()
    return found
