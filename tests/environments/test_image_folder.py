"""Images in DOMAIN/CLASS/IMAGE: read exactly as in the files; unreadable files are refused by name."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from photographs_folder import write_photographs
from PIL import ExifTags, Image, ImageOps

from concord.environments import BatchStream, from_image_folder
from concord.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_photographs(tmp_path / "images", each=4)


def truncate(file: Path, part: float = 0.6) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * part)])


def test_domains_hold_the_pixels_of_their_files(folder: Path) -> None:
    (folder / "day" / "cat" / ".hidden.png").write_bytes(b"")
    environments = from_image_folder(folder, test=["night"])
    assert (environments.train, environments.test) == (("dawn", "day"), ("night",))
    assert environments.classes == environments.leaving_out("day").classes == ("cat", "dog")
    inputs, targets = environments["day"].take(slice(None))
    files = [folder / "day" / name / f"{at:02}.png" for name in ("cat", "dog") for at in range(4)]
    expected = np.stack([np.asarray(Image.open(file)).transpose(2, 0, 1) for file in files])
    assert np.array_equal(inputs.numpy(), expected)
    assert targets.tolist() == environments["day"].targets.tolist() == [0] * 4 + [1] * 4


def test_other_files_are_counted(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_text("")
    shutil.copytree(folder / "day" / "cat", folder / "day" / "cat" / "more")
    (folder / "day" / "cat" / "a.tif").write_text("no image")
    (folder / "day" / "cat" / "._a.png").write_text("no image")
    expected = "files are at DOMAIN/CLASS/IMAGE and end with .bmp .jpeg .jpg .png .webp"
    some = r"day/cat/\._a.png \(hidden\), day/cat/a.tif, day/cat/more/00.png and 3 more"
    read = "dawn/cat/00.png, dawn/cat/01.png, dawn/cat/02.png and 21 more"
    line = f"^{folder}: other files: 6, such as {some}; they are left out, since {expected}; read: {read}$"
    with pytest.warns(UserWarning, match=line):
        environments = from_image_folder(folder)
    assert len(environments["day"]) == 8


def test_a_domain_and_a_class_may_be_links_but_not_to_a_folder_around_them(folder: Path, tmp_path: Path) -> None:
    whole = from_image_folder(folder)
    (folder / "day").rename(tmp_path / "elsewhere")
    (folder / "day").symlink_to(tmp_path / "elsewhere")
    (folder / "dawn" / "cat").rename(tmp_path / "cats")
    (folder / "dawn" / "cat").symlink_to(tmp_path / "cats")
    linked = from_image_folder(folder)
    assert (linked.train, linked.version) == (whole.train, whole.version)
    (folder / "day" / "again").symlink_to(folder)
    with pytest.raises(InputError, match="again: is a link to a folder that contains it"):
        from_image_folder(folder)


def test_images_of_any_size_and_mode_are_resized(folder: Path) -> None:
    Image.open(folder / "dawn" / "cat" / "00.png").convert("L").resize((30, 20)).save(
        folder / "dawn" / "cat" / "00.png"
    )
    with pytest.raises(InputError, match=r"environment dawn: examples of \(20, 30, 3\) uint8 and \(12, 12, 3\) uint8"):
        from_image_folder(folder)["dawn"].take(slice(None))
    assert from_image_folder(folder, size=6)["dawn"].take(slice(None))[0].shape == (8, 3, 6, 6)


def test_the_version_changes_with_the_files(folder: Path) -> None:
    first = from_image_folder(folder).version
    assert from_image_folder(folder, size=4).version == first
    (folder / "day" / "cat" / "00.png").unlink()
    assert from_image_folder(folder).version != first


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "webp"])
@pytest.mark.parametrize(
    "spoil", [truncate, lambda file: file.write_text("no image"), lambda file: file.write_bytes(b"")]
)
def test_unreadable_images_are_named_and_counted_or_left_out(
    ending: str, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = write_photographs(tmp_path / "images", each=2, size=24, ending=ending)
    for name in ("cat/00", "dog/01"):
        spoil(folder / "day" / f"{name}.{ending}")
    problem = rf"2 of 12 images cannot be read: day/cat/00.{ending} \(.+\), day/dog/01.{ending} \(.+\)"
    with pytest.raises(InputError, match=f"^data={folder}: {problem}; remove them, or give skip_unreadable$"):
        from_image_folder(folder)
    with pytest.warns(UserWarning, match=f"{problem}; left out"):
        environments = from_image_folder(folder, skip_unreadable=True)
    assert environments["day"].targets.tolist() == [0, 1]
    assert len(environments["day"].take(slice(None))[0]) == 2


def test_more_than_8_bits_a_channel_cannot_be_read(folder: Path) -> None:
    Image.fromarray(np.zeros((12, 12), dtype=np.uint16)).save(folder / "day" / "cat" / "00.png")
    with pytest.raises(
        InputError, match=r"day/cat/00\.png \(mode I;16 has more than 8 bits a channel; scale it to 8\)"
    ):
        from_image_folder(folder)


@pytest.mark.parametrize("readers", [0, 2])
def test_an_image_that_goes_missing_is_named_by_any_reader(folder: Path, readers: int) -> None:
    environments = from_image_folder(folder)
    shutil.rmtree(folder / "day" / "cat")
    batches = BatchStream([environments[name] for name in environments.train], 8, seed=0, readers=readers)
    with pytest.raises(InputError, match=r"day/cat/0\d.png: cannot be read as an image"):
        list(map(batches.batch, range(3)))
    batches.close()


def test_a_class_that_a_domain_lacks_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "dawn" / "dog")
    shutil.rmtree(folder / "night" / "cat")
    with pytest.warns(UserWarning, match="not every domain has all classes: dawn lacks dog; night lacks cat"):
        environments = from_image_folder(folder, test=["night"])
    assert environments["night"].targets.tolist() == [1] * 4


def test_a_class_that_no_training_domain_has_is_refused(folder: Path) -> None:
    shutil.copytree(folder / "night" / "dog", folder / "night" / "wolf")
    with pytest.raises(InputError, match="no training domain has class wolf of domain night"):
        from_image_folder(folder, test=["night"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"folder": "nowhere"}, "nowhere: there is no such folder"),
        (
            {"folder": "images/day", "test": ["night"]},
            "images/day: no image is at DOMAIN/CLASS/IMAGE (other files: 8, such as cat/00.png, ",
        ),
        ({"folder": "."}, "no image is at DOMAIN/CLASS/IMAGE (other files: 24, such as images/dawn/cat/00.png, "),
        ({"test": ["night", "day"]}, "two training domains are needed, as DOMAIN/CLASS/IMAGE; found dawn"),
        ({"test": ["noon"]}, "test=noon: there is no such environment; there are dawn, day, night"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(folder: Path, words: dict[str, object], line: str) -> None:
    given = {"folder": "images", **words}
    with pytest.raises(InputError) as refused:
        from_image_folder(folder.parent / str(given.pop("folder")), **given)  # type: ignore[arg-type]
    assert line in str(refused.value)


def test_channels_of_every_batch_come_first(folder: Path) -> None:
    environments = from_image_folder(folder, size=8)
    batch = BatchStream([environments[name] for name in environments.train], 5, seed=0).batch(0)
    assert (batch[0].shape, batch[0].dtype, batch[1].dtype) == ((3, 5, 3, 8, 8), torch.uint8, torch.int64)


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_orientation_says(folder: Path, orientation: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    file = folder / "day" / "cat" / "00.png"
    Image.fromarray(pixels).save(file, exif=oriented(orientation))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(file)))
    assert (orientation == 1) == np.array_equal(expected, pixels)
    inputs, _ = from_image_folder(folder)["day"].take(slice(0, 1))
    assert np.array_equal(inputs[0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("exif", [b"Exif\0\0no TIFF!", b"Exif\0\0II*\0"])
def test_an_exif_part_that_cannot_be_read_turns_nothing(folder: Path, exif: bytes) -> None:
    file = folder / "day" / "cat" / "00.png"
    pixels = np.asarray(Image.open(file))
    Image.fromarray(pixels).save(file, exif=exif)
    inputs, _ = from_image_folder(folder)["day"].take(slice(0, 1))
    assert np.array_equal(inputs[0].permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_an_image_of_any_mode_of_8_bits_has_three_channels(folder: Path, mode: str) -> None:
    ending = "jpg" if mode == "CMYK" else "png"
    (folder / "day" / "cat" / "00.png").unlink()
    image = Image.effect_noise((12, 12), 50).convert("RGB").convert(mode)
    image.save(folder / "day" / "cat" / f"00.{ending}", **({"transparency": bytes(range(256))} if mode == "P" else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs, _ = from_image_folder(folder)["day"].take(slice(0, 1))
    assert inputs.shape == (1, 3, 12, 12)


def test_an_image_beyond_the_limit_of_pillow_is_named_with_its_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("L", (40, 40)).save(folder / "day" / "cat" / "00.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    with pytest.raises(InputError, match=r"day/cat/00\.png \(Image size \(1600 pixels\) exceeds limit"):
        from_image_folder(folder)


def test_a_domain_whose_name_is_not_utf_8_is_refused_in_one_line(folder: Path) -> None:
    os.rename(folder / "day", os.fsencode(folder) + b"/caf\xe9")
    with pytest.raises(InputError, match=r"^environment caf\\udce9: its name is not UTF-8; rename it$"):
        from_image_folder(folder)
