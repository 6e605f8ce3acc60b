"""Trained models analyzed one after the other here, or side by side by Ray: a task each, kept as soon as it is done."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from concord.analysis.consistency.network import Settings
from concord.errors import ArgumentError, InputError, RunFailedError, to_be_sent
from concord.logs import Context, context, inherit_context
from concord.machine import machine
from concord.options import option_values
from concord.redaction import redact
from concord.runs.consistency import DataAsked, analyzed
from concord.runs.consistency_report import as_json, draw, metrics_of
from concord.runs.execute import only_process
from concord.runs.folder import run_folder
from concord.runs.progress import Display, on_terminal
from concord.runs.resources import check_gpus, check_local_gpus, require_resources
from concord.runs.session import ray_session
from concord.runs.tags import run_tags
from concord.runs.trained_model import TrainedModel, model_of_run, model_of_version
from concord.storage import Folder
from concord.tracking import Store
from concord.training.job import job_from_source
from concord.training.options import RUNTIME_OPTIONS, RunConfig, TrainConfig
from concord.training.process import tune_process

FOLDER, REPORT = "consistency", "consistency.json"  # in a run's folder, and among its artifacts in MLflow
_ASKED = "asked"  # in the report: what it is the answer to

Info = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ModelToAnalyze:
    """One model, and what is asked of it; a process elsewhere can be told it.

    Attributes:
        path, source: the job's file.
        name: of a run; None where a registered version is meant.
        version: ``NAME@ALIAS`` or ``NAME/VERSION``.
        through: another run, through whose solution slices go.
        asked: on which examples.
        settings: what is measured.
        where: where runs are, and the data if not where the run had them, and where to compute, as a run's options.
        again: also if the same was found before.
    """

    path: str
    source: str
    name: str | None = None
    version: str | None = None
    through: str | None = None
    asked: DataAsked
    settings: Settings
    where: TrainConfig
    again: bool = False

    @property
    def question(self) -> dict[str, Any]:
        """All that the answer depends on."""
        asked = {"data": asdict(self.asked), "settings": asdict(self.settings), "through": self.through}
        question: dict[str, Any] = json.loads(json.dumps(asked))
        return question


def analyze(models: Sequence[ModelToAnalyze], info: Info) -> list[dict[str, Any]]:
    """Analyze models, one here, several by Ray; gives the JSON of each, in their order.

    What is found of a model is kept in its run's folder and in MLflow at once, and is not measured again.

    Raises:
        InputError: a model is not there, or cannot be analyzed; or several are not comparable; or there is no GPU.
        RunFailedError: one could not be analyzed.
    """
    (check_local_gpus if len(models) == 1 else check_gpus)(models[0].where)
    trained = [_load(model) for model in models]
    require_comparable(trained)
    found = [None if model.again else _kept(model, each) for model, each in zip(models, trained, strict=True)]
    for each, known in zip(trained, found, strict=True):
        if known is not None:
            info(f"{each.name}: was analyzed so before; its result is shown (--again measures anew)")
    waiting = [place for place, known in enumerate(found) if known is None]
    if len(waiting) == 1:
        (place,) = waiting
        with _bar(models[place].name or str(models[place].version)) as advance:
            found[place] = _analyze(models[place], trained[place], advance)
    elif waiting:
        for place, result in _by_ray([(place, models[place]) for place in waiting], info):
            found[place] = result
    return [result for result in found if result is not None]


def require_comparable(trained: Sequence[TrainedModel]) -> None:
    """Refuse runs whose numbers cannot stand side by side (InputError).

    All need the same data and networks: what is not the platform's but the job's own, and the data's options. Those of
    one method have to be alike in everything but the seed, since their mean is one of an algorithm.
    """
    names = [each.name for each in trained]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError("name", name, "given twice; a run counts once")
    first = trained[0]
    of_seed: dict[tuple[str, int], str] = {}
    for each in trained:
        method, seed = each.config.method, each.config.run.seed
        if (before := of_seed.setdefault((method, seed), each.name)) != each.name:
            raise ArgumentError(
                "name", each.name, f"has seed {seed}, as {before} has; give runs that differ in the seed"
            )
    of_method = {each.config.method: each for each in reversed(trained)}
    for each in trained:
        compared = of_method[each.config.method]
        if (differs := _difference(compared, each, methods=True)) is not None:
            option, own, other = differs
            raise ArgumentError(
                "name",
                each.name,
                f"{option} is {own}, in {compared.name} {other}; give runs that differ in the seed",
            )
        if (differs := _difference(first, each, methods=False)) is not None:
            option, own, other = differs
            raise ArgumentError(
                "name", each.name, f"{option} is {own}, in {first.name} {other}; give runs on the same data"
            )


def _difference(first: TrainedModel, other: TrainedModel, *, methods: bool) -> tuple[str, Any, Any] | None:
    """An option in which two runs differ, with the second one's value and the first one's."""
    groups = [] if methods else ["objective", "aggregation", "optimizer", "schedule"]
    free = set(RUNTIME_OPTIONS) | {"seed"}
    for group in groups:
        free |= set(option_values(getattr(first.config, group)))
    before, now = option_values(first.config), option_values(other.config)
    for name, value in now.items():
        if name not in free and before.get(name) != value:
            return f"--{name.replace('_', '-')}", value, before.get(name)
    return None


def _load(model: ModelToAnalyze) -> TrainedModel:
    job = job_from_source(model.path, model.source)
    if model.version is not None:
        store = Store.open(model.where.run.output, model.where.run.tracking_uri)
        return model_of_version(job, store, model.version, model.where.data.data_dir)
    return model_of_run(job, model.where.run.output, str(model.name), model.where.data.data_dir)


def _folder(model: ModelToAnalyze, trained: TrainedModel) -> Folder:
    """Where what is found is kept: with the run, or among the job's reports where only the registry has the model."""
    if model.name is not None:
        return run_folder(model.where.run.output, model.name)
    return Folder(model.where.run.output / "reports" / trained.job.name / trained.name)


def _kept(model: ModelToAnalyze, trained: TrainedModel) -> dict[str, Any] | None:
    """What was found before, if the same was asked."""
    folder = _folder(model, trained)
    folder.fetch(FOLDER)
    try:
        found: dict[str, Any] = json.loads((folder.path / FOLDER / REPORT).read_text())
    except (OSError, ValueError):
        return None
    return found if found.get(_ASKED) == model.question else None


def _analyze(
    model: ModelToAnalyze, trained: TrainedModel, advance: Callable[[int, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Analyze one model, and keep what is found."""
    tune_process()
    check_local_gpus(model.where)
    through = None
    if model.through is not None:
        through = model_of_run(trained.job, model.where.run.output, model.through, model.where.data.data_dir)
    analysis = analyzed(trained, model.asked, model.settings, only_process(model.where).device, through, advance)
    folder = _folder(model, trained)
    here = folder.path / FOLDER
    here.mkdir(parents=True, exist_ok=True)
    tags = run_tags(trained.job.name, trained.job.path)
    commit = tags.get("concord.commit", f"version {tags['concord.version']}")
    result = as_json(analysis, draw(analysis, here)) | {
        "origin": {"commit": commit, "machine": machine()},
        _ASKED: model.question,
    }
    new = here / f"{REPORT}.new"
    new.write_text(json.dumps(result, indent=1))
    new.replace(here / REPORT)
    folder.keep(FOLDER)
    try:
        store = Store.open(model.where.run.output, model.where.run.tracking_uri)
        store.log_metrics(trained.run_id, metrics_of(result))
        store.log_files(trained.run_id, here, FOLDER)
    except RunFailedError as error:  # what was found is not lost by it
        result["untracked"] = str(error)
    return result


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal while the body runs, and what moves it."""
    if not on_terminal():
        yield lambda *_: None
        return
    display = Display(f"analyzing {name}")
    display.start()
    try:
        yield lambda done, total: display.counting(f"analyzing {name}", done, total, f"{done}/{total}", None, "")
    finally:
        display.stop()


def _by_ray(models: Sequence[tuple[int, ModelToAnalyze]], info: Info) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each model's place and JSON as it comes, in any order."""
    where = models[0][1].where
    with ray_session(where):
        import ray

        _require_shared_store(where)
        require_resources(where, info)
        task: Any = ray.remote(num_cpus=1, num_gpus=where.gpu_request()[0], max_retries=2)(_task)
        running = {task.remote(model, context()): (place, model) for place, model in models}
        done, failure = 0, None
        with _bar(f"{len(models)} models") as advance:
            while running:
                (ready,), _ = ray.wait(list(running), num_returns=1)
                place, model = running.pop(ready)
                try:
                    said = ray.get(ready)
                except ray.exceptions.RayError as error:
                    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
                    failure = RunFailedError(f"{model.name}: could not be analyzed: {lines[-1] if lines else error}")
                    continue
                if "input_error" in said:
                    raise said["input_error"]
                done += 1
                advance(done, len(models))
                info(f"{model.name}: {done} of {len(models)} analyzed, {said['result']['seconds']:.0f} s")
                yield place, said["result"]
        if failure is not None:  # the others are kept
            raise failure


def _task(model: ModelToAnalyze, log_context: Context) -> dict[str, Any]:
    """One model in a process of Ray's."""
    inherit_context(log_context)
    tune_process(threads=1)
    try:
        return {"result": _analyze(model, _load(model))}
    except InputError as error:
        return {"input_error": to_be_sent(error)}


def _require_shared_store(config: RunConfig) -> None:
    """Refuse a tracking store in a file (InputError) where tasks, which write to it, may be on other nodes."""
    import ray

    nodes = sum(node["Alive"] for node in ray.nodes())
    uri = config.run.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
    if nodes > 1 and uri.startswith("sqlite"):
        raise InputError(
            f"--tracking-uri {redact(uri)}: the Ray cluster has {nodes} nodes, and SQLite is on one; "
            "give the address of an MLflow server"
        )
