"""Agreement over time with sharded parameters: equal to one process that has them whole."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_group
from test_temporal_agreement import Lottery
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from concord.aggregation import AndMask, SandMask, TemporalAgreementAdam

RULES = [AndMask(0.3), SandMask(0.1, steepness=0.5), Lottery()]
PATHS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]
STEPS = 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def gradients(model: nn.Module) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()] for _ in range(STEPS)
    ]


def optimizer_for(model: nn.Module, rule: Any, path: Any) -> TemporalAgreementAdam:
    return TemporalAgreementAdam(model.parameters(), rule, 0.01, (0.5, 0.9, 0.6), weight_decay=0.1, **path)


def distributed(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    """Weights in columns, biases whole in every process."""
    for layer in (model[0], model[2]):
        for name, placement in (("weight", Shard(1)), ("bias", Replicate())):
            setattr(layer, name, nn.Parameter(distribute_tensor(getattr(layer, name).detach(), mesh, [placement])))
    return model


def sharded_as_whole(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for rule in RULES:
        for path in PATHS:
            for shard in (lambda model: fully_shard(model, mesh=mesh), lambda model: distributed(model, mesh)):
                whole = network()
                model = shard(copy.deepcopy(whole))
                expected, ours = optimizer_for(whole, rule, path), optimizer_for(model, rule, path)
                for step, at_step in enumerate(gradients(whole)):
                    for each, part, gradient in zip(whole.parameters(), model.parameters(), at_step, strict=True):
                        each.grad = gradient
                        part.grad = distribute_tensor(gradient, mesh, part.placements)
                    expected.step()
                    ours.step()
                    if step == 2:
                        state = copy.deepcopy(ours.state_dict())
                        ours = optimizer_for(model, rule, path)
                        ours.load_state_dict(state)
                for each, part in zip(whole.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(part.full_tensor(), each.detach(), rtol=1e-6, atol=1e-9)
                    for name, value in expected.state[each].items():
                        if name != "step":
                            kept = ours.state[part][name]
                            assert kept.placements == part.placements
                            torch.testing.assert_close(kept.full_tensor(), value, rtol=1e-6, atol=1e-9)
                assert ours.agreement() == pytest.approx(expected.agreement())


def sums_still_to_be_added(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    weight = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    weight.grad = torch.distributed.tensor.DTensor.from_local(torch.tensor([1.0, 2.0 * rank - 1, 0]), mesh, [Partial()])
    optimizer = TemporalAgreementAdam([weight], AndMask(0.1))
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"].to_local(), torch.tensor([0.2, 0.0, 0.0]))
    torch.testing.assert_close(optimizer.state[weight]["sign_avg"].to_local(), torch.tensor([0.1, 0.0, 0.0]))


@pytest.mark.parametrize("check", [sharded_as_whole, sums_still_to_be_added])
def test_in_two_processes(check: Any, tmp_path: Path) -> None:
    run_group(check, 2, tmp_path)
