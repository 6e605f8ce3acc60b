"""Labelled images: reading returns the written images, and an error is one line."""

import functools
import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from web_server import Quiet, serving

from concord.environments import image_dataset, shuffle_labels
from concord.environments.files import RemoteFile, download
from concord.environments.images import read_cifar10, read_idx
from concord.errors import InputError

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the real datasets are not on this machine")


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(
    folder: Path, train: int = 20, test: int = 10, compressed: bool = True, side: int = 8
) -> dict[str, np.ndarray]:
    """Small files of MNIST's format."""
    random = np.random.default_rng(0)
    arrays = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        arrays[f"{name}-images-idx3-ubyte"] = random.integers(0, 256, (count, side, side))
        arrays[f"{name}-labels-idx1-ubyte"] = np.arange(count) % 10
    for name, array in arrays.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


def cifar10_records(count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    records = random.integers(0, 256, (count, 3073)).astype(np.uint8)
    records[:, 0] = np.arange(count) % 10
    return records


def write_cifar10(path: Path, each: int = 4) -> np.ndarray:
    """A small archive of CIFAR-10's binary format; gives the test records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
            content = cifar10_records(each).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return cifar10_records(each)


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("inside", ["mnist", "."])
def test_mnist_is_read_from_its_files_compressed_or_not(tmp_path, compressed, inside):
    arrays = write_mnist(tmp_path / inside, compressed=compressed)
    data = image_dataset("mnist", tmp_path)
    assert data.classes == 10
    assert data.train.images.shape == (20, 1, 8, 8)
    assert data.train.images.dtype == torch.uint8
    assert np.array_equal(data.train.images[:, 0], arrays["train-images-idx3-ubyte"])
    assert np.array_equal(data.test.labels, arrays["t10k-labels-idx1-ubyte"])


def test_cifar10_is_read_from_its_binary_archive(tmp_path):
    records = write_cifar10(tmp_path / "cifar-10-binary.tar.gz")
    data = read_cifar10(tmp_path / "cifar-10-binary.tar.gz")
    assert len(data.train) == 20
    assert np.array_equal(data.test.images.reshape(len(records), -1), records[:, 1:])
    assert np.array_equal(data.test.labels, records[:, 0])


@pytest.mark.parametrize("column", ["img", "image"])
def test_cifar10_is_read_from_parquet_with_image_files(tmp_path, column):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3))
    files = [png(each) for each in pixels]
    cells = files if column == "img" else [{"bytes": file, "path": "a.png"} for file in files]
    for part in ("train", "test"):
        pq.write_table(pa.table({column: cells, "label": [0, 1, 2, 3, 4, 9]}), tmp_path / f"{part}.parquet")
    data = image_dataset("cifar10", tmp_path)
    assert np.array_equal(data.train.images, pixels.transpose(0, 3, 1, 2))
    assert data.test.labels.tolist() == [0, 1, 2, 3, 4, 9]


@needs_shared_data
def test_the_real_datasets_are_what_they_are_known_to_be():
    mnist = image_dataset("mnist", SHARED)
    assert (len(mnist.train), len(mnist.test)) == (60_000, 10_000)
    digest = hashlib.md5(idx(mnist.train.images[:, 0].numpy())).hexdigest()
    assert digest == "6bbc9ace898e44ae57da46a324031adb"  # of the uncompressed file
    assert mnist.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert mnist.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.slow  # decodes 60,000 images
@needs_shared_data
def test_the_real_cifar10_has_its_sizes():
    test = image_dataset("cifar10", SHARED).test
    assert test.images.shape == (10_000, 3, 32, 32)
    assert test.labels.bincount().tolist() == [1000] * 10


def test_a_folder_of_images_is_read_by_class(tmp_path):
    for part in ("train", "test"):
        for number, name in enumerate(["cat", "dog"]):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(3):
                (tmp_path / part / name / f"{index}.png").write_bytes(png(np.full((9, 8, 3), 10 * number + index)))
    data = image_dataset(str(tmp_path), None)
    assert data.classes == 2
    assert data.train.images.shape == (6, 3, 9, 8)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.images[:, 0, 0, 0].tolist() == [0, 1, 2, 10, 11, 12]


@settings(max_examples=50, deadline=None)
@given(
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=60), fraction=st.floats(0, 1), seed=st.integers(0, 1 << 40)
)
def test_shuffled_labels_are_a_permutation_that_seed_and_fraction_decide(labels, fraction, seed):
    given_ = torch.tensor(labels)
    shuffled, wrong = shuffle_labels(given_, fraction, seed)
    assert sorted(shuffled.tolist()) == sorted(labels)
    assert torch.equal(wrong, shuffled != given_)
    assert int(wrong.sum()) <= round(fraction * len(labels))
    again, _ = shuffle_labels(given_, fraction, seed)
    assert torch.equal(shuffled, again)


def test_about_nine_in_ten_of_many_shuffled_labels_are_wrong():
    labels = torch.arange(20_000) % 10
    _, wrong = shuffle_labels(labels, 0.25, 3)
    assert abs(float(wrong.float().mean()) - 0.225) < 0.01
    assert not torch.equal(wrong, shuffle_labels(labels, 0.25, 4)[1])


def test_a_fraction_beyond_the_whole_is_refused():
    with pytest.raises(InputError, match=r"label_noise=1.5: .* must lie in \[0, 1\]"):
        shuffle_labels(torch.arange(3), 1.5, 0)


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (cut(gzip.compress(idx(np.zeros((4, 8, 8))))), "incomplete, or not a gzip file"),
        (gzip.compress(cut(idx(np.zeros((4, 8, 8))))), "it is incomplete"),
        (gzip.compress(b"\x89PNG something else"), "is not an IDX file"),
        (b"", "is not an IDX file"),
    ],
    ids=["cut", "cut inside", "other", "empty"],  # gzip writes the time into its bytes
)
def test_an_idx_file_that_is_damaged_is_refused(tmp_path, content, said):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_idx(path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"data=.*: has neither train-images-idx3-ubyte nor .*gz"):
        image_dataset("mnist", tmp_path)
    with pytest.raises(InputError, match=r"data=.*: has neither cifar-10-binary.tar.gz nor train.parquet"):
        image_dataset("cifar10", tmp_path)
    with pytest.raises(InputError, match=r"data=.*nowhere: is not a folder with images"):
        image_dataset(str(tmp_path / "nowhere"), None)
    with pytest.raises(InputError, match="no images in train/CLASS/"):
        image_dataset(str(tmp_path), None)


def test_an_archive_with_a_wrong_checksum_or_cut_short_is_refused(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_cifar10(path)
    with pytest.raises(InputError, match=r"has a wrong checksum \(sha256 .*, expected c4a38c50"):
        image_dataset("cifar10", tmp_path)
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(InputError, match="incomplete, or not CIFAR-10's archive"):
        read_cifar10(path)


def test_labels_out_of_range_and_missing_ones_are_refused(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.full(10, 12))))
    with pytest.raises(InputError, match="mnist t10k: label 12 is out of range; there are 10 classes"):
        image_dataset("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(9))))
    with pytest.raises(InputError, match="10 images and 9 labels"):
        image_dataset("mnist", tmp_path)


def write_folder(folder: Path, test_classes: tuple[str, ...] = ("cat", "dog"), size: int = 8) -> None:
    for part, classes in (("train", ("cat", "dog")), ("test", test_classes)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            (folder / part / name / "0.png").write_bytes(png(np.zeros((size, 8, 3))))


def test_images_of_mixed_sizes_or_kinds_and_broken_ones_are_refused(tmp_path):
    write_folder(tmp_path / "mixed")
    (tmp_path / "mixed/train/dog/1.png").write_bytes(png(np.zeros((9, 8, 3))))
    with pytest.raises(InputError, match=r"dog/1.png: an image of \(channels, height, width\) \(3, 9, 8\), but"):
        image_dataset(str(tmp_path / "mixed"), None)
    write_folder(tmp_path / "broken")
    (tmp_path / "broken/train/dog/1.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"dog/1.png: cannot be read as an image"):
        image_dataset(str(tmp_path / "broken"), None)
    write_folder(tmp_path / "deep")
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(tmp_path / "deep/train/dog/1.png")
    with pytest.raises(InputError, match=r"dog/1.png: cannot be read as an image \(mode I;16 has more than 8 bits"):
        image_dataset(str(tmp_path / "deep"), None)
    write_folder(tmp_path / "empty")
    (tmp_path / "empty/train/.hidden").mkdir()
    (tmp_path / "empty/train/dog/._0.png").write_bytes(b"no image")
    assert image_dataset(str(tmp_path / "empty"), None).classes == 2
    (tmp_path / "empty/train/fox").mkdir()
    with pytest.raises(InputError, match="has no image in train/fox"):
        image_dataset(str(tmp_path / "empty"), None)
    write_folder(tmp_path / "stranger", test_classes=("cat", "dgo"))
    with pytest.raises(InputError, match="has test/dgo, but no class of this name"):
        image_dataset(str(tmp_path / "stranger"), None)


def test_a_parquet_without_the_columns_is_refused(tmp_path):
    for part in ("train", "test"):
        pq.write_table(pa.table({"pixels": [1], "label": [0]}), tmp_path / f"{part}.parquet")
    with pytest.raises(InputError, match="needs columns img"):
        image_dataset("cifar10", tmp_path)
    for cells, labels, said in (
        ([png(np.zeros((8, 8, 3)))], [None], "label is null, 1 missing; expected integers"),
        ([png(np.zeros((8, 8, 3)))], ["cat"], "label is string, 0 missing; expected integers"),
        ([[1, 2]], [0], "data row 1: img is of type list, expected an image file's bytes"),
    ):
        pq.write_table(pa.table({"img": cells, "label": labels}), tmp_path / "train.parquet")
        with pytest.raises(InputError, match=said):
            image_dataset("cifar10", tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(InputError, match="cannot be read"):
        image_dataset("cifar10", tmp_path)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[str]:
    """A web server on loopback that has one file."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "file.bin").write_bytes(b"content")
    with serving(functools.partial(Quiet, directory=str(folder))) as port:
        yield f"http://127.0.0.1:{port}/"


def test_a_download_comes_once_from_the_first_home_and_is_checked(home, tmp_path, monkeypatch):
    monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / "cache"))
    right = hashlib.sha256(b"content").hexdigest()
    path = download(RemoteFile("file.bin", right, (home + "missing.bin", home + "file.bin")), "things")
    assert path.read_bytes() == b"content"
    assert download(RemoteFile("file.bin", right, ("http://127.0.0.1:1/file.bin",)), "things") == path
    with pytest.raises(InputError, match=r"data=None: other.bin of things cannot be downloaded \(http.*give that"):
        download(RemoteFile("other.bin", "0" * 64, (home + "file.bin",)), "things")
    assert sorted(each.name for each in path.parent.iterdir()) == ["file.bin"]


def test_images_are_turned_by_their_orientation_and_any_mode_of_8_bits_is_read(tmp_path):
    write_folder(tmp_path / "turned")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(pixels).save(tmp_path / "turned/train/dog/0.png", exif=exif)
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "turned/train/dog/1.jpg")
    Image.fromarray(pixels).convert("P").save(tmp_path / "turned/train/dog/2.png", transparency=bytes(256))
    images = image_dataset(str(tmp_path / "turned"), None).train.images
    assert images.shape == (4, 3, 8, 8)
    assert np.array_equal(images[1].permute(1, 2, 0).numpy(), np.rot90(pixels, -1))
