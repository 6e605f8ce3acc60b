"""The predictions for an environment that is left out: of every evaluation, in the data's own terms, also resumed."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from concord.environments import Environments
from concord.environments.table_rows import TargetScale
from concord.training import Job, ProcessContext, Silent, TrainConfig, train
from concord.training.left_out import PREDICTIONS, LeftOutPredictions
from concord.training.worker_data import prepare


def names(**known: object) -> Environments:
    found = Environments(lambda _: None, train=["a", "b"], validation=["c"])
    for name, value in known.items():
        setattr(found, name, value)
    return found


def written(predictions: LeftOutPredictions, folder: Path) -> pd.DataFrame:
    predictions.write(folder / "found.parquet")
    return pd.read_parquet(folder / "found.parquet")


def test_classes_are_named_and_numbers_are_in_the_targets_units(tmp_path: Path) -> None:
    classes = LeftOutPredictions(names(classes=("no", "yes"), rows={"c": np.array([7, 3])}))
    classes.add(10, "c", torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    found = written(classes, tmp_path)
    assert found[["step", "row", "target", "prediction"]].to_numpy().tolist() == [
        [10, 7, "yes", "yes"],
        [10, 3, "yes", "no"],
    ]
    assert found.probability_yes.tolist() == pytest.approx([1 / (1 + np.exp(-2)), 1 / (1 + np.exp(1))])
    numbers = LeftOutPredictions(names(target_scale=TargetScale(100.0, 10.0)))
    numbers.add(1, "c", torch.tensor([[0.5], [-1.0]]), torch.tensor([[0.0], [1.0]]))
    assert written(numbers, tmp_path)[["row", "target", "prediction"]].to_numpy().tolist() == [
        [0, 100, 105],
        [1, 110, 90],
    ]
    rare = LeftOutPredictions(names(classes=("no", "yes")), cutoff=0.1)
    rare.add(10, "c", torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    assert written(rare, tmp_path).cutoff.tolist() == [0.1, 0.1]
    assert "cutoff" not in found
    mean = LeftOutPredictions(names(classes=("no", "yes")), cutoff=None)
    mean.add(10, "c", torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    assert written(mean, tmp_path).cutoff.isna().all()
    several = LeftOutPredictions(names())
    several.add(1, "c", torch.tensor([[0.5, 1.0]]), torch.tensor([[0.0, 1.0]]))
    ends = [f"{kind}_{place}" for kind in ("target", "prediction") for place in (0, 1)]
    assert list(written(several, tmp_path).columns) == ["step", "environment", "row", *ends]


class Kept(Silent):
    """Keeps files and the checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, list[Path]()

    def keep(self, path: str, write: object) -> None:
        write(self.folder / path)  # type: ignore[operator]

    def checkpoint(self, write: object, step: int) -> None:
        folder = self.folder / f"checkpoint-{step:04d}"
        folder.mkdir(parents=True)
        write(folder)  # type: ignore[operator]
        self.checkpoints.append(folder)


def test_a_resumed_run_has_the_predictions_of_all_evaluations(tmp_path: Path) -> None:
    def data(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(ord(name)))
        return inputs, (inputs[:, 0] > 0).long()

    job: Job[TrainConfig] = Job(
        lambda _: Environments(data, train=["a", "b", "c"]),
        lambda _: torch.nn.Linear(3, 2),
        torch.nn.functional.cross_entropy,
    )
    config = job.config.with_options(epochs=4, evaluations=4, checkpoints=4, aggregator="mean", leave_out="c", lr=0.1)
    whole, later = Kept(tmp_path / "whole"), Kept(tmp_path / "later")
    history = train(job, config, ProcessContext(), whole).history
    later.folder.mkdir()
    train(job, config, ProcessContext(), later, resume_from=whole.checkpoints[1])
    found = pd.read_parquet(whole.folder / PREDICTIONS)
    pd.testing.assert_frame_equal(found, pd.read_parquet(later.folder / PREDICTIONS))
    for each in history:
        rows = found[found.step == each.step]
        assert (rows.target == rows.prediction).mean() == pytest.approx(each.metrics["validation_accuracy"])


def test_the_first_process_predicts_for_all_environments_left_out() -> None:
    def data(_: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(9, 1), torch.arange(9) % 2

    job: Job[TrainConfig] = Job(
        lambda _: Environments(data, train=["a", "b", "c", "d", "e"]),
        lambda _: torch.nn.Linear(1, 2),
        torch.nn.functional.cross_entropy,
    )
    config = job.config.with_options(leave_out=("c", "d", "e"), aggregator="mean").resolve()
    first, second = ([name for name, _ in prepare(job, config, ProcessContext(rank, 2)).eval_only] for rank in (0, 1))
    assert (first, second) == (["c", "d", "e"], [])


def test_a_run_on_all_environments_keeps_no_predictions(tmp_path: Path) -> None:
    job: Job[TrainConfig] = Job(
        lambda _: Environments(lambda _: (torch.ones(9, 1), torch.arange(9) % 2), train=["a", "b"], validation=["c"]),
        lambda _: torch.nn.Linear(1, 2),
        torch.nn.functional.cross_entropy,
    )
    kept = Kept(tmp_path / "all")
    train(job, job.config.with_options(epochs=1, aggregator="mean"), ProcessContext(), kept)
    assert [path.name for path in kept.folder.iterdir()] == [kept.checkpoints[0].name]
