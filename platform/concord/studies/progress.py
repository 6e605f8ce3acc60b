"""How far a study is, as its user sees it: a bar on a terminal, a line now and then elsewhere."""

import threading
import time
from collections.abc import Callable

from concord.runs.live_metrics import Metric, Sample
from concord.runs.progress import Display, duration, on_terminal
from concord.studies.journal import TrialResult, TrialSpec
from concord.studies.selection import Criterion

_SAY_EVERY_SECONDS = 10.0
_LOOK_EVERY_SECONDS = 0.5

STUDY_METRICS = (
    Metric("concord_trials", "Trials of the study by how they stand: running, finished, failed", ("state",)),
    Metric("concord_trials_wanted", "Trials that the study is to have"),
    Metric("concord_best_trial", "The criterion's value in the best trial so far", ("metric",)),
)


class StudyProgress:
    """Counts and shows; a context manager, which shows while its body runs.

    Args:
        what: trials or runs, for the reader.
        total: to be done, if there is a known end.
        criterion: what the best is judged by; None where there is no best.
        info: takes a line.
    """

    def __init__(self, what: str, total: int, criterion: Criterion | None, info: Callable[[str], None]) -> None:
        self._what = what
        self._total = total
        self._criterion = criterion
        self._say = info
        self._running: dict[str, float] = {}
        self._done = self._failed = self._here = 0
        self._seconds = 0.0
        self._best: tuple[float, int, float] | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._started = time.monotonic()
        self._reasons: set[str] = set()

    def earlier(self, task: TrialSpec, ended: TrialResult) -> None:
        """A task that ended before this process began."""
        self._count(task, ended)

    def began(self, task: TrialSpec) -> None:
        """A task runs."""
        with self._lock:
            self._running[task.key] = 0.0

    def evaluated(self, task: TrialSpec, percent: float) -> None:
        """A task goes on."""
        with self._lock:
            self._running[task.key] = percent

    def ended(self, task: TrialSpec, ended: TrialResult) -> None:
        """A task is over."""
        with self._lock:
            self._running.pop(task.key, None)
            self._here += 1
        self._count(task, ended)
        if ended.failure is not None and ended.failure not in self._reasons:
            self._reasons.add(ended.failure)
            self._say(f"{task.name or task.key} failed: {ended.failure.splitlines()[0]}")

    def _count(self, task: TrialSpec, ended: TrialResult) -> None:
        with self._lock:
            self._done += 1
            self._failed += ended.failure is not None
            if self._criterion is not None and self._criterion.metric in ended.metrics:
                value, score = ended.metrics[self._criterion.metric], self._criterion.score(ended.metrics)
                if self._best is None or score > self._best[0]:
                    self._best = (score, task.trial, value)

    def __enter__(self) -> "StudyProgress":
        self._shower = threading.Thread(target=self._bar if on_terminal() else self._lines, daemon=True)
        self._shower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._shower.join(timeout=5)

    def line(self) -> str:
        """All of it in one line."""
        with self._lock:
            parts = [f"{self._done}/{self._total} {self._what}", *self._details()]
            left = self._left()
        if left is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def _details(self) -> list[str]:
        parts = [f"{len(self._running)} running"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        if self._best is not None and self._criterion is not None:
            oracle = " (oracle)" if self._criterion.oracle else ""
            parts.append(f"best {self._criterion.metric}{oracle} {self._best[2]:.4f} (trial {self._best[1]})")
        return parts

    def samples(self) -> list[Sample]:
        """The same as gauges: sums over the trials, which may be thousands."""
        with self._lock:
            states = {
                "running": len(self._running), "finished": self._done - self._failed, "failed": self._failed
            }  # fmt: skip
            samples = [Sample("concord_trials", float(count), (state,)) for state, count in states.items()]
            samples.append(Sample("concord_trials_wanted", float(self._total)))
            if self._best is not None and self._criterion is not None:
                samples.append(Sample("concord_best_trial", self._best[2], (self._criterion.metric,)))
        return samples

    def _left(self) -> float | None:
        if self._here == 0:
            return None
        # What runs counts by how far it is, so that the estimate does not jump at each end.
        done = self._here + sum(self._running.values()) / 100
        to_do = self._total - self._done - sum(self._running.values()) / 100
        return max(to_do, 0.0) * (time.monotonic() - self._started) / done

    def _lines(self) -> None:
        said = ""
        pause = 2.0
        while not self._over.wait(pause):
            pause = _SAY_EVERY_SECONDS
            if (line := self.line()) != said:
                self._say(line)
                said = line

    def _bar(self) -> None:
        with Display(f"starting {self._what}") as display:
            while not self._over.wait(_LOOK_EVERY_SECONDS):
                with self._lock:
                    # What runs counts by how far it is, so that the bar moves while the first trials run.
                    done = self._done + sum(self._running.values()) / 100
                    count, details, left = f"{self._done}/{self._total}", ", ".join(self._details()), self._left()
                if done > 0:
                    display.counting(self._what, done, self._total, count, left, details)
