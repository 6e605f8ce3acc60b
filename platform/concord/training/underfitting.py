"""Detects a run that ended while it was still learning; its last losses hide this, since the learning rate falls."""

import itertools
import math
import statistics
from collections.abc import Sequence

from concord.record import Evaluation
from concord.training.metric_names import split_metric
from concord.training.options import TrainConfig

_FEWEST = 6  # evaluations; with fewer a fall cannot be told from noise
_CERTAIN = 2.6  # standard deviations of Kendall's statistic: one history without a trend in two hundred
_OF_LOSS, _OF_FIRST = 0.03, 0.02
_HIGHER_AGAIN = 1.01


def underfitting(history: Sequence[Evaluation], config: TrainConfig) -> str | None:
    """A line about a run whose held-out loss was still falling, None about any other.

    The schedule flattens every run in the end, so only the evaluations count before the learning rate is first
    lowered, see :func:`late_fall`. A run whose held-out loss rose after that is not underfitted.
    """
    lowered = config.schedule.lowered
    loss = split_metric("held_out", "loss")
    seen = [(each.epoch, each.metrics[loss]) for each in history if loss in each.metrics]
    before = [(epoch, loss) for epoch, loss in seen if epoch <= lowered * config.schedule.epochs]
    losses = [loss for _, loss in before]
    fall = late_fall(losses)
    if fall is None or not seen[-1][1] <= _HIGHER_AGAIN * losses[-1]:
        return None
    since = before[-_late(len(before))][0]
    when = "at the end of the run" if lowered == 1 else f"at epoch {before[-1][0]}, when --lr was lowered"
    return (
        f"the held-out loss was still falling {when}: by {fall:.3g} since epoch {since}, to {losses[-1]:.3g}; "
        f"more --epochs than {config.schedule.epochs} or a larger --lr than {config.optimizer.lr:g} may learn more"
    )


def late_fall(losses: Sequence[float]) -> float | None:
    """The fall over the last 60 % of the losses, if it is a trend that matters; None otherwise.

    It is a trend if Kendall's rank statistic of loss and time is 2.6 standard deviations below zero, which one of two
    hundred sequences without a trend reaches. It matters if the fall, by the median slope of all
    pairs, is at least 3 % of the last loss and 2 % of the first, since a loss near 0 never stops falling. Fewer than
    six losses, or one that is not finite, give None.
    """
    if len(losses) < _FEWEST or not all(map(math.isfinite, losses)):
        return None
    late = losses[-_late(len(losses)) :]
    count = len(late)
    pairs = list(itertools.combinations(range(count), 2))
    order = sum((late[j] > late[i]) - (late[j] < late[i]) for i, j in pairs)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    fall = -statistics.median((late[j] - late[i]) / (j - i) for i, j in pairs) * (count - 1)
    certain = -order - 1 >= _CERTAIN * deviation
    matters = fall >= max(_OF_LOSS * abs(late[-1]), _OF_FIRST * abs(losses[0]))
    return fall if certain and matters else None


def _late(count: int) -> int:
    return max(_FEWEST, math.ceil(0.6 * count))
