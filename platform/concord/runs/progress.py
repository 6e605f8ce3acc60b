"""Shows the progress of a run: a bar on a terminal, a line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from concord import logs
from concord.training.checkpoint import RESUMED_EPOCH, RESUMED_SECONDS, RESUMED_WORKERS

_SAY_EVERY_SECONDS = 10.0
_SHOWN = ("train_accuracy", "ood_accuracy", "train_return", "unseen_return", "train_loss", "ood_loss", "kept_fraction")
_NO_BREAK_SPACE = "\u00a0"


class Display(Progress):
    """A bar on a terminal: one line of at most 80 columns, with the numbers in lines under it.

    Without a known total the bar pulses.
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
        """Show a pulsing bar with this text."""
        self.reset(self._task, total=None, description=what, count="", left="", details="")

    def counting(self, what: str, done: float, total: int, count: str, seconds: float | None, details: str) -> None:
        """Show ``done`` of ``total``, with the count in words, the seconds left if known, and details below the bar."""
        left = "" if seconds is None else f"{duration(seconds)} left"
        self.update(self._task, completed=done, total=total, description=what, count=count, left=left, details=details)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and under it the details."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["details"]:
                yield Padding(Text(task.fields["details"], style="dim"), (0, 0, 0, 2))


class RunProgress:
    """Shows how far a run is; a context manager around the whole run."""

    def __init__(self, info: Callable[[str], None]) -> None:
        self._say = info
        self._display: Display | None = None
        self._metrics: dict[str, float] = {}
        self._epochs = 0
        self._pace = _Pace()
        self._shown_at, self._shown_epoch = time.monotonic(), 0.0

    def __enter__(self) -> "RunProgress":
        if on_terminal():
            self._display = Display("starting")
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()

    def waiting(self, what: str) -> None:
        """Show work without a known length, on a terminal."""
        if self._display is not None:
            self._display.waiting(what)

    def training(self, epochs: int, first: str) -> None:
        """Begin to show training up to this epoch, with ``first`` as the first work."""
        self._epochs, self._shown_at = epochs, time.monotonic()
        self.waiting(first)

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show these metrics with those that came before."""
        self._metrics |= metrics
        if RESUMED_SECONDS in metrics:  # replacement or resumed workers
            self._pace = _Pace()
            self._pace.at(metrics[RESUMED_EPOCH])
            self._shown_at, self._shown_epoch = time.monotonic(), metrics[RESUMED_EPOCH]
            self._say(_resumed(metrics))
        elif "epoch" in metrics:
            self._pace.at(metrics["epoch"])
        if self._display is not None and self._pace.begun:
            details = "  ".join(each.replace(" ", _NO_BREAK_SPACE) for each in self._described())
            done, left = self._pace.done, self._pace.seconds_left(self._epochs)
            count = f"{done:.0f}/{self._epochs} epochs"
            self._display.counting("training", done, self._epochs, count, left, details)
        elif self._pace.done > self._shown_epoch and time.monotonic() - self._shown_at >= _SAY_EVERY_SECONDS:
            self._shown_at, self._shown_epoch = time.monotonic(), self._pace.done
            self._say(f"epoch {self._pace.done:.0f}/{self._epochs}  {'  '.join(self._described())}")

    def _described(self) -> list[str]:
        shown = [f"{name} {self._metrics[name]:.3f}" for name in _SHOWN if name in self._metrics]
        if "workers" in self._metrics:  # their number may change
            shown.append(f"workers {self._metrics['workers']:.0f}")
        return shown


class _Pace:
    """The speed of epochs; earlier work, before the first call, does not count."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)

    @property
    def begun(self) -> bool:
        """Whether an epoch was reported."""
        return self._first is not None

    @property
    def done(self) -> float:
        """The number of epochs done."""
        return self._last[0]

    def at(self, done: float) -> None:
        """Report the number of epochs done."""
        self._last = (done, time.monotonic())
        self._first = self._first or self._last

    def seconds_left(self, total: int) -> float | None:
        """The seconds left; None before any progress."""
        if self._first is None or self._last[0] <= self._first[0]:
            return None
        seconds = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return max((total - self._last[0]) * seconds, 0.0)


def on_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty() and not logs.as_json()


def duration(seconds: float) -> str:
    """Seconds as text."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _resumed(metrics: Mapping[str, float]) -> str:
    """The line about resumed or replaced workers: the epoch, and the time lost."""
    epoch, count, seconds = (metrics[name] for name in (RESUMED_EPOCH, RESUMED_WORKERS, RESUMED_SECONDS))
    workers = "one worker" if count == 1 else f"{count:.0f} workers"
    return f"training resumes from epoch {epoch:.0f} with {workers}, {seconds:.0f} s after that checkpoint"
