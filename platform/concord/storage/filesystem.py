"""The file system behind an address, by PyArrow or fsspec, its credentials, and errors of storages and disks in a line.

Credentials come from the environment, and are passed to Ray's processes.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from concord.errors import InputError, RunFailedError, UnansweredError, UnreachableError
from concord.redaction import redact
from concord.storage.address import NATIVE, display_path, is_remote, parts

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_PLACE = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "STORAGE_EMULATOR_HOST")
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_TRIES = 6  # the SDK waits in between: up to 1, 2, 4, … s, at random
_GCS_SECONDS = 20.0
_BUCKETS = ("s3", "gs", "gcs")
# Space that must stay free, so that runs can still record that the disk is full.
_RESERVE = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = (os.strerror(errno.ENOSPC).lower(), os.strerror(errno.EDQUOT).lower(), "database or disk is full")
# What a disk, or the machine, answers to a program without a mistake.
_REFUSALS = (
    *_FULL, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EISDIR, errno.ENOTDIR,
    errno.ESTALE, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
_ERRNO_IN_TEXT = re.compile(r"\(os error (\d+)\)")  # of safetensors, whose errors are no OSErrors


class StorageError(RunFailedError, ConnectionError):
    """A storage does not answer, or refuses; its content is unchanged."""


class StorageOutageError(StorageError, UnansweredError):
    """A storage does not answer."""


class DiskError(RunFailedError, OSError):
    """A file cannot be read or written, as on a full disk: one line that names the file."""

    def __init__(self, line: str, number: int | None = None) -> None:
        super().__init__(line)
        self.errno = number


def storage_credentials() -> dict[str, str]:
    """This process's environment variables for storages: keys, endpoint, region.

    Credentials in files or from a machine's role are not passed on: every node has its own.
    """
    return {name: os.environ[name] for name in (*_KEYS, *_PLACE) if os.environ.get(name)}


def apply_credentials(given: Mapping[str, str]) -> None:
    """Use another process's credentials in place of this process's."""
    if any(name in given for name in _KEYS):
        for name in _KEYS:
            os.environ.pop(name, None)
    os.environ.update(given)


def endpoint() -> str | None:
    """The S3 server's address; None for Amazon's own."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def filesystem(path: Path) -> tuple[Any, str]:
    """PyArrow's file system behind an address, and the path in it."""
    scheme, rest = parts(path)
    if scheme in _BUCKETS:
        return _of_bucket(scheme, rest.split("/")[0], tuple(sorted(storage_credentials().items()))), rest
    from pyarrow import fs

    if scheme in NATIVE:
        found, root = fs.FileSystem.from_uri(display_path(path))
        return found, root
    from fsspec.core import url_to_fs

    other, root = url_to_fs(display_path(path))
    return fs.PyFileSystem(fs.FSSpecHandler(other)), root


@functools.lru_cache(maxsize=16)
def _of_bucket(scheme: str, bucket: str, given: tuple[tuple[str, str], ...]) -> Any:
    from pyarrow import fs

    variables = dict(given)
    if scheme == "s3":
        names = {"access_key": _KEYS[0], "secret_key": _KEYS[1], "session_token": _KEYS[2]}
        keys = {name: variables.get(variable) for name, variable in names.items()}
        region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
        return fs.S3FileSystem(
            # Explicit, since Ray sends this object to processes without the variables. Without keys in the environment
            # PyArrow searches as the AWS SDK does, on each node.
            **(keys if keys["access_key"] and keys["secret_key"] else {}),
            endpoint_override=endpoint(),
            region=region or ("us-east-1" if endpoint() else fs.resolve_s3_region(bucket)),
            connect_timeout=_CONNECT_SECONDS,
            request_timeout=_ANSWER_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_TRIES),
            allow_delayed_open=True,  # a small file is one request, not three
        )
    protocol, _, host = variables.get("STORAGE_EMULATOR_HOST", "").rpartition("://")
    server = {"anonymous": True, "scheme": protocol or "http", "endpoint_override": host} if host else {}
    return fs.GcsFileSystem(**server, retry_time_limit=timedelta(seconds=_GCS_SECONDS))


def require_reachable(option: str, path: Path) -> None:
    """Refuse an address whose storage does not answer or lacks the bucket (InputError). A path on the disk passes.

    Call it before anything is started.
    """
    if not is_remote(path):
        return
    scheme, rest = parts(path)
    bucket, what = rest.split("/")[0], f"--{option} {display_path(path)}"
    with in_one_line(what, InputError):
        found, inside = filesystem(path)
        info = found.get_file_info(bucket if scheme in _BUCKETS else inside)
    if scheme in _BUCKETS and info.type.name == "NotFound":
        raise InputError(f"{what}: there is no bucket {bucket}{_at()}")


@contextlib.contextmanager
def in_one_line(what: str, kind: type[Exception]) -> Iterator[None]:
    """Turn a storage's errors in the body into one-line errors of this kind, which name ``what``.

    They are UnansweredErrors as well if the storage did not answer.
    """
    try:
        yield
    except (InputError, StorageError):
        raise
    except Exception as error:  # network, credentials, missing packages: each has its own errors
        if _unanswered(error):
            kind = StorageOutageError if issubclass(kind, StorageError) else UnreachableError
        raise kind(f"{what}: {reason(error)}") from error


def _unanswered(error: Exception) -> bool:
    """Whether the storage, or the network, may answer another time."""
    words = r"NETWORK_CONNECTION|curlCode|CURL error|SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|HTTP status 5\d\d"
    return isinstance(error, ConnectionError | TimeoutError) or re.search(words, str(error)) is not None


def reason(error: BaseException) -> str:
    """The error in one line, without credentials."""
    text = " ".join(redact(str(error)).split())
    if "NETWORK_CONNECTION" in text or "curlCode" in text or "CURL error" in text:
        message = re.search(r"(?:curlCode: \d+, |CURL error \[\d+\]=)([\w ']+?)(?: error_info)?(?=[^\w ']|$)", text)
        return f"no storage answers{_at()}" + (f" ({message[1].strip()})" if message else "")
    if "NO_SUCH_BUCKET" in text:
        return f"there is no such bucket{_at()}"
    if re.search(r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|INVALID_CLIENT_TOKEN|HTTP status 40[13]", text):
        return (
            f"access is refused{_at()}; give keys by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or as for the AWS SDK"
        )
    if "OAuth2 access token" in text:
        return "credentials are missing; give their file by GOOGLE_APPLICATION_CREDENTIALS"
    if isinstance(error, ImportError):
        return f"a package is missing ({text})"
    return re.sub(r" ?\(Request ID.*", "", text)[:300] or type(error).__name__


def _at() -> str:
    server = endpoint()
    return f" at {redact(server)}" if server else ""


@contextlib.contextmanager
def disk_errors_in_one_line(place: Path | None = None) -> Iterator[None]:
    """Turn a disk's error in the body into a :class:`DiskError` that names the error's file, or the place."""
    try:
        yield
    except (InputError, RunFailedError):
        raise  # already one line
    except Exception as error:  # each library has its own errors
        if (found := disk_error(error, place)) is None:
            raise
        raise found from error


def disk_error(error: BaseException, place: Path | None) -> DiskError | None:
    """The error of a disk that caused this one, as one line; None if none did, or if it names no file."""
    found: BaseException | None = error
    while found is not None:
        name = getattr(found, "filename", None)
        file = os.fsdecode(name) if isinstance(name, str | bytes) else place
        number = _disk_errno(found)
        if file is not None and (number in _REFUSALS or (found is error and number is not None and name is not None)):
            refused = f"cannot be read or written ({os.strerror(number or 0)})"
            why = "no space left on the disk" if number in _FULL else refused
            return DiskError(f"{file}: {why}", number)
        found = found.__cause__ or found.__context__
    return None


def _disk_errno(error: BaseException) -> int | None:
    """The number of a disk's error; None of any other, such as a lost connection."""
    if isinstance(error, ConnectionError | TimeoutError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if any(word in str(error).lower() for word in _WORDS):
        return errno.ENOSPC
    numbered = _ERRNO_IN_TEXT.search(str(error))
    return None if numbered is None else int(numbered[1])


def require_space(place: Path) -> None:
    """Refuse to write into a folder on a full disk (DiskError)."""
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return
    if free < _RESERVE:
        least = f"at least {_RESERVE / 2**20:.0f} MiB must be free"
        raise DiskError(f"{place}: no space left on the disk; {free / 2**20:.1f} MiB are free, {least}", errno.ENOSPC)
