"""Studies on real Ray with a real MLflow store: exact, tracked trial by trial, and whole after any kill.

The kill test at its full size, 200 trials and five kills: ``pytest -m slow tests/studies/test_study.py -k killed``.
"""

import contextlib
import csv
import errno
import itertools
import json
import os
import random
import re
import shlex
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from forked import Command
from recorded import comparable
from test_run import children_named
from waiting import wait_for

from concord.cli import main
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import InputError, RunFailedError, StoppedError
from concord.execution.execute import CHECKPOINTS
from concord.record import EVENTS, RECORD, OpenRun, Run, folder_of, read_run, require_run
from concord.storage import DiskError, Folder
from concord.studies.plan import StudyPlan, plan_study
from concord.studies.pool import SCHEDULER
from concord.studies.proposals import GroupRuns, Trial
from concord.studies.results import StudyResult, read_study
from concord.studies.search import Search, config_at
from concord.studies.study import run_study
from concord.studies.study_options import options_for
from concord.studies.trial import without
from concord.tracking import Store, load_program, show
from concord.training import ProcessContext, load_job
from concord.training.context import Silent
from concord.training.loop import training
from concord.training.worker_data import WorkerData, prepare

JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "tiny_study.py")
OTHER_JOB_FILE = str(Path(__file__).parents[1] / "jobs" / "shared_rule.py")
MEASURED = str(Path(__file__).parents[1] / "jobs" / "measured.py")
# The search alone; what comes after it has tests of its own. One process tries everything: each takes seconds to start.
SEARCH: dict[str, Any] = {
    "trials": 8, "name": "s", "concurrent": 1, "reruns": 0, "shortlist": 0, "register": False,
}  # fmt: skip
# All that a study does, two trials at a time.
CALM: dict[str, Any] = {"name": "calm", "concurrent": 2, "reruns": 2, "shortlist": 2, "register": True}
# One trial after the other, of which the first five are random: these are repeatable.
IN_TURN: dict[str, Any] = {"concurrent": 1, "startup": 5}
MANY = 9
# Drawing takes half of a tiny study's time, so only the calm one has its figures.
FIGURES = StudyResult.figures
pytestmark = pytest.mark.usefixtures("without_figures")


def planned(output: Path, job_file: str = JOB_FILE, **options: Any) -> StudyPlan:
    job = load_job(job_file)
    given = SEARCH | {"output": output} | options
    return plan_study(job, options_for(job.job.config).with_options(**given), given=set(given))


def study(output: Path, info: Callable[[str], None] = lambda _: None, **options: Any) -> StudyResult:
    return run_study(planned(output, **options), info)


def study_folder(output: Path, name: str = "s") -> Folder:
    return folder_of(output, name, "study")


def runs_in(output: Path) -> GroupRuns:
    group = read_run(study_folder(output), "study")
    return GroupRuns(Run(study_folder(output)) if group is None else group)


def points(result: StudyResult) -> list[dict[str, Any]]:
    return [ended.point for ended in in_order(result)]


def output_of(result: StudyResult) -> Path:
    return result.folder.path.parent.parent


def in_order(result: StudyResult) -> list[Trial]:
    return sorted([*result.finished, *result.failed], key=lambda each: each.number)


def trained_here(config: Any, left_out: str | None = None, job_file: str = JOB_FILE) -> dict[str, float]:
    """What the same training gives in this process, without Ray."""
    job, config = load_job(job_file).job, config.resolve()

    def load() -> WorkerData:
        return prepare(job, config.with_options(leave_out=left_out), ProcessContext())

    outcome = Run.of(training(job, config, ProcessContext(), Silent(), load=load))
    return comparable(outcome.metrics)


def mlflow(result: StudyResult) -> tuple[Any, dict[str, Any]]:
    """The study's run and its children as MLflow has them, by name; fails if two have one name."""
    client = Store.open(output_of(result)).client
    parent = client.get_run(result.record["run_id"])
    tagged = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    found = client.search_runs([parent.info.experiment_id], tagged, max_results=5000)
    names = [run.data.tags["concord.run"] for run in found]
    assert len(set(names)) == len(names)
    return parent, dict(zip(names, found, strict=True))


def statuses(children: Mapping[str, Any]) -> list[str]:
    return [run.info.status for run in children.values()]


def runs_of(output: Path) -> list[Any]:
    """Every run of every experiment that is not deleted."""
    client = Store.open(output).client
    return list(client.search_runs([each.experiment_id for each in client.search_experiments()]))


# --- what a study does


@pytest.fixture(scope="module")
def calm(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """A whole study that nothing disturbs."""
    output = tmp_path_factory.mktemp("calm") / "my runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StudyResult, "figures", FIGURES)
        return study(output, **CALM)


def test_every_trial_is_finished_and_has_one_child_run_in_mlflow(calm: StudyResult) -> None:
    assert sorted(ended.number for ended in calm.finished) == list(range(8))
    assert {path.stem for path in (calm.folder.path / "figures").iterdir()} == calm.drawn.keys() != set()
    parent, children = mlflow(calm)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["metric"] == "held_out_accuracy"
    assert parent.data.metrics["finished"] == 8
    trials = {key: run for key, run in children.items() if run.data.tags["concord.kind"] == "trial"}
    assert sorted(trials) == [f"calm-trial-{number}" for number in range(8)]
    assert set(statuses(children)) == {"FINISHED"}
    for ended in calm.finished:
        run = trials[ended.name]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["concord.trial"] == str(ended.number)
        used = {"l2": 0.0, "aggregator": "and-mask", "beta1": 0.9} | ended.point
        assert run.data.params == {name: str(value) for name, value in used.items()}
        assert run.data.metrics == ended.metrics
        assert len(ended.history) == 2


def test_a_job_with_dictionaries_is_searched_with_data_that_are_shared(ray_cluster: None, output: Path) -> None:
    job = str(Path(__file__).parents[1] / "jobs" / "dictionaries.py")
    options = {"trials": 2, "epochs": 2, "batch_size": 16, "search": "random", "register": True}
    plan = planned(output, job, **options)
    result = run_study(plan, lambda _: None)
    assert len(result.finished) == 2
    for ended in result.finished:
        assert comparable(ended.metrics) == trained_here(config_at(plan.base, plan.space, ended.point), job_file=job)
    assert read_study(result.folder).record["model"] == "models:/dictionaries/1"


def test_an_environment_of_dictionaries_that_is_left_out_is_whole_again() -> None:
    job = load_job(str(Path(__file__).parents[1] / "jobs" / "dictionaries.py")).job
    prepared = prepare(job, job.config.resolve(), ProcessContext())
    (name, whole), *_ = without(prepared, ["b"]).eval_only
    expected = job.environments(job.config)["b"].data
    assert name == "b"
    assert len(whole) == 60
    for leaf, values in expected.items():
        assert torch.equal(whole.data[leaf].double().sum(0), values.double().sum(0))


def test_the_space_is_searched_with_its_branches(calm: StudyResult) -> None:
    for point in points(calm):
        assert set(point) == {"lr", "threshold", "penalty"} | ({"l2"} if point["penalty"] == "l2" else set())
    assert {point["penalty"] for point in points(calm)} == {"none", "l2"}


def test_a_trial_gives_exactly_the_metrics_of_the_same_training_here(calm: StudyResult) -> None:
    plan = planned(output_of(calm), name="compared")
    for ended in calm.finished:
        expected = trained_here(config_at(plan.base, plan.space, ended.point))
        assert comparable(ended.metrics) == expected, ended.run


def test_trials_whose_data_differ_load_their_own_and_are_as_exact(ray_cluster: None, output: Path) -> None:
    options: dict[str, Any] = {"trials": 5, "method": "averaged", "vary": ("width=4,6",)}
    result = study(output, **options)
    plan = planned(output, **options)
    assert {point["width"] for point in points(result)} == {4, 6}
    for ended in result.finished:
        assert comparable(ended.metrics) == trained_here(config_at(plan.base, plan.space, ended.point)), ended.run


def test_the_best_is_rerun_over_seeds_and_the_shortlist_with_left_out(calm: StudyResult) -> None:
    plan = planned(output_of(calm), name="compared")
    best = config_at(plan.base, plan.space, calm.best.point)
    assert set(calm.reruns) == {1, 2}
    for seed, metrics in calm.reruns.items():
        assert comparable(metrics) == trained_here(best.with_options(seed=seed))
    shortlist = calm.finished[:2]
    assert set(calm.left_out) == {trial.number for trial in shortlist}
    for trial in shortlist:
        config = config_at(plan.base, plan.space, trial.point)
        assert calm.left_out[trial.number] == pytest.approx(left_out_metrics(config))
    assert {each.selection for each in calm.by_selection()} == {"held-out", "leave-one-out", "o.o.d. test (oracle)"}


def test_a_trials_option_of_several_numbers_has_one_place_in_the_table_of_the_best(calm: StudyResult) -> None:
    finished = [replace(each, resolved={"milestones": (0.5, 0.6 + each.number / 100)}) for each in calm.finished]
    result = replace(calm, finished=finished)
    header, rows = result.best_table().cells()
    assert "milestones" in header
    assert list(csv.reader(result.files()["best.csv"].decode().splitlines())) == [header, *rows]


@pytest.fixture(scope="module")
def two_trials(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    return study(tmp_path_factory.mktemp("two") / "runs", trials=2, **IN_TURN)


@pytest.mark.parametrize(
    ("event", "which"),
    [
        ("evaluated", 2),
        pytest.param("data", 1, marks=pytest.mark.slow),
        pytest.param("evaluated", 1, marks=pytest.mark.slow),
        pytest.param("checkpoint", 1, marks=pytest.mark.slow),
    ],
)
def test_a_trial_whose_event_cannot_be_written_is_not_finished_and_goes_on(
    two_trials: StudyResult, output: Path, monkeypatch: pytest.MonkeyPatch, event: str, which: int
) -> None:
    options: dict[str, Any] = {"trials": 2, **IN_TURN}
    append, count = OpenRun.append, itertools.count(1)

    def broken(run: OpenRun, name: str, /, at: int | None = None, **fields: Any) -> None:
        if run.record["kind"] == "run" and name == event and next(count) == which:
            raise DiskError(f"{run.file}: cannot be written (Input/output error)")
        append(run, name, at, **fields)

    with monkeypatch.context() as disk:
        disk.setattr(OpenRun, "append", broken)
        with pytest.raises(DiskError, match="cannot be written"):
            study(output, **options)
    first = require_run(folder_of(output, "s-trial-0"))
    assert first.status == "KILLED"
    again = study(output, **options)
    for before, after in zip(in_order(two_trials), in_order(again), strict=True):
        assert after.point == before.point
        assert after.run is not None
        assert before.run is not None
        assert [comparable(each.metrics) for each in after.run.history] == [
            comparable(each.metrics) for each in before.run.history
        ]


def test_the_shortlist_leaves_none_out_where_too_few_environments_remain(ray_cluster: None, output: Path) -> None:
    lines: list[str] = []
    result = study(output, lines.append, trials=1, shortlist=1, environments_per_step=3)
    assert (len(result.finished), result.left_out, result.failed) == (1, {}, [])
    assert "the best trials are not repeated with environments left out: --environments-per-step 3: there are 2" in str(
        lines
    )
    assert "trainings in the search: 1; after it of the best: 3 with environments left out" in lines
    assert "varied: lr, threshold, penalty; trained with and-mask" in lines


@pytest.mark.parametrize(
    ("options", "evaluations"),
    [({}, 1), ({"consistency": 2}, 1), ({"keep": "best"}, 4), ({"stop_spread": 0.1, "held_out": 0.2}, 4)],
)
def test_a_repetition_with_environments_left_out_keeps_the_weights_that_its_trial_kept(
    options: dict[str, Any], evaluations: int, tmp_path: Path
) -> None:
    plan = planned(tmp_path, evaluations=4, epochs=4, **options)
    (repetition,) = plan.parts("left-out", 0, plan.first[0], folds=("a",))
    (trial,) = plan.parts("trial", 0, plan.first[0])
    repetition.config.check()
    repeated, once = repetition.config.schedule, trial.config.schedule
    assert repeated.evaluations == evaluations
    assert (repeated.keep, repeated.stop_spread) == (once.keep, once.stop_spread)


def left_out_metrics(config: Any) -> dict[str, float]:
    """Mean and worst over trainings that leave each environment out, in this process."""
    folds = [trained_here(config, left_out) for left_out in ("a", "b", "c")]
    metrics: dict[str, float] = {}
    for measure, worst in (("accuracy", min), ("loss", max)):
        values = [fold[f"validation_{measure}"] for fold in folds]
        metrics |= {f"left_out_{measure}": sum(values) / 3, f"worst_left_out_{measure}": worst(values)}
    return metrics


def test_the_winner_is_registered_with_the_study_it_came_from(calm: StudyResult) -> None:
    store = Store.open(output_of(calm))
    best = calm.best
    version = show(store, "tiny-study")
    assert calm.record["model"] == version.uri
    lineage = {
        "concord.study": "calm",
        "concord.trial": str(best.number),
        "concord.selection": "held-out",
        "mlflow.parentRunId": calm.record["run_id"],
    }
    assert lineage.items() <= store.client.get_run(version.run_id).data.tags.items()
    registered = store.client.get_model_version(version.name, str(version.version))
    assert registered.tags["concord.study"] == "calm"
    assert len(registered.tags) <= 5
    assert f"Trial {best.number} of the study calm, chosen by selection held-out." in registered.description
    assert version.metrics["held_out_accuracy"] == pytest.approx(calm.best.metrics["held_out_accuracy"])


def test_a_study_says_whether_its_model_became_champion(calm: StudyResult) -> None:
    assert calm.registration == "models:/tiny-study/1: the champion now (the first champion)"
    assert (calm.as_json()["champion"], calm.as_json()["mode"]) == (True, "max")
    lines: list[str] = []
    again = study(output_of(calm), lines.append, **CALM)
    assert again.registration == calm.registration  # the winner was there already
    assert any("trials are done, 2 at a time, judged by held_out_accuracy, the larger the better" in s for s in lines)
    assert not any("trainings" in line for line in lines)  # none is left to wait for


def test_a_study_keeps_the_smallest_where_small_is_good(ray_cluster: None, output: Path) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"metric": "worst_off", "mode": "min", "trials": 4}
    result = study(output, lines.append, job_file=MEASURED, **options)
    values = [ended.metrics["worst_held_out_off"] for ended in result.finished]
    assert values == sorted(values)
    assert values[0] < values[-1]
    for ended in result.finished:  # the job says of the same numbers that small is good, and of their opposites
        for split in ("train", "held_out", "validation"):
            assert ended.metrics[f"worst_{split}_off"] == ended.metrics[f"worst_{split}_distance"]
            assert ended.metrics[f"worst_{split}_off"] == -ended.metrics[f"worst_{split}_closeness"]
        assert ended.metrics["worst_train_off"] > ended.metrics["train_off"]
    assert "judged by worst_held_out_off, the smaller the better (held-out examples" in "\n".join(lines)
    # The first trial is what the job is without a study.
    assert "the first trial has the job's own settings: lr 0.1" in lines
    first, *others = points(result)
    assert first == {"lr": 0.1}
    assert all(point != first for point in others)
    own = trained_here(load_job(MEASURED).job.config, job_file=MEASURED)
    assert comparable(in_order(result)[0].metrics).items() >= own.items()
    with pytest.raises(
        InputError, match=r"a study scored by worst_held_out_off, the smaller the better; here the larger the"
    ):
        planned(output, MEASURED, **options | {"mode": "max"})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"metric": "off"}, "--metric off: the job's measure has no mode; give --mode max or .*"),
        ({"metric": "worst_off"}, "--metric worst_off: the job's measure has no mode; give .*"),
        ({"metric": "distance", "mode": "max"}, "--mode max: the job's distance has mode min"),
        ({"mode": "max"}, "--mode max: the job's loss has mode min"),
        ({"metric": "of", "mode": "max"}, "--metric of: the job does not report it; there are closeness, distance, .*"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_no_direction_is_guessed(output: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refused:
        planned(output, MEASURED, **options)
    assert re.fullmatch(line, str(refused.value)), refused.value
    assert planned(output, MEASURED, metric="distance").criterion.mode == "min"
    assert planned(output, MEASURED, metric="worst_closeness").criterion.mode == "max"


def test_what_an_option_stands_for_is_found_for_each_trial(ray_cluster: None, output: Path) -> None:
    result = study(output, job_file=MEASURED, vary=("objective=erm,irm",), lr=0.1, search="grid")
    stand_for: dict[str, dict[str, Any]] = {
        "erm": {"aggregator": "mean", "beta1": 0.9, "epochs": 2},
        "irm": {"aggregator": "mean", "beta1": 0.9, "epochs": 3, "penalty_weight": 1e4},
    }
    _, children = mlflow(result)
    config = load_job(MEASURED).job.config
    assert len(result.finished) == 2
    for ended in result.finished:
        options = {"objective": ended.point["objective"], **stand_for[str(ended.point["objective"])]}
        assert comparable(ended.metrics) == trained_here(config.with_options(**options), job_file=MEASURED)
        assert children[ended.name].data.params == {name: str(value) for name, value in options.items()}
    header, rows = result.best_table().cells()
    assert [dict(zip(header, row, strict=True))["epochs"] for row in rows] == [
        str(stand_for[str(ended.point["objective"])]["epochs"]) for ended in result.finished
    ]


def test_a_study_varies_votes_and_both_ways_at_once_are_refused(ray_cluster: None, output: Path) -> None:
    vary = ("environment_momentum=0.0,0.9", "steps_per_update=1,3")
    result = study(output, job_file=MEASURED, vary=vary, lr=0.1, search="grid")
    config = load_job(MEASURED).job.config.with_options(lr=0.1)
    assert len(result.finished) == 3
    for ended in result.finished:
        own = trained_here(config.with_options(**ended.point), job_file=MEASURED)
        assert comparable(ended.metrics) == own
    (failed,) = result.failed
    assert str(failed.failure).startswith("--steps-per-update 3: with --environment-momentum all batches of an")


def test_trials_that_end_since_environments_are_equally_hard_are_finished(ray_cluster: None, output: Path) -> None:
    options: dict[str, Any] = {"epochs": 4, "stop_spread": 1e6, "stop_from": 0.5, "trials": 2}
    result = study(output, job_file=MEASURED, **options)
    assert not result.failed
    for ended in result.finished:
        assert ended.stopped == "held_out_spread < 1e+06"
        assert [at.epoch for at in ended.history] == [1, 2]
        config = config_at(planned(output, MEASURED, **options).base, result.space, ended.point)
        assert comparable(ended.metrics) == trained_here(config, job_file=MEASURED)
    folds = study(output, job_file=MEASURED, name="folds", selection="leave-one-out", **options | {"trials": 1})
    assert not folds.failed
    assert folds.best.metrics["worst_left_out_distance"] >= folds.best.metrics["left_out_distance"]


def test_leave_one_out_judges_by_one_training_for_each_environment(ray_cluster: None, output: Path) -> None:
    result = study(output, trials=2, selection="leave-one-out")
    plan = planned(output, name="compared", selection="leave-one-out")
    assert len(result.finished) == 2
    for ended in result.finished:
        config = config_at(plan.base, plan.space, ended.point)
        assert comparable(ended.metrics) == pytest.approx(trained_here(config) | left_out_metrics(config))
    scores = [ended.metrics["left_out_accuracy"] for ended in result.finished]
    assert scores == sorted(scores, reverse=True)


def test_a_trial_ends_early_when_the_stop_rule_holds(ray_cluster: None, output: Path) -> None:
    result = study(output, epochs=4, trials=5, stop_when=("train_accuracy>0.6", "ood-accuracy<1"))
    stopped = [ended for ended in result.finished if ended.stopped]
    assert 0 < len(stopped) < 5
    for ended in result.finished:
        held = [
            "train_accuracy" in m and m["train_accuracy"] > 0.6 and m["ood_accuracy"] < 1
            for m in (at.metrics for at in ended.history)
        ]
        assert ended.stopped == ("train_accuracy > 0.6 and ood_accuracy < 1" if any(held) else None)
        assert not any(held[:-1])
        assert len(held) == 4 or held[-1]
    assert result.record["oracle"] == "early stopping"
    _, children = mlflow(result)
    assert sum("concord.stopped" in run.data.tags for run in children.values()) == len(stopped)
    assert set(statuses(children)) == {"FINISHED"}


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["median", "asha"])
def test_a_scheduler_stops_trials_that_fall_behind_also_when_resumed(
    ray_cluster: None, output: Path, scheduler: str
) -> None:
    options = IN_TURN | {"scheduler": scheduler, "epochs": 4, "trials": 14}
    whole = study(output, name="whole", **options)
    stopped = [ended for ended in whole.finished if ended.stopped == SCHEDULER]
    assert 0 < len(stopped) < 14
    assert all((len(ended.history) < 4) == (ended.stopped == SCHEDULER) for ended in whole.finished)
    assert whole.best.stopped is None
    other = output / "other"  # where the runs are not there yet
    study(other, **options | {"trials": 8})
    parts = study(other, **options)
    assert outline(parts) == outline(whole)
    assert outline(study(output, name="reused", **options)) == outline(whole)


def outline(result: StudyResult) -> list[Any]:
    """What a study did, but for the time that it took."""
    return [
        (each.number, each.point, comparable(each.metrics), len(each.history), each.stopped)
        for each in in_order(result)
    ]


@pytest.mark.slow
def test_a_distributed_trial_is_watched_stopped_and_followed_by_the_next(ray_cluster: None, output: Path) -> None:
    result = study(
        output,
        trials=2,
        workers=2,
        epochs=3,
        pause=0.1,
        stop_when=("train_accuracy>0.6",),
        suggest=("lr=1,threshold=0,penalty=none", "lr=0.001,threshold=0,penalty=none"),
    )
    stopped, whole = in_order(result)
    assert stopped.stopped == "train_accuracy > 0.6"
    assert len(stopped.history) < 3
    assert whole.stopped is None
    assert [at.epoch for at in whole.history] == [1, 2, 3]
    plan = planned(output, name="compared", workers=2, epochs=3)
    alone = config_at(plan.base, plan.space, whole.point).with_options(workers=1)
    assert comparable(whole.metrics) == pytest.approx(trained_here(alone), rel=1e-4)
    assert not list((result.folder.path / "distributed").iterdir())


# --- what a study does again


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """A study of one trial after the other."""
    return study(tmp_path_factory.mktemp("undisturbed") / "runs", trials=MANY, **IN_TURN)


@pytest.fixture(scope="module")
def again(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """The first trials of the same study, somewhere else."""
    return study(tmp_path_factory.mktemp("again") / "runs", trials=7, **IN_TURN)


def test_one_trial_at_a_time_a_seed_decides_the_study(
    undisturbed: StudyResult, again: StudyResult, output: Path
) -> None:
    assert outline(again) == outline(undisturbed)[:7]
    first, *others = points(study(output, seed=1, trials=3, **IN_TURN))
    assert first == points(undisturbed)[0]  # the job's own settings
    assert all(point not in points(undisturbed) for point in others)


def test_a_study_is_extended_by_more_trials_and_continued_by_its_name(
    undisturbed: StudyResult, again: StudyResult, capsys: pytest.CaptureFixture[str]
) -> None:
    output = output_of(again)
    # A process that is killed may leave half a line.
    for file in (again.folder.path / EVENTS, output / "runs" / "s-trial-6" / EVENTS):
        with file.open("a") as lines:
            lines.write('{"event": "asked", "run": "s-tri')
    words = ["tune", JOB_FILE, "--output", str(output), "--name", "s", "--json"]
    assert main([*words, "--trials", str(MANY)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["finished"] == MANY
    before = events_of_runs(again)
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert events_of_runs(again) == before
    result = read_study(again.folder)
    assert outline(result) == outline(undisturbed)
    assert said["best"]["trial"] == result.best.number
    parent, children = mlflow(result)
    assert (parent.info.status, statuses(children)) == ("FINISHED", ["FINISHED"] * MANY)


@pytest.mark.slow
def test_max_minutes_ends_the_search_and_the_same_name_finishes_it(ray_cluster: None, output: Path) -> None:
    study_folder(output).path.mkdir(parents=True)  # as a process leaves it that is killed at once
    study(output, trials=2, search="random")
    lines: list[str] = []
    ended = study(output, lines.append, trials=5000, search="random", pause=0.0, max_minutes=0.03)
    assert any("--max-minutes 0.03: the time has run out" in line for line in lines)
    begun = len(runs_in(output).begun("trial"))
    assert 2 <= len(ended.finished) <= begun < 5000
    parent, children = mlflow(ended)
    assert parent.info.status == "FINISHED"
    assert sorted(statuses(children)) == ["FINISHED"] * len(ended.finished) + ["KILLED"] * (begun - len(ended.finished))
    result = study(output, trials=begun, search="random")
    assert sorted(ended.number for ended in result.finished) == list(range(begun))
    assert statuses(mlflow(result)[1]) == ["FINISHED"] * begun


# --- what a study survives


def command(output: Path, *options: str) -> list[str]:
    return ["tune", JOB_FILE, "--output", str(output), *options]


def events_of_runs(result: StudyResult) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in output_of(result).glob(f"runs/*/{EVENTS}")}


def ended(output: Path) -> int:
    """How many trials of the study have ended so far."""
    return len(runs_in(output).ended("trial"))


def killed_and_continued(output: Path, trials: int, kills: int, *options: str) -> StudyResult:
    """A study whose driver is killed at random moments, and that the same command continues."""
    words = command(output, "--name", "s", "--trials", str(trials), "--shortlist", "0", "--reruns", "0", *options)
    words += ["--no-register", "--pause", "0.03"]
    kept: list[bytes] = []
    moments = sorted(random.sample(range(1, trials - 6), kills))
    for moment in moments:
        with Command(*words) as process:
            wait_for(lambda moment=moment, process=process: process.poll() is not None or ended(output) >= moment, 300)
            time.sleep(random.uniform(0, 0.5))
            assert process.poll() is None, process.communicate()
            process.kill()
        kept.append((study_folder(output).path / EVENTS).read_bytes())
    with Command(*words) as done:
        _, errors = done.communicate(580)
    assert done.returncode == 0, (moments, errors[-2000:])
    written = (study_folder(output).path / EVENTS).read_bytes()
    assert all(written.startswith(before[: before.rfind(b"\n") + 1]) for before in kept), moments
    result = whole(output, trials)
    assert len(runs_of(output)) == 1 + trials
    assert {path.name for path in result.folder.path.iterdir()} >= {"figures", "best.csv", "summary.json"}
    return result


def whole(output: Path, trials: int) -> StudyResult:
    """The study, which has each trial once, finished, and in MLflow as it is here."""
    result = read_study(study_folder(output))
    assert [ended.number for ended in in_order(result)] == list(range(trials))
    assert not result.failed
    parent, children = mlflow(result)
    assert parent.info.status == "FINISHED"
    assert sorted(children) == sorted(ended.name for ended in result.finished)
    assert set(statuses(children)) == {"FINISHED"}
    for ended in result.finished:
        assert children[ended.name].data.metrics == ended.metrics
        assert children[ended.name].data.params["lr"] == str(ended.point["lr"])
        assert [at.epoch for at in ended.history] == sorted({at.epoch for at in ended.history})
    assert not list(result.folder.path.glob("tune-*"))
    return result


@pytest.mark.slow
def test_a_study_killed_twice_has_the_trials_of_an_undisturbed_one(undisturbed: StudyResult, output: Path) -> None:
    address = ray.get_runtime_context().gcs_address  # of a cluster that outlives the driver
    result = killed_and_continued(output, MANY, 2, "--concurrent", "1", "--startup", "5", "--address", address)
    assert outline(result) == outline(undisturbed)


@pytest.mark.slow
def test_a_study_of_200_trials_killed_five_times_has_each_once(output: Path) -> None:
    """Every driver starts a Ray of its own, which goes with it."""
    killed_and_continued(output, 200, 5)


def interrupted(words: Sequence[str], when: Callable[[], Any], by: int = signal.SIGINT) -> tuple[int, list[str]]:
    """Send Ctrl-C, as a terminal does to every process, or SIGTERM, as Slurm does to the driver.

    Gives how many trials had ended, and the words to go on.
    """
    with Command(*words) as process:
        wait_for(lambda: process.poll() is not None or when(), 1200)
        if by == signal.SIGINT:
            os.killpg(process.pid, by)
        else:
            process.send_signal(by)
        _, errors = process.communicate(timeout=60)
    said = [line for line in errors.splitlines() if line.startswith("concord: ")]
    assert len(said) == 1, errors
    assert "Traceback" not in errors, errors
    assert process.returncode == 1
    found = re.fullmatch(r"concord: stopped after (\d+) of \d+ trials; continue with concord (tune .*)", said[0])
    assert found is not None, said
    return int(found[1]), shlex.split(found[2])


def test_a_study_is_continued_with_its_store_and_cluster_and_shows_no_password(output: Path) -> None:
    plan = planned(output, name="s", address="ray://head:10001", tracking_uri="https://me:pass@host/", concurrent=1)
    words = ["--name", "s", "--output", str(output), "--tracking-uri", "https://me:***@host/"]
    words += ["--address", "ray://head:10001"]
    assert shlex.split(plan.continuation) == ["concord", "tune", JOB_FILE, *words]


@pytest.mark.parametrize("by", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_interrupted_study_says_how_to_resume_and_keeps_its_trials(
    ray_cluster: None, output: Path, by: signal.Signals
) -> None:
    options = ["--name", "s", "--trials", "6", "--pause", "0.1", "--shortlist", "0", "--reruns", "0", "--no-register"]
    options += ["--address", ray.get_runtime_context().gcs_address]
    done, words = interrupted(command(output, *options), lambda: ended(output) >= 1, by)
    folder = study_folder(output)
    before = (folder.path / EVENTS).read_bytes()
    parent, children = mlflow(read_study(folder))
    assert parent.info.status == "KILLED"
    assert statuses(children).count("FINISHED") == done == ended(output)
    assert statuses(children).count("KILLED") == len(children) - done
    assert main(words) == 0
    assert (folder.path / EVENTS).read_bytes().startswith(before)
    whole(output, 6)


TWO_WORKERS: dict[str, Any] = {"trials": 4, "workers": 2, "epochs": 3, "evaluations": 3, "pause": 0.05}


@pytest.fixture(scope="module")
def two_workers(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """A study of trials with two workers each."""
    return study(tmp_path_factory.mktemp("workers") / "runs", **TWO_WORKERS | IN_TURN)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["driver", "trial", "SIGTERM", "SIGINT"])
def test_trials_with_two_workers_are_trained_once_however_the_study_is_killed(
    two_workers: StudyResult, output: Path, killed: str
) -> None:
    options = TWO_WORKERS | {"shortlist": 0, "reruns": 0, "concurrent": 1, "startup": 5}
    words = command(output, "--name", "s", "--no-register", "--address", ray.get_runtime_context().gcs_address)
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]

    def second_trial_trains() -> bool:
        run = read_run(folder_of(output, "s-trial-1"))
        return run is not None and len(run.evaluations) > 0

    if killed in ("SIGTERM", "SIGINT"):
        _, words = interrupted(words, second_trial_trains, signal.Signals[killed])
    else:
        with Command(*words) as process:
            wait_for(lambda: process.poll() is not None or second_trial_trains(), 240)
            if killed == "driver":
                process.kill()
            else:
                for trial in children_named(os.getpid(), "ray::TrialProcess"):
                    os.kill(trial, signal.SIGKILL)
                _, errors = process.communicate(240)
                assert process.returncode == 0, errors
    if killed != "trial":
        assert main(words) == 0
    assert outline(whole(output, 4)) == outline(two_workers)


@pytest.mark.slow
def test_40_trials_with_two_workers_killed_in_every_way_are_those_of_an_undisturbed_study(
    ray_cluster: None, output: Path
) -> None:
    """In turn the driver, a trial's process and a worker are killed, and the driver gets SIGTERM and Ctrl-C."""
    size = TWO_WORKERS | {"trials": 40}
    undisturbed = study(output.with_name("undisturbed"), **size | IN_TURN)
    options = size | {"shortlist": 0, "reruns": 0, "concurrent": 1, "startup": 5}
    words = command(output, "--name", "s", "--no-register", "--address", ray.get_runtime_context().gcs_address)
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]

    def trains(number: int) -> bool:
        run = read_run(folder_of(output, f"s-trial-{number}"))
        return run is not None and len(run.evaluations) > 0

    def reached(process: Command, number: int) -> None:
        wait_for(lambda: process.poll() is not None or trains(number), 1200)
        assert process.poll() is None, process.communicate()

    def kill(name: str) -> None:
        def one() -> bool:  # it may end in the meantime
            for found in children_named(os.getpid(), name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found, signal.SIGKILL)
                    return True
            return False

        wait_for(one, 240)

    with Command(*words) as process:
        for number, name in ((3, "ray::TrialProcess"), (8, "ray::RayTrainWorker"), (11, "ray::TrialProcess")):
            reached(process, number)
            kill(name)
        reached(process, 14)
        process.kill()
    for number, by in ((19, signal.SIGTERM), (26, signal.SIGINT)):
        _, words = interrupted(words, lambda number=number: trains(number), by)
    with Command(*words) as process:
        reached(process, 31)
        kill("ray::RayTrainWorker")
        reached(process, 35)
        process.kill()
    assert main(words) == 0
    assert outline(whole(output, 40)) == outline(undisturbed)


@contextlib.contextmanager
def ctrl_c(when: Callable[[], Any]) -> Iterator[None]:
    """Press Ctrl-C as soon as this is true."""

    def press() -> None:
        wait_for(when, 240)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor() as threads:
        pressed = threads.submit(press)
        with pytest.raises(StoppedError):
            yield
        pressed.result()


@pytest.mark.parametrize(
    ("part", "options"),
    [
        pytest.param("", {"workers": 2, "evaluations": 10}, marks=pytest.mark.slow),
        pytest.param("", {"evaluations": 10}, marks=pytest.mark.slow),
        ("-without-b", {"evaluations": 1, "selection": "leave-one-out", "drawn": 2, "seed": 1}),
    ],
    ids=["two workers", "trial", "fold before its first evaluation"],
)
def test_a_stopped_trial_or_fold_continues_from_its_checkpoint(
    ray_cluster: None, output: Path, part: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concord.studies.pool._CHECKPOINT_SECONDS", 0.0)
    options = options | {"trials": 1, "epochs": 10, "checkpoints": 10, "pause": 0.05}
    evaluated = range(10 // options["evaluations"], 11, 10 // options["evaluations"])
    name = f"s-trial-0{part}"
    run = folder_of(output, name)
    with ctrl_c(lambda: len(run.names(CHECKPOINTS)) > 1):
        study(output, **options)
    before = require_run(run)
    assert before.status == "KILLED"
    assert min(options["evaluations"] - 1, 1) <= len(before.history) < options["evaluations"]
    lines: list[str] = []
    result = study(output, lines.append, **options)
    assert any(line.startswith(f"{name} continues from its checkpoint, after") for line in lines), lines
    after = require_run(run)
    assert after.began is not None
    assert after.began["resumed"]
    assert [at.epoch for at in after.history] == list(evaluated)
    assert after.seconds > before.seconds / 2
    plan = planned(output, **{**options, "workers": 1, "name": "compared"})
    config = config_at(plan.base, plan.space, result.best.point)
    expected = trained_here(config, "b" if part else None)
    assert comparable(after.metrics) == pytest.approx(expected, rel=1e-6 if part else 1e-4)


def trainings(witness: Path) -> int:
    """How often a model was made by another process than this one, which only looks at it."""
    return sum(int(line) != os.getpid() for line in witness.read_text().split())


def test_a_study_of_6_trials_with_a_registered_winner_trains_6_times(ray_cluster: None, output: Path) -> None:
    witness, lines = output.parent / "witness", list[str]()
    options: dict[str, Any] = {"trials": 6, "register": True, "witness": witness, "search": "random"}
    result = study(output, lines.append, **options)
    assert trainings(witness) == 6
    assert result.record["model"] == "models:/tiny-study/1"
    assert any(line.startswith(f"the best trial, {result.best.number}, is registered: lr ") for line in lines)
    checkpoints = {each.parent.parent.name for each in output.glob(f"runs/*/{CHECKPOINTS}/*")}
    assert checkpoints == {result.best.name}
    assert main(["analyze", JOB_FILE, "--name", result.best.name, "--output", str(output), "--epsilon", "1"]) == 0
    study(output, **options | {"trials": 7, "keep_trials": 3})
    assert trainings(witness) == 7
    words = ["train", JOB_FILE, "--name", result.finished[-1].name, "--resume", "--output", str(output)]
    assert main(words) == 0  # its checkpoint was removed, so it is trained again
    assert require_run(folder_of(output, result.finished[-1].name)).metrics.keys() >= result.finished[-1].metrics.keys()


def test_a_run_that_another_group_trained_is_not_trained_again(ray_cluster: None, output: Path) -> None:
    witness, lines = output.parent / "witness", list[str]()
    options: dict[str, Any] = {"method": "averaged", "vary": ("lr=0.1,0.2,0.3",), "search": "grid", "witness": witness}
    first = study(output, **options)
    assert trainings(witness) == 3
    second = study(output, lines.append, **options | {"name": "t", "register": True})
    assert [each.metrics for each in in_order(second)] == [each.metrics for each in in_order(first)]
    assert [each.name for each in in_order(second)] == [f"s-trial-{number}" for number in range(3)]
    assert second.record["model"] == "models:/tiny-study/1"  # s, which registers none, kept the best checkpoint
    assert trainings(witness) == 3
    assert set(first.folder.path.parent.iterdir()) == {first.folder.path, second.folder.path}


def test_trials_with_the_same_point_have_one_run(ray_cluster: None, output: Path) -> None:
    witness = output.parent / "witness"
    options = IN_TURN | {"method": "averaged", "vary": ("lr=0.1,0.2",), "search": "random", "witness": witness}
    result = study(output, **options | {"trials": 5, "register": True})
    distinct = {each.point["lr"]: each.metrics for each in result.finished}
    assert [each.number for each in in_order(result)] == [*range(5)]
    assert all(each.metrics == distinct[each.point["lr"]] for each in result.finished)
    assert trainings(witness) == len(distinct) == 2
    assert len(mlflow(result)[1]) == 2
    assert len([*output.glob(f"runs/*/{CHECKPOINTS}/*")]) == 1
    assert len(study(output, **options | {"trials": 8}).finished) == 8
    assert trainings(witness) == 2


@pytest.mark.slow
def test_a_study_leaves_alone_a_folder_that_has_the_name_of_its_trial(ray_cluster: None, output: Path) -> None:
    own = ["train", JOB_FILE, "--output", str(output), "--name", "s-trial-0", "--no-register"]
    assert main(own) == 0
    before = {file: file.read_bytes() for file in output.glob("runs/*/*") if file.is_file()}
    with pytest.raises(InputError, match=r"^--name s: .*/runs/s-trial-0 is a run of its own; give another name$"):
        study(output)
    assert {file: file.read_bytes() for file in output.glob("runs/*/*") if file.is_file()} == before
    notes = output / "runs" / "t-trial-0" / "notes"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(InputError, match=r"^--name t: .*/runs/t-trial-0 exists and is not a run; give another name$"):
        study(output, name="t")
    assert notes.read_text() == "mine"
    assert not list((output / "studies").glob("*"))


@pytest.mark.slow
def test_two_groups_that_want_the_same_runs_at_a_time_do_not_spoil_each_other(ray_cluster: None, output: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    words = ["--method", "averaged", "--vary", "lr=0.1,0.2,0.3", "--search", "grid", "--pause", "0.03"]
    words += ["--shortlist", "0", "--reruns", "0"]
    words += ["--no-register", "--address", address, "--concurrent", "1"]
    with (
        Command(*command(output, *words, "--name", "s")) as one,
        Command(*command(output, *words, "--name", "t")) as two,
    ):
        said = [each.communicate(240)[1] for each in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), said
    s, t = (read_study(study_folder(output, name)) for name in ("s", "t"))
    assert outline(s) == outline(t)
    assert len(s.finished) == 3
    for each in (*s.finished, *t.finished):
        assert (each.run is not None and each.run.status, len(each.history)) == ("FINISHED", 2)


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_trial_whose_process_is_killed_runs_again(ray_cluster: None, output: Path, by: signal.Signals) -> None:
    witness = output.parent / "witness"

    def kill() -> None:
        # The first line is of this process, which tries the model before it starts anything.
        lines = wait_for(lambda: witness.exists() and len(witness.read_text().split()) > 2 and witness.read_text(), 120)
        os.kill(int(lines.split()[-1]), by)

    killer = threading.Thread(target=kill)
    killer.start()
    result = study(output, trials=5, pause=0.1, witness=witness, **IN_TURN)
    killer.join()
    assert len(result.finished) == 5
    assert len(witness.read_text().split()) >= 1 + 5 + 1
    plan = planned(output, name="compared")
    for end in result.finished:
        assert comparable(end.metrics) == trained_here(config_at(plan.base, plan.space, end.point))
        assert [at.epoch for at in end.history] == [1, 2]
    assert statuses(mlflow(result)[1]) == ["FINISHED"] * 5


@pytest.mark.slow
def test_a_trial_that_takes_all_memory_fails_and_the_others_are_finished(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Ray of its own, which ends processes when 2.5 GB more than now are used on this machine."""
    known = {line.split()[0]: float(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    total, free = known["MemTotal:"], known["MemAvailable:"]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{1 - (free - 2.5e6) / total:.4f}")
    words = command(output, "--name", "s", "--trials", "4", "--vary", "broken=no,grows", "lr=0.03,0.3")
    words += ["--concurrent", "1", "--reruns", "0", "--shortlist", "0", "--no-register", "--max-failures", "1"]
    with Command(*words) as process:
        _, errors = process.communicate(300)
        assert process.returncode == 0, errors
    ends = read_study(study_folder(output))
    assert {end.point["broken"] for end in ends.finished} == {"no"}
    assert len(ends.finished) + sum("out of memory" in line for line in errors.splitlines()) == 4
    assert "out of memory" in errors


@pytest.mark.slow
def test_a_process_that_dies_between_two_trials_costs_neither(
    ray_cluster: None, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggest, killed = Search.suggest, []

    def suggest_late(search: Search, number: int) -> Any:
        if number == 2:
            for process in children_named(os.getpid(), "ray::TrialProcess"):
                os.kill(process, signal.SIGKILL)
                killed.append(process)
            time.sleep(1)
        return suggest(search, number)

    monkeypatch.setattr(Search, "suggest", suggest_late)
    result = study(output, trials=4, **IN_TURN)
    assert killed
    assert [ended.number for ended in in_order(result)] == [0, 1, 2, 3]
    assert not result.failed


@pytest.mark.slow
def test_a_full_disk_ends_the_study_and_costs_no_trial_that_had_ended(
    ray_cluster: None, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = 0
    fsync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal synced
        synced += 1
        if synced > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunFailedError, match=r"no space left"):
            study(output)
    assert 0 < ended(output) < 8
    result = study(output)
    assert len(result.finished) == 8
    assert statuses(mlflow(result)[1]) == ["FINISHED"] * 8


def test_failed_trials_are_kept_with_the_reason_and_the_others_go_on(ray_cluster: None, output: Path) -> None:
    lines: list[str] = []
    result = study(output, lines.append, method="fragile", search="grid", trials=8, max_failures=0)
    assert len(result.finished) == 2
    raised, died = "ArithmeticError: this model cannot be made, line ", "its process died"
    reasons = {"raises": raised, "exits": "SystemExit: this model cannot be made, line ", "dies": died}
    assert len(result.failed) == 6
    _, children = mlflow(result)
    for end in result.failed:
        reason = reasons[str(end.point["broken"])]
        assert end.failure is not None
        assert end.failure.startswith(reason)
        assert children[end.name].info.status == "FAILED"
        assert children[end.name].data.tags["concord.failure"] == end.failure
    assert all(children[ended.name].info.status == "FINISHED" for ended in result.finished)
    assert sum(raised in line for line in lines) == 1
    assert len(study(output, method="fragile", search="grid", trials=8, max_failures=0).failed) == 6


def test_a_study_of_which_every_trial_fails_says_so_once(
    ray_cluster: None, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--vary", "misshapen=b", "--trials", "3", "--concurrent", "1", "--name", "s", "--output", str(output)]
    assert main(["tune", JOB_FILE, *options]) == 1
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("concord: "))
    assert said.startswith("concord: every trial failed (3): environment b: ")
    folder = study_folder(output)
    parent, children = mlflow(read_study(folder))
    assert parent.info.status == "FAILED"
    assert statuses(children) == ["FAILED"] * 3


def test_a_study_whose_store_was_lost_tracks_all_its_trials_again(ray_cluster: None, output: Path) -> None:
    study(output, trials=2)
    with contextlib.closing(sqlite3.connect(output / "mlflow.db")) as database, database:
        for table in ("params", "tags", "metrics", "latest_metrics", "runs"):
            database.execute(f"DELETE FROM {table}")
    lines: list[str] = []
    study(output, lines.append, trials=3)
    assert any("has lost run" in line and "a new run takes the whole record" in line for line in lines)
    whole(output, 3)


@pytest.mark.slow
def test_trials_deleted_in_mlflow_are_restored_when_the_study_goes_on(ray_cluster: None, output: Path) -> None:
    study(output, trials=2)
    store = Store.open(output)
    trials = [each.run_id for each in store.search("tags.`concord.run` != ''") if "trial" in each.name]
    for run_id in trials:
        store.delete_run(run_id)
    study(output, trials=3)
    present = {each.run_id for each in store.search("tags.`concord.run` != ''")}
    assert present >= {*trials}
    whole(output, 3)


@pytest.mark.parametrize(
    "default",
    [pytest.param(False, id="output", marks=pytest.mark.slow), pytest.param(True, id="working-folder")],
)
def test_a_study_goes_on_where_its_folder_was_moved(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: bool
) -> None:
    def tune(folder: Path, trials: int) -> StudyResult:
        monkeypatch.chdir(folder if default else tmp_path)
        place = [] if default else ["--output", str(folder / DEFAULT_OUTPUT)]
        words = ["tune", JOB_FILE, "--method", "averaged", "--name", "s", "--trials", str(trials), "--concurrent", "1"]
        assert main([*words, *place, "--reruns", "0", "--shortlist", "0", "--no-register"]) == 0
        return whole(folder / DEFAULT_OUTPUT, trials)

    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    begun = tune(before, 2)
    before.rename(after)
    continued = tune(after, 3)
    assert points(continued)[:2] == points(begun)
    assert continued.record["run_id"] == begun.record["run_id"]
    assert [path.name for path in tmp_path.iterdir()] == [after.name]


@pytest.mark.parametrize("name", [pytest.param("a?b%20c", marks=pytest.mark.slow), "a#größe 大"])
def test_a_study_takes_an_output_folder_of_any_name(ray_cluster: None, tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    study(output, trials=1, register=True)
    whole(output, 1)
    store = Store.open(output)
    assert load_program(store, show(store, "tiny-study")) is not None
    assert [path.name for path in tmp_path.iterdir()] == [name]


# --- what a study refuses


def test_what_the_space_fixes_is_tried_before_anything_is_written(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", JOB_FILE, "--vary", "broken=raises", "lr=0.1,0.2", "--trials", "3", "--output", str(output)]
    assert main(words) == 2
    assert "its model cannot be made (ArithmeticError: this model cannot be made" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"trials": 0}, "--trials 0: must be at least 1"),
        (
            {"method": "averaged", "lr": 0.1},
            "the space is empty: nothing is varied; give --vary NAME=VALUES or --space FILE",
        ),
        ({"vary": ("lr=0.1,0.2",), "lr": 0.1}, "--vary lr: contradicts --lr, which fixes it"),
        ({"vary": ("nothing=1,2",)}, "space: nothing: the job has no such option; it has .*"),
        ({"method": "none"}, "--method none: there is no such method; there are masked, .*"),
        ({"metric": "f1"}, "--metric f1: the job does not report it; there are accuracy, loss, .*"),
        ({"selection": "validation"}, "--selection validation: the job has no validation environments"),
        (
            {"selection": "validation", "metric": "worst_loss"},
            "--selection validation: the job has no validation environments",
        ),
        ({"selection": "held-out", "held_out": 0.0}, "--selection held-out: no examples are held out; .*"),
        ({"selection": "leave-one-out", "folds": 4}, "--folds 4: there are 3 training environments"),
        ({"selection": "leave-one-out", "scheduler": "asha"}, "--scheduler asha: leave-one-out .*"),
        ({"stop_when": ("accuracy",)}, "--stop-when accuracy: give METRIC>NUMBER or METRIC<NUMBER"),
        ({"stop_when": ("f1>0",)}, "--stop-when f1: is not reported; there are .*"),
        ({"suggest": ("lr=5",)}, "--suggest lr=5: lr 5 is not in the space"),
        ({"search": "grid"}, "--search grid: lr is a number from 0.001 to 1; list its values, .*"),
        ({"workers": 2, "min_workers": 1}, "--min-workers 1: a trial that loses its workers .*"),
        ({"resume": True}, "--resume: the same --name continues a study; leave --resume out"),
        ({"name": "a/b"}, "--name a/b: must have letters, digits, .*"),
        ({"concurrent": -1}, "--concurrent -1: must not be negative"),
        ({"gpus_per_trial": 0.0}, "--gpus-per-trial 0.0: must be above 0"),
        ({"concurrent": 3}, "--concurrent 3: 3 trials with a CPU each do not fit; .* enough for 2"),
        ({"workers": 4}, "--workers 4: more than the 3 training environments; .*"),
        ({"misshapen": "c"}, r"environment c: one example of its inputs is \(3,\) float32, but \(4,\) float32 in .*"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_meant_is_refused_in_one_line_and_leaves_nothing(
    ray_cluster: None, output: Path, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(InputError) as refused:
        study(output, **options)
    assert re.fullmatch(line, str(refused.value)), refused.value
    if "misshapen" in options:  # which is not known before all data are loaded
        assert runs_of(output) == list((output / "studies").glob("*")) == []
    else:
        assert not output.exists()


def test_the_oracle_is_refused_without_test_environments(ray_cluster: None, output: Path) -> None:
    source = Path(JOB_FILE).read_text().replace(', test=["d"]', "")
    job_file = output.parent / "untested.py"
    job_file.write_text(source)
    with pytest.raises(InputError, match=r"^--selection oracle: the job has no test environments$"):
        planned(output, str(job_file), selection="oracle")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"job_file": OTHER_JOB_FILE}, "--name calm: is a study of job tiny-study, not of shared-rule"),
        ({"vary": ("lr=0.1,0.2",)}, "--space .*: the study calm was started with .*; give another name"),
        ({"epochs": 3}, "--epochs 3: the study calm was started with 2; give another name"),
        ({"seed": 1}, "--seed 1: the study calm was started with 0; give another name"),
        ({"method": "averaged"}, "--method averaged: the study calm was started with masked; give another name"),
        ({"selection": "oracle"}, "--selection oracle: the study calm was started with held-out; give another name"),
        ({"scheduler": "asha"}, "--scheduler asha: the study calm was started with none; give another name"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_name_belongs_to_one_study(calm: StudyResult, options: dict[str, Any], line: str) -> None:
    output = output_of(calm)
    before = {path: path.stat().st_mtime_ns for path in calm.folder.path.rglob("*")}
    with pytest.raises(InputError, match=f"^{line}$"):
        planned(output, **{"name": "calm", "reruns": 2, "shortlist": 2, "register": True} | options)
    assert {path: path.stat().st_mtime_ns for path in calm.folder.path.rglob("*")} == before


def test_a_study_that_continues_begins_with_the_points_it_began_with(calm: StudyResult, output: Path) -> None:
    folder = study_folder(output, "calm").path
    folder.mkdir(parents=True)
    options: dict[str, Any] = {"name": "calm", "reruns": 2, "shortlist": 2, "register": True}
    own = {"point": {"lr": 0.25, "threshold": 0.5, "penalty": "none"}, "moved": {}}
    for recorded, first in ((own, (own["point"],)), (None, ())):
        (folder / RECORD).write_text(json.dumps({**calm.record, "own": recorded}))
        assert planned(output, **options).first == first
    assert planned(output, **options | {"name": "new"}).first == (in_order(calm)[0].point,)


def test_a_study_of_before_an_option_goes_on_where_it_is_at_its_default(calm: StudyResult, output: Path) -> None:
    folder = study_folder(output, "calm").path
    folder.mkdir(parents=True)
    older = {name: value for name, value in calm.record["deciding"].items() if name != "width"}
    (folder / RECORD).write_text(json.dumps({**calm.record, "deciding": older}))
    options: dict[str, Any] = {"name": "calm", "reruns": 2, "shortlist": 2, "register": True}
    assert planned(output, **options).name == "calm"
    with pytest.raises(InputError, match=r"--width 6: the study calm was started with None; give another name"):
        planned(output, **options, width=6)


def test_a_study_continues_with_its_rule_in_whatever_way_numbers_are_written(calm: StudyResult, output: Path) -> None:
    folder = study_folder(output, "calm").path
    folder.mkdir(parents=True)
    deciding = {**calm.record["deciding"], "stop_when": "train_accuracy > 0.6"}
    (folder / RECORD).write_text(json.dumps({**calm.record, "deciding": deciding}))
    options: dict[str, Any] = {"name": "calm", "reruns": 2, "shortlist": 2, "register": True}
    for text in ("train_accuracy>0.6", "train-accuracy>.6", "train_accuracy>6e-1"):
        assert str(planned(output, **options, stop_when=(text,)).stop_rule) == "train_accuracy > 0.6"
    with pytest.raises(InputError, match=r"^--stop-when train_accuracy > 0.61: the study calm was started with "):
        planned(output, **options, stop_when=("train_accuracy>0.61",))


def test_a_study_is_judged_by_validation_environments_where_there_are_some(output: Path) -> None:
    sensors = str(Path(JOB_FILE).with_name("sensors.py"))
    for options, selection, metric in (
        ({"job_file": sensors}, "validation", "validation_accuracy"),
        ({"job_file": sensors, "selection": "held-out"}, "held-out", "held_out_accuracy"),
        ({"job_file": sensors, "metric": "spread"}, "held-out", "held_out_spread"),
        ({}, "held-out", "held_out_accuracy"),
    ):
        plan = planned(output, **options)
        assert (plan.options.selection, plan.criterion.metric) == (selection, metric)


def test_a_study_that_continues_keeps_the_selection_it_began_with(calm: StudyResult, output: Path) -> None:
    folder = study_folder(output, "calm").path
    folder.mkdir(parents=True)
    criterion = {**calm.record["criterion"], "selection": "oracle", "metric": "ood_accuracy"}
    deciding = {**calm.record["deciding"], "selection": "oracle"}
    (folder / RECORD).write_text(json.dumps({**calm.record, "criterion": criterion, "deciding": deciding}))
    options: dict[str, Any] = {"name": "calm", "reruns": 2, "shortlist": 2, "register": True}
    assert planned(output, **options).criterion.metric == "ood_accuracy"


def test_two_processes_do_not_work_on_one_study(calm: StudyResult) -> None:
    with (
        calm.folder.locked("study", "ann"),
        pytest.raises(
            InputError, match=r"^--name calm: another process is using this study: ann on \S+ since [\d: -]+ UTC; wait"
        ),
    ):
        study(output_of(calm), name="calm")


@pytest.mark.parametrize("tracked_elsewhere", [False, True])
def test_an_output_folder_that_cannot_be_written_is_refused(
    ray_cluster: None, output: Path, tracked_elsewhere: bool
) -> None:
    output.write_text("in the way")
    elsewhere = f"sqlite:///{output.parent / 'elsewhere.db'}"
    with pytest.raises(InputError, match=r"^--output ") as refused:
        study(output, tracking_uri=elsewhere if tracked_elsewhere else None)
    assert "\n" not in str(refused.value)
    assert output.read_text() == "in the way"
    if tracked_elsewhere:
        assert Store.open(output.parent, elsewhere).client.search_experiments(filter_string="name != 'Default'") == []
