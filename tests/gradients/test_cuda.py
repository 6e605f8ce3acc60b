"""On a GPU every rule, objective and optimizer gives what it gives on the CPU, in float64; skipped without a GPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from concord.aggregation import AndMask, TemporalAndMaskAdam, aggregator
from concord.aggregation.rules_by_name import AGGREGATORS
from concord.aggregation.rules_by_name import RULES as BUILT_IN
from concord.gradients import PerExampleGradients, StackedGradients, per_example
from concord.models import FastResNet
from concord.objectives import OBJECTIVES, ObjectiveGradients, objective

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ENVIRONMENTS, EXAMPLES = 7, 5
RULES: dict[str, Any] = {name: aggregator(name, 0.5) for name in AGGREGATORS}
RULES |= {name: rule() for name, rule in BUILT_IN.items() if name not in RULES}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 9),
        nn.Tanh(),
        nn.Linear(9, 3),
    ).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ENVIRONMENTS, EXAMPLES, 8, dtype=torch.float64, generator=generator)
    return inputs, inputs[..., :3].argmax(-1)  # the environments agree in part


def on_gpu(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.cuda() for tensor in tensors)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("vectorize", ["pooled", True, False])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_over_stacked_environments(name: str, vectorize: Any) -> None:
    here, there = network(), network().cuda()
    on_cpu = StackedGradients(here, cross_entropy, RULES[name], vectorize=vectorize)
    on_device = StackedGradients(there, cross_entropy, RULES[name], vectorize=vectorize)
    for step in range(3):
        expected, found = on_cpu(batch(), step), on_device(on_gpu(batch()), step)
        assert_close(gradients(there), gradients(here), rtol=1e-8, atol=1e-11)
        assert_close(found.losses.cpu(), expected.losses, rtol=1e-8, atol=1e-11)
        assert_close(found.kept_fraction.cpu(), expected.kept_fraction)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_every_rule_over_examples(name: str) -> None:
    here, there = network(), network().cuda()
    PerExampleGradients(here, cross_entropy, RULES[name])(batch())
    PerExampleGradients(there, cross_entropy, RULES[name])(on_gpu(batch()))
    assert_close(gradients(there), gradients(here), rtol=1e-8, atol=1e-11)


def test_a_residual_network_with_batch_norm_over_examples() -> None:
    torch.manual_seed(0)
    here = FastResNet().double()
    there = copy.deepcopy(here).cuda()
    images, labels = torch.rand(1, 6, 3, 32, 32, dtype=torch.float64), torch.randint(0, 10, (1, 6))
    PerExampleGradients(here, cross_entropy, AndMask(0.2))(images, labels)
    PerExampleGradients(there, cross_entropy, AndMask(0.2))(images.cuda(), labels.cuda())
    different = sum(
        int((found - expected).abs().gt(1e-9 + 1e-6 * expected.abs()).sum())
        for found, expected in zip(gradients(there), gradients(here), strict=True)
    )
    assert different <= 1e-5 * sum(parameter.numel() for parameter in here.parameters())  # signs of rounding


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(name: str) -> None:
    here, there = network(), network().cuda()
    found = []
    for model, given in ((here, batch()), (there, on_gpu(batch()))):
        torch.manual_seed(2)
        ours = objective(name, cross_entropy, penalty_weight=0.7)
        ours.begin(model, ENVIRONMENTS, 1)
        if ours.module is not None:
            ours.module.to(given[0])
        found.append(ObjectiveGradients(model, ours, [str(each) for each in range(ENVIRONMENTS)])(*given, 0))
    assert_close(found[1].losses.cpu(), found[0].losses, rtol=1e-8, atol=1e-11)
    assert_close(gradients(there), gradients(here), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", ["mean", "and-mask", "upgrad", "median"])
def test_layers_in_bfloat16_give_nearly_the_same_updates(name: str) -> None:
    model = network().float().cuda()
    inputs, targets = on_gpu(batch())
    steps = []
    for autocast in (None, torch.bfloat16):
        StackedGradients(model, cross_entropy, RULES[name], autocast=autocast)((inputs.float(), targets))
        steps.append(torch.cat([each.flatten() for each in gradients(model)]))
    assert torch.nn.functional.cosine_similarity(*steps, dim=0) > 0.9


@pytest.mark.parametrize("fused", [False, True])
def test_the_temporal_and_mask(fused: bool) -> None:
    here, there = network(), network().cuda()
    pairs = [(model, TemporalAndMaskAdam(model.parameters(), fused=fused)) for model in (here, there)]
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        drawn = [torch.randn(each.shape, dtype=torch.float64, generator=generator) for each in here.parameters()]
        for model, optimizer in pairs:
            for parameter, gradient in zip(model.parameters(), drawn, strict=True):
                parameter.grad = gradient.to(parameter.device)
            optimizer.step()
    assert_close([each.cpu() for each in there.parameters()], list(here.parameters()), rtol=1e-8, atol=1e-11)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)
    return nn.Sequential(*layers).double().cuda()


@pytest.mark.parametrize("source", ["stacked", "vmap", "examples", "loop"])
@pytest.mark.parametrize("name", ["mean", "and-mask", "geometric-mean", "median"])
def test_fifty_steps_by_a_graph_are_fifty_ordinary_steps(name: str, source: str) -> None:
    if name == "median" and source in ("examples", "loop"):
        pytest.skip("a median of examples needs their gradients")
    ended = []
    for graph in (True, False):
        model = dropping() if source in ("vmap", "examples") else network().cuda()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        gradients: Any
        if source == "examples":
            gradients = PerExampleGradients(model, cross_entropy, RULES[name], graph=graph)
        elif source == "loop":
            gradients = per_example(model, RULES[name], graph=graph)
        else:
            vectorize = True if source == "vmap" else None
            gradients = StackedGradients(model, cross_entropy, RULES[name], vectorize=vectorize, graph=graph)

        def compute(inputs: Tensor, targets: Tensor, model: nn.Module = model) -> Tensor:
            return cross_entropy(model(inputs.flatten(0, 1)), targets.flatten())

        for step in range(50):
            torch.manual_seed(step)
            both = on_gpu(batch())
            step_of = gradients.backward(compute, *both) if source == "loop" else gradients(both)
            optimizer.step()
        if graph:
            assert gradients._graph.captured
        ended.append([*model.state_dict().values(), step_of.losses, step_of.kept_fraction])
    assert_close(ended[0], ended[1], rtol=1e-6, atol=1e-9)
