"""Commands that run jobs: jobs, train, tune, compare, demo, data, report."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.cli.job_options import early_values, read_command, tables_and_options
from concord.cli.output import show, table
from concord.cli.parsing import job_and_words, parse
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError
from concord.job_files import job_texts
from concord.logs import info
from concord.storage import check_local_folder
from concord.submitted import is_submitted
from concord.table import Table


@dataclass(frozen=True)
class Jobs:
    """The built-in jobs, and the papers' results that each is for."""


def jobs(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """List the built-in jobs."""
    parse(Jobs, words, "concord jobs")
    jobs = [{"name": each.name, "reproduces": each.reproduces} for each in job_texts()]
    if not as_json:
        table(["job", "papers' results"], [[job["name"], job["reproduces"]] for job in jobs])
    return {"jobs": jobs}


def train(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """One run."""
    if is_submitted():  # only this machine knows, and reading the job takes seconds
        _require_new_name(words[1:])
    job, rest = job_and_words(words, "train")
    command = read_command("train", job, rest, f"concord train {words[0]}")
    if command.print_config:
        return _print_options(command, as_json)
    from concord.interface.commands import trained

    report = trained(command).as_json()
    if not as_json:
        _print_report(report)
    return report


def _require_new_name(words: Sequence[str]) -> None:
    """Refuse the name of an existing run that is not resumed (InputError)."""
    from concord.execution.taken_names import require_new

    early = early_values(words)
    if early["name"] is not None and "--resume" not in words:
        require_new(Path(early["output"] or DEFAULT_OUTPUT), early["name"])


def _print_options(command: Any, as_json: bool) -> Mapping[str, Any]:
    from concord.cli.config_file import print_options

    return print_options(command.job, command.options, as_json)


def _print_report(report: Mapping[str, Any]) -> None:
    shown = {name: value for name, value in report["metrics"].items() if not name.startswith(("worst_", "step"))}
    table(["metric", "value"], [[name, f"{value:.4f}"] for name, value in sorted(shown.items())])
    print(f"run       {report['name']}  (MLflow run {report['run_id']})")
    print(f"artifacts {report['artifacts']}")
    if report["model"]:
        print(f"model     {report['model']}" + (f": {report['registration']}" if report["registration"] else ""))
    print(f"seconds   {report['seconds']:.1f}")


def tune(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """One study."""
    job, rest = job_and_words(words, "tune")
    command = read_command("tune", job, rest, f"concord tune {words[0]}")
    if command.print_config:
        return _print_options(command, as_json)
    from concord.interface.commands import tuned

    result = tuned(command).result
    if not as_json:
        show(result.output())
    return result.as_json()


def compare(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Train the missing runs of tables, or tune each method, and show the result."""
    job, rest = job_and_words(words, "compare")
    command = read_command("compare", job, rest, f"concord compare {words[0]}")
    if command.print_config:
        return _print_options(command, as_json)
    from concord.interface.commands import compared, require_finished

    comparison = compared(command)
    result = comparison.result
    assert result is not None  # only a comparison that was loaded has none
    if not as_json:
        show(result.output())
    require_finished(comparison)
    return result.as_json()


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train the AND-mask and the average on the same synthetic data, and compare them."""

    seed: int = 0
    """Seed of data and training."""
    workers: int = 2
    """Worker processes."""
    output: Path = DEFAULT_OUTPUT
    """Folder for runs, figures and MLflow's store."""


def demo(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Compare the AND-mask with the average."""
    options = parse(Demo, words, "concord demo")
    from concord.execution.execute import needs_ray_train
    from concord.execution.preflight import preflight
    from concord.execution.session import ray_session
    from concord.execution.submission.profile import described
    from concord.interface.command_options import JobCommand
    from concord.interface.commands import trained
    from concord.tracking import Store
    from concord.training.job import load_job

    job = load_job("synthetic")
    config = job.job.config.with_options(**vars(options))
    config.check()
    preflight(job, config)  # before Ray starts, which takes seconds
    Store.open(config.run.output)
    with contextlib.ExitStack() as session:
        if needs_ray_train(config):
            info(f"both methods train on Ray Train with {options.workers} workers, in one Ray session")
            if dashboard := session.enter_context(ray_session(config)):
                info(f"Ray dashboard {described(dashboard)}")
        runs = {
            aggregator: trained(JobCommand("train", job, (), config.with_options(aggregator=aggregator), frozenset()))
            for aggregator in ("and-mask", "mean")
        }
        reports = {aggregator: each.as_json() for aggregator, each in runs.items()}
    if not as_json:
        columns = ["train_accuracy", "held_out_accuracy", "ood_accuracy", "kept_fraction"]
        rows = [
            [name, *(f"{report['metrics'][column]:.3f}" for column in columns), f"{report['seconds']:.0f}"]
            for name, report in reports.items()
        ]
        table(["aggregator", "train", "held-out", "o.o.d.", "kept fraction", "seconds"], rows)
        _print_next_steps(runs["and-mask"], reports["and-mask"]["model"], options.output)
    return {"reports": list(reports.values())}


def _print_next_steps(run: Any, model: str | None, output: Path) -> None:
    program = Path(sys.argv[0])
    program = program if program.exists() else Path("concord")
    ui = "" if output == DEFAULT_OUTPUT else f" --output {output}"
    print(f"figures      {run.folder / 'figures'}")
    print(f"runs, models {_relative(program)} ui{ui}")
    if model is None:
        return
    python = _relative(program.with_name("python")) if program.parent != Path() else "python"
    width, uri = 34, run.store
    print(
        f"predict      {python} -c \"import mlflow, numpy; mlflow.set_tracking_uri('{uri}'); "
        f"print(mlflow.pyfunc.load_model('{model}')"
        f'.predict(numpy.zeros((1, {width}), numpy.float32)))"'
    )


def _relative(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.absolute().relative_to(Path.cwd()))
    return str(path)


def data(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Make the data of a job."""
    job, rest = job_and_words(words, "data")
    making = job.job.data
    if making is None:
        raise InputError(f"data {words[0]}: this job has no data to make; train it")
    options = parse(making.options, rest, f"concord data {words[0]}")
    result: Mapping[str, Any] = making.make(options, info)
    if not as_json and not making.prints_result:
        Table.nested("data", result).print()
    return {"job": job.name, **result}


def report(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Figures and tables of a job, its comparisons and its studies, from existing runs."""
    job, rest = job_and_words(words, "report")
    from concord.studies.report import report_groups, report_options

    tables, rest = tables_and_options(rest)
    options = parse(report_options(job), rest, f"concord report {words[0]}")
    check_local_folder("--output", options.output)
    result, shown = report_groups(job, tables, options, info)
    if not as_json:
        show(shown)
    return result
