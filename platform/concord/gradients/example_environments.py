"""A gradient source for which every example of a batch is an environment of its own."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from concord.aggregation import Aggregator, sum_over_environments
from concord.errors import InputError
from concord.gradients.autocast import outputs_of
from concord.gradients.layout import match_strides
from concord.gradients.nonfinite import NonFinite
from concord.gradients.per_example import PerExample
from concord.gradients.stacked import Loss, random_state, set_random_state
from concord.gradients.step import EnvironmentStep
from concord.gradients.step_clock import StepClock

ExampleGradient = Literal["contribution", "loss"]
"""What the gradient of one example is, where the examples of a batch meet in batch norm.

* ``contribution``: what flows through the example's activations. One backward pass for all.
* ``loss``: the exact derivative of the example's loss, through the statistics it shares. One backward pass each, as
  the AND-mask paper's code did.

Without batch norm they are the same; they always sum to the same.
"""


class PerExampleGradients:
    """Aggregate the gradients of single examples, and leave the result in ``parameter.grad``.

    One call replaces ``loss.backward()``::

        gradients = PerExampleGradients(model, torch.nn.functional.cross_entropy, AndMask(threshold=0.2))
        for inputs, targets in batches:  # (environments, batch, ...), (environments, batch)
            step = gradients(inputs, targets)
            optimizer.step()

    The environments of the batch are pooled; which one an example came from plays no part. Batch norm sees all
    examples of this process together, and updates its running statistics once a call.

    Args:
        model: takes inputs ``(examples, ...)``.
        loss: maps outputs and targets to a scalar, the mean over the examples.
        rule: the rule.
        definition: see :data:`ExampleGradient`.
        autocast: the dtype that ``torch.autocast`` is to compute layers in; the loss gets float32. None: as they are.
        rescale: divide each parameter tensor's update by its kept fraction.
        nonfinite: what to do about examples whose gradient is not finite: ``skip`` leaves them out, of batch norm's
            statistics too.
        group: other processes of this group have other examples; all have to call with the same frequency.
        memory_limit: bytes of per-example gradients that may exist at once.
        clock: is told what part of a step time goes to.

    Raises:
        InputError: the model has no parameter that requires a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        rule: Aggregator,
        *,
        definition: ExampleGradient = "contribution",
        autocast: torch.dtype | None = None,
        rescale: bool = False,
        nonfinite: NonFinite = "raise",
        group: dist.ProcessGroup | None = None,
        memory_limit: int = 1 << 28,
        clock: StepClock | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.rule = rule
        self.definition = definition
        self.autocast = autocast
        self.nonfinite = nonfinite
        self.steps = 0
        self._collected = PerExample(
            model,
            rule,
            rescale=rescale,
            nonfinite=nonfinite,
            group=group,
            memory_limit=memory_limit,
            clock=clock,
        )
        self._parameters = list(self._collected.sums.parameters.values())
        self._device = self._collected.sums.device

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._collected.remove()

    def __call__(self, inputs: Tensor, targets: Tensor, step: int | None = None) -> EnvironmentStep:
        """Fill ``parameter.grad`` with the aggregated gradient of these examples.

        Args:
            inputs: ``(environments, batch, ...)``.
            targets: ``(environments, batch, ...)``.
            step: the step's number, for errors; counted from 0 if None.

        Returns:
            The losses of the environments; examples that were left out are named ``example N``, in the order of
            environments and then of the batch.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``.
            InputError: inputs and targets do not fit, there is one example in all processes together, or a layer
                has no per-example gradients.
        """
        if inputs.ndim < 2 or inputs.shape[:2] != targets.shape[:2] or inputs.shape[:2].numel() == 0:
            raise InputError(
                f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: both must begin with the same "
                "(environments, batch), at least one example"
            )
        step = self.steps if step is None else step
        self.steps = step + 1
        examples, wanted = inputs.flatten(0, 1), targets.flatten(0, 1)
        random = random_state(self._device)
        buffers = [buffer.detach().clone() for buffer in self.model.buffers()] if self.nonfinite == "skip" else []
        self._collected.discard()
        outputs, loss = self._collect(examples, wanted)
        finite = torch.ones(len(examples), dtype=torch.bool)
        if not self._finite():
            # Seldom: look at each example, drawing at random what was drawn before.
            self._restore(buffers, random)
            finite = self._which_are_finite(examples, wanted)
            self._restore(buffers, random)
            if self.nonfinite == "skip" and bool(finite.any()):
                self._collect(examples[finite], wanted[finite])
        by_loss = int(finite.sum()) if self.definition == "loss" else None
        finished = self._collected.finish(finite, step, examples=by_loss)
        for parameter in self._parameters:  # that the loss does not depend on
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if len(inputs) == 1:
            losses = loss[None]
        else:
            of_environments = zip(outputs.unflatten(0, inputs.shape[:2]), targets, strict=True)
            losses = torch.stack([self.loss(*pair) for pair in of_environments])
        return EnvironmentStep(losses, finished.kept_fraction, finished.skipped)

    def _collect(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the statistics of these examples; returns the outputs and their mean loss."""
        for parameter in self._parameters:
            parameter.grad = None
        if self.definition == "contribution":
            outputs = self._outputs(inputs)
            loss = self.loss(outputs, targets)
            loss.backward()
        else:
            with self._collected.paused():
                outputs = self._outputs(inputs)
                loss = self._collect_by_loss(outputs, targets)
        return outputs.detach(), loss.detach()

    def _outputs(self, inputs: Tensor) -> Tensor:
        return outputs_of(self.model, inputs, self.autocast)

    def _collect_by_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        sums = self._collected.sums
        losses = [self.loss(outputs[at : at + 1], targets[at : at + 1]) for at in range(len(outputs))]
        for example, loss in enumerate(losses):
            gradients = torch.autograd.grad(
                loss,
                self._parameters,
                retain_graph=example + 1 < len(outputs),
                materialize_grads=True,
            )
            for index, gradient in enumerate(gradients):
                sum_over_environments(self.rule, gradient[None], sums.part(index), accumulate=True)
        for index, parameter in enumerate(self._parameters):
            parameter.grad = match_strides(sums.part(index)["gradient"].to(parameter.dtype), parameter)
        return torch.stack(losses).mean()

    def _finite(self) -> bool:
        # A sum of finite gradients may overflow, too; then it cannot be used.
        sums = [parameter.grad.sum() for parameter in self._parameters if parameter.grad is not None]
        return not sums or bool(torch.isfinite(torch.stack(sums).sum()))

    def _which_are_finite(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Which examples' gradients are finite; none if only their sum is not."""
        with self._collected.watched(len(inputs)) as finite:
            self.loss(self._outputs(inputs), targets).backward()
        for parameter in self._parameters:
            parameter.grad = None
        return torch.zeros_like(finite) if bool(finite.all()) else finite

    @torch.no_grad()
    def _restore(self, buffers: list[Tensor], random: tuple[Tensor, Tensor | None]) -> None:
        for buffer, value in zip(self.model.buffers(), buffers, strict=False):
            buffer.copy_(value)
        set_random_state(self._device, random)
