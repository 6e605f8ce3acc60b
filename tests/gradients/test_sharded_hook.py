"""A model sharded by FSDP2 has the aggregated gradients of the whole model."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective import RULES, assert_selective, batches, network, poisoned, refused
from own_rules import OWN_RULES
from process_groups import in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.nn.functional import mse_loss

from concord.aggregation import AndMask, Median, PCGrad, TrimmedMean
from concord.errors import ArgumentError, InputError
from concord.gradients import ShardedAggregation, StackedGradients, register_aggregation

RULES_OF_SHARDS = RULES | OWN_RULES | {"median": Median(), "trimmed-mean": TrimmedMean(0.3)}


def sharded(model: nn.Module, rule: Any, *, policy: Any = None, **options: Any) -> tuple[nn.Module, ShardedAggregation]:
    """A copy, two of whose layers are sharded by themselves."""
    model = copy.deepcopy(model)
    if policy is not None:
        fully_shard(model, mp_policy=policy)
    else:
        for module in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(module)
    return model, register_aggregation(model, rule, environment=f"site {dist.get_rank()}", **options)


def backward(model: nn.Module, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> None:
    rank = dist.get_rank()
    (scale * mse_loss(model(inputs[rank]), targets[rank])).backward()


def whole(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


@in_processes(3, 4, slow=True, rule=list(RULES | OWN_RULES), rescale=[False, True])
@in_processes(3, 4, slow=True, rule=["trimmed-mean"], rescale=[False])
@in_processes(3, 4, rule=["sand-mask", "grad-drop"], rescale=[False, True])
@in_processes(3, 4, rule=["and-mask", "median"], rescale=[False])
@in_processes(2, rule=list(RULES | OWN_RULES), rescale=[False, True])
@in_processes(2, rule=["median", "trimmed-mean"], rescale=[False])
def test_gradients_are_those_of_the_whole_model_to_the_last_bit(rule: str, rescale: bool) -> None:
    made = RULES_OF_SHARDS[rule]
    environments, plain = dist.get_world_size(), network()
    model, aggregation = sharded(plain, made, rescale=rescale)
    # One backward pass an environment, as in each process; pooled or vectorized ones are rounded in another order.
    gradients = StackedGradients(plain, mse_loss, made, rescale=rescale, vectorize=False)
    for step in range(2):
        inputs, targets = batches(environments, step)
        model.zero_grad()
        backward(model, inputs, targets)
        result = gradients(inputs, targets, step)
        expected = [parameter.grad for parameter in plain.parameters()]
        if rescale and rule == "sand-mask":  # what a soft mask keeps of a shard is rounded before it is added
            torch.testing.assert_close(whole(model), expected, rtol=1e-5, atol=1e-7)
        else:
            assert all(map(torch.equal, whole(model), expected))
        if result.kept_fraction.numel() > 0:
            kept = torch.stack([aggregation.kept_fraction(parameter) for parameter in model.parameters()])
            torch.testing.assert_close(kept, result.kept_fraction, rtol=1e-5, atol=1e-6)


@in_processes(2)
def test_a_sharded_model_trains_as_the_whole_one() -> None:
    plain = network()
    model, aggregation = sharded(plain, AndMask(1.0))
    gradients = StackedGradients(plain, mse_loss, AndMask(1.0), vectorize=False)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (model, plain)]
    for step in range(10):
        inputs, targets = batches(2, step)
        optimizers[0].zero_grad()
        backward(model, inputs, targets)
        gradients(inputs, targets)
        for optimizer in optimizers:
            optimizer.step()
    for shard, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor(), parameter, rtol=1e-5, atol=1e-6)  # type: ignore[operator]
    kept = {name: (p.grad, aggregation.kept_fraction(p)) for name, p in model.named_parameters()}
    assert_selective(kept)  # type: ignore[arg-type]


@in_processes(2)
def test_after_a_restart_a_rule_draws_on_by_the_step() -> None:
    (inputs, targets), plain = batches(2), network()
    model, aggregation = sharded(plain, OWN_RULES["grad-drop"])
    drawn = []
    for _ in range(3):
        model.zero_grad()
        backward(model, inputs, targets)
        drawn.append(whole(model))
    assert aggregation.step == 3
    assert not all(map(torch.equal, drawn[0], drawn[2])), "each step draws anew"
    again, resumed = sharded(plain, OWN_RULES["grad-drop"])
    resumed.step = 2
    backward(again, inputs, targets)
    assert all(map(torch.equal, whole(again), drawn[2]))


@in_processes(2, reduce=[torch.float32, torch.bfloat16])
def test_gradients_in_half_precision_are_aggregated_in_float32(reduce: torch.dtype) -> None:
    plain, (inputs, targets) = network(), batches(2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce, output_dtype=torch.float32)
    model, _ = sharded(plain, AndMask(1.0), policy=policy)
    backward(model, inputs, targets)
    half = copy.deepcopy(plain).bfloat16()
    rows = []
    for x, y in zip(inputs.bfloat16(), targets, strict=True):
        rows.append(torch.autograd.grad(mse_loss(half(x).float(), y), list(half.parameters())))
    for found, of_parameter in zip(whole(model), zip(*rows, strict=True), strict=True):
        gradients = torch.stack(of_parameter).float()
        expected = gradients.mean(0) * (gradients.sign().sum(0).abs() == 2)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
        assert found.dtype == torch.float32


@in_processes(2)
def test_microbatches_and_frozen_parameters_are_as_in_the_whole_model() -> None:
    plain = network()
    plain[0].bias.requires_grad_(False)
    inputs, targets = batches(2)
    model, _ = sharded(plain, AndMask(1.0))
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    backward(model, inputs[:, :6], targets[:, :6])
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    backward(model, inputs[:, 6:], targets[:, 6:])
    StackedGradients(plain, mse_loss, AndMask(1.0))(inputs, targets)
    for (name, shard), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name == "0.bias":
            assert shard.grad is None
            continue
        torch.testing.assert_close(shard.grad.full_tensor(), 2 * parameter.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr,operator]


class Forked(nn.Module):
    """Each process leaves a layer out, not the same one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, inputs: Tensor, which: int) -> Tensor:
        outputs: Tensor = self.layers[which](inputs)
        return outputs


@in_processes(2)
def test_a_parameter_unused_in_a_process_has_a_gradient_of_zero_there() -> None:
    model, rank, (inputs, targets) = fully_shard(Forked()), dist.get_rank(), batches(2)
    register_aggregation(model, RULES["mean"])
    mse_loss(model(inputs[rank], rank), targets[rank]).backward()
    plain = Forked()
    for which in range(2):
        (mse_loss(plain(inputs[which], which), targets[which]) / 2).backward()
    for found, parameter in zip(whole(model), plain.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


@in_processes(2)
def test_an_environment_that_is_not_finite_is_named_in_every_process() -> None:
    model, _ = sharded(network(), AndMask(1.0))
    inputs, targets = batches(2)
    with refused(["site 1"], 0):
        backward(model, poisoned(inputs, 1), targets)


@in_processes(2)
def test_a_scaled_loss_leaves_scaled_gradients_and_overflow_to_the_scaler() -> None:
    plain, (inputs, targets) = network(), batches(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, _ = sharded(plain, RULES["sand-mask"], scaler=scaler)
    backward(model, inputs, targets, scale=1024.0)
    StackedGradients(plain, mse_loss, RULES["sand-mask"], vectorize=False)(inputs, targets)
    for found, parameter in zip(whole(model), plain.parameters(), strict=True):
        torch.testing.assert_close(found / 1024, parameter.grad, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    backward(model, poisoned(inputs, 1), targets)
    assert not all(bool(torch.isfinite(gradient).all()) for gradient in whole(model))


@in_processes(2)
def test_what_a_sharded_model_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"model Sequential: is not sharded; call fully_shard\(model\) before"):
        register_aggregation(network(), AndMask())
    model = fully_shard(network())
    with pytest.raises(InputError, match="rule PCGrad: needs inner products of whole gradients, of which a sharded"):
        register_aggregation(model, PCGrad())
    with pytest.raises(ArgumentError, match="nonfinite=skip: a sharded module is aggregated before"):
        register_aggregation(model, AndMask(), nonfinite="skip")
    with pytest.raises(ArgumentError, match=r"environment_momentum=0\.9: no process of a sharded model keeps"):
        register_aggregation(model, AndMask(), environment_momentum=0.9)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(InputError, match="module model: hybrid sharding replicates its shards"):
        register_aggregation(fully_shard(network(), mesh=mesh), AndMask())
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "alone"))["alone"]
    with pytest.raises(InputError, match="module model: is sharded over one process, which compares nothing"):
        register_aggregation(fully_shard(network(), mesh=alone), AndMask())


@in_processes(2)
def test_a_model_that_is_sharded_in_part_or_over_two_meshes_is_refused() -> None:
    model = network()
    fully_shard(model, ignored_params={model[0].bias})
    with pytest.raises(InputError, match=r"parameter 0\.bias: is not sharded, so each process would keep its own"):
        register_aggregation(model, AndMask())
    model = network()
    other = ShardPlacementResult(
        Shard(0), FSDPMeshInfo(DeviceMesh.from_group(dist.new_group(), "cpu"), shard_mesh_dim=0)
    )
    fully_shard(model, shard_placement_fn=lambda parameter: other if parameter.ndim == 1 else None)
    with pytest.raises(InputError, match="module model: its parameters are sharded over 2 meshes; give it one mesh"):
        register_aggregation(model, AndMask())


@in_processes(2, before=[True, False])
def test_a_parameter_that_is_frozen_or_unfrozen_later_is_refused(before: bool) -> None:
    model = network()
    model[0].bias.requires_grad_(before)
    fully_shard(model)
    register_aggregation(model, AndMask())
    model[0].bias.requires_grad_(not before)
    with pytest.raises(InputError, match="a parameter was frozen or unfrozen since register_aggregation; call it anew"):
        backward(model, *batches(2))


@in_processes(2)
def test_a_weighting_keeps_no_fraction_and_an_unknown_parameter_has_none() -> None:
    model, aggregation = sharded(network(), Median())
    with pytest.raises(InputError, match="rule Median: drops no components"):
        aggregation.kept_fraction(next(model.parameters()))
    _, masked = sharded(network(), AndMask())
    with pytest.raises(KeyError):
        masked.kept_fraction(next(model.parameters()))
