"""Adaptive skip intervals on the platform's loop: the risk of a batch, and the mean over all predictions."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from concord.dynamics.curriculum import Curriculum
from concord.dynamics.matching import FrameLoss, as_float
from concord.dynamics.sequences import number_of, parts_of
from concord.dynamics.trajectory_draws import uniform
from concord.dynamics.unroll import SkipConfig, Unrolled, unroll
from concord.gradients.risk import Batch
from concord.objectives import ERM, Objective


class SkipRisk:
    """Σℓ and Σn of a batch of :func:`~concord.dynamics.sequences`: sum of the predictions' losses, and their number.

    In evaluation mode there is no exploration, and predictions never start from frames of the data.

    Args:
        skips: the matching of predictions.
        curriculum: μ and ε by step.
        seed: the seed of the random draws.
        loss: the loss of a prediction; None takes the cross-entropy of logits.
    """

    counts_evaluations: ClassVar[bool] = True
    """Its weight is the number of the model's evaluations, a prediction each."""

    def __init__(self, skips: SkipConfig, curriculum: Curriculum, seed: int = 0, loss: FrameLoss | None = None) -> None:
        self.skips, self.curriculum, self.seed, self.loss = skips, curriculum, seed, loss

    def __call__(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Σℓ and Σn, two scalars.

        Raises:
            InputError: the batch has another form, or a sequence is too short.
        """
        unrolled = self.unrolled(model, batch, step)
        self._warn_of_nonfinite(unrolled.losses, batch["key"], step)
        total = unrolled.losses.sum()
        return total, unrolled.counts.sum().to(total)

    def unrolled(self, model: nn.Module, batch: Mapping[str, Tensor], step: int) -> Unrolled:
        """The unrolled sequences of a batch; see :meth:`__call__`."""
        frames, lengths, keys = parts_of(batch, self.loss)
        training = model.training
        return unroll(
            model,
            frames,
            lengths,
            self.skips,
            loss=self.loss,
            exploration=self.curriculum.exploration(step) if training else 0.0,
            sampling=self.curriculum.sampling(step) if training else 0.0,
            draws=uniform(self.seed, keys, step, frames.shape[1], 3),
        )

    def example(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The first frames as the model takes them; bytes become 0 to 1."""
        return as_float(parts_of(batch, self.loss)[0][:, 0])

    @staticmethod
    def _warn_of_nonfinite(losses: Tensor, keys: Tensor, step: int) -> None:
        """Name the sequences; the loop decides what follows, the same in every process."""
        wrong = ~torch.isfinite(losses.detach())
        if bool(wrong.any()):
            names = ", ".join(str(number_of(key)) for key in keys[wrong.to(keys.device)].tolist())
            warnings.warn(f"step {step}: the loss of sequence {names} of its environment is not finite", stacklevel=2)


class PredictionMean(Objective):
    """Σ_e Σℓ_e / Σ_e Σn_e: the mean over all predictions of all environments, in one process or several.

    Every prediction counts once, so long sequences count more than short ones (the authors' code; algorithm 1 of the
    thesis adds). The mean of the environments' own means, which an aggregator can replace, is
    :class:`~concord.objectives.ERM` of the same risk.
    """

    coupled: ClassVar[bool] = True

    def terms(
        self, model: nn.Module, batch: Batch, step: int = 0, own: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of each environment's predictions, and their number."""
        means, counts = self.risks(model, batch, step)
        return torch.stack([means, counts.to(means)], 1).flatten(), counts

    def combine(self, terms: Tensor, step: int = 0) -> Tensor:
        """The mean of the means, weighted by the numbers."""
        means, counts = terms.view(-1, 2).unbind(1)
        return (means * counts).sum() / counts.sum()

    def losses(self, terms: Tensor) -> Tensor:
        """The means alone."""
        return terms[:, 0]


def skip_objective(risk: SkipRisk, aggregator: str) -> Objective:
    """The objective of a job: with the aggregator ``mean`` or ``auto`` the mean over all predictions, with any other
    aggregator the environments' own means."""
    kind: Any = PredictionMean if aggregator in ("auto", "mean") else ERM
    made: Objective = kind(risk)
    return made
