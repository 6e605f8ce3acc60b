"""Similarity of representations: known answers of PWCCA."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from concord.errors import InputError
from concord_jobs.colored_mnist.similarity import layer_outputs, pwcca


def orthonormal(examples: int, features: int) -> torch.Tensor:
    """Centred orthonormal columns."""
    torch.manual_seed(0)
    values = torch.randn(examples, features, dtype=torch.float64)
    return torch.linalg.qr(values - values.mean(0))[0]


def test_a_linear_map_and_a_shift_change_nothing() -> None:
    torch.manual_seed(0)
    one = torch.randn(200, 5)
    assert pwcca(one, one @ torch.randn(5, 5) + 3.0) == pytest.approx(1.0, abs=1e-6)
    assert pwcca(one, torch.cat([one, torch.randn(200, 3)], 1)) == pytest.approx(1.0, abs=1e-6)


def test_it_is_the_mean_of_the_correlations_weighted_by_what_they_carry() -> None:
    # Features 3a and b, compared with cos(α) a + sin(α) c and cos(β) b + sin(β) d, all orthonormal: the canonical
    # correlations are cos α and cos β, and a carries three times what b does.
    a, b, c, d = orthonormal(50, 4).T
    one = torch.stack([3 * a, b], 1)
    other = torch.stack([0.6 * a + 0.8 * c, 0.8 * b + 0.6 * d], 1)
    assert pwcca(one, other) == pytest.approx((3 * 0.6 + 1 * 0.8) / 4, abs=1e-9)
    assert pwcca(other, one) == pytest.approx(0.7, abs=1e-9)  # there both carry as much


def test_unrelated_representations_have_little_in_common() -> None:
    torch.manual_seed(0)
    assert pwcca(torch.randn(20_000, 3), torch.randn(20_000, 3)) < 0.05


def test_features_that_say_nothing_new_do_not_count() -> None:
    a, b, c, _ = orthonormal(50, 4).T
    one = torch.stack([a, b, a + b, a * 0], 1)
    assert pwcca(one, torch.stack([a, c], 1)) == pytest.approx(pwcca(one, torch.stack([a, c, a], 1)), abs=1e-9)


def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(InputError, match="more than the 12 features are needed"):
        pwcca(torch.randn(10, 12), torch.randn(10, 2))
    with pytest.raises(InputError, match="the same for all examples"):
        pwcca(torch.ones(10, 2), torch.randn(10, 2))


def test_layers_are_seen_with_their_own_weights_or_others() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    inputs = torch.randn(7, 4)
    seen = layer_outputs(model, inputs)
    assert list(seen) == ["0", "2"]
    assert_close(seen["0"], model[0](inputs))
    assert_close(seen["2"], model(inputs))
    changed = layer_outputs(model, inputs, {"2.weight": model[2].weight * 2, "2.bias": model[2].bias * 2})
    assert_close(changed["2"], seen["2"] * 2)
