"""Environments: draws depend only on seed, name and step, and invalid data are refused by name."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
import torch
from bitwise import bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from concord.environments import (
    BatchStream,
    Environment,
    Environments,
    ExampleSource,
    InMemory,
    Switching,
    from_dataset,
    from_folder,
    split_held_out,
)
from concord.environments.collection import generator_for, some_examples
from concord.environments.source import ConcatSource, joined
from concord.environments.summary import summarize
from concord.errors import InputError
from concord_jobs.synthetic.spirals import Spirals

claim = settings(max_examples=40, deadline=None)


def numbered(name: str, size: int) -> Environment:
    """An environment whose example i is the number i, so that batches show which examples they hold."""
    return Environment.of(name, np.arange(size, dtype=np.float32)[:, None], np.arange(size) * 10)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


# Batches

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@claim
@given(sizes, st.integers(1, 9), st.integers(0, 1000), st.data())
def test_a_batch_depends_on_seed_environment_and_step_alone(
    sizes: list[int], batch_size: int, seed: int, data: st.DataObject
) -> None:
    environments = [numbered(f"e{index}", size) for index, size in enumerate(sizes)]
    together = BatchStream(environments, batch_size, seed)
    from_start = [together.batch(step) for step in range(8)]
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    for process in set(owners):
        mine = [index for index, owner in enumerate(owners) if owner == process]
        alone = BatchStream([environments[index] for index in reversed(mine)], batch_size, seed)
        for step in data.draw(st.permutations(range(8))):  # any start, any order: as after a resume
            inputs, targets = alone.batch(step)
            bitwise(inputs.flip(0), from_start[step][0][mine])
            bitwise(targets.flip(0), from_start[step][1][mine])


@claim
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 5))
def test_every_example_comes_once_a_pass(size: int, batch_size: int, seed: int) -> None:
    stream = BatchStream([numbered("small", size), numbered("other", 5)], batch_size, seed)
    steps = -(-3 * size // batch_size)
    batches = [stream.batch(step) for step in range(steps)]
    for inputs, targets in batches:
        assert inputs.shape == (2, batch_size, 1)
        assert targets.shape == (2, batch_size)
        bitwise(inputs[..., 0] * 10, targets.float())
    drawn = torch.cat([targets[0] for _, targets in batches]) // 10
    for passes in range(len(drawn) // size):
        assert sorted(drawn[passes * size : (passes + 1) * size].tolist()) == list(range(size))


def test_passes_seeds_and_environments_have_orders_of_their_own() -> None:
    environments = [numbered("a", 100), numbered("b", 100)]
    stream, other = BatchStream(environments, 100, seed=1), BatchStream(environments, 100, seed=2)
    orders = [stream.batch(0)[1][0], stream.batch(1)[1][0], stream.batch(0)[1][1], other.batch(0)[1][0]]
    for one in range(4):
        assert sorted(orders[one].tolist()) == [10 * index for index in range(100)]
        for another in range(one):
            assert float((orders[one] == orders[another]).float().mean()) < 0.1


def switching(name: str, size: int, epochs: int) -> Environment:
    """Before, example i is the number -1 - i."""
    before = InMemory((-1 - torch.arange(size)[:, None].float(), -10 - 10 * torch.arange(size)))
    return Environment(name, Switching(before, numbered(name, size).source, epochs))


@claim
@given(sizes, st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.4]), st.data())
def test_a_switching_environment_gives_other_examples_from_an_epoch_on(
    counts: list[int], batch_size: int, each: int, epochs: int, held_out: float, data: st.DataObject
) -> None:
    """And the same places in the same order as it had without; so do the environments beside it."""
    counts = [size + 1 for size in counts]  # of one example none can be held out
    chosen = data.draw(st.sets(st.integers(0, len(counts) - 1), min_size=1))
    names = [f"e{index}" for index in range(len(counts))]
    plain = {name: numbered(name, size) for name, size in zip(names, counts, strict=True)}
    changed = plain | {names[at]: switching(names[at], counts[at], epochs) for at in chosen}

    def stream(environments: dict[str, Environment]) -> BatchStream:
        parts = Environments(lambda name: environments[name].source, names).split(names, held_out, seed=4)
        return BatchStream([part.training for part in parts], batch_size, seed=5, batches_each=each)

    found, expected = stream(changed), stream(plain)
    largest = max(len(split_held_out(plain[name], held_out, 4).training) for name in names)
    assert found.steps_per_epoch == math.ceil(math.ceil(largest / batch_size) / each)
    for step in data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)):
        (inputs, targets), (usual, _) = found.batch(step), expected.batch(step)
        for row in range(len(names)):
            own = slice(row * each, (row + 1) * each)
            before = step < epochs * found.steps_per_epoch and row in chosen
            bitwise(inputs[own], -1 - usual[own] if before else usual[own])
        bitwise(inputs[..., 0] * 10, targets.float())
    at = min(chosen)
    bitwise(changed[names[at]].take(slice(None))[0], plain[names[at]].inputs)


def test_what_is_switched_is_alike() -> None:
    before, after = numbered("a", 3).source, numbered("a", 4).source
    other: Any = InMemory({"x": torch.zeros(4)})
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: Switching(before, after, 1), "3 examples before and 4 after"),
        (lambda: Switching(before, before, 0), "epochs=0: must be at least 1"),
        (lambda: Switching(other, after, 1), "environment before: its examples are of x, but of inputs, targets"),
        (lambda: Switching(other.data, after, 1), "before=dict: must be an ExampleSource"),
    ]
    for made, said in wrong:
        with pytest.raises(InputError, match=said):
            made()
    digests = {summarize(switching("a", 3, 1), "train").digest}
    digests.add(summarize(Environment("a", Switching(before, before, 1)), "train").digest)
    assert len(digests) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 2), (3,), (4, 1, 2), (16,), (0,)])
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_of_every_width_keep_every_bit(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> None:
    width = max(math.prod(shape), 1)
    memory = torch.randint(0, 255, (8 * (7 * width + 1),), dtype=torch.uint8)
    memory = memory % 2 if dtype == torch.bool else memory  # any bits, so also NaN
    table = memory.view(dtype)[offset : offset + 6 * math.prod(shape)].view(6, *shape)
    stream = BatchStream([Environment("a", table, torch.arange(6))], 5, seed=2)
    inputs, targets = stream.batch(3)
    expected = table[targets[0]]
    assert inputs.shape == (1, 5, *shape)
    assert inputs.dtype == dtype
    assert inputs.reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8))


def test_drawing_batches_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    BatchStream([numbered("a", 9)], 4, seed=0).batch(5)
    bitwise(torch.rand(4), expected)


def test_parts_that_lie_one_after_the_other_are_joined_without_a_copy() -> None:
    whole = torch.randn(12, 3)
    parts = whole[2:].split([1, 4, 5])
    assert joined(parts).data_ptr() == parts[0].data_ptr()
    assert torch.equal(joined(parts), whole[2:])
    for others in (parts[::-1], parts[::2], [part.clone() for part in parts], [whole[::2], whole[1::2]]):
        assert torch.equal(joined(others), torch.cat(list(others)))


@pytest.mark.parametrize("fraction", [0.0, 0.3])
@pytest.mark.parametrize("sizes", [[6], [6, 6, 6], [2, 9, 4, 30]])
def test_environments_split_together_are_those_split_one_by_one(fraction: float, sizes: list[int]) -> None:
    environments = Environments.from_arrays({f"e{size}-{at}": numbered("", size).data for at, size in enumerate(sizes)})
    found = environments.split(environments.train, fraction, seed=3)
    for ours, theirs in zip(found, map(split_by_itself(environments, fraction), environments.train), strict=True):
        assert ours.training.name == theirs.training.name
        bitwise(ours.training.inputs, theirs.training.inputs)
        bitwise(ours.training.targets, theirs.training.targets)
        assert (ours.held_out is None) == (fraction == 0)
        if ours.held_out is not None and theirs.held_out is not None:
            bitwise(ours.held_out.inputs, theirs.held_out.inputs)
    for leaf in (0, 1):
        parts = [pair.training.data[leaf] for pair in found]
        assert joined(parts).data_ptr() == parts[0].data_ptr()


def split_by_itself(environments: Environments, fraction: float) -> Callable[[str], Any]:
    return lambda name: split_held_out(environments[name], fraction, seed=3)


class Counting(ExampleSource):
    """Examples that are made when they are asked for; it notes how many at most at once."""

    def __init__(self, size: int = 5, most: list[int] | None = None) -> None:
        self.size, self.most = size, [0] if most is None else most

    def __len__(self) -> int:
        return self.size

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Any:
        found = torch.arange(float(self.size))[examples]
        self.most[0] = max(self.most[0], found.numel())
        return {"number": found, "square": found[..., None] ** 2}


def test_examples_of_different_shapes_do_not_go_into_one_step() -> None:
    sources = [InMemory((torch.zeros(4, width), torch.zeros(4))) for width in (5, 7)]
    with pytest.raises(
        InputError, match=r"a step's examples have different shapes, \(5,\) and \(7,\); pad them to one"
    ):
        ConcatSource(sources).take(slice(None))


def test_an_environment_takes_examples_of_any_source() -> None:
    environment = Environments(lambda _: Counting(), ["a"])["a"]
    assert len(environment) == 5
    assert environment.form == {"number": "() float32", "square": "(1,) float32"}
    bitwise(environment.take(slice(1, 3))["number"], torch.tensor([1.0, 2.0]))
    with pytest.raises(InputError, match="environment a: its examples come from a Counting; give them in memory"):
        _ = environment.inputs
    with pytest.raises(InputError, match="environment a: it holds number, square, not the inputs and targets"):
        _ = environment.targets


@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 20),
    st.sampled_from([0.0, 0.4]),
    st.booleans(),
)
def test_batches_of_what_is_read_are_those_of_the_same_in_memory(
    sizes: list[int], batch_size: int, step: int, fraction: float, mixed: bool
) -> None:
    most = [0]

    def stream(read: Callable[[int], bool]) -> Any:
        sources = {f"e{at}": Counting(size, most) for at, size in enumerate(sizes)}
        load = {name: each if read(at) else each.take(slice(None)) for at, (name, each) in enumerate(sources.items())}
        environments = Environments(load.__getitem__, list(load))
        most[0] = 0
        pairs = environments.split(environments.train, fraction, seed=3)
        batch = BatchStream([pair.training for pair in pairs], batch_size, seed=1).batch(step)
        held_out = [pair.held_out.take(slice(None)) for pair in pairs if pair.held_out is not None]
        return [batch, *held_out]

    expected = stream(lambda _: False)
    found = stream(lambda at: at == 0 or not mixed)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("number", "square"):
            bitwise(ours[name], theirs[name])
    largest = max(batch_size * len(sizes), 1 + max(round(fraction * size) for size in sizes))
    assert mixed or most[0] <= largest


def test_batch_size_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="batch_size=0"):
        BatchStream([numbered("a", 3)], 0, seed=0)


# The same in every process

ELSEWHERE = """
import hashlib, json
from concord_jobs.synthetic.spirals import Spirals
from concord.environments.collection import generator_for
import torch
digest = lambda tensor: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
torch.rand(7)
drawn = torch.rand(5, generator=generator_for(3, "é-site", "batches", 2)).tolist()
data = {name: digest(Spirals(seed=4).load(name)[0]) for name in ("ood", "train-031", "train-007")}
print(json.dumps({"drawn": drawn, "data": data}))
"""


def test_generators_and_generated_data_are_the_same_in_another_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    output = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True, env=environment
    )
    elsewhere = json.loads(output.stdout)
    assert elsewhere["drawn"] == torch.rand(5, generator=generator_for(3, "é-site", "batches", 2)).tolist()
    environments = Spirals(seed=4).as_environments()
    for name in ("train-007", "train-031", "ood"):  # another order, and others loaded in between
        assert elsewhere["data"][name] == digest(environments[name].inputs)
        environments["train-001"]


def test_generators_of_different_keys_differ() -> None:
    keys = [(0, "a", "x"), (1, "a", "x"), (0, "b", "x"), (0, "a", "y"), (0, "a", "x", 1), (0, "ax")]
    assert len({generator_for(*key).initial_seed() for key in keys}) == len(keys)


# Splits


@claim
@given(st.integers(2, 60), st.floats(0, 1, exclude_max=True), st.integers(0, 10))
def test_split_is_disjoint_covers_and_leaves_something_on_both_sides(size: int, fraction: float, seed: int) -> None:
    environment = numbered("site", size)
    training, held_out = split_held_out(environment, fraction, seed)
    if fraction == 0:
        assert held_out is None
        assert training is environment
        return
    assert held_out is not None
    assert training.name == held_out.name == "site"
    assert len(training) >= 1
    assert len(held_out) == min(max(round(fraction * size), 1), size - 1)
    together = training.targets.tolist() + held_out.targets.tolist()
    assert sorted(together) == environment.targets.tolist()
    for part in (training, held_out):
        bitwise(part.inputs[:, 0] * 10, part.targets.float())


def test_split_depends_on_seed_and_name_alone() -> None:
    def held(name: str, seed: int) -> list[int]:
        part = split_held_out(numbered(name, 200), 0.3, seed).held_out
        assert part is not None
        return part.targets.tolist()

    assert held("a", 0) == held("a", 0)
    assert held("a", 0) != held("b", 0)
    assert held("a", 0) != held("a", 1)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan")])
def test_held_out_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    with pytest.raises(InputError, match=f"fraction={fraction}"):
        split_held_out(numbered("a", 10), fraction, 0)


def test_one_example_cannot_be_split() -> None:
    with pytest.raises(InputError, match="environment a has one example"):
        split_held_out(numbered("a", 1), 0.5, 0)
    assert split_held_out(numbered("a", 1), 0.0, 0).held_out is None


# From arrays

PAIR = (np.zeros((4, 3), np.float32), np.zeros(4, np.int64))


def test_arrays_become_named_environments() -> None:
    environments = Environments.from_arrays(dict.fromkeys("abcd", PAIR), validation=["c"], test=["a"])
    assert environments.train == ("b", "d")
    assert environments.validation == ("c",)
    assert environments.test == ("a",)
    assert environments.names == ("b", "d", "c", "a")
    assert [environment.name for environment in environments.load(["d", "a"])] == ["d", "a"]
    assert len(environments["b"]) == 4


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros((2, 3)), torch.float32),
        (np.zeros((2, 3), np.longdouble), torch.float32),
        (np.zeros((2, 3), np.float32), torch.float32),
        (np.zeros((2, 3), np.float16), torch.float16),
        (np.zeros((2, 3), ">f4"), torch.float32),
        (np.zeros((2, 3), ">i4"), torch.int32),
        (np.zeros((2, 8, 8, 3), np.uint8), torch.uint8),
        (np.zeros((2, 3), np.uint16), torch.int64),
        (np.zeros((3, 2), np.float32).T, torch.float32),
        (np.zeros((4, 3), np.float32)[::-2], torch.float32),
        ([[1.0, 2.0], [3.0, 4.0]], torch.float32),
        (torch.zeros(2, 3, dtype=torch.float64), torch.float64),
    ],
)
def test_types_of_inputs(array: Any, dtype: torch.dtype) -> None:
    environment = Environment.of("a", array, [0, 1])
    assert environment.inputs.dtype == dtype
    assert tuple(environment.inputs.shape) == tuple(np.shape(array))
    assert environment.targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([1, 0], np.uint8), torch.int64),
        (np.array([True, False]), torch.int64),
        (np.array([0.5, 1.5]), torch.float32),
    ],
)
def test_types_of_targets(array: Any, dtype: torch.dtype) -> None:
    targets = Environment.of("a", np.zeros((2, 3)), array).targets
    assert targets.dtype == dtype
    assert targets.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (np.zeros((0, 3)), np.zeros(0), "it is empty"),
        (torch.tensor(1.0), np.zeros(1), "it is empty"),
        (np.zeros((4, 3)), np.zeros(3), "4 inputs and 3 targets"),
        (np.zeros((4, 3)), torch.tensor(3), "4 inputs and 0 targets"),
        (
            np.array([[1.0, np.nan]]),
            np.zeros(1),
            r"its inputs hold values that are not finite, 1 of 2: inputs\[0, 1\] is nan",
        ),
        (
            np.array([[1.0, 2.0]]),
            np.array([np.inf]),
            r"its targets hold values that are not finite, 1 of 1: targets\[0\] is inf",
        ),
        (np.array([["a", "b"]]), np.zeros(1), "its inputs are of type <U1"),
        (np.zeros((1, 2)), np.array([None]), "its targets are of type object"),
        (np.zeros((1, 2), np.complex64), np.zeros(1), "its inputs are of type complex64"),
        ([[1.0, 2.0], [3.0]], [0, 1], "its inputs cannot become an array"),
    ],
)
def test_data_that_cannot_be_used_are_refused_by_name(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"environment clinic: .*{message}"):
        Environments.from_arrays({"fine": (np.zeros((1, 2)), np.zeros(1)), "clinic": (inputs, targets)})


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((np.zeros((4, 2), np.float32), PAIR[1]), r"environment b: .*inputs is \(2,\) float32, but \(3,\) float32 in"),
        ((PAIR[0].astype(np.uint8), PAIR[1]), r"environment b: .*inputs is \(3,\) uint8, but \(3,\) float32 in .* a"),
        ((PAIR[0], np.zeros(4)), r"environment b: .*targets is \(\) float32, but \(\) int64 in environment a"),
        ((PAIR[0], np.zeros((4, 2), int)), r"environment b: .*targets is \(2,\) int64, but \(\) int64"),
    ],
)
def test_environments_that_differ_in_shape_or_type_are_refused(pair: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Environments.from_arrays({"a": PAIR, "b": pair})
    with pytest.raises(InputError, match=message):
        Environments(lambda name: PAIR if name == "a" else pair, ["a", "b"]).load(["a", "b"])


def test_names_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(InputError, match="environment c: there is none of this name; there are a, b"):
        Environments.from_arrays({"a": PAIR, "b": PAIR}, test=["c"])
    with pytest.raises(InputError, match=r"^validation=b: is also in test; an environment has one purpose"):
        Environments.from_arrays({"a": PAIR, "b": PAIR}, validation=["b"], test=["b"])
    with pytest.raises(InputError, match="environment b: is named twice"):
        Environments(lambda _: PAIR, ["a"], validation=["b"], test=["b"])
    with pytest.raises(InputError, match="no training environment"):
        Environments.from_arrays({"a": PAIR}, test=["a"])
    with pytest.raises(InputError, match="environment z: there is none"):
        Environments.from_arrays({"a": PAIR})["z"]


def test_data_are_made_only_when_asked_for() -> None:
    asked = []

    def load(name: str) -> tuple[Any, Any]:
        asked.append(name)
        return PAIR

    environments = Environments(load, ["a", "b"], test=["c"])
    assert asked == []
    environments.load(["b"])
    assert asked == ["b"]


# Examples of any form


def sentences(size: int, length: int = 3) -> dict[str, Any]:
    return {"tokens": {"ids": torch.arange(size * length).view(size, length)}, "labels": np.arange(size) % 2}


def test_a_tree_is_drawn_split_and_given_as_the_pair_of_the_same_examples() -> None:
    pairs = [numbered("small", 5), numbered("other", 9)]
    trees = [Environment.of(e.name, {"x": e.inputs, "more": (e.targets,)}) for e in pairs]
    # The same names in another order are the same form.
    trees[1] = Environment("other", {"more": (pairs[1].targets,), "x": pairs[1].inputs})
    stream, of_pairs = BatchStream(trees, 4, seed=3), BatchStream(pairs, 4, seed=3)
    for step in range(7):
        batch, (inputs, targets) = stream.batch(step), of_pairs.batch(step)
        assert list(batch) == ["x", "more"]
        bitwise(batch["x"], inputs)
        bitwise(batch["more"][0], targets)
    for tree, pair in zip(trees, pairs, strict=True):
        for ours, theirs in zip(split_held_out(tree, 0.3, seed=1), split_held_out(pair, 0.3, seed=1), strict=True):
            assert ours is not None
            assert theirs is not None
            assert len(ours) == len(theirs)
            bitwise(ours.data["x"], theirs.inputs)


def test_environments_of_trees_come_from_arrays_or_a_function() -> None:
    given = {"a": sentences(4), "b": sentences(6)}
    for environments in (Environments.from_arrays(given, test=["b"]), Environments(given.get, ["a"], test=["b"])):
        first, second = environments.load("ab")
        assert (len(first), len(second)) == (4, 6)
        assert second.data["labels"].tolist() == [0, 1, 0, 1, 0, 1]
        bitwise(first.data["tokens"]["ids"], given["a"]["tokens"]["ids"])
    alone = Environment.of("alone", torch.arange(3.0))  # a tensor is also a tree
    bitwise(BatchStream([alone], 3, seed=0).batch(0).sort().values, torch.arange(3.0)[None])


def test_what_a_tokenizer_gives_is_taken() -> None:
    from collections import UserDict

    given: Any = UserDict(input_ids=torch.zeros(2, 3, dtype=torch.long), labels=torch.zeros(2))
    assert set(Environment.of("a", given).data) == {"input_ids", "labels"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"tokens": torch.zeros(4, 2), "labels": torch.zeros(3)},
            r"environment b: tokens \(4, 2\), labels \(3,\); all must begin with the same number of examples",
        ),
        ({"tokens": torch.zeros(4, 2), "labels": torch.tensor(1)}, r"environment b: tokens \(4, 2\), labels \(\); all"),
        ({"tokens": [[1, 2], [3, 4]]}, r"environment b: tokens\.0\.0 is of type int; expected a tensor"),
        ({"tokens": torch.zeros(2, 2), "text": "no"}, "environment b: text is of type str; expected a tensor"),
        ({"tokens": np.array(["no"])}, "environment b: its tokens are of type <U2"),
        ({}, "environment b: it is empty"),
        ({"tokens": torch.zeros(0, 2)}, "environment b: it is empty"),
        (
            {"labels": torch.zeros(4)},
            "environment b: its examples are of labels, but of tokens.ids, labels in environment a",
        ),
        (
            (torch.zeros(4), torch.zeros(4)),
            "environment b: its examples are of inputs, targets, but of tokens.ids, labels",
        ),
        (
            sentences(4, 2),
            r"environment b: one example of its tokens\.ids is \(2,\) int64, but \(3,\) int64 in environment a",
        ),
    ],
)
def test_trees_that_do_not_fit_are_refused_by_leaf(tree: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Environments.from_arrays({"a": sentences(4), "b": tree})
    assert "\n" not in str(caught.value)


def test_only_pairs_have_inputs_and_targets() -> None:
    with pytest.raises(InputError, match=r"environment a: it holds tokens\.ids, labels, not the inputs and targets"):
        _ = Environment.of("a", sentences(2)).targets


# From a folder


@pytest.fixture(autouse=True)
def no_numpy_or_torch_warnings() -> Any:
    """A user who reads a folder should not be told about arrays that are not writable."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def write_npz(path: Path, seed: int = 0, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs, targets = generator.normal(size=(5, 3)), generator.integers(0, 2, 5)
    np.savez(path, **{"inputs": inputs, "targets": targets, **more})
    return inputs.astype(np.float32), targets


def test_npz_files_become_environments(tmp_path: Path) -> None:
    written = {name: write_npz(tmp_path / f"{name}.npz", seed) for seed, name in enumerate(["b", "a.2019", "c"])}
    (tmp_path / "notes.txt").write_text("not data")
    with pytest.warns(UserWarning, match=r"other files: 1, such as notes.txt; they are left out, since .* \.npz"):
        environments = from_folder(tmp_path, test=["c"])
    assert environments.train == ("a.2019", "b")
    assert environments.test == ("c",)
    for name, (inputs, targets) in written.items():
        assert environments[name].inputs.dtype == torch.float32
        assert environments[name].inputs.tolist() == inputs.tolist()
        assert environments[name].targets.tolist() == targets.tolist()


def test_a_folders_version_changes_with_its_files(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_npz(tmp_path / f"{name}.npz", seed)
    before = from_folder(tmp_path).version
    assert before is not None
    assert from_folder(tmp_path, test=["b"]).version == before
    size = (tmp_path / "b.npz").stat().st_size
    write_npz(tmp_path / "b.npz", 7)
    assert (tmp_path / "b.npz").stat().st_size == size
    changed = from_folder(tmp_path).version
    (tmp_path / "b.npz").rename(tmp_path / "c.npz")
    assert len({before, changed, from_folder(tmp_path).version}) == 3


def test_arrays_of_an_npz_file_go_by_the_names_given(tmp_path: Path) -> None:
    images = np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2)
    write_npz(tmp_path / "a.npz", images=images, digit=np.arange(5), width=np.ones(5), height=np.zeros(5))
    environment = from_folder(tmp_path, inputs="images", targets="digit")["a"]
    assert environment.inputs.dtype == torch.uint8
    assert environment.inputs.tolist() == images.tolist()
    assert environment.targets.tolist() == [0, 1, 2, 3, 4]
    assert from_folder(tmp_path, inputs=["width", "height"])["a"].inputs.tolist() == [[1.0, 0.0]] * 5


TABLE = {"age": [1.0, 2.0, 3.0], "dose": [4, 5, 6], "targets": [0, 1, 1]}


def column_types() -> dict[str, tuple[pa.Array, list[Any]]]:
    lists = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    return {
        "numbers": (pa.array([1.0, 2.0, 3.0], pa.float32()), [1.0, 2.0, 3.0]),
        "lists": (pa.array(lists, pa.list_(pa.float32())), lists),
        "large lists": (pa.array(lists, pa.large_list(pa.float64())), lists),
        "fixed lists": (pa.array(lists, pa.list_(pa.float32(), 2)), lists),
        "sliced lists": (pa.array([[9.0], *lists], pa.list_(pa.float32())).slice(1), lists),
        "booleans": (pa.array([True, False, True]), [True, False, True]),
        "bytes": (pa.array([[1, 2], [3, 4], [5, 255]], pa.list_(pa.uint8())), [[1, 2], [3, 4], [5, 255]]),
    }


@pytest.mark.parametrize("kind", column_types())
def test_parquet_column_becomes_the_inputs(kind: str, tmp_path: Path) -> None:
    column, expected = column_types()[kind]
    table = pa.table({"inputs": column, "targets": pa.array([0, 1, 1], pa.int64())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)  # so that it is read in several chunks
    environment = from_folder(tmp_path)["a"]
    assert environment.inputs.tolist() == expected
    assert environment.targets.tolist() == [0, 1, 1]
    environment.inputs[0] = 0  # the memory is ours


def test_parquet_columns_become_features_in_the_order_given(tmp_path: Path) -> None:
    pq.write_table(pa.table(TABLE), tmp_path / "a.parquet")
    assert from_folder(tmp_path)["a"].inputs.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert from_folder(tmp_path, inputs=["dose", "age"])["a"].inputs.tolist() == [[4, 1], [5, 2], [6, 3]]
    assert from_folder(tmp_path, inputs=["dose"])["a"].inputs.tolist() == [[4], [5], [6]]
    assert from_folder(tmp_path, inputs="age", targets="dose")["a"].targets.tolist() == [4, 5, 6]


def test_the_index_of_a_frame_is_no_input(tmp_path: Path) -> None:
    frame = pd.DataFrame({"site": list("abab"), "x": [1.0, 2.0, 3.0, 4.0], "targets": [0, 1, 1, 0]})
    for site in "ab":
        frame[frame.site == site].drop(columns="site").to_parquet(tmp_path / f"{site}.parquet")
    assert from_folder(tmp_path)["b"].inputs.tolist() == [[2.0], [4.0]]


def parquet(**columns: Any) -> Callable[[Path], None]:
    return lambda folder: pq.write_table(pa.table({**TABLE, **columns}), folder / "site.parquet")


def npz(**arrays: Any) -> Callable[[Path], None]:
    return lambda folder: write_npz(folder / "site.npz", **arrays) and None


def truncated(suffix: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (npz() if suffix == "npz" else parquet())(folder)
        path = folder / f"site.{suffix}"
        path.write_bytes(path.read_bytes()[:-60])

    return write


def text(suffix: str, content: bytes = b"this is no data\n") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / f"site.{suffix}").write_bytes(content)

    return write


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (text("npz"), {}, r"site\.npz cannot be read \(it is text, and a CSV file's name ends with .csv\)"),
        (text("npz", b""), {}, r"site\.npz cannot be read \(it is empty\)"),
        (text("parquet"), {}, r"site\.parquet cannot be read \(it is text, and"),
        (text("parquet", b""), {}, r"site\.parquet cannot be read \(it is empty\)"),
        (text("npz", b"<html>"), {}, r"site\.npz cannot be read \(it is a web page\)"),
        (text("parquet", b"\x93NUMPY\1\0"), {}, r"site\.parquet cannot be read \(it is an array of numpy.save\)"),
        (text("parquet", b"\0\1\2\3"), {}, r"site\.parquet cannot be read \(it is no \.parquet file by its"),
        (truncated("npz"), {}, r"site\.npz cannot be read \(is not an \.npz file, or not a whole one\)"),
        (truncated("parquet"), {}, r"site\.parquet cannot be read"),
        (npz(inputs=np.array([{}, 1], dtype=object)), {}, r"site\.npz cannot be read"),
        (npz(), {"inputs": "images"}, r"site\.npz has no array images; it has inputs, targets"),
        (npz(), {"targets": "digit"}, r"site\.npz has no array digit"),
        (parquet(), {"inputs": ["age", "height"]}, r"site\.parquet has no column height; it has age, dose, targets"),
        (parquet(), {"targets": "digit"}, r"site\.parquet has no column digit"),
        (parquet(age=[1.0, None, 3.0]), {}, r"column age of .*site\.parquet has 1 missing values"),
        (parquet(age=[1.0, float("nan"), 3.0]), {}, r"are not finite, 1 of 6: inputs\[1, 0\] is nan"),
        (parquet(inputs=[[1.0], [1.0, 2.0], [3.0]]), {}, r"the lists in column inputs of .* differ in length"),
        (parquet(inputs=[[1.0], [None], [3.0]]), {}, r"are not finite, 1 of 3: inputs\[1, 0\] is nan"),
        (parquet(age=["x", "y", "z"]), {"inputs": "age"}, "its inputs are of type object"),
        (npz(inputs=np.full((5, 3), np.nan)), {}, r"are not finite, 15 of 15: inputs\[0, 0\] is nan"),
        (npz(inputs=np.zeros((4, 3))), {}, "4 inputs and 5 targets"),
        (npz(inputs=np.zeros((0, 3)), targets=np.zeros(0)), {}, "it is empty"),
        (parquet(age=pa.array([], pa.float32()), dose=pa.array([], pa.int64()), targets=pa.array([], pa.int64())), {},
         "it is empty"),
    ],
)  # fmt: skip
def test_file_that_cannot_be_used_is_refused_by_name(
    write: Callable[[Path], None], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    environments = from_folder(tmp_path, **options)
    with pytest.raises(InputError, match=f"environment site: .*{message}") as caught:
        environments["site"]
    assert "\n" not in str(caught.value)


def test_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data=.*nowhere: there is no such folder"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no \.npz or \.parquet file"):
        from_folder(tmp_path)
    write_npz(tmp_path / "a.npz")
    (tmp_path / "b.npz").symlink_to(tmp_path / "gone.npz")
    with pytest.raises(InputError, match=r"/b\.npz: is a link to .*/gone\.npz, which does not exist$"):
        from_folder(tmp_path)
    (tmp_path / "b.npz").unlink()
    with pytest.raises(InputError, match=r"a\.npz: there is no such folder"):
        from_folder(tmp_path / "a.npz")
    with pytest.raises(InputError, match="environment b: there is none of this name; there are a"):
        from_folder(tmp_path, test=["b"])
    pq.write_table(pa.table(TABLE), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"both a\.npz and a\.parquet"):
        from_folder(tmp_path)


def test_files_that_differ_in_shape_are_refused_when_loaded_together(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz")
    write_npz(tmp_path / "b.npz", inputs=np.zeros((5, 4)))
    with pytest.raises(InputError, match=r"environment b: .* \(4,\) float32, but \(3,\) float32 in environment a"):
        from_folder(tmp_path).load(["a", "b"])


# The synthetic memorization dataset (appendix B.2)

LARGE = Spirals(examples=40_000, test_examples=20_000, seed=5)


@pytest.fixture(scope="module")
def spirals() -> dict[str, tuple[Tensor, Tensor]]:
    return {name: LARGE.load(name) for name in ("train-000", "train-001", "ood")}


def undone(inputs: Tensor, revolutions: float) -> tuple[Tensor, Tensor]:
    """Radius and angle, after taking back the scaling to unit variance (found here by drawing from the formula)."""
    generator = np.random.default_rng(0)
    radius = generator.uniform(0.08, 1.0, 500_000)
    angle = 2 * np.pi * revolutions * radius
    noisy = radius + generator.uniform(-0.02, 0.02, radius.size)
    x = inputs[:, 0].double() * np.std(np.concatenate([noisy * np.cos(angle), -noisy * np.cos(angle)]))
    y = inputs[:, 1].double() * np.std(np.concatenate([noisy * np.sin(angle), -noisy * np.sin(angle)]))
    return torch.hypot(x, y), torch.atan2(y, x)


def test_paper_defaults() -> None:
    environments = Spirals().as_environments()
    assert len(environments.train) == 32
    assert environments.test == ("ood",)
    assert environments["train-000"].inputs.shape == (1280, 34)
    assert environments["ood"].inputs.shape == (2000, 34)
    assert environments["train-000"].targets.dtype == torch.int64


@pytest.mark.parametrize("name", ["train-000", "ood"])
def test_classes_are_balanced_and_coordinates_have_unit_variance(name: str, spirals: Any) -> None:
    inputs, targets = spirals[name]
    assert set(targets.tolist()) == {0, 1}
    assert abs(float(targets.float().mean()) - 0.5) < 4 * 0.5 / len(targets) ** 0.5
    assert_close(inputs[:, :2].mean(0), torch.zeros(2), rtol=0, atol=0.03)
    assert_close(inputs[:, :2].var(0), torch.ones(2), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", ["train-000", "train-001", "ood"])
def test_radius_is_uniform_from_008_to_1_with_noise_of_002(name: str, spirals: Any) -> None:
    radius, _ = undone(spirals[name][0], LARGE.revolutions)
    assert float(radius.min()) == pytest.approx(0.06, abs=0.005)
    assert float(radius.max()) == pytest.approx(1.02, abs=0.005)
    counts = torch.histc(radius.float(), bins=8, min=0.1, max=0.98)
    expected = len(radius) * 0.11 / 0.92
    assert bool(((counts - expected).abs() < 5 * expected**0.5).all())


@pytest.mark.parametrize("revolutions", [1.0, 3.0])
def test_an_oracle_of_the_spiral_makes_no_mistake_in_any_environment(revolutions: float) -> None:
    made = Spirals(revolutions=revolutions, examples=3000, test_examples=3000, validation_environments=1)
    for name in ("train-000", "validation-000", "ood"):
        inputs, targets = made.load(name)
        radius, angle = undone(inputs, revolutions)
        away = angle - 2 * torch.pi * revolutions * radius  # 0 on the spiral of class 1, π on that of class 0
        away = torch.atan2(away.sin(), away.cos())
        bitwise((away.abs() < torch.pi / 2).long(), targets)
        noise = torch.where(targets == 1, away.abs(), torch.pi - away.abs())
        assert float(noise.max()) == pytest.approx(2 * torch.pi * revolutions * 0.02, rel=0.1)


def test_shortcuts_are_one_vector_an_environment_and_its_negative(spirals: Any) -> None:
    vectors = []
    for name in ("train-000", "train-001"):
        inputs, targets = spirals[name]
        one, zero = inputs[targets == 1, 2:], inputs[targets == 0, 2:]
        bitwise(one, one[:1].expand_as(one))
        bitwise(zero, -one[:1].expand_as(zero))
        vectors.append(one[0])
    assert float((vectors[0] - vectors[1]).abs().min()) > 0


@pytest.mark.parametrize(("scale", "expected"), [(None, 0.1**0.5), (1.0, 1.0)])
def test_shortcuts_differ_between_environments_with_the_papers_variance(scale: Any, expected: float) -> None:
    made = Spirals(examples=1, environments=300, **({} if scale is None else {"shortcut_scale": scale}))
    vectors = []
    for name in made.as_environments().train:
        inputs, targets = made.load(name)
        vectors.append(inputs[0, 2:] * (2 * targets[0] - 1))
    stacked = torch.stack(vectors)  # 9,600 numbers: the deviation is known to 0.7 %
    assert float(stacked.std()) == pytest.approx(expected, rel=0.03)
    assert abs(float(stacked.mean())) < 4 * expected / 9600**0.5
    assert len({tuple(vector.tolist()) for vector in stacked}) == 300


def test_shortcuts_of_the_test_environment_say_nothing_of_the_class(spirals: Any) -> None:
    inputs, targets = spirals["ood"]
    shortcuts = inputs[:, 2:]
    assert_close(shortcuts.var(0), torch.full((32,), 0.1), rtol=0.06, atol=0)
    difference = shortcuts[targets == 1].mean(0) - shortcuts[targets == 0].mean(0)
    assert float(difference.abs().max()) < 4.5 * (0.1 * 4 / len(targets)) ** 0.5
    across = torch.corrcoef(shortcuts.T) - torch.eye(32)
    assert float(across.abs().max()) < 5 / len(targets) ** 0.5


def test_seed_and_name_choose_the_data() -> None:
    digests = {digest(Spirals(seed=seed).load(name)[0]) for seed in (0, 1) for name in ("train-000", "train-001")}
    assert len(digests) == 4
    more = Spirals(environments=64).load("train-001")[0]
    bitwise(more, Spirals(environments=2).load("train-001")[0])  # what others there are does not matter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environments": 0}, "--environments 0: must"),
        ({"examples": 0}, "--examples 0: must"),
        ({"test_examples": -1}, "--test-examples -1: must"),
        ({"shortcut_dimensions": -1}, "--shortcut-dimensions -1: must"),
        ({"validation_environments": -2}, "--validation-environments -2: must"),
        ({"shortcut_scale": -0.5}, "--shortcut-scale -0.5: must"),
        ({"radius_noise": -0.1}, "--radius-noise -0.1: must"),
        ({"smallest_radius": 1.5}, "--smallest-radius 1.5: must"),
        ({"smallest_radius": -0.1}, "--smallest-radius -0.1: must"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Spirals(**options)


def test_some_examples_are_drawn_from_all_and_keep_their_order() -> None:
    """Examples may be sorted by class."""
    ordered = Environment("a", torch.arange(1000.0)[:, None], torch.arange(1000) // 500)
    inputs, targets = some_examples(ordered, 32, 0, "consistency")
    assert len(targets.unique()) == 2
    assert torch.equal(inputs, inputs.sort(0).values)
    assert torch.equal(inputs, some_examples(ordered, 32, 0, "consistency")[0])
    assert not torch.equal(inputs, some_examples(ordered, 32, 1, "consistency")[0])
    assert len(some_examples(ordered, 2000, 0, "consistency")[1]) == 1000


_VALUES = np.arange(6, dtype=np.float32).reshape(3, 2)
_HOLES = np.ma.masked_equal(_VALUES, 3)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (_HOLES, "are a masked array with 1 masked values, which have no number; give values.filled"),
        (list(_HOLES), "are a masked array with 1 masked values"),
        (torch.tensor(_VALUES).to_sparse(), "are a sparse_coo tensor; give a dense one, such as values.to_dense()"),
        (torch.tensor(_VALUES).to_sparse_csc(), "are a sparse_csc tensor"),
        (torch.nested.nested_tensor([torch.ones(2)] * 3, layout=torch.jagged), "are a nested tensor"),
        (torch.tensor(_VALUES).cfloat(), "are of type complex64; expected real numbers"),
        (scipy.sparse.csr_matrix(_VALUES), "are a sparse csr_matrix of SciPy; give values.toarray()"),
        (scipy.sparse.coo_array(_VALUES), "are a sparse coo_array of SciPy"),
    ],
)
def test_arrays_without_a_number_in_each_place_are_refused_by_name(inputs: Any, reason: str) -> None:
    for pair in ((inputs, np.zeros(3)), (np.zeros((3, 2)), inputs)):
        with pytest.raises(InputError, match=f"environment a: its (inputs|targets) {re.escape(reason)}"):
            Environment.of("a", *pair)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.tensor(_VALUES, requires_grad=True),
        torch.nn.Parameter(torch.tensor(_VALUES)),
        list(torch.tensor(_VALUES, requires_grad=True)),
        np.ma.array(_VALUES),
        pd.DataFrame(_VALUES).astype(pd.SparseDtype("float32")),
    ],
)
def test_gradients_and_masks_without_a_masked_value_leave_the_numbers(inputs: Any) -> None:
    found = Environment.of("a", inputs, np.zeros(3)).inputs
    assert torch.equal(found, torch.tensor(_VALUES))
    assert not found.requires_grad


def test_an_example_of_a_dataset_is_numbers_too() -> None:
    groups, targets = list("aabb"), [0, 1, 0, 1]
    whole = torch.arange(8.0).view(4, 2)
    found = from_dataset(list(zip(whole.clone().requires_grad_(), targets, strict=True)), groups)
    inputs, _ = found["a"].take(slice(None))
    assert torch.equal(inputs, whole[:2])
    assert not inputs.requires_grad
    holes = list(zip(np.ma.masked_equal(whole.numpy(), 3), targets, strict=True))
    with pytest.raises(InputError, match="environment a: example 1 is a masked array with 1 masked values"):
        from_dataset(holes, groups)["a"].take(slice(None))
    with pytest.raises(InputError, match="targets=MaskedArray: is a masked array"):
        from_dataset(holes, groups, targets=np.ma.masked_equal(targets, 1))


def test_environments_are_a_collection_of_names() -> None:
    found = Environments.from_arrays({name: (np.ones((2, 1)), np.zeros(2)) for name in "abc"}, test="b")
    assert (list(found), len(found), found.test) == (["a", "c", "b"], 3, ("b",))
    assert "b" in found
    assert "d" not in found


@pytest.mark.parametrize("argument", ["train", "validation", "test", "monitored"])
@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("abc", "=abc: must be a list of names"),
        (None, "=None: must be a list of names"),
        (5, "=5: must be a list of names"),
        ([1, 2], "=1: must be a list of names"),
        (np.array([1.5]), "=1.5: must be a list of names"),
        (["b", None], "=None: must be a list of names"),
        (["b", float("nan")], "=nan: must be a list of names"),
        ([["b"]], r"=\['b'\]: must be a list of names"),
        (["b", " "], "=' ': must be a list of names"),
        (["b", "b"], "environment b: is named twice"),
        (["caf\udce9"], r"environment caf\\udce9: its name is not UTF-8; rename it"),
    ],
)
def test_what_does_not_name_environments_is_refused_in_one_line(argument: str, given: Any, line: str) -> None:
    with pytest.raises(InputError, match=line):
        Environments(lambda _: (np.ones((2, 1)), np.zeros(2)), **{"train": ["a"], argument: given})


@pytest.mark.parametrize(
    "given",
    [["b", "a"], ("b", "a"), {"b": 1, "a": 2}, {"b": 1, "a": 2}.keys(), iter("ba"), np.array(["b", "a"])],
)
def test_names_in_any_ordered_form_keep_their_order(given: Any) -> None:
    assert Environments(lambda _: None, given).train == ("b", "a")


def test_names_in_a_set_have_one_order_in_every_process() -> None:
    names = {f"site {number}" for number in range(9)}
    assert Environments(lambda _: None, names).train == tuple(sorted(names))


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        (None, "arrays=None: must be a list of names"),
        ({1: (np.ones((2, 1)), np.zeros(2))}, "arrays=1: must be"),
    ],
)
def test_arrays_without_names_are_refused_in_one_line(arrays: Any, line: str) -> None:
    with pytest.raises(InputError, match=line):
        Environments.from_arrays(arrays)
