"""Summaries of data without the data: sizes, shapes, and cheap digests that tell data apart."""

import json
import tracemalloc

import pytest
import torch

from concord.environments import Environment
from concord.environments.summary import DataSummary, summarize
from concord.tracking.datasets import dataset_inputs


def of(inputs: torch.Tensor, targets: torch.Tensor | None = None) -> DataSummary:
    targets = torch.zeros(len(inputs), dtype=torch.long) if targets is None else targets
    return summarize(Environment("north", inputs, targets), "train")


def test_a_summary_says_how_many_of_what() -> None:
    said = of(torch.zeros(5, 2, 3, dtype=torch.uint8))
    assert (said.name, said.purpose, said.examples) == ("north", "train", 5)
    assert said.leaves == (("inputs", (2, 3), "uint8"), ("targets", (), "int64"))


def test_a_tree_is_summarized_by_its_leaves_and_is_a_dataset() -> None:
    tree = {"ids": torch.zeros(5, 7, dtype=torch.long), "labels": torch.zeros(5)}
    said = summarize(Environment("north", tree), "train")
    assert (said.examples, said.leaves) == (5, (("ids", (7,), "int64"), ("labels", (), "float32")))
    renamed = Environment("north", {"ids": tree["ids"], "weights": tree["labels"]})
    assert summarize(renamed, "train").digest != said.digest
    (found,) = dataset_inputs([said])
    features = json.loads(json.loads(found.dataset.schema)["mlflow_tensorspec"]["features"])
    assert [(each["name"], each["tensor-spec"]["shape"]) for each in features] == [("ids", [-1, 7]), ("labels", [-1])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64])
def test_other_data_have_another_digest(dtype: torch.dtype) -> None:
    inputs = (torch.arange(60).reshape(10, 6) % 2).to(dtype)
    changed = inputs.clone()
    changed[3, 4] = 1 - changed[3, 4].to(torch.int64)
    targets = torch.zeros(10, dtype=torch.long)
    digests = [
        of(inputs).digest,
        of(changed).digest,
        of(inputs.reshape(10, 2, 3)).digest,
        of(inputs, targets + 1).digest,
        of(inputs[:9]).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert of(inputs.T.contiguous().T).digest == of(inputs.clone()).digest == digests[0]


def test_the_digest_of_large_data_takes_little_memory() -> None:
    inputs = torch.zeros(4000, 10_000)  # 160 MB
    tracemalloc.start()
    digest = of(inputs).digest
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20e6
    inputs[0, 0] = 1
    assert of(inputs).digest != digest


def test_many_environments_are_one_dataset_for_each_purpose() -> None:
    parts = [
        summarize(Environment(f"level-{index}", torch.full((3, 1), float(index)), torch.zeros(3)), purpose)
        for index in range(60)
        for purpose in ("train", "held-out")
    ]
    assert len(dataset_inputs(parts[:100])) == 100
    together = dataset_inputs(parts)
    assert [(each.dataset.name, each.tags[0].value, json.loads(each.dataset.profile)) for each in together] == [
        ("60 environments, train", "train", {"num_rows": 180, "environments": 60}),
        ("60 environments, held-out", "held-out", {"num_rows": 180, "environments": 60}),
    ]
    other = [*parts[:-2], summarize(Environment("level-59", torch.zeros(3, 1), torch.zeros(3)), "train"), parts[-1]]
    assert dataset_inputs(other)[0].dataset.digest != together[0].dataset.digest
    assert dataset_inputs(other)[1].dataset.digest == together[1].dataset.digest
