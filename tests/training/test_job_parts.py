"""Parts that a job may define: an objective with parameters, an evaluation of whole environments."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Kept, without_time
from torch import nn

from concord.defaults import DEFAULT_OUTPUT
from concord.environments import BatchStream, Environment, split_held_out
from concord.errors import InputError
from concord.execution.preflight import preflight
from concord.objectives import GroupDRO, Objective
from concord.record import write_record
from concord.studies.plan import plan_study
from concord.studies.study_options import options_for
from concord.tracking import Store
from concord.training import EnvironmentEvaluation, Job, ProcessContext, TrainConfig, build_model, load_job, train
from concord.training.checkpoint import MODEL, OPTIMIZER
from concord.training.context import Silent
from concord.training.job import JobFile, command_line

FILE = load_job(str(Path(__file__).parents[1] / "jobs" / "calibrated.py"))
JOB: Job[Any] = FILE.job
CPU = torch.device("cpu")


def config(**changes: Any) -> TrainConfig:
    defaults = {"epochs": 6, "batch_size": 8, "lr": 1e-2, "evaluations": 3, "checkpoints": 3, "held_out": 0.2}
    made: TrainConfig = JOB.config.with_options(**{**defaults, **changes})
    return made


def kept_in(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The model and everything else that a checkpoint keeps of the training."""
    return (folder / MODEL).read_bytes(), torch.load(folder / OPTIMIZER, weights_only=True)


def test_an_objectives_parameters_are_trained_as_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    settings, kept = config(checkpoints=1), Kept(tmp_path)
    outcome = train(JOB, settings, ProcessContext(), kept)
    names = JOB.environments(settings)
    parts = [split_held_out(each, 0.2, 0).training for each in names.load(names.train)]
    model = build_model(JOB, settings)
    assert JOB.objective is not None
    objective = JOB.objective(settings)
    objective.begin(model, 4, outcome.steps)
    assert isinstance(objective.module, nn.Module)
    assert objective.optimizer is not None
    assert objective.schedule is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [outcome.steps // 2, outcome.steps * 3 // 4])
    stream = BatchStream(parts, settings.data.batch_size, seed=0)
    for step in range(outcome.steps):
        optimizer.zero_grad()
        objective.optimizer.zero_grad()
        objective(model, stream.batch(step), step=step).backward()
        for each in (optimizer, schedule, objective.optimizer, objective.schedule):
            each.step()
    _, states = kept_in(kept.checkpoints[-1])
    torch.testing.assert_close(states["objective_module"], dict(objective.module.state_dict()))
    assert states["objective_optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01)
    assert states["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-4)
    assert objective.module.logs.abs().max() > 0.05  # it has learned


def test_a_resumed_run_with_an_own_objective_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    whole, rest = Kept(tmp_path / "whole"), Kept(tmp_path / "rest")
    undisturbed = train(JOB, config(), ProcessContext(), whole)
    resumed = train(JOB, config(), ProcessContext(), rest, resume_from=whole.checkpoints[0])
    assert without_time(resumed.metrics) == without_time(undisturbed.metrics)
    (model, states), (same, others) = kept_in(whole.checkpoints[-1]), kept_in(rest.checkpoints[-1])
    assert same == model
    torch.testing.assert_close(others, states, rtol=0, atol=0)


def test_a_checkpoint_without_the_objectives_parameters_is_refused(tmp_path: Path) -> None:
    plain = Kept(tmp_path)
    train(dataclasses.replace(JOB, objective=None), config(epochs=1), ProcessContext(), plain)
    with pytest.raises(InputError, match=r"optimizer\.pt is of another optimizer or objective .*objective_module"):
        train(JOB, config(), ProcessContext(), Silent(), resume_from=plain.checkpoints[0])


class Uncoupled(Objective):
    coupled = False

    def begin(self, model: nn.Module, environments: int, steps: int) -> None:
        self.module = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        (None, {"objective": "vrex"}, "--objective vrex: the job has an objective of its own"),
        (None, {"aggregator": "and-mask"}, "--aggregator and-mask: .* so there is one gradient; give mean"),
        (None, {"nonfinite": "skip"}, "--nonfinite skip: .* so there is one gradient; give raise"),
        (None, {"per_example": True}, "--per-example True: .* so there is one gradient; leave it out"),
        (None, {"environment_momentum": 0.5}, "--environment-momentum 0.5: .* so there is one gradient; give 0"),
        (
            lambda _: GroupDRO(nn.functional.cross_entropy),
            {"environments_per_step": 2},
            "same environments at each step",
        ),
        (lambda _: nn.functional.cross_entropy, {}, "objective gave function, expected an Objective"),
        (lambda _: Uncoupled(nn.functional.cross_entropy), {}, "only a coupled one can have; set coupled = True"),
        (lambda _: 1 / 0, {}, "its objective cannot be made .*ZeroDivisionError"),
        (lambda _: Objective(lambda outputs, targets: outputs[99]), {}, "its objective cannot be computed .*index 99"),
        (lambda _: Objective(lambda outputs, _: outputs.detach().mean()), {}, "a scalar with a gradient"),
    ],
)
def test_an_objective_that_cannot_be_trained_is_refused_before_the_run(
    objective: Any, changes: dict[str, Any], said: str
) -> None:
    job = JOB if objective is None else dataclasses.replace(JOB, objective=objective)
    with pytest.raises(InputError, match=said):
        preflight(dataclasses.replace(FILE, job=job), config(**changes))


def test_auto_is_the_mean_where_an_own_objective_couples_environments() -> None:
    assert JOB.config.aggregation.aggregator == JOB.config.resolve().method == "mean"
    assert "threshold" in JOB.config.resolve().unused()
    automatic = JOB.config.with_options(aggregator="auto")
    for objective in (None, lambda _: Uncoupled(nn.functional.cross_entropy)):
        alone = dataclasses.replace(JOB, objective=objective, config=automatic).config
        assert (alone.aggregation.aggregator, alone.resolve().method) == ("auto", "mean")
        assert alone.with_options(threshold=0.9).resolve().method == "and-mask"
    asked = dataclasses.replace(JOB, config=JOB.config.with_options(aggregator="and-mask")).config
    assert asked.aggregation.aggregator == "and-mask"


# Evaluations of whole environments


def test_an_evaluation_is_reported_by_environment_and_averaged() -> None:
    def sizes(model: nn.Module, environment: Environment) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"examples": float(len(environment))}

    job = dataclasses.replace(JOB, evaluation=EnvironmentEvaluation(sizes, {"examples": "min"}))
    metrics = train(job, config(epochs=1), ProcessContext(), Silent()).metrics
    u, v = (metrics[f"examples/validation/{name}"] for name in "uv")
    assert (u, v) == (35, 36)
    assert metrics["validation_examples"] == (u * u + v * v) / (u + v)
    assert metrics["worst_validation_examples"] == 36
    assert {f"examples/held_out/{name}" for name in "abcd"} <= set(metrics)
    no_validation = dataclasses.replace(job, environments=lambda _: JOB.environments(_).leaving_out("a"))
    assert "validation_examples" in train(no_validation, config(epochs=1), ProcessContext(), Silent()).metrics


def test_an_evaluation_can_be_the_criterion_and_its_least_the_best() -> None:
    assert preflight(FILE, config()).criterion == ("validation_calibration_error", "min")
    options = options_for(JOB.config).with_options(metric="worst_calibration_error", name="least", lr=0.1)
    plan = plan_study(FILE, options, {"metric", "name"})
    assert (plan.criterion.metric, plan.criterion.mode) == ("worst_validation_calibration_error", "min")
    plan = plan_study(FILE, options.with_options(metric=None), {"name"})
    assert (plan.criterion.metric, plan.criterion.mode) == ("validation_calibration_error", "min")


def test_a_study_is_judged_by_the_criterion_with_what_it_requires(tmp_path: Path) -> None:
    least = {"worst_held_out_accuracy": 0.6}
    job = dataclasses.replace(JOB, criterion="held_out_spread", mode="min", required=lambda _: least)
    file, options = dataclasses.replace(FILE, job=job), options_for(JOB.config).with_options(name="spread", lr=0.1)
    criterion = plan_study(file, options, {"name"}).criterion
    assert (criterion.metric, criterion.mode, criterion.required) == ("held_out_spread", "min", least)
    assert plan_study(file, options.with_options(metric="loss"), {"name", "metric"}).criterion.required == {}
    # A study that began without the job's criterion goes on as it began.
    options = options.with_options(output=tmp_path)
    begun = plan_study(dataclasses.replace(file, job=dataclasses.replace(job, criterion=None)), options, {"name"})
    begun.folder.make()
    write_record(begun.folder, "study", begun.record(Store("sqlite:///", None)))
    again = plan_study(file, options, {"name"})
    assert (again.criterion, again.measure) == (begun.criterion, begun.measure)
    assert begun.criterion.metric != criterion.metric
    refused = [("worst_spread", {}), ("spread", {"selection": "validation"}), ("spread", {"held_out": 0.0})]
    for metric, given in refused:
        asked = options.with_options(metric=metric, **given)
        with pytest.raises(InputError, match=f"--metric {metric}: the spread of losses is over held-out examples"):
            plan_study(FILE, asked, {"name", "metric", *given})


def test_without_a_criterion_the_jobs_own_evaluation_compares_versions() -> None:
    for evaluation in (JOB.evaluation, lambda _: JOB.evaluation):
        job = dataclasses.replace(JOB, criterion=None, mode=None, evaluation=evaluation)
        checked = preflight(dataclasses.replace(FILE, job=job), config())
        assert checked.criterion == ("validation_calibration_error", "min")
    with pytest.raises(InputError, match="criterion validation_drawn has no mode"):
        preflight(dataclasses.replace(FILE, job=dataclasses.replace(JOB, criterion="validation_drawn")), config())
    with pytest.raises(InputError, match="--metric drawn: the job's measure has no mode"):
        plan_study(FILE, options_for(JOB.config).with_options(metric="drawn"), {"metric"})


def test_an_evaluations_draws_depend_on_seed_environment_and_step_alone() -> None:
    def drawn(**changes: Any) -> list[float]:
        history = train(JOB, config(**changes), ProcessContext(), Silent()).history
        return [each.metrics[f"drawn/{part}"] for each in history for part in ("train/a", "train/b", "held_out/a")]

    first = drawn()
    assert len(set(first)) == 9
    assert drawn(lr=0.5) == first
    assert not set(drawn(seed=1)) & set(first)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"other": 1.0}, "evaluation of environment a: gave other; expected score"),
        ({}, "evaluation of environment a: gave nothing; expected score"),
        (1.0, "evaluation of environment a: gave float; expected score"),
    ],
)
def test_an_evaluation_that_gives_other_numbers_than_it_says_is_refused(given: Any, said: str) -> None:
    job = dataclasses.replace(JOB, evaluation=EnvironmentEvaluation(lambda *_: given, {"score": "max"}))
    with pytest.raises(InputError, match=said):
        train(job, config(epochs=1), ProcessContext(), Silent())


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        ({"accuracy": "max"}, "evaluation: accuracy is also the name of a measure"),
        ({"loss": "min"}, "evaluation: loss is also the name of the loss"),
        ({"score?": "max", "score!": "max"}, r"'score\?' and measure 'score!': both would be reported as the metric"),
    ],
)
def test_names_of_an_evaluation_that_others_have_are_refused(modes: dict[str, Any], said: str) -> None:
    job = dataclasses.replace(JOB, evaluation=EnvironmentEvaluation(lambda *_: {}, modes), criterion=None)
    with pytest.raises(InputError, match=said):
        preflight(JobFile(job, FILE.path, FILE.source), config())


def test_an_evaluation_without_a_direction_that_there_is_is_refused() -> None:
    with pytest.raises(InputError, match="mode 'up' of score: give max or min"):
        EnvironmentEvaluation(lambda *_: {}, {"score": "up"})  # type: ignore[dict-item]


def test_a_command_is_quoted_and_has_neither_secrets_nor_the_default_folder() -> None:
    options: dict[str, Any] = {"output": DEFAULT_OUTPUT, "target": "chest pain", "hub_token": "abc", "resume": True}
    options |= {"tracking_uri": "https://me:pass@host/", "data": Path("s3:/bucket/a"), "only": ("ERM", "IRM, *")}
    command = command_line("compare", "mine.py", "masks", options=options)
    assert shlex.split(command) == [
        *("concord", "compare", "mine.py", "masks", "--target", "chest pain", "--hub-token=***", "--resume"),
        *("--tracking-uri", "https://me:***@host/", "--data", "s3://bucket/a", "--only", "ERM", "IRM, *"),
    ]
    assert command_line("tune", "mine.py", options={"output": Path("elsewhere")}).endswith(" --output elsewhere")
