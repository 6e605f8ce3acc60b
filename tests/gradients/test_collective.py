"""The collective gradients, in real gloo processes; the claims are the functions of ``collective_checks.py``."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from collective_checks import CHECKS

from concord.aggregation import SIGN

SCRIPT = Path(__file__).with_name("collective_checks.py")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """What became of every selected check: its traceback, or None. One interpreter runs them all."""
    names = [
        item.callspec.params["check"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_check.__name__
    ]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *names], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=600)  # each check has a much shorter time limit of its own
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]
    return {result["check"]: result["error"] for result in results}


@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str, outcomes: dict[str, str | None]) -> None:
    error = outcomes.get(check, "it was not run")
    if error is not None:
        pytest.fail(error, pytrace=False)


@pytest.mark.parametrize(
    ("environments", "dtype"),
    [
        (1, torch.int8),
        (127, torch.int8),
        (128, torch.int16),
        (32_767, torch.int16),
        (32_768, torch.int32),
    ],
)
def test_counts_of_signs_travel_as_the_smallest_integer_that_holds_them(environments: int, dtype: torch.dtype) -> None:
    assert SIGN.wire_dtype(environments, torch.float32) is dtype
