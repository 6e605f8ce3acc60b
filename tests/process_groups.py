"""Tests whose body runs in every process of a gloo group: each group starts once and then receives the tests."""

import contextlib
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import start_server

SECONDS = 30  # a longer test counts as hanging


def in_processes(
    *worlds: int, slow: bool = False, **options: Sequence[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body in groups of these sizes, with every combination of the options.

    Can be applied several times: combinations that are there already are left out. ``slow`` marks the tests.
    """

    def decorate(function: Any) -> Any:
        test = function if hasattr(function, "cases") else _test(function)
        for world, *values in itertools.product(worlds, *options.values()):
            arguments = dict(zip(options, values, strict=True))
            if any(case.values == (world, arguments) for case in test.cases):
                continue
            labels = [value if isinstance(value, str) else f"{name}={value}" for name, value in arguments.items()]
            name, marks = "-".join([f"{world} processes", *labels]), [pytest.mark.slow] if slow else []
            test.cases.append(pytest.param(world, arguments, id=name, marks=marks))
        return test

    return decorate


def _test(body: Callable[..., None]) -> Any:
    cases: list[Any] = []

    def test(world: int, arguments: dict[str, Any], process_groups: Any) -> None:
        process_groups(world, body.__module__, body.__name__, arguments)

    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    marked: Any = pytest.mark.parametrize(("world", "arguments"), cases)(test)
    marked.cases, marked.body = cases, body
    return marked


@contextlib.contextmanager
def groups() -> Iterator[Callable[[int, str, str, dict[str, Any]], None]]:
    """Runs bodies in groups. A group starts when it is needed; a failed or hanging body ends its group."""
    started: dict[int, Group] = {}

    def run(world: int, module: str, name: str, arguments: dict[str, Any]) -> None:
        if world not in started:
            started[world] = Group(world)
        errors = started[world].run((module, name, arguments))
        if not started[world].usable:
            started.pop(world).end()
        if errors:
            lines = (f"in process {rank} of {world}: {error}" for rank, error in errors.items())
            pytest.fail("\n".join(lines), pytrace=False)

    yield run
    for group in started.values():
        group.end()


class Group:
    """Processes that run one body after the other, until one of them fails or a body ends the group itself."""

    def __init__(self, world: int) -> None:
        self.usable = True
        start_server()
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(world)]
        self._connections = [ours for ours, _ in pipes]
        arguments = [(rank, world, Path(self._folder.name), theirs) for rank, (_, theirs) in enumerate(pipes)]
        self._processes = [context.Process(target=_process, args=given, daemon=True) for given in arguments]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, body: tuple[str, str, dict[str, Any]]) -> dict[int, str]:
        """Run a body; return the errors by process."""
        outcomes: dict[int, str | None] = {}
        for ours in self._connections:
            with contextlib.suppress(OSError):  # the process has ended, which is found below
                ours.send(body)
        waiting = {ours: rank for rank, ours in enumerate(self._connections)}
        deadline = time.monotonic() + SECONDS
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for ours in ready:
                rank = waiting.pop(ours)
                try:
                    outcomes[rank], stays = ours.recv()
                    self.usable &= stays
                except (EOFError, ConnectionError):
                    self._processes[rank].join(1)
                    outcomes[rank] = f"ended with status {self._processes[rank].exitcode}"
            if any(outcomes.values()):  # the other processes may now wait forever
                deadline = min(deadline, time.monotonic() + 2)
        failed = any(outcomes.values())
        self.usable &= not failed and not waiting
        for rank in waiting.values():
            outcomes[rank] = None if failed else "hangs:\n" + (Path(self._folder.name) / f"hanging {rank}").read_text()
        return {rank: error for rank, error in sorted(outcomes.items()) if error is not None}

    def end(self) -> None:
        for process, ours in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            ours.close()
        self._folder.cleanup()


_groups: list[Any] = []


def _process(rank: int, world: int, folder: Path, bodies: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each process's collector would copy the shared pages
    trace = (folder / f"hanging {rank}").open("w")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=2 * SECONDS),  # the parent ends a hanging collective first, with a traceback
    )
    # PyTorch may wait without end if the last reference to a group goes with a model. This one stays.
    _groups.append(dist.group.WORLD)
    while dist.is_initialized():
        module, name, arguments = bodies.recv()
        faulthandler.dump_traceback_later(SECONDS - 2, file=trace)
        torch.manual_seed(0)
        try:
            getattr(importlib.import_module(module), name).body(**arguments)
            bodies.send((None, dist.is_initialized()))
        except BaseException:
            bodies.send((traceback.format_exc(), False))
        faulthandler.cancel_dump_traceback_later()
