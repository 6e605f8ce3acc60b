"""The package of a submission: this version of Concord, and the user's files.

The files are chosen and copied here, not by Ray's ``excludes``: Ray would also send what a link names outside of the
folder or under another name (``notes.txt`` → ``.env``), and files that a ``.gitignore`` above the folder ignores.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import concord
from concord.errors import InputError
from concord.job_files import jobs_folder
from concord.redaction import is_secret_file

# Names of files that are useless on the cluster or private; hidden files are left out as well.
_LEFT_OUT_FOLDERS = {
    "venv", "node_modules", "__pycache__", "concord-runs", "mlruns", "mlartifacts",
}  # fmt: skip
_LEFT_OUT_ENDINGS = (".pyc", ".pyo", ".tmp", ".swp")
_MIB = 1 << 20


@dataclass(frozen=True)
class Package:
    """Folders to upload.

    Attributes:
        modules: the packages ``concord`` and ``concord_jobs``, as in the wheel.
        working_dir: the user's files; None for a built-in job.
    """

    modules: Sequence[Path]
    working_dir: Path | None


@contextlib.contextmanager
def packed(
    working_dir: Path | None, limit: float, needed: Sequence[Path] = (), texts: Mapping[Path, str] | None = None
) -> Iterator[Package]:
    """Copy the files to send into a temporary folder, while the body runs.

    With git, tracked files and files that are not ignored are sent; without git, all files of the working directory.
    Hidden files, files outside, environments, caches, results and files named like secrets are left out. A link is sent
    as its target if the target is sent. The files ``needed``, relative to the folder, must be among the sent files;
    ``texts`` are further files by path. ``limit`` is in MiB.
    """
    files: dict[Path, Path] = {}
    if working_dir is not None:
        if working_dir.resolve() == Path.home().resolve():
            raise InputError(f"--working-dir {working_dir}: is your home; submit from a folder of the job alone")
        files = {path: working_dir / path for path in _files(working_dir, _of_git(working_dir))}
        for path in needed:
            if path not in files:
                raise InputError(
                    f"{working_dir / path}: would not be sent: it is ignored by git, hidden, named like a secret, "
                    "or missing"
                )
    sizes = {path: source.stat().st_size for path, source in files.items()}
    packages = (Path(concord.__file__).parent, jobs_folder())
    own = {Path(package.name) / path: package / path for package in packages for path in _files(package)}
    size = sum(sizes.values()) + sum(source.stat().st_size for source in own.values())
    if size > limit * _MIB:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
        named = ", ".join(f"{path} ({sizes[path] / _MIB:.1f} MiB)" for path in largest)
        raise InputError(
            f"--working-dir {working_dir}: {size / _MIB:.1f} MiB exceed --size-limit {limit:g}; the largest are "
            f"{named}; list files to leave out in .gitignore"
        )
    with tempfile.TemporaryDirectory(prefix="concord-package-") as name:
        for folder, chosen in (("modules", own), ("work", files)):
            for path, source in chosen.items():
                target = Path(name, folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    shutil.copyfile(source, target)
                except OSError as error:
                    raise InputError(f"{source}: cannot be read ({error.strerror})") from error
        Path(name, "modules/concord/VERSION").write_text(concord.__version__, encoding="utf-8")
        work = Path(name, "work")
        if working_dir is not None:
            work.mkdir(exist_ok=True)
        for path, text in (texts or {}).items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_text(text, encoding="utf-8")
        modules = [Path(name, "modules", package.name) for package in packages]
        yield Package(modules, work if work.exists() else None)


def inside(file: Path, working_dir: Path) -> Path:
    """The path of a file relative to the working directory (InputError if it lies outside)."""
    try:
        return file.resolve().relative_to(working_dir.resolve())
    except ValueError:
        raise InputError(
            f"{file}: lies outside the working directory {working_dir.resolve()}, and only that is sent; "
            "give --working-dir, or submit from its folder"
        ) from None


def _files(folder: Path, found: list[Path] | None = None) -> list[Path]:
    """The files to send, of these or of the whole folder; sorted paths relative to the folder."""
    if found is None:
        found = []
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS and name[0] != "."]
            found += [(Path(place) / name).relative_to(folder) for name in names]
    root = folder.resolve()
    return sorted(path for path in found if _goes_along(path) and _leads_to_one(folder / path, root))


def _goes_along(path: Path) -> bool:
    """Whether a file is sent, by its name relative to the folder."""
    return (
        not _LEFT_OUT_FOLDERS & set(path.parts[:-1])
        and not any(part.startswith(".") for part in path.parts)
        and not path.name.endswith(_LEFT_OUT_ENDINGS)
        and not is_secret_file(path)
    )


def _leads_to_one(path: Path, root: Path) -> bool:
    """Whether the final target of a path is a sent file of the folder."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # a link to itself; the error depends on Python's version
        return False
    return target.is_file() and target.is_relative_to(root) and _goes_along(target.relative_to(root))


def _of_git(folder: Path) -> list[Path] | None:
    """The files that git tracks or would add; None without a repository."""
    if not any((each / ".git").exists() for each in (folder.resolve(), *folder.resolve().parents)):
        return None
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise InputError(f"--working-dir {folder}: is in a git repository; install git") from None
    except subprocess.CalledProcessError as error:
        reason = " ".join(os.fsdecode(error.stderr).split())
        raise InputError(f"--working-dir {folder}: git cannot list its files ({reason})") from error
    return [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
