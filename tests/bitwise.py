"""Equality to the last bit, of tensors and of trees of them."""

from typing import Any

from torch.testing import assert_close


def bitwise(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=0, atol=0)
