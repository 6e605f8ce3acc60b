"""Reads untrusted Parquet files as plain columns: a file with extension types is refused.

Code that a library registered in the process turns such a type into values: Ray's ``arrow_pickled_object`` unpickles
them, in every process that imported ``ray.data``. So the types are checked before Arrow reads the file: its schema is
in the footer, where an extension type is a plain one with a name beside it.
"""

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from concord.errors import InputError

_MAGIC = b"PAR1"
_SCHEMA, _EXTENSION = b"ARROW:schema", b"ARROW:extension:name"
# Of the same length, and unknown to Arrow, which then reads the plain types.
_DISARMED_SCHEMA, _DISARMED = b"ARROW_schema", b"ARROW_extension_name"


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file of plain columns."""
    file = pa.OSFile(str(path))
    if schema := _arrow_schema(_footer(file)):
        _refuse(path, _declared(schema))
    file.seek(0)
    opened = pq.ParquetFile(file)
    # Parquet's own types, without Arrow's schema.
    kinds = _kinds(opened.schema_arrow)
    _refuse(path, ((name, kind.extension_name) for name, kind in kinds if isinstance(kind, pa.BaseExtensionType)))
    return opened


def read_table(path: Path) -> pa.Table:
    """The table in a Parquet file; see :func:`open_parquet`."""
    return open_parquet(path).read()


def _refuse(path: Path, extensions: Iterable[tuple[str, str]]) -> None:
    for column, kind in extensions:
        raise InputError(
            f"{path}: column {column} is of the extension type {kind}; expected numbers, texts, bytes, or lists of them"
        )


def _footer(file: Any) -> bytes:
    """The footer, which describes the file; empty if it is damaged, which the reader reports."""
    size = file.size()
    file.seek(max(0, size - 8))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != _MAGIC or length > size - 8:
        return b""
    file.seek(size - 8 - length)
    return bytes(file.read(length))


def _arrow_schema(footer: bytes) -> bytes:
    """The serialized Arrow schema that the reader will find; empty without one."""
    if _SCHEMA not in footer:
        return b""
    if footer.count(_SCHEMA) > 1 or _DISARMED_SCHEMA in footer:
        raise pa.ArrowInvalid("it names more than one Arrow schema")
    # A file of this footer alone: the reader finds the same in it, but no schema whose types it would make.
    disarmed = footer.replace(_SCHEMA, _DISARMED_SCHEMA)
    alone = _MAGIC + disarmed + len(footer).to_bytes(4, "little") + _MAGIC
    found = pq.read_metadata(pa.BufferReader(alone)).metadata or {}
    try:
        return base64.b64decode(found.get(_DISARMED_SCHEMA, b""), validate=True)
    except ValueError as error:
        raise pa.ArrowInvalid("its Arrow schema is not base64") from error


def _declared(schema: bytes) -> Iterator[tuple[str, str]]:
    """The columns of a schema with an extension type, themselves or inside, and the type."""
    read = pa.ipc.read_schema(pa.py_buffer(schema.replace(_EXTENSION, _DISARMED)))
    for field in read:
        for name, each in _fields(field):
            if each.metadata and _DISARMED in each.metadata:
                yield name, each.metadata[_DISARMED].decode(errors="replace")
    if _EXTENSION in schema:
        yield "?", "?"


def _fields(field: pa.Field, below: str = "") -> Iterator[tuple[str, pa.Field]]:
    """A field and all fields within it, each with its path from the column on."""
    name = f"{below}{field.name}"
    yield name, field
    for index in range(field.type.num_fields):
        yield from _fields(field.type.field(index), f"{name}.")


def _kinds(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    for field in schema:
        for name, each in _fields(field):
            yield name, each.type.value_type if isinstance(each.type, pa.DictionaryType) else each.type
