"""Users' images with torchvision's real networks, trained for a step or two on small images."""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command_line import Concord
from forked import WITHOUT_CONCORD, run_program
from photographs_folder import write_photographs
from safetensors.torch import load_file, save_file
from torch import nn

from concord.cli import main
from concord.errors import InputError
from concord.execution.trained_model import model_of_run
from concord.extras import install_command
from concord.training import Job, ProcessContext, load_job, train
from concord.training.context import Silent

SMALL = {"image_size": 32, "batch_size": 4, "epochs": 1, "aggregator": "mean", "evaluations": 1, "readers": 0}
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def torchvision() -> ModuleType:
    return pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photographs(tmp_path_factory.mktemp("data") / "images", each=5, size=40, ending="jpg")


@pytest.fixture
def job() -> Job[Any]:
    return load_job("image-domains").job


@pytest.fixture
def weights(torchvision: ModuleType, tmp_path: Path) -> Path:
    """Weights of a ResNet-18 for ten classes, with statistics of its own."""
    torch.manual_seed(3)
    state = torchvision.models.resnet18(num_classes=10).state_dict()
    state = {name: value + 0.01 if "running" in name else value for name, value in state.items()}
    save_file(state, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def statistics(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for name, value in model.named_buffers() if "running" in name]


@pytest.mark.parametrize("network", ["resnet18", "resnet50", "vit-b-16"])
def test_every_network_gives_logits_of_the_folders_classes(
    network: str, job: Job[Any], torchvision: ModuleType, images: Path
) -> None:
    config = job.config.with_options(data=images, network=network, image_size=32).resolve()
    model = job.model(config)
    batch = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    logits = model.eval()(batch)
    assert logits.shape == (2, 2)
    torch.testing.assert_close(model(batch / 255), logits)


def test_weights_begin_the_network_and_its_last_layer_is_new(
    job: Job[Any], torchvision: ModuleType, images: Path, weights: Path
) -> None:
    config = job.config.with_options(data=images, weights=weights, image_size=32).resolve()
    found, expected = job.model(config).network.state_dict(), load_file(weights)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert name.startswith("fc.") or torch.equal(value, expected[name]), name
    assert (found["fc.weight"].shape, found["fc.bias"].shape) == ((2, 512), (2,))


FROZEN = pytest.param("frozen", True, marks=pytest.mark.slow)  # what auto takes here
TRAINED = pytest.param("trained", False, marks=pytest.mark.slow)


@pytest.mark.parametrize(("batch_norm", "kept"), [("auto", True), FROZEN, TRAINED])
def test_frozen_batch_norm_keeps_statistics_and_trains_weights(
    batch_norm: str, kept: bool, job: Job[Any], torchvision: ModuleType, images: Path, weights: Path
) -> None:
    config = job.config.with_options(data=images, weights=weights, batch_norm=batch_norm, **SMALL).resolve()
    made: list[nn.Module] = []
    watched = Job(
        job.environments, lambda given: made.append(job.model(given)) or made[-1], job.loss, config=job.config
    )
    before = statistics(job.model(config))
    train(watched, config, ProcessContext(), Silent())
    after = statistics(made[0])
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)) == kept
    assert not torch.equal(made[0].network.bn1.weight, torch.ones(64))  # type: ignore[union-attr,arg-type]


def test_augmentation_is_of_training_alone_and_of_the_size_asked_for(
    job: Job[Any], torchvision: ModuleType, images: Path
) -> None:
    def seen(**options: Any) -> list[torch.Tensor]:
        source = job.environments(job.config.with_options(data=images, image_size=32, **options))["day"].source
        places = torch.arange(4)
        return [source.take(places, draw)[0] for draw in (None, places, places, places + 9)]

    evaluated, first, again, other = seen()
    assert evaluated.shape == first.shape == (4, 3, 32, 32)
    assert torch.equal(first, again)
    assert not torch.equal(first, evaluated)
    assert not torch.equal(first, other)
    assert torch.equal(*seen(augment=False)[:2])


@pytest.mark.parametrize(
    ("side", "options", "size"),
    [
        (28, {}, 32),
        (40, {}, 40),
        (40, {"network": "vit-b-16"}, 48),
        (300, {}, 224),
        (40, {"weights": Path("weights.safetensors")}, 224),
        (40, {"image_size": 64}, 64),
    ],
)
def test_images_keep_their_size_unless_another_or_weights_are_given(
    side: int, options: dict[str, Any], size: int, job: Job[Any], tmp_path: Path
) -> None:
    folder = write_photographs(tmp_path / "images", each=1, size=side)
    assert job.config.with_options(data=folder, **options).image_size == size


def test_a_rate_for_given_weights_is_named_where_first_weights_are_random(
    job: Job[Any], torchvision: ModuleType, images: Path, weights: Path
) -> None:
    config = job.config.with_options(data=images, image_size=32)
    with pytest.warns(UserWarning, match="--lr 5e-05 is meant for pretrained --weights.*give.*or --lr 0.001$"):
        job.model(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.model(config.with_options(lr=1e-3))
        job.model(config.with_options(weights=weights))


def test_it_trains_with_bfloat16_and_registers_a_model_that_names_the_class_of_a_file(
    torchvision: ModuleType, concord_: Concord, output: Path, images: Path, tmp_path: Path
) -> None:
    words = ["--data", images, "--test", "night", *FLAGS, "--precision", "bfloat16", "--output", output]
    said = concord_("train", "image-domains", *words, "--json")
    assert said.status == 0, said.err
    assert said.json["model"] == "models:/image-domains/1"
    assert 0 <= said.json["metrics"]["ood_accuracy"] <= 1
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (program,) = re.findall(r"<!-- tested: images-predict -->\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "concord-runs").symlink_to(output)
    (tmp_path / "new.jpg").symlink_to(images / "night" / "cat" / "00.jpg")
    name, *logits = run_program(WITHOUT_CONCORD + program + "print(name, *logits[0])", tmp_path).split()[-3:]
    found = model_of_run(load_job("image-domains"), output, said.json["name"])
    environments = found.job.job.environments(found.config)
    with torch.no_grad():
        own = found.model.eval()(environments["night"].take(slice(1))[0])[0]  # the first file of the first class
    torch.testing.assert_close(torch.tensor([float(each) for each in logits]), own, atol=1e-4, rtol=1e-3)
    assert name == environments.classes[int(own.argmax())]


def other_network(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in state.items() if name != "bn1.weight"}
    return {**state, "conv1.weight": torch.zeros(64, 3, 3, 3), "stem.weight": torch.zeros(3)}


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            other_network,
            "are not of resnet18: the file lacks bn1.weight; has stem.weight; has another shape of conv1.weight",
        ),
        (
            lambda state: {name: value for name, value in state.items() if "layer1" not in name},
            "the file lacks layer1.0.bn1.bias, layer1.0.bn1.running_mean, layer1.0.bn1.running_var and 17 more",
        ),
        (None, "cannot be read as safetensors"),
    ],
)
def test_weights_of_another_network_are_refused_by_name(
    make: Callable[..., Any] | None, line: str, torchvision: ModuleType, images: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "other.safetensors"
    if make is None:
        file.write_text("no weights")
    else:
        save_file(make(torchvision.models.resnet18().state_dict()), file)
    output = tmp_path / "runs"
    status = main(["train", "image-domains", "--data", str(images), "--weights", str(file), "--output", str(output)])
    problem = capsys.readouterr().err.strip().splitlines()
    assert (status, len(problem)) == (2, 1), problem
    assert problem[0].startswith(f"concord: --weights {file}: ")
    assert line in problem[0]
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "--data: needed; give a folder with DOMAIN/CLASS/IMAGE"),
        (["--data", "nowhere"], "nowhere: there is no such folder"),
        (["--data", "IMAGES", "--test", "day", "night"], "two training domains are needed"),
        (["--data", "IMAGES", "--image-size", "8"], "--image-size 8: must be at least 32"),
        (["--data", "IMAGES", "--network", "vit-b-16", "--image-size", "40"], "must be a multiple of 16"),
        (["--data", "IMAGES", "--weights", "nowhere"], "nowhere: there is no such file"),
        (["--data", "s3://me:secret@bucket/images"], "--data s3://***@bucket/images: holds a user or a password"),
        (
            ["--data", "IMAGES", "--weights", "s3://me:secret@bucket/w"],
            "--weights s3://***@bucket/w: holds a user or a",
        ),
        (["--data", "BROKEN"], "2 of 30 images cannot be read: day/cat/00.jpg (image file is truncated"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    words: list[str], line: str, torchvision: ModuleType, refused: Callable[..., str], images: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    if "BROKEN" in words:
        write_photographs(broken, each=5, ending="jpg")
        for name in ("day/cat/00.jpg", "night/dog/01.jpg"):
            (broken / name).write_bytes((broken / name).read_bytes()[:-40])
    folders = {"IMAGES": images, "BROKEN": broken}
    assert line in refused("train", "image-domains", *(folders.get(word, word) for word in words))


def test_a_torchvision_of_another_torch_is_refused_in_one_line(
    job: Job[Any], images: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    advice = re.escape(install_command("images", replaced="torchvision"))
    problem = r"torchvision does not fit torch \S+ \(operator torchvision::nms does not exist"
    with pytest.raises(InputError, match=rf"{problem}\): {advice}$"):
        job.environments(job.config.with_options(data=images))
    (tmp_path / "torchvision.py").write_text("import a_module_that_is_missing\n")
    with pytest.raises(InputError, match=r"image-domains needs torchvision: .*pip install .*\[images\]"):
        job.environments(job.config.with_options(data=images))
