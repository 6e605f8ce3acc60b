"""Data that Concord makes: row groups are read as they were written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from concord.environments.sharded import FORMAT, Rows, ShardedData, shard_of
from concord.errors import InputError
from concord.storage.checksum import file_checksum

columns = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.tuples(st.sampled_from(["u1", "i1", "i8", "f4", "f8"]), array_shapes(min_dims=0, max_dims=2, max_side=3)),
    min_size=1,
    max_size=3,
)


def write(folder: Path, *shards: list[Rows], **changed: Any) -> None:
    described = []
    for number, rows in enumerate(shards):
        content, groups = shard_of(rows)
        path = folder / f"part-{number}.parquet"
        path.write_bytes(content)
        described.append({"file": path.name, "split": "train", "sha256": file_checksum(path), "groups": groups})
    manifest = {"format": FORMAT, "data": "made", "options": {}, "files": len(shards), "shards": described}
    (folder / "manifest.json").write_text(json.dumps(manifest | changed))


@settings(max_examples=25, deadline=None)
@given(columns, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_row_groups_of_any_lengths_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, Any], lengths: list[int], data: Any
) -> None:
    folder = tmp_path_factory.mktemp("made")
    given = [
        {name: data.draw(arrays(kind, (length, *shape))) for name, (kind, shape) in columns.items()}
        for length in lengths
    ]
    write(folder, [Rows(each, {"number": number}) for number, each in enumerate(given)])
    made = ShardedData(folder, "made")
    groups = made.groups("train")
    assert [(group.rows, group.facts["number"]) for group in groups] == list(zip(lengths, range(3), strict=False))
    for number in reversed(range(len(given))):
        read = made.read(groups[number])
        assert read.keys() == given[number].keys()
        for name, array in given[number].items():
            assert read[name].dtype == array.dtype
            np.testing.assert_array_equal(read[name], array)
            assert read[name].flags.writeable


def test_the_version_depends_on_the_rows_alone(tmp_path: Path) -> None:
    rows = [Rows({"a": np.arange(3) + number}) for number in range(4)]
    versions = []
    for name, shards in {"whole": [rows], "cut": [rows[:1], rows[1:]], "fewer": [rows[:3]]}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, *shards)
        versions.append(ShardedData(tmp_path / name, "made").version)
    assert versions[0] == versions[1] != versions[2]


def test_data_of_an_earlier_format_are_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, [Rows({"a": np.arange(3)})], format=1)
    with pytest.raises(InputError, match=r"has format 1; this Concord reads 2; make the data in another folder$"):
        ShardedData(tmp_path, "made")
