"""The definitions of a job that no file defines: equal in any process, different when anything that counts differs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from concord.execution.definitions import definitions

PROGRAM = '''
import functools
import torch
from torch import nn
from concord.execution.definitions import definitions

RATE = 0.5

class Net(nn.Module):
    """A network."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def forward(self, inputs):
        return helper(self.layer(inputs))

def helper(values):
    # a comment
    return RATE * values

def model(config):
    return Net(4)

for each in definitions({"model": model, "loss": functools.partial(helper), "other": {"b", "a"}}):
    print(each.name, hash_of(each.content), each.source is not None)
'''.replace("hash_of", "__import__('hashlib').sha256").replace("(each.content)", "(each.content.encode()).hexdigest()")


def printed(text: str, tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(text)
    found = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True)
    assert "model" in found.stdout
    return found.stdout


CHANGES = {
    "a constant": ("RATE = 0.5", "RATE = 0.6"),
    "a function that another calls": ("RATE * values", "RATE + values"),
    "a method": ("nn.Linear(width, 2)", "nn.Linear(width, 3)"),
    "an argument": ("Net(4)", "Net(5)"),
    "a base class": ("class Net(nn.Module)", "class Net(nn.Sequential)"),
}


@pytest.mark.slow  # a process each
@pytest.mark.parametrize("change", CHANGES)
def test_what_training_reaches_is_part_of_the_definitions(tmp_path: Path, change: str) -> None:
    assert printed(PROGRAM.replace(*CHANGES[change]), tmp_path) != printed(PROGRAM, tmp_path)


def test_comments_docstrings_and_processes_change_nothing(tmp_path: Path) -> None:
    other = PROGRAM.replace("# a comment", "# another, longer comment").replace("A network.", "Another text.")
    other = "\n\nUNUSED = 3\n" + other
    assert printed(other, tmp_path) == printed(PROGRAM, tmp_path)


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


def content(value: Any) -> str:
    return definitions({"value": value})[0].content


@given(PLAIN, PLAIN)
def test_plain_values_are_told_apart(one: Any, other: Any) -> None:
    assert (content(one) == content(other)) == (repr(one) == repr(other))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5))
def test_arrays_are_compared_by_their_values(values: list[float]) -> None:
    assert content(np.array(values)) == content(np.array(values))
    assert content(torch.tensor(values)) == content(torch.tensor(values))
    changed = [*values[:-1], values[-1] + 1]
    assert content(np.array(values)) != content(np.array(changed))
    assert content(np.array(values, np.float32)) != content(np.array(values, np.float64))


def test_functions_that_refer_to_each_other_end() -> None:
    def one(count: int) -> int:
        return other(count)

    def other(count: int) -> int:
        return one(count - 1) if count else 0

    assert [each.name.split(".")[-1] for each in definitions({"f": one})] == ["f", "one", "other"]


def test_objects_of_libraries_are_named_and_their_values_count() -> None:
    assert content(torch.nn.functional.cross_entropy) == "torch.nn.functional.cross_entropy"
    assert content(torch.nn.CrossEntropyLoss()) == content(torch.nn.CrossEntropyLoss())
    assert content(torch.nn.CrossEntropyLoss(label_smoothing=0.1)) != content(torch.nn.CrossEntropyLoss())
