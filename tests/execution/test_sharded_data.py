"""Data that Ray tasks make: only missing or damaged files are made, and always the same; other folders stay."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from concord.environments.sharded import RowGroupData, ShardedData
from concord.errors import InputError
from concord.execution.sharded_data import MakingOptions, SplitPart, make_sharded, split_parts

SHARDS = split_parts({"train": 5, "validation": 2, "test": 1}, 2)


def make(folder: Path, tasks: int | None = None, data: str = "made", **options: Any) -> Mapping[str, Any]:
    def numbered(part: SplitPart) -> list[RowGroupData]:  # inside, since Ray's workers do not have this file
        first = part.first + {"train": 0, "validation": 100, "test": 200}[part.split]
        return [
            RowGroupData(
                {"number": np.arange(first, first + part.count), "of": np.full((part.count, 2, 3), 7, np.uint8)}
            )
        ]

    about = {"data": data, "options": {"seed": 0, **options}}
    return make_sharded(folder, about, SHARDS, numbered, MakingOptions(tasks=tasks), lambda _: None)[1]


@pytest.fixture
def made(ray_cluster: None, tmp_path: Path) -> Path:
    assert make(tmp_path / "data")["files_made"] == 3 + 1 + 1
    return tmp_path / "data"


def test_files_hold_the_examples_in_their_order_whatever_the_number_of_tasks(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", tasks=1)
    files = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert {path: (tmp_path / "other" / path).read_bytes() for path in files} == files
    data = ShardedData(made, "made")
    assert data.read_all(data.groups("train"))["number"].tolist() == [0, 1, 2, 3, 4]


def test_what_is_lost_or_torn_is_made_again_the_same_and_nothing_else(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*.parquet")}
    lost, torn, flipped, unnoted = sorted(before)[:4]
    lost.unlink()
    torn.write_bytes(before[torn][:-1])
    content = bytearray(before[flipped])
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    # Killed before it noted one more file, which is made again.
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["shards"] = [shard for shard in manifest["shards"] if made / shard["file"] != unnoted]
    (made / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="only the beginning of some; concord data made makes them"):
        ShardedData(made, "made")
    kept = {path: path.stat().st_mtime_ns for path in sorted(before)[4:]}
    assert make(made)["files_made"] == 4
    assert make(made)["files_made"] == 0
    assert {path: path.read_bytes() for path in made.rglob("*.parquet")} == before
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (lambda folder: make(folder, seed=1), r"--seed 1: the data in .* are made with 0; give another --data"),
        (lambda folder: make(folder, data="other"), "holds data of made, not of other; give another folder"),
        (lambda folder: make(folder / "train"), "is not empty, and not made for made; give another folder"),
    ],
)
def test_a_folder_with_other_data_is_left_alone(made: Path, again: Callable[[Path], object], said: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    with pytest.raises(InputError, match=said):
        again(made)
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before
