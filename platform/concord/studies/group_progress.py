"""Shows the progress of a group of runs, on a terminal, in lines and as gauges."""

from collections.abc import Callable

from concord.record import Run
from concord.runs.live_metrics import Metric, Sample
from concord.runs.progress import Progress, duration
from concord.studies.criterion import Criterion
from concord.studies.proposals import Trial

STUDY_METRICS = (
    Metric("concord_trials", "Trials of the study by state: running, finished, failed", ("state",)),
    Metric("concord_trials_wanted", "Trials that the study will have"),
    Metric("concord_best_trial", "The criterion's value in the best trial so far", ("metric",)),
)


class GroupProgress(Progress):
    """Counts and shows trials or runs; around the pool's work. A trial has ``parts`` runs."""

    def __init__(
        self,
        what: str,
        total: int,
        info: Callable[[str], None],
        criterion: Criterion | None = None,
        parts: int = 1,
    ) -> None:
        super().__init__(info, f"starting {what}")
        self._what, self._total, self._parts = what, total, parts
        self._criterion = criterion
        self._running: dict[str, float] = {}  # per cent by name
        self._done = self._ended_here = 0.0
        self._failed = 0
        self._best: list[Trial] = []
        self._reasons: set[str] = set()

    def earlier(self, run: Run) -> None:
        """A run that ended before this process began."""
        self._done += 1 / self._parts
        self._failed += run.failure is not None

    def compared(self, trial: Trial) -> None:
        """A trial is over, and may be the best."""
        if self._criterion is not None:
            self._best = self._criterion.ranked([*self._best, trial])[:1]
            if self._pace.begun:
                self._show()

    def evaluated(self, run: str, percent: float) -> None:
        """The run of this name began or has an evaluation."""
        self._running[run] = percent
        self._count()

    def ended(self, run: Run, label: str) -> None:
        """A run is over."""
        self._running.pop(run.name, None)
        self._ended_here += 1 / self._parts
        self.earlier(run)
        self._count()
        if run.failure is not None and run.failure not in self._reasons:
            self._reasons.add(run.failure)
            self._info(f"{label} failed: {run.failure.splitlines()[0]}")

    def continues(self, run: str, seconds: float) -> None:
        """A run continues from a checkpoint after this time of training, which the estimate of the time left counts."""
        self._count(seconds / max(len(self._running), 1))  # the running ones trained side by side
        self._info(f"{run} continues from its checkpoint, after {duration(seconds)} of training")

    def line(self) -> str:
        """The progress in one line."""
        left = self._left()
        parts = [f"{self._done:.0f}/{self._total} {self._what}", *self._details()]
        return ", ".join(parts if left is None else [*parts, f"{duration(left)} left"])

    def _count(self, earlier_seconds: float = 0.0) -> None:
        # Running trials count by their progress, so that bar and estimate do not jump at each end.
        self._pace.at(self._done + sum(self._running.values()) / 100 / self._parts, earlier_seconds)
        self._show()

    def _show(self) -> None:
        count, details = f"{self._done:.0f}/{self._total}", ", ".join(self._details())
        self._draw(self._what, self._total, count, self._left(), details, self.line())

    def _left(self) -> float | None:
        return self._pace.seconds_left(self._total) if self._ended_here else None

    def _details(self) -> list[str]:
        parts = [f"{len(self._running)} running"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        if self._best and self._criterion is not None:
            value, trial = self._best[0].metrics[self._criterion.metric], self._best[0].number
            parts.append(f"best {self._criterion.shown} {value:.4f} (trial {trial})")
        return parts

    def samples(self) -> list[Sample]:
        """The progress as gauges, from another thread: sums over the trials, of which there may be thousands."""
        counts = {
            "running": len(self._running),
            "finished": round(self._done) - self._failed,
            "failed": self._failed,
        }
        samples = [Sample("concord_trials", float(count), (state,)) for state, count in counts.items()]
        if (best := self._best) and self._criterion is not None:
            metric = self._criterion.metric
            samples.append(Sample("concord_best_trial", best[0].metrics[metric], (metric,)))
        return [*samples, Sample("concord_trials_wanted", float(self._total))]
