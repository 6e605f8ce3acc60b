"""The signal in the average gradient: the mechanism's, or the shortcuts' (AND-mask paper, Fig. 7 and B.3.5)."""

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from concord.aggregation import AndMask, XorMask, aggregate

# A strict mask keeps few components of some networks, and a correlation over few components is meaningless.
FEWEST_COMPONENTS = 30


class Moments(NamedTuple):
    """Sums over components of a masked gradient x and a reference gradient y, enough for their correlation."""

    components: int
    x: float
    y: float
    xx: float
    yy: float
    xy: float

    @property
    def rho(self) -> float:
        """Pearson's correlation; NaN where there are fewer than 3 components, or one of the two is constant."""
        if self.components < 3:
            return math.nan
        covariance = self.xy - self.x * self.y / self.components
        variances = (self.xx - self.x**2 / self.components) * (self.yy - self.y**2 / self.components)
        return max(-1.0, min(1.0, covariance / math.sqrt(variances))) if variances > 0 else math.nan


class Correlation(NamedTuple):
    """A correlation between the masked and a reference gradient of one network.

    Attributes:
        seed: seed of the network's weights and of the permutations.
        mask: ``and-mask`` or ``xor-mask``.
        threshold: τ.
        signal: ``mechanism`` (shortcuts permuted away) or ``shortcuts`` (mechanism permuted away).
        moments: moments over the components that the mask kept.
    """

    seed: int
    mask: str
    threshold: float
    signal: str
    moments: Moments


class Summary(NamedTuple):
    """The correlations of several networks, and the numbers of networks and components.

    Attributes:
        networks: number of networks with at least :data:`FEWEST_COMPONENTS` kept components.
        of: number of all networks.
        components: sorted numbers of kept components of all networks.
        mean, deviation: mean and sample deviation of ρ over ``networks``; NaN with fewer than two networks, or fewer
            than half of all.
        pooled: ρ over the components of all networks together; NaN with fewer than :data:`FEWEST_COMPONENTS`.
    """

    networks: int
    of: int
    components: tuple[int, ...]
    mean: float
    deviation: float
    pooled: float


def summarize(correlations: Iterable[Correlation]) -> Summary:
    """Summarize the correlations of several networks with one mask, threshold and signal."""
    found = [each.moments for each in correlations]
    counts = tuple(sorted(each.components for each in found))
    rhos = [each.rho for each in found if each.components >= FEWEST_COMPONENTS and not math.isnan(each.rho)]
    enough = len(rhos) >= max(2, len(found) / 2)
    mean, deviation = (statistics.mean(rhos), statistics.stdev(rhos)) if enough else (math.nan, math.nan)
    count = sum(counts)
    sums = [sum(column) for column in zip(*(each[1:] for each in found), strict=True)]
    pooled = Moments(count, *sums).rho if count >= FEWEST_COMPONENTS else math.nan
    return Summary(len(rhos), len(found), counts, mean, deviation, pooled)


def write_correlations(correlations: Mapping[str, Iterable[Correlation]], path: Path) -> None:
    """Write one line for each correlation of each initialization."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["initialization", *Correlation._fields[:-1], *Moments._fields])
        for initialization, of_networks in correlations.items():
            for *which, moments in of_networks:
                sums = (f"{value:.6g}" for value in moments[1:])
                lines.writerow([initialization, *which, moments.components, *sums])


def gradient_correlations(
    network: Callable[[], nn.Module],
    inputs: Tensor,
    targets: Tensor,
    mechanism_dimensions: int,
    thresholds: Sequence[float],
    seed: int,
) -> list[Correlation]:
    """Correlate the masked average gradient of an untrained network with the gradients of one signal alone.

    (i) The masked gradient, from the original data. (ii) The shortcut gradient: the average after the mechanism's
    dimensions were permuted over all examples. (iii) The mechanism gradient: the average after the shortcuts'
    dimensions were permuted. Inputs are ``(environments, batch, features)``, the mechanism first. The seed draws
    weights and permutations.
    """
    torch.manual_seed(seed)
    model = network()
    parameters = list(model.parameters())

    def gradients(features: Tensor) -> Tensor:
        """``(environments, components)``. All masks have the same gradients, which are therefore kept."""
        of_environments = []
        for batch, labels in zip(features, targets, strict=True):
            risk = nn.functional.cross_entropy(model(batch), labels)
            of_environments.append(torch.cat([part.flatten() for part in torch.autograd.grad(risk, parameters)]))
        return torch.stack(of_environments)

    mechanism, shortcuts = inputs[..., :mechanism_dimensions], inputs[..., mechanism_dimensions:]
    references = {
        "mechanism": gradients(torch.cat([mechanism, _permuted(shortcuts)], dim=-1)).mean(0),
        "shortcuts": gradients(torch.cat([_permuted(mechanism), shortcuts], dim=-1)).mean(0),
    }
    own = gradients(inputs)
    found = []
    for threshold in thresholds:
        for mask, rule in (("and-mask", AndMask(threshold)), ("xor-mask", XorMask(threshold))):
            masked = aggregate(rule, own).value
            left = masked != 0
            for signal, reference in references.items():
                moments = _moments(masked[left].double(), reference[left].double())
                found.append(Correlation(seed, mask, threshold, signal, moments))
    return found


def _moments(x: Tensor, y: Tensor) -> Moments:
    return Moments(len(x), *(float(values.sum()) for values in (x, y, x * x, y * y, x * y)))


def _permuted(features: Tensor) -> Tensor:
    """The features, permuted over the examples of all environments."""
    flat = features.flatten(0, 1)
    return flat[torch.randperm(len(flat))].view_as(features)
