"""Batches that depend only on the seed, the environment and the step."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from concord.environments.collection import Environment, generator_for
from concord.environments.readers import StepReader
from concord.environments.source import InMemory, Switching, end_to_end
from concord.environments.tree import Tree
from concord.errors import ArgumentError


def names_of_batches(names: Sequence[str], batches_each: int) -> list[str]:
    """``NAME, batch N`` for each of an environment's batches of a step, or its name if it has one."""
    if batches_each == 1:
        return list(names)
    return [f"{name}, batch {number}" for name in names for number in range(1, batches_each + 1)]


# Of a small environment the orders of several passes are drawn at once: to prepare a generator takes longer than to
# draw a pass of a hundred examples, which was two fifths of a step with a hundred such environments.
_PLACES_AT_ONCE = 512


class BatchStream:
    """A batch of every environment at every step, or of some of them in turn.

    Environment e's examples are shuffled for each pass, by a generator that depends on (seed, e's name, pass) alone, or
    on the block of passes if e is small.
    Batch k takes positions k·B … (k+1)·B - 1 of the concatenated passes. So e's batch at step k depends on (seed, e, k)
    alone: not on the process that holds e, on other environments, or on where a run was resumed. Environments of
    different sizes have separate passes.

    With ``together`` below the number of environments, each round takes all of them once, in an order that depends on
    (seed, round), ``together`` and the number of environments alone; batch k is then e's batch in round k. A step that
    ends a round is filled by the next one, and has no environment twice.

    With ``batches_each`` above 1 a step has this number of consecutive batches of each environment, as if they were
    environments: the same batches as in that many steps.

    Args:
        environments: the environments of this process, alike in structure, shape and type. If they are
            contiguous in memory, as after :meth:`Environments.split`, they are not copied.
        batch_size: examples a batch, B.
        seed: of the run.
        device: the device of the batches; data in other memory are copied there once, sources that are not in memory
            batch by batch.
        part: the positions of every batch to take, if several processes share the batches; None: all.
        together: the number of environments of a step. None: all.
        batches_each: the number of batches of each.
        largest: examples of the largest environment of all processes; None: of these.
        readers: processes that read ahead what is not in memory; with 0 this process reads at each step.
        epoch_steps: the least number of steps of an epoch.

    Attributes:
        steps_per_epoch: the steps of one pass over the largest environment, or of several if these are too few.

    Raises:
        InputError: the batch size or ``batches_each`` is not positive, or ``together`` does not fit.
    """

    def __init__(
        self,
        environments: Sequence[Environment],
        batch_size: int,
        seed: int,
        device: torch.device | str = "cpu",
        part: slice | None = None,
        together: int | None = None,
        batches_each: int = 1,
        largest: int | None = None,
        readers: int = 0,
        epoch_steps: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ArgumentError("batch_size", batch_size, "must be at least 1")
        if batches_each < 1:
            raise ArgumentError("batches_each", batches_each, "must be at least 1")
        self._together = len(environments) if together is None else together
        if not environments or not 1 <= self._together <= len(environments):
            raise ArgumentError("together", together, f"must lie in [1, {len(environments)}], up to all environments")
        self._batches_each = batches_each
        self._names = [environment.name for environment in environments]
        self._sizes = [len(environment) for environment in environments]
        self._batch_size = batch_size
        passes = -(-(largest or max(self._sizes)) // batch_size)
        rounds = max(-(-passes // batches_each), -(-epoch_steps * self._together // len(environments)))
        self.steps_per_epoch = -(-rounds * len(environments) // self._together)
        self._seed = seed
        self._part = part or slice(0, batch_size)
        self._device = torch.device(device)
        # All environments in one tensor a leaf, if they are in memory: a step is then one gather a leaf, not one for
        # each environment. Examples before a switch follow them.
        sources = [environment.source for environment in environments]
        switching = {index: source for index, source in enumerate(sources) if isinstance(source, Switching)}
        laid = [source.after if isinstance(source, Switching) else source for source in sources]
        self._examples = end_to_end([*laid, *(source.before for source in switching.values())], device)
        of = [*range(len(sources)), *switching]
        starts = list(itertools.accumulate((self._sizes[index] for index in of), initial=0))
        self._starts = starts[: len(sources)]
        self._before = {
            index: (source.epochs, start - self._starts[index])
            for (index, source), start in zip(switching.items(), starts[len(sources) : -1], strict=True)
        }
        self._rounds: dict[int, list[int]] = {}
        self._orders: dict[tuple[int, int], Tensor] = {}
        self._reader = StepReader(self._read, readers, self._device)

    def batch(self, step: int) -> Tree:
        """The batches of a step, a tree like the environments': each leaf ``(environments · batches, batch, ...)``."""
        if not isinstance(self._examples, InMemory):
            return self._reader.batch(step)
        epoch = step // self.steps_per_epoch
        places = torch.cat([self._places_in(epoch, each, k) for each, k in self._batches_of(step)])
        if self._device.type == "cuda":
            places = places.pin_memory().to(self._device, non_blocking=True)
        return self._examples.take(places.view(self._together * self._batches_each, -1))

    def close(self) -> None:
        """End the processes that read ahead."""
        self._reader.close()

    def _read(self, step: int) -> Tree:
        """The batches of a step, read with the randomness of each example."""
        epoch, batches = step // self.steps_per_epoch, self._batches_of(step)
        places = torch.stack([self._places_in(epoch, each, k) for each, k in batches])
        return self._examples.take(places, torch.stack([self._draw(each, k) for each, k in batches]))

    def _draw(self, index: int, batch: int) -> Tensor:
        """A random number for each example of this process's part of a batch."""
        generator = generator_for(self._seed, self._names[index], "draw", batch)
        return torch.randint(2**63 - 1, (self._batch_size,), generator=generator)[self._part]

    def _batches_of(self, step: int) -> list[tuple[int, int]]:
        """The environments of a step by index, each with the number of its batch."""
        each = range(self._batches_each)
        return [(index, rounds * self._batches_each + k) for index, rounds in self._chosen(step) for k in each]

    def names(self, step: int) -> list[str]:
        """The environments of a step, in the order of its batch."""
        return names_of_batches([self._names[index] for index, _ in self._chosen(step)], self._batches_each)

    def _chosen(self, step: int) -> list[tuple[int, int]]:
        """The environments of a step by index, each with its round."""
        count = len(self._names)
        if self._together == count:
            return [(index, step) for index in range(count)]
        places = (divmod(at, count) for at in range(step * self._together, (step + 1) * self._together))
        return [(self._order_of_round(rounds)[place], rounds) for rounds, place in places]

    def _order_of_round(self, asked: int) -> list[int]:
        """The order of the environments in a round, without those of the step in which it begins at its front."""
        count, together = len(self._names), self._together
        period = together // math.gcd(count, together)  # rounds, of which the first begins with a step
        first = asked
        while first % period and first not in self._rounds:
            first -= 1
        for rounds in range(first, asked + 1):
            if rounds in self._rounds:
                continue
            generator = generator_for(self._seed, "environments", rounds)
            order = torch.randperm(count, generator=generator).tolist()
            if begun := rounds * count % together:  # of its first step, by the round before
                before = {*self._rounds[rounds - 1][-begun:]}
                front = [index for index in order if index not in before][: together - begun]
                order = [*front, *(index for index in order if index not in front)]
            self._rounds[rounds] = order
            self._rounds.pop(rounds - 2, None)
        return self._rounds[asked]

    def _places_in(self, epoch: int, index: int, batch: int) -> Tensor:
        """The positions of this process's part of a batch, in this epoch."""
        places = self._places(index, batch)[self._part]
        epochs, shift = self._before.get(index, (0, 0))
        return places + shift if epoch < epochs else places

    def _places(self, index: int, batch: int) -> Tensor:
        size, first = self._sizes[index], batch * self._batch_size
        passes = max(_PLACES_AT_ONCE // size, 1)
        parts, wanted = [], self._batch_size
        while wanted > 0:
            block, offset = divmod(first, passes * size)
            part = self._order(index, passes, block)[offset : offset + wanted]
            parts.append(part)
            first, wanted = first + len(part), wanted - len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _order(self, index: int, passes: int, block: int) -> Tensor:
        """The indices of this environment's examples in a block of passes, each in an order of its own."""
        if (index, block) not in self._orders:
            self._orders.pop((index, block - 2), None)
            generator = generator_for(self._seed, self._names[index], "batches", block)
            size = self._sizes[index]
            if passes == 1:
                order = torch.randperm(size, generator=generator)
            else:
                order = torch.rand(passes, size, dtype=torch.float64, generator=generator).argsort(1).flatten()
            self._orders[index, block] = order + self._starts[index]
        return self._orders[index, block]
