"""Every example its own environment: the rule's sums over examples, from one forward and one backward pass.

During backward each layer contributes the sums its rule needs (:mod:`~concord.gradients.example_layers` says how, in
the forms of :mod:`~concord.gradients.example_gradients`); the sum of the gradients themselves is the ordinary one.
On a model of one's own, in a plain loop::

    examples = per_example(model, AndMask(threshold=0.2))
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        examples.finish()  # parameter.grad now holds the aggregated gradient
        optimizer.step()
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from concord.aggregation import Aggregator, Statistics
from concord.errors import InputError
from concord.gradients.example_gradients import Added, ExampleGradients
from concord.gradients.example_layers import LAYERS, Call, convolution, is_unit, symmetric_padding
from concord.gradients.exchange import SliceExchange
from concord.gradients.nonfinite import NonFinite
from concord.gradients.sums import Sums
from concord.gradients.supplied_convolution import convolve

Reduction = Literal["mean", "sum"]

# Two that scale the gradients of one model would both be wrong.
_registered: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class Finished(NamedTuple):
    """What :meth:`PerExample.finish` made of the examples.

    Attributes:
        examples: how many there were, in all processes.
        kept_fraction: ``(parameters,)``, the part of each parameter tensor's components that the rule let through,
            in the order of ``model.named_parameters()``; float32.
        skipped: names of examples that were left out, in any process, because their gradient was not finite.
    """

    examples: int
    kept_fraction: Tensor
    skipped: tuple[str, ...]


@dataclass
class _Pass:
    """One forward pass: its examples, how often each parameter was used, and what backward brought so far."""

    examples: int
    uses: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, list[ExampleGradients]] = field(default_factory=dict)
    counted: bool = False


class PerExample:
    """Sums of a rule's statistics over the examples of a model's batches, collected while backward runs.

    It registers hooks and changes nothing in the model; :meth:`remove` takes them off again. Layers of PyTorch
    contribute their sums in the cheapest way there is for them, any other module the general way. Several passes
    before :meth:`finish` (microbatches) are summed. Tied weights and mixed precision (``autocast``, ``GradScaler``)
    work.

    "The gradient of an example" is here what flows through that example's activations, its contribution to the
    batch's gradient. For models that treat examples separately that is the derivative of the example's loss. Under
    batch norm it also holds what the example's normalized activations get from other examples' losses; the
    derivative of one example's loss through the shared statistics needs a backward pass of its own for every
    example, see :class:`~concord.gradients.example_batch.PerExampleGradients`. Both sum to the batch's gradient.

    Args:
        model: the model. Its inputs and layers have the examples in the first dimension.
        rule: the rule.
        rescale: divide each parameter tensor's update by its kept fraction.
        reduction: whether the loss is the mean or the sum over the examples of a pass. Do not divide the loss by
            the number of microbatches: the result is the rule's over all examples since the last :meth:`finish`.
        nonfinite: what to do about examples that :meth:`finish` is told are not finite.
        group: other processes of this group have other examples; the rule is applied to all of them together, and
            :meth:`finish` has to be called in all. The model is not to be wrapped in DDP, which would average.
        memory_limit: bytes of per-example gradients that may exist at once.

    Attributes:
        sums: of this process's examples; their ``gradient`` comes from ``parameter.grad`` in the end.
        examples: how many examples backward has reached since the last :meth:`finish`.

    Raises:
        InputError: the model has no parameter that requires a gradient, or is collected from already. Later: what a
            layer did has no per-example
            gradient; the error names the layer, and what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Aggregator,
        *,
        rescale: bool = False,
        reduction: Reduction = "mean",
        nonfinite: NonFinite = "raise",
        group: dist.ProcessGroup | None = None,
        memory_limit: int = 1 << 28,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise InputError(f"reduction {reduction!r}: expected 'mean' or 'sum'")
        self.rule = rule
        self.reduction = reduction
        self.group = group
        self.memory_limit = memory_limit
        self.examples = 0
        self.steps = 0
        self.sums = Sums(model, rule, rescale=rescale, nonfinite=nonfinite)
        parameters = self.sums.parameters.values()
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._exchanges: dict[tuple[int, ...], SliceExchange] = {}
        # Sums of gradients that were obtained the general way, and the modules' names: to compare with backward's.
        self._general: dict[int, tuple[str, Tensor]] = {}
        # What finish() left in parameter.grad, and how often that had been written to by then.
        self._results: list[tuple[weakref.ref[Tensor], int]] = []
        self._current: _Pass | None = None
        self._loose: _Pass | None = None
        self._open: list[_Pass] = []
        self._scale = 1.0
        self._busy = False
        self._finite: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        # Convolutions that ask here for their weight's gradient, their latest calls, and what they are given.
        self._supplying: set[int] = set()
        self._calls: dict[int, object] = {}
        self._supplied: dict[object, Tensor] = {}
        if model in _registered:
            raise InputError("model: its examples are collected already; call remove() on what does, first")
        _registered.add(model)
        self._model = model
        self._register(model)

    def remove(self) -> None:
        """Take the hooks off the model."""
        _registered.discard(self._model)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self._model.modules():
            if id(module) in self._supplying:
                del module.forward
        self._supplying = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PerExample":
        # A copy of the model has copies of the hooks, which are to do nothing: it is another model.
        return self

    def __enter__(self) -> "PerExample":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing meanwhile."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    @contextlib.contextmanager
    def watched(self, examples: int) -> Iterator[Tensor]:
        """Collect nothing meanwhile, but which examples of the passes are finite in all layers.

        Args:
            examples: of each pass.

        Yields:
            ``(examples,)`` bool, filled by backward.
        """
        self._finite = torch.ones(examples, dtype=torch.bool)
        try:
            yield self._finite
        finally:
            self._finite = None
            self.discard()

    def discard(self) -> None:
        """Forget what was collected since the last :meth:`finish`."""
        self.sums.zero()
        self.examples = 0
        self._calls, self._supplied = {}, {}
        self._open, self._current, self._loose, self._general, self._scale = [], None, None, {}, 1.0

    @torch.no_grad()
    def finish(self, finite: Tensor | None = None, step: int | None = None, *, unscaled: bool = True) -> Finished:
        """Apply the rule to the examples since the last call, and leave the result in ``parameter.grad``.

        Args:
            finite: ``(examples,)`` bool, which of the examples of this process are in the sums, if some were left
                out because their gradients were not finite; None looks at the sum of the gradients.
            step: the step's number, for errors; counted from 0 if None.
            unscaled: False: a ``GradScaler`` scaled the loss, and is to find what is not finite itself.

        Raises:
            InputError: there was no backward pass, or one of one example only.
            NonFiniteGradientError: with ``nonfinite="raise"``.
        """
        step = self.steps if step is None else step
        self.steps = step + 1
        try:
            for waiting in self._open:  # of a parameter whose other use the loss did not depend on
                for index in list(waiting.arrived):
                    self._add(waiting, index)
            self._check_general()
            gradient = self.sums.flat["gradient"]
            for index, parameter in enumerate(self.sums.parameters.values()):
                if parameter.grad is not None:
                    self.sums.layout.part(gradient, index).copy_(parameter.grad)
            if finite is None:
                good = not unscaled or bool(torch.isfinite(gradient.sum()))
                finite = torch.full((self.examples,), good)
            counts = self._counts(len(finite))
            if sum(counts) < 2:
                what = "a batch of one example; a rule needs at least 2 to compare" if sum(counts) else "no backward"
                raise InputError(f"per-example gradients: there was {what} since the last finish()")
            exchange = self._exchange(counts) if self.group is not None else None
            rank = dist.get_rank(self.group) if self.group is not None else 0
            kept, skipped = self.sums.finish(finite, _names(counts, rank), step, exchange)
        finally:
            self.discard()
        gradients = [parameter.grad for parameter in self.sums.parameters.values() if parameter.grad is not None]
        self._results = [(weakref.ref(gradient), gradient._version) for gradient in gradients]
        return Finished(sum(counts), kept, skipped)

    def _counts(self, examples: int) -> tuple[int, ...]:
        if self.group is None:
            return (examples,)
        counts = [torch.zeros(1, dtype=torch.int64, device=self.sums.device) for _ in range(self.group.size())]
        dist.all_gather(counts, torch.tensor([examples], device=self.sums.device), group=self.group)
        return tuple(int(count) for count in counts)

    def _exchange(self, counts: tuple[int, ...]) -> SliceExchange:
        assert self.group is not None
        if counts not in self._exchanges:
            names = [_names(counts, rank) for rank in range(len(counts))]
            self._exchanges[counts] = self.sums.exchange(names, self.group)
        return self._exchanges[counts]

    def _register(self, model: nn.Module) -> None:
        inside: set[int] = set()
        for name, module in model.named_modules():
            if id(module) in inside:
                continue
            unit = is_unit(module)
            if unit:
                inside |= {id(child) for child in module.modules()}
            own = {n: p for n, p in module.named_parameters(recurse=unit) if p.requires_grad}
            if own:
                called = self._called(module, name or type(module).__name__, own)
                self._handles.append(module.register_forward_hook(called, with_kwargs=True))
            if "weight" in own and LAYERS.get(type(module)) is convolution and symmetric_padding(module) is not None:
                self._supply_to(module)
        self._handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))
        for parameter in self.sums.parameters.values():
            self._handles.append(parameter.register_hook(self._summed))

    def _supply_to(self, module: Any) -> None:
        """Let a convolution take its weight's gradient from what is summed here."""

        def forward(this: Any, inputs: Tensor) -> Tensor:
            batch = inputs.ndim == len(this.kernel_size) + 2
            if this is not module or self._ignored() or torch.compiler.is_compiling() or not batch:
                result: Tensor = type(this).forward(this, inputs)
                return result
            call = object()
            self._calls[id(module)] = call
            return convolve(module, inputs, lambda: self._supplied.pop(call, None))

        self._supplying.add(id(module))
        module.forward = MethodType(forward, module)  # the instance's; its class keeps its own

    def _ignored(self) -> bool:
        """Whether a forward pass is none that backward will come back from."""
        # A forward pass that is repeated inside backward, as by activation checkpointing, has been counted before.
        return self._busy or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1

    def _begin(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if model is self._model and not self._ignored():
            self._current = self._new_pass(arguments, keywords)

    def _end(self, model: nn.Module, *_: Any) -> None:
        if model is self._model and not self._ignored():
            self._current = None

    def _new_pass(self, arguments: Any, keywords: Any) -> _Pass:
        tensors = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        if not tensors or tensors[0].ndim == 0:
            raise InputError("model: its input is no tensor with the examples in the first dimension")
        return _Pass(len(tensors[0]))

    def _called(self, layer: nn.Module, name: str, own: dict[str, nn.Parameter]) -> Callable[..., None]:
        """The forward hook of a layer with these parameters."""
        indices = {parameter: self._index[id(value)] for parameter, value in own.items()}

        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            if module is not layer or self._ignored():
                return
            outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            watched = [index for index, tensor in enumerate(outputs) if tensor.requires_grad]
            if not watched:
                return
            if self._current is None and self._loose is None:  # a part of the model was called by itself
                self._loose = self._new_pass(arguments, keywords)
            current = self._current or self._loose
            assert current is not None
            for index in indices.values():
                current.uses[index] = current.uses.get(index, 0) + 1
            call, count = Call(module, name, own, arguments, keywords), len(outputs)
            asks = self._calls.pop(id(module), None)

            def arrived(grads: Sequence[Tensor | None]) -> None:
                given = dict(zip(watched, grads, strict=True))
                self._arrived(current, call, indices, [given.get(index) for index in range(count)], asks)

            if len(watched) == 1:
                outputs[watched[0]].register_hook(lambda grad: arrived([grad]))
            else:
                torch.autograd.graph.register_multi_grad_hook([outputs[index] for index in watched], arrived)

        return hook

    @torch.no_grad()
    def _arrived(
        self, of: _Pass, call: Call, indices: dict[str, int], grads: Sequence[Tensor | None], asks: object | None
    ) -> None:
        if not of.counted:
            self._check_zeroed()
            of.counted = True
            self.examples += of.examples
            self._open.append(of)
        self._loose = None
        if self._finite is not None:
            self._finite &= call.finite(grads, of.examples)
            return
        self._scale = float(of.examples) if self.reduction == "mean" else 1.0
        scaled = [None if grad is None else grad.detach() * self._scale for grad in grads]
        with self.paused(), torch.autocast(self.sums.device.type, enabled=False):
            forms, general = call.gradients(scaled, of.examples)
            for name, form in forms.items():
                index = indices[name]
                if general and index not in self._general:
                    self._general[index] = (call.name, torch.zeros_like(self.sums.part(index)["gradient"]))
                of.arrived.setdefault(index, []).append(form)
                if asks is not None and name == "weight" and of.uses[index] == 1:
                    self._supplied[asks] = torch.zeros_like(self.sums.part(index)["gradient"])
                    self._add(of, index, self._supplied[asks])
                    self._supplied[asks] /= self._scale  # the parameter's hook is going to multiply by it
                elif len(of.arrived[index]) == of.uses[index]:
                    self._add(of, index)

    def _check_zeroed(self) -> None:
        """Refuse to add to what the last step left in ``parameter.grad``."""
        results, self._results = self._results, []
        parameters = self.sums.parameters.values()
        there = {id(parameter.grad) for parameter in parameters if parameter.grad is not None}
        for reference, version in results:
            gradient = reference()
            if gradient is not None and id(gradient) in there and gradient._version == version:
                raise InputError("per-example gradients: zero_grad() was not called since the last finish()")

    def _summed(self, grad: Tensor) -> Tensor:
        """The sum of the examples' gradients, from the gradient of the loss."""
        return grad if self._scale == 1.0 else grad * self._scale

    def _add(self, of: _Pass, index: int, gradient: Tensor | None = None) -> None:
        """Add what arrived for a parameter; to ``gradient`` too, which otherwise is left to backward."""
        forms = of.arrived.pop(index)
        totals: Statistics = self.sums.part(index)
        del totals["gradient"]
        if index in self._general:
            gradient = self._general[index][1]
        if gradient is not None:
            totals["gradient"] = gradient
        if totals:
            form = forms[0] if len(forms) == 1 else Added(forms)
            form.add_to(totals, self.rule, self.memory_limit)

    def _check_general(self) -> None:
        """Refuse layers whose gradient is not the sum of what their examples give one by one."""
        parameters = list(self.sums.parameters.values())
        for index, (name, total) in self._general.items():
            gradient = parameters[index].grad
            whole = torch.zeros_like(total) if gradient is None else gradient.to(total.dtype)
            # Beyond rounding, half precision's if that is what the layer computes in.
            if float((total - whole).norm()) > 0.02 * float(total.norm() + whole.norm()):
                raise InputError(
                    f"module {name}: its gradient is not the sum of its examples' gradients, taken one by one; it "
                    "draws at random (dropout) or mixes examples. Switch that off, freeze the module "
                    "(requires_grad_(False)), or build it of PyTorch's own layers"
                )


def per_example(
    model: nn.Module,
    rule: Aggregator,
    *,
    rescale: bool = False,
    reduction: Reduction = "mean",
    group: dist.ProcessGroup | None = None,
) -> PerExample:
    """Treat every example as an environment of its own; call ``finish()`` on the result after backward.

    Arguments as for :class:`PerExample`.
    """
    return PerExample(model, rule, rescale=rescale, reduction=reduction, group=group)


def _names(counts: Sequence[int], rank: int) -> list[str]:
    where = f" of process {rank}" if len(counts) > 1 else ""
    return [f"example {index}{where}" for index in range(counts[rank])]
