"""Parquet files from anybody: Ray's types that could run code are refused before the file is read."""

import base64
import contextlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data  # noqa: F401  registers Ray's types, as it is done in Ray Train's workers
from hypothesis import given
from hypothesis import strategies as st
from ray.data._internal.object_extensions.arrow import ArrowPythonObjectType
from unpickled import Program

from concord.environments import from_folder
from concord.environments.images import image_dataset
from concord.environments.parquet import read_table
from concord.environments.sharded import FORMAT, ShardedData
from concord.errors import InputError
from concord.storage import file_checksum

ROWS = 2


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    return tmp_path / "the program ran"


@pytest.fixture
def objects(witness: Path) -> pa.Array:
    """A column whose values are programs."""
    pickled = pa.array([pickle.dumps(Program(witness))] * ROWS, pa.large_binary())
    return pa.ExtensionArray.from_storage(ArrowPythonObjectType(), pickled)


def write(folder: Path, name: str, **columns: Any) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")


def read_folder(folder: Path) -> Any:
    return from_folder(folder)["train"]


def read_images(folder: Path) -> Any:
    return image_dataset("cifar10", folder)


def read_made_data(folder: Path) -> Any:
    checksum = file_checksum(folder / "train.parquet")
    group = {"rows": ROWS, "facts": {}, "digest": "0"}
    shard = {"file": "train.parquet", "split": "train", "sha256": checksum, "groups": [group]}
    manifest = {"format": FORMAT, "data": "made", "options": {}, "files": 1, "shards": [shard]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    data = ShardedData(folder, "made")
    return data.read_all(data.groups("train"))


# Each reader with the column that it turns into values first.
READERS = [(read_folder, "inputs"), (read_folder, "targets"), (read_images, "img"), (read_made_data, "level")]


@pytest.mark.parametrize(("reader", "column"), READERS)
def test_no_reader_runs_what_a_file_holds(
    reader: Callable[[Path], Any], column: str, objects: pa.Array, witness: Path, tmp_path: Path
) -> None:
    whole: dict[str, Any] = {"inputs": [1.0, 2.0], "targets": [0, 1], "label": [0, 1]}
    whole |= {"frame": pa.array([bytes(12)] * ROWS, pa.binary(12)), "level": [0, 1]}
    for name in ("train", "test"):
        write(tmp_path / "data", name, **whole | {column: objects})
    with pytest.raises(
        InputError, match=rf"train\.parquet: column {column} is of the .* ray\.data\.arrow_pickled_object"
    ):
        reader(tmp_path / "data")
    assert not witness.exists()


def nested(kind: str, objects: pa.Array) -> pa.Array:
    match kind:
        case "list":
            return pa.ListArray.from_arrays(pa.array(range(ROWS + 1)), objects)
        case "fixed-size list":
            return pa.FixedSizeListArray.from_arrays(objects, 1)
        case "struct":
            return pa.StructArray.from_arrays([objects], ["bytes"])
        case _:
            return pa.MapArray.from_arrays(pa.array(range(ROWS + 1)), pa.array(["a", "b"]), objects)


@pytest.mark.parametrize("kind", ["list", "fixed-size list", "struct", "map"])
def test_what_is_nested_is_found_by_its_name(kind: str, objects: pa.Array, witness: Path, tmp_path: Path) -> None:
    write(tmp_path, "train", inputs=nested(kind, objects), targets=[0, 1])
    with pytest.raises(
        InputError, match=r"column inputs\.\S+ is of the extension type ray\.data\.arrow_pickled_object"
    ):
        read_table(tmp_path / "train.parquet")
    assert not witness.exists()


class _TellTale(pa.ExtensionType):
    """A type that is a program itself: it runs when a schema that names it is read."""

    read: list[bytes] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.tell_tale")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"payload"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> "_TellTale":
        cls.read.append(serialized)
        return cls()


def test_a_type_is_not_even_made(tmp_path: Path) -> None:
    write(tmp_path, "train", inputs=pa.ExtensionArray.from_storage(_TellTale(), pa.array([1, 2])), targets=[0, 1])
    pa.register_extension_type(_TellTale())
    try:
        with pytest.raises(InputError, match=r"column inputs is of the extension type tests\.tell_tale"):
            read_table(tmp_path / "train.parquet")
        assert _TellTale.read == []
    finally:
        pa.unregister_extension_type("tests.tell_tale")


def test_a_type_of_parquet_s_own_is_refused_too(tmp_path: Path) -> None:
    table = pa.table({"inputs": pa.array([bytes(16)] * ROWS, pa.uuid()), "targets": [0, 1]})
    pq.write_table(table, tmp_path / "train.parquet", store_schema=False)
    with pytest.raises(InputError, match=r"column inputs is of the extension type arrow\.uuid"):
        read_table(tmp_path / "train.parquet")


def text(value: bytes) -> bytes:
    """A text in Thrift's compact form: its length, seven bits a byte, and its bytes."""
    return bytes([len(value) & 0x7F | 0x80, len(value) >> 7]) + value


KEY = b"\x18\x0cARROW:schema"
PLAIN = b"\x18" + text(
    base64.b64encode(pa.schema([("inputs", pa.large_binary()), ("targets", pa.int64())]).serialize().to_pybytes())
)
ONE_PAIR, TWO_PAIRS = b"\x1c" + KEY, b"\x2c" + KEY


@pytest.mark.parametrize(
    ("written", "spoilt", "error"),
    [
        # Thrift's readers keep the last of two values of one field.
        (KEY, KEY + PLAIN + b"\x08\x04", "column inputs is of the extension type ray.data.arrow_pickled_object"),
        (ONE_PAIR, TWO_PAIRS + PLAIN + b"\x00" + KEY, "more than one Arrow schema"),
    ],
    ids=["two values", "two pairs"],
)
def test_a_second_schema_is_not_overlooked(
    objects: pa.Array, witness: Path, tmp_path: Path, written: bytes, spoilt: bytes, error: str
) -> None:
    write(tmp_path, "evil", inputs=objects, targets=[0, 1])
    path = tmp_path / "evil.parquet"
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    body, footer = content[: -8 - length], content[-8 - length : -8]
    assert footer.count(written) == 1
    rest = footer.partition(written)[2]
    footer = footer.replace(written + rest, spoilt + (rest if spoilt.endswith(KEY) else rest[1:]))
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises((InputError, pa.ArrowInvalid), match=error):
        read_table(path)
    assert not witness.exists()


@given(place=st.floats(0, 1), value=st.integers(0, 255))
def test_a_changed_byte_of_the_footer_never_makes_a_type(place: float, value: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("damaged") / "train.parquet"
    pq.write_table(pa.table({"inputs": pa.ExtensionArray.from_storage(_TellTale(), pa.array([1, 2]))}), path)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[-8:-4], "little")
    content[-8 - length + round(place * (length + 3))] = value
    path.write_bytes(content)
    _TellTale.read.clear()
    pa.register_extension_type(_TellTale())
    try:
        with contextlib.suppress(InputError, OSError, pa.ArrowException, UnicodeDecodeError):
            read_table(path)
        assert _TellTale.read == []
    finally:
        pa.unregister_extension_type("tests.tell_tale")


def test_plain_columns_are_read_as_they_were_written(tmp_path: Path) -> None:
    columns = {"a": [1.0, 2.0], "b": [[1, 2], [3, 4]], "c": pa.array(["x", "y"]).dictionary_encode(), "d": [b"1", b"2"]}
    write(tmp_path, "train", **columns, e=[{"bytes": b"1", "path": "p"}] * ROWS)
    assert read_table(tmp_path / "train.parquet").equals(pq.read_table(tmp_path / "train.parquet"))
