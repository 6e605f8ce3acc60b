"""Runs, studies and data on a storage (``s3://``, ``gs://``, whatever PyArrow or fsspec reach) as if in a folder.

An address is a :class:`~pathlib.Path` like any other: ``Path("s3://bucket/runs") / "a"``. Only this package knows which
paths are addresses. What is read from there is fetched into this machine's cache (:func:`local`); what is written is
worked on in the cache and sent at the moments at which it has to last (:class:`Folder`). The cache is never the truth
and may be deleted at any time. For a path on the disk every function here gives that path itself, and does nothing.
"""

from concord.storage.access import access, granted
from concord.storage.address import check_address, is_remote, settled, shown
from concord.storage.cache import listing, local
from concord.storage.filesystem import StorageError, require_reachable
from concord.storage.folder import LOCK, OWNER, Folder, Lines, TakenOverError

__all__ = [
    "LOCK",
    "OWNER",
    "Folder",
    "Lines",
    "StorageError",
    "TakenOverError",
    "access",
    "check_address",
    "granted",
    "is_remote",
    "listing",
    "local",
    "require_reachable",
    "settled",
    "shown",
]
