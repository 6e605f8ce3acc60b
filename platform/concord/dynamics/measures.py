"""The evaluation of a model of dynamics: its skips, and labels read from its rollouts (thesis, §2.3.1)."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from concord.dynamics.matching import FrameLoss
from concord.dynamics.rollout import accuracies, rollout, rollout_depth
from concord.dynamics.sequences import parts_of
from concord.dynamics.unroll import SkipConfig, unroll

Batches = Callable[[], Iterable[Mapping[str, Tensor]]]


def skip_measures(times: Iterable[Tensor]) -> dict[str, float]:
    """``mean_skip``, the frames of a prediction, and ``predictions``, the mean number of a sequence's.

    Args:
        times: of batches, see :class:`~concord.dynamics.Unrolled`.
    """
    counts, ends = [], []
    for each in times:
        counts.append((each >= 0).sum(1) - 1)
        ends.append(each.amax(1))
    predictions, frames = torch.cat(counts), torch.cat(ends)
    return {
        "mean_skip": float(frames.sum() / predictions.sum()),
        "predictions": float(predictions.double().mean()),
    }


@torch.no_grad()
def task_measures(
    model: nn.Module,
    batches: Batches,
    skips: SkipConfig,
    read_label: Callable[[Tensor, Tensor], Tensor],
    sees_object: Callable[[Tensor], Tensor],
    *,
    loss: FrameLoss | None = None,
) -> dict[str, float]:
    """Measures of a model's rollouts from the first frames of labelled sequences.

    Args:
        model: in evaluation mode.
        batches: gives the same batches each time, on the model's device: ``frames``, ``length``, ``key``, ``label``.
        skips: how far a prediction reaches; it says how many predictions matching needs, and so how long a rollout is.
        read_label: ψ, from frames ``(sequences, depth, ...)`` and the first ones ``(sequences, ...)`` to the share of
            each class, ``(sequences, classes)``.
        sees_object: whether what moves is seen in each frame, ``(sequences, depth, ...)`` to ``(sequences, depth)``.
        loss: that the model was trained with; None: :class:`CrossEntropy`.

    Returns:
        ``soft_accuracy``, the mean share of the true class, as the thesis reports; ``hard_accuracy``, how often it is
        the largest; ``mean_skip`` and ``predictions`` of matching; ``depth`` of the rollouts; ``frames_seen``, how many
        of their frames come before the first in which the object is lost.
    """
    times = []
    for batch in batches():
        frames, lengths, _ = parts_of(batch, loss)
        times.append(unroll(model, frames, lengths, skips, loss=loss).times)
    counts = torch.cat([(each >= 0).sum(1) - 1 for each in times])
    depth = rollout_depth(counts)
    shares, labels, seen = [], [], []
    for batch in batches():
        first = batch["frames"][:, 0]
        found = rollout(model, first, depth, loss=loss)
        shares.append(read_label(found, first).cpu())
        labels.append(batch["label"].cpu())
        seen.append(sees_object(found).long().cumprod(1).sum(1).cpu())
    soft, hard = accuracies(torch.cat(shares), torch.cat(labels))
    return {
        "soft_accuracy": soft,
        "hard_accuracy": hard,
        **skip_measures(times),
        "depth": float(depth),
        "frames_seen": float(torch.cat(seen).double().mean()),
    }
