"""Files of a user beside installed modules."""

import sys

import pytest

from concord.errors import InputError
from concord.execution.session import check_current_folder
from concord.source_file import hidden_module, run_source


def package(folder, name):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    return folder / name


@pytest.mark.parametrize("name", ["torch", "queue", "typing", "json", "numpy"])
@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_module_that_hides_one_in_use_is_named_before_ray_starts(tmp_path, monkeypatch, name, kind):
    own = package(tmp_path, name) if kind == "package" else tmp_path / f"{name}.py"
    if kind == "file":
        own.write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"{own}: .* hides the module {name}; rename it"):
        check_current_folder()


def test_modules_of_a_job_hide_nothing(tmp_path):
    (tmp_path / "own_data_of_this_test.py").write_text("values = 3")
    (tmp_path / "__main__.py").write_text("")
    (tmp_path / "torch").mkdir()  # without __init__.py an installed package comes first
    job = tmp_path / "job.py"
    job.write_text("from own_data_of_this_test import values")
    run_source(str(job), job.read_text(), "job", InputError)
    assert "own_data_of_this_test" in sys.modules
    assert hidden_module(tmp_path) is None
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    assert hidden_module(link) is None
