"""Shows the progress of a group of runs: a bar on a terminal, a line from time to time elsewhere."""

import threading
import time
from collections.abc import Callable

from concord.record import Run
from concord.runs.live_metrics import Metric, Sample
from concord.runs.progress import Display, duration, on_terminal
from concord.studies.criterion import Criterion
from concord.studies.proposals import Trial

_SAY_EVERY_SECONDS = 10.0
_LOOK_EVERY_SECONDS = 0.5

STUDY_METRICS = (
    Metric("concord_trials", "Trials of the study by state: running, finished, failed", ("state",)),
    Metric("concord_trials_wanted", "Trials that the study will have"),
    Metric("concord_best_trial", "The criterion's value in the best trial so far", ("metric",)),
)


class GroupProgress:
    """Counts and shows the progress of trials or runs while its body runs; a context manager.

    A trial has ``parts`` runs.
    """

    def __init__(
        self,
        what: str,
        total: int,
        info: Callable[[str], None],
        criterion: Criterion | None = None,
        parts: int = 1,
    ) -> None:
        self._what = what
        self._total, self._parts = total, parts
        self._criterion = criterion
        self._info = info
        self._running: dict[str, float] = {}
        self._done = self._here = 0.0
        self._failed = 0
        self._best: list[Trial] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._started = time.monotonic()
        self._reasons: set[str] = set()

    def earlier(self, run: Run) -> None:
        """A run that ended before this process began."""
        with self._lock:
            self._done += 1 / self._parts
            self._failed += run.failure is not None

    def compared(self, trial: Trial) -> None:
        """A trial is over, and may be the best."""
        if self._criterion is not None:
            with self._lock:
                self._best = self._criterion.ranked([*self._best, trial])[:1]

    def evaluated(self, run: str, percent: float) -> None:
        """The run of this name began or has an evaluation."""
        with self._lock:
            self._running[run] = percent

    def ended(self, run: Run, label: str) -> None:
        """A run is over."""
        with self._lock:
            self._running.pop(run.name, None)
            self._here += 1 / self._parts
        self.earlier(run)
        if run.failure is not None and run.failure not in self._reasons:
            self._reasons.add(run.failure)
            self._info(f"{label} failed: {run.failure.splitlines()[0]}")

    def continues(self, run: str, seconds: float) -> None:
        """A run continues from a checkpoint after this time of training, which the estimate of the time left counts."""
        with self._lock:
            self._started -= seconds / max(len(self._running), 1)  # the running ones trained side by side
        self._info(f"{run} continues from its checkpoint, after {duration(seconds)} of training")

    def __enter__(self) -> "GroupProgress":
        self._shower = threading.Thread(target=self._bar if on_terminal() else self._lines, daemon=True)
        self._shower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._shower.join(timeout=5)

    def line(self) -> str:
        """The progress in one line."""
        with self._lock:
            left = self._left()
            parts = [f"{self._done:.0f}/{self._total} {self._what}", *self._details()]
        return ", ".join(parts if left is None else [*parts, f"{duration(left)} left"])

    def _details(self) -> list[str]:
        parts = [f"{len(self._running)} running"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        if self._best and self._criterion is not None:
            value, trial = self._best[0].metrics[self._criterion.metric], self._best[0].number
            parts.append(f"best {self._criterion.shown} {value:.4f} (trial {trial})")
        return parts

    def samples(self) -> list[Sample]:
        """The progress as gauges: sums over the trials, of which there may be thousands."""
        with self._lock:
            counts = {
                "running": len(self._running),
                "finished": round(self._done) - self._failed,
                "failed": self._failed,
            }
            samples = [Sample("concord_trials", float(count), (state,)) for state, count in counts.items()]
            if self._best and self._criterion is not None:
                metric = self._criterion.metric
                samples.append(Sample("concord_best_trial", self._best[0].metrics[metric], (metric,)))
        return [*samples, Sample("concord_trials_wanted", float(self._total))]

    def _left(self) -> float | None:
        if self._here == 0:
            return None
        # Running trials count by their progress, so that the estimate does not jump at each end.
        under_way = sum(self._running.values()) / 100 / self._parts
        to_do = max(self._total - self._done - under_way, 0.0)
        return to_do * (time.monotonic() - self._started) / (self._here + under_way)

    def _lines(self) -> None:
        shown = ""
        pause = 2.0
        while not self._over.wait(pause):
            pause = _SAY_EVERY_SECONDS
            if (line := self.line()) != shown:
                self._info(line)
                shown = line

    def _bar(self) -> None:
        with Display(f"starting {self._what}") as display:
            while not self._over.wait(_LOOK_EVERY_SECONDS):
                with self._lock:
                    # Running trials count by their progress, so that the bar moves during the first trials.
                    done = self._done + sum(self._running.values()) / 100 / self._parts
                    count, details, left = f"{self._done:.0f}/{self._total}", ", ".join(self._details()), self._left()
                if done > 0:
                    display.counting(self._what, done, self._total, count, left, details)
