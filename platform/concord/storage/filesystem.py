"""The file system behind an address, by PyArrow or fsspec, and what went wrong with it in one line."""

import contextlib
import functools
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from concord.errors import InputError, RunFailedError
from concord.storage.address import NATIVE, display_path, is_remote, parts
from concord.storage.credentials import endpoint, storage_credentials

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_TRIES = 4
_GCS_SECONDS = 20.0
_BUCKETS = ("s3", "gs", "gcs")
_USER_INFO = re.compile(r"://[^/@\s]*@")


class StorageError(RunFailedError, ConnectionError):
    """A storage does not answer, or refuses; what it holds is as it was."""


def filesystem(path: Path) -> tuple[Any, str]:
    """PyArrow's file system behind an address, and the path in it.

    Raises:
        OSError, ValueError, ImportError: there is none, or a package for it is missing.
    """
    scheme, rest = parts(path)
    place = rest.split("/")[0]
    found = _filesystem(scheme, place, tuple(sorted(storage_credentials().items())))
    if scheme in _BUCKETS:
        return found, rest
    if scheme in NATIVE:
        from pyarrow import fs

        return found, fs.FileSystem.from_uri(display_path(path))[1]
    from fsspec.core import url_to_fs

    return found, url_to_fs(display_path(path))[1]


@functools.lru_cache(maxsize=16)
def _filesystem(scheme: str, place: str, given: tuple[tuple[str, str], ...]) -> Any:
    from pyarrow import fs

    variables = dict(given)
    if scheme == "s3":
        keys = {
            "access_key": variables.get("AWS_ACCESS_KEY_ID"),
            "secret_key": variables.get("AWS_SECRET_ACCESS_KEY"),
            "session_token": variables.get("AWS_SESSION_TOKEN"),
        }
        region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
        return fs.S3FileSystem(
            # Without keys in the environment PyArrow looks where the AWS SDK does, on each node for itself.
            **(keys if keys["access_key"] and keys["secret_key"] else {}),
            endpoint_override=endpoint(),
            region=region or ("us-east-1" if endpoint() else fs.resolve_s3_region(place)),
            connect_timeout=_CONNECT_SECONDS,
            request_timeout=_ANSWER_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_TRIES),
            allow_delayed_open=True,  # a small file is one request, not three
        )
    if scheme in ("gs", "gcs"):
        limit = {"retry_time_limit": timedelta(seconds=_GCS_SECONDS)}
        if emulator := variables.get("STORAGE_EMULATOR_HOST"):
            protocol, _, host = emulator.rpartition("://")
            return fs.GcsFileSystem(anonymous=True, scheme=protocol or "http", endpoint_override=host, **limit)
        return fs.GcsFileSystem(**limit)
    if scheme in NATIVE:
        return fs.FileSystem.from_uri(f"{scheme}://{place}")[0]
    from fsspec.core import url_to_fs

    return fs.PyFileSystem(fs.FSSpecHandler(url_to_fs(f"{scheme}://{place}")[0]))


def require_reachable(option: str, path: Path) -> None:
    """Refuse an address whose storage does not answer, or has no such bucket (InputError). A path on the disk is taken.

    To be asked before anything is started.
    """
    if not is_remote(path):
        return
    scheme, rest = parts(path)
    bucket = rest.split("/")[0]
    try:
        found, inside = filesystem(path)
        asked = found.get_file_info(bucket if scheme in _BUCKETS else inside)
    except Exception as error:  # of the network, the credentials, a package that is missing: each has its own
        raise InputError(f"--{option} {display_path(path)}: {reason(error)}") from error
    if scheme in _BUCKETS and asked.type.name == "NotFound":
        raise InputError(f"--{option} {display_path(path)}: there is no bucket {bucket}{_at()}")


@contextlib.contextmanager
def in_one_line(path: Path) -> Iterator[None]:
    """What goes wrong in the body with the storage of this address becomes a :class:`StorageError`."""
    try:
        yield
    except (StorageError, FileNotFoundError):
        raise
    except Exception as error:  # every file system has its own
        raise StorageError(f"{display_path(path)}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What is wrong, in a line without credentials."""
    text = " ".join(_USER_INFO.sub("://***@", str(error)).split())
    if "NETWORK_CONNECTION" in text or "curlCode" in text or "CURL error" in text:
        said = re.search(r"(?:curlCode: \d+, |CURL error \[\d+\]=)([\w ']+?)(?: error_info)?(?=[^\w ']|$)", text)
        return f"no storage answers{_at()}" + (f" ({said[1].strip()})" if said else "")
    if "NO_SUCH_BUCKET" in text:
        return f"there is no such bucket{_at()}"
    if re.search(r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|INVALID_CLIENT_TOKEN|HTTP status 40[13]", text):
        return (
            f"access is refused{_at()}; keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or from where the AWS SDK finds them"
        )
    if "OAuth2 access token" in text:
        return "there are no credentials; GOOGLE_APPLICATION_CREDENTIALS names the file with them"
    if isinstance(error, ImportError):
        return f"a package is missing ({text})"
    return re.sub(r" ?\(Request ID.*", "", text)[:300] or type(error).__name__


def _at() -> str:
    server = endpoint()
    return f" at {_USER_INFO.sub('://', server)}" if server else ""
