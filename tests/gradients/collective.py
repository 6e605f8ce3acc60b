"""A model, its data and its gradients, in one process and in a group, for tests in gloo groups."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from concord.aggregation import Aggregator, AndMask, GeometricMean, Mean, SandMask, TMask, XorMask
from concord.gradients import AggregationHook, NonFiniteGradientError, StackedGradients

TINY = 20 / (1 << 20)  # a bucket of 20 bytes, in MiB


RULES: dict[str, Aggregator] = {
    "mean": Mean(),
    "and-mask": AndMask(0.6),
    "geometric-mean": GeometricMean(0.6),
    "xor-mask": XorMask(0.6),
    "sand-mask": SandMask(0.3, steepness=1e-3),
    "t-mask": TMask(0.3),
}


Gradients = dict[str, tuple[Tensor, Tensor]]


def network(seed: int = 0) -> nn.Sequential:
    """A network of 275 components; no number of processes used here splits them at a layer's border."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(environments: int, seed: int = 0, batch: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs and targets of environments that share one mechanism and each have another of their own."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(environments, batch, 6, generator=generator)
    shared = torch.randn(6, 3, generator=generator)
    own = torch.randn(environments, 6, 3, generator=generator)
    return inputs, torch.tanh(inputs @ shared) + inputs @ own


def stacked(
    model: nn.Module, rule: Aggregator, inputs: Tensor, targets: Tensor, *, rescale: bool = False, loss: Any = mse_loss
) -> Gradients:
    """The gradients of all these environments in one process, the reference of the collective forms."""
    model = copy.deepcopy(model)
    return of_step(model, StackedGradients(model, loss, rule, rescale=rescale)(inputs, targets))


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(copy.deepcopy(model), **options)


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    model.zero_grad()
    mse_loss(model(inputs), targets).backward()


def of_step(model: nn.Module, step: Any) -> Gradients:
    parameters = zip(model.named_parameters(), step.kept_fraction, strict=True)
    return {name: (parameter.grad, kept) for (name, parameter), kept in parameters}


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
    """Check that the rule kept some components and dropped some, so that the comparison is meaningful."""
    kept = [float(fraction) for _, fraction in gradients.values()]
    assert any(0.02 < fraction < 0.98 for fraction in kept), kept


def environment_names(counts: Sequence[int]) -> list[list[str]]:
    return [[f"site {rank}.{index}" for index in range(count)] for rank, count in enumerate(counts)]


def local(counts: Sequence[int], rank: int) -> slice:
    """The environments of this process."""
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
    return of_step(gradients.model, gradients(inputs[mine], targets[mine]))


def gathered(tensor: Tensor) -> Tensor:
    """Every process's tensor, stacked."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def assert_same_everywhere(tensor: Tensor) -> None:
    """Check that every process has the same bits: parameters that once differ stay different."""
    everyone = gathered(tensor)
    assert torch.equal(everyone, everyone[:1].expand_as(everyone))


class Probe(nn.Module):
    """A model whose gradient is its input: the output is weight · input."""

    def __init__(self, components: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(components))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def identity(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean()


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


def assert_passes_agree(
    rule: str, model: DistributedDataParallel, hook: AggregationHook, rescale: bool, environments: int | None = None
) -> None:
    """Check that four passes on new data, with changing parameters, equal the stacked form."""
    for seed in range(4):
        inputs, targets = batches(environments or dist.get_world_size(), seed)
        expected = stacked(model.module, RULES[rule], inputs, targets, rescale=rescale)
        rank = dist.get_rank(model.process_group)
        backward(model, inputs[rank], targets[rank])
        assert_same(of_hook(model, hook), expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)


def trained(source: Callable[[nn.Module], Callable[[Tensor, Tensor], object]], environments: int) -> Tensor:
    """The parameters after 15 steps of Adam on the same batches."""
    model = network()
    step = source(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for seed in range(15):
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
