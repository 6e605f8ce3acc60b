"""Concord's dependencies resolve on every Python, in their lowest and their tested versions (``make resolve``).

uv asks the package index and installs nothing.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROCGENS = PYTHONS[:2]
EXTRAS = ("coinrun", "box2d", "mujoco", "flights", "images", "dev")
VERSIONS = {
    "tested": ("--constraint", "constraints.txt"),
    "lowest": ("--resolution", "lowest-direct"),
    "newest": ("--upgrade",),
}


def resolved(python: str, extras: tuple[str, ...], versions: str) -> dict[str, str]:
    """The version of each package for this Python on Linux on x86-64.

    Raises:
        SystemExit: no versions fit together; uv's message is printed.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet", "--no-annotate"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--no-python-downloads"]
    command += [*VERSIONS[versions], *(word for extra in extras for word in ("--extra", extra))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"Python {python}, extras {extras}, {versions} versions: no solution:\n{done.stderr}")
    return dict(re.findall(r"^(\S+)==(\S+)", done.stdout, re.MULTILINE))


def main() -> None:
    """Resolve all, and print what numpy each has: 1 where Procgen is published, 2 elsewhere and without the extra."""
    wanted = [(python, extras, "tested") for python in PYTHONS for extras in ((), EXTRAS)]
    wanted += [(PYTHONS[0], (), "lowest"), (PYTHONS[-1], (), "newest")]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda each: resolved(*each), wanted))
    for (python, extras, versions), found in zip(wanted, results, strict=True):
        shown = "  ".join(f"{name} {found[name]}" for name in ("numpy", "ray", "torch", "mlflow", "pandas"))
        print(f"Python {python}, {'all extras' if extras else 'no extra'}, {versions}: {shown}")
        expected = "1" if extras and python in PROCGENS else "2"
        if versions == "tested" and found["numpy"].split(".")[0] != expected:
            raise SystemExit(f"expected numpy {expected}")


if __name__ == "__main__":
    main()
