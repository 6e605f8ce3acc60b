"""The risk on a compiled model, for training steps: evaluations, checkpoints and callbacks have the model itself."""

import warnings
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from concord.gradients.layout import trainable
from concord.gradients.nonfinite import random_state, set_random_state
from concord.gradients.risk import Batch, MeanRisk, Risk


@dataclass(frozen=True)
class CompiledRisk:
    """A risk that calls a compiled model, which has the parameters of the model that it is given."""

    risk: Risk
    compiled: nn.Module

    def __call__(self, model: nn.Module, batch: Batch, step: int) -> Tensor | tuple[Tensor, Tensor]:
        """The risk of the compiled model."""
        del model
        return self.risk(self.compiled, batch, step)


def compiled_risk(model: nn.Module, risk: Risk, batch: Batch, autocast: torch.dtype | None) -> Risk:
    """The risk on the compiled model, tried on a batch in the model's present mode.

    If PyTorch cannot compile the model, or this machine lacks a compiler, a warning says so; the risk is then the given
    one. Neither buffers nor random numbers change.
    """
    parameters = list(trainable(model).values())
    device = parameters[0].device
    compiled = CompiledRisk(risk, cast(nn.Module, torch.compile(model)))
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    random = random_state(device)
    try:
        value, _ = MeanRisk(model, compiled, autocast, device)(batch, 0)
        torch.autograd.grad(value, parameters, allow_unused=True)
    except Exception as error:  # of any kind, from Dynamo, Inductor or a compiler
        warn_uncompiled(" ".join(str(error).splitlines()[:2]))  # the second one has the reason
        return risk
    finally:
        set_random_state(device, random)
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)
    return compiled


def warn_uncompiled(reason: str) -> None:
    """Say why the model is not compiled."""
    warnings.warn(f"the model is not compiled: {reason}", stacklevel=2)
