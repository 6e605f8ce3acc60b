"""What the collective gradients promise, as functions that run in every one of several real gloo processes.

``test_collective.py`` runs them; by hand: ``python tests/gradients/collective_checks.py [NAME …]``. PyTorch is imported
once, and processes are forked from that, one group for each number of them. After a check that fails or hangs there is
a new group, so it leaves the others alone. One JSON line a check: its name, its traceback or null, its seconds.
"""

import contextlib
import copy
import dataclasses
import faulthandler
import gc
import itertools
import json
import math
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from own_rules import OWN_RULES, Averages, looped
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import (
    GRADIENT,
    SIGN,
    Aggregator,
    AndMask,
    GeometricMean,
    Mean,
    SandMask,
    Statistic,
    Statistics,
    TMask,
    Update,
    XorMask,
    aggregate,
)
from concord.environments.batches import names_of_batches
from concord.errors import InputError
from concord.gradients import (
    AggregationHook,
    HookedGradients,
    NonFiniteGradientError,
    PerExampleGradients,
    StackedGradients,
    aggregation_hook,
    per_example,
    register_aggregation_hook,
)
from concord.objectives import (
    DANN,
    IRMv1,
    MetaIRM,
    MMREx,
    Objective,
    ObjectiveGradients,
    PenaltyWeight,
    VREx,
)
from concord.objectives import objective as objective_named
from concord.training import ProcessContext, load_job, train
from concord.training.context import Silent

SECONDS = 30  # after which a check counts as hanging
TINY = 20 / (1 << 20)  # a bucket of 20 bytes, in MiB

RULES: dict[str, Aggregator] = {
    "mean": Mean(),
    "and-mask": AndMask(0.6),
    "geometric-mean": GeometricMean(0.6),
    "xor-mask": XorMask(0.6),
    "sand-mask": SandMask(0.3, steepness=1e-3),
    "t-mask": TMask(0.3),
}
CHECKS: dict[str, tuple[int, Callable[[], None]]] = {}

Gradients = dict[str, tuple[Tensor, Tensor]]
"""For every parameter's name its gradient and its kept fraction."""


def check(*worlds: int, **options: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a check for these numbers of processes and every combination of the options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for world, *values in itertools.product(worlds, *options.values()):
            arguments = dict(zip(options, values, strict=True))
            labels = [value if isinstance(value, str) else f"{name}={value}" for name, value in arguments.items()]
            name = "-".join([function.__name__, f"{world} processes", *labels])
            CHECKS[name] = world, lambda arguments=arguments: function(**arguments)
        return function

    return register


# What the checks share


def network(seed: int = 0) -> nn.Sequential:
    """A network of 275 components: no number of processes used here divides it at the borders of its layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(environments: int, seed: int = 0, batch: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs and targets of environments that share one mechanism beside one of their own."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(environments, batch, 6, generator=generator)
    shared = torch.randn(6, 3, generator=generator)
    own = torch.randn(environments, 6, 3, generator=generator)
    return inputs, torch.tanh(inputs @ shared) + inputs @ own


def stacked(
    model: nn.Module, rule: Aggregator, inputs: Tensor, targets: Tensor, *, rescale: bool = False, loss: Any = mse_loss
) -> Gradients:
    """The gradients of all these environments in one process: what the collective forms are compared with."""
    model = copy.deepcopy(model)
    step = StackedGradients(model, loss, rule, rescale=rescale)(inputs, targets)
    return {
        name: (parameter.grad, kept)
        for (name, parameter), kept in zip(model.named_parameters(), step.kept_fraction, strict=True)
    }


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(copy.deepcopy(model), **options)


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    model.zero_grad()
    mse_loss(model(inputs), targets).backward()


def of_hook(model: DistributedDataParallel, hook: AggregationHook) -> Gradients:
    return {
        name: (parameter.grad, hook.kept_fraction(parameter)) for name, parameter in model.module.named_parameters()
    }


def assert_same(actual: Gradients, expected: Gradients, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, (gradient, kept) in expected.items():
        note = f"{name} in process {dist.get_rank()}: "
        torch.testing.assert_close(
            actual[name][0], gradient, rtol=rtol, atol=atol, msg=lambda text, note=note: note + text
        )
        torch.testing.assert_close(
            actual[name][1], kept, rtol=1e-5, atol=1e-6, msg=lambda text, note=note: note + "kept fraction: " + text
        )


def assert_selective(gradients: Gradients) -> None:
    """The comparison says something: the rule kept some components and dropped some."""
    kept = [float(fraction) for _, fraction in gradients.values()]
    assert any(0.02 < fraction < 0.98 for fraction in kept), kept


def environment_names(counts: Sequence[int]) -> list[list[str]]:
    return [[f"site {rank}.{index}" for index in range(count)] for rank, count in enumerate(counts)]


def local(counts: Sequence[int], rank: int) -> slice:
    """Which of all environments are this process's."""
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def two_level(
    model: nn.Module, rule: Aggregator, counts: Sequence[int], group: dist.ProcessGroup | None = None, **options: Any
) -> StackedGradients:
    names = environment_names(counts)[dist.get_rank(group)]
    return StackedGradients(model, mse_loss, rule, names=names, group=group or dist.group.WORLD, **options)


def of_two_level(
    gradients: StackedGradients, inputs: Tensor, targets: Tensor, counts: Sequence[int], group: Any = None
) -> Gradients:
    mine = local(counts, dist.get_rank(group))
    step = gradients(inputs[mine], targets[mine])
    parameters = gradients.model.named_parameters()
    return {
        name: (parameter.grad, kept) for (name, parameter), kept in zip(parameters, step.kept_fraction, strict=True)
    }


def gathered(tensor: Tensor) -> Tensor:
    """Every process's tensor, stacked."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


# Any rule, in any placement


@check(3, rule=list(OWN_RULES), placement=["hook", "small buckets", "two-level", "one each", "examples"])
def rules_that_nobody_knows_are_those_of_a_loop(rule: str, placement: str) -> None:
    rank, counts = dist.get_rank(), {"two-level": [3, 1, 2]}.get(placement, [1, 1, 1])
    inputs, targets = (each.double() for each in batches(sum(counts), batch=4))
    model, own = network().double(), local(counts, rank)
    pairs = list(zip(inputs, targets, strict=True))
    if placement == "examples":
        pairs = [(x[None], y[None]) for x, y in zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True)]
    source: Any
    if placement in ("hook", "small buckets"):
        source = HookedGradients(model, mse_loss, OWN_RULES[rule], find_unused_parameters=placement == "small buckets")
    elif placement == "examples":
        source = PerExampleGradients(model, mse_loss, OWN_RULES[rule], group=dist.group.WORLD)
    else:
        source = two_level(model, OWN_RULES[rule], counts)
    for step in (0, 4):
        result = source((inputs[own], targets[own]), step)
        expected = looped(model, mse_loss, OWN_RULES[rule], pairs, step)
        for parameter, update in zip(model.parameters(), expected.updates, strict=True):
            torch.testing.assert_close(parameter.grad, update, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.kept_fraction.double(), torch.stack(expected.kept), rtol=1e-5, atol=1e-6)
        assert result.environments == len(pairs)


@check(3, rule=["and-mask", "grad-drop"], placement=["hook", "two-level", "one each"])
def averages_of_environments_are_those_of_a_loop(rule: str, placement: str) -> None:
    rank, counts = dist.get_rank(), {"two-level": [3, 1, 2]}.get(placement, [1, 1, 1])
    made, averages = (RULES | OWN_RULES)[rule], Averages(0.8)
    model, own = network().double(), local(counts, rank)
    source: Any
    if placement == "hook":
        source = HookedGradients(model, mse_loss, made, environment_momentum=0.8)
    else:
        source = two_level(model, made, counts, environment_momentum=0.8)
    for step in range(4):  # DDP lays its buckets out anew after the first
        inputs, targets = (each.double() for each in batches(sum(counts), step, batch=4))
        result = source((inputs[own], targets[own]), step)
        expected = looped(model, mse_loss, made, list(zip(inputs, targets, strict=True)), step, averages)
        for parameter, update in zip(model.parameters(), expected.updates, strict=True):
            torch.testing.assert_close(parameter.grad, update, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.kept_fraction.double(), torch.stack(expected.kept), rtol=1e-5, atol=1e-6)


@check(3)
def batches_of_single_environments_vote_over_processes_as_in_a_loop() -> None:
    rank, counts = dist.get_rank(), [2, 2, 2]  # two batches of one environment in each
    inputs, targets = (each.double() for each in batches(6, batch=4))
    model, own = network().double(), local(counts, rank)
    names = names_of_batches([f"site {rank}"], 2)
    source = StackedGradients(model, mse_loss, RULES["and-mask"], names=names, group=dist.group.WORLD)
    source((inputs[own], targets[own]))
    expected = looped(model, mse_loss, RULES["and-mask"], list(zip(inputs, targets, strict=True)))
    for parameter, update in zip(model.parameters(), expected.updates, strict=True):
        torch.testing.assert_close(parameter.grad, update, rtol=1e-9, atol=1e-12)


@check(2, policy=["skip", "propagate"], scaled=[False, True])
def a_gradient_that_is_not_finite_is_in_no_average_of_the_hook(policy: Any, scaled: bool) -> None:
    """Of two environments that agree about everything, so that the update is the mean of the averages."""
    rank, averages = dist.get_rank(), Averages(0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0 if policy == "skip" else 64.0) if scaled else None
    model = ddp(network().double(), bucket_cap_mb=TINY, find_unused_parameters=True)
    hook = register_aggregation_hook(
        model, Mean(), environment=f"site {rank}", environment_momentum=0.8, nonfinite=policy, scaler=scaler
    )
    scale = 1.0 if scaler is None else scaler.get_scale()
    for seed, bad in enumerate([False, True, False]):
        inputs, targets = (each.double() for each in batches(2, seed))
        inputs[1] = torch.nan if bad else inputs[1]
        model.zero_grad()
        (scale * mse_loss(model(inputs[rank]), targets[rank])).backward()
        pairs = list(zip(inputs, targets, strict=True))
        expected = looped(model.module, mse_loss, Mean(), pairs, seen=averages)
        assert hook.skipped == (("site 1",) if bad and policy == "skip" else ())
        for parameter, update in zip(model.parameters(), expected.updates, strict=True):
            if bad and policy == "propagate":
                assert not bool(parameter.grad.isfinite().any())
            else:
                torch.testing.assert_close(parameter.grad, scale * update, rtol=1e-9, atol=1e-12)
    assert set(hook.state_dict()) == {f"average/site {rank}", f"steps/site {rank}"}


@check(2)
def a_hook_goes_on_from_a_checkpoint_of_a_loop_of_one_s_own() -> None:
    rank = dist.get_rank()
    states: list[Any] = [None, None]
    whole, resumed = (ddp(network()) for _ in range(2))
    hooks = [register_aggregation_hook(m, AndMask(0.6), environment_momentum=0.9) for m in (whole, resumed)]
    for seed in range(3):
        inputs, targets = batches(2, seed)
        if seed == 2:
            dist.all_gather_object(states, hooks[0].state_dict())
            hooks[1].load_state_dict(states[0] | states[1])
            backward(resumed, inputs[rank], targets[rank])
        backward(whole, inputs[rank], targets[rank])
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with pytest.raises(InputError, match=f"there is no average of environment rank {rank}"):
        hooks[1].load_state_dict(states[1 - rank])


class Votes:
    """A rule that swallows what is not finite, and has no sum of gradients."""

    statistics: ClassVar[tuple[Statistic, ...]] = (SIGN,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        value = sums["sign"].nan_to_num().clamp(-1, 1)
        return Update(value, torch.ones_like(value))


@check(2, form=["hook", "two-level", "examples"])
def what_is_not_finite_is_everywhere_where_it_is_to_propagate(form: str) -> None:
    rank, counts = dist.get_rank(), [2, 1] if form == "two-level" else [1, 1]
    inputs, targets = batches(sum(counts))
    own = local(counts, rank)
    for rule in (AndMask(0.6), Votes()):
        model = network()
        source: Any
        if form == "hook":
            source = HookedGradients(model, mse_loss, rule, nonfinite="propagate")
        elif form == "examples":
            source = PerExampleGradients(model, mse_loss, rule, nonfinite="propagate", group=dist.group.WORLD)
        else:
            source = two_level(model, rule, counts, nonfinite="propagate")
        for bad in (True, False):
            given = inputs.clone()
            given[-1] = torch.inf if bad else given[-1]  # of the last process alone
            assert source((given[own], targets[own])).skipped == ()
            finite = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
            assert finite != bad, f"{type(rule).__name__} in process {rank}"


@check(2)
def a_scaled_loss_is_unscaled_for_the_rule_and_scaled_again() -> None:
    rank = dist.get_rank()
    inputs, targets = batches(2)
    plain, scaled = network(), network()
    HookedGradients(plain, mse_loss, RULES["sand-mask"])((inputs[[rank]], targets[[rank]]))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    HookedGradients(scaled, mse_loss, RULES["sand-mask"], scaler=scaler)((inputs[[rank]], targets[[rank]]))
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, 256 * one.grad, rtol=1e-4, atol=1e-5)


class Wide(nn.Module):
    """A layer of 200,000 components in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(200_000, dtype=torch.float16))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * inputs).sum()


@check(2)
def a_half_precision_layer_of_which_hardly_anything_is_kept_is_rescaled_exactly() -> None:
    """The factor, 200,000, is more than float16 can hold; the rescaled component, 200, is not."""
    model = DistributedDataParallel(Wide())
    register_aggregation_hook(model, AndMask(1.0), rescale=True)
    inputs = torch.full((200_000,), 1e-3 if dist.get_rank() == 0 else -1e-3, dtype=torch.float16)
    inputs[7] = 1e-3
    model(inputs).backward()
    gradient = model.module.weight.grad
    assert abs(float(gradient[7]) - 200) < 1
    gradient[7] = 0
    assert not bool(gradient.any())


@check(2)
def a_hook_registered_by_hand_refuses_a_process_without_a_batch() -> None:
    inputs, targets = (each[dist.get_rank()] for each in batches(2))
    model = ddp(network())
    model.register_comm_hook(AggregationHook(AndMask(0.6)), aggregation_hook)
    if dist.get_rank() == 1:
        backward(model, inputs, targets)
        with pytest.raises(InputError, match=r"model.join\(\): uneven numbers"), model.join():
            pass  # no second batch here
        dist.destroy_process_group()
    else:
        backward(model, inputs, targets)
        with pytest.raises(RuntimeError), model.join():  # the other one has left
            backward(model, inputs, targets)
        dist.destroy_process_group()


# One environment a process: the hook


@check(2, 4, rule=list(RULES))
def hook_equals_stacked(rule: str) -> None:
    inputs, targets = batches(dist.get_world_size())
    for rescale in (False, True):
        model = ddp(network())
        hook = register_aggregation_hook(model, RULES[rule], rescale=rescale)
        backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
        expected = stacked(network(), RULES[rule], inputs, targets, rescale=rescale)
        if rule != "mean":
            assert_selective(expected)
        assert_same(of_hook(model, hook), expected)


def assert_passes_agree(
    rule: str, model: DistributedDataParallel, hook: AggregationHook, rescale: bool, environments: int | None = None
) -> None:
    """Four passes on new data, the parameters changing between them, equal the stacked form."""
    for seed in range(4):
        inputs, targets = batches(environments or dist.get_world_size(), seed)
        expected = stacked(model.module, RULES[rule], inputs, targets, rescale=rescale)
        rank = dist.get_rank(model.process_group)
        backward(model, inputs[rank], targets[rank])
        assert_same(of_hook(model, hook), expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)


@check(4, rule=list(RULES))
def hook_after_buckets_were_rebuilt(rule: str) -> None:
    model = ddp(network(), bucket_cap_mb=TINY)
    hook = AggregationHook(RULES[rule], rescale=True)
    passes: list[int] = []

    def counted(state: AggregationHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        passes.append(bucket.index())
        return aggregation_hook(state, bucket)

    model.register_comm_hook(hook, counted)
    assert_passes_agree(rule, model, hook, rescale=True)
    assert passes[:2] == [0, 0], "the first pass had one bucket"
    assert passes[1:] == list(range(len(passes) // 3)) * 3, passes
    assert len(passes) // 3 >= 3, "later ones several"


@check(4)
def hook_with_small_buckets_from_the_first_pass_on() -> None:
    indices: list[int] = []

    def counted(state: AggregationHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        indices.append(bucket.index())
        return aggregation_hook(state, bucket)

    model = ddp(network(), bucket_cap_mb=TINY, find_unused_parameters=True)  # such buckets are never rebuilt
    hook = AggregationHook(RULES["and-mask"])
    model.register_comm_hook(hook, counted)
    assert_passes_agree("and-mask", model, hook, rescale=False)
    assert indices == list(range(len(indices) // 4)) * 4
    assert len(indices) >= 8


class Images(nn.Module):
    """Convolutions whose weights may lie in memory with the channels last."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 6, 2), nn.Tanh(), nn.Conv2d(6, 4, 2), nn.Tanh())
        self.last = nn.Linear(4, 3)
        self.to(memory_format=memory_format)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.features(inputs).mean((2, 3)))


@check(2, form=["hook", "two-level"])
def channels_last_with_a_fused_optimizer(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 5, 3, 4, 4, generator=generator)
    targets = torch.randn(4, 5, 3, generator=generator)
    rank, counts = dist.get_rank(), [2, 2]
    if form == "hook":
        images, targets = images[:2], targets[:2]
    plain, model = Images(), Images(torch.channels_last)
    alone = StackedGradients(plain, mse_loss, AndMask(0.6))
    slow = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, foreach=False)
    fused = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    if form == "hook":
        wrapped = DistributedDataParallel(model)
        register_aggregation_hook(wrapped, AndMask(0.6))
    else:
        together = two_level(model, AndMask(0.6), counts)
    for _ in range(3):
        alone(images, targets)
        slow.step()
        if form == "hook":
            backward(wrapped, images[rank], targets[rank])
        else:
            together(images[local(counts, rank)], targets[local(counts, rank)])
        for parameter in model.parameters():
            assert parameter.grad.stride() == parameter.stride()
        fused.step()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


@check(2)
def what_a_hooked_model_refuses_by_name() -> None:
    inputs, targets = (each[dist.get_rank()] for each in batches(2))
    model = ddp(network())
    register_aggregation_hook(model, AndMask(0.6))
    backward(model, inputs, targets)
    with pytest.raises(InputError, match=r"model.join\(\): uneven numbers of batches"):
        model.join()
    backward(model, inputs, targets)
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    model.module.load_state_dict(state, assign=True)  # the new parameters are in no bucket
    with pytest.raises(InputError, match=r"parameter 0.weight: it is another one"):
        model(inputs)
    frozen = network()
    frozen[0].weight.requires_grad_(False)
    model = ddp(frozen)
    register_aggregation_hook(model, AndMask(0.6))
    model.module[0].weight.requires_grad_(True)
    with pytest.raises(InputError, match=r"parameter 0.weight: it was unfrozen"):
        model(inputs)
    with torch.no_grad():
        model(inputs)  # an evaluation needs no gradients


@check(2, 4, rule=["and-mask", "geometric-mean"])
def layers_split_over_slices(rule: str) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(6, 3)  # 18 and 3 components: in slices of 6 (4 processes) or 11 (2)
    inputs, targets = batches(dist.get_world_size())
    model = ddp(layer)
    hook = register_aggregation_hook(model, RULES[rule], rescale=True)
    backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
    assert_same(of_hook(model, hook), stacked(layer, RULES[rule], inputs, targets, rescale=True))


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * self.weight[0] + self.weight[1]


@check(4, rescale=[False, True])
def fewer_components_than_processes(rescale: bool) -> None:
    inputs, targets = batches(8)
    targets = targets[..., :1]
    model = ddp(OneWeight())
    hook = register_aggregation_hook(model, AndMask(0.4), rescale=rescale)
    backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
    assert_same(of_hook(model, hook), stacked(OneWeight(), AndMask(0.4), inputs[:4], targets[:4], rescale=rescale))

    counts = [2, 2, 2, 2]
    gradients = two_level(OneWeight(), AndMask(0.4), counts, rescale=rescale)
    expected = stacked(OneWeight(), AndMask(0.4), inputs, targets, rescale=rescale)
    assert_same(of_two_level(gradients, inputs, targets, counts), expected)


@check(2)
def hook_with_gradient_accumulation() -> None:
    inputs, targets = batches(2, batch=24)
    rank = dist.get_rank()
    model = ddp(network(), bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, AndMask(1.0))
    expected = stacked(network(), AndMask(1.0), inputs, targets, loss=lambda *pair: 2 * mse_loss(*pair))
    for _ in range(3):
        model.zero_grad()
        with model.no_sync():
            mse_loss(model(inputs[rank, :12]), targets[rank, :12]).backward()
        mse_loss(model(inputs[rank, 12:]), targets[rank, 12:]).backward()
        assert_same(of_hook(model, hook), expected)
    assert hook.step == 3, "passes under no_sync() are no steps"


class TwoHeads(nn.Module):
    """The sign of the first input says which head is used; ``gated`` does it without control flow."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.nobody = nn.Linear(6, 8), nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.gated = gated

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        if not self.gated:
            return self.heads[int(inputs[0, 0] > 0)](hidden)
        gate = (inputs[0, 0] > 0).float()
        return (1 - gate) * self.heads[0](hidden) + gate * self.heads[1](hidden)


@check(4, bucket_view=[False, True])
def hook_with_unused_parameters(bucket_view: bool) -> None:
    rank = dist.get_rank()
    model = ddp(TwoHeads(), find_unused_parameters=True, bucket_cap_mb=TINY, gradient_as_bucket_view=bucket_view)
    hook = register_aggregation_hook(model, AndMask(0.5), rescale=True)
    for seed in range(3):
        inputs, targets = batches(4, seed)
        inputs[:, 0, 0] = torch.tensor([1.0, -1.0, 1.0, 1.0]).roll(seed)
        backward(model, inputs[rank], targets[rank])
        assert model.module.nobody.weight.grad is None
        expected = stacked(TwoHeads(gated=True), AndMask(0.5), inputs, targets, rescale=True)
        actual = {
            name: (parameter.grad, hook.kept_fraction(parameter))
            for name, parameter in model.module.named_parameters()
            if not name.startswith("nobody")
        }
        assert_same(actual, {name: expected[name] for name in actual})


@check(4)
def hook_with_static_graph() -> None:
    model = ddp(network(), static_graph=True, bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, RULES["and-mask"])
    assert_passes_agree("and-mask", model, hook, rescale=False)


@check(4)
def hook_with_gradients_as_bucket_views() -> None:
    model = ddp(network(), gradient_as_bucket_view=True, bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, RULES["geometric-mean"], rescale=True)
    assert_passes_agree("geometric-mean", model, hook, rescale=True)


def assert_half_precision_agrees(
    dtype: torch.dtype, as_sent: torch.dtype, wrap: Callable[[Any], Any], rtol: float
) -> None:
    """The hook equals the rule on the very gradients of the processes, as they are sent."""
    inputs, targets = (part.to(dtype) for part in batches(4))
    inputs, targets = inputs[dist.get_rank()], targets[dist.get_rank()]
    for rule, rescale in itertools.product(RULES.values(), (False, True)):
        plain = network().to(dtype)
        backward(plain, inputs, targets)
        model = ddp(network().to(dtype), bucket_cap_mb=TINY)
        hook = AggregationHook(rule, rescale=rescale)
        model.register_comm_hook(hook, wrap(aggregation_hook))
        expected = {}
        for name, parameter in plain.named_parameters():
            value, kept = aggregate(rule, gathered(parameter.grad.to(as_sent).float()))
            fraction = kept.mean()
            expected[name] = (value / (fraction + 1e-10) if rescale else value).to(dtype), fraction
        for _ in range(3):
            backward(model, inputs, targets)
            assert_same(of_hook(model, hook), expected, rtol=rtol, atol=1e-5)


@check(4)
def hook_with_bf16_parameters() -> None:
    assert_half_precision_agrees(torch.bfloat16, torch.bfloat16, lambda hook: hook, rtol=2**-6)


@check(4)
def hook_under_fp16_compression() -> None:
    assert_half_precision_agrees(torch.float32, torch.float16, fp16_compress_wrapper, rtol=2**-8)


@check(2)
def fp16_rescaling_of_a_layer_of_which_nothing_is_kept() -> None:
    inputs, targets = batches(1)
    model = ddp(network())
    hook = AggregationHook(XorMask(1.0), rescale=True)  # both processes agree everywhere: nothing is kept
    model.register_comm_hook(hook, fp16_compress_wrapper(aggregation_hook))
    backward(model, inputs[0], targets[0])
    for name, (gradient, kept) in of_hook(model, hook).items():
        assert not gradient.any(), f"{name}: {gradient}"
        assert kept == 0


@check(2)
def hook_with_channels_last_and_mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.convolution = nn.Conv2d(2, 4, 3)
            self.head = nn.Linear(4, 3, dtype=torch.float64)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(torch.tanh(self.convolution(inputs)).mean((2, 3)).double())

    torch.manual_seed(1)
    inputs, targets = torch.randn(2, 8, 2, 5, 5), torch.randn(2, 8, 3, dtype=torch.float64)
    model = ddp(Mixed().to(memory_format=torch.channels_last))
    hook = register_aggregation_hook(model, AndMask(1.0), rescale=True)
    expected = stacked(Mixed(), AndMask(1.0), inputs, targets, rescale=True)
    for _ in range(3):
        backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
        assert_same(of_hook(model, hook), expected)


@check(2, 4)
def mean_hook_equals_plain_ddp() -> None:
    inputs, targets = batches(dist.get_world_size())
    plain, model = ddp(network(), bucket_cap_mb=TINY), ddp(network(), bucket_cap_mb=TINY)
    register_aggregation_hook(model, Mean())
    for _ in range(3):
        for either in (plain, model):
            backward(either, inputs[dist.get_rank()], targets[dist.get_rank()])
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: name + text)


@check(4)
def hook_counts_steps_and_kept_fractions() -> None:
    inputs, targets = batches(4)
    model = ddp(network(), bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, AndMask(1.0))
    assert hook.step == 0
    for step in range(1, 4):
        backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
        assert hook.step == step
        assert (hook.skipped, hook.skipped_total) == ((), 0)
        for parameter in model.parameters():
            kept = hook.kept_fraction(parameter)
            assert (kept.dtype, kept.shape) == (torch.float32, ())
            # Where no gradient is exactly zero, what is kept is what is not zero.
            assert abs(float(kept) - float((parameter.grad != 0).float().mean())) < 1e-6
    with pytest.raises(KeyError):
        hook.kept_fraction(torch.ones(1))


@check(4)
def hooked_gradients_are_a_gradient_source() -> None:
    inputs, targets = batches(4)
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    model = network()
    gradients = HookedGradients(model, mse_loss, RULES["and-mask"], environment=f"site {dist.get_rank()}")
    expected = stacked(network(), RULES["and-mask"], inputs, targets)
    for step in (0, 7):
        result = gradients(inputs[mine], targets[mine], step)
        kept = dict(zip(dict(model.named_parameters()), result.kept_fraction, strict=True))
        assert_same({name: (part.grad, kept[name]) for name, part in model.named_parameters()}, expected)
        torch.testing.assert_close(result.losses, mse_loss(network()(inputs[mine][0]), targets[mine][0]).detach()[None])
        assert result.skipped == ()
    with refused([f"site {rank}" for rank in range(4)], 11):
        gradients(inputs[mine] * float("nan"), targets[mine], 11)


# Several environments in each of several processes: the two-level form

COUNTS = {
    "even": {2: [3, 3], 4: [3, 3, 3, 3]},
    "uneven": {2: [5, 1], 4: [1, 4, 2, 3]},
    "one each": {2: [1, 1], 4: [1, 1, 1, 1]},
}


@check(4, rule=list(RULES), placement=["even", "uneven"])
@check(2, rule=["and-mask"], placement=list(COUNTS))
@check(4, rule=["sand-mask"], placement=["one each"])
def two_level_equals_one_process(rule: str, placement: str) -> None:
    counts = COUNTS[placement][dist.get_world_size()]
    for rescale in (False, True):
        gradients = two_level(network(), RULES[rule], counts, rescale=rescale)
        for seed in range(2):
            inputs, targets = batches(sum(counts), seed)
            expected = stacked(gradients.model, RULES[rule], inputs, targets, rescale=rescale)
            assert_same(of_two_level(gradients, inputs, targets, counts), expected)
            with torch.no_grad():
                for parameter in gradients.model.parameters():
                    parameter.sub_(0.1 * parameter.grad)


class Probe(nn.Module):
    """A model whose gradient is its input: the output is weight · input."""

    def __init__(self, components: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(components))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def identity(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean()


@check(2, 4, total=[127, 128, 140, 300])
def many_environments_are_counted_exactly(total: int) -> None:
    """Component j is negative in j environments, so |Σ sign g| = |d - 2j|; τ asks for d - 10."""
    world, rank = dist.get_world_size(), dist.get_rank()
    counts = [total // world + (1 if rank < total % world else 0) for rank in range(world)]
    rows = (torch.arange(total)[:, None] * 11) % total  # spread over the processes
    gradients = torch.where(rows < torch.arange(total + 1), -1.0, 1.0)
    threshold = (total - 10) / total
    model = Probe(total + 1)
    names = environment_names(counts)[rank]
    source = StackedGradients(model, identity, AndMask(threshold), names=names, group=dist.group.WORLD)
    mine = gradients[local(counts, rank)][:, None]
    step = source(mine, torch.zeros(mine.shape[:2]))
    signs = gradients.sum(0)
    kept = signs.abs() >= total - 10
    assert int(kept.sum()) == 12
    assert torch.equal(model.weight.grad != 0, kept)
    torch.testing.assert_close(model.weight.grad, torch.where(kept, signs / total, 0))
    torch.testing.assert_close(step.kept_fraction, kept.float().mean()[None])


@dataclass(frozen=True)
class SignSum:
    """A rule whose update is Σ sign g itself."""

    statistics: ClassVar[tuple[Statistic, ...]] = (GRADIENT, SIGN)

    def finish(self, sums: Statistics, environments: int) -> Update:
        return Update(sums["sign"], torch.ones_like(sums["sign"]))


@check(2, 4, counts=[(127,), (128,), (127, 128), (8_192,), (32_767,), (32_768,), (1, 32_768)])
def sums_of_signs_are_exact_at_the_bounds_of_their_integers(counts: tuple[int, ...]) -> None:
    """All environments agree, all but one, half of them; one has a zero. 4 · 8192 are as many as 1024 · 32."""
    world, rank = dist.get_world_size(), dist.get_rank()
    each = [counts[other % len(counts)] for other in range(world)]
    total, own = sum(each), local(each, rank)
    gradients = torch.ones(total, 6)
    gradients[:, 1] = -1
    gradients[-1, 2] = -1
    gradients[1:, 3] = -1
    gradients[::2, 4] = -1
    gradients[0, 5] = 0
    model = Probe(6)
    names = environment_names(each)[rank]
    source = StackedGradients(model, identity, SignSum(), names=names, group=dist.group.WORLD)
    source(gradients[own, None], torch.zeros(each[rank], 1))
    expected = [total, -total, total - 2, 2 - total, total // 2 - (total + 1) // 2, total - 1]
    assert model.weight.grad.tolist() == expected


@check(4, ranks=[(0, 1), (1, 3), (3, 1, 2)])
def sub_group(ranks: tuple[int, ...]) -> None:
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return
    model = ddp(network(), process_group=group, bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, RULES["and-mask"], rescale=True)
    assert_passes_agree("and-mask", model, hook, rescale=True, environments=len(ranks))
    assert hook.processes.names == tuple((f"rank {rank}",) for rank in range(len(ranks)))

    counts = [2, 3, 1][: len(ranks)]
    inputs, targets = batches(sum(counts))
    gradients = two_level(network(), RULES["and-mask"], counts, group, rescale=True)
    expected = stacked(network(), RULES["and-mask"], inputs, targets, rescale=True)
    assert_same(of_two_level(gradients, inputs, targets, counts, group), expected)


@check(2)
def a_process_without_environments_is_refused_in_every_process() -> None:
    with pytest.raises(InputError, match="process 1"):
        two_level(network(), Mean(), [2, 0])


def trained(source: Callable[[nn.Module], Callable[[Tensor, Tensor], object]], environments: int) -> Tensor:
    """The parameters after 50 steps of Adam on the same batches."""
    model = network()
    step = source(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for seed in range(50):
        step(*batches(environments, seed))
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def assert_placement_does_not_matter(rule: str, environments: int, worlds: Sequence[int]) -> None:
    one = trained(lambda model: StackedGradients(model, mse_loss, RULES[rule]), environments)
    assert not torch.allclose(one, nn.utils.parameters_to_vector(network().parameters()), rtol=1e-2)
    for world in worlds:
        group = dist.new_group(list(range(world)))
        if dist.get_rank() >= world:
            continue
        counts = [environments // world] * world

        def placed(model: nn.Module, counts: list[int] = counts, group: Any = group) -> Any:
            source = two_level(model, RULES[rule], counts, group)
            mine = local(counts, dist.get_rank(group))
            return lambda inputs, targets: source(inputs[mine], targets[mine])

        several = trained(placed, environments)
        assert (several - one).norm() <= 1e-5 * one.norm(), f"{world} × {environments // world}"
        torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-5)


@check(4, rule=list(RULES))
def placement_of_16_environments(rule: str) -> None:
    assert_placement_does_not_matter(rule, 16, [2, 4])


OBJECTIVES: dict[str, Objective] = {
    "irm": IRMv1(mse_loss, PenaltyWeight(0.5)),
    "vrex": VREx(mse_loss, PenaltyWeight(0.5)),
    "mm-rex": MMREx(mse_loss, PenaltyWeight(0.5)),
    "dann": DANN(mse_loss, PenaltyWeight(0.5)),
    "meta-irm": MetaIRM(mse_loss, 0.1, 2, PenaltyWeight(0.5)),
}


@check(2, 3, objective=list(OBJECTIVES))
def objectives_do_not_depend_on_placement(objective: str) -> None:
    """Five environments over two or three processes, as in one; also what each process says of its own losses."""
    world, rank = dist.get_world_size(), dist.get_rank()
    counts = [4, 1] if world == 2 else [1, 2, 2]
    inputs, targets = batches(5)
    model, ours = network(), OBJECTIVES[objective]
    ours.begin(model, 5, 1)
    trained = [*model.parameters(), *(ours.module.parameters() if ours.module is not None else ())]
    whole = ObjectiveGradients(model, ours, environment_names([5])[0])(inputs, targets, 0)
    expected = [parameter.grad for parameter in trained]
    mine = local(counts, rank)
    source = ObjectiveGradients(model, ours, environment_names(counts)[rank], dist.group.WORLD)
    part = source(inputs[mine], targets[mine], 0)
    torch.testing.assert_close(part.losses, whole.losses[mine])
    for parameter, one in zip(trained, expected, strict=True):
        assert parameter.grad is not one
        torch.testing.assert_close(parameter.grad, one, rtol=1e-4, atol=1e-6)
        assert_same_everywhere(parameter.grad)


@check(2, part=["dann", "own"])
def training_with_an_objectives_own_parameters_does_not_depend_on_placement(part: str) -> None:
    """The job's own evaluation, too: what it draws at random is the same."""
    job = load_job(str(Path(__file__).parents[1] / "jobs" / "calibrated.py")).job
    job = job if part == "own" else dataclasses.replace(job, objective=None)
    objective = "erm" if part == "own" else "dann"
    config = job.config.with_options(epochs=2, batch_size=8, lr=1e-2, objective=objective, clip=1.0)
    alone = train(job, config, ProcessContext(), Silent()).metrics
    together = train(job, config, ProcessContext(dist.get_rank(), dist.get_world_size()), Silent()).metrics
    assert together.keys() == alone.keys()
    for name in alone.keys() - {"steps_per_second"}:
        assert math.isclose(together[name], alone[name], rel_tol=1e-4, abs_tol=1e-6), name


def masked_risk(model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
    """The error of the examples that count, as a sum and their number."""
    errors = (model(batch["inputs"]) - batch["targets"]).square().mean(1) * batch["counts"]
    return errors.sum(), batch["counts"].sum()


@check(2, objective=["vrex", "meta-irm"])
def objectives_of_a_risk_do_not_depend_on_placement(objective: Any) -> None:
    """Dictionaries of several dtypes; meta-IRM sends them to the other process."""
    counts = [4, 1]
    inputs, targets = batches(5)
    batch = {"inputs": inputs, "targets": targets, "counts": inputs[:, :, 0] > -1}
    mine = local(counts, dist.get_rank())
    part = {name: leaf[mine] for name, leaf in batch.items()}
    ours = objective_named(objective, masked_risk, penalty_weight=0.5)
    models = [network() for _ in range(2)]
    whole = ObjectiveGradients(models[0], ours, environment_names([5])[0])(batch, 0)
    source = ObjectiveGradients(models[1], ours, environment_names(counts)[dist.get_rank()], dist.group.WORLD)
    step = source(part, 0)
    torch.testing.assert_close(step.losses, whole.losses[mine])
    assert step.environments == whole.environments == 5
    if objective == "vrex":
        assert step.weights.tolist() == part["counts"].sum(1).tolist()
    for one, several in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(several.grad, one.grad, rtol=1e-4, atol=1e-6)
        assert_same_everywhere(several.grad)


@check(2, unused=[False, True])
def hooked_processes_take_irms_risk(unused: bool) -> None:
    """One environment a process; the risk scales what the wrapped model gives."""
    inputs, targets = batches(2)
    batch = {"inputs": inputs, "targets": targets, "counts": inputs[:, :, 0] > -1}
    part = {name: leaf[dist.get_rank()][None] for name, leaf in batch.items()}
    ours = IRMv1(masked_risk, PenaltyWeight(0.5))
    models = [network() for _ in range(2)]
    ObjectiveGradients(models[0], ours, ["a", "b"])(batch, 0)
    HookedGradients(models[1], ours.risk, Mean(), find_unused_parameters=unused)(part, 0)
    for one, several in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(several.grad, one.grad, rtol=1e-4, atol=1e-6)


@check(2)
def batches_that_go_to_other_processes_have_one_shape() -> None:
    inputs, targets = batches(4, batch=12 - dist.get_rank())
    source = ObjectiveGradients(network(), OBJECTIVES["meta-irm"], ["a", "b"], dist.group.WORLD)
    with pytest.raises(InputError, match=r"\[12, 6, 12, 3\] in process 0, \[11, 6, 11, 3\]"):
        source(inputs[:2], targets[:2], 0)


@check(2)
def objectives_that_are_not_finite_name_the_environment_everywhere() -> None:
    inputs, targets = batches(3)
    inputs[2] = torch.nan
    mine = local([1, 2], dist.get_rank())
    names = environment_names([1, 2])
    source = ObjectiveGradients(network(), OBJECTIVES["vrex"], names[dist.get_rank()], dist.group.WORLD)
    with pytest.raises(NonFiniteGradientError) as caught:
        source(inputs[mine], targets[mine], 3)
    assert caught.value.environments == (names[1][1],)


@check(8)
def placement_on_8_processes() -> None:
    """1 × 32, 4 × 8 and 8 × 4 (processes × environments)."""
    assert_placement_does_not_matter("and-mask", 32, [4, 8])

    def hooked(model: nn.Module) -> Any:
        source = HookedGradients(model, mse_loss, RULES["and-mask"])
        mine = slice(dist.get_rank(), dist.get_rank() + 1)
        return lambda inputs, targets: source(inputs[mine], targets[mine], 0)

    one = trained(lambda model: StackedGradients(model, mse_loss, RULES["and-mask"]), 8)
    several = trained(hooked, 8)
    assert (several - one).norm() <= 1e-5 * one.norm()
    assert_same_everywhere(several)


def assert_same_everywhere(tensor: Tensor) -> None:
    """Every process has the very same bits: parameters that drift apart would never meet again."""
    everyone = gathered(tensor)
    assert torch.equal(everyone, everyone[:1].expand_as(everyone))


@check(4, rule=["and-mask", "geometric-mean"])
def every_process_gets_the_same_bits(rule: str) -> None:
    inputs, targets = batches(8)
    model = ddp(network(), bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, RULES[rule], rescale=True)
    gradients = two_level(network(), RULES[rule], [2] * 4, rescale=True)
    for _ in range(2):
        backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
        of_two_level(gradients, inputs, targets, [2] * 4)
        for parameter in (*model.parameters(), *gradients.model.parameters()):
            assert_same_everywhere(parameter.grad)
        assert_same_everywhere(torch.stack([hook.kept_fraction(parameter) for parameter in model.parameters()]))


# Gradients that are not finite


def poisoned(inputs: Tensor, *environments: int) -> Tensor:
    inputs = inputs.clone()
    for environment in environments:
        inputs[environment, 0, 0] = float("nan") if environment % 2 else float("inf")
    return inputs


@contextmanager
def refused(environments: Sequence[str], step: int) -> Iterator[None]:
    with pytest.raises(NonFiniteGradientError, match=f"step {step}") as caught:
        yield
    assert type(caught.value) is NonFiniteGradientError
    assert (caught.value.environments, caught.value.step) == (tuple(environments), step)
    assert all(name in str(caught.value) for name in environments)


@check(4, buckets=["one bucket", "several buckets"])
def hook_raises_in_every_process(buckets: str) -> None:
    rank = dist.get_rank()
    inputs, targets = batches(4)
    model = ddp(network(), bucket_cap_mb=25 if buckets == "one bucket" else TINY)
    register_aggregation_hook(model, AndMask(1.0), environment=f"site {rank}")
    for _ in range(3):
        backward(model, inputs[rank], targets[rank])
    with refused(["site 1", "site 2"], 3):
        backward(model, poisoned(inputs, 1, 2)[rank], targets[rank])


@check(4)
def hook_raises_for_one_layer_and_names_environments_of_all_buckets() -> None:
    rank = dist.get_rank()
    inputs, targets = batches(4)
    model = ddp(network(), bucket_cap_mb=TINY)
    register_aggregation_hook(model, AndMask(1.0), environment=f"site {rank}")
    for _ in range(2):
        backward(model, inputs[rank], targets[rank])
    parameters = list(model.parameters())
    bad = {1: parameters[-1], 3: parameters[0]}.get(rank)  # the first bucket's, and the last one's
    if bad is not None:
        bad.register_hook(lambda gradient: gradient / 0)
    with refused(["site 1", "site 3"], 2):
        backward(model, inputs[rank], targets[rank])


@check(2)
def large_finite_gradients_are_no_error() -> None:
    model = ddp(Probe(8))
    register_aggregation_hook(model, AndMask(1.0))
    model(torch.full((1, 8), 1.5e38)).sum().backward()  # their sum over components is infinite
    torch.testing.assert_close(model.module.weight.grad, torch.full((8,), 1.5e38))


@check(4)
def two_level_raises_in_every_process_and_goes_on() -> None:
    counts = [1, 4, 2, 3]
    inputs, targets = batches(10)
    gradients = two_level(network(), AndMask(0.6), counts)
    expected = stacked(network(), AndMask(0.6), inputs, targets)
    assert_same(of_two_level(gradients, inputs, targets, counts), expected)
    with refused(["site 1.1", "site 3.2"], 1):
        of_two_level(gradients, poisoned(inputs, 2, 9), targets, counts)
    assert_same(of_two_level(gradients, inputs, targets, counts), expected)
    mine = local(counts, dist.get_rank())
    with refused(["site 0.0"], 41):
        gradients(poisoned(inputs, 0)[mine], targets[mine], step=41)


@check(4, rule=list(RULES))
@check(2, rule=["and-mask"])
def hook_skips(rule: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs, targets = batches(world)
    model = ddp(network(), bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, RULES[rule], nonfinite="skip", rescale=True, environment=f"site {rank}")
    whole = stacked(network(), RULES[rule], inputs, targets, rescale=True)
    skipped_total = 0
    # Twice everything: in one bucket (DDP's first pass) and in several; after a skipped step a whole one.
    for bad in ([1], [], [1, 0], [], list(range(world)), []):
        backward(model, poisoned(inputs, *bad)[rank], targets[rank])
        good = [environment for environment in range(world) if environment not in bad]
        skipped_total += len(bad)
        assert hook.skipped == tuple(f"site {environment}" for environment in sorted(bad))
        assert hook.skipped_total == skipped_total
        if good:
            assert_same(
                of_hook(model, hook),
                stacked(network(), RULES[rule], inputs[good], targets[good], rescale=True) if bad else whole,
            )
        else:
            for gradient, kept in of_hook(model, hook).values():
                assert not gradient.any()
                assert kept == 0
    assert hook.step == 6


@check(4)
def hook_skips_an_environment_of_which_one_layer_is_bad() -> None:
    rank = dist.get_rank()
    inputs, targets = batches(4)
    model = ddp(network(), bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, AndMask(0.6), nonfinite="skip")
    if rank == 2:
        list(model.parameters())[1].register_hook(lambda gradient: gradient / 0)
    for _ in range(3):
        backward(model, inputs[rank], targets[rank])
        assert hook.skipped == ("rank 2",)
        good = [0, 1, 3]
        assert_same(of_hook(model, hook), stacked(network(), AndMask(0.6), inputs[good], targets[good]))


@check(2)
def hook_skips_under_fp16_compression() -> None:
    rank = dist.get_rank()
    inputs, targets = batches(2)
    model = ddp(network())
    hook = AggregationHook(Mean(), nonfinite="skip", rescale=True)
    model.register_comm_hook(hook, fp16_compress_wrapper(aggregation_hook))
    backward(model, inputs[rank] * 1, targets[rank] * (1e6 if rank == 0 else 1))  # infinite in float16
    assert hook.skipped == ("rank 0",)
    assert_same(of_hook(model, hook), stacked(network(), Mean(), inputs[1:], targets[1:]), rtol=2**-8, atol=1e-5)
    backward(model, inputs[rank] * float("nan"), targets[rank])
    assert hook.skipped == ("rank 0", "rank 1")
    assert not any(gradient.any() for gradient, _ in of_hook(model, hook).values())


@check(4, rule=list(RULES))
def two_level_skips(rule: str) -> None:
    counts = [1, 4, 2, 3]
    inputs, targets = batches(10)
    names = list(itertools.chain(*environment_names(counts)))
    mine = local(counts, dist.get_rank())
    gradients = two_level(network(), RULES[rule], counts, nonfinite="skip", rescale=True)
    # One of several, the only one of a process, all of a process, all; after each a whole step.
    for bad in ([2], [], [0, 6], [], [5, 6], [], list(range(10)), []):
        step = gradients(poisoned(inputs, *bad)[mine], targets[mine])
        good = [environment for environment in range(10) if environment not in bad]
        assert step.skipped == tuple(names[environment] for environment in bad)
        parameters = gradients.model.named_parameters()
        actual = {name: (part.grad, kept) for (name, part), kept in zip(parameters, step.kept_fraction, strict=True)}
        if good:
            assert_same(actual, stacked(network(), RULES[rule], inputs[good], targets[good], rescale=True))
        else:
            for gradient, kept in actual.values():
                assert not gradient.any()
                assert kept == 0


# Every example an environment


def examples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Examples of environments that agree on something: inputs ``(count, 6)`` and targets ``(count, 3)``."""
    inputs, targets = batches(count, seed, batch=1)
    return inputs[:, 0], targets[:, 0]


@check(2, 4, rule=list(RULES))
def examples_of_all_processes_equal_one_process(rule: str) -> None:
    rank = dist.get_rank()
    for rescale in (False, True):
        model = network()
        collected = per_example(model, RULES[rule], rescale=rescale, group=dist.group.WORLD)
        for seed in range(3):  # the numbers of examples change from step to step
            counts = [(3 + seed + 2 * other) % 5 + 1 for other in range(dist.get_world_size())]
            inputs, targets = examples(sum(counts), seed)
            mine = local(counts, rank)
            model.zero_grad()
            mse_loss(model(inputs[mine]), targets[mine]).backward()
            finished = collected.aggregate()
            assert finished.environments == sum(counts)
            expected = stacked(model, RULES[rule], inputs[:, None], targets[:, None], rescale=rescale)
            parameters = zip(model.named_parameters(), finished.kept_fraction, strict=True)
            assert_same({name: (parameter.grad, kept) for (name, parameter), kept in parameters}, expected)


@dataclass(frozen=True)
class ExampleDraws:
    """Keeps a component's mean with the probability that its signs agree; its sums are those of signs, or beside them
    of clipped gradients, and never of gradients alone."""

    clipped: bool
    seed: int = 3
    draws: ClassVar[tuple[str, ...]] = ("uniform",)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        clipped = Statistic("clipped", lambda gradient: gradient.clamp(-0.01, 0.02))
        return (SIGN, clipped) if self.clipped else (SIGN,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        kept = (sums["sign"].abs() / environments >= sums["uniform"]).to(sums["sign"].dtype)
        return Update(kept * sums["clipped" if self.clipped else "sign"] / environments, kept)


@check(2, clipped=[False, True])
def examples_of_rules_that_draw_and_do_without_the_gradient_equal_one_process(clipped: bool) -> None:
    rank, rule, model = dist.get_rank(), ExampleDraws(clipped), network().double()
    counts, step = [3, 5], 4
    inputs, targets = (each.double() for each in examples(sum(counts)))
    mine = local(counts, rank)
    parameters = list(model.parameters())
    each = [
        torch.cat([g.flatten() for g in torch.autograd.grad(mse_loss(model(x[None]), y[None]), parameters)])
        for x, y in zip(inputs, targets, strict=True)
    ]
    expected = aggregate(rule, torch.stack(each), step).value
    gradients = PerExampleGradients(model, mse_loss, rule, group=dist.group.WORLD)
    gradients(inputs[None, mine], targets[None, mine], step=step)
    torch.testing.assert_close(torch.cat([parameter.grad.flatten() for parameter in parameters]), expected)


@check(2)
def examples_of_a_weighted_risk_have_its_weight_among_all_processes() -> None:
    rank, model = dist.get_rank(), network().double()
    counts = [3, 5]
    inputs, targets = (each.double() for each in examples(sum(counts)))
    weights = torch.linspace(0.1, 2.0, sum(counts), dtype=torch.float64)
    mine = local(counts, rank)

    def risk(network: nn.Module, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        data, labels, weight = batch
        return ((network(data) - labels).square().mean(1) * weight).sum(), weight.sum()

    total, weight = risk(model, (inputs, targets, weights), 0)
    expected = torch.autograd.grad(total / weight, list(model.parameters()))
    gradients = PerExampleGradients(model, risk, RULES["mean"], group=dist.group.WORLD)
    gradients((inputs[None, mine], targets[None, mine], weights[None, mine]))
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, value, rtol=1e-6, atol=1e-9)


@check(2)
def one_example_a_process_is_enough() -> None:
    model = network()
    inputs, targets = examples(2)
    gradients = PerExampleGradients(model, mse_loss, RULES["and-mask"], group=dist.group.WORLD)
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    step = gradients(inputs[None, mine], targets[None, mine])
    expected = stacked(model, RULES["and-mask"], inputs[:, None], targets[:, None])
    parameters = zip(model.named_parameters(), step.kept_fraction, strict=True)
    assert_same({name: (parameter.grad, kept) for (name, parameter), kept in parameters}, expected)


@check(4, where=[0, 3])
def examples_that_are_not_finite_are_named_everywhere_or_left_out(where: int) -> None:
    rank, model = dist.get_rank(), network()
    inputs, targets = examples(12)
    inputs[3 * where + 1, 2] = float("inf")
    mine = slice(3 * rank, 3 * rank + 3)
    strict = PerExampleGradients(copy.deepcopy(model), mse_loss, RULES["and-mask"], group=dist.group.WORLD)
    with pytest.raises(NonFiniteGradientError) as caught:
        strict(inputs[None, mine], targets[None, mine], step=4)
    assert caught.value.environments == (f"example 1 of process {where}",)
    assert caught.value.step == 4

    lenient = PerExampleGradients(
        model, mse_loss, RULES["and-mask"], nonfinite="skip", group=dist.group.WORLD, rescale=True
    )
    step = lenient(inputs[None, mine], targets[None, mine])
    assert step.skipped == (f"example 1 of process {where}",)
    good = torch.arange(12) != 3 * where + 1
    expected = stacked(model, RULES["and-mask"], inputs[good][:, None], targets[good][:, None], rescale=True)
    parameters = zip(model.named_parameters(), step.kept_fraction, strict=True)
    assert_same({name: (parameter.grad, kept) for (name, parameter), kept in parameters}, expected)


# What crosses the network


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Bytes that this process sends to others, by collective, as ``torch.distributed`` is given them."""
    sent: dict[str, int] = {}
    allowed = ("all_to_all_single", "broadcast", "all_gather")
    refused = ("all_reduce", "all_gather_into_tensor", "all_gather_object", "all_to_all", "reduce", "reduce_scatter")
    originals = {name: getattr(dist, name) for name in (*allowed, *refused)}
    rank, others = dist.get_rank(), dist.get_world_size() - 1

    def all_to_all_single(output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> Any:  # noqa: A002
        sizes = options["input_split_sizes"]
        count("all_to_all_single", (sum(sizes) - sizes[rank]) * input.itemsize)
        return originals["all_to_all_single"](output, input, *arguments, **options)

    def broadcast(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if options["group_src"] == rank:
            count("broadcast", others * tensor.nbytes)
        return originals["broadcast"](tensor, *arguments, **options)

    def all_gather(outputs: list[Tensor], tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        count("all_gather", others * tensor.nbytes)
        return originals["all_gather"](outputs, tensor, *arguments, **options)

    def count(name: str, number: int) -> None:
        sent[name] = sent.get(name, 0) + number

    def unexpected(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective that is not counted")

    for name in originals:
        setattr(dist, name, locals()[name] if name in allowed else unexpected)
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))


def ring_bytes(model: nn.Module) -> float:
    """What one process sends in a ring all-reduce of the gradient; half of it is the first phase."""
    world = dist.get_world_size()
    return 2 * (world - 1) / world * sum(parameter.nbytes for parameter in model.parameters())


@check(2, 4, nonfinite=["raise", "skip"])
def hooked_and_mask_sends_what_an_all_reduce_sends(nonfinite: Any) -> None:
    inputs, targets = batches(dist.get_world_size())
    model = ddp(wide(), bucket_cap_mb=0.001)
    buckets: list[int] = []

    def counted(state: AggregationHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.index())
        return aggregation_hook(state, bucket)

    model.register_comm_hook(AggregationHook(AndMask(1.0), nonfinite=nonfinite), counted)
    for _ in range(3):
        buckets.clear()
        with counted_bytes() as sent:
            backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
    assert len(buckets) >= 3
    ring = ring_bytes(model)
    assert sent["all_to_all_single"] > 0.4 * ring, "the counters see what is sent"
    assert sum(sent.values()) <= ring + 300 * len(buckets), (sent, ring, len(buckets))


@check(2, 4)
def two_level_and_mask_sends_a_quarter_more_in_the_first_phase() -> None:
    world = dist.get_world_size()
    counts = [2] * world
    inputs, targets = batches(sum(counts))
    gradients = two_level(wide(), AndMask(1.0), counts)
    for _ in range(2):
        with counted_bytes() as sent:
            of_two_level(gradients, inputs, targets, counts)
    phase = ring_bytes(gradients.model) / 2
    assert phase < sent["all_to_all_single"] <= 1.25 * phase + 300, (sent, phase)
    assert sum(sent.values()) <= 2.25 * phase + 600, (sent, phase)


# Running them


class Group:
    """Processes that run one check after the other, until one of them fails or a check ends the group itself."""

    def __init__(self, world: int) -> None:
        self.usable = True
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(world)]
        self._connections = [ours for ours, _ in pipes]
        arguments = [(rank, world, Path(self._folder.name), theirs) for rank, (_, theirs) in enumerate(pipes)]
        self._processes = [context.Process(target=_process, args=given, daemon=True) for given in arguments]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, name: str) -> dict[int, str]:
        """What went wrong in which process."""
        outcomes: dict[int, str | None] = {}
        for ours in self._connections:
            with contextlib.suppress(OSError):  # its end is read below
                ours.send(name)
        waiting = {ours: rank for rank, ours in enumerate(self._connections)}
        deadline = time.monotonic() + SECONDS
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for ours in ready:
                rank = waiting.pop(ours)
                try:
                    outcomes[rank], stays = ours.recv()
                    self.usable &= stays
                except (EOFError, ConnectionError):
                    self._processes[rank].join(1)
                    outcomes[rank] = f"ended with status {self._processes[rank].exitcode}"
            if any(outcomes.values()):  # the others may now wait for it in vain
                deadline = min(deadline, time.monotonic() + 2)
        failed = any(outcomes.values())
        self.usable &= not failed and not waiting
        for rank in waiting.values():
            outcomes[rank] = None if failed else "hangs:\n" + (Path(self._folder.name) / f"hanging {rank}").read_text()
        return {rank: error for rank, error in sorted(outcomes.items()) if error is not None}

    def end(self) -> None:
        for process, ours in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            ours.close()
        self._folder.cleanup()


def _process(rank: int, world: int, folder: Path, names: Connection) -> None:
    torch.set_num_threads(1)
    trace = (folder / f"hanging {rank}").open("w")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=2 * SECONDS),  # a collective that hangs is ended from outside, with a traceback
    )
    while dist.is_initialized():
        name = names.recv()
        faulthandler.dump_traceback_later(SECONDS - 2, file=trace)
        torch.manual_seed(0)
        try:
            CHECKS[name][1]()
            names.send((None, dist.is_initialized()))
        except BaseException:
            names.send((traceback.format_exc(), False))
        faulthandler.cancel_dump_traceback_later()


def main(names: Sequence[str]) -> None:
    import torch._dynamo  # noqa: F401  the first DDP of a process imports it, 2 to 6 seconds: here once for all

    gc.freeze()  # or every process's collector would copy the pages it shares with this one
    groups: dict[int, Group] = {}
    for name in names or CHECKS:
        start = time.monotonic()
        world = CHECKS[name][0]
        if world not in groups:
            groups[world] = Group(world)
        errors = groups[world].run(name)
        if not groups[world].usable:
            groups.pop(world).end()
        said = "\n".join(f"in process {rank} of {world}: {error}" for rank, error in errors.items()) or None
        print(json.dumps({"check": name, "error": said, "seconds": round(time.monotonic() - start, 2)}), flush=True)
    for group in groups.values():
        group.end()


if __name__ == "__main__":
    main(sys.argv[1:])
