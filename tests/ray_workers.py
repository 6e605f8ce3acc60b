"""Ray's workers for tests, forked from a process that has imported their modules; importing in each takes seconds.

The workers, the processes that start them and their communication are Ray's own. Only a worker's first step differs:
Ray runs this file in place of its ``setup_worker.py``, and the file asks the process with the imports for a fork.
"""

import argparse
import atexit
import gc
import importlib.util
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "TESTS_RAY_WORKERS"
# No test looks at what a node says of itself. Its log files are looked for twice a second, not ten times.
QUIET = {
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
}
_SERVE, NODE, _PYTHON = "serve", "node", "python"
_LIBRARY = "torch._dynamo"
# Ray reads the environment when it is imported, and the node gives its workers another environment.
_RAY = (
    "ray._private.workers.default_worker",
    "ray.train.torch",
    "ray.train.v2._internal.execution.controller",
    "pydantic.v1.fields",  # for the serializers of every worker
)
_CONCORD = (
    "concord.tracking.store",
    "concord.execution.ray_train",
    "concord.studies.trial",
    *(["concord.reinforcement.policy_optimization"] if importlib.util.find_spec("procgen") else []),
)


@contextmanager
def forked_workers(folder: Path) -> Iterator[None]:
    """Let a Ray that the body starts fork its workers; its dashboard has only the part that Ray Train asks."""
    import pytest

    with template(folder, _CONCORD) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in (QUIET | variables).items():
            patch.setenv(name, value)
        patch.setattr("ray._private.parameter.RayParams", parameters())
        patch.setattr("ray._private.services.start_ray_process", _small_dashboard())
        yield


@contextmanager
def template(folder: Path, more: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Start the process to fork, with these further modules imported; return the variables of a Ray that uses it."""
    if sys.platform != "linux":  # elsewhere a fork of a process with these libraries may crash
        yield {}
        return
    address = str(folder / "workers")
    # The process ends with its standard input.
    with subprocess.Popen(
        [sys.executable, __file__, _SERVE, address, *more], stdin=subprocess.PIPE, start_new_session=True
    ):
        yield {ADDRESS: address}


def _small_dashboard() -> Callable[..., Any]:
    """Ray's function that starts a node's processes, with an option of the dashboard: each module is a process."""
    from ray._private.services import start_ray_process

    def start(command: list[str], kind: str, **options: Any) -> Any:
        return start_ray_process(command + ["--modules-to-load=StateHead"] * (kind == "dashboard"), kind, **options)

    return start


def parameters() -> type[Any]:
    """Ray's parameters of a node; with a template, its workers are forked."""
    from ray._private.parameter import RayParams

    own = {"setup_worker_path": __file__} if ADDRESS in os.environ else {}

    class Params(RayParams):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **own | options)  # type: ignore[arg-type]

    return Params


def start_node(words: list[str]) -> None:
    """Run the command ``ray`` with these words; its nodes fork their workers."""
    import ray._private.parameter

    ray._private.parameter.RayParams = parameters()  # type: ignore[misc]
    from ray.scripts.scripts import main

    sys.argv = ["ray", *words]
    main()


def python(file: Path) -> Path:
    """Make this file a command that does as ``python -m`` does, in a fork of the process with the imports."""
    file.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {_PYTHON} "$@"\n')
    file.chmod(0o700)
    return file


def ask(words: list[str]) -> int:
    """Ask for a fork, pass on to it what would end it, and wait until it has ended; return its exit status."""
    asked = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        socket.send_fds(connection, [asked], [0, 1, 2])
        connection.shutdown(socket.SHUT_WR)
        pid = int(connection.recv(16))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda given, _: os.kill(pid, given))
        return int(connection.recv(16) or -signal.SIGKILL)


def serve(address: str, *more: str) -> None:
    """Fork until standard input is closed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        importlib.import_module(_LIBRARY)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while 0 not in select.select([listener, 0], [], [])[0]:
            connection, _ = listener.accept()
            words, environment, folder, descriptors = received(connection)
            os.environ.clear()
            os.environ.update(environment)
            for name in (*_RAY, *more):
                importlib.import_module(name)
            # Forked workers would all draw the same random identifiers; of two that start at once, one would crash, and
            # Ray would wait for it without end. Each begins this many identifiers after the previous one.
            for _ in range(1000):
                sys.modules["ray"].ObjectRef.from_random()
            gc.freeze()  # a collection would copy the memory of all imports
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                os.chdir(folder)
                connection.send(str(os.getpid()).encode())
                work(words, connection)
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)


def received(connection: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]]:
    """The words, the environment, the folder and the standard streams of the asking process."""
    text, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while more := connection.recv(1 << 20):
        text += more
    words, environment, folder = json.loads(text)
    return words, environment, folder, descriptors


def work(words: list[str], connection: socket.socket) -> NoReturn:
    """Run one worker, as ``setup_worker.py`` does, or one module, as ``python -m`` does.

    It ends like a forked process, without finalizing modules.
    """
    os.setsid()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        # PyTorch would take back hundreds of operators, one by one.
        finalizer.atexit &= finalizer.peek()[1] is not sys.modules["torch.library"]._del_library
    try:
        if words[0] == _PYTHON:
            _, _, module, *sys.argv[1:] = words
            sys.path[:1] = [os.getcwd(), *_own_paths()]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = worker(words)
            runpy.run_path(sys.argv[0], run_name="__main__")
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    status = code if isinstance(code, int) else int(code is not None)
    connection.send(str(status).encode())
    os._exit(status)


def worker(words: list[str]) -> list[str]:
    """Apply a worker's runtime environment; return its command."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, rest = parser.parse_known_args(words)
    context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context)
    update_envs(context.env_vars)
    # For jobs with files of their own; a new interpreter would do both.
    match context.command_prefix:
        case ["cd", place, "&&"]:
            os.chdir(*shlex.split(place))
    sys.path[:0] = _own_paths()
    return rest


def _own_paths() -> list[str]:
    """The paths in PYTHONPATH that the process with the imports had not."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]


if __name__ == "__main__":
    match sys.argv[1:]:
        case [word, *words] if word == _SERVE:
            serve(*words)
        case [word, *words] if word == NODE:
            start_node(words)
        case words:
            sys.exit(ask(words))
