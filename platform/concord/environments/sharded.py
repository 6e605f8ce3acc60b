"""Data that Concord makes: Parquet files with zstd, and one manifest of their content.

A file holds row groups, which are read one at a time: the states of a level, the frames of a trajectory. A row group
maps names to arrays ``(rows, ...)``; an array of several dimensions is a column of bytes, and the column's metadata say
its type and shape. The manifest has the options that the data were made with, and for each file its checksum and the
row groups. :mod:`concord.execution.sharded_data` makes such data.
"""

import hashlib
import io
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict
from typing_extensions import TypedDict

from concord.environments.parquet import open_parquet
from concord.errors import InputError, first_line
from concord.storage import display_path, file_checksum, listing, local
from concord.storage.typed_json import Count, Fields, parse_json, require_type

FORMAT = 2
MANIFEST = "manifest.json"
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Arrays = Mapping[str, npt.NDArray[Any]]
_WORTH_IT = 0.8  # of the size: a column that zstd hardly shrinks is read faster uncompressed
_SAMPLED = 1 << 20  # bytes of a column


@dataclass(frozen=True)
class RowGroupData:
    """A row group to write: arrays ``(rows, ...)``, and facts for the manifest, as JSON."""

    arrays: Arrays
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RowGroup:
    """The manifest's description of a row group, the ``number`` of its file; the digest is of arrays and facts."""

    file: str
    number: int
    rows: int
    facts: Mapping[str, Any]
    digest: str


def shard_of(groups: Sequence[RowGroupData]) -> tuple[bytes, list[dict[str, Any]]]:
    """The content of a file with these row groups, of the same columns, and their entries in the manifest."""
    tables = [pa.table([_column(a) for a in rows.arrays.values()], schema=_schema(rows.arrays)) for rows in groups]
    buffer = io.BytesIO()
    with pq.ParquetWriter(
        buffer,
        tables[0].schema,
        compression={name: _compression(array) for name, array in groups[0].arrays.items()},
        use_dictionary=False,
        write_statistics=False,
    ) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, len(table)))
    described = [
        {"rows": len(table), "facts": dict(rows.facts), "digest": _digest(rows)}
        for table, rows in zip(tables, groups, strict=True)
    ]
    return buffer.getvalue(), described


def _schema(arrays: Arrays) -> pa.Schema:
    return pa.schema(
        [
            pa.field(
                name, _column(array[:0]).type, metadata={"dtype": array.dtype.str, "shape": json.dumps(array.shape[1:])}
            )
            for name, array in arrays.items()
        ]
    )


def _column(array: npt.NDArray[Any]) -> pa.Array:
    if array.ndim == 1 and array.dtype.kind in "iuf":  # Arrow packs booleans into bits
        return pa.array(array)
    kind = pa.binary(array.itemsize * int(np.prod(array.shape[1:])))
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(array), [None, pa.py_buffer(np.ascontiguousarray(array))])


def _compression(array: npt.NDArray[Any]) -> str:
    content = np.ascontiguousarray(array).tobytes()[:_SAMPLED]
    return "zstd" if len(pa.compress(content, "zstd", asbytes=True)) < _WORTH_IT * len(content) else "none"


def _digest(rows: RowGroupData) -> str:
    digest = hashlib.sha256(json.dumps(dict(rows.facts), sort_keys=True).encode())
    for name, array in rows.arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:24]


def data_folder(folder: Path | None, output: Path, name: str) -> Path:
    """``folder``, or by default the folder of data of this name."""
    return folder if folder is not None else output / "data" / name


def invalid_data_error(folder: Path, why: str) -> InputError:
    """The error for a folder of data."""
    return InputError(f"--data {display_path(folder)}: {why}")


class _RowGroup(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    rows: Count
    facts: Fields
    digest: str


class _Shard(TypedDict):
    file: str
    sha256: str
    split: Split
    groups: list[_RowGroup]


class _Manifest(TypedDict):
    data: str
    options: Fields
    files: Count
    shards: list[_Shard]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in a folder."""
    try:
        manifest = parse_json(local(folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise invalid_data_error(folder, f"{MANIFEST} cannot be read ({first_line(error)})") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        why = f"its {MANIFEST} has format {found}; this Concord reads {FORMAT}; make the data in another folder"
        raise invalid_data_error(folder, why)
    try:
        require_type(manifest, _Manifest)
    except ValueError as error:
        raise invalid_data_error(folder, f"its {MANIFEST} is not complete ({error})") from error
    return dict(manifest)


class ShardedData:
    """Data in a folder. A file's checksum is compared at its first use.

    Args:
        folder: the folder, or its address.
        data: the name of their job.
        command: the command that makes them, for messages; by default ``concord data`` and the name.

    Attributes:
        manifest: the manifest.
        options: the options of their making.
        version: differs if any row does, but not with another division into files.
    """

    def __init__(self, folder: Path, data: str, command: str | None = None) -> None:
        self.folder, self.command = folder, command or f"concord data {data}"
        names = set(listing(folder, recursive=True) or ())
        if MANIFEST not in names:
            raise self.error(f"no data of {data}; {self.command} makes them")
        self.manifest = read_manifest(folder)
        if self.manifest["data"] != data:
            found = self.manifest["data"]
            raise self.error(f"data of {found}, not of {data}; {self.command} makes those")
        if len(self.manifest["shards"]) < self.manifest["files"]:
            raise self.error(f"no data of {data}, only the beginning of some; {self.command} makes them")
        self.options: Mapping[str, Any] = self.manifest["options"]
        self._checksums: dict[str, str] = {shard["file"]: shard["sha256"] for shard in self.manifest["shards"]}
        self._groups: dict[Split, list[RowGroup]] = {split: [] for split in SPLITS}
        for shard in self.manifest["shards"]:
            found = [RowGroup(shard["file"], at, **group) for at, group in enumerate(shard["groups"])]
            self._groups[shard["split"]] += found
        if missing := sorted(self._checksums.keys() - names):
            raise self.error(f"{missing[0]} is missing; {self.command} makes it")
        digests = {split: [group.digest for group in groups] for split, groups in self._groups.items()}
        seen: dict[str, str] = {}
        for group in (group for groups in self._groups.values() for group in groups):
            if (other := seen.setdefault(group.digest, group.file)) != group.file:
                raise self.error(f"the same rows are in {other} and in {group.file}")
        self.version = hashlib.sha256(json.dumps([data, digests]).encode()).hexdigest()[:12]
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:  # for the workers of a data loader, which open the files themselves
        return {key: value for key, value in self.__dict__.items() if key not in ("_opened", "_reading")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opened: dict[str, pq.ParquetFile] = {}
        self._reading = threading.Lock()

    def error(self, why: str) -> InputError:
        """The error for these data."""
        return invalid_data_error(self.folder, why)

    def groups(self, split: Split) -> list[RowGroup]:
        """The row groups of a split, in their order; empty if it has none."""
        return self._groups[split]

    def read(self, group: RowGroup) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a row group, by their names."""
        try:
            with self._reading:
                table = self._open(group.file).read_row_group(group.number, use_threads=False)
            return {column.name: _array(column, table[column.name]) for column in table.schema}
        except InputError:
            raise
        except (OSError, pa.ArrowException, TypeError, ValueError) as error:
            why = f"{group.file} cannot be read ({first_line(error)}); remove it, and {self.command} makes it"
            raise self.error(why) from error

    def read_all(self, groups: Sequence[RowGroup]) -> dict[str, npt.NDArray[Any]]:
        """The arrays of several row groups, joined."""
        parts = [self.read(group) for group in groups]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _open(self, file: str) -> pq.ParquetFile:
        if file not in self._opened:
            path = local(self.folder / file)
            if file_checksum(path) != self._checksums[file]:
                raise self.error(f"{file} is corrupt; remove it, and {self.command} makes it anew")
            try:
                self._opened[file] = open_parquet(path)
            except InputError as error:
                raise InputError(f"--data: {error}") from None
        return self._opened[file]


def _array(column: pa.Field, values: pa.ChunkedArray) -> npt.NDArray[Any]:
    metadata = column.metadata or {}
    shape = json.loads(metadata[b"shape"])
    return np.frombuffer(values.combine_chunks().buffers()[1], metadata[b"dtype"].decode()).reshape(-1, *shape)
