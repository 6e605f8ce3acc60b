"""The package of a submission: this version of Concord, and the user's files.

The files are chosen and copied here, not by Ray's ``excludes``: Ray would also send what a link names outside of the
folder or under another name (``notes.txt`` → ``.env``), and files that a ``.gitignore`` above the folder ignores.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import concord
from concord.errors import InputError
from concord.job_files import jobs_folder
from concord.logs import info
from concord.redaction import is_secret_file

# Names of files that are useless on the cluster or private; hidden files are left out as well.
_LEFT_OUT_FOLDERS = {
    "venv", "node_modules", "__pycache__", "concord-runs", "mlruns", "mlartifacts",
}  # fmt: skip
_LEFT_OUT_ENDINGS = (".pyc", ".pyo", ".tmp", ".swp")
_MIB = 1 << 20
MOST_FILES = 10_000
"""Files that are sent at most by default: each node unpacks them, one after the other."""
_TOLD_FROM = 1_000


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
    working_dir: Path | None,
    limit: float,
    needed: Sequence[Path] = (),
    texts: Mapping[Path, str] | None = None,
    most_files: int = MOST_FILES,
) -> Iterator[Package]:
    """Copy the files to send into a temporary folder, while the body runs.

    With git, tracked files and files that are not ignored are sent, also of repositories inside the folder; without
    git, all files that a ``.gitignore`` of the folder does not name. Hidden files, files outside, environments, caches,
    results and files named like secrets are left out. A link is sent as its target if the target is sent. The files
    ``needed``, relative to the folder, must be among the sent files; ``texts`` are further files by path. ``limit`` is
    in MiB.
    """
    files: dict[Path, Path] = {}
    if working_dir is not None:
        if working_dir.resolve() == Path.home().resolve():
            raise InputError(f"--working-dir {working_dir}: is your home; submit from a folder of the job alone")
        files = {path: working_dir / path for path in _files(working_dir, _chosen_by_git(working_dir))}
        for path in needed:
            if path not in files:
                raise InputError(
                    f"{working_dir / path}: would not be sent: it is ignored by git, hidden, named like a secret, "
                    "or missing"
                )
        for path in files:
            _check_name(working_dir, path)
    if len(files) > most_files:
        folders = Counter(path.parts[0] if len(path.parts) > 1 else "." for path in files).most_common(3)
        named = ", ".join(f"{folder} ({count:,})" for folder, count in folders)
        raise InputError(
            f"--working-dir {working_dir}: {len(files):,} files exceed --file-limit {most_files}; most are in {named}; "
            "list what to leave out in .gitignore, or pack data into one file"
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
    if len(files) > _TOLD_FROM:
        info(f"packing {len(files):,} files of {working_dir} ({sum(sizes.values()) / _MIB:.1f} MiB)")
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


def _check_name(folder: Path, path: Path) -> None:
    """Refuse a name that Ray's packages lose."""
    name = str(path)
    try:
        name.encode()
        wrong = "has a backslash" if "\\" in name else None
    except UnicodeEncodeError:
        name, wrong = os.fsencode(name).decode(errors="backslashreplace"), "is not UTF-8"
    if wrong:
        raise InputError(
            f"--working-dir {folder}: the name of {name} {wrong}; rename the file, or list it in .gitignore"
        )


def _files(folder: Path, found: list[Path] | None = None) -> list[Path]:
    """The files to send, of these or of the whole folder; sorted paths relative to the folder."""
    if found is None:
        found = []
        for place, folders, names in os.walk(folder, onerror=_refuse):
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


def _refuse(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _chosen_by_git(folder: Path) -> list[Path] | None:
    """The files that git tracks or would add; None without a repository or a .gitignore."""
    if any((each / ".git").exists() for each in (folder.resolve(), *folder.resolve().parents)):
        return _listed_by_git(folder)
    if not (folder / ".gitignore").is_file():
        return None
    with tempfile.TemporaryDirectory(prefix="concord-git-") as name:  # for git to read .gitignore
        _git(folder, ["init", "-q", name])
        return _listed_by_git(folder, ["--git-dir", str(Path(name, ".git")), "--work-tree", str(folder.resolve())])


def _listed_by_git(folder: Path, repository: Sequence[str] = ()) -> list[Path]:
    words = [*repository, "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = list[Path]()
    for name in _git(folder, words).split(b"\0"):
        path = Path(os.fsdecode(name))
        if name and (folder / path / ".git").exists():  # a repository of its own, or a submodule
            found += [path / each for each in _listed_by_git(folder / path)]
        elif name:
            found.append(path)
    return found


def _git(folder: Path, words: Sequence[str]) -> bytes:
    """The output of git (InputError if it fails, or cannot read a folder)."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        raise InputError(f"--working-dir {folder}: is in a git repository, or has a .gitignore; install git") from None
    reason = " ".join(os.fsdecode(done.stderr).split())
    if done.returncode or "could not open directory" in reason:
        raise InputError(f"--working-dir {folder}: git cannot list its files ({reason})")
    return done.stdout
