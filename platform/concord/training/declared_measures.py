"""What a job declares of its evaluation; a module of its own, which needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from concord.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from concord.training.evaluation import EvaluatedPart

PerExample = Callable[[Any, Any], "Tensor"]
"""Maps the model's outputs and the targets, or with a risk the outputs and the batch, to one number an example."""
Mode = Literal["max", "min"]


@dataclass(frozen=True)
class Measure:
    """A number of every example, averaged over examples, with a direction: larger or smaller is better.

    Attributes:
        function: maps outputs and targets of a batch to one number an example, ``(batch,)``. Of a job with a risk it
            gets the output of the risk's first call of the model, and the batch:
            ``lambda outputs, batch: (outputs.logits.argmax(1) == batch["labels"]).float()``.
        mode: ``max`` if larger is better, ``min`` if smaller is; None if it does not matter: then there is no worst
            environment by this measure, and it selects nothing.

    Raises:
        InputError: the mode is not one of these.
    """

    function: PerExample
    mode: Mode | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min", None):
            raise InputError(f"Measure: mode={self.mode!r}: give max or min")

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The numbers of a batch's examples."""
        return self.function(outputs, targets)


@dataclass(frozen=True)
class EnvironmentEvaluation:
    """Numbers of whole environments that are no means over examples, such as the return of a game::

        def play(model, environment):
            return {"return": mean_return(model, level=environment.name)}

        job = Job(..., evaluation=EnvironmentEvaluation(play, {"return": "max"}), criterion="validation_return")

    They are reported like measures. In the mean over several environments each counts by its number of examples.

    Attributes:
        function: maps the model and one environment to numbers by name. The model is on its device, in evaluation mode;
            there are no gradients. PyTorch's random numbers depend on the run's seed, the environment and the step.
            A number may be None: undefined in this environment, which is then left out of the mean and the worst.
        modes: all names that the function gives: ``max`` if large is good, ``min`` if small is, or None, see
            :class:`Measure`.
        of_outputs: whether the function maps outputs and targets of all examples of an environment instead, on the CPU.
            They are those of the loss, so that it costs no further pass of the model. If examples have weights,
            these are its third argument ``(examples,)``.
        compares: whether its first number with a mode compares models unless the job has a criterion.
        cutoff: of two classes, the probability from which recall and specificity predict the second, if they have one.

    Raises:
        InputError: a mode is not one of these.
    """

    function: Callable[..., Mapping[str, float | None]]
    modes: Mapping[str, Mode | None]
    of_outputs: bool = False
    compares: bool = True
    cutoff: float | None = None

    def __post_init__(self) -> None:
        for name, mode in self.modes.items():
            if mode not in ("max", "min", None):
                raise InputError(f"EnvironmentEvaluation: mode {mode!r} of {name}: give max or min")

    @property
    def criteria(self) -> tuple[str, ...]:
        """The names that may compare models unless the job has a criterion, the first one first."""
        return tuple(self.modes) if self.compares else ()

    def __call__(self, model: nn.Module, part: EvaluatedPart, seed: int, step: int) -> dict[str, float | None]:
        """The numbers of a part of the data; empty if another worker has the part."""
        import torch

        from concord.environments.collection import generator_for
        from concord.training.evaluation import outputs_and_targets

        if part.data is None:
            return {}
        training = model.training
        torch.manual_seed(generator_for(seed, part.split, part.name, step).initial_seed())
        with torch.no_grad():
            model.eval()
            if self.of_outputs:
                given = self.function(*outputs_and_targets(model, part.data))
            else:
                given = self.function(model, part.data)
        model.train(training)
        return self.checked(part.name, given)

    def checked(self, environment: str, given: Mapping[str, float | None]) -> dict[str, float | None]:
        """The numbers of an environment by name (InputError if they are not those of the modes)."""
        if not isinstance(given, Mapping) or given.keys() != self.modes.keys():
            found = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise InputError(
                f"evaluation of environment {environment}: gave {found or 'nothing'}; expected {', '.join(self.modes)}"
            )
        return {name: None if (value := given[name]) is None else float(value) for name in self.modes}
