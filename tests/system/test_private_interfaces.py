"""The private parts of Ray, MLflow and tyro that Concord uses: all of them, with a test each.

A new version of one of these libraries may change them. The others of its parts are public, so that these tests tell
whether the version can be used.
"""

import ast
import inspect
import logging
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# What is private, and where it is used.
PRIVATE = {
    "mlflow.store.db.utils": "tracking/database.py",
    "mlflow.utils.credentials": "tracking/client.py",
    "mlflow.utils.rest_utils": "tracking/client.py",
    "ray._private.services": "execution/session.py",
    "ray._private.worker": "execution/local_ray.py",
    "ray.train.v2._internal.constants": "execution/ray_train.py",
    "ray.train.v2._internal.execution.callback": "execution/ray_train.py",
    "tyro._errors": "cli/parsing.py",
}


def _used(source: str) -> Iterator[str]:
    """The dotted names of the libraries' modules in imports and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_the_list_is_complete() -> None:
    private = re.compile(r"(ray|mlflow|tyro)\.(.*\b_[a-z]|(store|utils)\.).*")
    found = {
        (name, path.relative_to(ROOT / "platform" / "concord").as_posix())
        for path in (ROOT / "platform" / "concord").rglob("*.py")
        for name in _used(path.read_text(encoding="utf-8"))
        if private.fullmatch(name)
    }
    unlisted = [
        (name, path)
        for name, path in found
        if not any(name.startswith(each) or each.startswith(name) for each in PRIVATE)
    ]
    assert not unlisted
    assert {each: {path for name, path in found if name.startswith(each)} for each in PRIVATE} == {
        name: {path} for name, path in PRIVATE.items()
    }
    for path in (ROOT / "jobs").rglob("*.py"):
        assert not [name for name in _used(path.read_text(encoding="utf-8")) if private.fullmatch(name)]


def _takes(function: Any, *arguments: Any, **options: Any) -> None:
    inspect.signature(function).bind(*arguments, **options)


def test_mlflow_creates_its_tables_for_an_engine() -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine("sqlite://")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    import_module("mlflow.store.db.utils")._initialize_tables(engine)
    assert {"experiments", "runs", "alembic_version"} <= set(sqlalchemy.inspect(engine).get_table_names())


def test_mlflow_finds_the_credentials_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a token")
    credentials = import_module("mlflow.utils.credentials").get_default_host_creds("http://127.0.0.1:1")
    assert (credentials.host, credentials.token) == ("http://127.0.0.1:1", "a token")


def test_mlflow_sends_one_request_without_retries() -> None:
    rest = import_module("mlflow.utils.rest_utils")
    _takes(rest.http_request, None, "/", "POST", max_retries=0, timeout=(1, 1), raise_on_status=False, json={})
    _takes(rest.verify_rest_response, None, "/")


def test_ray_finds_the_address_of_a_cluster() -> None:
    services = import_module("ray._private.services")
    assert services.canonicalize_bootstrap_address("10.0.0.1:6379") == "10.0.0.1:6379"


def test_ray_has_a_node_whose_processes_can_be_listed_and_ended() -> None:
    assert hasattr(import_module("ray._private.worker"), "_global_node")
    node = import_module("ray._private.node").Node
    for method in ("any_processes_alive", "live_processes", "destroy_external_storage"):
        _takes(getattr(node, method), None)
    _takes(node.kill_all_processes, None, check_alive=False)


def test_ray_prints_the_lines_and_messages_of_its_processes_in_one_function() -> None:
    worker = import_module("ray._private.worker")
    assert next(iter(inspect.signature(worker.print_worker_logs).parameters)) == "data"
    assert "print_worker_logs(batch, sink, ignore_prefix)" in inspect.getsource(worker.print_to_stdstream)
    assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages)
    assert "functools.partial(print_to_stdstream, " in inspect.getsource(worker.connect)
    assert hasattr(import_module("ray._private.node").Node, "get_logs_dir_path")


def test_ray_train_passes_listed_variables_to_its_actors() -> None:
    assert isinstance(import_module("ray.train.v2._internal.constants").ENV_VARS_TO_PROPAGATE, set)


def test_tyro_gives_errors_of_parsing_to_a_function() -> None:
    errors = import_module("tyro._errors")
    with errors.on_parse_error(lambda *_: None):
        pass
