"""Monitoring a run: the time of its parts, Ray's gauges, the dashboard, structured logs."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forked import Command, run_group
from prometheus_client.parser import text_string_to_metric_families
from prometheus_server import CONFIGURATION, PROGRAM, Prometheus
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES
from ray_head import Head
from torch import nn
from torch.nn.functional import cross_entropy
from waiting import wait_for

from concord.environments import Environments
from concord.execution.live_metrics import RUN_METRICS, Metric, Published, RunSamples, Sample
from concord.gradients import EnvironmentStep, StepClock
from concord.studies.proposals import STUDY_METRICS
from concord.training import Job, ProcessContext, TrainConfig, train
from concord.training.context import Silent, StepsSoFar

TESTS = Path(__file__).parents[1]
DASHBOARD: dict[str, Any] = json.loads(CONFIGURATION.with_name("concord.json").read_text())
RUN_LABELS = {"run", "concord_job", "method", "rank"}
STUDY_LABELS = {"study", "concord_job", "method"}
EPOCHS = 20


# --- where the time of a step goes


def blobs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(ord(name))
    inputs = torch.randn(128, 32, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


def network(_: TrainConfig) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2))


def environments(_: TrainConfig) -> Environments:
    return Environments(blobs, train=["a", "b", "c", "d"], test=["t"])


JOB: Job[TrainConfig] = Job(environments=environments, model=network, loss=cross_entropy, name="blobs")
# What differs in how gradients are obtained, and so in where the exchange is; the second is divided one to each worker.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "stacked": ({"batch_size": 32}, 2),
    "hook": ({"batch_size": 32}, 4),
    "per-example": ({"batch_size": 64, "per_example": True, "threshold": 0.2}, 2),
    "objective": ({"batch_size": 32, "objective": "mm-rex"}, 2),
}


class Rates(Silent):
    """A context that keeps how many steps a second each epoch had."""

    seconds = 0.0

    def log(self, metrics: dict[str, float], step: int) -> None:
        if "steps_per_second" in metrics:
            self.seconds += 1 / metrics["steps_per_second"]


def timed(way: str, process: ProcessContext) -> dict[str, float]:
    """The seconds of the parts, and of the whole steps (by the first process's clock)."""
    options, _ = WAYS[way]
    config = TrainConfig().with_options(epochs=EPOCHS, evaluations=1, checkpoints=1, **options)
    so_far, rates = StepsSoFar(), Rates()
    outcome = train(JOB, config, process, rates, so_far=so_far)
    rates.log(outcome.metrics, outcome.steps)  # of the epoch that was evaluated
    steps = outcome.steps
    assert so_far.steps == steps
    return {**so_far.clock.seconds, "whole": rates.seconds * steps / EPOCHS}


def _timed_in_group(rank: int, world_size: int, folder: Path, way: str) -> None:
    (folder / f"{rank}.json").write_text(json.dumps(timed(way, ProcessContext(rank, world_size))))


def adds_up(seconds: Mapping[str, float]) -> bool:
    parts = seconds["gradients"] + seconds["exchange"] + seconds["optimizer"]
    return 0.9 * seconds["whole"] < parts <= seconds["whole"]


@pytest.mark.parametrize("way", ["stacked", "per-example", "objective"])
def test_in_one_process_the_parts_add_up_to_the_steps(way: str) -> None:
    seconds = timed(way, ProcessContext())
    assert seconds["exchange"] == 0
    assert seconds["gradients"] > 0
    assert seconds["optimizer"] > 0
    assert adds_up(seconds), seconds


@pytest.mark.parametrize("way", WAYS)
def test_in_several_processes_a_part_of_every_step_is_exchange(way: str, tmp_path: Path) -> None:
    world_size = WAYS[way][1]
    run_group(_timed_in_group, world_size, tmp_path, tmp_path, way)
    each = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    for seconds in each:
        assert min(seconds["gradients"], seconds["exchange"], seconds["optimizer"]) > 0
    assert adds_up(each[0]), each[0]


def test_every_moment_belongs_to_one_part_and_none_outside_of_steps() -> None:
    clock = StepClock()
    assert clock.switch("gradients") is None
    assert clock.switch("exchange") == "gradients"
    clock.switch("gradients")
    clock.switch(None)
    before = dict(clock.seconds)
    assert clock.switch("optimizer") is None
    assert clock.seconds == before
    assert before["gradients"] > 0
    assert before["exchange"] > 0
    assert before["optimizer"] == 0


# --- gauges


def test_a_worker_s_samples_are_what_its_steps_were() -> None:
    so_far = StepsSoFar(epochs=4, sizes=torch.tensor([3.0, 1.0]), restarts=2)
    first, other = RunSamples(so_far, first=True), RunSamples(so_far, first=False)
    always = {"concord_epoch", "concord_epochs", "concord_checkpoint_age_seconds", "concord_restarts"}
    assert {sample.name for sample in first()} == always
    assert other() == []
    so_far.steps, so_far.epoch = 5, 2.5
    so_far.clock.seconds.update(gradients=5.0, exchange=10.0, optimizer=0.5)
    so_far.latest = EnvironmentStep(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0]), (), torch.ones(2), 2)
    so_far.evaluated(
        {"train_loss": 0.5, "ood_loss": 2.0, "worst_ood_loss": 3.0, "loss/train/a": 0.1, "train_accuracy": 1.0}
    )
    values = {(sample.name, sample.tags): sample.value for sample in first()}
    assert values.pop(("concord_steps_per_second", ())) > 0
    assert 0 < values.pop(("concord_checkpoint_age_seconds", ())) < 60
    assert values == {
        ("concord_step_seconds", ("gradients",)): 1.0,
        ("concord_step_seconds", ("exchange",)): 2.0,
        ("concord_step_seconds", ("optimizer",)): 0.1,
        ("concord_step_loss", ()): 2.0,
        ("concord_kept_fraction", ()): 0.75,
        ("concord_epoch", ()): 2.5,
        ("concord_epochs", ()): 4.0,
        ("concord_restarts", ()): 2.0,
        ("concord_loss", ("train",)): 0.5,
        ("concord_loss", ("ood",)): 2.0,
    }
    assert {sample.name for sample in other()} == {
        "concord_steps_per_second",
        "concord_step_seconds",
        "concord_step_loss",
    }


def test_a_gauge_that_cannot_be_read_ends_no_training(ray_cluster: None, recwarn: pytest.WarningsRecorder) -> None:
    asked = threading.Event()

    def broken() -> Sequence[Sample]:
        asked.set()
        raise ArithmeticError("no such number")

    with Published(RUN_METRICS, {"run": "r"}, broken):
        assert asked.wait(30)
    assert "no such number" in str(recwarn.pop(RuntimeWarning).message)


# --- the dashboard


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bray_(\w+)", expression))


def test_every_metric_of_the_dashboard_is_one_that_concord_or_ray_exports() -> None:
    ours = {metric.name for metric in (*RUN_METRICS, *STUDY_METRICS)}
    of_core = {"resources", "object_store_memory"}  # written in C++; the slow test asks a running Ray for them
    for title, expression in expressions():
        assert names_in(expression), title
        assert names_in(expression) <= ours | set(METRICS_GAUGES) | of_core, title
    used = {name for _, expression in (*expressions(), *alerts()) for name in names_in(expression)}
    assert ours == used & ours  # none unseen


def alerts() -> list[tuple[str, str]]:
    (group,) = yaml.safe_load(CONFIGURATION.with_name("alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for rule in group["rules"]]


def test_every_metric_of_the_alert_rules_is_one_that_concord_or_ray_exports() -> None:
    ours = {metric.name for metric in RUN_METRICS}
    for alert, expression in alerts():
        assert names_in(expression), alert
        assert names_in(expression) <= ours | {"actors"}, (
            alert
        )  # of Ray's core; the slow test asks a running Ray for it
        assert set(re.findall(r"by \((\w+)\)", expression)) <= RUN_LABELS, alert
    assert yaml.safe_load(CONFIGURATION.read_text())["rule_files"] == ["alerts.yml"]


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool on the path (Debian's package prometheus has it)")
def test_each_alert_fires_when_it_should_and_not_before() -> None:
    words = [str(PROMTOOL), "test", "rules", "alerts_test.yml"]
    done = subprocess.run(words, cwd=CONFIGURATION.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("metrics", "labels"), [(RUN_METRICS, RUN_LABELS), (STUDY_METRICS, STUDY_LABELS)])
def test_the_dashboard_knows_concord_s_gauges_by_labels_that_they_have(
    metrics: Sequence[Metric], labels: set[str]
) -> None:
    for metric in metrics:
        for title, expression in expressions():
            if metric.name in names_in(expression):
                grouped = {label for part in re.findall(r"by \(([^)]*)\)", expression) for label in part.split(", ")}
                selected = set(re.findall(r"[{,](\w+)=", expression))
                assert grouped | selected <= labels | set(metric.tags), title


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    everything = DASHBOARD["panels"]
    assert DASHBOARD["schemaVersion"] >= 36  # data sources as objects
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        assert 0 < at["w"] <= 24 - at["x"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in panels():
        for owner in (panel, *panel["targets"]):
            assert owner["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for _, expression in expressions():
        assert set(re.findall(r"\$(\w+)", expression)) <= set(variables)


# --- logs


def refused(*words: str, **environment: str) -> tuple[str, str]:
    """What a refused command says on standard output and on standard error."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with Command(*words) as ended:
            said = ended.communicate()
    assert ended.returncode == 2
    return said


def test_an_error_is_one_json_object_on_standard_error() -> None:
    words = ("train", "synthetic", "--lr", "0", "--json")
    out, error = refused(*words, CONCORD_LOG="json", CONCORD_SUBMISSION="s-1")
    (line,) = error.splitlines()
    record = json.loads(line)
    assert record["levelname"] == "ERROR"
    assert record["message"].startswith("concord: --lr 0.0: must be a finite number above 0")
    assert record["submission"] == "s-1"
    assert set(record) >= {"asctime", "timestamp_ns", "filename", "lineno", "process"}
    assert json.loads(out) == {"error": "--lr 0.0: must be a finite number above 0"}


def test_without_being_asked_for_json_lines_are_text() -> None:
    _, error = refused("train", "synthetic", "--lr", "0", CONCORD_LOG="text")
    assert error == "concord: --lr 0.0: must be a finite number above 0\n"


def test_a_form_of_logs_that_there_is_not_is_named() -> None:
    _, error = refused("jobs", CONCORD_LOG="xml")
    assert error == "concord: CONCORD_LOG=xml: must be json or text\n"


# --- a real cluster, a real Prometheus


@dataclass
class Seen:
    """What was seen of a run and a study on a cluster.

    Attributes:
        metrics: ``(labels, value)`` of the run's gauges by name, from the node's own port, without a token.
        panels: what each expression of the dashboard gave.
        left: which of the run's gauges the node still had in the end.
        log: of the run's submission.
    """

    metrics: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    panels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)


class _Watched:
    """A cluster with a Prometheus, and what is submitted to it."""

    def __init__(self, head: Head, prometheus: Prometheus) -> None:
        self.head = head
        self.prometheus = prometheus

    def concord(self, *words: str) -> Mapping[str, Any]:
        where = ["--address", self.head.address, "--token-file", str(self.head.token_file), "--json"]
        given = [*words[:1], *where, *words[1:]]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CONCORD_"))}
        ended = subprocess.run(
            [sys.executable, "-m", "concord", *given],
            cwd=TESTS / "jobs",
            env={**environment, "CONCORD_LOG": "json"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        result: Mapping[str, Any] = json.loads(ended.stdout)
        return result

    def scraped(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        targets = json.loads((self.head.temporary / "prom_metrics_service_discovery.json").read_text())[0]["targets"]
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for target in targets:
            text = urllib.request.urlopen(f"http://{target}/metrics", timeout=30).read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith("ray_concord_"):
                        found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
        return found

    def shown(self, metrics: Sequence[str], seen: Seen) -> bool:
        """Whether every panel of these metrics shows something; what they show is kept."""
        for _, expression in expressions():
            if names_in(expression) & set(metrics) and not seen.panels.get(expression):
                anything = expression.replace("$run", ".*").replace("$study", ".*")
                seen.panels[expression] = self.prometheus.ask(anything)
        return all(seen.panels[expression] for _, expression in expressions() if names_in(expression) & set(metrics))


OF_GPUS = {"node_gpus_utilization"}  # there may be none
OF_STUDIES = {metric.name for metric in STUDY_METRICS}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A run of two workers and then a study, submitted to a cluster that Prometheus scrapes, each stopped when seen."""
    if PROGRAM is None:
        pytest.skip("there is no prometheus on the path (Debian's package of that name has it)")
    head = Head(tmp_path_factory.mktemp("head"))
    head.command += ["--system-config", json.dumps({"metrics_report_interval_ms": 1000})]
    head.start()
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), head.temporary)
    try:
        prometheus.start()
        yield _look(_Watched(head, prometheus))
    finally:
        prometheus.stop()
        head.stop()


def _look(watched: _Watched) -> Seen:
    seen = Seen()
    slow = ["--no-wait", "--epochs", "100000", "--evaluations", "100000", "--pause", "0.01"]
    run = watched.concord("submit", "train", "talkative.py", "--workers", "2", "--name", "watched", *slow)["submission"]
    of_runs = {name for _, expression in expressions() for name in names_in(expression)} - OF_STUDIES - OF_GPUS

    def everything_of_the_run() -> bool:
        seen.metrics = watched.scraped()
        complete = {f"ray_{metric.name}" for metric in RUN_METRICS} <= set(seen.metrics)
        return watched.shown(sorted(of_runs), seen) and complete

    wait_for(everything_of_the_run, 300)
    seen.log = watched.concord("logs", run)["log"].splitlines()
    watched.concord("stop", run)
    wait_for(lambda: not watched.scraped(), 120)
    seen.left = set(watched.scraped())
    study = [
        "--no-wait",
        "--name",
        "study",
        "--trials",
        "100000",
        "--pause",
        "0.01",
        "--reruns",
        "0",
        "--shortlist",
        "0",
    ]
    study_id = watched.concord("submit", "tune", "talkative.py", "--no-wait", *study)["submission"]
    wait_for(lambda: watched.shown(sorted(OF_STUDIES), seen), 300)
    watched.concord("stop", study_id)
    return seen


@pytest.mark.slow
def test_every_worker_exports_its_gauges_under_their_labels(seen: Seen) -> None:
    for metric in RUN_METRICS:
        for labels, _ in seen.metrics[f"ray_{metric.name}"]:
            assert set(labels) >= RUN_LABELS | set(metric.tags)
            assert (labels["run"], labels["concord_job"], labels["method"]) == ("watched", "talkative", "and-mask")
    of_each = {labels["rank"] for labels, _ in seen.metrics["ray_concord_steps_per_second"]}
    of_first = {labels["rank"] for labels, _ in seen.metrics["ray_concord_kept_fraction"]}
    assert (of_each, of_first) == ({"0", "1"}, {"0"})
    parts = {(labels["rank"], labels["part"]): value for labels, value in seen.metrics["ray_concord_step_seconds"]}
    assert len(parts) == 6
    assert all(value > 0 for value in parts.values()), parts
    assert {labels["split"] for labels, _ in seen.metrics["ray_concord_loss"]} == {
        *("train", "held_out", "validation", "ood")
    }


@pytest.mark.slow
def test_the_gauges_end_with_the_run(seen: Seen) -> None:
    assert seen.left == set()


@pytest.mark.slow
@pytest.mark.parametrize(("title", "expression"), expressions())
def test_a_panel_of_the_dashboard_shows_something(title: str, expression: str, seen: Seen) -> None:
    if names_in(expression) <= OF_GPUS:
        pytest.skip("there is no GPU here")
    assert seen.panels[expression], title


@pytest.mark.slow
def test_a_submitted_run_logs_json_with_its_ids(seen: Seen) -> None:
    records = [json.loads(line) for line in seen.log if line.startswith("{")]
    said = {record["message"]: record for record in records}
    progress = next(record for message, record in said.items() if message.startswith("run watched: "))
    assert (progress["run"], progress["job"]) == ("watched", "talkative")
    assert progress["submission"].startswith("watched-")
    of_workers = [record for record in records if "rank" in record]
    assert {record["rank"] for record in of_workers} == {0, 1}
    for record in of_workers:
        assert (record["run"], record["job"]) == ("watched", "talkative")
        assert record["submission"] == progress["submission"]
        assert set(record) >= {"job_id", "worker_id", "node_id", "timestamp_ns", "levelname"}
    loaded = {record["message"] for record in of_workers if record["message"].startswith("loading")}
    assert loaded == {f"loading {name}" for name in "abcde"}
    assert any("a is small" in record["message"] for record in of_workers)
    # What is logged or warned of appears as JSON alone.
    raw = [line for line in seen.log if not line.startswith("{")]
    assert not [line for line in raw if "loading" in line or "is small" in line], raw
