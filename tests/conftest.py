"""Shared by several test files: one Ray a process for the whole session, and quiet libraries."""

import functools
import gc
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3_server
import torch
import torchvision_operators  # noqa: F401
from command_line import Concord, Said, files
from forked import share_server, start_server
from hypothesis import settings
from made_tables import copied_tables
from mlflow_server import Server
from process_groups import groups
from ray_workers import forked_workers
from recorder import Recorder, recording
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling
from xdist.workermanage import WorkerController

from concord.cli import main
from concord.errors import InputError
from concord.extras import require_extra
from concord.tracking import Store

# Tests use no cluster, tracking server, profile or data of the shell that starts them.
for _variable in ("CONCORD_DATA", "CONCORD_PROFILE", "MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
    os.environ.pop(_variable, None)
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Tests have tiny tensors and many processes, whose threads would wait for each other. Processes inherit this setting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A Ray that starts on this machine enables tokens, and writes one to the home folder if none exists. A process that was
# forked earlier would not know the token, and a second Ray that starts at the same moment would overwrite it.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
torch.set_num_threads(1)
# Tests in the background ignore SIGINT. The processes that they interrupt would inherit this, so restore the handler.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
# MLflow's module for PyTorch imports Lightning where it is there, for autologging, which takes three seconds a process.
sys.modules["pytorch_lightning"] = None  # type: ignore[assignment]
# No deadline for an example: on a busy machine the first example imports, allocates and waits.
settings.register_profile("concord", deadline=None)
settings.load_profile("concord")
# Tests and their processes read the bytecode of earlier ones; each would compile all sources again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
SECONDS = 20.0  # "a few" on a shared machine; starting Ray and training would take longer

# The slowest files and groups, slowest first, so that none starts last when they run in parallel. A group is where its
# first file is.
LONG = (
    "test_study", "test_analyze", "test_submission", "test_local_ray", "test_readme", "test_run", "test_storage",
    "test_tracking", "test_training", "test_interface", "test_ui", "test_notebook", "test_record", "test_own_rule",
    "test_collective", "test_cli", "test_objective_jobs", "test_store_creation", "test_readers", "test_dynamics",
    "test_network_consistency", "test_run_lifecycle", "test_comparison", "test_methods", "test_consistency_job",
    "test_watching", "test_wire_model", "test_exit_watchdog", "test_synthetic", "test_weightings", "test_progress",
    "test_kubernetes", "test_image_domains", "test_distill_tasks", "test_champion", "test_objectives",
)  # fmt: skip
# Fixtures that are expensive to start, with the group of all tests that use them: one process runs a group.
GROUPS = {"ray_cluster": "ray", "process_groups": "processes", "server": "servers"}
# The tests of these folders share a second Ray, in another process: one process with all tests of Ray would end last.
SECOND = ("cli", "execution", "interface", "recipes", "reinforcement", "system")
GROUPED = "concord/groups"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run all tests in parallel; run named tests in this process.

    The number of workers is the number of cores + 1, since tests of runs and clusters mostly wait for processes.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return 1 + max(2, os.cpu_count() or 1) if whole else 0


def pytest_configure_node(node: WorkerController) -> None:
    """Let the processes of the suite share the one that is forked, whose warnings are not for the terminal."""
    terminal = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    node.workerinput["fork_server"] = start_server()
    os.dup2(terminal, 2)
    os.close(terminal)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        share_server(config.workerinput["fork_server"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files; a file's tests stay together and in their order, but for those of a group."""
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))
    if hasattr(config, "workerinput") and hasattr(config, "cache"):
        config.cache.set(GROUPED, {item.nodeid: group for item in items if (group := group_of(item))})


def pytest_unconfigure() -> None:
    """Hide all objects from the collections at the end of the process, which would take seconds."""
    gc.freeze()


def group_of(item: pytest.Item) -> str | None:
    """The group of a test, if it uses what is expensive to start."""
    used = GROUPS.keys() & set(getattr(item, "fixturenames", ()))
    if not used:
        return None
    group = GROUPS[min(used)]
    return f"second {group}" if group == "ray" and item.path.parent.name in SECOND else group


class Scheduling(LoadFileScheduling):
    """Give a process of the suite one file after the other, or all tests of a group."""

    @functools.cached_property
    def groups(self) -> dict[str, str]:
        """The tests with a group, as the processes of the suite collected them."""
        return self.config.cache.get(GROUPED, {}) if hasattr(self.config, "cache") else {}

    def _split_scope(self, nodeid: str) -> str:
        return self.groups.get(nodeid) or super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray on this machine, started once and used by the runs of all tests."""
    from concord.execution.session import ray_session
    from concord.training import TrainConfig

    with forked_workers(tmp_path_factory.mktemp("ray")), ray_session(TrainConfig()):
        yield


@pytest.fixture(scope="session", autouse=True)
def _tables_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    with copied_tables(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base):
        yield


@pytest.fixture(scope="session", autouse=True)
def _commits_read_once() -> Iterator[None]:
    """Ask git once for the commit of a folder, not four times a run."""
    from concord.execution import spec

    git = functools.cache(spec._git)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "_git", lambda folder, *words: git(folder.absolute(), *words))
        yield


@pytest.fixture(scope="session")
def process_groups() -> Iterator[Callable[..., None]]:
    with groups() as run:
        yield run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(tmp_path_factory.mktemp("a store"))


@pytest.fixture
def run_id(store: Store) -> str:
    return store.start_run("tests", "a run", {"lr": 0.1}, {})


@pytest.fixture(scope="session")
def coinrun() -> None:
    """Procgen and RLlib; without the extra, tests that need them are skipped."""
    try:
        require_extra("coinrun", "this test")
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Steps are recorded, as a GPU would capture them."""
    with recording() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _freeze_earlier_objects() -> None:
    """Hide the objects of earlier files from the garbage collector, which would examine all of them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _denormal_numbers() -> Iterator[None]:
    """Restore denormal numbers: training in this process flushes them to zero, and Hypothesis then draws no numbers."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def server(_tables_made_once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running MLflow server; a test that kills it starts it again."""
    server = Server(tmp_path_factory.mktemp("server"))
    Store.open(server.folder, server.database)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def s3() -> Iterator[s3_server.Server]:
    """A running S3 server with a bucket."""
    started = s3_server.Server()
    started.start()
    started.make_bucket()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def without_figures() -> Iterator[None]:
    """For files that look at no figure of a run or study: drawing takes half of a tiny run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("concord.execution.finish._draw", lambda *_: [])
        patch.setattr("concord.studies.results.StudyResult.figures", lambda *_: {})
        yield


@pytest.fixture
def seeded() -> Iterator[None]:
    """Seed PyTorch's generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An empty folder for runs."""
    return tmp_path / "runs"


@pytest.fixture
def concord_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Concord:
    """The command line, in an empty working folder."""
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)

    def call(*words: object) -> Said:
        capsys.readouterr()
        started = time.monotonic()
        try:
            status = main([str(word) for word in words])
        except SystemExit as stop:  # from --help
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Said(status, captured.out, captured.err, time.monotonic() - started)

    return call


@pytest.fixture
def refused(concord_: Concord, tmp_path: Path) -> Callable[..., str]:
    """The one line of a refusal, which is the same with --json and leaves no files."""

    def call(*words: object) -> str:
        before = files(tmp_path)
        plain, as_json = concord_(*words), concord_(*words, "--json")
        assert (plain.status, as_json.status) == (2, 2), plain.err
        assert plain.out == ""
        assert as_json.err == plain.err
        (line,) = plain.err.splitlines()
        assert as_json.json == {"error": line.removeprefix("concord: ")}
        assert line.startswith("concord: ")
        assert max(plain.seconds, as_json.seconds) < SECONDS
        assert files(tmp_path) == before
        return line.removeprefix("concord: ")

    return call
