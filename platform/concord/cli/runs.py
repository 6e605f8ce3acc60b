"""The command ``runs``: lists, finds, compares and deletes tracked runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from concord.cli.output import require_consent, table
from concord.cli.parsing import parse
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.logs import info
from concord.record import FOLDERS
from concord.table import format_value

_SPLITS = ("train", "held_out", "validation", "ood")
_MOST_METRICS = 4
_NOT_LISTED = ("do", "names", "yes", "compare")  # options that a list does not have
# Tags that may explain a run's metrics, by the names to show.
_TAGS = {
    "concord.environments": "training environments",
    "concord.data": "data version",
    "concord.commit": "commit",
    "concord.version": "concord version",
    "torch": "torch version",
}


@dataclass(frozen=True, kw_only=True)
class Runs:
    """List, find or --compare tracked runs of all jobs, the newest first; or delete runs, studies and comparisons."""

    do: tyro.conf.Positional[Literal["list", "delete"]] = "list"
    """Action."""
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """With delete: names of runs, studies and comparisons, whose files and models go as well."""
    yes: bool = False
    """With delete: do not ask. Needed where no terminal can be asked."""
    job: str | None = None
    """Only runs of this job."""
    status: Literal["running", "interrupted", "finished", "failed", "killed"] | None = None
    """Only runs of this status."""
    name: str | None = None
    """Only runs whose name contains this text."""
    where: tuple[str, ...] = ()
    """Only runs for which all conditions hold, such as objective=irm 'ood_accuracy>0.9' (with quotes, since > and < are
    redirections in a shell)."""
    study: str | None = None
    """Show the trials of this study instead of runs."""
    mine: bool = False
    """Only runs of this user."""
    metric: str | None = None
    """Metric to sort by, such as ood_accuracy, the best first; runs without it are left out."""
    mode: Literal["max", "min"] | None = None
    """Mode of the metric; by default min for losses and errors, max for others."""
    show: tuple[str, ...] = ()
    """Further options and metrics to show."""
    top: int = 20
    """Number of rows of the table."""
    compare: tuple[str, ...] = ()
    """Names (or ids) of runs to compare: the options that differ, and the metrics."""
    output: Path = DEFAULT_OUTPUT
    """Folder of MLflow's store, without a tracking URI."""
    tracking_uri: str | None = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI)."""


def runs(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """List, find or compare runs."""
    options = parse(Runs, words, "concord runs")
    if options.do == "delete":
        return _deleted(options)
    if options.names or options.yes:
        given = "--yes" if options.yes else " ".join(options.names)
        raise InputError(f"{given}: applies to runs delete; leave it out, or give --name to find runs")
    if options.top < 1:
        raise InputError(f"--top {options.top}: must be at least 1")
    if len(options.compare) == 1:
        raise InputError(f"--compare {options.compare[0]}: is one run; give at least two names")
    if options.compare:
        from concord.tracking import Store
        from concord.tracking.run_search import compared_run

        store = Store.existing(options.output, options.tracking_uri)
        return _compared([compared_run(store, name) for name in options.compare], as_json)
    from concord.interface.commands import runs as find
    from concord.tracking.run_search import field_name

    found = find(
        **{name: value for name, value in vars(options).items() if name not in ("do", "names", "yes", "compare")}
    ).tracked
    if not as_json:
        _print_list(found, list(map(field_name, [*([options.metric] if options.metric else []), *options.show])))
    return {"runs": [_as_json(run) for run in found]}


def _deleted(options: Runs) -> Mapping[str, Any]:
    """Delete what was named, after a question."""
    if not options.names:
        raise InputError("runs delete: no run is named; give names; concord runs lists them")
    from concord.execution.deletion import delete, plan_deletion
    from concord.tracking import Store

    store = Store.existing(options.output, options.tracking_uri)
    deletion = plan_deletion(store, options.output, options.names)
    require_consent([*deletion.lines()], options.yes)
    delete(store, deletion)
    info("deleted; mlflow gc frees the space that MLflow keeps of it")
    return {"deleted": [run.name for _, run in deletion.runs], "models": [each.uri for each in deletion.versions]}


def _print_list(found: Sequence[Any], asked: Sequence[str]) -> None:
    if not found:
        info("there is no such run")
        return
    columns = list(dict.fromkeys([*asked, *_main_metrics(found)]))
    rows = [
        [
            *(run.name, _job(run), run.owner or "", run.status.lower(), f"{run.started:%Y-%m-%d %H:%M}"),
            *(_cell(run, column) for column in columns),
        ]
        for run in found
    ]
    table(["run", "job", "owner", "status", "started (UTC)", *(column.replace("_", " ") for column in columns)], rows)


def _main_metrics(found: Iterable[Any]) -> list[str]:
    """The metrics to show of these runs: each split's accuracy, or the loss without one."""
    known = {name for run in found for name in _short(run.metrics)}
    splits = [[f"{split}_{measure}" for measure in ("accuracy", "loss")] for split in _SPLITS]
    chosen = [name for names in splits for name in [each for each in names if each in known][:1]]
    return chosen or sorted(known)[:_MOST_METRICS]


def _job(run: Any) -> str:
    """The job, and the group if the run belongs to one."""
    job = run.tags.get("concord.job", "")
    for kind, folder in (("study", FOLDERS["study"]), ("comparison", FOLDERS["comparison"])):
        if group := run.tags.get(f"concord.{kind}"):
            own = run.experiment.endswith(f"-{folder}")  # not the user's experiment
            name = job or (run.experiment.removesuffix(f"-{folder}") if own else "")
            return f"{name} ({kind} {group})".strip()
    return str(job)


def _cell(run: Any, name: str) -> str:
    value = run.metrics.get(name, run.parameters.get(name))
    return "" if value is None else format_value(value)


def _short(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those of single environments, layers and step times."""
    return {name: value for name, value in sorted(metrics.items()) if "/" not in name and not name.startswith("step")}


def _compared(found: Sequence[Any], as_json: bool) -> Mapping[str, Any]:
    described = [_described(run) for run in found]
    options = {
        name: values
        for name in sorted({name for each in described for name in each})
        if len(set(values := [each.get(name) for each in described])) > 1
    }
    short = [_short(run.metrics) for run in found]
    metrics = {name: [each.get(name) for each in short] for name in sorted({name for each in short for name in each})}
    if not as_json:
        names = [run.name for run in found]
        rows = [[name, *("" if value is None else str(value) for value in values)] for name, values in options.items()]
        table(["differs", *names], rows)
        rows = [[name, *("" if value is None else format_value(value) for value in v)] for name, v in metrics.items()]
        table(["metric", *names], rows)
    return {"runs": [_as_json(run) for run in found], "options": options, "metrics": metrics}


def _described(run: Any) -> dict[str, str]:
    """The possible explanations of a run's metrics: job, options, data, versions."""
    tags = {name: run.tags[tag] for tag, name in _TAGS.items() if tag in run.tags}
    options = {name: value for name, value in run.parameters.items() if name not in ("name", "resume")}
    return {"job": _job(run), "status": run.status.lower(), **tags, **options}


def _as_json(run: Any) -> dict[str, Any]:
    return {
        "name": run.name,
        "run_id": run.run_id,
        "job": run.tags.get("concord.job"),
        "study": run.tags.get("concord.study"),
        "owner": run.owner,
        "status": run.status.lower(),
        "started": run.started.isoformat(timespec="seconds"),
        "options": run.parameters,
        "metrics": _short(run.metrics),
    }
