"""Test processes that are forked from a process with PyTorch imported; importing it in each would take seconds."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from made_tables import copied_tables
from torch.multiprocessing.spawn import start_processes

# Modules that the tests' functions need. The first DDP of a process imports Dynamo.
_IMPORTED = [
    "pytest",
    "torch._dynamo",
    "torchvision_operators",
    "concord.training",
    "transformers.activations",
    "torchjd.aggregation",
    "test_training",
    "test_watching",
    "concord.cli",
    "concord.studies.comparison_plan",
    "imported_once",
]

# A program that begins with these lines sees no imported module of Concord, though its process was forked from one that
# imported them.
WITHOUT_CONCORD = """
import sys
sys.modules |= {name: None for name in ["concord", *sys.modules] if name.partition(".")[0].startswith("concord")}
"""


_SERVER: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]


def start_server() -> str:
    """Start the process that imports once and is then forked; return its address."""
    with pytest.MonkeyPatch.context() as patch:
        # The server has no other path. A process that collects no tests has not that of test_training.
        patch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parent / "training")]))
        multiprocessing.set_forkserver_preload(_IMPORTED)
        _SERVER.ensure_running()
    return str(_SERVER._forkserver_address)


def share_server(address: str) -> None:
    """Fork from the server of another process, which keeps it running; each would take seconds to start."""
    _SERVER._forkserver_address = address
    _SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    _SERVER.ensure_running = multiprocessing.resource_tracker.ensure_running


def run_processes(function: Callable[..., None], number: int, *arguments: Any) -> None:
    """Call a function in this number of processes, with the process's number first; raises the error of a process."""
    start_server()
    start_processes(_with_environment, (dict(os.environ), function, *arguments), number, start_method="forkserver")


def _with_environment(rank: int, environment: dict[str, str], function: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()  # the environment is the one at the server's start
    os.environ.update(environment)
    function(rank, *arguments)


def run_group(function: Callable[..., None], world_size: int, folder: Path, *arguments: Any) -> None:
    """Call a function, with rank and number of processes first, in a gloo group that meets in the folder."""
    run_processes(_member, world_size, function, world_size, folder, *arguments)


def run_program(text: str, folder: Path, **environment: str) -> str:
    """Run the main program in a process in the folder; return its output, or raise its error."""
    (folder / "program.py").write_text(text)
    run_processes(_program, 1, folder, environment)
    return (folder / "printed").read_text()


class Command:
    """``concord`` with these words in a process with its own session; has the interface of ``subprocess.Popen``.

    Standard streams are the terminal, if one is given; otherwise output is kept.
    """

    def __init__(self, *words: object, folder: Path | None = None, terminal: Path | None = None) -> None:
        start_server()
        self._written = tempfile.TemporaryDirectory()
        written = Path(self._written.name)
        streams = {0: terminal, 1: terminal, 2: terminal} if terminal else {1: written / "out", 2: written / "error"}
        given = ([str(word) for word in words], folder or Path.cwd(), dict(os.environ), streams)
        self._process = multiprocessing.get_context("forkserver").Process(target=_command, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Standard output and standard error, after the end of the process."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still at work after {timeout} s"
        out, error = (Path(self._written.name) / name for name in ("out", "error"))
        return out.read_text(), error.read_text()

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def kill(self) -> None:
        self._process.kill()


def _command(words: list[str], folder: Path, environment: dict[str, str], streams: Mapping[int, Path]) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, place in streams.items():
        os.dup2(os.open(place, os.O_RDWR | os.O_CREAT), number)
    from concord.cli import entry

    sys.argv = ["concord", *words]
    with copied_tables():
        entry()


def _program(_: int, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with open("printed", "w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path("program.py", run_name="__main__")


def _member(rank: int, function: Callable[..., None], world_size: int, folder: Path, *arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    function(rank, world_size, *arguments)
    dist.destroy_process_group()
