"""What the public interface returns: runs, studies, and comparisons, from their records."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from concord.analysis.uncertainty import Verdict
from concord.defaults import DEFAULT_OUTPUT
from concord.environments.parquet import read_table
from concord.errors import InputError
from concord.execution.finish import figures_of, register_later
from concord.execution.trained_model import model_of_run
from concord.job_files import built_in_jobs
from concord.logs import info
from concord.options import path_of, shortened
from concord.record import FOLDERS, folder_of, read_record, require_run
from concord.record import Run as RecordedRun
from concord.storage import is_remote
from concord.studies.comparison_page import REPORT, methods_page
from concord.studies.comparison_run import TABLES, ComparisonResult
from concord.studies.page import check_page_file, write_file
from concord.studies.proposals import Trial
from concord.studies.recommendation import MethodsResult
from concord.studies.results import ResultLine, StudyResult, read_study, table_of_lines
from concord.studies.verdicts import recorded_verdict
from concord.table import Table
from concord.tracking import Store, TrackedRun, load_predictor
from concord.training.job import JobFile
from concord.training.left_out import PREDICTIONS
from concord.training.metric_names import short_metrics
from concord.training.row_estimates import intervals_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from torch import nn


class Run:
    """A run: its metrics, history, figures and model.

    Attributes:
        name: for the command line, as in ``concord analyze JOB --name NAME``.
        status: FINISHED, FAILED or KILLED; None while it runs.
        metrics: at the end, by name, without those of single environments; see :attr:`environments`.
        options: resolved, by name.
    """

    def __init__(self, recorded: RecordedRun, job: JobFile | None = None, tracking_uri: str | None = None) -> None:
        self._recorded, self._job, self._tracking_uri = recorded, job, tracking_uri
        self.name = recorded.name
        self.status = recorded.status
        self.metrics = short_metrics(recorded.metrics)
        self.options = dict(recorded.options)

    @property
    def history(self) -> "pandas.DataFrame":
        """Every evaluation: a row each, by epoch, with the metrics and the step."""
        import pandas

        rows = [{"step": at.step, **short_metrics(at.metrics)} for at in self._recorded.history]
        epochs = pandas.Index([at.epoch for at in self._recorded.history], name="epoch")
        return pandas.DataFrame(rows, index=epochs).drop(columns="epoch", errors="ignore")

    @property
    def environments(self) -> "pandas.DataFrame":
        """The measures of each environment at the end: a row for each part of the data, by split and environment."""
        import pandas

        found: dict[tuple[str, str], dict[str, float]] = {}
        for name, value in self._recorded.metrics.items():
            measure, *place = name.split("/", 2)
            if len(place) == 2:
                found.setdefault((place[0], place[1]), {})[measure] = value
        index = pandas.MultiIndex.from_tuples(list(found), names=["split", "environment"]) if found else None
        return pandas.DataFrame(list(found.values()), index=index)

    def frame(self) -> "pandas.DataFrame":
        """The run in one row: its status, metrics and options."""
        import pandas

        row = {"status": self.status, **self.metrics, **_new(self.options, self.metrics)}
        return pandas.DataFrame([row], index=pandas.Index([self.name], name="run"))

    def as_json(self) -> Mapping[str, Any]:
        """The contract of ``concord train --json``."""
        ended = self._recorded.ended or {}
        found: Mapping[str, Any] = ended.get("report") or ended.get("untracked") or {}
        return found

    @property
    def folder(self) -> Path:
        """Its folder; of a run at an address, a copy on this machine."""
        return self._recorded.folder.path

    @property
    def store(self) -> str:
        """The address of its MLflow store, without a password."""
        return str(self._recorded.record["store"])

    def figures(self) -> Mapping[str, "Figure"]:
        """The figures of the run, by name, as its folder has them."""
        return figures_of(self._require_job(), self._recorded, info)

    def model(self) -> "nn.Module":
        """The trained model, on the CPU, in evaluation mode."""
        return model_of_run(self._require_job(), self._recorded.output, self.name).model

    def predict(self, inputs: Any) -> Any:
        """Predictions of the model in MLflow: of a table's rows as a frame, else of arrays as the model takes them.

        Columns that the model does not take, such as the target's, may be there. Of classes a table's predictions are
        their probabilities; the columns are the classes as texts, ``"1"`` for a target of 0 and 1.

        Raises:
            InputError: the run has no model in MLflow, or the model takes a table's rows, and these are none.
        """
        import pandas

        if hasattr(inputs, "to_pandas"):
            inputs = inputs.to_pandas()
        elif isinstance(inputs, torch.Tensor):
            inputs = inputs.numpy(force=True)
        schema = self._predictor.metadata.get_input_schema()
        if schema is not None and not schema.is_tensor_spec():
            if not isinstance(inputs, pandas.DataFrame):
                names = ", ".join(schema.input_names())
                raise InputError(f"inputs of type {type(inputs).__name__}: must be a frame with the columns {names}")
            inputs = inputs.rename(columns=lambda name: str(name).strip())  # as in training
            inputs = inputs[[name for name in inputs.columns if name in schema.input_names()]]  # MLflow warns of others
        return self._predictor.predict(inputs)

    def __reduce__(self) -> Any:
        """Another process reads the run from its folder; a job that is not built in goes along."""
        job = None if self._job is None or self._job.name in built_in_jobs() else self._job
        output = self._recorded.output
        return _loaded_run, (self.name, job, output if is_remote(output) else output.absolute(), self._tracking_uri)

    @cached_property
    def _predictor(self) -> Any:
        uri = (self._recorded.report or {}).get("model")
        if uri is None:
            raise InputError(f"run {self.name}: has no model in MLflow; use model(), the module")
        return load_predictor(Store.open(self._recorded.output, self._tracking_uri), uri)

    def register(self) -> str:
        """Register the model, if it is not; return the version as ``models:/NAME/VERSION``."""
        return register_later(self._require_job(), self._recorded, self._tracking_uri)

    def _require_job(self) -> JobFile:
        if self._job is None:
            name = self._recorded.record["job"]
            raise InputError(f"run {self.name}: is of job {name}, which is not built in; give load(NAME, job=…)")
        return self._job

    def __repr__(self) -> str:
        return f"<concord run {self.name}: {self.status or 'running'}>"

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self.metrics.items() if not name.startswith(("worst_", "step"))}
        rows = [[name, value] for name, value in sorted(shown.items())]
        return dataclasses.replace(Table.plain(["metric", "value"], rows), title=repr(self)[1:-1])._repr_html_()


class Study:
    """A study: its trials, and the best of them.

    Attributes:
        name: the same name continues it.
    """

    def __init__(self, result: StudyResult, job: JobFile | None = None, tracking_uri: str | None = None) -> None:
        self.result, self._job, self._tracking_uri = result, job, tracking_uri
        self.name = str(result.record["name"])

    @property
    def best(self) -> Run:
        """The best trial, a run like any other."""
        best = self.result.best.run
        assert best is not None
        return Run(require_run(folder_of(best.output, best.name)), self._job, self._tracking_uri)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the best trial, with those of environments left out for it."""
        return short_metrics(self.result.metrics(self.result.best))

    def frame(self) -> "pandas.DataFrame":
        """A row for each trial that ended, best first: its point, its metrics, its failure."""
        import pandas

        trials: list[Trial] = [*self.result.finished, *self.result.failed]
        rows = []
        for each in trials:
            point = {**each.point, **each.resolved}
            metrics = {} if each.failure is not None else short_metrics(self.result.metrics(each))
            name = each.run.name if each.run is not None else None
            rows.append({"run": name, **point, **_new(metrics, point), "failure": each.failure})
        return pandas.DataFrame(rows, index=pandas.Index([each.number for each in trials], name="trial"))

    def figures(self) -> Mapping[str, "Figure"]:
        """The course of the search, and the effect of each option, by name."""
        return self.result.figures(info)

    def __repr__(self) -> str:
        count = len(self.result.finished)
        return f"<concord study {self.name}: {count} trials finished, {len(self.result.failed)} failed>"

    def _repr_html_(self) -> str:
        parts = [self.result.best_table(), self.result.selections_table()]
        return f"<p>{repr(self)[1:-1]}</p>" + "".join(each._repr_html_() for each in parts)


class Comparison:
    """Tables of configurations over seeds.

    Attributes:
        tables: by name.
        failed: the failures of runs, by label.
        verdict: of environments left out in turn, and of methods: which one, by how much, whether that is more than
            chance, and what to expect in a new environment, in numbers and in ``lines``; None of other tables.
        train: the command that trains a model with the recommended method; None of other tables, and of one loaded.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        failed: Mapping[str, str],
        result: ComparisonResult | MethodsResult | None = None,
        folder: Path | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        self.result, self.failed, self._folder = result, dict(failed), folder
        self.verdict = verdict if result is None else result.verdict
        self.train = None if result is None else result.train
        self.tables = {table.name: table for table in tables}

    @property
    def table(self) -> Table:
        """The table, if there is one."""
        if len(self.tables) != 1:
            raise InputError(f"there are {len(self.tables)} tables: {', '.join(self.tables)}; take one of tables")
        return next(iter(self.tables.values()))

    @property
    def runs(self) -> "pandas.DataFrame":
        """A row for each finished run: table, configuration, seed and values."""
        import pandas

        rows = [
            {"table": name, "configuration": line.configuration, "seed": line.seed, **line.values}
            for name, table in self.tables.items()
            for line in table.runs
        ]
        return pandas.DataFrame(rows)

    @property
    def predictions(self) -> "pandas.DataFrame":
        """Of environments left out in turn: a row for each example, with each method and seed that predicted it.

        The columns are method, seed, environment, row (its place in the data, from 0), target, prediction, and
        ``probability_NAME`` of each class, and ``cutoff`` if recall and specificity have one other than 0.5.

        Raises:
            InputError: it is another comparison, or of a job with a risk of its own.
        """
        file = None if self._folder is None else self._folder / PREDICTIONS
        if file is None or not file.exists():
            raise InputError("predictions: only leave-one-out keeps them, of jobs with a loss of inputs and targets")
        return read_table(file).to_pandas()

    def intervals(self, measure: str | None = None) -> "pandas.DataFrame":
        """Of environments left out in turn: each method's value in each environment with its 95 % interval over rows.

        The columns are value (the mean over seeds), low and high (NaN where rows bound nothing), units (rows, or
        clusters with ``--cluster-by``), seeds, and std, the standard deviation over seeds.

        Args:
            measure: by default the comparison's; another is computed from the predictions.

        Raises:
            InputError: there are no predictions, or the measure is not known of their rows.
        """
        predictions = self.predictions
        if measure is None and self.verdict is not None:
            measure = self.verdict.measure
        return intervals_of(predictions, str(measure))

    def frame(self) -> "pandas.DataFrame":
        """The table with means, standard deviations and counts over seeds; several below one another."""
        import pandas

        frames = {name: table.frame() for name, table in self.tables.items()}
        return next(iter(frames.values())) if len(frames) == 1 else pandas.concat(frames, names=["table"])

    def markdown(self) -> str:
        """The tables in Markdown."""
        return "\n".join(table.markdown() for table in self.tables.values())

    def figures(self) -> Mapping[str, "Figure"]:
        """The tables' figures by name, if their configurations all have runs."""
        return self.result.figures(info) if isinstance(self.result, ComparisonResult) else {}

    def html(self, path: str | Path) -> Path:
        """Write the page to hand on, one HTML file: answer, tables, figures, columns, data and commands.

        Raises:
            InputError: the path cannot be written, or the comparison has no page, since none of its runs has finished.
        """
        file = path_of(str(path))
        check_page_file(file)
        self._write_page(file)
        return file

    def _write_page(self, file: Path) -> None:
        page = None if self._folder is None else self._folder / REPORT
        if page is None or not page.exists():
            raise InputError(f"html {file}: the comparison has no page yet; compare again, to train what is missing")
        write_file(file, page.read_text(encoding="utf-8"))

    def __repr__(self) -> str:
        return f"<concord comparison: {', '.join(self.tables)}, {len(self.failed)} runs failed>"

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables.values())


class Methods(Comparison):
    """A study of each method, and the recommendation.

    Attributes:
        studies: by method.
        recommended: the method.
        reasons: the recommendation, its evidence and the rule behind it, in words.
    """

    def __init__(self, result: MethodsResult, job: JobFile, again: str) -> None:
        super().__init__([dataclasses.replace(result.table(), name="methods")], result.failed, result)
        self.studies = {method: Study(study, job) for method, study in result.studies.items()}
        self._page = partial(methods_page, job, result, again, info)
        self.recommended, self.reasons = result.recommended, result.lines()

    def _write_page(self, file: Path) -> None:
        self._page().write(file)

    def _repr_html_(self) -> str:
        return super()._repr_html_() + "".join(f"<p>{line}</p>" for line in self.reasons)


class Runs(Sequence[Run]):
    """The runs that a search found, in its order; each is read from its folder when it is asked for.

    Attributes:
        names: of the runs.
        tracked: the runs as MLflow has them.
    """

    def __init__(self, tracked: Sequence[TrackedRun], output: Path, tracking_uri: str | None = None) -> None:
        self.tracked, self._output, self._tracking_uri = tracked, output, tracking_uri
        self.names = [each.name for each in tracked]

    def frame(self) -> "pandas.DataFrame":
        """A row for each run: job, owner, status, beginning, metrics and options."""
        import pandas

        rows = []
        for each in self.tracked:
            about = {"job": each.tags.get("concord.job"), "owner": each.owner, "status": each.status.lower()}
            found = {**about, "started": each.started, **short_metrics(each.metrics)}
            rows.append({**found, **_new(each.parameters, found)})
        return pandas.DataFrame(rows, index=pandas.Index(self.names, name="run"))

    @overload
    def __getitem__(self, place: int) -> Run: ...
    @overload
    def __getitem__(self, place: slice) -> "Runs": ...
    def __getitem__(self, place: int | slice) -> "Run | Runs":
        if isinstance(place, slice):
            return Runs(self.tracked[place], self._output, self._tracking_uri)
        recorded = require_run(folder_of(self._output, self.names[place]))
        return Run(recorded, _job_of(recorded.record, None), self._tracking_uri)

    def __len__(self) -> int:
        return len(self.tracked)

    def __repr__(self) -> str:
        return f"<concord runs: {', '.join(self.names) or 'none'}>"

    def _repr_html_(self) -> str:
        html: str = self.frame()._repr_html_()
        return html


def load(
    name: str | Path,
    job: Any = None,
    *,
    kind: str | None = None,
    output: str | Path = DEFAULT_OUTPUT,
    tracking_uri: str | None = None,
) -> Run | Study | Comparison:
    """The run, study or comparison of this name.

    Args:
        name: as ``concord runs`` shows it.
        job: its job, needed for the model and figures of a job that is not built in.
        kind: ``"run"``, ``"study"`` or ``"comparison"``, needed where several have the name.
        output: the folder of runs.
        tracking_uri: of MLflow's store, if it is not in that folder.

    Raises:
        InputError: nothing has this name, or more than one kind has, or the record is damaged.
    """
    if not isinstance(name, str | Path):
        raise InputError(f"name {shortened(repr(name))}: must be text; concord.runs() lists names")
    if kind is not None and kind not in FOLDERS:
        raise InputError(f"kind {shortened(repr(kind))}: must be one of {', '.join(FOLDERS)}")
    folders = {each: folder_of(Path(output), str(name), each) for each in FOLDERS if kind in (None, each)}
    found = {each: record for each, folder in folders.items() if (record := read_record(folder, each)) is not None}
    if len(found) > 1:
        raise InputError(f"{name}: is the name of a {' and of a '.join(found)}; give kind={next(iter(found))!r}")
    for each, record in found.items():
        folder, of = folders[each], _job_of(record, job)
        if each == "run":
            return Run(require_run(folder), of, tracking_uri)
        if each == "study":
            return Study(read_study(folder), of, tracking_uri)
        tables = list(_tables(folder.path / TABLES, record))
        return Comparison(tables, {}, folder=folder.path, verdict=recorded_verdict(record, tables, folder.path))
    raise InputError(f"{name}: no run, study or comparison in {output} has this name; concord.runs() lists them")


def _loaded_run(name: str, job: JobFile | None, output: Path, tracking_uri: str | None) -> Run:
    recorded = require_run(folder_of(output, name))
    return Run(recorded, _job_of(recorded.record, job), tracking_uri)


def _tables(folder: Path, record: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of a comparison, from their lines."""
    for table in record.get("asked", {}):
        if lines := ResultLine.read_all(folder / f"{record['job']}-{table}.jsonl"):
            yield table_of_lines(table, lines)


def _job_of(record: Mapping[str, Any], job: Any) -> JobFile | None:
    if job is not None:
        return JobFile.of(job)
    return JobFile.of(str(record["job"])) if record["job"] in built_in_jobs() else None


def _new(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The values with names that are not known."""
    return {name: value for name, value in values.items() if name not in known}
