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
    """``mean_skip``, the mean frames of a prediction, and ``predictions``, the mean predictions of a sequence.

    Args:
        times: the ``times`` of batches, see :class:`~concord.dynamics.Unrolled`.
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
        batches: returns the same batches at each call, on the model's device: ``frames``, ``length``, ``key``,
            ``label``.
        skips: the matching, whose number of predictions decides the length of a rollout.
        read_label: ψ, from frames ``(sequences, depth, ...)`` and the first ones ``(sequences, ...)`` to the share of
            each class, ``(sequences, classes)``.
        sees_object: whether the moving object is visible in each frame, ``(sequences, depth, ...)`` to ``(sequences,
            depth)``.
        loss: the loss of the training; None takes :class:`CrossEntropy`.

    Returns:
        ``soft_accuracy``, the mean share of the true class, as the thesis reports; ``hard_accuracy``, the fraction
        where it is the largest; ``mean_skip`` and ``predictions`` of the matching; ``depth`` of the rollouts;
        ``frames_seen``, the mean number of their frames before the object disappears.
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
