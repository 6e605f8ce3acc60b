"""Environments and examples in several gloo processes: the gradients equal those of one process."""

import copy
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from collective import (
    RULES,
    TINY,
    assert_passes_agree,
    assert_placement_does_not_matter,
    assert_same,
    assert_same_everywhere,
    backward,
    batches,
    ddp,
    environment_names,
    local,
    network,
    of_hook,
    of_step,
    of_two_level,
    poisoned,
    refused,
    stacked,
    trained,
    two_level,
)
from own_rules import OWN_RULES, Averages, assert_gradients, looped
from process_groups import in_processes
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import SIGN, AndMask, Mean, Statistic, Statistics, Update, aggregate
from concord.environments.batches import names_of_batches
from concord.errors import InputError
from concord.gradients import (
    HookedGradients,
    NonFiniteGradientError,
    PerExampleGradients,
    StackedGradients,
    per_example,
    register_aggregation_hook,
)


@in_processes(3, rule=list(OWN_RULES), placement=["hook", "small buckets", "two-level", "one each", "examples"])
def test_own_rules_are_those_of_a_loop(rule: str, placement: str) -> None:
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
        assert_gradients(model, expected.updates, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.kept_fraction.double(), torch.stack(expected.kept), rtol=1e-5, atol=1e-6)
        assert result.environments == len(pairs)


@in_processes(3, rule=["and-mask", "grad-drop"], placement=["hook", "two-level", "one each"])
def test_averages_of_environments_are_those_of_a_loop(rule: str, placement: str) -> None:
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
        assert_gradients(model, expected.updates, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.kept_fraction.double(), torch.stack(expected.kept), rtol=1e-5, atol=1e-6)


@in_processes(3)
def test_batches_of_one_environment_vote_over_processes_as_in_a_loop() -> None:
    rank, counts = dist.get_rank(), [2, 2, 2]  # two batches of one environment in each
    inputs, targets = (each.double() for each in batches(6, batch=4))
    model, own = network().double(), local(counts, rank)
    names = names_of_batches([f"site {rank}"], 2)
    source = StackedGradients(model, mse_loss, RULES["and-mask"], names=names, group=dist.group.WORLD)
    source((inputs[own], targets[own]))
    expected = looped(model, mse_loss, RULES["and-mask"], list(zip(inputs, targets, strict=True)))
    assert_gradients(model, expected.updates, rtol=1e-9, atol=1e-12)


class Votes:
    """A rule that swallows what is not finite, and has no sum of gradients."""

    statistics: ClassVar[tuple[Statistic, ...]] = (SIGN,)

    def finish(self, sums: Statistics, environments: int) -> Update:
        value = sums["sign"].nan_to_num().clamp(-1, 1)
        return Update(value, torch.ones_like(value))


@in_processes(2, form=["hook", "two-level", "examples"])
def test_what_is_not_finite_propagates_to_every_process(form: str) -> None:
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


@in_processes(2, form=["hook", "two-level"])
def test_channels_last_with_a_fused_optimizer(form: str) -> None:
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


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * self.weight[0] + self.weight[1]


@in_processes(4, rescale=[False, True])
def test_fewer_components_than_processes(rescale: bool) -> None:
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


COUNTS = {
    "even": {2: [3, 3], 4: [3, 3, 3, 3]},
    "uneven": {2: [5, 1], 4: [1, 4, 2, 3]},
    "one each": {2: [1, 1], 4: [1, 1, 1, 1]},
}


@in_processes(4, slow=True, rule=list(RULES), placement=["even"])
@in_processes(4, rule=["and-mask"], placement=["even"])
@in_processes(4, rule=list(RULES), placement=["uneven"])
@in_processes(2, rule=["and-mask"], placement=list(COUNTS))
@in_processes(4, rule=["sand-mask"], placement=["one each"])
def test_two_level_equals_one_process(rule: str, placement: str) -> None:
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


@in_processes(4, ranks=[(0, 1), (1, 3), (3, 1, 2)])
def test_sub_group(ranks: tuple[int, ...]) -> None:
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


@in_processes(2)
def test_a_process_without_environments_is_refused_in_every_process() -> None:
    with pytest.raises(InputError, match="process 1"):
        two_level(network(), Mean(), [2, 0])


@in_processes(4, slow=True, rule=list(RULES))
@in_processes(4, rule=["and-mask", "sand-mask"])
def test_placement_of_16_environments(rule: str) -> None:
    assert_placement_does_not_matter(rule, 16, [2, 4])


@in_processes(8)
def test_placement_on_8_processes() -> None:
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


@in_processes(4, rule=["and-mask", "geometric-mean"])
def test_every_process_gets_the_same_bits(rule: str) -> None:
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


@in_processes(4)
def test_two_level_raises_in_every_process_and_goes_on() -> None:
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


@in_processes(4, slow=True, rule=list(RULES))
@in_processes(4, rule=["mean", "and-mask", "sand-mask"])
def test_two_level_skips(rule: str) -> None:
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
        actual = of_step(gradients.model, step)
        if good:
            assert_same(actual, stacked(network(), RULES[rule], inputs[good], targets[good], rescale=True))
        else:
            for gradient, kept in actual.values():
                assert not gradient.any()
                assert kept == 0


def examples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Examples of environments that agree on something: inputs ``(count, 6)`` and targets ``(count, 3)``."""
    inputs, targets = batches(count, seed, batch=1)
    return inputs[:, 0], targets[:, 0]


@in_processes(4, slow=True, rule=list(RULES))
@in_processes(4, rule=["and-mask", "sand-mask"])
@in_processes(2, rule=list(RULES))
def test_examples_of_all_processes_equal_one_process(rule: str) -> None:
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
            assert_same(of_step(model, finished), expected)


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


@in_processes(2, clipped=[False, True])
def test_examples_of_rules_that_draw_equal_one_process(clipped: bool) -> None:
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


@in_processes(2)
def test_examples_of_a_weighted_risk_are_weighted_among_all_processes() -> None:
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
    assert_gradients(model, expected, rtol=1e-6, atol=1e-9)


@in_processes(2)
def test_one_example_a_process_is_enough() -> None:
    model = network()
    inputs, targets = examples(2)
    gradients = PerExampleGradients(model, mse_loss, RULES["and-mask"], group=dist.group.WORLD)
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    step = gradients(inputs[None, mine], targets[None, mine])
    expected = stacked(model, RULES["and-mask"], inputs[:, None], targets[:, None])
    assert_same(of_step(model, step), expected)


@in_processes(4, where=[0, 3])
def test_examples_that_are_not_finite_are_named_everywhere_or_left_out(where: int) -> None:
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
    assert_same(of_step(model, step), expected)
