"""Captures the inputs of a model's layers and the gradients of their outputs, to compute gradients by group.

A group is an environment, if the environments go through the model as one batch, see
:class:`~concord.gradients.pooled.PooledPass`, or one example, see
:class:`~concord.gradients.example_hooks.ExampleHooks`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from concord.errors import InputError
from concord.gradients.example_tracing import Spread
from concord.gradients.group_gradients import GroupGradients, SummedGradients
from concord.gradients.layer_gradients import Call, CapturedLayer, Forms, ModuleState, is_unit


@dataclass
class Pass:
    """One forward pass: its groups of examples, each parameter's uses, and the arrived gradients.

    The examples of a group are neighbours, or they ``alternate`` with those of the other groups.
    """

    examples: int
    groups: int
    alternate: bool = False
    uses: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, list[GroupGradients]] = field(default_factory=dict)

    def take(self, layer: CapturedLayer, forms: Forms) -> Iterator[int]:
        """Keep the gradients of a layer's parameters; return the parameters of which all uses have arrived."""
        for name, form in forms.items():
            index = layer.indices[name]
            self.arrived.setdefault(index, []).append(form)
            if len(self.arrived[index]) == self.uses[index]:
                yield index

    def pop(self, index: int) -> GroupGradients:
        """The sum of a parameter's gradients that have arrived."""
        forms = self.arrived.pop(index)
        return forms[0] if len(forms) == 1 else SummedGradients(self.groups, forms)


OwnPass = TypeVar("OwnPass", bound=Pass)


class Capture(ABC, Generic[OwnPass]):
    """Forward hooks that keep each layer's arguments and wait for the gradient of its output."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.layers = captured_layers(model, parameters)
        self._states: dict[int, ModuleState] = {}  # before the calls that are on their way, by module

    def attach(self, left_out: Callable[[nn.Module], bool] = lambda _: False) -> list[RemovableHandle]:
        """Register the hooks on the layers, except those of modules that are left out."""
        layers = [each for each in self.layers if not left_out(each.module)]
        # First of all: another hook, such as that of torch.nn.utils.spectral_norm, may change the module's state.
        before = [
            each.module.register_forward_pre_hook(self._keep_state(each), prepend=True)
            for each in layers
            if not each.has_formula
        ]
        before += [
            each.module.register_forward_pre_hook(self._keep_as_computed(each))
            for each in layers
            if type(each.module) is nn.Linear
        ]
        return before + [each.module.register_forward_hook(self._hook(each), with_kwargs=True) for each in layers]

    def _keep_as_computed(self, layer: CapturedLayer) -> Callable[..., Any]:
        """A hook by which autocast's smaller copy of a linear layer's input is kept, which backward keeps anyway."""

        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor] | None:
            if module is not layer.module or self.ignored() or len(arguments) != 1:
                return None
            (inputs,) = arguments
            if not isinstance(inputs, Tensor) or inputs.dtype != torch.float32 or module.weight.dtype == torch.float64:
                return None
            kind = inputs.device.type
            return (inputs.to(torch.get_autocast_dtype(kind)),) if torch.is_autocast_enabled(kind) else None

        return hook

    def _keep_state(self, layer: CapturedLayer) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            if module is layer.module and not self.ignored():
                self._states[id(module)] = ModuleState(module)

        return hook

    def ignored(self) -> bool:
        """Whether backward does not reach this call of a layer."""
        return not torch.is_grad_enabled()

    @abstractmethod
    def pass_of(self, arguments: Any, keywords: Any) -> OwnPass | None:
        """The pass of a layer's call; None for a pass that was counted before."""

    def with_examples(
        self, current: OwnPass | None, layer: CapturedLayer, arguments: Any, output: Tensor
    ) -> tuple[Tensor, Spread | None]:
        """A layer's output, with a dimension of examples added if it has none."""
        del current, layer, arguments
        return output, None

    def waits(self, current: OwnPass, call: Call, sources: Sequence[Tensor]) -> None:
        """Called when a call's outputs, or their bases, wait for gradients."""

    @abstractmethod
    def arrived(self, current: OwnPass, call: Call, grads: Sequence[Tensor | None]) -> None:
        """Called when the gradients of a call's outputs have arrived."""

    def _hook(self, layer: CapturedLayer) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            if module is not layer.module or self.ignored():
                return None
            state = self._states.pop(id(module), None)
            if any(module._parameters.get(each, value) is not value for each, value in layer.parameters.items()):
                return None  # called with other parameters (functional_call)
            leaves, structure = ([output], None) if isinstance(output, Tensor) else pytree.tree_flatten(output)
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            watched = [at for at, place in enumerate(places) if leaves[place].requires_grad]
            if not watched:
                return None
            current = self.pass_of(arguments, keywords)
            spreads: list[Spread | None] = [None] * len(places)
            sources, shapes, replaced = [], [], False
            for at in watched:
                given = leaves[places[at]]
                tensor, spreads[at] = self.with_examples(current, layer, arguments, given)
                source: Any = tensor
                if spreads[at] is None and current is not None and tensor._is_view():
                    if type(module) is nn.Linear and _same_elements(tensor):
                        # A hook on a view is lost when it is written to in place, one on what it views is not.
                        source = tensor._base
                    else:
                        source = tensor = tensor.clone()
                sources.append(source)
                shapes.append(tensor.shape)
                leaves[places[at]] = tensor
                replaced |= tensor is not given
            if current is not None:
                for index in layer.indices.values():
                    current.uses[index] = current.uses.get(index, 0) + 1
                call = Call(layer, arguments, keywords, spreads, state)
                self.waits(current, call, sources)

                def arrived(grads: Sequence[Tensor | None]) -> None:
                    by_output: list[Tensor | None] = [None] * len(places)
                    for at, shape, grad in zip(watched, shapes, grads, strict=True):
                        by_output[at] = None if grad is None else grad.detach().reshape(shape)
                    self.arrived(current, call, by_output)

                if len(sources) == 1:
                    sources[0].register_hook(lambda grad: arrived([grad]))
                else:
                    torch.autograd.graph.register_multi_grad_hook(sources, arrived)
            if not replaced:
                return None
            return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)

        return hook


def captured_layers(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[CapturedLayer]:
    """The modules of a model that have trainable parameters of their own."""
    numbers = {id(parameter): index for index, parameter in enumerate(parameters.values())}
    layers = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise InputError(f"module {name or 'model'}: it has no parameters yet; run the model once, then register")
        unit = is_unit(module)
        if unit:
            inside |= {id(child) for child in module.modules()}
        own = {each: value for each, value in module.named_parameters(recurse=unit) if id(value) in numbers}
        if own:
            indices = {each: numbers[id(value)] for each, value in own.items()}
            layers.append(CapturedLayer(name or type(module).__name__, module, own, indices))
    return layers


def _same_elements(view: Tensor) -> bool:
    base = view._base
    return (
        base is not None
        and base.numel() == view.numel()
        and base.is_contiguous()
        and view.is_contiguous()
        and base.grad_fn is not None
    )
