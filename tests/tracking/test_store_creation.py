"""Creation of a store's SQLite file: repeated after a kill; a file with runs is not touched, but when it was moved."""

import contextlib
import shlex
import shutil
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy
import torch
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from forked import run_program
from tracked import tracked_runs

from concord.errors import InputError
from concord.tracking import Store, load_program, log_model, register, show

# Creates stores in forked processes: one as a whole; two killed after a part of that time; one killed by the system as
# its file grows over a limit, while the tables are written; and two by MLflow alone, killed when the file has a size.
KILLED = """
import os, resource, signal, time
from pathlib import Path
from concord.tracking import Store
from concord.tracking.client import connect, import_mlflow
import_mlflow()
import mlflow.store.tracking.sqlalchemy_store

os.environ.pop("MLFLOW_TRACKING_URI", None)

def in_place(folder):
    connect(f"sqlite:///{folder}/mlflow.db").search_experiments()

def killed(name, until, create=Store.open, limit=resource.RLIM_INFINITY):
    folder = Path(name)
    folder.mkdir()
    start = time.monotonic()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        create(folder)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if until(time.monotonic() - start, folder / "mlflow.db"):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.001)
    return time.monotonic() - start

whole = killed("whole", lambda *_: False)
killed("early", lambda seconds, _: seconds > 0.3 * whole)
killed("late", lambda seconds, _: seconds > 0.7 * whole)
killed("writing", lambda *_: False, limit=300_000)
for size in (50_000, 400_000):
    killed(f"in place {size}", lambda _, file: file.exists() and file.stat().st_size > size, in_place)
"""


def number_of_tables(file: Path) -> int:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return int(connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0])


@pytest.mark.slow
def test_a_store_whose_creation_was_killed_is_completed(tmp_path: Path) -> None:
    run_program(KILLED, tmp_path)
    folders = [file.parent for file in tmp_path.glob("*/mlflow.db")]
    left = {folder.name: number_of_tables(folder / "mlflow.db") for folder in folders}
    whole = left.pop("whole")
    assert {left["early"], left["late"]} <= {0, whole}, "Concord creates all tables or none"
    assert left["writing"] == 0
    assert 0 < left["in place 50000"] < left["in place 400000"] < whole
    for folder in folders:
        store = Store.open(folder)
        store.finish_run(store.start_run("after", "a run", {"lr": 0.1}, {}))
        assert [run.name for run in tracked_runs(store, "after")] == ["a run"]


def test_a_store_of_an_older_mlflow_is_refused_and_can_be_upgraded(tmp_path: Path) -> None:
    import mlflow
    from mlflow.store.tracking.dbmodels.initial_models import Base

    file = tmp_path / "a folder" / "mlflow.db"
    file.parent.mkdir()
    uri = f"sqlite:///{file}"
    engine = sqlalchemy.create_engine(uri)
    Base.metadata.create_all(engine)
    settings = Config()
    settings.set_main_option("script_location", str(Path(mlflow.__file__).parent / "store" / "db_migrations"))
    settings.set_main_option("sqlalchemy.url", uri)
    older = [each.revision for each in ScriptDirectory.from_config(settings).walk_revisions()][10]
    command.upgrade(settings, older)
    with engine.begin() as connection:
        rows = "experiments (experiment_id, name, lifecycle_stage) VALUES (7, 'an experiment', 'active')"
        connection.exec_driver_sql(f"INSERT INTO {rows}")
    engine.dispose()
    before = file.read_bytes()
    with pytest.raises(InputError) as refused:
        Store.open(file.parent)
    line = str(refused.value)
    assert line.startswith(f"the MLflow store {uri} has the schema {older}, and MLflow {mlflow.__version__} needs ")
    assert line.endswith(f": copy the database, then run: mlflow db upgrade '{uri}'")
    assert "\n" not in line
    assert file.read_bytes() == before
    program, *words = shlex.split(line.partition("run: ")[2])
    assert program == "mlflow"
    run_program(f"from mlflow.cli import cli\ncli({words!r}, standalone_mode=False)", tmp_path)
    assert Store.open(file.parent).client.get_experiment("7").name == "an experiment"


def test_an_sqlite_file_of_another_program_is_refused_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript("CREATE TABLE cities (name); INSERT INTO cities VALUES ('Graz')")
    before = file.read_bytes()
    with pytest.raises(InputError, match="it holds tables of another program; give http"):
        Store.open(tmp_path, f"sqlite:///{file}")
    assert file.read_bytes() == before


def kept_model(folder: Path) -> str:
    """The id of a run whose file and champion are in the store of a folder."""
    store = Store.open(folder)
    run_id = store.start_run("moved", "a run", {}, {})
    store.log_text(run_id, "[1]", "lists/a.json")
    uri = log_model(store, run_id, torch.nn.Linear(2, 1), torch.zeros(2, 2))
    register(store, uri, run_id, "moved", {"a": 1.0}, "a", "max")
    return run_id


def require_kept(folder: Path, run_id: str) -> None:
    """File and champion are there, and a new run keeps its files there."""
    store = Store.open(folder)
    assert store.read_json(run_id, "lists/a.json") == [1]
    load_program(store, show(store, "moved"))
    again = store.start_run("moved", "another", {}, {})
    store.log_text(again, "[2]", "a.json")
    assert (folder / "artifacts" / again / "artifacts" / "a.json").read_text() == "[2]"


NAMES = ["a?b", "a#b", "a%20b", "a%3Fb", "a b", "ü", "a&b=c", "a:b", "a@b", "a;b", "~a", "a'b"]


@pytest.mark.parametrize(
    "name", [*NAMES[::3], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in NAMES[::3])]
)
def test_the_store_lies_in_its_folder_whatever_the_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "runs"
    store = Store.open(folder)
    run_id = store.start_run("tests", "a run", {}, {})
    store.log_text(run_id, "[1]", "lists/a.json")
    assert (folder / "mlflow.db").exists()
    assert (folder / "artifacts" / run_id / "artifacts" / "lists" / "a.json").exists()
    assert store.read_json(run_id, "lists/a.json") == [1]
    assert Store.open(tmp_path / "other", store.uri).uri == store.uri
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("a", "b", marks=pytest.mark.slow),
        ("a?b", "c d/e"),
        pytest.param("ü", "a%20b", marks=pytest.mark.slow),
    ],
)
def test_a_moved_folder_has_its_files_and_models(tmp_path: Path, before: str, after: str) -> None:
    run_id = kept_model(tmp_path / before)
    (tmp_path / after).parent.mkdir(exist_ok=True)
    (tmp_path / before).rename(tmp_path / after)
    require_kept(tmp_path / after, run_id)
    assert not (tmp_path / before).exists()


def test_a_copied_folder_has_its_own_files_and_a_linked_one_the_same(tmp_path: Path) -> None:
    run_id = kept_model(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "link").symlink_to("a")
    place = Store.open(tmp_path / "link").client.get_run(run_id).info.artifact_uri
    assert place.startswith((tmp_path / "a").as_uri())
    require_kept(tmp_path / "copy", run_id)
    require_kept(tmp_path / "a", run_id)


def test_a_database_that_was_moved_without_its_files_keeps_their_place(tmp_path: Path) -> None:
    run_id = kept_model(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "mlflow.db").rename(tmp_path / "b" / "mlflow.db")
    for _ in range(2):
        assert Store.open(tmp_path / "b").read_json(run_id, "lists/a.json") == [1]
