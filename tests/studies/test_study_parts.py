"""The parts of a study: its record survives failures; trials are stopped, ranked and explained."""

import contextlib
import dataclasses
import itertools
import json
import math
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import comparable, described, record_run
from waiting import wait_for

from concord.analysis.parameter_importance import FEWEST_TRIALS, missing_for_importance, parameter_importance
from concord.environments import Environments, ExampleSource
from concord.environments.tree import Tree
from concord.errors import InputError
from concord.execution.execute import CHECKPOINTS, RunTask, execute, last_checkpoint, remove_older
from concord.execution.key import Key
from concord.execution.lifecycle import ActiveRun, Member, open_run, reserved_group
from concord.execution.spec import RunSpec
from concord.options import OptionGroup, option_values
from concord.record import EVENTS, OpenRun, Run, folder_of, read_record, read_run, require_run, write_record
from concord.storage import Folder
from concord.studies.criterion import (
    SCORED_ON,
    Criterion,
    StopRule,
    TrialEvaluator,
    check_metric,
    chosen_mode,
    left_out_metrics,
    measure_of,
    worst_environments,
)
from concord.studies.plan import StudyPlan, plan_study
from concord.studies.pool import SCHEDULER
from concord.studies.proposals import GroupProgress, GroupRuns, Trial
from concord.studies.study import replay, scheduler
from concord.studies.study_options import options_for
from concord.studies.trial import PROGRESS, SCORE, data_options, share_data
from concord.tracking.run_search import Condition
from concord.training import Evaluation, Job, TrainConfig, load_job
from concord.training.checkpoint import MODEL
from concord.training.declared_measures import Mode
from concord.training.evaluation import worst

claim = settings(max_examples=20, deadline=None)


def ended(number: int = 0, history: list[Evaluation] | None = None, **metrics: float) -> Trial:
    run = Run.of(history or [Evaluation(1, 10, metrics)])
    return Trial("trial", number, {"lr": 0.1 * number}, None, {}, {None: run}, TrialEvaluator())


# The runs of a group in their records

words = st.text(max_size=4)
metrics = st.dictionaries(st.sampled_from(["held_out_loss", "ood_accuracy"]), st.floats(allow_nan=False))
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
chosen = st.dictionaries(words, values | st.tuples(values, st.tuples(values)), max_size=3)
places = st.fixed_dictionaries(
    {"kind": st.sampled_from(["trial", "left-out", "seed"]), "trial": st.integers(0, 3), "point": chosen},
    optional={"seed": st.integers(0, 2), "left_out": st.sampled_from("ab"), "resolved": chosen},
)
group_runs = st.lists(
    st.tuples(places, st.none() | metrics),
    max_size=4,
    unique_by=lambda run: tuple(run[0].get(name) for name in ("kind", "trial", "seed", "left_out")),
)
KINDS: list[Any] = ["trial", "left-out", "seed"]


def group_folder(output: Path) -> Folder:
    return folder_of(output, "s", "study")


@contextlib.contextmanager
def opened(output: Path) -> Iterator[OpenRun]:
    """A group's record, open."""
    folder = group_folder(output)
    record = read_record(folder, "study") or write_record(folder, "study", described("study"))
    with contextlib.closing(OpenRun(folder, record)) as group:
        yield group


def runs_of(output: Path) -> GroupRuns:
    return GroupRuns(read_run(group_folder(output), "study") or Run(group_folder(output)))


def known(output: Path) -> Any:
    """What is known of a group's runs, in its order and in that of their ends."""
    runs = runs_of(output)
    found = [trials for kind in KINDS for trials in (runs.begun(kind), runs.ended(kind))]
    return [[(each.number, each.seed, each.point, each.failure, each.metrics) for each in trials] for trials in found]


def test_a_group_cut_off_anywhere_resumes_from_its_last_whole_event() -> None:
    later: dict[str, Any] = {"kind": "seed", "trial": 7, "point": {}, "seed": 9}

    @claim
    @given(group_runs, st.data())
    def any_group(group: list[tuple[dict[str, Any], dict[str, float] | None]], data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as name:
            output = Path(name)
            with opened(output):
                states = [known(output)]
            for place, at in group:
                with opened(output) as record:
                    record_run(record, at, **place)
                states.append(known(output))
            path = group_folder(output).path / EVENTS
            text = path.read_bytes()
            assert text.count(b"\n") == len(group)
            kept = text[: data.draw(st.integers(0, len(text)))]
            whole = kept[: kept.rfind(b"\n") + 1]
            path.write_bytes(kept)
            assert known(output) == states[whole.count(b"\n")]
            assert path.read_bytes() == kept  # who only reads changes nothing
            with opened(output) as record:
                record_run(record, {"held_out_loss": 1.0}, **later)
            assert path.read_bytes().startswith(whole)
            assert known(output)[-1][-1] == (7, 9, {}, None, {"held_out_loss": 1.0})
            assert known(output)[:4] == states[whole.count(b"\n")][:4]

    any_group()


WRITER = f"""
import itertools, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from recorded import described, record_run
from concord.record import OpenRun, folder_of, write_record
folder = folder_of(Path(sys.argv[1]), "s", "study")
folder.make()
with folder.locked("study"):
    group = OpenRun(folder, write_record(folder, "study", described("study")))
    for number in itertools.count():
        record_run(group, {{"loss": 1.0}}, kind="trial", trial=number, point={{"lr": 0.1}})
        group.sync()
"""


def test_a_killed_process_loses_nothing_that_ended_and_leaves_no_lock(tmp_path: Path) -> None:
    path = group_folder(tmp_path).path / EVENTS
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    wait_for(lambda: path.exists() and path.stat().st_size > 5_000, 60)
    with (
        pytest.raises(InputError, match=r"--name s: another process is using this study"),
        group_folder(tmp_path).locked("study"),
    ):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    asked = path.read_bytes().count(b"\n")
    with group_folder(tmp_path).locked("study"):
        over = [each.complete for each in runs_of(tmp_path).begun("trial")]
    assert len(over) == asked > 0
    assert all(over[:-1])


def test_results_come_in_order_of_ends_and_abandoned_trials_have_none(tmp_path: Path) -> None:
    def place(number: int, kind: str = "trial", **more: Any) -> dict[str, Any]:
        return {"kind": kind, "trial": number, "point": {"lr": 0.1 * number}, **more}

    with opened(tmp_path) as group:
        group.append("asked", run="s-kind-trial-trial-1", key="", **place(1))  # and its process was killed
        for number, at in ((2, 0.5), (0, 0.5), (3, None)):
            record_run(group, None if at is None else {"ood_accuracy": at}, **place(number))
            time.sleep(0.002)
        group.append("asked", run="never", key="", **place(1, "seed", seed=5))
        for runs in (GroupRuns(group), runs_of(tmp_path)):
            assert [each.number for each in runs.ended("trial")] == [2, 0, 3]
            assert [each.number for each in runs.finished("trial")] == [2, 0]
            assert (runs.ended("trial")[2].failure, runs.ended("trial")[2].metrics) == ("ValueError: no", {})
            assert [each.number for each in runs.begun("trial") if not each.complete] == [1]
            assert [each.seed for each in runs.begun("seed") if not each.complete] == [5]


TINY = str(Path(__file__).parents[1] / "jobs" / "tiny_study.py")


def part_of_a_run(folder: Folder, seconds: float, evaluations: int | None) -> list[Evaluation]:
    """Some evaluations of a group's run of eight epochs, from its last checkpoint on, recorded in its folder."""
    file = load_job(TINY)
    options: dict[str, Any] = {"epochs": 8, "evaluations": 8, "checkpoints": 8}
    config = file.job.config.with_options(**options).resolve()
    record = read_record(folder) or write_record(folder, "run", described(job="tiny-study"))
    with contextlib.closing(OpenRun(folder, record)) as run:
        run.append("began", resumed=bool(run.checkpoints))

        def take(name: str, /, **fields: Any) -> None:
            run.append(name, **fields)
            if name == "checkpoint":
                remove_older(run)

        task = RunTask(file.sent, option_values(config), folder, checkpoint_seconds=seconds)
        start = last_checkpoint(run, lambda _: None)
        with contextlib.closing(execute(task, file, take, start)) as training:
            return list(itertools.islice(training, evaluations))


def test_an_unfinished_run_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    folder, other = (folder_of(tmp_path, name) for name in ("s-trial-3", "undisturbed"))
    undisturbed = part_of_a_run(other, math.inf, None)
    steps = [each.step for each in undisturbed]
    assert other.names(CHECKPOINTS) == [f"checkpoint_{steps[-1]:012d}"]  # too short for another one
    part_of_a_run(folder, 0.0, 6)
    assert folder.names(CHECKPOINTS) == [f"checkpoint_{step:012d}" for step in steps[3:5]]  # the sixth is not yet there
    (folder.path / CHECKPOINTS / "checkpoint_000000009999.new").mkdir()  # a process died as it wrote it
    rest = part_of_a_run(folder, 0.0, None)
    assert [comparable(each.metrics) for each in rest] == [comparable(each.metrics) for each in undisturbed[5:]]
    run = require_run(folder)
    assert [each.step for each in run.history] == steps
    assert 0 < run.seconds_before < 60


def test_a_run_is_found_by_its_key_or_by_all_of_it_but_the_data(tmp_path: Path) -> None:
    def found(key: Key) -> str | None:
        run = runs.by_key(key)
        return None if run is None else run.name

    key = Key("job", {"lr": 0.1})
    first, second = (dataclasses.replace(key, data=version) for version in ("1", "2"))
    asked = [{"run": name, "key": each.value} for name, each in (("a", first), ("b", second), ("c", first))]
    runs = GroupRuns(Run(folder_of(tmp_path, "s", "study"), asked=list(asked)))
    assert [found(each) for each in (first, second, key)] == ["c", "b", "c"]
    assert found(dataclasses.replace(key, data="3")) is None
    assert found(Key("job", {"lr": 0.2})) is None


def test_without_a_terminal_a_line_comes_after_ten_seconds_and_some_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("concord.execution.progress.time.monotonic", lambda: now)
    monkeypatch.setattr("concord.execution.progress.on_terminal", lambda: False)
    lines: list[str] = []
    shown = GroupProgress("trials", 4, lines.append)
    for at, percent in ((0.0, 0.0), (3.0, 0.0), (4.0, 50.0), (14.0, 50.0), (20.0, 50.0), (21.0, 75.0)):
        now = at
        shown.evaluated("s-trial-0", percent)
    assert lines == ["0/4 trials, 1 running"] * 2
    now = 40.0
    shown.ended(Run(Folder(Path("s-trial-0"))), "trial 0")
    assert lines[2:] == ["1/4 trials, 0 running, 2 min left"]


def test_the_time_left_counts_the_training_before_a_checkpoint() -> None:
    said: list[str] = []
    shown = GroupProgress("trials", 6, said.append)
    names = ["s-trial-1", "s-trial-2"]
    for name in names:  # both trained for 10 minutes before the group was stopped
        shown.evaluated(name, 0.0)
    for name in names:
        shown.continues(name, 600.0)
    for name in names:
        shown.ended(Run(Folder(Path(name))), name)
    assert shown.line() == "2/6 trials, 0 running, 20 min left"
    assert said == [f"{name} continues from its checkpoint, after 10 min of training" for name in names]


def test_the_trainings_that_follow_are_announced_and_their_time_once_it_can_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("concord.execution.progress.time.monotonic", lambda: now)
    shown = GroupProgress("trials", 4, lambda _: None, parts=2, after=6)
    shown.evaluated("a", 0.0)
    assert shown.line() == "0/4 trials, 1 running, then 6 trainings"
    now = 120.0
    for name in ("a", "b"):  # a trial of two runs
        shown.ended(Run(Folder(Path(name))), name)
    assert shown.line() == "1/4 trials, 0 running, 6 min left, then 6 trainings of about 6 min"


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_gauges_count_whole_trials(parts: int) -> None:
    shown = GroupProgress("trials", 4, lambda _: None, parts=parts)
    failed, finished = Run(Folder(Path("f"))), Run(Folder(Path("g")))
    failed.ended = {"failure": "out of memory", "at": 0}
    shown.ended(failed, "trial 0")  # a fold, whose trial is over
    counts = {each.tags: each.value for each in shown.samples() if each.name == "concord_trials"}
    assert counts == {("running",): 0, ("finished",): 0, ("failed",): 1}
    for _ in range(parts):
        shown.ended(finished, "trial 1")
    counts = {each.tags: each.value for each in shown.samples() if each.name == "concord_trials"}
    assert counts[("finished",)] == 1


def test_a_damaged_checkpoint_is_not_used(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "s-trial-3")
    part_of_a_run(folder, 0.0, 4)
    listed = folder.names(CHECKPOINTS)
    weights = folder.path / CHECKPOINTS / listed[1] / MODEL
    weights.write_bytes(weights.read_bytes()[:-1])
    assert last_checkpoint(require_run(folder), lambda _: None) == listed[0]


def test_a_checkpoint_that_cannot_be_written_fails_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, "s-trial-3")
    folder.make()
    (folder.path / CHECKPOINTS).write_text("in the way")
    assert len(part_of_a_run(folder, 0.0, None)) == 8
    assert "a checkpoint is missing" in caplog.text


@contextlib.contextmanager
def open_study(output: Path) -> Iterator[tuple[StudyPlan, ActiveRun]]:
    """A study whose runs a test begins itself."""
    job = load_job(TINY)
    given: dict[str, Any] = {"name": "s", "output": output, "vary": ("lr=0.1,0.2",)}
    plan = plan_study(job, options_for(job.job.config).with_options(**given), set(given))
    with (
        reserved_group("study", plan.base, plan.folder) as reserved,
        open_run(reserved, plan.record(reserved.store), lambda _: None) as group,
    ):
        yield plan, group


def begun(spec: RunSpec, group: ActiveRun, until: str = "KILLED") -> tuple[Mapping[str, Any] | None, list[str]]:
    """How a run begins that ends so, and with which checkpoints."""
    member = Member(spec, group)
    found = member.run.began, list(member.run.checkpoints)
    member.end(until)  # type: ignore[arg-type]
    return found


def test_a_run_goes_on_only_with_what_the_same_run_left(tmp_path: Path) -> None:
    """A checkpoint counts once the evaluations before it are recorded, even if its own event was lost."""
    with open_study(tmp_path) as (plan, group):
        (spec,) = plan.parts("trial", 0, {"lr": 0.1, "threshold": 0.5, "penalty": "none"})
        member = Member(spec, group)
        member.run.append("evaluated", epoch=1, step=3, metrics={"train_loss": 0.5})
        member.end("KILLED")
        for name in ("checkpoint_000000000003", "checkpoint_000000000006", "checkpoint_000000000003.new"):
            (member.run.folder.path / CHECKPOINTS / name).mkdir(parents=True)
        for _ in range(2):
            began, checkpoints = begun(spec, group)
            assert began is not None
            assert (began["resumed"], checkpoints) == (True, ["checkpoint_000000000003"])
        key = spec.key
        for other in (
            {"options": {**key.options, "lr": 0.2}},
            {"sources": {**key.sources, "tiny_study.py": "changed"}},
        ):
            changed = dataclasses.replace(spec, key=dataclasses.replace(key, **other))
            began, checkpoints = begun(changed, group)
            assert began is not None
            assert (began["resumed"], checkpoints) == (False, [])
            assert member.run.folder.names(CHECKPOINTS) == []
            (member.run.folder.path / CHECKPOINTS / "checkpoint_000000000003").mkdir(parents=True)


def test_every_part_of_a_study_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Also where names of environments are alike in plain letters, or a study's name is long."""
    file = tmp_path / "cities.py"
    file.write_text(
        "import torch\nfrom concord.environments import Environments\nfrom concord.training import Job\n"
        "names = ['北京', '上海', 'new york', 'new-york']\n"
        "job = Job(lambda _: Environments(lambda _: (torch.ones(20, 3), torch.arange(20) % 2), names),\n"
        "    lambda _: torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)\n",
        encoding="utf-8",
    )
    job = load_job(str(file))
    for name in ("s", "s" * 160):
        given: dict[str, Any] = {"name": name, "output": tmp_path, "vary": ("lr=0.1,0.2",)}
        plan = plan_study(job, options_for(job.job.config).with_options(**given), set(given))
        assert len(plan.shortlist_folds) == 4
        parts = [
            plan.parts("trial", trial, {"lr": lr}, folds=plan.shortlist_folds) for trial, lr in ((1, 0.1), (12, 0.2))
        ]
        assert len({spec.name for part in parts for spec in part}) == 10


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
    st.text(string.ascii_lowercase + "_").map("m".__add__), signs, st.floats(allow_nan=False).filter(math.isfinite)
)


@claim
@given(st.lists(conditions, min_size=1, max_size=3))
def test_a_rule_is_read_back_from_what_it_says(conditions: list[tuple[str, str, float]]) -> None:
    rule = StopRule(tuple(Condition(name, sign, str(bound)) for name, sign, bound in conditions))
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
        "a>inf",
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
    with pytest.raises(InputError, match=r"^--stop-when accuracy/ood/d: is not reported; there are "):
        StopRule.of(["accuracy/ood/d>0"]).check(["ood_accuracy"])


# Schedulers


def live(stopping: Any, scores: list[float], own_end: int | None = None) -> Iterator[Trial | None]:
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
            run = Run.of(history)
            run.ended = {"status": "FINISHED", "at": 0, **({} if stopped is None else {"stopped": stopped})}
            yield dataclasses.replace(ended(), parts={None: run})
            return
        yield None


def last(trial: Iterator[Trial | None]) -> Trial:
    (*_, end) = trial
    assert end is not None
    return end


def replayed(kind: Any, results: list[Trial], epochs: dict[int, int]) -> Any:
    """A new scheduler to which these trials are replayed."""
    new = scheduler(kind)
    for each in results:
        replay(new, each, lambda metrics: metrics["score"], epochs[each.number])
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
                results.append(dataclasses.replace(end, number=number))
                del running[number]
        telling = replayed(kind, results, {number: len(scores) for number, (scores, _) in enumerate(earlier)})
        for scores in later:
            assert last(live(telling, scores)) == last(live(seeing, scores))

    any_trials()


@pytest.mark.parametrize("kind", ["asha", "median"])
def test_a_trial_that_falls_behind_earlier_ones_is_stopped(kind: Any) -> None:
    def trials(count: int) -> list[Trial]:
        ends = [last(live(scheduler("none"), [0.8 + number / 100] * 10)) for number in range(count)]
        return [dataclasses.replace(end, number=number) for number, end in enumerate(ends)]

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
    assert [each.number for each in spread.ranked(runs)] == [1]
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
    assert sorted(each.number for each in ranked) == [each.number for each in expected]
    for one, other in itertools.pairwise(ranked):
        scores = criterion.score(one.metrics), criterion.score(other.metrics)
        assert scores[0] >= scores[1]
        if scores[0] == scores[1]:
            losses = [each.metrics.get("validation_loss", math.inf) for each in (one, other)]
            losses = [loss if math.isfinite(loss) else math.inf for loss in losses]  # no number is the worst
            assert (losses[0], one.number) < (losses[1], other.number)


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
    assert data_options(Config) == {"environments", "examples", "seed", "held_out", "held_out_environments"}


def job_of(value: Callable[[Config], float]) -> Job[Config]:
    """A job whose data are this value of the options."""

    def environments(config: Config) -> Environments:
        def load(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((4, 2), value(config)), torch.zeros(4, dtype=torch.long)

        return Environments(load, train=["a", "b"])

    return Job(environments, lambda _: torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, config=Config())


def test_trials_share_data_unless_an_option_is_varied_on_which_they_depend(ray_cluster: None) -> None:
    job = job_of(lambda config: config.sizes.examples)
    assert share_data(job, job.config, ["lr", "examples"]) is None
    shared = share_data(job, job.config, ["lr", "epochs"])
    assert shared is not None
    assert shared.fits(job.config.with_options(lr=0.5))
    assert not shared.fits(job.config.with_options(examples=50))
    inputs, _ = shared.prepared().training[0].training.take(slice(1))
    assert inputs[0, 0] == 100


@pytest.mark.parametrize(
    "value",
    [
        lambda config: config.optimizer.lr,
        lambda config: option_values(config)["lr"],
        lambda config: config.with_options(l2=0.0).optimizer.lr,
        lambda config: float(len(config.method)),
        lambda config: vars(config.optimizer)["lr"],
    ],
    ids=["attribute", "values", "with_options", "method", "vars"],
)
def test_data_that_read_an_option_of_learning_in_any_way_are_not_shared(
    ray_cluster: None, value: Callable[[Config], float]
) -> None:
    job = job_of(value)
    assert share_data(job, job.config, ["readers"]) is None


class Kept(ExampleSource):
    """Examples that are computed from the options."""

    def __init__(self, config: Config, option: str) -> None:
        self.config, self.option = config, option

    def __len__(self) -> int:
        return 4

    def take(self, examples: slice | torch.Tensor, draw: torch.Tensor | None = None) -> Tree:
        targets = torch.zeros(4, dtype=torch.long)[examples]
        value = self.config.optimizer.lr if self.option == "lr" else self.config.sizes.examples
        return torch.full((*targets.shape, 2), float(value)), targets


@pytest.mark.parametrize("option", ["lr", "examples"])
def test_a_source_that_keeps_the_options_is_not_shared(ray_cluster: None, option: str) -> None:
    """A trial could read an option of learning in it."""
    job = job_of(lambda _: 0.0)

    def environments(config: Config) -> Environments:
        return Environments(lambda _: Kept(config, option), train=["a", "b"])

    assert share_data(dataclasses.replace(job, environments=environments), job.config, ["l2"]) is None
