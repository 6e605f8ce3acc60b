"""A run with extremely large, finite losses reports them."""

import math
from pathlib import Path

import pytest
from command_line import Concord

from concord.training.large_losses import LARGE, large_losses
from concord.record import Evaluation

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "shared_rule.py")


@pytest.mark.parametrize("value", [0.0, 0.7, 1e6, LARGE, -1e30, math.nan])
def test_losses_that_float32_can_train_on_are_not_mentioned(value: float) -> None:
    assert large_losses([Evaluation(1, 5, {"loss/train/a": value, "accuracy/train/a": 2 * LARGE})]) is None
    assert large_losses([]) is None


def test_the_largest_loss_of_the_first_evaluation_is_named() -> None:
    first = {"loss/train/a": 0.7, "loss/held_out/b": 3.21e29, "loss/ood/c": 1e12, "train_loss": 1e30}
    said = large_losses([Evaluation(1, 5, first), Evaluation(2, 10, {"loss/train/a": 0.5})])
    assert said is not None
    assert said.startswith("warning: loss/held_out/b was 3.21e+29 at the first evaluation; losses above 1e+10 ")


def test_train_says_so_of_inputs_that_are_absurdly_large(concord_: Concord, output: Path) -> None:
    said = concord_("train", JOB_FILE, "--trouble", "large", "--epochs", "1", "--output", output)
    assert said.status == 0
    (line,) = [line for line in said.err.splitlines() if line.startswith("warning: loss/")]
    assert line.split()[1] in ("loss/train/c", "loss/held_out/c")
