"""What a submission takes along: this version of Concord, and the files beside the user's job."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import concord
from concord.errors import InputError
from concord.training.job import jobs_folder

# Never of use on the cluster, or not for others' eyes.
_LEFT_OUT_FOLDERS = {
    ".git", ".hg", ".venv", "venv", ".tox", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache",
    ".ruff_cache", "concord-runs", "mlruns", "mlartifacts", ".ipynb_checkpoints", ".ssh", ".aws", ".kube",
}  # fmt: skip
_LEFT_OUT_ENDINGS = (".pyc", ".pyo", ".pem", ".key", ".env", ".tmp", ".swp")
_MIB = 1 << 20


@dataclass(frozen=True)
class Package:
    """Folders that are ready to be sent.

    Attributes:
        concord: the package ``concord``, with the built-in jobs inside, as in its wheel.
        working_dir: the user's files; None where the job is a built-in one.
        size: bytes of both.
    """

    concord: Path
    working_dir: Path | None
    size: int


@contextlib.contextmanager
def packed(working_dir: Path | None, limit: float) -> Iterator[Package]:
    """Copy what goes along into a folder of its own, which is gone afterwards.

    Of the working directory go the files that git would take (tracked ones, and others that are not ignored), or all
    where there is no git; without environments, caches, results and files that hold keys.

    Args:
        working_dir: the user's folder; None takes none.
        limit: MiB that both may have together.

    Raises:
        InputError: they are larger; it names the largest files.
    """
    files: dict[Path, Path] = {}
    if working_dir is not None:
        files = {path: working_dir / path for path in _files(working_dir, _of_git(working_dir))}
    sizes = {path: source.stat().st_size for path, source in files.items()}
    package = Path(concord.__file__).parent
    own = {path: package / path for path in _files(package)}
    own |= {Path("jobs") / path: jobs_folder() / path for path in _files(jobs_folder())}
    size = sum(sizes.values()) + sum(source.stat().st_size for source in own.values())
    if size > limit * _MIB:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
        named = ", ".join(f"{path} ({sizes[path] / _MIB:.1f} MiB)" for path in largest)
        raise InputError(
            f"--working-dir {working_dir}: {size / _MIB:.1f} MiB to send, --size-limit is {limit:g}; the largest are "
            f"{named}; what .gitignore names stays here"
        )
    with tempfile.TemporaryDirectory(prefix="concord-package-") as name:
        for folder, chosen in (("module/concord", own), ("work", files)):
            for path, source in chosen.items():
                target = Path(name, folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        work = Path(name, "work")
        if working_dir is not None:
            work.mkdir(exist_ok=True)
        yield Package(Path(name, "module/concord"), work if working_dir is not None else None, size)


def inside(job: Path, working_dir: Path) -> Path:
    """Where a job's file lies in the working directory (InputError if it lies elsewhere)."""
    try:
        return job.resolve().relative_to(working_dir.resolve())
    except ValueError:
        raise InputError(
            f"job {job}: lies outside the working directory {working_dir.resolve()}, which is what is sent; "
            "give --working-dir, or submit from the job's folder"
        ) from None


def _files(folder: Path, found: list[Path] | None = None) -> list[Path]:
    """Those of these files, or of all in the folder, that go along, relative to it, in order."""
    if found is None:
        found = []
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS]
            found += [(Path(place) / name).relative_to(folder) for name in names]
    return sorted(
        path
        for path in found
        if not _LEFT_OUT_FOLDERS & set(path.parts[:-1])
        and not path.name.endswith(_LEFT_OUT_ENDINGS)
        and (folder / path).is_file()
    )


def _of_git(folder: Path) -> list[Path] | None:
    """What git tracks or would take; None where there is no git, or no repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
