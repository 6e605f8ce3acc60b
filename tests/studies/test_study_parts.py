"""The parts of a study: its record survives failures; trials are stopped, ranked and explained."""

import contextlib
import dataclasses
import itertools
import json
import math
import pickle
import resource
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from concord.runs.worker import RunSpec
from concord.studies.unfinished import RunCheckpoints, UnfinishedRuns
from hypothesis import given, settings
from hypothesis import strategies as st
from test_study import comparable

from concord.analysis.parameter_importance import FEWEST_TRIALS, missing_for_importance, parameter_importance
from concord.environments import Environments, ExampleSource
from concord.environments.tree import Tree
from concord.errors import InputError, RunFailedError
from concord.options import OptionGroup, option_values
from concord.record import EVENTS, Events, read_history
from concord.runs.execute import execute
from concord.storage import Folder
from concord.studies.criterion import (
    SCORED_ON,
    Criterion,
    check_metric,
    chosen_mode,
    left_out_metrics,
    measure_of,
    worst_environments,
)
from concord.studies.group_progress import GroupProgress
from concord.studies.proposals import EndedRun, GroupRuns, RunProposal
from concord.studies.shared_data import data_options, share_data
from concord.studies.stopping import PROGRESS, SCHEDULER, SCORE, StopRule, replay, scheduler
from concord.training import Evaluation, Job, TrainConfig, load_job
from concord.training.evaluation import Mode, worst

claim = settings(max_examples=20, deadline=None)


def proposal(number: int, **more: Any) -> RunProposal:
    return RunProposal(**{"kind": "trial", "trial": number, "point": {"lr": 0.1 * number}, **more})


def ended(number: int = 0, history: list[Evaluation] | None = None, **metrics: float) -> EndedRun:
    return EndedRun(proposal(number), history or [Evaluation(1, 10, metrics)], 2.5, 1.7e9)


# The runs of a group in its record

words = st.text(max_size=4)
metrics = st.dictionaries(st.sampled_from(["held_out_loss", "ood_accuracy"]), st.floats(allow_nan=False))
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
chosen = st.dictionaries(words, values | st.tuples(values, st.tuples(values)), max_size=3)
proposals = st.builds(
    RunProposal,
    kind=st.sampled_from(["trial", "left-out", "seed"]),
    trial=st.integers(0, 3),
    point=chosen,
    seed=st.none() | st.integers(0, 2),
    left_out=st.lists(words, max_size=2).map(tuple),
    whole=st.booleans(),
    resolved=chosen,
    name=st.none() | words,
)
ends = st.fixed_dictionaries({"seconds": st.floats(0, 1e9)}, optional={"stopped": words}).map(
    lambda fields: {"status": "FINISHED", **fields}
) | st.builds(lambda why: {"status": "FAILED", "seconds": 1.0, "failure": why}, words)
group_events = st.lists(st.tuples(proposals, metrics, st.none() | ends), max_size=4)


def known(folder: Path) -> Any:
    """What is known of a group's runs, in its order."""
    runs = GroupRuns(read_history(Folder(folder)))
    return [(runs.begun(kind), runs.ended(kind)) for kind in KINDS]


KINDS: list[Any] = ["trial", "left-out", "seed"]


def written(folder: Path, group: Sequence[tuple[RunProposal, dict[str, float], Any]]) -> list[Any]:
    """What was known after each event."""
    events = Events(Folder(folder))
    states = [known(folder)]
    for began, at, end in group:
        events.append("began", run=began.key, **began.as_event())
        states.append(known(folder))
        events.append("evaluated", run=began.key, epoch=1, step=1, metrics=at)
        states.append(known(folder))
        if end is not None:
            events.append("ended", run=began.key, **end)
            states.append(known(folder))
    events.close()
    return states


def test_a_group_cut_off_anywhere_resumes_from_its_last_whole_event() -> None:
    later = proposal(7, kind="seed", seed=9)

    @claim
    @given(group_events, st.data())
    def any_group(group: list[tuple[RunProposal, dict[str, float], Any]], data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            states = written(folder, group)
            path = folder / EVENTS
            text = path.read_bytes()
            assert text.count(b"\n") == len(states) - 1
            kept = text[: data.draw(st.integers(0, len(text)))]
            whole = kept[: kept.rfind(b"\n") + 1]
            path.write_bytes(kept)
            assert known(folder) == states[whole.count(b"\n")]
            assert path.read_bytes() == kept  # who only reads changes nothing
            (state,) = written(folder, [(later, {"held_out_loss": 1.0}, {"status": "FINISHED", "seconds": 1.0})])[-1:]
            assert path.read_bytes().startswith(whole)
            assert state[2][0][-1] == later
            assert state[2][1][-1].metrics == {"held_out_loss": 1.0}
            assert state[:2] == states[whole.count(b"\n")][:2]

    any_group()


def test_a_full_disk_ends_the_group_and_leaves_no_torn_event(tmp_path: Path) -> None:
    events = Events(Folder(tmp_path))
    events.append("began", run="trial 0", **proposal(0).as_event())
    size = (tmp_path / EVENTS).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
        with pytest.raises(RunFailedError):
            events.append("began", run="trial 1", **proposal(1).as_event())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / EVENTS).stat().st_size == size
    events.append("began", run="trial 2", **proposal(2).as_event())
    assert known(tmp_path)[0][0] == [proposal(0), proposal(2)]


WRITER = """
import itertools, sys
from pathlib import Path
from concord.record import Events
from concord.storage import Folder
folder = Folder(Path(sys.argv[1]))
with folder.locked("study"):
    events = Events(folder)
    for number in itertools.count():
        run = f"trial {number}"
        events.append("began", run=run, kind="trial", trial=number, point={"lr": 0.1})
        events.append("ended", run=run, status="FINISHED", seconds=1.0)
        events.sync()
"""


def test_a_killed_process_loses_nothing_that_ended_and_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    deadline = time.monotonic() + 60
    while (not path.exists() or path.stat().st_size < 20_000) and time.monotonic() < deadline:
        time.sleep(0.005)
    with (
        pytest.raises(InputError, match=r"--name .*: another process is using this study"),
        Folder(tmp_path).locked("study"),
    ):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    count = path.read_bytes().count(b"\n")
    with Folder(tmp_path).locked("study"):
        runs = GroupRuns(Events(Folder(tmp_path)).history)
    assert len(runs.ended("trial")) == count // 2 > 0
    assert [began.trial for began in runs.unfinished("trial")] == [count // 2] * (count % 2)


def test_results_come_in_order_of_ends_and_abandoned_trials_have_none(tmp_path: Path) -> None:
    again = [proposal(1, kind="left-out", whole=False), proposal(1, kind="seed", seed=5)]
    assert [each.key for each in again] == ["left-out 1", "seed 1 seed 5"]
    events = Events(Folder(tmp_path))
    for each in (*map(proposal, range(4)), *again):
        events.append("began", run=each.key, **each.as_event())
    for each, status in ((proposal(2), "FINISHED"), (proposal(0), "FINISHED"), (proposal(3), "FAILED")):
        time.sleep(0.002)
        more = {"failure": "no number"} if status == "FAILED" else {}
        events.append("evaluated", run=each.key, epoch=1, step=1, metrics={"ood_accuracy": 0.5})
        events.append("ended", run=each.key, status=status, seconds=1.0, **more)
    events.append("ended", run="trial 1", status="KILLED", seconds=1.0)
    for runs in (GroupRuns(events.history), GroupRuns(read_history(Folder(tmp_path)))):
        assert [each.run.trial for each in runs.ended("trial")] == [2, 0, 3]
        assert [each.run.trial for each in runs.finished("trial")] == [2, 0]
        assert (runs.ended("trial")[2].failure, runs.ended("trial")[2].metrics) == ("no number", {})
        assert runs.unfinished("trial") == [proposal(1)]
        assert runs.unfinished("seed") == [again[1]]


def part_of_a_run(run: RunCheckpoints, seconds: float, evaluations: int | None) -> list[Evaluation]:
    """Some evaluations of a run of eight epochs that keeps checkpoints alone, from its last one on."""
    file = load_job(str(Path(__file__).parents[1] / "jobs" / "tiny_study.py"))
    options: dict[str, Any] = {"epochs": 8, "evaluations": 8, "checkpoints": 8}
    config = file.job.config.with_options(**options)
    spec = RunSpec(file.path, file.source, None, option_values(config), run.folder, checkpoint_seconds=seconds)
    found = []
    with contextlib.closing(execute(spec, file, config, run, run.start)) as training:
        for evaluation in itertools.islice(training, evaluations):
            found.append(evaluation)
            run.reports.append({"step": evaluation.step})
    return found


def test_an_unfinished_run_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path / "unfinished" / "trial-3"), Folder(tmp_path / "undisturbed")
    undisturbed = part_of_a_run(RunCheckpoints.read(other), math.inf, None)
    assert not other.exists()  # too short for a checkpoint
    part_of_a_run(RunCheckpoints.read(folder), 0.0, 6)
    assert folder.names() == ["checkpoints"]
    kept = [f"checkpoint_{each.step:012d}" for each in undisturbed[3:5]]  # the sixth epoch's is written after it
    assert folder.names("checkpoints") == sorted([*kept, *(f"{name}.json" for name in kept)])
    (folder.path / "checkpoints" / "checkpoint_000000009999").mkdir()  # a process died as it wrote it
    again = RunCheckpoints.read(folder)
    assert (again.start, again.reports) == (kept[1], [{"step": each.step} for each in undisturbed[:5]])
    assert 0 < again.seconds_before < 60
    rest = part_of_a_run(again, 0.0, None)
    assert [(each.step, comparable(each.metrics)) for each in rest] == [
        (each.step, comparable(each.metrics)) for each in undisturbed[5:]
    ]


def test_the_time_left_counts_the_training_before_a_checkpoint() -> None:
    said: list[str] = []
    shown = GroupProgress("trials", 6, said.append)
    for number in (1, 2):  # both trained for 10 minutes before the group was stopped
        shown.evaluated(proposal(number), 0.0)
    for number in (1, 2):
        shown.continues(proposal(number), 600.0)
    for number in (1, 2):
        shown.ended(ended(number))
    assert shown.line() == "2/6 trials, 0 running, 20 min left"
    assert said == [f"trial {number} continues from its checkpoint, after 10 min of training" for number in (1, 2)]


def test_a_damaged_checkpoint_is_not_used(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "trial-3")
    part_of_a_run(RunCheckpoints.read(folder), 0.0, 4)
    first, second = [name for name in folder.names("checkpoints") if not name.endswith(".json")]
    weights = folder.path / "checkpoints" / second / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert RunCheckpoints.read(folder).start == first
    (folder.path / "checkpoints" / f"{first}.json").write_text("{")
    again = RunCheckpoints.read(folder)
    assert (again.start, again.reports) == (None, [])


def test_a_checkpoint_that_cannot_be_written_fails_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trial-3").mkdir()
    folder = Folder(tmp_path / "trial-3" / ("n" * 300))  # too long a name for a folder
    assert len(part_of_a_run(RunCheckpoints(folder), 0.0, None)) == 8
    assert "a checkpoint is missing" in caplog.text


@pytest.mark.parametrize(
    "other",
    [{"point": {"lr": 0.5}}, {"origin": {"data": "v2"}}, {"seed": 7}, {"left_out": ("a",)}, {"resolved": {"a": 1}}],
)
def test_a_checkpoint_of_another_run_or_other_code_is_not_found(other: dict[str, Any], tmp_path: Path) -> None:
    runs, changed = (UnfinishedRuns(Folder(tmp_path / "unfinished"), code) for code in ("old", "new"))
    run = proposal(3, origin={"commit": "a", "machine": "b", "data": "v1"})
    own = runs.name(run)
    assert own == runs.name(dataclasses.replace(run, name="table 2", origin={"machine": "c", "data": "v1"}))
    assert own not in {changed.name(run), runs.name(dataclasses.replace(run, **other))}
    for name in (own, changed.name(run), runs.name(proposal(33))):
        (tmp_path / "unfinished" / name).mkdir(parents=True)
    runs.remove(["trial 3", "trial 4"])
    assert runs.folder.names() == [runs.name(proposal(33))]
    runs.close(["trial 33"])
    assert not runs.folder.exists()


# When a trial ends early

PAPER = StopRule.of(["train_accuracy>0.97", "ood_accuracy<0.6"])


@pytest.mark.parametrize(
    ("train", "ood", "stops"),
    [(0.98, 0.5, True), (0.98, 0.6, False), (0.97, 0.5, False), (0.96, 0.5, False), (1.0, 0.9, False)],
)
def test_the_rule_of_the_paper(train: float, ood: float, stops: bool) -> None:
    """B.3: training accuracy above 97% with a test accuracy below 60%."""
    assert PAPER.holds({"train_accuracy": train, "ood_accuracy": ood, "train_loss": 0.1}) is stops
    assert str(PAPER) == "train_accuracy > 0.97 and ood_accuracy < 0.6"
    assert PAPER.oracle
    assert StopRule.of(["worst-ood-accuracy<.6e0"]).oracle
    assert not StopRule.of(["train_accuracy>0.97", "held_out_goodness>0.9"]).oracle


def test_a_rule_asks_for_all_of_its_conditions() -> None:
    assert not PAPER.holds({"train_accuracy": 0.99})
    assert not PAPER.holds({"train_accuracy": 0.99, "ood_accuracy": math.nan})
    assert not StopRule(()).holds({"train_accuracy": 0.99})
    rule = StopRule.of(["a>=1", "a<=1"])
    assert [rule.holds({"a": a}) for a in (0.999, 1.0, 1.001)] == [False, True, False]


signs = st.sampled_from([">", "<", ">=", "<="])
conditions = st.tuples(
    st.text(string.ascii_lowercase + "_", min_size=1), signs, st.floats(allow_nan=False).filter(math.isfinite)
)


@claim
@given(st.lists(conditions, min_size=1, max_size=3))
def test_a_rule_is_read_back_from_what_it_says(conditions: list[tuple[str, str, float]]) -> None:
    rule = StopRule(tuple(conditions))
    assert StopRule.of(str(rule).split(" and ")) == rule
    assert StopRule.of([f"{name.replace('_', '-')}{sign}{bound}" for name, sign, bound in conditions]) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "train_accuracy",
        "train_accuracy>",
        ">0.9",
        "a=0.9",
        "a==0.9",
        "a>>1",
        "a>b",
        "a>nan",
        "a>1e",
        "a>1 b<2",
        "a/b>1",
    ],
)
def test_a_condition_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError) as refused:
        StopRule.of(["train_loss<1", text])
    assert str(refused.value) == f"--stop-when {text}: give METRIC>NUMBER or METRIC<NUMBER"


def test_a_condition_on_what_is_not_reported_is_refused() -> None:
    PAPER.check(["ood_accuracy", "train_accuracy"])
    with pytest.raises(InputError) as refused:
        PAPER.check(iter(["train_accuracy", "train_loss"]))
    assert str(refused.value) == "--stop-when ood_accuracy: is not reported; there are train_accuracy, train_loss"


# Schedulers


def live(stopping: Any, scores: list[float], own_end: int | None = None) -> Iterator[EndedRun | None]:
    """A trial as Ray Tune runs it, an evaluation at a time; in the end what became of it."""
    from ray.tune.experiment import Trial

    trial = Trial("live", stub=True)
    stopping.on_trial_add(None, trial)
    history: list[Evaluation] = []
    for epoch, score in enumerate(scores, 1):
        result = {PROGRESS: 100 * epoch / len(scores), SCORE: score}
        history.append(Evaluation(epoch, epoch, {"score": score}))
        itself = epoch == len(scores) or epoch == own_end
        if itself or stopping.on_trial_result(None, trial, result) == "STOP":
            stopping.on_trial_complete(None, trial, result)
            stopped = ("a rule" if epoch < len(scores) else None) if itself else SCHEDULER
            yield EndedRun(proposal(0), history, 1.0, 1.0, stopped)
            return
        yield None


def last(trial: Iterator[EndedRun | None]) -> EndedRun:
    (*_, end) = trial
    assert end is not None
    return end


def replayed(kind: Any, results: list[EndedRun], epochs: dict[int, int]) -> Any:
    """A new scheduler to which these trials are replayed."""
    new = scheduler(kind)
    replay(new, results, lambda metrics: metrics["score"], lambda run: epochs[run.trial])
    return new


curves = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", ["asha", "median"])
def test_a_scheduler_told_of_earlier_trials_decides_as_if_it_saw_them(kind: Any) -> None:
    @claim
    @given(
        st.lists(st.tuples(curves, st.none() | st.integers(1, 4)), max_size=12),
        st.randoms(use_true_random=False),
        st.lists(curves, min_size=1, max_size=4),
    )
    def any_trials(earlier: list[tuple[list[float], int | None]], random: Any, later: list[list[float]]) -> None:
        seeing = scheduler(kind)
        running = {number: live(seeing, *each) for number, each in enumerate(earlier)}
        results = []
        while running:  # side by side
            number = random.choice(list(running))
            end = next(running[number])
            if end is not None:
                results.append(dataclasses.replace(end, run=proposal(number)))
                del running[number]
        telling = replayed(kind, results, {number: len(scores) for number, (scores, _) in enumerate(earlier)})
        for scores in later:
            assert last(live(telling, scores)) == last(live(seeing, scores))

    any_trials()


@pytest.mark.parametrize("kind", ["asha", "median"])
def test_a_trial_that_falls_behind_earlier_ones_is_stopped(kind: Any) -> None:
    def trials(count: int) -> list[EndedRun]:
        ends = [last(live(scheduler("none"), [0.8 + number / 100] * 10)) for number in range(count)]
        return [dataclasses.replace(end, run=proposal(number)) for number, end in enumerate(ends)]

    epochs = dict.fromkeys(range(6), 10)
    for scores, epoch in (([0.1] * 20, {"asha": 2, "median": 4}[kind]), ([0.9] * 20, 20)):
        assert len(last(live(replayed(kind, trials(6), epochs), scores)).history) == epoch
    alone = last(live(scheduler(kind), [0.1] * 20))
    assert (len(alone.history), alone.stopped) == (20, None)
    if kind == "median":  # which asks for five to compare with
        assert len(last(live(replayed(kind, trials(4), epochs), [0.1] * 20)).history) == 20


def test_the_median_rule_does_not_pause_a_trial_to_let_others_go_first() -> None:
    """A paused trial goes on from a checkpoint, and trials write none."""
    from ray.tune.experiment import Trial

    class Controller:
        def get_live_trials(self) -> list[Trial]:
            return [Trial("waiting", stub=True)]

    stopping, trial = scheduler("median"), Trial("running", stub=True)
    stopping.on_trial_add(Controller(), trial)
    for percent in range(10, 100, 10):
        assert stopping.on_trial_result(Controller(), trial, {PROGRESS: percent, SCORE: 0.5}) == "CONTINUE"


def test_without_a_scheduler_every_trial_comes_to_its_end() -> None:
    assert last(live(scheduler("none"), [0.0] * 10)).stopped is None


# What trials are judged by


@pytest.mark.parametrize(
    ("selection", "measure", "metric", "mode", "loss"),
    [
        ("held-out", "accuracy", "held_out_accuracy", "max", "held_out_loss"),
        ("validation", "worst_loss", "worst_validation_loss", "min", "validation_loss"),
        ("leave-one-out", "worst_accuracy", "worst_left_out_accuracy", "max", "left_out_loss"),
        ("oracle", "squared_error", "ood_squared_error", "min", "ood_loss"),
    ],
)
def test_a_criterion_is_a_measure_on_what_a_selection_looks_at(
    selection: Any, measure: str, metric: str, mode: str, loss: str
) -> None:
    criterion = Criterion.of(selection, measure, mode)  # type: ignore[arg-type]
    assert (criterion.metric, criterion.mode, criterion.loss) == (metric, mode, loss)
    assert criterion.oracle == (selection == "oracle") == ("oracle" in SCORED_ON[selection].lower())


def test_scores_are_finite_and_the_larger_the_better() -> None:
    accuracy, loss = Criterion.of("held-out", "accuracy", "max"), Criterion.of("held-out", "loss", "min")
    assert accuracy.score({"held_out_accuracy": 0.75}) == 0.75
    assert loss.score({"held_out_loss": 0.75}) == -0.75
    for criterion in (accuracy, loss):
        for metrics in ({}, {criterion.metric: math.nan}, {criterion.metric: math.inf}, {criterion.metric: -math.inf}):
            assert math.isfinite(criterion.score(metrics))
            assert criterion.score(metrics) < -1e20


def test_a_run_below_what_the_job_requires_has_no_value() -> None:
    """An untrained network has no spread."""
    spread = Criterion("held-out", "held_out_spread", "min", {"worst_held_out_accuracy": 0.625})
    trained, untrained = (
        {"held_out_spread": at, "worst_held_out_accuracy": least} for at, least in ((0.1, 0.7), (0.0, 0.5))
    )
    assert spread.score(trained) == -0.1
    assert spread.score(untrained) == spread.score({"held_out_spread": 0.0}) < -1e20
    runs = [ended(number, [Evaluation(1, 1, metrics)]) for number, metrics in enumerate((untrained, trained))]
    assert [each.run.trial for each in spread.ranked(runs)] == [1]
    assert Criterion(**json.loads(json.dumps(dataclasses.asdict(spread)))) == spread


@pytest.mark.parametrize(
    ("metric", "measure"),
    [
        ("held_out_spread", "spread"),
        ("worst_validation_loss", "worst_loss"),
        ("held_out_loss", "loss"),
        ("ood_loss", None),
        ("train_loss", None),
        ("", None),
    ],
)
def test_a_criterion_names_a_measure_on_examples_that_may_judge(metric: str, measure: str | None) -> None:
    assert measure_of(metric, ["loss", "spread"]) == measure


few = st.sampled_from([0.0, 0.5, 1.0, math.nan, math.inf, -math.inf, None])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(few, few), max_size=7), st.sampled_from(["accuracy", "loss"]), st.randoms())
def test_the_best_comes_first_equals_by_loss_and_then_by_number(
    scored: list[tuple[float | None, float | None]], measure: str, random: Any
) -> None:
    criterion = Criterion.of("validation", measure, "min" if measure == "loss" else "max")
    results = []
    for number, (value, loss) in enumerate(scored):
        metrics = {"validation_loss": loss, criterion.metric: value}
        found = {name: value for name, value in metrics.items() if value is not None}
        results.append(ended(number, [Evaluation(1, 1, found)]))
    expected = [each for each in results if math.isfinite(each.metrics.get(criterion.metric, math.nan))]
    random.shuffle(results)
    ranked = criterion.ranked(results)
    assert sorted(each.run.trial for each in ranked) == [each.run.trial for each in expected]
    for one, other in itertools.pairwise(ranked):
        better, worse = one.run, other.run
        scores = criterion.score(one.metrics), criterion.score(other.metrics)
        assert scores[0] >= scores[1]
        if scores[0] == scores[1]:
            losses = [each.metrics.get("validation_loss", math.inf) for each in (one, other)]
            losses = [loss if math.isfinite(loss) else math.inf for loss in losses]  # no number is the worst
            assert (losses[0], better.trial) < (losses[1], worse.trial)


@pytest.mark.parametrize(
    ("selection", "measure", "message"),
    [
        ("held-out", "accuracy", "--selection held-out: no examples are held out; give --held-out above 0"),
        ("validation", "loss", "--selection validation: the job has no validation environments"),
        ("oracle", "loss", "--selection oracle: the job has no test environments"),
    ],
)
def test_a_criterion_that_is_not_reported_is_refused(selection: Any, measure: str, message: str) -> None:
    reported = ["train_loss", "train_accuracy", "left_out_loss"]
    check_metric(Criterion.of("leave-one-out", "loss", "min"), reported)
    with pytest.raises(InputError) as refused:
        check_metric(Criterion.of(selection, measure, "max"), reported)
    assert str(refused.value).startswith(message)


MODES: dict[str, Mode | None] = {"loss": "min", "accuracy": "max", "rmse": None}


@pytest.mark.parametrize(
    ("measure", "asked", "expected"),
    [
        ("accuracy", None, "max"),
        ("worst_accuracy", "max", "max"),
        ("worst_loss", None, "min"),
        ("rmse", "min", "min"),
        ("worst_rmse", "max", "max"),
        ("rmse", None, "--metric rmse: the job's measure has no mode; give --mode max or --mode"),
        ("worst_rmse", None, "--metric worst_rmse: the job's measure has no mode"),
        ("worst_loss", "max", "--mode max: the job's loss has mode min"),
        (
            "f1",
            "max",
            "--metric f1: the job does not report it; there are accuracy, loss, rmse, each also as worst_…",
        ),
        ("worst_f1", None, "--metric worst_f1: the job does not report it; there are accuracy, loss, rmse"),
        ("accuracy", "min", "--mode min: the job's accuracy has mode max"),
    ],
)
def test_the_job_or_the_mode_decides_the_direction_and_nobody_guesses(
    measure: str, asked: Mode | None, expected: str
) -> None:
    if expected in ("max", "min"):
        assert chosen_mode(measure, asked, MODES) == expected
    else:
        with pytest.raises(InputError) as refused:
            chosen_mode(measure, asked, MODES)
        assert str(refused.value).startswith(expected)


def test_the_worst_environment_by_a_measure_without_a_direction() -> None:
    metrics = {"rmse/train/a": 1.0, "rmse/train/b": 2.0, "rmse/held_out/a": 3.0, "rmse/ood/x/y": 4.0, "mse/ood/x": 9.0}
    of_held_out = {"worst_held_out_rmse": 3.0, "worst_validation_rmse": 3.0}
    assert worst_environments(metrics, "rmse", "min") == {"worst_train_rmse": 2.0, "worst_ood_rmse": 4.0} | of_held_out
    assert worst_environments(metrics, "rmse", "max") == {"worst_train_rmse": 1.0, "worst_ood_rmse": 4.0} | of_held_out


@pytest.mark.parametrize("values", list(itertools.permutations([0.5, math.nan, 0.7])))
@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_worst_of_values_with_a_nan_is_nan_in_any_order(values: tuple[float, ...], mode: Mode) -> None:
    assert math.isnan(worst(values, mode))
    folds = [{"validation_rmse": value} for value in values]
    assert math.isnan(left_out_metrics(folds, {"rmse": mode})["worst_left_out_rmse"])


# Which options matter

GENERATOR = np.random.default_rng(0)
TRIALS: list[dict[str, Any]] = [
    {
        "lr": float(10 ** GENERATOR.uniform(-4, 0)),
        "optimizer": str(GENERATOR.choice(["adam", "sgd"])),
        **({"penalty": "none"} if GENERATOR.random() < 0.5 else {"penalty": "l1", "l1": float(GENERATOR.uniform())}),
        "dropout": float(GENERATOR.uniform()),
    }
    for _ in range(40)
]


def test_the_option_that_decides_the_score_is_the_most_important() -> None:
    of_lr = parameter_importance(TRIALS, [-abs(math.log10(trial["lr"]) + 2) for trial in TRIALS])
    assert sorted(of_lr) == ["dropout", "l1", "lr", "optimizer", "penalty"]
    assert next(iter(of_lr)) == "lr"
    assert of_lr["lr"] > 0.5
    assert all(0 <= value < 0.1 for name, value in of_lr.items() if name != "lr")
    assert list(of_lr.values()) == sorted(of_lr.values(), reverse=True)
    penalties = [{name: trial[name] for name in ("penalty", "l1") if name in trial} for trial in TRIALS]
    conditional = parameter_importance(penalties, [trial.get("l1", -1) for trial in penalties])
    assert next(iter(conditional)) == "l1"


def test_importance_does_not_depend_on_how_a_number_is_written_down() -> None:
    trials = [{name: trial[name] for name in ("lr", "optimizer")} for trial in TRIALS[:24]]
    scores = [math.log10(trial["lr"]) + (trial["optimizer"] == "sgd") for trial in trials]
    expected = parameter_importance(trials, scores)
    ranked = sorted(trial["lr"] for trial in trials)
    places = [ranked.index(trial["lr"]) for trial in trials]
    # Whole numbers and others in turn, in the same order as the learning rates were.
    written = [
        {**trial, "lr": place if place % 2 else float(place)} for trial, place in zip(trials, places, strict=True)
    ]
    assert parameter_importance(written, scores) == expected


def test_few_trials_or_equal_scores_say_nothing() -> None:
    assert parameter_importance(TRIALS[: FEWEST_TRIALS - 1], list(range(FEWEST_TRIALS - 1))) == {}
    assert parameter_importance(TRIALS, [0.5] * len(TRIALS)) == {}
    assert parameter_importance([{}] * 20, list(range(20))) == {}
    assert parameter_importance([], []) == {}
    assert missing_for_importance(TRIALS, list(range(len(TRIALS)))) is None
    assert missing_for_importance(TRIALS[:3], [1, 2, 3]) == "it needs 16 finished trials, and there are 3"
    assert missing_for_importance(TRIALS, [0.5] * 40) is not None
    assert missing_for_importance([{}] * 20, list(range(20))) == "no option was varied"


# What the data depend on


@dataclass(frozen=True, kw_only=True)
class Sizes(OptionGroup):
    examples: int = 100


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    environments: int = 4
    sizes: Sizes = dataclasses.field(default_factory=Sizes)


def test_data_may_depend_on_a_jobs_own_options_and_data_options() -> None:
    found = data_options(Config)
    assert found == {"environments", "examples", "seed", "held_out", "data_dir", "leave_out"}


def job_of(value: Callable[[Config], float]) -> Job[Config]:
    """A job whose data are this value of the options."""

    def environments(config: Config) -> Environments:
        def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((4, 2), value(config)), torch.zeros(4, dtype=torch.long)

        return Environments(load, train=["a", "b"])

    return Job(environments, lambda _: torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, config=Config())


def test_data_are_not_shared_by_trials_that_vary_what_environments_read(ray_cluster: None) -> None:
    job = job_of(lambda config: config.optimizer.lr)
    assert share_data(job, job.config, ["lr"]) is None
    shared = share_data(job, job.config, ["l2", "epochs"])
    assert shared is not None
    assert shared.fits(job.config.with_options(l2=0.5))
    assert not shared.fits(job.config.with_options(lr=0.5))


@pytest.mark.parametrize(
    ("value", "varied"),
    [
        (lambda config: option_values(config)["lr"], "lr"),
        (lambda config: option_values(config).get("lr", 0.0), "lr"),
        (lambda config: config.with_options(l2=0.0).optimizer.lr, "lr"),
        (lambda config: float(len(config.method)), "aggregator"),
        (lambda config: vars(config.optimizer)["lr"], "lr"),
    ],
    ids=["item", "get", "with_options", "method", "vars"],
)
def test_options_may_be_read_in_any_way(ray_cluster: None, value: Callable[[Config], float], varied: str) -> None:
    job = job_of(value)
    assert share_data(job, job.config, [varied]) is None
    shared = share_data(job, job.config, ["readers"])
    assert shared is not None
    inputs, _ = shared.prepared().training[0].training.take(slice(1))
    assert inputs[0, 0] == pytest.approx(value(job.config))


class Kept(ExampleSource):
    """Examples that are computed from the options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __len__(self) -> int:
        return 4

    def take(self, examples: slice | torch.Tensor, draw: torch.Tensor | None = None) -> Tree:
        targets = torch.zeros(4, dtype=torch.long)[examples]
        return torch.full((*targets.shape, 2), self.config.optimizer.lr), targets


def test_a_source_that_keeps_the_options_is_shared(ray_cluster: None) -> None:
    def environments(config: Config) -> Environments:
        return Environments(lambda _: Kept(config), train=["a", "b"])

    job = dataclasses.replace(job_of(lambda _: 0.0), environments=environments)
    shared = share_data(job, job.config, ["l2"])
    assert shared is not None
    for_readers = pickle.loads(pickle.dumps(shared.prepared().training[0].training))
    assert for_readers.take(slice(1))[0][0, 0] == pytest.approx(job.config.optimizer.lr)
