"""A description of this machine, for measurements, and the size of its cache."""

import contextlib
import functools
import os
import platform
from pathlib import Path

import torch

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE = 32 << 20


@functools.cache
def last_level_cache(caches: Path = _CACHES) -> int:
    """Bytes of the largest data cache that a core of this machine reaches; 32 MiB if the system does not tell."""
    sizes = []
    with contextlib.suppress(OSError, ValueError):
        for index in caches.glob("index*"):
            if (index / "type").read_text().strip() != "Instruction":
                sizes.append(_bytes((index / "size").read_text().strip()))
    return max(sizes, default=_USUAL_CACHE)


def _bytes(size: str) -> int:
    """``32768K`` or ``32M`` in bytes."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(size[:-1]) * units[size[-1]] if size[-1:] in units else int(size)


def machine() -> str:
    """This machine in a line: CPU, cores, memory, accelerator, versions."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {device}, torch {torch.__version__}"
