"""The folds of environments that are left out in turn: each alone, or of ten and more in one of five folds."""

from collections.abc import Sequence

import numpy as np

from concord.training.options import LeftOut, as_names

LEAST_TO_LEAVE_OUT = 3
"""Environments; with fewer, nothing is left to compare if one is left out."""
_ALONE_BELOW = 10  # environments
_FOLDS = 5  # as scikit-learn's GroupKFold has by default


def drawn(names: tuple[str, ...], count: int, seed: int) -> tuple[str, ...]:
    """This number of the names, drawn by the seed, in their order; 0 takes all."""
    if count in (0, len(names)):
        return names
    order = np.random.default_rng(seed).permutation(len(names))[:count]
    return tuple(names[index] for index in sorted(order))


def folds_of(names: Sequence[str], count: int, seed: int) -> tuple[LeftOut, ...]:
    """The environments in this number of folds, each in one: which one depends on the seed and the set of names.

    The folds differ in size by at most one environment, as those of ``GroupKFold(count, shuffle=True)``. With 0 each is
    alone, of ten and more in one of five folds.
    """
    count = count or (len(names) if len(names) < _ALONE_BELOW else _FOLDS)
    if count == len(names):
        return tuple(names)
    dealt = np.random.default_rng(seed).permutation(sorted(names))
    folds = [tuple(sorted(map(str, fold))) for fold in np.array_split(dealt, count)]
    return tuple(fold if len(fold) > 1 else fold[0] for fold in folds)


def most_left_out(folds: Sequence[LeftOut]) -> int:
    """The number of environments of the largest fold; 0 without folds."""
    return max((len(as_names(fold)) for fold in folds), default=0)


def ends_of(folds: Sequence[LeftOut]) -> tuple[LeftOut, ...]:
    """A fold of each size."""
    return tuple({len(as_names(fold)): fold for fold in folds}.values())
