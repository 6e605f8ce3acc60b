"""Analyzes trained models: one in this process, several by Ray tasks; each report is kept as soon as it is done."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from concord.errors import ArgumentError, InputError, RunFailedError, picklable
from concord.logs import Context, context, inherit_context
from concord.options import RESULT, Role, flag_of, names_of, option_values
from concord.redaction import redact
from concord.runs.analyzed_model import AnalyzeOptions, analyze_model, kept_report
from concord.runs.lifecycle import Info, resolved_paths
from concord.runs.progress import Display, on_terminal
from concord.runs.resources import check_gpus, check_local_gpus, require_resources
from concord.runs.session import ray_session, task_failure, task_results
from concord.runs.trained_model import TrainedModel
from concord.tracking import Store
from concord.training.job import JobFile, job_from_source
from concord.training.options import RunConfig, TrainConfig
from concord.training.process import tune_process


def analyze(job: JobFile, options: AnalyzeOptions, info: Info) -> list[dict[str, Any]]:
    """Analyze models, one here, several by Ray; return their reports in order.

    A report is kept in its run's folder and in MLflow, and is reused.
    """
    where = options.where.with_options(**resolved_paths(options.where))
    options = options.with_options(output=where.run.output, data_dir=where.data.data_dir)
    (check_gpus if len(options.name) > 1 else check_local_gpus)(where)
    trained = [options.load(job, name) for name in options.name or (None,)]
    require_comparable(trained)
    found = [None if options.again else kept_report(each, options) for each in trained]
    waiting = []
    for place, (each, known) in enumerate(zip(trained, found, strict=True)):
        if known is None:
            waiting.append(place)
        else:
            info(f"{each.name}: was analyzed before with these options; this is its result (--again repeats it)")
    if waiting:
        Store.open(options.output, options.tracking_uri)  # one that does not answer is refused before the work
    if len(waiting) == 1:
        (place,) = waiting
        tune_process()
        with _bar(trained[place].name) as advance:
            found[place] = analyze_model(trained[place], options, advance)
    elif waiting:
        by_name = _by_ray(job, options, [trained[place].name for place in waiting], where, info)
        found = [by_name.get(each.name, known) for each, known in zip(trained, found, strict=True)]
    return [report for report in found if report is not None]


def require_comparable(trained: Sequence[TrainedModel]) -> None:
    """Refuse runs whose numbers are not comparable (InputError).

    All need the same data and networks: the job's own options and the data's. The runs of one method must be equal in
    everything but the seed, since their mean describes one algorithm.
    """
    names: set[str] = set()
    of_seed: dict[tuple[str, int], str] = {}
    of_method: dict[str, TrainedModel] = {}
    for each in trained:
        method, seed = each.config.method, each.config.run.seed
        if each.name in names:
            raise ArgumentError("name", each.name, "is given twice; give it once")
        names.add(each.name)
        if (before := of_seed.setdefault((method, seed), each.name)) != each.name:
            problem = f"has seed {seed}, as {before} has; give runs that differ in the seed"
            raise ArgumentError("name", each.name, problem)
        for first, roles, alike in (
            (of_method.setdefault(method, each), RESULT, "that differ in the seed"),
            (trained[0], (Role.SCIENCE, Role.SCORING), "on the same data"),
        ):
            if (differs := _difference(first, each, roles)) is not None:
                option, own, other = differs
                raise ArgumentError(
                    "name", each.name, f"{flag_of(option)} is {own}, in {first.name} {other}; give runs {alike}"
                )


def _difference(first: TrainedModel, other: TrainedModel, roles: Collection[Role]) -> tuple[str, Any, Any] | None:
    """An option of these roles, besides the seed, in which two runs differ, with the values of both, the first last."""
    compared = names_of(type(first.config), *roles) - {"seed"}
    before = option_values(first.config)
    for name, value in option_values(other.config).items():
        if name in compared and before.get(name) != value:
            return name, value, before.get(name)
    return None


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal while the body runs; yields the function that updates it."""
    if not on_terminal():
        yield lambda *_: None
        return
    with Display(f"analyzing {name}") as display:
        yield lambda done, total: display.counting(f"analyzing {name}", done, total, f"{done}/{total}", None, "")


def _by_ray(
    job: JobFile, options: AnalyzeOptions, names: Sequence[str], where: TrainConfig, info: Info
) -> Mapping[str, dict[str, Any]]:
    """The reports by run name; if one fails the others are kept."""
    found: dict[str, dict[str, Any]] = {}
    failure = None
    with ray_session(where), _bar(f"{len(names)} models") as advance:
        import ray

        _require_shared_store(where)
        require_resources(where, info)
        task: Any = ray.remote(num_cpus=1, num_gpus=where.gpu_request()[0], max_retries=2)(_task)
        given = (job.path, job.source, options)
        for name, report in task_results(task, names, lambda name: (*given, name, context())):
            if isinstance(report, InputError):
                raise report
            if isinstance(report, Exception):
                failure = RunFailedError(f"{name}: could not be analyzed: {task_failure(report)}")
                continue
            found[name] = report
            advance(len(found), len(names))
            info(f"{name}: {len(found)} of {len(names)} analyzed, {report['seconds']:.0f} s")
    if failure is not None:
        raise failure
    return found


def _task(path: str, source: str, options: AnalyzeOptions, name: str, log_context: Context) -> Any:
    """A Ray task that returns the report of one model, or the InputError that refuses it."""
    inherit_context(log_context)
    tune_process(threads=1)
    try:
        return analyze_model(options.load(job_from_source(path, source), name), options)
    except InputError as error:
        return picklable(error)


def _require_shared_store(config: RunConfig) -> None:
    """Refuse a tracking store in a file (InputError) if tasks, which write to it, may run on other nodes."""
    import ray

    nodes = sum(node["Alive"] for node in ray.nodes())
    uri = config.run.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
    if nodes > 1 and uri.startswith("sqlite"):
        raise InputError(
            f"--tracking-uri {redact(uri)}: the Ray cluster has {nodes} nodes, and SQLite works on one; "
            "give the address of an MLflow server"
        )
