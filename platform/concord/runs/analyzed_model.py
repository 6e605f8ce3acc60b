"""The analysis of one trained model: its options, the model's losses, and the report that is kept."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from concord.analysis.consistency.environment_losses import EnvironmentLosses, deal_out
from concord.analysis.consistency.figures import layers_figure, slice_figures
from concord.analysis.consistency.measurement import ACCURACIES, as_json, as_metrics, read_measurements
from concord.analysis.consistency.network import Settings, measure
from concord.analysis.figures import save
from concord.defaults import DEFAULT_OUTPUT
from concord.environments.collection import generator_for, some_examples
from concord.errors import ArgumentError, InputError, RunFailedError
from concord.options import OptionGroup, Place, Unkept, group
from concord.record import folder_of
from concord.runs.execute import only_process
from concord.runs.key import Key
from concord.runs.resources import check_local_gpus
from concord.runs.tags import run_origin
from concord.runs.trained_model import TrainedModel, model_of_run, model_of_version
from concord.storage import Folder, check_local_folder
from concord.tracking import Store
from concord.training.job import JobFile
from concord.training.options import TrainConfig

FOLDER, REPORT = "consistency", "consistency.json"  # in a run's folder, and among its artifacts in MLflow


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
    use_gpu: Place[bool] = False
    """Compute on a GPU."""
    results: Place[Path | None] = None
    """Folder for the main numbers, one line a run: JOB-analyzed.jsonl."""
    again: Place[bool] = False
    """Repeat an analysis that exists with the same options."""
    data_dir: Place[Path | None] = None
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
            self.require("through", "slices" in self.settings.parts, "is for slices; add slices to --parts")

    @property
    def where(self) -> TrainConfig:
        """The folders and the device, as a run's options."""
        shared = ("output", "tracking_uri", "address", "use_gpu", "data_dir")
        return TrainConfig().with_options(**{option: getattr(self, option) for option in shared})

    @property
    def asked(self) -> dict[str, Any]:
        """The options that decide the result, as JSON."""
        asked: dict[str, Any] = json.loads(json.dumps({**asdict(self.settings), "through": self.through}))
        return asked

    def load(self, job: JobFile, name: str | None) -> TrainedModel:
        """The model of the run of this name, or the registered one."""
        if name is None:
            return model_of_version(job, Store.open(self.output, self.tracking_uri), str(self.model), self.data_dir)
        return model_of_run(job, self.output, name, self.data_dir)

    def folder(self, trained: TrainedModel) -> Folder:
        """The report's folder: the run's, or the job's reports for a model that only the registry has."""
        if self.name:
            return folder_of(self.output, trained.name)
        return Folder(self.output / "reports" / trained.job.name / trained.name)


def kept_report(trained: TrainedModel, options: AnalyzeOptions) -> dict[str, Any] | None:
    """The earlier report with the same options, if there is one; sent to MLflow if it is not there yet."""
    folder = options.folder(trained)
    folder.fetch(FOLDER)
    try:
        found: dict[str, Any] = json.loads((folder.path / FOLDER / REPORT).read_text())
    except (OSError, ValueError):
        return None
    key = Key(trained.run_id, options.asked)
    other = any(key.differences({"job": found.get("run_id"), "config": found.get("asked", {})}))
    if other or "measurements" not in found:
        return None
    return _kept(found, options, folder) if "untracked" in found else found


def analyze_model(
    trained: TrainedModel, options: AnalyzeOptions, advance: Callable[[int, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Analyze a model, and keep the report with its figures in the run's folder and in MLflow."""
    started = time.perf_counter()
    check_local_gpus(options.where)
    device = only_process(options.where).device
    losses, through = environment_losses(trained, options.settings, device), None
    if options.through is not None:
        through = _difference(losses, trained.model, options.load(trained.job, options.through), device)
    found = measure(losses, options.settings, advance, through)
    seconds = time.perf_counter() - started
    folder = options.folder(trained)
    here = folder.path / FOLDER
    here.mkdir(parents=True, exist_ok=True)
    figures = slice_figures(found, trained.name, options.settings.parts, options.through)
    if (layers := layers_figure(found, trained.name)) is not None:
        figures = {"layers": layers, **figures}
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
        "seconds": round(seconds, 1),
        "metrics": {name: value for name, value in trained.metrics.items() if name in ACCURACIES},
        "figures": {name: str(save(figure, here / f"{name}.png")) for name, figure in figures.items()},
        "origin": run_origin(trained.job.path),
        "asked": options.asked,
    }
    folder.keep(FOLDER)  # the figures
    return _kept(report, options, folder)


def _kept(report: Mapping[str, Any], options: AnalyzeOptions, folder: Folder) -> dict[str, Any]:
    """Keep a report in the run's folder, then in MLflow; ``untracked`` says why MLflow has it not."""
    here, file = folder.path / FOLDER, f"{FOLDER}/{REPORT}"
    kept = {name: value for name, value in report.items() if name != "untracked"}
    folder.write(file, json.dumps(kept, indent=1))
    try:
        store = Store.open(options.output, options.tracking_uri)
        measured = read_measurements({**report, "metrics": {}})  # MLflow has the run's accuracies
        metrics = {f"analyzed/{name}": value for name, value in as_metrics(measured).items()}
        store.log_metrics(report["run_id"], metrics)
        store.log_files(report["run_id"], here, FOLDER)
    except (RunFailedError, InputError) as error:
        kept["untracked"] = str(error)
        folder.write(file, json.dumps(kept, indent=1))
    return kept


def environment_losses(trained: TrainedModel, settings: Settings, device: torch.device) -> EnvironmentLosses:
    """The losses of a trained model in its training environments."""
    config, job, groups = trained.config, trained.job, settings.environments
    environments = job.job.environments_of(config).fitted(config.data.held_out, config.run.seed)
    names = environments.train
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


def _difference(
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
