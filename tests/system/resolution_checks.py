"""Concord's dependencies resolve with numpy 2, and with numpy 1 where Procgen needs it (``make resolve``).

pip resolves both against the package index and installs nothing. Installed packages in a version that constraints.txt
allows are not looked up, so a check takes seconds.
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT, WITH = (f"{ROOT}", "numpy>=2"), (f"{ROOT}[coinrun,box2d,mujoco,dev]",)


def resolved(requirements: tuple[str, ...]) -> dict[str, str]:
    """The versions that pip would install in addition to the installed ones.

    Raises:
        SystemExit: pip finds no solution; its message is printed.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--constraint", str(ROOT / "constraints.txt")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [*command, "--report", str(report), *requirements], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = [line for line in (done.stdout + done.stderr).splitlines() if "already satisfied" not in line]
            raise SystemExit("\n".join([f"{' '.join(requirements)} does not resolve:", *said[-30:]]))
        packages = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    return {package["name"]: package["version"] for package in packages}


def main() -> None:
    """Resolve both at once, and print their versions of numpy."""
    with ThreadPoolExecutor() as pool:
        numpys = [each.get("numpy", version("numpy")) for each in pool.map(resolved, (WITHOUT, WITH))]
    print(f"without the extra coinrun: numpy {numpys[0]}; with it: numpy {numpys[1]}")
    majors = [int(each.split(".")[0]) for each in numpys]
    if majors != [2, 1]:
        raise SystemExit("expected numpy 2 without the extra and numpy 1 with it")


if __name__ == "__main__":
    main()
