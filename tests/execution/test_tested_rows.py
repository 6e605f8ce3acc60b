"""The sentence of intervals for a table's test environments."""

import numpy as np
import pandas as pd
import pytest
import torch

from concord.environments.table import TableEnvironments, from_table
from concord.execution.tested_rows import intervals_of_test


def sites(names: str, **options: object) -> TableEnvironments:
    random = np.random.default_rng(0)
    site = np.repeat(list(names), 40)
    frame = pd.DataFrame({"site": site, "patient": np.arange(len(site)) // 4, "x": random.normal(size=len(site))})
    frame["sick"] = np.where(frame.x > 0, "yes", "no")
    if "weight" in options:
        frame["w"] = np.where(frame.x > 0, 3.0, 1.0)
    found = from_table(frame, target="sick", environment="site", test=list(names[2:]), **options)  # type: ignore[arg-type]
    fitted = found.fitted(0.0, 0)
    assert isinstance(fitted, TableEnvironments)
    return fitted


class Sign(torch.nn.Module):
    """Says yes where the first input is positive; its one parameter names its device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([-inputs[:, 0], inputs[:, 0]], 1) * self.scale


class Yes(Sign):
    """Says yes always."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 1.0]).expand(len(inputs), 2) * self.scale


def said(environments: TableEnvironments) -> str | None:
    metrics = {}
    for name in environments.test:
        inputs, targets = environments[name].pairs(slice(None))
        metrics[f"accuracy/ood/{name}"] = float(((inputs[:, 0] > 0).long() == targets).float().mean())
    return intervals_of_test(environments, Sign(), "accuracy", metrics)


def test_each_test_environment_has_its_interval_over_rows_or_clusters() -> None:
    line = said(sites("abcd"))
    assert line is not None
    assert line.startswith("accuracy in the test (95 % over rows): c ")
    assert line.endswith("; 40); they say little of the next")
    by_patient = said(sites("abc", cluster_by="patient"))
    assert by_patient is not None
    assert "over clusters" in by_patient
    assert by_patient.endswith("; 10); one environment says little of the next")


def test_of_three_the_next_is_expected_and_many_are_a_range() -> None:
    three, seven = said(sites("abcde")), said(sites("abcdefghi"))
    assert three is not None
    assert seven is not None
    assert three.endswith(" in a new environment (t interval of 3)")
    assert " in 7 environments; expect " in seven


@pytest.mark.parametrize("metrics", [{}, {"accuracy/ood/c": 0.0}])
def test_a_measure_that_the_run_reports_otherwise_is_left_out(metrics: dict[str, float]) -> None:
    assert intervals_of_test(sites("abc"), Sign(), "accuracy", metrics) is None


def test_rows_count_by_their_weights() -> None:
    environments = sites("abc", weight="w")
    (_, targets, weights) = environments["c"].take(slice(None))
    right = float(np.average(targets.numpy(), weights=weights.numpy()))
    line = intervals_of_test(environments, Yes(), "accuracy", {"accuracy/ood/c": right})
    assert line is not None
    assert line.startswith(f"accuracy in the test (95 % over rows): c {right:.3g} (")
