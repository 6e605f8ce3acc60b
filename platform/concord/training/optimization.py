"""From the aggregated gradient to the next weights: clipping, penalties, optimizer, schedule."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, LRScheduler, MultiStepLR

from concord.aggregation import TemporalAndMaskAdam
from concord.gradients.layout import trainable
from concord.objectives import Objective
from concord.training.options import ResolvedTrainConfig


class Optimization:
    """The optimizer of a run with its schedule and penalties; every parameter needs a gradient at each step.

    Penalties see every trainable parameter. Coupled ones are added to the gradient after aggregation, as in the AND-
    mask paper's code: a masked weight then has the penalty as its only gradient, which Adam scales to a full step. An
    objective that divides its loss by a large λ divides them as well, as in the code of IRM's authors. Decoupled ones
    are updates of their own: L2 shrinks a weight by ``lr·l2·w``, L1 moves it by ``lr·l1`` towards zero and stops there.

    An objective's own module is trained as well: like the model, or by the objective's optimizer, which has neither
    clipping nor penalties. A module that the objective trains itself is only kept in checkpoints.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: ResolvedTrainConfig,
        steps: int,
        objective: Objective | None = None,
    ) -> None:
        options = config.optimizer
        self._parameters: list[Tensor] = list(parameters)
        self._objective = objective
        own = None if objective is None or objective.alternates else objective  # whose module is trained here
        if own is not None and own.module is not None and own.optimizer is None:
            self._parameters += trainable(own.module).values()
        self._stepped = own if own is not None and own.optimizer is not None else None
        self._options = options
        self.optimizer: torch.optim.Optimizer
        if options.optimizer == "adam":
            self.optimizer = torch.optim.Adam(self._parameters, lr=options.lr, betas=options.betas)
        elif options.optimizer == "temporal-and-mask":
            self.optimizer = TemporalAndMaskAdam(
                self._parameters,
                options.lr,
                (*options.betas, options.beta3),
                options.temporal_threshold,
                bias_correction=options.bias_correction,
            )
        else:
            self.optimizer = torch.optim.SGD(self._parameters, lr=options.lr, momentum=options.momentum)
        # Each multiplies the rate by a factor of its own, so that they combine.
        asked = config.schedule
        fractions = asked.milestones if asked.schedule == "milestones" else ()
        milestones = [max(1, round(fraction * steps)) for fraction in fractions]
        self.schedules: dict[str, LRScheduler] = {
            "schedule": CosineAnnealingLR(self.optimizer, steps)
            if asked.schedule == "cosine"
            else MultiStepLR(self.optimizer, milestones, gamma=asked.decay)
        }
        if asked.decay_per_step != 1:
            self.schedules["step_schedule"] = ExponentialLR(self.optimizer, asked.decay_per_step)
        if (rising := round(asked.warmup * steps)) > 1:
            self.schedules["warmup"] = LinearLR(self.optimizer, 1 / rising, total_iters=rising - 1)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self, step: int) -> None:
        """One update from ``parameter.grad``; ``step`` is the step's number, for the objective's scale."""
        options, lr = self._options, self.lr
        gradients = [cast(Tensor, parameter.grad) for parameter in self._parameters]
        if options.clip > 0:
            nn.utils.clip_grad_norm_(self._parameters, options.clip)
        coupled = options.regularization == "coupled"
        scale = 1.0 if self._objective is None else self._objective.scale(step)
        if coupled and options.l1 > 0:
            torch._foreach_add_(gradients, torch._foreach_sign(self._parameters), alpha=options.l1 * scale)
        if coupled and options.l2 > 0:
            torch._foreach_add_(gradients, self._parameters, alpha=options.l2 * scale)
        self.optimizer.step()
        if not coupled and options.l2 > 0:
            torch._foreach_mul_(self._parameters, 1 - lr * options.l2)
        if not coupled and options.l1 > 0:
            for parameter in self._parameters:
                parameter.copy_(nn.functional.softshrink(parameter, lr * options.l1))
        for schedule in self.schedules.values():
            schedule.step()
        if self._stepped is not None and self._stepped.optimizer is not None:
            self._stepped.optimizer.step()
            if self._stepped.schedule is not None:
                self._stepped.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of the run's optimizer and of the objective, for a checkpoint."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint."""
        for name, part in self._parts().items():
            part.load_state_dict(states[name])

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"optimizer": self.optimizer, **self.schedules}
        own = {
            f"objective_{name}": getattr(self._objective, name, None) for name in ("module", "optimizer", "schedule")
        }
        return parts | {name: part for name, part in own.items() if part is not None}
