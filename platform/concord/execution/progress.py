"""Shows progress: a bar on a terminal, a line every ten seconds elsewhere."""

import abc
import html
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from concord import logs
from concord.training.callback import Callback
from concord.training.checkpoint import RESUMED_EPOCH, RESUMED_SECONDS, RESUMED_WORKERS

if TYPE_CHECKING:
    from torch import nn

    from concord.gradients import EnvironmentStep

_FIRST_LINE_SECONDS, _LINE_SECONDS = 2.0, 10.0
_STEP_SECONDS = 0.5  # between steps that a bar shows
_SHOWN = ("train_accuracy", "ood_accuracy", "train_return", "unseen_return", "train_loss", "ood_loss", "kept_fraction")
_NO_BREAK_SPACE = "\u00a0"


class Display(RichProgress):
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


class NotebookBar:
    """A bar in the output of a notebook's cell, with the numbers in lines under it."""

    def __init__(self, what: str) -> None:
        from IPython.display import display

        self._shown = display(self._html(what), display_id=True)

    def stop(self) -> None:
        """Remove the bar."""
        from IPython.display import HTML

        self._shown.update(HTML(""))

    def waiting(self, what: str) -> None:
        """Show a bar without a value with this text."""
        self._shown.update(self._html(what))

    def counting(self, what: str, done: float, total: int, count: str, seconds: float | None, details: str) -> None:
        """Show ``done`` of ``total``, see :meth:`Display.counting`."""
        left = "" if seconds is None else f", {duration(seconds)} left"
        self._shown.update(self._html(f"{what} {count}{left}", f"value={done} max={total}", details))

    @staticmethod
    def _html(text: str, value: str = "", details: str = "") -> Any:
        from IPython.display import HTML

        bar = f"<progress {value} style='width: 20em; vertical-align: middle'></progress>"
        return HTML(f"{bar} {html.escape(text)}<br><small>{html.escape(details)}</small>")


class Progress(abc.ABC):
    """Shows how far work is: a bar on a terminal or in a notebook, elsewhere a line at most every ten seconds.

    A context manager. A line needs some progress since the last one.
    """

    def __init__(self, info: Callable[[str], None], starting: str) -> None:
        self._info, self._starting = info, starting
        self._display: Display | NotebookBar | None = None
        self._pace = Pace()
        self._next_line, self._last_shown = time.monotonic() + _FIRST_LINE_SECONDS, -1.0

    def __enter__(self) -> Self:
        if in_notebook():
            self._display = NotebookBar(self._starting)
        elif on_terminal():
            self._display = Display(self._starting)
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()

    def waiting(self, what: str) -> None:
        """Show work without a known length, on a terminal."""
        if self._display is not None:
            self._display.waiting(what)

    def _begin(self, done: float) -> None:
        """Count from here on; the first line comes after ten seconds."""
        self._next_line, self._last_shown = time.monotonic() + _LINE_SECONDS, done

    def _show(self) -> None:
        if self._display is not None:
            if self._pace.begun:
                self._display.counting(*self._bar())
        elif self._pace.done > self._last_shown and time.monotonic() >= self._next_line:
            self._begin(self._pace.done)
            self._info(self.line())

    @abc.abstractmethod
    def line(self) -> str:
        """The progress in one line."""

    @abc.abstractmethod
    def _bar(self) -> tuple[str, float, int, str, float | None, str]:
        """The arguments of :meth:`Display.counting`."""


class RunProgress(Progress, Callback):
    """Shows how far a run is; around the whole run. As its callback it shows steps between evaluations."""

    def __init__(self, info: Callable[[str], None]) -> None:
        super().__init__(info, "starting")
        self._metrics: dict[str, float] = {}
        self._epochs = 0
        self._step, self._next_step = "", 0.0

    def training(self, epochs: int, first: str) -> None:
        """Begin to show training up to this epoch, with ``first`` as the first work."""
        self._epochs = epochs
        self._begin(0.0)
        self.waiting(first)

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show these metrics with those that came before."""
        self._metrics |= metrics
        if RESUMED_SECONDS in metrics:  # replacement or resumed workers
            self._pace = Pace()
            self._pace.at(metrics[RESUMED_EPOCH])
            self._begin(metrics[RESUMED_EPOCH])
            self._info(_resumed(metrics))
        elif "epoch" in metrics:
            self._step = ""
            self._pace.at(metrics["epoch"])
        self._show()

    def on_step(self, step: int, model: "nn.Module", result: "EnvironmentStep") -> None:  # noqa: ARG002
        """Show the loss of a step, if a line or a bar is due."""
        now = time.monotonic()
        if now < (self._next_line if self._display is None else self._next_step):
            return
        self._step, self._next_step = f"step {step} loss {float(result.losses.mean()):.3f}", now + _STEP_SECONDS
        if self._display is not None:
            self._display.counting(*self._bar())
        else:
            self._begin(self._pace.done)
            self._info(self.line())

    def line(self) -> str:
        """The progress in one line."""
        return f"epoch {self._pace.done:.0f}/{self._epochs}  {'  '.join(self._details())}"

    def _bar(self) -> tuple[str, float, int, str, float | None, str]:
        done, left = self._pace.done, self._pace.seconds_left(self._epochs)
        details = "  ".join(each.replace(" ", _NO_BREAK_SPACE) for each in self._details())
        return "training", done, self._epochs, f"{done:.0f}/{self._epochs} epochs", left, details

    def _details(self) -> list[str]:
        shown = [self._step] * bool(self._step)
        shown += [f"{name} {self._metrics[name]:.3f}" for name in _SHOWN if name in self._metrics]
        if "workers" in self._metrics:  # their number may change
            shown.append(f"workers {self._metrics['workers']:.0f}")
        return shown


class Pace:
    """The speed of work that is counted; work before the first count has no part in it."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)

    @property
    def begun(self) -> bool:
        """Whether there was a count."""
        return self._first is not None

    @property
    def done(self) -> float:
        """The last count."""
        return self._last[0]

    def at(self, done: float, earlier_seconds: float = 0.0) -> None:
        """Count the work done; ``earlier_seconds`` of another process were spent on it as well."""
        self._last = (done, time.monotonic())
        start, since = self._first or self._last
        self._first = (start, since - earlier_seconds)

    def seconds_left(self, total: float) -> float | None:
        """The seconds left; None before any progress."""
        if self._first is None or self._last[0] <= self._first[0]:
            return None
        seconds = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return max((total - self._last[0]) * seconds, 0.0)


def on_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty() and not logs.as_json()


def in_notebook() -> bool:
    """Whether a notebook's cell runs this process."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


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
