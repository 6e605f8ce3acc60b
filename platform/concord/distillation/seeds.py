"""Several students and teachers in one pass: each seed has its own data, weights and loss.

Small networks spend their time on launching operations. With the parameters of S seeds stacked in one tensor, each
operation is launched once. No operation mixes the seeds: the loss is a vector, and the gradient of its sum consists of
the seeds' own gradients. Elementwise optimizers (SGD and Adam) take an independent step for each seed.

Batches are ``(examples, seeds, ...)``: operations on the examples (join, split, order) do not change.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from concord.distillation.student import Student, Weights
from concord.distillation.teaching import Teaching
from concord.errors import InputError
from concord.gradients.risk import Batch, Risk


class Stacked(nn.Module):
    """Networks of one architecture in one module: parameters ``(seeds, ...)``, inputs ``(examples, seeds, ...)``.

    ``Stacked(models)(inputs)[:, s]`` is ``models[s](inputs[:, s])``. Each network draws its own random numbers,
    such as dropout's.

    Args:
        networks: modules whose parameters and buffers have the same names and shapes. Their values are copied.

    Raises:
        InputError: there is no network, or names or shapes differ.
    """

    form: nn.Module

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        states = [{name: tuple(each.shape) for name, each in network.state_dict().items()} for network in networks]
        if not states or any(state != states[0] for state in states):
            found = "none" if not states else "some with other parameters than the first"
            raise InputError(f"networks: {found}; expected at least one, alike but in their numbers")
        self.seeds = len(networks)
        form = copy.deepcopy(networks[0])
        self.__dict__["form"] = form  # no submodule: its parameters are not trained
        for name, parameter in form.named_parameters():
            given = [network.get_parameter(name).detach() for network in networks]
            self.register_parameter(_flat(name), nn.Parameter(torch.stack(given), parameter.requires_grad))
        for name, _ in form.named_buffers():
            given = [network.get_buffer(name).detach() for network in networks]
            self.register_buffer(_flat(name), torch.stack(given))

    def forward(self, inputs: Any) -> Any:
        """Outputs, leaves ``(examples, seeds, ...)``, of inputs with such leaves."""
        self.form.train(self.training)
        each = vmap(lambda own, part: functional_call(self.form, own, (part,)), (0, 1), 1, randomness="different")
        return each(self.by_name(), inputs)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """All modules, with those of one network, so that a search for batch norm finds it."""
        yield from super().modules(remove_duplicate)
        yield from self.form.modules(remove_duplicate)

    def by_name(self, changed: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Parameters and buffers ``(seeds, ...)`` by their names in one network.

        Args:
            changed: values in place of the module's own, by their names here.
        """
        own = {**dict(self.named_parameters()), **dict(self.named_buffers()), **(changed or {})}
        names = [name for name, _ in (*self.form.named_parameters(), *self.form.named_buffers())]
        return {name: own[_flat(name)] for name in names}

    def network(self, seed: int) -> nn.Module:
        """A copy of one network, with its present values."""
        alone, own = copy.deepcopy(self.form), self.by_name()
        with torch.no_grad():
            for name, value in (*alone.named_parameters(), *alone.named_buffers()):
                value.copy_(own[name][seed])
        return alone.train(self.training)


class StackedStudent(Student):
    """Students of several seeds, for :func:`~concord.distillation.meta_gradient` and loops: their losses ``(seeds,)``.

    Args:
        model: the students.
        risk: the risk of one student's batch, by its labels.
        teaching: the taught layers and the teaching loss; targets are ``(examples, seeds, ...)``.
        autocast: the dtype in which layers compute.

    Raises:
        InputError: the networks have no layer of a taught name.
    """

    def __init__(self, model: Stacked, risk: Risk, teaching: Teaching, autocast: torch.dtype | None = None) -> None:
        self._one = Student(model.form, risk, teaching, autocast)
        self.model: Stacked = model
        self.risk, self.teaching, self.autocast = risk, teaching, autocast

    def loss(self, batch: Batch, targets: Any, step: int = 0, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """The training loss of each student, and the weight of its batch, both ``(seeds,)``.

        Args:
            batch: a tree of tensors ``(examples, seeds, ...)``.
            targets: the teachers' targets for these examples, leaves ``(examples, seeds, ...)``.
            step: the step's number, for the risk.
            weights: values in place of the model's own, by name.

        Raises:
            InputError: see :class:`Student`.
        """
        self.model.form.train(self.model.training)

        def one_loss(own: dict[str, Tensor], part: Batch, target: Any) -> tuple[Tensor, Tensor]:
            return self._one.loss(part, target, step, own)

        losses: tuple[Tensor, Tensor] = vmap(one_loss, (0, 1, 1), randomness="different")(
            self.model.by_name(weights), batch, targets
        )
        return losses

    def label_loss(self, batch: Batch, step: int = 0, weights: Weights | None = None) -> Tensor:
        """The label loss alone of each student ``(seeds,)``, in evaluation mode."""

        def one_loss(own: dict[str, Tensor], part: Batch) -> Tensor:
            return self._one.label_loss(part, step, own)

        losses: Tensor = vmap(one_loss, (0, 1))(self.model.by_name(weights), batch)
        return losses


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """Stack one batch for each seed into a batch for :class:`Stacked` networks, leaves ``(examples, seeds, ...)``.

    Raises:
        InputError: the batches differ in form.
    """
    forms = [pytree.tree_map(lambda leaf: (tuple(leaf.shape), leaf.dtype), batch) for batch in batches]
    if not forms or any(form != forms[0] for form in forms):
        raise InputError("batches: expected at least one, all of one form, with as many examples each")
    return pytree.tree_map(lambda *leaves: torch.stack(leaves, 1), *batches)


def _flat(name: str) -> str:
    """A parameter's name in one network, as a name without dots."""
    return name.replace(".", "/")
