"""One environment in each process, with a model sharded by FSDP2: an aggregator replaces the reduce-scatter.

``fully_shard`` passes a module's gradients on when its backward pass is done, laid out by the processes' slices. An
all-to-all gives every process its slice of all gradients, on which it applies the rule. The result is the gradient of
its shard, so there is no second phase of :mod:`~concord.gradients.exchange`. On a model of your own::

    fully_shard(model)
    aggregation = register_aggregation(model, AndMask(threshold=0.8))

A small all-reduce for each module has the kept components of each parameter, and which gradients are finite.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from concord.aggregation import ColumnRule, Weighting, sum_over_environments
from concord.aggregation.families import masks
from concord.aggregation.rule import accumulation_dtype
from concord.aggregation.weighting import name_of
from concord.errors import ArgumentError, InputError
from concord.gradients.exchange import Processes
from concord.gradients.finish import combine_in_blocks, finish_in_blocks, poison, rescale_layers
from concord.gradients.layout import Layers, Layout, trainable
from concord.gradients.nonfinite import NonFiniteGradientError, presence
from concord.gradients.step import Aggregation, AggregationOptions


class ShardedAggregation:
    """The result of :func:`register_aggregation`, for a model's modules."""

    def __init__(self, units: Sequence["_Unit"]) -> None:
        self._units = units

    @property
    def step(self) -> int:
        """The number of backward passes that were aggregated. A rule draws at random by it: set it after a restart."""
        return max(unit.step for unit in self._units)

    @step.setter
    def step(self, step: int) -> None:
        for unit in self._units:
            unit.step = step

    def kept_fraction(self, parameter: Tensor) -> Tensor:
        """The fraction of this parameter's components that the last backward pass kept, a float32 number in [0, 1].

        Raises:
            KeyError: the parameter was in no backward pass.
            InputError: the rule lets whole gradients through.
        """
        rule = self._units[0].aggregation.rule
        if not masks(rule):
            raise InputError(f"rule {name_of(rule)}: drops no components; there is no kept fraction")
        for unit in self._units:
            for each, fraction in zip(unit.parameters, unit.kept, strict=False):
                if each.sharded_param is parameter:
                    return fraction
        raise KeyError("the parameter was in no backward pass")


def register_aggregation(
    model: nn.Module, rule: Any, *, environment: str | None = None, **options: Unpack[AggregationOptions]
) -> ShardedAggregation:
    """Aggregate the gradients of a model under ``fully_shard`` with ``rule``, every process being one environment.

    Call it in every process, after ``fully_shard`` and before the first backward pass. Backward then adds the
    aggregated gradient's shard to each parameter's ``grad``, so call ``zero_grad()``.

    Args:
        model: the root module of ``fully_shard``; it may be sharded in several modules.
        rule: a rule of sums, or a column rule.
        environment: this process's name in errors; ``rank N`` if None.
        options: see :class:`~concord.gradients.step.Aggregation`; ``skip`` and ``environment_momentum`` are refused.

    Raises:
        InputError: the model is not sharded, only in part, over one process alone, over several process groups or in a
            way that replicates shards; the rule, or an option, needs more than one module's gradients at a time. Later,
            in backward: a parameter was frozen or unfrozen.
    """
    aggregation = Aggregation(rule, **options)
    if isinstance(aggregation.rule, Weighting):
        raise InputError(
            f"rule {name_of(aggregation.rule)}: needs inner products of whole gradients, of which a sharded model has "
            "one module's at a time; it runs with StackedGradients, HookedGradients and register_aggregation_hook"
        )
    if aggregation.nonfinite == "skip":
        problem = "a sharded module is aggregated before the others' gradients are known; give raise or propagate"
        raise ArgumentError("nonfinite", "skip", problem)
    if aggregation.environment_momentum > 0:
        problem = "no process of a sharded model keeps whole gradients; give 0"
        raise ArgumentError("environment_momentum", aggregation.environment_momentum, problem)
    if not hasattr(model, "_get_fsdp_state"):
        raise InputError(f"model {type(model).__name__}: is not sharded; call fully_shard(model) before")
    parameters = trainable(model)
    first = dict(zip(map(id, parameters.values()), Layout.of(parameters).offsets, strict=False))
    groups = {}
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state") and (of_module := module._get_fsdp_state()._fsdp_param_groups):
            _check(name or "model", of_module, aggregation)
            groups[module] = of_module[0]
    sharded = {id(each.sharded_param) for group in groups.values() for each in group.fsdp_params}
    for name, parameter in parameters.items():
        if id(parameter) not in sharded:
            raise InputError(
                f"parameter {name}: is not sharded, so each process would keep its own gradient; freeze it"
            )
    units = []
    for module, group in groups.items():
        units.append(_Unit(aggregation, group, first, environment))
        module.set_custom_reduce_scatter(units[-1])
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True, recurse=False)
    return ShardedAggregation(units)


def _check(name: str, groups: Sequence[Any], aggregation: Aggregation) -> None:
    if len(groups) > 1:
        raise InputError(f"module {name}: its parameters are sharded over {len(groups)} meshes; give it one mesh")
    mesh = groups[0].mesh_info.mesh
    if mesh.ndim > 1:
        raise InputError(
            f"module {name}: hybrid sharding replicates its shards; give fully_shard a mesh of one dimension"
        )
    if mesh.size() == 1:
        raise InputError(f"module {name}: is sharded over one process, which compares nothing; use StackedGradients")
    moved = any(each.fsdp_placement.dim != 0 for each in groups[0].fsdp_params)
    if moved and len(getattr(aggregation.rule, "draws", ())) > 0:
        raise InputError(
            f"module {name}: {name_of(aggregation.rule)} draws at random, and needs sharding in dimension 0"
        )


class _Unit:
    """The all-to-all and the rule in place of one module's reduce-scatter."""

    def __init__(self, aggregation: Aggregation, group: Any, first: dict[int, int], environment: str | None) -> None:
        mesh = group.mesh_info.mesh
        self.aggregation = aggregation
        self.parameters = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
        self.processes = Processes.of([environment or f"rank {mesh.get_local_rank()}"], mesh.get_group())
        self.kept: Sequence[Tensor] = ()
        self.step = 0
        count, rank = len(self.processes.names), self.processes.rank
        sizes, numbers = [], []
        for each in self.parameters:  # its shard, and what fills it up to the size of the others
            padded = each.padded_sharded_param_size.numel()
            own = each.sharded_size.numel()
            start = first[id(each.sharded_param)] + rank * padded
            sizes += [own, padded - own]
            numbers += [start, start]
        self._layers = Layers(tuple(sizes), tuple(numbers))
        self._components = torch.tensor(
            [each._orig_size.numel() for each in self.parameters], dtype=torch.float32, device="cpu"
        )
        self._names = [name for names in self.processes.names for name in names]
        self._count = count

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory of a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any) -> None:
        """Receive this process's slice of all gradients, and put the update of it into ``output_tensor``."""
        rule: Any = self.aggregation.rule
        if len(output_tensor) != sum(self._layers.sizes):
            names = "a parameter was frozen or unfrozen since register_aggregation; call it anew after such a change"
            raise InputError(names)
        rows = torch.empty(self._count, len(output_tensor), dtype=input_tensor.dtype, device=input_tensor.device)
        present = presence(input_tensor)
        dist.all_to_all_single(rows.view(-1), input_tensor, group=group)
        scale, wide = self.aggregation.scale(rows.device), accumulation_dtype([rows.dtype])
        step, self.step = self.step, self.step + 1

        def gradients(block: slice) -> Tensor:
            given = rows[:, block].to(wide)
            return given if scale is None else given / scale

        kept = torch.zeros(2 * len(self.parameters), device=rows.device)
        if isinstance(rule, ColumnRule):
            combine_in_blocks(rule, gradients, output_tensor)
        else:
            kept = finish_in_blocks(
                rule,
                lambda block: sum_over_environments(rule, gradients(block)),
                output_tensor,
                self._layers,
                0,
                self._count,
                step,
            )
        if scale is not None:
            output_tensor.mul_(scale)
        absent = torch.zeros(self._count, device=rows.device)
        absent[self.processes.rank] = (present < 0).float()[0]
        report = torch.cat([kept[::2], absent])
        dist.all_reduce(report, group=group)
        absent = report[len(self.parameters) :]
        if self.aggregation.policy == "raise":
            if bool(absent.any()):
                bad = [name for name, is_absent in zip(self._names, absent.tolist(), strict=True) if is_absent]
                raise NonFiniteGradientError(bad, step)
        else:
            poison(output_tensor, torch.where(absent.any(), torch.inf, 0.0))
        if not isinstance(rule, ColumnRule):
            fractions = report[: len(self.parameters)] / self._components.to(rows.device)
            self.kept = fractions.unbind()
            if self.aggregation.rescale:
                filled = torch.stack([fractions, torch.ones_like(fractions)], 1).flatten()
                rescale_layers(output_tensor, self._layers, filled)
