"""Commands that run jobs: jobs, train, tune, compare, demo, data, report."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from concord.cli.job_options import JobCommand, read_command, tables_and_options
from concord.cli.output import info, show, table
from concord.cli.parsing import asks_for_help, job_and_words, parse
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, UnfinishedError
from concord.job_files import job_texts
from concord.options import flag_of
from concord.storage import check_local_folder
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
    job, rest = job_and_words(words, "train")
    from concord.cli.config_file import print_options
    from concord.runs.run import run

    command = read_command("train", job, rest, f"concord train {words[0]}", _resumed_run)
    job, config = command.job, command.options
    if command.print_config:
        return print_options(job, config, as_json)
    report = _report_of(run(job, config, info, given=command.given))
    if not as_json:
        _print_report(report)
    return report


def _report_of(run: Any) -> Mapping[str, Any]:
    """What a run says of itself, also if MLflow has not taken all."""
    found: Mapping[str, Any] = run.report or run.ended["untracked"]
    return found


def _resumed_run(output: Path, name: str, words: Sequence[str]) -> Mapping[str, Any] | None:
    """With --resume, the record of the resumed run."""
    from concord.record import folder_of, require_run

    if "--resume" not in words or asks_for_help(words):
        return None
    return require_run(folder_of(output, name)).record


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
    from concord.cli.config_file import print_options

    command = read_command("tune", job, rest, f"concord tune {words[0]}", partial(_earlier_study, job))
    if command.print_config:
        return print_options(command.job, command.options, as_json)
    from concord.studies.plan import plan_study

    plan = plan_study(command.job, command.options, set(command.given), command.sources)
    from concord.studies.study import run_study  # imports Ray Tune, which takes seconds

    result = run_study(plan, info)
    if not as_json:
        show(result.output())
    return result.as_json()


def _earlier_study(job: Any, output: Path, name: str, words: Sequence[str]) -> Mapping[str, Any] | None:
    """The record of the study of this --name, with its initial options as the configuration."""
    from concord.record import folder_of, read_record

    if "/" in name or asks_for_help(words):
        return None
    record = read_record(folder_of(output, name, "study"), "study")
    if record is None:
        return None
    if record["job"] != job.name:
        raise InputError(f"--name {name}: is a study of job {record['job']}, not of {job.name}")
    return {**record, "config": {**record["config"], **record["options"], "name": name}}


def compare(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Train the missing runs of tables, or tune each method, and show the result."""
    job, rest = job_and_words(words, "compare")
    from concord.cli.config_file import print_options
    from concord.studies.comparison_plan import METHODS

    command = read_command("compare", job, rest, f"concord compare {words[0]}")
    if command.print_config:
        return print_options(command.job, command.options, as_json)
    result = _methods(command) if METHODS in command.tables else _tables(command)
    if not as_json:
        show(result.output())
    shown: Mapping[str, Any] = result.as_json()
    if result.failed:
        name, failure = next(iter(result.failed.items()))
        what, again = ("methods", "") if METHODS in command.tables else ("runs", "; the same command tries again")
        first = f"{name}: {failure.splitlines()[0]}"
        raise UnfinishedError(f"failed {what}: {len(result.failed)}, the first of them {first}{again}", shown)
    return shown


def _tables(command: JobCommand) -> Any:
    from concord.studies.comparison_plan import LEAVE_ONE_OUT, plan_comparison
    from concord.studies.leave_one_out import plan_leave_one_out

    if LEAVE_ONE_OUT in command.tables:
        plan = plan_leave_one_out(command.job, command.options, command.given)
    else:
        plan = plan_comparison(command.job, command.tables, command.options, command.given)
    from concord.studies.comparison_run import run_comparison  # imports Ray Tune, which takes seconds
    from concord.studies.results import write_lines

    result = run_comparison(plan, info)
    if (results := command.options.comparison.results) is not None:
        for table in result.tables:
            if table.runs:  # else rows that were kept earlier would be lost
                info(f"kept in {write_lines(table.runs, results, command.job.name, table.name)}")
    return result


def _methods(command: JobCommand) -> Any:
    from concord.studies.methods import plan_methods, run_methods

    return run_methods(plan_methods(command.job, command.options, command.given), command.words(), info)


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
    from concord.runs.execute import needs_ray_train
    from concord.runs.preflight import preflight
    from concord.runs.run import run
    from concord.runs.session import ray_session
    from concord.runs.submission.profile import described
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
            aggregator: run(job, config.with_options(aggregator=aggregator), info)
            for aggregator in ("and-mask", "mean")
        }
        reports = {aggregator: _report_of(each) for aggregator, each in runs.items()}
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
    print(f"figures      {run.folder.path / 'figures'}")
    print(f"runs, models {_relative(program)} ui{ui}")
    if model is None:
        return
    python = _relative(program.with_name("python")) if program.parent != Path() else "python"
    width, uri = 34, run.record["store"]
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
    for option in ("output", "data_dir"):
        check_local_folder(flag_of(option), getattr(options, option, None))
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
