"""A copy of MLflow's tables for each new SQLite file, since creating them takes a second."""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from concord.tracking.database import create_tables, sqlite_file

_TABLES = "TESTS_TABLES"  # the file to copy; processes inherit its name


@contextlib.contextmanager
def copied_tables(folder: Path | None = None) -> Iterator[None]:
    """Copy the tables in the body, which the first process that needs them makes in the folder.

    Without a folder: those of the process that started this one, if there are any yet.
    """
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            patch.setenv(_TABLES, str(folder / "mlflow.db"))
        patch.setattr("concord.tracking.store.create_tables", _create)
        yield


def _create(uri: str) -> None:
    file, first = sqlite_file(uri), Path(os.environ.get(_TABLES, ""))
    if file.stat().st_size or not first.suffix:
        create_tables(uri)
        return
    with first.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not first.exists():
            made = first.with_suffix(".made")
            create_tables(f"sqlite:///{made}")
            made.replace(first)
    with contextlib.closing(sqlite3.connect(first)) as source, contextlib.closing(sqlite3.connect(file)) as copy:
        source.backup(copy)
