"""The programs of the guides: from DomainBed, from WILDS and from Lightning."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from forked import run_program
from PIL import Image
from test_readme import snippet

from concord.training import ProcessContext, load_job, train
from concord.training.context import Silent


@pytest.fixture
def camelyon(tmp_path: Path) -> Path:
    """Camelyon17 as WILDS leaves it on the disk, with a few patches of one colour."""
    folder = tmp_path / "data" / "camelyon17_v1.0"
    random, rows = np.random.default_rng(0), []
    for hospital in range(5):
        for place in range(12):
            rows.append((f"{hospital:03d}", 0, place, place, place % 2, 10 * hospital, hospital, int(place < 2)))
            (patient, node, x, y), label = rows[-1][:4], rows[-1][4]
            name = f"patches/patient_{patient}_node_{node}/patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.uint8(random.integers(0, 60, (32, 32, 3)) + 150 * label)).save(folder / name)
    columns = ["patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "metadata.csv")
    (folder / "RELEASE_v1.0.txt").touch()
    return tmp_path


def test_wilds_itself_finds_the_accuracy_of_the_run(camelyon: Path) -> None:
    (camelyon / "camelyon.py").write_text(snippet("wilds"))
    found, reported = run_program(snippet("wilds-eval"), camelyon).splitlines()[-1].split()
    assert float(found) == pytest.approx(float(reported), abs=1e-6)


def test_a_data_set_and_an_algorithm_of_domainbed_are_a_job(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(snippet("domainbed"))
    job = load_job(str(tmp_path / "shapes.py")).job
    config = job.config.with_options(epochs=1, batch_size=8).resolve()
    assert 0 <= train(job, config, ProcessContext(), Silent()).metrics["ood_accuracy"] <= 1


def test_concord_trains_a_module_of_lightning(tmp_path: Path) -> None:
    printed = run_program(snippet("lightning-job"), tmp_path)
    assert 0 <= float(printed.splitlines()[-1]) <= 1


def test_the_page_on_gpus_says_which_build_is_there(tmp_path: Path) -> None:
    assert run_program(snippet("gpu"), tmp_path).splitlines()[-1].split()[0] in {"cpu", "cuda"}
