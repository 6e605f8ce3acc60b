"""The lock of a run, its state after every kind of end, and refusals before any file is touched."""

import contextlib
import getpass
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import ray
from forked import Command, start_server
from ports import free_port
from recorded import described, report_of
from test_run import JOB_FILE, OPTIONS, command, recorded_checkpoints, start
from torch import nn
from tracked import lose_run, tracked_runs
from waiting import wait_for
from web_server import serving

from concord.errors import InputError, RunFailedError, StoppedError
from concord.execution import lifecycle
from concord.execution.failures import end_at_sigterm, sigterm_as_interrupt
from concord.execution.lifecycle import ActiveRun, open_run, require_own, reserved_run
from concord.execution.session import check_cluster, require_cluster
from concord.execution.spec import RunSpec
from concord.record import EVENTS, RECORD, folder_of
from concord.storage import LOCK
from concord.tracking import Store
from concord.tracking.store import TrackedRun
from concord.training import load_job
from concord.training.options import RunConfig

pytestmark = pytest.mark.usefixtures("without_figures")

JOB = "shared-rule"
FILE = load_job(JOB_FILE)


def spec(output: Path, name: str | None = "a", **options: Any) -> RunSpec:
    """A run of the job with these options."""
    return RunSpec.of(FILE, FILE.job.config.with_options(output=output, name=name, **options).resolve(), None)


@contextlib.contextmanager
def opened(asked: RunSpec, info: Callable[[str], None] = lambda _: None) -> Iterator[ActiveRun]:
    """The run, new or resumed."""
    with reserved_run(asked) as reserved, open_run(reserved, asked.record(reserved.store), info) as run:
        yield run


def train(output: Path, *steps: Callable[[], object], **options: Any) -> ActiveRun:
    """A run, new or resumed, whose training is these steps."""
    with opened(spec(output, **options)) as run:
        for step in steps:
            step()
    return run


def fails(error: type[Exception]) -> Callable[[], object]:
    def fail() -> None:
        raise error("for a test")

    return fail


def tracked(output: Path, uri: str | None = None) -> dict[str, TrackedRun]:
    return {run.name: run for run in tracked_runs(Store.open(output, uri), JOB, finished_only=False)}


def failed_run(output: Path) -> None:
    """A run that ended by a failure, before it had a checkpoint."""
    with pytest.raises(RunFailedError, match="for a test"):
        train(output, fails(RunFailedError))


@contextlib.contextmanager
def elsewhere(output: Path, name: str, how: str) -> Iterator[BaseProcess]:
    """Another process that has a run."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_reserve, args=(theirs, output, name, how))
    process.start()
    try:
        assert ours.recv() == "reserved"
        yield process
    finally:
        process.kill()
        process.join()


def _reserve(said: Connection, output: Path, name: str, how: str) -> None:
    with reserved_run(spec(output, name, resume=how == "resume")):
        said.send("reserved")
        said.recv()


# --- one process has a run


def test_a_run_is_one_process_s_until_it_dies(output: Path) -> None:
    failed_run(output)
    with elsewhere(output, "a", "resume") as other:
        who = rf"{getpass.getuser()} on {socket.gethostname()} since [\d: -]+ UTC"
        with pytest.raises(
            InputError, match=rf"^--name a: another process is using this run: {who}; wait for its end, or"
        ):
            train(output, resume=True)
        assert tracked(output)["a"].status == "FAILED"
        other.kill()
        other.join()
        status: list[str] = []
        assert train(output, lambda: status.append(tracked(output)["a"].status), resume=True).resumed
        assert status == ["RUNNING"]


def test_new_runs_of_one_moment_get_names_of_their_own(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "new_names", lambda *_: iter(["now", *(f"now-{number}" for number in range(2, 5))]))
    everybody = threading.Barrier(4)
    Store.open(output)

    def reserve(_: int) -> str:
        with reserved_run(spec(output, None)) as reserved:
            everybody.wait(60)
            return reserved.name

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(reserve, range(4))) == ["now", "now-2", "now-3", "now-4"]
    assert not (output / "runs").exists()


def test_a_name_of_a_process_killed_before_its_record_can_be_used(output: Path) -> None:
    with elsewhere(output, "a", "new") as other:
        with pytest.raises(InputError, match="another process is using this run"):
            train(output)
        other.kill()
        other.join()
    assert [path.name for path in (output / "runs" / "a").iterdir()] == [LOCK]
    run = train(output)
    assert not run.resumed
    assert json.loads((output / "runs" / "a" / RECORD).read_text())["run_id"] == run.run.run_id


def test_a_folder_that_is_no_run_is_not_taken_for_one(output: Path) -> None:
    (output / "runs" / "a").mkdir(parents=True)
    (output / "runs" / "a" / "notes").write_text("mine")
    with pytest.raises(InputError, match=r"^--name a: .*/runs/a exists and is not a run; give another name$"):
        train(output)
    assert (output / "runs" / "a" / "notes").read_text() == "mine"


def _record(**more: Any) -> str:
    return json.dumps({"version": 2, "kind": "run", **described(**more)})


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"notes": "mine"}, "exists and is not a run"),
        ({RECORD: _record()}, "is a run of its own"),
        ({RECORD: _record(group="another")}, "is a run of its own"),
        ({RECORD: _record(group="s"), "notes": "mine"}, None),
        ({EVENTS: "", "checkpoints": "", LOCK: ""}, None),  # the record was lost in a power failure
        ({RECORD: ""}, None),
        ({RECORD: "\0" * 200}, None),
        ({RECORD: _record(group="s")[1:]}, None),
        ({RECORD: _record(group="s", key=3)}, None),
        ({}, None),
    ],
)
def test_a_group_takes_a_folder_only_of_its_own_runs(output: Path, files: dict[str, str], problem: str | None) -> None:
    folder = folder_of(output, "s-trial-0")
    folder.path.mkdir(parents=True)
    for name, text in files.items():
        (folder.path / name).write_text(text)
    if problem is None:
        require_own(folder, "s")
    else:
        with pytest.raises(InputError, match=rf"^--name s: .*/runs/s-trial-0 {problem}; give another name$"):
            require_own(folder, "s")


@pytest.mark.parametrize("text", [_record()[:-9], _record(key=3), _record(group="another", config=[]), "{"])
def test_a_group_leaves_a_damaged_run_that_is_not_its_own(output: Path, text: str) -> None:
    folder = folder_of(output, "s-trial-0")
    folder.path.mkdir(parents=True)
    (folder.path / RECORD).write_text(text)
    with pytest.raises(InputError, match=r"record\.json"):
        require_own(folder, "s")
    assert (folder.path / RECORD).read_text() == text


# --- what becomes of a run


def test_wrong_input_leaves_no_new_run_and_earlier_runs_untouched(output: Path) -> None:
    with pytest.raises(InputError, match="for a test"):
        train(output, fails(InputError), name="new")
    assert not (output / "runs").exists()
    assert tracked(output) == {}
    failed_run(output)
    for _ in range(2):
        with pytest.raises(InputError, match="for a test"):
            train(output, fails(InputError), resume=True)
    assert (output / "runs" / "a" / RECORD).exists()
    assert tracked(output)["a"].status == "FAILED"


@pytest.mark.parametrize(("gone", "error"), [("runs/a", InputError), (".", ArithmeticError)])
def test_a_run_whose_folder_goes_away_says_so_and_removes_nothing(
    output: Path, gone: str, error: type[Exception]
) -> None:
    uri = f"sqlite:///{output.parent / 'elsewhere.db'}"
    folder = output / "runs" / "a"

    def go_away() -> None:
        shutil.rmtree(output / gone)
        folder.mkdir(parents=True)
        (folder / EVENTS).write_text("of a worker that writes on\n")

    with pytest.raises(RunFailedError) as said:
        train(output, go_away, fails(error), tracking_uri=uri)
    assert str(said.value) == f"{folder}: was removed while the run was at work"
    assert (folder / EVENTS).exists()
    assert tracked(output, uri)["a"].status == "FAILED"


def test_a_resumed_run_whose_store_was_lost_is_tracked_from_its_first_step_again(output: Path) -> None:
    for store, steps in (("first", (1, 2)), ("second", (3,))):
        asked = replace(spec(output, resume=store == "second"), artifacts={"data.json": [1]})
        lines: list[str] = []
        with opened(asked, lines.append) as run:
            for step in steps:
                run.run.append("metrics", step=step, metrics={"loss": float(step)})
        if store == "first":
            lost = str(run.run.run_id)
            lose_run(output / "mlflow.db", lost)
    assert lines == [f"tracking at sqlite:///{output}/mlflow.db has lost run {lost}; a new run takes the whole record"]
    tracked_run = tracked(output)["a"]
    run_id = tracked_run.run_id
    assert (tracked_run.status, run_id) == ("FINISHED", run.run.run_id) != ("FINISHED", lost)
    client = run.store.client
    assert [point.value for point in client.get_metric_history(run_id, "loss")] == [1.0, 2.0, 3.0]
    assert {each.path for each in client.list_artifacts(run_id)} == {"config.json", "data.json"}
    assert json.loads((output / "runs" / "a" / RECORD).read_text())["run_id"] == run.run.run_id


@pytest.mark.parametrize("experiment", [False, True])
def test_a_resumed_run_that_was_deleted_in_mlflow_is_restored(output: Path, experiment: bool) -> None:
    with opened(spec(output)) as run:
        run.run.append("metrics", step=1, metrics={"loss": 1.0})
    run_id, client = str(run.run.run_id), run.store.client
    if experiment:
        client.delete_experiment(client.get_run(run_id).info.experiment_id)
    else:
        client.delete_run(run_id)
    lines: list[str] = []
    with opened(spec(output, resume=True), lines.append) as run:
        run.run.append("metrics", step=2, metrics={"loss": 2.0})
    assert lines == [f"tracking at {run.store.uri} has deleted run {run_id}; it is restored"]
    assert tracked(output)["a"].run_id == run_id
    assert [point.value for point in client.get_metric_history(run_id, "loss")] == [1.0, 2.0]


def test_a_run_of_a_moved_folder_is_resumed_there(output: Path) -> None:
    asked = replace(spec(output), artifacts={"data.json": [1]})
    with opened(asked) as run:
        run.run.append("metrics", step=1, metrics={"loss": 1.0})
    moved = output.with_name("moved")
    output.rename(moved)
    with opened(spec(moved, resume=True)) as again:
        again.run.append("metrics", step=2, metrics={"loss": 2.0})
    assert again.run.run_id == run.run.run_id
    assert again.run.record["store"] == f"sqlite:///{moved}/mlflow.db"
    assert again.store.read_json(str(again.run.run_id), "data.json") == [1]
    assert not output.exists()
    with pytest.raises(InputError, match=r"--tracking-uri .*other.db: the run a was started with .*moved/mlflow.db"):
        train(moved, resume=True, tracking_uri=f"sqlite:///{moved}/other.db")


def test_a_run_whose_store_and_folder_vanish_still_says_what_happened(output: Path) -> None:
    with pytest.raises(RunFailedError, match=r"was removed while the run was at work$"):
        train(output, lambda: shutil.rmtree(output), fails(InputError))


def told_to_end() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # by an impatient user


@pytest.mark.parametrize("ignored", [False, True], ids=["", "where-ctrl-c-is-ignored"])
def test_sigterm_is_ctrl_c_once(output: Path, ignored: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        with pytest.raises(StoppedError, match=r"^stopped before the first checkpoint; --name a --resume begins"):
            train(output, told_to_end)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert tracked(output)["a"].status == "KILLED"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_weak_references_callback_ends_a_run(output: Path, number: signal.Signals) -> None:
    """As in SQLAlchemy's, while a model is registered: Python drops an exception there."""
    dropped: list[bool] = []

    def register() -> None:
        model = nn.Linear(1, 1)
        weakref.finalize(model, os.kill, os.getpid(), number)
        del model
        dropped.append(True)
        wait_for(lambda: False)

    with pytest.raises(StoppedError):
        train(output, register)
    assert dropped
    assert tracked(output)["a"].status == "KILLED"


def test_a_failure_that_follows_from_sigterm_is_a_stop(output: Path) -> None:
    """As when the workers get the signal too, and die before this process is told."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with pytest.raises(StoppedError):
            train(output, told_to_end, fails(RunFailedError))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
    assert tracked(output)["a"].status == "KILLED"


def test_in_other_threads_sigterm_is_left_alone() -> None:
    def handler() -> Any:
        with sigterm_as_interrupt() as termination:
            assert not termination.requested
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(handler).result() is signal.getsignal(signal.SIGTERM)


def test_a_ray_worker_ends_at_sigterm_in_a_weak_references_callback(ray_cluster: None) -> None:
    class Worker:
        def end(self) -> None:
            end_at_sigterm()
            model = nn.Linear(1, 1)
            weakref.finalize(model, os.kill, os.getpid(), signal.SIGTERM)
            del model

    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(ray.remote(num_cpus=0)(Worker).remote().end.remote(), timeout=60)


# --- what is refused before anything is touched


def failed_run_of_the_job(output: Path) -> None:
    with pytest.raises(RunFailedError):
        train(output, fails(RunFailedError), **OPTIONS)


def test_too_few_cpus_for_a_resumed_run_are_refused_without_touching_it(ray_cluster: None, output: Path) -> None:
    failed_run_of_the_job(output)
    before = (output / "runs" / "a" / RECORD).read_bytes()
    with pytest.raises(InputError, match=r"^--min-workers 3: each takes a CPU; the Ray cluster has 2$"):
        start(output, name="a", resume=True, workers=3, min_workers=3)
    assert (output / "runs" / "a" / RECORD).read_bytes() == before
    assert tracked(output)["a"].status == "FAILED"


def test_a_resumed_run_with_a_wrong_address_is_refused_without_touching_it(output: Path) -> None:
    failed_run_of_the_job(output)
    words = command(output, "--name", "a", "--resume", "--address", "nope.invalid:1")
    with Command(*words) as done:
        (line,) = done.communicate()[1].strip().splitlines()
    assert line.startswith("concord: --address nope.invalid:1: no Ray cluster answers there (")
    assert done.returncode == 2
    assert (output / "runs" / "a" / RECORD).exists()
    assert tracked(output)["a"].status == "FAILED"


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("nope", "the address has no port"),
        ("nope:port", "Port could not be cast"),
        ("nope.invalid:6379", r"no Ray cluster answers there \(.*not known\)"),
        ("http://127.0.0.1:8265", "a Ray cluster has no http address"),
        ("ray://nope.invalid:10001", r"no Ray cluster answers there \(.*not known\)"),
        (free_port, r"no Ray cluster answers there \(Connection refused\)"),
        (silent, r"no Ray cluster answers there \(no answer in time\)"),
        (lambda: serving(host="0.0.0.0"), "another service answers there, not a Ray cluster"),
    ],
)
def test_an_address_without_a_ray_cluster_is_refused(monkeypatch: pytest.MonkeyPatch, address: Any, line: str) -> None:
    monkeypatch.setattr("concord.execution.session.ANSWER_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        if callable(address):
            port = address()
            address = f"127.0.0.1:{port if isinstance(port, int) else stack.enter_context(port)}"
        with pytest.raises(InputError, match=rf"^--address {address}: {line}.*; give HOST:PORT of a Ray head"):
            require_cluster(address, "--address")


def test_the_address_of_a_ray_cluster_is_taken(ray_cluster: None) -> None:
    import ray

    require_cluster(ray.get_runtime_context().gcs_address, "--address")


def test_an_address_of_the_environment_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nope")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(InputError, match=r"^--address \(from RAY_ADDRESS\) nope: the address has no port"):
        check_cluster(RunConfig())
    check_cluster(RunConfig().with_options(address="local"))


# --- a whole run


@pytest.mark.parametrize(
    ("workers", "stop"),
    [
        (1, signal.SIGTERM),
        pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_told_to_end_is_killed_in_mlflow_and_goes_on_later(
    ray_cluster: None, output: Path, workers: int, stop: signal.Signals
) -> None:
    """Told as by a terminal, or by Slurm, which tell its workers as well, where those are of this machine."""
    import ray

    address = ("--address", ray.get_runtime_context().gcs_address) if workers > 1 else ()
    words = command(output, "--name", "a", "--pause", "0.1", "--workers", str(workers), *address)
    with Command(*words) as process:
        wait_for(lambda: process.poll() is not None or recorded_checkpoints(output / "runs" / "a"), 240)
        os.killpg(process.pid, stop)
        said, errors = process.communicate(timeout=120)
    line = "stopped; continue with --name a --resume"
    assert json.loads(said) == {"error": line}
    assert errors.splitlines()[-1] == f"concord: {line}"
    assert "Traceback" not in errors
    assert process.returncode == 1
    assert tracked(output)["a"].status == "KILLED"
    assert report_of(start(output, name="a", resume=True, pause=0.1, workers=1))["model"] == f"models:/{JOB}/1"
