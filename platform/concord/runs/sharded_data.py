"""Data that are made file by file in Ray tasks, and go on where they stopped.

A folder has a plan (the options that decide the data), the files, a line for each file that is whole, and in the end
a manifest. What a file holds depends on the plan and its own place in it alone.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, RunFailedError
from concord.options import OptionGroup
from concord.runs.session import ray_session
from concord.storage import append_line, read_lines
from concord.storage.data_folder import PLAN, checksum, file_checksum, read_json, unfit, write_whole
from concord.training.options import RunConfig

_MADE = "made.jsonl"  # a line for each file, with its checksum, when it is whole

Info = Callable[[str], None]


class Shard(Protocol):
    """What one file holds."""

    @property
    def file(self) -> str:
        """Its name in the folder."""


AnyShard = TypeVar("AnyShard", bound=Shard)


@dataclass(frozen=True)
class SplitPart:
    """A file with examples number ``first`` to ``first + count - 1`` of a split."""

    file: str
    split: Literal["train", "validation", "test"]
    first: int
    count: int


def split_parts(counts: Mapping[Literal["train", "validation", "test"], int], size: int) -> list[SplitPart]:
    """The files of splits with so many examples each, of which a file holds ``size`` at most."""
    return [
        SplitPart(f"{split}/part-{start // size:04d}.safetensors", split, start, min(size, count - start))
        for split, count in counts.items()
        for start in range(0, count, size)
    ]


@dataclass(frozen=True, kw_only=True)
class MakingOptions(OptionGroup):
    """Where data are made, and where they go."""

    # fmt: off
    tasks: int | None = None
    """Ray tasks at a time; one for each CPU if not given."""
    address: str | None = None
    """Ray cluster to run on; without it (or RAY_ADDRESS) Ray starts on this machine."""
    data_dir: Path | None = None
    """Folder for the data; one of their own name under data/ of --output if not given."""
    output: Path = DEFAULT_OUTPUT
    """Folder of runs and data."""
    # fmt: on

    def check(self) -> None:
        """Validate options."""
        self.require("tasks", self.tasks is None or self.tasks >= 1, "must be at least 1")


def begin(folder: Path, plan: Mapping[str, Any], kind: str, special: Collection[str] = ()) -> dict[str, Any] | None:
    """Write down what the folder is for, or see that it is for the same.

    Args:
        folder: where the data are to be.
        plan: what decides them: ``format``, and options by their names.
        kind: of data, for messages.
        special: keys of the plan that the caller compares.

    Returns:
        The plan that was there; None where there was none.

    Raises:
        InputError: the folder holds other data, or cannot be written.
    """
    if (folder / PLAN).exists():
        there = read_json(folder / PLAN)
        if there.get("format") != plan["format"] or not set(special) <= set(there):
            raise unfit(folder, f"{PLAN} is of another version of Concord; give another folder")
        for key in plan:
            if key not in special and there.get(key) != plan[key]:
                raise InputError(
                    f"--{key.replace('_', '-')} {plan[key]}: the data in {folder} are made with {there.get(key)}; "
                    "give another --data-dir"
                )
        return there
    if folder.exists() and any(folder.iterdir()):
        raise unfit(folder, f"not empty, and not made for {kind}; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / PLAN, json.dumps(plan, indent=1).encode())
    except OSError as error:
        raise unfit(folder, f"not a folder to write to ({error.strerror})") from error
    return None


def make_missing(
    folder: Path,
    shards: Sequence[AnyShard],
    task: Callable[..., bytes],
    arguments: Callable[[Any], Sequence[Any]],
    tasks: int | None,
    address: str | None,
    info: Info,
) -> int:
    """Make the files that are not there as they were made, and say how many that were.

    Args:
        folder: where they are.
        shards: all of them.
        task: makes one file's content, from a shard and the arguments; runs in Ray.
        arguments: gets :mod:`ray` and gives what every task takes beside its shard, after Ray has started.
        tasks: at a time; one for each CPU if None.
        address: of the Ray cluster; None: this machine's own.
        info: prints a line of progress.

    Raises:
        RunFailedError: a task failed.
    """
    there = _whole(folder)
    missing = [shard for shard in shards if shard.file not in there]
    if not missing:
        return 0
    info(f"{len(missing)} of {len(shards)} files to make in {folder}")
    with ray_session(RunConfig().with_options(address=address)):
        for done, (shard, content) in enumerate(_made(missing, task, arguments, tasks), 1):
            write_whole(folder / shard.file, content)
            append_line(folder / _MADE, {"file": shard.file, "sha256": checksum(content)})
            if done % 8 == 0 or done == len(missing):
                info(f"{done}/{len(missing)} files")
    return len(missing)


def _made(
    shards: Sequence[AnyShard],
    task: Callable[..., bytes],
    arguments: Callable[[Any], Sequence[Any]],
    tasks: int | None,
) -> Iterable[tuple[AnyShard, bytes]]:
    """The contents of the files as they come, in any order."""
    import ray

    make: Any = ray.remote(num_cpus=1, max_retries=3)(task)
    others = arguments(ray)
    limit = tasks or int(ray.cluster_resources().get("CPU", 1))
    waiting = list(shards)
    running: dict[Any, AnyShard] = {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                shard = waiting.pop(0)
                running[make.remote(shard, *others)] = shard
            (ready,), _ = ray.wait(list(running), num_returns=1)
            shard = running.pop(ready)
            try:
                yield shard, ray.get(ready)
            except ray.exceptions.RayError as error:
                lines = str(getattr(error, "cause", None) or error).strip().splitlines()
                raise RunFailedError(f"{shard.file} could not be made: {lines[-1] if lines else error}") from error
    finally:
        for each in running:
            ray.cancel(each, force=True)


def _whole(folder: Path) -> set[str]:
    """The files that are there as they were made."""
    made: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for entry, _ in read_lines(folder / _MADE):
            with contextlib.suppress(KeyError, TypeError):
                made[entry["file"]] = entry["sha256"]
    there = {file for file in made if (folder / file).is_file()}
    return {file for file in there if file_checksum(folder / file) == made[file]}
