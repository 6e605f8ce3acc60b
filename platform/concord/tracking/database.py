"""Checks the SQL database of a store: it must answer and have the schema of the installed MLflow.

MLflow creates its tables when it opens a database, statement by statement: a killed process leaves a database that
MLflow refuses from then on. It also upgrades an older database in place, without a copy. Here a new or incomplete
SQLite file gets its tables in one transaction, and a database of another schema is refused.
"""

import functools
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit
from urllib.request import url2pathname

from concord.errors import InputError
from concord.redaction import redact
from concord.tracking.client import import_mlflow, one_line

CONNECT_SECONDS = 3.0

# Where MLflow keeps the places of files.
_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
# Tables that have rows in a database without runs.
_FILLED_WITHOUT_RUNS = {"alembic_version", "workspaces"}


def sqlite_uri(file: Path) -> str:
    """The URI of an SQLite file, as SQLAlchemy reads it: ``%`` is an escape there, and ``?`` begins parameters.

    Slashes are then escaped as well, since MLflow creates the folder of the file from the URI without decoding it.
    """
    path = str(file)
    return f"sqlite:///{quote(path, safe='') if set(path) & set('%?') else path}"


def sqlite_file(uri: str) -> Path:
    """Return the absolute path of an SQLite database, after a test of its write lock."""
    from sqlalchemy.engine import make_url

    path = uri.split(":", 1)[-1]
    if path != "//" and not path.startswith("///"):
        raise ValueError("SQLite's path follows three slashes")
    name = make_url(uri).database
    if not name or name == ":memory:":
        raise ValueError("a database in memory cannot be shared with training")
    file = Path(name).absolute()  # a worker has another working directory
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(file, timeout=CONNECT_SECONDS)) as connection:
            connection.execute("BEGIN IMMEDIATE")
    except (OSError, sqlite3.Error) as error:
        if "locked" not in str(error):  # a busy database is usable
            raise ValueError(f"not a writable SQLite file ({one_line(error)})") from None
    return file


def check_database(uri: str) -> None:
    """Connect once (MLflow would retry for two minutes), and refuse a database of another schema."""
    import sqlalchemy

    timeout = {} if uri.startswith("mssql") else {"connect_timeout": int(CONNECT_SECONDS)}
    try:
        engine = sqlalchemy.create_engine(uri, connect_args=timeout)
        with engine.connect() as connection:
            revision = _revision(connection)
        engine.dispose()
    except ModuleNotFoundError as error:
        raise ValueError(f"its driver is not installed ({error})") from None
    except Exception as error:  # each driver has its own errors
        raise ConnectionError(f"no database answers ({one_line(error)})") from None
    if revision is not None and revision != _latest_revision():
        _refuse_schema(uri, revision)


def create_tables(uri: str) -> None:
    """Create MLflow's tables in an SQLite file without tables, or with some but no rows. For one process at a time.

    They are created in memory and written in one transaction: a killed process leaves the file unchanged.
    """
    import sqlalchemy

    import_mlflow()
    from mlflow.store.db.utils import _initialize_tables

    with sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool).connect() as connection:
        if (revision := _revision(connection)) == _latest_revision():
            return
        for table in set(sqlalchemy.inspect(connection).get_table_names()) - _FILLED_WITHOUT_RUNS:
            if connection.exec_driver_sql(f'SELECT 1 FROM "{table}"').first():
                if revision is None:
                    raise ValueError("it holds tables of another program")
                _refuse_schema(uri, revision)
        engine = sqlalchemy.create_engine("sqlite://")
        _initialize_tables(engine)
        made: Any = engine.raw_connection()
        made.backup(connection.connection.driver_connection)


def follow_move(file: Path, artifacts: Path) -> None:
    """Give runs and models that were moved with their SQLite file, or copied, the present place of their files.

    MLflow keeps absolute places. Those of another folder become those of `artifacts`, all or none, if files of its runs
    are in `artifacts` and none only there.
    """
    present = artifacts.as_uri()
    with closing(sqlite3.connect(file)) as connection:
        places = "SELECT DISTINCT artifact_location FROM experiments WHERE artifact_location LIKE 'file:///%/artifacts'"
        for (other,) in connection.execute(places).fetchall():
            earlier = Path(url2pathname(urlsplit(other).path))
            if other == present or (earlier.exists() and earlier.samefile(artifacts)):
                continue
            of_other = (len(other) + 1, f"{other}/")
            ids = connection.execute("SELECT run_uuid FROM runs WHERE substr(artifact_uri, 1, ?) = ?", of_other)
            found = {((artifacts / run_id).exists(), (earlier / run_id).exists()) for (run_id,) in ids}
            if (False, True) in found or not any(here for here, _ in found):
                continue
            with connection:  # one transaction
                for table, column in _PLACES:
                    replaced = f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
                    where = f"WHERE substr({column} || '/', 1, ?) = ?"
                    connection.execute(f"{replaced} {where}", (present, len(other) + 1, *of_other))
            import_mlflow().tracking._tracking_service.utils._artifact_repos_cache.clear()  # in a notebook


def _revision(connection: Any) -> str | None:
    """The schema version of a database."""
    from alembic.migration import MigrationContext

    return MigrationContext.configure(connection).get_current_revision()


@functools.cache
def _latest_revision() -> str | None:
    """The schema version of the installed MLflow."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(Path(import_mlflow().__file__).parent / "store" / "db_migrations")).get_current_head()


def _refuse_schema(uri: str, revision: str) -> NoReturn:
    raise InputError(
        f"the MLflow store {redact(uri)} has the schema {revision}, and MLflow {import_mlflow().__version__} needs "
        f"{_latest_revision()}: copy the database, then run: mlflow db upgrade {shlex.quote(redact(uri))}"
    )
