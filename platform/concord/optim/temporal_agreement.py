"""Adam under a mask of agreement over time, in place of agreement between the environments of one step."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from concord.aggregation import (
    GRADIENT,
    SIGN,
    Aggregator,
    AndMask,
    Statistic,
    Statistics,
    Update,
    check_statistics,
    kept_where_signs_agree,
)
from concord.aggregation.draws import with_draws
from concord.aggregation.rule import accumulation_dtype
from concord.errors import ArgumentError, InputError
from concord.gradients.layout import match_strides

# Elements that are updated together. On a CPU, what Adam and the rule read and write of them stays in its cache; on
# other devices few kernels are started, and temporaries stay small beside a large model.
_CPU_BLOCK, _BLOCK = 1 << 18, 1 << 26
# On a CPU only what is smaller goes together, since a call costs more than its arithmetic; of others a copy would.
_SMALL = 1 << 14

_Part = tuple[Tensor, ...]
"""Of a parameter or a run of its components: step, parameter, gradient, m, v, averages, draws; alike in shape."""


class TemporalAgreementAdam(Optimizer):
    """Adam, each step of which is multiplied with what a rule keeps, given averages over time in place of environments.

    Where consecutive batches come from different environments, agreement over time is agreement between them
    (Parascandolo et al., Learning explanations that are hard to vary, 2021, appendix B.6). For a rule with statistics
    sᵢ, of which it keeps ``kept(s₁, s₂, …)``::

        m ← β₁ m + (1 - β₁) g
        v ← β₂ v + (1 - β₂) g ⊙ g
        aᵢ ← β₃ aᵢ + (1 - β₃) sᵢ(g)
        θ ← θ - α m / (√v + ε) ⊙ kept(a₁, a₂, …)

    The first two lines and the step are PyTorch's own Adam, whose kernels are used. So under a rule that keeps
    everything it is ``torch.optim.Adam`` with the same arguments, to the last bit; and where the rule keeps nothing, a
    weight stays to the last bit. The averages begin at 0 and are not corrected for it, as in the paper. m is the
    average of the statistic ``GRADIENT``.

    Args:
        params: parameters or parameter groups; a group may have its own values of all options. Parameters that are
            DTensors (of ``fully_shard`` for instance) are updated shard by shard.
        rule: which says what is kept, from averages as from sums over one environment. Its value is not used.
        lr: learning rate α; a tensor needs ``capturable``.
        betas: β₁ and β₂ of Adam, and β₃ of the averages of the rule's statistics.
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

    State of a parameter: ``step``, ``exp_avg`` (m), ``exp_avg_sq`` (v), and for each statistic aᵢ but ``GRADIENT`` its
    average, ``sign_avg`` for instance. Averages are float32 at least; in bfloat16 they would stall. What a checkpoint
    (of Adam, for instance) does not have begins at 0.

    Raises:
        ValueError: an option is out of its range, the rule is none that could be averaged, or a parameter is complex.
        RuntimeError: options contradict one another; or, in ``step``, a gradient is sparse or a parameter's state has
            another shape. Then nothing has been changed.
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
        defaults = {
            "lr": lr,
            "betas": betas,
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

    def rule_of(self, group: dict[str, Any]) -> Aggregator:  # noqa: ARG002  a subclass may go by it
        """The rule of a parameter group. One that depends on the group's options has the same statistics in all."""
        return self.rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; checks its options (ValueError, RuntimeError)."""
        super().add_param_group(param_group)
        try:
            rule = self.rule_of(self.param_groups[-1])
            _check_rule(rule)
            _check_options(self.param_groups[-1], rule)
        except Exception:
            self.param_groups.pop()
            raise

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
        prepared = []
        for group in self.param_groups:
            rule = self.rule_of(group)
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._prepared_state(parameter, group, rule) for parameter in parameters]
            parts = [self._part(*each, rule) for each in zip(parameters, states, strict=True)]
            prepared.append((group, rule, parameters, states, parts))
        # Everything has been checked, and nothing has moved.
        for group, rule, parameters, states, parts in prepared:
            self.state.update(zip(parameters, states, strict=True))
            for together in _blocks(parts):
                _update(group, rule, together)
            if parts:
                torch._foreach_add_([state["step"] for state in states], 1)
            if parts and group["weight_decay"] and group["decoupled"]:
                torch._foreach_mul_([part[1] for part in parts], 1 - group["lr"] * group["weight_decay"])
        return loss

    @torch.no_grad()
    def agreement(self) -> float:
        """The fraction of weights that the mask lets move, over all groups; 1 before the first step."""
        kept, components = 0.0, 0
        for group in self.param_groups:
            rule = self.rule_of(group)
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state:
                    averages = {each.name: _local(state[_key(each)]) for each in rule.statistics}
                    averages |= self._draws(rule, parameter, state["step"])
                    mask = torch.zeros_like(parameter, dtype=torch.float32)
                    _local(mask).copy_(rule.finish(averages, environments=1).kept)
                    total = mask.sum()
                    kept += float(total.full_tensor() if hasattr(total, "full_tensor") else total)
                    components += parameter.numel()
        return kept / components if components else 1.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, the averages as they are: PyTorch rounds all state to the parameters' dtype."""
        given: list[dict[str, Any]] = []
        last = self.register_load_state_dict_pre_hook(lambda _, loaded: given.append(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        for group, saved in zip(self.param_groups, given[0]["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for statistic in _averaged(self.rule):
                    average = given[0]["state"].get(number, {}).get(_key(statistic))
                    if average is not None:
                        self.state[parameter][_key(statistic)] = average.to(parameter.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rule": self.rule}

    def _prepared_state(self, parameter: Tensor, group: dict[str, Any], rule: Aggregator) -> dict[str, Tensor]:
        """The parameter's state, in the memory format that the parameter has now; zeros if there is none yet."""
        found = self.state.get(parameter, {})
        dtypes = {"exp_avg": parameter.dtype, "exp_avg_sq": parameter.dtype}
        wide = accumulation_dtype([parameter.dtype])
        dtypes |= {_key(each): torch.promote_types(wide, each.dtype) for each in _averaged(rule)}
        device = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
        state = {"step": found["step"] if found else torch.zeros((), dtype=torch.float32, device=device)}
        for name, dtype in dtypes.items():
            value = found.get(name)
            if value is None:
                value = torch.zeros_like(parameter, dtype=dtype)
            elif value.shape != parameter.shape:
                shapes = f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}"
                raise RuntimeError(f"state {name} of a parameter has the shape {shapes}")
            elif value.dtype != dtype or _local(value).stride() != _local(parameter).stride():
                value = torch.empty_like(parameter, dtype=dtype).copy_(value)
            state[name] = value
        return state

    def _part(self, parameter: Tensor, state: dict[str, Tensor], rule: Aggregator) -> _Part:
        gradient: Any = parameter.grad
        if gradient.layout != torch.strided:
            raise RuntimeError(f"{type(self).__name__}: a gradient is sparse; its zeros would have to be averaged, too")
        if hasattr(parameter, "placements"):  # autograd may leave a DTensor's gradient as sums still to be added
            gradient = gradient.redistribute(placements=parameter.placements)
        weights = _local(parameter)
        step, *averages = state.values()
        draws = self._draws(rule, parameter, step + 1).values() if getattr(rule, "draws", ()) else ()
        return step, weights, match_strides(_local(gradient), weights), *map(_local, averages), *draws

    def _draws(self, rule: Aggregator, parameter: Tensor, step: Tensor) -> Statistics:
        """What the rule draws for a parameter's components, which are numbered over all of the optimizer's."""

        def components() -> Tensor:
            owned = (each for group in self.param_groups for each in group["params"])
            first = sum(each.numel() for each in itertools.takewhile(lambda each: each is not parameter, owned))
            numbers = torch.arange(first, first + parameter.numel(), device=parameter.device).view(parameter.shape)
            if hasattr(parameter, "placements"):
                from torch.distributed.tensor import distribute_tensor

                like: Any = parameter
                numbers = distribute_tensor(numbers, like.device_mesh, like.placements, src_data_rank=None)
            return match_strides(_local(numbers), _local(parameter))

        return with_draws(rule, {}, int(step), components)


class TemporalAndMaskAdam(TemporalAgreementAdam):
    """Adam that moves a weight only while the signs of its late gradients agree.

    Algorithm 1 of appendix B.6 of the paper: :class:`TemporalAgreementAdam` with the AND-mask, where a is the average
    of signs and the step is taken where |a| ≥ τ. A weight first moves when its gradients have agreed for
    log(1 - τ) / log(β₃) steps; τ = 0 keeps everything.

    Args:
        threshold: agreement threshold τ in [0, 1]; above, no weight could ever move. A group may have its own.
        options: the others of :class:`TemporalAgreementAdam`.
    """

    rule: AndMask

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9),
        threshold: float = 0.4,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, _MaskAlone(threshold), lr, betas, eps, weight_decay, **options)

    def rule_of(self, group: dict[str, Any]) -> Aggregator:
        """The AND-mask with the group's threshold."""
        threshold: float = group.setdefault("threshold", self.rule.threshold)
        return _MaskAlone(threshold)


class _MaskAlone(AndMask):
    """The AND-mask without its value, which nobody uses here and which takes a quarter of the time of a step."""

    statistics: ClassVar[tuple[Statistic, ...]] = (SIGN,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        """The mask."""
        kept = kept_where_signs_agree(sums["sign"], self.threshold, environments)
        return Update(kept, kept)


def _update(group: dict[str, Any], rule: Aggregator, together: Sequence[_Part]) -> None:
    """Adam's step beside the parameters, and of it what the rule keeps."""
    steps, parameters, gradients, exp_avgs, exp_avg_sqs, *others = (
        list(column) for column in zip(*together, strict=True)
    )
    beta1, beta2, beta3 = group["betas"]
    decay = 0.0 if group["decoupled"] else group["weight_decay"]
    moved = [parameter.clone() for parameter in parameters]
    # Adam counts the step. Others may need it as it was; after infinitely many, nothing is left to be corrected.
    steps = [step.clone() if group["bias_correction"] else torch.full_like(step, torch.inf) for step in steps]
    adam(
        moved,
        gradients,
        exp_avgs,
        exp_avg_sqs,
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
    seen = torch._foreach_neg(gradients) if group["maximize"] else gradients
    if decay:
        seen = torch._foreach_add(seen, parameters, alpha=decay)
    gradient = _joined(seen)
    for statistic, averages in zip(_averaged(rule), others, strict=False):
        values = statistic.of(gradient.to(averages[0].dtype)).to(averages[0].dtype)
        torch._foreach_lerp_(averages, _parted(values, averages), 1 - beta3)
    names = [each.name for each in _averaged(rule)] + list(getattr(rule, "draws", ()))
    sums = {name: _joined(column) for name, column in zip(names, others, strict=True)}
    if GRADIENT in rule.statistics:
        sums[GRADIENT.name] = _joined(exp_avgs).to(accumulation_dtype([exp_avgs[0].dtype]))
    kept = rule.finish(sums, environments=1).kept.to(parameters[0].dtype)
    # Between two tensors, a weight of 1 gives the second as it is, a weight of 0 the first.
    torch._foreach_lerp_(parameters, moved, _parted(kept, parameters))


def _blocks(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """What is updated together: of one device and dtype, and of not more elements than the device likes."""
    alike: dict[tuple[torch.device, torch.dtype], list[_Part]] = {}
    for part in parts:
        alike.setdefault((part[1].device, part[1].dtype), []).append(part)
    for (device, _), those in alike.items():
        limit = _CPU_BLOCK if device.type == "cpu" else _BLOCK
        together: list[_Part] = []
        elements = 0
        for part in those:
            for run in _runs(part, limit):
                size = run[1].numel()
                if device.type == "cpu" and size > _SMALL:
                    yield [run]
                    continue
                if together and elements + size > limit:
                    yield together
                    together, elements = [], 0
                together.append(run)
                elements += size
        if together:
            yield together


def _runs(part: _Part, limit: int) -> Iterable[_Part]:
    """A large part in runs of memory; whole if its parameter has gaps or overlaps there."""
    step, *tensors = part
    # The state lies densely in memory, so it is laid out as a parameter that does so, too.
    if tensors[0].numel() <= limit or any(tensor.stride() != tensors[0].stride() for tensor in tensors):
        return [part]
    flat = (tensor.as_strided((tensor.numel(),), (1,)).split(limit) for tensor in tensors)
    return zip(itertools.repeat(step), *flat, strict=False)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The components of all tensors one after the other, so that a rule is asked once."""
    return torch.cat([each.reshape(-1) for each in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)


def _parted(joined: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The reverse of :func:`_joined`: in the shapes of these tensors."""
    if len(tensors) == 1:
        return [joined.view(tensors[0].shape)]
    parts = joined.split([each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _averaged(rule: Aggregator) -> list[Statistic]:
    """The statistics that are averaged beside Adam's own average of gradients."""
    return [each for each in rule.statistics if each != GRADIENT]


def _key(statistic: Statistic) -> str:
    """The name of a statistic's average in a parameter's state."""
    return "exp_avg" if statistic == GRADIENT else f"{statistic.name}_avg"


def _local(tensor: Any) -> Tensor:
    """What this process has of a DTensor; any other tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _check_rule(rule: Aggregator) -> None:
    """Refuse a rule that cannot mask (InputError), as far as a few numbers tell."""
    check_statistics(rule)
    if "exp" in (each.name for each in rule.statistics):
        raise InputError("a statistic's name is exp, and its average would be kept as exp_avg, which is Adam's own")
    probe = torch.tensor([-0.75, 0.0, 0.3, 250.0])
    averages = {each.name: each.of(probe.to(each.dtype)) for each in rule.statistics}
    averages = with_draws(rule, averages, 0, lambda: torch.arange(len(probe)))
    given = {name: average.clone() for name, average in averages.items()}
    kept = rule.finish(averages, environments=1).kept
    if kept.shape != probe.shape:
        shapes = f"{tuple(kept.shape)} for components of shape {tuple(probe.shape)}"
        raise InputError(f"rule {type(rule).__name__}: kept has the shape {shapes}")
    if not all(torch.equal(average, given[name]) for name, average in averages.items()):
        raise InputError(f"rule {type(rule).__name__}: finish writes into the averages, which the next step needs")


def _check_options(group: dict[str, Any], rule: Aggregator) -> None:
    if group["foreach"] and group["fused"]:
        raise RuntimeError("foreach and fused: give one of them")
    if group["capturable"] and getattr(rule, "draws", ()):
        raise RuntimeError(f"capturable: {type(rule).__name__} draws by the step's number, which is needed on the CPU")
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or not group["capturable"]):
        raise ArgumentError("lr", lr, "a tensor must have one element, and needs capturable=True")
    for option in ("lr", "eps", "weight_decay"):
        if not group[option] >= 0:
            raise ArgumentError(option, group[option], "must not be negative")
    if len(betas) != 3:
        raise ArgumentError("betas", betas, "must be three: β₁, β₂ and β₃")
    if not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError("betas", betas, "must lie in [0, 1)")
    if any(parameter.is_complex() for parameter in group["params"]):
        raise ValueError("a parameter is complex, and complex numbers have no sign that could agree")
