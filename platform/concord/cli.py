"""The command line. Each command is a dataclass of its options; ``train`` and ``report`` take a job's own.

Results go to standard output, everything else to standard error; with ``--json`` the last line on standard output is
one JSON object. Exit status: 0 done, 1 failed, 2 wrong usage.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import tyro
from tyro import _errors as tyro_errors

import concord
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, RunFailedError

Options = TypeVar("Options")

USAGE = """\
usage: concord COMMAND [options]

  concord jobs                          what there is to run, and what each reproduces
  concord train JOB [--option value]    one run; --name NAME --resume continues it
  concord tune JOB [--trials N]         one study; the same --name continues it
  concord report JOB                    figures and tables from what was tracked
  concord data JOB                      make the data of a job that needs some made
  concord demo                          the AND-mask beside the average, on the synthetic task
  concord models                        the model registry: list, show, promote
  concord ui                            the MLflow UI on this machine's store
  concord bench                         the benchmark table

JOB is a name from `concord jobs` or a Python file of your own.
Every command takes --help, and --json: then the last line on standard output is one JSON object."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    # With --json, what a job file or a worker prints must not come before the reader's JSON.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        status, result = _outcome(words, as_json)
    if as_json and result is not None:
        print(json.dumps(_plain(result)), flush=True)
    return status


def _outcome(words: Sequence[str], as_json: bool) -> tuple[int, Mapping[str, Any] | None]:
    """The exit status of a command and what --json shows; what went wrong is said here."""
    try:
        if not words:
            raise InputError(f"no command given; there are {', '.join(COMMANDS)}; concord --help says more")
        if words[0] in {"-h", "--help"}:
            print(USAGE)
            return 0, None
        if words[0] == "--version":
            if not as_json:
                print(concord.__version__)
            return 0, {"version": concord.__version__}
        if words[0] not in COMMANDS:
            raise InputError(f"command {words[0]}: there is none; there are {', '.join(COMMANDS)}")
        return 0, COMMANDS[words[0]](words[1:], as_json)
    except (InputError, RunFailedError) as error:
        status, problem = (2 if isinstance(error, InputError) else 1), str(error)
    except KeyboardInterrupt:
        status, problem = 1, "stopped"
    except Exception as error:  # a mistake of ours, to be seen whole, but for passwords
        status, problem = 1, f"{type(error).__name__}: {error}"
        print(_without_passwords(traceback.format_exc()), file=sys.stderr)
    problem = _without_passwords(problem)
    print(f"concord: {problem}", file=sys.stderr, flush=True)
    return status, {"error": problem}


def _without_passwords(text: str) -> str:
    from concord.tracking.client import redact

    return redact(text)


def _plain(value: Any) -> Any:
    """The value with null for each number that JSON does not have (a loss that is not finite)."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def _parse(options: type[Options], words: Sequence[str], program: str, default: Options | None = None) -> Options:
    """The options in these words; what is wrong with them becomes one line."""

    def refuse(event: Any) -> None:
        raise InputError(
            _one_line(event, [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(cast(Any, options))])
        )

    given: dict[str, Any] = {} if default is None else {"default": default}
    with tyro_errors.on_parse_error(refuse):
        parsed: Options = tyro.cli(options, prog=program, args=list(words), **given)
    return parsed


# What tyro calls the values of an option, in words.
_KINDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "[INT [INT ...]]": "whole numbers",
    "[FLOAT [FLOAT ...]]": "numbers",
}


def _one_line(event: Any, known: Sequence[str]) -> str:
    """What a parse error is about: the option, the value, and what would be right."""
    lowered = getattr(getattr(event, "argument", None), "lowered", None)
    option = "/".join(getattr(lowered, "name_or_flags", ()) or ())
    if not option.startswith("-"):
        option = event.prog.removeprefix("concord ")
    metavar = str(getattr(lowered, "metavar", None) or "").removeprefix("{None}|")
    kind = _KINDS.get(metavar, metavar)
    match type(event).__name__:
        case "UnrecognizedArgs":
            first = event.tokens[0]
            if not first.startswith("-"):
                return f"{' '.join(event.tokens)}: not expected here; {event.prog} --help lists the options"
            near = difflib.get_close_matches(first.split("=")[0].lower(), known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            return f"{' '.join(event.tokens)}: there is no such option; {meant}{event.prog} --help lists them"
        case "InvalidChoice":
            return f"{option} {event.value}: must be one of {', '.join(event.choices)}"
        case "BadValue" if event.reason == "too_few_values":
            return f"{option}: needs a value, {kind}"
        case "BadValue":
            return f"{option} {event.offending_value or ''}: {' '.join(str(event.reason).split())}".replace(" :", ":")
        case "InstantiationFailure":
            message = " ".join(event.message.split())
            value = " ".join(re.findall(r"'([^']*)'", message))
            return f"{option} {value}: must be {kind}" if metavar in _KINDS else f"{option}: {message}"
        case _:
            return f"{' '.join(event.prog.split())}: the options are incomplete or contradict one another; see --help"


def _job_and_words(words: Sequence[str], command: str) -> tuple[Any, list[str]]:
    from concord.training.job import built_in_jobs, load_job

    if not words or words[0].startswith("-"):
        if words and words[0] in {"-h", "--help"}:
            print(f"usage: concord {command} JOB [options]\n\nOptions depend on the job: concord {command} JOB --help")
            raise SystemExit(0)
        raise InputError(f"{command}: which job? one of {', '.join(built_in_jobs())}, or a Python file")
    return load_job(words[0]), list(words[1:])


# --- jobs


def _jobs(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """What there is to run."""
    from concord.training.job import built_in_jobs, load_job

    _parse(_NoOptions, words, "concord jobs")
    jobs = [{"name": name, "reproduces": load_job(name).job.reproduces} for name in built_in_jobs()]
    if not as_json:
        _table(["job", "reproduces"], [[job["name"], job["reproduces"]] for job in jobs])
    return {"jobs": jobs}


@dataclass(frozen=True)
class _NoOptions:
    """What there is to run, and what each reproduces."""


# --- train


def _train(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """One run."""
    from concord.training.job import OwnJob
    from concord.training.run import run

    job, rest = _job_and_words(words, "train")
    program = f"concord train {words[0]}"
    config = _parse(job.job.config, rest, program, default=_resumed_options(job, rest))
    report = job.job.run(job, config, say) if isinstance(job.job, OwnJob) else run(job, config, say)
    if not as_json:
        _print_report(report)
    return report.as_json()


def _resumed_options(job: Any, words: Sequence[str]) -> Any:
    """With --resume, the options the run was started with: they need not be given again."""
    from concord.training.run_folder import read_record, restored_config

    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if "--resume" not in words or "--name" not in words[:-1] or {"-h", "--help"} & set(words):
        return None
    output = Path(words[words.index("--output") + 1]) if "--output" in words[:-1] else DEFAULT_OUTPUT
    recorded = read_record(output / "runs" / words[words.index("--name") + 1])["config"]
    return restored_config(job.job.config, recorded)


def _print_report(report: Any) -> None:
    shown = {name: value for name, value in report.metrics.items() if not name.startswith(("worst_", "step"))}
    _table(["metric", "value"], [[name, f"{value:.4f}"] for name, value in sorted(shown.items())])
    print(f"run       {report.name}  (MLflow run {report.run_id})")
    print(f"artifacts {report.folder}")
    if report.model:
        print(f"model     {report.model}" + (f": {report.registered.reason}" if report.registered else ""))
    print(f"seconds   {report.seconds:.1f}")


# --- tune


def _tune(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """One study."""
    from concord.training.job import OwnJob
    from concord.tuning.options import options_for
    from concord.tuning.plan import make_plan

    job, rest = _job_and_words(words, "tune")
    if isinstance(job.job, OwnJob):
        raise InputError(f"tune {words[0]}: this job trains in a way of its own, and has nothing that is searched")
    kind = options_for(job.job.config, list(job.job.studies))
    earlier, given_then = _earlier_study(kind, job, rest)
    options = _parse(kind, rest, f"concord tune {words[0]}", default=earlier)
    plan = make_plan(job, options, given_then | _given(kind, rest))
    from concord.tuning.study import run_study  # imports Ray Tune, which takes seconds

    result = run_study(plan, say)
    if not as_json:
        _print_study(result)
    return result.as_json()


def _given(options: type[Any], words: Sequence[str]) -> set[str]:
    """The options that these words name."""
    names = {field.name for field in dataclasses.fields(options)}
    named = {word.removeprefix("--").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return (named | {name.removeprefix("no_") for name in named}) & names


def _earlier_study(kind: type[Any], job: Any, words: Sequence[str]) -> tuple[Any, set[str]]:
    """The options that the study of this --name was started with, which need not be given again, and their names."""
    from concord.training.run_folder import restored_config
    from concord.tuning.journal import STUDY, read_study
    from concord.tuning.plan import studies_folder

    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if "--name" not in words[:-1] or {"-h", "--help"} & set(words):
        return None, set()
    name = words[words.index("--name") + 1]
    output = Path(words[words.index("--output") + 1]) if "--output" in words[:-1] else DEFAULT_OUTPUT
    folder = studies_folder(output) / name
    if "/" in name or not (folder / STUDY).exists():
        return None, set()
    record = read_study(folder)
    if record["job"] != job.name:
        raise InputError(f"--name {name}: is a study of job {record['job']}, not of {job.name}")
    return restored_config(kind, {**record["config"], **record["options"], "name": name}), set(record["given"])


def _print_study(result: Any) -> None:
    from concord.tuning.results import selections_table

    header, rows = result.table(int(result.record["options"]["top"]))
    _table([name.replace("_", " ") for name in header], rows)
    _table(*selections_table(result))
    if result.reruns:
        _print_reruns(result)
    task, _ = result.best
    print(f"study     {result.record['name']}: {len(result.finished)} trials finished, {len(result.failed)} failed")
    print(f"best      trial {task.trial}, selected by {result.label}")
    if result.record["oracle"]:
        print(f"oracle    the o.o.d. test decided over {result.record['oracle']}")
    if result.record.get("model"):
        print(f"model     {result.record['model']}")
    print(f"figures   {result.folder / 'figures'}")
    if result.seconds:
        print(f"seconds   {result.seconds:.1f}")


def _print_reruns(result: Any) -> None:
    rows = []
    for split in ("train", "held_out", "ood"):
        values = sorted(
            m[f"{split}_{result.measure}"] for m in result.reruns.values() if f"{split}_{result.measure}" in m
        )
        if values:
            middle = statistics.median(values)
            rows.append(
                [f"{split} {result.measure}".replace("_", " "), *(f"{v:.4f}" for v in (middle, values[0], values[-1]))]
            )
    _table([f"best, {len(result.reruns)} new seeds", "median", "least", "largest"], rows)


# --- demo


@dataclass(frozen=True, kw_only=True)
class _Demo:
    """Train the AND-mask and the average on the same synthetic data, and compare them."""

    seed: int = 0
    """Seed of data and training."""
    workers: int = 2
    """Ray Train workers."""
    output: Path = DEFAULT_OUTPUT
    """Folder for runs, figures and MLflow's store."""


def _demo(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """The AND-mask beside the average."""
    from concord.tracking import Store
    from concord.training.distributed import ray_session
    from concord.training.job import load_job
    from concord.training.run import preflight, run

    options = _parse(_Demo, words, "concord demo")
    job = load_job("synthetic")
    config = job.job.config(seed=options.seed, workers=options.workers, output=options.output)
    config.check()
    preflight(job, config)  # this and the store, before Ray takes its seconds to start
    Store.open(config.output)
    reports = {}
    with ray_session(config):
        for aggregator in ("and-mask", "mean"):
            reports[aggregator] = run(job, dataclasses.replace(config, aggregator=aggregator), say)
    if not as_json:
        columns = ["train_accuracy", "held_out_accuracy", "ood_accuracy", "kept_fraction"]
        rows = [
            [name, *(f"{report.metrics[column]:.3f}" for column in columns), f"{report.seconds:.0f}"]
            for name, report in reports.items()
        ]
        _table(["aggregator", "train", "held-out", "o.o.d.", "kept fraction", "seconds"], rows)
        _print_next_steps(reports["and-mask"], options.output)
    return {"reports": [report.as_json() for report in reports.values()]}


def _print_next_steps(report: Any, output: Path) -> None:
    program = Path(sys.argv[0])
    program = program if program.exists() else Path("concord")
    ui = "" if output == DEFAULT_OUTPUT else f" --output {output}"
    print(f"figures      {report.folder / 'figures'}")
    print(f"runs, models {_shortened(program)} ui{ui}")
    if report.model is None:
        return
    python = _shortened(program.with_name("python")) if program.parent != Path() else "python"
    width, uri = 34, _without_passwords(report.tracking_uri)
    print(
        f"predict      {python} -c \"import mlflow, numpy; mlflow.set_tracking_uri('{uri}'); "
        f"print(mlflow.pyfunc.load_model('{report.model}')"
        f'.predict(numpy.zeros((1, {width}), numpy.float32)))"'
    )


def _shortened(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.absolute().relative_to(Path.cwd()))
    return str(path)


# --- data


def _data(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Make the data of a job."""
    job, rest = _job_and_words(words, "data")
    data = getattr(job.job, "data", None)
    if data is None:
        raise InputError(f"data {words[0]}: this job reads data that are there, or makes its own when it runs")
    result: Mapping[str, Any] = data.make(_parse(data.options, rest, f"concord data {words[0]}"), say)
    if not as_json:
        _table(["data", ""], [[str(key), _shown(value)] for key, value in result.items()])
    return {"job": job.name, **result}


# --- report


def _report(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Figures and tables of a job, and of its studies."""
    from concord.tuning.options import combined
    from concord.tuning.report import StudyReport, report_studies

    job, rest = _job_and_words(words, "report")
    kind = StudyReport if job.job.report is None else combined(job.job.report.options, StudyReport)
    options = _parse(kind, rest, f"concord report {words[0]}")
    result: dict[str, Any] = {"job": job.name}
    if job.job.report is not None and not options.only_studies:
        result |= job.job.report.make(options, say)
    studies, of_studies = report_studies(job.name, options, say)
    if not studies and (job.job.report is None or options.only_studies):
        raise InputError(f"report: job {job.name} has no study in {options.output}; concord tune {words[0]} makes one")
    result |= of_studies | {"figures": {**result.get("figures", {}), **of_studies.get("figures", {})}}
    if not as_json:
        for study in studies:
            if study.finished:
                _print_study(study)
        for name, value in result.items():
            if isinstance(value, Mapping):
                _table([name, ""], [[str(key), _shown(entry)] for key, entry in value.items()])
    return result


def _shown(value: Any) -> str:
    if isinstance(value, float):  # small ones, such as learning rates, keep their digits
        return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return "  ".join(f"{key}: {_shown(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(_shown(entry) for entry in value)
    return str(value)


# --- models


@dataclass(frozen=True, kw_only=True)
class _Models:
    """The model registry: list the versions, show one, or promote one to champion."""

    do: tyro.conf.Positional[Literal["list", "show", "promote"]] = "list"
    """What to do."""
    name: tyro.conf.Positional[str | None] = None
    """Of the registered model, for show and promote."""
    version: tyro.conf.Positional[str | None] = None
    """Number of the version, or (for show) an alias; show takes the champion if it is not given."""
    output: Path = DEFAULT_OUTPUT
    """Folder of MLflow's store, without a tracking URI."""
    tracking_uri: str | None = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI)."""


def _models(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """The model registry."""
    from concord.tracking import models, promote, show

    options = _parse(_Models, words, "concord models")
    if options.do != "list" and options.name is None:
        raise InputError(f"models {options.do}: of which model? give its name; concord models lists them")
    if options.do == "promote" and not (options.version or "").isdecimal():
        raise InputError(f"models promote {options.name}: which version? give its number")
    store = _store(options.output, options.tracking_uri)
    if options.do == "list":
        versions = models(store)
    elif options.do == "show":
        versions = [show(store, str(options.name), options.version or "champion")]
    else:
        versions = [promote(store, str(options.name), int(str(options.version)))]
    listed = [
        {"name": v.name, "version": v.version, "aliases": list(v.aliases), "metrics": v.metrics} for v in versions
    ]
    if not as_json and options.do == "show":
        version = versions[0]
        print(f"{version.uri}  {' '.join(version.aliases)}\nrun {version.run_id}, judged by {version.criterion}")
        _table(["metric", "value"], [[name, f"{value:.4f}"] for name, value in sorted(version.metrics.items())])
    elif not as_json:
        rows = [[v.name, str(v.version), " ".join(v.aliases), _judged(v)] for v in versions]
        _table(["model", "version", "aliases", "judged by"], rows)
    return {"models": listed}


def _judged(version: Any) -> str:
    value = version.metrics.get(version.criterion)
    return "" if value is None else f"{version.criterion} {value:.4f}"


def _store(output: Path, tracking_uri: str | None) -> Any:
    from concord.tracking import Store

    local = tracking_uri is None and "MLFLOW_TRACKING_URI" not in os.environ
    if local and not (output / "mlflow.db").exists():
        raise InputError(f"--output {output}: there is no MLflow store; a run of concord train makes one there")
    return Store.open(output, tracking_uri)


# --- ui


@dataclass(frozen=True, kw_only=True)
class _Ui:
    """The MLflow UI on this machine's store; Ctrl-C stops it."""

    output: Path = DEFAULT_OUTPUT
    """Folder of MLflow's store."""
    host: str = "127.0.0.1"
    """Address to listen on. Anyone who reaches it can read and change the store."""
    port: int = 5000
    """Port to listen on."""
    tracking_uri: str | None = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI); a server has its own UI, whose address is shown."""


def _ui(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:  # noqa: ARG001
    """The MLflow UI, and the Ray dashboard's address."""
    options = _parse(_Ui, words, "concord ui")
    if not 0 < options.port < 2**16:
        raise InputError(f"--port {options.port}: must lie between 1 and {2**16 - 1}")
    store = _store(options.output, options.tracking_uri)
    dashboard = _ray_dashboard()
    say(f"Ray dashboard: {dashboard or 'no Ray is running here; a run shows it while it lasts'}")
    if store.uri.startswith("http"):
        address = _without_passwords(store.uri)
        say(f"MLflow UI: {address}")
        return {"mlflow": address, "ray": dashboard}
    address = f"http://{options.host}:{options.port}"
    say(f"MLflow UI: {address}")
    server = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store.uri]
    server += ["--host", options.host, "--port", str(options.port)]
    with contextlib.suppress(KeyboardInterrupt):
        status = subprocess.run(server, check=False, stdout=subprocess.DEVNULL).returncode
        if status != 0:
            raise RunFailedError(f"the MLflow UI stopped with status {status}; is port {options.port} taken?")
    return {"mlflow": address, "ray": dashboard}


def _ray_dashboard() -> str | None:
    from concord.training.distributed import running_dashboard

    return running_dashboard()


# --- bench


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """The benchmark table: ratios, measured interleaved on this machine."""

    only: str = ""
    """Only benchmarks whose file name contains this."""


def _bench(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """The benchmark table."""
    from concord.benchmark import run_benchmarks
    from concord.machine import machine

    options = _parse(_Bench, words, "concord bench")
    rows = run_benchmarks(options.only, say)
    if not as_json:
        print(machine())
        shown = [
            [
                row.name,
                _ms(row.seconds) + _gib(row.memory),
                row.reference,
                _ms(row.reference_seconds) + _gib(row.reference_memory),
                f"{row.ratio:.3f}",
                row.target,
            ]
            for row in rows
        ]
        _table(["what", "time", "against", "time", "ratio", "target"], shown)
    fields = ("name", "seconds", "reference", "reference_seconds", "ratio", "memory", "reference_memory")
    return {"machine": machine(), "rows": [{field: getattr(row, field) for field in fields} for row in rows]}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _gib(memory: float | None) -> str:
    return "" if memory is None else f", {memory:.2f} GiB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    # Where output is no terminal, a narrow default width would break every row.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


COMMANDS: dict[str, Callable[[Sequence[str], bool], Mapping[str, Any]]] = {
    "jobs": _jobs,
    "train": _train,
    "tune": _tune,
    "report": _report,
    "data": _data,
    "demo": _demo,
    "models": _models,
    "ui": _ui,
    "bench": _bench,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def entry() -> None:
    """The ``concord`` program."""
    with _quiet():
        raise SystemExit(main())
