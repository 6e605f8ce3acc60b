"""A Ray cluster's jobs: submit, follow, list and stop by Ray's client. Errors of network and Ray become one line."""

import asyncio
import contextlib
import logging
import math
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import ray
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

import concord
from concord.errors import InputError, RunFailedError, last_line
from concord.execution.submission.admission import Submission, check_memory, with_waits
from concord.execution.submission.package import Package
from concord.execution.submission.profile import RAY_TOKEN, Profile, running_dashboard
from concord.execution.submission.runtime_environment import brings_python
from concord.process_environment import environment_variables
from concord.redaction import redact
from concord.submitted import BEGUN

_VERSION_SECONDS = 10.0
# How long an answer may take: the server first unpacks a package of up to 100 MiB.
ANSWER_SECONDS = 60.0
# How long a stopped command has to end itself and its MLflow run; Ray's default is 3 s. More than the patience of a run
# with its workers and with MLflow together.
_ENDING_SECONDS = 60
# Between two checks of a job that is stopping.
_POLL_SECONDS = 1.0
# The answer of a starting cluster, whose dashboard runs before the rest, and how long that may last.
_STARTING = "No available agent"
_STARTING_SECONDS = 30.0
# Where Ray's dashboard listens unless told otherwise, and how long a look there may take.
_USUAL_PORT, _INSTEAD_SECONDS = 8265, 2.0
# Ray's reasons for the end of a job whose supervising process is gone.
_LOST = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_START_FAILURE", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")
# Ray's message about an existing id.
_TAKEN = "already exists"
# And about an id that it does not know.
_MISSING = "does not exist"
# Ray's resource of the head node, and the amount that pins a job there.
_HEAD, _A_TRACE = "node:__internal_head__", 1e-4
# Variables that would override the address given to Ray's client.
_NO_ADDRESSES = {"RAY_API_SERVER_ADDRESS": None, "RAY_ADDRESS": None}
# Two submissions that agree in these labels would work in one record.
_ONE_RECORD = ("command", "name", "output")
# How long the beginning of a command is waited for, where it is pending and in all, and the time between two looks.
_PENDING_SECONDS, _BEGINNING_SECONDS, _BEGINNING_POLL_SECONDS = 5.0, 30.0, 0.5
_ENDED = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}


class ConnectionLostError(RunFailedError):
    """The connection to a submission's log broke."""


class TakenError(InputError):
    """The cluster has a submission of this id."""


class _UnknownError(InputError):
    """The cluster knows no submission of this id."""


@dataclass(frozen=True)
class DriverResources:
    """What a submitted command reserves on the head node; ``memory`` in bytes."""

    memory: int
    cpus: float = 0.0
    gpus: float = 0.0


class _Client(JobSubmissionClient):
    """Ray's client, whose requests have a timeout; Ray has no public setting for it."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, **{"timeout": ANSWER_SECONDS, **options})


class Cluster:
    """A connection to the jobs of a Ray cluster."""

    def __init__(self, profile: Profile) -> None:
        address = profile.address or running_dashboard()
        if address is None:
            if gcs := os.environ.get("RAY_ADDRESS"):
                raise InputError(
                    f"RAY_ADDRESS {redact(gcs)}: is no dashboard's address, http://HOST:8265{_instead(gcs)}; give "
                    "--address, or RAY_API_SERVER_ADDRESS"
                )
            raise InputError(
                "--address: no Ray of yours runs on this machine; give the dashboard's, http://HOST:8265 (or "
                "RAY_API_SERVER_ADDRESS, or an address in a profile)"
            )
        self.address = address
        self.profile = profile
        self._answered = False  # as Ray's dashboard
        if profile.verify is False:  # as asked
            warnings.filterwarnings("ignore", "Unverified HTTPS request")
        with self._one_line():
            self._check_version()
            self._answered = True
            with environment_variables(_NO_ADDRESSES):
                self._client = _Client(address, headers=profile.headers, verify=profile.verify)
        for name in logging.root.manager.loggerDict:
            if name.startswith("ray."):  # several have their own level, INFO
                logging.getLogger(name).setLevel(logging.ERROR)

    def _check_version(self) -> None:
        answer = requests.get(
            f"{self.address}/api/version",
            headers=self.profile.headers,
            timeout=_VERSION_SECONDS,
            verify=self.profile.verify,
        )
        if answer.status_code in {401, 403}:
            raise AuthenticationError(answer.text)
        try:
            version = answer.json()["ray_version"]
        except (ValueError, KeyError) as error:
            raise InputError(
                f"--address {self.address}: no Ray dashboard answers there (status {answer.status_code})"
                f"{_instead(self.address)}"
            ) from error
        if version != ray.__version__:
            raise InputError(
                f"--address {self.address}: the cluster has Ray {version}, this machine {ray.__version__}; "
                f"install ray=={version} here, or the same version on both"
            )

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            if self.profile.token is None:
                raise InputError(
                    f"--address {self.address}: the cluster needs a token; give RAY_AUTH_TOKEN, --token-file, "
                    f"or put it into {RAY_TOKEN}"
                ) from error
            raise InputError(
                f"--address {self.address}: the cluster refuses the token of {self.profile.token_source}"
            ) from error
        except requests.exceptions.ReadTimeout as error:
            raise RunFailedError(
                f"{self.address}: took the question and did not answer in time; a busy head node answers later"
            ) from error
        except (requests.exceptions.RequestException, ConnectionError) as error:
            if self._answered and "Connection aborted" in str(error):
                raise RunFailedError(
                    f"{self.address}: closed the connection without an answer; a busy head node answers later"
                ) from error
            if isinstance(error, requests.exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
                trust = "its certificate is not trusted; give --verify FILE of the authority that signed it"
                raise InputError(f"--address {self.address}: {trust}") from error
            plain = isinstance(error, requests.exceptions.SSLError)
            reason = "the server there speaks no TLS" if plain else "no Ray cluster answers there"
            raise InputError(f"--address {self.address}: {reason}{_instead(self.address)}") from error
        except RuntimeError as error:  # the server's own error, with a traceback
            raise RunFailedError(f"{self.address}: {last_line(error)}") from error

    def submit(
        self,
        command: Sequence[str],
        package: Package,
        identity: str,
        labels: Mapping[str, str],
        environment: Mapping[str, str],
        resources: DriverResources,
        for_code: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Send the package and start ``python -m concord`` with these words on the cluster's head node; return the id.

        It uses the Python of CONCORD_PYTHON in the head node's environment, or the first on its path. ``environment``
        must hold no secrets: every user of the cluster can read it. The command waits until the ``resources`` are free
        on the head node. ``for_code`` is Ray's runtime environment for the user's code, without variables.
        """
        runtime: dict[str, Any] = {
            **for_code,
            "py_modules": list(map(str, package.modules)),
            "env_vars": {
                "RAY_JOB_STOP_WAIT_TIME_S": str(_ENDING_SECONDS),
                **environment,
                "CONCORD_DASHBOARD": self.address,
            },
        }
        if package.working_dir is not None:
            runtime["working_dir"] = str(package.working_dir)
        # An environment with a Python of its own puts that first on the path.
        python = "python" if brings_python(for_code) else '"${CONCORD_PYTHON:-python}"'
        end = time.monotonic() + _STARTING_SECONDS
        while (head_memory := self._head_memory()) is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        check_memory(resources.memory, head_memory or math.inf)
        while True:
            try:
                with self._one_line():
                    return self._client.submit_job(
                        entrypoint=f"{python} {shlex.join(['-m', 'concord', *command])}",
                        submission_id=identity,
                        runtime_env=runtime,
                        entrypoint_memory=resources.memory,
                        entrypoint_num_cpus=resources.cpus,
                        entrypoint_num_gpus=resources.gpus,
                        # With other resources, Ray may choose any node.
                        entrypoint_resources={_HEAD: _A_TRACE},
                        metadata={**labels, "memory": str(resources.memory), "concord": concord.__version__},
                    )
            except RunFailedError as error:
                if _TAKEN in str(error):
                    raise TakenError(_taken(identity)) from error
                if _STARTING not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(_POLL_SECONDS)

    def submissions(self) -> list[Submission]:
        """The cluster's submissions, newest first."""
        found = list(map(_submission, self._jobs()))
        pending = any(each.status == "pending" for each in found)
        return with_waits(found, (self._head_memory() if pending else None) or math.inf)

    def _jobs(self) -> list[Any]:
        with self._one_line():
            return [job for job in self._client.list_jobs() if job.submission_id]

    def status(self, identity: str) -> str:
        """The status of a submission."""
        with self._one_line():
            status: str = self._client.get_job_status(identity).value
        return status.lower()

    def _head_memory(self) -> float | None:
        """The head node's bytes of memory for commands; infinite if the cluster does not tell, None while it starts."""
        head = {"filter_keys": "is_head_node", "filter_predicates": "=", "filter_values": "true", "detail": "1"}
        with self._one_line():
            answer = requests.get(
                f"{self.address}/api/v0/nodes",
                head,
                headers=self.profile.headers,
                timeout=ANSWER_SECONDS,
                verify=self.profile.verify,
            )
        try:
            nodes = answer.json()["data"]["result"]["result"]
            return float(nodes[0]["resources_total"]["memory"]) if nodes else None
        except (ValueError, KeyError, TypeError):
            return math.inf

    def require_free(self, identity: str, labels: Mapping[str, str]) -> None:
        """Refuse an id that the cluster has, and the name of a run, study or comparison at work there (InputError)."""
        for job in self._jobs():
            if job.submission_id == identity:
                raise InputError(_taken(identity))
            if job.status not in _ENDED and all((job.metadata or {}).get(key) == labels[key] for key in _ONE_RECORD):
                does = "waits to begin" if job.status == JobStatus.PENDING else "is at work"
                raise InputError(
                    f"--name {labels['name']}: {job.submission_id} has this name and {does}; concord logs "
                    f"{job.submission_id} --follow shows its log, concord stop {job.submission_id} ends it"
                )

    def await_beginning(self, identity: str) -> tuple[Submission | None, str]:
        """Wait until the command has begun its work or has ended; return the submission and its log so far.

        Not for long: one that waits for resources may begin much later. A server that is too busy to answer has
        accepted it all the same; None if it gave no answer.
        """
        started = time.monotonic()
        found, log = None, ""
        while True:
            with contextlib.suppress(InputError, RunFailedError):
                found = self.find(identity)
                log = log if found.status.upper() == JobStatus.PENDING else self._log(identity)
            waiting = found is None or found.status.upper() == JobStatus.PENDING
            patience = _PENDING_SECONDS if waiting else _BEGINNING_SECONDS
            ended = found is not None and found.status.upper() in _ENDED
            if ended or BEGUN in log or time.monotonic() - started > patience:
                return found, log
            time.sleep(_BEGINNING_POLL_SECONDS)

    def find(self, identity: str) -> Submission:
        """The submission of this id."""
        try:
            with self._one_line():
                return _submission(self._client.get_job_info(identity))
        except RunFailedError as error:
            if _MISSING not in str(error):
                raise
            raise _UnknownError(
                f"{identity}: there is no such submission at {self.address}; concord submissions lists them"
            ) from error

    def logs(self, identity: str) -> str:
        """The submission's log so far."""
        self.find(identity)
        return self._log(identity)

    def _log(self, identity: str) -> str:
        with self._one_line():
            text: str = self._client.get_job_logs(identity)
        return text

    def follow(self, identity: str, show: Callable[[str], None]) -> Submission:
        """Show the submission's log until it ends."""
        again = self.find(identity).again
        broken: Exception | None = None
        try:
            asyncio.run(self._tail(identity, show))
        except (InputError, RuntimeError, aiohttp.ClientError, OSError) as error:
            broken = error
        try:
            found = self.find(identity)
        except _UnknownError:
            lost = f"{identity}: {self.address} no longer knows it, as after a restart of its head node"
            raise RunFailedError(lost + (f"; {again} continues it" if again else "")) from broken
        except (InputError, RuntimeError) as error:
            lost = f"; if its head node was lost, {again} continues it when the cluster answers" if again else ""
            raise self._broken(identity, lost) from error
        if found.status.upper() not in _ENDED:
            raise self._broken(identity) from broken
        return found

    def _broken(self, identity: str, otherwise: str = "") -> RunFailedError:
        return RunFailedError(
            f"{self.address}: the connection to the log broke; the job may continue there, "
            f"concord logs {identity} --follow shows the log again{otherwise}"
        )

    async def _tail(self, identity: str, show: Callable[[str], None]) -> None:
        async for text in self._client.tail_job_logs(identity):
            show(text)

    def forget(self, identity: str) -> None:
        """Remove a submission that has ended, so that its id is free again."""
        with self._one_line():
            self._client.delete_job(identity)

    def stop(self, identity: str, seconds: float) -> Submission:
        """Stop the submission, and wait up to this number of seconds for its end.

        One that waits for the head node's memory hears of it when it is admitted: it is returned as pending.
        """
        found = self.find(identity)
        if found.status.upper() in _ENDED:
            raise InputError(f"{identity}: has ended already ({found.status})")
        with self._one_line():
            self._client.stop_job(identity)
        started = time.monotonic()
        while (waited := time.monotonic() - started) < seconds:
            found = self.find(identity)
            pending = found.status.upper() == JobStatus.PENDING
            if found.status.upper() in _ENDED or (pending and waited > _PENDING_SECONDS):
                return found
            time.sleep(_POLL_SECONDS)
        raise RunFailedError(f"{identity}: is still {found.status}, {seconds:.0f} s after the request to stop")


def _taken(identity: str) -> str:
    return f"--submission-id {identity}: the cluster has this id; give another"


def _instead(address: str) -> str:
    """The dashboard at its usual port of the same host, for an error message; empty if none answers there."""
    host = urlsplit(address if "://" in address else f"http://{address}").hostname
    usual = f"http://{host}:{_USUAL_PORT}"
    if host is None or usual == address:
        return ""
    try:
        answer = requests.get(f"{usual}/api/version", timeout=_INSTEAD_SECONDS)  # without the token
    except requests.exceptions.RequestException:
        return ""
    known = answer.status_code in {401, 403} or "ray_version" in answer.text
    return f"; a Ray dashboard answers at {usual}" if known else ""


def _submission(job: Any) -> Submission:
    labels = job.metadata or {}
    return Submission(
        id=job.submission_id,
        status=job.status.value.lower(),
        command=labels.get("command") or job.entrypoint,
        job=labels.get("job", ""),
        name=labels.get("name", ""),
        owner=labels.get("user", ""),
        started=None if job.start_time is None else job.start_time / 1e3,
        ended=None if job.end_time is None else job.end_time / 1e3,
        exit_status=job.driver_exit_code,
        again=labels.get("again", ""),
        memory=int(labels.get("memory", 0)),
        lost=job.status == JobStatus.FAILED and job.driver_exit_code is None and job.error_type in _LOST,
        message=" ".join((job.message or "").split(", last available logs")[0].split()),
    )
