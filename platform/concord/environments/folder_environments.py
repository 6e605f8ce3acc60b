"""Environments from a folder with one file each: ``NAME.npz`` or ``NAME.parquet``."""

import functools
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from concord.environments.collection import Array, Environments
from concord.environments.data_files import data_files, kind_by_content, missing, stem
from concord.environments.parquet import read_table
from concord.environments.purposes import purposes_of
from concord.errors import ArgumentError, InputError, first_line
from concord.storage import display_path, file_checksum, is_remote, local

_ENDINGS = (".npz", ".parquet")


def from_folder(
    folder: str | Path | None,
    *,
    inputs: str | Sequence[str] = "inputs",
    targets: str = "targets",
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
) -> Environments:
    """Environments from files, one each, named after the file without its ending.

    Args:
        folder: the folder, readable by every worker under the same path, or its address: then a worker fetches the
            files of its own environments. None, the default of ``config.data.data``, is refused.
        inputs: the array of an npz file; in a parquet file a column (of numbers, or of lists of equal length) or
            several columns, which become the features of an example in this order. The default for parquet, if
            there is no column ``inputs``, is every column but the targets.
        targets: the array or column of the targets.
        validation, test: names of these environments; all others train.

    The version of a folder on the disk is a digest of all its files; an address has none.

    Raises:
        InputError: the folder is missing or holds no such file, or (when an environment is loaded) a file is
            corrupt or lacks an array or column.
    """
    if folder is None:
        raise ArgumentError(
            "data", None, "is required; give a folder with one .npz or .parquet file for each environment"
        )
    folder, shown = Path(folder), display_path(folder)
    nothing = "has no .npz or .parquet file; add one for each environment"
    names = data_files(folder, _ENDINGS, option="data", shown=shown, place="NAME", nothing=nothing)
    if names is None:
        raise missing(folder, "folder")
    files = {stem(name): folder / name for name in names}
    purposes = purposes_of(files, validation, test)

    def load(name: str) -> tuple[Array, Array]:
        path = local(files[name])
        try:
            if path.suffix.lower() == ".npz":
                return _npz(path, inputs, targets)
            return _parquet(path, inputs, targets)
        except InputError:
            raise
        except Exception as error:  # each format has its own errors for an incomplete file
            kind = kind_by_content(path, _ENDINGS)
            why = f"it is {kind}" if kind else first_line(error)
            raise InputError(f"environment {name}: {path} cannot be read ({why})") from error

    return Environments(load, **purposes, version=functools.partial(_version, files))


def _version(files: Mapping[str, Path]) -> str | None:
    """A digest of all files on this machine's disk; None at an address, whose files no worker fetches all."""
    if any(is_remote(path) for path in files.values()):
        return None
    with ThreadPoolExecutor() as threads:
        checksums = threads.map(_checksum_now, files.values())
        return hashlib.sha256(repr(list(zip(files, checksums, strict=True))).encode()).hexdigest()[:16]


def _checksum_now(path: Path) -> str | None:
    try:
        about = path.stat()
        return _checksum(path, about.st_size, about.st_mtime_ns)
    except OSError:  # reading the environment says what is wrong
        return None


@functools.lru_cache(maxsize=10_000)
def _checksum(path: Path, size: int, changed: int) -> str:
    """The checksum of a file, read again if its size or its time of change differs."""
    del size, changed
    return file_checksum(path)


def _npz(path: Path, inputs: str | Sequence[str], targets: str) -> tuple[Array, Array]:
    if not zipfile.is_zipfile(path):  # NumPy would speak of pickles
        raise ValueError("is not an .npz file, or not a whole one")
    with np.load(path, allow_pickle=False) as arrays:
        wanted = [inputs] if isinstance(inputs, str) else list(inputs)
        _require(path, "array", [*wanted, targets], arrays.files)
        parts = [arrays[name] for name in wanted]
        return (parts[0] if len(parts) == 1 else np.stack(parts, axis=1)), arrays[targets]


def _parquet(path: Path, inputs: str | Sequence[str], targets: str) -> tuple[Array, Array]:
    table = read_table(path)
    if inputs == "inputs" and "inputs" not in table.column_names:
        index = (table.schema.pandas_metadata or {}).get("index_columns", [])  # of a frame: mostly numbers of its rows
        inputs = [name for name in table.column_names if name != targets and name not in index]
    wanted = [inputs] if isinstance(inputs, str) else list(inputs)
    _require(path, "column", [*wanted, targets], table.column_names)
    columns = [_column(path, name, table[name].combine_chunks()) for name in wanted]
    values = columns[0] if isinstance(inputs, str) else np.stack(columns, axis=1)
    return values, _column(path, targets, table[targets].combine_chunks())


def _column(path: Path, name: str, column: pa.Array) -> Array:
    if column.null_count:
        raise InputError(f"environment {path.stem}: column {name} of {path} has {column.null_count} missing values")
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = np.diff(column.offsets.to_numpy())
        if len(set(lengths.tolist())) > 1:
            raise InputError(f"environment {path.stem}: the lists in column {name} of {path} differ in length")
        return np.asarray(column.flatten()).reshape(len(column), -1)
    if pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.flatten()).reshape(len(column), -1)
    return np.asarray(column)


def _require(path: Path, kind: str, wanted: Sequence[str], found: Sequence[str]) -> None:
    for name in wanted:
        if name not in found:
            raise InputError(f"environment {path.stem}: {path} has no {kind} {name}; it has {', '.join(found)}")
