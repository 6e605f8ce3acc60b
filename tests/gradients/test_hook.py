"""The hook of DistributedDataParallel: one environment for each process equals all environments in one process."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective import (
    RULES,
    TINY,
    Probe,
    assert_passes_agree,
    assert_same,
    assert_selective,
    backward,
    batches,
    ddp,
    gathered,
    network,
    of_hook,
    of_step,
    poisoned,
    refused,
    stacked,
)
from own_rules import OWN_RULES, Averages, looped
from process_groups import in_processes
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from concord.aggregation import AndMask, Mean, XorMask, aggregate
from concord.errors import InputError
from concord.gradients import (
    AggregationHook,
    HookedGradients,
    PerExampleGradients,
    StackedGradients,
    aggregation_hook,
    register_aggregation_hook,
)
from concord.objectives import ObjectiveGradients, PenaltyWeight, VREx


@in_processes(2, policy=["skip", "propagate"], scaled=[False, True])
def test_a_gradient_that_is_not_finite_is_in_no_average_of_the_hook(policy: Any, scaled: bool) -> None:
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


@in_processes(2)
def test_a_hook_resumes_from_a_checkpoint_of_an_own_loop() -> None:
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


@in_processes(2)
def test_a_scaled_loss_is_unscaled_for_the_rule_and_scaled_again() -> None:
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


@in_processes(2)
def test_a_half_precision_layer_hardly_kept_is_rescaled_exactly() -> None:
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


@in_processes(2)
def test_a_hook_registered_by_hand_refuses_a_process_without_a_batch() -> None:
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


@in_processes(2, 4, rule=list(RULES))
def test_hook_equals_stacked(rule: str) -> None:
    inputs, targets = batches(dist.get_world_size())
    for rescale in (False, True):
        model = ddp(network())
        hook = register_aggregation_hook(model, RULES[rule], rescale=rescale)
        backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
        expected = stacked(network(), RULES[rule], inputs, targets, rescale=rescale)
        if rule != "mean":
            assert_selective(expected)
        assert_same(of_hook(model, hook), expected)


@in_processes(4, slow=True, rule=list(RULES))
@in_processes(4, rule=["mean", "and-mask", "sand-mask"])
def test_hook_after_buckets_were_rebuilt(rule: str) -> None:
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


@in_processes(4)
def test_hook_with_small_buckets_from_the_first_pass_on() -> None:
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


@in_processes(2)
def test_a_hooked_model_refuses_by_name() -> None:
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


@in_processes(2)
def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = ddp(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2)).double())
    register_aggregation_hook(model, AndMask(0.6))
    with pytest.raises(InputError, match=r"parameter of shape \(5, 3\): has a sparse gradient; .* sparse=False"):
        model(torch.tensor([[0, 1], [1, 2]])).sum().backward()


@in_processes(2, 4, rule=["and-mask", "geometric-mean"])
def test_layers_split_over_slices(rule: str) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(6, 3)  # 18 and 3 components: in slices of 6 (4 processes) or 11 (2)
    inputs, targets = batches(dist.get_world_size())
    model = ddp(layer)
    hook = register_aggregation_hook(model, RULES[rule], rescale=True)
    backward(model, inputs[dist.get_rank()], targets[dist.get_rank()])
    assert_same(of_hook(model, hook), stacked(layer, RULES[rule], inputs, targets, rescale=True))


@in_processes(2)
def test_hook_with_gradient_accumulation() -> None:
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


@in_processes(3)
def test_after_a_restart_a_rule_draws_on_by_the_step() -> None:
    (inputs, targets), rank = batches(3), dist.get_rank()
    drawn = []
    for begun in (0, 2):
        model = ddp(network(), bucket_cap_mb=TINY)
        hook = register_aggregation_hook(model, OWN_RULES["grad-drop"])
        hook.step = begun
        for _ in range(begun, 3):
            model.zero_grad()
            backward(model, inputs[rank], targets[rank])
            drawn.append([parameter.grad.clone() for parameter in model.parameters()])
    first, _, third, after = drawn
    assert not all(map(torch.equal, first, third)), "each step draws anew"
    assert all(map(torch.equal, third, after))


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


@in_processes(4, bucket_view=[False, True])
def test_hook_with_unused_parameters(bucket_view: bool) -> None:
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


def risk_of_parts(model: Any, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
    """A risk that calls the trunk twice and one head, and never the model itself."""
    inputs, targets = batch
    twice = torch.tanh(model.trunk(inputs)) + torch.tanh(model.trunk(-2 * inputs))
    return mse_loss(model.heads[0](twice), targets)


@in_processes(2, momentum=[0.0, 0.9])
def test_a_risk_may_call_parts_of_the_model_in_every_placement(momentum: float) -> None:
    rank, options = dist.get_rank(), {"environment_momentum": momentum}
    ours, theirs = TwoHeads(), TwoHeads()
    hooked = HookedGradients(
        ours, risk_of_parts, AndMask(1.0), environment="01"[rank], find_unused_parameters=True, **options
    )
    one = StackedGradients(theirs, risk_of_parts, AndMask(1.0), names="01", **options)
    for step in range(3):
        inputs, targets = batches(2, step)
        found = hooked((inputs[[rank]], targets[[rank]]), step)
        assert_same(of_step(ours, found), of_step(theirs, one((inputs, targets), step)))


@in_processes(2)
def test_hooked_gradients_name_a_frozen_parameter_as_the_model_does() -> None:
    rank, model = dist.get_rank(), network()
    gradients = HookedGradients(model, mse_loss, AndMask(1.0), environment="01"[rank])
    inputs, targets = (each[[rank]] for each in batches(2))
    gradients(inputs, targets)
    model[0].weight.requires_grad_(False)
    with pytest.raises(InputError, match=r"parameter 0.weight: it was frozen"):
        gradients(inputs, targets)


class Branch(nn.Module):
    """A network one part of which is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.part: nn.Linear | None = nn.Linear(6, 6)
        self.used = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        assert self.part is not None
        return self.second(hidden + self.part(hidden) if self.used else hidden)


@in_processes(2, momentum=[0.0, 0.9])
def test_what_no_environment_uses_in_a_step_has_the_gradient_that_it_has_in_one_process(momentum: float) -> None:
    rank, options = dist.get_rank(), {"environment_momentum": momentum}
    ours, theirs = Branch(), Branch()
    hooked = HookedGradients(ours, mse_loss, Mean(), environment="01"[rank], find_unused_parameters=True, **options)
    one = StackedGradients(theirs, mse_loss, Mean(), names="01", **options)
    for step in range(4):
        ours.used = theirs.used = step != 2
        inputs, targets = batches(2, step)
        hooked(inputs[rank : rank + 1], targets[rank : rank + 1], step=step)
        one(inputs, targets, step=step)
        for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(found.grad, expected.grad)


@in_processes(2)
def test_a_wrapped_model_is_refused_where_its_exchange_would_not_run() -> None:
    model = ddp(network())
    for make in (
        lambda: StackedGradients(model, mse_loss, Mean()),
        lambda: ObjectiveGradients(model, VREx(mse_loss, PenaltyWeight(1.0)), ["a", "b"]),
        lambda: PerExampleGradients(model, mse_loss, Mean()),
    ):
        with pytest.raises(InputError, match="wrapped in DistributedDataParallel, whose exchange would not run"):
            make()


@in_processes(2)
def test_a_branch_that_is_left_out_unannounced_is_refused() -> None:
    model, rank = Branch(), dist.get_rank()
    gradients = HookedGradients(model, mse_loss, AndMask(1.0), environment="01"[rank])
    inputs, targets = (each[rank : rank + 1] for each in batches(2, 0))
    gradients(inputs, targets)
    model.used = False
    with pytest.raises(InputError, match=f"step 1: the risk left out parameters in environment {rank}.*find_unused"):
        gradients(inputs, targets)


@in_processes(4)
def test_hook_with_static_graph() -> None:
    model = ddp(network(), static_graph=True, bucket_cap_mb=TINY)
    hook = register_aggregation_hook(model, RULES["and-mask"])
    assert_passes_agree("and-mask", model, hook, rescale=False)


@in_processes(4)
def test_hook_with_gradients_as_bucket_views() -> None:
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


@in_processes(4)
def test_hook_with_bf16_parameters() -> None:
    assert_half_precision_agrees(torch.bfloat16, torch.bfloat16, lambda hook: hook, rtol=2**-6)


@in_processes(4)
def test_hook_under_fp16_compression() -> None:
    assert_half_precision_agrees(torch.float32, torch.float16, fp16_compress_wrapper, rtol=2**-8)


@in_processes(2)
def test_fp16_rescaling_of_a_layer_of_which_nothing_is_kept() -> None:
    inputs, targets = batches(1)
    model = ddp(network())
    hook = AggregationHook(XorMask(1.0), rescale=True)  # both processes agree everywhere: nothing is kept
    model.register_comm_hook(hook, fp16_compress_wrapper(aggregation_hook))
    backward(model, inputs[0], targets[0])
    for name, (gradient, kept) in of_hook(model, hook).items():
        assert not gradient.any(), f"{name}: {gradient}"
        assert kept == 0


@in_processes(2)
def test_hook_with_channels_last_and_mixed_dtypes() -> None:
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


@in_processes(2, 4)
def test_mean_hook_equals_plain_ddp() -> None:
    inputs, targets = batches(dist.get_world_size())
    plain, model = ddp(network(), bucket_cap_mb=TINY), ddp(network(), bucket_cap_mb=TINY)
    register_aggregation_hook(model, Mean())
    for _ in range(3):
        for either in (plain, model):
            backward(either, inputs[dist.get_rank()], targets[dist.get_rank()])
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: name + text)


@in_processes(4)
def test_hook_counts_steps_and_kept_fractions() -> None:
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


@in_processes(4)
def test_hooked_gradients_are_a_gradient_source() -> None:
    inputs, targets = batches(4)
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    model = network()
    gradients = HookedGradients(model, mse_loss, RULES["and-mask"], environment=f"site {dist.get_rank()}")
    expected = stacked(network(), RULES["and-mask"], inputs, targets)
    for step in (0, 7):
        result = gradients(inputs[mine], targets[mine], step)
        assert_same(of_step(model, result), expected)
        torch.testing.assert_close(result.losses, mse_loss(network()(inputs[mine][0]), targets[mine][0]).detach()[None])
        assert result.skipped == ()
    with refused([f"site {rank}" for rank in range(4)], 11):
        gradients(inputs[mine] * float("nan"), targets[mine], 11)


@in_processes(4, buckets=["one bucket", "several buckets"])
def test_hook_raises_in_every_process(buckets: str) -> None:
    rank = dist.get_rank()
    inputs, targets = batches(4)
    model = ddp(network(), bucket_cap_mb=25 if buckets == "one bucket" else TINY)
    register_aggregation_hook(model, AndMask(1.0), environment=f"site {rank}")
    for _ in range(3):
        backward(model, inputs[rank], targets[rank])
    with refused(["site 1", "site 2"], 3):
        backward(model, poisoned(inputs, 1, 2)[rank], targets[rank])


@in_processes(4)
def test_hook_names_the_environments_of_all_buckets() -> None:
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


@in_processes(2)
def test_large_finite_gradients_are_no_error() -> None:
    model = ddp(Probe(8))
    register_aggregation_hook(model, AndMask(1.0))
    model(torch.full((1, 8), 1.5e38)).sum().backward()  # their sum over components is infinite
    torch.testing.assert_close(model.module.weight.grad, torch.full((8,), 1.5e38))


@in_processes(4, slow=True, rule=list(RULES))
@in_processes(4, rule=["mean", "and-mask", "sand-mask"])
@in_processes(2, rule=["and-mask"])
def test_hook_skips(rule: str) -> None:
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


@in_processes(4)
def test_hook_skips_an_environment_of_which_one_layer_is_bad() -> None:
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


@in_processes(2)
def test_hook_skips_under_fp16_compression() -> None:
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
