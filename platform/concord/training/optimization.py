"""From the aggregated gradient to the next weights: scale, clipping, penalties, optimizer, schedule."""

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, LRScheduler, MultiStepLR

from concord.aggregation import TemporalAndMaskAdam
from concord.errors import InputError
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

    Args:
        parameters: the trained parameters, or groups of them as :mod:`torch.optim` takes them, see
            :meth:`Job.parameters_of <concord.training.job.Job.parameters_of>`. Decoupled penalties take a group's rate.
        config: the options.
        steps: of the run.
        objective: of the run.
        capturable: keep on the device what a CUDA graph of the update needs there: numbers of steps and rates.

    Raises:
        InputError: the optimizer has no such option as a group gives.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        config: ResolvedTrainConfig,
        steps: int,
        objective: Objective | None = None,
        *,
        capturable: bool = False,
    ) -> None:
        options = config.optimizer
        # Of SGD's update the rate is a constant, so that another one needs another graph.
        of_device: dict[str, Any] = {"capturable": True, "foreach": True} if capturable else {}
        self._objective = objective
        own = None if objective is None or objective.alternates else objective  # whose module is trained here
        groups: list[dict[str, Any]] = [{"params": []}]  # of the objective's module, and of ungrouped parameters
        if own is not None and own.module is not None and own.optimizer is None:
            groups[0]["params"] += trainable(own.module).values()
        if parameters and isinstance(parameters[0], dict):
            groups = [*parameters, *(group for group in groups if group["params"])]
        else:
            groups[0]["params"][:0] = parameters
        self._parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        given = {name for group in groups for name in group}  # PyTorch puts all options into them
        self._stepped = own if own is not None and own.optimizer is not None else None
        self._options = options
        self.optimizer: torch.optim.Optimizer
        if options.optimizer == "adam":
            self.optimizer = torch.optim.Adam(groups, lr=options.lr, betas=options.betas, **of_device)
        elif options.optimizer == "adamw":
            decay = options.weight_decay
            self.optimizer = torch.optim.AdamW(
                groups, lr=options.lr, betas=options.betas, weight_decay=decay, **of_device
            )
        elif options.optimizer == "temporal-and-mask":
            self.optimizer = TemporalAndMaskAdam(
                groups,
                options.lr,
                (*options.betas, options.beta3),
                options.temporal_threshold,
                bias_correction=options.bias_correction,
                **of_device,
            )
        else:
            self.optimizer = torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)
        for name in given - {"params", *self.optimizer.defaults}:
            known = ", ".join(self.optimizer.defaults)
            raise InputError(
                f"parameter_groups: {name}: --optimizer {options.optimizer} has no such option; it has {known}"
            )
        self._rates: list[Tensor] = []  # of the groups, on the device
        if capturable and options.optimizer != "sgd":
            device = self._parameters[0].device
            self._rates = [torch.zeros((), device=device) for _ in self.optimizer.param_groups]
        self.scaler: torch.amp.GradScaler | None = None
        """Scales the loss with ``--precision float16``, so that small gradients do not become 0."""
        if options.precision == "float16":
            self.scaler = torch.amp.GradScaler(next((each.device.type for each in self._parameters), "cpu"))
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
        """The learning rate of the next step, of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next step."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def constants(self) -> Hashable:
        """The numbers that a graph of :meth:`update` holds."""
        rates = None if self._rates else [group["lr"] for group in self.optimizer.param_groups]
        return str(rates)

    def state(self) -> list[Tensor]:
        """The tensors that :meth:`update` changes, beside the parameters."""
        return [
            value
            for parameter in self._parameters
            for value in self.optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor)
        ]

    def rates(self) -> list[Tensor]:
        """The rates that a graph of :meth:`update` reads, set to those of the next step."""
        for rate, group in zip(self._rates, self.optimizer.param_groups, strict=False):
            rate.fill_(group["lr"])
        return self._rates

    @contextlib.contextmanager
    def rates_of_device(self) -> Iterator[None]:
        """Let the optimizer read the rates from the device while the body runs."""
        groups = self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=False):
                group["lr"] = rate
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr

    def step(self, step: int) -> bool:
        """:meth:`update`, and :meth:`advance` if there was one."""
        updated = self.update(step)
        if updated:
            self.advance()
        return updated

    @torch.no_grad()
    def update(self, step: int) -> bool:
        """One update from ``parameter.grad``, which a scaler has scaled.

        Args:
            step: the step's number, for the objective's scale.

        Returns:
            False if the gradient is not finite under a scaler: the step only lowered the scale.
        """
        options = self._options
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        groups = [(group["params"], group["lr"]) for group in self.optimizer.param_groups]
        gradients = [cast(Tensor, parameter.grad) for parameter in self._parameters]
        if options.clip > 0:
            nn.utils.clip_grad_norm_(self._parameters, options.clip)
        coupled = options.regularization == "coupled"
        scale = 1.0 if self._objective is None else self._objective.scale(step)
        if coupled and options.l1 > 0:
            torch._foreach_add_(gradients, torch._foreach_sign(self._parameters), alpha=options.l1 * scale)
        if coupled and options.l2 > 0:
            torch._foreach_add_(gradients, self._parameters, alpha=options.l2 * scale)
        if not self._update():
            return False
        for parameters, lr in () if coupled else groups:
            if options.l2 > 0:
                torch._foreach_mul_(parameters, 1 - lr * options.l2)
            if options.l1 > 0:
                for parameter in parameters:
                    parameter.copy_(nn.functional.softshrink(parameter, lr * options.l1))
        return True

    def advance(self) -> None:
        """The rates of the next step."""
        for schedule in self.schedules.values():
            schedule.step()
        if self._stepped is not None and self._stepped.schedule is not None:
            self._stepped.schedule.step()

    def _update(self) -> bool:
        """Step the optimizers; with a scaler whether it found the gradients finite."""
        optimizers = [self.optimizer]
        if self._stepped is not None and self._stepped.optimizer is not None:
            optimizers.append(self._stepped.optimizer)
        if self.scaler is None:
            for each in optimizers:
                each.step()
            return True
        before = self.loss_scale
        for each in optimizers:
            self.scaler.step(each)
        self.scaler.update()
        return self.loss_scale >= before

    def state_dict(self) -> dict[str, Any]:
        """The state of the run's optimizer and of the objective, for a checkpoint."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint."""
        for name, part in self._parts().items():
            state = states[name]
            if part is self.optimizer:  # where it keeps what is this run's, whatever the checkpoint's was
                kept = [
                    {key: group[key] for key in ("capturable", "foreach") if key in group}
                    for group in self.optimizer.param_groups
                ]
                groups = [group | own for group, own in zip(state["param_groups"], kept, strict=True)]
                state = {**state, "param_groups": groups}
            part.load_state_dict(state)

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"optimizer": self.optimizer, **self.schedules}
        if self.scaler is not None:
            parts["scaler"] = self.scaler
        own = {
            f"objective_{name}": getattr(self._objective, name, None) for name in ("module", "optimizer", "schedule")
        }
        return parts | {name: part for name, part in own.items() if part is not None}
