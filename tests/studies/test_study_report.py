"""Reports of studies: selections side by side, best trials, methods over seeds, searches compared."""

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from recorded import described, record_run

from concord.cli import main
from concord.errors import InputError
from concord.record import OpenRun, read_record, write_record
from concord.space import Choice, LogUniform, OneOf, Space
from concord.storage import Folder
from concord.studies.methods_result import read_methods
from concord.studies.report import ReportOptions, report_groups
from concord.studies.results import StudyResult, read_study, write_results
from concord.training import load_job

SPACE = Space({"lr": LogUniform(1e-3, 1.0), "penalty": OneOf({"none": {"l2": 0.0}, "l2": {"l2": Choice(0.1, 0.2)}})})


Runs = tuple[dict[str, float] | None, dict[str, Any]]  # the metrics, None of one that failed; and the place


def append(folder: Path, *runs: Runs) -> None:
    """Record these runs of a study."""
    record = read_record(Folder(folder), "study")
    assert record is not None
    with contextlib.closing(OpenRun(Folder(folder), record)) as group:
        for metrics, place in runs:
            record_run(group, metrics, **place)
            time.sleep(0.002)  # results come in the order of their ends


def trial(number: int, **more: Any) -> dict[str, Any]:
    return {"kind": "trial", "trial": number, "point": {"lr": 0.5, "penalty": "none"}, **more}


FAILED: Runs = (None, trial(3))


def study(output: Path, name: str, **changes: Any) -> Path:
    """A study of four trials, of which one failed, that were judged by held-out accuracy."""
    folder = recorded(output, name, **changes)
    values = [(0.9, 0.4), (0.8, 0.7), (0.7, 0.9)]
    append(
        folder,
        *(
            (
                {"held_out_accuracy": held_out, "ood_accuracy": ood, "train_accuracy": 1.0},
                trial(number, point={"lr": 0.1 * (number + 1), "penalty": "l2", "l2": 0.1}),
            )
            for number, (held_out, ood) in enumerate(values)
        ),
        FAILED,
        *(
            ({"validation_accuracy": left_out}, {"kind": "left-out", "trial": number, "left_out": "a"})
            for number, left_out in ((0, 0.5), (1, 0.6))
        ),
        *((seed_metrics(seed), {"kind": "seed", "trial": 0, "seed": seed}) for seed in (1, 2)),
    )
    return folder


def seed_metrics(seed: int) -> dict[str, float]:
    return {"train_accuracy": 1.0, "ood_accuracy": 0.4 + seed / 10}


def recorded(output: Path, name: str, **changes: Any) -> Path:
    """The same study before its first trial."""
    deciding = {"search": "tpe", "stop_when": "", "startup": 20, "seed": 0, "method": changes.get("method", "plain")}
    record = described("study", space=SPACE.as_json())
    folder = output / "studies" / name
    folder.mkdir(parents=True)
    deciding |= changes.pop("deciding", {})
    write_record(Folder(folder), "study", record | changes | {"deciding": deciding})
    return folder


def job_file(output: Path, name: str = "mine") -> str:
    path = output / f"{name}.py"
    path.write_text("from concord.training import Job\n\njob = Job(*3 * [print])\n")
    return str(path)


def printed(output: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What ``concord report`` prints of the job's studies, and what it says."""
    assert main(["report", job_file(output), "--output", str(output)]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def report(output: Path, job: str = "mine", **options: Any) -> dict[str, Any]:
    """What ``concord report --json`` shows."""
    return report_groups(load_job(job_file(output, job)), [], ReportOptions(output=output, **options), lambda _: None)[
        0
    ]


@pytest.fixture
def result(tmp_path: Path) -> StudyResult:
    return read_study(Folder(study(tmp_path, "s")))


def test_the_three_selections_stand_side_by_side_and_may_disagree(result: StudyResult) -> None:
    chosen = {each.selection: (each.trial, each.among) for each in result.by_selection()}
    assert chosen == {"held-out": (0, 3), "leave-one-out": (1, 2), "o.o.d. test (oracle)": (2, 3)}
    header, rows = result.selections_table().cells()
    assert header == ["selected by", "among", "trial", "held_out accuracy", "left_out accuracy", "ood accuracy"]
    assert rows[1] == ["leave-one-out", "2", "1", "0.8", "0.6", "0.7"]


def test_the_table_has_the_metric_first_then_what_was_varied(result: StudyResult) -> None:
    header, rows = result.best_table().cells()
    assert header == ["held_out_accuracy", "lr", "penalty", "l2", "trial"]
    assert rows == [["0.9", "0.1", "l2", "0.1", "0"], ["0.8", "0.2", "l2", "0.1", "1"]]


def test_a_study_of_an_error_shows_the_smallest_first_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    criterion = {"selection": "held-out", "metric": "held_out_accuracy", "mode": "min"}  # an error by this name
    study(tmp_path, "s", criterion=criterion, options={"top": 3})
    result = read_study(Folder(tmp_path / "studies" / "s"))
    assert [row[0] for row in result.best_table().cells()[1]] == ["0.7", "0.8", "0.9"]
    assert (result.as_json()["mode"], result.as_json()["best"]["trial"]) == ("min", 2)
    chosen = {each.selection: each.trial for each in result.by_selection()}
    assert chosen == {"held-out": 2, "leave-one-out": 0, "o.o.d. test (oracle)": 0}
    out, _ = printed(tmp_path, capsys)
    assert out.index("0.7") < out.index("0.8") < out.index("s: 3 trials finished, 1 failed")
    assert "best      trial 2, selected by held-out: held_out_accuracy 0.7, the smaller the better" in out


def test_the_worst_environment_stands_beside_each_selections_choice(tmp_path: Path) -> None:
    criterion = {"selection": "oracle", "metric": "worst_ood_accuracy", "mode": "max"}
    folder = study(tmp_path, "s", criterion=criterion, measure="worst_accuracy")
    append(folder, ({"worst_held_out_accuracy": 0.25, "worst_ood_accuracy": 0.125}, trial(4)))
    header, rows = read_study(Folder(folder)).selections_table().cells()
    assert header[3] == "held_out worst_accuracy"
    assert rows == [
        ["held-out", "1", "4", "0.25", "–", "0.125"],
        ["o.o.d. test (oracle)", "1", "4", "0.25", "–", "0.125"],
    ]


def test_what_an_option_stood_for_is_shown_where_trials_differ_in_it(tmp_path: Path) -> None:
    folder = study(tmp_path, "s")
    for number, name in ((4, "and-mask"), (5, "mean")):
        resolved: dict[str, Any] = {"aggregator": name, "epochs": 94}
        append(folder, ({"held_out_accuracy": 0.99 - number / 1000}, trial(number, resolved=resolved)))
    result = read_study(Folder(folder))
    header, rows = result.best_table().cells()
    assert header == ["held_out_accuracy", "lr", "penalty", "l2", "aggregator", "epochs", "trial"]
    assert [row[4] for row in rows] == ["and-mask", "mean"]
    assert result.as_json()["best"]["config"] == {"lr": 0.5, "penalty": "none", "aggregator": "and-mask", "epochs": 94}


def test_a_study_says_whether_its_model_became_champion(tmp_path: Path) -> None:
    of_model: dict[str, Any] = {"model": "models:/mine/2", "champion": False, "registration": "not better than 0.9"}
    not_now = read_study(Folder(study(tmp_path, "s", **of_model)))
    assert not_now.registration == "models:/mine/2: not the champion (not better than 0.9)"
    assert not_now.as_json()["champion"] is False
    champion = {**of_model, "champion": True, "registration": "the first champion"}
    now = read_study(Folder(study(tmp_path, "n", **champion)))
    assert now.registration == "models:/mine/2: the champion now (the first champion)"
    assert now.as_json()["champion"] is True
    assert read_study(Folder(study(tmp_path, "none"))).registration is None


def test_the_json_keeps_its_contract(result: StudyResult) -> None:
    said = result.as_json()
    assert {"job", "study", "finished", "failed", "seconds", "selection", "best"} <= said.keys()
    assert (said["finished"], said["failed"], said["selection"]) == (3, 1, "held-out")
    assert said["best"].keys() == {"trial", "config", "metrics"}
    assert said["best"]["metrics"]["left_out_accuracy"] == 0.5
    assert [run["seed"] for run in said["reruns"]] == [1, 2]


def test_an_oracle_is_called_one_wherever_it_appears(tmp_path: Path) -> None:
    criterion = {"selection": "oracle", "metric": "ood_accuracy", "mode": "max"}
    result = read_study(Folder(study(tmp_path, "s", criterion=criterion, oracle="selection")))
    assert result.best.number == 2
    assert result.criterion.label == "o.o.d. test (oracle)"
    assert result.best_table().cells()[0][0] == "ood_accuracy (oracle)"
    assert result.as_json()["oracle"] == "selection"


def test_a_report_calls_every_choice_by_the_test_an_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: dict[str, list[str]] = {}

    def save(figure: Figure, path: Path) -> Path:
        labels[path.stem] = [axes.get_ylabel() for axes in figure.axes]
        return path

    monkeypatch.setattr("concord.studies.report.save", save)
    criterion = {"selection": "oracle", "metric": "ood_accuracy", "mode": "max"}
    folder = study(tmp_path, "s", criterion=criterion, oracle="selection")
    append(folder, *((seed_metrics(seed), {"kind": "seed", "trial": 2, "seed": seed}) for seed in (1, 2)))
    study(tmp_path, "random", criterion=criterion, oracle="selection", deciding={"search": "random"})
    study(tmp_path, "other", method="mask")
    shown = report(tmp_path)
    assert shown["best trials (oracle)"].keys() == {"plain", "mask"}
    assert shown["searches"].keys() == shown["methods"].keys() - {"mask"} == {"plain (oracle)"}
    assert labels["best-runs"] == ["best test accuracy (oracle)"]
    assert labels["curves"] == ["accuracy, best trials (oracle)"] * 2
    assert labels["searches-plain-(oracle)"] == ["best o.o.d. accuracy (oracle) so far"]


def test_every_figure_is_drawn_from_the_folder_alone(result: StudyResult) -> None:
    lines: list[str] = []
    drawn = write_results(result, lines.append).drawn
    assert drawn.keys() == {"history", "slices", "parallel"}
    assert lines == ["no figure of importances: it needs 16 finished trials, and there are 3"]
    assert all(path == str(result.folder.path / "figures" / f"{name}.png") for name, path in drawn.items())
    assert all(Path(path).stat().st_size > 5000 for path in drawn.values())


def test_methods_are_compared_over_the_seeds_of_their_newest_study(tmp_path: Path) -> None:
    study(tmp_path, "old", started=1.0)
    study(tmp_path, "other", started=2.0, method="mask")
    study(tmp_path, "new", started=3.0)
    append(tmp_path / "studies" / "new", (seed_metrics(3), {"kind": "seed", "trial": 0, "seed": 3}))
    shown = report(tmp_path)
    assert [each["study"] for each in shown["studies"]] == ["old", "other", "new"]
    assert {name: runs["ood"]["seeds"] for name, runs in shown["methods"].items()} == {"plain": 3, "mask": 2}
    expected = {"median": 0.55, "least": 0.5, "largest": 0.6, "seeds": 2}
    assert shown["methods"]["mask"]["ood"] == pytest.approx(expected)
    assert Path(shown["figures"]["methods"]).exists()


def test_methods_are_compared_by_one_measure(tmp_path: Path) -> None:
    criterion = {"selection": "held-out", "metric": "held_out_loss", "mode": "min"}
    append(
        recorded(tmp_path, "by-loss", criterion=criterion, measure="loss", method="mask", started=1.0),
        ({"held_out_loss": 0.1}, trial(0)),
        *(
            (seed_metrics(seed) | {"train_loss": 9.0, "ood_loss": 9.0}, {"kind": "seed", "trial": 0, "seed": seed})
            for seed in (1, 2)
        ),
    )
    study(tmp_path, "by-accuracy", started=2.0)
    shown = report(tmp_path)["methods"]
    assert shown["mask"] == shown["plain"]


def test_a_comparison_of_methods_is_found_beside_one_whose_name_begins_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concord.studies.methods_result.methods_result", lambda _, studies, failed: [*studies, *failed])
    for started, name in enumerate(("a-mean", "a-vrex", "a-b-mean", "a-b-vrex")):
        study(tmp_path, name, method=name[-4:], started=float(started))
    found: Any = read_methods(load_job(job_file(tmp_path)), tmp_path, "a")
    assert found == ["mean", "vrex"]


def test_methods_are_printed_as_a_table_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(tmp_path, "s")
    study(tmp_path, "other", method="mask")
    out, said = printed(tmp_path, capsys)
    lines = [line.split() for line in out.splitlines()]
    assert ["methods", "median", "least", "largest", "seeds"] in lines
    assert [line for line in lines if line[:1] == ["mask"]] == [
        ["mask", "train", "1.000", "1.000", "1.000", "2"],
        ["mask", "ood", "0.550", "0.500", "0.600", "2"],
        ["mask", "test", "accuracy", "0.700", "0.400", "0.900", "3"],  # of the best trials
    ]
    assert "median:" not in out
    assert said.count("no figure of importances: it needs 16 finished trials, and there are 3") == 2


def test_searches_are_compared_where_nothing_but_search_and_seed_differs(tmp_path: Path) -> None:
    study(tmp_path, "t0")
    study(tmp_path, "t1", deciding={"seed": 1})
    study(tmp_path, "r0", deciding={"search": "random"})
    study(tmp_path, "another", deciding={"search": "random", "epochs": 3})
    shown = report(tmp_path)
    assert shown["searches"].keys() == {"plain"}
    searches = shown["searches"]["plain"]
    assert {search: found["seeds"] for search, found in searches.items()} == {"tpe": 2, "random": 1}
    assert searches["tpe"]["median"] == searches["random"]["median"] == 0.9
    assert Path(shown["figures"]["searches plain"]).exists()


def test_a_study_without_finished_trials_leaves_the_others_in_the_report(tmp_path: Path) -> None:
    criterion = {"selection": "held-out", "metric": "held_out_spread", "mode": "min"}
    append(recorded(tmp_path, "failing", criterion=criterion, measure="spread", started=1.0), FAILED)
    with_failing = report(tmp_path)
    assert (with_failing["studies"], with_failing["figures"]) == ([], {})
    study(tmp_path, "s")
    shown = report(tmp_path)
    assert [each["study"] for each in shown["studies"]] == ["s"]
    assert shown["methods"].keys() == {"plain"}


def test_only_studies_of_the_job_are_reported(tmp_path: Path) -> None:
    study(tmp_path, "s")
    study(tmp_path, "foreign", job="other")
    assert [each["study"] for each in report(tmp_path)["studies"]] == ["s"]
    with pytest.raises(InputError, match="--studies foreign: is a study of job other, not of mine"):
        report(tmp_path, studies=("foreign",))
    with pytest.raises(InputError, match="there is no such study"):
        report(tmp_path, studies=("none",))
    with pytest.raises(InputError, match="job nobody has no study in"):
        report(tmp_path, "nobody")
