"""Hooks that collect a rule's sums over the examples of a model's batches while backward runs."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from concord.errors import InputError
from concord.gradients.capture import Capture, Pass
from concord.gradients.example_tracing import ExampleTracing, Spread, is_range, spread_out
from concord.gradients.group_gradients import chunks, tolerances
from concord.gradients.layer_gradients import LAYERS, Call, CapturedLayer, convolution, geometry_of
from concord.gradients.layout import require_no_hooks_after_accumulation, require_unchanged
from concord.gradients.sums import Sums
from concord.gradients.supplied_convolution import convolve

Reduction = Literal["mean", "sum"]

# Layers that are collected from. Two that scale the gradients of one layer would both be wrong.
_registered: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@dataclass
class _Pass(Pass):
    """A forward pass of a user's loop.

    Attributes:
        added: the parameters of which all uses are in the sums.
        supplied: by parameter, the source of a convolution's weight gradient.
        counted: whether its examples are counted.
        whole: whether it is a pass of the whole model.
        tracing: the tracing of the first pass of its form.
    """

    added: set[int] = field(default_factory=set)
    supplied: dict[int, list[Tensor]] = field(default_factory=dict)
    counted: bool = False
    whole: bool = True
    tracing: ExampleTracing | None = None


class ExampleHooks(Capture[_Pass]):
    """Hooks on a model that add every example's statistics to sums, in a training loop of the user's own.

    Forward: each layer's hook keeps the layer's arguments and waits for the gradient of its output. Backward: from this
    gradient the per-example gradients of the layer's parameters are computed, in the layer's form, and their statistics
    are added at once; a parameter with several uses waits until all uses have arrived. Backward itself sums
    ``gradient`` in ``parameter.grad``, which is scaled to the sum over examples. For a convolution that sum is formed
    anyway, and passed to backward.

    In the first step the sums are compared with backward's gradient, parameter by parameter; in every step the sums
    that were computed the general way.

    Args:
        model: the model; its inputs have the examples in the first dimension, or a 1 there.
        sums: the sums of the statistics; those of ``gradient`` are not changed.
        reduction: whether the loss is the mean or the sum over the examples of a pass.
        memory_limit: bytes of per-example gradients that may exist at once.

    Attributes:
        examples: the number of examples that backward has reached since :meth:`reset`.
        expected: the number of examples of the next passes, if known; None takes it from their inputs.
    """

    def __init__(self, model: nn.Module, sums: Sums, reduction: Reduction, memory_limit: int) -> None:
        for name, module in model.named_modules():
            if module in _registered:
                raise InputError(f"module {name or 'model'}: its examples are collected already; remove() that first")
            if isinstance(module, _TRANSFORMER_LAYERS) and _puts_positions_first(module):
                raise InputError(
                    f"module {name or 'model'} ({type(module).__name__}): puts positions before examples, and examples "
                    "have to be in the first dimension; give batch_first=True, or freeze it (requires_grad_(False))"
                )
        super().__init__(model, sums.parameters)
        self.examples = 0
        self.expected: int | None = None
        self._model = model
        self._sums = sums
        self._reduction = reduction
        self._memory_limit = memory_limit
        self._parameters = list(sums.parameters.values())
        self._results: list[weakref.ref[Tensor]] = []
        # Each gradient as backward left it, by parameter, with its count of changes in place.
        self._left: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._unverified = set(range(len(sums.parameters)))  # one that is 0 or not finite shows nothing
        self._verified: dict[int, tuple[str, Tensor]] = {}
        self._half = False
        self._reached: set[int] = set()
        self._current: _Pass | None = None
        self._loose: _Pass | None = None
        self._open: list[_Pass] = []
        self._task: int | None = None
        self._scale = 1.0
        self._paused = False
        self._finite: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        # Convolutions whose weight's gradient is supplied, and where their latest calls take it from.
        self._supplying: list[nn.Module] = []
        self._supplied: dict[int, list[Tensor]] = {}
        # Forms of inputs that were traced, and which outputs of layers got a dimension of examples then.
        self._traced: set[object] = set()
        self._spreads: dict[object, Spread] = {}
        self._latest = 0  # examples of the latest pass
        self._register()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self._supplying:
            del module.forward
        for module in self._model.modules():
            _registered.discard(module)
        self._supplying = []

    def reset(self) -> None:
        """Empty the sums."""
        self._sums.zero()
        self.examples = 0
        self._supplied, self._verified, self._reached, self._left = {}, {}, set(), {}
        self._open, self._current, self._loose, self._task, self._scale = [], None, None, None, 1.0

    def settle(self) -> None:
        """Add the remaining gradients, and compare the sums with backward's gradients."""
        for waiting in self._open:  # of a parameter whose other use the loss did not depend on
            for index in list(waiting.arrived):
                self._add(waiting, index)
        for index, (name, parameter) in enumerate(self._sums.parameters.items()):
            if index not in self._reached and parameter.grad is not None and bool(parameter.grad.any()):
                raise InputError(
                    f"parameter {name}: it has a gradient, but its module was not called, so that its examples are "
                    "not known: it is used elsewhere, or under reentrant checkpointing (take use_reentrant=False). "
                    "Call it through a module, or freeze it (requires_grad_(False))"
                )
        self._require_gradients_of_backward()
        self._verify()
        seen = [(index, total) for index, (_, total) in self._verified.items() if index in self._unverified]
        self._unverified -= {index for index, total in seen if bool(total.any()) and bool(total.isfinite().all())}

    def note_results(self) -> None:
        """Remember the present ``parameter.grad``: a step's result, to which nothing may be added."""
        gradients = [parameter.grad for parameter in self._sums.parameters.values()]
        self._results = [weakref.ref(gradient) for gradient in gradients if gradient is not None]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing while the body runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextlib.contextmanager
    def watched(self, examples: int) -> Iterator[Tensor]:
        """While the body runs, collect only whether each example's gradient is finite: ``(examples,)`` bool."""
        self._finite = torch.ones(examples, dtype=torch.bool, device="cpu")
        try:
            yield self._finite
        finally:
            self._finite = None
            self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExampleHooks":
        # A copy of the model has copies of the hooks, which are to do nothing: it is another model.
        return self

    def _register(self) -> None:
        self._handles += self.attach()
        for layer in self.layers:
            if "weight" in layer.parameters and LAYERS.get(type(layer.module)) is convolution:
                self._supply_to(layer.module)
        for module in self._model.modules():
            _registered.add(module)
        self._handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))
        self._handles.append(self._model.register_forward_hook(self._end, always_call=True))
        for parameter in self._sums.parameters.values():
            self._handles.append(parameter.register_hook(self._summed))

    def _supply_to(self, module: Any) -> None:
        """Supply a convolution's weight gradient from these sums."""
        geometry = geometry_of(module)
        if geometry is None:
            return

        def forward(this: Any, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name for it
            batch = input.ndim == len(this.kernel_size) + 2
            ignored = self.ignored() or _in_backward() or torch.compiler.is_compiling()
            if this is not module or ignored or not batch:
                result: Tensor = type(this).forward(this, input)
                return result
            self._supplied[id(module)] = []
            return convolve(module, geometry, input, self._supplied[id(module)])

        self._supplying.append(module)
        module.forward = MethodType(forward, module)  # the instance's; its class keeps its own

    def ignored(self) -> bool:
        """Whether backward does not reach this call of a layer."""
        return self._paused or not torch.is_grad_enabled()

    def _begin(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if model is not self._model or self.ignored() or _in_backward():
            return
        require_unchanged(model, self._sums.parameters)
        require_no_hooks_after_accumulation(self._sums.parameters)
        for name, parameter in self._sums.parameters.items():
            if len(parameter._backward_hooks or {}) > 1:  # one is ours
                raise InputError(
                    f"parameter {name}: its gradient hook would see the sum over the examples alone, and what it "
                    "changes would not be in the rule's other statistics; remove it, and do its work after aggregate()"
                )
        inputs = (arguments, keywords)
        self._current = self._new_pass(arguments, keywords)
        self._latest = self._current.examples
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(inputs))
        form = (self._latest, model.training, shapes)
        if form not in self._traced and not torch.compiler.is_compiling():
            self._traced.add(form)
            self._current.tracing = ExampleTracing(self._latest, inputs)
            self._current.tracing.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, model: nn.Module, *_: Any) -> None:
        if model is self._model and self._current is not None and not (self.ignored() or _in_backward()):
            if self._current.tracing is not None:
                self._current.tracing.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._current.tracing = None
            self._current = None

    def with_examples(
        self, current: _Pass | None, layer: CapturedLayer, arguments: Any, output: Tensor
    ) -> tuple[Tensor, Spread | None]:
        """A layer's output, with a dimension of examples added if all examples share it."""
        examples = current.examples if current else self._open[-1].examples if self._open else self._latest
        spread = self._spread(current, layer, arguments, output, examples)
        if spread is None:
            return output, None
        output = spread_out(output, spread, examples)
        if current is not None and current.tracing is not None:
            current.tracing.note(output, layer.name, spread)
        return output, spread

    def _spread(
        self, current: _Pass | None, layer: CapturedLayer, arguments: Any, output: Tensor, examples: int
    ) -> Spread | None:
        """How an output gets a dimension of examples, from the first pass of this form."""
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in arguments)
        form = (id(layer.module), examples, shapes, output.shape)
        positions = type(layer.module) is nn.Embedding and output.ndim == 2
        if current is not None and current.tracing is not None:
            if isinstance(layer.module, nn.MultiheadAttention | nn.RNNBase):
                return None
            spread = current.tracing.spread(output, layer.name, positions)
            if spread is not None:
                self._spreads[form] = spread
            elif layer.has_formula:
                current.tracing.require_first(output, layer.name)
            return spread
        if current is not None and not current.whole and positions and arguments and is_range(arguments[0]):
            raise InputError(
                f"module {layer.name}: its input counts 0, 1, 2, …, which seem to be positions and not examples. Call "
                "the model as a whole, or expand its input to the batch"
            )
        return self._spreads.get(form)

    def pass_of(self, arguments: Any, keywords: Any) -> _Pass | None:
        """The pass of a layer's call; None if activation checkpointing repeats the call inside backward."""
        if _in_backward():
            return None
        if self._current is not None:
            return self._current
        # A part of the model was called by itself; what was so called since the last backward pass is one pass.
        begun = self._new_pass(arguments, keywords)
        begun.whole = False
        if self._loose is None or self._loose.examples != begun.examples:
            self._loose = begun
        return self._loose

    def _new_pass(self, arguments: Any, keywords: Any) -> _Pass:
        """A pass with the number of examples of the inputs."""
        positional = [each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)]
        tensors = positional or [each for each in pytree.tree_leaves(keywords) if isinstance(each, Tensor)]
        if not tensors or tensors[0].ndim == 0:
            raise InputError("model: its first input is no tensor with the examples in the first dimension")
        lengths = [len(tensor) for tensor in tensors if tensor.ndim]
        begins = [each for each in tensors if each.ndim and len(each) != 1]
        if not positional:  # in any order: what most begin with, or the one of the most dimensions
            begins.sort(key=lambda each: (-lengths.count(len(each)), -each.ndim))
        examples = self.expected if self.expected in lengths else len(begins[0]) if begins else 1
        return _Pass(examples, groups=examples)

    def waits(self, current: _Pass, call: Call, sources: Sequence[Tensor]) -> None:
        """Wait for the gradients of a call's outputs, or of their bases."""
        supplied = self._supplied.pop(id(call.layer.module), None)
        if supplied is not None:
            current.supplied[call.layer.indices["weight"]] = supplied

    def arrived(self, current: _Pass, call: Call, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of parameters of which all uses have arrived."""
        indices = call.layer.indices.values()
        if torch.is_grad_enabled() and not self._paused:
            raise InputError("per-example gradients: backward with create_graph=True cannot be collected from")
        if self._paused or not self._fills_gradients(indices):
            return
        self._loose = None
        if self._finite is None:
            self._reach(current)
            if not current.added.isdisjoint(indices):
                raise InputError(
                    f"module {call.layer.name}: a second backward pass reaches the same forward pass; add the losses "
                    "instead, or run the model again"
                )
        scaled = [None if grad is None else _scaled(grad, self._scale) for grad in grads]
        self._half |= any(grad is not None and grad.itemsize < 4 for grad in grads)
        with self.paused(), torch.no_grad(), torch.autocast(self._sums.device.type, enabled=False):
            forms, general = call.gradients(
                scaled, current.examples, current.groups, compiled=self._sums.aggregation.compile
            )
            if self._finite is not None:
                for name, form in forms.items():
                    size = max(call.layer.parameters[name].nbytes, 1)
                    for part in chunks(current.groups, self._memory_limit // size):
                        of_part = form.of_groups(part)
                        self._finite[part] &= torch.isfinite(of_part.reshape(len(of_part), -1)).all(1).cpu()
                return
            for index in indices:
                if (general or index in self._unverified) and index not in self._verified:
                    self._verified[index] = (call.layer.name, self._room(index))
            for index in current.take(call.layer, forms):
                self._add(current, index)

    def _fills_gradients(self, indices: Any) -> bool:
        """Whether the present backward pass adds to one of these parameters' ``grad``."""
        # Where backward adds to parameter.grad: what is not on its way there (autograd.grad) is no training step. The
        # nodes are not kept: they belong to the stream on which they were made, and a graph is captured on another one.
        nodes = (get_gradient_edge(self._parameters[index]).node for index in indices)
        try:
            return any(map(torch._C._will_engine_execute_node, nodes))
        except RuntimeError:  # torch.autograd.grad with respect to the parameters
            return False

    def _reach(self, of: _Pass) -> None:
        """Count the pass when backward reaches it."""
        task = torch._C._current_graph_task_id()
        scale = float(of.examples) if self._reduction == "mean" else 1.0
        scaler = self._sums.aggregation.scaler
        if scaler is not None:
            scale /= scaler.get_scale()
        if task != self._task:
            if self._results_are_there():
                raise InputError("per-example gradients: zero_grad() was not called since the last aggregate()")
            if self.examples and self._dropped():
                self.reset()  # an earlier backward pass, the gradients of which the user has thrown away
            else:
                self._require_gradients_of_backward()
            self._task, self._scale = task, scale
            torch.autograd.Variable._execution_engine.queue_callback(self._note_gradients)
        elif scale != self._scale or any(of.examples != each.examples and not each.whole for each in self._open):
            raise InputError(
                f"per-example gradients: passes of {self._open[-1].examples} and {of.examples} examples in one "
                "backward pass; a mean over them is no mean over examples. Call backward for each, or the model as a "
                "whole with summed losses (reduction='sum')"
            )
        if not of.counted:
            of.counted = True
            self.examples += of.examples
            self._open.append(of)

    def _note_gradients(self) -> None:
        """Note the gradients at the end of a backward pass."""
        gradients = {index: parameter.grad for index, parameter in enumerate(self._sums.parameters.values())}
        self._left = {i: (weakref.ref(each), each._version) for i, each in gradients.items() if each is not None}

    def _require_gradients_of_backward(self) -> None:
        """Refuse gradients that something else has changed since (InputError)."""
        for index, (name, parameter) in enumerate(self._sums.parameters.items()):
            if index not in self._left:
                continue
            reference, version = self._left[index]
            left = reference()
            if left is None or left is not parameter.grad or left._version != version:
                raise InputError(
                    f"parameter {name}: its gradient was changed after backward, as by clipping or zero_grad(); call "
                    "aggregate() right after backward, and clip the aggregated gradient"
                )

    def _results_are_there(self) -> bool:
        """Whether the result of the last step is still in ``parameter.grad``, and was not zeroed."""
        results, self._results = [reference() for reference in self._results], []
        there = {id(parameter.grad) for parameter in self._sums.parameters.values() if parameter.grad is not None}
        return any(result is not None and id(result) in there and bool(result.any()) for result in results)

    def _dropped(self) -> bool:
        """Whether the collected gradients are no longer in ``parameter.grad``."""
        parameters = list(self._sums.parameters.values())
        gradients = [parameters[index].grad for index in self._reached]
        return any(gradient is None for gradient in gradients) or not any(
            gradient is not None and bool(gradient.any()) for gradient in gradients
        )

    def _summed(self, grad: Tensor) -> Tensor:
        """The sum of the examples' gradients, from the gradient of the loss."""
        ours = not self._paused and torch._C._current_graph_task_id() == self._task
        return grad * self._scale if ours and self._scale != 1.0 else grad

    def _add(self, of: _Pass, index: int) -> None:
        """Add a parameter's arrived gradients; the gradient itself only to verify it or supply it to backward."""
        of.added.add(index)
        self._reached.add(index)
        supplied, verified = of.supplied.pop(index, None), index in self._verified
        supplies = supplied is not None and not verified and of.uses[index] == 1
        total = self._sums.add_form(
            index, of.pop(index), of.groups, self._memory_limit, wants_total=verified or supplies
        )
        if total is not None and verified:
            self._verified[index][1].add_(total)
        elif supplied is not None and total is not None:
            # The parameter's hook is going to multiply by it.
            supplied.append(total if self._scale == 1.0 else total.div_(self._scale))

    def _room(self, index: int) -> Tensor:
        """The memory for the sum of a parameter's gradients."""
        layout = self._sums.layout
        return torch.zeros(layout.shapes[index], dtype=layout.dtype, device=self._sums.device)

    def _verify(self) -> None:
        parameters = list(self._sums.parameters.values())
        if not self._verified:
            return
        norms = [parameter.grad.norm().float() for parameter in parameters if parameter.grad is not None]
        whole_norm = float(torch.stack(norms).norm()) if norms else 0.0
        relative, absolute = tolerances(self._half)
        if not self._half and _is_exact(self._sums.device):
            relative = _RELATIVE
        for index, (name, total) in self._verified.items():
            gradient = parameters[index].grad
            whole = torch.zeros_like(total) if gradient is None else gradient.to(total.dtype)
            allowed = max(relative * float(total.norm() + whole.norm()), absolute * whole_norm)
            if float((total - whole).norm()) > allowed:
                raise InputError(
                    f"module {name}: its gradient is not the sum of its examples' gradients, taken one by one: it "
                    "draws at random (dropout), mixes examples, or its parameters are also used elsewhere, as by a "
                    "penalty on weights in the loss (give the optimizer a weight_decay). Change that, freeze it "
                    "(requires_grad_(False)), or build it of PyTorch's own layers"
                )


_TRANSFORMER_LAYERS = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def _puts_positions_first(module: Any) -> bool:
    """Whether a trained layer beside the attention has positions where examples should be.

    If there are as many positions as examples no shape would tell.
    """
    beside = (each for each in module.children() if not isinstance(each, nn.MultiheadAttention))
    trained = any(parameter.requires_grad for each in beside for parameter in each.parameters())
    return trained and not module.self_attn.batch_first


# Where no product is rounded to TF32 or bfloat16. A larger error is the module's, as of a small random change, or the
# loss's, as of a small penalty on the weights.
_RELATIVE = 5e-5


def _is_exact(device: torch.device) -> bool:
    """Whether float32 products are computed in float32: not on a GPU, nor where the user allows less on a CPU."""
    of_cpu: Any = torch.backends.mkldnn
    chosen = {of_cpu.matmul.fp32_precision, of_cpu.conv.fp32_precision, of_cpu.rnn.fp32_precision}
    return device.type == "cpu" and chosen <= {"none", "ieee"}


def _scaled(grad: Tensor, scale: float) -> Tensor:
    # float16 would overflow soon; bfloat16 has the range of float32.
    grad = grad.float() if grad.dtype == torch.float16 else grad
    return grad if scale == 1.0 else grad * scale


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
