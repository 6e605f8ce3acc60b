"""Folders of data: one rule for tables, arrays and images says which files are read, and why others are not."""

import bz2
import gzip
import io
import lzma
import pickle
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from concord.environments import Environments, from_folder, from_image_folder, image_dataset
from concord.environments.data_files import kind_by_content, missing, stem
from concord.environments.table import from_table
from concord.errors import ArgumentError, format_for_cli

FRAME = pd.DataFrame({"age": np.arange(20.0) + 0.5, "died": [0, 1] * 10})
PLACES = ("north", "south", "west")


def tables(folder: Path) -> Environments:
    return from_table(folder, target="died", test=["west"])


def csv(path: Path) -> None:
    FRAME.to_csv(path, index=False)


def packed(path: Path) -> None:
    path.write_bytes(gzip.compress(FRAME.to_csv(index=False).encode()))


def npz(path: Path) -> None:
    with path.open("wb") as file:  # NumPy would add its ending
        np.savez(file, inputs=np.ones((4, 2), np.float32), targets=np.arange(4))


def png(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), 9, np.uint8)).save(content, "png")
    path.write_bytes(content.getvalue())


@pytest.mark.parametrize(
    ("read", "write", "endings"),
    [
        (tables, csv, (".csv", ".CSV", ".Csv")),
        (tables, packed, (".csv.gz", ".CSV.gz", ".csv.GZ")),
        (tables, FRAME.to_parquet, (".parquet", ".PARQUET", ".Parquet")),
        (from_folder, npz, (".npz", ".NPZ", ".Npz")),
        (lambda folder: from_folder(folder, targets="died"), FRAME.to_parquet, (".parquet", ".PARQUET", ".Parquet")),
    ],
)
def test_a_file_is_read_whatever_the_case_of_its_ending(
    read: Callable[[Path], Environments], write: Callable[[Path], Any], endings: tuple[str, ...], tmp_path: Path
) -> None:
    for place, ending in zip(PLACES, endings, strict=True):
        write(tmp_path / f"{place}{ending}")
    found = read(tmp_path).fitted(0, 0)
    assert sorted(found.names) == list(PLACES)
    assert len({len(found[name]) for name in PLACES}) == 1


def _hidden_copies(folder: Path, ending: str, write: Callable[[Path], Any]) -> None:
    for place in PLACES:
        write(folder / f"{place}{ending}")
    write(folder / f".west{ending}")
    (folder / f"._west{ending}").write_bytes(b"\0\5\x16\7")  # macOS's
    (folder / ".DS_Store").write_bytes(b"")
    (folder / "notes.txt").write_text("no data")


@pytest.mark.parametrize(("read", "write", "ending"), [(tables, csv, ".csv"), (from_folder, npz, ".npz")])
def test_hidden_and_other_files_are_left_out_with_one_line(
    read: Callable[[Path], Environments], write: Callable[[Path], Any], ending: str, tmp_path: Path
) -> None:
    _hidden_copies(tmp_path, ending, write)
    others = rf"other files: 3, such as \._west{ending} \(hidden\), \.west{ending} \(hidden\), notes.txt"
    read_files = ", ".join(f"{place}{ending}" for place in PLACES)
    with pytest.warns(UserWarning, match=f"^{tmp_path}: {others}; they are left out, since .*; read: {read_files}$"):
        assert sorted(read(tmp_path).names) == list(PLACES)


def test_hidden_images_are_left_out_with_one_line(tmp_path: Path) -> None:
    for domain in PLACES:
        for name in ("cat", "dog"):
            png(tmp_path / "domains" / domain / name / "a.PNG")
    png(tmp_path / "domains/west/dog/._a.PNG")
    for part in ("train", "test"):
        png(tmp_path / "parts" / part / "cat" / "a.PNG")
    png(tmp_path / "parts/train/cat/.b.png")
    png(tmp_path / "parts/train/b.png")
    with pytest.warns(UserWarning, match=r"other files: 1, such as west/dog/\._a.PNG \(hidden\); they are left out"):
        assert len(from_image_folder(tmp_path / "domains")["west"]) == 2
    with pytest.warns(UserWarning, match=r"other files: 2, such as b.png, cat/\.b.png \(hidden\); they are left out"):
        assert len(image_dataset(str(tmp_path / "parts"), None).train) == 1


@pytest.mark.parametrize(
    ("read", "files", "message"),
    [
        (tables, {"north.csv": csv, "north.parquet": FRAME.to_parquet}, "has both north.csv and north.parquet"),
        (tables, {"north.CSV": csv, "north.csv": csv}, "has both north.CSV and north.csv; keep one of them"),
        (tables, {"north.csv": csv, "north.csv.gz": packed}, "has both north.csv and north.csv.gz"),
        (from_folder, {"north.npz": npz, "north.PARQUET": FRAME.to_parquet}, "has both north.PARQUET and north.npz"),
        (tables, {".north.csv": csv}, r"no .csv or .parquet file .* \(other files: 1, such as .north.csv \(hidden\)\)"),
        (from_folder, {"north.csv": csv}, r"has no .npz or .parquet file; .* \(other files: 1, such as north.csv\)"),
        (tables, {}, r"no .csv or .parquet file in this folder \(other files: 0\)"),
    ],
)
def test_two_files_of_one_environment_and_a_folder_without_data_are_refused(
    read: Callable[[Path], Environments], files: dict[str, Callable[[Path], Any]], message: str, tmp_path: Path
) -> None:
    for name, write in files.items():
        write(tmp_path / name)
    with pytest.raises(ArgumentError, match=message):
        read(tmp_path)


def test_the_name_of_an_environment_is_that_of_its_file_without_endings() -> None:
    names = {"north.csv": "north", "a.2019.npz": "a.2019", "b.CSV.GZ": "b", "c .parquet": "c", "v1.2.csv.zip": "v1.2"}
    assert {name: stem(name) for name in names} == names


ZIPPED = io.BytesIO()
np.savez(ZIPPED, inputs=np.ones(3))
TEXT = FRAME.to_csv(index=False).encode()
PICTURE = io.BytesIO()
Image.new("RGB", (4, 4)).save(PICTURE, "png")
PHOTOGRAPH = io.BytesIO()
Image.new("RGB", (4, 4)).save(PHOTOGRAPH, "jpeg")
# What a file has, what it is, and the ending with which it is data.
CONTENTS = {
    "a Parquet file": (FRAME.to_parquet(), ".parquet"),
    "a ZIP archive": (ZIPPED.getvalue(), ".npz"),
    "compressed by gzip": (gzip.compress(TEXT), ".csv.gz"),
    "compressed by bzip2": (bz2.compress(TEXT), ".csv.bz2"),
    "compressed by xz": (lzma.compress(TEXT), ".csv.xz"),
    "a PDF": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", None),
    "a PNG image": (PICTURE.getvalue(), None),
    "a JPEG image": (PHOTOGRAPH.getvalue(), None),
    "a pickle of Python": (pickle.dumps(FRAME), None),
    "an SQLite database": (b"SQLite format 3\0\x10\0", None),
    "an HDF5 file": (b"\x89HDF\r\n\x1a\n\0", None),
    "JSON": (FRAME.to_json(orient="records", indent=1).encode(), None),
    "JSON ": (FRAME.to_json(orient="records", lines=True).encode(), None),
    "JSON  ": (b'\xef\xbb\xbf\n{\n  "age": [1, 2]}', None),
    "a web page": (b"\n<!doctype html><title>404</title>", None),
    "XML": (FRAME.head(1).to_xml(parser="etree").encode(), None),
    "text": (TEXT, ".csv"),
    "text ": ("Größe;Süden\n1,5;2\n".encode("latin-1"), ".csv"),
}


@pytest.mark.parametrize("case", CONTENTS)
@pytest.mark.parametrize("ending", [".parquet", ".csv", ".csv.gz", ".csv.bz2", ".csv.xz", ".npz"])
def test_a_file_with_the_ending_of_another_kind_is_named_by_its_content(case: str, ending: str, tmp_path: Path) -> None:
    content, own = CONTENTS[case]
    file = tmp_path / f"a{ending}"
    file.write_bytes(content)
    kind = kind_by_content(file, (".csv", ".csv.gz", ".csv.bz2", ".csv.xz", ".parquet", ".npz"))
    assert kind is None if ending == own else str(kind).startswith(case.strip()), kind
    if kind is not None and ending != ".npz":
        with pytest.raises(ArgumentError, match=f"{file}: is {re.escape(kind)}; give a CSV or Parquet file"):
            from_table(file, target="died", environment="age")


@given(st.text(st.characters(codec="latin-1", categories=["L", "N", "P", "Zs"]), min_size=1, max_size=20))
def test_the_header_of_a_table_is_no_other_kind(header: str) -> None:
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        file.write(f"{header},died\n1,0\n".encode())
        file.flush()
        assert header.startswith(("[", "{")) or kind_by_content(Path(file.name), [".csv"]) is None


@pytest.mark.parametrize(("name", "kind"), [("patients.csv", "file"), ("hospitals", "folder")])
def test_on_a_cluster_a_missing_file_says_on_which_machine(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert format_for_cli(missing(tmp_path / name, kind)) == f"--data {tmp_path / name}: there is no such {kind}"
    monkeypatch.setenv("CONCORD_SUBMISSION", "mine")
    there = format_for_cli(missing(tmp_path / name, kind))
    assert f"there is no such {kind} on {socket.gethostname()}, the cluster's head node; give" in there
    assert ("relative" in there) == (kind == "file")
    assert format_for_cli(missing(Path("s3://bucket/a.csv"), kind)).endswith(f"there is no such {kind}")
