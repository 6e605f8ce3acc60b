"""What adaptive skips look like: sequences beside their predictions, timelines, rollouts, accuracy over training."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from concord.analysis.compared_runs import ComparedRuns
from concord.analysis.figures import BLUE, GREEN, ORANGE, PURPLE, RED
from concord.analysis.trajectory_figures import as_bytes
from concord.errors import InputError

_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE)
Picture = npt.NDArray[np.uint8]


def aligned_sequences(frames: Tensor, predicted: Tensor, times: Sequence[int], most: int = 24) -> Figure:
    """Fig. 2.7 and 2.8 of the thesis: the frames of a sequence, and below each the prediction that was matched with it.

    Args:
        frames: ``(length, channels, height, width)``, uint8 or in [0, 1].
        predicted: ``(predictions, channels, height, width)`` in [0, 1].
        times: of the frames with which they were matched, ``(predictions,)``.
        most: frames to show, the first ones.

    Raises:
        InputError: there are not as many times as predictions, or one lies outside of the sequence.
    """
    if len(times) != len(predicted) or any(not 0 < time < len(frames) for time in times):
        raise InputError(f"times {list(times)}: expected {len(predicted)} of a sequence of {len(frames)} frames")
    shown = min(most, len(frames))
    figure = Figure(figsize=(0.75 * shown + 0.6, 1.9), layout="constrained")
    axes = figure.subplots(2, shown, squeeze=False)
    of_frame = dict(zip(times, predicted, strict=True))
    for time in range(shown):
        for row, picture in ((0, frames[time]), (1, of_frame.get(time))):
            axes[row, time].set_axis_off()
            if picture is not None:
                _show(axes[row, time], picture)
        axes[0, time].set_title(str(time), fontsize=7)
    return figure


def timelines(times: Tensor, lengths: Tensor, names: Sequence[str] = ()) -> Figure:
    """Where predictions lie in sequences: a line for each of them, a mark for each frame that one was matched with.

    Args:
        times: ``(sequences, predictions + 1)``, -1 after the last one, see :class:`~concord.dynamics.Unrolled`.
        lengths: of the sequences, in frames.
        names: of the sequences.
    """
    figure = Figure(figsize=(7, 0.6 + 0.28 * len(times)), layout="constrained")
    axes = figure.subplots()
    for row, (each, length) in enumerate(zip(times, lengths.tolist(), strict=True)):
        axes.hlines(row, 0, length - 1, color="#cccccc", linewidth=1, zorder=1)
        reached = each[each >= 0].tolist()
        axes.scatter(reached, [row] * len(reached), s=14, color=BLUE, zorder=2, linewidths=0)
    axes.set_yticks(range(len(times)), names or [str(row) for row in range(len(times))])
    axes.invert_yaxis()
    axes.set_xlabel("frame")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def accuracy_figure(runs: ComparedRuns, metric: str = "validation_soft_accuracy") -> Figure:
    """Fig. 2.9 to 2.11: a metric by epochs (left) and by evaluations of the model in training (right).

    The mean over the runs of a method, and the range of the middle half of them.

    Raises:
        InputError: no run has this metric.
    """
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    found = False
    for colour, (name, each) in zip(_COLOURS * len(runs), runs.items(), strict=False):
        histories = [[at for at in run.history if metric in at.metrics] for run in each]
        shortest = min((len(history) for history in histories), default=0)
        if shortest == 0:
            continue
        found = True
        values = np.array([[at.metrics[metric] for at in history[:shortest]] for history in histories])
        low, high = np.quantile(values, [0.25, 0.75], axis=0)
        epochs = np.array([[at.epoch for at in history[:shortest]] for history in histories]).mean(0)
        counted = [[at.metrics.get("model_evaluations", np.nan) for at in each[:shortest]] for each in histories]
        for axes, places in zip(panels, (epochs, np.array(counted).mean(0)), strict=True):
            axes.plot(places, values.mean(0), color=colour, label=name)
            axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    if not found:
        raise InputError(f"metric {metric}: none of the runs has it")
    panels[0].set(xlabel="epoch", ylabel=metric.replace("_", " "))
    panels[1].set(xlabel="evaluations of the model in training")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].xaxis.set_major_locator(MaxNLocator(4))
    panels[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _show(axes: Axes, picture: Tensor) -> None:
    shown = _picture(picture)
    axes.imshow(shown, interpolation="nearest", cmap="gray", vmin=0, vmax=255)


def _picture(frame: Tensor) -> Picture:
    """``(channels, height, width)`` as bytes, ``(height, width, 3)``, or ``(height, width)`` of one channel."""
    picture: Picture = as_bytes(frame).cpu().permute(1, 2, 0).numpy()
    return picture[..., 0] if picture.shape[2] == 1 else picture
