"""What a submission takes along: this version of Concord, and the files beside the user's job."""

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

# Never of use on the cluster, or not for others' eyes; as is what begins with a dot.
_LEFT_OUT_FOLDERS = {
    "venv", "node_modules", "__pycache__", "concord-runs", "mlruns", "mlartifacts",
}  # fmt: skip
_LEFT_OUT_ENDINGS = (".pyc", ".pyo", ".tmp", ".swp")
_MIB = 1 << 20


@dataclass(frozen=True)
class Package:
    """Folders that are ready to be sent.

    Attributes:
        modules: the packages ``concord`` and ``concord_jobs``, as in the wheel.
        working_dir: the user's files; None where the job is a built-in one.
        size: bytes of both.
    """

    modules: Sequence[Path]
    working_dir: Path | None
    size: int


@contextlib.contextmanager
def packed(
    working_dir: Path | None, limit: float, needed: Sequence[Path] = (), texts: Mapping[Path, str] | None = None
) -> Iterator[Package]:
    """Copy what goes along into a folder of its own, which is gone afterwards.

    Of the working directory go the files that git would take (tracked ones, and others that are not ignored), or all
    where there is no git; without what is hidden or lies elsewhere, environments, caches, results and files named like
    secrets. A link goes along as the file that it leads to, if that would.

    Args:
        working_dir: the user's folder; None takes none.
        limit: MiB that both may have together.
        needed: files of the folder that have to go along, relative to it.
        texts: further files, as texts by their paths.

    Raises:
        InputError: they are larger (it names the largest files), or one that is needed does not go along.
    """
    files: dict[Path, Path] = {}
    if working_dir is not None:
        if working_dir.resolve() == Path.home().resolve():
            raise InputError(f"--working-dir {working_dir}: is your home; submit from a folder of the job's own")
        files = {path: working_dir / path for path in _files(working_dir, _of_git(working_dir))}
        for path in needed:
            if path not in files:
                raise InputError(
                    f"{working_dir / path}: would not go along; it is ignored by git, hidden, named like a secret, "
                    "or not there"
                )
    sizes = {path: source.stat().st_size for path, source in files.items()}
    packages = (Path(concord.__file__).parent, jobs_folder())
    own = {Path(package.name) / path: package / path for package in packages for path in _files(package)}
    size = sum(sizes.values()) + sum(source.stat().st_size for source in own.values())
    if size > limit * _MIB:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
        named = ", ".join(f"{path} ({sizes[path] / _MIB:.1f} MiB)" for path in largest)
        raise InputError(
            f"--working-dir {working_dir}: {size / _MIB:.1f} MiB to send, --size-limit is {limit:g}; the largest are "
            f"{named}; what .gitignore names stays here"
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
        yield Package(
            [Path(name, "modules", package.name) for package in packages], work if work.exists() else None, size
        )


def inside(file: Path, working_dir: Path) -> Path:
    """Where a file lies in the working directory (InputError if it lies elsewhere)."""
    try:
        return file.resolve().relative_to(working_dir.resolve())
    except ValueError:
        raise InputError(
            f"{file}: lies outside the working directory {working_dir.resolve()}, which is what is sent; "
            "give --working-dir, or submit from its folder"
        ) from None


def _files(folder: Path, found: list[Path] | None = None) -> list[Path]:
    """The files that go along, of these or of all in the folder; relative to it, in order."""
    if found is None:
        found = []
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS and name[0] != "."]
            found += [(Path(place) / name).relative_to(folder) for name in names]
    root = folder.resolve()
    return sorted(path for path in found if _goes_along(path) and _leads_to_one(folder / path, root))


def _goes_along(path: Path) -> bool:
    """By its name, relative to the folder."""
    return (
        not _LEFT_OUT_FOLDERS & set(path.parts[:-1])
        and not any(part.startswith(".") for part in path.parts)
        and not path.name.endswith(_LEFT_OUT_ENDINGS)
        and not is_secret_file(path)
    )


def _leads_to_one(path: Path, root: Path) -> bool:
    """Whether a link ends, after all links, at a file of the folder that goes along itself."""
    target = path.resolve()
    return target.is_file() and target.is_relative_to(root) and _goes_along(target.relative_to(root))


def _of_git(folder: Path) -> list[Path] | None:
    """What git tracks or would take; None where there is no repository."""
    if not any((each / ".git").exists() for each in (folder.resolve(), *folder.resolve().parents)):
        return None
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise InputError(f"--working-dir {folder}: is of a git repository, and there is no git to ask") from None
    except subprocess.CalledProcessError as error:
        said = " ".join(os.fsdecode(error.stderr).split())
        raise InputError(f"--working-dir {folder}: git does not say what belongs to it ({said})") from error
    return [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
