"""Chooses the data files in a user's folder, and says which others are left out and why."""

import codecs
import re
import socket
import warnings
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path

from concord.errors import ArgumentError, InputWarning
from concord.storage import display_path, is_remote, listing
from concord.submitted import is_submitted

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip")
_NAMED = 3  # files in a line
_BEGIN = 512  # bytes that show what a file is
SPREADSHEET = "a spreadsheet"
# The first bytes of a file, what it is, and the endings with which it can be data.
_KINDS: tuple[tuple[bytes, str, tuple[str, ...]], ...] = (
    (rb"PAR1[\x00-\x08\x0e-\x1f]", "a Parquet file, whose name must end with .parquet", (".parquet",)),
    (rb"PK[\x03\x05]", "a ZIP archive, such as an .npz file or one of torch.save", (".zip", ".npz")),
    (rb"\x1f\x8b\x08", "compressed by gzip, so its name must end with .gz", (".gz",)),
    (rb"BZh\d1AY", "compressed by bzip2, so its name must end with .bz2", (".bz2",)),
    (rb"\xfd7zXZ", "compressed by xz, so its name must end with .xz", (".xz",)),
    (rb"\x28\xb5\x2f\xfd", "compressed by Zstandard", ()),
    (rb"\x93NUMPY", "an array of numpy.save", ()),
    (rb"\x80[\x02-\x05]", "a pickle of Python", ()),
    (rb"ARROW1\0|FEA1", "a Feather file", ()),
    (rb"SQLite format 3\0", "an SQLite database", ()),
    (rb"\x89HDF", "an HDF5 file", ()),
    (rb"RD[AX][23]\n", "a file of R's save", ()),
    (rb"<stata_dta>", "a file of Stata", ()),
    (rb"\xd0\xcf\x11\xe0", SPREADSHEET, ()),
    (rb"%PDF-", "a PDF", ()),
    (rb"\x89PNG", "a PNG image", ()),
    (rb"\xff\xd8\xff", "a JPEG image", ()),
    (rb"GIF8[79]a", "a GIF image", ()),
    (rb"(?i:<!doctype|<html)", "a web page", ()),
    (rb"<\?xml", "XML", ()),
    (rb"[\[{]\s*[\[{\"]", "JSON", ()),
    (rb"version https://git-lfs", "a pointer of Git LFS; git lfs pull fetches the file", ()),
)
_BINARY = {ending for *_, endings in _KINDS for ending in endings}
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")  # bytes that no text has


def missing(path: Path, kind: str, option: str = "data") -> ArgumentError:
    """The error for a file or folder that does not exist; on a cluster it says on which of its machines."""
    if is_remote(path) or not is_submitted():
        return ArgumentError(option, display_path(path), f"there is no such {kind}")
    sent = "a file by its path relative to the folder that is sent, " if kind == "file" else ""
    place = f"on {socket.gethostname()}, the cluster's head node; give {sent}a path on the nodes, or s3://…"
    return ArgumentError(option, display_path(path), f"there is no such {kind} {place}")


def stem(name: str) -> str:
    """The name of a file without its ending: ``north`` for ``north.csv.gz``."""
    path = Path(name)
    return Path(path.stem if path.suffix.lower() in COMPRESSIONS else name).stem.strip()


def kind_by_content(path: Path, endings: Collection[str]) -> str | None:
    """What a file is by its first bytes; None if it may be what the ending of its name says, one of those of data."""
    with path.open("rb") as file:
        begin = file.read(_BEGIN).removeprefix(codecs.BOM_UTF8).lstrip()
    if not begin:
        return "empty"
    if begin.startswith(b"PK") and _is_spreadsheet(path):
        return SPREADSHEET
    suffix = path.suffix.lower()
    binary = any(ending.endswith(suffix) for ending in endings) and suffix in _BINARY
    for first, kind, own in _KINDS:
        if re.match(first, begin):
            return None if binary and suffix in own else kind
    if not binary:
        return None
    text = not _CONTROL.search(begin)
    return "text, and a CSV file's name ends with .csv" if text else f"no {suffix} file by its first bytes"


def _is_spreadsheet(path: Path) -> bool:
    """Whether a file is a ZIP archive with a workbook of Excel (.xlsx, .xlsb) or of OpenDocument (.ods)."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            opened = "mimetype" in names and archive.read("mimetype").rstrip().endswith(b".spreadsheet")
            return opened or any(name.startswith("xl/workbook.") for name in names)
    except zipfile.BadZipFile:
        return False


def last_change(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of a file, or of each file in a folder; empty for an address."""
    if is_remote(path):
        return ()
    files = sorted(each for each in (path.iterdir() if path.is_dir() else [path]) if each.is_file())
    return tuple((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files)


def data_files(
    folder: Path, endings: Collection[str], *, option: str, shown: str, place: str, nothing: str, one_each: bool = True
) -> list[str] | None:
    """The names of the data files in a folder, in order; None if there is no such folder.

    A warning counts the other files: those of another ending or in another place, and hidden ones that would be data.

    Args:
        folder: the folder, or its address.
        endings: of data files, in lower case; a file's may be in upper case.
        option, shown: to name in errors and warnings, with the folder.
        place: of data files, ``NAME`` in the folder itself, or such as ``DOMAIN/CLASS/IMAGE``.
        nothing: the error if there are no data files.
        one_each: whether two files with one stem are refused, since each is an environment.

    Raises:
        ArgumentError: there are no data files, or two have one stem.
    """
    depth = place.count("/")
    names = listing(folder, recursive=depth > 0)
    if names is None:
        return None
    by_stem: dict[str, str] = {}
    used, others = [], []
    for name in names:
        hidden = any(part.startswith(".") for part in name.split("/"))
        if not name.lower().endswith(tuple(endings)) or name.count("/") != depth:
            others += [] if hidden else [name]
        elif hidden:
            others.append(f"{name} (hidden)")
        else:
            used.append(name)
            if one_each and (twin := by_stem.setdefault(stem(name), name)) != name:
                raise ArgumentError(option, shown, f"has both {twin} and {name}; keep one of them")
    counted = f"other files: {len(others)}" + (f", such as {_some(others)}" if others else "")
    if not used:
        raise ArgumentError(option, shown, f"{nothing} ({counted})")
    if others:
        expected = f"files {f'are at {place} and ' if depth else ''}end with {' '.join(sorted(endings))}"
        warnings.warn(
            f"{shown}: {counted}; they are left out, since {expected}; read: {_some(used)}", InputWarning, stacklevel=3
        )
    return used


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
