"""Batches sent by readers through reused memory."""

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from concord.environments import from_dataset, readers
from concord.environments.readers import read_ahead

BATCHES = 12


class Numbered:
    """Examples that are their own places."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"image": torch.full((2, 3), place, dtype=torch.uint8), "number": torch.tensor(float(place))}


@pytest.fixture
def read() -> Any:
    source = from_dataset(Numbered(), ["a", "b"] * (2 * BATCHES))["a"].source
    return lambda k: source.take(slice(2 * k, 2 * k + 2))


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for name, leaf in theirs.items():
            assert torch.equal(ours[name], leaf)
            assert ours[name].stride() == leaf.stride()


@pytest.mark.parametrize("readers", [1, 2])
def test_batches_that_the_caller_keeps_stay_as_they_are(read: Any, readers: int) -> None:
    expected = [read(k) for k in range(BATCHES)]
    assert_equal(list(read_ahead(read, range(BATCHES), readers, "cpu")), expected)


def test_batches_that_a_source_keeps_stay_as_they_are(read: Any) -> None:
    kept: dict[int, Any] = {}

    def cached(k: int) -> Any:
        return kept.setdefault(k % 2, read(k % 2))

    expected = [read(k % 2) for k in range(BATCHES)]
    for ours, theirs in zip(read_ahead(cached, range(BATCHES), 1, "cpu"), expected, strict=True):
        assert_equal([ours], [theirs])


def test_on_macos_the_process_itself_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    batches = read_ahead(lambda k: {"reader": torch.tensor(os.getpid())}, range(2), 2, "cpu")
    assert [batch["reader"].item() for batch in batches] == [os.getpid()] * 2


def test_memory_is_used_again_when_a_batch_is_gone(read: Any) -> None:
    addresses = set()
    for batch in read_ahead(read, range(BATCHES), 1, "cpu"):
        addresses.add(batch["image"].data_ptr())
        assert addresses <= {slot._bytes.ctypes.data for slot in readers._SLOTS.values()}
    assert len(addresses) <= 4


def test_batches_are_read_without_shared_memory(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [read(k) for k in range(BATCHES)]
    monkeypatch.setattr("concord.environments.readers._SLOT", 1 << 60)
    assert_equal(list(read_ahead(read, range(BATCHES), 1, "cpu")), expected)


def test_tensors_keep_their_form(read: Any) -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    views = {"turned": whole.permute(2, 0, 1), "some": whole[:, :2, 1:], "one": whole[:1, :1].expand(2, 3, 4)}
    views |= {"none": whole[:0], "type": whole.bfloat16(), "number": whole.sum()}
    found = next(read_ahead(lambda _: views, itertools.count(), 1, "cpu"))
    assert_equal([found], [views])
    assert found["turned"].untyped_storage().nbytes() == whole.nbytes
