"""What the average gradient contains: the mechanism's signal, or the shortcuts' (AND-mask paper, Fig. 7 and B.3.5)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from concord.aggregation import Aggregator, AndMask, Mean, XorMask
from concord.gradients import StackedGradients


class Correlation(NamedTuple):
    """A correlation between masked and reference gradient.

    Attributes:
        seed: of the network's weights and of the permutations.
        mask: ``and-mask`` or ``xor-mask``.
        threshold: τ.
        signal: ``mechanism`` (shortcuts permuted away) or ``shortcuts`` (mechanism permuted away).
        rho: Pearson's correlation over the components that the mask left other than zero; NaN if fewer than 3.
        components: how many those are.
    """

    seed: int
    mask: str
    threshold: float
    signal: str
    rho: float
    components: int


def gradient_correlations(
    network: Callable[[], nn.Module],
    inputs: Tensor,
    targets: Tensor,
    mechanism_dimensions: int,
    thresholds: Sequence[float],
    seed: int,
) -> list[Correlation]:
    """Correlate the masked average gradient of an untrained network with the gradients of one signal alone.

    (i) The masked gradient, from the data as they are. (ii) The shortcut gradient: the average after the mechanism's
    dimensions were permuted over all examples. (iii) The mechanism gradient: the average after the shortcuts' were.

    Args:
        network: makes a network, its weights drawn from PyTorch's default generator.
        inputs: ``(environments, batch, features)``, the mechanism's features first.
        targets: ``(environments, batch)``.
        mechanism_dimensions: how many features are the mechanism's.
        thresholds: the τ to try.
        seed: of the weights and of the permutations.
    """
    torch.manual_seed(seed)
    model = network()

    def gradient(features: Tensor, rule: Aggregator) -> Tensor:
        StackedGradients(model, nn.functional.cross_entropy, rule)(features, targets)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    mechanism, shortcuts = inputs[..., :mechanism_dimensions], inputs[..., mechanism_dimensions:]
    references = {
        "mechanism": gradient(torch.cat([mechanism, _permuted(shortcuts)], dim=-1), Mean()),
        "shortcuts": gradient(torch.cat([_permuted(mechanism), shortcuts], dim=-1), Mean()),
    }
    found = []
    for threshold in thresholds:
        for mask, rule in (("and-mask", AndMask(threshold)), ("xor-mask", XorMask(threshold))):
            masked = gradient(inputs, rule)
            left = masked != 0
            for signal, reference in references.items():
                rho = float("nan")
                if int(left.sum()) >= 3:
                    rho = float(torch.corrcoef(torch.stack([masked[left], reference[left]]).double())[0, 1])
                found.append(Correlation(seed, mask, threshold, signal, rho, int(left.sum())))
    return found


def _permuted(features: Tensor) -> Tensor:
    """The features of all examples in another order, over all environments."""
    flat = features.flatten(0, 1)
    return flat[torch.randperm(len(flat))].view_as(features)
