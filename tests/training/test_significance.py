"""A threshold by significance, from the command line to MLflow; the report of a run that learned shortcuts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Concord
from hypothesis import given
from hypothesis import strategies as st
from planned_comparison import planned

from concord.aggregation import (
    AGGREGATORS,
    AndMask,
    GeometricMean,
    Mean,
    SandMask,
    TMask,
    XorMask,
    agreeing_signs,
    chance_of,
    default_threshold,
)
from concord.errors import InputError
from concord.options import option_values
from concord.record import write_record
from concord.space import Choice, LogUniform, OneOf, Space, Uniform
from concord.studies.plan import plan_study
from concord.studies.search import config_at, least_significance, study_space
from concord.studies.study_options import StudyOptions, options_for
from concord.tracking import Store
from concord.training import Comparison, Job, Study, TrainConfig, load_job
from concord.training.options import AggregatorOptions

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "sensors.py")
JOB: Job[Any] = load_job(JOB_FILE).job
BASE = TrainConfig()


# --- which threshold it is


@pytest.mark.parametrize(
    ("options", "environments", "rule"),
    [
        ({"significance": 1e-4}, 20, AndMask(0.9)),
        ({"significance": 1e-4, "threshold": 0.5}, 20, AndMask(0.9)),
        ({"significance": 1e-4, "environments_per_step": 15}, 30, AndMask(1.0)),
        ({"significance": 1e-4, "per_example": True, "batch_size": 20}, 1, AndMask(0.9)),
        ({"significance": 1e-4, "per_example": True, "batch_size": 10}, 2, AndMask(0.9)),
        ({"significance": 1e-4, "aggregator": "geometric-mean"}, 20, GeometricMean(0.9)),
        ({"threshold": 0.9}, 20, AndMask(0.9)),
        ({"threshold": 0.8}, 20, AndMask(0.8)),
        ({}, 17, AndMask(0.8)),  # chance agrees fully with 1.5e-5
        ({}, 18, AndMask(1.0)),
        ({}, 25, AndMask(23 / 25)),  # 24 signs
        ({}, 32, AndMask(26 / 32)),  # 29 signs, as 0.8 asks for
        ({}, 50, AndMask(32 / 50)),  # 41 signs
        ({}, 100, AndMask(0.5)),
        ({"steps_per_update": 2}, 10, AndMask(1.0)),
        ({"aggregator": "geometric-mean"}, 20, GeometricMean(1.0)),
        ({"aggregator": "sand-mask"}, 20, SandMask(0.8)),
        ({"aggregator": "xor-mask"}, 20, XorMask(0.8)),
        ({"aggregator": "t-mask"}, 3, TMask(1e-4)),
        ({"aggregator": "t-mask", "significance": 1e-6}, 3, TMask(1e-6)),  # which three signs cannot have
        ({"aggregator": "mean"}, 20, Mean()),
    ],
)
def test_it_follows_from_what_votes_at_a_step(options: dict[str, Any], environments: int, rule: Any) -> None:
    config = BASE.with_options(**{"aggregator": "and-mask"} | options)
    config.check()
    assert config.resolve().rule(environments) == rule


@pytest.mark.parametrize(
    "option", [{"threshold": 0.9}, {"threshold": 0.0}, {"significance": 0.1}, {"per_example": True}]
)
def test_an_option_of_a_mask_asks_for_one_and_nothing_else_does(option: dict[str, Any]) -> None:
    asked = BASE.with_options(**option)
    assert BASE.resolve().method == BASE.with_options(objective="erm").resolve().method == "mean"
    assert asked.resolve().method == BASE.with_options(objective="erm", **option).resolve().method == "and-mask"
    assert asked.with_options(aggregator="mean", significance=None).resolve().method == "mean"
    if "per_example" not in option:
        assert asked.with_options(objective="vrex", significance=None).resolve().method == "vrex"


class Masked(TrainConfig):
    auto_aggregator = "and-mask"


def test_a_job_that_gains_by_a_mask_has_it_unless_an_objective_is_given() -> None:
    assert Masked().resolve().method == "and-mask"
    assert Masked().with_options(objective="erm").resolve().method == "mean"
    assert Masked().with_options(objective="erm", aggregator="and-mask").resolve().method == "and-mask"
    assert Masked().with_options(aggregator="and-mask").with_options(objective="erm").resolve().method == "and-mask"
    assert Masked().with_options(objective="vrex").resolve().method == "vrex"


@given(st.sampled_from(AGGREGATORS), st.integers(1, 300))
def test_the_default_is_as_strict_as_chance_asks_and_no_stricter(name: str, environments: int) -> None:
    threshold = default_threshold(name, environments)
    if name in ("and-mask", "geometric-mean") and 2.0 ** (1 - environments) <= 1e-5:
        assert 0.5 <= threshold <= 1
        assert chance_of(threshold, environments) <= 1e-5
        one_less = 2 * (agreeing_signs(threshold, environments) - 1) / environments - 1
        assert one_less < 0.5 or chance_of(one_less, environments) > 1e-5
    else:
        assert threshold == 0.8


def test_the_one_that_is_given_later_takes_the_other_s_place() -> None:
    chosen = BASE.with_options(significance=1e-4)
    assert chosen.with_options(threshold=0.7).aggregation == AggregatorOptions(threshold=0.7)
    assert chosen.with_options(lr=0.1).aggregation.significance == 1e-4
    assert BASE.with_options(**option_values(chosen)) == chosen
    assert "threshold" in chosen.resolve().unused()
    assert "significance" in BASE.resolve().unused()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--significance 1e-4 --threshold 0.9",
         "--significance 0.0001: replaces --threshold, which is given as 0.9; give one of them"),
        ("--significance 1e-4",
         "--significance 0.0001: by chance 8 environments agree fully with probability 7.8e-3; give 7.9e-3 or more, or "
         "at least 15 environments"),
        ("--significance 0", "--significance 0.0: must be a probability above 0 and at most 1"),
        ("--significance 0.01 --aggregator sand-mask",
         "--significance 0.01: sand-mask does not keep components by their signs alone; it is for and-mask, "
         "geometric-mean, xor-mask, t-mask"),
        ("--significance 0.01 --objective vrex",
         "--significance 0.01: mean does not keep components by their signs alone; it is for and-mask, geometric-mean, "
         "xor-mask, t-mask"),
        ("--significance 0.01 --optimizer temporal-and-mask",
         "--significance 0.01: steps of --optimizer temporal-and-mask are not environments; give --temporal-threshold"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_before_training(refused: Callable[..., str], words: str, line: str) -> None:
    assert refused("train", JOB_FILE, *words.split()) == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--vary significance=1e-4,1e-2", "--significance 0.0001: by chance 8 environments agree fully"),
        ("--significance 0.01 --selection leave-one-out", "--significance 0.01: by chance 7 environments agree fully"),
        ("--significance 0.01 --vary threshold=0.5,0.9", "--significance 0.01: replaces --threshold, which"),
        ("--vary significance=0.5,1.5", "space: --significance 1.5: must be a probability above 0"),
    ],
)
def test_a_study_is_refused_what_its_trials_could_not_have(refused: Callable[..., str], words: str, line: str) -> None:
    assert refused("tune", JOB_FILE, *words.split()).startswith(line)


def test_a_study_of_the_t_mask_may_have_a_significance_that_signs_cannot_have(tmp_path: Path) -> None:
    strict = Space({"aggregator": "t-mask", "significance": LogUniform(1e-6, 1e-2)})
    file = load_job(JOB_FILE)
    file = dataclasses.replace(file, job=dataclasses.replace(file.job, studies={"strict": Study(strict)}))
    command = options_for(file.job.config, ["strict"])
    asked = dataclasses.replace(command, config=command.config.with_options(output=tmp_path))
    assert plan_study(file, asked, set()).space == strict
    signs = dataclasses.replace(strict, entries={**strict.entries, "aggregator": "and-mask"})
    file = dataclasses.replace(file, job=dataclasses.replace(file.job, studies={"strict": Study(signs)}))
    with pytest.raises(InputError, match="by chance 8 environments agree fully"):
        plan_study(file, asked, set())


MASKED = Space({"lr": LogUniform(1e-4, 1), "threshold": Uniform(0.0, 1.0)})


def test_a_study_varies_either_and_given_options_replace_declared_ones() -> None:
    varied = study_space(MASKED, StudyOptions(vary=("significance=log:1e-6:1e-2",)), set(), BASE)
    assert varied == Space({"lr": LogUniform(1e-4, 1), "significance": LogUniform(1e-6, 1e-2)})
    assert least_significance(varied, BASE) == 1e-6
    assert config_at(BASE, varied, {"lr": 0.1, "significance": 1e-4}).resolve().rule(20) == AndMask(0.9)
    chosen = BASE.with_options(significance=1e-4)
    assert study_space(MASKED, StudyOptions(), {"significance"}, chosen).names() == {"lr"}
    assert config_at(chosen, MASKED, {"lr": 0.1, "threshold": 0.7}).resolve().rule(20) == AndMask(0.7)


def test_a_space_varies_both_only_in_branches_of_their_own() -> None:
    both = {"threshold": Uniform(0.0, 1.0), "significance": Choice(1e-4, 1e-2)}
    with pytest.raises(InputError, match="space: significance and threshold: one replaces the other"):
        study_space(Space(both), StudyOptions(), set(), BASE)
    apart = Space({"mask": OneOf({name: {name: domain} for name, domain in both.items()})})
    assert study_space(apart, StudyOptions(), set(), BASE) == apart
    assert config_at(BASE, apart, {"mask": "threshold", "threshold": 0.7}).resolve().rule(20) == AndMask(0.7)


def test_a_comparison_takes_it_for_the_rows_that_mask() -> None:
    rows: dict[str, dict[str, Any]] = {
        "average": {"aggregator": "mean"}, "mask": {"threshold": 0.6}, "chance": {"significance": 0.1},
    }  # fmt: skip
    file = dataclasses.replace(
        load_job(JOB_FILE), job=dataclasses.replace(JOB, name="sensors", comparisons={"t": Comparison(rows, seeds=1)})
    )

    def rules(*words: str) -> list[Any]:
        return [run.config.rule(8) for run in planned(file, ["t"], words).runs["t"]]

    assert rules() == [Mean(), AndMask(0.6), AndMask(0.75)]
    assert rules("--significance", "0.01") == [Mean(), AndMask(1.0), AndMask(1.0)]
    assert rules("--threshold", "0.5") == [Mean(), AndMask(0.5), AndMask(0.5)]
    rows["both"] = {"threshold": 0.6, "significance": 0.1}
    with pytest.raises(InputError, match=r"t, both: --significance 0\.1: replaces --threshold"):
        rules()
    del rows["both"]
    rows["chance"]["significance"] = 1e-4
    with pytest.raises(InputError, match="by chance 8 environments agree fully"):
        rules()


def test_a_study_of_a_version_without_the_option_goes_on(output: Path) -> None:
    options = options_for(JOB.config).with_options(name="old", output=output, aggregator="and-mask")
    plan = plan_study(load_job(JOB_FILE), options, {"name", "output"})
    record = plan.record(Store.open(output))
    for recorded in (record["config"], record["deciding"]):
        recorded.pop("significance", None)
    plan.folder.make()
    write_record(plan.folder, "study", record)
    assert plan_study(load_job(JOB_FILE), options, {"name", "output"}).spec().key == plan.spec().key
    with pytest.raises(InputError, match=r"^--significance 0\.1: the study old was started with None; give another"):
        plan_study(load_job(JOB_FILE), options.with_options(significance=0.1), {"name", "output"})


# --- in runs


def test_a_run_follows_the_advice_of_the_one_that_learned_shortcuts(concord_: Concord, output: Path) -> None:
    words = ["train", JOB_FILE, "--output", output]
    averaged = concord_(*words, "--aggregator", "mean", "--name", "averaged")
    advice = averaged.err.splitlines()[-1]
    assert advice.startswith("shortcuts were learned: accuracy on held-out examples 0.")
    assert advice.endswith(
        "; try --aggregator and-mask --significance 0.01, or more training environments than 8, or --aggregator t-mask "
        "--environment-momentum 0.9, or --objective vrex --aggregator mean"
    )
    masked = concord_(*words, "--aggregator", "and-mask", "--significance", "0.01", "--name", "masked", "--json")
    assert "shortcuts were" not in masked.err
    line = "mask: 8 environments, τ 1: 8 of 8 signs must agree; by chance a component passes with probability 7.8e-3"
    assert line in masked.err.splitlines()
    kept = Store.open(output).run(masked.json["run_id"]).parameters
    assert (kept["significance"], kept["threshold"], kept["chance_fraction"]) == ("0.01", "1.0", "0.0078125")
    said = concord_(*words, "--name", "masked", "--resume")
    assert (said.status, "run masked is finished" in said.err) == (0, True)
    said = concord_(*words, "--name", "masked", "--resume", "--threshold", "0.5")
    assert said.err == (
        "concord: --threshold 0.5: the run masked was started with None; a resumed run keeps its options\n"
    )
    record = output / "runs" / "masked" / "record.json"
    for more, significance in ([], 0.01), (["--threshold", "0.5"], None):
        printed = concord_("train", JOB_FILE, "--config", record, *more, "--print-config")
        assert yaml.safe_load(printed.out)["significance"] == significance
