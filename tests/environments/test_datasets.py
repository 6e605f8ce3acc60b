"""Any dataset with a group for each example: batches depend only on seed, environment and step."""

import random
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from bitwise import bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from concord.environments import BatchStream, Environments, ExampleSource, from_dataset
from concord.environments.summary import summarize
from concord.errors import ArgumentError, InputError


class Noisy(Dataset[Any]):
    """Examples that are drawn anew whenever they are read, by each kind of random numbers."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        self.read += 1
        drawn = [float(torch.rand(())), float(np.random.rand()), random.random(), float(place)]
        return torch.tensor(drawn), place % 3


def noisy(sizes: list[int], **options: Any) -> Environments:
    groups = [f"e{number}" for number, size in enumerate(sizes) for _ in range(size)]
    return from_dataset(Noisy(sum(sizes)), groups, **options)


def stream(environments: Environments, batch_size: int, **options: Any) -> BatchStream:
    pairs = environments.split(environments.train, 0.0, seed=3)
    return BatchStream([pair.training for pair in pairs], batch_size, seed=1, **options)


@settings(max_examples=5, deadline=None)  # each starts processes
@given(
    st.lists(st.integers(2, 9), min_size=2, max_size=3),
    st.integers(1, 12),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sampled_from([1, 4]),
)
def test_batches_are_the_same_with_any_number_of_readers(
    sizes: list[int], batch_size: int, starts: list[int], readers: int
) -> None:
    steps = [start + more for start in starts for more in range(3)]  # a run that is resumed begins anywhere
    expected = stream(noisy(sizes), batch_size)
    ahead = stream(noisy(sizes), batch_size, readers=readers)
    for step in steps:
        bitwise(ahead.batch(step), expected.batch(step))
    ahead.close()


@given(st.integers(2, 9), st.integers(2, 12), st.integers(0, 9), st.data())
def test_an_environments_batch_depends_on_no_other_process_or_environment(
    size: int, batch_size: int, step: int, data: st.DataObject
) -> None:
    whole = stream(noisy([size, 4]), batch_size).batch(step)
    cut = data.draw(st.integers(1, batch_size - 1))
    parts = [
        stream(noisy([size, 4]), batch_size, part=part).batch(step) for part in (slice(cut), slice(cut, batch_size))
    ]
    bitwise([torch.cat(each, 1) for each in zip(*parts, strict=True)], list(whole))
    bitwise(stream(noisy([size, 7]), batch_size).batch(step)[0][0], whole[0][0])


def test_each_step_draws_anew_and_evaluation_draws_the_same() -> None:
    environments = noisy([3, 3], test=[], train_transform=lambda example: (example[0] + 10, example[1]))
    first, again = (stream(environments, 3).batch(step)[0][0] for step in (0, 1))
    order = first[:, 3].argsort(), again[:, 3].argsort()
    columns = zip(first[order[0], :3].T, again[order[1], :3].T, strict=True)  # PyTorch's, NumPy's, Python's numbers
    assert not any(torch.isin(*pair).any() for pair in columns)
    assert first.min() >= 10
    evaluated = environments["e0"].take(slice(None))[0]
    assert evaluated[:, :3].max() < 1
    bitwise(environments["e0"].take(torch.tensor([2, 0]))[0], evaluated[[2, 0]])
    assert summarize(environments["e0"], "train") == summarize(environments["e0"], "train")


def test_reading_leaves_the_callers_random_numbers_alone() -> None:
    environments = noisy([4, 4])
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    expected = torch.rand(()), np.random.rand(), random.random()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    for readers in (0, 2):
        batches = stream(environments, 2, readers=readers)
        for step in range(3):
            batches.batch(step)
        batches.close()
    assert (torch.rand(()), np.random.rand(), random.random()) == expected


def test_targets_that_are_given_are_had_without_reading() -> None:
    dataset = Noisy(6)
    environments = from_dataset(dataset, list("aabbcc"), targets=[0, 1, 2, 0, 1, 2], test=["c"])
    read = {name: environments[name].targets.tolist() for name in environments.names}
    assert read == {"a": [0, 1], "b": [2, 0], "c": [1, 2]}
    assert dataset.read == 3  # the form of each environment
    without = from_dataset(Noisy(6), np.array([1, 1, 2, 2, 3, 3]))
    assert without["2"].targets.tolist() == [2, 0]
    pairs = environments.split(environments.train, 0.5, seed=0)
    assert [len(pair.training.targets) for pair in pairs] == [1, 1]


@pytest.fixture(scope="module")
def reviews() -> datasets.Dataset:
    pictures = [Image.fromarray(np.full((4, 4, 3), 10 * at, dtype=np.uint8)) for at in range(8)]
    columns = {"shop": list("aabbccdd"), "picture": pictures, "words": [[at, at + 1] for at in range(8)]}
    columns["stars"] = [0, 1] * 4
    features = {"shop": datasets.Value("string"), "picture": datasets.Image()}
    features |= {"words": datasets.List(datasets.Value("int32")), "stars": datasets.ClassLabel(names=["bad", "good"])}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_the_version_depends_on_examples_groups_and_targets(reviews: datasets.Dataset) -> None:
    stars = reviews["stars"]
    given = from_dataset(reviews, "shop", targets="stars").version
    assert given is not None
    assert from_dataset(reviews, "shop", targets=list(stars)).version == given
    assert from_dataset(reviews, "shop", targets=[1 - each for each in stars]).version != given
    assert from_dataset(reviews, list("aabbccdc"), targets="stars").version != given
    assert from_dataset(reviews.select([*range(7), 6]), "shop", targets="stars").version != given
    assert from_dataset(Noisy(6), list("aabbcc")).version is None


def test_a_hugging_face_dataset_gives_groups_and_targets_by_column(reviews: datasets.Dataset) -> None:
    environments = from_dataset(
        reviews, "shop", targets="stars", test=["d"], transform=lambda row: (row["picture"], row["stars"])
    )
    assert (environments.train, environments.test) == (("a", "b", "c"), ("d",))
    inputs, targets = environments["b"].take(slice(None))
    assert (inputs.shape, inputs.dtype, inputs[:, 0, 0, 0].tolist()) == ((2, 3, 4, 4), torch.uint8, [20, 30])
    bitwise(targets, environments["b"].targets)
    ahead = stream(environments, 2, readers=2)
    bitwise([ahead.batch(step) for step in range(4)], [stream(environments, 2).batch(step) for step in range(4)])
    ahead.close()


def test_a_row_without_transform_is_a_dictionary(reviews: datasets.Dataset) -> None:
    environments = from_dataset(reviews.remove_columns("shop"), list("aabbccdd"))
    row = environments["a"].take(slice(0, 1))
    assert {name: tuple(leaf.shape) for name, leaf in row.items()} == {
        "picture": (1, 3, 4, 4), "words": (1, 2), "stars": (1,),
    }  # fmt: skip
    with pytest.raises(InputError, match="environment a: it holds picture, words, stars, not the inputs and targets"):
        _ = environments["a"].targets


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda _: from_dataset(Noisy(3), list("ab")), "groups=2 values: the dataset has 3 examples"),
        (lambda _: from_dataset(Noisy(2), list("aa")), "groups=a: two training environments are needed; found a"),
        (lambda _: from_dataset(Noisy(2), ["a", float("nan")]), "groups=2 labels: example 1 has none"),
        (lambda _: from_dataset(Noisy(2), "shop"), "groups=shop: no such column; there are none"),
        (lambda _: from_dataset(Noisy(3), list("abc"), test=["d"]), "environment d: there is none of this name"),
        (lambda _: from_dataset(Endless(), list("abc")), "dataset=Endless: has no length or no places"),
        (lambda _: from_dataset(Noisy(2), list("ab"), targets=["x", "y"]), "its targets are of type <U1"),
        (lambda rows: from_dataset({"train": rows}, "shop"), "dataset=train: has several parts; give one of them"),
        (lambda rows: from_dataset(rows, "town"), "there are shop, picture, words, stars"),
        (lambda rows: from_dataset(rows, "shop")["a"].form, "environment a, example 0: its shop are of type <U1"),
        (
            lambda rows: from_dataset(rows, "shop", transform=lambda row: torch.zeros(1 + row["stars"]))["a"].take(
                slice(None)
            ),
            "environment a: examples of (1,) float32 and (2,) float32; transform them to one form",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    make: Callable[[datasets.Dataset], Any], line: str, reviews: datasets.Dataset
) -> None:
    with pytest.raises(InputError) as refused:
        make(reviews)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


class Failing(ExampleSource):
    def __len__(self) -> int:
        return 4

    def take(self, examples: slice | Tensor, draw: Tensor | None = None) -> Any:
        if draw is not None and 3 in examples.tolist():  # type: ignore[union-attr]
            raise InputError("row 3: cannot be read")
        return torch.zeros((*torch.arange(4)[examples].shape, 1))


@pytest.mark.parametrize("readers", [0, 2])
def test_what_a_reader_refuses_is_one_line(readers: int) -> None:
    environments = Environments(lambda _: Failing(), ["a", "b"])
    batches = stream(environments, 1, readers=readers)
    with pytest.raises(InputError, match=r"^row 3: cannot be read$"):
        list(map(batches.batch, range(8)))
    batches.close()


def test_an_image_with_a_palette_has_its_colours() -> None:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, 255, 7, 9])
    environments = from_dataset([(image, 0), (image, 1)], ["a", "b"])
    assert environments["a"].take(slice(0, 1))[0][0, :, 0, 0].tolist() == [255, 7, 9]


@pytest.mark.parametrize("none", [None, float("nan"), pd.NA, pd.NaT, "", " "])
def test_an_example_without_a_group_is_named(none: object) -> None:
    with pytest.raises(ArgumentError, match="groups=4 labels: example 2 has none"):
        from_dataset(range(4), ["a", "b", none, "a"])


def test_groups_may_be_numbers_or_text_with_spaces_around() -> None:
    assert from_dataset(range(4), [1, 2, 3, 3], test=[3]).by_purpose()["test"] == ("3",)  # type: ignore[list-item]
    assert from_dataset(range(4), ["a", " a", "None", "nan "]).train == ("None", "a", "nan")
