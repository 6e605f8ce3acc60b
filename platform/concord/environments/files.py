"""Finds a dataset's files in a user's folder, or downloads them and checks their checksums."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from concord.errors import ArgumentError, InputError, first_line
from concord.storage import file_checksum, local


@dataclass(frozen=True)
class RemoteFile:
    """A file, its checksum (None where the reader checks the content), and its addresses: its home, then mirrors."""

    name: str
    sha256: str | None
    urls: tuple[str, ...]


def data_folders(dataset: str, folder: Path | None) -> list[Path]:
    """The user's folders that may have a dataset: ``folder/dataset`` and ``folder``; none without ``folder``."""
    return [] if folder is None else [folder / dataset, folder]


def find(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """The first of these files that exists; all names are tried in a folder before the next folder."""
    paths = (local(folder / name) for folder in folders for name in names)
    return next((path for path in paths if path.is_file()), None)


def download(file: RemoteFile, dataset: str) -> Path:
    """The file in the user's cache (``CONCORD_CACHE``, or the system's folder), downloaded if missing."""
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")
    folder = pooch.os_cache("concord") / dataset
    problems = []
    try:
        for url in file.urls:
            try:
                return Path(
                    pooch.retrieve(
                        url,
                        known_hash=None if file.sha256 is None else f"sha256:{file.sha256}",
                        fname=file.name,
                        path=pooch.utils.cache_location(folder, env="CONCORD_CACHE"),
                    )
                )
            except Exception as error:  # network, disk, or checksum
                problems.append(f"{url}: {first_line(error)}")
    finally:
        logger.setLevel(level)
    problem = f"{file.name} of {dataset} cannot be downloaded ({'; '.join(problems)})"
    raise ArgumentError("data", None, f"{problem}; put it into a folder and give that")


def check_sha256(path: Path, expected: str) -> None:
    """Refuse a file with another checksum (InputError): it is incomplete, or another file."""
    found = file_checksum(path)
    if found != expected:
        raise InputError(
            f"{path}: has a wrong checksum (sha256 {found}, expected {expected}); remove it to download it again"
        )
