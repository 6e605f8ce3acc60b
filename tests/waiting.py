"""Waits for what another process or thread does."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(found: Callable[[], Found], seconds: float = 120.0) -> Found:
    """What the function finds as soon as that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError(f"nothing came within {seconds} s")
