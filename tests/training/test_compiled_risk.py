"""A compiled model takes the same steps, and whatever cannot be compiled trains as ever, with a line that says why."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from concord.aggregation import AndMask
from concord.gradients import PerExampleGradients
from concord.gradients.compiled import CompiledRule
from concord.gradients.risk import Supervised
from concord.objectives.erm import ERM
from concord.training.compiled_risk import CompiledRisk, compiled_risk
from concord.training.gradient_source import gradient_source

BATCH = (torch.linspace(-1, 1, 2 * 6 * 4).view(2, 6, 4), torch.linspace(1, -1, 2 * 6 * 3).view(2, 6, 3))


@pytest.fixture
def _without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate as ever, but run no C++ compiler, which takes half a minute."""
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: compile_model(model, backend="aot_eager", **how))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def gradients(model: nn.Module, vectorize: Any = False, **options: Any) -> list[Tensor]:
    risk = ERM(mse_loss)
    first = {"first_batch": lambda: BATCH, "vectorize": vectorize}
    gradient_source(model, risk, AndMask(0.5), ["a", "b"], **first, **options)(BATCH, 0)
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.usefixtures("_without_inductor")
def test_a_compiled_model_takes_the_same_step_under_its_own_names() -> None:
    plain, compiled = network(), network()
    torch.testing.assert_close(gradients(compiled, compile=True), gradients(plain))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())  # batch norm's statistics, too


@pytest.mark.usefixtures("_without_inductor")
def test_the_trial_changes_neither_buffers_nor_random_numbers() -> None:
    model, random = network(), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    risk = compiled_risk(model, Supervised(mse_loss), (BATCH[0][0], BATCH[1][0]), None)
    assert isinstance(risk, CompiledRisk)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_that_cannot_be_compiled_trains_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: compile_model(model, backend=broken, **how))
    with pytest.warns(UserWarning, match="the model is not compiled: .*no compiler here"):
        found = gradients(network(), compile=True)
    torch.testing.assert_close(found, gradients(network()), rtol=0, atol=0)


def test_environments_that_share_a_pass_are_not_compiled() -> None:
    with pytest.warns(UserWarning, match="the model is not compiled: its environments share a pass; give --vectorize"):
        gradients(network(), vectorize=None, compile=True)


@pytest.mark.usefixtures("_without_inductor")
def test_with_examples_as_environments_the_rule_is_compiled_and_the_model_is_not() -> None:
    rule, model = AndMask(0.5), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    of_examples: dict[str, Any] = {"first_batch": lambda: BATCH, "example_gradient": "contribution"}
    with pytest.warns(UserWarning, match="the model is not compiled: every example is an environment"):
        source = gradient_source(model, ERM(mse_loss), rule, ["a", "b"], compile=True, **of_examples)
    source(BATCH, 0)
    assert isinstance(source, PerExampleGradients)
    assert isinstance(source.aggregation.rule, CompiledRule)
    assert not source.aggregation.rule.compiled.refused
