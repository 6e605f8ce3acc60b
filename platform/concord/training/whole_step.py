"""A run's whole step, model to optimizer, as one CUDA graph where it can be one."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from concord.gradients import Batch, EnvironmentStep, GradientSource, NonFiniteGradientError, step_graph
from concord.gradients.step_graph import NO_NUMBER, Recordable, StepGraph
from concord.logs import info
from concord.training.context import ProcessContext
from concord.training.optimization import Optimization
from concord.training.options import ResolvedTrainConfig


def obstacle(config: ResolvedTrainConfig, process: ProcessContext, *, coupled: bool) -> str | None:
    """Why a run's step cannot be one graph, if that is known before it: the optimizer is made for it."""
    optimizer = config.optimizer
    if not step_graph.can_capture(process.device):
        return "the run is not on a GPU"
    if not config.parallel.graph:
        return "nobody asked for one"
    if process.world_size > 1:
        return "several workers exchange their gradients"
    if coupled:
        return "the objective couples the environments"
    if optimizer.precision == "float16":
        return "the host reads the scale of the loss"
    if config.aggregation.nonfinite == "skip":
        return "--nonfinite skip decides on the host which environments are in a step"
    if optimizer.l1 > 0 and optimizer.regularization == "decoupled":
        return "--l1 is an update of its own, by a number of the host"
    return None


class WholeStep(Recordable):
    """A gradient source and an optimizer as one step.

    With ``nonfinite="raise"`` the host learns after the next step has begun whether a step's gradients were finite, so
    that it does not wait. Nothing is kept in between: no evaluation and no checkpoint.

    Args:
        source: of the gradients.
        optimization: of the run.
        device: of the run.
        raises: whether gradients that are not finite end the run.
        name: returns the names of the environments, from a step's losses and number.
    """

    def __init__(
        self,
        source: Recordable,
        optimization: Optimization,
        device: torch.device,
        *,
        raises: bool,
        name: Callable[[Tensor, int], Sequence[str]],
    ) -> None:
        self.model, self.aggregation = source.model, source.aggregation
        self._source, self._optimization = source, optimization
        self._graph = StepGraph(device)
        self._raises, self._name = raises, name
        self._unread: tuple[Tensor, torch.cuda.Event | None, Tensor, int] | None = None

    def __call__(self, batch: Batch, at: int) -> EnvironmentStep:
        """The step of number ``at``, and the rates of the next one."""
        self._optimization.rates()
        found = self._graph(self, batch, at)
        self._optimization.advance()
        self.read_finite()
        if self._raises and found.finite is not None:
            on_host, event = found.finite.to("cpu", non_blocking=True), None
            if found.finite.is_cuda:
                event = torch.cuda.Event()
                event.record()
            self._unread = on_host, event, found.losses, at
        return found

    def read_finite(self) -> None:
        """Read whether the gradients of the latest step were finite (NonFiniteGradientError)."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        finite, event, losses, at = unread
        if event is not None:
            event.synchronize()
        if not bool(finite):
            raise NonFiniteGradientError(self._name(losses, at), at)

    @property
    def checks(self) -> bool:
        """No step is done again: it has changed the weights."""
        return False

    def obstacle(self) -> str | None:
        """Why the gradients cannot be recorded."""
        return self._source.obstacle()

    def ordinary(self, batch: Batch, at: int) -> EnvironmentStep:
        """Gradients, and the update."""
        found = self._source.ordinary(batch, at)
        self._optimization.update(at)
        return found

    def recorded(self, batch: Batch) -> EnvironmentStep:
        """The same, with the rates of the device."""
        found = self._source.recorded(batch)
        with self._optimization.rates_of_device():
            self._optimization.update(NO_NUMBER)
        return found

    def constants(self) -> Hashable:
        """The modes of the modules, and a rate that is no tensor."""
        return self._source.constants(), self._optimization.constants()

    def read(self) -> list[Tensor]:
        """The parameters that are not trained, and all others."""
        return list(self.model.parameters())

    def changed(self) -> list[Tensor]:
        """The parameters, the buffers and the optimizer's state."""
        return [*self.trained(), *self.model.buffers(), *self._optimization.state()]


def whole_step(
    source: GradientSource,
    optimization: Optimization,
    config: ResolvedTrainConfig,
    device: torch.device,
    without: str | None,
    name: Callable[[Tensor, int], Sequence[str]],
) -> WholeStep | None:
    """The step of this source as one; None if ``without`` says why it has no graph, with a line for who asked."""
    if without is None and isinstance(source, Recordable):
        return WholeStep(source, optimization, device, raises=config.aggregation.nonfinite == "raise", name=name)
    if config.parallel.graph:
        info(f"a step is computed without a CUDA graph: {without or type(source).__name__}")
    return None
