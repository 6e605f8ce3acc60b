"""The command line. Each command is a function that is imported when it is called, with a dataclass of its options.

Results go to standard output, everything else to standard error; with ``--json`` the last line on standard output is
one JSON object. Exit status: 0 done, 1 failed, 2 wrong usage.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import concord
from concord import logs as structured_logs
from concord.cli.output import output_closed, prepare_streams
from concord.errors import InputError, RunFailedError, UnfinishedError, format_for_cli, require_posix
from concord.exit_watchdog import reported_death
from concord.logs import info
from concord.openmp import wait_variables
from concord.options import did_you_mean
from concord.redaction import redact

Command = Callable[[Sequence[str], bool], Mapping[str, Any]]
# The module of each command, with a function of its name that takes the other words and whether --json was given, and a
# dataclass of its options (``Demo``), unless they depend on a job, see concord.cli.job_options.
COMMANDS = {
    **dict.fromkeys(("jobs", "train", "tune", "compare", "report"), "concord.cli.running"),
    "analyze": "concord.cli.analyze",
    **dict.fromkeys(("data", "demo"), "concord.cli.running"),
    **dict.fromkeys(("submit", "submissions", "logs", "stop"), "concord.cli.submit"),
    "runs": "concord.cli.runs",
    **dict.fromkeys(("models", "ui"), "concord.cli.models"),
    "bench": "concord.cli.bench",
    "completion": "concord.cli.completion",
}

USAGE = """\
usage: concord COMMAND [options]

  concord jobs                          the built-in jobs, and the papers' results that each is for
  concord train JOB [--option value]    one run; --name NAME --resume continues it
  concord tune JOB [--trials N]         one study; the same --name continues it
  concord compare JOB [TABLE…]          configurations × seeds: a paper's table; repeat it to continue
  concord report JOB [TABLE…]           figures and tables from tracked runs, without training
  concord analyze JOB --name RUN…       how consistent a trained model is across environments
  concord data JOB                      make the data of a job
  concord demo                          the AND-mask compared with the average, on the synthetic task
  concord submit train|tune|compare JOB the same on a cluster, through Ray Jobs; shows the log, or --no-wait
  concord submissions                   a cluster's jobs; concord logs ID, concord stop ID
  concord runs                          tracked runs: list, find, --compare NAME NAME, delete
  concord models                        the model registry: list, show, promote, delete
  concord ui                            the MLflow UI on this machine's store
  concord bench                         the benchmark table, in minutes; --all measures everything
  concord completion bash|zsh           a script that completes commands, jobs and options

JOB is a name from `concord jobs` or a Python file of your own.
Every command takes --help and --json; with --json the last line on standard output is one JSON object."""


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
    """The exit status of a command and its JSON result; errors are printed here."""
    partial: Mapping[str, Any] = {}
    try:
        require_posix()
        from concord.storage import disk_errors_in_one_line

        structured_logs.check()
        if structured_logs.as_json():
            structured_logs.use_json()
        if not words:
            raise InputError(f"no command given; the commands are {', '.join(COMMANDS)}; concord --help explains them")
        if words[0] in {"-h", "--help", "help"}:
            print(USAGE)
            return 0, None
        if words[0] == "--version":
            if not as_json:
                print(concord.__version__)
            return 0, {"version": concord.__version__}
        if words[0] not in COMMANDS:
            near = did_you_mean(words[0], COMMANDS) or f"; there are {', '.join(COMMANDS)};"
            raise InputError(f"command {words[0]}: there is no such command{near} concord --help explains them")
        command: Command = getattr(importlib.import_module(COMMANDS[words[0]]), words[0])
        with disk_errors_in_one_line():
            return 0, command(words[1:], as_json)
    except (InputError, RunFailedError) as error:
        status, problem = (2 if isinstance(error, InputError) else 1), format_for_cli(error)
        partial = error.result if isinstance(error, UnfinishedError) else {}
    except KeyboardInterrupt:
        status, problem = 1, "stopped"
    except Exception as error:  # a bug of Concord: show the traceback, without passwords
        if isinstance(error, BrokenPipeError) and output_closed():
            raise
        status, problem = 1, f"{type(error).__name__}: {error}"
        info(redact(traceback.format_exc()), logging.ERROR)
    problem = redact(problem)
    info(f"concord: {problem}", logging.ERROR)
    return status, {**partial, "error": problem}


def _plain(value: Any) -> Any:
    """The value with null for each number that JSON lacks (a loss that is not finite)."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def entry() -> None:
    """The ``concord`` program."""
    os.environ.update(wait_variables())  # before PyTorch is imported
    prepare_streams()
    runs_jobs = sys.argv[1:2] and sys.argv[1] in ("train", "tune", "compare", "demo", "data", "analyze")
    for category in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    structured_logs.show_warnings_in_one_line()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # before a run has its own handler
    with reported_death() if runs_jobs else contextlib.nullcontext():
        try:
            try:
                raise SystemExit(main())
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            if not output_closed():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at the end
            raise SystemExit(1) from None
