"""Progress of a run as its user sees it, read from the store: it works wherever the workers are."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from concord import logs
from concord.errors import RunFailedError
from concord.tracking import Store
from concord.training.checkpoint import RESUMED_EPOCH, RESUMED_SECONDS, RESUMED_WORKERS

_LOOK_EVERY_SECONDS = 1.5
_SAY_EVERY_SECONDS = 10.0
_SHOWN = ("train_accuracy", "ood_accuracy", "train_loss", "ood_loss", "kept_fraction")
_STARTING = "starting workers"
_NO_BREAK_SPACE = "\u00a0"


class Display(Progress):
    """A bar on a terminal: one line that fits 80 columns, with the numbers in lines of their own under it.

    Without a known total the bar pulses, so that something moves while nothing can be counted.
    """

    def __init__(self, what: str) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        super().__init__(*columns, console=Console(stderr=True), transient=True, expand=True)
        self._task = self.add_task(what, total=None, count="", left="", details="")

    def waiting(self, what: str) -> None:
        """Nothing can be counted now: say what is waited for."""
        self.reset(self._task, total=None, description=what, count="", left="", details="")

    def counting(self, what: str, done: float, total: int, count: str, seconds: float | None, details: str) -> None:
        """So much is done.

        Args:
            what: what is going on.
            done: of ``total``, the bar's length.
            total: how much there is.
            count: the same in words, for the reader.
            seconds: left, if that is known.
            details: shown under the bar, broken between words.
        """
        left = "" if seconds is None else f"{duration(seconds)} left"
        self.update(self._task, completed=done, total=total, description=what, count=count, left=left, details=details)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and under it the details."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["details"]:
                yield Padding(Text(task.fields["details"], style="dim"), (0, 0, 0, 2))


class RunProgress:
    """Shows how far a run is: a bar on a terminal, a line every ten seconds elsewhere.

    A context manager around the whole run, :meth:`training` around its training.

    Args:
        info: takes a line.
    """

    def __init__(self, info: Callable[[str], None]) -> None:
        self._say = info
        self._display: Display | None = None

    def __enter__(self) -> "RunProgress":
        if on_terminal():
            self._display = Display("starting")
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()

    def waiting(self, what: str) -> None:
        """Show on a terminal what the run does now that cannot be counted."""
        if self._display is not None:
            self._display.waiting(what)

    @contextlib.contextmanager
    def training(self, store: Store, run_id: str, epochs: int) -> Iterator[None]:
        """While the body runs, show how far training is."""
        done = threading.Event()
        self.waiting(_STARTING)
        show = self._lines if self._display is None else self._bar
        watcher = threading.Thread(target=show, args=(store, run_id, epochs, done), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join(timeout=10)

    def _lines(self, store: Store, run_id: str, epochs: int, done: threading.Event) -> None:
        said, last, resumed = time.monotonic(), -1, _resumed(_metrics(store, run_id))
        while not done.wait(_LOOK_EVERY_SECONDS):
            if time.monotonic() - said < _SAY_EVERY_SECONDS:
                continue
            metrics = _metrics(store, run_id)
            if _resumed(metrics) != resumed:
                resumed = _resumed(metrics)
                said, last = time.monotonic(), -1
                self._say(resumed)
                continue
            epoch = int(metrics.get("epoch", 0))
            if epoch > last:
                said, last = time.monotonic(), epoch
                self._say(f"epoch {epoch}/{epochs}  {'  '.join(_described(metrics))}" if epoch else _STARTING)

    def _bar(self, store: Store, run_id: str, epochs: int, done: threading.Event) -> None:
        display = self._display
        assert display is not None
        before = _metrics(store, run_id)  # of a resumed run, what its earlier processes did
        pace = _Pace()
        while not done.wait(_LOOK_EVERY_SECONDS):
            metrics = _metrics(store, run_id)
            if _resumed(metrics) not in ("", _resumed(before)):
                before, pace = metrics, _Pace()
                pace.at(metrics[RESUMED_EPOCH])
                self._say(_resumed(metrics))
            epoch = metrics.get("epoch")
            if epoch is not None and (epoch != before.get("epoch") or pace.begun):
                pace.at(epoch)
            if pace.begun:
                details = "  ".join(each.replace(" ", _NO_BREAK_SPACE) for each in _described(metrics))
                count = f"{pace.done:.0f}/{epochs} epochs"
                display.counting("training", pace.done, epochs, count, pace.seconds_left(epochs), details)


class _Pace:
    """How many epochs are done, and how fast they come; what was done before the first look counts for no speed."""

    def __init__(self) -> None:
        self.done = 0.0
        self._first: tuple[float, float] | None = None
        self._last = 0.0

    @property
    def begun(self) -> bool:
        return self._first is not None

    def at(self, done: float) -> None:
        """So many are done now."""
        now = time.monotonic()
        if self._first is None:
            self._first = (done, now)
        if done != self.done:
            self.done, self._last = done, now

    def seconds_left(self, total: int) -> float | None:
        """None where nothing was done yet since the first look."""
        if self._first is None or self.done <= self._first[0]:
            return None
        an_epoch = (self._last - self._first[1]) / (self.done - self._first[0])
        return max((total - self.done) * an_epoch - (time.monotonic() - self._last), 0.0)


def on_terminal() -> bool:
    """Whether there is a terminal to show a bar on."""
    return sys.stderr.isatty() and not logs.as_json()


def duration(seconds: float) -> str:
    """Seconds as a reader wants them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _metrics(store: Store, run_id: str) -> dict[str, float]:
    try:
        return store.metrics(run_id)
    except RunFailedError:
        return {}  # a store that does not answer is the metric log's to report


def _described(metrics: dict[str, float]) -> list[str]:
    shown = [f"{name} {metrics[name]:.3f}" for name in _SHOWN if name in metrics]
    if "workers" in metrics:  # where their number may change
        shown.append(f"workers {metrics['workers']:.0f}")
    return shown


def _resumed(metrics: dict[str, float]) -> str:
    """From where workers that were started in place of others, or by ``--resume``, went on, and what that cost."""
    if RESUMED_SECONDS not in metrics:
        return ""
    epoch, count, seconds = (metrics[name] for name in (RESUMED_EPOCH, RESUMED_WORKERS, RESUMED_SECONDS))
    workers = "one worker" if count == 1 else f"{count:.0f} workers"
    return f"training goes on from epoch {epoch:.0f} with {workers}, {seconds:.0f} s after it was there"
