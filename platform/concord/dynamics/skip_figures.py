"""Figures of adaptive skips: sequences beside their predictions, timelines, rollouts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from concord.analysis.figures import BLUE, new_figure, one_panel
from concord.analysis.trajectory_figures import as_bytes
from concord.dynamics import rollout, unroll
from concord.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DRAWN, _SHOWN = 12, 24  # sequences; frames of one


def skip_figures(job: Any, config: Any, outcome: Any, model: nn.Module) -> "Mapping[str, Figure | Tensor]":
    """Draw the skips of a trained model on sequences that did not train it; for a job's ``figures``.

    The figures show the matched frames of the predictions (Fig. 2.7 and 2.8 of the thesis), and a rollout beside the
    true frames of the same times. For any job on :func:`~concord.dynamics.sequences` whose options have ``skips``.
    Predictions are matched and fed back by the ``loss`` of the job's risk; a risk without one takes the cross-entropy.
    """
    loss = getattr(job.risk_of(config), "loss", None)
    environments = job.environments(config)
    name = (*environments.validation, *environments.test, *environments.train)[0]
    device = next(model.parameters()).device
    batch = pytree.tree_map(lambda leaf: leaf.to(device), environments[name].take(slice(0, _DRAWN)))
    with torch.no_grad():
        times = unroll(model, batch["frames"], batch["length"], config.skips.skips, loss=loss).times
    matched = times[0, 1:][times[0, 1:] >= 0]
    predicted = rollout(model, batch["frames"][:1, 0], len(matched), loss=loss)[0].cpu()
    frames = batch["frames"][0, : batch["length"][0]].cpu()
    return {
        "sequence": aligned_sequences(frames, predicted, matched.tolist()),
        "skips": timelines(times, batch["length"].cpu()),
        "rollout": torch.stack([as_bytes(frames[matched]), as_bytes(predicted)]),
    }


def aligned_sequences(frames: Tensor, predicted: Tensor, times: Sequence[int]) -> "Figure":
    """Fig. 2.7 and 2.8 of the thesis: the first 24 frames of a sequence, and below each the matched prediction.

    Frames are ``(length, channels, height, width)``, uint8 or in [0, 1], predictions ``(predictions, ...)`` in [0, 1],
    each matched with the frame at its time.
    """
    if len(times) != len(predicted) or any(not 0 < time < len(frames) for time in times):
        raise InputError(f"times {list(times)}: expected {len(predicted)} of a sequence of {len(frames)} frames")
    shown = min(_SHOWN, len(frames))
    figure = new_figure(0.75 * shown + 0.6, 1.9)
    axes = figure.subplots(2, shown, squeeze=False)
    of_frame = dict(zip(times, predicted, strict=True))
    for time in range(shown):
        for row, picture in ((0, frames[time]), (1, of_frame.get(time))):
            axes[row, time].set_axis_off()
            if picture is not None:
                _show(axes[row, time], picture)
        axes[0, time].set_title(str(time), fontsize=7)
    return figure


def timelines(times: Tensor, lengths: Tensor) -> "Figure":
    """The places of predictions in sequences: a line for each sequence, a mark for each matched frame.

    Times are those of :class:`~concord.dynamics.Unrolled`, lengths in frames.
    """
    figure, axes = one_panel(7, 0.6 + 0.28 * len(times))
    for row, (each, length) in enumerate(zip(times, lengths.tolist(), strict=True)):
        axes.hlines(row, 0, length - 1, color="#cccccc", linewidth=1, zorder=1)
        reached = each[each >= 0].tolist()
        axes.scatter(reached, [row] * len(reached), s=14, color=BLUE, zorder=2, linewidths=0)
    axes.set_yticks(range(len(times)))
    axes.invert_yaxis()
    axes.set_xlabel("frame")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _show(axes: "Axes", frame: Tensor) -> None:
    """Draw ``(channels, height, width)``."""
    picture = as_bytes(frame).cpu().permute(1, 2, 0).numpy()
    shown = picture[..., 0] if picture.shape[2] == 1 else picture
    axes.imshow(shown, interpolation="nearest", cmap="gray", vmin=0, vmax=255)
