"""Convolutions whose weight gradient is supplied, so that backward does not compute it again.

The sums over a convolution's per-example gradients include the ordinary gradient. Backward would compute it a second
time: a FastResNet's per-example step would take 1.29 times as long.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from concord.gradients.group_gradients import Geometry


def convolve(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, geometry: Geometry, inputs: Tensor, supplied: list[Tensor]
) -> Tensor:
    """The result of the module's forward, for inputs ``(examples, channels, ...)``.

    Backward takes the weight's gradient from ``supplied``, after the hooks of the output's gradient, and computes it if
    ``supplied`` is empty.
    """
    weight, bias = module.weight, module.bias
    device = inputs.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        # Here, so that what is kept for backward is the smaller.
        dtype = torch.get_autocast_dtype(device)
        inputs, weight, bias = inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result: Tensor = _Convolve.apply(inputs, weight, bias, module, geometry, supplied)  # type: ignore[no-untyped-call]
    return result


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: nn.Conv1d | nn.Conv2d | nn.Conv3d,
        geometry: Geometry,
        supplied: list[Tensor],
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry, ctx.supplied = geometry, supplied
        result: Tensor = module._conv_forward(inputs, weight, bias)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad[:3]
        supplied = ctx.supplied.pop() if of_weight and ctx.supplied else None
        wanted = [of_inputs, of_weight and supplied is None, of_bias]
        gradients = ctx.geometry.backward(grad, inputs, weight, wanted) if any(wanted) else [None, None, None]
        if supplied is not None:
            gradients[1] = supplied.to(weight.dtype)
        return *gradients, None, None, None
