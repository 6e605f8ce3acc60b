"""What MLflow's pages say of a run and of its model: description, model card, tags, user, and metrics of the system."""

import getpass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tracked import tracked_runs

import concord
from concord.errors import InputError
from concord.record import folder_of, require_run
from concord.tracking import Store, show

pytestmark = pytest.mark.usefixtures("without_figures")
JOB_FILE = Path(__file__).parents[1] / "jobs" / "shared_rule.py"
SMALL: dict[str, Any] = {"epochs": 2, "batch_size": 16, "evaluations": 1, "workers": 1}


def table(rows: int = 60) -> pd.DataFrame:
    """Five sites, in the last two of which the marker means the opposite."""
    draw = np.random.default_rng(0)
    frames = []
    for place, site in enumerate(("north", "south", "east", "hill", "coast")):
        ill = draw.random(rows) < 0.5
        sign = -1 if place > 2 else 1
        marker = draw.normal(size=rows) + sign * 4.0 * (ill - 0.5)
        columns = {"site": site, "marker": marker, "sex": draw.choice(["f", "m"], rows)}
        frames.append(pd.DataFrame({**columns, "ill": np.where(ill, "yes", "no")}))
    return pd.concat(frames, ignore_index=True)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on a table, which learned the shortcut."""
    output = tmp_path_factory.mktemp("sites") / "runs"
    columns = {"environment": "site", "target": "ill", "validation": ["hill"], "test": ["coast"]}
    named = {"name": "first", "experiment": "clinics", "tag": {"team": "eyes"}, "model_name": "illness"}
    concord.train("table", data=table(), **columns, output=output, epochs=8, lr=0.05, aggregator="mean", **named)
    return output


@pytest.fixture(scope="module")
def store(sites: Path) -> Store:
    """Its store."""
    return Store.open(sites)


def registered(store: Store, name: str) -> Any:
    return store.client.get_model_version(name, str(show(store, name).version))


def test_a_version_has_a_card_of_one_screen_and_at_most_five_tags(store: Store) -> None:
    version = registered(store, "illness")
    assert sorted(version.tags) == ["concord.data", "concord.method", "concord.owner", "concord.run", "concord.score"]
    card = version.description
    for part in (
        "the probability of each class of `ill` (no, yes), from marker, sex.",
        "300 examples, version ",
        "| environment | used for | examples | accuracy | loss |",
        "| hill | selection | 60 |",
        "| coast | test | 60 |",
        "mean over 3 environments; optimizer adam, lr 0.05",
        "Versions are compared by the largest `validation_accuracy`.",
        "The test environments decided nothing (no oracle).",
        "Measured in one environment that it has not seen (coast)",
        "- shortcuts were learned: accuracy on held-out examples",
        f"MLFLOW_TRACKING_URI={store.uri} \\\n  mlflow models serve --model-uri models:/illness/1 ",
        "### Champion\n\nYes: the first champion.",
    ):
        assert part in card, part
    assert len(card.splitlines()) < 50


def test_the_logged_model_has_the_metrics_and_names_its_version(store: Store) -> None:
    version = show(store, "illness")
    model = store.client.get_logged_model(str(version.model_id))
    measured = {each.key: each.value for each in model.metrics}
    run = require_run(folder_of(store.artifacts.parent, "first")) if store.artifacts is not None else None
    assert run is not None
    assert measured == pytest.approx({name: value for name, value in run.metrics.items() if "/" not in name})
    assert version.metrics == pytest.approx(measured)
    assert model.name == "illness"
    assert '"name": "illness"' in model.tags["mlflow.modelVersions"]
    # The points are those that the mirror sends, so none is stored twice.
    points = store.client.get_metric_history(run.run_id, "validation_accuracy")
    assert len({point.step for point in points}) == len(points)


def test_a_table_s_signature_names_columns_and_classes(store: Store) -> None:
    version = show(store, "illness")
    assert (version.inputs, version.outputs) == ("marker, sex", "no, yes")


def test_a_run_s_page_names_user_experiment_tags_and_result(store: Store) -> None:
    (run,) = tracked_runs(store, "clinics")
    tags = store.client.get_run(run.run_id).data.tags
    assert (tags["team"], tags["mlflow.user"]) == ("eyes", getpass.getuser())
    description = tags["mlflow.note.content"]
    assert description.startswith("**accuracy** train ")
    assert "Model `models:/illness/1`: the first champion" in description
    assert "\n- shortcuts were learned" in description
    assert "**table**: mean, 1 worker" in description
    assert not {"experiment", "tag"} & run.parameters.keys()


def test_experiment_tags_and_names_change_no_key(sites: Path, tmp_path: Path) -> None:
    first = require_run(folder_of(sites, "first"))
    columns = {"environment": "site", "target": "ill", "validation": ["hill"], "test": ["coast"]}
    options = {"epochs": 8, "lr": 0.05, "aggregator": "mean", "register": False, "output": tmp_path / "runs"}
    again = concord.train("table", data=sites / "frames" / _frame(sites), **columns, **options)
    assert require_run(folder_of(tmp_path / "runs", again.name)).record["key"] == first.record["key"]


def _frame(output: Path) -> str:
    (file,) = (output / "frames").iterdir()
    return file.name


def test_mlflow_s_variables_name_the_experiment_and_ask_for_system_metrics(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by variable")
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    run = concord.train(JOB_FILE, output=output, name="a", **SMALL)
    (tracked,) = tracked_runs(Store.open(output), "by variable")
    assert 0 <= tracked.metrics["system/worker-0/system_memory_usage_percentage"] <= 100
    assert not any(name.startswith("system/") for name in run.metrics)
    for options, line in (
        ({"experiment": "other"}, "--experiment other: the run a is in by variable; leave it out"),
        ({"tag": ["team=ears"]}, "--tag team=ears: the run a was started without it"),
    ):
        with pytest.raises(InputError) as refused:
            concord.train(JOB_FILE, output=output, name="a", resume=True, **SMALL, **options)
        assert str(refused.value).startswith(line)


def test_a_sampling_interval_that_is_no_number_is_refused(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "1")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "often")
    with pytest.raises(InputError, match=r"^MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL often: must be a number"):
        concord.train(JOB_FILE, output=output, **SMALL)
    assert not (output / "runs").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tag": ["team"]}, "--tag team: expected NAME=VALUE"),
        ({"tag": ["concord.job=x"]}, "--tag concord.job=x: names that begin with concord."),
        ({"experiment": " "}, "--experiment  : must be a name"),
        ({"model_name": "a/b"}, "--model-name a/b: expected text without '/'"),
    ],
)
def test_what_mlflow_cannot_take_is_refused_by_its_option(output: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refused:
        concord.train(JOB_FILE, output=output, **SMALL, **options)
    assert str(refused.value).startswith(line)
    assert not output.exists()
