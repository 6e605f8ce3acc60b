"""Analyzes trained models (``concord analyze``): one in this process, several by Ray tasks.

A report has the measurements of one model. It is kept as soon as it is done, in its run's folder and in MLflow.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired

import torch
from pydantic import ConfigDict
from torch.utils import _pytree as pytree
from typing_extensions import TypedDict

from concord.analysis.columns.figures import columns_figure
from concord.analysis.consistency.environment_losses import EnvironmentLosses, deal_out
from concord.analysis.consistency.figures import layers_figure, slice_figures
from concord.analysis.consistency.measurement import ACCURACIES, as_json, as_metrics, read_measurements
from concord.analysis.consistency.network import PARTS, Part, Settings, measure
from concord.analysis.figures import save
from concord.defaults import DEFAULT_OUTPUT
from concord.environments.collection import generator_for, some_examples
from concord.errors import ArgumentError, InputError, RunFailedError, picklable
from concord.execution.analyzing_columns import TableReport, fitted_table, table_columns
from concord.execution.execute import only_process
from concord.execution.key import Key, plain
from concord.execution.lifecycle import Info, tracked_id
from concord.execution.progress import Display, on_terminal
from concord.execution.session import (
    check_gpus,
    check_local_gpus,
    ray_session,
    require_resources,
    send_by_value,
    task_failure,
    task_results,
)
from concord.execution.spec import resolved_paths, run_origin
from concord.execution.trained_model import TrainedModel, model_of_run, model_of_version
from concord.logs import Context, context, inherit_context
from concord.options import RESULT, OptionGroup, Place, Role, Unkept, flag_of, group, names_of, option_values
from concord.record import folder_of
from concord.redaction import redact
from concord.storage import Folder, check_local_folder
from concord.storage.typed_json import Fields, read_json
from concord.tracking import Store
from concord.training.job import JobFile, SentJob
from concord.training.options import Device, RunConfig, TrainConfig, device_of
from concord.training.process import tune_process

FOLDER, REPORT = "consistency", "consistency.json"  # in a run's folder, and among its artifacts in MLflow


class _Measurement(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    name: str
    value: float
    epsilon: NotRequired[float | None]
    layer: NotRequired[str | None]
    environments: NotRequired[list[str]]
    spread: NotRequired[float | None]
    null: NotRequired[float | None]
    null_spread: NotRequired[float | None]


class _Pair(TypedDict):
    converged: bool


class _Report(TypedDict):
    job: str
    run: str
    run_id: str
    method: str
    seed: int
    epsilon: list[float]
    radius: float
    environments: int
    absolute_radius: float
    possible_pairs: int
    pairs: list[_Pair]
    gradient_norms: dict[str, float]
    measurements: list[_Measurement]
    seconds: float
    metrics: dict[str, float]
    figures: dict[str, str]
    origin: dict[str, str]
    asked: Fields
    table: NotRequired[TableReport]
    untracked: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(OptionGroup):
    """Measure how consistent a trained model is across environments: the largest change of another environment's loss
    under a change of weights that changes one environment's loss by at most ε. The null is the same measurement on
    pseudo-environments, random groups of the same examples."""

    name: tuple[str, ...] = ()
    """Finished runs. Runs that differ only in the seed are one method; other runs have columns of their own."""
    model: str | None = None
    """Registered model in place of a run: NAME@champion, or NAME/VERSION."""
    settings: Settings = group(Settings)
    through: str | None = None
    """Another run of the same network, through whose solution the slices pass."""
    device: Place[Device] = "auto"
    """auto, cpu or cuda; auto is cuda if this machine has a GPU, else cpu; on a cluster it is cpu."""
    results: Place[Path | None] = None
    """Folder for the main numbers, one line a run: JOB-analyzed.jsonl."""
    again: Place[bool] = False
    """Repeat an analysis that exists with the same options."""
    data: Place[Path | None] = None
    """Folder of the data; by default the run's."""
    output: Place[Path] = DEFAULT_OUTPUT
    """Folder of the runs, and of MLflow's store without a tracking URI."""
    tracking_uri: Unkept[str | None] = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI)."""
    address: Unkept[str | None] = None
    """Ray cluster for several runs, or local; by default RAY_ADDRESS, else a Ray started on this machine."""

    def check(self) -> None:
        """Validate options."""
        super().check()
        check_local_folder("--results", self.results)
        if bool(self.name) == bool(self.model):
            raise InputError(
                "analyze: no model is named; give --name RUN, or several, or --model NAME@champion; concord runs lists"
            )
        if self.through is not None:
            self.require("through", len(self.name) == 1, "needs one run to start from; give one --name")
            self.require(
                "through",
                not {"auto", "slices"}.isdisjoint(self.settings.parts),
                "is for slices; add slices to --parts",
            )

    @property
    def where(self) -> TrainConfig:
        """The folders and the device, as a run's options."""
        shared = ("output", "tracking_uri", "address", "device", "data")
        return TrainConfig().with_options(**{option: getattr(self, option) for option in shared})

    @property
    def asked(self) -> dict[str, Any]:
        """The options that decide the result, as JSON."""
        return dict(plain({**asdict(self.settings), "through": self.through}))

    def load(self, job: JobFile, name: str | None) -> TrainedModel:
        """The model of the run of this name, or the registered one."""
        if name is None:
            return model_of_version(job, Store.open(self.output, self.tracking_uri), str(self.model), self.data)
        return model_of_run(job, self.output, name, self.data)

    def folder(self, trained: TrainedModel) -> Folder:
        """The report's folder: the run's, or the job's reports for a model that only the registry has."""
        if self.name:
            return folder_of(self.output, trained.name)
        return Folder(self.output / "reports" / trained.job.name / trained.name)


def earlier_report(trained: TrainedModel, options: AnalyzeOptions) -> dict[str, Any] | None:
    """The earlier report with the same options, if there is one; sent to MLflow if it is not there yet."""
    folder = options.folder(trained)
    folder.fetch(FOLDER)
    try:
        found: dict[str, Any] = read_json((folder.path / FOLDER / REPORT).read_text(), _Report)
    except (OSError, ValueError):  # there is none, or it is damaged: it is made again
        return None
    if any(Key(trained.run_id, options.asked).differences({"job": found["run_id"], "config": found["asked"]})):
        return None
    return _store_report(found, options, folder) if "untracked" in found else found


def analyze_model(
    trained: TrainedModel, options: AnalyzeOptions, advance: Callable[[int, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Analyze a model, and keep the report with its figures in the run's folder and in MLflow."""
    started = time.perf_counter()
    check_local_gpus(options.where)
    device = only_process(options.where).device
    losses, through = environment_losses(trained, options.settings, device), None
    if options.through is not None:
        through = _offset(losses, trained.model, options.load(trained.job, options.through), device)
    found = measure(losses, options.settings, advance, through)
    table = table_columns(trained, options.settings, device, advance) if "columns" in options.settings.parts else None
    seconds = time.perf_counter() - started
    folder = options.folder(trained)
    here = folder.path / FOLDER
    here.mkdir(parents=True, exist_ok=True)
    figures = slice_figures(found, trained.name, options.settings.parts, options.through)
    if (layers := layers_figure(found, trained.name)) is not None:
        figures = {"layers": layers, **figures}
    if table is not None:
        figures = {"columns": columns_figure(**table, title=trained.name), **figures}
    report = {
        "job": trained.job.name,
        "run": trained.name,
        "run_id": trained.run_id,
        "method": trained.config.method,
        "seed": trained.config.run.seed,
        "epsilon": sorted(options.settings.epsilon),
        "radius": options.settings.radius,
        "environments": len(losses.names),
        **as_json(found),
        **({} if table is None else {"table": table}),
        "seconds": round(seconds, 1),
        "metrics": {name: value for name, value in trained.metrics.items() if name in ACCURACIES},
        "figures": {name: str(save(figure, here / f"{name}.png")) for name, figure in figures.items()},
        "origin": run_origin(trained.job.path),
        "asked": options.asked,
    }
    folder.keep(FOLDER)  # the figures
    return _store_report(report, options, folder)


def _store_report(report: Mapping[str, Any], options: AnalyzeOptions, folder: Folder) -> dict[str, Any]:
    """Keep a report in the run's folder, then in MLflow; ``untracked`` says why MLflow has it not."""
    here, file = folder.path / FOLDER, f"{FOLDER}/{REPORT}"
    stored = {name: value for name, value in report.items() if name != "untracked"}
    folder.write(file, json.dumps(stored, indent=1))
    try:
        store = Store.open(options.output, options.tracking_uri)
        if options.name and (run_id := tracked_id(folder, store)) != stored["run_id"]:
            stored["run_id"] = run_id
            folder.write(file, json.dumps(stored, indent=1))
        measured = read_measurements({**report, "metrics": {}})  # MLflow has the run's accuracies
        metrics = {f"analyzed/{name}": value for name, value in as_metrics(measured).items()}
        store.log_metrics(stored["run_id"], metrics)
        store.log_files(stored["run_id"], here, FOLDER)
    except (RunFailedError, InputError) as error:
        stored["untracked"] = str(error)
        folder.write(file, json.dumps(stored, indent=1))
    return stored


def environment_losses(trained: TrainedModel, settings: Settings, device: torch.device) -> EnvironmentLosses:
    """The losses of a trained model in its training environments."""
    config, job, groups = trained.config, trained.job, settings.environments
    environments = job.job.environments_of(config).fitted(config.data.held_out, config.run.seed)
    names = (settings.split == "held-out" and environments.held_out) or environments.train
    if config.aggregation.per_example and not groups:
        raise ArgumentError(
            "environments", groups, f"in run {trained.name} every example is an environment; give the number of groups"
        )
    if settings.split == "held-out" and config.data.held_out == 0:
        raise ArgumentError("split", "held-out", f"run {trained.name} has no held-out examples; give train")
    if len(names) < 2 and not groups:
        raise InputError(f"job {job.name}: has one training environment; consistency needs at least two")
    batches = {}
    for pair in environments.split(names, config.data.held_out, config.run.seed):
        held_out = settings.split == "held-out" and pair.held_out is not None
        part = pair.held_out if held_out and pair.held_out is not None else pair.training
        batches[part.name] = some_examples(part, settings.examples, settings.seed, "consistency")
    if groups:
        count = sum(len(pytree.tree_leaves(batch)[0]) for batch in batches.values())
        if groups > count:
            raise ArgumentError("environments", groups, f"there are {count} examples; give at most this number")
        each, more = divmod(count, groups)
        sizes = {f"group {number}": each + (number < more) for number in range(groups)}
        batches = deal_out(batches.values(), sizes, generator_for(settings.seed, "groups"))
    return EnvironmentLosses(trained.model.to(device), job.job.risk_of(config), batches)


def _with_parts(options: AnalyzeOptions, trained: TrainedModel) -> AnalyzeOptions:
    """The options with the parts that are measured by default."""
    parts, is_table = options.settings.parts, fitted_table(trained) is not None
    if "columns" in parts and not is_table:
        problem = f"job {trained.job.name} has no table, or no loss; give some of {', '.join(PARTS)}"
        raise ArgumentError("parts", "columns", problem)
    of_network = options.through is not None or options.settings.environments > 0
    default: tuple[Part, ...] = ("columns",) if is_table and not of_network else PARTS
    return options.with_options(parts=default if "auto" in parts else parts)


def _offset(
    losses: EnvironmentLosses, model: torch.nn.Module, through: TrainedModel, device: torch.device
) -> torch.Tensor:
    """The offset of another model's solution."""
    parameters = [value.detach() for value in through.model.to(device).parameters() if value.requires_grad]
    other = torch.cat([value.reshape(-1) for value in parameters])
    if other.shape != losses.solution.shape:
        raise ArgumentError(
            "through", through.name, f"has {len(other)} parameters, not {losses.size}; give the same network"
        )
    if torch.equal(other, losses.solution):
        raise ArgumentError("through", through.name, "is the same model; a slice needs two different ones")
    if not all(map(torch.equal, model.buffers(), through.model.buffers())):
        reason = "has other buffers, such as statistics of batch norm, and a slice changes only parameters"
        raise ArgumentError("through", through.name, reason)
    return other.to(losses.dtype) - losses.solution


def analyze(job: JobFile, options: AnalyzeOptions, info: Info) -> list[dict[str, Any]]:
    """Analyze models, one here, several by Ray; return their reports in order.

    A report is kept in its run's folder and in MLflow, and is reused.
    """
    where = options.where.with_options(**resolved_paths(options.where))
    options = options.with_options(output=where.run.output, data=where.data.data, device=device_of(where))
    (check_gpus if len(options.name) > 1 else check_local_gpus)(where)
    trained = [options.load(job, name) for name in options.name or (None,)]
    require_comparable(trained)
    options = _with_parts(options, trained[0])
    found = [None if options.again else earlier_report(each, options) for each in trained]
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
    name_of_seed: dict[tuple[str, int], str] = {}
    first_of_method: dict[str, TrainedModel] = {}
    for each in trained:
        method, seed = each.config.method, each.config.run.seed
        if each.name in names:
            raise ArgumentError("name", each.name, "is given twice; give it once")
        names.add(each.name)
        if (before := name_of_seed.setdefault((method, seed), each.name)) != each.name:
            problem = f"has seed {seed}, as {before} has; give runs that differ in the seed"
            raise ArgumentError("name", each.name, problem)
        for first, roles, alike in (
            (first_of_method.setdefault(method, each), RESULT, "that differ in the seed"),
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
        given = (job.sent, options)
        send_by_value(job.sent.value)
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


def _task(sent: SentJob, options: AnalyzeOptions, name: str, log_context: Context) -> Any:
    """A Ray task that returns the report of one model, or the InputError that refuses it."""
    inherit_context(log_context)
    tune_process(threads=1)
    try:
        return analyze_model(options.load(sent.load(), name), options)
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
