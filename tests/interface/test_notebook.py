"""A job in the cells of a notebook, in a real kernel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

JOB = """
import torch, concord
from torch import nn

def environments(config):
    def load(name):
        generator = torch.Generator().manual_seed(ord(name))
        inputs = torch.randn(60, 4, generator=generator)
        return inputs, (inputs[:, 0] > 0).long()
    return concord.Environments(load, train=["a", "b", "c"], test=["d"])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, inputs):
        return self.layer(inputs)

job = concord.Job(environments=environments, model=lambda config: Net(), loss=nn.functional.cross_entropy, name="cell")
"""
TRAIN = "run = concord.train(job, output='runs', name='one', epochs=2, resume={}, register=False)\nrun"


class Notebook:
    """A notebook whose cells are run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.document = nbformat.v4.new_notebook()
        resources = {"metadata": {"path": str(folder)}}
        self.client = NotebookClient(self.document, timeout=300, allow_errors=True, resources=resources)

    def cell(self, code: str) -> dict[str, str]:
        """Run a cell; its outputs by kind: text on standard error, an error's lines, its HTML result."""
        self.document.cells.append(nbformat.v4.new_code_cell(code))
        cell = self.client.execute_cell(self.document.cells[-1], len(self.document.cells) - 1)
        found: dict[str, str] = {}
        for output in cell.outputs:
            kind, text = {
                "stream": lambda each: (each.name, each.text),
                "error": lambda each: ("error", "\n".join(each.traceback)),
                "display_data": lambda each: ("display", each.data.get("text/html", "")),
                "execute_result": lambda each: ("result", each.data.get("text/html", "")),
            }[output.output_type](output)
            found[kind] = found.get(kind, "") + text
        return found


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("notebook"))
    with notebook.client.setup_kernel():
        assert "error" not in notebook.cell(JOB)
        yield notebook


def test_a_cell_trains_and_again_is_the_run_that_is_there(notebook: Notebook) -> None:
    first = notebook.cell(TRAIN.format(False))
    assert "ood_accuracy" in first["result"]
    assert first["stderr"].count("run one: mean") == 1
    notebook.cell(JOB)  # new objects, the same definitions
    again = notebook.cell(TRAIN.format(True))
    assert "run one is finished" in again["stderr"]
    assert again["result"] == first["result"]
    assert "class Net(nn.Module):" in notebook.cell("print(open('runs/runs/one/job.py').read())")["stdout"]


def test_an_error_is_one_line(notebook: Notebook) -> None:
    found = notebook.cell("concord.train(job, output='runs', epochs=0)")
    assert found["error"] == "concord: --epochs 0: must be at least 1"


def test_an_interrupt_ends_a_run_in_order_and_it_goes_on(notebook: Notebook) -> None:
    slow = """
class Slow(concord.Callback):
    def on_evaluation(self, evaluation):
        if evaluation.epoch == 2:
            import _thread
            _thread.interrupt_main()  # as the notebook's button does
concord.train(job, callbacks=[Slow()], output='runs', name='stopped', epochs=4, evaluations=4, checkpoints=4)
"""
    found = notebook.cell(slow)
    call = "concord.train(job, name='stopped', resume=True, output='"
    assert found["error"].startswith(f"concord: stopped; continue with {call}")
    later = notebook.cell(
        "run = concord.train(job, output='runs', name='stopped', epochs=4, evaluations=4, checkpoints=4, resume=True)\n"
        "print(run.status, run.history.index.tolist())"
    )
    assert later["stdout"] == "FINISHED [1, 2, 3, 4]\n"


@pytest.mark.slow  # it starts Ray in the kernel
def test_a_cell_trains_on_ray_train_and_in_a_study(notebook: Notebook) -> None:
    found: Any = notebook.cell("concord.train(job, output='runs', epochs=2, workers=2, register=False)")
    assert "ood_accuracy" in found["result"]
    study = notebook.cell("concord.tune(job, output='runs', trials=2, epochs=2, shortlist=0, reruns=0, register=False)")
    assert "2 trials finished, 0 failed" in study["result"]
    assert "Missing packages" not in found["stderr"] + study["stderr"]
