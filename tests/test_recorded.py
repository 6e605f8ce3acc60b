"""Recorded operations give the function's own bits, whatever was left out of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from concord.gradients.recorded import recorded


def penalized(weight: Tensor, inputs: Tensor) -> Tensor:
    """As IRM's penalty: the same outputs and the same numbers several times."""

    def loss(weight: Tensor, inputs: Tensor) -> Tensor:
        return 0.5 * ((inputs @ weight) ** 2).mean() + 0.5 * (inputs @ weight).mean() ** 2 + 0.5

    return vmap(grad(loss), (None, 0))(weight, inputs)


def written_twice(weight: Tensor, inputs: Tensor) -> Tensor:
    """Two values from the same operation, of which one is written to."""
    first, second = inputs * weight, inputs * weight
    first.add_(1)
    return first + 10 * second


def written_through_a_view(weight: Tensor, inputs: Tensor) -> Tensor:
    first = inputs * weight
    before = first.sum()
    first.view(-1)[0] = 7.0
    return before + 10 * first.sum()


def written_through_one_of_several_views(weight: Tensor, inputs: Tensor) -> Tensor:
    first = inputs * weight
    before = first.sum()
    first.unbind(0)[1].zero_()
    return before + 10 * first.sum()


def written_in_a_list(weight: Tensor, inputs: Tensor) -> Tensor:
    first, second = inputs * weight, inputs * weight
    torch._foreach_add_([first], 1.0)
    return first + 10 * second


def written_before_it_is_read_again(weight: Tensor, inputs: Tensor) -> Tensor:
    copy = inputs * weight
    before = copy.exp()
    copy.mul_(2)
    return before + 10 * copy.exp()


def written_constant(weight: Tensor, inputs: Tensor) -> Tensor:
    total = torch.zeros(()).to(inputs)
    total += (inputs * weight).sum()
    return total


@pytest.mark.parametrize(
    "function",
    [
        penalized,
        written_twice,
        written_through_a_view,
        written_through_one_of_several_views,
        written_in_a_list,
        written_before_it_is_read_again,
        written_constant,
    ],
)
def test_a_replay_gives_every_bit_of_the_function(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    replay = recorded(function, torch.randn(4), torch.randn(3, 5, 4))
    for _ in range(3):
        weight, inputs = torch.randn(4), torch.randn(3, 5, 4)
        assert torch.equal(replay(weight, inputs), function(weight, inputs))


def test_what_is_drawn_at_random_is_neither_shared_nor_kept() -> None:
    replay = recorded(lambda inputs: (torch.rand_like(inputs), torch.rand_like(inputs)), torch.zeros(50))
    one, other = replay(torch.zeros(50))
    again, _ = replay(torch.zeros(50))
    assert not torch.equal(one, other)
    assert not torch.equal(one, again)


def test_results_have_memory_of_their_own() -> None:
    replay = recorded(lambda inputs: (inputs * 2, (inputs * 2).t(), torch.tensor(0.5) * 1), torch.ones(3, 3))
    for _ in range(2):
        results = replay(torch.ones(3, 3))
        for result in results:
            result.add_(1)
        assert [float(result.sum()) for result in results] == [27.0, 27.0, 1.5]


def test_what_repeats_is_done_once() -> None:
    arguments = torch.randn(4), torch.randn(3, 5, 4)
    operations = [
        sum(node.op == "call_function" for node in module.graph.nodes)
        for module in (recorded(penalized, *arguments), make_fx(penalized)(*arguments))
    ]
    assert operations[0] < 0.8 * operations[1]
