"""The parts of a study: its journal survives everything, and what stops, ranks and explains its trials."""

import dataclasses
import itertools
import json
import math
import resource
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concord.analysis.parameter_importance import FEWEST_TRIALS, missing_for_importance, parameter_importance
from concord.errors import InputError, RunFailedError
from concord.options import options_of
from concord.studies import journal as journals
from concord.studies.journal import Journal, TrialResult, TrialSpec
from concord.studies.selection import LOOKED_AT, Criterion, check_metric, chosen_mode, worst_environments
from concord.studies.shared_data import recording
from concord.studies.stopping import PROGRESS, SCHEDULER, SCORE, StopRule, replay, scheduler
from concord.training import TrainConfig
from concord.training.evaluation import Mode

claim = settings(max_examples=20, deadline=None)


def task(number: int, **more: Any) -> TrialSpec:
    return TrialSpec(**{"kind": "trial", "trial": number, "point": {"lr": 0.1 * number}, **more})


def ended(**metrics: float) -> TrialResult:
    return TrialResult(metrics, [(1, 10, metrics)], 2.5, 1.7e9)


# The journal

words = st.text(max_size=4)
metrics = st.dictionaries(st.sampled_from(["held_out_loss", "ood_accuracy"]), st.floats(allow_nan=False))
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
chosen = st.dictionaries(words, values | st.tuples(values, st.tuples(values)), max_size=3)
tasks = st.builds(
    TrialSpec,
    kind=st.sampled_from(["trial", "left-out", "seed"]),
    trial=st.integers(0, 3),
    point=chosen,
    seed=st.none() | st.integers(0, 2),
    left_out=st.lists(words, max_size=2).map(tuple),
    whole=st.booleans(),
    resolved=chosen,
)
ends = st.builds(
    TrialResult,
    metrics=metrics,
    history=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), metrics), max_size=2),
    seconds=st.floats(0, 1e9),
    ended=st.floats(0, 1e10),
    stopped=st.none() | words,
    failure=st.none() | words,
)
events = st.lists(st.tuples(tasks, st.none() | ends), max_size=4)


def known(journal: Journal) -> tuple[list[tuple[str, TrialSpec]], list[tuple[str, TrialResult]]]:
    """What is known, in its order."""
    return list(journal.tasks.items()), list(journal.ended.items())


def written(folder: Path, events: list[tuple[TrialSpec, TrialResult | None]]) -> list[Any]:
    """What was known after each line of the journal."""
    path = folder / journals.TRIALS

    def lines() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    with journals.opened(folder) as journal:
        states = [known(journal)]
        for began, end in events:
            journal.begin(began)
            if lines() == len(states):
                states.append(known(journal))
            if end is not None:
                journal.end(began, end)  # another end of what failed is one more line, and replaces the first
            if lines() == len(states):
                states.append(known(journal))
        return states


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are not waited for."""
    monkeypatch.setattr(journals.os, "fsync", lambda _: None)


@pytest.mark.usefixtures("quick")
def test_wherever_a_journal_is_cut_off_it_goes_on_from_the_last_whole_line() -> None:
    later = task(7, kind="seed", seed=9)

    @claim
    @given(events, st.data())
    def any_journal(events: list[tuple[TrialSpec, TrialResult | None]], data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            states = written(folder, events)
            path = folder / journals.TRIALS
            text = path.read_bytes()
            assert text.count(b"\n") == len(states) - 1
            kept = text[: data.draw(st.integers(0, len(text)))]
            whole = kept[: kept.rfind(b"\n") + 1]
            expected = states[whole.count(b"\n")]
            path.write_bytes(kept)
            assert known(journals.read(folder)) == expected
            assert path.read_bytes() == kept  # who only reads changes nothing
            with journals.opened(folder) as journal:
                assert known(journal) == expected
                journal.begin(later)
                journal.end(later, ended(held_out_loss=1.0))
                assert known(journals.read(folder)) == known(journal)
            assert path.read_bytes().startswith(whole)
            tasks, ends = known(journals.read(folder))
            assert tasks == [*expected[0], (later.key, later)]
            assert ends == [*expected[1], (later.key, ended(held_out_loss=1.0))]

    any_journal()


def test_every_byte_of_a_journal_may_be_the_last(tmp_path: Path) -> None:
    events = [
        (task(0), ended(ood_accuracy=0.5)),
        (task(1, point={"s": "é\n", "m": (0.5, 0.75)}), None),
        (task(2), None),
    ]
    states = written(tmp_path, events)
    text = (tmp_path / journals.TRIALS).read_bytes()
    for length in range(len(text) + 1):
        (tmp_path / journals.TRIALS).write_bytes(text[:length])
        assert known(journals.read(tmp_path)) == states[text[:length].count(b"\n")]


def test_a_disk_that_loses_power_may_leave_anything_after_the_last_line(tmp_path: Path) -> None:
    (*_, state) = written(tmp_path, [(task(0), ended(ood_accuracy=0.5))])
    with (tmp_path / journals.TRIALS).open("ab") as file:
        file.write(b'{"event": "beg' + bytes(4000))
    with journals.opened(tmp_path) as journal:
        assert known(journal) == state
        journal.begin(task(1))
    assert list(journals.read(tmp_path).tasks) == ["trial 0", "trial 1"]


def test_a_full_disk_ends_the_study_and_leaves_no_torn_line(tmp_path: Path) -> None:
    with journals.opened(tmp_path) as journal:
        journal.begin(task(0))
        size = (tmp_path / journals.TRIALS).stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
            with pytest.raises(RunFailedError, match=r"trials\.jsonl cannot be written \(No space left on device\)"):
                journal.begin(task(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (tmp_path / journals.TRIALS).stat().st_size == size
        assert list(journal.tasks) == ["trial 0"]
        journal.begin(task(2))
    assert list(journals.read(tmp_path).tasks) == ["trial 0", "trial 2"]


WRITER = """
import itertools, sys
from pathlib import Path
from concord.studies.journal import TrialResult, TrialSpec, opened
with opened(Path(sys.argv[1])) as journal:
    for number in itertools.count():
        task = TrialSpec("trial", number, {"lr": 0.1})
        journal.begin(task)
        journal.end(task, TrialResult({"ood_accuracy": 0.5}, [(1, 1, {"ood_accuracy": 0.5})] * 20, 1.0, 2.0))
"""


def test_a_killed_process_loses_nothing_that_ended_and_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / journals.TRIALS
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    deadline = time.monotonic() + 60
    while (not path.exists() or path.stat().st_size < 20_000) and time.monotonic() < deadline:
        time.sleep(0.005)
    with (
        pytest.raises(InputError, match=r"--name .*: another process is at work on this study"),
        journals.opened(tmp_path),
    ):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    count = path.read_bytes().count(b"\n")
    with journals.opened(tmp_path) as journal:
        assert len(journal.tasks) + len(journal.ended) == count
        assert len(journal.ended) == count // 2 > 0
        assert [began.trial for began in journal.unfinished("trial")] == [count // 2] * (count % 2)


def test_a_study_has_one_writer_and_any_number_of_readers(tmp_path: Path) -> None:
    with journals.opened(tmp_path) as journal:
        journal.begin(task(0))
        with pytest.raises(InputError) as refused, journals.opened(tmp_path):
            pass
        assert str(refused.value) == f"--name {tmp_path.name}: another process is at work on this study"
        reader = journals.read(tmp_path)
        assert known(reader) == known(journal)
        with pytest.raises(ValueError, match="opened to be read only"):
            reader.begin(task(1))
        journal.begin(task(1))
    with pytest.raises(ValueError, match="opened to be read only"):
        journal.end(task(1), ended())
    with journals.opened(tmp_path) as again:
        assert list(again.tasks) == ["trial 0", "trial 1"]


def test_what_is_said_again_is_no_news(tmp_path: Path) -> None:
    with journals.opened(tmp_path) as journal:
        journal.begin(task(0))
        journal.end(task(0), ended(ood_accuracy=0.5))
        text = (tmp_path / journals.TRIALS).read_bytes()
        journal.begin(task(0, point={"lr": 9.0}))
        journal.end(task(0), ended(ood_accuracy=1.0))
        assert (tmp_path / journals.TRIALS).read_bytes() == text
        assert journal.ended["trial 0"].metrics == {"ood_accuracy": 0.5}


def test_a_journal_of_a_version_that_did_not_write_what_options_stood_for_is_read(tmp_path: Path) -> None:
    began = {"kind": "trial", "trial": 3, "point": {"lr": 0.1}, "seed": None, "left_out": ["a"], "whole": True}
    (tmp_path / journals.TRIALS).write_text(json.dumps({"event": "began", "key": "trial 3", **began}) + "\n")
    expected = TrialSpec("trial", 3, {"lr": 0.1}, left_out=("a",))
    assert journals.read(tmp_path).tasks == {"trial 3": expected}
    assert expected.resolved == {}


def test_results_come_in_the_order_of_their_ends(tmp_path: Path) -> None:
    again = [task(1, kind="left-out", whole=False), task(1, kind="seed", seed=5), task(1, kind="seed", seed=6)]
    assert [each.key for each in again] == ["left-out 1", "seed 1 seed 5", "seed 1 seed 6"]
    failed = dataclasses.replace(ended(), failure="no number")
    with journals.opened(tmp_path) as journal:
        for each in (task(0), task(1), task(2), task(3), *again):
            journal.begin(each)
        for each in (task(2), again[2], task(0), again[0]):
            journal.end(each, ended(ood_accuracy=each.trial))
        journal.end(task(3), failed)
    for found in (journal, journals.read(tmp_path)):
        assert [each.trial for each, _ in found.results("trial")] == [2, 0, 3]
        assert [each.trial for each, _ in found.finished("trial")] == [2, 0]
        assert found.results("trial")[2] == (task(3), failed)
        assert found.unfinished("trial") == [task(1)]
        assert found.unfinished("seed") == [again[1]]
        assert found.results("left-out") == [(again[0], ended(ood_accuracy=1))]
    assert journals.read(tmp_path / "elsewhere") == Journal(tmp_path / "elsewhere")


def test_what_a_study_is_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "studies" / "mine"
    folder.mkdir(parents=True)
    with pytest.raises(InputError) as refused:
        journals.read_study(folder)
    assert str(refused.value) == f"--name mine: there is no such study in {tmp_path}"
    journals.write_study(folder, {"trials": 3})
    with pytest.raises(TypeError):
        journals.write_study(folder, {"trials": 4, "broken": object()})
    assert journals.read_study(folder) == {"trials": 3}  # what was being written does not count
    journals.write_study(folder, {"trials": 4})
    assert journals.read_study(folder) == {"trials": 4}
    (folder / journals.STUDY).write_text("{")
    with pytest.raises(InputError, match=r"--name mine: .*study\.json cannot be read \(Expecting"):
        journals.read_study(folder)


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
    assert not StopRule.of(["train_accuracy>0.97"]).oracle


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
    assert str(refused.value) == "--stop-when ood_accuracy: not reported; there are train_accuracy, train_loss"


# Schedulers


def live(stopping: Any, scores: list[float], own_end: int | None = None) -> Iterator[TrialResult | None]:
    """A trial as Ray Tune runs it, an evaluation at a time; in the end what became of it."""
    from ray.tune.experiment import Trial

    trial = Trial("live", stub=True)
    stopping.on_trial_add(None, trial)
    history: list[tuple[int, int, dict[str, float]]] = []
    for epoch, score in enumerate(scores, 1):
        result = {PROGRESS: 100 * epoch / len(scores), SCORE: score}
        history.append((epoch, epoch, {"score": score}))
        itself = epoch == len(scores) or epoch == own_end
        if itself or stopping.on_trial_result(None, trial, result) == "STOP":
            stopping.on_trial_complete(None, trial, result)
            stopped = ("a rule" if epoch < len(scores) else None) if itself else SCHEDULER
            yield TrialResult({"score": score}, history, 1.0, 1.0, stopped)
            return
        yield None


def last(trial: Iterator[TrialResult | None]) -> TrialResult:
    (*_, end) = trial
    assert end is not None
    return end


def told(kind: Any, results: list[tuple[TrialSpec, TrialResult]], epochs: dict[int, int]) -> Any:
    """A scheduler that did not see these trials."""
    new = scheduler(kind)
    replay(new, results, lambda metrics: metrics["score"], lambda task: epochs[task.trial])
    return new


curves = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", ["asha", "median"])
def test_a_scheduler_that_is_told_of_earlier_trials_decides_as_one_that_saw_them(kind: Any) -> None:
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
                results.append((task(number), end))
                del running[number]
        telling = told(kind, results, {number: len(scores) for number, (scores, _) in enumerate(earlier)})
        for scores in later:
            assert last(live(telling, scores)) == last(live(seeing, scores))

    any_trials()


@pytest.mark.parametrize("kind", ["asha", "median"])
def test_a_trial_that_falls_behind_earlier_ones_is_stopped(kind: Any) -> None:
    def trials(count: int) -> list[tuple[TrialSpec, TrialResult]]:
        return [(task(number), last(live(scheduler("none"), [0.8 + number / 100] * 10))) for number in range(count)]

    epochs = dict.fromkeys(range(6), 10)
    for scores, epoch in (([0.1] * 20, {"asha": 2, "median": 4}[kind]), ([0.9] * 20, 20)):
        assert len(last(live(told(kind, trials(6), epochs), scores)).history) == epoch
    alone = last(live(scheduler(kind), [0.1] * 20))
    assert (len(alone.history), alone.stopped) == (20, None)
    if kind == "median":  # which asks for five to compare with
        assert len(last(live(told(kind, trials(4), epochs), [0.1] * 20)).history) == 20


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
    assert criterion.oracle == (selection == "oracle") == ("oracle" in LOOKED_AT[selection].lower())


def test_scores_are_finite_and_the_larger_the_better() -> None:
    accuracy, loss = Criterion.of("held-out", "accuracy", "max"), Criterion.of("held-out", "loss", "min")
    assert accuracy.score({"held_out_accuracy": 0.75}) == 0.75
    assert loss.score({"held_out_loss": 0.75}) == -0.75
    for criterion in (accuracy, loss):
        for metrics in ({}, {criterion.metric: math.nan}, {criterion.metric: math.inf}, {criterion.metric: -math.inf}):
            assert math.isfinite(criterion.score(metrics))
            assert criterion.score(metrics) < -1e20


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
        results.append(
            (task(number), ended(**{name: number for name, number in metrics.items() if number is not None}))
        )
    expected = [pair for pair in results if math.isfinite(pair[1].metrics.get(criterion.metric, math.nan))]
    random.shuffle(results)
    ranked = criterion.ranked(results)
    assert sorted(each.trial for each, _ in ranked) == [each.trial for each, _ in expected]
    for (better, one), (worse, other) in itertools.pairwise(ranked):
        scores = criterion.score(one.metrics), criterion.score(other.metrics)
        assert scores[0] >= scores[1]
        if scores[0] == scores[1]:
            losses = [each.metrics.get("validation_loss", math.inf) for each in (one, other)]
            losses = [loss if math.isfinite(loss) else math.inf for loss in losses]  # no number is the worst
            assert (losses[0], better.trial) < (losses[1], worse.trial)


@pytest.mark.parametrize(
    ("selection", "measure", "message"),
    [
        ("held-out", "accuracy", "--selection held-out: nothing is held out; give --held-out above 0"),
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
        ("rmse", None, "--metric rmse: the job does not say whether large or small is good; give --mode max or --mode"),
        ("worst_rmse", None, "--metric worst_rmse: the job does not say whether large or small is good"),
        ("worst_loss", "max", "--mode max: the job's loss says min"),
        (
            "f1",
            "max",
            "--metric f1: the job does not report it; there are accuracy, loss, rmse, each also as worst_…",
        ),
        ("worst_f1", None, "--metric worst_f1: the job does not report it; there are accuracy, loss, rmse"),
        ("accuracy", "min", "--mode min: the job's accuracy says max"),
    ],
)
def test_the_job_or_the_mode_says_whether_large_or_small_is_good_and_nobody_guesses(
    measure: str, asked: Mode | None, expected: str
) -> None:
    if expected in ("max", "min"):
        assert chosen_mode(measure, asked, MODES) == expected
    else:
        with pytest.raises(InputError) as refused:
            chosen_mode(measure, asked, MODES)
        assert str(refused.value).startswith(expected)


def test_the_worst_environment_of_every_split_by_a_measure_that_does_not_say_what_is_worse() -> None:
    metrics = {"rmse/train/a": 1.0, "rmse/train/b": 2.0, "rmse/held_out/a": 3.0, "rmse/ood/x/y": 4.0, "mse/ood/x": 9.0}
    of_held_out = {"worst_held_out_rmse": 3.0, "worst_validation_rmse": 3.0}
    assert worst_environments(metrics, "rmse", "min") == {"worst_train_rmse": 2.0, "worst_ood_rmse": 4.0} | of_held_out
    assert worst_environments(metrics, "rmse", "max") == {"worst_train_rmse": 1.0, "worst_ood_rmse": 4.0} | of_held_out


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

OPTIONS = list(options_of(TrainConfig))


@claim
@given(st.lists(st.sampled_from(OPTIONS)))
def test_exactly_the_options_that_were_read_are_recorded(names: list[str]) -> None:
    config = TrainConfig().with_options(lr=0.3)
    copy, reads = recording(config)
    assert reads == set()
    assert isinstance(copy, TrainConfig)
    assert [read(copy, name) for name in names] == [read(config, name) for name in names]
    assert reads == set(names)


def read(config: TrainConfig, name: str) -> Any:
    """The option, as a job reads it."""
    found: Any = config
    for part in (*options_of(TrainConfig)[name].groups, name):
        found = getattr(found, part)
    return found


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    environments: int = 4
    examples: int = 100
    per_environment: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_environment", self.examples // self.environments)
        object.__setattr__(self, "table", {"seed": self.run.seed})

    @property
    def total(self) -> int:
        return self.environments * self.examples

    def folder(self) -> str:
        return f"{self.data.data_dir}/{self.total}"


def test_reading_by_a_method_counts_and_what_nobody_reads_does_not() -> None:
    copy, reads = recording(Config().with_options(examples=50))
    assert copy.total == 200
    assert reads == {"environments", "examples"}
    copy.folder()
    assert reads == {"environments", "examples", "data_dir"}
    assert copy.per_environment == 12
    assert reads == {"environments", "examples", "data_dir", "per_environment"}
    assert type(copy).__name__ == "Config"


@pytest.mark.parametrize(
    "use",
    [vars, dataclasses.asdict, lambda config: config.table, lambda config: json.dumps(config.__dict__, default=str)],
    ids=["vars", "asdict", "made of options", "dict"],
)
def test_what_may_depend_on_any_option_counts_as_reading_all(use: Any) -> None:
    config = Config()
    copy, reads = recording(config)
    assert use(copy) == use(config)
    assert reads == {*OPTIONS, "environments", "examples", "per_environment"}


def test_a_recorded_configuration_may_be_replaced() -> None:
    copy, reads = recording(Config().with_options(examples=50, lr=0.25))
    changed = copy.with_options(examples=200)
    assert (changed.examples, changed.per_environment, changed.optimizer.lr, copy.examples) == (200, 50, 0.25, 50)
    assert {"lr", "environments", "seed"} <= reads  # all that was taken over
    with pytest.raises(dataclasses.FrozenInstanceError):
        copy.optimizer.lr = 1.0  # type: ignore[misc]
    changed.check()
