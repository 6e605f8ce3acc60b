"""The call of a model by its risk: named tensors, in any form that the risk returns."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from concord.tracking.model_call import OUTPUT, first_call

BATCH = {"left": torch.arange(6.0).reshape(3, 2), "right": torch.ones(3, 2), "labels": torch.tensor([0, 1, 0])}


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor | None = None, *, sign: int = 1, labels: Tensor | None = None) -> Any:
        answer = self.scale * (left + sign * (0 if right is None else right))
        return answer if labels is None else {"loss": answer.mean(), "answer": answer}


class OfMapping(Sum):
    def forward(self, batch: dict[str, Tensor]) -> Any:
        return super().forward(**batch)


@pytest.mark.parametrize(
    ("model", "call", "names", "output"),
    [
        (Sum(), lambda model, batch: model(**batch), {"left", "right", "labels"}, "answer"),
        (Sum(), lambda model, batch: model(batch["left"], batch["right"], sign=-1), {"left", "right"}, OUTPUT),
        (Sum(), lambda model, batch: model(batch["left"], right=batch["right"]), {"left", "right"}, OUTPUT),
        (OfMapping(), lambda model, batch: model(batch), {"left", "right", "labels"}, "answer"),
        (OfMapping(), lambda model, batch: model({"left": batch["left"]}), {"left"}, OUTPUT),
    ],
)
def test_a_recorded_call_names_its_tensors_and_is_repeated(
    model: nn.Module, call: Any, names: set[str], output: str
) -> None:
    expected = call(model, BATCH)
    found = first_call(model, lambda model, batch, step: call(model, batch), BATCH)
    assert found is not None
    assert found.inputs.keys() == names
    answers = found(model, found.inputs)
    assert torch.equal(answers[output], expected if output == OUTPUT else expected["answer"])
    assert "loss" not in answers  # has no row for each example
    two = found.rows([0, 2])
    assert torch.equal(two(model, two.inputs)[output], answers[output][[0, 2]])
    without = {name: each for name, each in found.inputs.items() if name != "labels"}
    assert torch.equal(found(model, without)[output], answers[output])


def test_a_risk_that_does_not_call_the_model_has_no_call() -> None:
    assert first_call(Sum(), lambda model, batch, step: model.scale * batch["left"].mean(), BATCH) is None
