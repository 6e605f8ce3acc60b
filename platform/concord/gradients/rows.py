"""Keeps the gradients of this process's environments, for rules that compare them.

The gradients are kept while they fit the limit. Otherwise each layer's input and its output's gradient are kept, as in
an ordinary backward pass; the gradients of all environments are formed from them layer by layer, in blocks, once for
their inner products and once for the update.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from concord.aggregation import ColumnRule, Weighting, weights_of
from concord.aggregation.asynchronous import is_asynchronous
from concord.aggregation.column_rule import WeightedSum
from concord.aggregation.weighting import gram_of, name_of
from concord.errors import InputError
from concord.gradients.collected import Collected
from concord.gradients.exchange import Processes, SliceExchange, complete, weights_of_slices
from concord.gradients.finish import combine_in_blocks
from concord.gradients.group_gradients import GroupGradients, Product, columns_of, gram_of_groups
from concord.gradients.step import Aggregation


class Rows(Collected):
    """The environments' gradients of all trainable parameters of a model, for a weighting or a column rule.

    At most ``memory_limit`` bytes of gradients are kept, but at least those of two environments.

    Attributes:
        most: the number of environments whose gradients are kept.
        compared: the number of those that two ways are compared by: the gradients of both, and their differences,
            exist at once.
    """

    def __init__(self, model: nn.Module, aggregation: Aggregation, memory_limit: int) -> None:
        super().__init__(model, aggregation)
        assert isinstance(aggregation.rule, Weighting | ColumnRule)
        self.rule: Weighting | ColumnRule = aggregation.rule
        self._size = self.layout.components * self.layout.dtype.itemsize
        self._room: dict[int, Tensor] = {}
        self.most = max(2, memory_limit // self._size)
        self.compared = max(2, memory_limit // (4 * self._size))
        self.zero()

    def require_room(self, environments: int) -> None:
        """Refuse environments whose gradients exceed the memory limit (InputError)."""
        if environments > self.most:
            raise InputError(
                f"memory_limit: {name_of(self.rule)} compares the gradients of {environments} environments, which take "
                f"{environments * self._size} bytes; give as many, or fewer environments to a process"
            )

    def add(self, index: int, gradients: Tensor, *, accumulate: bool) -> None:
        """Keep environments' gradients of parameter ``index``, ``(environments, *shape)``."""
        if not accumulate and index == 0:
            self.zero()
        self._kept[index].append(gradients.reshape(len(gradients), -1).to(self.layout.dtype))

    def add_form(self, index: int, form: GroupGradients, groups: int) -> Tensor | None:
        """Keep the gradients of parameter ``index``, or their form."""
        self._groups = groups
        if groups > self.most:
            self._forms[index] = form
        else:
            self._kept[index].append(self._formed(index, form, groups).reshape(groups, -1).to(self.layout.dtype))
        return None

    def _formed(self, index: int, form: GroupGradients, groups: int) -> Tensor:
        """The gradients of all groups; products reuse the memory of the previous step, without page faults."""
        if not isinstance(form, Product):
            return form.of_groups(slice(0, groups))
        shape, room = (groups, *self.layout.shapes[index]), self._room.get(index)
        if room is None or room.shape != shape or room.dtype != form.rows.dtype:
            room = self._room[index] = torch.empty(shape, dtype=form.rows.dtype, device=self.device)
        return torch.bmm(form.rows, form.columns, out=room)

    def values(self) -> Mapping[str, Sequence[Tensor]]:
        """The gradients of each parameter, not copied: the next step forms its own elsewhere."""
        self._room = {}
        return {"gradient": [columns for _, columns in self._by_parameter()]}

    def zero(self) -> None:
        """Empty the collection."""
        self._kept: list[list[Tensor]] = [[] for _ in self.parameters]
        self._all: Tensor | None = None
        self._forms: dict[int, GroupGradients] = {}
        self._groups = 0
        self.__dict__.pop("gram", None)

    @functools.cached_property
    def gram(self) -> Tensor:
        """The inner products of this process's gradients."""
        parts = [gram_of(columns) for _, columns in self._columns(in_forms=False)]
        parts += [gram_of_groups(form, self._groups) for form in self._forms.values()]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def finite(self) -> Tensor:
        """Whether each gradient is finite, bool."""
        if isinstance(self.rule, Weighting):
            return torch.isfinite(self.gram.diagonal())
        return self._finite_columns().cpu()

    def _finite_columns(self) -> Tensor:
        # By the extremes, which need no memory beside the gradients. Small tensors kept of each block would keep the
        # heap from reusing the blocks' memory.
        extremes: tuple[Tensor, Tensor] | None = None
        for _, columns in self._columns():
            if columns.shape[1] == 0:
                continue
            lowest, highest = torch.aminmax(columns, dim=1)
            if extremes is None:
                extremes = lowest, highest
            else:
                torch.minimum(extremes[0], lowest, out=extremes[0])
                torch.maximum(extremes[1], highest, out=extremes[1])
        assert extremes is not None
        return torch.isfinite(torch.stack(extremes)).all(0)

    def are_finite(self) -> bool:
        """Whether all gradients are finite."""
        return bool(self.finite().all())

    def exchange(self, processes: Processes) -> SliceExchange:
        """The exchange of all gradients between processes."""
        return SliceExchange(
            self.aggregation, self.layout.layers, self.layout.dtype, self.device, processes, sends_statistics=False
        )

    def apply_here(self, finite: Tensor | None, environments: int, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weigh or combine the environments' gradients of this process."""
        update, rule, weights = self._zeros(), self.rule, None
        propagates = self.aggregation.policy == "propagate"
        if isinstance(rule, Weighting):
            weights = torch.zeros(environments if finite is None else len(finite), dtype=torch.float64, device="cpu")
        if weights is not None and propagates and not self.are_finite():
            update.fill_(torch.nan)
        elif environments > 0:
            if isinstance(rule, Weighting):
                assert weights is not None
                found = weights_of(rule, self.gram, step)
                weights[slice(None) if finite is None else finite] = found
                rule = WeightedSum(found)
            for part, columns in self._columns():
                combine_in_blocks(rule, functools.partial(_block, columns), update[part])
            if weights is None and propagates:
                update.masked_fill_(~self._finite_columns().all(), torch.nan)
        self.zero()
        return update, torch.empty(0, device=self.device), weights

    def apply_together(
        self, exchange: SliceExchange, finite: Tensor | None, environments: int, step: int
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[str, ...]]:
        """Exchange all gradients, and weigh or combine a slice."""
        update, rows = self._zeros(), torch.cat([columns for _, columns in self._columns()], 1)
        if finite is not None and len(rows) < environments:
            collected, rows = rows, rows.new_zeros(environments, rows.shape[1])
            rows[finite.to(rows.device)] = collected[: int(finite.sum())]
        present = self.present(finite, environments)
        if self.aggregation.policy == "propagate":
            # Of a column rule on the device: the host would wait.
            whole = self.finite().to(self.device) if isinstance(self.rule, Weighting) else self._finite_columns()
            present = torch.where(whole, present, -1.0)
        exchange.send_rows(rows, present)
        weights = None
        if isinstance(self.rule, Weighting):
            exchange.form_gram()
            weights = weights_of_slices([exchange], step)
        by_presence = weights is None and self.aggregation.policy == "skip"
        exchange.apply_rule(
            update, step, exchange.processes.gathered(exchange.present) if by_presence else None, weights=weights
        )
        _, skipped = complete([exchange], step)
        self.zero()
        return update, torch.empty(0, device=self.device), weights, skipped

    def _zeros(self) -> Tensor:
        return torch.zeros(self.layout.components, dtype=self.layout.dtype, device=self.device)

    def _columns(self, *, in_forms: bool = True) -> Iterator[tuple[slice, Tensor]]:
        """Slices of components, with all environments' gradients of them; on a GPU of all components, if they fit."""
        environments = sum(map(len, self._kept[0]))
        fit = 2 * environments <= self.most and not self._forms
        if environments == 0 or not fit or not is_asynchronous(self.device):
            yield from self._by_parameter(in_forms=in_forms)
            return
        if self._all is None:
            self._all = torch.cat([columns for _, columns in self._by_parameter()], 1)
            self._kept = [[part] for part in self._all.split([shape.numel() for shape in self.layout.shapes], 1)]
        yield slice(0, self.layout.components), self._all

    def _by_parameter(self, *, in_forms: bool = True) -> Iterator[tuple[slice, Tensor]]:
        """Slices of components of one parameter each, or of parts of one."""
        for index, start in enumerate(self.layout.offsets[:-1]):
            if self._kept[index]:
                columns = self._kept[index]
                yield (
                    slice(start, self.layout.offsets[index + 1]),
                    columns[0] if len(columns) == 1 else torch.cat(columns),
                )
            elif index in self._forms and in_forms:
                for part, block in columns_of(self._forms[index], self._groups):
                    yield slice(start + part.start, start + part.stop), block.to(self.layout.dtype)
            elif in_forms:  # the loss did not depend on it
                end = self.layout.offsets[index + 1]
                yield (
                    slice(start, end),
                    torch.zeros(self._groups, end - start, dtype=self.layout.dtype, device=self.device),
                )


def _block(columns: Tensor, block: slice) -> Tensor:
    return columns[:, block]
