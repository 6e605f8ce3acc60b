"""Progress of a run as its user sees it, read from the store: it works wherever the workers are."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from concord import logs
from concord.errors import RunFailedError
from concord.tracking import Store
from concord.training.checkpoint import RESUMED_EPOCH, RESUMED_SECONDS, RESUMED_WORKERS

_LOOK_EVERY_SECONDS = 1.5
_SAY_EVERY_SECONDS = 10.0
_SHOWN = ("train_accuracy", "ood_accuracy", "train_loss", "ood_loss", "kept_fraction")


@contextlib.contextmanager
def watched(store: Store, run_id: str, epochs: int, say: Callable[[str], None]) -> Iterator[None]:
    """While the body runs, show how far the run is: a bar on a terminal, a line every ten seconds elsewhere."""
    done = threading.Event()
    show = _bar if sys.stderr.isatty() and not logs.as_json() else _lines
    watcher = threading.Thread(target=show, args=(store, run_id, epochs, say, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join(timeout=10)


def _metrics(store: Store, run_id: str) -> dict[str, float]:
    try:
        return store.metrics(run_id)
    except RunFailedError:
        return {}  # a store that does not answer is the metric log's to report


def _described(metrics: dict[str, float]) -> str:
    shown = [f"{name} {metrics[name]:.3f}" for name in _SHOWN if name in metrics]
    if "workers" in metrics:  # where their number may change
        shown.append(f"workers {metrics['workers']:.0f}")
    return "  ".join(shown)


def _resumed(metrics: dict[str, float]) -> str:
    """From where workers that were started in place of others, or by ``--resume``, went on, and what that cost."""
    if RESUMED_SECONDS not in metrics:
        return ""
    epoch, count, seconds = (metrics[name] for name in (RESUMED_EPOCH, RESUMED_WORKERS, RESUMED_SECONDS))
    workers = "one worker" if count == 1 else f"{count:.0f} workers"
    return f"training goes on from epoch {epoch:.0f} with {workers}, {seconds:.0f} s after it was there"


def _lines(store: Store, run_id: str, epochs: int, say: Callable[[str], None], done: threading.Event) -> None:
    said, last, resumed = time.monotonic(), -1, _resumed(_metrics(store, run_id))
    while not done.wait(_LOOK_EVERY_SECONDS):
        if time.monotonic() - said < _SAY_EVERY_SECONDS:
            continue
        metrics = _metrics(store, run_id)
        if _resumed(metrics) != resumed:
            resumed = _resumed(metrics)
            said, last = time.monotonic(), -1
            say(resumed)
            continue
        epoch = int(metrics.get("epoch", 0))
        if epoch > last:
            said, last = time.monotonic(), epoch
            say(f"epoch {epoch}/{epochs}  {_described(metrics)}" if epoch else "starting workers")


def _bar(store: Store, run_id: str, epochs: int, say: Callable[[str], None], done: threading.Event) -> None:  # noqa: ARG001
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} epochs"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting workers", total=epochs, metrics="")
        resumed = _resumed(_metrics(store, run_id))
        while not done.wait(_LOOK_EVERY_SECONDS):
            metrics = _metrics(store, run_id)
            if _resumed(metrics) != resumed:
                resumed = _resumed(metrics)
                progress.console.print(resumed)
            if "epoch" in metrics:
                progress.update(task, description="training", completed=metrics["epoch"], metrics=_described(metrics))
