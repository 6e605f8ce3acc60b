"""Commands on a Ray cluster's jobs: submit, submissions, logs, stop."""

import contextlib
import dataclasses
import functools
import math
import os
import re
import secrets
import shlex
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from concord import logs as structured_logs
from concord.cli.job_options import read_command
from concord.cli.output import table
from concord.cli.parsing import asks_for_help, given_options, job_and_words, parse, parse_known
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, RunFailedError
from concord.execution.submission.package import MOST_FILES, inside, packed
from concord.execution.submission.runtime_environment import runtime_environment, variables_of
from concord.logs import info
from concord.options import as_words, flag_of, option_values, options_of
from concord.redaction import is_secret, redact
from concord.storage import is_remote
from concord.submitted import BEGUN, SUBMITTED, submit_variables
from concord.user import USER, require_user, user_name

if TYPE_CHECKING:
    from concord.interface.command_options import JobCommand

# Ray asks a job to end, kills it a minute later, and then ends its workers.
_STOP_SECONDS = 90.0
_PROBLEM = "concord: "  # begins the last line of a command that failed
# MiB that Ray's dashboard takes.
_LARGEST_PACKAGE = 100


@dataclass(frozen=True, kw_only=True)
class _ClusterOptions:
    """A Ray cluster."""

    address: str | None = None
    """Address of the cluster's dashboard, http://HOST:8265 (or RAY_API_SERVER_ADDRESS, or the profile's); by default
    the Ray on this machine."""
    profile: str | None = None
    """Profile in ~/.config/concord/profiles.toml (or CONCORD_PROFILE); by default the one called default."""
    token_file: Path | None = None
    """File with the cluster's token; by default RAY_AUTH_TOKEN, the profile's, or ~/.ray/auth_token."""
    verify: str | None = None
    """How the certificate of an https address is checked: a file or folder with the authority's certificates, or no;
    by default by this machine's authorities."""


@dataclass(frozen=True, kw_only=True)
class Submit(_ClusterOptions):
    """Run a command on a Ray cluster, through Ray Jobs: concord submit train|tune|compare JOB, with its own options."""

    wait: bool = True
    """Show the log until the job ends, and exit with its status; Ctrl-C leaves the job running. --no-wait prints the
    submission's id instead, as soon as the cluster has found its name, data and tracking server right."""
    working_dir: Path | None = None
    """Folder to send; for a job file of your own, the current one by default. Files that git ignores are not sent."""
    size_limit: float = 100.0
    """Largest size to send, in MiB."""
    file_limit: int = MOST_FILES
    """Largest number of files to send."""
    driver_memory: float = 2.0
    """GiB reserved on the head node for the command and its processes there; a submission waits until they are free,
    so that many at once do not fill the node."""
    driver_cpus: float = 0.0
    """CPUs reserved on the head node for the command; its workers have their own."""
    driver_gpus: float = 0.0
    """GPUs reserved on the head node for the command, as for a job with a loop of its own."""
    env: tuple[str, ...] = ()
    """Environment variables for the job's code on all nodes, NAME=VALUE. Everybody who may look at the cluster can
    read them: none that is named like a secret is sent."""
    pip: tuple[str, ...] = ()
    """Packages that the nodes install for this submission, or a file of requirements that ends with .txt."""
    runtime_env: Path | None = None
    """YAML or JSON file with Ray's runtime environment, such as env_vars, pip, conda or image_uri."""
    restart: int = 0
    """Times to submit again, after a death of the head node, when it is back: the run or study continues."""
    submission_id: str | None = None
    """Id of the submission; by default made of the run's name."""
    tracking_uri: str | None = None
    """MLflow server as the cluster reaches it (or MLFLOW_TRACKING_URI, or the profile's), without a password."""


@dataclass(frozen=True, kw_only=True)
class Submissions(_ClusterOptions):
    """The jobs of a Ray cluster, the newest first."""

    all: bool = False
    """Also jobs that Concord did not submit."""
    mine: bool = False
    """Only submissions of this user."""


@dataclass(frozen=True, kw_only=True)
class Logs(_ClusterOptions):
    """The log of a submission."""

    id: tyro.conf.Positional[str]
    """The id of a submission; concord submissions lists them."""
    follow: bool = False
    """Follow the log until the job ends, and exit with its status."""


@dataclass(frozen=True, kw_only=True)
class Stop(_ClusterOptions):
    """End a submission, and wait until it has ended."""

    id: tyro.conf.Positional[str]
    """The id of a submission; concord submissions lists them."""


def submit(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Check the command here, send it, and follow it unless told not to wait."""
    if not words or asks_for_help(words[:1]):
        parse(Submit, words, "concord submit")
    options, rest = parse_known(Submit, words, "concord submit")
    variables = variables_of(options.env)
    if not rest and options.pip:
        raise InputError(f"--pip {' '.join(options.pip)}: names packages; a command and its job stand before --pip")
    if not rest or rest[0] not in SUBMITTED:
        what = f"submit {rest[0]}: cannot be submitted" if rest else "submit: no command given"
        raise InputError(
            f"{what}; give {', '.join(SUBMITTED[:-1])} or {SUBMITTED[-1]}, and a job: concord submit train synthetic"
        )
    job, own = job_and_words(rest[1:], f"submit {rest[0]}")
    command = read_command(rest[0], job, own, f"concord submit {rest[0]} {rest[1]}", around=Submit)
    if command.print_config:
        from concord.cli.config_file import print_options

        return print_options(command.job, command.options, as_json)
    name = check_command(command)
    if "hours" in options_of(type(command.options)) and "hours" not in command.given:
        hours = option_values(command.options)["hours"]
        info(f"on the cluster nobody is asked: above --hours {hours:g} of expected time the comparison is refused")
    profile = _profile(options, options.tracking_uri)
    for_code, variables = environment_for_code(options, profile, variables)
    if profile.tracking_uri is not None and redact(profile.tracking_uri) != profile.tracking_uri:
        raise InputError(
            f"--tracking-uri {redact(profile.tracking_uri)}: holds a password, which everybody who may look "
            "at the cluster could read; give it to the cluster's nodes, as MLFLOW_TRACKING_PASSWORD"
        )
    values = _cluster_values(command, profile)
    if options.working_dir is not None and not options.working_dir.is_dir():
        raise InputError(f"--working-dir {options.working_dir}: there is no such folder")
    files = SentFiles(options.working_dir)
    reference = files.take_job(command, rest[1])
    values |= files.take_options(command, values)
    if not 0 < options.size_limit <= _LARGEST_PACKAGE:
        raise InputError(f"--size-limit {options.size_limit:g}: must lie above 0 and not above {_LARGEST_PACKAGE}")
    if options.file_limit < 1:
        raise InputError(f"--file-limit {options.file_limit}: must be at least 1")
    if not 0 < options.driver_memory < math.inf:
        raise InputError(f"--driver-memory {options.driver_memory:g}: must be a finite number above 0")
    for option, number in (("--driver-cpus", options.driver_cpus), ("--driver-gpus", options.driver_gpus)):
        if not 0 <= number < math.inf:
            raise InputError(f"{option} {number:g}: must be a finite number, at least 0")
    if options.restart < 0:
        raise InputError(f"--restart {options.restart}: must not be negative")
    if options.restart > 0 and not options.wait:
        raise InputError(f"--restart {options.restart}: needs this command to wait; leave out --no-wait")
    made_up = values.get("name") is None and command.name != "compare"  # a comparison has one name
    identity = options.submission_id or _ascii(name) + ("" if made_up else f"-{secrets.token_hex(3)}")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", identity, re.ASCII):
        raise InputError(f"--submission-id {identity}: must have letters, digits, '-_.' only, a letter or digit first")
    values["name"] = name
    environment = {} if profile.tracking_uri is None else {"MLFLOW_TRACKING_URI": profile.tracking_uri}
    environment["CONCORD_CLIENT_PYTHON"] = ".".join(map(str, sys.version_info[:2]))
    from concord.tracking.system_metrics import ENABLED, INTERVAL

    environment |= {} if (user := user_name()) is None else {USER: user}
    environment |= {
        name: os.environ[name] for name in ("MLFLOW_EXPERIMENT_NAME", ENABLED, INTERVAL) if name in os.environ
    }
    environment |= variables
    repeated = given_options(Submit, words) - {"env", "submission_id", "wait"}  # values of --env are shown nowhere
    typed = as_words({option: value for option, value in vars(options).items() if option in repeated})
    environment |= submit_variables(identity, files.folder and (options.working_dir or Path()), typed)
    if structured_logs.as_json():
        environment[structured_logs.VARIABLE] = "json"
    from concord.execution.submission.admission import position
    from concord.execution.submission.cluster import Cluster, DriverResources  # imports Ray, which takes a second

    cluster = Cluster(profile)
    labels = {"command": command.name, "job": job.name, "name": name, "output": str(values.get("output", ""))}
    labels |= {"again": _again(command, rest, name, typed)} | ({} if user is None else {"user": user})
    if not made_up or options.submission_id is not None:
        cluster.require_free(identity, labels)
    with packed(files.folder, options.size_limit, files.needed, files.texts, options.file_limit) as package:
        started = time.perf_counter()
        sent = [command.name, reference, *command.tables, *as_words(values)]
        reserved = DriverResources(round(options.driver_memory * 2**30), options.driver_cpus, options.driver_gpus)
        send = functools.partial(cluster.submit, sent, package, identity, labels, environment, reserved, for_code)
        send()
        seconds = time.perf_counter() - started
        info(f"submitted {identity} to {cluster.address}")
        result: dict[str, Any] = {"submission": identity, "address": cluster.address, "command": command.name}
        result |= {"job": job.name, "name": name, "seconds": round(seconds, 3)}
        if options.wait:
            return result | _follow(cluster, identity, as_json, send, options.restart)
    with _left_running(identity):
        begun, log = cluster.await_beginning(identity)
    status = "pending" if begun is None else begun.status
    if begun is not None and begun.ended is not None:
        lines = [line.partition(_PROBLEM)[2] for line in log.splitlines() if line.startswith(_PROBLEM)]
        _require_success(begun, lines[-1] if lines else "see its log")
    elif BEGUN not in log:
        waits = ""
        with contextlib.suppress(InputError, RunFailedError):  # a busy head node does not answer
            waits = position(cluster, identity) if status == "pending" else ""
        does = f"waits as {waits}" if waits else f"is {status}, and has not begun its work"
        info(f"{identity}: {does}; whether the cluster accepts it is in its log")
    if not as_json:
        print(identity)
        info(f"concord logs {identity} --follow shows its log, concord stop {identity} ends it")
    return result | {"status": status}


def _again(command: "JobCommand", words: Sequence[str], name: str, typed: Sequence[str]) -> str:
    """The command that continues this one after its cluster was lost, with the options of submit as they were typed."""
    if command.name == "compare":
        return shlex.join(["concord", "submit", *words, *typed])
    resume = ["--resume"] if command.name == "train" else []
    return shlex.join(["concord", "submit", *words[:2], "--name", name, *resume, *typed])


def _ascii(name: str) -> str:
    """A name in the letters that Ray takes for ids."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^\w.-]+", "-", plain, flags=re.ASCII).strip("-._") or "run"


class SentFiles:
    """The user's files in a submission, by their paths in the sent folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.needed: list[Path] = []
        self.texts: dict[Path, str] = {}

    def _take(self, file: Path) -> str:
        self.folder = self.folder or Path.cwd()
        self.needed.append(inside(file, self.folder))
        return str(self.needed[-1])

    def take_job(self, command: "JobCommand", reference: str) -> str:
        """The job's reference on the cluster: its name, or its file's path."""
        from concord.job_files import built_in_jobs

        if reference in built_in_jobs():
            return reference
        job = command.job
        if command.name == "compare" and isinstance(job.job.comparisons, str):
            self._take(Path(job.path).parent / job.job.comparisons)
        return self._take(Path(job.path))

    def _take_method(self, method: str) -> str:
        """A method of a comparison; a rule of the user's own by its path on the cluster."""
        from concord.training.rule_file import RuleFile

        if not RuleFile.is_reference(method):
            return method
        file, rule = RuleFile.parts(method)
        return f"{self._take(Path(file))}:{rule}"

    def take_options(self, command: "JobCommand", values: Mapping[str, Any]) -> dict[str, Any]:
        """The options that name files, with the paths on the cluster."""
        found: dict[str, Any] = {}
        rule = command.job.rule
        if rule is not None and not Path(rule.path).is_absolute():  # a run's record has its text
            self.texts[Path("rule-of-the-record", rule.path)] = rule.source
            found["aggregator"] = f"{next(iter(self.texts))}:{rule.name}"
        elif rule is not None:
            found["aggregator"] = f"{self._take(Path(rule.path))}:{rule.name}"
        for name, value in values.items():
            if name == "methods":
                found[name] = tuple(self._take_method(each) for part in value for each in part.split(","))
            if not isinstance(value, Path) or name == "output":
                continue
            # An absolute path may be on the cluster; a study's space is also read here.
            if name == "space" or (not value.is_absolute() and value.is_file()):
                found[name] = self._take(value)
        return found


def submissions(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """List the submissions."""
    options = parse(Submissions, words, "concord submissions")
    owner = require_user("--mine") if options.mine else None
    cluster = _cluster(options)
    found = cluster.submissions()
    found += _forgotten(cluster, found)
    found = [each for each in found if (options.all or each.job) and owner in (None, each.owner)]
    if not as_json:
        rows = [
            [
                *(each.id, each.owner, each.status + (f", {each.waits}" if each.waits else "")),
                f"{each.command} {each.job}".strip(),
                *(_format_time(each.started), _seconds(each)),
            ]
            for each in found
        ]
        table(["submission", "owner", "status", "what", "started", "seconds"], rows)
    return {"submissions": [dataclasses.asdict(each) for each in found]}


def _forgotten(cluster: Any, known: Sequence[Any]) -> list[Any]:
    """The submissions that the tracking server alone knows, if its address is known here."""
    uri = cluster.profile.tracking_uri or ""
    if not uri.startswith(("http://", "https://")):  # another is of the cluster's nodes
        return []
    from concord.execution.submission.earlier import earlier_submissions
    from concord.tracking import Store

    try:
        return earlier_submissions(Store.open(DEFAULT_OUTPUT, uri), cluster.address, {each.id for each in known})
    except (InputError, RunFailedError) as error:
        info(f"warning: submissions before a restart of the head node are not listed; {error}")
        return []


def logs(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Show a submission's log."""
    options = parse(Logs, words, "concord logs")
    cluster = _cluster(options)
    if options.follow:
        return {"submission": options.id} | _follow(cluster, options.id, as_json)
    text = cluster.logs(options.id)
    if not as_json:
        print(text, end="")
    return {"submission": options.id, "log": text}


def stop(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Stop a submission."""
    options = parse(Stop, words, "concord stop")
    ended = _cluster(options).stop(options.id, _STOP_SECONDS)
    if not as_json:
        ends = "; it ends when the head node admits it, before it works" if ended.status == "pending" else ""
        print(f"{ended.id}: {ended.status}{ends}")
    return {"submission": ended.id, "status": ended.status}


def _cluster(options: _ClusterOptions) -> Any:
    from concord.execution.submission.cluster import Cluster

    return Cluster(_profile(options))


def _profile(options: _ClusterOptions, tracking_uri: str | None = None) -> Any:
    from concord.execution.submission.profile import Profile

    return Profile.find(options.profile, options.address, options.token_file, tracking_uri, options.verify)


def environment_for_code(
    options: Submit, profile: Any, variables: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Ray's runtime environment for the user's code, and its variables: the options', before the profile's."""
    from concord.interface.option_file import read_mapping

    file = options.runtime_env or (Path(profile.runtime_env).expanduser() if profile.runtime_env else None)
    base = {} if file is None else read_mapping(file, "--runtime-env")
    return runtime_environment(base, f"--runtime-env {file}", {**profile.env, **variables}, options.pip or profile.pip)


def check_command(command: "JobCommand") -> str:
    """Refuse options that are invalid without the cluster; return the name of the run, study or comparison."""
    clash = options_of(type(command.options)).keys() & options_of(Submit).keys() - {"address", "tracking_uri"}
    if clash:
        raise InputError(f"job option {flag_of(sorted(clash)[0])}: is also an option of concord submit; rename it")
    for option, value in command.given_values().items():
        if is_secret(option):
            raise InputError(
                f"{flag_of(option)}: would be shown on the cluster; let the job read it from the environment"
            )
        for word in as_words({option: value}):
            if redact(word) != word:
                raise InputError(f"{redact(word)}: holds a password, which would be shown on the cluster")
    from concord.execution.spec import new_names

    job, options = command.job, command.options
    if command.name == "compare":
        return _check_comparison(command)
    if command.name == "train":
        config, method = options, options.resolve().method
    else:
        options.study.check()
        config, method = options.config, options.study.method or "study"
        from concord.studies.plan import check_group
        from concord.studies.search import chosen_study

        check_group(config, "study")
        chosen_study(job.job.studies, options.study, config)
    config.check()
    # Many may be submitted in one second without seeing each other's folders.
    return config.run.name or f"{next(new_names(job.name, config, method))}-{secrets.token_hex(3)}"


def _check_comparison(command: "JobCommand") -> str:
    from concord.studies.comparison_plan import comparison_name, plan_comparison
    from concord.studies.job_tables import LEAVE_ONE_OUT, METHODS
    from concord.studies.methods import check_methods
    from concord.studies.methods_result import methods_name

    job, options = command.job, command.options
    if METHODS in command.tables:
        check_methods(options, command.given)
        return options.config.run.name or methods_name(job)
    if LEAVE_ONE_OUT in command.tables:
        check_methods(options, command.given)
        return comparison_name(job.name, options.config.run.name)
    name: str = plan_comparison(job, command.tables, options, command.given, check=False).name
    return name


def _cluster_values(command: "JobCommand", profile: Any) -> dict[str, Any]:
    """The given options and the profile's; an output folder inside the sent folder does not count."""
    values = command.given_values()
    of_profile = {"output": profile.output, "data": profile.data}
    known = options_of(type(command.options))
    values = {name: value for name, value in of_profile.items() if value is not None and name in known} | values
    for option in ("output", "results", "html"):
        path = values.get(option)
        if path is not None and not Path(path).is_absolute() and not is_remote(Path(path)):
            also = "; without it a comparison's page is report.html in MLflow" if option == "html" else ""
            raise InputError(
                f"--{option} {path}: is relative; give the absolute path as the cluster's nodes see it{also}"
            )
    return values


def _follow(
    cluster: Any, identity: str, as_json: bool, submit: Callable[[], object] = str, restarts: int = 0
) -> dict[str, Any]:
    """Show the log to the end; a failure becomes this command's."""
    from concord.execution.submission.restart import follow_restarting

    show = functools.partial(print, end="", file=sys.stderr if as_json else sys.stdout, flush=True)
    with _left_running(identity):
        ended = follow_restarting(cluster, identity, show, submit, restarts, info)
    _require_success(ended, "see its log")
    return {"status": ended.status, "exit_status": ended.exit_status}


@contextlib.contextmanager
def _left_running(identity: str) -> Iterator[None]:
    """Ctrl-C ends the waiting, not the submission (RunFailedError)."""
    try:
        yield
    except KeyboardInterrupt:
        raise RunFailedError(f"stopped following; {identity} continues, concord stop {identity} ends it") from None


def _require_success(ended: Any, reason: str) -> None:
    """Raise the failure of a submission as one of this command; ``reason`` is what its log says."""
    if ended.status == "stopped":
        raise RunFailedError(f"{ended.id}: was stopped")
    if ended.exit_status == 2:
        raise InputError(f"{ended.id}: ended with exit status 2, invalid input; {reason}")
    if ended.status != "succeeded":
        status = "" if ended.exit_status is None else f" with exit status {ended.exit_status}"
        # By a signal: of Ray's shell -9, of the command in that shell 128 + 9, as after the kernel's out of memory.
        killed = ended.lost or not 0 <= (ended.exit_status or 0) < 128
        again = f"; {ended.again} continues it" if killed and ended.again else ""
        raise RunFailedError(f"{ended.id}: failed{status}; {ended.message or reason}{again}")


def _format_time(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%d %H:%M:%S}"


def _seconds(each: Any) -> str:
    at_work = each.status in ("pending", "running")
    if each.started is None or not (each.ended or at_work):
        return ""
    return f"{(each.ended or time.time()) - each.started:.0f}"
