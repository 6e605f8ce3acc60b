"""Temporal AND-mask Adam: agreement over time in place of agreement between environments of one step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from concord.gradients.layout import match_strides

# Elements that are updated together on a processor: what Adam and the mask read and write of them stays in its cache.
_BLOCK = 1 << 18
_SMALL = 1 << 14
_STATE = ("exp_avg", "exp_avg_sq", "sign_avg")


class TemporalAndMaskAdam(Optimizer):
    """Adam that moves a weight only while the signs of its late gradients agree.

    Where consecutive batches come from different environments, agreement over time is agreement between them
    (Parascandolo et al., Learning explanations that are hard to vary, 2021, appendix B.6, algorithm 1)::

        m ← β₁ m + (1 - β₁) g
        v ← β₂ v + (1 - β₂) g ⊙ g
        a ← β₃ a + (1 - β₃) sign(g)
        θ ← θ - α (m ⊙ 1[|a| ≥ τ]) / (√v + ε)

    The first two lines and the step are PyTorch's own Adam, whose kernels are used; what the mask drops is then put
    back as it was. So with τ = 0 it is ``torch.optim.Adam`` with the same arguments, to the last bit.

    The average of signs begins at 0 and is not corrected for it, as in the paper: a weight first moves when its
    gradients have agreed for log(1 - τ) / log(β₃) steps.

    Args:
        params: parameters or parameter groups; a group may have its own values of all options.
        lr: learning rate α; a tensor needs ``capturable``.
        betas: β₁ and β₂ of Adam, and β₃ of the average of signs.
        threshold: agreement threshold τ in [0, 1]; above, no weight could ever move.
        eps: ε.
        weight_decay: see ``decoupled``.
        decoupled: weight decay as an update of its own after the masked one, θ ← θ - α λ θ, which moves masked
            weights too and which the paper found better; otherwise λ θ is added to the gradient, as in Adam.
        bias_correction: divide m and v by 1 - βᵗ as Adam does. The paper prints the algorithm without it; then the
            first steps are long, since v begins at 0.
        foreach: one operation for many tensors; None decides as Adam does, yes on a GPU.
        fused: PyTorch's fused kernel for Adam's part.
        capturable: keep the number of steps on the GPU, so that a CUDA graph may hold the step.
        maximize: ascend.

    State of a parameter: ``step``, ``exp_avg`` (m), ``exp_avg_sq`` (v), ``sign_avg`` (a).

    Raises:
        ValueError: an option is out of its range, or a parameter is complex.
        RuntimeError: a gradient is sparse (in ``step``), or options contradict one another. With ``fused``, in
            ``step``: a parameter has gaps or overlaps in memory, which PyTorch's fused kernel would write into.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9),
        threshold: float = 0.4,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
        bias_correction: bool = True,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
    ) -> None:
        if foreach and fused:
            raise RuntimeError("foreach and fused: give one of them")
        if isinstance(lr, Tensor) and (lr.numel() != 1 or not capturable):
            raise ValueError("lr: a tensor must have one element, and needs capturable=True")
        defaults = {
            "lr": lr,
            "betas": betas,
            "threshold": threshold,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "bias_correction": bias_correction,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; checks its options (ValueError)."""
        options = {**self.defaults, **param_group}
        _require("lr", options["lr"], bool(options["lr"] >= 0), "must not be negative")
        betas = options["betas"]
        _require("betas", betas, len(betas) == 3, "must be three: β₁, β₂ and β₃")
        _require("betas", betas, all(0 <= beta < 1 for beta in betas), "must lie in [0, 1)")
        _require("threshold", options["threshold"], 0 <= options["threshold"] <= 1, "must lie in [0, 1]")
        for option in ("eps", "weight_decay"):
            _require(option, options[option], options[option] >= 0, "must not be negative")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                self.param_groups.pop()
                raise ValueError("a parameter is complex, and complex numbers have no sign that could agree")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update from the parameters' gradients; gives the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def agreement(self) -> float:
        """The fraction of weights that the mask lets move, over all groups; 1 before the first step."""
        kept, whole = 0, 0
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state:
                    kept += int((state["sign_avg"].abs() >= group["threshold"]).sum())
                    whole += parameter.numel()
        return kept / whole if whole else 1.0

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        steps = [self._step_of(parameter, group) for parameter in parameters]
        states = [[self.state[parameter][name] for parameter in parameters] for name in _STATE]
        gradients = [match_strides(cast(Tensor, parameter.grad), parameter) for parameter in parameters]
        if group["bias_correction"]:
            counted = steps
        else:  # after infinitely many steps nothing is left to be corrected
            counted = [torch.full_like(step, torch.inf) for step in steps]
            torch._foreach_add_(steps, 1)
        on_processor = all(parameter.device.type == "cpu" for parameter in parameters)
        if on_processor and not group["foreach"] and not group["capturable"]:
            # In pieces that fit the cache; what is small goes together, since a call costs more than its arithmetic.
            together: list[tuple[Tensor, ...]] = []
            for step, *tensors in zip(counted, parameters, gradients, *states, strict=True):
                if tensors[0].numel() <= _SMALL:
                    together.append((step, *tensors))
                    continue
                before = step.clone()
                for block in _blocks(tensors):
                    step.copy_(before)
                    _masked_adam(group, [step], *([each] for each in block))
            if together:
                _masked_adam(group, *(list(column) for column in zip(*together, strict=True)))
        else:
            _masked_adam(group, counted, parameters, gradients, *states)
        if group["weight_decay"] and group["decoupled"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])

    def _step_of(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise RuntimeError("TemporalAndMaskAdam: a gradient is sparse; its zeros would have to be averaged, too")
        state = self.state[parameter]
        if not state:
            device = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in _STATE:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for name in _STATE:  # a checkpoint, or the model since, may have another memory format
            state[name] = match_strides(state[name], parameter)
        if group["fused"] and state["sign_avg"].stride() != parameter.stride():
            shape = tuple(parameter.shape)
            raise RuntimeError(f"fused: a parameter of shape {shape} has gaps or overlaps in memory; copy it densely")
        step: Tensor = state["step"]
        return step


def _masked_adam(
    group: dict[str, Any],
    steps: list[Tensor],
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    signs: list[Tensor],
) -> None:
    """Adam's step on these tensors, then back with what the mask drops."""
    beta1, beta2, beta3 = group["betas"]
    threshold, decay = group["threshold"], 0.0 if group["decoupled"] else group["weight_decay"]
    before = [parameter.clone() for parameter in parameters] if threshold > 0 else []
    seen = torch._foreach_neg(gradients) if group["maximize"] else gradients
    if decay:
        seen = torch._foreach_add(seen, parameters, alpha=decay)
    adam(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        foreach=group["foreach"],
        fused=group["fused"],
        capturable=group["capturable"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=decay,
        eps=group["eps"],
        maximize=group["maximize"],
    )
    torch._foreach_lerp_(signs, torch._foreach_sign(seen), 1 - beta3)
    if threshold > 0:
        _put_back(before, parameters, signs, threshold)


def _put_back(before: list[Tensor], parameters: list[Tensor], signs: list[Tensor], threshold: float) -> None:
    """Set the parameters to what they were before where |a| < τ.

    The mask is made of numbers: comparisons that give booleans are several times slower on a processor. Between two
    tensors, a weight of 1 gives the second as it is, a weight of 0 the first.
    """
    mask = torch._foreach_abs(signs)
    if len(mask) == 1:
        torch.lerp(before[0], parameters[0], mask[0].ge_(threshold), out=parameters[0])
        return
    torch._foreach_sub_(mask, threshold)
    torch._foreach_sign_(mask)
    torch._foreach_add_(mask, 1)
    torch._foreach_clamp_max_(mask, 1)
    torch._foreach_lerp_(before, parameters, mask)
    torch._foreach_copy_(parameters, before)


def _blocks(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Tensors of one shape in pieces, cut at the same places."""
    first = tensors[0]
    alike = all(tensor.stride() == first.stride() for tensor in tensors)
    dense = first.is_contiguous() or (first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last))
    if first.numel() <= _BLOCK or not alike or not dense:
        yield tensors
        return
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    for start in range(0, first.numel(), _BLOCK):
        yield [tensor[start : start + _BLOCK] for tensor in flat]


def _require(option: str, value: object, right: bool, expected: str) -> None:
    if not right:
        raise ValueError(f"{option} {value}: {expected}")
