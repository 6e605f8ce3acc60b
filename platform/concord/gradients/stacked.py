"""Several environments in one process: their gradients by one vectorized backward pass, summed where they arise."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd

from concord.aggregation import Aggregator, sum_over_environments
from concord.errors import InputError
from concord.gradients.autocast import outputs_of
from concord.gradients.exchange import SliceExchange
from concord.gradients.layout import require_no_hooks_after_accumulation, require_unchanged
from concord.gradients.nonfinite import NonFinite
from concord.gradients.recorded import recorded
from concord.gradients.step import EnvironmentStep
from concord.gradients.step_clock import StepClock
from concord.gradients.sums import Sums
from concord.machine import last_level_cache

_LARGEST_CHUNK = 1 << 30  # bytes of gradients
_FEWEST_TOGETHER = 8  # fewer are slower, whatever the cache holds: their matrix products are too small

Loss = Callable[[Tensor, Tensor], Tensor]


class StackedGradients:
    """Aggregate the gradients of environments that this process holds, and leave the result in ``parameter.grad``.

    One call replaces ``loss.backward()``::

        gradients = StackedGradients(model, torch.nn.functional.cross_entropy, AndMask(threshold=0.8))
        for inputs, targets in batches:  # (environments, batch, ...), (environments, batch)
            step = gradients(inputs, targets)
            optimizer.step()

    The gradient of every environment's loss is computed by ``vmap(grad)`` over environments, in chunks of about the
    same size that hold at most ``memory_limit`` bytes of gradients, and each chunk is mapped and added to the sums at
    once.

    Dropout draws its own mask for each environment, from the process's default generator.
    Batch norm normalizes each environment's batch by that batch alone, and the running statistics become the mean
    over environments of what each would have made of them. Both are what one process an environment would do.
    Where vmap cannot go (control flow that depends on values, ``.item()``, operators without a batching rule),
    environments are done one after the other, with the same result, and a warning says so once.

    Args:
        model: its parameters that require gradients get ``grad``; whatever was there is replaced, not added to.
        loss: maps outputs ``(batch, ...)`` and targets ``(batch, ...)`` to a scalar, the mean over the batch.
        rule: the aggregator.
        rescale: divide each parameter tensor's update by its kept fraction.
        nonfinite: ``raise`` an error that names the environment and the step, or ``skip`` it for this step.
        names: the environments' names, for errors; ``environment 0…`` if None.
        group: the two-level form: other processes of this group hold other environments, and the rule is applied
            to all of them together. Every process must then call with the same frequency. Give ``names``, since
            their number says how many environments each process has. None: this process holds all of them.
        memory_limit: bytes of per-environment gradients that may exist at once. None chooses by the device: on a
            CPU what its last cache holds, but 8 environments at least; up to 1 GiB, which a GPU takes in any case. How
            many go together decides how sums are rounded and what dropout draws, so give a number if runs on
            different machines have to agree in that.
        vectorize: False does one environment after the other from the start. None does so for networks with
            convolutions on a processor, where vmap makes grouped convolutions of them, which are slower.
        autocast: the dtype that ``torch.autocast`` is to compute layers in; the loss gets float32. None: as they are.
        trace: record the vectorized computation once for each shape of the batch and each training mode, and replay
            the recorded tensor operations afterwards, which spares a small network a tenth of its step. Only for
            models and losses that do the same at every step: what Python decides in them (a schedule, a counter,
            ``random``) would stay as it was when it was recorded. Dropout draws anew; a model with buffers in
            training mode, such as batch norm's, is not recorded.
        clock: is told what part of a step time goes to.

    Raises:
        InputError: the model has no parameter that requires a gradient, or ``group`` came without ``names``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        rule: Aggregator,
        *,
        rescale: bool = False,
        nonfinite: NonFinite = "raise",
        names: Sequence[str] | None = None,
        group: dist.ProcessGroup | None = None,
        memory_limit: int | None = None,
        vectorize: bool | None = None,
        autocast: torch.dtype | None = None,
        trace: bool = False,
        clock: StepClock | None = None,
    ) -> None:
        self._sums = Sums(model, rule, rescale=rescale, nonfinite=nonfinite, clock=clock)
        if group is not None and names is None:
            raise InputError("names: needed with a process group, to know how many environments each process has")
        self.model = model
        self.loss = loss
        self.rule = rule
        self.nonfinite = nonfinite
        self.autocast = autocast
        self.names = names
        convolutions = any(isinstance(module, _ConvNd) for module in model.modules())
        on_processor = self._sums.device.type == "cpu"
        self.vectorize = not (convolutions and on_processor) if vectorize is None else vectorize
        self.trace = trace
        self.steps = 0
        self._recorded: dict[object, Callable[..., Any]] = {}
        self._chunk = _environments_together(self._sums.flat["gradient"], memory_limit)
        self._gradients = vmap(grad_and_value(self._objective, has_aux=True), (None, 0, 0, 0), randomness="different")
        self._exchange: SliceExchange | None = None
        self._finite_flags: list[Tensor] | None = None
        if group is not None:
            everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everyone, list(names or []), group=group)
            self._exchange = self._sums.exchange(everyone, group)

    def __call__(self, inputs: Tensor, targets: Tensor, step: int | None = None) -> EnvironmentStep:
        """Fill ``parameter.grad`` with the aggregated gradient of these batches.

        Args:
            inputs: ``(environments, batch, ...)``.
            targets: ``(environments, batch, ...)``.
            step: the step's number, for errors; counted from 0 if None.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``.
            InputError: inputs and targets do not fit each other or the names, or a parameter was frozen, unfrozen
                or exchanged since this was made, or has a hook that cannot run.
        """
        self._check(inputs, targets)
        step = self.steps if step is None else step
        self.steps = step + 1
        losses, buffers, finite = self._sum_of_finite(inputs, targets)
        names = self.names or [f"environment {index}" for index in range(len(inputs))]
        kept, skipped = self._sums.finish(finite, names, step, self._exchange)
        self._write_buffers(buffers)
        return EnvironmentStep(losses, kept, skipped)

    def _sum(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Put the summed statistics into ``self._sums``; return losses and the new buffers of the model."""
        if not self.vectorize or len(inputs) == 1:
            return self._sum_one_by_one(inputs, targets)
        hooked = next((name for name, each in self._sums.parameters.items() if each._backward_hooks), None)
        if hooked is not None:
            return self._fall_back(inputs, targets, f"the gradient hook of parameter {hooked} has to see each of them")
        try:
            return self._sum_vectorized(inputs, targets)
        except Exception as error:  # whatever the model does that vmap cannot
            said = str(error).strip().split("\n")[0]
            reason = f"vmap cannot take this model or loss: {said}"
            if _is_out_of_memory(error):
                together = min(self._chunk, len(inputs))
                reason = f"memory does not suffice for {together} at once (give a smaller memory_limit): {said}"
        return self._fall_back(inputs, targets, reason)  # here the error and what it holds in memory are gone

    def _fall_back(self, inputs: Tensor, targets: Tensor, reason: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Do one environment after the other from now on, and say why."""
        result = self._sum_one_by_one(inputs, targets)  # a mistake of the user's own is raised again here
        self.vectorize = False
        # Reported where this object was called.
        warnings.warn(f"environments are done one after the other, since {reason}", stacklevel=5)
        return result

    def _sum_vectorized(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        parameters = tuple(parameter.detach() for parameter in self._sums.parameters.values())
        losses: list[Tensor] = []
        buffer_means = _BufferMeans(self.model)
        width = math.ceil(len(inputs) / math.ceil(len(inputs) / self._chunk))
        for start in range(0, len(inputs), width):
            chunk = slice(start, start + width)
            buffers = self._copies_of_buffers(len(inputs[chunk]))
            batch = (parameters, buffers, inputs[chunk], targets[chunk])
            gradients, (loss, buffers) = self._vectorized(*batch)(*batch)
            losses.append(loss)
            self._note_finite(gradients)
            for index, gradient in enumerate(gradients):
                self._add(index, gradient, accumulate=start > 0)
            buffer_means.add(buffers)
        return torch.cat(losses), buffer_means.over(len(inputs))

    def _vectorized(self, *batch: Any) -> Callable[..., Any]:
        """The vectorized gradient function, recorded for batches like this one if that is wanted."""
        _, buffers, inputs, targets = batch
        if not self.trace or buffers:  # what is written in place, as running statistics are, is not recorded right
            return self._gradients
        modes = tuple(module.training for module in self.model.modules())
        key = (inputs.shape, inputs.dtype, targets.shape, targets.dtype, modes)
        if key not in self._recorded:
            random = random_state(self._sums.device)
            # Through a function of its own: make_fx would take vmap's copy of a method's signature for its own.
            self._recorded[key] = recorded(lambda *arguments: self._gradients(*arguments), *batch)
            set_random_state(self._sums.device, random)  # recording draws, too: a resumed run must not draw otherwise
        return self._recorded[key]

    def _sum_one_by_one(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses: list[Tensor] = []
        before = self._copies_of_buffers(1)
        buffer_means = _BufferMeans(self.model)
        for environment, (batch, target) in enumerate(zip(inputs, targets, strict=True)):
            loss = self.loss(outputs_of(self.model, batch, self.autocast), target)
            gradients = torch.autograd.grad(loss, list(self._sums.parameters.values()), materialize_grads=True)
            losses.append(loss.detach())
            self._note_finite([gradient[None] for gradient in gradients])
            for index, gradient in enumerate(gradients):
                self._add(index, gradient[None], accumulate=environment > 0)
            state = dict(self.model.named_buffers())
            after = {name: state[name].detach().clone()[None] for name in before}
            for name, value in before.items():
                state[name].copy_(value[0])
            buffer_means.add(after)
        return torch.stack(losses), buffer_means.over(len(inputs))

    def _add(self, index: int, gradients: Tensor, *, accumulate: bool) -> None:
        sum_over_environments(self.rule, gradients, self._sums.part(index), accumulate=accumulate)

    def _objective(
        self, parameters: tuple[Tensor, ...], buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # The parameters come as a tuple: functorch flattens its arguments at every level, and dictionaries cost
        # it 2 % of a small network's step.
        named = dict(zip(self._sums.layout.names, parameters, strict=True))
        state = {**named, **buffers}
        outputs = outputs_of(lambda batch: functional_call(self.model, state, (batch,)), inputs, self.autocast)
        # A forward pass may write into a buffer or assign it anew; functional_call puts what is assigned into state.
        return self.loss(outputs, targets), {name: state[name].detach() for name in buffers}

    def _sum_of_finite(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Sum the environments whose gradients are finite, or all of them if that is an error anyway.

        Returns:
            All losses, the new buffers, and which environments' gradients are finite, ``(environments,)``.
        """
        left = torch.arange(len(inputs))
        all_losses: Tensor | None = None
        while True:
            random = random_state(self._sums.device)
            whole = len(left) == len(inputs)  # then nothing has to be copied
            losses, buffers = self._sum(inputs if whole else inputs[left], targets if whole else targets[left])
            all_losses = losses if all_losses is None else all_losses
            if bool(torch.isfinite(self._sums.flat["gradient"].sum())):
                break
            # Seldom: look at each gradient, drawing at random what was drawn before, so that the same ones come.
            set_random_state(self._sums.device, random)
            left = left[self._which_are_finite(inputs[left], targets[left])]
            if self.nonfinite == "raise" or len(left) == 0:
                buffers = {}
                break
        finite = torch.zeros(len(inputs), dtype=torch.bool)
        finite[left] = True
        return all_losses, buffers, finite

    def _which_are_finite(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Which environments' gradients are finite; none if only their sum is not, since it cannot be used."""
        self._finite_flags = []
        self._sum(inputs, targets)
        finite = torch.cat(self._finite_flags).cpu()
        self._finite_flags = None
        return torch.zeros_like(finite) if bool(finite.all()) else finite

    def _note_finite(self, gradients: Sequence[Tensor]) -> None:
        if self._finite_flags is not None:
            flags = [torch.isfinite(gradient).reshape(len(gradient), -1).all(1) for gradient in gradients]
            self._finite_flags.append(torch.stack(flags).all(0))

    def _copies_of_buffers(self, environments: int) -> dict[str, Tensor]:
        if not any(module.training for module in self.model.modules()):
            return {}
        return {
            name: buffer.detach().expand(environments, *buffer.shape).clone()
            for name, buffer in self.model.named_buffers()
        }

    def _write_buffers(self, new: dict[str, Any]) -> None:
        for name, buffer in self.model.named_buffers():
            if name in new:
                buffer.copy_(new[name])

    def _check(self, inputs: Tensor, targets: Tensor) -> None:
        require_unchanged(self.model, self._sums.parameters)
        require_no_hooks_after_accumulation(self._sums.parameters)
        if inputs.ndim < 2 or inputs.shape[:2] != targets.shape[:2] or inputs.shape[0] == 0:
            raise InputError(
                f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: both must begin with the same "
                "(environments, batch), at least one environment"
            )
        if self.names is not None and len(self.names) != inputs.shape[0]:
            raise InputError(f"inputs: {inputs.shape[0]} environments, expected {len(self.names)} ({self.names[0]} …)")


def _environments_together(gradient: Tensor, memory_limit: int | None) -> int:
    """How many environments are vectorized at once, of which one has this gradient."""
    if memory_limit is None:
        largest = _LARGEST_CHUNK // gradient.nbytes
        cached = largest if gradient.device.type != "cpu" else last_level_cache() // gradient.nbytes
        return max(1, min(largest, max(cached, _FEWEST_TOGETHER)))
    return max(1, memory_limit // gradient.nbytes)


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU PyTorch says so in a RuntimeError like any other.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The state of the default generators, the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Draw again what was drawn after :func:`random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


class _BufferMeans:
    """The mean over environments of what each made of the model's buffers.

    What no environment changed stays exactly as it is: the mean of equal numbers is rounded, so that tables, frozen
    statistics and large counts would drift.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[str, Tensor] = {}
        self._changed: dict[str, Tensor] = {}

    def add(self, new: dict[str, Tensor]) -> None:
        """Add what environments made of the buffers, each ``(environments, *buffer.shape)``."""
        old = dict(self._model.named_buffers()) if new else {}
        for name, values in new.items():
            total, changed = values.sum(0), (values != old[name]).any(0)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._changed[name] = self._changed[name] | changed if name in self._changed else changed

    def over(self, environments: int) -> dict[str, Tensor]:
        """The buffers' new values; whole numbers stay whole."""
        old = dict(self._model.named_buffers()) if self._sums else {}
        new = {}
        for name, total in self._sums.items():
            mean = total / environments if total.is_floating_point() else total // environments
            new[name] = torch.where(self._changed[name], mean.to(old[name].dtype), old[name])
        return new
