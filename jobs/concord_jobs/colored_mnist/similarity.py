"""The similarity of two representations of the same examples, independent of their bases."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from concord.errors import InputError
from concord.objectives import MetaIRM

# Directions whose singular value is below this fraction of the largest are rounding errors.
_RANK_TOLERANCE = 1e-5


def pwcca(one: Tensor, other: Tensor) -> float:
    """Projection-weighted canonical correlation of ``one`` with ``other``, in [0, 1].

    The mean of the canonical correlations ρ_i with the weights α_i = Σ_j |⟨h_i, x_j⟩|: the part of ``one``, with
    features x_j, that its canonical direction h_i carries. Morcos et al., Insights on Representational Similarity in
    Neural Networks with Canonical Correlation, 2018, section 2.2. 1 for representations that are linear maps of each
    other; not symmetric.

    Args:
        one: ``(examples, features)``.
        other: ``(examples, features)`` of the same examples, with any number of features.
    """
    most = max(one.shape[1], other.shape[1])
    if len(one) <= most:
        raise InputError(f"representations of {len(one)} examples: more than the {most} features are needed")
    one, other = (values.double() - values.double().mean(0) for values in (one, other))
    basis, other_basis = _basis(one), _basis(other)
    directions, correlations, _ = torch.linalg.svd(basis.T @ other_basis, full_matrices=False)
    weights = ((basis @ directions).T @ one).abs().sum(1)
    return float((weights * correlations.clamp(max=1)).sum() / weights.sum())


def layer_outputs(model: nn.Module, inputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The outputs of every linear layer for these inputs, ``(examples, features)``, by the layer's name."""
    seen: dict[str, Tensor] = {}
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    with torch.no_grad(), ExitStack() as hooks:
        for name, layer in layers:
            hook = layer.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.flatten(1)}))
            hooks.enter_context(hook)
        functional_call(model, dict(weights or {}), (inputs,))
    return seen


def _basis(centred: Tensor) -> Tensor:
    """An orthonormal basis ``(examples, rank)`` of the span of the features."""
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    if sizes[0] == 0:
        raise InputError("a representation is the same for all examples: it correlates with nothing")
    basis: Tensor = left[:, sizes > _RANK_TOLERANCE * sizes[0]]
    return basis


def adapted_similarities(
    model: nn.Module, objective: MetaIRM, environments: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """PWCCA of each layer's outputs before and after meta-IRM's inner steps, by ``pwcca_adapted_{layer}_{environment}``
    (whose steps drop no gradients here).
    """
    objective.drop_grad = 0.0
    measured = {}
    for name, (inputs, targets) in environments.items():
        with torch.enable_grad():
            adapted = objective.adapted(model, (inputs, targets))
        before, after = layer_outputs(model, inputs), layer_outputs(model, inputs, adapted)
        for layer, (one, other) in enumerate(zip(before.values(), after.values(), strict=True)):
            measured[f"pwcca_adapted_{layer}_{name}"] = pwcca(one, other)
    return measured
