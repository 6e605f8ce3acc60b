"""The wheel and the sdist work in empty environments: ``distribution_checks.py dist`` (``make dist``).

Each is installed with pip into an environment of its own, without the sources beside it, and trains for an epoch.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ("python", "-c", "import concord; print(concord.__file__, concord.__version__)"),
    ("concord", "--help"),
    ("concord", "jobs"),
    ("concord", "train", "synthetic", "--epochs", "1", "--output", "here"),
)


def check(distribution: Path, folder: Path) -> None:
    """Install one distribution in a new environment in this folder, and use it there."""
    print(f"== {distribution.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "environment"], cwd=folder, check=True)
    programs = folder / "environment" / "bin"
    install = (programs / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", distribution.resolve())
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CONCORD_", "MLFLOW_"))}
    for command in (install, *((programs / name, *words) for name, *words in COMMANDS)):
        subprocess.run(command, cwd=folder, check=True, env=own)


if __name__ == "__main__":
    for each in sorted(Path(sys.argv[1]).iterdir()):
        with tempfile.TemporaryDirectory() as name:
            check(each, Path(name))
