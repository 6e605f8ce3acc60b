"""Addresses of storages as paths: recognizes, formats and checks them."""

import re
from pathlib import Path

from concord.errors import InputError

# Path merges slashes and drops final ones: s3://bucket/runs becomes s3:/bucket/runs, and s3:// becomes s3:.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/+(.*))?", re.DOTALL)
# Schemes of PyArrow; all others are fsspec's.
NATIVE = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_FILE = "file"


def is_remote(path: Path) -> bool:
    """Whether a path is the address of a storage, not a path on this machine's disk."""
    found = _ADDRESS.fullmatch(str(path))
    return found is not None and found[1] != _FILE


def parts(path: Path) -> tuple[str, str]:
    """Scheme and rest of an address: ``("s3", "bucket/runs")``."""
    found = _ADDRESS.fullmatch(str(path))
    if found is None:
        raise ValueError(f"{path} is not an address of a storage")
    return found[1], found[2] or ""


def display_path(path: Path) -> str:
    """A path as a user writes it, without user, password and parameters."""
    if not is_remote(path):
        return str(path)
    scheme, rest = parts(path)
    rest, *hidden = re.split(r"[?#]", rest, maxsplit=1)
    if "@" in rest and not _is_container(scheme, rest):
        rest = "***@" + rest.rpartition("@")[2]
    return f"{scheme}://{rest}" + ("?…" if hidden else "")


def resolve(path: Path) -> Path:
    """An absolute path, valid in every process; an address is unchanged, ``file://`` becomes a path."""
    if is_remote(path):
        return path
    found = _ADDRESS.fullmatch(str(path))
    return Path("/", found[2] or "") if found else path.absolute()


def check_address(option: str, path: Path) -> None:
    """Refuse an invalid address (InputError), without a request to the storage."""
    if not is_remote(path):
        return
    scheme, rest = parts(path)

    def refuse(why: str) -> None:
        raise InputError(f"--{option} {display_path(path)}: {why}")

    if "@" in rest and not _is_container(scheme, rest):
        refuse("holds a user or a password, which would be recorded; give credentials in the environment")
    if "?" in rest or "#" in rest:
        refuse("parameters are not allowed; give an endpoint by AWS_ENDPOINT_URL, a region by AWS_REGION")
    if not rest:
        refuse(f"names no bucket; give {scheme}://BUCKET/FOLDER")
    if "::" in str(path) or ".." in rest.split("/"):
        refuse("must be one plain address, without :: and ..")
    if scheme in NATIVE:
        return
    from fsspec import available_protocols

    if scheme not in available_protocols():
        refuse(f"the scheme {scheme}:// is unknown; give a folder, s3://, gs://, or another scheme of fsspec")


def check_local_folder(flag: str, path: Path | None) -> None:
    """Refuse an address, or a file, where files are to be written to this machine's disk (InputError)."""
    if path is not None and is_remote(path):
        raise InputError(f"{flag} {display_path(path)}: must be a folder on this machine's disk")
    if path is not None and path.exists() and not path.is_dir():
        raise InputError(f"{flag} {path}: is a file; give a folder")


def _is_container(scheme: str, rest: str) -> bool:
    """Whether an @ belongs to Azure's ``abfss://container@account.dfs.core.windows.net``."""
    user = rest.partition("@")[0]
    return scheme in ("abfs", "abfss") and ":" not in user and "/" not in user
