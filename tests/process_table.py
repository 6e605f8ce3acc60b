"""Which processes live."""

import contextlib
from pathlib import Path

import pytest


def lives(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
