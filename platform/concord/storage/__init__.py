"""Runs, studies and data on a storage (``s3://``, ``gs://``, any that PyArrow or fsspec reach) as if in a folder.

An address is a :class:`~pathlib.Path` like any other: ``Path("s3://bucket/runs") / "a"``. Only this package knows which
paths are addresses. Files to read are fetched into this machine's cache (:func:`local`); files to write are changed in
the cache and uploaded when they must persist (:class:`Folder`). The cache is never the truth and may be deleted at any
time. For a path on the disk every function here returns that path and does nothing.
"""

from concord.storage.address import check_address, check_local_folder, display_path, is_remote, resolve
from concord.storage.cache import file_checksum, listing, local, one_at_a_time
from concord.storage.filesystem import (
    DiskError,
    StorageError,
    apply_credentials,
    disk_error,
    disk_errors_in_one_line,
    require_reachable,
    require_space,
    storage_credentials,
)
from concord.storage.folder import LOCK, Folder
from concord.storage.holder import HeldError
from concord.storage.json_lines import JsonLines, append_line, json_line, read_lines
from concord.storage.lease import leased

__all__ = [
    "LOCK",
    "DiskError",
    "Folder",
    "HeldError",
    "JsonLines",
    "StorageError",
    "append_line",
    "apply_credentials",
    "check_address",
    "check_local_folder",
    "disk_error",
    "disk_errors_in_one_line",
    "display_path",
    "file_checksum",
    "is_remote",
    "json_line",
    "leased",
    "listing",
    "local",
    "one_at_a_time",
    "read_lines",
    "require_reachable",
    "require_space",
    "resolve",
    "storage_credentials",
]
