"""Convolutions whose weight gradient is supplied where it was computed already, so that backward need not do it again.

Summing the statistics of a convolution's per-example gradients forms these gradients, and their sum is the ordinary
one, which backward would compute once more: about a third of a network's step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from concord.gradients.example_layers import symmetric_padding

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def convolve(module: Convolution, inputs: Tensor, supply: Callable[[], Tensor | None]) -> Tensor:
    """What the module's own forward gives.

    Args:
        module: pads with zeros, equally on both sides.
        inputs: ``(examples, channels, ...)``.
        supply: asked in backward, after the hooks of the output's gradient: gives the weight's gradient, or None to
            have it computed.
    """
    weight, bias = module.weight, module.bias
    device = inputs.device.type
    if (
        torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    ):  # here, so that what is kept for backward is the smaller
        dtype = torch.get_autocast_dtype(device)
        inputs, weight, bias = inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result: Tensor = _Convolve.apply(inputs, weight, bias, module, supply)  # type: ignore[no-untyped-call]
    return result


def convolution_gradients(
    module: Convolution, grad: Tensor, inputs: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of a convolution's inputs, weight and bias as backward computes them, where they are wanted."""
    return list(
        torch.ops.aten.convolution_backward(
            grad,
            inputs,
            weight,
            [len(weight)] if wanted[2] else None,
            module.stride,
            symmetric_padding(module),
            module.dilation,
            False,
            [0] * len(module.stride),
            module.groups,
            wanted,
        )
    )


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: Convolution,
        supply: Callable[[], Tensor | None],
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.module, ctx.supply = module, supply
        result: Tensor = module._conv_forward(inputs, weight, bias)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        module = ctx.module
        of_inputs, of_weight, of_bias = ctx.needs_input_grad[:3]
        supplied = ctx.supply() if of_weight else None
        wanted = [of_inputs, of_weight and supplied is None, of_bias]
        gradients: list[Tensor | None] = [None, None, None]
        if any(wanted):
            gradients = convolution_gradients(module, grad, inputs, weight, wanted)
        gradients[1] = gradients[1] if supplied is None else supplied.to(weight.dtype)
        return *gradients, None, None
