"""The state of a run as gauges, which Ray exports to Prometheus beside its own.

Gauges, not counters: a Ray node exports a counter as long as the node lives, but drops a gauge that was not set for two
report intervals (20 s). So the metrics end with the run, or soon after a kill. For the same reason a thread sets the
gauges every second, even while the loop evaluates or waits.
"""

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from concord.gradients.step_clock import PARTS, Part
from concord.training.context import StepsSoFar

_EVERY_SECONDS = 1.0
# Rates are means over Ray's interval between two reports, so that no time is left out.
_WINDOW_SECONDS = 10.0


class Metric(NamedTuple):
    """A gauge.

    Attributes:
        name: Concord's name; Ray exports it with the prefix ``ray_``.
        tags: the names of its own tags, beside the labels of all gauges of a run.
    """

    name: str
    description: str
    tags: tuple[str, ...] = ()


class Sample(NamedTuple):
    """One value of a gauge now."""

    name: str
    value: float
    tags: tuple[str, ...] = ()


RUN_METRICS = (
    Metric("concord_steps_per_second", "Steps of this worker a second, evaluations included (mean of 10 s)"),
    Metric("concord_step_seconds", "Seconds of a step in one of its parts (mean of the steps of 10 s)", ("part",)),
    Metric("concord_step_loss", "Mean loss of this worker's environments at its latest step"),
    Metric("concord_kept_fraction", "Fraction of all components that the aggregator kept at the last step"),
    Metric("concord_epoch", "Epochs done, with the fraction of the current one"),
    Metric("concord_epochs", "Epochs of the whole run"),
    Metric("concord_checkpoint_age_seconds", "Seconds since the latest checkpoint, or since the beginning"),
    Metric("concord_restarts", "How many groups of workers began before the present one"),
    Metric("concord_loss", "Mean loss at the latest evaluation", ("split",)),
)


class _Moment(NamedTuple):
    at: float
    steps: int
    seconds: dict[Part, float]


class RunSamples:
    """Returns the samples of a worker at each call; the first worker alone reports values that are equal in all."""

    def __init__(self, so_far: StepsSoFar, first: bool) -> None:
        self._so_far = so_far
        self._first = first
        self._window: deque[_Moment] = deque(maxlen=round(_WINDOW_SECONDS / _EVERY_SECONDS) + 1)

    def __call__(self) -> list[Sample]:
        """The current samples."""
        now = self._so_far
        self._window.append(_Moment(time.perf_counter(), now.steps, dict(now.clock.seconds)))
        oldest, newest = self._window[0], self._window[-1]
        samples: list[Sample] = []
        if newest.at > oldest.at:
            rate = (newest.steps - oldest.steps) / (newest.at - oldest.at)
            samples.append(Sample("concord_steps_per_second", rate))
        if steps := newest.steps - oldest.steps:
            each = {part: (newest.seconds[part] - oldest.seconds[part]) / steps for part in PARTS}
            samples += [Sample("concord_step_seconds", seconds, (part,)) for part, seconds in each.items()]
        if (step := now.latest) is not None:
            samples.append(Sample("concord_step_loss", float(step.losses.mean())))
            if self._first and now.sizes is not None and step.kept_fraction.numel() > 0:
                kept = float((step.kept_fraction.float().cpu() * now.sizes).sum() / now.sizes.sum())
                samples.append(Sample("concord_kept_fraction", kept))
        if self._first:
            samples += [Sample("concord_epoch", now.epoch), Sample("concord_epochs", float(now.epochs))]
            samples.append(Sample("concord_checkpoint_age_seconds", time.monotonic() - now.checkpointed))
            samples.append(Sample("concord_restarts", float(now.restarts)))
            samples += [Sample("concord_loss", loss, (split,)) for split, loss in now.losses.items()]
        return samples


class Published:
    """Sets gauges in this process's Ray every second while its body runs; a context manager.

    ``labels`` may have few values, since Prometheus keeps each combination. ``samples`` is called in another thread.
    """

    def __init__(
        self, metrics: Sequence[Metric], labels: Mapping[str, str], samples: Callable[[], Iterable[Sample]]
    ) -> None:
        self._metrics = metrics
        self._labels = dict(labels)
        self._samples = samples
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="concord-metrics", daemon=True)

    def __enter__(self) -> "Published":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)

    def _publish(self) -> None:
        from ray.util.metrics import Gauge

        gauges: dict[str, tuple[Any, tuple[str, ...]]] = {
            metric.name: (
                Gauge(metric.name, metric.description, (*self._labels, *metric.tags)).set_default_tags(self._labels),
                metric.tags,
            )
            for metric in self._metrics
        }
        over = False
        while not over:
            over = self._over.wait(_EVERY_SECONDS)
            try:
                for sample in self._samples():
                    gauge, tags = gauges[sample.name]
                    gauge.set(sample.value, dict(zip(tags, sample.tags, strict=True)))
            except Exception as error:  # monitoring must not disturb the run
                warnings.warn(f"metrics for Prometheus stopped: {type(error).__name__}: {error}", RuntimeWarning, 1)
                return
