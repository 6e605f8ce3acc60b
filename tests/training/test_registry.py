"""The options of built-in rules and objectives are declared beside their classes' arguments, and say the same.

Options are declared without the classes, so that help and a wrong option import no PyTorch.
"""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from concord.analysis.method_names import method_name
from concord.built_in import OBJECTIVES, RULES
from concord.cli.help import OptionHelp, option_help
from concord.errors import InputError, format_for_cli
from concord.hyperparameters import Hyperparameter, Registry
from concord.objectives import Rescaled
from concord.options import options_of
from concord.studies.methods import methods_options_for, plan_methods
from concord.training import TrainConfig, load_job
from concord.training.options import AggregatorOptions, ObjectiveOptions
from concord.training.worker_data import check_environments

JOB = Path(__file__).parents[1] / "jobs" / "sensors.py"
PARTS = [(registry, name) for registry in (RULES, OBJECTIVES) for name in registry.names]
each_part = pytest.mark.parametrize(("registry", "name"), PARTS, ids=[name for _, name in PARTS])


@pytest.fixture(scope="module")
def helps() -> dict[str, OptionHelp]:
    return option_help(TrainConfig)


def own(registry: Registry[Any], name: str) -> dict[str, Hyperparameter]:
    return dict(registry.own_options(registry.kind(name)))


@each_part
def test_an_option_has_the_type_default_and_help_of_its_class(
    registry: Registry[Any], name: str, helps: dict[str, OptionHelp]
) -> None:
    declared = options_of(TrainConfig)
    for each, argument in own(registry, name).items():
        assert (declared[each].hint, declared[each].default) == (argument.hint, argument.default), each
        assert helps[each].text == argument.text, each


def test_no_class_lacks_an_option_and_no_option_a_class() -> None:
    platform = {"aggregator", "significance", "threshold", "rescale", "environment_momentum", "steps_per_update"} | {
        "accumulate"
    }
    platform |= {"nonfinite", "per_example", "example_gradient", "vectorize"}
    assert options_of(AggregatorOptions).keys() - platform == RULES.all_options().keys()
    shared = {"objective", "penalty_weight", "penalty_warmup"}
    assert options_of(ObjectiveOptions).keys() - shared == OBJECTIVES.all_options().keys()


def listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def test_the_help_of_the_weight_has_the_default_of_each_objective(helps: dict[str, OptionHelp]) -> None:
    by_weight: dict[float, list[str]] = {}
    for name, kind in OBJECTIVES.kinds().items():
        if kind.default_weight is not None:
            by_weight.setdefault(kind.default_weight, []).append(name)
    exponents = {each: str(Decimal(str(each)).normalize()).replace("E+", "e") for each in by_weight}
    shown = {each: f"{each:g}" if each < 1e3 else exponents[each] for each in by_weight}
    defaults = ", ".join(f"{shown[each]} for {listed(by_weight[each])}" for each in sorted(by_weight, reverse=True))
    assert f"By default {defaults}." in helps["penalty_weight"].text


def test_the_help_of_the_warm_up_names_the_objectives_that_begin_at_one(helps: dict[str, OptionHelp]) -> None:
    kinds = OBJECTIVES.kinds()
    names = [name for name, kind in kinds.items() if issubclass(kind, Rescaled) and kind.warms_up_at_one]
    assert f"for {listed(names)} it is 1," in helps["penalty_warmup"].text


@each_part
def test_a_value_reaches_the_class_and_no_other_uses_the_option(registry: Registry[Any], name: str) -> None:
    arguments = own(registry, name)
    changed = {each: _other(argument.default) for each, argument in arguments.items()}
    config = TrainConfig().with_options(**{registry.option: name}, **changed).resolve()
    made = config.rule(8) if registry is RULES else config.objective.build(lambda outputs, targets: outputs.mean(), 1)
    for each, argument in arguments.items():
        assert _values(made, argument.name) == {changed[each]}, each
    assert {*registry.all_options()} & config.unused() == {*registry.all_options()} - {*arguments}


def _other(default: Any) -> Any:
    if default is None or isinstance(default, str):
        return {None: "head", "squared": "halves", "scalar": "vector"}[default]
    return (not default) if isinstance(default, bool) else 2 * default or 1 if isinstance(default, int) else 0.3


def _values(made: Any, argument: str) -> set[Any]:
    """The values of an attribute of the object, or of its risk, that has the argument's name."""
    parts = [vars(each) for each in (made, getattr(made, "risk", None)) if hasattr(each, "__dict__")]
    return {part[name] for part in parts for name in (argument, f"_{argument}") if name in part}


def refusal(config: TrainConfig) -> str:
    with pytest.raises(InputError) as refused:
        config.check()
    return format_for_cli(refused.value)


def test_the_class_s_own_checks_refuse() -> None:
    job = load_job(str(JOB)).job
    krum = job.config.with_options(aggregator="krum", byzantine=100)
    assert refusal(krum.with_options(byzantine=-1)) == "--byzantine -1: must be at least 0"
    with pytest.raises(InputError) as few:
        check_environments(krum.resolve(), job.environments(krum))
    assert format_for_cli(few.value).startswith("--byzantine 100: needs 103 environments at each step")
    assert refusal(krum.with_options(significance=0.1)).startswith(
        "--significance 0.1: krum does not keep components by their signs alone; it is for and-m"
    )


def test_compare_methods_searches_the_declared_space() -> None:
    job = load_job(str(JOB))
    names = ("mean", "trimmed-mean", "group-dro", "vrex")
    options = methods_options_for(job).with_options(methods=names, trials=1)
    spaces = {
        name: study.space.as_json() for name, study in plan_methods(job, options, {"methods", "trials"}).studies.items()
    }
    assert spaces["trimmed-mean"]["trimmed_fraction"] == {"uniform": [0.0, 0.45]}
    assert spaces["group-dro"]["group_rate"] == {"log-uniform": [0.001, 0.1]}
    assert spaces["vrex"]["penalty_weight"] == {"log-uniform": [0.01, 10000.0]}


def test_figures_show_the_published_name() -> None:
    assert method_name("and-mask, irm") == "AND-mask, IRMv1"
