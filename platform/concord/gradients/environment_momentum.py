"""A moving average of each environment's gradients, which the rule sees in place of the gradients.

With few environments a step has few votes, and the sign of one batch's gradient is noisy. The average over the
environment's latest steps is less noisy, and every environment still has one vote. With β and the gradient g at step t:

    m ← β m + (1 - β) g,    m̂ = m / (1 - βᵗ)

The state is m̂ itself, which takes one pass over the gradients: m̂ ← m̂ + w (g - m̂) with w = (1 - β) / (1 - βᵗ). At the
first step w is 1, and m̂ is the gradient to the last bit.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from concord.aggregation.asynchronous import is_asynchronous
from concord.errors import InputError
from concord.gradients.layout import Layout

Rows = slice | Tensor
"""Which environments: neighbours, or their numbers."""


class EnvironmentMomentum:
    """The averages of one process's environments, ``(environments, components)`` numbers.

    A gradient with a component that is not finite leaves the average of its parameter tensor as it was.

    Args:
        beta: β, in (0, 1).
        parameters: the model's trainable parameters, by name.
    """

    def __init__(self, beta: float, parameters: Mapping[str, Tensor]) -> None:
        self._beta = beta
        self._layout = Layout.of(parameters)
        self._device = next(iter(parameters.values())).device
        self._names: tuple[str, ...] = ()
        self._averages: list[Tensor] = []  # of each parameter, (environments, *shape)
        self._steps = torch.empty(0)  # t, (environments, parameters), float64, for powers
        self._taken = torch.empty(0)  # whether this step's gradient is in, likewise, bool

    def begin(self, names: Sequence[str]) -> None:
        """Begin a step of the environments with these names, whose order may be another than that of a loaded state."""
        if not self._names:
            self._allocate(names)
        if tuple(names) != self._names and sorted(names) == sorted(self._names):
            self._reorder(names)
        if tuple(names) != self._names:
            raise InputError(
                f"environment_momentum: the environments of this step are {', '.join(names)}, and were "
                f"{', '.join(self._names)}; averages need the same ones at every step"
            )
        self._taken.zero_()

    def take_again(self) -> None:
        """Forget this step's gradients if they were the first, so that others can replace them."""
        first = self._taken & (self._steps == 1)
        self._steps.masked_fill_(first, 0)  # the next one has w = 1: nothing is left of what it replaces
        self._taken.masked_fill_(first, value=False)

    def averaged(self, index: int, rows: Rows, gradients: Tensor, finite: Tensor | None = None) -> Tensor:
        """Add gradients, once a step, and return the averages; a gradient that is not finite is returned itself.

        A step's gradients may be computed several times; the first ones count. Gradients are those of the environments
        ``rows`` for one parameter, ``(environments, *shape)``, not scaled. ``finite`` ``(environments,)`` is
        whether each is finite, if known. Only read the result: it may be the averages' own memory.
        """
        if gradients.numel() == 0:
            return gradients
        if finite is None:  # extremes are as fast as a sum, isfinite().all() is not
            flat = gradients.reshape(len(gradients), -1)
            finite = torch.isfinite(flat.amin(1)) & torch.isfinite(flat.amax(1))
        fresh = finite & ~self._taken[rows, index]
        self._taken[rows, index] |= fresh
        self._steps[rows, index] += fresh
        weights = (1 - self._beta) / (1 - self._beta ** self._steps[rows, index].clamp(min=1))
        shape = (-1,) + (1,) * (gradients.ndim - 1)
        averages = self._averages[index][rows]  # neighbours: a view
        given = gradients.to(averages.dtype)
        known = not is_asynchronous(gradients.device)  # reading a flag makes the host wait for a GPU, and nothing else
        if not (known and bool(fresh.all())):
            given = torch.where(fresh.view(shape), given, averages)
        averages.lerp_(given, weights.to(averages.dtype).view(shape))
        if not isinstance(rows, slice):
            self._averages[index][rows] = averages
        return averages if known and bool(finite.all()) else torch.where(finite.view(shape), averages, gradients)

    def state_dict(self) -> dict[str, Tensor]:
        """By ``average/ENVIRONMENT`` ``(components,)``, by ``steps/ENVIRONMENT`` ``(parameters,)``, float64."""
        state = {}
        for row, name in enumerate(self._names):
            state[f"average/{name}"] = torch.cat([average[row].reshape(-1) for average in self._averages])
            state[f"steps/{name}"] = self._steps[row].clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], names: Sequence[str] | None = None) -> None:
        """Load the averages of these environments (None: all); others in ``state`` are not read.

        An empty state is that before the first step.
        """
        known = [name.removeprefix("steps/") for name in state if name.startswith("steps/")]
        self._allocate(known if names is None or not state else names)
        for row, name in enumerate(self._names):
            if f"average/{name}" not in state or f"steps/{name}" not in state:
                raise InputError(f"environment_momentum: there is no average of environment {name}")
            average, steps = state[f"average/{name}"], state[f"steps/{name}"]
            if len(average) != self._layout.components or len(steps) != len(self._averages):
                raise InputError(
                    f"environment_momentum: the average of environment {name} has {len(average)} components of "
                    f"{len(steps)} parameters, expected {self._layout.components} of {len(self._averages)}"
                )
            self._steps[row] = steps
            for index, each in enumerate(self._averages):
                each[row] = self._layout.part(average, index)

    def _reorder(self, names: Sequence[str]) -> None:
        rows = [self._names.index(name) for name in names]
        self._names = tuple(names)
        self._averages = [average[rows] for average in self._averages]
        self._steps = self._steps[rows]

    def _allocate(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        dtype, shapes = self._layout.dtype, self._layout.shapes
        self._averages = [torch.zeros(len(names), *shape, dtype=dtype, device=self._device) for shape in shapes]
        size = len(names), len(self._averages)
        self._steps = torch.zeros(size, dtype=torch.float64, device=self._device)
        self._taken = torch.zeros(size, dtype=torch.bool, device=self._device)
