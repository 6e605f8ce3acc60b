"""Adam under a mask of agreement over time, in place of agreement between the environments of one step."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from concord.aggregation.agreement import kept_where_signs_agree
from concord.aggregation.and_mask import AndMask
from concord.aggregation.draws import with_draws
from concord.aggregation.families import of_sums
from concord.aggregation.rule import Aggregator, Update, accumulation_dtype, aggregate, sum_over_environments
from concord.aggregation.statistic import GRADIENT, SIGN, Statistic, Statistics
from concord.aggregation.strides import match_strides
from concord.errors import ArgumentError, InputError

# Elements that are updated together: on a CPU their state stays in the cache, on a GPU few kernels are started.
CPU_BLOCK, _BLOCK = 1 << 18, 1 << 26

_Part = list[Tensor]
"""Step, parameter, gradient, m, v, averages and draws: of a parameter, or of a run of its components."""


class TemporalAgreementAdam(Optimizer):
    """Adam whose steps are masked by a rule, which sees averages over time in place of sums over environments.

    If consecutive batches come from different environments, agreement over time is agreement between environments
    (Parascandolo et al., Learning explanations that are hard to vary, 2021, appendix B.6). For a rule with statistics
    sᵢ, of which it keeps ``kept(s₁, s₂, …)``::

        m ← β₁ m + (1 - β₁) g
        v ← β₂ v + (1 - β₂) g ⊙ g
        aᵢ ← β₃ aᵢ + (1 - β₃) sᵢ(g)
        θ ← θ - α m / (√v + ε) ⊙ kept(a₁, a₂, …)

    If the rule keeps everything, this is ``torch.optim.Adam`` with the same arguments, to the last bit; if it keeps
    nothing, a weight does not change. The averages begin at 0 without a correction, as in the paper.
    m is the average of the statistic ``GRADIENT``. For any other statistic the state of a parameter has an average
    beside Adam's, such as ``sign_avg``, in float32 at least. An average that a checkpoint lacks begins at 0.

    Args:
        params: parameters or parameter groups; a group may have its own values of all options. Parameters that are
            DTensors (of ``fully_shard`` for instance) are updated shard by shard.
        rule: decides what is kept. The value of its update is not used.
        lr: learning rate α; a tensor needs ``capturable``.
        betas: β₁ and β₂ of Adam, and β₃ of the averages of the rule's statistics.
        eps: ε.
        weight_decay: λ, see ``decoupled``.
        decoupled: weight decay as an update of its own after the masked one, θ ← θ - α λ θ, which also moves masked
            weights and which the paper found better; otherwise λ θ is added to the gradient, as in Adam.
        bias_correction: divide m and v by 1 - βᵗ as Adam does. The paper prints the algorithm without it; then the
            first steps are long, since v begins at 0.
        foreach: one operation for many tensors, unless False.
        fused: PyTorch's fused kernel for Adam's part.
        capturable: keep the number of steps on the GPU, so that a CUDA graph may hold the step.
        maximize: maximize the objective in place of minimizing it.

    Raises:
        ValueError: an option is out of its range, the rule cannot mask, or a parameter is complex.
        RuntimeError: options contradict one another; or, in ``step``, a gradient is sparse or a parameter's state has
            another shape. In that case nothing is changed.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        rule: Aggregator,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9),
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
        self.rule = rule
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        options |= {"bias_correction": bias_correction, "maximize": maximize}
        super().__init__(params, {**options, "foreach": foreach, "fused": fused, "capturable": capturable})

    def rule_of(self, group: dict[str, Any]) -> Aggregator:
        """The rule of a parameter group; rules of different groups have the same statistics."""
        return self.rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; checks its options (ValueError, RuntimeError)."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1], self.rule_of(self.param_groups[-1]))
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the parameters' gradients; returns the closure's loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        prepared = []
        for group in self.param_groups:
            rule = self.rule_of(group)
            owned = [parameter for parameter in group["params"] if parameter.grad is not None]
            prepared.append((group, rule, {each: self._prepared(each, group, rule) for each in owned}))
        # Everything has been checked, and nothing has moved.
        for group, rule, ready in prepared:
            for block in _blocks(part for _, part in ready.values()):
                _update(group, rule, block)
            for parameter, (state, _) in ready.items():
                state["step"] += 1
                self.state[parameter] = state
        return loss

    @torch.no_grad()
    def agreement(self) -> float:
        """The fraction of weights that the mask lets move, over all groups; 1 before the first step."""
        kept, components = 0.0, 0
        for group in self.param_groups:
            rule = self.rule_of(group)
            for parameter in (each for each in group["params"] if self.state.get(each)):
                state, mask = self.state[parameter], torch.zeros_like(parameter, dtype=torch.float32)
                averages = {each.name: _local(state[_key(each)]) for each in rule.statistics}
                averages |= self._draws(rule, parameter, state["step"])
                _local(mask).copy_(rule.finish(averages, environments=1).kept)
                total: Any = mask.sum()
                kept += float(total.full_tensor() if hasattr(total, "full_tensor") else total)
                components += parameter.numel()
        return kept / components if components else 1.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state without rounding the averages, as PyTorch would, to the parameters' dtype.

        A state of ``torch.optim.Adam`` or ``AdamW`` fits, too: its averages go on, the rule's begin at 0, and
        options that it does not have, such as β₃, stay as they are here. InputError for a state with ``amsgrad``, or of
        an optimizer that is not Adam's kind.
        """
        if any(each and not each.keys() >= {"step", "exp_avg", "exp_avg_sq"} for each in state_dict["state"].values()):
            raise InputError("state: it lacks Adam's averages exp_avg and exp_avg_sq; load a state of Adam or AdamW")
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # otherwise PyTorch raises
            groups = [self._completed(*pair) for pair in zip(groups, self.param_groups, strict=True)]
        state_dict = {**state_dict, "param_groups": groups}
        super().load_state_dict(state_dict)
        names = {_key(each) for each in _averaged(self.rule)}
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for parameter, number in zip(self._parameters(), numbers, strict=True):
            saved = state_dict["state"].get(number, {})
            for name in saved.keys() & names:
                self.state[parameter][name] = saved[name].to(parameter.device, copy=True)

    def _completed(self, saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """The options of a saved group, with this optimizer's own where it has none (an error if they do not fit)."""
        if saved.get("amsgrad"):
            raise InputError("amsgrad: the state keeps the largest averages of Adam's amsgrad, which is not used here")
        found = {**group, **saved}
        if len(found["betas"]) == 2:  # Adam's
            found["betas"] = (*found["betas"], group["betas"][2])
            found["decoupled"] = saved.get("decoupled_weight_decay", group["decoupled"])
        _check({**found, "params": group["params"]}, self.rule_of(found))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rule": self.rule}

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _prepared(self, parameter: Tensor, group: dict[str, Any], rule: Aggregator) -> tuple[dict[str, Tensor], _Part]:
        """The parameter's state (zeros at first), in its present memory format, and the inputs of its step."""
        gradient: Any = parameter.grad
        if gradient.layout != torch.strided:
            raise RuntimeError(f"{type(self).__name__}: a gradient is sparse; the averages need a dense one")
        if hasattr(parameter, "placements"):  # autograd may leave a DTensor's gradient as sums still to be added
            gradient = gradient.redistribute(placements=parameter.placements)
        found, weights = self.state.get(parameter, {}), _local(parameter)
        device = parameter.device if group["capturable"] or group["fused"] else "cpu"
        step = found["step"] if found else torch.zeros((), dtype=torch.float32, device=device)
        state: dict[str, Tensor] = {}
        dtypes = {"exp_avg": parameter.dtype, "exp_avg_sq": parameter.dtype}
        wide = accumulation_dtype([parameter.dtype])
        dtypes |= {_key(each): torch.promote_types(wide, each.dtype) for each in _averaged(rule)}
        for name, dtype in dtypes.items():
            value = found.get(name)
            if value is None:
                value = torch.zeros_like(parameter, dtype=dtype)
            elif value.shape != parameter.shape:
                shapes = f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}"
                raise RuntimeError(f"state {name} of a parameter has the shape {shapes}")
            elif value.dtype != dtype or _local(value).stride() != weights.stride():
                value = torch.empty_like(parameter, dtype=dtype).copy_(value)
            state[name] = value
        draws = self._draws(rule, parameter, step + 1).values()
        part = [step, weights, match_strides(_local(gradient), weights), *map(_local, state.values()), *draws]
        return {"step": step, **state}, part

    def _draws(self, rule: Aggregator, parameter: Any, step: Tensor) -> Statistics:
        """The numbers that the rule draws for a parameter's components, numbered over all of the optimizer's."""

        def components() -> Tensor:
            before = itertools.takewhile(lambda each: each is not parameter, self._parameters())
            numbers = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
            numbers += sum(each.numel() for each in before)
            if hasattr(parameter, "placements"):
                from torch.distributed.tensor import distribute_tensor  # takes seconds

                numbers = distribute_tensor(numbers, parameter.device_mesh, parameter.placements, src_data_rank=None)
            return match_strides(_local(numbers), _local(parameter))

        return with_draws(rule, {}, step, components)


class TemporalAndMaskAdam(TemporalAgreementAdam):
    """Adam that moves a weight only while the signs of its recent gradients agree.

    Algorithm 1 of appendix B.6 of the paper: :class:`TemporalAgreementAdam` with the AND-mask, where a is the average
    of signs and the step is taken where |a| ≥ τ. A weight first moves when its gradients have agreed for
    log(1 - τ) / log(β₃) steps; τ = 0 keeps everything.

    Args:
        threshold: agreement threshold τ in [0, 1]. A group may have its own.
        options: the other options of :class:`TemporalAgreementAdam`.
    """

    rule: AndMask

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9),
        threshold: float = 0.4,
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(params, _MaskAlone(threshold), lr, betas, *args, **options)

    def rule_of(self, group: dict[str, Any]) -> Aggregator:
        """The AND-mask with the group's threshold."""
        return _MaskAlone(group.setdefault("threshold", self.rule.threshold))


class _MaskAlone(AndMask):
    """The AND-mask without its value, which is not used here and takes time."""

    statistics: ClassVar[tuple[Statistic, ...]] = (SIGN,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The mask."""
        kept = kept_where_signs_agree(sums["sign"], self.threshold, environments)
        return Update(kept, kept)


def _update(group: dict[str, Any], rule: Aggregator, block: Sequence[_Part]) -> None:
    """Adam's step, masked by the rule."""
    steps, parameters, gradients, exp_avgs, exp_avg_sqs, *others = map(list, zip(*block, strict=True))
    beta1, beta2, beta3 = group["betas"]
    lr, decay = group["lr"], 0.0 if group["decoupled"] else group["weight_decay"]
    ages = [step + 1 if group["bias_correction"] else torch.full_like(step, math.inf) for step in steps]
    moved = []
    if group["fused"] or group["capturable"] or group["foreach"] is False:  # PyTorch's kernel, on a copy
        moved = [parameter.clone() for parameter in parameters]
        options = {name: group[name] for name in ("lr", "eps", "maximize", "foreach", "fused", "capturable")}
        options |= {"amsgrad": False, "beta1": beta1, "beta2": beta2, "weight_decay": decay}
        adam(moved, gradients, exp_avgs, exp_avg_sqs, [], [age - 1 for age in ages], **options)
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    if decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
    if not moved:
        torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, value=1 - beta2)
    for statistic, averages in zip(_averaged(rule), others, strict=False):
        values = statistic.of(_joined(gradients).to(averages[0].dtype)).to(averages[0].dtype)
        torch._foreach_lerp_(averages, _parted(values, averages), 1 - beta3)
    names = [*(each.name for each in _averaged(rule)), *getattr(rule, "draws", ())]
    sums = {name: _joined(column) for name, column in zip(names, others, strict=True)}
    if GRADIENT in rule.statistics:
        sums[GRADIENT.name] = _joined(exp_avgs).to(accumulation_dtype([exp_avgs[0].dtype]))
    kept = _parted(rule.finish(sums, environments=1).kept.to(parameters[0].dtype), parameters)
    if moved:  # a weight of 1 gives the second of two tensors as it is, a weight of 0 the first
        torch._foreach_lerp_(parameters, moved, kept)
    else:
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denominators, [(1 - beta2 ** float(age)) ** 0.5 for age in ages])
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_div_(denominators, kept)  # m / ∞ is 0, the step of a weight that is not kept
        step_sizes = [-(lr / (1 - beta1 ** float(age))) for age in ages]
        torch._foreach_addcdiv_(parameters, exp_avgs, denominators, step_sizes)
    if group["decoupled"] and group["weight_decay"]:
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])


def _blocks(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """The parts that are updated together, of one device and dtype; large tensors are cut."""
    alike: dict[tuple[torch.device, torch.dtype], list[_Part]] = {}
    for part in sorted(parts, key=lambda part: part[1].numel()):
        alike.setdefault((part[1].device, part[1].dtype), []).append(part)
    for (device, _), those in alike.items():
        limit = CPU_BLOCK if device.type == "cpu" else _BLOCK
        block: list[_Part] = []
        for step, *tensors in those:
            # State and gradient lie densely in memory; if the parameter does not, its strides differ from theirs.
            if tensors[0].numel() > limit and all(each.stride() == tensors[0].stride() for each in tensors):
                flat = [tensor.as_strided((tensor.numel(),), (1,)).split(limit) for tensor in tensors]
                yield from ([[step, *run]] for run in zip(*flat, strict=True))
                continue
            if block and sum(each[1].numel() for each in block) + tensors[0].numel() > limit:
                yield block
                block = []
            block.append([step, *tensors])
        if block:
            yield block


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The concatenated components of all tensors, so that the rule is called once."""
    return torch.cat([each.reshape(-1) for each in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)


def _parted(joined: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The reverse of :func:`_joined`: in the shapes of these tensors."""
    parts = joined.split([each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _averaged(rule: Aggregator) -> list[Statistic]:
    """The statistics that are averaged beside Adam's own average of gradients."""
    return [each for each in rule.statistics if each != GRADIENT]


def _key(statistic: Statistic) -> str:
    """The name of a statistic's average in a parameter's state."""
    return "exp_avg" if statistic == GRADIENT else f"{statistic.name}_avg"


def _local(tensor: Any) -> Any:
    """The part of a DTensor in this process; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _check(group: dict[str, Any], rule: Aggregator) -> None:
    """Refuse a rule that cannot mask a few numbers, and wrong options."""
    kind, lr, betas = type(rule).__name__, group["lr"], group["betas"]
    probe = torch.tensor([[-0.75, 0.0, 0.3, 250.0]], device="cpu")
    aggregate(of_sums(rule, "an average over steps"), probe)
    if getattr(rule, "counts_environments", False):
        raise InputError(
            f"rule {kind}: its test needs the number of environments, which averages over steps do not have"
        )
    if any(each.name == "exp" for each in rule.statistics):
        raise InputError("a statistic's name is exp, and its average would be kept as exp_avg, which is Adam's own")
    averages = with_draws(rule, sum_over_environments(rule, probe), 0, lambda: torch.arange(4, device="cpu"))
    before = {name: average.clone() for name, average in averages.items()}
    rule.finish(averages, environments=1)
    if not all(torch.equal(average, before[name]) for name, average in averages.items()):
        raise InputError(f"rule {kind}: finish writes into the averages, which the next step needs")
    if group["foreach"] and group["fused"]:
        raise RuntimeError("foreach and fused: give one of them")
    if group["capturable"] and getattr(rule, "draws", ()):
        raise RuntimeError(f"capturable: {kind} draws by the step's number, which is needed on the CPU")
    if isinstance(lr, Tensor) and not (lr.numel() == 1 and group["capturable"]):
        raise ArgumentError("lr", lr, "a tensor must have one element, and needs capturable=True")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ArgumentError(name, group[name], "must not be negative")
    if len(betas) != 3 or not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError("betas", betas, "must be three in [0, 1): β₁, β₂ and β₃")
    if any(parameter.is_complex() for parameter in group["params"]):
        raise ValueError("a parameter is complex, and complex numbers have no sign that could agree")
