"""Commands whose n-th write fails, each in a process forked from one that has imported everything, see ``faults.c``."""

import ctypes
import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("faults.c")
SHORT, KILL = -1, -2  # as in faults.c
FAULTS = {
    **{name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EACCES", "EMFILE", "EROFS")},
    "short": SHORT,
    "kill": KILL,
}


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: the exit status; negative for a signal.
        writes: its writes, in order: what, and the file.
    """

    status: int
    output: str
    error: str
    writes: list[str]


class FaultyCommands:
    """Runs commands one after the other."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._folder = folder
        library = folder / "faults.so"
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler here")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self._server = subprocess.Popen(
            [sys.executable, __file__, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": paths, **environment},
        )

    def run(self, output: Path, *words: str, at: int = 0, fault: int = 0) -> Ended:
        """Run ``concord`` with these words; its write number ``at`` (from 1; 0 for none) below ``output`` has a fault.

        Writes of MLflow's store do not count.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        asked = {"output": str(output), "folder": str(self._folder), "words": words, "at": at, "fault": fault}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        out, error, writes = ((self._folder / name).read_text() for name in ("out", "error", "writes"))
        return Ended(status, out, error, writes.splitlines())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)


@contextmanager
def faulty_commands(folder: Path, **environment: str) -> Iterator[FaultyCommands]:
    commands = FaultyCommands(folder, **environment)
    try:
        yield commands
    finally:
        commands.close()


def _serve(library: ctypes.CDLL) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    import imported_once  # noqa: F401

    for module in ("cli.running", "execution.run", "studies.comparison_run", "studies.study", "studies.leave_one_out"):
        importlib.import_module(f"concord.{module}")
    for line in sys.stdin:
        asked = json.loads(line)
        process = os.fork()
        if process == 0:
            _command(library, asked)
        _, status = os.waitpid(process, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _command(library: ctypes.CDLL, asked: dict[str, Any]) -> None:
    from made_tables import copied_tables

    from concord.cli import entry

    folder, output, words = Path(asked["folder"]), asked["output"], _words(asked["words"])
    streams = [os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in ("out", "error", "writes")]
    for number, stream in zip((1, 2), streams, strict=False):
        os.dup2(stream, number)
    paths = f"^{output}/(runs|studies|comparisons|keys|results)(/|$)"
    library.arm(paths.encode(), asked["at"], asked["fault"], streams[-1])
    sys.argv = ["concord", *words]
    status = 0
    try:
        with copied_tables():
            entry()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _words(words: Sequence[str]) -> list[str]:
    return [str(word) for word in words]


if __name__ == "__main__":
    _serve(ctypes.CDLL(sys.argv[1]))
