"""A built-in rule or objective is its file and one line: options, help, checks, spaces and names follow from its class.

Options are made when the platform is imported, so a process that adds its own parts first is asked.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).parents[1] / "jobs" / "sensors.py"
PARTS = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from concord.aggregation import GRADIENT, Update
from concord.errors import ArgumentError
from concord.objectives import Rescaled
from concord.space import Entries, LogUniform, Uniform


@dataclass(frozen=True)
class Shrunk:
    """The average, times a factor."""

    shrinkage: float = 0.5
    """Factor of the average
    (shrunk)."""
    scale_free: bool = False
    """A constant."""
    display_name: ClassVar[str] = "shrunk average"
    constants: ClassVar[tuple[str, ...]] = ("scale_free",)
    space: ClassVar[Entries] = {"shrinkage": Uniform(0.1, 1.0)}
    statistics: ClassVar = (GRADIENT,)

    def __post_init__(self):
        if self.shrinkage <= 0:
            raise ArgumentError("shrinkage", self.shrinkage, "must be above 0")

    def check_environments(self, environments):
        if environments * self.shrinkage < 0.1:
            raise ArgumentError("shrinkage", self.shrinkage, f"too small for {environments} environments")

    def finish(self, sums, environments):
        return Update(self.shrinkage * sums["gradient"] / environments, torch.ones_like(sums["gradient"]))


class RiskGap(Rescaled):
    """The mean risk and λ times the gap of the risks.

    Args:
        loss: the loss or the risk of one environment.
        weight: λ.
        autocast: the dtype in which layers compute.
        power: Exponent of the gap (risk-gap).
    """

    default_weight: ClassVar[float | None] = 7.0
    display_name: ClassVar[str | None] = "RiskGap"
    option_names: ClassVar = {"power": "gap_power"}
    space: ClassVar[Entries] = {"penalty_weight": LogUniform(0.1, 10.0), "gap_power": Uniform(1.0, 2.0)}

    def __init__(self, loss, weight, autocast=None, power: float = 1.0):
        super().__init__(loss, weight, autocast)
        self.power = power
'''
QUESTIONS = """
import dataclasses, json, sys

from concord.aggregation import RULES
from concord.objectives import OBJECTIVES
from parts import RiskGap, Shrunk

RULES["shrunk"] = Shrunk
OBJECTIVES["risk-gap"] = RiskGap

from concord.analysis.method_names import method_name
from concord.cli.help import option_help
from concord.errors import InputError, format_for_cli
from concord.studies.methods import MethodsOptions, methods_options_for, plan_methods
from concord.training import load_job
from concord.training.worker_data import check_environments

job = load_job(sys.argv[1])
config, methods = job.job.config, methods_options_for(job)
helps = option_help(type(config), default=config) | option_help(MethodsOptions, default=MethodsOptions())
tiny = config.with_options(aggregator="shrunk", shrinkage=0.001)
rule, objective = config.with_options(aggregator="shrunk", shrinkage=0.25), config.with_options(objective="risk-gap")

def refusal(work):
    try:
        work()
    except InputError as error:
        return format_for_cli(error)

plan = plan_methods(job, methods.with_options(methods=("mean", "shrunk", "risk-gap"), trials=1), {"methods", "trials"})
print(json.dumps({
    "options": sorted(helps),
    "help": {name: [helps[name].text, helps[name].default] for name in ("shrinkage", "gap_power", "penalty_weight",
             "penalty_warmup", "methods")},
    "choices": helps["aggregator"].choices + helps["objective"].choices,
    "rule": dataclasses.asdict(rule.resolve().rule(3)),
    "power": objective.with_options(gap_power=2.0).objective.build(lambda outputs, targets: outputs.mean(), 1).power,
    "weight": objective.resolve().objective.penalty_weight,
    "unused": [sorted(each.resolve().unused()) for each in (rule, objective)],
    "refused": [refusal(config.with_options(aggregator="shrunk", shrinkage=-1.0).check),
                refusal(lambda: check_environments(tiny.resolve(), job.job.environments(tiny))),
                refusal(config.with_options(aggregator="shrunk", significance=0.1).check)],
    "spaces": {name: study.space.as_json() for name, study in plan.studies.items()},
    "names": method_name("shrunk, risk-gap"),
}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "parts.py").write_text(PARTS)
    (folder / "questions.py").write_text(QUESTIONS)
    command = [sys.executable, str(folder / "questions.py"), str(JOB)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def test_hyperparameters_are_options_with_their_documentation_as_help(answers: dict[str, Any]) -> None:
    assert answers["help"]["shrinkage"] == ["Factor of the average (shrunk).", "0.5"]
    assert answers["help"]["gap_power"] == ["Exponent of the gap (risk-gap).", "1"]
    assert {"shrunk", "risk-gap"} < {*answers["choices"]}
    assert not {"scale_free", "power", "weight", "ridge", "steepness"} & {*answers["options"]}


def test_shared_help_names_the_new_objective(answers: dict[str, Any]) -> None:
    assert "7 for risk-gap" in answers["help"]["penalty_weight"][0]
    assert "iga and risk-gap it is 1" in answers["help"]["penalty_warmup"][0]
    assert "trimmed-mean, shrunk) and objectives (irm" in answers["help"]["methods"][0]
    assert "meta-irm, risk-gap), or rules" in answers["help"]["methods"][0]


def test_the_options_reach_rule_and_objective(answers: dict[str, Any]) -> None:
    assert answers["rule"] == {"shrinkage": 0.25, "scale_free": False}
    assert (answers["power"], answers["weight"]) == (2.0, 7.0)
    of_rule, of_objective = map(set, answers["unused"])
    assert "shrinkage" in of_objective - of_rule
    assert "gap_power" in of_rule - of_objective
    assert {"threshold", "significance", "clip_norm"} < of_rule


def test_the_class_s_own_checks_refuse(answers: dict[str, Any]) -> None:
    bound, environments, chance = answers["refused"]
    assert bound == "--shrinkage -1.0: must be above 0"
    assert environments.startswith("--shrinkage 0.001: too small for ")
    assert chance.startswith(
        "--significance 0.1: shrunk does not keep components by their signs alone; it is for and-m"
    )


def test_compare_methods_searches_the_declared_space(answers: dict[str, Any]) -> None:
    spaces = answers["spaces"]
    assert spaces["shrunk"]["shrinkage"] == {"uniform": [0.1, 1.0]}
    assert spaces["risk-gap"]["gap_power"] == {"uniform": [1.0, 2.0]}
    assert spaces["risk-gap"]["penalty_weight"] == {"log-uniform": [0.1, 10.0]}


def test_figures_show_the_published_name(answers: dict[str, Any]) -> None:
    assert answers["names"] == "shrunk average, RiskGap"
