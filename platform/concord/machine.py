"""What a measurement was made on."""

import contextlib
import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """This machine in a line: processor, cores, memory, accelerator, versions."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {device}, torch {torch.__version__}"
