#!/usr/bin/env python3
"""Backs up the databases and the artifacts of an MLflow server into a folder, and restores them where nothing is yet.

    backup.py backup FOLDER --store sqlite:////srv/mlflow/mlflow.db --artifacts /srv/mlflow/artifacts
    backup.py restore FOLDER --store postgresql://mlflow@db/mlflow --artifacts /srv/mlflow/artifacts

The server may run during a backup: the databases come first, each as it is at one moment, and files that are added
later do no harm. A restore wants an empty database of the same kind and no artifacts; it changes nothing else. FOLDER
appears when the backup is complete.
"""

import argparse
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

_DATABASES, _ARTIFACTS = "databases", "artifacts"


class UsageError(Exception):
    """The request is invalid."""


def backup(folder: Path, stores: Sequence[str], artifacts: Path) -> None:
    """Write a backup of these databases and of a folder of artifacts."""
    if folder.exists():
        raise UsageError(f"{folder}: exists; give a new folder")
    if not artifacts.is_dir():
        raise UsageError(f"--artifacts {artifacts}: there is no such folder")
    draft = folder.with_name(f"{folder.name}.new")  # of a backup that was interrupted, or of this one
    shutil.rmtree(draft, ignore_errors=True)
    (draft / _DATABASES).mkdir(parents=True, mode=0o700)
    draft.chmod(0o700)
    for number, store in enumerate(stores):
        target = draft / _DATABASES / _file(number, store)
        if (file := _sqlite(store)) is not None:
            if not file.exists():
                raise UsageError(f"--store {store}: there is no such file")
            with (
                contextlib.closing(sqlite3.connect(file)) as database,
                contextlib.closing(sqlite3.connect(target)) as copy,
            ):
                database.backup(copy)
        else:
            _postgresql(store, "pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={target}")
    shutil.copytree(artifacts, draft / _ARTIFACTS, symlinks=True)
    draft.rename(folder)


def restore(folder: Path, stores: Sequence[str], artifacts: Path) -> None:
    """Restore a backup into these databases, in the order of the backup, and into a folder of artifacts."""
    if not (folder / _ARTIFACTS).is_dir():
        raise UsageError(f"{folder}: is not a complete backup")
    wanted, kept = (
        [_file(*each) for each in enumerate(stores)],
        sorted(each.name for each in (folder / _DATABASES).iterdir()),
    )
    if wanted != kept:
        raise UsageError(f"--store: the backup has {', '.join(kept)}, and {', '.join(wanted)} were given")
    if artifacts.exists() and any(artifacts.iterdir()):
        raise UsageError(f"--artifacts {artifacts}: has files; give an empty folder")
    for name, store in zip(kept, stores, strict=True):
        source = folder / _DATABASES / name
        if (file := _sqlite(store)) is not None:
            if file.exists():
                raise UsageError(f"--store {store}: exists; give a new file")
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, file)
        else:  # all of it or nothing; a database that is not empty is refused
            _postgresql(store, "pg_restore", "--single-transaction", "--no-owner", "--no-privileges", source=source)
    shutil.copytree(folder / _ARTIFACTS, artifacts, symlinks=True, dirs_exist_ok=True)


def _file(number: int, store: str) -> str:
    return f"{number}.{'postgresql' if _sqlite(store) is None else 'sqlite'}"


def _sqlite(store: str) -> Path | None:
    """The file of an SQLite database; None of a PostgreSQL database."""
    scheme = store.split(":")[0].split("+")[0]
    if scheme == "sqlite" and store.startswith("sqlite:////"):
        return Path(unquote(store.removeprefix("sqlite:///")))
    if scheme == "postgresql":
        return None
    raise UsageError(f"--store {store.split('@')[-1]}: give sqlite:////FILE or postgresql://USER@HOST/DATABASE")


def _postgresql(store: str, program: str, *options: str, source: Path | None = None) -> None:
    """Run a program of PostgreSQL on a database; the password is in the environment, hidden from other users."""
    parts = urlsplit(store)
    secret = {} if parts.password is None else {"PGPASSWORD": unquote(parts.password)}
    place = parts.netloc if parts.password is None else f"{parts.username}@{parts.netloc.rpartition('@')[2]}"
    address = parts._replace(scheme="postgresql", netloc=place).geturl()
    command = [program, *options, f"--dbname={address}", *([] if source is None else [str(source)])]
    done = subprocess.run(command, env=os.environ | secret, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{program}: {done.stderr.strip() or f'exit status {done.returncode}'}")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["backup", "restore"])
    parser.add_argument("folder", type=Path, help="of the backup")
    parser.add_argument("--store", action="append", required=True, help="a database; may be given several times")
    parser.add_argument("--artifacts", type=Path, required=True, help="the server's folder of artifacts")
    options = parser.parse_args()
    try:
        {"backup": backup, "restore": restore}[options.command](options.folder, options.store, options.artifacts)
    except (UsageError, RuntimeError, OSError, sqlite3.Error) as error:
        print(f"backup.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
