"""DomainBed's RotatedMNIST and ColoredMNIST: the content of each environment, the network, and the spaces."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_images import idx, write_mnist

from concord.space import Choice, LogUniform
from concord.studies.search import own_point
from concord.training import Job, ProcessContext, load_job, train
from concord.training.context import Silent
from concord_jobs.domainbed.small_images import dealt, network


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    write_mnist(tmp_path, train=80, test=40, side=28)
    return tmp_path


@pytest.fixture
def numbered(mnist: Path) -> Path:
    """MNIST of which every pixel of an image is the image's number, 0 to 119."""
    for name, numbers in (("train", np.arange(80)), ("t10k", np.arange(80, 120))):
        images = np.broadcast_to(numbers[:, None, None], (len(numbers), 28, 28))
        (mnist / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    return mnist


def job_of(name: str, folder: Path, **options: Any) -> tuple[Job, Any]:
    job = load_job(name).job
    return job, job.config.with_options(data=folder, epochs=1, evaluations=1, batch_size=4, **options).resolve()


def test_all_digits_are_dealt_out_to_the_angles(mnist: Path) -> None:
    job, config = job_of("rotated-mnist", mnist, test_angle="30")
    found = job.environments(config)
    assert (found.train, found.test) == (("0", "15", "45", "60", "75"), ("30",))
    parts = [found[angle] for angle in (*found.train, *found.test)]
    assert [len(part.targets) for part in parts] == [20] * 6
    upright = found["0"].inputs
    assert upright.shape == (20, 1, 28, 28)
    other = job.environments(config.with_options(seed=1))["0"].inputs
    assert not torch.equal(upright, other)


@pytest.mark.parametrize("name", ["rotated-mnist", "domainbed-colored-mnist"])
def test_every_digit_is_in_one_environment(numbered: Path, name: str) -> None:
    job, config = job_of(name, numbered)
    found = job.environments(config)
    centres = [found[each].inputs[:, :, 14, 14].amax(1) for each in (*found.train, *found.test)]
    assert torch.cat(centres).sort().values.tolist() == list(range(120))


def test_an_angle_turns_its_digits_anticlockwise(mnist: Path) -> None:
    job, config = job_of("rotated-mnist", mnist)
    inputs = job.environments(config)["60"].inputs
    images, _ = dealt(mnist, 0, 4, 6)
    expected = np.asarray(Image.fromarray(images[3].numpy()).rotate(60, Image.Resampling.BILINEAR))
    assert np.array_equal(inputs[3, 0].numpy(), expected)


def test_a_colour_agrees_with_the_noisy_label_as_often_as_its_name_tells(mnist: Path) -> None:
    write_mnist(mnist, train=9000, test=3000, side=28)
    job, config = job_of("domainbed-colored-mnist", mnist)
    found = job.environments(config)
    assert (found.train, found.test) == (("flip-0.1", "flip-0.2"), ("flip-0.9",))
    for name, flips in (("flip-0.1", 0.1), ("flip-0.2", 0.2), ("flip-0.9", 0.9)):
        part = found[name]
        assert part.inputs.shape == (4000, 2, 28, 28)
        colours = part.inputs.flatten(2).sum(2).argmax(1)
        assert float((colours != part.targets).float().mean()) == pytest.approx(flips, abs=0.02)


@pytest.mark.parametrize(("name", "test"), [("rotated-mnist", "75"), ("domainbed-colored-mnist", "flip-0.9")])
def test_a_run_reports_the_environment_that_is_left_out(mnist: Path, name: str, test: str) -> None:
    job, config = job_of(name, mnist)
    metrics = train(job, config, ProcessContext(), Silent()).metrics
    assert metrics[f"accuracy/ood/{test}"] == metrics["ood_accuracy"]
    for study in job.studies.values():
        assert own_point(study.space, config, 2) is not None


@pytest.mark.parametrize("name", ["rotated-mnist", "domainbed-colored-mnist", "image-domains"])
def test_every_space_varies_options_that_its_method_uses(name: str, tmp_path: Path) -> None:
    job = load_job(name).job
    needed = {"data": tmp_path} if name == "image-domains" else {}
    for method, study in job.studies.items():
        fixed = {option: value for option, value in study.space.entries.items() if isinstance(value, str)}
        config = job.config.with_options(**needed, **fixed)
        config.check()
        assert not (study.space.entries.keys() - fixed) & config.resolve().unused(), method


def test_photographs_are_searched_as_in_domainbed(tmp_path: Path) -> None:
    small, large = (load_job(name).job for name in ("rotated-mnist", "image-domains"))
    assert large.studies.keys() == small.studies.keys()
    config = large.config.with_options(data=tmp_path)
    for method, study in large.studies.items():
        entries = dict(study.space.entries)
        assert entries.pop("lr") == LogUniform(1e-5, 10**-3.5)
        assert entries.pop("batch_size") == Choice(8, 16, 32)
        assert (entries.pop("l2"), entries.pop("regularization")) == (LogUniform(1e-6, 1e-2), "coupled")
        theirs = small.studies[method].space.entries
        assert entries.keys() == theirs.keys() - {"lr", "batch_size"}, method
        assert method == "fishr" or all(entries[name] == theirs[name] for name in entries), method
        own = own_point(study.space, config, 3)
        assert own is not None
        assert {name: own.point[name] for name in ("lr", "batch_size", "l2")} == {
            "lr": config.optimizer.lr,
            "batch_size": 32,
            "l2": 1e-6,
        }


def test_the_tables_have_domainbeds_numbers_of_each_environment() -> None:
    angles, colours = (load_job(name).job.comparisons for name in ("rotated-mnist", "domainbed-colored-mnist"))
    assert angles["domainbed"].paper["ERM, 75"] == {"left out": "96.4"}
    assert colours["domainbed"].paper["GroupDRO, flip-0.9"] == {"left out": "10.0"}
    assert len(angles["domainbed"].configurations) == 7 * 6


def test_the_network_is_that_of_small_images() -> None:
    model = network(2, 2)
    assert sum(weight.numel() for weight in model.parameters()) == 371_394
    assert model(torch.zeros(3, 2, 28, 28, dtype=torch.uint8)).shape == (3, 2)
    assert dict(model.named_children())["classifier"].in_features == 128


@pytest.mark.parametrize("name", ["rotated-mnist", "domainbed-colored-mnist"])
def test_the_settings_are_domainbeds_defaults_for_small_images(name: str) -> None:
    config = load_job(name).job.config
    optimizer, schedule = config.optimizer, config.schedule
    assert (config.data.batch_size, optimizer.optimizer, optimizer.lr, optimizer.l2) == (64, "adam", 1e-3, 0.0)
    assert (schedule.schedule, schedule.warmup, schedule.decay_per_step) == ("constant", 0.0, 1.0)
