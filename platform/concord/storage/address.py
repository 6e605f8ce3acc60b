"""Addresses of storages as paths: which paths are some, how they are written, and which of them are refused."""

import re
from pathlib import Path

from concord.errors import InputError

# Path makes one slash of several, and none of those at the end: s3:/bucket/runs is left of s3://bucket/runs, s3: of s3://.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/+(.*))?", re.DOTALL)
# What PyArrow itself reaches; all other schemes are fsspec's.
NATIVE = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_FILE = "file"


def is_remote(path: Path) -> bool:
    """Whether a path is the address of a storage, and not of this machine's disk."""
    found = _ADDRESS.fullmatch(str(path))
    return found is not None and found[1] != _FILE


def parts(path: Path) -> tuple[str, str]:
    """Scheme and rest of an address: ``("s3", "bucket/runs")``."""
    found = _ADDRESS.fullmatch(str(path))
    if found is None:
        raise ValueError(f"{path} is no address of a storage")
    return found[1], found[2] or ""


def display_path(path: Path) -> str:
    """A path as its user would write it, without user, password and parameters, which do not belong there."""
    if not is_remote(path):
        return str(path)
    scheme, rest = parts(path)
    rest, *hidden = re.split(r"[?#]", rest, maxsplit=1)
    if "@" in rest and not _is_container(scheme, rest):
        rest = "***@" + rest.rpartition("@")[2]
    return f"{scheme}://{rest}" + ("?…" if hidden else "")


def resolve(path: Path) -> Path:
    """The same place for every process: an address as it is, a path on the disk (also as ``file://``) from / on."""
    if is_remote(path):
        return path
    found = _ADDRESS.fullmatch(str(path))
    return Path("/", found[2] or "") if found else path.absolute()


def check_address(option: str, path: Path) -> None:
    """Refuse an address that cannot be one (InputError); nothing is asked of the storage."""
    if not is_remote(path):
        return
    scheme, rest = parts(path)

    def refuse(why: str) -> None:
        raise InputError(f"--{option} {display_path(path)}: {why}")

    if "@" in rest and not _is_container(scheme, rest):
        refuse("holds a user or a password, which would be recorded; credentials come from the environment")
    if "?" in rest or "#" in rest:
        refuse("parameters are not taken here; an endpoint comes from AWS_ENDPOINT_URL, a region from AWS_REGION")
    if not rest:
        refuse(f"names no bucket; {scheme}://BUCKET/FOLDER")
    if "::" in str(path) or ".." in rest.split("/"):
        refuse("must be one plain address, without :: and ..")
    if scheme in NATIVE:
        return
    from fsspec import available_protocols

    if scheme not in available_protocols():
        refuse(f"no storage is known by {scheme}://; a folder, or s3://, gs://, or what fsspec reaches")


def _is_container(scheme: str, rest: str) -> bool:
    """Whether the @ is the one in Azure's ``abfss://container@account.dfs.core.windows.net``."""
    user = rest.partition("@")[0]
    return scheme in ("abfs", "abfss") and ":" not in user and "/" not in user
