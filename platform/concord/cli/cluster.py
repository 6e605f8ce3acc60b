"""Commands on a Ray cluster's jobs: submit, submissions, logs, stop."""

import dataclasses
import functools
import math
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import tyro

from concord import logs as structured_logs
from concord.cli.job_options import default_options
from concord.cli.output import info, table
from concord.cli.parsing import (
    asks_for_help,
    given_options,
    job_and_words,
    option_of,
    option_value,
    parse,
    replaced_option,
)
from concord.errors import InputError, RunFailedError
from concord.redaction import is_secret, redact
from concord.storage import is_remote

SUBMITTED = ("train", "tune", "compare")
# Ray asks a job to end, kills it three seconds later, and then ends its workers.
_STOP_SECONDS = 60.0
# MiB that Ray's dashboard takes.
_LARGEST_PACKAGE = 100


@dataclass(frozen=True, kw_only=True)
class _ClusterOptions:
    """A Ray cluster."""

    address: str | None = None
    """Address of the cluster's dashboard, http://HOST:8265 (or RAY_API_SERVER_ADDRESS, or the profile's); the Ray on
    this machine if there is none."""
    profile: str | None = None
    """Profile in ~/.config/concord/profiles.toml (or CONCORD_PROFILE); the one called default if not given."""
    token_file: Path | None = None
    """File with the cluster's token; without it RAY_AUTH_TOKEN, the profile's, or ~/.ray/auth_token."""


@dataclass(frozen=True, kw_only=True)
class Submit(_ClusterOptions):
    """Run a command on a Ray cluster, through Ray Jobs: concord submit train|tune|compare JOB, with its own options."""

    follow: bool = False
    """Show the log until the job ends, and end with its exit status; Ctrl-C leaves the job running."""
    working_dir: Path | None = None
    """Folder that is sent; where the job is a file of your own, the present one. Files that git ignores stay here."""
    size_limit: float = 100.0
    """MiB that may be sent."""
    driver_memory: float = 2.0
    """GiB that are set aside on the head node for the command and what it starts there; a submission waits until they
    are free, so that many at once do not fill the node."""
    submission_id: str | None = None
    """Id of the submission; made up from the run's name if not given."""
    tracking_uri: str | None = None
    """MLflow server as the cluster reaches it (or MLFLOW_TRACKING_URI, or the profile's), without a password."""


@dataclass(frozen=True, kw_only=True)
class Submissions(_ClusterOptions):
    """The jobs of a Ray cluster, the newest first."""

    all: bool = False
    """Those too that were not submitted by Concord."""


@dataclass(frozen=True, kw_only=True)
class Logs(_ClusterOptions):
    """What a submission has printed."""

    id: tyro.conf.Positional[str]
    """Id of the submission."""
    follow: bool = False
    """Go on until the job ends, and end with its exit status."""


@dataclass(frozen=True, kw_only=True)
class Stop(_ClusterOptions):
    """End a submission, and wait until it has ended."""

    id: tyro.conf.Positional[str]
    """Id of the submission."""


def submit(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Check the command here, send it, and follow it if that is wanted."""
    submit_words, rest = split_options(words)
    if not rest or asks_for_help(rest[:1]):
        submit_words, rest = [*submit_words, *rest], []
    options = parse(Submit, submit_words, "concord submit")
    if not rest or rest[0] not in SUBMITTED:
        what = f"submit {rest[0]}: cannot be submitted" if rest else "submit: what?"
        raise InputError(
            f"{what}; give {', '.join(SUBMITTED[:-1])} or {SUBMITTED[-1]}, and a job: concord submit train synthetic"
        )
    command, (job, own) = rest[0], job_and_words(rest[1:], f"submit {rest[0]}")
    if asks_for_help(own):
        from concord.cli.comparing import compare
        from concord.cli.running import train, tune

        return {"train": train, "tune": tune, "compare": compare}[command](rest[1:], as_json)
    job, own = _from_file(command, job, own, rest[1])
    name, fields = check_command(command, job, own, rest[1])
    from concord.job_files import built_in_jobs
    from concord.submission.package import inside, packed
    from concord.submission.profile import Profile

    profile = Profile.find(options.profile, options.address, options.token_file, options.tracking_uri)
    if profile.tracking_uri is not None and redact(profile.tracking_uri) != profile.tracking_uri:
        raise InputError(
            f"--tracking-uri {redact(profile.tracking_uri)}: holds a password, which everybody who may look "
            "at the cluster could read; give it to the cluster's nodes, as MLFLOW_TRACKING_PASSWORD"
        )
    own += _profile_options(own, profile, fields)
    _require_absolute(own)
    folder = options.working_dir
    if folder is not None and not folder.is_dir():
        raise InputError(f"--working-dir {folder}: there is no such folder")
    needed: list[Path] = []

    def taken_along(file: Path) -> str:
        nonlocal folder
        folder = folder or Path.cwd()
        needed.append(inside(file, folder))
        return str(needed[-1])

    reference = rest[1]
    if reference not in built_in_jobs():
        reference = taken_along(Path(job.path))
        if command == "compare" and isinstance(job.job.comparisons, str):
            taken_along(Path(job.path).parent / job.job.comparisons)
    texts: dict[Path, str] = {}
    if job.rule is not None and not Path(job.rule.path).is_absolute():  # a run's record has its text
        texts[Path("rule-of-the-record", job.rule.path)] = job.rule.source
        own = replaced_option(own, "--aggregator", f"{next(iter(texts))}:{job.rule.name}")
    elif job.rule is not None:
        own = replaced_option(own, "--aggregator", f"{taken_along(Path(job.rule.path))}:{job.rule.name}")
    for flag in _path_flags(default_options(command, job, rest[1])):
        value = option_value(own, flag)
        # A path from / on may be one of the cluster's; a study's space is read here, too.
        if value is None or (flag != "--space" and (Path(value).is_absolute() or not Path(value).is_file())):
            continue
        own = replaced_option(own, flag, taken_along(Path(value)))
    if not 0 < options.size_limit <= _LARGEST_PACKAGE:
        raise InputError(f"--size-limit {options.size_limit:g}: must lie above 0 and not above {_LARGEST_PACKAGE}")
    if not 0 < options.driver_memory < math.inf:
        raise InputError(f"--driver-memory {options.driver_memory:g}: must be a finite number above 0")
    identity = options.submission_id or (
        name if option_value(own, "--name") is None else f"{name}-{secrets.token_hex(3)}"
    )
    plain = all(letter.isalnum() or letter in "-_." for letter in identity) and identity[:1].isalnum()
    if not plain or not identity.isascii():
        raise InputError(f"--submission-id {identity}: letters, digits, '-', '_' and '.' only, a letter or digit first")
    if option_value(own, "--name") is None:
        own += ["--name", name]
    environment = {} if profile.tracking_uri is None else {"MLFLOW_TRACKING_URI": profile.tracking_uri}
    environment["CONCORD_CLIENT_PYTHON"] = ".".join(map(str, sys.version_info[:2]))
    if structured_logs.as_json():
        environment[structured_logs.VARIABLE] = "json"
    with packed(folder, options.size_limit, needed, texts) as package:
        from concord.submission.cluster import Cluster  # imports Ray, which takes a second

        cluster = Cluster(profile)
        labels = {"command": command, "job": job.name, "name": name}
        started = time.perf_counter()
        words = [command, reference, *own]
        memory = round(options.driver_memory * 2**30)
        identity = cluster.submit(words, package, identity, labels, environment, memory)
        seconds = time.perf_counter() - started
    info(f"submitted {identity} to {cluster.address}")
    result: dict[str, Any] = {"submission": identity, "address": cluster.address, "command": command, "job": job.name}
    result |= {"name": name, "seconds": round(seconds, 3)}
    if options.follow:
        return result | _follow(cluster, identity, as_json)
    if not as_json:
        print(identity)
        info(f"concord logs {identity} --follow shows what it prints, concord stop {identity} ends it")
    return result | {"status": "pending"}


def submissions(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """List them."""
    options = parse(Submissions, words, "concord submissions")
    found = [each for each in _cluster(options).submissions() if options.all or each.job]
    if not as_json:
        rows = [
            [each.id, each.status, f"{each.command} {each.job}".strip(), _format_time(each.started), _seconds(each)]
            for each in found
        ]
        table(["submission", "status", "what", "started", "seconds"], rows)
    return {"submissions": [dataclasses.asdict(each) for each in found]}


def logs(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Show one's log."""
    options = parse(Logs, words, "concord logs")
    cluster = _cluster(options)
    if options.follow:
        return {"submission": options.id} | _follow(cluster, options.id, as_json)
    text = cluster.logs(options.id)
    if not as_json:
        print(text, end="")
    return {"submission": options.id, "log": text}


def stop(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """End one."""
    options = parse(Stop, words, "concord stop")
    ended = _cluster(options).stop(options.id, _STOP_SECONDS)
    if not as_json:
        print(f"{ended.id}: {ended.status}")
    return {"submission": ended.id, "status": ended.status}


def _cluster(options: _ClusterOptions) -> Any:
    from concord.submission.cluster import Cluster
    from concord.submission.profile import Profile

    return Cluster(Profile.find(options.profile, options.address, options.token_file))


def _from_file(command: str, job: Any, words: Sequence[str], reference: str) -> tuple[Any, list[str]]:
    """The job and the words, with what ``--config`` names in its place: the file stays here."""
    from concord.cli.comparing import tables_and_options
    from concord.cli.config_file import file_as_words

    tables, words = tables_and_options(words) if command == "compare" else ([], words)
    job, words = file_as_words(job, words, lambda job: default_options(command, job, reference, tables))
    return job, [*tables, *words]


def _path_flags(defaults: Any) -> list[str]:
    """The options that name a file, but for those that name folders of the cluster."""
    from concord.options import options_of

    named = {each.flag: (each.hint, *get_args(each.hint)) for each in options_of(type(defaults)).values()}
    return [flag for flag, kinds in named.items() if Path in kinds and flag not in ("--output", "--data-dir")]


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the submission's own options, wherever they stand, and the others."""
    own = {f"--{field.name.replace('_', '-')}": field.type is bool for field in dataclasses.fields(Submit)}
    submit_words, rest, waiting = [], [], list(words)
    while waiting:
        word = waiting.pop(0)
        flag = option_of(word)
        if flag not in own and flag.replace("--no-", "--", 1) not in own:
            rest.append(word)
            continue
        submit_words.append(word)
        if not own.get(flag, True) and "=" not in word and waiting:
            submit_words.append(waiting.pop(0))
    return submit_words, rest


def check_command(command: str, job: Any, words: Sequence[str], reference: str) -> tuple[str, set[str]]:
    """Refuse here what is wrong for the options alone; the run's or study's name, and the options there are."""
    from concord.cli.comparing import tables_and_options
    from concord.options import options_of
    from concord.runs.folder import new_name

    tables = tables_and_options(words)[0] if command == "compare" else []
    defaults = default_options(command, job, reference, tables)
    fields = set(options_of(type(defaults)))
    clash = fields & {field.name for field in dataclasses.fields(Submit)} - {"address", "tracking_uri"}
    if clash:
        option = sorted(clash)[0].replace("_", "-")
        raise InputError(f"job option --{option}: also an option of concord submit; rename it")
    for word in words:
        if word.startswith("--") and is_secret(option_of(word)):
            raise InputError(
                f"{option_of(word)}: would be shown on the cluster; let the job read it from the environment"
            )
        if redact(word) != word:
            raise InputError(f"{redact(word)}: holds a password, which would be shown on the cluster")
    if command == "compare":
        return _checked_comparison(job, words)
    options = parse(type(defaults), words, f"concord submit {command} {reference}", defaults)
    if command == "train":
        config, method = options, getattr(options, "method", None)
    else:
        options.study.check()
        config, method = options.config, options.study.method or "study"
        if config.run.resume:
            raise InputError("--resume: the same --name continues a study; leave --resume out")
        from concord.studies.spaces import chosen_study

        chosen_study(job.job.studies, options.study, config)
    config.check()
    # Many may be submitted in a second, and none of them sees the others' folders.
    made_up = f"{new_name(job.name, config, method)}-{secrets.token_hex(3)}"
    return config.run.name or made_up, fields


def _checked_comparison(job: Any, words: Sequence[str]) -> tuple[str, set[str]]:
    from concord.cli.comparing import parsed_methods, planned, tables_and_options
    from concord.comparisons.methods import check_methods, methods_name
    from concord.comparisons.plan import METHODS
    from concord.options import options_of

    tables, options = tables_and_options(words)
    if METHODS in tables:
        asked = parsed_methods(job, options, f"concord submit compare {job.name} {METHODS}")
        check_methods(asked, given_options(type(asked), options))
        return methods_name(job, asked), set(options_of(type(asked)))
    plan = planned(job, tables, options, f"concord submit compare {job.name}", check=False)
    return plan.name, set(options_of(type(plan.base)))


def _profile_options(words: Sequence[str], profile: Any, fields: set[str]) -> list[str]:
    """Options that the profile gives where the words do not."""
    wanted = {"--output": profile.output, "--data-dir": profile.data_dir if "data_dir" in fields else None}
    return [
        part
        for option, value in wanted.items()
        if value is not None and option_value(words, option) is None
        for part in (option, value)
    ]


def _require_absolute(words: Sequence[str]) -> None:
    """Refuse what would lie in the folder of the submission, which goes with it."""
    value = option_value(words, "--output")
    if value is not None and not value.startswith("/") and not is_remote(Path(value)):
        raise InputError(f"--output {value}: give the whole path, from / on, as the cluster's nodes see it")


def _follow(cluster: Any, identity: str, as_json: bool) -> dict[str, Any]:
    """Show the log to the end; another exit status than 0 becomes this command's."""
    show = functools.partial(print, end="", file=sys.stderr if as_json else sys.stdout, flush=True)
    try:
        ended = cluster.follow(identity, show)
    except KeyboardInterrupt:
        raise RunFailedError(f"stopped following; {identity} goes on, concord stop {identity} ends it") from None
    if ended.status == "stopped":
        raise RunFailedError(f"{identity}: was stopped")
    if ended.exit_status == 2:
        raise InputError(f"{identity}: ended with exit status 2, wrong usage; its log says what")
    if ended.status != "succeeded":
        status = "" if ended.exit_status is None else f" with exit status {ended.exit_status}"
        raise RunFailedError(f"{identity}: failed{status}; {ended.message or 'its log says why'}")
    return {"status": ended.status, "exit_status": ended.exit_status}


def _format_time(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%d %H:%M:%S}"


def _seconds(each: Any) -> str:
    return "" if each.started is None else f"{(each.ended or time.time()) - each.started:.0f}"
