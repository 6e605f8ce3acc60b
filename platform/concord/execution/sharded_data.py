"""Makes data file by file in Ray tasks, resumable; :mod:`concord.environments.sharded` reads them.

The content of a file depends only on the options and its number. The manifest is rewritten after each file.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from concord.defaults import DEFAULT_OUTPUT
from concord.environments.sharded import (
    FORMAT,
    MANIFEST,
    RowGroupData,
    ShardedData,
    Split,
    invalid_data_error,
    read_manifest,
    shard_of,
)
from concord.errors import InputError, RunFailedError
from concord.execution.key import Key, plain
from concord.execution.session import ray_session, task_failure, task_results
from concord.options import OptionGroup, Place, Unkept, flag_of, science_values
from concord.storage import DiskError, Folder, check_local_folder, file_checksum
from concord.training.options import RunConfig
from concord.training.process import tune_process

Info = Callable[[str], None]


@dataclass(frozen=True)
class SplitPart:
    """A file with examples number ``first`` to ``first + count - 1`` of a split."""

    file: str
    split: Split
    first: int
    count: int


Shard = TypeVar("Shard", bound=SplitPart)


def split_parts(counts: Mapping[Split, int], size: int) -> list[SplitPart]:
    """The files of splits with these numbers of examples, at most ``size`` in a file."""
    return [
        SplitPart(f"{split}/part-{start // size:04d}.parquet", split, start, min(size, count - start))
        for split, count in counts.items()
        for start in range(0, count, size)
    ]


@dataclass(frozen=True, kw_only=True)
class MakingOptions(OptionGroup):
    """The tasks, cluster and folder for making data."""

    # fmt: off
    tasks: Place[int | None] = None
    """Number of parallel Ray tasks; by default one for each CPU."""
    address: Unkept[str | None] = None
    """Ray cluster to run on; by default RAY_ADDRESS, else a Ray started on this machine."""
    data: Place[Path | None] = None
    """Folder for the data; by default a folder named after the data in data/ of --output."""
    output: Place[Path] = DEFAULT_OUTPUT
    """Folder of runs and data."""
    # fmt: on

    @property
    def deciding(self) -> dict[str, Any]:
        """The options that decide the data, with values."""
        return science_values(self)

    def check(self) -> None:
        """Validate options."""
        check_local_folder("--output", self.output)
        check_local_folder("--data", self.data)
        self.require_at_least(1, "tasks")


def make_sharded(
    folder: Path,
    about: Mapping[str, Any],
    shards: Sequence[Shard],
    task: Callable[[Shard], Sequence[RowGroupData]],
    options: MakingOptions,
    info: Info,
) -> tuple[ShardedData, dict[str, Any]]:
    """Make the files that are missing or damaged; return the data, and the beginning of the JSON result.

    ``about`` has further entries of the manifest: ``data``, the job's name; ``options``, the values that decide the
    data; and entries for readers. ``task`` makes the row groups of a file in a Ray task, so it must be picklable.
    """
    started = time.perf_counter()
    folder = folder.absolute()
    manifest = {"format": FORMAT, **about, "files": len(shards)}
    made = _begin(folder, manifest)
    missing = [shard for shard in shards if shard.file not in made]
    if missing:
        info(f"{len(missing)} of {len(shards)} files to make in {folder}")
        with ray_session(RunConfig().with_options(address=options.address)):
            for done, (shard, (content, groups)) in enumerate(_made(missing, task, options.tasks), 1):
                Folder(folder).write(shard.file, content)
                checksum = file_checksum(folder / shard.file)
                made[shard.file] = {"file": shard.file, "split": shard.split, "sha256": checksum, "groups": groups}
                _write_manifest(folder, manifest, [made[each.file] for each in shards if each.file in made])
                if done % 8 == 0 or done == len(missing):
                    info(f"{done}/{len(missing)} files")
    seconds = round(time.perf_counter() - started, 1)
    return ShardedData(folder, about["data"]), {"folder": str(folder), "files_made": len(missing), "seconds": seconds}


def _begin(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The manifest's entries of the undamaged files; a manifest is begun if there is none."""
    if (folder / MANIFEST).exists():
        made = read_manifest(folder)
        key = Key(manifest["data"], plain(manifest["options"]))
        for part, name, value, found in key.differences({"job": made.get("data"), "config": made.get("options", {})}):
            if part == "job":
                raise invalid_data_error(folder, f"holds data of {found}, not of {value}; give another folder")
            given = f"{flag_of(name)} {value}"
            raise InputError(f"{given}: the data in {folder} are made with {found}; give another --data")
        files = [each for each in made.get("shards", ()) if (folder / each["file"]).is_file()]
        return {each["file"]: each for each in files if file_checksum(folder / each["file"]) == each["sha256"]}
    if folder.is_dir() and any(folder.iterdir()):
        raise invalid_data_error(folder, f"is not empty, and not made for {manifest['data']}; give another folder")
    try:
        _write_manifest(folder, manifest, [])
    except DiskError as error:
        raise invalid_data_error(folder, f"not a folder to write to ({error})") from error
    return {}


def _write_manifest(folder: Path, manifest: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> None:
    Folder(folder).write(MANIFEST, json.dumps({**manifest, "shards": shards}, indent=1))


def _made(
    shards: Sequence[Shard], task: Callable[[Shard], Sequence[RowGroupData]], tasks: int | None
) -> Iterator[tuple[Shard, tuple[bytes, list[dict[str, Any]]]]]:
    """The files as they are made, in any order."""
    import ray

    make: Any = ray.remote(num_cpus=1, max_retries=3)(_make)
    shared = ray.put(task)
    most = tasks or int(ray.cluster_resources().get("CPU", 1))
    with contextlib.closing(task_results(make, shards, lambda shard: (shared, shard), most)) as results:
        for shard, result in results:
            if isinstance(result, Exception):
                raise RunFailedError(f"{shard.file} could not be made: {task_failure(result)}") from result
            yield shard, result


def _make(task: Callable[[Shard], Sequence[RowGroupData]], shard: Shard) -> tuple[bytes, list[dict[str, Any]]]:
    tune_process(threads=1)
    return shard_of(task(shard))
